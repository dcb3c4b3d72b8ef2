"""One call of detect_topk, checked, and how its kernels deal out the maps; the kernels' file says what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._nhwc import cdiv, check_map, next_power_of_2, pixel_pitch
from ridgeline.models.postprocess import MAX_DETECTIONS

_TILE_LOGITS = _SPLITTERS = 8192  # of a tile, of an image: most where shapes leave a choice, 32 a thread of 8 warps
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # bits of an fp32 that are 0 if it comes from these


@dataclass(frozen=True)
class Problem:
    """One call, checked."""

    box_p3: Tensor
    box_p4: Tensor
    box_p5: Tensor
    logits_p3: Tensor
    logits_p4: Tensor
    logits_p5: Tensor
    limit: int = MAX_DETECTIONS
    pdl: bool = False
    out: Tensor | None = None

    def __post_init__(self) -> None:
        first, logits = self.box_p3, self.logits_p3
        if any(t.dim() != 4 for t in (*self.boxes, *self.logits)) or 0 in logits.shape[1:]:
            _refuse(f"boxes and logits must have 4 axes, got {tuple(first.shape)} and {tuple(logits.shape)}")
        if first.dtype not in FLOATS or logits.dtype not in FLOATS:
            _refuse(f"maps must be fp32, fp16 or bf16, got {first.dtype} boxes and {logits.dtype} logits", TypeError)
        n, _, h, w = first.shape
        if h % 4 or w % 4:
            _refuse(f"the map of stride 8 must have sides that are multiples of 4, got {h}x{w}")
        if self.limit < 1:
            _refuse(f"limit must be at least 1, got {self.limit}")
        for level, box, logit in zip((3, 4, 5), self.boxes, self.logits, strict=True):
            size = h >> (level - 3), w >> (level - 3)
            check_map("detect_topk", f"box_p{level}", box, like=first, shape=(n, 4, *size))
            check_map("detect_topk", f"logits_p{level}", logit, like=logits, shape=(n, self.classes, *size))
            for name, tensor in (("box", box), ("logits", logit)):
                if tensor.device != first.device:
                    _refuse(f"{name}_p{level} must be on {first.device} like box_p3, got {tensor.device}")
                if size[0] * size[1] * (pixel_pitch(tensor) or 0) >= INT32_ELEMENTS:
                    _refuse(f"{name}_p{level} must span less than 2^31 elements an image, got {tuple(tensor.shape)}")
        if self.pairs >= INT32_ELEMENTS:
            _refuse(f"anchors times classes must be below 2^31, got {self.anchors} times {self.classes}")

    @property
    def boxes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.box_p3, self.box_p4, self.box_p5

    @property
    def logits(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.logits_p3, self.logits_p4, self.logits_p5

    @property
    def classes(self) -> int:
        return self.logits_p3.shape[1]

    @property
    def cells(self) -> tuple[int, ...]:
        """Anchors of each level."""
        return tuple(box.shape[2] * box.shape[3] for box in self.boxes)

    @property
    def anchors(self) -> int:
        return sum(self.cells)

    @property
    def detections(self) -> int:
        return min(self.limit, self.anchors)

    @property
    def word_bits(self) -> int:
        """2^word_bits logits are 16 bytes."""
        return 4 - (self.logits_p3.element_size() - 1).bit_length()

    @property
    def block_c(self) -> int:
        return max(next_power_of_2(self.classes), 1 << self.word_bits)

    @property
    def tile(self) -> int:
        """Anchors of a tile."""
        return max(16, min(64, _TILE_LOGITS // self.block_c))

    @property
    def tiles(self) -> int:
        """Of an image, each on one level."""
        return sum(cdiv(cells, self.tile) for cells in self.cells)

    @property
    def slots(self) -> int:
        """Splitters of a tile: its places 1, 2, 4 ... to the last, fewer on maps of very many anchors."""
        return min(self.tile.bit_length(), max(1, _SPLITTERS // self.tiles))

    @property
    def splitters(self) -> int:
        return self.tiles * self.slots

    @property
    def splitter_dtype(self) -> torch.dtype:
        return torch.int64 if self.tile_bits == 32 else torch.int32

    @property
    def pairs(self) -> int:
        return self.anchors * self.classes

    @property
    def shift(self) -> int:
        return _SHIFT[self.logits_p3.dtype]

    @property
    def tile_bits(self) -> int:
        """Below a key in a splitter: those that an int32 has left, or 32 of an int64."""
        return self.shift if self.tiles <= 1 << self.shift else 32

    @property
    def pair_bits(self) -> int:
        """Below two keys in an int64, or 0."""
        left = 2 * self.shift
        return left if self.pairs <= 1 << left else 0


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"detect_topk: {text}")
