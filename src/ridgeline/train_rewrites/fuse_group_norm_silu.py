"""group_norm, and the scale, shift, SiLU and dropout that follow it, become one op with one pass each way."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.kernels import group_norm_silu
from ridgeline.train_rewrites._match import arguments, calls, finish, is_channel_vector, only_user, value

_ADDS = (operator.add, torch.add, operator.iadd)
_MULTIPLIES = (operator.mul, torch.mul, operator.imul)
# what casts its own operands under autocast, so that the dtype they come in does not matter
_CASTING = (torch.conv2d, F.linear, torch.matmul, torch.bmm)
_VIEWS = ("flatten", "transpose", "permute", "reshape", "view", "unflatten")


@dataclass
class _Chain:
    """What follows one group_norm, as far as the op can take it. `last` is the node it replaces."""

    last: fx.Node
    scale: fx.Node | None = None
    shift: fx.Node | None = None
    act: str = "none"
    p: float = 0.0


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every F.group_norm of a map [N, C, H, W] with weight and bias; returns how many.

    Takes along, in this order and where nobody else reads what is between: a product with 1 + scale, a sum with shift
    (both [N, C, 1, 1]), SiLU, dropout. Does not fire on: maps in another layout than channels_last or of a dtype that
    the op has no kernel for, norms without weight or bias.
    """
    graph = graph_module.graph
    chains: list[tuple[fx.Node, _Chain]] = []
    for node in calls(graph_module, F.group_norm, torch.group_norm):
        given = arguments(node, F.group_norm)
        x = value(given["input"])
        if x is None or given["weight"] is None or given["bias"] is None or not _suits(x):
            continue
        chains.append((node, _chain(node, x)))
    dropping = [chain for _, chain in chains if chain.p]
    seeds = _seeds(graph, len(dropping), chains[0][0]) if dropping else None
    for node, chain in chains:
        given = arguments(node, F.group_norm)
        x, was = value(given["input"]), value(chain.last)
        assert x is not None and was is not None
        with graph.inserting_before(chain.last):
            vectors = [_flat(graph, chain.scale), _flat(graph, chain.shift)]
            seed = _getitem(graph, seeds, slice(at := dropping.index(chain), at + 1)) if chain.p else None
            new = graph.call_function(
                group_norm_silu.OP.overload,
                # a seed of its own tells each site's mask from the others', so the offset may be anything
                (given["input"], given["weight"], given["bias"], *vectors, seed, seed),
                {"groups": given["num_groups"], "eps": given["eps"], "act": chain.act, "p": chain.p},
            )
            if was.dtype != x.dtype and not _cast_anyway(chain.last):
                # autocast computes norms in fp32 and hands fp32 on: who reads that must still get it
                new = graph.call_method("to", (new, was.dtype))
        new.meta["example_value"] = was
        chain.last.replace_all_uses_with(new)
    finish(graph_module)
    return len(chains)


def _suits(x: Tensor) -> bool:
    return x.dim() == 4 and x.dtype in group_norm_silu.FLOATS and x.is_contiguous(memory_format=torch.channels_last)


def _chain(norm: fx.Node, x: Tensor) -> _Chain:
    chain = _Chain(norm)
    while (user := only_user(chain.last)) is not None and _take(chain, user, x):
        chain.last = user
    return chain


def _take(chain: _Chain, user: fx.Node, x: Tensor) -> bool:
    """Whether the op can do what `user` does after what the chain has so far; then it is noted."""
    if user.op != "call_function" or chain.p:
        return False
    if user.target is F.dropout:
        given = arguments(user, F.dropout)
        if not given["training"] or not 0.0 <= given["p"] < 1.0:
            return False
        chain.p = float(given["p"])
        return True
    if chain.act != "none":
        return False
    if user.target is F.silu:
        chain.act = "silu"
        return True
    if chain.shift is not None or len(user.args) != 2 or user.kwargs:
        return False
    other = user.args[1] if user.args[0] is chain.last else user.args[0]
    if user.target in _ADDS and _is_parameter(other, x):
        assert isinstance(other, fx.Node)
        chain.shift = other
        return True
    if user.target in _MULTIPLIES and chain.scale is None and _is_parameter(other, x):
        chain.scale = _less_one(other)
        return chain.scale is not None
    return False


def _is_parameter(node: Any, x: Tensor) -> bool:
    """Whether a node is a scale or shift that the op takes for x."""
    found = value(node)
    return found is not None and is_channel_vector(node, x) and found.dtype in (torch.float32, x.dtype)


def _less_one(node: Any) -> fx.Node | None:
    """s of a node that is 1 + s or s + 1."""
    if node.op != "call_function" or node.target not in _ADDS or len(node.args) != 2 or node.kwargs:
        return None
    ones = [i for i, operand in enumerate(node.args) if isinstance(operand, (int, float)) and operand == 1]
    return node.args[1 - ones[0]] if len(ones) == 1 else None


def _cast_anyway(node: fx.Node) -> bool:
    """Whether all who read a node, or a view of it, cast it under autocast."""
    for user in node.users:
        if user.op == "call_method" and user.target in _VIEWS:
            if not _cast_anyway(user):
                return False
        elif user.op != "call_function" or user.target not in _CASTING:
            return False
    return bool(node.users)


def _seeds(graph: fx.Graph, sites: int, first: fx.Node) -> fx.Node:
    """One draw for the whole graph, before its first norm: a number for each site that drops."""
    x = value(arguments(first, F.group_norm)["input"])
    assert x is not None
    with graph.inserting_before(first):
        limits = {"low": 0, "high": 2**62, "size": (sites,), "dtype": torch.int64, "device": x.device}
        return graph.call_function(torch.randint, (), limits)


def _flat(graph: fx.Graph, vector: fx.Node | None) -> fx.Node | None:
    """[N, C, 1, 1] as [N, C]."""
    return None if vector is None else _getitem(graph, vector, (slice(None), slice(None), 0, 0))


def _getitem(graph: fx.Graph, node: fx.Node | None, index: Any) -> fx.Node:
    assert node is not None
    return graph.call_function(operator.getitem, (node, index))
