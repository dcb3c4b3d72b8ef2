"""verify: is the compiled module right? Layer by layer, at the end, and on pictures; all against the untouched module.

Three questions, each with a limit of its own:
- `layers`: how far has each kernel drifted, and how far had it to (a table to read; it fails nothing);
- `agreement`: are the results on the example inputs within the recipe's limits, by the one rule of `numerics`;
- `pictures`: does a detector find the same objects in images, scored like a detector against labels (mAP 50-95), with
  the untouched module's detections for labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ridgeline import compiler
from ridgeline.drift import Layer, drift
from ridgeline.errors import UsageError
from ridgeline.example_inputs import tensors
from ridgeline.recipe import Recipe, chosen
from ridgeline.verifier import Agreement, agree, is_detections, reference_of, run_as, tensors_of
from ridgeline.workloads import letterbox
from ridgeline.workloads.average_precision import Rows, agreement_map, counted
from ridgeline.workloads.images import find_images, read_image

Detector = Callable[[Tensor], Any]

CONFIDENCE = 0.25  # detections above it are what a user sees

# Of the boxes near a detection the one it is compared with is the nearest, one pixel weighing as much as 0.01 of score.
_PX_PER_SCORE = 100.0


@dataclass(frozen=True)
class PictureLimits:
    """What detections on pictures must keep to; the last two are off unless given."""

    map_5095: float = 0.99
    box_px: float = math.inf
    score: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.map_5095 <= 1:
            raise UsageError(f"the limit of mAP must lie in 0..1, got {self.map_5095}")
        if not (self.box_px > 0 and self.score > 0):
            raise UsageError(f"limits must be above 0, got {self.box_px} px and {self.score} of score")


@dataclass(frozen=True)
class Pictures:
    """Two detectors on the same images: all detections above CONFIDENCE, of either side, are asked for in the other."""

    images: int
    detections: int  # of the untouched module
    map_5095: float  # 1.0: the same
    box_px: float  # farthest edge of a detection from the nearest of its class; infinite where there is none
    score: float  # largest difference of those pairs

    def within(self, limits: PictureLimits) -> bool:
        close = self.box_px <= limits.box_px and self.score <= limits.score
        return self.map_5095 >= limits.map_5095 and close

    @property
    def text(self) -> str:
        return (
            f"mAP 50-95 {self.map_5095:.4f} against the untouched module, boxes within {self.box_px:.3g} px and scores "
            f"within {self.score:.3g}, {self.detections} detections in {self.images} image(s)"
        )


@dataclass(frozen=True)
class Verification:
    """What was found; `passed` is the verdict and `reason` says it in one sentence."""

    recipe: Recipe
    layers: tuple[Layer, ...]
    agreement: Agreement
    pictures: Pictures | None
    limits: PictureLimits
    blame: str = ""  # what breaks the limit that failed

    @property
    def passed(self) -> bool:
        return self.agreement.passed and (self.pictures is None or self.pictures.within(self.limits))

    @property
    def reason(self) -> str:
        if self.pictures is not None and self.agreement.passed and not self.passed:
            limits = f"mAP at least {self.limits.map_5095:g}"
            limits += f", boxes {self.limits.box_px:g} px" if self.limits.box_px < math.inf else ""
            limits += f", scores {self.limits.score:g}" if self.limits.score < math.inf else ""
            found = f"{self.pictures.text} (allowed: {limits})"
        else:
            found = self.agreement.reason
        return f"{found}; {self.blame}" if self.blame else found

    def lines(self, *, layers: int = 20) -> list[str]:
        """For a terminal: the table of the `layers` worst, in order, then one line a question."""
        worst = sorted(range(len(self.layers)), key=lambda index: -self.layers[index].excess)[:layers]
        rows = [_row(index, self.layers[index]) for index in sorted(worst)]
        titles = ("", "kernel", "where", "shape", "relative RMS", "PyTorch's", "maximum", "PyTorch's", "of allowed")
        table = _aligned([titles, *rows]) if rows else []
        if 0 < len(rows) < len(self.layers):
            table.append(f"… {len(self.layers) - len(rows)} more kernels, all nearer to the truth")
        lost = [layer for layer in self.layers if layer.excess > 1]
        first = f"; the first is {lost[0].op} in {lost[0].where}" if lost else ""
        verdict = "passed" if self.passed else "FAILED"
        return [
            *table,
            f"layers    {len(lost)} of {len(self.layers)} kernels err more than they may{first}",
            f"results   {self.agreement.reason}",
            *([] if self.pictures is None else [f"pictures  {self.pictures.text}"]),
            f"verdict   {verdict}" + (f": {self.blame}" if self.blame else ""),
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it, every layer included; numbers that are infinite are null."""
        found = self.agreement.detections
        return {
            "passed": self.passed,
            "reason": self.reason,
            "dtype": self.recipe.dtype,
            "precision": self.recipe.precision,
            "pdl": self.recipe.pdl,
            "layers": [_layer_json(layer) for layer in self.layers],
            "results": {
                "reason": self.agreement.reason,
                "detections": None if found is None else _finite(vars(found)),
                "dense": [_finite(vars(verdict)) for verdict in self.agreement.dense],
            },
            "pictures": None if self.pictures is None else _finite(vars(self.pictures)),
        }


