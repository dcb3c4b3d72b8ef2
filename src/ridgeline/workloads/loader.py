"""Batches for training: shuffled without end, gathered ahead of the step, flipped and scaled on the device.

Everything random follows from (seed, epoch), so that (epoch, index) is the whole state and a resumed run sees the very
images, in the very order and flips, that it would have seen. Numbers are equal on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.errors import UsageError

Resident = Literal["auto", "device", "host"]
RESIDENT_SHARE = 8  # "auto" keeps the set on a GPU while it takes at most this fraction (1/8) of the free memory


@dataclass(frozen=True)
class Position:
    """`index` images of `epoch` have been taken."""

    epoch: int = 0
    index: int = 0


class Batches(Iterator[Tensor]):
    """Endless iterator of fp32 [batch, C, H, W] in [-1, 1], channels_last, on `device`.

    Every epoch is another permutation and uses each image once; a batch may span two epochs, so that all have one size.
    Each image is mirrored left to right with probability one half when `flip`. `position` may be read and set at any
    time: it is where the next batch begins, whatever has been gathered ahead.

    resident  "device": the whole set lives on the GPU, and a step moves no image over the bus; "host": the next batch
              is gathered in pinned memory and copied on a stream of its own; "auto": the former where it fits.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        batch: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        resident: Resident = "auto",
        flip: bool = True,
    ) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
            raise UsageError(f"loader: images must be uint8 [N, H, W, C], got {images.dtype} {list(images.shape)}")
        if batch < 1:
            raise UsageError(f"loader: batch must be at least 1, got {batch}")
        self._images = images
        self._batch = batch
        self._seed = seed
        self._device = torch.device(device)
        self._flip = flip
        self._on_device = self._place(resident)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._orders: dict[int, tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        self._position = Position()
        self._ahead: tuple[Tensor, Tensor] | None = None  # pixels and flips of the batch at `position`

    @property
    def position(self) -> Position:
        return self._position

    @position.setter
    def position(self, value: Position) -> None:
        if value.epoch < 0 or not 0 <= value.index < len(self._images):
            raise UsageError(f"loader: {value} lies outside a set of {len(self._images)} images")
        self._position, self._ahead = value, None

    def __next__(self) -> Tensor:
        pixels, flips = self._ahead or self._gather(self._position)
        self._position = self._after(self._position)
        self._ahead = None
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            # the allocator must not hand this memory to the copy stream again before the step has read it
            pixels.record_stream(current)
            flips.record_stream(current)
            self._ahead = self._gather(self._position)
        return to_model_range(pixels, flips)

    def _place(self, resident: Resident) -> Tensor | None:
        """The whole set on the GPU, or None."""
        if resident not in ("auto", "device", "host"):
            raise UsageError(f"loader: resident must be auto, device or host, got {resident!r}")
        if self._device.type != "cuda" or resident == "host":
            return None
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        if resident == "auto" and self._images.nbytes * RESIDENT_SHARE > free_bytes:
            return None
        return torch.from_numpy(np.array(self._images)).to(self._device)

    def _after(self, position: Position) -> Position:
        epochs, index = divmod(position.index + self._batch, len(self._images))
        return Position(position.epoch + epochs, index)

    def _gather(self, position: Position) -> tuple[Tensor, Tensor]:
        """uint8 [batch, H, W, C] and bool [batch], on the device once the copy stream gets there."""
        chosen, flips = self._choose(position)
        if self._copies is None:
            return torch.from_numpy(self._images[chosen]), torch.from_numpy(flips)
        with torch.cuda.stream(self._copies):
            flips_on_device = _pinned(flips).to(self._device, non_blocking=True)
            if self._on_device is not None:
                indices = _pinned(chosen).to(self._device, non_blocking=True)
                return self._on_device.index_select(0, indices), flips_on_device
            # pinned memory comes from PyTorch's cache, which reuses a block only after the copy out of it is done
            pixels = torch.empty((len(chosen), *self._images.shape[1:]), dtype=torch.uint8, pin_memory=True)
            np.take(self._images, chosen, axis=0, out=pixels.numpy(), mode="clip")
            return pixels.to(self._device, non_blocking=True), flips_on_device

    def _choose(self, position: Position) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Which images form the batch at `position`, and which of them are mirrored."""
        parts: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []
        epoch, index, missing = position.epoch, position.index, self._batch
        while missing:
            order, flips = self._order(epoch)
            taken = slice(index, min(index + missing, len(order)))
            parts.append((order[taken], flips[taken]))
            missing -= taken.stop - taken.start
            epoch, index = epoch + 1, 0
        return np.concatenate([chosen for chosen, _ in parts]), np.concatenate([flips for _, flips in parts])

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if epoch not in self._orders:
            # a batch looks at no epoch but its first and those after it
            self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
            draws = np.random.default_rng([self._seed, epoch])
            order = draws.permutation(len(self._images))
            flips = draws.random(len(self._images)) < 0.5
            self._orders[epoch] = order, flips & self._flip
        return self._orders[epoch]


def to_model_range(pixels: Tensor, flips: Tensor) -> Tensor:
    """uint8 [N, H, W, C] and bool [N] → fp32 [N, C, H, W] in [-1, 1], channels_last; mirrored where `flips`."""
    mirrored = torch.where(flips[:, None, None, None], pixels.flip(2), pixels)
    # NHWC memory seen as NCHW is channels_last already: no layout copy
    return mirrored.permute(0, 3, 1, 2).float().mul_(2 / 255).sub_(1)


def to_pixels(x: Tensor) -> Tensor:
    """fp [N, C, H, W] in [-1, 1] → uint8 [N, H, W, C], rounded; what lies outside is clamped."""
    return ((x.float() + 1) * (255 / 2)).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _pinned(values: NDArray) -> Tensor:
    return torch.from_numpy(values).pin_memory()
