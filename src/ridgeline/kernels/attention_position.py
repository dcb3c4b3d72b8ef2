"""y = softmax(qᵀk / sqrt(key channels)) applied to v, plus depthwise conv3x3(v) + bias; NHWC, one kernel.

qkv        [N, heads (2 D + E), H, W]  channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16;
                                       per head D query, D key and E value channels, in that order
weight     [heads E, 1, 3, 3]          stored in the order [3, 3, C] (depthwise_conv2d_act.pack); dtype of qkv
bias       [heads E]                   fp32 or the dtype of qkv; None: no bias
heads, key_channels                    heads and D; D and E are multiples of 16
precision  products of fp32 operands: "tf32" (tensor cores, 10 mantissa bits, rounded to nearest) or "ieee"; no effect
           on fp16 and bf16
pdl        programmatic dependent launch: the filter is read while the predecessor still runs; sm_90 and later
y          [N, heads E, H, W]          channels_last, dtype of qkv

Scores, softmax, sums and the convolution are fp32; the softmax's numerators are rounded to the dtype of qkv for their
product with v; y is rounded once. An empty batch gives an empty y. Raises ValueError or TypeError for any other
layout, dtype or choice.

One program takes a block of queries of one head and walks over the keys with the online softmax (Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022), so that no score leaves the chip. The convolution of v, YOLO26's
position encoding, needs only v's pixels around the queries, which the same program finds in the L1 or L2 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.attention import AttentionProblem
from ridgeline.cost.conv import ConvProblem, conv_pipe
from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._nhwc import (
    cdiv,
    check_map,
    empty_nhwc,
    let_dependent_in,
    next_power_of_2,
    pixel_pitch,
    random_nhwc,
    round_operand,
    share_elements,
    tf32_rounding,
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
from ridgeline.kernels.depthwise_conv2d_act import convolve, is_packed, pack

PRECISIONS = ("tf32", "ieee")
_MAX_ACCUMULATORS = 80  # fp32 a thread: scores, mixed values and their convolution; 128 spill on sm_90


def reference(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    heads: int,
    key_channels: int,
    precision: str = "tf32",  # noqa: ARG001 - a choice of arithmetic, not of meaning
    pdl: bool = False,  # noqa: ARG001 - nor is the schedule
) -> Tensor:
    n, channels, h, w = qkv.shape
    value_channels = channels // heads - 2 * key_channels
    per_head = qkv.reshape(n, heads, channels // heads, h * w)
    q, k, v = per_head.split([key_channels, key_channels, value_channels], dim=2)
    attention = (q.transpose(-2, -1) @ k * key_channels**-0.5).softmax(dim=-1)
    mixed = (v @ attention.transpose(-2, -1)).reshape(n, heads * value_channels, h, w)
    values = v.reshape(n, heads * value_channels, h, w)
    position = convolve(values, weight, None if bias is None else bias.to(qkv.dtype), (1, 1), (1, 1))
    return mixed + position


def cost(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    heads: int,
    key_channels: int,
    precision: str = "tf32",
    pdl: bool = False,  # noqa: ARG001
) -> Cost:
    """The FLOPs of the two matrix products and of the convolution: the softmax rides on them."""
    n, _, h, w = qkv.shape
    channels, tokens = weight.shape[0], h * w
    attention = AttentionProblem(n, heads, tokens, tokens, key_channels, channels // heads)
    position = ConvProblem(n, channels, channels, (h, w), (3, 3), padding=1, groups=channels)
    # any dense convolution of this dtype names the unit that multiplies its matrices
    pipe = conv_pipe(ConvProblem(1, 16, 16, (1, 1), (1, 1)), qkv.dtype)
    return Cost(
        attention.forward_flops + 2 * position.macs,
        qkv.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes),
        n * channels * tokens * qkv.element_size(),
        "cuda_fp32" if qkv.dtype == torch.float32 and precision == "ieee" else pipe,
    )


@triton.jit
def attention_position_kernel(  # noqa: ANN201
    qkv_ptr, weight_ptr, bias_ptr, y_ptr,
    H: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    QKV_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, PRECISION: tl.constexpr, ROUNDING: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = H * W
    blocks: tl.constexpr = (TOKENS + BLOCK_Q - 1) // BLOCK_Q
    program = tl.program_id(0)
    query = program % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = program // blocks % HEADS
    first_pixel = program // (blocks * HEADS) * TOKENS
    if WIDE:
        # some tensor has 2^31 elements or more; within one image offsets fit 32 bits
        first_pixel = (program // (blocks * HEADS)).to(tl.int64) * TOKENS
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    valid_q = query < TOKENS
    valid_d = d < D
    valid_e = e < E

    taps = ()
    if PDL:
        # All that the predecessor does not write is loaded before the wait. With no wait, holding it costs registers.
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + head * E + e, mask=valid_e, other=0.0)
        for tap in tl.static_range(9):
            kept = tl.load(weight_ptr + tap * (HEADS * E) + head * E + e, mask=valid_e, other=0.0)
            taps = taps + (kept,)  # noqa: RUF005 - Triton cannot unpack
    wait_holding_dependent(PDL)

    q_ptr = qkv_ptr + first_pixel * QKV_PITCH + head * (2 * D + E)
    k_ptr = q_ptr + D
    v_ptr = k_ptr + D
    q = tl.load(q_ptr + query[:, None] * QKV_PITCH + d[None, :], mask=valid_q[:, None] & valid_d[None, :], other=0.0)
    q = round_operand(q, ROUNDING)
    position = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    for r in tl.static_range(3):
        for s in tl.static_range(3):
            row = query // W + (r - 1)
            column = query % W + (s - 1)
            inside = valid_q & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            near_ptr = v_ptr + (query + ((r - 1) * W + s - 1))[:, None] * QKV_PITCH + e[None, :]
            near = tl.load(near_ptr, mask=inside[:, None] & valid_e[None, :], other=0.0)
            if PDL:
                weight = taps[r * 3 + s]
            else:
                weight = tl.load(weight_ptr + (r * 3 + s) * (HEADS * E) + head * E + e, mask=valid_e, other=0.0)
            position += near.to(tl.float32) * weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        if not PDL:
            bias = tl.load(bias_ptr + head * E + e, mask=valid_e, other=0.0)
        position += bias.to(tl.float32)[None, :]

    # scores are kept in units of log2(e), because the hardware's exponential is 2^x
    SCALE: tl.constexpr = 1.4426950408889634 / D**0.5
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    for start in range(0, TOKENS, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        valid_k = key < TOKENS
        k = tl.load(k_ptr + key[None, :] * QKV_PITCH + d[:, None], mask=valid_k[None, :] & valid_d[:, None], other=0.0)
        scores = tl.dot(q, round_operand(k, ROUNDING), input_precision=PRECISION) * SCALE
        scores = tl.where(valid_k[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # the first block has a valid key, so new_largest is finite and the first rescale is 2^-inf = 0
        rescale = tl.exp2(largest - new_largest)
        p = tl.exp2(scores - new_largest[:, None])
        total = total * rescale + tl.sum(p, 1)
        v = tl.load(v_ptr + key[:, None] * QKV_PITCH + e[None, :], mask=valid_k[:, None] & valid_e[None, :], other=0.0)
        p, v = round_operand(p.to(v.dtype), ROUNDING), round_operand(v, ROUNDING)
        mixed = tl.dot(p, v, mixed * rescale[:, None], input_precision=PRECISION)
        largest = new_largest

    y = mixed / total[:, None] + position
    y_tile = y_ptr + (first_pixel + query)[:, None] * Y_PITCH + head * E + e[None, :]
    let_dependent_in(PDL)
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=valid_q[:, None] & valid_e[None, :])


@dataclass(frozen=True)
class Problem:
    """One call, checked. `out` is where y goes, channels_last or a channel slice of it; None: not allocated yet."""

    qkv: Tensor
    weight: Tensor
    bias: Tensor | None = None
    heads: int = 1
    key_channels: int = 16
    precision: str = "tf32"
    pdl: bool = False
    out: Tensor | None = None

    def __post_init__(self) -> None:
        qkv, weight, bias = self.qkv, self.weight, self.bias
        if qkv.dim() != 4 or weight.dim() != 4 or 0 in qkv.shape[1:]:
            _refuse(f"qkv and weight must have 4 axes and a pixel, got {tuple(qkv.shape)} and {tuple(weight.shape)}")
        if qkv.dtype not in FLOATS or weight.dtype != qkv.dtype:
            _refuse(f"qkv and weight must share one of fp32, fp16, bf16, got {qkv.dtype} and {weight.dtype}", TypeError)
        if self.precision not in PRECISIONS:
            _refuse(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.heads < 1 or qkv.shape[1] % self.heads:
            _refuse(f"heads must divide the {qkv.shape[1]} channels of qkv, got {self.heads}")
        if min(self.key_channels, self.value_channels) < 16 or self.key_channels % 16 or self.value_channels % 16:
            _refuse(
                f"key and value channels of a head must be multiples of 16, got {self.key_channels} and "
                f"{self.value_channels} of {qkv.shape[1] // self.heads} in all"
            )
        channels = self.out_shape[1]
        if tuple(weight.shape) != (channels, 1, 3, 3):
            _refuse(f"weight must be [{channels}, 1, 3, 3] like the value channels, got {tuple(weight.shape)}")
        if not is_packed(weight):
            _refuse(f"weight must be stored as [3, 3, C], got strides {weight.stride()}: use depthwise_conv2d_act.pack")
        if bias is not None and not (
            tuple(bias.shape) == (channels,) and bias.is_contiguous() and bias.dtype in (torch.float32, qkv.dtype)
        ):
            _refuse(
                f"bias must be contiguous, of shape ({channels},) and float32 or {qkv.dtype}, "
                f"got {tuple(bias.shape)}, strides {bias.stride()}, {bias.dtype}"
            )
        check_map("attention_position", "qkv", qkv, like=qkv, shape=tuple(qkv.shape))
        if self.out is not None:
            check_map("attention_position", "out", self.out, like=qkv, shape=self.out_shape)
            if share_elements(self.out, qkv):
                _refuse("out must not share memory with qkv: other programs still read what would be written")
        for name, tensor in (("weight", weight), ("bias", bias), ("out", self.out)):
            if tensor is not None and tensor.device != qkv.device:
                _refuse(f"{name} must be on {qkv.device} like qkv, got {tensor.device}")

    @property
    def value_channels(self) -> int:
        return self.qkv.shape[1] // self.heads - 2 * self.key_channels

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        n, _, h, w = self.qkv.shape
        return n, self.heads * self.value_channels, h, w

    @property
    def tokens(self) -> int:
        return self.qkv.shape[2] * self.qkv.shape[3]

    def programs(self, block_q: int) -> int:
        return self.qkv.shape[0] * self.heads * cdiv(self.tokens, block_q)


@dataclass(frozen=True)
class Config:
    """One program takes block_q queries and block_k keys a step."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def is_valid(self, problem: Problem, target: Target) -> bool:
        """Whether it compiles, fits the target's shared memory and keeps its accumulators in registers."""
        d, e = map(next_power_of_2, (problem.key_channels, problem.value_channels))
        # the keys and values of every stage, and the numerators on their way from one product to the next
        shared = self.num_stages * self.block_k * (d + e) + self.block_q * max(self.block_k, e)
        return (
            all(block >= 16 and block & (block - 1) == 0 for block in (self.block_q, self.block_k))
            and self.num_warps in (1, 2, 4, 8)
            and self.num_stages >= 1
            and self.block_q * (self.block_k + 2 * e) <= _MAX_ACCUMULATORS * 32 * self.num_warps
            and shared * problem.qkv.element_size() <= target.shared_bytes
        )


