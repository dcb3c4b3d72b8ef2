"""dw = the gradient of concat_conv2d's weight, NHWC, from dy and both maps. sm_90.

dy    [N, K, HO, WO]      channels_last, or a channel slice of it; fp16, bf16
x1    [N, C1, H, W]       likewise, dtype of dy
x2    [N, C2, H, W]       likewise
dw    [K, C1 + C2, R, S]  channels_last, dtype of dy
kernel_size               (R, S)
padding                   (rows, columns) of zeros on each side of x1 and x2, less than R and S

C1 is a multiple of 32, C2 and K of 8; stride 1. It is conv2d_wgrad, whose tuned configs it takes where their tiles
divide C1: equal calls give equal bits. Raises ValueError or TypeError for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_weight_grad
from ridgeline.kernels import conv2d_wgrad
from ridgeline.kernels._concat_conv2d_call import concat_pass, concat_sample, whole
from ridgeline.kernels._concat_conv2d_gluon import concat_conv2d_wgrad_kernel
from ridgeline.kernels._conv2d_launch import weight_gradient
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    WGRAD_PIXELS,
    Pass,
    WgradConfig,
    box_of,
    map_of,
    wgrad_configs,
)
from ridgeline.kernels._conv2d_wgrad_gluon import wgrad_parts_kernel
from ridgeline.kernels._nhwc import starts_early
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config


def reference(dy: Tensor, x1: Tensor, x2: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int]) -> Tensor:
    return conv2d_wgrad.reference(dy, torch.cat((x1, x2), 1), kernel_size=kernel_size, padding=padding)


def cost(dy: Tensor, x1: Tensor, x2: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int]) -> Cost:
    return conv_weight_grad(_pass(dy, x1, x2, kernel_size, padding).conv, x1.dtype)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[WgradConfig, ...]:
    x1 = arguments["x1"]
    return _configs(_pass(**arguments), x1, target or target_of(x1))


def plan(
    dy: Tensor, x1: Tensor, x2: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int],
    config: WgradConfig | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The two launches for one call. Runs nothing."""
    one, target = _pass(dy, x1, x2, kernel_size, padding), target or target_of(x1)
    one.check_maps(DTYPES, dy=dy, x1=x1, x2=x2)
    conv, c1 = one.conv, x1.shape[1]
    if config is None:
        filed = {"dy": dy, "x": whole((x1, x2)), "kernel_size": kernel_size, "padding": padding}
        config = tuned_config(conv2d_wgrad.OP, WgradConfig, lambda c: _is_valid(c, x1, target), **filed)
        config = config or next(iter(_configs(one, x1, target)), None)
    if config is None or not _is_valid(config, x1, target):
        one.refuse(f"{config} is not valid for {conv} with {c1} channels of x1 on {target.arch}")
    box, parts, (r, s) = box_of(conv.n, conv.oh, conv.ow, WGRAD_PIXELS), config.parts(conv, target), conv.filter
    pdl = starts_early(target)
    sums = torch.empty((parts, conv.w_numel), dtype=torch.float32, device=x1.device)
    multiply = Launch(
        kernel=concat_conv2d_wgrad_kernel,
        grid=(min(config.tiles(conv) * parts, target.sm_count),),
        arguments={
            "x1_desc": map_of(x1, box, config.c),
            "x2_desc": map_of(x2, box, config.c),
            "dy_desc": map_of(dy, box, config.k),
            "parts_ptr": sums,
            "images": conv.n,
            "H": conv.oh,
            "W": conv.ow,
        },
        constants={
            "C1": c1, "C": conv.c, "K": conv.k, "R": r, "S": s, "TOP": one.padding[0], "LEFT": one.padding[1],
            "PARTS": parts, "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2], "BLOCK_K": config.k,
            "BLOCK_C": config.c, "TAPS": config.taps, "STAGES": config.stages, "PDL": pdl,
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=sums,
        pdl=pdl,
    )  # fmt: skip
    return weight_gradient(wgrad_parts_kernel, multiply, one, target)


def concat_conv2d_wgrad(
    dy: Tensor, x1: Tensor, x2: Tensor, *, kernel_size: Sequence[int], padding: Sequence[int]
) -> Tensor:
    launch = plan(dy, x1, x2, kernel_size=kernel_size, padding=padding)
    return execute("concat_conv2d_wgrad", launch, x1)


def _pass(dy: Tensor, x1: Tensor, x2: Tensor, kernel_size: Sequence[int], padding: Sequence[int]) -> Pass:
    one = concat_pass("concat_conv2d_wgrad", (x1, x2), dy.shape[1], kernel_size, padding)
    if tuple(dy.shape) != one.y_shape:
        one.refuse(f"dy must have the shape of y, {one.y_shape}, got {tuple(dy.shape)}")
    return one


def _configs(one: Pass, x1: Tensor, target: Target) -> tuple[WgradConfig, ...]:
    found = wgrad_configs(one.conv, x1.element_size(), target)
    return tuple(config for config in found if _is_valid(config, x1, target))


def _is_valid(config: WgradConfig, x1: Tensor, target: Target) -> bool:
    """As for one map, and no tile has channels of both."""
    return config.is_valid(x1.element_size(), target) and x1.shape[1] % config.c == 0


def _sample(
    why: str, channels: tuple[int, int], image: tuple[int, int, int], weight: tuple[int, int, int], **options: Any
) -> Sample:
    names = ("x1", "x2", "dy", "")
    return concat_sample(why, channels, image, weight, names=names, kernel_size=weight[1:], **options)


SAMPLES = (
    _sample("UNet 32x32 256 + 128->128 1x1, batch 128", (256, 128), (128, 32, 32), (128, 1, 1), real_size=True),
    _sample("UNet 32x32 128 + 128->128 1x1, batch 128", (128, 128), (128, 32, 32), (128, 1, 1), real_size=True),
    _sample("UNet 16x16 256 + 256->256 1x1, batch 128", (256, 256), (128, 16, 16), (256, 1, 1), real_size=True),
    _sample("UNet 8x8 256 + 256->256 1x1, batch 128", (256, 256), (128, 8, 8), (256, 1, 1), real_size=True),
    _sample("UNet 4x4 256 + 256->256 1x1, batch 128", (256, 256), (128, 4, 4), (256, 1, 1), real_size=True),
    _sample("channels beside the tiles, odd map", (32, 24), (3, 7, 13), (72, 1, 1)),
    _sample("3x3, boxes of several images", (64, 72), (9, 3, 3), (40, 3, 3)),
)

OP = define(
    concat_conv2d_wgrad,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
