"""y = act(conv2d(x, weight) + bias) + residual, NHWC, one kernel: implicit GEMM with a fused epilogue.

x         [N, C, H, W]    channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16
weight    [K, C, R, S]    channels_last, that is [K, R, S, C] packed; dtype of x; groups = 1, dilation = 1
bias      [K]             fp32 or the dtype of x; None: no bias
residual  [N, K, HO, WO]  as x; added after the activation; may be x itself
y         [N, K, HO, WO]  channels_last, dtype of x
act       "silu" or "none"
precision products of fp32 operands: "tf32" (tensor cores, 10 mantissa bits) or "ieee"; no effect on fp16 and bf16

Accumulates in fp32; bias, activation and residual are applied in fp32 and rounded once. An empty batch gives an
empty y. Raises ValueError or TypeError for any other layout, dtype or choice.

The GEMM is [N HO WO, R S C] x [R S C, K]. Rows of the left matrix are never written out: each is gathered by its pixel,
tap by tap (the method of implicit GEMM in cuDNN, Chetlur et al. 2014, with NHWC so that a tap's channels are adjacent).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_forward, problem_of
from ridgeline.kernels._nhwc import (
    ACTIVATIONS,
    activate,
    check_map,
    conv_sample,
    empty_nhwc,
    partly_shared,
    pixel_pitch,
    share_elements,
    split_pixel,
)
from ridgeline.kernels._op import Launch, Launcher, Target, check_launchable, define, target_of

PRECISIONS = ("tf32", "ieee")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INT32_ELEMENTS = 2**31
_MAX_ACCUMULATORS = (
    64  # fp32 a thread; at 128 the gather's pointers no longer fit beside them, measured by spills on sm_90
)


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
) -> Cost:
    """The FLOPs of the matrix product, as for a plain convolution: the epilogue rides on it."""
    conv = conv_forward(problem_of(x, weight, stride, padding, (1, 1), 1), x.dtype)
    epilogue = sum(t.nbytes for t in (bias, residual) if t is not None and t is not x)
    pipe = "cuda_fp32" if x.dtype == torch.float32 and precision == "ieee" else conv.pipe
    return replace(conv, read_bytes=conv.read_bytes + epilogue, pipe=pipe)


@triton.jit
def conv2d_act_kernel(  # noqa: ANN201
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    pixels,  # N * HO * WO
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    X_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share their pixels: x comes from DRAM once, and from L2 for each further block of channels.
    channel_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    m = tile // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        # some tensor has 2^31 elements or more, and every offset below is a multiple of m
        m = (tile // channel_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % channel_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m = m < pixels
    valid_n = n < K

    image, row, column = split_pixel(m, HO, WO)  # pyright: ignore[reportGeneralTypeIssues]
    h = row * STRIDE_H - PAD_H
    w = column * STRIDE_W - PAD_W
    # the tap (0, 0) of each pixel; before the tensor's start where padded, and then never read
    x_tap = x_ptr + ((image * H + h) * W + w) * X_PITCH
    weight_row = weight_ptr + n * (R * S * C)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, (R * S * C + BLOCK_K - 1) // BLOCK_K):
        # weight is packed in the order of the reduction, so its offset needs no taps
        reduction = step * BLOCK_K + k
        if C % BLOCK_K == 0:
            # one tap a step: r and s are scalars, and only a pixel can fall outside
            tap = step // (C // BLOCK_K)
            r = tap // S
            s = tap % S
            offset = (r * W + s) * X_PITCH + (step % (C // BLOCK_K)) * BLOCK_K + k
            valid_x = valid_m[:, None]
            valid_w = valid_n[None, :]
            if PAD_H > 0 or PAD_W > 0:
                valid_x = valid_x & ((h + r >= 0) & (h + r < H) & (w + s >= 0) & (w + s < W))[:, None]
        else:
            # several taps a step: fewer idle lanes than padding every tap to BLOCK_K
            tap = reduction // C
            r = tap // S
            s = tap % S
            offset = (r * W + s) * X_PITCH + reduction % C
            valid_k = reduction < R * S * C
            valid_x = valid_m[:, None] & valid_k[None, :]
            valid_w = valid_n[None, :] & valid_k[:, None]
            if PAD_H > 0 or PAD_W > 0:
                h_tap = h[:, None] + r[None, :]
                w_tap = w[:, None] + s[None, :]
                valid_x = valid_x & (h_tap >= 0) & (h_tap < H) & (w_tap >= 0) & (w_tap < W)
        a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
        b_kn = tl.load(weight_row[None, :] + reduction[:, None], mask=valid_w, other=0.0)
        acc = tl.dot(a_mk, b_kn, acc, input_precision=PRECISION)

    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACT)
    valid_y = valid_m[:, None] & valid_n[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n[None, :], mask=valid_y, other=0.0).to(tl.float32)
    tl.store(y_ptr + m[:, None] * Y_PITCH + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)


@dataclass(frozen=True)
class Problem:
    """One call, checked. `out` is where y goes, channels_last or a channel slice of it; None: not allocated yet."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    act: str = "silu"
    precision: str = "tf32"
    out: Tensor | None = None

    def __post_init__(self) -> None:
        x, weight, bias = self.x, self.weight, self.bias
        if x.dim() != 4 or weight.dim() != 4:
            _refuse(f"x and weight must have 4 axes, got shapes {tuple(x.shape)} and {tuple(weight.shape)}")
        if x.dtype not in FLOATS or weight.dtype != x.dtype:
            _refuse(f"x and weight must share one of fp32, fp16, bf16, got {x.dtype} and {weight.dtype}", TypeError)
        if weight.shape[1] != x.shape[1] or 0 in weight.shape:
            _refuse(f"groups must be 1: weight {tuple(weight.shape)} must have the {x.shape[1]} channels of x")
        if self.act not in ACTIVATIONS:
            _refuse(f"act must be one of {', '.join(ACTIVATIONS)}, got {self.act!r}")
        if self.precision not in PRECISIONS:
            _refuse(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if len(self.stride) != 2 or min(self.stride) < 1:
            _refuse(f"stride must be two numbers of at least 1, got {tuple(self.stride)}")
        if len(self.padding) != 2 or min(self.padding) < 0:
            _refuse(f"padding must be two numbers of at least 0, got {tuple(self.padding)}")
        if not weight.is_contiguous(memory_format=torch.channels_last) or weight.numel() >= _INT32_ELEMENTS:
            _refuse(
                f"weight must be channels_last with less than 2^31 elements, got strides {weight.stride()} "
                f"for shape {tuple(weight.shape)}: use .contiguous(memory_format=torch.channels_last)"
            )
        if bias is not None and not (
            bias.shape == weight.shape[:1] and bias.is_contiguous() and bias.dtype in (torch.float32, x.dtype)
        ):
            _refuse(
                f"bias must be contiguous, of shape ({weight.shape[0]},) and float32 or {x.dtype}, "
                f"got {tuple(bias.shape)}, strides {bias.stride()}, {bias.dtype}"
            )
        check_map("conv2d_act", "x", x, like=x, shape=tuple(x.shape))
        for name, tensor in (("residual", self.residual), ("out", self.out)):
            if tensor is not None:
                check_map("conv2d_act", name, tensor, like=x, shape=self.out_shape)
        if self.out is not None and share_elements(self.out, x):
            _refuse("out must not share memory with x: other programs still read what would be written")
        if self.out is not None and self.residual is not None and partly_shared(self.out, self.residual):
            _refuse("out must be the residual itself or share no memory with it, got shifted channels of one buffer")
        for name, tensor in (("weight", weight), ("bias", bias), ("residual", self.residual), ("out", self.out)):
            if tensor is not None and tensor.device != x.device:
                _refuse(f"{name} must be on {x.device} like x, got {tensor.device}")

    @property
    def conv(self) -> ConvProblem:
        return problem_of(self.x, self.weight, self.stride, self.padding, (1, 1), 1)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        conv = self.conv
        return conv.n, conv.k, conv.oh, conv.ow

    @property
    def on_cuda_cores(self) -> bool:
        """No tensor core multiplies fp32 without rounding it first."""
        return self.x.dtype == torch.float32 and self.precision == "ieee"

    @property
    def pixels(self) -> int:
        """Rows of the GEMM."""
        conv = self.conv
        return conv.n * conv.oh * conv.ow


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_n output channels, block_k of the reduction a step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def is_valid(self, problem: Problem, target: Target) -> bool:
        """Whether it compiles, fits the target's shared memory and keeps its accumulators in registers."""
        blocks = (self.block_m, self.block_n, self.block_k)
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * problem.x.element_size()
        return (
            all(block >= 16 and block & (block - 1) == 0 for block in blocks)
            and self.num_warps in (1, 2, 4, 8)
            and self.num_stages >= 1
            and self.block_m * self.block_n <= _MAX_ACCUMULATORS * 32 * self.num_warps
            and operands <= target.shared_bytes
        )


def default_config(problem: Problem, target: Target) -> Config:
    """The largest tile that still gives every multiprocessor one, or the smallest if none does."""
    conv = problem.conv
    shapes = [(m, n) for m, n in _TILES if n <= _widest(conv) and not (problem.on_cuda_cores and m * n > 64 * 64)]
    filling = (s for s in shapes if _tiles(problem, *s) >= target.sm_count)
    block_m, block_n = next(filling, shapes[-1])
    block_k = _block_k(problem)
    # a second stage hides the first load of a short reduction; more than its steps would only take shared memory
    deepest = min(4, max(2, -(-conv.c * conv.taps // block_k)))
    stages = range(deepest, 0, -1)
    configs = (Config(block_m, block_n, block_k, 8 if block_m * block_n > 64 * 128 else 4, s) for s in stages)
    return next(config for config in configs if config.is_valid(problem, target))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing, the likeliest first."""
    problem = Problem(**arguments)
    conv, target = problem.conv, target or target_of(problem.x)
    default = default_config(problem, target)
    widest, block_k = _widest(conv), default.block_k
    tiles = [(m, n) for m, n in product((32, 64, 128), (16, 32, 64, 128)) if min(32, widest) <= n <= widest]
    # nearest to one tile a multiprocessor first: fewer leave some idle, more and smaller ones reload the same operands
    tiles.sort(key=lambda mn: abs(math.log2(max(_tiles(problem, *mn), 1) / target.sm_count)))
    variants = ((block_k, 4, 4), (block_k, 8, 4), (2 * block_k, 4, 3), (block_k, 4, 2), (block_k // 2, 4, 5))
    ranked = sorted(product(enumerate(tiles), enumerate(variants)), key=lambda pair: pair[0][0] + pair[1][0])
    tried = [Config(m, n, k, num_warps, num_stages) for (_, (m, n)), (_, (k, num_warps, num_stages)) in ranked]
    return (default, *(c for c in tried if c != default and c.is_valid(problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    conv, target = problem.conv, target or target_of(problem.x)
    config = config or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"conv2d_act: {config} is not valid for {conv} on {target.arch}")
    y = empty_nhwc(problem.out_shape, like=problem.x) if problem.out is None else problem.out
    maps = {"x": problem.x, "residual": problem.residual, "y": y}
    pitches = {name: 0 if t is None else pixel_pitch(t) or 0 for name, t in maps.items()}
    extents = [t.shape[0] * t.shape[2] * t.shape[3] * pitches[name] for name, t in maps.items() if t is not None]
    constants = {
        "C": conv.c, "H": conv.image[0], "W": conv.image[1], "K": conv.k, "R": conv.filter[0], "S": conv.filter[1],
        "HO": conv.oh, "WO": conv.ow, "STRIDE_H": problem.stride[0], "STRIDE_W": problem.stride[1],
        "PAD_H": problem.padding[0], "PAD_W": problem.padding[1],
        "X_PITCH": pitches["x"], "RESIDUAL_PITCH": pitches["residual"], "Y_PITCH": pitches["y"],
        "ACT": problem.act, "PRECISION": problem.precision, "WIDE": max(extents) >= _INT32_ELEMENTS,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
    }  # fmt: skip
    return Launch(
        kernel=conv2d_act_kernel,
        grid=(_tiles(problem, config.block_m, config.block_n),),
        arguments={
            "x_ptr": problem.x,
            "weight_ptr": problem.weight,
            "bias_ptr": problem.bias,
            "residual_ptr": problem.residual,
            "y_ptr": y,
            "pixels": problem.pixels,
        },
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=y,
    )


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
) -> Tensor:
    choices = {"stride": stride, "padding": padding, "act": act, "precision": precision}
    launch = plan(x=x, weight=weight, bias=bias, residual=residual, **choices)
    if launch.output.numel():
        check_launchable("conv2d_act", conv2d_act_kernel, x)
        launch.run()
    return launch.output


# 64 rows and 4 warps are the least that sm_90's wgmma takes; narrower tiles run on mma.sync.
_TILES = ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (32, 32), (64, 16), (32, 16))


def _tiles(problem: Problem, block_m: int, block_n: int) -> int:
    return -(-problem.pixels // block_m) * -(-problem.conv.k // block_n)


def _widest(conv: ConvProblem) -> int:
    """No block of output channels is wider than K needs."""
    return max(16, _next_power_of_2(conv.k))


def _block_k(problem: Problem) -> int:
    """128 bytes of channels, the width of a shared-memory row; half of it, or several taps, where C does not divide."""
    conv = problem.conv
    full = 128 // problem.x.element_size()
    if conv.c % full == 0:
        return full
    if conv.c % (full // 2) == 0:
        return full // 2
    return min(full, max(16, _next_power_of_2(conv.c * conv.taps)))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"conv2d_act: {text}")


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
    conv2d_act, reference=reference, cost=cost, launcher=Launcher(plan, candidates), samples=SAMPLES, dtypes=FLOATS
)
