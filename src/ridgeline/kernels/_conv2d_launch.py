"""How the convolutions of training launch the two kernels for wgmma: only what they read and write differs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels._conv2d_pass import (
    GRANULE,
    WGRAD_PIXELS,
    Config,
    Pass,
    WgradConfig,
    box_count,
    box_of,
    configs_of_phases,
    large_map_of,
    map_of,
    step_of,
    summed_at_once,
    tile_configs,
    weight_map,
)
from ridgeline.kernels._nhwc import cdiv, pixel_pitch, starts_early
from ridgeline.kernels._op import LastLaunch, Launch, Target


def check_residual(one: Pass, residual: Tensor | None, out: Tensor) -> None:
    """Refuse a residual that is no map like `out`, or that a tensor map cannot describe, and any with stride 2."""
    if residual is None:
        return
    if one.stride != 1:
        one.refuse(f"a residual is added with stride 1 alone, got {one.stride}")
    if residual.dtype != out.dtype:
        one.refuse(f"residual must be {out.dtype}, got {residual.dtype}", TypeError)
    if residual.shape != out.shape:
        one.refuse(f"residual must have the shape {tuple(out.shape)} of the result, got {tuple(residual.shape)}")
    pitch = pixel_pitch(residual)
    if pitch is None or pitch % GRANULE or residual.storage_offset() % GRANULE:
        one.refuse(
            f"residual must be channels_last, or a slice of it that starts at a multiple of {GRANULE} channels, "
            f"got strides {residual.stride()} for shape {tuple(residual.shape)}"
        )


def residual_cost(residual: Tensor | None) -> Cost:
    return Cost() if residual is None else Cost(read_bytes=residual.nbytes)


@dataclass(frozen=True)
class Product:
    """The tensors of one call, checked: out = conv2d(operand, weight) * inverse[row] * inverse[row of weight] + bias
    + residual.

    With `dgrad` the operand is dy and out is dx: the weight's filters are reduced, and its taps run backward.
    With `phases` the convolution is of x upsampled, and the weight is that of its phases, see `upsample_conv2d`.
    Where `one` has stride 2, x or dx is read or written by its phases too.

    inverse   [tensors]           fp32; None: 1
    bias      [channels of out]   None: none
    residual  [as out]            channels_last, or a channel slice of it; None: none
    """

    one: Pass
    operand: Tensor
    weight: Tensor
    out: Tensor
    inverse: Tensor | None = None
    rows: tuple[int, int] | tuple[None, None] = (None, None)  # of inverse, for operand and weight
    bias: Tensor | None = None
    residual: Tensor | None = None
    dgrad: bool = False
    phases: bool = False

    def is_valid(self, config: Config, target: Target) -> bool:
        # a tile must not reach beyond the filters of a phase: its neighbour's are stored behind them
        fits = not self._writes_phases or config.channels <= self.out.shape[1]
        return fits and config.is_valid(self._size, self._step, target)

    def launch(self, kernel: Any, config: Config | None, target: Target) -> Launch:
        """The launch with a config; None: the likeliest. Raises ValueError for one that is not valid.

        `kernel` is conv2d_gluon_kernel, by an import in the op's own file: `source_hash` follows those alone.
        """
        reduced, channels = self.operand.shape[1], self.out.shape[1]
        # the larger map of two is read or written phase by phase, each as large as the smaller
        n, _, h, w = (self.operand if self._writes_phases else self.out).shape
        known = configs_of_phases if self._writes_phases else tile_configs
        config = config or next(iter(known(reduced, channels, self._size, target)), None)
        if config is None or not self.is_valid(config, target):
            self.one.refuse(f"{config} is not valid for {self.one.conv} on {target.arch}")
        config = config if self.residual is None else whole_tile(config, self._size, self._step, target)
        box, pieces = box_of(n, h, w, config.pixels), config.pieces(self._size, self._step, target)
        tiles = box_count(n, h, w, box) * cdiv(channels, config.channels)
        tiles *= 4 if self._writes_phases else 1
        weight_box = (self._step, 1, config.channels) if self.dgrad else (config.channels, 1, self._step)
        (r, s), (top, left) = self.one.conv.filter, self.one.padding
        if self.dgrad and self.one.stride == 1:
            # row h of x meets row h + top - tap of dy, and the last tap comes first
            top, left = r - 1 - top, s - 1 - left
        if self.phases:
            # of each phase; dgrad sums over all
            r = s = 4 if self.dgrad else 2
        read = large_map_of if self._reads_phases else map_of
        written = large_map_of if self._writes_phases else map_of
        return Launch(
            kernel=kernel,
            grid=(min(tiles, target.sm_count),),
            arguments={
                "x_desc": read(self.operand, box, self._step),
                "weight_desc": weight_map(self.weight, weight_box),
                "y_desc": written(self.out, box, config.channels // pieces),
                "residual_desc": None if self.residual is None else map_of(self.residual, box, config.channels),
                "inverse_ptr": self.inverse,
                "bias_ptr": self.bias,
                "x_row": self.rows[0],
                "weight_row": self.rows[1],
                "images": n,
                "H": h,
                "W": w,
            },
            constants={
                "REDUCED": reduced, "OUT": channels, "R": r, "S": s, "TOP": top, "LEFT": left, "DGRAD": self.dgrad,
                "PHASES": 4 if self._reads_phases or self._writes_phases else 1, "STRIDE": self.one.stride,
                "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2], "BLOCK_N": config.channels,
                "BLOCK_K": self._step, "STAGES": config.stages, "PIECES": pieces, "PDL": starts_early(target),
            },
            num_warps=config.num_warps,
            num_stages=1,
            output=self.out,
            pdl=starts_early(target),
        )  # fmt: skip

    @property
    def _reads_phases(self) -> bool:
        return self.phases if self.dgrad else self.one.stride == 2

    @property
    def _writes_phases(self) -> bool:
        return self.one.stride == 2 if self.dgrad else self.phases

    @property
    def _size(self) -> int:
        """Bytes of an operand's element."""
        return self.operand.element_size()

    @property
    def _step(self) -> int:
        reduced = self.operand.shape[1]
        step = step_of(reduced, self._size)
        # behind the channels of a phase lie those of its neighbour, which must not be reduced with them
        return min(step, reduced & -reduced) if self._reads_phases else step


