"""dw = the gradient of conv2d's weight, NHWC, from dy and x: sums of products of pixels. As conv2d_fprop.

dy    [N, K, HO, WO]  channels_last, or a channel slice of it; fp16, bf16
x     [N, C, H, W]    likewise, dtype of dy
dw    [K, C, R, S]    channels_last, dtype of dy
kernel_size           (R, S)
padding               (rows, columns) of zeros on each side of x, less than R and S
stride                1 or 2, of rows and columns

C, K and with stride 2 x are as in conv2d_fprop. Accumulates in fp32; the parts into which the pixels are split are
added in a fixed order and rounded once, so that equal calls give equal bits. Raises ValueError or TypeError for
anything else.

The GEMM is [K, N HO WO] x [N HO WO, C] for each tap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_weight_grad
from ridgeline.kernels import _conv2d_matmul
from ridgeline.kernels._conv2d_launch import weight_gradient, weight_gradient_sums
from ridgeline.kernels._conv2d_narrow import narrow_reduce_kernel
from ridgeline.kernels._conv2d_narrow_call import NarrowConfig, narrow_pass, with_narrow_configs
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    Pass,
    WgradConfig,
    pass_of,
    torch_gradients,
    wgrad_configs,
)
from ridgeline.kernels._conv2d_wgrad_gluon import conv2d_wgrad_gluon_kernel, wgrad_parts_kernel
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config


def reference(dy: Tensor, x: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1) -> Tensor:
    shape = (dy.shape[1], x.shape[1], *kernel_size)
    weight = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _, dw = torch_gradients(dy, x, weight, padding, of_x=False, of_weight=True, stride=stride)
    assert dw is not None
    return dw


def cost(dy: Tensor, x: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1) -> Cost:
    return conv_weight_grad(_pass(dy, x, kernel_size, padding, stride).conv, x.dtype)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[WgradConfig | NarrowConfig, ...]:
    one, x, target = _pass(**arguments), arguments["x"], target or target_of(arguments["x"])
    return with_narrow_configs(wgrad_configs(one.conv, x.element_size(), target), one, target)


def plan(
    dy: Tensor, x: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1,
    config: WgradConfig | NarrowConfig | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The two launches for one call. Runs nothing."""
    one, target = _pass(dy, x, kernel_size, padding, stride), target or target_of(x)
    arguments = {"dy": dy, "x": x, "kernel_size": kernel_size, "padding": padding, "stride": stride}
    narrow = narrow_pass(one, OP, config, target, arguments)
    if narrow is not None:
        return narrow.gradient(narrow_reduce_kernel, wgrad_parts_kernel, dy, x)
    assert not isinstance(config, NarrowConfig)
    one.check_maps(DTYPES, dy=dy, x=x)
    conv, size = one.conv, x.element_size()
    if config is None:
        config = tuned_config(OP, WgradConfig, lambda c: c.is_valid(size, target), **arguments)
        config = config or next(iter(wgrad_configs(conv, size, target)), None)
    if config is None or not config.is_valid(size, target):
        one.refuse(f"{config} is not valid for {conv} on {target.arch}")
    multiply = weight_gradient_sums(conv2d_wgrad_gluon_kernel, one, (dy, x), config, target)
    return weight_gradient(wgrad_parts_kernel, multiply, one, target)


def rival(
    dy: Tensor, x: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1
) -> Callable[[], Tensor]:
    return lambda: reference(dy, x, kernel_size=kernel_size, padding=padding, stride=stride)


def matmul(
    dy: Tensor, x: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1
) -> Callable[[], Tensor] | None:
    conv = _pass(dy, x, kernel_size, padding, stride).conv
    return _conv2d_matmul.called_if(conv, lambda: _conv2d_matmul.weight_gradient(dy, x))


def conv2d_wgrad(
    dy: Tensor, x: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1
) -> Tensor:
    return execute("conv2d_wgrad", plan(dy, x, kernel_size=kernel_size, padding=padding, stride=stride), x)


def _pass(dy: Tensor, x: Tensor, kernel_size: Sequence[int], padding: Sequence[int], stride: int = 1) -> Pass:
    n, c, *image = x.shape
    conv = ConvProblem(n, c, dy.shape[1], tuple(image), tuple(kernel_size), stride, tuple(padding))
    one = pass_of("conv2d_wgrad", conv, x.dtype)
    if tuple(dy.shape) != one.y_shape:
        one.refuse(f"dy must have the shape of y, {one.y_shape}, got {tuple(dy.shape)}")
    return one


def wgrad_sample(
    why: str, x: tuple[int, int, int, int], weight: tuple[int, int, int], *, stride: int = 1, real_size: bool = False
) -> Sample:
    """`weight` is (K, R, S); padded to keep the size, or with stride 2 to halve it."""
    k, r, s = weight

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        n, _, h, w = x
        return {
            "dy": random_nhwc((n, k, h // stride, w // stride), dtype, device, seed=1),
            "x": random_nhwc(x, dtype, device, seed=0),
            "kernel_size": (r, s),
            "padding": (r // 2, s // 2),
            "stride": stride,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    wgrad_sample("UNet 32x32 128->128, batch 128", (128, 128, 32, 32), (128, 3, 3), real_size=True),
    wgrad_sample("UNet 16x16 512->256, batch 128", (128, 512, 16, 16), (256, 3, 3), real_size=True),
    wgrad_sample("UNet 4x4 256->256, batch 128", (128, 256, 4, 4), (256, 3, 3), real_size=True),
    wgrad_sample("UNet 8x8 512->256 1x1, batch 128", (128, 512, 8, 8), (256, 1, 1), real_size=True),
    wgrad_sample(
        "ResNet-50 56x56 256->512 1x1 by 2, batch 128", (128, 256, 56, 56), (512, 1, 1), stride=2, real_size=True
    ),
    wgrad_sample("ResNet-50 56x56 128->128 by 2, batch 128", (128, 128, 56, 56), (128, 3, 3), stride=2, real_size=True),
    wgrad_sample("UNet 32x32 128->128 by 2, batch 128", (128, 128, 32, 32), (128, 3, 3), stride=2, real_size=True),
    wgrad_sample("UNet 32x32 3->128, batch 128", (128, 3, 32, 32), (128, 3, 3), real_size=True),
    wgrad_sample("UNet 32x32 128->3, batch 128", (128, 128, 32, 32), (3, 3, 3), real_size=True),
    wgrad_sample("stride 2, channels beside the tiles", (3, 80, 14, 10), (40, 3, 3), stride=2),
    wgrad_sample("stride 2, one phase of four is read", (2, 48, 6, 18), (24, 1, 1), stride=2),
    wgrad_sample("three channels, odd map, filters beside the tiles", (3, 3, 7, 13), (72, 3, 3)),
    wgrad_sample("five filters of 7x7, two tiles of columns", (2, 40, 9, 7), (5, 7, 7)),
    wgrad_sample("odd map, channels beside the tiles", (3, 72, 7, 13), (40, 3, 3)),
    wgrad_sample("filters that are not square, one image", (1, 64, 9, 5), (96, 1, 5)),
    wgrad_sample("a map smaller than a box", (2, 16, 3, 2), (8, 3, 3)),
    wgrad_sample("fewer channels than a tile, one tap", (2, 8, 6, 5), (200, 1, 1)),
)

OP = define(
    conv2d_wgrad,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival, matmul=matmul),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
