"""y = conv2d(x, weight) · inverse[x_row] · inverse[weight_row] + bias + residual of FP8 operands, NHWC, stride 1.

x       [N, C, H, W]    FP8 e4m3 (activations) or e5m2 (gradients); channels_last, or a channel slice of it
weight  [K, C, R, S]    FP8 e4m3; channels_last
inverse [tensors]       fp32 on the device of x: what FP8 values of each tensor are multiplied by, see DelayedScaling
bias    [K]             fp32 or bf16; None: none
residual                [N, K, HO, WO] bf16; channels_last, or a channel slice of it; None: none
y       [N, K, HO, WO]  bf16, channels_last
padding                 (rows, columns) of zeros on each side of x, less than R and S

C is a multiple of 16, K of 8. Sums in the tensor cores' own accumulator, which keeps some 14 bits and cuts the rest off
(`eps`), and rounds once. On sm_90 boxes of pixels meet wgmma, see `_conv2d_gluon`; on sm_89 and sm_120 gathered pixels
meet mma.sync, see `_conv2d_fp8_tl`. Raises ValueError or TypeError for anything else.

It is the forward pass, and the gradient of x: matrix units want both FP8 operands with the reduced dimension adjacent,
so that gradient is this op on `for_dgrad(weight)` with the padding R - 1 - p, the weight transposed, its taps backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_forward
from ridgeline.kernels._conv import INT32_ELEMENTS
from ridgeline.kernels._conv2d_fp8_tl import conv2d_fp8_tl_kernel
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product, check_residual, residual_cost
from ridgeline.kernels._conv2d_pass import Config, Pass, forward_pass, tile_configs
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, pixel_pitch, random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config
from ridgeline.numerics import fp8_sum_eps

OPERANDS = (torch.float8_e4m3fn, torch.float8_e5m2)
_GATHERING = ("sm_89", "sm_120")  # without wgmma; both have the same shared memory and the same FP8 instruction
_ACCUMULATORS = 128  # fp32 a thread


@dataclass(frozen=True)
class GatherConfig:
    """A tile of so many pixels by channels of a program that gathers them; each stage holds `step` of the reduction."""

    pixels: int
    channels: int
    step: int
    stages: int
    num_warps: int

    def is_valid(self, target: Target) -> bool:
        """Whether it fills copies and matrix units, and its sums fit registers, its operands shared memory."""
        return (
            target.arch in _GATHERING
            and self.num_warps in (4, 8)
            and self.stages >= 2
            and self.step in (64, 128)
            and self.pixels in (64, 128, 256)
            and self.channels in (32, 64, 128, 256)
            and self.pixels * self.channels <= _ACCUMULATORS * 32 * self.num_warps
            and self.stages * (self.pixels + self.channels) * self.step <= target.shared_bytes
        )

    def tiles(self, one: Pass) -> int:
        conv = one.conv
        return cdiv(conv.n * conv.oh * conv.ow, self.pixels) * cdiv(conv.k, self.channels)


def for_dgrad(weight: Tensor) -> Tensor:
    """[C, K, R, S], taps backward, of a weight [K, C, R, S]: the gradient of x is the convolution of dy with it."""
    bits = weight.view(torch.uint8) if weight.dtype in OPERANDS else weight
    turned = bits.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
    return turned.view(weight.dtype)


def reference(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    x_row: int,
    weight_row: int,
    padding: Sequence[int],
) -> Tensor:
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = F.conv2d(x.to(wide), weight.to(wide), padding=tuple(padding)) * (inverse[x_row] * inverse[weight_row]).to(wide)
    y = y if bias is None else y + bias.to(wide)[:, None, None]
    y = y if residual is None else y + residual.to(wide)
    return y if wide == torch.float64 else y.to(torch.bfloat16)


def cost(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,  # noqa: ARG001
    bias: Tensor | None = None,  # noqa: ARG001
    residual: Tensor | None = None,
    *,
    padding: Sequence[int],
    **_rows: int,
) -> Cost:
    conv = _pass(x, weight, padding).conv
    return conv_forward(conv, x.dtype, out_dtype=torch.bfloat16) + residual_cost(residual)


def eps(weight: Tensor, **_others: Any) -> float:
    """Rounding to bf16, and what an instruction, 32 products, cuts off the sum, at worst always to one side."""
    return fp8_sum_eps(weight[0].numel())


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config | GatherConfig, ...]:
    x, weight = arguments["x"], arguments["weight"]
    target = target or target_of(x)
    if target.arch in _GATHERING:
        return _gather_configs(_pass(x, weight, arguments["padding"]), target)
    return tile_configs(weight.shape[1], weight.shape[0], x.element_size(), target)


def plan(
    x: Tensor, weight: Tensor, inverse: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    x_row: int, weight_row: int, padding: Sequence[int],
    config: Config | GatherConfig | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The launch for one call. Runs nothing."""
    one = _pass(x, weight, padding)
    one.check_maps(OPERANDS, x=x)
    one.check_weight(weight, torch.float8_e4m3fn)
    one.check_bias(bias, torch.bfloat16)
    if inverse.dtype != torch.float32 or inverse.dim() != 1 or inverse.device != x.device or inverse.stride() != (1,):
        got = f"{inverse.dtype} of shape {tuple(inverse.shape)} on {inverse.device}"
        one.refuse(f"inverse must be dense fp32 of one axis on {x.device}, got {got}", TypeError)
    if not (0 <= x_row < len(inverse) and 0 <= weight_row < len(inverse)):
        one.refuse(f"x_row and weight_row must be among the {len(inverse)} of inverse, got {x_row} and {weight_row}")
    y = torch.empty(one.y_shape, dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last)
    check_residual(one, residual, y)
    product, target = Product(one, x, weight, y, inverse, (x_row, weight_row), bias, residual), target or target_of(x)
    # the best config with a residual is that without
    call = {"x": x, "weight": weight, "inverse": inverse, "bias": bias, "padding": padding}
    call |= {"x_row": x_row, "weight_row": weight_row}
    if target.arch in _GATHERING:
        config = config or tuned_config(OP, GatherConfig, lambda c: c.is_valid(target), **call)
        config = config or _gather_configs(one, target)[0]
        if isinstance(config, GatherConfig) and config.is_valid(target):
            return _gathering(product, config)
    else:
        config = config or tuned_config(OP, Config, lambda c: product.is_valid(c, target), **call)
        if not isinstance(config, GatherConfig):
            return product.launch(conv2d_gluon_kernel, config, target)
    one.refuse(f"{config} is not valid for {one.conv} on {target.arch}")


