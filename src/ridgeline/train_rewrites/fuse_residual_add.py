"""A convolution adds the map that its result would be added to: before it rounds, and without a pass for the sum.

A pass over graphs of aten operators, forward and backward, as AOTAutograd hands them to a compiler. `meta["val"]` is
what a node returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import conv2d_dgrad, conv2d_fp8, conv2d_fprop
from ridgeline.train_rewrites._match import is_channels_last, only_user
from ridgeline.train_rewrites._operators import VIEWS, arguments, call

_ADD = torch.ops.aten.add.Tensor
_VIEW, _PERMUTE = torch.ops.aten.view.default, torch.ops.aten.permute.default
_OPS = {op.overload: op for op in (conv2d_fprop.OP, conv2d_dgrad.OP, conv2d_fp8.OP)}


@dataclass(frozen=True)
class _Term:
    """A term of a sum: a convolution's result, or its pixels [N, ..., C] one behind the other, and the other term."""

    conv: fx.Node
    seen: fx.Node  # the convolution, or the last of the views of its result
    other: fx.Node


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums of a convolution's result and another map by the convolution with a residual; returns how many.

    Both may be given as their pixels, the tokens of a linear layer. The convolution moves to where the sum was. Where
    both maps are results of convolutions, the one with more products adds the other's, for they hide the reading; of
    equals the later one. Does not fire on: a result that has other readers too, or is cast before the sum; stride 2; a
    map of another dtype, shape or layout; a sum with a factor; a convolution that has a residual already.
    """
    graph = graph_module.graph
    fused = 0
    for add in graph.find_nodes(op="call_function", target=_ADD):
        found = [term for pair in _orders(add) if (term := _term(*pair, add)) is not None]
        if not found:
            continue
        term = max(found, key=lambda one: (_flops(one.conv), one.conv))
        conv: Any = term.conv
        y = conv.meta["val"]
        with graph.inserting_before(add):
            residual = term.other if term.seen is conv else _map_of(term.other, y)
            new = call(graph, conv.target, {**arguments(conv), "residual": residual}, (conv, add))
            new.meta["val"] = y
            total = new if term.seen is conv else _pixels_of(new, add.meta["val"])
        add.replace_all_uses_with(total)
        graph.erase_node(add)
        fused += 1
    if fused:
        # the convolutions that were, and views of their results
        graph.eliminate_dead_code()
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


def _term(seen: Any, other: Any, add: fx.Node) -> _Term | None:
    """`seen`, if it is of a convolution that only `add` reads, of a form that reads `other` too."""
    if not isinstance(seen, fx.Node) or not isinstance(other, fx.Node):
        return None
    conv, alone = seen, only_user(seen) is add
    while conv.op == "call_function" and conv.target in VIEWS:
        (source,) = conv.all_input_nodes
        conv, alone = source, alone and only_user(source) is conv
    if not alone or conv.target not in _OPS or not isinstance(other.meta["val"], Tensor):
        return None
    given, y, found, residual = arguments(conv), conv.meta["val"], seen.meta["val"], other.meta["val"]
    if seen is conv:
        dense = is_channels_last(residual)
    else:
        of_pixels = found.shape[:1] + found.shape[-1:] == y.shape[:2]
        dense = of_pixels and all(one.is_contiguous() for one in (_pixels(y), found, residual))
    fits = given["residual"] is None and given.get("stride", 1) == 1 and dense
    alike = _is_like(residual, found) and residual.device == found.device and _is_like(add.meta["val"], found)
    same = alike and add.meta["val"].stride() == found.stride()
    return _Term(conv, seen, other) if fits and same else None


def _is_like(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape


def _pixels(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1)


def _map_of(pixels: fx.Node, like: Tensor) -> fx.Node:
    """A map of the same memory as its pixels [N, ..., C]."""
    n, c, h, w = like.shape
    rows = _called(pixels, _VIEW, [n, h, w, c])
    return _called(rows, _PERMUTE, [0, 3, 1, 2])


def _pixels_of(map_: fx.Node, like: Tensor) -> fx.Node:
    """The pixels of a map, in the shape of `like`."""
    return _called(_called(map_, _PERMUTE, [0, 2, 3, 1]), _VIEW, list(like.shape))


def _called(node: fx.Node, view: torch._ops.OpOverload, numbers: list[int]) -> fx.Node:
    new = node.graph.call_function(view, (node, numbers))
    new.meta["val"] = view(node.meta["val"], numbers)
    return new


def _flops(conv: fx.Node) -> int:
    values = fx.map_arg(arguments(conv), lambda node: node.meta["val"])
    return _OPS[conv.target].cost(**values).flops  # pyright: ignore[reportArgumentType]
