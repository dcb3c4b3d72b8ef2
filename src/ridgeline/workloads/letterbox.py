"""Fit an image into the network's input, and map boxes back to the image.

The image is scaled by one ratio, centred, and framed with grey 114. Mode "square" fills size x size; mode "rect" pads
the short side only up to the next multiple of the stride. The mode moves boxes by pixels and mAP by tenths, so
nothing here has a default for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ridgeline.errors import UsageError

MODES = ("square", "rect")
PAD_VALUE = 114
MAX_SIZE = 4096  # attention takes memory by its fourth power: yolo26n 5 GB here on a CPU, 16 times that at twice


@dataclass(frozen=True)
class Letterbox:
    """Where an image of image_h x image_w lands in the network's input. All fields in pixels."""

    image_h: int
    image_w: int
    new_h: int  # the image after scaling
    new_w: int
    left: int
    top: int
    right: int
    bottom: int

    @property
    def height(self) -> int:
        return self.top + self.new_h + self.bottom

    @property
    def width(self) -> int:
        return self.left + self.new_w + self.right

    @property
    def gain_x(self) -> float:
        """Input pixels per image pixel; differs from `gain_y` by the rounding of the scaled size."""
        return self.new_w / self.image_w

    @property
    def gain_y(self) -> float:
        return self.new_h / self.image_h


def plan(h: int, w: int, size: int = 640, *, mode: str, stride: int = 32, scaleup: bool = True) -> Letterbox:
    """The letterbox of an h x w image. Sides round half to even; an odd pad puts its extra pixel right and below.

    Raises UsageError for sides below 1, a size that is no multiple of the stride or above MAX_SIZE, or an unknown mode.
    """
    if mode not in MODES:
        raise UsageError(f"letterbox mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(size, int) or size < stride or size % stride:
        raise UsageError(f"image size must be a positive multiple of {stride}, got {size}")
    if size > MAX_SIZE:
        raise UsageError(f"image size must be at most {MAX_SIZE}, got {size}: cut larger images into parts")
    if h < 1 or w < 1:
        raise UsageError(f"an image must have at least one pixel a side, got {h} x {w}")
    ratio = min(size / h, size / w)
    if not scaleup:
        ratio = min(ratio, 1.0)
    new_h, new_w = max(round(h * ratio), 1), max(round(w * ratio), 1)
    pad_h, pad_w = size - new_h, size - new_w
    if mode == "rect":
        pad_h, pad_w = pad_h % stride, pad_w % stride
    left, right = _halves(pad_w)
    top, bottom = _halves(pad_h)
    return Letterbox(h, w, new_h, new_w, left=left, top=top, right=right, bottom=bottom)


def apply(image: NDArray[np.uint8], letterbox: Letterbox) -> NDArray[np.uint8]:
    """The framed image, uint8 [height, width, 3]. Scales with OpenCV's 8-bit bilinear filter, only if the size changes.

    Bit-equal to the usual YOLO preprocessing, whose detections this must reproduce.
    """
    if image.dtype != np.uint8 or image.shape != (letterbox.image_h, letterbox.image_w, 3):
        raise ValueError(
            f"letterbox was planned for uint8 {(letterbox.image_h, letterbox.image_w, 3)}, "
            f"got {image.dtype} {image.shape}"
        )
    new_h, new_w = letterbox.new_h, letterbox.new_w
    if image.shape[:2] != (new_h, new_w):
        image = np.asarray(cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR), np.uint8)
    framed = np.full((letterbox.height, letterbox.width, 3), PAD_VALUE, np.uint8)
    framed[letterbox.top : letterbox.top + new_h, letterbox.left : letterbox.left + new_w] = image
    return framed


def to_tensor(
    images: Sequence[NDArray[np.uint8]],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Framed RGB images of one shape as contiguous [N, 3, H, W] in 0..1. Raises ValueError when their shapes differ."""
    shapes = {image.shape for image in images}
    if len(shapes) != 1:
        raise ValueError(f"a batch needs images of one shape, got {sorted(shapes)}: use mode 'square' or batch 1")
    # uint8 crosses to the device, a quarter of the float bytes
    x_nhwc = torch.from_numpy(np.stack(images)).to(device)
    return (x_nhwc.permute(0, 3, 1, 2).float() / 255).to(dtype).contiguous()


def boxes_back(boxes: ArrayLike, letterbox: Letterbox) -> NDArray[np.float64]:
    """Boxes [..., 4] as x1 y1 x2 y2 in input pixels → float64 in image pixels, clamped to the image."""
    left, top, w, h = letterbox.left, letterbox.top, letterbox.image_w, letterbox.image_h
    gain = np.array([letterbox.gain_x, letterbox.gain_y] * 2)
    image_boxes = (np.asarray(boxes, np.float64) - (left, top, left, top)) / gain
    return image_boxes.clip(0.0, (w, h, w, h))


def _halves(pad: int) -> tuple[int, int]:
    return round(pad / 2 - 0.1), round(pad / 2 + 0.1)
