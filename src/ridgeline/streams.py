"""Run a graph's kernels on several CUDA streams, so that independent branches overlap; one capture keeps them so.

A small model's kernels leave most of the GPU idle, and what counts is the chain of those that wait for one another.
The longest remaining chain stays on the caller's stream; a branch that leaves it gets a side stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.graph import is_view, mutated


@dataclass(frozen=True)
class Schedule:
    """Which stream each kernel runs on, whom it waits for, and what must outlive its last reader.

    0 is the caller's stream. `keep` holds values that are read on another stream than the one they were allocated on:
    the allocator would hand their memory out again as soon as *its* stream is through.
    """

    stream: dict[fx.Node, int]
    waits: dict[fx.Node, tuple[fx.Node, ...]]
    keep: frozenset[fx.Node]

    @property
    def streams(self) -> int:
        return max(self.stream.values(), default=0) + 1


def schedule(graph: fx.Graph, *, side_streams: int) -> Schedule:
    """Assign streams: of a value's readers the one with the longest chain behind it inherits the stream."""
    roots = _roots(graph)
    kernels = _kernels(graph, roots)
    before = _dependencies(kernels, roots)
    after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in kernels:
        for earlier in before[node]:
            after[earlier].append(node)
    height: dict[fx.Node, int] = {}
    for node in reversed(kernels):
        height[node] = 1 + max((height[later] for later in after[node]), default=0)
    stream: dict[fx.Node, int] = {}
    inherited: set[fx.Node] = set()
    free_at = [0] * (side_streams + 1)  # index of the last kernel on each stream
    for index, node in enumerate(kernels):
        heirs_of = [e for e in before[node] if e not in inherited and max(after[e], key=height.__getitem__) is node]
        if heirs_of:
            chosen = max(heirs_of, key=lambda earlier: (stream[earlier] == 0, height[earlier]))
            inherited.update(heirs_of)
            stream[node] = stream[chosen]
        else:
            # the side stream idle for longest; without any predecessor there is nothing to leave
            stream[node] = (
                min(range(1, side_streams + 1), key=free_at.__getitem__) if before[node] and side_streams else 0
            )
        free_at[stream[node]] = index
    waits = {node: tuple(e for e in before[node] if stream[e] != stream[node]) for node in kernels}
    return Schedule(stream, waits, _crossing(kernels, roots, stream))


def chain_length(graph: fx.Graph, launches: Callable[[fx.Node], int]) -> int:
    """Launches on the longest chain of calls that wait for one another; `launches(node)` says how many a call makes."""
    roots = _roots(graph)
    kernels = _kernels(graph, roots)
    before = _dependencies(kernels, roots)
    reached: dict[fx.Node, int] = {}
    for node in kernels:
        reached[node] = launches(node) + max((reached[earlier] for earlier in before[node]), default=0)
    return max(reached.values(), default=0)


class StreamedGraph:
    """A graph module called under a schedule, on the current stream and side streams of its own."""

    def __init__(self, graph_module: fx.GraphModule, plan: Schedule) -> None:
        self._interpreter = _Streamed(graph_module, plan)

    def __call__(self, *inputs: Tensor) -> Any:
        return self._interpreter.run(*inputs)


class _Streamed(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, plan: Schedule) -> None:
        super().__init__(graph_module)
        self.plan = plan
        self.side = [torch.cuda.Stream() for _ in range(plan.streams - 1)]
        self.awaited = {earlier for waits in plan.waits.values() for earlier in waits}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.lanes = [torch.cuda.current_stream(), *self.side]
        self.begun = {0}
        self.events: dict[fx.Node, Any] = {}
        self.kept: list[Any] = []
        out = super().run(*args, **kwargs)
        for index in self.begun - {0}:
            self.lanes[0].wait_stream(self.lanes[index])
        return out

    def run_node(self, n: fx.Node) -> Any:
        index = self.plan.stream.get(n)
        if index is None:
            return super().run_node(n)
        lane = self.lanes[index]
        # A side stream joins the capture with the first kernel it waits for, and waits for no more than that: the main
        # stream's last kernel so far is far behind a branch that the graph's order puts at its end.
        self.begun.add(index)
        for earlier in self.plan.waits[n]:
            lane.wait_event(self.events[earlier])
        with torch.cuda.stream(lane):
            result = super().run_node(n)
        if n in self.awaited:
            self.events[n] = lane.record_event()
        if n in self.plan.keep:
            self.kept.append(result)
        return result


def _roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node whose memory a value lives in: itself for a kernel's result, the source for a view."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_view(node):
            roots[node] = roots[node.all_input_nodes[0]]
        elif node.op != "output":
            roots[node] = node
    return roots


def _kernels(graph: fx.Graph, roots: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The calls that launch something: all but views."""
    return [node for node in graph.nodes if node.op == "call_function" and roots.get(node) in (None, node)]


def _dependencies(kernels: list[fx.Node], roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Kernels that must have finished: who wrote what this one reads, who read or wrote what it writes."""
    writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    before: dict[fx.Node, list[fx.Node]] = {}
    for node in kernels:
        targets = mutated(node)
        # dictionaries, so that one graph always gets one schedule
        written = dict.fromkeys(roots[target] for target in targets)
        read = dict.fromkeys(roots[source] for source in node.all_input_nodes if source not in targets)
        needed = dict.fromkeys(earlier for root in read for earlier in writers[root])
        needed |= dict.fromkeys(earlier for root in written for earlier in (*writers[root], *readers[root]))
        before[node] = list(needed)
        for root in written or (node,):
            writers[root].append(node)
        for root in read:
            readers[root].append(node)
    return before


def _crossing(kernels: list[fx.Node], roots: dict[fx.Node, fx.Node], stream: dict[fx.Node, int]) -> frozenset[fx.Node]:
    return frozenset(
        root
        for node in kernels
        for root in {roots[source] for source in node.all_input_nodes}
        if stream.get(root, stream[node]) != stream[node]
    )
