"""y = conv2d(cat((x1, x2), 1), weight) + bias, NHWC, for training, where the concatenation is never written. sm_90.

x1      [N, C1, H, W]      channels_last, or a channel slice of it; fp16, bf16
x2      [N, C2, H, W]      likewise, dtype of x1
weight  [K, C1 + C2, R, S] channels_last; dtype of x1
bias    [K]                fp32 or the dtype of x1; None: none
y       [N, K, HO, WO]     channels_last, dtype of x1
padding                    (rows, columns) of zeros on each side, less than R and S

C1 is a multiple of 16, C2 and K of 8; stride 1. Sums run over the channels of x1, then of x2, in fp32, and are rounded
once, in the order of conv2d_fprop on the concatenation, whose tuned configs it takes. Raises ValueError or TypeError
for anything else.

A concatenation is read and written once for nothing: 100 MB each way for 256 and 128 channels at 32², batch 128, bf16.
It is the GEMM of conv2d_fprop; only what copies boxes to shared memory asks which map a box is of. Gradients are
those of conv2d_dgrad and concat_conv2d_wgrad, which who places it in a graph calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_forward
from ridgeline.kernels import conv2d_fprop
from ridgeline.kernels._concat_conv2d_call import NARROWEST, concat_pass, concat_sample, whole
from ridgeline.kernels._concat_conv2d_gluon import concat_conv2d_kernel
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    GRANULE,
    Config,
    Pass,
    box_count,
    box_of,
    map_of,
    step_of,
    tile_configs,
    weight_map,
)
from ridgeline.kernels._nhwc import cdiv, empty_nhwc, starts_early
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config


def reference(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None, *, padding: Sequence[int]) -> Tensor:
    return conv2d_fprop.reference(torch.cat((x1, x2), 1), weight, bias, padding=padding)


def cost(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,  # noqa: ARG001
    *,
    padding: Sequence[int],
) -> Cost:
    return conv_forward(_pass(x1, x2, weight, padding).conv, x1.dtype)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    x1, x2, weight = (arguments[name] for name in ("x1", "x2", "weight"))
    one = _pass(x1, x2, weight, arguments["padding"])
    return tile_configs(one.conv.c, one.conv.k, x1.element_size(), target or target_of(x1))


def plan(
    x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    padding: Sequence[int], config: Config | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The launch for one call. Runs nothing."""
    one, target = _pass(x1, x2, weight, padding), target or target_of(x1)
    one.check_maps(DTYPES, x1=x1, x2=x2)
    one.check_weight(weight, x1.dtype)
    one.check_bias(bias, x1.dtype)
    conv, c1, size = one.conv, x1.shape[1], x1.element_size()
    # a box of channels is of one map
    step = min(step_of(conv.c, size), c1 & -c1)
    if config is None:
        filed = {"x": whole((x1, x2)), "weight": weight, "padding": padding}
        config = tuned_config(conv2d_fprop.OP, Config, lambda c: c.is_valid(size, step, target), **filed)
        config = config or next(iter(tile_configs(conv.c, conv.k, size, target)), None)
    if config is None or not config.is_valid(size, step, target):
        one.refuse(f"{config} is not valid for {conv} on {target.arch}")
    y = empty_nhwc(one.y_shape, x1)
    n, _, h, w = y.shape
    box, pieces, (r, s) = box_of(n, h, w, config.pixels), config.pieces(size, step, target), conv.filter
    return Launch(
        kernel=concat_conv2d_kernel,
        grid=(min(box_count(n, h, w, box) * cdiv(conv.k, config.channels), target.sm_count),),
        arguments={
            "x1_desc": map_of(x1, box, step),
            "x2_desc": map_of(x2, box, step),
            "weight_desc": weight_map(weight, (config.channels, 1, step)),
            "y_desc": map_of(y, box, config.channels // pieces),
            "bias_ptr": bias,
            "images": n,
            "H": h,
            "W": w,
        },
        constants={
            "C1": c1, "REDUCED": conv.c, "OUT": conv.k, "R": r, "S": s, "TOP": one.padding[0], "LEFT": one.padding[1],
            "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2], "BLOCK_N": config.channels, "BLOCK_K": step,
            "STAGES": config.stages, "PIECES": pieces, "PDL": starts_early(target),
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
        pdl=starts_early(target),
    )  # fmt: skip


def takes(channels: tuple[int, int], k: int) -> bool:
    """Whether the three passes have kernels for maps of so many channels each, and K filters."""
    first, second = channels
    return not (first % 32 or second % NARROWEST or k % GRANULE)


def concat_conv2d(
    x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None, *, padding: Sequence[int]
) -> Tensor:
    return execute("concat_conv2d", plan(x1, x2, weight, bias, padding=padding), x1)


def _pass(x1: Tensor, x2: Tensor, weight: Tensor, padding: Sequence[int]) -> Pass:
    k, c, *filter_size = weight.shape
    one = concat_pass("concat_conv2d", (x1, x2), k, filter_size, padding)
    if c != one.conv.c:
        one.refuse(f"weight {tuple(weight.shape)} must have the {one.conv.c} channels of both maps")
    return one


def _sample(
    why: str, channels: tuple[int, int], image: tuple[int, int, int], weight: tuple[int, int, int], **options: Any
) -> Sample:
    return concat_sample(why, channels, image, weight, names=("x1", "x2", "", "weight"), **options)


SAMPLES = (
    _sample("UNet 32x32 256 + 128->128 1x1, batch 128", (256, 128), (128, 32, 32), (128, 1, 1), real_size=True),
    _sample("UNet 32x32 128 + 128->128 1x1, batch 128", (128, 128), (128, 32, 32), (128, 1, 1), real_size=True),
    _sample("UNet 16x16 256 + 256->256 1x1, batch 128", (256, 256), (128, 16, 16), (256, 1, 1), real_size=True),
    _sample("UNet 8x8 256 + 256->256 1x1, batch 128", (256, 256), (128, 8, 8), (256, 1, 1), real_size=True),
    _sample("UNet 4x4 256 + 256->256 1x1, batch 128", (256, 256), (128, 4, 4), (256, 1, 1), real_size=True),
    _sample("channels beside the tiles, odd map", (48, 24), (3, 7, 13), (72, 1, 1), bias=True),
    _sample("3x3, boxes of several images", (64, 72), (9, 3, 3), (40, 3, 3), bias=True),
)

OP = define(
    concat_conv2d,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=DTYPES,
    interpretable=False,
)
