"""The three passes of a convolution for wgmma: their numbers on a GPU, all else without one."""

import itertools
import random

import pytest
import torch

from ridgeline import tuned
from ridgeline.kernels import PASSES, conv2d_dgrad, conv2d_fprop, conv2d_wgrad
from ridgeline.kernels._conv2d_pass import Config, WgradConfig, box_count, box_of, step_of
from ridgeline.kernels._op import RIVAL, typical_target
from ridgeline.numerics import compare, to_float64
from shared_kernels import assert_valid_and_distinct, right, sizes_of_one_kernel

SM_90 = typical_target("sm_90")
ALL = [(op, sample) for op in PASSES for sample in op.samples]


def named(cases):
    return [pytest.param(op, sample, id=f"{op.name}-{sample.why}") for op, sample in cases]


def launch_of(op, sample, *, dtype=torch.bfloat16, config=None):
    return op.launcher.plan(config=config, target=SM_90, **sample.arguments(dtype, "meta"))


def sample_of(op, size, c, k, filter_size, *, bias=False):
    """Of a pass of the convolution from c to k channels; `size` is (N, H, W)."""
    (n, h, w), (r, s) = size, filter_size
    if op is conv2d_fprop.OP:
        return conv2d_fprop.fprop_sample("", (n, c, h, w), (k, r, s), bias=bias)
    if op is conv2d_dgrad.OP:
        return conv2d_dgrad.dgrad_sample("", (n, k, h, w), (c, r, s))
    return conv2d_wgrad.wgrad_sample("", (n, c, h, w), (k, r, s))


# --- configs ---------------------------------------------------------------------------------------------------------


def test_configs_are_for_hopper_alone():
    for op in PASSES:
        arguments = op.samples[0].arguments(torch.bfloat16, "meta")
        for arch in ("sm_89", "sm_120"):
            assert op.launcher.candidates(target=typical_target(arch), **arguments) == ()
            with pytest.raises(ValueError, match=f"{op.name}: None is not valid for .* on {arch}"):
                op.launcher.plan(target=typical_target(arch), **arguments)


def test_every_candidate_is_valid_and_distinct():
    for op, sample in ALL:
        arguments = sample.arguments(torch.bfloat16, "meta")
        assert_valid_and_distinct(op, arguments)


@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
def test_every_problem_has_a_config(op):
    for c, k, filter_size in itertools.product((8, 24, 200, 512), (8, 24, 200, 512), ((1, 1), (1, 3), (5, 5))):
        sample = sample_of(op, (3, 7, 9), c, k, filter_size)
        assert op.launcher.candidates(target=SM_90, **sample.arguments(torch.float16, "meta"))


# --- tiling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_boxes_cover_every_pixel_once(seed):
    chosen = random.Random(seed)
    n, h, w = chosen.choice((1, 2, 3, 16, 128)), chosen.randint(1, 70), chosen.randint(1, 70)
    pixels = chosen.choice((64, 128, 256))
    box = box_of(n, h, w, pixels)
    assert box[0] * box[1] * box[2] == pixels
    starts = [range(0, size, side) for size, side in zip((n, h, w), box, strict=True)]
    assert box_count(n, h, w, box) == len(list(itertools.product(*starts)))
    # no worse than rows of one image
    assert box_count(n, h, w, box) <= box_count(n, h, w, (1, 1, pixels))


def test_a_box_of_a_small_map_spans_images():
    assert box_of(128, 4, 4, 64) == (4, 4, 4)
    assert box_of(128, 32, 32, 128)[0] == 1
    assert box_of(128, 8, 8, 64) == (1, 8, 8)


def test_parts_of_the_pixels_are_never_empty():
    for sample in conv2d_wgrad.SAMPLES:
        arguments = sample.arguments(torch.bfloat16, "meta")
        conv = conv2d_wgrad._pass(**arguments).conv
        boxes = box_count(conv.n, conv.oh, conv.ow, box_of(conv.n, conv.oh, conv.ow, 64))
        configs = conv2d_wgrad.candidates(target=SM_90, **arguments)
        for config in (one for one in configs if isinstance(one, WgradConfig)):
            parts = config.parts(conv, SM_90)
            each = -(-boxes // parts)
            assert 1 <= parts <= boxes
            assert (parts - 1) * each < boxes


def test_a_tile_is_stored_in_as_many_pieces_as_shared_memory_asks_for():
    assert Config(128, 128, 4, 4).pieces(2, 64, SM_90) == 1
    assert Config(128, 256, 4, 8).pieces(2, 64, SM_90) == 2
    assert Config(128, 256, 5, 8).pieces(2, 64, SM_90) == 0
    assert not Config(128, 256, 5, 8).is_valid(2, 64, SM_90)
    assert not Config(256, 256, 2, 8).is_valid(2, 64, SM_90)
    assert not WgradConfig(256, 256, 1, 2, 8, 1).is_valid(2, SM_90)
    assert (step_of(256, 2), step_of(40, 2), step_of(24, 2), step_of(8, 2)) == (64, 64, 32, 16)


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "sample"), named([case for case in ALL if not case[1].real_size]))
def test_without_a_gpu_a_pass_is_its_reference(op, sample):
    arguments = sample.arguments(torch.float32, "cpu")
    y = op(**arguments)
    exact = op.reference(**to_float64(arguments))
    assert y.is_contiguous(memory_format=torch.channels_last)
    verdict = compare(y, exact, op.reference(**arguments), error_factor=op.error_factor)
    assert verdict.passed, verdict.reason
    assert torch.ops.ridgeline.conv2d_fprop is not None
    torch.library.opcheck(op.overload, (), arguments, test_utils=("test_schema", "test_faketensor"))


