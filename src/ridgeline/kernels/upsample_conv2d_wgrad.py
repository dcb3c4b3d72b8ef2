"""dw = the gradient of upsample_conv2d's weight, from dy and x: dV, 4 taps of each phase, turned back. sm_90.

dy    [N, K, 2 H, 2 W]  channels_last; fp16, bf16
x     [N, C, H, W]      channels_last, or a channel slice of it; dtype of dy
dw    [K, C, 3, 3]      channels_last, dtype of dy

    dV[a, b, dr, ds] = the sum of dy[2h + a, 2w + b] x[h + a - 1 + dr, w + b - 1 + ds] over all pixels h, w

and dw is of dV as in `_upsample_conv2d`. C is a multiple of 8, K of 16. Accumulates in fp32; the parts into which the
pixels are split, and the four phases, are added in a fixed order and rounded once, so that equal calls give equal bits.
Raises ValueError or TypeError for anything else.

The GEMM is [K, N H W] x [N H W, C] for each of 16 taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_weight_grad
from ridgeline.kernels._conv2d_launch import weight_gradient, weight_gradient_sums
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    Pass,
    WgradConfig,
    pass_of,
    torch_gradients,
    wgrad_configs,
)
from ridgeline.kernels._conv2d_wgrad_gluon import conv2d_wgrad_gluon_kernel
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config
from ridgeline.kernels._upsample_conv2d import phase_gradients_kernel
from ridgeline.kernels._upsample_conv2d_call import (
    FILTER,
    PADDING,
    PHASE_TAPS,
    PHASES,
    check,
    cost_of,
    upsample_pass,
    upsampled,
)


def reference(dy: Tensor, x: Tensor) -> Tensor:
    shape = (dy.shape[1], x.shape[1], *FILTER)
    weight = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _, dw = torch_gradients(dy, upsampled(x), weight, PADDING, of_x=False, of_weight=True)
    assert dw is not None
    return dw


def cost(dy: Tensor, x: Tensor) -> Cost:
    one = _pass(dy, x)
    full = conv_weight_grad(one.conv, x.dtype)
    return cost_of(one, full, read=dy.numel() + x.numel(), written=one.conv.w_numel)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[WgradConfig, ...]:
    x = arguments["x"]
    return wgrad_configs(_of_phases(arguments["dy"], x).conv, x.element_size(), target or target_of(x))


def plan(dy: Tensor, x: Tensor, *, config: WgradConfig | None = None, target: Target | None = None) -> Launch:
    """The two launches for one call. Runs nothing."""
    one, of_phases = _pass(dy, x), _of_phases(dy, x)
    check(one, dy=dy, x=x)
    conv, target, size = one.conv, target or target_of(x), x.element_size()
    if config is None:
        config = tuned_config(OP, WgradConfig, lambda c: c.is_valid(size, target), dy=dy, x=x)
        config = config or next(iter(wgrad_configs(of_phases.conv, size, target)), None)
    if config is None or not config.is_valid(size, target):
        one.refuse(f"{config} is not valid for {conv} on {target.arch}")
    multiply = weight_gradient_sums(conv2d_wgrad_gluon_kernel, of_phases, (dy, x), config, target, phases=True)
    return weight_gradient(phase_gradients_kernel, multiply, one, target, C=conv.c)


def rival(dy: Tensor, x: Tensor) -> Callable[[], Tensor]:
    return lambda: reference(dy, x)


def upsample_conv2d_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return execute("upsample_conv2d_wgrad", plan(dy, x), x)


def _pass(dy: Tensor, x: Tensor) -> Pass:
    one = upsample_pass("upsample_conv2d_wgrad", x.shape, dy.shape[1], x.dtype)
    if tuple(dy.shape) != one.y_shape:
        one.refuse(f"dy must have the shape of y, {one.y_shape}, got {tuple(dy.shape)}")
    return one


def _of_phases(dy: Tensor, x: Tensor) -> Pass:
    """A convolution with as many pixels and taps as the kernel multiplies: all phases are of the smaller map."""
    n, c, h, w = x.shape
    image = (h + PHASES - 1, w + PHASE_TAPS - 1)
    return pass_of("upsample_conv2d_wgrad", ConvProblem(n, c, dy.shape[1], image, (PHASES, PHASE_TAPS)), x.dtype)


def upsample_wgrad_sample(why: str, x: tuple[int, int, int, int], k: int, *, real_size: bool = False) -> Sample:
    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        n, _, h, w = x
        return {
            "dy": random_nhwc((n, k, 2 * h, 2 * w), dtype, device, seed=1),
            "x": random_nhwc(x, dtype, device, seed=0),
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    upsample_wgrad_sample("UNet 16x16 256->256, batch 128", (128, 256, 16, 16), 256, real_size=True),
    upsample_wgrad_sample("UNet 8x8 256->256, batch 128", (128, 256, 8, 8), 256, real_size=True),
    upsample_wgrad_sample("UNet 4x4 256->256, batch 128", (128, 256, 4, 4), 256, real_size=True),
    upsample_wgrad_sample("odd map, channels beside the tiles", (3, 40, 7, 5), 80),
    upsample_wgrad_sample("a map smaller than a box", (2, 8, 3, 2), 16),
    upsample_wgrad_sample("one pixel", (1, 72, 1, 1), 48),
)

OP = define(
    upsample_conv2d_wgrad,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
