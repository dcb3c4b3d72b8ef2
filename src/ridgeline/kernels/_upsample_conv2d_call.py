"""What upsample_conv2d and its two gradients check, launch and choose alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._conv2d_pass import DTYPES, PHASE_GRANULE, Config, Pass, configs_of_phases, pass_of, tile_configs
from ridgeline.kernels._nhwc import cdiv, starts_early
from ridgeline.kernels._op import Launch, Target

FILTER = (3, 3)
PADDING = (1, 1)
PHASES, PHASE_TAPS = 4, 4
_TAPS = FILTER[0] * FILTER[1]
_PAIRS = 256  # of filter and channel that a program of phase_weights_kernel has


def upsample_pass(name: str, x_shape: tuple[int, ...], k: int, dtype: torch.dtype) -> Pass:
    """The convolution of the upsampled map, from x [N, C, H, W] to K filters."""
    n, c, h, w = x_shape
    return pass_of(name, ConvProblem(n, c, k, (2 * h, 2 * w), FILTER, padding=PADDING), dtype)


def check(one: Pass, *, weight: Tensor | None = None, dy: Tensor | None = None, **maps: Tensor) -> None:
    """Refuse what the tensor maps cannot describe. `dy` is dense, because its phases are interleaved."""
    if dy is not None:
        maps = {"dy": dy, **maps}
    one.check_maps(DTYPES, **maps)
    if one.conv.k % PHASE_GRANULE:
        one.refuse(f"filters must be a multiple of {PHASE_GRANULE}, got {one.conv.k}")
    if dy is not None and not dy.is_contiguous(memory_format=torch.channels_last):
        one.refuse(f"dy must be channels_last, got strides {dy.stride()} for shape {tuple(dy.shape)}")
    if weight is not None:
        one.check_weight(weight, one.dtype)
        if tuple(weight.shape[2:]) != FILTER:
            one.refuse(f"filters must be 3 x 3, got {weight.shape[2]} x {weight.shape[3]}")


def cost_of(one: Pass, full: Cost, *, read: int, written: int) -> Cost:
    """4 taps of each phase instead of 9, where `full` is the pass of the upsampled map's convolution; elements moved.

    The weight of the phases is not charged.
    """
    size = one.dtype.itemsize
    return replace(full, flops=full.flops * PHASE_TAPS // _TAPS, read_bytes=read * size, write_bytes=written * size)


def phase_configs(one: Pass, target: Target, *, dgrad: bool) -> tuple[Config, ...]:
    """What is worth timing, the likeliest first, see `Product.is_valid`."""
    conv, size = one.conv, one.dtype.itemsize
    return tile_configs(conv.k, conv.c, size, target) if dgrad else configs_of_phases(conv.c, conv.k, size, target)


def phase_weights(kernel: Any, weight: Tensor, target: Target) -> Launch:
    """The launch that makes V [K, C, phases, taps of each], channels_last, of a weight; see `_upsample_conv2d`."""
    k, c = weight.shape[:2]
    shape = (k, c, PHASES, PHASE_TAPS)
    phases = torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
    pdl = starts_early(target)
    return Launch(
        kernel=kernel,
        grid=(cdiv(k * c, _PAIRS),),
        arguments={"weight_ptr": weight, "phases_ptr": phases, "pairs": k * c},
        constants={"C": c, "BLOCK": _PAIRS, "PDL": pdl},
        num_warps=4,
        num_stages=1,
        output=phases,
        pdl=pdl,
    )


def upsampled(x: Tensor) -> Tensor:
    """Each pixel as 2 x 2 equal ones."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def gradient_of_upsampled(d_large: Tensor) -> Tensor:
    """The gradient of `upsampled`'s argument: sums of 2 x 2."""
    rows, columns = d_large.shape[2:]
    return d_large.unflatten(3, (columns // 2, 2)).unflatten(2, (rows // 2, 2)).sum((3, 5))
