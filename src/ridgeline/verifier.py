"""Is the fast version right? Its results beside the untouched module's, judged by the one rule of `numerics`.

A dense result is compared element by element. Detections [N, k, 6] are a sorted selection, in which two nearly equal
scores may swap rows; they are compared by what the selection preserves: the sorted scores, and for every row clear of
the cut, on either side, the nearest row of the same class on the other.

What is allowed follows from what the module errs as plain PyTorch, in the worse of the two memory layouts: they add up
in other orders, and on a CPU the sums of one may err three times as much as those of the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import VerificationFailed
from ridgeline.numerics import TF32_EPS, Verdict, compare
from ridgeline.recipe import Recipe

# What two orders of the same fp32 sums differ by, also where the module itself happens to be luckier: a score in
# sigmoid units, and a box edge of networks with random weights, which amplify rounding most.
_SCORE_FLOOR = 1e-5
_BOX_FLOOR_PX = 1e-2
_REORDERED_SUMS = 2.0**-18  # relative; 32 roundings of fp32
_DETECTED = 0.05  # a score that says an object is there; YOLO26's best on an empty picture lies far below


@dataclass(frozen=True)
class DetectionErrors:
    """Largest differences between two sets of detections of the same images."""

    score: float  # of equal ranks
    box_px: float  # of a row's edges to the nearest row of its class on the other side
    rows: int  # reference rows clear of the cut, whose boxes were compared
    seen: int = 0  # reference rows that say an object is there


@dataclass(frozen=True)
class Agreement:
    """What was compared, how far apart it is, and whether that is within the recipe's limits."""

    dense: tuple[Verdict, ...]
    detections: DetectionErrors | None = None
    allowed: DetectionErrors | None = None

    @property
    def passed(self) -> bool:
        found, allowed = self.detections, self.allowed
        close = found is None or (
            allowed is not None and found.score <= allowed.score and found.box_px <= allowed.box_px
        )
        return close and not self.compared_nothing and all(verdict.passed for verdict in self.dense)

    @property
    def compared_nothing(self) -> bool:
        """Whether there are objects, but no row is clear of the cut: equal scores would pass with any boxes."""
        return self.detections is not None and self.detections.rows == 0 < self.detections.seen

    @property
    def reason(self) -> str:
        """One sentence with the numbers."""
        if self.detections is not None and self.compared_nothing and self.detections.score < math.inf:
            return (
                f"no box was compared, because all {self.detections.seen} scores above {_DETECTED} lie within "
                f"{2 * self.detections.score:.3g} of the last: use trained weights or an image that tells anchors apart"
            )
        if self.detections is not None and self.allowed is not None:
            found, allowed = self.detections, self.allowed
            return (
                f"scores differ by {found.score:.3g} (allowed {allowed.score:.3g}) and boxes by {found.box_px:.3g} px "
                f"(allowed {allowed.box_px:.3g}) over {found.rows} rows"
            )
        failed = [verdict for verdict in self.dense if not verdict.passed]
        return (failed or list(self.dense))[0].reason

    @property
    def remedy(self) -> str:
        """What to do about it where no rewrite is to blame; "" where `reason` already says."""
        if self.compared_nothing:
            return ""
        if any(verdict.nonfinite for verdict in self.dense):
            return "take a dtype, or inputs, in which the module stays finite"
        return "allow more with Recipe(limits=Limits(error_factor=…)), or --limit-factor, if this is near enough"


def agree(module: nn.Module, inputs: Sequence[Tensor], results: Any, recipe: Recipe) -> Agreement:
    """Compare `results` with the untouched module in float64; the module in the recipe's dtype sets what is allowed.

    Of its two memory layouts the worse counts. A module that insists on float32 somewhere is its own reference in
    float32, and fp32 results are allowed the rounding of `_REORDERED_SUMS`.
    """
    reference, exact = reference_of(module, inputs)
    runs = eager_runs(module, inputs, recipe.torch_dtype)
    actual = [tensor.detach().clone() for tensor in tensors_of(results)]
    factor = recipe.limits.error_factor
    if len(reference) == 1 and is_detections(reference[0]):
        found = detection_errors(actual[0], reference[0])
        return Agreement((), found, _allowed([run[0] for run in runs], reference[0], factor))
    eps = rounding(recipe, exact=exact, on_gpu=inputs[0].is_cuda)
    if not len(actual) == len(reference) == len(runs[0]):
        raise VerificationFailed(f"compile: {len(actual)} results, but the module returns {len(reference)} tensors")
    verdicts = []
    for a, r, *own in zip(actual, reference, *runs, strict=True):
        if own[0].is_floating_point():
            judged = [compare(a.to(e.dtype), r.double(), e, error_factor=factor, eps=eps) for e in own]
        else:
            # indices, masks: as often wrong as the module itself is in this dtype
            judged = [compare(a.double(), r.double(), e.double(), error_factor=factor, eps=0.0) for e in own]
        verdicts.append(most_allowing(judged))
    return Agreement(tuple(verdicts))


