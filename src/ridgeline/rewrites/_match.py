"""Reading and editing a graph of aten calls: the few moves every rewrite is made of."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline.graph import memory, mutated


def calls(graph_module: fx.GraphModule, *targets: Callable) -> Iterator[fx.Node]:
    """Every call of one of `targets`, in execution order; the graph may be edited meanwhile.

    Calls that touch memory which an in-place call writes are left out: what they compute depends on when they run.
    """
    written = written_memory(graph_module)
    yield from [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target in targets and not written & touched_memory(node)
    ]


def written_memory(graph_module: fx.GraphModule) -> set[int]:
    """Identities of the memory that in-place calls write."""
    return set().union(*(memory(source) for node in graph_module.graph.nodes for source in mutated(node)))


def touched_memory(node: fx.Node) -> set[int]:
    """Identities of the memory that a call reads or makes."""
    return memory(node).union(*(memory(source) for source in node.all_input_nodes))


def argument(node: fx.Node, index: int, default: Any = None) -> Any:
    """A positional argument that the caller may have left out."""
    return node.args[index] if len(node.args) > index else default


def only_user(node: fx.Node, *targets: Callable) -> fx.Node | None:
    """The single user of `node`, when it calls one of `targets`."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.op == "call_function" and user.target in targets else None


def value(node: fx.Node) -> Tensor:
    """The fake tensor a node carries."""
    return node.meta["val"]


def constant(graph_module: fx.GraphModule, node: Any) -> Tensor | None:
    """The parameter or buffer behind a `get_attr` node; None for anything else, and for one that the graph writes."""
    if not isinstance(node, fx.Node) or node.op != "get_attr" or any(node in mutated(user) for user in node.users):
        return None
    owner: Any = graph_module
    *path, name = str(node.target).split(".")
    for part in path:
        owner = getattr(owner, part)
    found = getattr(owner, name)
    return found if isinstance(found, Tensor) else None


def add_constant(graph_module: fx.GraphModule, tensor: Tensor, *, near: fx.Node, name: str) -> fx.Node:
    """Register `tensor` as a buffer under a free name and return the node that reads it, placed before `near`."""
    free = next(candidate for candidate in _numbered(name.replace(".", "_")) if not hasattr(graph_module, candidate))
    graph_module.register_buffer(free, tensor.detach())
    with graph_module.graph.inserting_before(near):
        node = graph_module.graph.get_attr(free)
    node.meta["val"] = _fake(tensor, near)
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let `new` stand for `old`: users, fake tensor and origin move over."""
    for key in ("val", "nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])
    old.replace_all_uses_with(new)


def same(pattern: Any, node: Any, bound: dict[fx.Node, fx.Node]) -> bool:
    """Whether `node` computes what `pattern` does: equal targets, literals and structure down to the bound nodes.

    `bound` maps nodes of the pattern's graph, its placeholders above all, to nodes here; it grows by what was matched.
    """
    if isinstance(pattern, fx.Node):
        if pattern in bound:
            return bound[pattern] is node
        if not isinstance(node, fx.Node) or (pattern.op, pattern.target) != (node.op, node.target):
            return False
        if not same(pattern.args, node.args, bound) or not same(pattern.kwargs, node.kwargs, bound):
            return False
        bound[pattern] = node
        return True
    if isinstance(pattern, (list, tuple)):
        return (
            isinstance(node, (list, tuple))
            and len(pattern) == len(node)
            and all(same(p, n, bound) for p, n in zip(pattern, node, strict=True))
        )
    if isinstance(pattern, dict):
        return (
            isinstance(node, dict)
            and pattern.keys() == node.keys()
            and all(same(pattern[key], node[key], bound) for key in pattern)
        )
    return type(pattern) is type(node) and pattern == node


def channel_range(node: fx.Node) -> tuple[int, int] | None:
    """Where a slice along channels without gaps begins and ends in its source; None for any other call."""
    sliced = node.op == "call_function" and node.target is torch.ops.aten.slice.Tensor
    if not sliced or argument(node, 1, 0) != 1 or argument(node, 4, 1) != 1:
        return None
    start, stop, _ = slice(argument(node, 2), argument(node, 3)).indices(value(node.args[0]).shape[1])
    return start, stop


def name_slices(graph_module: fx.GraphModule) -> None:
    """chunk and split along channels become slices, so that one node says where a part begins."""
    for node in calls(
        graph_module, torch.ops.aten.chunk.default, torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default
    ):
        named = all(user.target is operator.getitem for user in node.users)
        if argument(node, 2, 0) != 1 or value(node.args[0]).dim() != 4 or not named:
            continue
        starts = [0]
        for part in node.meta["val"]:
            starts.append(starts[-1] + part.shape[1])
        for user in list(node.users):
            index = user.args[1]
            with graph_module.graph.inserting_before(user):
                part = graph_module.graph.call_function(
                    torch.ops.aten.slice.Tensor, (node.args[0], 1, starts[index], starts[index + 1])
                )
            part.meta.update(user.meta)
            part.meta["val"] = value(node.args[0])[:, starts[index] : starts[index + 1]]
            user.replace_all_uses_with(part)


def finish(graph_module: fx.GraphModule) -> None:
    """Drop what nothing reads any more, check the graph and regenerate its code."""
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    _drop_unused_constants(graph_module)


def _drop_unused_constants(graph_module: fx.GraphModule) -> None:
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for owner_path, owner in list(graph_module.named_modules()):
        for store in (owner._parameters, owner._buffers):
            for name in list(store):
                if (f"{owner_path}.{name}" if owner_path else name) not in read:
                    del store[name]


def _numbered(name: str) -> Iterator[str]:
    yield name
    count = 1
    while True:
        yield f"{name}_{count}"
        count += 1


def _fake(tensor: Tensor, near: fx.Node) -> Tensor:
    for node in near.graph.nodes:
        known = node.meta.get("val")
        if hasattr(known, "fake_mode"):
            return known.fake_mode.from_tensor(nn.Parameter(tensor, requires_grad=False).data, static_shapes=True)
    return tensor