def verify(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    recipe: Recipe | None = None,
    *,
    images: Iterable[str | Path] | None = None,
    limits: PictureLimits | None = None,
) -> Verification:
    """Compile `module` and compare it with itself untouched, in float64 where it can run there.

    inputs   example arguments, on the device to compile for; on the CPU kernels run through their references
    images   files, folders or globs for a detector [1, 3, S, S] -> [1, k, 6], letterboxed to its square
    Never raises for numbers that are wrong: ask `.passed`. Raises UsageError for inputs that are no tensors, images
    without a detection to compare or a module that is no such detector, NotEngaged where the module cannot be exported
    or captured.
    """
    recipe, limits = chosen(recipe), limits or PictureLimits()
    examples = tensors(inputs, of="verify")
    # first, because unsuitable images shall not cost a compilation
    truth = None if images is None else _truth(module, examples, images)
    fast = compiler.compile(module, examples, recipe, verify=False)
    agreement = agree(module, examples, fast(*examples), recipe)
    layers = drift(module, examples, recipe)
    pictures = None if truth is None else truth.compare(fast)
    blame = ""
    if not agreement.passed:
        blame = compiler.blame(module, examples, recipe)
    elif truth is not None and pictures is not None and not pictures.within(limits):
        blame = _blame_on_picture(module, fast, recipe, truth)
    return Verification(recipe, layers, agreement, pictures, limits, blame)


@dataclass(frozen=True)
class _Truth:
    """Images as a detector takes them, and what the untouched one finds in each."""

    images: tuple[Tensor, ...]
    rows: tuple[Rows, ...]

    def compare(self, detector: Detector) -> Pictures:
        found = [_rows(detector(x)) for x in self.images]
        distances = [_distance(*pair) for pair in zip(self.rows, found, strict=True)]
        box_px, score = (max(side) for side in zip(*distances, strict=True))
        mean = agreement_map(self.rows, found, confidence=CONFIDENCE)
        assert mean is not None  # the truth holds a detection
        seen = sum(int(counted(rows, CONFIDENCE).sum()) for rows in self.rows)
        return Pictures(len(self.images), seen, mean, box_px, score)

    def worst(self, detector: Detector) -> Tensor:
        """The image in which the detector is farthest off."""
        distances = [
            box_px + _PX_PER_SCORE * score
            for box_px, score in (
                _distance(rows, _rows(detector(x))) for rows, x in zip(self.rows, self.images, strict=True)
            )
        ]
        return self.images[distances.index(max(distances))]