def test_gradients_are_those_of_conv2d():
    arguments = conv2d_fprop.SAMPLES[-3].arguments(torch.float64, "cpu")
    arguments["bias"] = arguments["bias"].double()
    x, weight, bias = (arguments[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
    copies = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    dy = torch.randn_like(conv2d_fprop.reference(x, weight, bias, padding=(1, 1)))
    conv2d_fprop.OP(x, weight, bias, padding=[1, 1]).backward(dy)
    torch.nn.functional.conv2d(*copies, padding=1).backward(dy)
    for ours, theirs in zip((x, weight, bias), copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_frozen_weight_gets_no_gradient():
    arguments = conv2d_fprop.SAMPLES[-1].arguments(torch.float64, "cpu")
    x = arguments["x"].requires_grad_()
    conv2d_fprop.OP(x, arguments["weight"], None, padding=[1, 1]).sum().backward()
    assert x.grad is not None and arguments["weight"].grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.empty(1, 12, 8, 8)}, "weight .* must have the 12 channels of x"),
        ({"x": torch.empty(1, 16, 8, 8)}, "x must be channels_last, or a slice of it .* got strides"),
        ({"padding": (3, 0)}, r"padding must be less than the filter \(3, 3\)"),
        ({"bias": torch.empty(5)}, r"bias must be fp32 or torch.bfloat16 of shape \(24,\)"),
        ({"weight": torch.empty(24, 16, 3, 3, dtype=torch.bfloat16)}, "weight must be channels_last"),
        ({"weight": torch.empty(20, 16, 3, 3)}, "channels must be multiples of 8 and filters of 8, got 16 and 20"),
        ({"x": torch.empty(1, 16, 8, 8, dtype=torch.float64)}, "x must be torch.float16 or torch.bfloat16"),
    ],
)
def test_what_cannot_be_computed_is_refused(change, message):
    arguments = {
        "x": torch.empty(1, 16, 8, 8).contiguous(memory_format=torch.channels_last),
        "weight": torch.empty(24, 16, 3, 3).contiguous(memory_format=torch.channels_last),
        "padding": (1, 1),
    }
    bf16 = {name: t.bfloat16() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    given = {name: t.bfloat16() if name == "x" and t.dtype == torch.float32 else t for name, t in change.items()}
    with pytest.raises((ValueError, TypeError), match=f"conv2d_fprop: {message}"):
        conv2d_fprop.plan(**{**bf16, **given}, target=SM_90)


def test_a_gradient_of_no_map_is_refused():
    dy = torch.empty(1, 8, 1, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.empty(8, 8, 3, 3, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with pytest.raises(
        ValueError, match=r"conv2d_dgrad: no x has a y of shape \(1, 8, 1, 5\): it would have \(-1, 5\)"
    ):
        conv2d_dgrad.plan(dy, weight, padding=(2, 1), target=SM_90)


# --- the choice ------------------------------------------------------------------------------------------------------


def row(op, key, seconds, theirs):
    return tuned.Row(
        op.name, op.source_hash, "a GPU", "bf16", key, {"pixels": 128}, seconds, None, "2", "3", "5", {RIVAL: theirs}
    )


def test_the_faster_kernel_is_chosen_pass_by_pass(monkeypatch):
    rows = {
        "conv2d_fprop": row(conv2d_fprop.OP, "f", 2e-5, 3e-5),
        "conv2d_dgrad": row(conv2d_dgrad.OP, "d", 4e-5, 3e-5),
    }
    monkeypatch.setattr(conv2d_fprop, "tuned_row", lambda op, **_arguments: rows.get(op.name))
    arguments = conv2d_fprop.SAMPLES[-1].arguments(torch.bfloat16, "meta")
    found = conv2d_fprop.choice(arguments["x"], arguments["weight"], (1, 1))
    assert {name: wins for name, (_, wins) in found.items()} == {"fprop": True, "dgrad": False}


# --- numbers, on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "sample"), named(ALL))
def test_every_candidate_is_right(op, sample):
    arguments = sample.arguments(torch.bfloat16, "cuda")
    for config in op.launcher.candidates(**arguments):
        right(op, arguments, config)


# (C, K, R, S): each, with the sizes that share its boxes, is compiled once
KERNELS = (
    *((8, 16, 3, 3), (8, 200, 1, 1), (72, 16, 1, 5), (72, 64, 3, 3)),
    *((72, 200, 3, 3), (128, 16, 1, 1), (128, 64, 1, 5), (128, 200, 3, 3)),
)


@pytest.mark.parametrize("seed", range(len(KERNELS)))
@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
@pytest.mark.gpu
def test_random_sizes(op, seed):
    c, k, *filter_size = KERNELS[seed]
    dtype, bias = (torch.float16, torch.bfloat16)[seed % 2], seed % 4 < 2

    def of(size):
        return sample_of(op, size, c, k, filter_size, bias=bias)

    sizes = sizes_of_one_kernel(lambda size: launch_of(op, of(size), dtype=dtype), seed)
    for size in sizes:
        right(op, of(size).arguments(dtype, "cuda"))


@pytest.mark.gpu
def test_equal_calls_give_equal_bits():
    arguments = conv2d_wgrad.SAMPLES[0].arguments(torch.bfloat16, "cuda")
    first = conv2d_wgrad.OP(**arguments)
    assert all(torch.equal(first, conv2d_wgrad.OP(**arguments)) for _ in range(5))
