"""What makes a map quantises it: a norm before a convolution, or the gradient of one, stores FP8 instead of bf16.

A pass over graphs of aten operators, forward and backward, as AOTAutograd hands them to a compiler: there the gradients
are nodes like any other. `meta["val"]` is what a node returns.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ridgeline.kernels import (
    group_norm_silu,
    group_norm_silu_backward,
    group_norm_silu_backward_fp8,
    group_norm_silu_fp8,
    quantize_fp8,
)
from ridgeline.train_rewrites._operators import arguments, call

_QUANTIZE = quantize_fp8.OP.overload
_NORM = group_norm_silu.OP.overload
_NORM_BACKWARD = group_norm_silu_backward.OP.overload
_NORM_FP8 = group_norm_silu_fp8.OP.overload
_NORM_BACKWARD_FP8 = group_norm_silu_backward_fp8.OP.overload
_OWN = "passes of their own"


def apply(graph_module: fx.GraphModule) -> int:
    """Fuse every quantize_fp8 with the norm, forward or backward, whose map it reads; returns how many.

    A norm forward must have no other reader, one backward keeps its bf16 map for others. Does not fire on: maps that
    the fused kernels do not fit, scales on another device, formats that they do not store.
    """
    graph = graph_module.graph
    fused = 0
    for node in graph.find_nodes(op="call_function", target=_QUANTIZE):
        fused += _with_norm(graph, node) or _with_norm_backward(graph, node)
    if fused:
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return fused


def quantised_by(graph_module: fx.GraphModule) -> Counter[str]:
    """How many maps of a graph are quantised by passes of their own, and by norms."""
    of_backward = dict.fromkeys((_NORM_BACKWARD_FP8, group_norm_silu_backward_fp8.SUMMED), "gradients of norms")
    names = {_QUANTIZE: _OWN, _NORM_FP8: "norms", **of_backward}
    calls = (node.target for node in graph_module.graph.nodes if node.op == "call_function")
    return Counter(names[target] for target in calls if target in names)


def _with_norm(graph: fx.Graph, node: fx.Node) -> bool:
    given = arguments(node)
    norm = given["x"]
    if norm.target is not _NORM or len(norm.users) > 1 or given["fp8_format"] != "e4m3":
        return False
    of_norm = arguments(norm)
    if not _suits(of_norm, given, group_norm_silu_fp8.fits):
        return False
    with graph.inserting_before(node):
        new = call(graph, _NORM_FP8, {**of_norm, **_recording(given)}, (norm, node))
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(norm)
    return True


def _with_norm_backward(graph: fx.Graph, node: fx.Node) -> bool:
    given = arguments(node)
    dx = given["x"]
    if dx.target is not operator.getitem or dx.args[0].target is not _NORM_BACKWARD or dx.args[1] != 0:
        return False
    norm, recording = dx.args[0], _recording(given)
    of_norm = arguments(norm)
    # the call moves to where the norm is: what it records in must be there by then
    there = all(value.op == "placeholder" for value in recording.values() if isinstance(value, fx.Node))
    if given["fp8_format"] != "e5m2" or not there or not _suits(of_norm, given, group_norm_silu_backward_fp8.fits):
        return False
    keep = len(dx.users) > 1
    with graph.inserting_before(norm):
        new = call(graph, _NORM_BACKWARD_FP8, {**of_norm, **recording, "keep": keep}, (norm, node))
    bf16, *others = norm.meta["val"]
    new.meta["val"] = (bf16 if keep else bf16.new_empty(0), *node.meta["val"], *others)
    # (dx, others) and (dx8, quads) become (dx, dx8, quads, others)
    for old, index_of in ((norm, lambda index: index + 2 if index else 0), (node, lambda index: index + 1)):
        for item in list(old.users):
            item.args = (new, index_of(item.args[1]))
    graph.erase_node(node)
    graph.erase_node(norm)
    return True


def _recording(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of quantize_fp8 as the fused operators name them."""
    names = {"scale": "fp8_scale", "amax": "amax", "counts": "counts", "row": "row", "quads": "quads"}
    return {new: given[old] for old, new in names.items()}


def _suits(of_norm: Mapping[str, Any], given: Mapping[str, Any], fits: Callable[..., bool]) -> bool:
    """Whether a fused kernel takes the norm's map, and finds the scale where it is."""
    x, scale, second = of_norm["x"].meta["val"], given["scale"].meta["val"], of_norm.get("x2")
    more = {} if second is None else {"x2": second.meta["val"]}
    return x.device == scale.device and fits(x, of_norm["groups"], quads=given["quads"], **more)
