"""The gradient of a convolution's bias is summed by the norm that makes the gradient of its result.

A pass over the backward's graph of aten operators, as AOTAutograd hands it to a compiler. `meta["val"]` is what a node
returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import group_norm_silu_backward

_NORM = group_norm_silu_backward.OP.overload
_SUMMED = group_norm_silu_backward.SUMMED
_SUM = torch.ops.aten.sum.dim_IntList
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_CAST = torch.ops.prims.convert_element_type.default
_ALL_BUT_CHANNELS = (0, 2, 3)
_MASK, _BIAS = 10, 2  # places of convolution_backward's output_mask, and in it, of the bias


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums over images and pixels of a norm's dx; returns how many.

    Takes a sum of its own, and the bias gradient of one of PyTorch's convolutions, also where dx is cast before. The
    sum is then of values that were not rounded. Does not fire on: sums over other axes, dx that another operator
    changes first.
    """
    graph = graph_module.graph
    replaced = 0
    for norm in graph.find_nodes(op="call_function", target=_NORM):
        sums = list(_sums(norm))
        if not sums:
            continue
        with graph.inserting_before(norm):
            new = graph.call_function(_SUMMED, norm.args, norm.kwargs)
        dx, *others = norm.meta["val"]
        total = dx.new_empty(dx.shape[1], dtype=torch.promote_types(dx.dtype, torch.float32))
        new.meta = {**norm.meta, "val": (dx, total, *others)}
        for item in list(norm.users):
            # (dx, others) become (dx, its sum, others)
            index = item.args[1]
            item.args = (new, index + 1 if index else 0)
        graph.erase_node(norm)
        with graph.inserting_after(new):
            of_new = graph.call_function(operator.getitem, (new, 1))
        of_new.meta["val"] = total
        for node in sums:
            _replace(graph, node, of_new)
        replaced += len(sums)
    if replaced:
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return replaced


def _sums(norm: fx.Node) -> Iterator[fx.Node]:
    """What is the sum of the norm's dx over all but the channels."""
    for dx in (item for item in norm.users if item.args[1] == 0):
        casts = [user for user in dx.users if user.target is _CAST]
        for node in (dx, *casts):
            for user in node.users:
                if user.target is _SUM and _over_pixels(user):
                    yield user
                elif user.target is _CONVOLUTION and user.args[0] is node and _mask(user)[_BIAS]:
                    yield from (item for item in user.users if item.args[1] == _BIAS)


def _mask(convolution: fx.Node) -> list[bool]:
    """Which gradients one of PyTorch's convolutions computes: of its input, its weight, its bias."""
    mask: Any = convolution.args[_MASK]
    return list(mask)


def _over_pixels(node: fx.Node) -> bool:
    axes: Any = node.args[1]
    keep = node.args[2:]
    return tuple(axes) == _ALL_BUT_CHANNELS and not (keep and keep[0]) and not node.kwargs.get("keepdim")


def _replace(graph: fx.Graph, node: fx.Node, total: fx.Node) -> None:
    """Give the readers of `node` the sum in its place, and in its dtype where they do not widen it."""
    if node.target is operator.getitem:
        convolution: Any = node.args[0]
        mask = _mask(convolution)
        mask[_BIAS] = False
        convolution.update_arg(_MASK, mask)
    wide = total.meta["val"].dtype
    for cast in [user for user in node.users if user.target is _CAST and user.args[1] == wide]:
        cast.replace_all_uses_with(total)
        graph.erase_node(cast)
    found = node.meta["val"]
    if node.users and found.dtype != wide:
        with graph.inserting_before(node):
            narrow = graph.call_function(_CAST, (total, found.dtype))
        narrow.meta["val"] = found
        total = narrow
    node.replace_all_uses_with(total)
    graph.erase_node(node)
