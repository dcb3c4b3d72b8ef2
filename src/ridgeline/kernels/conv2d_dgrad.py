"""dx = the gradient of conv2d's input, NHWC, stride 1, from dy and weight: the forward kernel, taps backward. sm_90.

dy      [N, K, HO, WO]  channels_last, or a channel slice of it; fp16, bf16
weight  [K, C, R, S]    channels_last; dtype of dy
dx      [N, C, H, W]    channels_last, dtype of dy; H = HO + R - 1 - 2 * rows of padding
padding                 (rows, columns) of zeros on each side of x, less than R and S

C and K are multiples of 8. Accumulates in fp32 and rounds once. Raises ValueError or TypeError for anything else.

The GEMM is [N H W, R S K] x [R S K, C]. wgmma reads 16-bit operands with either dimension adjacent, so the weight needs
no transposed copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_input_grad
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product
from ridgeline.kernels._conv2d_pass import DTYPES, Config, Pass, pass_of, tile_configs, torch_gradients
from ridgeline.kernels._nhwc import empty_nhwc, random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config


def reference(dy: Tensor, weight: Tensor, *, padding: Sequence[int]) -> Tensor:
    x = empty_nhwc(_pass(dy, weight, padding).x_shape, dy)
    dx, _ = torch_gradients(dy, x, weight, padding, of_x=True, of_weight=False)
    assert dx is not None
    return dx


def cost(dy: Tensor, weight: Tensor, *, padding: Sequence[int]) -> Cost:
    return conv_input_grad(_pass(dy, weight, padding).conv, dy.dtype)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    dy, weight = arguments["dy"], arguments["weight"]
    return tile_configs(weight.shape[0], weight.shape[1], dy.element_size(), target or target_of(dy))


def plan(
    dy: Tensor, weight: Tensor, *, padding: Sequence[int], config: Config | None = None, target: Target | None = None
) -> Launch:
    """The launch for one call. Runs nothing."""
    one = _pass(dy, weight, padding)
    one.check_maps(DTYPES, dy=dy)
    one.check_weight(weight, dy.dtype)
    product, target = Product(one, dy, weight, empty_nhwc(one.x_shape, dy), dgrad=True), target or target_of(dy)
    if config is None:
        arguments = {"dy": dy, "weight": weight, "padding": padding}
        config = tuned_config(OP, Config, lambda c: product.is_valid(c, target), **arguments)
    return product.launch(conv2d_gluon_kernel, config, target)


def rival(dy: Tensor, weight: Tensor, *, padding: Sequence[int]) -> Callable[[], Tensor]:
    return lambda: reference(dy, weight, padding=padding)


def conv2d_dgrad(dy: Tensor, weight: Tensor, *, padding: Sequence[int]) -> Tensor:
    return execute("conv2d_dgrad", plan(dy, weight, padding=padding), dy)


def _pass(dy: Tensor, weight: Tensor, padding: Sequence[int]) -> Pass:
    k, c, r, s = weight.shape
    n, channels, ho, wo = dy.shape
    image = (ho + r - 1 - 2 * padding[0], wo + s - 1 - 2 * padding[1])
    one = pass_of("conv2d_dgrad", ConvProblem(n, c, k, image, (r, s), padding=tuple(padding)), dy.dtype)
    if channels != k:
        one.refuse(f"dy must have the {k} filters of weight as channels, got {channels}")
    return one


def dgrad_sample(
    why: str, dy: tuple[int, int, int, int], weight: tuple[int, int, int], *, real_size: bool = False
) -> Sample:
    """`weight` is (C, R, S); padded to keep the size."""
    c, r, s = weight

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        scale = (dy[1] * r * s) ** -0.5
        return {
            "dy": random_nhwc(dy, dtype, device, seed=0),
            "weight": random_nhwc((dy[1], c, r, s), dtype, device, seed=1) * scale,
            "padding": (r // 2, s // 2),
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    dgrad_sample("UNet 32x32 384->128, batch 128", (128, 128, 32, 32), (384, 3, 3), real_size=True),
    dgrad_sample("UNet 16x16 256->256, batch 128", (128, 256, 16, 16), (256, 3, 3), real_size=True),
    dgrad_sample("UNet 8x8 512->256, batch 128", (128, 256, 8, 8), (512, 3, 3), real_size=True),
    dgrad_sample("UNet 32x32 384->128 1x1, batch 128", (128, 128, 32, 32), (384, 1, 1), real_size=True),
    dgrad_sample("odd map, channels beside the tiles", (3, 72, 7, 13), (40, 3, 3)),
    dgrad_sample("filters that are not square, one image", (1, 64, 9, 5), (96, 1, 5)),
    dgrad_sample("a map smaller than a box", (2, 16, 3, 2), (8, 3, 3)),
)

OP = define(
    conv2d_dgrad,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
