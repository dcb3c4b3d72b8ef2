"""Average precision: hand-made cases, then pycocotools as the referee on random ones."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from ridgeline.workloads.average_precision import OVERLAPS, agreement_map, average_precisions, counted

CUT = (600.0, 600.0, 610.0, 610.0, 0.001, 79.0)  # every selection ends in a row that nobody asks for
SIDE = 100.0
EVERY_RECALL = 101


def rows(*boxes: tuple[float, ...]) -> np.ndarray:
    return np.array([*boxes, CUT])


def box(x: float, score: float, class_id: int = 0, *, side: float = SIDE) -> tuple[float, ...]:
    return (x, 0.0, x + side, side, score, class_id)


def agreement(reference: np.ndarray, actual: np.ndarray) -> float | None:
    return agreement_map([reference], [actual], confidence=0.25)


def shift_for(overlap: float) -> float:
    """How far a square of SIDE must move along one axis to overlap itself so much: (s - d) / (s + d) = overlap."""
    return SIDE * (1 - overlap) / (1 + overlap)


PAIR = rows(box(0, 0.9), box(300, 0.8, 1))


# --- agreement -------------------------------------------------------------------------------------------------------


def test_the_same_detections_agree_fully():
    assert agreement(PAIR, PAIR) == 1.0
    # another order of equal content, and scores that rounding moved
    assert agreement(PAIR, rows(box(300, 0.81, 1), box(0, 0.79))) == 1.0


@pytest.mark.parametrize("overlap", [0.98, 0.93, 0.72, 0.53, 0.4])
def test_a_shifted_box_counts_at_the_overlaps_it_keeps(overlap):
    moved = rows(box(shift_for(overlap), 0.9), box(300, 0.8, 1))
    expected = (np.mean(overlap >= OVERLAPS) + 1) / 2  # the other class is untouched
    assert agreement(PAIR, moved) == pytest.approx(expected)
    assert agreement(moved, PAIR) == pytest.approx(expected)


def test_a_missing_class_is_one_of_two():
    only = rows(box(0, 0.9))
    assert agreement(PAIR, only) == agreement(only, PAIR) == 0.5


def test_another_class_at_the_same_place_is_two_errors():
    assert agreement(rows(box(0, 0.9)), rows(box(0, 0.9, 1))) == 0.0


@pytest.mark.parametrize("score", [0.95, 0.5])
def test_an_extra_box_costs_whether_it_ranks_first_or_last(score):
    """One of two boxes of the other side is found: the recalls up to one half of 101."""
    extra = rows(*sorted((box(0, 0.9), box(300, score)), key=lambda row: -row[4]))
    alone = rows(box(0, 0.9))
    # by the protocol alone an extra box that ranks last costs nothing
    assert average_precisions([extra], [alone[:1]])[0] == (0.5 if score > 0.9 else 1.0)
    assert agreement(alone, extra) == pytest.approx(0.5 if score > 0.9 else 51 / EVERY_RECALL)


def test_a_doubled_box_is_an_extra_one():
    assert agreement(rows(box(0, 0.9)), rows(box(0, 0.9), box(0, 0.9))) == pytest.approx(51 / EVERY_RECALL)


def test_scores_on_either_side_of_the_threshold_are_the_same_object():
    assert agreement(rows(box(0, 0.9), box(300, 0.2501, 1)), rows(box(0, 0.9), box(300, 0.2499, 1))) == 1.0
    # and what nobody sees is not asked for
    assert agreement(rows(box(0, 0.9), box(300, 0.2, 1)), rows(box(0, 0.9), box(500, 0.2, 2))) == 1.0


def test_rows_that_the_cut_took_are_not_asked_for():
    best = [box(200.0 * i, 0.9 - 0.1 * i) for i in range(3)]
    reference, actual = (np.array([*best, box(1000, 0.5001), box(1400, 0.5)]), np.array([*best, box(1400, 0.5001)]))
    assert counted(reference, 0.25).tolist() == [True, True, True, False, False]
    assert agreement(reference, actual) == 1.0


def test_empty_images():
    nothing = rows()
    assert agreement(nothing, nothing) is None
    assert agreement(PAIR, nothing) == agreement(nothing, PAIR) == 0.0
    # an image without objects beside one with: it adds nothing, unless one side invents something there
    assert agreement_map([PAIR, nothing], [PAIR, nothing], confidence=0.25) == 1.0
    assert agreement_map([PAIR, nothing], [PAIR, PAIR], confidence=0.25) == pytest.approx(51 / EVERY_RECALL)
    assert agreement_map([np.empty((0, 6))], [np.empty((0, 6))], confidence=0.25) is None


def test_objects_of_another_image_do_not_help():
    assert agreement_map([PAIR, rows()], [rows(), PAIR], confidence=0.25) == 0.0


def test_boxes_without_area_are_left_out():
    inside_out = (100.0, 0.0, 0.0, 100.0, 0.9, 0.0)
    assert agreement(rows(inside_out, box(300, 0.8, 1)), rows(box(300, 0.8, 1))) == 1.0
    assert agreement(rows(inside_out), rows(inside_out)) is None


# --- the protocol ----------------------------------------------------------------------------------------------------


def test_precision_is_made_to_fall():
    """Hit, miss, hit of two: precision 1 up to recall 1/2, then 2/3."""
    found = np.array([box(0, 0.9), box(700, 0.8), box(300, 0.7)])
    truth = np.array([box(0, 1.0), box(300, 1.0)])
    assert average_precisions([found], [truth])[0] == pytest.approx((51 * 1 + 50 * 2 / 3) / EVERY_RECALL)


def test_only_the_best_of_a_class_in_an_image_are_looked_at():
    found, truth = np.array([box(700, 0.9), box(0, 0.8)]), np.array([box(0, 1.0)])
    assert average_precisions([found], [truth])[0] == 0.5
    assert average_precisions([found], [truth], most_found=1)[0] == 0.0


def test_a_true_box_is_found_once_and_the_finder_takes_the_nearest():
    truth = np.array([box(0, 1.0), box(20, 1.0)])
    assert average_precisions([np.array([box(20, 0.9), box(0, 0.8)])], [truth])[0] == 1.0
    assert average_precisions([np.array([box(20, 0.9), box(20, 0.8)])], [truth])[0] < 0.8


def test_another_number_of_images_is_refused():
    with pytest.raises(ValueError, match="2 images with detections, but 1 with the truth"):
        average_precisions([PAIR, PAIR], [PAIR])


def coco_average_precisions(found, truth, ignored, most_found) -> dict[int, float]:
    """The same by pycocotools; its area range "small" is stretched so that ignored boxes are those outside it."""
    coco, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    annotations, results = [], []
    for image_id, (f, t, mask) in enumerate(zip(found, truth, ignored, strict=True), start=1):
        for row, out in zip(t, mask, strict=True):
            annotation = {
                "id": len(annotations) + 1, "image_id": image_id, "category_id": int(row[5]), "iscrowd": 0,
                "bbox": [row[0], row[1], row[2] - row[0], row[3] - row[1]], "area": 1e9 if out else 1.0,
            }  # fmt: skip
            annotations.append(annotation)
        results += [
            {"image_id": image_id, "category_id": int(row[5]), "score": row[4],
             "bbox": [row[0], row[1], row[2] - row[0], row[3] - row[1]]}
            for row in f
        ]  # fmt: skip
    classes = sorted({annotation["category_id"] for annotation in annotations} | {r["category_id"] for r in results})
    with contextlib.redirect_stdout(io.StringIO()):
        labels = coco.COCO()
        labels.dataset = {
            "images": [{"id": i + 1} for i in range(len(found))], "annotations": annotations,
            "categories": [{"id": class_id} for class_id in classes],
        }  # fmt: skip
        labels.createIndex()
        run = cocoeval.COCOeval(labels, labels.loadRes(results), "bbox")
        # detections are never outside this range, so that none is forgiven for its size
        run.params.areaRng, run.params.areaRngLbl = [[0, 1e8]], ["all"]
        run.params.maxDets = [most_found]
        run.evaluate()
        run.accumulate()
    precision = run.eval["precision"][:, :, :, 0, 0]  # overlaps, recalls, classes
    return {c: float(precision[:, :, k].mean()) for k, c in enumerate(classes) if precision[0, 0, k] >= 0}


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_pycocotools(seed):
    """Crowded random images: several classes, overlapping boxes, ties of scores, ignored boxes, absent classes."""
    random = np.random.default_rng(seed)

    def image(count: int, jitter: np.ndarray | None = None) -> np.ndarray:
        corner = random.integers(0, 60, (count, 2)).astype(float)
        sides = random.integers(10, 50, (count, 2))
        made = np.column_stack(
            [corner, corner + sides, random.integers(1, 20, count) / 20, random.integers(0, 4, count)]
        )
        if jitter is not None and len(jitter):
            near = jitter[random.integers(0, len(jitter), count)].copy()
            near[:, :4] += random.normal(0, 2, (count, 4))
            near[:, 4] = made[:, 4]
            made = np.where(random.random((count, 1)) < 0.7, near, made)
        solid = (made[:, 2] > made[:, 0]) & (made[:, 3] > made[:, 1])
        return made[solid]

    truth = [image(int(random.integers(0, 12))) for _ in range(6)]
    found = [image(int(random.integers(1, 25)), rows) for rows in truth]
    ignored = [random.random(len(rows)) < 0.3 for rows in truth]
    for most_found in (100, 3):
        ours = average_precisions(found, truth, ignored=ignored, most_found=most_found)
        theirs = coco_average_precisions(found, truth, ignored, most_found)
        assert ours.keys() == theirs.keys() and len(ours) > 1
        assert [*ours.values()] == pytest.approx([theirs[c] for c in ours], abs=1e-9)
