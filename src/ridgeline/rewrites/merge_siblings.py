"""1x1 convolutions of one input and one activation become a single convolution; their outputs are channel slices."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from ridgeline.kernels import conv2d_act
from ridgeline.rewrites._match import add_constant, calls, constant, finish, replace, value


def apply(graph_module: fx.GraphModule) -> int:
    """Merge every group of mergeable siblings; returns how many convolutions disappeared.

    Does not fire on: kernels other than 1x1, a residual, differing stride, padding, activation or bias presence.
    """
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in calls(graph_module, conv2d_act.OP.overload):
        source, weight, bias, residual = node.args
        if residual is None and value(weight).shape[2:] == (1, 1):
            groups[source, bias is None, repr(sorted(node.kwargs.items()))].append(node)
    sites = 0
    for siblings in groups.values():
        if len(siblings) > 1:
            _merge(graph_module, siblings)
            sites += len(siblings) - 1
    finish(graph_module)
    return sites


def _merge(graph_module: fx.GraphModule, siblings: list[fx.Node]) -> None:
    first = siblings[0]
    name = str(first.args[1].target)
    weights = torch.cat([constant(graph_module, node.args[1]) for node in siblings])
    weight = add_constant(
        graph_module, weights.contiguous(memory_format=torch.channels_last), near=first, name=f"{name}_merged"
    )
    bias = None
    if first.args[2] is not None:
        biases = torch.cat([constant(graph_module, node.args[2]) for node in siblings])
        bias = add_constant(graph_module, biases, near=first, name=f"{name}_merged_bias")
    with graph_module.graph.inserting_before(first):
        merged = graph_module.graph.call_function(first.target, (first.args[0], weight, bias, None), dict(first.kwargs))
    merged.meta.update({key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta})
    shape = list(value(first).shape)
    shape[1] = len(weights)
    merged.meta["val"] = torch.empty_like(value(first).new_empty(shape), memory_format=torch.channels_last)
    start = 0
    for node in siblings:
        stop = start + value(node).shape[1]
        with graph_module.graph.inserting_before(first):
            part = graph_module.graph.call_function(torch.ops.aten.slice.Tensor, (merged, 1, start, stop))
        part.meta["val"] = merged.meta["val"][:, start:stop]
        replace(node, part)
        start = stop
