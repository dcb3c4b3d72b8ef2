"""The detection head's decoding and selection becomes one operator, and nothing else that looks like it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphs import BY_NAME, check, image, net, rewritten
from ridgeline.graph import export
from ridgeline.models.postprocess import (
    anchor_grid,
    decode_cxcywh,
    decode_xyxy,
    top_detections,
    top_detections_agnostic,
)

SIZES = ((8, 12), (4, 6), (2, 3))  # of a 64 x 96 image


def maps(channels: int, *, batch: int = 2, seed: int = 0, levels=SIZES) -> list[Tensor]:
    return [image(batch, channels, *size, seed=seed + level) for level, size in enumerate(levels)]


def inputs(classes: int = 5, **choices) -> list[Tensor]:
    return [*maps(4, **choices), *maps(classes, seed=10, **choices)]


def joined(levels) -> Tensor:
    return torch.cat([level.flatten(2) for level in levels], dim=2)


def detect(m, *levels, size=(64, 96), decode=decode_xyxy, top=top_detections, grid=anchor_grid):
    boxes, logits = levels[:3], levels[3:]
    points, strides = grid(*size)
    return top(decode(joined(boxes), points, strides), joined(logits))


def fused(forward, sites, given=None):
    return rewritten(net(forward), given or inputs(), "fuse_detect", sites=sites)[1]


@pytest.mark.parametrize(
    "given",
    [inputs(), inputs(1, batch=1), inputs(4), inputs(80, batch=1)],
    ids=["5", "1", "4 classes, as box edges", "80"],
)
def test_fires(given):
    assert fused(detect, 1, given) == {"detect_topk": 1}


def test_more_anchors_than_rows():
    big = [(16, 24), (8, 12), (4, 6)]
    given = inputs(3, batch=1, levels=big)
    assert fused(lambda m, *x: detect(m, *x, size=(128, 192)), 1, given) == {"detect_topk": 1}


def test_two_heads_whose_maps_others_read_too():
    """One in another layout: its maps are converted."""

    def forward(m, *x):
        return detect(m, *x), detect(m, *(level.flip(1).contiguous() * 1 for level in x)), x[4] + 1

    assert fused(forward, 2)["detect_topk"] == 2


def transposed_levels(m, *levels):
    """Pixels counted down the columns."""
    points, strides = anchor_grid(64, 96)
    boxes, logits = ([level.transpose(2, 3) for level in side] for side in (levels[:3], levels[3:]))
    return top_detections(decode_xyxy(joined(boxes), points, strides), joined(logits))


def logits_of_other_levels(m, *levels):
    points, strides = anchor_grid(64, 96)
    boxes = joined(levels[:3])
    logits = torch.cat([level.flatten(2) for level in (levels[4], levels[3], levels[5])], dim=2)
    return top_detections(decode_xyxy(boxes, points, strides), logits)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, *x: detect(m, *x, top=lambda b, s: top_detections(b, s, limit=50)),
        lambda m, *x: detect(m, *x, top=top_detections_agnostic),
        lambda m, *x: detect(m, *x, decode=decode_cxcywh),
        lambda m, *x: detect(m, *x, top=lambda b, s: top_detections(b, s * 2)),
        lambda m, *x: detect(m, *x, grid=lambda h, w: (lambda p, s: (p, s * 2))(*anchor_grid(h, w))),
        transposed_levels,
        logits_of_other_levels,
    ],
    ids=[
        "limit", "agnostic", "centre and size", "scaled logits", "other strides", "columns first", "levels mixed",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    assert fused(forward, 0)["detect_topk"] == 0


def test_does_not_fire_on_float64():
    graph_module = export(net(detect), [level.double() for level in inputs()])
    assert BY_NAME["fuse_detect"](graph_module) == 0


def test_a_map_written_before_the_selection_stays():
    def forward(m, *levels):
        first = levels[0] * 1
        half = first[:, :2]
        boxes = joined((first, *levels[1:3]))
        half.add_(1.0)
        points, strides = anchor_grid(64, 96)
        return top_detections(decode_xyxy(boxes, points, strides), joined(levels[3:])), first

    module = net(forward)
    graph_module = export(module, inputs())
    BY_NAME["fuse_detect"](graph_module)
    check(graph_module, module, inputs())


def test_equal_logits_keep_their_order():
    given = inputs(3)
    for level in given[3:]:
        level.copy_(level.round())
    fused(detect, 1, given)
