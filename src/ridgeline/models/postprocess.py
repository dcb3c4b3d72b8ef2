"""From raw head outputs to detections: anchors, decoding, two-stage top-k, non-maximum suppression.

N images, A anchors, C classes. Distances are (left, top, right, bottom) in grid units, boxes are in input pixels.
Everything here computes in float32 whatever the network ran in: half precision rounds a coordinate near 640 to 0.5
pixel and saturates scores, which creates ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STRIDES = (8, 16, 32)
MAX_DETECTIONS = 300
MAX_CANDIDATES = 30_000
CLASS_OFFSET = 7680  # pixels; larger than any input side, so boxes of different classes never overlap
NMS_BLOCK = 512  # candidates compared at once: 1 MB of overlaps


def check_input_size(height: int, width: int) -> None:
    """Raise ValueError unless both sides are positive multiples of the largest stride."""
    if height <= 0 or width <= 0 or height % STRIDES[-1] or width % STRIDES[-1]:
        raise ValueError(
            f"input is {height}x{width} pixels, but both sides must be multiples of {STRIDES[-1]}: letterbox it first"
        )


def anchor_grid(height: int, width: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cell centres [2, A] as (x, y) in grid units, and strides [A] in pixels: levels in order, row-major inside.

    Depends on shapes only, so in an exported graph it is a constant subgraph.
    """
    check_input_size(height, width)
    points, strides = [], []
    for stride in STRIDES:
        x = torch.arange(width // stride, device=device, dtype=torch.float32) + 0.5
        y = torch.arange(height // stride, device=device, dtype=torch.float32) + 0.5
        rows, columns = torch.meshgrid(y, x, indexing="ij")
        points.append(torch.stack([columns.flatten(), rows.flatten()]))
        strides.append(torch.full_like(points[-1][0], stride))
    return torch.cat(points, dim=1), torch.cat(strides)


def decode_xyxy(distances: Tensor, points: Tensor, strides: Tensor) -> Tensor:
    """Corners [N, 4, A] in pixels from distances [N, 4, A]; no activation is applied to the distances."""
    left_top, right_bottom = distances.float().chunk(2, dim=1)
    return torch.cat([points - left_top, points + right_bottom], dim=1) * strides


def decode_cxcywh(distances: Tensor, points: Tensor, strides: Tensor) -> Tensor:
    """Centres and sizes [N, 4, A] in pixels from distances [N, 4, A]."""
    left_top, right_bottom = distances.float().chunk(2, dim=1)
    low, high = points - left_top, points + right_bottom
    return torch.cat([(low + high) / 2, high - low], dim=1) * strides


def top_detections(boxes: Tensor, logits: Tensor, *, limit: int = MAX_DETECTIONS) -> Tensor:
    """The k = min(limit, A) best (anchor, class) pairs [N, k, 6]: x1, y1, x2, y2, score, class; best first.

    boxes [N, 4, A] corners, logits [N, C, A]. First the k anchors with the highest class logit, then the k highest
    of their k·C logits: one anchor may appear under several classes. Equal logits keep anchor, then class order.
    """
    classes, k = logits.shape[1], min(limit, logits.shape[2])
    per_anchor = logits.float().transpose(1, 2)  # [N, A, C]
    _, anchors = _top(per_anchor.amax(dim=2), k)
    candidates = per_anchor.gather(1, anchors[:, :, None].expand(-1, -1, classes))
    best, pairs = _top(candidates.flatten(1), k)
    anchors = anchors.gather(1, pairs // classes)
    return _rows(boxes, anchors, best, pairs % classes)


def top_detections_agnostic(boxes: Tensor, logits: Tensor, *, limit: int = MAX_DETECTIONS) -> Tensor:
    """As `top_detections`, but every anchor stands for its best class only."""
    best, classes = logits.float().max(dim=1)
    best, anchors = _top(best, min(limit, logits.shape[2]))
    return _rows(boxes, anchors, best, classes.gather(1, anchors))


def keep_confident(
    detections: Tensor, confidence: float, *, classes: Sequence[int] | None = None, limit: int = MAX_DETECTIONS
) -> Tensor:
    """Rows of one image's detections [n, 6] with score strictly above `confidence`, of `classes` if given."""
    mask = detections[:, 4] > confidence
    if classes is not None:
        wanted = torch.tensor(list(classes), dtype=detections.dtype, device=detections.device)
        mask &= torch.isin(detections[:, 5], wanted)
    return detections[mask][:limit]


def non_maximum_suppression(
    predictions: Tensor,
    confidence: float,
    *,
    iou: float = 0.7,
    multi_label: bool = True,
    agnostic: bool = False,
    limit: int = MAX_DETECTIONS,
) -> list[Tensor]:
    """Detections [n, 6] per image, best first, from one-to-many predictions [N, 4 + C, A].

    multi_label takes every class above `confidence` (validation), else the best class of each anchor (prediction);
    agnostic lets boxes of different classes suppress each other. A box goes when it overlaps a better one by more
    than `iou`. Equal scores keep anchor, then class order.
    """
    if predictions.ndim != 3 or predictions.shape[1] < 5:
        raise ValueError(f"non_maximum_suppression: predictions must be [N, 4 + C, A], got {list(predictions.shape)}")
    if not 0 <= confidence <= 1 or not 0 <= iou <= 1:
        raise ValueError(f"non_maximum_suppression: thresholds must lie in 0..1, got {confidence} and {iou}")
    detections = []
    for image in predictions.float():
        candidates = _candidates(image, confidence, multi_label=multi_label)
        offset = 0 if agnostic else CLASS_OFFSET
        boxes = candidates[:, :4] + candidates[:, 5:6] * offset
        detections.append(candidates[_greedy_keep(boxes, iou, limit)])
    return detections


def _top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # a stable sort, because topk leaves the order of equal values to the device
    ordered, index = torch.sort(values, dim=1, descending=True, stable=True)
    return ordered[:, :k], index[:, :k]


def _rows(boxes: Tensor, anchors: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    corners = boxes.transpose(1, 2).gather(1, anchors[:, :, None].expand(-1, -1, 4))
    return torch.cat([corners, logits.sigmoid()[:, :, None], classes[:, :, None].to(corners.dtype)], dim=2)


def _candidates(image: Tensor, confidence: float, *, multi_label: bool) -> Tensor:
    """Rows [n, 6] above `confidence` of one image [4 + C, A], best first, at most MAX_CANDIDATES."""
    boxes, scores = image[:4].T, image[4:].T
    if multi_label:
        anchors, classes = torch.nonzero(scores > confidence, as_tuple=True)
    else:
        best, classes = scores.max(dim=1)
        anchors = torch.nonzero(best > confidence).flatten()
        classes = classes[anchors]
    scores = scores[anchors, classes]
    order = torch.argsort(scores, descending=True, stable=True)[:MAX_CANDIDATES]
    centre, size = boxes[anchors[order]].chunk(2, dim=1)
    corners = torch.cat([centre - size / 2, centre + size / 2], dim=1)
    return torch.cat([corners, scores[order, None], classes[order, None].to(corners.dtype)], dim=1)


def _greedy_keep(boxes: Tensor, iou: float, limit: int) -> Tensor:
    """Indices of the first `limit` survivors of greedy suppression; boxes [n, 4] come best first."""
    kept = torch.empty(0, dtype=torch.int64, device=boxes.device)
    for start in range(0, len(boxes), NMS_BLOCK):
        if len(kept) >= limit:
            break
        block = boxes[start : start + NMS_BLOCK]
        free = ~(_overlap(boxes[kept], block) > iou).any(dim=0)
        # suppresses[i, j]: i comes before j and overlaps it
        suppresses = (_overlap(block, block) > iou).triu(diagonal=1)
        alive = free
        # each pass settles at least one more box of a chain, so the fixed point is the greedy answer
        while True:
            survivors = free & ~(suppresses & alive[:, None]).any(dim=0)
            if torch.equal(survivors, alive):
                break
            alive = survivors
        kept = torch.cat([kept, start + torch.nonzero(alive).flatten()])
    return kept[:limit]


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union [len(a), len(b)]; 0 where both boxes are empty."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    intersection = (high - low).clamp(min=0).prod(dim=2)
    area_a, area_b = ((boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (a, b))
    union = area_a[:, None] + area_b[None, :] - intersection
    return torch.where(union > 0, intersection / union, 0.0)
