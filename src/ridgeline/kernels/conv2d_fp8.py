"""y = conv2d(x, weight) · inverse[x_row] · inverse[weight_row] + bias of FP8 operands, NHWC, stride 1. sm_90.

x       [N, C, H, W]    FP8 e4m3 (activations) or e5m2 (gradients); channels_last, or a channel slice of it
weight  [K, C, R, S]    FP8 e4m3; channels_last
inverse [tensors]       fp32 on the device of x: what FP8 values of each tensor are multiplied by, see DelayedScaling
bias    [K]             fp32 or bf16; None: none
y       [N, K, HO, WO]  bf16, channels_last
padding                 (rows, columns) of zeros on each side of x, less than R and S

C is a multiple of 16, K of 8. Sums in the tensor cores' own accumulator, which keeps some 14 bits and cuts the rest off
(`eps`), and rounds once. Raises ValueError or TypeError for anything else.

It is the forward pass, and the gradient of x: wgmma wants both FP8 operands with the reduced dimension adjacent, so
that gradient is this op on `for_dgrad(weight)` with the padding R - 1 - p, the weight transposed, its taps backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_forward
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product
from ridgeline.kernels._conv2d_pass import Config, Pass, forward_pass, tile_configs
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config
from ridgeline.numerics import BF16_EPS

_CUT = 2.0**-13  # the last bit that Hopper's FP8 sums keep: DeepSeek-V3's technical report, section 3.3.2
OPERANDS = (torch.float8_e4m3fn, torch.float8_e5m2)


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
    *,
    x_row: int,
    weight_row: int,
    padding: Sequence[int],
) -> Tensor:
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = F.conv2d(x.to(wide), weight.to(wide), padding=tuple(padding)) * (inverse[x_row] * inverse[weight_row]).to(wide)
    y = y if bias is None else y + bias.to(wide)[:, None, None]
    return y if wide == torch.float64 else y.to(torch.bfloat16)


def cost(x: Tensor, weight: Tensor, *_others: Tensor | None, padding: Sequence[int], **_rows: int) -> Cost:
    return conv_forward(_pass(x, weight, padding).conv, x.dtype, out_dtype=torch.bfloat16)


def eps(weight: Tensor, **_others: Any) -> float:
    """Rounding to bf16, and what an instruction, 32 products, cuts off the sum, at worst always to one side."""
    return BF16_EPS + weight[0].numel() / 32 * _CUT


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    x, weight = arguments["x"], arguments["weight"]
    return tile_configs(weight.shape[1], weight.shape[0], x.element_size(), target or target_of(x))


def plan(
    x: Tensor, weight: Tensor, inverse: Tensor, bias: Tensor | None = None, *,
    x_row: int, weight_row: int, padding: Sequence[int],
    config: Config | None = None, target: Target | None = None,
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
    product, target = Product(one, x, weight, y, inverse, (x_row, weight_row), bias), target or target_of(x)
    if config is None:
        arguments = {"x": x, "weight": weight, "inverse": inverse, "bias": bias, "padding": padding}
        rows = {"x_row": x_row, "weight_row": weight_row}
        config = tuned_config(OP, Config, lambda c: product.is_valid(c, target), **arguments, **rows)
    return product.launch(conv2d_gluon_kernel, config, target)


def conv2d_fp8(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    bias: Tensor | None = None,
    *,
    x_row: int,
    weight_row: int,
    padding: Sequence[int],
) -> Tensor:
    launch = plan(x, weight, inverse, bias, x_row=x_row, weight_row=weight_row, padding=padding)
    return execute("conv2d_fp8", launch, x)


def _pass(x: Tensor, weight: Tensor, padding: Sequence[int]) -> Pass:
    return forward_pass("conv2d_fp8", x, weight, padding)


def fp8_sample(
    why: str, x: tuple[int, int, int, int], weight: tuple[int, int, int], *, bias: bool = True, real_size: bool = False
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
        return {**made, "x_row": 2, "weight_row": 1, "padding": (r // 2, s // 2)}

    return Sample(why, arguments, real_size)


SAMPLES = (
    fp8_sample("UNet 32x32 128->128, batch 128", (128, 128, 32, 32), (128, 3, 3), real_size=True),
    fp8_sample("UNet 32x32 256->256, batch 128", (128, 256, 32, 32), (256, 3, 3), real_size=True),
    fp8_sample("UNet 16x16 512->256, batch 128", (128, 512, 16, 16), (256, 3, 3), real_size=True),
    fp8_sample("UNet 8x8 512->256, batch 128", (128, 512, 8, 8), (256, 3, 3), real_size=True),
    fp8_sample("UNet 32x32 384->128 1x1, batch 128", (128, 384, 32, 32), (128, 1, 1), real_size=True),
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
