"""Concatenation along channels disappears: every producer stores into its slice of one buffer. The mutating rewrite.

Two placements, tried in order:
- *in place*: the concat has the size of a map P of which an input is a slice at its own position, and what P held in
  the other positions is dead by the time they are written (C3k: [m(a) | b] over [a | b]);
- *new buffer*: every input is made by a kernel that can store at a channel offset, or the inputs are all the slices
  of such a kernel's output, in order (C3k2: [y0 | y1 | b1] with [y0 | y1] made by one convolution).
A concat that allows neither stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ridgeline.graph import is_view, refresh
from ridgeline.kernels import ALL
from ridgeline.rewrites._match import argument, calls, channel_range, finish, name_slices, value

_aten = torch.ops.aten
_INTO = {op.overload: op.into for op in ALL if op.into is not None}
_FRESH = (*(op.overload for op in ALL), _aten.empty.memory_format)  # calls whose result shares memory with nothing


def apply(graph_module: fx.GraphModule) -> int:
    """Place every concat that can be; returns how many disappeared.

    Does not fire on: concats along another axis, of inputs of the graph, of other operators' results, of one map twice,
    of several dtypes; where a reader of the overwritten channels would run later, through whatever view.
    """
    refresh(graph_module)
    name_slices(graph_module)
    views = frozenset(node for node in graph_module.graph.nodes if is_view(node))
    sites = 0
    for cat in calls(graph_module, _aten.cat.default):
        maps = cat.args[0]
        plain = argument(cat, 1, 0) == 1 and len(set(maps)) == len(maps)
        if plain and all(value(node).dim() == 4 and value(node).dtype == value(cat).dtype for node in (cat, *maps)):
            sites += _place(graph_module, cat, views)
    finish(graph_module)
    return sites


@dataclass(frozen=True)
class _Part:
    """One input of a concat: where it begins there, and the kernel output it is (a slice of)."""

    node: fx.Node
    start: int
    root: fx.Node
    root_start: int

    @property
    def channels(self) -> int:
        return value(self.node).shape[1]


def _place(graph_module: fx.GraphModule, cat: fx.Node, views: frozenset[fx.Node]) -> bool:
    parts, start = [], 0
    for node in cat.args[0]:
        root, root_start = _root(node)
        parts.append(_Part(node, start, root, root_start))
        start += value(node).shape[1]
    return _place_over(graph_module, cat, parts, views) or _place_in_new(graph_module, cat, parts)


def _place_over(graph_module: fx.GraphModule, cat: fx.Node, parts: Sequence[_Part], views: frozenset[fx.Node]) -> bool:
    """Write the other parts over dead slices of the map that one part is already in."""
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for kept in parts:
        host = kept.root
        if kept.root is kept.node or kept.start != kept.root_start or value(host).shape != value(cat).shape:
            continue
        if host.target not in _FRESH:
            continue
        written = [part for part in parts if part.root is not host]
        stays = all(part.start == part.root_start for part in parts if part.root is host)
        if not stays or not all(_storable(part.node) for part in written):
            continue
        if all(order[host] < order[part.node] and _dead(host, part, cat, order, views) for part in written):
            for part in written:
                _store(graph_module, part.node, host, part.start)
            cat.replace_all_uses_with(host)
            return True
    return False


def _place_in_new(graph_module: fx.GraphModule, cat: fx.Node, parts: Sequence[_Part]) -> bool:
    roots = list(dict.fromkeys(part.root for part in parts))
    offsets = {}
    for root in roots:
        own = [part for part in parts if part.root is root]
        first = own[0]
        # all of the root, in its own order and without a gap
        consecutive = all(part.start - first.start == part.root_start for part in own)
        if not consecutive or sum(part.channels for part in own) != value(root).shape[1] or not _storable(root):
            return False
        offsets[root] = first.start
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    shape = list(value(cat).shape)
    kind = {"dtype": value(cat).dtype, "device": value(cat).device, "memory_format": torch.channels_last}
    with graph_module.graph.inserting_before(min(roots, key=order.__getitem__)):
        buffer = graph_module.graph.call_function(_aten.empty.memory_format, (shape,), kind)
    buffer.meta.update({key: cat.meta[key] for key in ("nn_module_stack", "stack_trace") if key in cat.meta})
    buffer.meta["val"] = torch.empty_like(value(cat), memory_format=torch.channels_last)
    for root, offset in offsets.items():
        _store(graph_module, root, buffer, offset)
    cat.replace_all_uses_with(buffer)
    return True


def _store(graph_module: fx.GraphModule, node: fx.Node, buffer: fx.Node, start: int) -> None:
    """Let the kernel behind `node` write channels `start` … of `buffer`, and its readers read them there."""
    stop = start + value(node).shape[1]
    with graph_module.graph.inserting_before(node):
        view = graph_module.graph.call_function(_aten.slice.Tensor, (buffer, 1, start, stop))
        view.meta["val"] = value(buffer)[:, start:stop]
        into = graph_module.graph.call_function(_INTO[node.target], (view, *node.args), dict(node.kwargs))
    into.meta.update({key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta})
    node.replace_all_uses_with(view)
    graph_module.graph.erase_node(node)


def _storable(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _INTO


def _root(node: fx.Node) -> tuple[fx.Node, int]:
    """The map that `node` is a channel slice of, and where it begins; the node itself for a whole map."""
    channels = channel_range(node)
    if channels is None:
        return node, 0
    root, offset = _root(node.args[0])
    return root, offset + channels[0]


def _dead(host: fx.Node, part: _Part, cat: fx.Node, order: dict[fx.Node, int], views: frozenset[fx.Node]) -> bool:
    """Whether nothing but `cat` reads the part's place in `host` when the part's writer runs, or later.

    The writer itself counts as a reader: its programs finish in any order, so one may overwrite what another needs.
    """
    readers = [(host, 0, value(host).shape[1], True)]
    while readers:
        node, low, high, sliced = readers.pop()
        if low >= part.start + part.channels or high <= part.start:
            continue
        for user in node.users:
            channels = channel_range(user)
            if channels is not None and sliced:
                readers.append((user, low + channels[0], low + channels[1], True))
            elif user in views:
                # its axes may be others: what is made of it counts for all channels
                readers.append((user, low, high, False))
            elif user is not cat and order[user] >= order[part.node]:
                return False
    return True
