"""The gradient of a convolution's bias is summed by the norm that makes the gradient of its result.

A pass over the backward's graph of aten operators, as AOTAutograd hands it to a compiler, after `fuse_quantize`.
`meta["val"]` is what a node returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import (
    conv2d_wgrad_fp8,
    group_norm_silu_backward,
    group_norm_silu_backward_concat,
    group_norm_silu_backward_fp8,
    quantize_fp8,
)
from ridgeline.train_rewrites._operators import OUTPUT_MASK, arguments


@dataclass(frozen=True)
class _Norm:
    """A norm's backward, whose form that sums dx returns the sum behind its `maps`.

    The first of these is dx, or as many are as it has `parts`, side by side.
    """

    overload: torch._ops.OpOverload
    summed: torch._ops.OpOverload
    maps: int
    parts: int = 1
    quads: int | None = None  # which result is dx in FP8 for a weight gradient


_NORMS = (
    _Norm(group_norm_silu_backward.OP.overload, group_norm_silu_backward.SUMMED, maps=1),
    _Norm(group_norm_silu_backward_concat.OP.overload, group_norm_silu_backward_concat.SUMMED, maps=2, parts=2),
    _Norm(group_norm_silu_backward_fp8.OP.overload, group_norm_silu_backward_fp8.SUMMED, maps=3, quads=2),
)
_WGRAD_FP8 = conv2d_wgrad_fp8.OP.overload
_SUM = torch.ops.aten.sum.dim_IntList
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_CAST = torch.ops.prims.convert_element_type.default
_CLONE, _SLICE = torch.ops.aten.clone.default, torch.ops.aten.slice.Tensor
_QUANTIZE = quantize_fp8.OP.overload
_ALL_BUT_CHANNELS = (0, 2, 3)
_BIAS = 2  # place among convolution_backward's results, and in its output_mask


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums over images and pixels of a norm's dx; returns how many.

    Takes a sum of its own, and the bias gradient of one of PyTorch's convolutions, also where dx is cast or copied
    before, and of some of its channels, and that of a weight gradient in FP8, where the norm's kernel has dx at hand.
    The sum is then of values that were not rounded. Does not fire on: sums over other axes, dx that another operator
    changes first. A bias gradient in FP8 that nothing reads is not computed.
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
    total = maps[0].new_empty(others[0].shape, dtype=torch.promote_types(maps[0].dtype, torch.float32))
    new.meta = {**node.meta, "val": (*maps, total, *others)}
    for item in list(node.users):
        index: Any = item.args[1]
        item.args = (new, index + 1 if index >= norm.maps else index)
    graph.erase_node(node)
    with graph.inserting_after(new):
        of_new = graph.call_function(operator.getitem, (new, norm.maps))
    of_new.meta["val"] = total
    for one, channels in sums:
        _replace(graph, one, _channels_of(of_new, channels))
    if new.kwargs.get("keep") and not _is_read(new, 0):
        _do_not_keep(new)
    return len(sums)


def _sums(node: fx.Node, norm: _Norm) -> Iterator[tuple[fx.Node, range | None]]:
    """What is the sum of some channels of the norm's dx, or of all, over all else, and is read; and which channels."""
    for map_, channels in _maps_of(node, norm):
        for user in map_.users:
            if user.target is _SUM and _over_pixels(user):
                yield user, channels
            elif user.target is _CONVOLUTION and user.args[0] is map_ and _mask(user)[_BIAS]:
                yield from ((db, channels) for db in _results(user, _BIAS))
            elif user.target is _QUANTIZE and _sums_for_nothing(node):
                yield from ((db, channels) for quads in _results(user, 1) for db in _of_quads(quads))
    if norm.quads is not None:
        yield from ((db, None) for quads in _results(node, norm.quads) for db in _of_quads(quads))


def _maps_of(node: fx.Node, norm: _Norm) -> Iterator[tuple[fx.Node, range | None]]:
    """What holds dx or some of its channels, and which."""
    if norm.parts == 1:
        yield from chain.from_iterable(map(_parts, _results(node, 0)))
        return
    first = 0
    for index in range(norm.parts):
        end = first + node.meta["val"][index].shape[1]
        for part in _results(node, index):
            yield from _parts(part, range(first, end))
        first = end


def _parts(map_: fx.Node, channels: range | None = None) -> Iterator[tuple[fx.Node, range | None]]:
    """A map of these channels of another, or of all, and what holds some of them: slices, copies, casts, and theirs."""
    yield map_, channels
    for user in map_.users:
        if user.target in (_CAST, _CLONE):
            yield from _parts(user, channels)
        elif user.target is _SLICE and (given := arguments(user))["dim"] == given["step"] == 1:
            held = channels or range(map_.meta["val"].shape[1])
            yield from _parts(user, held[given["start"] : given["end"]])


def _sums_for_nothing(node: fx.Node) -> bool:
    """Whether the norm has dx in registers when it is done; else a pass over it would do what the gradient does."""
    if node.target is _NORMS[-1].overload:
        return True
    given = dict(fx.map_arg(arguments(node), lambda one: one.meta["val"]))  # pyright: ignore[reportArgumentType]
    return group_norm_silu_backward.sums_dx(group_norm_silu_backward.plan_summed(**given))


def _of_quads(quads: fx.Node) -> Iterator[fx.Node]:
    """Bias gradients that weight gradients in FP8 sum of a map in this form, and that are read."""
    for user in quads.users:
        if user.target is _WGRAD_FP8 and user.args[0] is quads and user.kwargs.get("bias", True):
            yield from (db for db in _results(user, 1) if db.users)


def _channels_of(total: fx.Node, channels: range | None) -> fx.Node:
    """Those of a sum over all else."""
    if channels is None:
        return total
    value = total.meta["val"]
    with total.graph.inserting_after(total):
        part = total.graph.call_function(_SLICE, (total, 0, channels.start, channels.stop))
    part.meta["val"] = value[channels.start : channels.stop]
    return part


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
