"""Calls of group_norm_silu_backward_fp8: what may be given, and how it is tiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ridgeline.kernels._group_norm_silu_call import BackwardCall, Config
from ridgeline.kernels._op import Target
from ridgeline.kernels._quads import why_not
from ridgeline.kernels._quantize_fp8_call import check_rows

_CHANNELS = 16  # a multiple of them is what FP8 convolutions take
_MOST_PIECES = 32  # of a slab: the kernel's code has each of them
_WORKING = 64  # registers a thread beside the elements that it holds; two programs of 64 KB then fit a multiprocessor
_FEWEST = 128  # that a thread is bound to: small slabs have so few programs that more of them need not fit
_OBSERVED = 8  # elements at most that a thread observes together


@dataclass(frozen=True, kw_only=True)
class BackwardFp8Call(BackwardCall):
    """One call, checked but for its tiles."""

    name: ClassVar[str] = "group_norm_silu_backward_fp8"

    fp8_scale: Tensor
    amax: Tensor
    counts: Tensor
    row: int
    quads: bool = False
    keep: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.x2 is None  # its gradient would have a scale of its own
        check_rows(self.x, self.amax, self.counts, self.fp8_scale, self.row)
        c, h, w = self.x.shape[1:]
        if c % _CHANNELS:
            self.refuse(f"x must have a multiple of {_CHANNELS} channels, got {c}")
        if h * w % 4:
            self.refuse(f"a map of x must have a multiple of 4 pixels, got {h} x {w}")
        if self.quads and (reason := why_not(h, w)) is not None:
            self.refuse(reason)

    def takes(self, config: Config, target: Target) -> bool:
        """Whether a program of `config` holds its slab in few enough pieces, for quads of whole rows."""
        if not (config.is_valid(self, target) and config.whole(self)):
            return False
        pieces = self.pieces(config)
        whole = not self.quads or pieces["BLOCK_P"] % self.x.shape[3] == 0
        return whole and pieces["PIECES"] <= _MOST_PIECES

    def pieces(self, config: Config) -> dict[str, int]:
        """The tiling of `config`, in pieces that end where a quarter of the map does."""
        constants = config.constants(self)
        quarter = self.pixels // 4
        block_p = min(constants["BLOCK_P"], quarter & -quarter)
        elements = block_p * constants["BLOCK_C"] // (32 * config.num_warps)
        access = min(_OBSERVED, max(1, elements))
        return {**constants, "BLOCK_P": block_p, "PIECES": self.pixels // block_p, "ACCESS": access}

    def most_registers(self, config: Config) -> int:
        """What a thread is bound to: left alone, the compiler takes 168 and more, one program a multiprocessor."""
        return min(max(config.registers(self) + _WORKING, _FEWEST), 65_536 // (32 * config.num_warps), 255)
