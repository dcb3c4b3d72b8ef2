"""Convolution → 1x1 convolution(s) becomes one kernel, where reading all weights again costs less than a launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ridgeline.kernels import BY_OVERLOAD, conv2d_act, conv_chain, depthwise_conv2d_act
from ridgeline.kernels._conv_chain_call import MOST_TAILS, WIDEST
from ridgeline.kernels._op import tuned_row
from ridgeline.rewrites._match import (
    add_constant,
    argument,
    calls,
    channel_range,
    constant,
    finish,
    name_slices,
    replace,
    value,
)

_aten = torch.ops.aten
_DENSE, _DEPTHWISE = conv2d_act.OP.overload, depthwise_conv2d_act.OP.overload

# Where the tables hold no times to compare. A program of every multiprocessor at once gets some 40 GB/s of the L2, so
# a chain of n stages took 1 µs and as much again for each 40 KiB of weights, n launches 1.75 µs each.
_FIRST_BYTES, _MORE_BYTES = 64 * 1024, 32 * 1024
_MULTIPROCESSORS = 132


def apply(graph_module: fx.GraphModule) -> int:
    """Replace each longest chain that pays; returns how many. Runs after `fuse_conv_act`.

    A chain is a dense or depthwise convolution and up to three 1x1 convolutions of stride 1, each reading the one
    before, alone or concatenated with other maps. Does not fire where something else reads a value in between, where a
    later stage adds a map from outside the chain, where values in between have more than 256 channels, where every
    program's share of the weights takes longer to read than the launches it saves, or where the tables of tuned
    configs have times for the chain and for its parts, and the parts are faster.
    """
    name_slices(graph_module)
    sites = 0
    gone: set[fx.Node] = set()
    for first in calls(graph_module, _DENSE, _DEPTHWISE):
        chain = [] if first in gone else _longest(graph_module, first)
        if chain:
            _fuse(graph_module, first, chain)
            gone.update(stage.conv for stage in chain)
            sites += 1
    finish(graph_module)
    return sites


@dataclass(frozen=True)
class _Stage:
    """A 1x1 convolution behind the first: what it reads beside the value before it, in order, and what it adds."""

    conv: fx.Node
    source: fx.Node  # the value itself, or the concat that holds it
    before: tuple[fx.Node, ...]  # inputs of the concat in front of the value
    behind: tuple[fx.Node, ...]
    skip: int


def _longest(graph_module: fx.GraphModule, first: fx.Node) -> list[_Stage]:
    """The stages behind `first`; empty where not even one pays."""
    chain: list[_Stage] = []
    best = 0
    for stage in _stages(graph_module, first):
        chain.append(stage)
        fits = _closed(first, chain) and not _in_its_own_way(first, chain)
        if fits and _pays(first, chain) and not _loses(graph_module, first, chain):
            best = len(chain)
    return chain[:best]


def _stages(graph_module: fx.GraphModule, first: fx.Node) -> Iterator[_Stage]:
    values = [first]
    while len(values) <= MOST_TAILS and value(values[-1]).shape[1] <= WIDEST:
        found = [stage for user in values[-1].users for stage in _reading(graph_module, user, values)]
        if len(found) != 1:
            return
        yield found[0]
        values.append(found[0].conv)


def _reading(graph_module: fx.GraphModule, user: fx.Node, values: Sequence[fx.Node]) -> Iterator[_Stage]:
    """The 1x1 convolution that reads the last value through `user`, which is itself or a concat."""
    last, before, behind = values[-1], (), ()
    source, conv = last, user
    maps: Any = user.args[0]
    if user.target is _aten.cat.default and argument(user, 1, 0) == 1 and maps.count(last) == 1:
        at = maps.index(last)
        before, behind = tuple(maps[:at]), tuple(maps[at + 1 :])
        source, conv = user, next(iter(user.users)) if len(user.users) == 1 else user
    if conv.target is not _DENSE or conv.args[0] is not source:
        return
    weight, residual = argument(conv, 1), argument(conv, 3)
    known = constant(graph_module, weight)
    geometry = (conv.kwargs["stride"], conv.kwargs["padding"])
    if known is None or known.shape[2:] != (1, 1) or [list(pair) for pair in geometry] != [[1, 1], [0, 0]]:
        return
    if residual is None or residual in values:
        yield _Stage(conv, source, before, behind, -1 if residual is None else values.index(residual))


def _closed(first: fx.Node, chain: Sequence[_Stage]) -> bool:
    """Whether nothing outside the chain reads a value that it would no longer store."""
    inside = {stage.conv for stage in chain} | {stage.source for stage in chain}
    return all(set(node.users) <= inside for node in (first, *(stage.conv for stage in chain[:-1])))


def _in_its_own_way(first: fx.Node, chain: Sequence[_Stage]) -> bool:
    """Whether y belongs, by a concat, into the map that the chain reads: its programs would overwrite what others need.

    One after the other the parts can write there (`write_into_concat`); as one kernel they would leave a copy behind.
    """
    read = [argument(first, 0), argument(first, 3)]
    read += [part for stage in chain for part in (*stage.before, *stage.behind)]
    roots = {node.args[0] for node in read if node is not None and channel_range(node) is not None}
    last = chain[-1].conv
    joined: list[Any] = [user.args[0] for user in last.users if user.target is _aten.cat.default]
    return any(part.args[0] in roots for parts in joined for part in parts if part is not last and channel_range(part))


def _pays(first: fx.Node, chain: Sequence[_Stage]) -> bool:
    """Whether reading the weights anew in every program takes less time than the launches saved."""
    *shared, last = (value(node.args[1]).nbytes for node in (first, *(stage.conv for stage in chain)))
    y = value(chain[-1].conv)
    pixels = y.shape[0] * y.shape[2] * y.shape[3]
    read = []  # by one multiprocessor, with ever smaller tiles
    for tile in (64, 32, 16):
        tiles = -(-pixels // tile)
        splits = max(1, min(_MULTIPROCESSORS // tiles, y.shape[1] // 32))
        waves = -(-tiles * splits // _MULTIPROCESSORS)
        read.append(waves * (sum(shared) + last // splits))
    return min(read) <= _FIRST_BYTES + _MORE_BYTES * len(chain)


def _loses(graph_module: fx.GraphModule, first: fx.Node, chain: Sequence[_Stage]) -> bool:
    """Whether this GPU was seen to run the parts faster, each as one launch of a dependent chain."""
    if graph_module.meta.get("explore", False):
        return False
    y = value(chain[-1].conv)
    extras = [sum(value(part).shape[1] for part in (*stage.before, *stage.behind)) for stage in chain]
    precision = graph_module.meta.get("precision", "tf32")
    fused: dict[str, Any] = {
        **_named(first),
        "weights": [value(stage.conv.args[1]) for stage in chain],
        "biases": [None if (bias := argument(stage.conv, 2)) is None else value(bias) for stage in chain],
        "extras": [y.new_empty((y.shape[0], count, *y.shape[2:])) if count else None for count in extras],
        **_choices(first, chain),
    }
    del fused["act"]
    whole = tuned_row(conv_chain.OP, **fused, precision=precision)
    parts = []
    for node in (first, *(stage.conv for stage in chain)):
        op = BY_OVERLOAD[node.target]
        parts.append(tuned_row(op, **_named(node), **({"precision": precision} if node.target is _DENSE else {})))
    seconds = [row.seconds for row in parts if row is not None]
    # beside parts that were measured, a chain that was not is one that `tune` had no reason to try
    return len(seconds) == len(parts) and (whole is None or sum(seconds) < whole.seconds)


def _named(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, tensors as the fakes that its nodes carry."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: map_arg(part, value) for name, part in given.items()}


def _choices(first: fx.Node, chain: Sequence[_Stage]) -> dict[str, Any]:
    nodes = (first, *(stage.conv for stage in chain))
    return {
        "stride": first.kwargs["stride"],
        "padding": first.kwargs["padding"],
        "acts": " ".join(node.kwargs.get("act", "silu") for node in nodes),
        "skips": [stage.skip for stage in chain],
    }


def _fuse(graph_module: fx.GraphModule, first: fx.Node, chain: Sequence[_Stage]) -> None:
    graph, last = graph_module.graph, chain[-1].conv
    weights, biases, extras = [], [], []
    for stage in chain:
        weights.append(_columns(graph_module, stage, near=last))
        biases.append(argument(stage.conv, 2))
        extras.append(_joined(graph, (*stage.before, *stage.behind), near=last))
    x, weight, bias, residual = (argument(first, index) for index in range(4))
    with graph.inserting_before(last):
        fused = graph.call_function(
            conv_chain.OP.overload, (x, weight, bias, residual, weights, biases, extras), _choices(first, chain)
        )
    replace(last, fused)


def _columns(graph_module: fx.GraphModule, stage: _Stage, *, near: fx.Node) -> fx.Node:
    """The stage's weight with the columns of the value first."""
    node = stage.conv.args[1]
    if not stage.before:
        return node
    weight = constant(graph_module, node)
    assert isinstance(weight, Tensor)
    start = sum(value(part).shape[1] for part in stage.before)
    behind = sum(value(part).shape[1] for part in stage.behind)
    stop = weight.shape[1] - behind
    moved = torch.cat((weight[:, start:stop], weight[:, :start], weight[:, stop:]), dim=1).contiguous()
    return add_constant(graph_module, moved, near=near, name=f"{node.target}_turned")


def _joined(graph: fx.Graph, parts: Sequence[fx.Node], *, near: fx.Node) -> fx.Node | None:
    """One map that holds `parts` in order: a map they are neighbouring slices of, or their concat."""
    if len(parts) < 2:
        return parts[0] if parts else None
    ranges = [channel_range(part) for part in parts]
    roots = {part.args[0] for part, found in zip(parts, ranges, strict=True) if found is not None}
    spans = [found for found in ranges if found is not None]
    meet = all(a[1] == b[0] for a, b in pairwise(spans))
    if len(roots) == 1 and len(spans) == len(parts) and meet:
        root, start, stop = roots.pop(), spans[0][0], spans[-1][1]
        if (start, stop) == (0, value(root).shape[1]):
            return root
        with graph.inserting_before(near):
            part = graph.call_function(_aten.slice.Tensor, (root, 1, start, stop))
        part.meta["val"] = value(root)[:, start:stop]
        return part
    with graph.inserting_before(near):
        joined = graph.call_function(_aten.cat.default, (list(parts), 1))
    joined.meta["val"] = torch.cat([value(part) for part in parts], dim=1).contiguous(memory_format=torch.channels_last)
    return joined
