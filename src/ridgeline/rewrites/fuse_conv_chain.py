"""Convolution → 1x1 convolution(s) becomes one kernel, where reading all weights again costs less than a launch.

Two 3x3 convolutions, one behind the other, may begin such a chain, where that was measured to be faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from ridgeline.kernels import BY_OVERLOAD, Op, conv2d_act, conv_chain, conv_pair_chain, depthwise_conv2d_act
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

    In front of a dense 3x3 convolution another one joins, if both have stride 1 and padding 1, nothing else reads the
    value between them, the first adds no map, and the tables have times for the whole and for its parts, and the whole
    is faster than the fastest partition of the parts that they know.
    """
    name_slices(graph_module)
    sites = 0
    gone: set[fx.Node] = set()
    for first in calls(graph_module, _DENSE, _DEPTHWISE):
        if first in gone:
            continue
        outer = _outer(graph_module, first)
        chain = None if outer is None else _paired(graph_module, first, outer)
        if chain is not None and outer is not None:
            _fuse(graph_module, outer, chain, inner=first)
            gone.update((outer, *(stage.conv for stage in chain)))
            sites += 1
            continue
        chain = _longest(graph_module, first)
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
        whole = _closed(first, chain) and not _in_its_own_way(first, chain)
        worth = whole and _pays(first, chain) and not _loses(graph_module, first, chain)
        if worth and _fits(graph_module, first, chain):
            best = len(chain)
    return chain[:best]


def _outer(graph_module: fx.GraphModule, first: fx.Node) -> fx.Node | None:
    """The 3x3 convolution that can be computed with `first`, itself one, by a program that keeps what lies between."""
    users = list(first.users)
    if len(users) != 1 or {first.target, users[0].target} != {_DENSE} or users[0].args[0] is not first:
        return None
    if argument(first, 3) is not None or argument(users[0], 3) is first:
        return None
    for node in (first, users[0]):
        known = constant(graph_module, argument(node, 1))
        geometry = [list(pair) for pair in (node.kwargs["stride"], node.kwargs["padding"])]
        if known is None or known.shape[2:] != (3, 3) or geometry != [[1, 1], [1, 1]] or known.shape[0] > WIDEST:
            return None
    # to `round_weights` a weight of one input channel is depthwise
    return users[0] if value(first).shape[1] > 1 else None


def _paired(graph_module: fx.GraphModule, inner: fx.Node, outer: fx.Node) -> list[_Stage] | None:
    """The stages behind `outer` that become one kernel with it and `inner`; None where no such kernel pays."""
    stages = list(_stages(graph_module, outer))
    fitting = [
        stages[:count]
        for count in range(len(stages) + 1)
        if _closed(outer, stages[:count]) and not _in_its_own_way(outer, stages[:count], inner=inner)
    ]
    explore = graph_module.meta.get("explore", "")
    if explore:
        if explore != "pairs":
            return None
        worth = (chain for chain in reversed(fitting) if not chain or _pays(outer, chain))
        return next((chain for chain in worth if _fits(graph_module, outer, chain, inner=inner)), None)
    run = (outer, *(stage.conv for stage in stages))
    apart = _seconds(graph_module, inner) + _least_seconds(graph_module, run)
    if apart == math.inf:
        return None  # nothing to compare with
    least, best = apart, None
    for chain in fitting:
        whole = _seconds(graph_module, outer, chain, inner=inner)
        seconds = whole + _least_seconds(graph_module, run[1 + len(chain) :])
        if seconds < least:
            least, best = seconds, chain
    return best


def _least_seconds(graph_module: fx.GraphModule, run: Sequence[fx.Node]) -> float:
    """Of all ways to compute a run of convolutions, alone or as chains, that the tables know."""
    if not run:
        return 0.0
    first, least = run[0], _seconds(graph_module, run[0]) + _least_seconds(graph_module, run[1:])
    chain: list[_Stage] = []
    for stage, expected in zip(_stages(graph_module, first), run[1:], strict=False):
        chain.append(stage)
        if stage.conv is expected and _closed(first, chain) and not _in_its_own_way(first, chain):
            rest = _least_seconds(graph_module, run[1 + len(chain) :])
            least = min(least, _seconds(graph_module, first, chain) + rest)
    return least


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
    *between, _ = (first, *(stage.conv for stage in chain))
    return all(set(node.users) <= inside for node in between)


