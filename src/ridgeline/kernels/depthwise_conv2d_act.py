"""y = act(depthwise conv2d(x, weight) + bias) + residual, NHWC, one kernel on the CUDA cores.

x         [N, C, H, W]    channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16
weight    [C, 1, R, S]    stored in the order [R, S, C] (see `pack`), so that channels are adjacent; dtype of x
bias      [C]             fp32 or the dtype of x; None: no bias
residual  [N, C, HO, WO]  as x; added after the activation; may be x itself
y         [N, C, HO, WO]  channels_last, dtype of x
act       "silu" or "none"
pdl       programmatic dependent launch: the kernel reads its filter while its predecessor still runs; sm_90 and later

Products and sums in fp32; bias, activation and residual are applied in fp32 and rounded once. An empty batch gives an
empty y. Raises ValueError or TypeError for any other layout, dtype or choice.

With R·S multiply-adds an element no matrix unit helps, and the bound is bandwidth. A program takes a run of pixels and
a block of channels; a thread owns adjacent channels, so that loads are 16 bytes wide, and leaves the reuse of x to L1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_forward, problem_of
from ridgeline.kernels._conv import FLOATS, ConvCall
from ridgeline.kernels._nhwc import (
    activate,
    cdiv,
    let_dependent_in,
    next_power_of_2,
    random_nhwc,
    wait_holding_dependent,
)
from ridgeline.kernels._op import (
    Launch,
    Launcher,
    Sample,
    Target,
    define,
    execute,
    nearest_first,
    target_of,
    tuned_config,
)

_VECTOR_BYTES = 16
_MAX_ELEMENTS = 32  # fp32 accumulators a thread
# A 3x3 filter of 8 channels fits a thread's registers beside its accumulators, a 5x5 filter does not.
_MOST_TAPS_KEPT = tl.constexpr(9)


def pack(weight: Tensor) -> Tensor:
    """The same [C, 1, R, S] weight stored as [R, S, C]. Done once, when a graph is built, never per call."""
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def is_packed(weight: Tensor) -> bool:
    return weight.permute(2, 3, 1, 0).is_contiguous()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """F.conv2d with a filter a channel, fit to be a reference: cuDNN takes seconds for a small map in float64."""
    if x.dtype != torch.float64:
        return F.conv2d(x, weight, bias, stride, padding, groups=x.shape[1])
    (down, across), (r, s) = stride, weight.shape[2:]
    framed = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    h, w = framed.shape[2] - r + 1, framed.shape[3] - s + 1
    y = sum(
        framed[:, :, i : i + h : down, j : j + w : across] * weight[:, 0, i, j, None, None]
        for i, j in product(range(r), range(s))
    )
    assert isinstance(y, Tensor)
    return y if bias is None else y + bias[:, None, None]


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    pdl: bool = False,  # noqa: ARG001 - a choice of scheduling, not of meaning
) -> Tensor:
    y = convolve(x, weight, None if bias is None else bias.to(x.dtype), stride, padding)
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
    pdl: bool = False,  # noqa: ARG001
) -> Cost:
    """The FLOPs of the products, as for a plain convolution: the epilogue rides on them."""
    conv = conv_forward(problem_of(x, weight, stride, padding, (1, 1), x.shape[1]), x.dtype)
    epilogue = sum(t.nbytes for t in (bias, residual) if t is not None and t is not x)
    return replace(conv, read_bytes=conv.read_bytes + epilogue, pipe="cuda_fp32")


@triton.jit
def depthwise_conv2d_act_kernel(  # noqa: ANN201
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    pixels,  # N * HO * WO
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    X_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share their pixels, and with them the DRAM sectors that a block of channels only half uses.
    channel_tiles: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0)
    m = tile // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        # some tensor has 2^31 elements or more, and every offset below is a multiple of m
        m = (tile // channel_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tile % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_m = m < pixels
    valid_c = c < C
    valid_y = valid_m[:, None] & valid_c[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    KEEP_TAPS: tl.constexpr = PDL and R * S <= _MOST_TAPS_KEPT
    taps = ()
    if PDL:
        # All that the predecessor does not write is loaded before the wait. With no wait, holding it costs registers.
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + c, mask=valid_c, other=0.0)
        if KEEP_TAPS:
            for tap in tl.static_range(R * S):
                kept = tl.load(weight_ptr + tap * C + c, mask=valid_c, other=0.0)
                taps = taps + (kept,)  # noqa: RUF005 - Triton cannot unpack
    wait_holding_dependent(PDL)

    image = m // (HO * WO)
    h = m // WO % HO * STRIDE_H - PAD_H
    w = m % WO * STRIDE_W - PAD_W
    # the tap (0, 0) of each pixel; before the tensor's start where padded, and then never read
    x_tap = x_ptr + ((image * H + h) * W + w)[:, None] * X_PITCH + c[None, :]
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            inside = valid_m & (h + r >= 0) & (h + r < H) & (w + s >= 0) & (w + s < W)
            x = tl.load(x_tap + (r * W + s) * X_PITCH, mask=inside[:, None] & valid_c[None, :], other=0.0)
            if KEEP_TAPS:
                weight = taps[r * S + s]
            else:
                weight = tl.load(weight_ptr + (r * S + s) * C + c, mask=valid_c, other=0.0)
            acc += x.to(tl.float32) * weight.to(tl.float32)[None, :]

    if bias_ptr is not None:
        if not PDL:
            bias = tl.load(bias_ptr + c, mask=valid_c, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    acc = activate(acc, ACT)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + c[None, :], mask=valid_y, other=0.0).to(tl.float32)
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * Y_PITCH + c[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)


@dataclass(frozen=True)
class Problem(ConvCall):
    """One call of this op, checked."""

    name = "depthwise_conv2d_act"

    def check_weight(self) -> None:
        channels, weight = self.x.shape[1], self.weight
        if weight.shape[:2] != (channels, 1) or 0 in weight.shape:
            self.refuse(f"weight must be [{channels}, 1, R, S] like the channels of x, got {tuple(weight.shape)}")
        if not is_packed(weight):
            self.refuse(
                f"weight must be stored as [R, S, C], got strides {weight.stride()}: use depthwise_conv2d_act.pack"
            )


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_c channels."""

    block_m: int
    block_c: int
    num_warps: int

    def is_valid(self, problem: Problem, target: Target) -> bool:  # noqa: ARG002 - the contract's signature
        """Whether blocks are powers of two and a thread keeps its accumulators, filter and pointers in registers."""
        return (
            all(block >= 1 and block & (block - 1) == 0 for block in (self.block_m, self.block_c))
            and self.num_warps in (1, 2, 4, 8)
            and self.block_m * self.block_c <= _MAX_ELEMENTS * 32 * self.num_warps
            # a filter row with as many channels as threads is loaded one by one and dealt out through shared memory
            and self.block_c <= min(16 * self.num_warps, next_power_of_2(problem.x.shape[1]))
        )


