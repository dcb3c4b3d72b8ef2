"""Detect objects in images: letterbox, model, threshold, boxes back to image pixels.

A model here is any callable that takes x [N, 3, H, W] in 0..1 RGB and returns [N, k, 6], each row
x1 y1 x2 y2 (input pixels), score, class, sorted by score; `ridgeline.models.yolo26` builds such models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ridgeline.cache import cache_dir
from ridgeline.errors import EnvironmentUnusable, UsageError, VerificationFailed
from ridgeline.models.postprocess import keep_confident
from ridgeline.models.weights import resolve_weights, yolo26_from
from ridgeline.workloads import letterbox
from ridgeline.workloads.coco_names import COCO_NAMES
from ridgeline.workloads.images import find_images, read_image

Model = Callable[[torch.Tensor], torch.Tensor]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EAGER_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@runtime_checkable
class Placed(Protocol):
    """A callable that says where, and in which dtype, it wants its images."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Detection:
    """One object: a box in image pixels, a score in 0..1, a class."""

    x1: float
    y1: float
    x2: float
    y2: float
    score: float
    class_id: int
    class_name: str


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class FileResult:
    """What one file gave: its RGB image and detections, or the `error` that says why it could not be read."""

    path: Path
    image: NDArray[np.uint8] | None
    detections: tuple[Detection, ...]
    error: UsageError | None = None

    def to_json(self) -> dict[str, Any]:
        """`detections_to_json` of a file that was read."""
        if self.image is None:
            raise ValueError(f"'{self.path}' was not read, so it has no detections: look at `error` first")
        return detections_to_json(self.path, self.image.shape[:2], self.detections)


def load_detector(name: str, weights: Path | None, *, device: str = "auto", download: bool = True) -> torch.nn.Module:
    """The detector `name`, ready to run in fp32: `weights`, else the cache folder, else the official release.

    device is that of `choose_device`.
    """
    place = choose_device(device)
    path = resolve_weights(name, explicit=weights, cache_dir=cache_dir() / "weights", download=download)
    model = yolo26_from(path)
    if name != f"yolo26{model.scale}":
        raise UsageError(f"{path} holds yolo26{model.scale}, not {name}: pass --model yolo26{model.scale}")
    return model.to(place)


def choose_device(name: str) -> torch.device:
    """The device of "cpu", "cuda" or "auto", which is the GPU when there is one. Raises EnvironmentUnusable."""
    if name == "cuda" and not torch.cuda.is_available():
        raise EnvironmentUnusable("--device cuda: torch sees no CUDA GPU; use --device cpu, or run `ridgeline doctor`")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def multiply_as_(dtype: str) -> None:
    """Set PyTorch's process-wide switches so that its own fp32 products are TF32's unless `dtype` is "fp32"."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype != "fp32"


def device_name(device: torch.device) -> str:
    """What to call a device in a line of text."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def detect(
    model: Model,
    image: NDArray[np.uint8],
    *,
    mode: str,
    size: int = 640,
    conf: float = 0.25,
    classes: Iterable[int] | None = None,
    max_det: int = 300,
    names: tuple[str, ...] = COCO_NAMES,
) -> list[Detection]:
    """Objects in one uint8 [h, w, 3] RGB image with a score strictly above `conf`, best first.

    `mode` is the letterbox, "square" or "rect"; the two find different boxes. `classes` keeps only those class ids.
    Raises UsageError for a choice out of range, VerificationFailed when the model returns NaN or infinity.
    """
    wanted = _check_choices(conf, classes, max_det, names)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise UsageError(f"an image must be uint8 [height, width, 3] RGB, got {image.dtype} {image.shape}")
    fit = letterbox.plan(image.shape[0], image.shape[1], size, mode=mode)
    device, dtype = _placement(model)
    x = letterbox.to_tensor([letterbox.apply(image, fit)], device=device, dtype=dtype)
    rows = keep_confident(predict(model, x)[0].float(), conf, classes=wanted, limit=max_det).cpu().numpy()
    boxes = letterbox.boxes_back(rows[:, :4], fit)
    return [
        Detection(*map(float, box), score=float(row[4]), class_id=int(row[5]), class_name=_name(int(row[5]), names))
        for box, row in zip(boxes, rows, strict=True)
    ]