def _truth(module: nn.Module, examples: Sequence[Tensor], images: Iterable[str | Path]) -> _Truth:
    placed = tuple(_letterboxed(images, examples))
    rows = tuple(_rows(reference_of(module, (x,))[0]) for x in placed)
    if not any(counted(one, CONFIDENCE).any() for one in rows):
        raise UsageError(
            f"nothing in {len(placed)} image(s) is detected with a score above {CONFIDENCE} and clear of the last: "
            "verify with images that show objects, and trained weights"
        )
    return _Truth(placed, rows)


def _letterboxed(images: Iterable[str | Path], examples: Sequence[Tensor]) -> Iterator[Tensor]:
    example = examples[0]
    size = example.shape[-1]
    if len(examples) != 1 or example.shape != (1, 3, size, size):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in examples)
        raise UsageError(f"images are for a detector of one input (1, 3, S, S), and this module's is {shapes}")
    for path in find_images(images):
        image = read_image(path)
        framed = letterbox.apply(image, letterbox.plan(image.shape[0], image.shape[1], size, mode="square"))
        yield letterbox.to_tensor([framed], device=example.device, dtype=example.dtype)


def _rows(results: Any) -> Rows:
    tensors = tensors_of(results)
    if len(tensors) != 1 or not is_detections(tensors[0]):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(f"images are for a detector that returns rows (1, k, 6), best first, got {shapes}")
    return tensors[0][0].double().cpu().numpy()


def _distance(reference: Rows, actual: Rows) -> tuple[float, float]:
    """(pixels, score) between each counted detection of either side and the nearest of its class on the other."""
    farthest = [0.0, 0.0]
    for asked, others in ((reference, actual), (actual, reference)):
        for row in asked[counted(asked, CONFIDENCE)]:
            same = others[others[:, 5] == row[5]]
            if not len(same):
                return math.inf, math.inf
            edges, score = abs(same[:, :4] - row[:4]).max(axis=1), abs(same[:, 4] - row[4])
            nearest = (edges + _PX_PER_SCORE * score).argmin()
            farthest = [max(farthest[0], float(edges[nearest])), max(farthest[1], float(score[nearest]))]
    return farthest[0], farthest[1]


def _blame_on_picture(module: nn.Module, fast: Detector, recipe: Recipe, truth: _Truth) -> str:
    """A rewrite where the compiled module is at fault, else the dtype, with what plain PyTorch reaches in it."""
    worst = truth.worst(fast)
    if not agree(module, (worst,), fast(worst), recipe).passed:
        return compiler.blame(module, (worst,), recipe)
    plain = truth.compare(lambda x: run_as(module, (x,), recipe.torch_dtype))
    return f"no rewrite is to blame: plain PyTorch in {recipe.dtype} reaches {plain.map_5095:.4f} itself"


def _row(index: int, layer: Layer) -> tuple[str, ...]:
    shape = "x".join(map(str, layer.shape))
    if layer.verdict is None:
        return (str(index), layer.op, layer.where, shape, *("-",) * 5)
    found = layer.verdict
    relative = (layer.relative(error) for error in (found.rms_error, layer.own_rms))
    largest = (found.max_error, layer.own_max)
    excess = f"{layer.excess:.2f}" + (" !" if layer.excess > 1 else "")
    return (str(index), layer.op, layer.where, shape, *(f"{error:.2e}" for error in (*relative, *largest)), excess)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = {1, 2, 3}  # columns of words; numbers stand at the right
    return [
        "  ".join(
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _layer_json(layer: Layer) -> dict[str, Any]:
    named = {"op": layer.op, "where": layer.where, "shape": list(layer.shape)}
    if layer.verdict is None:
        return {**named, "compared": False}
    numbers = {
        "relative_rms_error": layer.relative(layer.verdict.rms_error),
        "max_error": layer.verdict.max_error,
        "pytorch_relative_rms_error": layer.relative(layer.own_rms),
        "pytorch_max_error": layer.own_max,
        "of_allowed": layer.excess,
    }
    return {**named, "compared": True, **_finite(numbers)}


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