def most_allowing(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of those on the same result beside several runs of plain PyTorch: it may err as much as any of them.

    A run with NaN or infinity says nothing about how far others may be off, unless it is the first.
    """
    if verdicts[0].nonfinite:
        return verdicts[0]
    usable = [verdict for verdict in verdicts if not verdict.nonfinite]
    return replace(
        verdicts[0],
        allowed_rms=max(verdict.allowed_rms for verdict in usable),
        allowed_max=max(verdict.allowed_max for verdict in usable),
    )


def reference_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The untouched module's results and whether they are float64's; float32's where it insists on them somewhere."""
    try:
        return run_as(module, inputs, torch.float64), True
    except RuntimeError:
        return run_as(module, inputs, torch.float32), False


def rounding(recipe: Recipe, *, exact: bool, on_gpu: bool) -> float | None:
    """The `eps` of the one rule for results of a recipe; None: that of their dtype.

    `exact` says that the reference is float64's.
    """
    if recipe.dtype == "fp32" and recipe.precision == "tf32" and on_gpu:
        return TF32_EPS
    return None if exact or recipe.dtype != "fp32" else _REORDERED_SUMS


def _allowed(runs: Sequence[Tensor], reference: Tensor, factor: float) -> DetectionErrors:
    """What the untouched module errs in the recipe's dtype, the worse of its layouts, times the factor.

    One score out of 300 is the largest error, and whether a run hits that one is luck.
    """
    own = [detection_errors(run, reference) for run in runs]
    # a run that itself lost a row says nothing about how far the others may move
    score, box_px = (
        max((error for error in errors if math.isfinite(error)), default=0.0)
        for errors in ([o.score for o in own], [o.box_px for o in own])
    )
    return DetectionErrors(factor * score + _SCORE_FLOOR, factor * box_px + _BOX_FLOOR_PX, max(o.rows for o in own))


def is_detections(result: Tensor) -> bool:
    """[N, k, 6] with scores in the fifth column, best first."""
    if result.dim() != 3 or result.shape[2] != 6 or result.shape[1] < 1:
        return False
    scores = result[..., 4]
    return bool(((scores >= 0) & (scores <= 1)).all() and (scores.diff(dim=1) <= 0).all())


def detection_errors(actual: Tensor, reference: Tensor) -> DetectionErrors:
    """Differences of detections [N, k, 6]; infinite for another shape, NaN, or a clear row without one of its class."""
    actual, reference = actual.double(), reference.double()
    if actual.shape != reference.shape or not actual.isfinite().all():
        return DetectionErrors(math.inf, math.inf, 0)
    score = (actual[..., 4] - reference[..., 4]).abs().max().item()
    seen = int((reference[..., 4] > _DETECTED).sum())
    box_px, rows = 0.0, 0
    for found, wanted in zip(actual, reference, strict=True):
        # a row within twice the score error of the last one may have been cut on one side only
        last = max(found[-1, 4].item(), wanted[-1, 4].item())
        clear_found, clear_wanted = (side[side[:, 4] > last + 2 * score] for side in (found, wanted))
        box_px = max(box_px, _farthest(clear_wanted, found), _farthest(clear_found, wanted))
        rows += len(clear_wanted)
    return DetectionErrors(score, box_px, rows, seen)


def _farthest(rows: Tensor, others: Tensor) -> float:
    """Largest distance of a row's edges to the nearest of `others` with its class; 0 without rows."""
    distance = (rows[:, None, :4] - others[None, :, :4]).abs().amax(dim=2)
    distance.masked_fill_(rows[:, None, 5] != others[None, :, 5], math.inf)
    return distance.amin(dim=1).max().item() if len(rows) else 0.0


def eager_runs(module: nn.Module, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    """The untouched module's results in `dtype`: as it is, and channels-last where it takes maps in that layout."""
    plain = run_as(module, inputs, dtype)
    try:
        return [plain, run_as(module, inputs, dtype, channels_last=True)]
    except RuntimeError:  # `view` of a map that is channels-last
        return [plain]


def run_as(
    module: nn.Module, inputs: Sequence[Tensor], dtype: torch.dtype, *, channels_last: bool = False
) -> list[Tensor]:
    """The results of a copy of the module in `dtype`, floating inputs too."""
    twin = copy.deepcopy(module).eval().to(dtype)
    arguments = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
    if channels_last:
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.data = _channels_last(tensor.data)
        arguments = [_channels_last(tensor) for tensor in arguments]
    with torch.no_grad():
        return tensors_of(twin(*arguments))


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def tensors_of(results: Any) -> list[Tensor]:
    """The tensors in a module's result, through tuples, lists and dictionaries, in order."""
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, dict):
        results = list(results.values())
    if isinstance(results, (list, tuple)):
        return [tensor for part in results for tensor in tensors_of(part)]
    return []