def detect_files(
    model: Model,
    paths: Iterable[str | Path],
    *,
    mode: str,
    size: int = 640,
    conf: float = 0.25,
    classes: Iterable[int] | None = None,
    max_det: int = 300,
    names: tuple[str, ...] = COCO_NAMES,
) -> Iterator[FileResult]:
    """One result a file, in the order of `find_images(paths)`; one unreadable file does not stop the others.

    Wrong choices and paths that name no image raise UsageError at the call, before the first result.
    """
    wanted = _check_choices(conf, classes, max_det, names)
    letterbox.plan(1, 1, size, mode=mode)  # refuses a wrong size or mode
    files = find_images(paths)

    def results() -> Iterator[FileResult]:
        for path in files:
            try:
                image = read_image(path)
            except UsageError as error:
                yield FileResult(path, None, (), error)
                continue
            found = detect(model, image, mode=mode, size=size, conf=conf, classes=wanted, max_det=max_det, names=names)
            yield FileResult(path, image, tuple(found))

    return results()


def detections_to_json(
    image_path: str | Path, shape_hw: Iterable[int], detections: Iterable[Detection]
) -> dict[str, Any]:
    """One JSON-ready object an image; boxes rounded to 3 decimals, scores to 5, as COCO result files have them."""
    return {
        "image": str(image_path),
        "shape_hw": [int(side) for side in shape_hw],
        "boxes": [
            {
                "x1": round(found.x1, 3),
                "y1": round(found.y1, 3),
                "x2": round(found.x2, 3),
                "y2": round(found.y2, 3),
                "score": round(found.score, 5),
                "class": found.class_id,
                "name": found.class_name,
            }
            for found in detections
        ],
    }


def predict(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Run the model on [N, 3, H, W] without gradients → [N, k, 6], checked at both ends.

    Raises UsageError for an input the model was not built for or an output of another shape, VerificationFailed for
    NaN or infinity in the output.
    """
    if isinstance(model, torch.nn.Module):
        if model.training:
            raise UsageError("the model is in training mode, where BatchNorm uses the batch: call model.eval() first")
        check_input(x, dtype=_placement(model)[1])
    else:
        check_input(x)
    with torch.no_grad():
        rows = model(x)
    if not isinstance(rows, torch.Tensor) or rows.ndim != 3 or rows.shape[0] != x.shape[0] or rows.shape[2] != 6:
        got = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise UsageError(f"a detector must return ({x.shape[0]}, k, 6), got {got}: wrap it in its decode and top-k")
    # NaN compares false with every threshold, so it would read as "nothing detected"
    bad = int((~torch.isfinite(rows)).sum())
    if bad:
        raise VerificationFailed(
            f"the model returned {bad} values of {rows.numel()} that are NaN or infinite in {x.dtype}: "
            "run it in float32 to see whether the precision or the weights are at fault"
        )
    return rows


def check_input(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Raise UsageError unless x is [N, 3, H, W] in 0..1 and in `dtype` (None: any of FLOAT_DTYPES).

    The range has half a unit of slack: it is there to catch 0..255 and mean/std inputs, not rounding.
    """
    if x.ndim != 4 or x.shape[1] != 3 or 0 in x.shape:
        raise UsageError(f"a detector's input must be (N, 3, H, W), got {tuple(x.shape)}")
    allowed = FLOAT_DTYPES if dtype is None else (dtype,)
    if x.dtype not in allowed:
        names = " or ".join(str(one) for one in allowed)
        raise UsageError(f"this detector's input must be {names} in 0..1, got {x.dtype}: convert it first")
    low, high = (float(edge) for edge in torch.aminmax(x))
    if not (low >= -0.5 and high <= 1.5):
        raise UsageError(
            f"a detector's input must lie in 0..1, got {low:.4g}..{high:.4g}: "
            "divide 8-bit pixels by 255 and subtract no mean"
        )


def _placement(model: Model) -> tuple[torch.device, torch.dtype]:
    """Where the model wants its images: where its weights are, or as it says; any other callable moves them itself."""
    if isinstance(model, Placed):
        return model.device, model.dtype
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return (torch.device("cpu"), torch.float32) if first is None else (first.device, first.dtype)


def _check_choices(
    conf: float, classes: Iterable[int] | None, max_det: int, names: tuple[str, ...]
) -> list[int] | None:
    if not 0.0 <= conf <= 1.0:
        raise UsageError(f"conf must lie in 0..1, got {conf}")
    if max_det < 1:
        raise UsageError(f"max_det must be at least 1, got {max_det}")
    if classes is None:
        return None
    wanted = sorted(set(classes))
    unknown = [class_id for class_id in wanted if not 0 <= class_id < len(names)]
    if unknown:
        raise UsageError(f"class ids must lie in 0..{len(names) - 1}, got {', '.join(map(str, unknown))}")
    return wanted


def _name(class_id: int, names: tuple[str, ...]) -> str:
    # a model trained on more classes than `names` lists
    return names[class_id] if class_id < len(names) else f"class {class_id}"
