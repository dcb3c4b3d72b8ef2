"""Average precision by the COCO protocol, of one set of detections against another.

Detections of an image are an array [n, 6] in a model's row order: x1, y1, x2, y2, score, class. The protocol: found
boxes, best first, take the free true box of their class and image that they overlap most; precision is read at 101
recalls and made to fall; the mean is over recalls, over ten overlaps from 0.50 to 0.95, and over classes.
Lin et al., "Microsoft COCO: Common Objects in Context", 2014; equal to pycocotools.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]  # [n, 6]
Mask = NDArray[np.bool_]  # [n]

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST_FOUND = 100  # of a class in an image; COCO's figure

# A selection of k rows ends at a score, and which rows next to it are in is decided by rounding.
_NEAR_THE_CUT = 0.01


def agreement_map(reference: Sequence[Rows], actual: Sequence[Rows], *, confidence: float) -> float | None:
    """How well two models' detections of the same images agree: 1.0 when they are the same, 0.0 when none is shared.

    Each side once takes the other's detections above `confidence` for the truth; the smaller mAP 50-95 counts, so a
    box, a class or an image that only one side sees is seen here. True boxes at or below `confidence`, or within
    rounding of the last score of their image, are neither asked for nor held against anyone. Rows of boxes without
    area are left out. None where neither side sees anything.
    """
    scores = []
    for truth, found in ((reference, actual), (actual, reference)):
        ignored = [~counted(rows, confidence) for rows in truth]
        classes = average_precisions(found, truth, ignored=ignored, most_found=max(map(len, found), default=0))
        if classes:
            scores.append(float(np.mean(list(classes.values()))))
    return min(scores, default=None)


def counted(rows: Rows, confidence: float) -> Mask:
    """Which of an image's rows, best first as a model returns them, are above `confidence` and clear of the cut."""
    cut = rows[-1, 4] + _NEAR_THE_CUT if len(rows) else 0.0
    return rows[:, 4] > max(confidence, cut)


def average_precisions(
    found: Sequence[Rows],
    truth: Sequence[Rows],
    *,
    ignored: Sequence[Mask] | None = None,
    most_found: int = MOST_FOUND,
) -> dict[int, float]:
    """AP 50-95 of each class that has a true box; images in the same order on both sides.

    `ignored` marks true boxes that need not be found, and whose finder counts for nothing. `most_found` detections of a
    class in an image are looked at, the best. The scores of `truth` are not read.
    """
    if len(found) != len(truth):
        raise ValueError(f"average_precisions: {len(found)} images with detections, but {len(truth)} with the truth")
    ignored = [np.zeros(len(rows), bool) for rows in truth] if ignored is None else ignored
    true = [(rows[solid], mask[solid]) for rows, mask, solid in zip(truth, ignored, map(_has_area, truth), strict=True)]
    found = [rows[_has_area(rows)] for rows in found]
    result = {}
    for class_id in sorted({int(wanted) for rows, mask in true for wanted in rows[~mask, 5]}):
        own = [(rows[rows[:, 5] == class_id], mask[rows[:, 5] == class_id]) for rows, mask in true]
        matches = [
            _match(_best_first(f[f[:, 5] == class_id])[:most_found], *image)
            for f, image in zip(found, own, strict=True)
        ]
        scores, hit, void = (np.concatenate(part, axis=-1) for part in zip(*matches, strict=True))
        result[class_id] = _average_precision(scores, hit, void, sum(int((~mask).sum()) for _, mask in own))
    return result


def _has_area(rows: Rows) -> Mask:
    return (rows[:, 2] > rows[:, 0]) & (rows[:, 3] > rows[:, 1])


def _best_first(rows: Rows) -> Rows:
    return rows[np.argsort(-rows[:, 4], kind="stable")]


def _match(found: Rows, truth: Rows, ignored: Mask) -> tuple[Rows, NDArray[np.bool_], NDArray[np.bool_]]:
    """(scores [n], hit [T, n], void [T, n]) of one image and class: what each detection is at each overlap."""
    overlap = _overlap(found[:, :4], truth[:, :4])
    # 1 - 1e-10 as in pycocotools: a box is allowed to be found by itself
    limits = np.minimum(OVERLAPS, 1 - 1e-10)[:, None]
    free = np.ones((len(OVERLAPS), len(truth)), bool)
    hit, void = (np.zeros((len(OVERLAPS), len(found)), bool) for _ in range(2))
    levels = np.arange(len(OVERLAPS))
    for index in range(len(found) if len(truth) else 0):
        possible = free & (overlap[index] >= limits)
        # a box that counts is preferred to any that does not; of equal overlaps the last is taken
        wanted = np.where((possible & ~ignored).any(axis=1)[:, None], possible & ~ignored, possible)
        choice = len(truth) - 1 - np.argmax(np.where(wanted, overlap[index], -1.0)[:, ::-1], axis=1)
        taken = wanted.any(axis=1)
        free[levels[taken], choice[taken]] = False
        hit[:, index] = taken & ~ignored[choice]
        void[:, index] = taken & ignored[choice]
    return found[:, 4], hit, void


def _average_precision(scores: Rows, hit: NDArray[np.bool_], void: NDArray[np.bool_], wanted: int) -> float:
    """Mean over overlaps and recalls of the falling precision; hit and void [T, n] in any order."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(hit[:, order], axis=1)
    misses = np.cumsum(~hit[:, order] & ~void[:, order], axis=1)
    total = 0.0
    for right, wrong in zip(hits, misses, strict=True):
        precision = right / np.maximum(right + wrong, 1)
        falling = np.maximum.accumulate(precision[::-1])[::-1]
        position = np.searchsorted(right / wanted, RECALLS, side="left")
        total += np.append(falling, 0.0)[position].mean()
    return total / len(hits)


def _overlap(a: Rows, b: Rows) -> Rows:
    """Intersection over union [len(a), len(b)] of boxes with area."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    intersection = (high - low).clip(min=0).prod(axis=2)
    area_a, area_b = ((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (a, b))
    return intersection / (area_a[:, None] + area_b[None, :] - intersection)
