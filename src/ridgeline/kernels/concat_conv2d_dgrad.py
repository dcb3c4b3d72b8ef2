"""dx1, dx2 = the gradients of concat_conv2d's maps, from dy and weight, each with a residual added, NHWC. sm_90.

dy         [N, K, HO, WO]      channels_last, or a channel slice of it; fp16, bf16
weight     [K, C1 + C2, R, S]  channels_last; dtype of dy
residual1  [N, C1, H, W]       as dy: the gradient that another reader of x1 has
residual2  [N, C2, H, W]       likewise
dx1, dx2                       as the residuals; channels_last, dtype of dy
padding                        (rows, columns) of zeros on each side of x1 and x2, less than R and S

C1 and C2 are multiples of 16, K of 8; stride 1. Accumulates in fp32, adds the residual and rounds once, in the order of
conv2d_dgrad on the concatenation, whose tuned configs it takes where their tiles divide C1 and C2. Neither gradient is
a slice, which readers would have to copy. Raises ValueError or TypeError for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_input_grad
from ridgeline.kernels import conv2d_dgrad
from ridgeline.kernels._concat_conv2d_call import concat_pass, concat_sample
from ridgeline.kernels._concat_conv2d_gluon import concat_conv2d_dgrad_kernel
from ridgeline.kernels._conv2d_launch import residual_cost, whole_tile
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    NARROW,
    Config,
    Pass,
    box_count,
    box_of,
    map_of,
    step_of,
    tile_configs,
    weight_map,
)
from ridgeline.kernels._nhwc import empty_nhwc, starts_early
from ridgeline.kernels._op import (
    Launch,
    Launcher,
    Op,
    Sample,
    Target,
    check_launchable,
    register,
    target_of,
    tuned_config,
)

Gradients = tuple[Tensor, Tensor]


def gradients(dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, *, padding: Sequence[int]) -> Gradients:
    """Both, by PyTorch's own kernels."""
    residual = torch.cat((residual1, residual2), 1)
    dx1, dx2 = conv2d_dgrad.reference(dy, weight, residual, padding=padding).split(
        [residual1.shape[1], residual2.shape[1]], 1
    )
    return dx1.clone(memory_format=torch.channels_last), dx2.clone(memory_format=torch.channels_last)


def reference(dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, *, padding: Sequence[int]) -> Tensor:
    """dx1 alone."""
    return gradients(dy, weight, residual1, residual2, padding=padding)[0]


def cost(dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, *, padding: Sequence[int]) -> Cost:
    one = _pass(dy, weight, residual1, residual2, padding)
    return conv_input_grad(one.conv, dy.dtype) + residual_cost(residual1) + residual_cost(residual2)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    target = target or target_of(arguments["dy"])
    return _configs(_pass(**arguments), arguments["residual1"].shape[1], target)