def conv2d_fp8(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    x_row: int,
    weight_row: int,
    padding: Sequence[int],
) -> Tensor:
    launch = plan(x, weight, inverse, bias, residual, x_row=x_row, weight_row=weight_row, padding=padding)
    return execute("conv2d_fp8", launch, x)


def _pass(x: Tensor, weight: Tensor, padding: Sequence[int]) -> Pass:
    return forward_pass("conv2d_fp8", x, weight, padding)


def _gather_configs(one: Pass, target: Target) -> tuple[GatherConfig, ...]:
    """What is worth timing: first the tiles of which every multiprocessor gets two."""
    sizes = ((128, 128, 64, 4, 4), (128, 128, 128, 3, 8), (128, 128, 64, 4, 8), (256, 64, 64, 4, 8))
    sizes += ((256, 128, 64, 4, 8), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 128, 3, 4))
    sizes += ((128, 32, 64, 4, 4), (64, 32, 128, 3, 4))
    widest = max(32, next_power_of_2(one.conv.k))
    fit = (c for c in (GatherConfig(*numbers) for numbers in sizes) if c.channels <= widest and c.is_valid(target))
    return tuple(sorted(fit, key=lambda c: -min(c.tiles(one), 2 * target.sm_count)))


def _gathering(product: Product, config: GatherConfig) -> Launch:
    """The launch for mma.sync, of the same tensors as `Product.launch`."""
    one, x, weight, residual, y = product.one, product.operand, product.weight, product.residual, product.out
    conv, pitch = one.conv, pixel_pitch(product.operand) or product.operand.shape[1]
    (h, w), (r, s) = one.x_shape[2:], conv.filter
    residual_pitch = 0 if residual is None else pixel_pitch(residual) or conv.k
    extents = (conv.n * h * w * pitch, weight.numel(), conv.n * conv.oh * conv.ow * max(conv.k, residual_pitch))
    return Launch(
        kernel=conv2d_fp8_tl_kernel,
        grid=(config.tiles(one),),
        arguments={
            "x_ptr": x,
            "weight_ptr": weight,
            "inverse_ptr": product.inverse,
            "bias_ptr": product.bias,
            "residual_ptr": residual,
            "y_ptr": y,
            "x_row": product.rows[0],
            "weight_row": product.rows[1],
            "pixels": conv.n * conv.oh * conv.ow,
            "steps": cdiv(conv.c * conv.taps, config.step),
        },
        constants={
            "C": conv.c, "H": h, "W": w, "K": conv.k, "R": r, "S": s, "HO": conv.oh, "WO": conv.ow,
            "TOP": one.padding[0], "LEFT": one.padding[1], "X_PITCH": pitch, "RESIDUAL_PITCH": residual_pitch,
            "WIDE": max(extents) >= INT32_ELEMENTS,
            "BLOCK_M": config.pixels, "BLOCK_N": config.channels, "BLOCK_K": config.step,
        },
        num_warps=config.num_warps,
        num_stages=config.stages,
        output=y,
    )  # fmt: skip


