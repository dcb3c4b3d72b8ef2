"""What is special to letterbox_conv_act: OpenCV's integers, grey in the canvas and zero around it, bytes in."""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels import _letterbox, _op
from ridgeline.kernels._letterbox import GREY, PADDING, SHIFT, axis_table, has_weights
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.letterbox_conv_act import OP, Config, Problem, candidates, default_config, plan, reference
from ridgeline.numerics import TF32_EPS, compare, to_float64
from ridgeline.workloads import letterbox

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
H200 = typical_target("sm_90")


def frame_of(*shape: int, seed: int = 0) -> Tensor:
    """uint8 [N, C, H, W], channels_last; `shape` is N, H, W, C."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE).permute(0, 3, 1, 2)


def tables(h: int, w: int, new_h: int, new_w: int, pads=(0, 0, 0, 0)) -> dict[str, Tensor]:
    """pads: top, bottom, left, right."""
    rows = axis_table(h, new_h, *pads[:2], vertical=True)
    columns = axis_table(w, new_w, *pads[2:], vertical=False)
    return {"rows": rows.to(DEVICE), "columns": columns.to(DEVICE)}


def make(n=1, h=9, w=7, size=(6, 8), pads=(1, 2, 0, 1), krs=(8, 3, 3), *, c=3, dtype=torch.float16, **choices):
    (k, r, s), bias = krs, choices.pop("bias", True)
    return {
        "frame": frame_of(n, h, w, c),
        "weight": random_nhwc((k, c, r, s), dtype, DEVICE, seed=1) * (c * r * s) ** -0.5,
        "bias": random_nhwc((1, k, 1, 1), torch.float32, DEVICE, seed=2).flatten() if bias else None,
        **tables(h, w, *size, pads),
        "stride": (2, 2), "padding": (r // 2, s // 2), **choices,
    }  # fmt: skip


def identity(frame: Tensor, **tables_: Any) -> dict[str, Any]:
    """A filter that hands the canvas on as it is: one product by 1 and exact zeros, in strict fp32."""
    c = frame.shape[1]
    weight = torch.eye(c, device=DEVICE).view(c, c, 1, 1).contiguous(memory_format=torch.channels_last)
    choices = {"stride": (1, 1), "padding": (0, 0), "act": "none", "precision": "ieee"}
    return {"frame": frame, "weight": weight, "bias": None, **tables_, **choices}


def check(arguments: dict[str, Any], actual: Tensor | None = None) -> None:
    tf32 = HAS_GPU and arguments["weight"].dtype == torch.float32 and arguments.get("precision") != "ieee"
    actual = OP(**arguments) if actual is None else actual
    verdict = compare(
        actual, reference(**to_float64(arguments)), reference(**arguments), eps=TF32_EPS if tf32 else None
    )
    assert verdict.passed, verdict.reason


# The integers


def sizes(rng: random.Random, case: int) -> tuple[int, int, int, int]:
    """(h, w, new_h, new_w): up and down, by whole factors, with sides of one pixel, unchanged."""
    h, w, new_h, new_w = (rng.randint(1, 150) for _ in range(4))
    kind = case % 6
    if kind == 1:
        h, w = 2 * new_h, 2 * new_w  # where OpenCV takes its area filter
    elif kind == 2:
        factor = rng.randint(2, 6)
        h, w = factor * new_h, rng.randint(2, 6) * new_w
    elif kind == 3:
        new_h, new_w = rng.randint(2, 5) * (h := rng.randint(1, 40)), rng.randint(2, 5) * (w := rng.randint(1, 40))
    elif kind == 4:
        h, w = rng.choice([(1, w), (h, 1), (1, 1)])
    elif kind == 5:
        new_h, new_w = rng.choice([(h, new_w), (new_h, w), (1, new_w), (new_h, 1), (h, w)])
    return h, w, new_h, new_w


@pytest.mark.parametrize("seed", range(6))
def test_resize_equals_opencv_bit_for_bit(seed: int):
    rng = random.Random(seed)
    for case in range(60):
        h, w, new_h, new_w = sizes(rng, case)
        image = np.random.default_rng(case).integers(0, 256, (h, w, 3), np.uint8)
        expected = cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR).reshape(new_h, new_w, 3)
        made = [axis_table(h, new_h, 0, 0, vertical=True), axis_table(w, new_w, 0, 0, vertical=False)]
        actual = _letterbox.canvas(torch.from_numpy(image).permute(2, 0, 1)[None], *made)
        np.testing.assert_array_equal(actual[0].permute(1, 2, 0).numpy(), expected, err_msg=f"{h, w, new_h, new_w}")


@pytest.mark.parametrize(
    ("h", "w", "mode"),
    [(1080, 1920, "square"), (720, 1280, "rect"), (1080, 811, "square"), (375, 500, "rect"), (1, 900, "rect")],
)
def test_canvas_equals_the_letterbox(h: int, w: int, mode: str):
    fit = letterbox.plan(h, w, mode=mode)
    frame = frame_of(1, h, w, 3)
    made = tables(h, w, fit.new_h, fit.new_w, (fit.top, fit.bottom, fit.left, fit.right))
    image = frame[0].permute(1, 2, 0).cpu().numpy()
    expected = letterbox.apply(np.ascontiguousarray(image), fit)
    np.testing.assert_array_equal(_letterbox.canvas(frame, **made)[0].permute(1, 2, 0).cpu().numpy(), expected)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = _letterbox.letterbox(frame, **made, dtype=dtype, reverse=True)
        assert torch.equal(x.flip(1).cpu(), letterbox.to_tensor([expected], dtype=dtype))
        assert x.is_contiguous(memory_format=torch.channels_last)


def test_weights_of_two_pixels_sum_to_one():
    """OpenCV rounds both weights on their own; a table holds the second only."""
    rng = random.Random(0)
    for _ in range(300):
        source, scaled = rng.randint(1, 5000), rng.choice([rng.randint(1, 4096), 640, 1280])
        position = ((np.arange(scaled) + 0.5) * (1.0 / (scaled / source)) - 0.5).astype(np.float32)
        share = position - np.floor(position)
        first, second = (np.rint(part * np.float32(2048)).astype(int) for part in (np.float32(1) - share, share))
        assert (first + second == 2048).all(), (source, scaled)
        np.testing.assert_array_equal(axis_table(source, scaled, 0, 0, vertical=True).numpy() & 4095, second)


@pytest.mark.parametrize(
    ("h", "w", "blends"),
    [(1080, 1920, False), (640, 640, False), (3200, 1920, False), (720, 1280, True), (1080, 810, True)],
    ids=["a third", "unchanged", "a fifth", "a half", "uneven"],
)
def test_an_odd_factor_reads_single_pixels(h: int, w: int, blends: bool):
    fit = letterbox.plan(h, w, mode="square")
    assert any(map(has_weights, tables(h, w, fit.new_h, fit.new_w).values())) == blends


@pytest.mark.parametrize("sides", [(0, 5, 0, 0), (2**18 + 1, 5, 0, 0), (5, 0, 0, 0), (5, 4097, 0, 0), (5, 5, -1, 0)])
def test_tables_refuse_sides_they_cannot_hold(sides):
    with pytest.raises(ValueError, match=r"letterbox: sides must lie in 1\.\.262144, .* got"):
        axis_table(*sides, vertical=True)
    assert axis_table(2**18, 4096, 0, 0, vertical=False).max() >> SHIFT < 2**18


# The kernel


def test_every_byte_becomes_the_nearest_fp32_to_its_255th():
    frame = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 1, 16, 16)
    y = OP(**identity(frame, **tables(16, 16, 16, 16)), blend=False)
    assert y.flatten().tolist() == [float(np.float32(byte) / np.float32(255)) for byte in range(256)]
    assert torch.equal(_letterbox.unit(frame, torch.float32), y)


@pytest.mark.parametrize("seed", range(6))
def test_kernel_scales_as_opencv_bit_for_bit(seed: int):
    rng = random.Random(seed)
    h, w, new_h, new_w = sizes(rng, seed)
    new_h, new_w, pads = min(new_h, 12), min(new_w, 12), tuple(rng.randint(0, 2) for _ in range(4))
    frame = frame_of(2, h, w, 3, seed=seed)
    images = frame.permute(0, 2, 3, 1).cpu().numpy()
    scaled = [cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR) for image in images]
    top, bottom, left, right = pads
    canvas = np.full((2, top + new_h + bottom, left + new_w + right, 3), GREY, np.uint8)
    canvas[:, top : top + new_h, left : left + new_w] = np.stack(scaled).reshape(2, new_h, new_w, 3)
    arguments = identity(frame, **tables(h, w, new_h, new_w, pads))
    config = Config(128, 16, 4) if seed % 2 else Config(64, 16, 2)
    launch = plan(config=config, **arguments)
    launch.run()
    assert torch.equal(launch.output.cpu(), letterbox.to_tensor(list(canvas)))


def test_padding_of_the_convolution_is_zero_and_not_grey():
    """A sum over 3x3 of a canvas that is grey all over: corners see four pixels, edges six."""
    arguments = make(h=2, w=2, size=(2, 2), pads=(1, 1, 1, 1), krs=(1, 3, 3), c=1, dtype=torch.float32, bias=False)
    arguments |= {"frame": torch.full_like(arguments["frame"], GREY), "stride": (1, 1), "act": "none"}
    arguments["weight"].fill_(1)
    seen = OP(**arguments)[0, 0] * 255 / GREY
    expected = torch.tensor([[4, 6, 6, 4], [6, 9, 9, 6], [6, 9, 9, 6], [4, 6, 6, 4]], dtype=torch.float32)
    torch.testing.assert_close(seen.cpu(), expected, rtol=2e-3, atol=0)


def random_problem(rng: random.Random) -> dict[str, Any]:
    """Small, with every choice open but filters that do not fit their canvas."""
    size, pads = (rng.randint(2, 5), rng.randint(2, 5)), tuple(rng.randint(0, 2) for _ in range(4))
    padding = rng.choice([(0, 0), (1, 1), (2, 0)])
    canvas_h, canvas_w = size[0] + sum(pads[:2]) + 2 * padding[0], size[1] + sum(pads[2:]) + 2 * padding[1]
    # the interpreter pays for every tap of every channel, four pixels each
    filters = [(1, 3, 3), (16, 2, 2), (20, 1, 1), (20, 1, 1), (8, 1, 4), (33, 3, 1)]
    arguments = make(
        n=rng.randint(1, 2), h=rng.randint(1, 12), w=rng.randint(1, 12), size=size, pads=pads,
        c=rng.choice([1, 1, 3, 4]),
        krs=rng.choice([(k, r, s) for k, r, s in filters if r <= canvas_h and s <= canvas_w]),
        dtype=rng.choice([torch.float32, torch.float16]), bias=rng.random() < 0.7, act=rng.choice(["silu", "none"]),
    )  # fmt: skip
    arguments |= {"stride": rng.choice([(1, 1), (2, 2), (1, 3)]), "padding": padding}
    if rng.random() < 0.5:
        # as the first channels of wider pixels: BGRA, or planes that were packed together
        n, c, h, w = arguments["frame"].shape
        wide = frame_of(n, h, w, c + 2, seed=rng.randrange(100))
        wide[:, :c] = arguments["frame"]
        arguments["frame"] = wide[:, :c]
    return arguments


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_random_problems_against_float64(first: int):
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        arguments = random_problem(rng)
        tiles = [Config(16, 16, 1), Config(32, 32, 4), Config(64, 16, 2), Config(64, 64, 4), Config(128, 32, 8)]
        config = rng.choice([tile for tile in tiles if tile.is_valid(Problem(**arguments), H200)])
        launch = plan(config=config, **arguments)
        launch.output.fill_(float("nan"))
        launch.run()
        check(arguments, launch.output)


def test_a_filter_of_many_channels_is_computed_in_blocks():
    arguments = make(krs=(150, 3, 3), size=(4, 4), pads=(0, 0, 0, 0))
    assert default_config(Problem(**arguments), H200).block_n == 128
    check(arguments)


def test_tables_that_point_outside_the_frame_read_grey():
    arguments = identity(frame_of(1, 4, 4, 3), **tables(4, 4, 4, 4))
    arguments["rows"][1] = 4 << SHIFT
    arguments["columns"][2] = 2**30
    arguments["rows"][3] = PADDING
    y = (OP(**arguments) * 255).round().int()
    assert torch.equal(y, _letterbox.canvas(**{name: arguments[name] for name in ("frame", "rows", "columns")}))
    assert (y[:, :, [1, 3]] == GREY).all() and (y[:, :, :, 2] == GREY).all() and (y[:, :, 0, 0] != GREY).any()


def test_an_empty_batch_gives_an_empty_result():
    assert OP(**make(n=0)).shape == (0, 8, 5, 5)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"frame": torch.zeros(1, 3, 4, 4)}, TypeError, "frame must be uint8, got torch.float32"),
        ({"frame": torch.zeros(4, 4, 3, dtype=torch.uint8)}, ValueError, r"must have 4 axes and frames pixels, .*4, 4"),
        ({"frame": torch.zeros(1, 3, 0, 4, dtype=torch.uint8)}, ValueError, r"frames pixels, .*\(1, 3, 0, 4\)"),
        ({"frame": torch.zeros(1, 3, 4, 5, dtype=torch.uint8)}, ValueError, r"channels_last or .*\(60, 20, 5, 1\)"),
        ({"rows": torch.zeros(4)}, ValueError, "rows must be int32 with one contiguous axis, got torch.float32"),
        ({"columns": torch.zeros(4, 2, dtype=torch.int32)[:, 0]}, ValueError, "columns must be int32 with one cont"),
        ({"weight": torch.zeros(8, 4, 3, 3)}, ValueError, r"weight \(8, 4, 3, 3\) must have the 3 channels"),
        ({"weight": torch.zeros(8, 3, 3, 3, dtype=torch.float64)}, TypeError, "one of fp32, fp16, bf16, got"),
        ({"weight": torch.zeros(8, 3, 1, 22)}, ValueError, "at most 16 rows of 64 elements, got 1 rows of 22 x 3"),
        ({"weight": torch.zeros(8, 3, 17, 1)}, ValueError, "at most 16 rows of 64 elements, got 17 rows of 1 x 3"),
        ({"act": "relu"}, ValueError, "act must be one of none, silu, got 'relu'"),
        ({"precision": "bf16"}, ValueError, "precision must be one of tf32, ieee, got 'bf16'"),
    ],
)
def test_refusals(change, error, says):
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in change.items()}
    if "weight" in moved:
        moved["weight"] = moved["weight"].contiguous(memory_format=torch.channels_last)
    with pytest.raises(error, match=f"letterbox_conv_act: .*{says}"):
        plan(**(make(size=(30, 30)) | moved))


# Configs


def test_candidates_are_valid_and_distinct():
    for sample in OP.samples:
        for dtype in OP.dtypes:
            arguments = sample.arguments(dtype, "meta")
            found = candidates(target=H200, **arguments)
            assert found[0] == default_config(Problem(**arguments), H200)
            assert len(set(found)) == len(found) > 5
            assert all(config.is_valid(Problem(**arguments), H200) for config in found)
    small = Problem(**make())
    invalid = [Config(24, 16, 4), Config(16, 8, 4), Config(16, 16, 3), Config(256, 128, 4), Config(256, 16, 4)]
    assert [config.is_valid(small, H200) for config in invalid] == [False] * 5
    with pytest.raises(ValueError, match=r"letterbox_conv_act: Config\(block_m=24, .* is not valid"):
        plan(config=invalid[0], **make())


def test_tuned_rows_are_filed_under_the_dtype_of_the_weight():
    """The frame is bytes in every recipe."""
    arguments = OP.samples[0].arguments(torch.bfloat16, "meta")
    assert _op.computed_in(arguments) is arguments["weight"]
    assert OP.key(**arguments).startswith("act silu, blend True, columns 12, frame 1x3x23x37, padding 1 1, precision")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OP.dtypes)
@pytest.mark.parametrize("pdl", [False, True])
def test_on_a_gpu_every_config_is_right(dtype: torch.dtype, pdl: bool):
    pdl = pdl and torch.cuda.get_device_capability() >= (9, 0)
    arguments = make(h=97, w=151, size=(41, 64), pads=(11, 12, 0, 0), krs=(16, 3, 3), dtype=dtype, pdl=pdl)
    plain = F.conv2d(
        _letterbox.letterbox(arguments["frame"], arguments["rows"], arguments["columns"], dtype=dtype),
        arguments["weight"], arguments["bias"].to(dtype), 2, 1,
    )  # fmt: skip
    torch.testing.assert_close(OP(**arguments), F.silu(plain), rtol=2e-2, atol=2e-2)
    for config in candidates(**arguments):
        launch = plan(config=config, **arguments)
        launch.output.fill_(float("nan"))
        launch.run()
        check(arguments, launch.output)