def _in_its_own_way(first: fx.Node, chain: Sequence[_Stage], *, inner: fx.Node | None = None) -> bool:
    """Whether y belongs, by a concat, into the map that the chain reads: its programs would overwrite what others need.

    One after the other the parts can write there (`write_into_concat`); as one kernel they would leave a copy behind.
    """
    read = [argument(inner or first, 0), argument(first, 3)]
    read += [part for stage in chain for part in (*stage.before, *stage.behind)]
    slices = {(node.args[0], span) for node in read if node is not None and (span := channel_range(node)) is not None}
    last = chain[-1].conv if chain else first
    joined: list[Any] = [user.args[0] for user in last.users if user.target is _aten.cat.default]
    for parts in joined:
        kept = {(part.args[0], channel_range(part)) for part in parts if part is not last and channel_range(part)}
        # what is joined too keeps its place beside y
        if {root for root, _ in slices - kept} & {root for root, _ in kept}:
            return True
    return False


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
    if graph_module.meta.get("explore", ""):
        return False
    whole = _seconds(graph_module, first, chain)
    apart = sum(_seconds(graph_module, node) for node in (first, *(stage.conv for stage in chain)))
    # beside parts that were measured, a chain that was not is one that `tune` had no reason to try
    return apart < math.inf and apart < whole


def _seconds(
    graph_module: fx.GraphModule, first: fx.Node, chain: Sequence[_Stage] = (), *, inner: fx.Node | None = None
) -> float:
    """What the tables hold for one kernel that computes `inner`, `first` and `chain`; infinity where they do not."""
    if chain or inner is not None:
        row = tuned_row(_op(inner), **_call(graph_module, first, chain, inner=inner))
    else:
        precision = {"precision": graph_module.meta.get("precision", "tf32")} if first.target is _DENSE else {}
        row = tuned_row(BY_OVERLOAD[first.target], **_named(first), **precision)
    return math.inf if row is None else row.seconds


def _fits(
    graph_module: fx.GraphModule, first: fx.Node, chain: Sequence[_Stage], *, inner: fx.Node | None = None
) -> bool:
    """Whether the GPU holds what a program of such a kernel keeps, in the layout that maps have in the end."""

    def laid_out(given: Any) -> Any:
        return given.contiguous(memory_format=torch.channels_last) if isinstance(given, Tensor) else given

    call = _call(graph_module, first, chain, inner=inner)
    call |= {name: tree_map(laid_out, call[name]) for name in ("x", "residual", "extras")}
    return (conv_chain if inner is None else conv_pair_chain).fits(**call)


def _call(
    graph_module: fx.GraphModule, first: fx.Node, chain: Sequence[_Stage], *, inner: fx.Node | None
) -> dict[str, Any]:
    """The arguments of the kernel that computes `inner`, `first` and `chain`, tensors as fakes."""
    y = value(chain[-1].conv if chain else first)
    extras = [sum(value(part).shape[1] for part in (*stage.before, *stage.behind)) for stage in chain]
    fused: dict[str, Any] = {
        **_named(first),
        "weights": [value(stage.conv.args[1]) for stage in chain],
        "biases": [None if (bias := argument(stage.conv, 2)) is None else value(bias) for stage in chain],
        "extras": [y.new_empty((y.shape[0], count, *y.shape[2:])) if count else None for count in extras],
        **_choices(first, chain, inner=inner),
        "precision": graph_module.meta.get("precision", "tf32"),
    }
    del fused["act"]
    if inner is not None:
        given = _named(inner)
        fused |= {"x": given["x"], "inner_weight": given["weight"], "inner_bias": given.get("bias")}
    return fused


def _op(inner: fx.Node | None) -> Op:
    return conv_chain.OP if inner is None else conv_pair_chain.OP


def _named(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, tensors as the fakes that its nodes carry."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: map_arg(part, value) for name, part in given.items()}


def _choices(first: fx.Node, chain: Sequence[_Stage], *, inner: fx.Node | None = None) -> dict[str, Any]:
    nodes = (first, *(stage.conv for stage in chain))
    nodes = nodes if inner is None else (inner, *nodes)
    geometry = {} if inner is not None else {name: first.kwargs[name] for name in ("stride", "padding")}
    return {
        **geometry,
        "acts": " ".join(node.kwargs.get("act", "silu") for node in nodes),
        "skips": [stage.skip for stage in chain],
    }


def _fuse(
    graph_module: fx.GraphModule, first: fx.Node, chain: Sequence[_Stage], *, inner: fx.Node | None = None
) -> None:
    graph, last = graph_module.graph, chain[-1].conv if chain else first
    weights, biases, extras = [], [], []
    for stage in chain:
        weights.append(_columns(graph_module, stage, near=last))
        biases.append(argument(stage.conv, 2))
        extras.append(_joined(graph, (*stage.before, *stage.behind), near=last))
    x, *operands = (argument(first, index) for index in range(4))
    if inner is not None:
        x, *inner_operands = (argument(inner, index) for index in range(3))
        operands = [*inner_operands, *operands]
    choices = _choices(first, chain, inner=inner)
    with graph.inserting_before(last):
        fused = graph.call_function(_op(inner).overload, (x, *operands, weights, biases, extras), choices)
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
