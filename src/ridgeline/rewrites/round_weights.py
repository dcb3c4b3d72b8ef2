"""Weights that a matrix unit multiplies in TF32 are rounded to it, once: the unit itself would cut their low bits.

Not in PIPELINE: it depends on a choice that is written into the graph after the rewrites, and on where the graph will
run. Only the GPU's kernels multiply in TF32; elsewhere the rounding would be an error instead of mending one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import BY_OVERLOAD
from ridgeline.kernels._nhwc import round_to_tf32
from ridgeline.rewrites._match import add_constant, constant, finish, value

_MULTIPLIED = ("weight", "weights", "inner_weight")


def apply(graph_module: fx.GraphModule) -> int:
    """Round the fp32 weights of every kernel whose `precision` is "tf32"; returns how many weights were.

    To nearest, ties to even: cutting moves all products of a layer towards zero, and what the layers of a network lose
    adds up. A weight that others read too stays as it is for them. Does not fire on: depthwise weights, which meet no
    matrix unit, other dtypes, weights that are computed or written.
    """
    rounded: dict[fx.Node, fx.Node] = {}
    # not `calls`, which leaves out those that touch a buffer the graph writes: no weight is one
    for node in list(graph_module.graph.nodes):
        if node.target not in BY_OVERLOAD or node.kwargs.get("precision") != "tf32":
            continue
        for weight in _weights(node):
            if weight not in rounded:
                tensor = constant(graph_module, weight)
                if tensor is None:
                    continue
                # beside the weight itself, which comes before all of its users
                rounded[weight] = add_constant(
                    graph_module, round_to_tf32(tensor), near=weight, name=f"{weight.target}_tf32"
                )
            node.replace_input_with(weight, rounded[weight])
    finish(graph_module)
    return len(rounded)


def _weights(node: fx.Node) -> Iterator[fx.Node]:
    """The fp32 arguments of a call that are right operands of a matrix product."""
    overload: Any = node.target
    names = (argument.name for argument in overload._schema.arguments)
    named: dict[str, Any] = dict(zip(names, node.args, strict=False))
    named |= node.kwargs
    channels = next(_channels(given) for name, given in named.items() if name != "out")
    for name in _MULTIPLIED:
        given = named.get(name, ())
        for weight in given if isinstance(given, (list, tuple)) else (given,):
            tensor: Tensor = value(weight)
            depthwise = tensor.shape[1] == 1 < channels
            if tensor.dtype == torch.float32 and not depthwise:
                yield weight


def _channels(image: fx.Node) -> int:
    return value(image).shape[1]
