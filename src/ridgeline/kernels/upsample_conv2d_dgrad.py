"""dx = the gradient of upsample_conv2d's x, from dy and weight: one sum over the taps of all phases. sm_90.

dy      [N, K, 2 H, 2 W]  channels_last; fp16, bf16
weight  [K, C, 3, 3]      channels_last; dtype of dy
dx      [N, C, H, W]      channels_last, dtype of dy

    dx[h, w] = the sum of V[a, b, dr, ds] dy[2 (h + 1 - a - dr) + a, 2 (w + 1 - b - ds) + b] over a, b, dr and ds

with V as in upsample_conv2d. C is a multiple of 8, K of 16. V is summed in fp32 and rounded once to the dtype of dy;
products are summed in fp32 and rounded once. Raises ValueError or TypeError for anything else.

The GEMM is [N H W, 16 K] x [16 K, C].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_input_grad
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product
from ridgeline.kernels._conv2d_pass import DTYPES, Config, Pass, torch_gradients
from ridgeline.kernels._nhwc import empty_nhwc, random_nhwc
from ridgeline.kernels._op import LastLaunch, Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config
from ridgeline.kernels._upsample_conv2d import phase_weights_kernel
from ridgeline.kernels._upsample_conv2d_call import (
    PADDING,
    check,
    cost_of,
    gradient_of_upsampled,
    phase_configs,
    phase_weights,
    upsample_pass,
)


def reference(dy: Tensor, weight: Tensor) -> Tensor:
    large = empty_nhwc(_pass(dy, weight).x_shape, dy)
    d_large, _ = torch_gradients(dy, large, weight, PADDING, of_x=True, of_weight=False)
    assert d_large is not None
    return gradient_of_upsampled(d_large)


def cost(dy: Tensor, weight: Tensor) -> Cost:
    one = _pass(dy, weight)
    full = conv_input_grad(one.conv, dy.dtype)
    return cost_of(one, full, read=dy.numel() + weight.numel(), written=one.conv.x_numel // 4)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    dy = arguments["dy"]
    return phase_configs(_pass(dy, arguments["weight"]), target or target_of(dy), dgrad=True)


def plan(dy: Tensor, weight: Tensor, *, config: Config | None = None, target: Target | None = None) -> Launch:
    """The two launches for one call. Runs nothing."""
    one = _pass(dy, weight)
    check(one, weight=weight, dy=dy)
    target = target or target_of(dy)
    phases = phase_weights(phase_weights_kernel, weight, target)
    n, c, rows, columns = one.x_shape
    dx = empty_nhwc((n, c, rows // 2, columns // 2), dy)
    product = Product(one, dy, phases.output, dx, dgrad=True, phases=True)
    if config is None:
        config = tuned_config(OP, Config, lambda c: product.is_valid(c, target), dy=dy, weight=weight)
    return LastLaunch(**vars(product.launch(conv2d_gluon_kernel, config, target)), before=(phases,))


def rival(dy: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: reference(dy, weight)


def upsample_conv2d_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    return execute("upsample_conv2d_dgrad", plan(dy, weight), dy)


def _pass(dy: Tensor, weight: Tensor) -> Pass:
    n, channels, rows, columns = dy.shape
    k, c = weight.shape[:2]
    one = upsample_pass("upsample_conv2d_dgrad", (n, c, rows // 2, columns // 2), k, dy.dtype)
    if rows % 2 or columns % 2:
        one.refuse(f"dy must have even rows and columns, got {rows} and {columns}")
    if channels != k:
        one.refuse(f"dy must have the {k} filters of weight as channels, got {channels}")
    return one


def upsample_dgrad_sample(why: str, dy: tuple[int, int, int, int], c: int, *, real_size: bool = False) -> Sample:
    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        return {
            "dy": random_nhwc(dy, dtype, device, seed=0),
            "weight": random_nhwc((dy[1], c, 3, 3), dtype, device, seed=1) * (dy[1] * 9) ** -0.5,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    upsample_dgrad_sample("UNet 16x16 256->256, batch 128", (128, 256, 32, 32), 256, real_size=True),
    upsample_dgrad_sample("UNet 8x8 256->256, batch 128", (128, 256, 16, 16), 256, real_size=True),
    upsample_dgrad_sample("UNet 4x4 256->256, batch 128", (128, 256, 8, 8), 256, real_size=True),
    upsample_dgrad_sample("odd map, channels beside the tiles", (3, 80, 14, 10), 40),
    upsample_dgrad_sample("a map smaller than a box", (2, 16, 6, 4), 8),
    upsample_dgrad_sample("one pixel", (1, 48, 2, 2), 72),
)

OP = define(
    upsample_conv2d_dgrad,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
