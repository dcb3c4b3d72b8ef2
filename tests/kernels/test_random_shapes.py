"""Seeded random problems of every op with tiles: odd sizes, strides, paddings, slices of wider buffers, every tile.

Every map lies in a wider buffer that is NaN everywhere else, so a read or a write out of place shows. Under the
interpreter sizes are small, for a program takes it some ten milliseconds; on a GPU the same problems are drawn larger,
in bf16 too, and products of fp32 both ways.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import (
    Op,
    attention_position,
    conv2d_act,
    depthwise_conv2d_act,
    max_pool_chain,
    upsample_concat_conv_act,
)
from ridgeline.kernels._nhwc import random_nhwc, round_to_tf32
from ridgeline.kernels._op import target_of
from ridgeline.numerics import TF32_EPS, compare, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
TARGET = target_of(torch.empty(0, device=DEVICE))
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.float16)
SIZES = (7, 13, 20, 40)  # of YOLO's maps at 224, 416, 640 and 1280 pixels: no tile divides them all


@dataclass(frozen=True)
class Case:
    """One problem with the config it is to run with. `maps` names the arguments that may be slices."""

    op: Op
    arguments: dict[str, Any]
    config: Any
    maps: tuple[str, ...]

    def __str__(self) -> str:
        shown = {name: _spelled(value) for name, value in self.arguments.items()}
        return f"{self.op.name} {shown} {self.config}"


def run(case: Case, rng: random.Random, *, aligned: bool = False) -> None:
    """Launch with all maps in NaN buffers, compare with float64, and see that nothing else was written."""
    maps = {name: case.arguments[name] for name in case.maps if case.arguments[name] is not None}
    given = {name: in_nan_buffer(tensor, rng, aligned=aligned) for name, tensor in maps.items()}
    arguments = {**case.arguments, **given}
    reference64 = case.op.reference(**to_float64(arguments))
    empty = torch.full_like(reference64, math.nan, dtype=next(iter(given.values())).dtype)
    out = in_nan_buffer(empty, rng, aligned=aligned)
    case.op.launcher.plan(config=case.config, out=out, **arguments).run()
    fp32 = out.dtype == torch.float32
    tf32 = HAS_GPU and fp32 and arguments.get("precision", "ieee") == "tf32"
    eps = TF32_EPS if tf32 else None
    if fp32 and not tf32 and case.op is attention_position.OP:
        # logits of some tens are rounded before they are exponents; by how much eager's are is chance, and the CPU's
        eps = 64 * torch.finfo(torch.float32).eps
    verdict = compare(out, reference64, case.op.reference(**arguments), eps=eps)
    assert verdict.passed, f"{case}: {verdict.reason}"
    assert int((~out._base.isnan()).sum()) == out.numel(), f"{case}: more than the slice was written"


def in_nan_buffer(x: Tensor, rng: random.Random, *, aligned: bool = False) -> Tensor:
    """`x` as a channel slice of a wider NHWC buffer that is NaN everywhere else; now and then of one just as wide.

    Slices begin at multiples of 16 bytes half of the time, as those of concat buffers do, or always if `aligned`.
    """
    n, c, h, w = x.shape
    step = rng.choice([1, 16 // x.element_size()][aligned:])
    before, after = rng.choice([(0, 0), (0, step), (step, 0), (2 * step, step)])
    wide = torch.full((n, h, w, before + c + after), math.nan, dtype=x.dtype, device=x.device).permute(0, 3, 1, 2)
    slice_ = wide[:, before : before + c]
    slice_.copy_(x)
    return slice_


def any_config(rng: random.Random, op: Op, arguments: dict[str, Any], tiles: list[Any]) -> Any:
    """One of `tiles` that this problem can take with few enough programs; the last, largest one if none is."""
    rng.shuffle(tiles)
    most_programs = 4096 if HAS_GPU else rng.choice([1, 1, 1, 3])
    valid: list[tuple[int, Any]] = []
    for config in tiles:
        try:
            programs = op.launcher.plan(config=config, target=TARGET, **arguments).grid[0]
        except ValueError:
            continue
        if programs <= most_programs:
            return config
        valid.append((programs, config))
    return min(valid, key=lambda pair: pair[0])[1]


def bias_of(rng: random.Random, channels: int, dtype: torch.dtype) -> Tensor | None:
    bias = random_nhwc((1, channels, 1, 1), rng.choice([torch.float32, dtype]), DEVICE, seed=2).flatten()
    return bias if rng.random() < 0.75 else None


def side(rng: random.Random, least: int = 1) -> int:
    largest = 48 if HAS_GPU else 9
    drawn = rng.choice([rng.randint(1, largest), rng.choice([size for size in SIZES if size <= largest])])
    return max(least, drawn)


def dense_tiles(rng: random.Random, reduction: int) -> list[conv2d_act.Config]:
    """Of any size, with any pipeline; under the interpreter only those that go through the reduction in few steps."""
    sides = (16, 32, 64, 128)
    return [
        conv2d_act.Config(m, n, k, num_warps, rng.choice([1, 1, 2, 3, 4]), split_k)
        for m, n, k in product(sides, sides, sides)
        for num_warps, split_k in [(rng.choice([1, 2, 4, 8]), 1), (4, 4), (8, 8)]
        if HAS_GPU or k == 128 or reduction <= 3 * k * split_k
    ]


def draw_conv2d_act(rng: random.Random) -> Case:
    dtype = rng.choice(DTYPES)
    r, s = rng.choice([(1, 1), (3, 3), (5, 5) if HAS_GPU or rng.random() < 0.3 else (1, 1), (2, 3), (1, 5), (3, 2)])
    padding = (rng.randint(0, r // 2 + 1), rng.randint(0, s // 2 + 1))
    h, w = (side(rng, taps - 2 * pad) for taps, pad in zip((r, s), padding, strict=True))
    n, c, k = rng.randint(1, 3), rng.choice([1, 2, 3, 5, 8, 16, 17, 24]), rng.choice([1, 3, 8, 16, 20, 33])
    if HAS_GPU:
        c, k = c * rng.choice([1, 2, 8]), k * rng.choice([1, 2, 5])
    stride = (rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2]))
    conv = ConvProblem(n, c, k, (h, w), (r, s), stride, padding)
    residual = rng.random() < 0.4
    arguments = {
        "x": random_nhwc((n, c, h, w), dtype, DEVICE, seed=0),
        "weight": _weight((k, c, r, s), dtype),
        "bias": bias_of(rng, k, dtype),
        "residual": random_nhwc((n, k, conv.oh, conv.ow), dtype, DEVICE, seed=3) if residual else None,
        "stride": stride, "padding": padding,
        "act": rng.choice(["silu", "none"]), "precision": rng.choice(["tf32", "ieee"]),
    }  # fmt: skip
    config = any_config(rng, conv2d_act.OP, arguments, dense_tiles(rng, c * r * s))
    return Case(conv2d_act.OP, arguments, config, ("x", "residual"))


def draw_upsample_concat_conv_act(rng: random.Random) -> Case:
    dtype, op = rng.choice(DTYPES), upsample_concat_conv_act.OP
    n, c1, c2, k = rng.randint(1, 3), rng.choice([16, 16, 32, 48]), rng.choice([16, 32]), rng.choice([1, 3, 8, 20, 33])
    h, w = ((side(rng) + 1) // 2 for _ in range(2))
    arguments = {
        "coarse": random_nhwc((n, c1, h, w), dtype, DEVICE, seed=0),
        "fine": random_nhwc((n, c2, 2 * h, 2 * w), dtype, DEVICE, seed=1),
        "weight": _weight((k, c1 + c2, 1, 1), dtype),
        "bias": bias_of(rng, k, dtype),
        "act": rng.choice(["silu", "none"]), "precision": rng.choice(["tf32", "ieee"]),
    }  # fmt: skip
    tiles = [tile for tile in dense_tiles(rng, 16) if tile.block_k <= 16 or (c1 | c2) % tile.block_k == 0]
    return Case(op, arguments, any_config(rng, op, arguments, tiles), ("coarse", "fine"))


def draw_depthwise_conv2d_act(rng: random.Random) -> Case:
    dtype, op = rng.choice(DTYPES), depthwise_conv2d_act.OP
    # the interpreter pays for every tap
    r, s = rng.choice([(3, 3), (1, 3), (3, 2), (5, 5) if HAS_GPU or rng.random() < 0.1 else (2, 1)])
    padding = (rng.randint(0, r // 2 + 1), rng.randint(0, s // 2 + 1))
    h, w = (side(rng, taps - 2 * pad) for taps, pad in zip((r, s), padding, strict=True))
    n, c = rng.randint(1, 2), rng.choice([1, 2, 3, 8, 16, 17, 24, 33, 64])
    stride = (rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2]))
    conv = ConvProblem(n, c, c, (h, w), (r, s), stride, padding, groups=c)
    residual = rng.random() < 0.4
    arguments = {
        "x": random_nhwc((n, c, h, w), dtype, DEVICE, seed=0),
        "weight": depthwise_conv2d_act.pack(random_nhwc((c, 1, r, s), dtype, DEVICE, seed=1) * (r * s) ** -0.5),
        "bias": bias_of(rng, c, dtype),
        "residual": random_nhwc((n, c, conv.oh, conv.ow), dtype, DEVICE, seed=3) if residual else None,
        "stride": stride, "padding": padding, "act": rng.choice(["silu", "none"]),
    }  # fmt: skip
    tiles = [depthwise_conv2d_act.Config(*tile) for tile in product((4, 16, 64, 256), (1, 2, 8, 16, 64), (1, 4, 8))]
    return Case(op, arguments, any_config(rng, op, arguments, tiles), ("x", "residual"))


def draw_attention_position(rng: random.Random) -> Case:
    dtype, op = rng.choice(DTYPES), attention_position.OP
    d, e = rng.choice([16, 32, 48]), rng.choice([16, 32, 48, 64])
    n, heads = (rng.randint(1, 3), rng.randint(1, 4)) if HAS_GPU else rng.choice([(1, 1), (1, 1), (1, 2), (2, 1)])
    h, w = (rng.choice([rng.randint(1, 20), 7, 13, 20]) if HAS_GPU else rng.randint(1, 5) for _ in range(2))
    qkv = random_nhwc((n, heads * (2 * d + e), h, w), dtype, DEVICE, seed=0)
    # scores up to some hundreds; then TF32's rounding alone is more than the rule allows, in PyTorch too, and bf16's
    scale = rng.choice([0.1, 1.0, 6.0] if dtype != torch.bfloat16 else [0.1, 1.0])
    arguments = {
        "qkv": qkv * scale,
        "weight": depthwise_conv2d_act.pack(random_nhwc((heads * e, 1, 3, 3), dtype, DEVICE, seed=1) / 3),
        "bias": bias_of(rng, heads * e, dtype),
        "heads": heads, "key_channels": d,
        "precision": rng.choice(["tf32", "ieee"]) if scale <= 1 else "ieee",
    }  # fmt: skip
    tiles = [attention_position.Config(q, k, 4, 2) for q, k in product((16, 32, 64), (16, 32, 64, 128))]
    return Case(op, arguments, any_config(rng, op, arguments, tiles), ("qkv",))


def draw_max_pool_chain(rng: random.Random) -> Case:
    dtype, op = rng.choice(DTYPES), max_pool_chain.OP
    size, count = rng.choice([(3, 1), (3, 2), (5, 1), (1, 2), (5, 3) if HAS_GPU else (3, 1)])
    shape = rng.randint(1, 2), rng.choice([1, 3, 8, 16, 17]), side(rng), side(rng)
    # few distinct values: ties everywhere
    x = ((random_nhwc(shape, torch.float32, DEVICE, seed=0) * 2).round() / 2).to(dtype)
    arguments = {"x": x, "size": size, "count": count}
    tiles = [max_pool_chain.Config(*tile) for tile in product((16, 64, 128), (1, 4, 16), (1, 2, 4), (4, 8))]
    return Case(op, arguments, any_config(rng, op, arguments, tiles), ("x",))


DRAWS: dict[Callable[[random.Random], Case], int] = {
    draw_conv2d_act: 300,
    draw_upsample_concat_conv_act: 300,
    draw_depthwise_conv2d_act: 300,
    draw_attention_position: 100,
    draw_max_pool_chain: 100,
}
BATCH = 20


@pytest.mark.parametrize(
    ("draw", "first"), [(draw, first) for draw, count in DRAWS.items() for first in range(0, count, BATCH)],
    ids=lambda value: value.__name__.removeprefix("draw_") if callable(value) else str(value),
)  # fmt: skip
def test_random_problems_against_float64(draw: Callable[[random.Random], Case], first: int):
    for seed in range(first, first + BATCH):
        rng = random.Random(seed)
        run(draw(rng), rng)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__.removeprefix("draw_"))
def test_draws_cover_what_they_should(draw: Callable[[random.Random], Case]):
    """A generator that never draws a case tests nothing of it."""
    cases = [draw(random.Random(seed)) for seed in range(60)]
    first_maps = [case.arguments[case.maps[0]] for case in cases]
    assert {x.dtype for x in first_maps} == set(DTYPES)
    assert {x.shape[0] for x in first_maps} >= {1, 2}
    assert min(x.shape[2] * x.shape[3] for x in first_maps) < 10 < max(x.shape[2] * x.shape[3] for x in first_maps)
    assert len({case.config for case in cases}) > 5
    for choice in ("bias", "residual"):
        if choice in cases[0].arguments:
            assert {case.arguments[choice] is None for case in cases} == {True, False}
    if draw is draw_conv2d_act:
        assert {case.config.num_stages == 1 for case in cases} == {True, False}
        assert {case.arguments["stride"][0] for case in cases} >= {1, 2, 3}


def all_tiles(phase: int) -> Iterator[conv2d_act.Config]:
    """Every tile that `candidates` may return; `phase` alternates pipelined, unrolled and split reductions."""
    sides = (16, 32, 64, 128)
    for index, (m, n, k) in enumerate(product(sides, sides, sides)):
        num_warps = 8 if m * n > 64 * 128 else 4
        num_stages = 1 + (index // 4 + index + phase) % 2
        yield conv2d_act.Config(m, n, k, num_warps, num_stages)
        if max(m, n) <= 32:
            yield conv2d_act.Config(m, n, k, num_warps, 3 - num_stages, split_k=num_warps)


@pytest.mark.parametrize("size", SIZES)
def test_every_tile_on_sizes_that_none_divides(size: int):
    """Tiles end inside rows, behind the last pixel and behind the last channel."""
    rng, phase, tried = random.Random(size), SIZES.index(size), 0
    for index, config in enumerate(all_tiles(phase)):
        c, filter_side = (24, 1) if (index + phase // 2) % 2 else (3, 3)
        # two blocks of pixels under the interpreter and one of channels, the last of each cut short
        width = size if HAS_GPU else max(1, (2 * config.block_m - 1) // size)
        k = config.block_n - 3 if not HAS_GPU else 77
        arguments = {
            "x": random_nhwc((1, c, size, width), torch.float16, DEVICE, seed=0),
            "weight": _weight((k, c, filter_side, filter_side), torch.float16),
            "bias": random_nhwc((1, k, 1, 1), torch.float32, DEVICE, seed=2).flatten(),
            "residual": random_nhwc((1, k, size, width), torch.float16, DEVICE, seed=3),
            "stride": (1, 1), "padding": (filter_side // 2,) * 2,
        }  # fmt: skip
        if config.is_valid(conv2d_act.Problem(**arguments), TARGET):
            run(Case(conv2d_act.OP, arguments, config, ("x", "residual")), rng)
            tried += 1
    assert tried > 60


PROBLEMS = {
    # a step of 64 spans four taps of 16 channels, and with them two rows of the filter: Triton 3.6 once got this wrong
    # for sm_90 with three stages and more
    "16 channels 3x3": ((1, 16, 40, 40), (32, 3, 3), 1),
    "8 channels 3x3": ((1, 8, 40, 40), (16, 3, 3), 1),
    "stem": ((1, 3, 64, 80), (16, 3, 3), 2),
    "64 channels 3x3": ((1, 64, 20, 20), (64, 3, 3), 1),
    "1x1": ((1, 128, 13, 13), (96, 1, 1), 1),
}


def problem(name: str, dtype: torch.dtype, precision: str) -> dict[str, Any]:
    (n, c, h, w), (k, r, s), stride = PROBLEMS[name]
    return {
        "x": random_nhwc((n, c, h, w), dtype, DEVICE, seed=0),
        "weight": _weight((k, c, r, s), dtype),
        "bias": random_nhwc((1, k, 1, 1), torch.float32, DEVICE, seed=2).flatten(),
        "residual": None,
        "stride": (stride, stride), "padding": (r // 2, s // 2), "precision": precision,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float16, "tf32"), (torch.bfloat16, "tf32"), (torch.float32, "tf32"), (torch.float32, "ieee")],
)
def test_every_candidate_is_right_on_a_gpu(name: str, dtype: torch.dtype, precision: str):
    arguments = problem(name, dtype, precision)
    for config in conv2d_act.candidates(target=TARGET, **arguments):
        # boxes are copied from and to multiples of 16 bytes alone
        run(Case(conv2d_act.OP, arguments, config, ("x",)), random.Random(0), aligned=config.box_h > 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["16 channels 3x3", "8 channels 3x3"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_pipelines_whose_steps_span_filter_rows_on_a_gpu(name: str, num_stages: int):
    arguments, tried = problem(name, torch.float16, "tf32"), 0
    for m, n, k, num_warps in product((16, 32, 64, 128), (16, 32), (32, 64, 128), (2, 4, 8)):
        config = conv2d_act.Config(m, n, k, num_warps, num_stages)
        if config.is_valid(conv2d_act.Problem(**arguments), TARGET):
            run(Case(conv2d_act.OP, arguments, config, ("x",)), random.Random(0))
            tried += 1
    assert tried > 30


def _weight(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Variance 1 in the output; fp32 as `round_weights` leaves it, exact in every precision."""
    weight = random_nhwc(shape, dtype, DEVICE, seed=1) * math.prod(shape[1:]) ** -0.5
    return round_to_tf32(weight) if dtype == torch.float32 else weight


def _spelled(value: Any) -> Any:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else value