def fp8_sample(
    why: str,
    x: tuple[int, int, int, int],
    weight: tuple[int, int, int],
    *,
    bias: bool = True,
    residual: bool = False,
    real_size: bool = False,
) -> Sample:
    """`weight` is (K, R, S); padded to keep the size. `dtype` is that of x: e4m3, or e5m2 as gradients have it."""
    k, r, s = weight

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        reduced = x[1] * r * s
        # a wide spread, as scales would leave it: 16 is far from the largest of both formats
        made: dict[str, Any] = {"x": (random_nhwc(x, torch.float32, device, seed=0) * 16).to(dtype)}
        made["weight"] = (random_nhwc((k, x[1], r, s), torch.float32, device, seed=1) * 16).to(torch.float8_e4m3fn)
        made["inverse"] = torch.tensor([1.0, 2.0**-4, 2.0**-4 * reduced**-0.5], device=device)
        made["bias"] = random_nhwc((1, k, 1, 1), torch.float32, device, seed=2).flatten() if bias else None
        made["residual"] = random_nhwc((x[0], k, *x[2:]), torch.bfloat16, device, seed=3) if residual else None
        return {**made, "x_row": 2, "weight_row": 1, "padding": (r // 2, s // 2)}

    return Sample(why, arguments, real_size)


SAMPLES = (
    fp8_sample("UNet 32x32 128->128, batch 128", (128, 128, 32, 32), (128, 3, 3), real_size=True),
    fp8_sample("UNet 32x32 256->256, batch 128", (128, 256, 32, 32), (256, 3, 3), real_size=True),
    fp8_sample("UNet 16x16 512->256, batch 128", (128, 512, 16, 16), (256, 3, 3), real_size=True),
    fp8_sample("UNet 8x8 512->256, batch 128", (128, 512, 8, 8), (256, 3, 3), real_size=True),
    fp8_sample("UNet 32x32 384->128 1x1, batch 128", (128, 384, 32, 32), (128, 1, 1), real_size=True),
    fp8_sample("a residual, odd map, channels beside the tiles", (3, 80, 7, 13), (72, 3, 3), residual=True),
    fp8_sample("odd map, channels beside the tiles", (3, 80, 7, 13), (72, 3, 3)),
    fp8_sample("filters that are not square, one image, no bias", (1, 64, 9, 5), (96, 1, 5), bias=False),
    fp8_sample("a map smaller than a box", (2, 16, 3, 2), (16, 3, 3)),
)

OP = define(
    conv2d_fp8,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=OPERANDS,
    eps=eps,
    interpretable=False,
)