def plan(
    dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, *,
    padding: Sequence[int], config: Config | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The launch that makes dx1 and, as its argument `dx2_desc`, dx2. Runs nothing."""
    one, target = _pass(dy, weight, residual1, residual2, padding), target or target_of(dy)
    one.check_maps(DTYPES, dy=dy, residual1=residual1, residual2=residual2)
    one.check_weight(weight, dy.dtype)
    c1, c2 = residual1.shape[1], residual2.shape[1]
    if config is None:
        filed = {"dy": dy, "weight": weight, "padding": padding}
        config = tuned_config(conv2d_dgrad.OP, Config, lambda c: _is_valid(c, one, c1, target), **filed)
        config = config or next(iter(_configs(one, c1, target)), None)
    if config is None or not _is_valid(config, one, c1, target):
        one.refuse(f"{config} is not valid for {one.conv} with {c1} and {c2} channels on {target.arch}")
    step = step_of(one.conv.k, dy.element_size())
    config = whole_tile(config, dy.element_size(), step, target)
    dx1, dx2 = (empty_nhwc((*residual.shape,), dy) for residual in (residual1, residual2))  # pyright: ignore
    n, _, h, w = dx1.shape
    box, (r, s) = box_of(n, h, w, config.pixels), one.conv.filter
    return Launch(
        kernel=concat_conv2d_dgrad_kernel,
        grid=(min(box_count(n, h, w, box) * (one.conv.c // config.channels), target.sm_count),),
        arguments={
            "dy_desc": map_of(dy, box, step),
            "weight_desc": weight_map(weight, (step, 1, config.channels)),
            "dx1_desc": map_of(dx1, box, config.channels),
            "dx2_desc": map_of(dx2, box, config.channels),
            "residual1_desc": map_of(residual1, box, config.channels),
            "residual2_desc": map_of(residual2, box, config.channels),
            "images": n,
            "H": h,
            "W": w,
        },
        constants={
            # row h of x meets row h + top - tap of dy, and the last tap comes first
            "C1": c1, "REDUCED": one.conv.k, "OUT": one.conv.c, "R": r, "S": s,
            "TOP": r - 1 - one.padding[0], "LEFT": s - 1 - one.padding[1],
            "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2], "BLOCK_N": config.channels, "BLOCK_K": step,
            "STAGES": config.stages, "PDL": starts_early(target),
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=dx1,
        pdl=starts_early(target),
    )  # fmt: skip


def concat_conv2d_dgrad(
    dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, *, padding: Sequence[int]
) -> Gradients:
    launch = plan(dy, weight, residual1, residual2, padding=padding)
    if launch.output.numel():
        check_launchable("concat_conv2d_dgrad", launch.kernel, dy)
        launch.run()
    return launch.output, second(launch)


def second(launch: Launch) -> Tensor:
    """dx2 of a launch."""
    descriptor: Any = launch.arguments["dx2_desc"]
    return descriptor.base


def _fake(dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, *, padding: Sequence[int]) -> Gradients:
    _pass(dy, weight, residual1, residual2, padding)
    dx1, dx2 = (torch.empty_like(one, memory_format=torch.channels_last) for one in (residual1, residual2))
    return dx1, dx2


def _pass(dy: Tensor, weight: Tensor, residual1: Tensor, residual2: Tensor, padding: Sequence[int]) -> Pass:
    k, c, *filter_size = weight.shape
    one = concat_pass("concat_conv2d_dgrad", (residual1, residual2), k, filter_size, padding)
    if c != one.conv.c:
        one.refuse(f"weight {tuple(weight.shape)} must have the {one.conv.c} channels of both residuals")
    if tuple(dy.shape) != one.y_shape:
        one.refuse(f"dy must have the shape of y, {one.y_shape}, got {tuple(dy.shape)}")
    return one


def _configs(one: Pass, c1: int, target: Target) -> tuple[Config, ...]:
    found = tile_configs(one.conv.k, one.conv.c, one.dtype.itemsize, target)
    return tuple(config for config in (*found, NARROW) if _is_valid(config, one, c1, target))


def _is_valid(config: Config, one: Pass, c1: int, target: Target) -> bool:
    """As for one map, and every tile is full of the channels of one."""
    size = one.dtype.itemsize
    whole = not (c1 % config.channels or one.conv.c % config.channels)
    return whole and config.is_valid(size, step_of(one.conv.k, size), target)


def _sample(
    why: str, channels: tuple[int, int], image: tuple[int, int, int], weight: tuple[int, int, int], **options: Any
) -> Sample:
    names = ("residual1", "residual2", "dy", "weight")
    return concat_sample(why, channels, image, weight, names=names, **options)


SAMPLES = (
    _sample("UNet 32x32 256 + 128->128 1x1, batch 128", (256, 128), (128, 32, 32), (128, 1, 1), real_size=True),
    _sample("UNet 32x32 128 + 128->128 1x1, batch 128", (128, 128), (128, 32, 32), (128, 1, 1), real_size=True),
    _sample("UNet 16x16 256 + 256->256 1x1, batch 128", (256, 256), (128, 16, 16), (256, 1, 1), real_size=True),
    _sample("UNet 8x8 256 + 256->256 1x1, batch 128", (256, 256), (128, 8, 8), (256, 1, 1), real_size=True),
    _sample("UNet 4x4 256 + 256->256 1x1, batch 128", (256, 256), (128, 4, 4), (256, 1, 1), real_size=True),
    _sample("narrow tiles, odd map", (48, 32), (3, 7, 13), (72, 1, 1)),
    _sample("3x3, boxes of several images", (64, 96), (9, 3, 3), (40, 3, 3)),
)

OP = Op(
    name="concat_conv2d_dgrad",
    call=register(concat_conv2d_dgrad, fake=_fake, on_cpu=gradients, cost=cost, interpretable=False),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=DTYPES,
    error_factor=2.0,
    into=None,
)