def whole_tile(config: Config, size: int, step: int, target: Target) -> Config:
    """The config with fewer stages, by as few as leave room for a whole tile of out: the residual is read into it.

    Of a tile in pieces none of the residual could be read before the piece in front was stored.
    """
    while config.pieces(size, step, target) > 1:
        config = replace(config, stages=config.stages - 1)
    return config


def weight_gradient_sums(
    kernel: Any, one: Pass, maps: tuple[Tensor, Tensor], config: WgradConfig, target: Target, *, phases: bool = False
) -> Launch:
    """The launch that leaves the sums of `parts` of the pixels, [parts, dw.numel()] fp32, from (dy, x), checked.

    With `phases` dy has twice the rows and columns of x, and `one` is of the smaller map and 4 taps for each phase.
    Where `one` has stride 2, x has twice those of dy.
    `kernel` is conv2d_wgrad_gluon_kernel, as in `Product.launch`.
    """
    conv, (dy, x) = one.conv, maps
    box = box_of(conv.n, conv.oh, conv.ow, WGRAD_PIXELS)
    parts, (r, s) = config.parts(conv, target), conv.filter
    sums = torch.empty((parts, conv.w_numel), dtype=torch.float32, device=x.device)
    return Launch(
        kernel=kernel,
        grid=(min(config.tiles(conv) * parts, target.sm_count),),
        arguments={
            "x_desc": (large_map_of if one.stride == 2 else map_of)(x, box, config.c),
            "dy_desc": (large_map_of if phases else map_of)(dy, box, config.k),
            "parts_ptr": sums,
            "images": conv.n,
            "H": conv.oh,
            "W": conv.ow,
        },
        constants={
            "C": conv.c, "K": conv.k, "R": r, "S": s, "TOP": one.padding[0], "LEFT": one.padding[1], "PARTS": parts,
            "PHASES": 4 if phases else 1, "STRIDE": one.stride, "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2],
            "BLOCK_K": config.k, "BLOCK_C": config.c, "TAPS": config.taps, "STAGES": config.stages,
            "PDL": starts_early(target),
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=sums,
        pdl=starts_early(target),
    )  # fmt: skip


def weight_gradient(kernel: Any, multiply: Launch, one: Pass, target: Target, **constants: int) -> Launch:
    """The launch that adds the sums of `multiply` to dw [K, C, R, S], behind it; `one` is of all of dw's taps.

    `kernel` is wgrad_parts_kernel or one that takes `constants` too, as in `Product.launch`.
    """
    sums, conv, pdl = multiply.output, one.conv, starts_early(target)
    shape = (conv.k, conv.c, *conv.filter)
    dw = torch.empty(shape, dtype=one.dtype, device=sums.device, memory_format=torch.channels_last)
    parts = len(sums)
    at_once, block = summed_at_once(parts)
    return LastLaunch(
        kernel=kernel,
        grid=(cdiv(dw.numel(), block),),
        arguments={"parts_ptr": sums, "dw_ptr": dw, "numel": dw.numel()},
        constants={**constants, "PARTS": parts, "AT_ONCE": at_once, "BLOCK": block, "PDL": pdl},
        num_warps=4,
        num_stages=1,
        output=dw,
        pdl=pdl,
        before=(multiply,),
    )
