"""dx = the gradient of conv2d's input, NHWC, from dy and weight: the forward kernels, taps backward. As conv2d_fprop.

dy      [N, K, HO, WO]  channels_last, or a channel slice of it; fp16, bf16
weight  [K, C, R, S]    channels_last; dtype of dy
residual                [N, C, H, W], as dy: what is added to dx, with stride 1 alone; None: nothing
dx      [N, C, H, W]    channels_last, dtype of dy; H = HO + R - 1 - 2 * rows of padding, with stride 2 H = 2 HO
padding                 (rows, columns) of zeros on each side of x, less than R and S
stride                  1 or 2, of rows and columns

C and K are multiples of 8, with stride 2 C of 16, or one of them is small, see conv2d_fprop. Accumulates in fp32 and
rounds once. Raises ValueError or TypeError for anything else.

The GEMM is [N H W, R S K] x [R S K, C]. wgmma reads 16-bit operands with either dimension adjacent, so the weight needs
no transposed copy. With stride 2 every second row and column of dx is a GEMM of its own with the taps that meet it: of
3 x 3 taps 1, 2, 2 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_input_grad
from ridgeline.kernels import _conv2d_matmul
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product, check_residual, residual_cost
from ridgeline.kernels._conv2d_narrow import narrow_contract_kernel, narrow_expand_kernel
from ridgeline.kernels._conv2d_narrow_call import NarrowConfig, narrow_pass, with_narrow_configs
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    Config,
    Pass,
    configs_of_phases,
    pass_of,
    tile_configs,
    torch_gradients,
)
from ridgeline.kernels._nhwc import empty_nhwc, random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config


def reference(
    dy: Tensor, weight: Tensor, residual: Tensor | None = None, *, padding: Sequence[int], stride: int = 1
) -> Tensor:
    x = empty_nhwc(_pass(dy, weight, padding, stride).x_shape, dy)
    dx, _ = torch_gradients(dy, x, weight, padding, of_x=True, of_weight=False, stride=stride)
    assert dx is not None
    return dx if residual is None else dx + residual


def cost(
    dy: Tensor, weight: Tensor, residual: Tensor | None = None, *, padding: Sequence[int], stride: int = 1
) -> Cost:
    return conv_input_grad(_pass(dy, weight, padding, stride).conv, dy.dtype) + residual_cost(residual)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config | NarrowConfig, ...]:
    dy, weight, target = arguments["dy"], arguments["weight"], target or target_of(arguments["dy"])
    known = configs_of_phases if arguments.get("stride", 1) == 2 else tile_configs
    others = known(weight.shape[0], weight.shape[1], dy.element_size(), target)
    return with_narrow_configs(others, _pass(dy, weight, arguments["padding"], arguments.get("stride", 1)), target)


def plan(
    dy: Tensor, weight: Tensor, residual: Tensor | None = None, *, padding: Sequence[int], stride: int = 1,
    config: Config | NarrowConfig | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The launch for one call. Runs nothing."""
    one, target = _pass(dy, weight, padding, stride), target or target_of(dy)
    # filed without the residual: one config serves calls with and without
    arguments = {"dy": dy, "weight": weight, "padding": padding, "stride": stride}
    narrow = narrow_pass(one, OP, config, target, arguments)
    if narrow is not None:
        return narrow.product((narrow_expand_kernel, narrow_contract_kernel), dy, weight, residual=residual)
    assert not isinstance(config, NarrowConfig)
    one.check_maps(DTYPES, dy=dy)
    one.check_weight(weight, dy.dtype)
    dx = empty_nhwc(one.x_shape, dy)
    check_residual(one, residual, dx)
    product = Product(one, dy, weight, dx, residual=residual, dgrad=True)
    if config is None:
        config = tuned_config(OP, Config, lambda c: product.is_valid(c, target), **arguments)
    return product.launch(conv2d_gluon_kernel, config, target)


def rival(dy: Tensor, weight: Tensor, *others: Tensor | None, **choices: Any) -> Callable[[], Tensor]:
    return lambda: reference(dy, weight, *others, **choices)


