"""Anchors, decoding, top-k and suppression against slow loops written from the specification."""

import math

import pytest
import torch

from ridgeline.models import postprocess
from ridgeline.models.postprocess import (
    anchor_grid,
    decode_cxcywh,
    decode_xyxy,
    keep_confident,
    non_maximum_suppression,
    top_detections,
    top_detections_agnostic,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_anchors_are_row_major_and_level_by_level():
    points, strides = anchor_grid(32, 64)
    assert points.shape == (2, 4 * 8 + 2 * 4 + 1 * 2)
    assert points[:, :2].T.tolist() == [[0.5, 0.5], [1.5, 0.5]]  # x runs first
    assert points[:, 8].tolist() == [0.5, 1.5]
    assert points[:, 32 + 4].tolist() == [0.5, 1.5]
    assert strides.tolist() == [8.0] * 32 + [16.0] * 8 + [32.0] * 2
    assert anchor_grid(640, 640)[0].shape[1] == 8400


@pytest.mark.parametrize(("height", "width"), [(33, 64), (64, 16), (0, 32), (-32, 32)])
def test_other_sizes_are_refused(height, width):
    with pytest.raises(ValueError, match=f"{height}x{width} pixels, but both sides must be multiples of 32"):
        anchor_grid(height, width)


def test_decoding_is_arithmetic_without_activation():
    points, strides = anchor_grid(32, 32)
    distances = torch.zeros(1, 4, 21)
    distances[0, :, 16 + 1] = torch.tensor([-1.0, 0.25, 2.0, 3.0])  # stride 16, cell (x 1, y 0); left is negative
    corners = decode_xyxy(distances, points, strides)[0, :, 17].tolist()
    assert corners == [(1.5 + 1) * 16, (0.5 - 0.25) * 16, (1.5 + 2) * 16, (0.5 + 3) * 16]
    x1, y1, x2, y2 = corners
    centred = decode_cxcywh(distances, points, strides)[0, :, 17].tolist()
    assert centred == [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]


def test_half_precision_is_decoded_in_float32():
    points, strides = anchor_grid(640, 640)
    distances = torch.full((1, 4, 8400), 0.3, dtype=torch.float16)
    corners = decode_xyxy(distances, points, strides)
    assert corners.dtype == torch.float32
    assert corners[0, 0, 79].item() == pytest.approx((79.5 - 0.3) * 8, abs=0.01)  # fp16 would give 633.5 or 634


def two_stage(boxes: torch.Tensor, logits: torch.Tensor, limit: int) -> list[list[float]]:
    """The rule of the specification for one image, in plain Python; earlier index first among equals."""
    classes, anchors = logits.shape
    k = min(limit, anchors)
    best = [max(logits[:, a].tolist()) for a in range(anchors)]
    chosen = sorted(range(anchors), key=lambda a: (-best[a], a))[:k]
    flat = [(logits[c, a].item(), a, c) for a in chosen for c in range(classes)]
    order = sorted(range(len(flat)), key=lambda i: (-flat[i][0], i))[:k]
    return [[*boxes[:, flat[i][1]].tolist(), 1 / (1 + math.exp(-flat[i][0])), float(flat[i][2])] for i in order]


@pytest.mark.parametrize(
    ("anchors", "classes", "limit", "values", "why"),
    [
        (50, 7, 20, 1000, "ordinary"),
        (20, 5, 300, 1000, "k is larger than the number of anchors"),
        (60, 1, 30, 1000, "one class"),
        (40, 6, 15, 3, "many ties"),
        (30, 4, 12, 1, "everything ties"),
        (1, 9, 300, 100, "one anchor: a single row, its best class"),
    ],
)
def test_two_stage_selection_follows_the_rule(anchors, classes, limit, values, why):
    logits = torch.randint(values, (2, classes, anchors), generator=generator(anchors)).float() / 50 - 5
    boxes = torch.rand(2, 4, anchors, generator=generator(1)) * 640
    found = top_detections(boxes, logits, limit=limit)
    expected = torch.tensor([two_stage(b, x, limit) for b, x in zip(boxes, logits, strict=True)])
    assert found.shape == (2, min(limit, anchors), 6), why
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=why)


def test_one_anchor_may_appear_under_several_classes():
    logits = torch.full((1, 3, 5), -9.0)
    logits[0, :, 2] = torch.tensor([4.0, 6.0, 5.0])
    logits[0, 0, 4] = 4.5
    boxes = torch.arange(20.0).reshape(1, 4, 5)
    found = top_detections(boxes, logits, limit=4)[0]
    assert found[:, 5].tolist() == [1, 2, 0, 0]
    assert found[:, 0].tolist() == [2, 2, 4, 2]
    agnostic = top_detections_agnostic(boxes, logits, limit=2)[0]
    assert agnostic[:, 5].tolist() == [1, 0] and agnostic[:, 0].tolist() == [2, 4]
    assert len(top_detections_agnostic(boxes, logits)[0]) == 5


def test_saturated_half_precision_scores_are_ranked_by_logit():
    logits = torch.tensor([[[20.0, 40.0, 30.0]]], dtype=torch.float16)
    assert len(set(logits.sigmoid().flatten().tolist())) == 1  # the scores cannot tell them apart
    found = top_detections(torch.tensor([[[0.0, 1.0, 2.0]] * 4]).transpose(0, 1).reshape(1, 4, 3), logits)
    assert found[0, :, 0].tolist() == [1, 2, 0]
    assert found.dtype == torch.float32


