"""y = act(conv1x1(concat[upsample2(coarse), fine]) + bias), NHWC: neither the upsampled map nor the concat is written.

coarse    [N, C1, H/2, W/2]  channels_last or a channel slice of it; fp32, fp16, bf16; C1 and C2 multiples of 16
fine      [N, C2, H, W]      as coarse, same dtype
weight    [K, C1 + C2, 1, 1] channels_last, dtype of coarse: its first C1 channels meet the upsampled map
bias      [K]                fp32 or the dtype of coarse; None: no bias
y         [N, K, H, W]       channels_last
act       "silu" or "none"
precision products of fp32 operands: "tf32" or "ieee"; no effect on fp16 and bf16. With "tf32" both maps are rounded
          to nearest; weight must be, see `_nhwc.round_to_tf32`: its low 13 bits are cut
pdl       programmatic dependent launch (sm_90 and later)

Nearest upsampling by 2 is an index rule, pixel (h, w) reads (h // 2, w // 2), and a concat is a second run of the
reduction. Accumulates in fp32, rounds once. Raises ValueError or TypeError for any other shape, layout or dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import conv2d_act
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._nhwc import (
    activate,
    awaited,
    check_map,
    empty_nhwc,
    let_dependent_in,
    pixel_pitch,
    prefetch_weights,
    random_nhwc,
    round_operand,
    share_elements,
    split_pixel,
    tf32_rounding,
    wait_holding_dependent,
)
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config
from ridgeline.kernels.conv2d_act import Config

NAME = "upsample_concat_conv_act"
CHANNEL_STEP = 16  # the shortest reduction of a tensor-core instruction: a block of it never spans both sources


def reference(
    coarse: Tensor,
    fine: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: str = "silu",
    precision: str = "tf32",
    pdl: bool = False,
) -> Tensor:
    joined = torch.cat([F.interpolate(coarse, scale_factor=2.0, mode="nearest"), fine], dim=1)
    choices = {"act": act, "precision": precision, "pdl": pdl}
    return conv2d_act.reference(joined, weight, bias, stride=(1, 1), padding=(0, 0), **choices)


def cost(
    coarse: Tensor,
    fine: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: str = "silu",
    precision: str = "tf32",
    pdl: bool = False,
) -> Cost:
    """That of the convolution, reading the coarse map itself in place of its upsampled copy."""
    joined = fine.new_empty((fine.shape[0], weight.shape[1], *fine.shape[2:]), device="meta")
    choices = {"act": act, "precision": precision, "pdl": pdl}
    conv = conv2d_act.cost(joined, weight, bias, stride=(1, 1), padding=(0, 0), **choices)
    return replace(conv, read_bytes=conv.read_bytes - joined.nbytes + coarse.nbytes + fine.nbytes)


@triton.jit
def upsample_concat_conv_act_kernel(  # noqa: ANN201
    coarse_ptr, fine_ptr, weight_ptr, bias_ptr, y_ptr,
    pixels,  # N * H * W
    C1: tl.constexpr, C2: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    COARSE_PITCH: tl.constexpr, FINE_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, ROUNDING: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    channel_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    m = tile // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % channel_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m = m < pixels
    valid_n = n < K
    image, row, column = split_pixel(m, H, W)  # pyright: ignore[reportGeneralTypeIssues]
    coarse_pixel = (image * (H // 2) + row // 2) * (W // 2) + column // 2
    weight_row = weight_ptr + n * (C1 + C2)
    if bias_ptr is not None:
        bias_n = tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    prefetch_weights(weight_ptr, (C1 + C2) * K, PDL)
    wait_holding_dependent(PDL)
    # C1 and C2 are multiples of BLOCK_K, so no step needs a mask along the reduction
    for step in range(0, C1 // BLOCK_K):
        c = step * BLOCK_K + k
        a_mk = tl.load(coarse_ptr + coarse_pixel[:, None] * COARSE_PITCH + c[None, :], mask=valid_m[:, None], other=0.0)
        b_kn = tl.load(weight_row[None, :] + c[:, None], mask=valid_n[None, :], other=0.0)
        acc = tl.dot(round_operand(a_mk, ROUNDING), b_kn, acc, input_precision=PRECISION)
        acc = awaited(acc, ROUNDING != "")
    for step in range(0, C2 // BLOCK_K):
        c = step * BLOCK_K + k
        a_mk = tl.load(fine_ptr + m[:, None] * FINE_PITCH + c[None, :], mask=valid_m[:, None], other=0.0)
        b_kn = tl.load(weight_row[None, :] + C1 + c[:, None], mask=valid_n[None, :], other=0.0)
        acc = tl.dot(round_operand(a_mk, ROUNDING), b_kn, acc, input_precision=PRECISION)
        acc = awaited(acc, ROUNDING != "")
    if bias_ptr is not None:
        acc += bias_n[None, :]
    acc = activate(acc, ACT)
    valid_y = valid_m[:, None] & valid_n[None, :]
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * Y_PITCH + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)


class _Joined(conv2d_act.Problem):
    """The plain convolution, refusing in this op's name."""

    name = NAME


