"""Draw detections into a copy of the image, and save images whole or not at all."""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from ridgeline.atomic import write_file
from ridgeline.errors import UsageError
from ridgeline.workloads.detection import Detection, FileResult
from ridgeline.workloads.images import EXTENSIONS

Colour = tuple[int, int, int]

_FONT = cv2.FONT_HERSHEY_SIMPLEX
_HUES = 80
_HUE_STEP = 31  # coprime to 80: every class has a hue of its own, and neighbours lie far apart
_JPEG_QUALITY = 92
_JPEG_MAX_SIDE = 65500  # of the common JPEG library


def draw(image: NDArray[np.uint8], detections: Iterable[Detection]) -> NDArray[np.uint8]:
    """A copy of the uint8 [h, w, 3] RGB image with a box and a label for each detection.

    Line and letters scale with the image; a label stays inside it, and is left out where no letter would fit.
    """
    canvas = image.copy()
    line_px = max(1, round(min(canvas.shape[:2]) / 250))
    # worst first, so that the best boxes stay on top
    for found in sorted(detections, key=lambda one: one.score):
        colour = class_colour(found.class_id)
        corner, opposite = (round(found.x1), round(found.y1)), (round(found.x2), round(found.y2))
        cv2.rectangle(canvas, corner, opposite, colour, line_px)
        _draw_label(canvas, f"{found.class_name} {found.score:.2f}", corner, colour)
    return canvas


def draw_files(results: Iterable[FileResult], folder: str | Path) -> Iterator[tuple[FileResult, Path | None]]:
    """Each result with the picture drawn for it, `<stem>-detected.jpg` in `folder`; None where no image was read.

    Files of one stem are numbered, so none overwrites another of the same run; the folder is made if missing.
    Raises UsageError when it cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder '{folder}' cannot be made ({error.strerror}): choose another place") from error
    used: Counter[str] = Counter()
    for result in results:
        if result.image is None:
            yield result, None
            continue
        stem = f"{result.path.stem}-detected"
        used[stem] += 1
        number = f"-{used[stem]}" if used[stem] > 1 else ""
        extension = ".jpg" if max(result.image.shape) <= _JPEG_MAX_SIDE else ".png"
        picture = folder / f"{stem}{number}{extension}"
        save_image(picture, draw(result.image, result.detections))
        yield result, picture


def class_colour(class_id: int) -> Colour:
    """RGB of a class; COCO's 80 all differ in hue, and by thirds in depth."""
    hue = class_id * _HUE_STEP % _HUES / _HUES
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, (1.0, 0.8, 0.6)[class_id % 3])
    return round(red * 255), round(green * 255), round(blue * 255)


def save_image(path: str | Path, image: NDArray[np.uint8]) -> None:
    """Write a uint8 [h, w, 3] RGB image in the format of the file's extension, under a temporary name, then rename.

    Raises UsageError for an unknown extension or a place that cannot be written.
    """
    path = Path(path)
    extension = path.suffix.lower()
    if extension not in EXTENSIONS:
        raise UsageError(f"'{path}' must end in one of {', '.join(EXTENSIONS)} to say its format")
    options = [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY] if extension in (".jpg", ".jpeg") else []
    try:
        encoded_well, data = cv2.imencode(extension, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    except cv2.error:
        encoded_well, data = False, np.empty(0, np.uint8)
    if not encoded_well:
        h, w = image.shape[:2]
        raise UsageError(f"an image of {w} x {h} pixels cannot be stored as {extension}: choose .png")
    try:
        write_file(path, lambda file: file.write(data.tobytes()))
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written ({error.strerror}): choose another place") from error


def _draw_label(canvas: NDArray[np.uint8], text: str, corner: tuple[int, int], colour: Colour) -> None:
    image_h, image_w = canvas.shape[:2]
    scale = max(0.4, min(image_h, image_w) / 1000)
    thickness = max(1, round(scale * 1.6))
    while True:
        (text_w, text_h), descent = cv2.getTextSize(text, _FONT, scale, thickness)
        margin = max(2, text_h // 4)
        label_w, label_h = text_w + 2 * margin, text_h + descent + margin
        if label_w <= image_w and label_h <= image_h:
            break
        scale *= 0.8
        thickness = 1
        if scale < 0.2:  # unreadable
            return
    left = min(max(corner[0], 0), image_w - label_w)
    # above the box where there is room, else inside it
    top = corner[1] - label_h if corner[1] >= label_h else min(max(corner[1], 0), image_h - label_h)
    cv2.rectangle(canvas, (left, top), (left + label_w - 1, top + label_h - 1), colour, cv2.FILLED)
    luminance = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    ink = (0, 0, 0) if luminance > 140 else (255, 255, 255)
    cv2.putText(canvas, text, (left + margin, top + label_h - descent), _FONT, scale, ink, thickness, cv2.LINE_AA)
