"""The kernels of convolutions with few channels or few filters, in Triton's interpreter, and what chooses them."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from ridgeline import tuned
from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import PASSES, conv2d_dgrad, conv2d_fprop, conv2d_wgrad
from ridgeline.kernels import _conv2d_narrow_call as narrow_call
from ridgeline.kernels._conv2d_narrow_call import NarrowConfig
from ridgeline.kernels._conv2d_pass import Config, WgradConfig, pass_of
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import RIVAL, Launch, typical_target
from ridgeline.numerics import Verdict, compare, to_float64

SM_89, SM_90, SM_120 = TARGETS = tuple(map(typical_target, ("sm_89", "sm_90", "sm_120")))
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ROUNDING = None if HAS_GPU else 2.0**-11  # of fp16: the interpreter multiplies exactly


def calls(n, c, k, image, filter_size, padding, *, device=DEVICE):
    """(op, arguments) of the three passes of a convolution."""
    conv = ConvProblem(n, c, k, image, filter_size, 1, padding)
    x = random_nhwc((n, c, *image), torch.float16, device, seed=0)
    weight = random_nhwc((k, c, *filter_size), torch.float16, device, seed=1) * (c * conv.taps) ** -0.5
    dy = random_nhwc((n, k, *conv.out), torch.float16, device, seed=2)
    bias = random_nhwc((1, k, 1, 1), torch.float32, device, seed=3).flatten()
    return (
        (conv2d_fprop.OP, {"x": x, "weight": weight, "bias": bias, "padding": padding}),
        (conv2d_dgrad.OP, {"dy": dy, "weight": weight, "padding": padding}),
        (conv2d_wgrad.OP, {"dy": dy, "x": x, "kernel_size": filter_size, "padding": padding}),
    )


def narrow_configs(op, arguments, target=SM_90) -> list[NarrowConfig]:
    found = op.launcher.candidates(target=target, **arguments)
    return [config for config in found if isinstance(config, NarrowConfig)]


def run(launch: Launch, **constants: Any) -> torch.Tensor:
    """The kernels themselves, which the operator runs on a GPU alone, with other constants."""
    for part in launch.parts:
        part.output.fill_(float("nan"))
        changed = {name: value for name, value in constants.items() if name in part.constants}
        Launch.run(replace(part, constants={**part.constants, **changed}))
    return launch.output


def judged(op, arguments, config, *, target=SM_90, **constants: Any) -> Verdict:
    y = run(op.launcher.plan(config=config, target=target, **arguments), **constants)
    assert y.is_contiguous(memory_format=torch.channels_last)
    return compare(y, op.reference(**to_float64(arguments)), op.reference(**arguments), eps=ROUNDING)


def samples():
    found = []
    for op, sample in ((one, sample) for one in PASSES for sample in one.samples):
        if narrow_configs(op, sample.arguments(torch.float16, "meta")):
            marks = [pytest.mark.gpu] if sample.real_size else []
            found.append(pytest.param(op, sample, id=f"{op.name}-{sample.why}", marks=marks))
    return found


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "sample"), samples())
def test_samples_against_float64(op, sample):
    arguments = sample.arguments(torch.float16, DEVICE)
    configs = narrow_configs(op, arguments)
    for config in configs if HAS_GPU else configs[:1]:
        verdict = judged(op, arguments, config)
        assert verdict.passed, f"{config}: {verdict.reason}"


@pytest.mark.parametrize("seed", range(20))
def test_random_passes_against_float64(seed):
    rng = random.Random(seed)
    few, wide = rng.randint(1, 8), 8 * rng.randint(1, 20)
    c, k = rng.choice([(few, wide), (wide, few)])
    r, s = rng.choice([(3, 3), (1, 1), (rng.randint(1, 7), rng.randint(1, 7))])
    padding = rng.randrange(r), rng.randrange(s)
    image = tuple(rng.randint(max(1, size - 2 * p), 13) for size, p in zip((r, s), padding, strict=True))
    target = SM_90 if HAS_GPU else replace(rng.choice(TARGETS), sm_count=rng.choice([1, 3, 9]))
    for op, arguments in calls(rng.randint(1, 3), c, k, image, (r, s), padding):
        config, large = rng.choice(narrow_configs(op, arguments, target)), rng.random() < 0.3
        verdict = judged(op, arguments, config, target=target, **({"LARGE": True} if large else {}))
        assert verdict.passed, f"{op.name} {config} {c} {k} {image} {(r, s)} {padding}: {verdict.reason}"


@pytest.mark.parametrize("name", ["FORWARD", "TOP", "LEFT"])
def test_a_wrong_constant_is_caught(name):
    for op, arguments in (call for c, k in ((3, 40), (40, 3)) for call in calls(2, c, k, (5, 6), (3, 3), (1, 1))):
        (config, *_) = narrow_configs(op, arguments)
        right = op.launcher.plan(config=config, target=SM_90, **arguments).parts[0].constants[name]
        assert judged(op, arguments, config).passed
        assert not judged(op, arguments, config, **{name: not right}).passed


@pytest.mark.parametrize(("c", "k"), [(3, 40), (40, 3)])
def test_slices_of_wider_maps_are_read_in_place(c, k):
    for op, arguments in calls(2, c, k, (5, 6), (3, 3), (1, 1)):
        sliced = dict(arguments)
        for name in ("x", "dy"):
            if name in arguments:
                map_ = arguments[name]
                sliced[name] = torch.cat((map_ * 7, map_, map_ * 5), 1)[:, map_.shape[1] : 2 * map_.shape[1]]
        (config, *_) = narrow_configs(op, arguments)
        assert torch.equal(
            run(op.launcher.plan(config=config, target=SM_90, **sliced)),
            run(op.launcher.plan(config=config, target=SM_90, **arguments)),
        )


def test_equal_calls_give_equal_bits():
    _, _, (op, arguments) = calls(3, 3, 40, (7, 6), (3, 3), (1, 1))
    for config in narrow_configs(op, arguments)[:3]:
        first = run(op.launcher.plan(config=config, target=SM_90, **arguments)).clone()
        assert torch.equal(first, run(op.launcher.plan(config=config, target=SM_90, **arguments)))


@pytest.mark.parametrize(("c", "k"), [(3, 16), (16, 3)])
def test_gradients_are_those_of_conv2d(c, k):
    (_, given), *_ = calls(2, c, k, (5, 6), (3, 3), (1, 1), device="cpu")
    ours = [given[name].double().requires_grad_() for name in ("x", "weight", "bias")]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    y = conv2d_fprop.OP(*ours, padding=[1, 1])
    y.backward(torch.ones_like(y))
    torch.nn.functional.conv2d(*theirs, padding=1).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


# --- configs ---------------------------------------------------------------------------------------------------------


def test_every_problem_has_configs_and_all_are_valid():
    sides = [(few, wide) for few in (1, 3, 4, 8) for wide in (8, 40, 128, 320)]
    filters = ((1, 1), (3, 3), (7, 7), (2, 5))
    for (few, wide), filter_size, flip in itertools.product(sides, filters, (False, True)):
        c, k = (wide, few) if flip else (few, wide)
        padding = filter_size[0] // 2, filter_size[1] // 2
        for op, arguments in calls(4, c, k, (9, 33), filter_size, padding, device="meta"):
            for target in TARGETS:
                configs = narrow_configs(op, arguments, target)
                assert configs and len(set(configs)) == len(configs)
                for config in configs:
                    assert op.launcher.plan(config=config, target=target, **arguments).grid[0] > 0


@pytest.mark.parametrize("seed", range(50))
def test_boxes_cover_the_map_and_what_its_taps_meet(seed):
    rng = random.Random(seed)
    r, s = rng.randint(1, 7), rng.randint(1, 7)
    padding = rng.randrange(r), rng.randrange(s)
    image = tuple(rng.randint(max(1, size - 2 * p), 70) for size, p in zip((r, s), padding, strict=True))
    for name, c, k in (("conv2d_fprop", 16, 3), ("conv2d_dgrad", 3, 16)):
        one = pass_of(name, ConvProblem(1, c, k, image, (r, s), 1, padding), torch.float16)
        narrow = narrow_call._NarrowPass(one, SM_90)
        for pixels in (64, 256):
            box = narrow.box(pixels)
            assert box is not None and box["BOX_H"] * box["BOX_W"] == pixels
            axes = (("BOX_H", "ROWS", "ABOVE", r), ("BOX_W", "COLUMNS", "BEFORE", s))
            for axis, (side, made, before, taps) in enumerate(axes):
                size, wide = narrow.narrow_shape[2 + axis], narrow.wide_shape[2 + axis]
                for first in range(0, size, box[made]):
                    for row, tap in itertools.product(range(first, min(first + box[made], size)), range(taps)):
                        shift = tap - padding[axis]
                        met = row + (shift if narrow.forward else -shift)
                        # zeros lie beside the map
                        assert not 0 <= met < wide or 0 <= met - first + box[before] < box[side]


def test_offsets_are_int64_where_a_map_is_that_large():
    (op, small), *_ = calls(2**11, 3, 128, (64, 64), (3, 3), (1, 1), device="meta")
    (_, large), *_ = calls(2**12, 3, 128, (64, 64), (3, 3), (1, 1), device="meta")
    assert not op.launcher.plan(target=SM_90, **small).constants["LARGE"]
    assert op.launcher.plan(target=SM_90, **large).constants["LARGE"]


# --- the choice between kernels --------------------------------------------------------------------------------------


def kernel_of(op, arguments, target=SM_90, config=None) -> str:
    return op.launcher.plan(config=config, target=target, **arguments).parts[0].kernel.fn.__name__


def test_eight_channels_are_computed_by_either_kernel():
    for op, arguments in calls(2, 8, 40, (5, 6), (3, 3), (1, 1)):
        kinds = [type(config) for config in op.launcher.candidates(target=SM_90, **arguments)]
        assert kinds[0] in (Config, WgradConfig) and kinds[1] is NarrowConfig
        assert "gluon" in kernel_of(op, arguments)
        assert "narrow" in kernel_of(op, arguments, config=narrow_configs(op, arguments)[0])
        for target in (SM_89, SM_120):
            assert {type(config) for config in op.launcher.candidates(target=target, **arguments)} == {NarrowConfig}
            assert "narrow" in kernel_of(op, arguments, target)


@pytest.mark.parametrize(("c", "k"), [(8, 40), (3, 40), (40, 3)])
def test_a_tuned_config_is_taken_of_either_kind(monkeypatch, c, k):
    for op, arguments in calls(2, c, k, (5, 6), (3, 3), (1, 1), device="meta"):
        for config in op.launcher.candidates(target=SM_90, **arguments)[1:]:
            key, plain = op.key(**arguments), asdict(config)
            row = tuned.Row(op.name, "hash", "GPU", "fp16", key, plain, 1e-5, None, "2", "3", "5", {RIVAL: 2e-5})
            monkeypatch.setattr("ridgeline.kernels._op.tuned_row", lambda _op, row=row, **_arguments: row)
            monkeypatch.setattr(narrow_call, "tuned_row", lambda _op, row=row, **_arguments: row)
            tuned_launch, given = (
                op.launcher.plan(config=one, target=SM_90, **arguments).parts[0] for one in (None, config)
            )
            assert tuned_launch.constants == given.constants and tuned_launch.num_warps == given.num_warps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": (5, 3, 3, 3)}, "conv2d_fprop: channels must be multiples of 8 and filters of 8, got 3 and 5"),
        (
            {"weight": (16, 3, 9, 3), "padding": (4, 1)},
            "channels must be multiples of 8 and filters of 8, got 3 and 16",
        ),
        ({"stride": 2}, "channels must be multiples of 8 and filters of 8, got 3 and 16"),
        ({"padding": (3, 0)}, r"padding must be less than the filter \(3, 3\)"),
        ({"x": torch.zeros(1, 3, 8, 8, dtype=torch.float16)}, "x must be channels_last, or a slice of it, got strides"),
        ({"x": torch.zeros(1, 3, 8, 8, dtype=torch.float32)}, "x must be torch.float16 or torch.bfloat16, got"),
        ({"residual": (1, 16, 8, 7)}, r"residual must have the shape \(1, 16, 8, 8\) of the result"),
        ({"config": NarrowConfig(128, 128, 8, 1, 1)}, r"NarrowConfig\(.*\) is not valid for .* on sm_90"),
        ({"config": NarrowConfig(128, 64, 4, 1, 1), "weight": (16, 24, 3, 3), "x": (1, 24, 8, 8)}, "is not valid"),
        ({"bias": torch.zeros(5)}, r"bias must be fp32 or torch.float16 of shape \(16,\)"),
    ],
)
def test_what_no_kernel_takes_is_refused(change, message):
    given = {"x": (1, 3, 8, 8), "weight": (16, 3, 3, 3), "padding": (1, 1), **change}
    maps = {"x", "weight", "residual"}
    arguments = {
        name: random_nhwc(value, torch.float16, "cpu", seed=0) if name in maps and isinstance(value, tuple) else value
        for name, value in given.items()
    }
    with pytest.raises((ValueError, TypeError), match=message):
        conv2d_fprop.plan(**arguments, target=SM_90)
