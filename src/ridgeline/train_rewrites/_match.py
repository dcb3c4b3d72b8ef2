"""Read the nodes of a graph of torch functions: their values, their only users, their operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx


def calls(graph_module: fx.GraphModule, *targets: Callable[..., Any]) -> Iterator[fx.Node]:
    """Every call of one of `targets`, in the order of the graph; nodes may be replaced meanwhile."""
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def value(node: Any) -> Tensor | None:
    """The fake tensor that a node returned when dynamo ran it; None for what is no tensor."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def arguments(node: fx.Node, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included; `function` is one with a Python signature."""
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that alone reads `node`."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_channel_vector(node: Any, like: Tensor) -> bool:
    """Whether a node is one number a sample and channel of `like`: [N, C, 1, 1]."""
    found = value(node)
    return found is not None and tuple(found.shape) == (*like.shape[:2], 1, 1)


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same calls in a graph of their own, on the same attributes; nothing else that dynamo noted comes along."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


def finish(graph_module: fx.GraphModule) -> None:
    """Drop what nobody reads any more. Random draws stay only if they are read."""
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
