"""The main job end to end on one page: the rooflines of both reference workloads and a detection on a picture."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from torch import nn

from ridgeline import targets, units
from ridgeline.errors import UsageError
from ridgeline.profiler import estimate_target
from ridgeline.report import Report
from ridgeline.report_html import detection_section, page, report_section, write_html
from ridgeline.specs import DeviceSpec
from ridgeline.workloads.detection import FileResult, detect_files, load_detector
from ridgeline.workloads.draw import draw_files
from ridgeline.workloads.images import find_images

DETECTOR = "yolo26n"
STREET = str(files("ridgeline") / "assets" / "street.jpg")
PAGE = "demo.html"


def run(images: Sequence[str], *, spec: DeviceSpec, weights: Path | None, folder: Path) -> Iterator[str]:
    """Do the work step by step, yielding a line of text after each; the last line is the page's path.

    `images` empty: the bundled picture. Without weights at hand the detection is left out and the page and the line
    say how to get them; nothing is downloaded. Raises UsageError for an image, a weights file or a folder that cannot
    be used, before the first line.
    """
    found = find_images(images or [STREET])
    try:
        detector: nn.Module | UsageError = load_detector(DETECTOR, weights, download=False)
    except UsageError as error:
        if weights is not None:
            raise
        detector = error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder '{folder}' cannot be made ({error.strerror}): choose another with --out") from error
    return _steps(detector, found, spec, weights, folder)


def _steps(
    detector: nn.Module | UsageError, images: list[Path], spec: DeviceSpec, weights: Path | None, folder: Path
) -> Iterator[str]:
    sections = []
    for name, train in ((DETECTOR, False), ("ddpm-cifar10", True)):
        report = estimate_target(targets.resolve(name, train=train), spec, train=train)
        flags = ["--train"] if train else []
        command = shlex.join(["ridgeline", "roofline", name, *flags, "--gpu", spec.name])
        sections.append(report_section(report, command=command))
        yield _headline(report)
    if isinstance(detector, UsageError):
        sections.append(detection_section([], title="Detection", note=str(detector)))
        yield f"detection left out: {detector}"
    else:
        flags = [] if weights is None else ["--weights", str(weights)]
        command = shlex.join(["ridgeline", "detect", *map(str, images), *flags])
        pictures = _detect(detector, images, folder / "detections")
        sections.append(detection_section(pictures, title="Detection", command=command))
        found = sum(len(rows) for _, _, rows in pictures)
        yield f"{found} objects found in {len(pictures)} image(s) by {DETECTOR}, pictures in {folder / 'detections'}"
    yield str(write_html(folder / PAGE, page(sections, title="ridgeline demo")))


def _headline(report: Report) -> str:
    what = "training step" if report.train else "forward pass"
    return (
        f"{report.subject} {what}, batch {report.batch}, {report.dtype} on {report.gpu}: "
        f"{units.flops(report.flops)}, one kernel an op {units.seconds(report.unfused_s)}, "
        f"fused floor {units.seconds(report.floor_s)}, {report.chain_length} dependent kernels"
    )


def _detect(model: nn.Module, images: list[Path], folder: Path) -> list[tuple[str, bytes, list[dict[str, object]]]]:
    pictures = []
    for result, picture in draw_files(detect_files(model, images, mode="rect"), folder):
        if result.error is not None:
            raise result.error
        assert picture is not None
        pictures.append((result.path.name, picture.read_bytes(), _rows(result)))
    return pictures


def _rows(result: FileResult) -> list[dict[str, object]]:
    return [
        {"label": one.class_name, "score": one.score, "box": (one.x1, one.y1, one.x2, one.y2)}
        for one in result.detections
    ]
