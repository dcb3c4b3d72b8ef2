"""Decoding and two-stage top-k of an end-to-end detection head become one operator on the head's maps."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ridgeline.graph import export
from ridgeline.kernels import detect_topk
from ridgeline.models.postprocess import STRIDES, anchor_grid, decode_xyxy, top_detections
from ridgeline.rewrites._match import argument, calls, finish, replace, same, value

_aten = torch.ops.aten


def apply(graph_module: fx.GraphModule) -> int:
    """Replace top_detections(decode_xyxy(distances), logits) over three levels; returns how many.

    The pattern is the reference itself, exported at the sizes found, so nothing that computes anything else matches:
    another limit, agnostic selection, a threshold, a level more or less, other strides, dtypes the kernel refuses.
    """
    sites = 0
    flat = set(calls(graph_module, _aten.flatten.using_ints))
    levels = [
        cat for cat in calls(graph_module, _aten.cat.default) if flat.issuperset(cat.args[0]) and _level_maps(cat)
    ]
    for boxes in levels:
        for logits in levels:
            maps = [*_level_maps(boxes), *_level_maps(logits)]
            if logits is boxes or value(boxes).shape[1] != 4 or not _agree(maps):
                continue
            sites += _replace(graph_module, boxes, logits, maps)
    finish(graph_module)
    return sites


class _Reference(torch.nn.Module):
    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, distances: Tensor, logits: Tensor) -> Tensor:
        points, strides = anchor_grid(self.height, self.width, distances.device)
        return top_detections(decode_xyxy(distances, points, strides), logits)


def _level_maps(cat: fx.Node) -> list[fx.Node]:
    """The three 4-D maps whose flattened pixels a concat along its last axis joins; [] for any other concat."""
    flat = cat.args[0]
    joins = argument(cat, 1, 0) in (2, -1) and value(cat).dim() == 3 and len(flat) == len(STRIDES)
    if not joins or any(node.target is not _aten.flatten.using_ints or node.args[1:] != (2,) for node in flat):
        return []
    return [node.args[0] for node in flat if value(node.args[0]).dim() == 4]


def _agree(maps: list[fx.Node]) -> bool:
    """Box and class maps of equal levels, each level half as large as the one before."""
    sizes = [value(node).shape[2:] for node in maps]
    count = len(STRIDES)
    halves = all(
        (size[0] * stride, size[1] * stride) == (sizes[0][0] * STRIDES[0], sizes[0][1] * STRIDES[0])
        for size, stride in zip(sizes, STRIDES, strict=False)
    )
    known = all(value(node).dtype in detect_topk.FLOATS for node in maps)
    return len(maps) == 2 * count and sizes[:count] == sizes[count:] and halves and known


def _replace(graph_module: fx.GraphModule, boxes: fx.Node, logits: fx.Node, maps: list[fx.Node]) -> bool:
    height, width = (int(side) * STRIDES[0] for side in value(maps[0]).shape[2:])
    examples = [
        torch.empty(value(node).shape, dtype=value(node).dtype, device=value(node).device) for node in (boxes, logits)
    ]
    pattern = export(_Reference(height, width).eval(), examples)
    *_, output = pattern.graph.nodes
    placeholders = [node for node in pattern.graph.nodes if node.op == "placeholder"]
    root = output.args[0][0] if isinstance(output.args[0], (list, tuple)) else output.args[0]
    for node in calls(graph_module, root.target):
        bound = dict(zip(placeholders, (boxes, logits), strict=True))
        if same(root, node, bound):
            with graph_module.graph.inserting_before(node):
                fused = graph_module.graph.call_function(detect_topk.OP.overload, tuple(maps))
            replace(node, fused)
            return True
    return False
