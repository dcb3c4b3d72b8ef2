"""The gradient of the bias of q, k and v is summed by the attention that makes the gradient of these.

A pass over the backward's graph of aten operators, as AOTAutograd hands it to a compiler, beside `fuse_bias_gradient`.
`meta["val"]` is what a node returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import attention_packed_backward
from ridgeline.train_rewrites._operators import VIEWS, arguments

_BACKWARD = attention_packed_backward.OP.overload
_SUMMED = attention_packed_backward.SUMMED
_SUM = torch.ops.aten.sum.dim_IntList
_CAST = torch.ops.prims.convert_element_type.default
_VIEW = torch.ops.aten.view.default


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums over images and tokens of an attention's dqkv by sums over images; returns how many.

    Takes sums of any view of dqkv that keep the axis of its channels. They are then of values that were not rounded.
    Does not fire on: sums over other axes, of a part of dqkv or of what another operator makes of it, a cast included;
    bias gradients that the operator of a weight gradient makes.
    """
    graph = graph_module.graph
    replaced = sum(_by_attention(graph, node) for node in graph.find_nodes(op="call_function", target=_BACKWARD))
    if replaced:
        graph.lint()
        graph_module.recompile()
    return replaced


def _by_attention(graph: fx.Graph, node: fx.Node) -> int:
    """Let this call sum dqkv if something reads the sum; how many do."""
    dqkv = node.meta["val"]
    totals = [one for one in _sums(node) if _keeps_channels(one, dqkv.shape[2])]
    if not totals:
        return 0
    sums = dqkv.new_empty((dqkv.shape[0], dqkv.shape[2]), dtype=torch.promote_types(dqkv.dtype, torch.float32))
    with graph.inserting_before(node):
        summed = graph.call_function(_SUMMED, node.args, node.kwargs)
        first, second = (graph.call_function(operator.getitem, (summed, index)) for index in range(2))
    summed.meta = {**node.meta, "val": (dqkv, sums)}
    first.meta["val"], second.meta["val"] = dqkv, sums
    node.replace_all_uses_with(first)
    graph.erase_node(node)
    for total in totals:
        _replace(graph, total, second)
    return len(totals)


def _sums(node: fx.Node) -> Iterator[fx.Node]:
    """Sums of a node or of a view of it."""
    for user in node.users:
        if user.target is _SUM:
            yield user
        elif user.target in VIEWS:
            yield from _sums(user)


def _keeps_channels(total: fx.Node, channels: int) -> bool:
    """Whether a sum of a view of dqkv, whose channels are neighbours in memory, keeps these and nothing else."""
    given = arguments(total)
    x = given["self"].meta["val"]
    axes = {axis % x.dim() for axis in given["dim"] or ()}  # none stands for all
    long = [axis for axis in range(x.dim()) if x.shape[axis] != 1]
    kept = [(x.shape[axis], x.stride(axis)) for axis in long if axis not in axes]
    whole_rows = all(x.stride(axis) % channels == 0 for axis in long if axis in axes)
    return bool(axes) and kept == [(channels, 1)] and whole_rows


def _replace(graph: fx.Graph, total: fx.Node, sums: fx.Node) -> None:
    """Give the readers of `total` the sum of `sums` over images, in its shape and dtype."""
    found, val = total.meta["val"], sums.meta["val"]
    with graph.inserting_before(total):
        new = _call(graph, _SUM, (sums, [0]), val.new_empty(val.shape[1]))
        if found.shape != new.meta["val"].shape:
            new = _call(graph, _VIEW, (new, list(found.shape)), new.meta["val"].view(found.shape))
        if found.dtype != new.meta["val"].dtype:
            new = _call(graph, _CAST, (new, found.dtype), found)
    total.replace_all_uses_with(new)
    graph.erase_node(total)


def _call(graph: fx.Graph, target: Any, given: tuple[Any, ...], result: torch.Tensor) -> fx.Node:
    node = graph.call_function(target, given)
    node.meta["val"] = result
    return node
