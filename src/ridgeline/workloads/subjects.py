"""What `ridgeline verify` puts to the test: a module, example inputs and, for a detector, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from torch import Tensor, nn

from ridgeline import targets
from ridgeline.cache import cache_dir
from ridgeline.errors import UsageError
from ridgeline.models import DETECTOR_INPUT_PIXELS, YOLO26_NAMES, build
from ridgeline.models.weights import resolve_weights
from ridgeline.models.yolo26 import YOLO26, fuse
from ridgeline.workloads import letterbox
from ridgeline.workloads.detection import load_detector
from ridgeline.workloads.images import find_images, read_image

STREET = str(files("ridgeline") / "assets" / "street.jpg")


@dataclass(frozen=True)
class Subject:
    """A module on the CPU in fp32, what to call it with, and the images to compare detections on, if any."""

    text: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    images: tuple[Path, ...] | None


def subject(
    model: str, *, weights: Path | None = None, images: Sequence[str] | None = None, size: int | None = None
) -> Subject:
    """What the user named.

    A built-in detector runs on the first of `images` (default: the bundled picture) in a square letterbox of `size`,
    with `weights`, else those in the cache folder, else seeded random ones. Anything else brings its own inputs; then
    `weights` and `size` are refused.
    """
    paths = None if images is None else tuple(find_images(images))
    if model not in YOLO26_NAMES:
        for name, value in (("--weights", weights), ("--size", size)):
            if value is not None:
                raise UsageError(f"{name} is for {', '.join(YOLO26_NAMES)}, and {model} brings its own: leave it out")
        target = targets.resolve(model)
        return Subject(target.name, target.module, target.inputs, paths)
    paths = paths or (Path(STREET),)
    image = read_image(paths[0])
    side = DETECTOR_INPUT_PIXELS if size is None else size
    framed = letterbox.apply(image, letterbox.plan(image.shape[0], image.shape[1], side, mode="square"))
    module, whose = _detector(model, weights)
    return Subject(f"{model} with {whose}", module, (letterbox.to_tensor([framed]),), paths)


def _detector(name: str, weights: Path | None) -> tuple[nn.Module, str]:
    try:
        path = resolve_weights(name, explicit=weights, cache_dir=cache_dir() / "weights", download=False)
    except UsageError:
        if weights is not None:
            raise
        model = build(name)
        assert isinstance(model, YOLO26)
        return fuse(model), "seeded random weights"
    return load_detector(name, path, device="cpu"), str(path)