@dataclass(frozen=True)
class Problem:
    """One call, checked: the convolution over `fine` alone does most of it."""

    coarse: Tensor
    fine: Tensor
    weight: Tensor
    bias: Tensor | None = None
    act: str = "silu"
    precision: str = "tf32"
    pdl: bool = False
    out: Tensor | None = None

    def __post_init__(self) -> None:
        coarse, fine, weight = self.coarse, self.fine, self.weight
        if coarse.dim() != 4 or fine.dim() != 4 or coarse.shape[2] * 2 != fine.shape[2]:
            _refuse(f"fine must be twice as large as coarse, got {tuple(fine.shape)} beside {tuple(coarse.shape)}")
        n, _, h, w = fine.shape
        check_map(NAME, "fine", fine, like=fine, shape=tuple(fine.shape))
        check_map(NAME, "coarse", coarse, like=fine, shape=(n, coarse.shape[1], h // 2, w // 2))
        if coarse.shape[1] % CHANNEL_STEP or fine.shape[1] % CHANNEL_STEP:
            _refuse(f"channels must be multiples of {CHANNEL_STEP}, got {coarse.shape[1]} and {fine.shape[1]}")
        if weight.dim() != 4 or weight.shape[1:] != (coarse.shape[1] + fine.shape[1], 1, 1):
            _refuse(
                f"weight must be [K, {coarse.shape[1] + fine.shape[1]}, 1, 1] like the joined channels, "
                f"got {tuple(weight.shape)}"
            )
        if self.out is not None and (share_elements(self.out, coarse) or share_elements(self.out, fine)):
            _refuse("out must not share memory with an input: other programs still read what would be written")
        for name, tensor in (("coarse", coarse), ("weight", weight), ("bias", self.bias), ("out", self.out)):
            if tensor is not None and tensor.device != fine.device:
                _refuse(f"{name} must be on {fine.device} like fine, got {tensor.device}")
        joined = self.joined  # refuses dtypes, weight layout, bias and choices that the plain convolution refuses
        if self.out is not None:
            check_map(NAME, "out", self.out, like=fine, shape=joined.out_shape)
        pitch = max(pixel_pitch(fine) or 0, joined.conv.k if self.out is None else pixel_pitch(self.out) or 0)
        if max(joined.pixels * pitch, coarse.shape[0] * (h // 2) * (w // 2) * (pixel_pitch(coarse) or 0)) >= 2**31:
            _refuse(f"maps must span less than 2^31 elements, got {tuple(fine.shape)} to {joined.conv.k} channels")

    @property
    def joined(self) -> conv2d_act.Problem:
        """The plain convolution of the concatenated map, on the meta device: same tiles, same checks, no memory."""
        n, _, h, w = self.fine.shape
        x = torch.empty((n, self.weight.shape[1], h, w), dtype=self.fine.dtype, device="meta")
        weight, bias = (
            None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for t in (self.weight, self.bias)
        )
        assert weight is not None
        x = x.contiguous(memory_format=torch.channels_last)
        return _Joined(x, weight, bias, act=self.act, precision=self.precision, pdl=self.pdl)

    @property
    def step(self) -> int:
        """The longest power-of-two block that divides both sources' channels."""
        both = self.coarse.shape[1] | self.fine.shape[1]
        return both & -both


def is_valid(config: Config, problem: Problem, target: Target) -> bool:
    """Whether blocks end where sources end, and the plain convolution's conditions hold; its loops are pipelined."""
    pipelined = config.num_stages > 1 and config.split_k == 1 and not config.boxed
    return pipelined and problem.step % config.block_k == 0 and config.is_valid(problem.joined, target)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """Those of the plain convolution, with blocks that no source ends in."""
    problem, target = Problem(**arguments), target or target_of(arguments["fine"])
    joined = problem.joined
    names = ("x", "weight", "bias", "act", "precision", "pdl")
    plain = conv2d_act.candidates(target=target, **{name: getattr(joined, name) for name in names})
    deepest = {1: 4}  # what the plain convolution loads at once is a pipeline here
    tried = (
        replace(c, block_k=min(c.block_k, problem.step), num_stages=deepest.get(c.num_stages, c.num_stages))
        for c in plain
    )
    return tuple(dict.fromkeys(config for config in tried if is_valid(config, problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem, target = Problem(**arguments), target or target_of(arguments["fine"])
    joined = problem.joined
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: is_valid(c, problem, target), **arguments)
        config = tuned or candidates(target=target, **arguments)[0]
    if not is_valid(config, problem, target):
        raise ValueError(f"{NAME}: {config} is not valid for {joined.conv} on {target.arch}")
    y = empty_nhwc(joined.out_shape, like=problem.fine) if problem.out is None else problem.out
    pitches = {"COARSE_PITCH": problem.coarse, "FINE_PITCH": problem.fine, "Y_PITCH": y}
    return Launch(
        kernel=upsample_concat_conv_act_kernel,
        grid=(-(-joined.pixels // config.block_m) * -(-joined.conv.k // config.block_n),),
        arguments={
            "coarse_ptr": problem.coarse,
            "fine_ptr": problem.fine,
            "weight_ptr": problem.weight,
            "bias_ptr": problem.bias,
            "y_ptr": y,
            "pixels": joined.pixels,
        },
        constants={
            "C1": problem.coarse.shape[1], "C2": problem.fine.shape[1], "K": joined.conv.k,
            "H": problem.fine.shape[2], "W": problem.fine.shape[3],
            **{name: pixel_pitch(tensor) or 0 for name, tensor in pitches.items()},
            "ACT": problem.act, "PRECISION": problem.precision, "PDL": problem.pdl,
            "ROUNDING": tf32_rounding(problem.fine, problem.precision, target),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=y,
        pdl=problem.pdl,
    )  # fmt: skip


def upsample_concat_conv_act(
    coarse: Tensor,
    fine: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: str = "silu",
    precision: str = "tf32",
    pdl: bool = False,
) -> Tensor:
    choices = {"act": act, "precision": precision, "pdl": pdl}
    return execute(NAME, plan(coarse=coarse, fine=fine, weight=weight, bias=bias, **choices), coarse)


def _refuse(text: str) -> None:
    raise ValueError(f"{NAME}: {text}")


def _sample(
    why: str, coarse: tuple[int, int, int, int], fine_channels: int, k: int, *, real_size: bool = False, **choices: Any
) -> Sample:
    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        n, c1, h, w = coarse
        channels = c1 + fine_channels
        return {
            "coarse": random_nhwc(coarse, dtype, device, seed=0),
            "fine": random_nhwc((n, fine_channels, 2 * h, 2 * w), dtype, device, seed=1),
            "weight": random_nhwc((k, channels, 1, 1), dtype, device, seed=2) * channels**-0.5,
            "bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=3).flatten(),
            **choices,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("two images, odd coarse map", (2, 16, 3, 5), 32, 24),
    _sample("no activation, strict fp32 products", (1, 32, 2, 2), 16, 7, act="none", precision="ieee"),
    _sample("YOLO26n layers 11-13", (1, 256, 20, 20), 128, 128, real_size=True),
    _sample("YOLO26n layers 14-16", (1, 128, 40, 40), 128, 64, real_size=True),
)

OP = define(
    upsample_concat_conv_act,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    stores_into=True,
)
