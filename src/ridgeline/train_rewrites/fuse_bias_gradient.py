"""The gradient of a convolution's bias is summed by the norm that makes the gradient of its result.

A pass over the backward's graph of aten operators, as AOTAutograd hands it to a compiler, after `fuse_quantize`.
`meta["val"]` is what a node returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import conv2d_wgrad_fp8, group_norm_silu_backward, group_norm_silu_backward_fp8
from ridgeline.train_rewrites._operators import OUTPUT_MASK


@dataclass(frozen=True)
class _Norm:
    """A norm's backward, whose form that sums dx returns the sum behind its `maps`, the first of which is dx."""

    overload: torch._ops.OpOverload
    summed: torch._ops.OpOverload
    maps: int
    quads: int | None = None  # which result is dx in FP8 for a weight gradient


_NORMS = (
    _Norm(group_norm_silu_backward.OP.overload, group_norm_silu_backward.SUMMED, maps=1),
    _Norm(group_norm_silu_backward_fp8.OP.overload, group_norm_silu_backward_fp8.SUMMED, maps=3, quads=2),
)
_WGRAD_FP8 = conv2d_wgrad_fp8.OP.overload
_SUM = torch.ops.aten.sum.dim_IntList
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_CAST = torch.ops.prims.convert_element_type.default
_ALL_BUT_CHANNELS = (0, 2, 3)
_BIAS = 2  # place among convolution_backward's results, and in its output_mask


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums over images and pixels of a norm's dx; returns how many.

    Takes a sum of its own, and the bias gradient of one of PyTorch's convolutions, also where dx is cast before, and
    that of a weight gradient in FP8, where the norm writes dx in FP8. The sum is then of values that were not rounded.
    Does not fire on: sums over other axes, dx that another operator changes or quantises first. A bias gradient in FP8
    that nothing reads is not computed.
    """
    graph = graph_module.graph
    replaced = sum(_by_norm(graph, node, norm) for norm in _NORMS for node in _calls(graph, norm.overload))
    unread = [node for node in _calls(graph, _WGRAD_FP8) if not _is_read(node, 1) and node.kwargs.get("bias", True)]
    for node in unread:
        _leave_out_bias(node)
    if replaced or unread:
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return replaced


def _calls(graph: fx.Graph, target: torch._ops.OpOverload) -> tuple[fx.Node, ...]:
    return tuple(graph.find_nodes(op="call_function", target=target))


def _by_norm(graph: fx.Graph, node: fx.Node, norm: _Norm) -> int:
    """Let this call of a norm sum dx if something reads the sum; how many do."""
    sums = list(_sums(node, norm))
    if not sums:
        return 0
    with graph.inserting_before(node):
        new = graph.call_function(norm.summed, node.args, node.kwargs)
    maps, others = node.meta["val"][: norm.maps], node.meta["val"][norm.maps :]
    channels = sums[0].meta["val"].shape[0]
    total = maps[0].new_empty(channels, dtype=torch.promote_types(maps[0].dtype, torch.float32))
    new.meta = {**node.meta, "val": (*maps, total, *others)}
    for item in list(node.users):
        index: Any = item.args[1]
        item.args = (new, index + 1 if index >= norm.maps else index)
    graph.erase_node(node)
    with graph.inserting_after(new):
        of_new = graph.call_function(operator.getitem, (new, norm.maps))
    of_new.meta["val"] = total
    for one in sums:
        _replace(graph, one, of_new)
    if new.kwargs.get("keep") and not _is_read(new, 0):
        _do_not_keep(new)
    return len(sums)


def _sums(node: fx.Node, norm: _Norm) -> Iterator[fx.Node]:
    """What is the sum of the norm's dx over all but the channels, and is read."""
    for dx in _results(node, 0):
        casts = [user for user in dx.users if user.target is _CAST]
        for map_ in (dx, *casts):
            for user in map_.users:
                if user.target is _SUM and _over_pixels(user):
                    yield user
                elif user.target is _CONVOLUTION and user.args[0] is map_ and _mask(user)[_BIAS]:
                    yield from _results(user, _BIAS)
    if norm.quads is not None:
        for quads in _results(node, norm.quads):
            for user in quads.users:
                if user.target is _WGRAD_FP8 and user.args[0] is quads and user.kwargs.get("bias", True):
                    yield from (db for db in _results(user, 1) if db.users)


def _results(node: fx.Node, index: int) -> Iterator[fx.Node]:
    """The nodes that take a result of a call."""
    return (user for user in node.users if user.target is operator.getitem and user.args[1] == index)


def _is_read(node: fx.Node, index: int) -> bool:
    return any(result.users for result in _results(node, index))


def _mask(convolution: fx.Node) -> list[bool]:
    """Which gradients one of PyTorch's convolutions computes: of its input, its weight, its bias."""
    mask: Any = convolution.args[OUTPUT_MASK]
    return list(mask)


def _over_pixels(node: fx.Node) -> bool:
    axes: Any = node.args[1]
    keep = node.args[2:]
    return tuple(axes) == _ALL_BUT_CHANNELS and not (keep and keep[0]) and not node.kwargs.get("keepdim")


def _replace(graph: fx.Graph, node: fx.Node, total: fx.Node) -> None:
    """Give the readers of `node` the sum in its place, and in its dtype where they do not widen it."""
    if node.target is operator.getitem:
        convolution: Any = node.args[0]
        if convolution.target is _WGRAD_FP8:
            _leave_out_bias(convolution)
        else:
            mask = _mask(convolution)
            mask[_BIAS] = False
            convolution.update_arg(OUTPUT_MASK, mask)
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


def _leave_out_bias(wgrad: fx.Node) -> None:
    """Its second result, which nothing reads any more, becomes empty."""
    dw, db = wgrad.meta["val"]
    _choose(wgrad, "bias", value=False)
    wgrad.meta["val"] = (dw, db.new_empty(0))


def _do_not_keep(norm: fx.Node) -> None:
    """Its first result, dx that is not in FP8, which nothing reads any more, becomes empty."""
    dx, *others = norm.meta["val"]
    _choose(norm, "keep", value=False)
    norm.meta["val"] = (dx.new_empty(0), *others)


def _choose(node: fx.Node, name: str, *, value: bool) -> None:
    """Give a call this keyword argument, and likewise what Inductor reads strides from."""
    node.kwargs = {**node.kwargs, name: value}
    if (given := node.meta.get("eager_input_vals")) is not None:
        node.meta["eager_input_vals"] = (given[0], {**given[1], name: value})
