"""Views that lead from a map back to the map itself are that map.

A linear layer of the pixels of a map is a convolution of the map itself: map -> tokens -> map. So is its gradient. What
looks for the convolution behind a sum, or for the norm behind a gradient, finds it where such views are gone.

A pass over graphs of aten operators, as AOTAutograd hands them to a compiler, before those that fuse. `meta["val"]` is
what a node returns.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from ridgeline.train_rewrites._operators import VIEWS


def apply(graph_module: fx.GraphModule) -> int:
    """Let readers of such views read the map; returns of how many. What a graph returns stays as it is."""
    graph = graph_module.graph
    cancelled = 0
    for node in graph.nodes:
        alike = [one for one in _sources(node) if _is_like(one, node)]
        if not alike:
            continue
        source = alike[-1]
        found = node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
        cancelled += bool(found)
    if cancelled:
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return cancelled


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """What a node is a view of, what that is a view of, and so on."""
    while node.op == "call_function" and node.target in VIEWS:
        (node,) = node.all_input_nodes
        yield node


def _is_like(source: fx.Node, node: fx.Node) -> bool:
    """Whether both, of one memory, read the same places of it in the same order."""
    a, b = source.meta.get("val"), node.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
