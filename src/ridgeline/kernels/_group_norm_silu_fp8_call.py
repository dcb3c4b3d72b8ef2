"""Calls of group_norm_silu_fp8: what may be given, and how it is tiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ridgeline.kernels._group_norm_silu_call import Call
from ridgeline.kernels._group_norm_silu_call import Config as Slab
from ridgeline.kernels._group_norm_silu_call import default_config as default_slab
from ridgeline.kernels._group_norm_silu_fp8 import PACK
from ridgeline.kernels._nhwc import cdiv, next_power_of_2
from ridgeline.kernels._op import Target
from ridgeline.kernels._quads import why_not
from ridgeline.kernels._quantize_fp8_call import check_rows

WARPS = (1, 2, 4, 8, 16)
_PREFERRED_WARPS = (4, 8, 16, 2, 1)
_MOST_REGISTERS = 64  # of x a thread, so that sixteen warps share a multiprocessor
_MOST_BYTES = WARPS[-1] * 32 * _MOST_REGISTERS * 4  # of x in a slab
# Registers beside those of x with which nothing is spilled. With fewer, more programs fit, and take longer: measured on
# an H200 with 64 of x and no dropout, 112 and 128 in all 33.6 µs, 96 36.5, 80 47.9.
_WORKING, _DRAWING = 48, 8  # the latter with dropout
_REGISTERS, _MOST_WARPS = 65_536, 64  # of a multiprocessor
_ROW_BYTES = 32  # the unit in which memory is written: a slab's share of a pixel should fill it


@dataclass(frozen=True)
class Fp8Call(Call):
    """One call, checked: the norm's arguments, then those of what quantises."""

    name: ClassVar[str] = "group_norm_silu_fp8"

    fp8_scale: Tensor | None = None
    amax: Tensor | None = None
    counts: Tensor | None = None
    row: int = 0
    quads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_scale is None or self.amax is None or self.counts is None:
            self.refuse("fp8_scale, amax and counts must be given")
        check_rows(self.x, self.amax, self.counts, self.fp8_scale, self.row)
        if self.quads and (reason := why_not(*self.x.shape[2:])) is not None:
            self.refuse(reason)

    @property
    def norm(self) -> dict[str, Any]:
        """The arguments of the norm alone."""
        own = ("fp8_scale", "amax", "counts", "row", "quads")
        return {name: value for name, value in vars(self).items() if name not in own}


@dataclass(frozen=True)
class Config:
    """A program takes whole `groups` of a sample, piece by piece: PACK elements of each a thread."""

    groups: int
    num_warps: int

    def is_valid(self, call: Call, quads: bool) -> bool:
        """Whether it divides the groups and the map, and its threads hold the slab."""
        if self.num_warps not in WARPS or not 1 <= self.groups <= call.groups or call.groups % self.groups:
            return False
        rows, quarter = self.rows(call), call.pixels // 4
        divides = not quads or (rows and quarter % rows == rows % call.x.shape[3] == 0)
        return bool(rows and divides) and self.registers(call, quads) <= _MOST_REGISTERS

    def slab(self, call: Call) -> Slab:
        return Slab(self.groups, next_power_of_2(call.pixels), self.num_warps)

    def rows(self, call: Call) -> int:
        """Pixels of a piece."""
        return PACK * 32 * self.num_warps // self.slab(call).block_c(call)

    def pieces(self, call: Call, quads: bool) -> int:
        return 4 * (call.pixels // 4 // self.rows(call)) if quads else cdiv(call.pixels, self.rows(call))

    def programs(self, call: Call) -> int:
        return call.x.shape[0] * (call.groups // self.groups)

    def registers(self, call: Call, quads: bool) -> int:
        """What a thread's share of x takes."""
        return self.pieces(call, quads) * PACK * call.x.element_size() // 4

    def max_registers(self, call: Call, quads: bool) -> int:
        """All that a thread may take where as many programs share a multiprocessor as fit without spilling."""
        needed = self.registers(call, quads) + _WORKING + (_DRAWING if call.p else 0)
        warps = min(_REGISTERS // (32 * needed), _MOST_WARPS) // self.num_warps * self.num_warps
        return min(_REGISTERS // (32 * warps) // 8 * 8, 255)  # they are given in eights


def default_config(call: Call, quads: bool, target: Target) -> Config | None:
    """The widest slab of whole _ROW_BYTES a pixel that four warps hold and every multiprocessor gets three of.

    Of eight warps, sixteen, two or one where there is no such slab of four, and the narrowest where all are too few.
    Where none has whole _ROW_BYTES, groups as group_norm_silu takes them, or more where pieces would not divide a
    quarter. None where nothing fits.
    """
    pixels = next_power_of_2(call.pixels)
    if pixels * next_power_of_2(call.group_channels) * call.x.element_size() > _MOST_BYTES:
        return None
    slab = default_slab(call, target)
    if not slab.whole(call):
        return None
    wider = [k for k in range(slab.groups, call.groups + 1) if call.groups % k == 0]
    filling = [k for k in range(1, call.groups + 1) if call.groups % k == 0 and _fills_rows(call, k)]
    by_warps = [_valid(call, quads, filling, warps) for warps in _PREFERRED_WARPS]
    busy = [[c for c in valid if c.programs(call) >= 3 * target.sm_count] for valid in by_warps]
    narrowest = [_valid(call, quads, [k], warps) for k in wider for warps in WARPS]
    best = [valid[-1:] for valid in busy] + by_warps + narrowest
    return next((valid[0] for valid in best if valid), None)


def _fills_rows(call: Call, groups: int) -> bool:
    return groups * call.group_channels % _ROW_BYTES == 0


def _valid(call: Call, quads: bool, widths: list[int], num_warps: int) -> list[Config]:
    return [config for k in widths if (config := Config(k, num_warps)).is_valid(call, quads)]
