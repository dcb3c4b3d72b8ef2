"""Read and make calls of operators in graphs of aten, as AOTAutograd hands them to a compiler.

`meta["val"]` is what a node returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
# of one tensor, the first argument, of which they return the same elements
VIEWS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.permute.default, _aten.transpose.int, _aten.t.default),
        *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default, _aten.alias.default),
    }
)
OUTPUT_MASK = 10  # place among convolution_backward's arguments: which gradients it makes, of input, weight and bias


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's call by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {**dict(zip((one.name for one in schema), node.args, strict=False)), **node.kwargs}
    return {one.name: given.get(one.name, one.default_value) for one in schema}


def call(
    graph: fx.Graph, target: torch._ops.OpOverload, arguments: dict[str, Any], replaced: tuple[fx.Node, ...]
) -> fx.Node:
    """A call with the strides that Inductor is to give its inputs: those that `replaced` would have got."""
    schema = target._schema.arguments
    args = tuple(arguments[one.name] for one in schema if not one.kwarg_only)
    kwargs = {one.name: arguments[one.name] for one in schema if one.kwarg_only}
    new = graph.call_function(target, args, kwargs)
    eager: dict[fx.Node, Tensor] = {}
    for old in replaced:
        old_args, old_kwargs = old.meta.get("eager_input_vals", ((), {}))
        given = zip((*old.args, *old.kwargs.values()), (*old_args, *old_kwargs.values()), strict=False)
        eager |= {node: value for node, value in given if isinstance(node, fx.Node)}
    values = fx.map_arg((args, kwargs), lambda node: eager.get(node, node.meta["val"]))
    new.meta["eager_input_vals"] = values
    return new