def default_config(problem: Problem, target: Target) -> Config:
    """The largest tile that still gives every multiprocessor one, or the smallest if none does."""
    widths = [(elements, min(_block_c(problem), 16 * warps), warps) for elements, warps in _TILES]
    tiles = [Config(elements // block_c, block_c, warps) for elements, block_c, warps in widths]
    return next((tile for tile in tiles if _programs(problem, tile) >= target.sm_count), tiles[-1])


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config with 4 to 16 elements a thread, those nearest to it first."""
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    default = default_config(problem, target)
    widths = {default.block_c, max(8, default.block_c // 2), next_power_of_2(problem.x.shape[1])}
    tried = (Config(m, c, warps) for c in sorted(widths) for m in (4, 8, 16, 32, 64, 128) for warps in (1, 2, 4, 8))
    worth = (t for t in tried if 4 <= t.block_m * t.block_c // (32 * t.num_warps) <= 16)
    return nearest_first(default, (t for t in worth if t.is_valid(problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"depthwise_conv2d_act: {config} is not valid for {problem.conv} on {target.arch}")
    y = problem.output()
    return Launch(
        kernel=depthwise_conv2d_act_kernel,
        grid=(_programs(problem, config),),
        arguments=problem.arguments(y),
        constants={**problem.constants(y), "BLOCK_M": config.block_m, "BLOCK_C": config.block_c},
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
        pdl=problem.pdl,
    )


def depthwise_conv2d_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    pdl: bool = False,
) -> Tensor:
    choices = {"stride": stride, "padding": padding, "act": act, "pdl": pdl}
    return execute("depthwise_conv2d_act", plan(x=x, weight=weight, bias=bias, residual=residual, **choices), x)


# (elements, warps) of a tile: two vectors of 8 a thread where there is work for it, one where there is not.
_TILES = ((4096, 8), (2048, 4), (1024, 4), (512, 2), (256, 1))


def _programs(problem: Problem, config: Config) -> int:
    return cdiv(problem.pixels, config.block_m) * cdiv(problem.x.shape[1], config.block_c)


def _block_c(problem: Problem) -> int:
    """The widest power of two up to 64 that divides C and keeps loads 16 bytes wide; without one, C rounded up."""
    channels, vector = problem.x.shape[1], _VECTOR_BYTES // problem.x.element_size()
    divisor = channels & -channels
    return min(divisor, 64) if divisor >= vector else min(next_power_of_2(channels), 64)


def _sample(why: str, x: tuple[int, int, int, int], filter_size: tuple[int, int] = (3, 3), **choices: Any) -> Sample:
    """ "Same" padding; `stride` is one number; `residual=True` adds one, `bias=False` drops it."""
    real_size = choices.pop("real_size", False)
    with_bias, with_residual = choices.pop("bias", True), choices.pop("residual", False)
    (r, s), stride = filter_size, (choices.pop("stride", 1),) * 2
    padding = (r // 2, s // 2)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        out = ConvProblem(x[0], x[1], x[1], x[2:], filter_size, stride, padding, groups=x[1])
        # variance 1 in the output, as in a trained network
        filters = pack(random_nhwc((x[1], 1, r, s), dtype, device, seed=1) * (r * s) ** -0.5)
        return {
            "x": random_nhwc(x, dtype, device, seed=0),
            "weight": filters,
            "bias": random_nhwc((1, x[1], 1, 1), torch.float32, device, seed=2).flatten() if with_bias else None,
            "residual": random_nhwc((x[0], x[1], out.oh, out.ow), dtype, device, seed=3) if with_residual else None,
            "stride": stride,
            "padding": padding,
            **choices,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("3x3, 16 channels", (1, 16, 7, 6)),
    _sample("two images, residual, no activation", (2, 24, 5, 5), residual=True, act="none"),
    _sample("stride 2, odd map", (1, 32, 9, 7), stride=2),
    _sample("odd channels, 5x5, no bias", (1, 7, 6, 9), (5, 5), bias=False),
    _sample("7x7 on a smaller map: every pixel sees padding", (1, 8, 4, 5), (7, 7)),
    _sample("filters that are not square", (1, 8, 6, 8), (1, 5)),
    _sample("1x1 map: every stride of size 1 is arbitrary", (3, 16, 1, 1)),
    _sample("YOLO26n 80x80x80", (1, 80, 80, 80), real_size=True),
    _sample("YOLO26n 80x80x64", (1, 64, 80, 80), real_size=True),
    _sample("YOLO26n 40x40x128", (1, 128, 40, 40), real_size=True),
    _sample("YOLO26n 20x20x256", (1, 256, 20, 20), real_size=True),
    _sample("YOLO26n 20x20x80", (1, 80, 20, 20), real_size=True),
)

OP = define(
    depthwise_conv2d_act,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
)
