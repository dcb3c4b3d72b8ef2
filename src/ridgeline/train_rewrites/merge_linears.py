"""Linear layers of one input with few rows become a single one, whose result is split; so do both their gradients.

Every block of a diffusion network projects the same embedding of the time step, one row an image. Such a product is
over before its launch has paid, and it takes three: its own, that of its weight's gradient, and that of its input's,
which are then added one by one. Joining the weights costs a copy of them in each step; both ways they are read anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.train_rewrites._match import calls, finish, value

_NAMES = ("input", "weight", "bias")
_FEWEST = 4  # layers; for fewer, joining weights and gradients takes as many launches as it saves
_MOST_ROWS = 1024  # of the input; with more, products fill a GPU, and joining their gradients moves more bytes


def apply(graph_module: fx.GraphModule) -> int:
    """Merge every four or more F.linear of one input; returns how many of them disappeared.

    Sums of a gradient of the input are made in fp32 inside the product, where single layers' are rounded and added.
    Does not fire on: inputs of more than 1,024 rows, weights that are computed in the graph, layers of which some have
    a bias and some none.
    """
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in calls(graph_module, F.linear):
        given = _operands(node)
        if _suits(given):
            groups[given["input"], given["bias"] is None, _dtypes(given)].append(node)
    merged = [siblings for siblings in groups.values() if len(siblings) >= _FEWEST]
    for siblings in merged:
        _merge(graph_module.graph, siblings)
    finish(graph_module)
    return sum(len(siblings) - 1 for siblings in merged)


def linears(x: Tensor, count: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """F.linear of x with each of `count` weights as one product; biases, if there are any, follow the weights."""
    weights, biases = operands[:count], operands[count:]
    y = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return y.split([len(weight) for weight in weights], dim=-1)


def _operands(node: fx.Node) -> dict[str, Any]:
    return dict.fromkeys(_NAMES) | dict(zip(_NAMES, node.args, strict=False)) | node.kwargs


def _suits(given: dict[str, Any]) -> bool:
    x, weight = value(given["input"]), value(given["weight"])
    # an input of the graph is there before whichever layer comes first
    there = all(node is None or node.op == "placeholder" for node in (given["weight"], given["bias"]))
    return there and x is not None and weight is not None and x.numel() <= _MOST_ROWS * weight.shape[1]


def _dtypes(given: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """Of weight and bias: joined, those that differ would be promoted."""
    found = (value(given[name]) for name in ("weight", "bias"))
    return tuple(tensor.dtype for tensor in found if tensor is not None)


def _merge(graph: fx.Graph, siblings: Sequence[fx.Node]) -> None:
    given = [_operands(node) for node in siblings]
    operands = [g["weight"] for g in given] + [g["bias"] for g in given if g["bias"] is not None]
    with graph.inserting_before(siblings[0]):
        parts = graph.call_function(linears, (given[0]["input"], len(siblings), *operands))
        for index, node in enumerate(siblings):
            part = graph.call_function(getitem, (parts, index))
            part.meta["example_value"] = value(node)
            node.replace_all_uses_with(part)
