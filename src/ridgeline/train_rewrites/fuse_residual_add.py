"""A convolution adds the map that its result would be added to: before it rounds, and without a pass for the sum.

A pass over graphs of aten operators, forward and backward, as AOTAutograd hands them to a compiler. `meta["val"]` is
what a node returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import conv2d_dgrad, conv2d_fp8, conv2d_fprop
from ridgeline.train_rewrites._match import is_channels_last, only_user
from ridgeline.train_rewrites._operators import arguments, call

_ADD = torch.ops.aten.add.Tensor
_OPS = {op.overload: op for op in (conv2d_fprop.OP, conv2d_dgrad.OP, conv2d_fp8.OP)}


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums of a convolution's result and another map by the convolution with a residual; returns how many.

    The convolution moves to where the sum was. Where both maps are results of convolutions, the one with more products
    adds the other's, for they hide the reading; of equals the later one. Does not fire on: a result that has other
    readers too, or is cast before the sum; stride 2; a map of another dtype, shape or layout; a sum with a factor; a
    convolution that has a residual already.
    """
    graph = graph_module.graph
    fused = 0
    for add in graph.find_nodes(op="call_function", target=_ADD):
        found = [(conv, other) for conv, other in _orders(add) if _takes(conv, other, add)]
        if not found:
            continue
        conv, residual = max(found, key=lambda pair: (_flops(pair[0]), pair[0]))
        with graph.inserting_before(add):
            new = call(graph, conv.target, {**arguments(conv), "residual": residual}, (conv, add))
        new.meta["val"] = add.meta["val"]
        add.replace_all_uses_with(new)
        graph.erase_node(add)
        graph.erase_node(conv)
        fused += 1
    if fused:
        graph.lint()
        graph_module.recompile()
    return fused


def residuals(graph_module: fx.GraphModule) -> int:
    """How many convolutions of a graph add a map."""
    calls = (node for node in graph_module.graph.nodes if node.op == "call_function" and node.target in _OPS)
    return sum(arguments(node)["residual"] is not None for node in calls)


def _orders(add: fx.Node) -> tuple[tuple[Any, Any], ...]:
    given = arguments(add)
    first, second = given["self"], given["other"]
    return () if first is second or given["alpha"] != 1 else ((first, second), (second, first))


def _takes(conv: Any, other: Any, add: fx.Node) -> bool:
    """Whether `conv` is a convolution that only `add` reads, of a form that reads `other` too."""
    if not isinstance(conv, fx.Node) or not isinstance(other, fx.Node) or conv.target not in _OPS:
        return False
    given, y, residual = arguments(conv), conv.meta["val"], other.meta["val"]
    if not isinstance(residual, Tensor):
        return False
    alike = residual.shape == y.shape and residual.dtype == y.dtype and residual.device == y.device
    return (
        only_user(conv) is add
        and given["residual"] is None
        and given.get("stride", 1) == 1
        and alike
        and is_channels_last(residual)
        and _is_like(add.meta["val"], y)
    )


def _is_like(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _flops(conv: fx.Node) -> int:
    values = fx.map_arg(arguments(conv), lambda node: node.meta["val"])
    return _OPS[conv.target].cost(**values).flops  # pyright: ignore[reportArgumentType]