def default_config(problem: Problem, target: Target) -> Config:
    """16 queries, or 32 where that still gives every multiprocessor a program; a step of 256 bytes of each key channel.

    Larger tiles share their keys among more queries, but spill: the convolution's operands wait beside the scores.
    """
    fits = problem.qkv.element_size() == 2
    block_q = 32 if fits and problem.programs(32) >= target.sm_count else 16
    block_k = min(256 // problem.qkv.element_size(), max(16, next_power_of_2(problem.tokens)))
    blocks = (block_k, 64, 32, 16)
    tried = (Config(block_q, min(k, block_k), 4, stages) for k in blocks for stages in (3, 2, 1))
    return next(config for config in tried if config.is_valid(problem, target))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing, those nearest to it first."""
    problem = Problem(**arguments)
    target = target or target_of(problem.qkv)
    default = default_config(problem, target)
    tried = (Config(q, k, w, s) for q, k, w, s in product((16, 32, 64), (64, 128, 256, 512), (4, 8, 2), (3, 2, 1)))
    return nearest_first(default, (c for c in tried if c.is_valid(problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.qkv)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(
            f"attention_position: {config} is not valid for qkv {tuple(problem.qkv.shape)} on {target.arch}"
        )
    y = empty_nhwc(problem.out_shape, like=problem.qkv) if problem.out is None else problem.out
    qkv_pitch, y_pitch = pixel_pitch(problem.qkv) or 0, pixel_pitch(y) or 0
    n, _, h, w = problem.qkv.shape
    return Launch(
        kernel=attention_position_kernel,
        grid=(problem.programs(config.block_q),),
        arguments={"qkv_ptr": problem.qkv, "weight_ptr": problem.weight, "bias_ptr": problem.bias, "y_ptr": y},
        constants={
            "H": h, "W": w, "HEADS": problem.heads, "D": problem.key_channels, "E": problem.value_channels,
            "QKV_PITCH": qkv_pitch, "Y_PITCH": y_pitch, "PRECISION": problem.precision,
            "ROUNDING": tf32_rounding(problem.qkv, problem.precision, target),
            "WIDE": n * h * w * max(qkv_pitch, y_pitch) >= INT32_ELEMENTS, "PDL": problem.pdl,
            "BLOCK_Q": config.block_q, "BLOCK_K": config.block_k,
            "BLOCK_D": next_power_of_2(problem.key_channels),
            "BLOCK_E": next_power_of_2(problem.value_channels),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=problem.pdl,
        output=y,
    )  # fmt: skip


def attention_position(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    heads: int,
    key_channels: int,
    precision: str = "tf32",
    pdl: bool = False,
) -> Tensor:
    choices = {"heads": heads, "key_channels": key_channels, "precision": precision, "pdl": pdl}
    return execute("attention_position", plan(qkv=qkv, weight=weight, bias=bias, **choices), qkv)


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"attention_position: {text}")


def _sample(why: str, n: int, heads: int, d: int, e: int, size: tuple[int, int], **choices: Any) -> Sample:
    real_size, with_bias = choices.pop("real_size", False), choices.pop("bias", True)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        return {
            "qkv": random_nhwc((n, heads * (2 * d + e), *size), dtype, device, seed=0),
            # the taps sum to variance 1, as large as v
            "weight": pack(random_nhwc((heads * e, 1, 3, 3), dtype, device, seed=1) / math.sqrt(9)),
            "bias": random_nhwc((1, heads * e, 1, 1), torch.float32, device, seed=2).flatten() if with_bias else None,
            "heads": heads,
            "key_channels": d,
            **choices,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("two heads as in YOLO26, tokens no multiple of a block", 1, 2, 32, 64, (3, 6)),
    _sample("more tokens than a step takes, no bias", 1, 1, 16, 32, (6, 11), bias=False),
    _sample("channels of a head no powers of two", 1, 2, 48, 16, (3, 6)),
    _sample("one token", 3, 1, 16, 16, (1, 1)),
    _sample("strict fp32 products", 1, 1, 16, 16, (4, 4), precision="ieee"),
    _sample("YOLO26n 20x20, 2 heads", 1, 2, 32, 64, (20, 20), real_size=True),
    _sample("YOLO26x 20x20, 6 heads", 1, 6, 32, 64, (20, 20), real_size=True),
    _sample("YOLO26n at 1280: 40x40, 2 heads", 1, 2, 32, 64, (40, 40), real_size=True),
)

OP = define(
    attention_position,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
)