def matmul(
    dy: Tensor, weight: Tensor, residual: Tensor | None = None, *, padding: Sequence[int], stride: int = 1
) -> Callable[[], Tensor] | None:
    conv = _pass(dy, weight, padding, stride).conv
    return _conv2d_matmul.called_if(conv, lambda: _conv2d_matmul.input_gradient(dy, weight, residual))


def conv2d_dgrad(
    dy: Tensor, weight: Tensor, residual: Tensor | None = None, *, padding: Sequence[int], stride: int = 1
) -> Tensor:
    return execute("conv2d_dgrad", plan(dy, weight, residual, padding=padding, stride=stride), dy)


def _pass(dy: Tensor, weight: Tensor, padding: Sequence[int], stride: int = 1) -> Pass:
    k, c, r, s = weight.shape
    n, channels, ho, wo = dy.shape
    image = (ho + r - 1 - 2 * padding[0], wo + s - 1 - 2 * padding[1]) if stride == 1 else (stride * ho, stride * wo)
    one = pass_of("conv2d_dgrad", ConvProblem(n, c, k, image, (r, s), stride, tuple(padding)), dy.dtype)
    if channels != k:
        one.refuse(f"dy must have the {k} filters of weight as channels, got {channels}")
    return one


def dgrad_sample(
    why: str,
    dy: tuple[int, int, int, int],
    weight: tuple[int, int, int],
    *,
    stride: int = 1,
    residual: bool = False,
    real_size: bool = False,
) -> Sample:
    """`weight` is (C, R, S); padded to keep the size, or with stride 2 to halve it."""
    c, r, s = weight

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        scale = (dy[1] * r * s) ** -0.5
        return {
            "dy": random_nhwc(dy, dtype, device, seed=0),
            "weight": random_nhwc((dy[1], c, r, s), dtype, device, seed=1) * scale,
            "residual": random_nhwc((dy[0], c, *dy[2:]), dtype, device, seed=3) if residual else None,
            "padding": (r // 2, s // 2),
            "stride": stride,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    dgrad_sample("UNet 32x32 384->128, batch 128", (128, 128, 32, 32), (384, 3, 3), real_size=True),
    dgrad_sample("UNet 16x16 256->256, batch 128", (128, 256, 16, 16), (256, 3, 3), real_size=True),
    dgrad_sample("UNet 8x8 512->256, batch 128", (128, 256, 8, 8), (512, 3, 3), real_size=True),
    dgrad_sample("UNet 32x32 384->128 1x1, batch 128", (128, 128, 32, 32), (384, 1, 1), real_size=True),
    dgrad_sample(
        "ResNet-50 56x56 256->512 1x1 by 2, batch 128", (128, 512, 28, 28), (256, 1, 1), stride=2, real_size=True
    ),
    dgrad_sample("ResNet-50 56x56 128->128 by 2, batch 128", (128, 128, 28, 28), (128, 3, 3), stride=2, real_size=True),
    dgrad_sample("UNet 32x32 128->128 by 2, batch 128", (128, 128, 16, 16), (128, 3, 3), stride=2, real_size=True),
    dgrad_sample("UNet 32x32 128->3, batch 128", (128, 3, 32, 32), (128, 3, 3), real_size=True),
    dgrad_sample("UNet 32x32 3->128, batch 128", (128, 128, 32, 32), (3, 3, 3), real_size=True),
    dgrad_sample("stride 2, channels beside the tiles", (3, 40, 7, 5), (80, 3, 3), stride=2),
    dgrad_sample("stride 2, one phase of four has a tap", (2, 24, 3, 9), (48, 1, 1), stride=2),
    dgrad_sample("a residual, odd map, channels beside the tiles", (3, 72, 7, 13), (40, 3, 3), residual=True),
    dgrad_sample("three filters and a residual, odd map", (3, 3, 7, 13), (72, 3, 3), residual=True),
    dgrad_sample("one channel, a wide map", (1, 40, 9, 70), (1, 3, 5)),
    dgrad_sample("odd map, channels beside the tiles", (3, 72, 7, 13), (40, 3, 3)),
    dgrad_sample("filters that are not square, one image", (1, 64, 9, 5), (96, 1, 5)),
    dgrad_sample("a map smaller than a box", (2, 16, 3, 2), (8, 3, 3)),
)

OP = define(
    conv2d_dgrad,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival, matmul=matmul),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
