"""y = act(conv2d(x, weight) + bias) + residual, NHWC, one kernel: implicit GEMM with a fused epilogue.

x         [N, C, H, W]    channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16
weight    [K, C, R, S]    channels_last, that is [K, R, S, C] packed; dtype of x; groups = 1, dilation = 1
bias      [K]             fp32 or the dtype of x; None: no bias
residual  [N, K, HO, WO]  as x; added after the activation; may be x itself
y         [N, K, HO, WO]  channels_last, dtype of x
act       "silu" or "none"
precision products of fp32 operands: "tf32" (tensor cores, 10 mantissa bits) or "ieee"; no effect on fp16 and bf16.
          With "tf32" x is rounded to nearest; weight must be, see `_nhwc.round_to_tf32`: its low 13 bits are cut
pdl       programmatic dependent launch (sm_90 and later): starts while its predecessor runs, and waits for it itself

Accumulates in fp32; bias, activation and residual are applied in fp32 and rounded once. An empty batch gives an
empty y. Raises ValueError or TypeError for any other layout, dtype or choice.

The GEMM is [N HO WO, R S C] x [R S C, K]. Rows of the left matrix are never written out: each is gathered by its pixel,
tap by tap (the method of implicit GEMM in cuDNN, Chetlur et al. 2014, with NHWC so that a tap's channels are adjacent).
On sm_90 and later the config may have whole boxes of pixels copied instead, see `_conv2d_act_tma`, and on sm_90 by
warps that do nothing else, see `_conv2d_act_gluon`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_forward, problem_of
from ridgeline.kernels._conv import FLOATS, padded, reduction_step
from ridgeline.kernels._conv2d_act import conv2d_act_kernel
from ridgeline.kernels._conv2d_act_boxes import (
    box_configs,
    programs,
    specialised_configs,
    specialised_maps,
    tensor_maps,
    worth_boxes,
    worth_specialised,
)
from ridgeline.kernels._conv2d_act_call import PRECISIONS, Config, Problem  # noqa: F401 - kernels beside take them here
from ridgeline.kernels._conv2d_act_gluon import conv2d_act_gluon_kernel
from ridgeline.kernels._conv2d_act_tma import conv2d_act_tma_kernel, sum_parts_kernel
from ridgeline.kernels._nhwc import conv_sample, tf32_rounding
from ridgeline.kernels._op import LastLaunch, Launch, Launcher, Target, define, execute, target_of, tuned_config

_MOST_CANDIDATES, _MOST_SPLIT, _MOST_BOXED = 32, 20, 16  # beside the default
_FEW_OUTPUTS = 2**18  # elements of y: four tiles of 16 x 32 a multiprocessor


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    precision: str = "tf32",  # noqa: ARG001 - a choice of arithmetic, not of meaning
    pdl: bool = False,  # noqa: ARG001 - a choice of scheduling
) -> Tensor:
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), stride, padding)
    if act == "silu":
        y = F.silu(y)
    return y if residual is None else y + residual


def cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",  # noqa: ARG001
    precision: str = "tf32",
    pdl: bool = False,  # noqa: ARG001
) -> Cost:
    """The FLOPs of the matrix product, as for a plain convolution: the epilogue rides on it."""
    conv = conv_forward(problem_of(x, weight, stride, padding, (1, 1), 1), x.dtype)
    epilogue = sum(t.nbytes for t in (bias, residual) if t is not None and t is not x)
    pipe = "cuda_fp32" if x.dtype == torch.float32 and precision == "ieee" else conv.pipe
    return replace(conv, read_bytes=conv.read_bytes + epilogue, pipe=pipe)


def default_config(problem: Problem, target: Target) -> Config:
    """The largest tile that still gives every second multiprocessor one, or the smallest if none does.

    On the problems of YOLO26n that were tuned on an H200 this is 4 % slower than the best config, in geometric mean.
    """
    conv, widest = problem.conv, padded(problem.conv.k)
    block_k = reduction_step(conv.c, conv.taps, problem.x.element_size())
    reduction = conv.c * conv.taps
    # short and not many tiles: latency counts, and all operands can be loaded at once
    at_once = reduction * problem.x.element_size() <= _SHORT_BYTES
    at_once = at_once and _tiles(problem, 64, min(64, widest)) <= 16 * target.sm_count
    shapes = [(m, n) for m, n in (_TILES_AT_ONCE if at_once else _TILES) if n <= widest]
    if problem.on_cuda_cores:
        shapes = [(m, n) for m, n in shapes if m * n <= 64 * 64]
    block_m, block_n = next((s for s in shapes if 2 * _tiles(problem, *s) >= target.sm_count), shapes[-1])
    configs = []
    if at_once:
        fewest = 2 if block_m * block_n <= 512 else 4
        configs = [Config(block_m, block_n, block_k, num_warps, 1) for num_warps in (2, 4) if num_warps >= fewest]
    # a second stage hides the first load of a short reduction; more than its steps would only take shared memory
    deepest = min(4, max(2, -(-reduction // block_k)))
    # sm_90's wgmma takes four warps
    warps = 4 if block_m >= 32 or block_m * block_n > 1024 else 2
    configs += [Config(block_m, block_n, block_k, warps, stages) for stages in range(deepest, 1, -1)]
    return next(config for config in configs if config.is_valid(problem, target))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing, the likeliest first.

    Twelve with pointers lose 0.4 % of what was tuned for YOLO26n on an H200, and 48 of its 54 problems nothing.
    """
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    default, widest = default_config(problem, target), padded(problem.conv.k)
    k = default.block_k
    tiles = [(m, n) for m, n in product((16, 32, 64, 128), (16, 32, 64, 128)) if min(32, widest) <= n <= widest]
    variants = [(k, 4, 4), (k, 4, 1), (k, 2, 1), (2 * k, 4, 3), (k // 2, 4, 4), (k, 2, 4), (2 * k, 2, 3)]
    variants += [(k, 4, 2), (k, 4, 3), (k, 8, 4), (k, 2, 2), (k, 1, 4)]

    def rank(config: Config, variant: int) -> float:
        # a tile half or twice the default's is as far off as the next variant
        steps = math.log2(config.block_m / default.block_m), math.log2(config.block_n / default.block_n)
        return variant + sum(map(abs, steps))

    tried = [(Config(m, n, *variant), i) for (m, n), (i, variant) in product(tiles, enumerate(variants))]
    worth = [c for c, _ in sorted(tried, key=lambda pair: rank(*pair)) if c != default and c.is_valid(problem, target)]
    split = [c for c in _split(problem, k) if c.is_valid(problem, target)]
    boxes, late = box_configs(problem, target)[:_MOST_BOXED], 0
    specialised = specialised_configs(problem, target)[:_MOST_BOXED]
    if worth_boxes(problem, target):
        # boxes and the likeliest tiles without them take turns; all else comes later
        first = [c for c in (Config(m, n, factor * k, 4, stages) for m, n, factor, stages in _WIDE) if c in worth]
        worth, late = [*first, *(c for c in worth if c not in first)], len(first)
    places = [(i - 0.5 if late else math.inf, c) for i, c in enumerate(boxes)]
    places += [(i, c) for i, c in enumerate(worth[:_MOST_CANDIDATES])]
    # one of these, then three others
    pace, early = 1.5 if late else 3, worth_specialised(problem)
    places += [(pace * i - 0.75 if early else math.inf, c) for i, c in enumerate(specialised)]
    # every fourth one is split
    places += [(late + 3 * i + 2.5, c) for i, c in enumerate(split[:_MOST_SPLIT])]
    return (default, *(config for _, config in sorted(places, key=itemgetter(0))))


def _split(problem: Problem, block_k: int) -> Iterator[Config]:
    """Small tiles whose warps share a long reduction, where few tiles there are."""
    if problem.pixels * problem.conv.k <= _FEW_OUTPUTS:
        for (m, n), warps, stages, k in product(
            ((16, 16), (16, 32), (32, 32), (32, 16)), (4, 8), (1, 3), (block_k, block_k // 2)
        ):
            if k >= 16 and 2 * warps * k <= problem.conv.c * problem.conv.taps:
                yield Config(m, n, k, warps, stages, warps)


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    conv, target = problem.conv, target or target_of(problem.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"conv2d_act: {config} is not valid for {conv} on {target.arch}")
    y = problem.output()
    choices = {
        "K": conv.k,
        "PRECISION": problem.precision,
        "ROUNDING": tf32_rounding(problem.x, problem.precision, target),
        "SPLIT": config.split_k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    if config.specialised:
        return _specialised(problem, config, target, y)
    if config.boxed:
        return _boxed(problem, config, choices, y)
    return Launch(
        kernel=conv2d_act_kernel,
        grid=(_tiles(problem, config.block_m, config.block_n),),
        arguments=problem.arguments(y),
        constants={
            **problem.constants(y),
            **choices,
            "UNROLL": config.num_stages == 1,
            "BLOCK_M": config.block_m,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=y,
        pdl=problem.pdl,
    )


def _boxed(problem: Problem, config: Config, choices: Mapping[str, int | str], y: Tensor) -> Launch:
    """One kernel, or two where several programs share the reduction of a tile."""
    x_map, weight_map = tensor_maps(problem, config)
    sides = {"BOX_N": config.box_n, "BOX_H": config.box_h, "BOX_W": config.box_w, "STRIDE": problem.stride[0]}
    in_maps = ("H", "W", "STRIDE_H", "STRIDE_W")
    constants = {name: value for name, value in problem.constants(y).items() if name not in in_maps}
    arguments = {name: value for name, value in problem.arguments(y).items() if name != "x_ptr"}
    whole = Launch(
        kernel=conv2d_act_tma_kernel,
        grid=(programs(problem, config),),
        arguments={"x_desc": x_map, "weight_desc": weight_map, **arguments},
        constants={**constants, **choices, **sides},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=y,
        pdl=problem.pdl,
    )
    if config.split_k == 1:
        return whole
    parts = _parts(problem, config, y)
    first = replace(
        whole,
        arguments={**whole.arguments, "bias_ptr": None, "residual_ptr": None, "y_ptr": parts},
        # the epilogue's choices are the second kernel's: the first is compiled once for all of them
        constants={**whole.constants, "RESIDUAL_PITCH": 0, "Y_PITCH": problem.conv.k, "ACT": "none"},
        output=parts,
    )
    return _summed(problem, config, first, y)


def _specialised(problem: Problem, config: Config, target: Target, y: Tensor) -> Launch:
    """As `_boxed`, by as many programs as run at a time."""
    conv, split = problem.conv, config.split_k > 1
    out = _parts(problem, config, y) if split else y
    n, (ho, wo) = (1, (1, problem.pixels)) if problem.is_product else (conv.n, (conv.oh, conv.ow))
    first = Launch(
        kernel=conv2d_act_gluon_kernel,
        grid=(min(programs(problem, config), target.sm_count * config.resident(problem, target)),),
        arguments={
            **specialised_maps(problem, config, out),
            "bias_ptr": None if split else problem.bias,
            "images": n,
        },
        constants={
            "C": conv.c, "K": conv.k, "R": conv.filter[0], "S": conv.filter[1], "HO": ho, "WO": wo,
            "PAD_H": problem.padding[0], "PAD_W": problem.padding[1], "ACT": "none" if split else problem.act,
            "PDL": problem.pdl, "SPLIT": config.split_k, "BOX_N": config.box_n, "BOX_H": config.box_h,
            "BOX_W": config.box_w, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages,
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=out,
        pdl=problem.pdl,
    )  # fmt: skip
    return _summed(problem, config, first, y) if split else first


def _parts(problem: Problem, config: Config, y: Tensor) -> Tensor:
    """Memory for what the programs of a tile sum up."""
    return torch.empty((config.split_k, problem.pixels, problem.conv.k), dtype=torch.float32, device=y.device)


def _summed(problem: Problem, config: Config, first: Launch, y: Tensor) -> Launch:
    """After the launch that leaves parts: added in their order, as atomic adds would give other bits on every run."""
    k, constants, arguments = problem.conv.k, problem.constants(y), problem.arguments(y)
    block_m, block_n = _SUM_TILE[0], min(_SUM_TILE[1], padded(k))
    return LastLaunch(
        kernel=sum_parts_kernel,
        grid=(-(-problem.pixels // block_m) * -(-k // block_n),),
        arguments={
            "parts_ptr": first.output,
            **{name: arguments[name] for name in ("bias_ptr", "residual_ptr", "y_ptr", "pixels")},
        },
        constants={
            "K": k, **{name: constants[name] for name in ("RESIDUAL_PITCH", "Y_PITCH", "ACT", "WIDE", "PDL")},
            "SPLIT": config.split_k, "BLOCK_M": block_m, "BLOCK_N": block_n,
        },
        num_warps=4,
        num_stages=1,
        output=y,
        pdl=problem.pdl,
        before=(first,),
    )  # fmt: skip


def conv2d_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    precision: str = "tf32",
    pdl: bool = False,
) -> Tensor:
    choices = {"stride": stride, "padding": padding, "act": act, "precision": precision, "pdl": pdl}
    return execute("conv2d_act", plan(x=x, weight=weight, bias=bias, residual=residual, **choices), x)


# 64 rows and 4 warps are the least that sm_90's wgmma takes; narrower tiles run on mma.sync.
_TILES = ((64, 128), (128, 64), (64, 64), (64, 32), (32, 32), (16, 64), (64, 16), (16, 32), (16, 16))
_TILES_AT_ONCE = (
    *((64, 64), (128, 32), (32, 64), (64, 32), (16, 64), (32, 32)),
    *((128, 16), (16, 32), (64, 16), (32, 16), (16, 16)),
)
_SUM_TILE = (8, 128)  # pixels x channels of a program that adds parts of a reduction
# (m, n, times the default's k, stages): with the default they come within 0.5 % of all pointer configs together, on the
# wide layers of the H200's table
_WIDE = ((64, 64, 1, 4), (16, 64, 1, 4), (64, 64, 2, 3), (128, 64, 1, 4), (64, 128, 2, 3), (64, 128, 1, 4))
_SHORT_BYTES = 640  # of a reduction: 320 fp16 elements


def _tiles(problem: Problem, block_m: int, block_n: int) -> int:
    return -(-problem.pixels // block_m) * -(-problem.conv.k // block_n)


SAMPLES = (
    conv_sample("3x3 with padding, C a multiple of the tile", (1, 32, 7, 6), (32, 3, 3)),
    conv_sample("1x1, two images, residual", (2, 32, 5, 5), (24, 1, 1), residual=True),
    conv_sample("stem: 3 channels, stride 2", (1, 3, 12, 10), (16, 3, 3), stride=2),
    conv_sample("odd channels, 5x5, no activation, no bias", (1, 7, 6, 9), (5, 5, 5), act="none", bias=False),
    conv_sample("filters that are not square, unequal padding", (1, 8, 6, 8), (8, 1, 7), padding=(0, 3)),
    conv_sample("1x1 map: every stride of size 1 is arbitrary", (3, 16, 1, 1), (17, 1, 1), padding=0),
    conv_sample("strict fp32 products", (1, 16, 6, 6), (16, 3, 3), precision="ieee"),
    conv_sample("UNet 16x16 256->256, batch 128", (128, 256, 16, 16), (256, 3, 3), real_size=True),
    conv_sample("UNet 32x32 128->128, batch 128", (128, 128, 32, 32), (128, 3, 3), real_size=True),
    conv_sample("UNet 8x8 512->256, batch 128", (128, 512, 8, 8), (256, 3, 3), real_size=True),
    conv_sample("UNet 32x32 256->128 1x1, batch 128", (128, 256, 32, 32), (128, 1, 1), real_size=True),
    conv_sample("YOLO26n stem, 640", (1, 3, 640, 640), (16, 3, 3), stride=2, real_size=True),
    conv_sample("YOLO26n 320x320 16->32 stride 2", (1, 16, 320, 320), (32, 3, 3), stride=2, real_size=True),
    conv_sample("YOLO26n 160x160 8->16 3x3", (1, 8, 160, 160), (16, 3, 3), residual=True, real_size=True),
    conv_sample("YOLO26n 80x80 64->64 3x3", (1, 64, 80, 80), (64, 3, 3), real_size=True),
    conv_sample("YOLO26n 40x40 128->128 1x1", (1, 128, 40, 40), (128, 1, 1), real_size=True),
    conv_sample("YOLO26n 20x20 128->128 3x3", (1, 128, 20, 20), (128, 3, 3), real_size=True),
    conv_sample("YOLO26n 20x20 256->256 1x1", (1, 256, 20, 20), (256, 1, 1), real_size=True),
)

OP = define(
    conv2d_act,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    stores_into=True,
)
