"""dx = the gradient of conv2d's input, NHWC, stride 1, from dy and the weight: the forward kernel, taps backward.

dy      [N, K, HO, WO]  channels_last, or a channel slice of it; fp16, bf16
weight  [K, C, R, S]    channels_last; dtype of dy
dx      [N, C, H, W]    channels_last, dtype of dy; H = HO + R - 1 - 2 * rows of padding
padding                 (rows, columns) of zeros on each side of x, less than R and S

C and K are multiples of 8. Accumulates in fp32 and rounds once. Raises ValueError or TypeError for anything else.

wgmma reads the weight [K, R S, C] with its channels along the output, so that no transposed copy of it is made.
Written for wgmma alone: elsewhere PyTorch's kernel is the rival that wins, see `conv2d_fprop.choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_input_grad
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    Config,
    Pass,
    box_count,
    box_of,
    map_of,
    pass_of,
    step_of,
    tile_configs,
    weight_map,
)
from ridgeline.kernels._nhwc import cdiv, empty_nhwc, random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config


def reference(dy: Tensor, weight: Tensor, *, padding: Sequence[int]) -> Tensor:
    x = empty_nhwc(_pass(dy, weight, padding).x_shape, dy)
    ones = [1, 1]
    dx, _, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, ones, list(padding), ones, False, [0, 0], 1, [True, False, False]
    )
    return dx


def cost(dy: Tensor, weight: Tensor, *, padding: Sequence[int]) -> Cost:
    return conv_input_grad(_pass(dy, weight, padding).conv, dy.dtype)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    conv, dy = _pass(**arguments).conv, arguments["dy"]
    return tile_configs(conv.k, conv.c, dy.element_size(), target or target_of(dy))


def plan(
    dy: Tensor, weight: Tensor, *, padding: Sequence[int], config: Config | None = None, target: Target | None = None
) -> Launch:
    """The launch for one call. Runs nothing."""
    one = _pass(dy, weight, padding)
    one.check(maps={"dy": dy}, weight=weight)
    conv, target, size = one.conv, target or target_of(dy), dy.element_size()
    step, (r, s) = step_of(conv.k, size), conv.filter
    if config is None:
        arguments = {"dy": dy, "weight": weight, "padding": padding}
        config = tuned_config(OP, Config, lambda c: c.is_valid(size, step, target), **arguments)
        config = config or next(iter(tile_configs(conv.k, conv.c, size, target)), None)
    if config is None or not config.is_valid(size, step, target):
        one.refuse(f"{config} is not valid for {conv} on {target.arch}")
    dx = empty_nhwc(one.x_shape, dy)
    n, c, h, w = one.x_shape
    box, pieces = box_of(n, h, w, config.pixels), config.pieces(size, step, target)
    tiles = box_count(n, h, w, box) * cdiv(c, config.channels)
    return Launch(
        kernel=conv2d_gluon_kernel,
        grid=(min(tiles, target.sm_count),),
        arguments={
            "x_desc": map_of(dy, box, step),
            "weight_desc": weight_map(weight, (step, 1, config.channels)),
            "y_desc": map_of(dx, box, config.channels // pieces),
            "scale_ptr": None,
            "bias_ptr": None,
            "images": n,
            "H": h,
            "W": w,
        },
        constants={
            "REDUCED": conv.k, "OUT": conv.c, "R": r, "S": s,
            "TOP": r - 1 - one.padding[0], "LEFT": s - 1 - one.padding[1], "DGRAD": True,
            "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2], "BLOCK_N": config.channels, "BLOCK_K": step,
            "STAGES": config.stages, "PIECES": pieces,
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=dx,
    )  # fmt: skip


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