def test_confidence_is_a_strict_bound():
    rows = torch.tensor([[0, 0, 1, 1, 0.9, 2], [0, 0, 1, 1, 0.25, 0], [0, 0, 1, 1, 0.3, 1], [0, 0, 1, 1, 0.26, 2.0]])
    assert keep_confident(rows, 0.25)[:, 5].tolist() == [2, 1, 2]
    assert keep_confident(rows, 0.25, classes=[2, 7])[:, 4].tolist() == pytest.approx([0.9, 0.26])
    assert keep_confident(rows, 0.25, classes=[]).shape == (0, 6)
    assert len(keep_confident(rows, 0.25, limit=1)) == 1


def overlap(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inter = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    return inter / union if union > 0 else 0.0


def greedy(predictions: torch.Tensor, confidence: float, iou: float, multi_label: bool, agnostic: bool, limit: int):
    """Suppression as textbooks write it, one pair at a time."""
    rows = []
    for cx, cy, w, h, *scores in predictions.T.tolist():
        classes = range(len(scores)) if multi_label else [max(range(len(scores)), key=scores.__getitem__)]
        corners = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]
        rows += [[*corners, scores[c], float(c)] for c in classes if scores[c] > confidence]
    rows.sort(key=lambda row: -row[4])
    kept = []
    for row in rows:
        if all(overlap(row, other) <= iou or (row[5] != other[5] and not agnostic) for other in kept):
            kept.append(row)
    return kept[:limit]


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("agnostic", [True, False])
@pytest.mark.parametrize(("anchors", "limit"), [(120, 300), (250, 25)])
def test_suppression_equals_the_greedy_loop(multi_label, agnostic, anchors, limit, monkeypatch):
    monkeypatch.setattr(postprocess, "NMS_BLOCK", 64)  # several blocks, and boxes suppressed across them
    g = generator(anchors)
    # centres and sizes in steps of 4 pixels: exact in float32 even with the class offset added
    centre = torch.randint(25, (2, 2, anchors), generator=g) * 4.0 + 100
    size = torch.randint(4, 14, (2, 2, anchors), generator=g) * 8.0
    scores = torch.randperm(2 * 3 * anchors, generator=g).reshape(2, 3, anchors) / (6 * anchors)
    predictions = torch.cat([centre, size, scores], dim=1)
    # neither threshold is a value these scores and overlaps take, so float32 and float64 cannot disagree
    iou = 0.7013
    found = non_maximum_suppression(
        predictions, 0.3001, iou=iou, multi_label=multi_label, agnostic=agnostic, limit=limit
    )
    for image, rows in zip(predictions, found, strict=True):
        expected = torch.tensor(greedy(image, 0.3001, iou, multi_label, agnostic, limit))
        assert len(expected) > 10
        torch.testing.assert_close(rows, expected)


def one_image(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).T[None]


def test_a_chain_of_overlaps_is_settled_in_order():
    # each box overlaps its neighbours by more than 0.7: the second goes, so the third stays, so the fourth goes …
    predictions = one_image(*[(100.0 + 8 * i, 50.0, 64.0, 64.0, 0.9 - 0.01 * i) for i in range(9)])
    kept = non_maximum_suppression(predictions, 0.1)[0]
    assert ((kept[:, 0] + 32 - 100) / 8).tolist() == [0, 2, 4, 6, 8]


def test_thresholds_are_strict_and_classes_are_apart():
    # a 64 x 64 box, and one inside it of exactly half the area
    same = one_image((100.0, 100.0, 64.0, 64.0, 0.9), (100.0, 100.0, 64.0, 32.0, 0.8))
    assert len(non_maximum_suppression(same, 0.1, iou=0.5)[0]) == 2
    assert len(non_maximum_suppression(same, 0.1, iou=0.49)[0]) == 1
    two = one_image((100.0, 100.0, 64.0, 64.0, 0.9, 0.0), (100.0, 100.0, 64.0, 64.0, 0.0, 0.8))
    assert len(non_maximum_suppression(two, 0.1)[0]) == 2
    assert len(non_maximum_suppression(two, 0.1, agnostic=True)[0]) == 1
    assert non_maximum_suppression(two, 0.9)[0].shape == (0, 6)
    empty = one_image((100.0, 100.0, 0.0, 0.0, 0.9), (100.0, 100.0, 0.0, 0.0, 0.8))
    assert len(non_maximum_suppression(empty, 0.1)[0]) == 2


def test_only_the_best_candidates_are_considered(monkeypatch):
    apart = [(100.0 * i, 50.0, 10.0, 10.0, 0.2 + 0.01 * i) for i in range(40)]
    assert len(non_maximum_suppression(one_image(*apart), 0.1)[0]) == 40
    monkeypatch.setattr(postprocess, "MAX_CANDIDATES", 7)
    kept = non_maximum_suppression(one_image(*apart), 0.1)[0]
    assert kept[:, 4].tolist() == pytest.approx([0.59, 0.58, 0.57, 0.56, 0.55, 0.54, 0.53])


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match=r"must be \[N, 4 \+ C, A\], got \[84, 10\]"):
        non_maximum_suppression(torch.zeros(84, 10), 0.1)
    with pytest.raises(ValueError, match=r"thresholds must lie in 0\.\.1, got 25 and 0\.7"):
        non_maximum_suppression(torch.zeros(1, 84, 10), 25)
