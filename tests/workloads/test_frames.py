"""Frames in, results out: the same as letterbox, tensor and model one after the other, in one graph without copies."""

from __future__ import annotations

import copy
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ridgeline
from graphs import by_reference, net
from ridgeline.compiler import lower
from ridgeline.cost import CostMode
from ridgeline.errors import UsageError
from ridgeline.kernels import _letterbox
from ridgeline.models.yolo26 import YOLO26, fuse, randomise_
from ridgeline.numerics import compare
from ridgeline.recipe import Recipe
from ridgeline.workloads import letterbox
from ridgeline.workloads.frames import FromFrame, from_frame

FP32 = Recipe(dtype="fp32")
MODEL = net(lambda m, x: m.head(F.silu(m.stem(x))), stem=nn.Conv2d(3, 8, 3, 2, 1), head=nn.Conv2d(8, 4, 1))


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


def photo(h: int, w: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (h, w, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_hand(frame: Tensor, fit: letterbox.Letterbox, order: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a caller does without `from_frame`."""
    image = frame.numpy()[..., ::-1] if order == "bgr" else frame.numpy()
    return letterbox.to_tensor([letterbox.apply(np.ascontiguousarray(image), fit)], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", ["rgb", "bgr"])
@pytest.mark.parametrize(
    ("h", "w", "mode"), [(75, 131, "square"), (75, 131, "rect"), (192, 96, "rect"), (1, 3, "rect")]
)
def test_the_model_sees_the_letterboxed_image_bit_for_bit(h, w, mode, order, dtype):
    frame = photo(h, w)
    module = from_frame(nn.Identity(), h, w, size=96, mode=mode, order=order).to(dtype)
    x = module(frame)
    assert module.fit == letterbox.plan(h, w, 96, mode=mode)
    assert x.dtype == dtype and x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, by_hand(frame, module.fit, order, dtype))


def test_a_batch_is_each_of_its_frames():
    frames = torch.stack([photo(40, 60, seed=seed) for seed in range(3)])
    module = from_frame(MODEL, 40, 60, size=64)
    # one image at a time or three: the convolution may sum in another order
    torch.testing.assert_close(module(frames), torch.cat([module(frame) for frame in frames]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_compiled_it_is_the_model_on_the_letterboxed_image(order: str):
    frame = photo(75, 131)
    module = from_frame(MODEL, 75, 131, size=96, order=order)
    fast = ridgeline.compile(module, frame, FP32)
    graph = fast.graph(frame)
    assert dict(graph.sites)["fuse_letterbox"] == 1
    assert graph.kernels == (("letterbox_conv_act", 1), ("conv2d_act", 1))
    assert graph.foreign == graph.interior == ()
    x = by_hand(frame, module.fit, order)
    verdict = compare(fast(frame), copy.deepcopy(MODEL).double()(x.double()), MODEL(x))
    assert verdict.passed, verdict.reason


def test_compiled_in_half_precision_reads_the_image_rounded_to_it():
    frame = photo(75, 131)
    fast = ridgeline.compile(from_frame(MODEL, 75, 131, size=96), frame, Recipe(dtype="bf16"))
    y = fast(frame)
    assert y.dtype == torch.bfloat16
    x = by_hand(frame, from_frame(MODEL, 75, 131, size=96).fit, "rgb", torch.bfloat16)
    twin = copy.deepcopy(MODEL).double()
    verdict = compare(y, twin(x.double()), twin.bfloat16()(x))
    assert verdict.passed, verdict.reason


def test_without_the_rewrite_the_letterbox_is_one_operator():
    frame = photo(75, 131)
    fast = ridgeline.compile(from_frame(MODEL, 75, 131, size=96), frame, Recipe(dtype="fp32", rewrites=()))
    assert dict(fast.graph(frame).foreign)["ridgeline.letterbox.default"] == 1
    assert fast.graph(frame).interior == ()
    torch.testing.assert_close(fast(frame), from_frame(MODEL, 75, 131, size=96)(frame))


def test_a_wrong_letterbox_is_caught():
    """compile compares with the untouched module, so a table that is off by one column cannot pass."""
    frame = photo(75, 131)
    module = from_frame(MODEL, 75, 131, size=96)
    original = _letterbox.canvas

    def shifted(frames: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return original(frames, rows, columns.roll(1))

    graph_module, _ = lower(module, (frame,), FP32)
    right = module(frame)
    assert torch.allclose(graph_module(frame), right, atol=1e-5)
    with patch.object(_letterbox, "canvas", shifted):
        assert not torch.allclose(graph_module(frame), right, atol=1e-2)


def test_a_norm_before_the_first_convolution_keeps_the_dtype_of_the_rest():
    """Batch norms stay in fp32 until they are folded; the letterbox must not follow them."""
    model = net(lambda m, x: m.conv(m.norm(x)), norm=nn.BatchNorm2d(3), conv=nn.Conv2d(3, 4, 3))
    frame = photo(20, 30)
    fast = ridgeline.compile(from_frame(model, 20, 30, size=32), frame, Recipe(dtype="bf16"))
    y = fast(frame)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), from_frame(model, 20, 30, size=32)(frame), rtol=2e-2, atol=2e-2)


def test_yolo26_from_a_frame_is_one_kernel_in_place_of_the_stem():
    model = fuse(randomise_(YOLO26("n", heads=("one_to_one",))))
    frame = photo(54, 96)
    module = from_frame(model, 54, 96, size=96, mode="rect")
    _, graph = lower(module, (frame,), FP32)
    assert dict(graph.kernels)["letterbox_conv_act"] == dict(graph.sites)["fuse_letterbox"] == 1
    assert graph.interior == graph.foreign == ()


def test_state_mode_and_dtype_are_the_models():
    module = from_frame(MODEL, 75, 131)
    assert list(module.state_dict()) == [f"model.{name}" for name in MODEL.state_dict()]
    assert not module.training and from_frame(nn.Conv2d(3, 1, 1), 9, 9).training
    half = from_frame(nn.Conv2d(3, 8, 3).half(), 75, 131, size=96)
    assert half.like.dtype == torch.float16 and half.rows.dtype == torch.int32
    assert isinstance(module, FromFrame) and module.fit == letterbox.plan(75, 131, mode="square")


def test_its_cost_is_known():
    module = from_frame(MODEL, 75, 131, size=96)
    with CostMode(module) as mode:
        module(photo(75, 131))
    assert mode.unknown == ()
    (call,) = [call for call in mode.calls if "letterbox" in call.op]
    assert call.cost.read_bytes == 75 * 131 * 3 + 4 * (96 + 96)
    assert call.cost.write_bytes == 96 * 96 * 3 * 4


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (torch.zeros(75, 131, 3), r"uint8 \[75, 131, 3\] as planned, got torch.float32 \[75, 131, 3\]"),
        (torch.zeros(131, 75, 3, dtype=torch.uint8), r"got torch.uint8 \[131, 75, 3\]"),
        (torch.zeros(3, 75, 131, dtype=torch.uint8), r"got torch.uint8 \[3, 75, 131\]"),
        (torch.zeros(1, 1, 75, 131, 3, dtype=torch.uint8), r"got torch.uint8 \[1, 1, 75, 131, 3\]"),
    ],
)
def test_another_frame_than_planned_is_refused(frame, says):
    with pytest.raises(UsageError, match=says):
        from_frame(MODEL, 75, 131)(frame)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"order": "rbg"}, "channel order must be one of rgb, bgr, got 'rbg'"),
        ({"mode": "auto"}, "square, rect, got 'auto'"),
        ({"size": 600}, "multiple of 32, got 600"),
    ],
)
def test_wrong_choices_are_refused(choices, says):
    with pytest.raises(UsageError, match=says):
        from_frame(MODEL, 75, 131, **choices)


@pytest.mark.gpu
@pytest.mark.parametrize(("h", "w"), [(1080, 1920), (720, 1280), (427, 640)])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_on_a_gpu_new_frames_replay_right(h: int, w: int, dtype: str):
    """The captured graph reads each new frame; the fused stem agrees with OpenCV's canvas through the plain model."""
    recipe = Recipe(dtype=dtype, precision="ieee")
    model = net(lambda m, x: F.silu(m.stem(x)), stem=nn.Conv2d(3, 16, 3, 2, 1)).cuda()
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model).to(recipe.torch_dtype)
    module = from_frame(model, h, w, order="bgr")
    fast = ridgeline.compile(module, photo(h, w).cuda(), recipe)
    assert fast.graph(photo(h, w).cuda()).kernels == (("letterbox_conv_act", 1),)
    for seed in range(3):
        frame = photo(h, w, seed)
        x = by_hand(frame, module.fit, "bgr", recipe.torch_dtype).cuda()
        verdict = compare(fast(frame.cuda()), exact(x.double()), eager(x))
        assert verdict.passed, verdict.reason
