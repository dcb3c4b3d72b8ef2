"""A norm's backward adds the gradient that comes to its input by another way: a residual branch, or a 1x1 convolution.

In y = x + f(norm(x)) two gradients reach x. Autograd adds them in a pass of its own, two reads and a write; the norm's
kernel has its part in registers, and reads the other one once. The sum is rounded once, not twice.

A pass over graphs of aten operators, as AOTAutograd hands them to a compiler, before those that look at what norms
make: the norm may sum the result or store it in FP8, as a convolution that adds a map may not. `meta["val"]` is what a
node returns.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import group_norm_silu_backward
from ridgeline.train_rewrites._match import is_channels_last, only_user
from ridgeline.train_rewrites._operators import arguments, call

_ADD, _CLONE = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default
_NORM = group_norm_silu_backward.OP.overload


@dataclass(frozen=True)
class _Site:
    """A norm's backward, its dx that only a sum reads, the other term, and what of that the norm has to wait for."""

    norm: fx.Node
    dx: fx.Node
    other: fx.Node
    late: tuple[fx.Node, ...]


def apply(graph_module: fx.GraphModule) -> int:
    """Replace sums of a norm's dx and another map by the norm with a residual; returns how many.

    What makes the other map moves to before the norm where it came later; a slice of a wider map's channels is made
    dense, which costs what the sum did. Does not fire on: dx with other readers, a map that is made of results of the
    norm, one of another dtype, shape or layout, a sum with a factor, a norm that has a residual already.
    """
    graph = graph_module.graph
    fused = 0
    for add in graph.find_nodes(op="call_function", target=_ADD):
        given = arguments(add)
        orders = ((given["self"], given["other"]), (given["other"], given["self"])) if given["alpha"] == 1 else ()
        site = next((site for pair in orders if (site := _site(*pair, add)) is not None), None)
        if site is None:
            continue
        norm = site.norm
        for node in site.late:
            norm.prepend(node)
        with graph.inserting_before(norm):
            residual = _dense(site.other)
            new = call(graph, _NORM, {**arguments(norm), "residual": residual}, (norm, add))
        new.meta["val"] = norm.meta["val"]
        norm.replace_all_uses_with(new)
        graph.erase_node(norm)
        add.replace_all_uses_with(site.dx)
        graph.erase_node(add)
        fused += 1
    if fused:
        graph.lint()
        graph_module.recompile()
    return fused


def _site(dx: Any, other: Any, add: fx.Node) -> _Site | None:
    if not isinstance(dx, fx.Node) or not isinstance(other, fx.Node) or only_user(dx) is not add:
        return None
    if dx.target is not operator.getitem or dx.args[1] != 0:
        return None
    norm: Any = dx.args[0]
    found, residual = dx.meta["val"], other.meta["val"]
    if norm.target is not _NORM or arguments(norm)["residual"] is not None or not isinstance(residual, Tensor):
        return None
    alike = (residual.dtype, residual.shape, residual.device) == (found.dtype, found.shape, found.device)
    late = _late(other, norm)
    by_pixels = residual.dim() == 4 and (residual.stride(1) == 1 or is_channels_last(residual))
    return _Site(norm, dx, other, late) if alike and by_pixels and late is not None else None


def _dense(other: fx.Node) -> fx.Node:
    """It, or a copy of what is a slice."""
    found = other.meta["val"]
    if is_channels_last(found):
        return other
    copy = other.graph.call_function(_CLONE, (other,), {"memory_format": torch.channels_last})
    copy.meta["val"] = found.clone(memory_format=torch.channels_last)
    return copy


def _late(node: fx.Node, norm: fx.Node) -> tuple[fx.Node, ...] | None:
    """What makes `node`, and itself, from behind the norm, in order; None where the norm has a part in it."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        one = pending.pop()
        if one is norm:
            return None
        if norm < one and one not in found:
            found.add(one)
            pending += one.all_input_nodes
    return tuple(sorted(found))
