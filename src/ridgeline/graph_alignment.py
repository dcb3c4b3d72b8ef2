"""Give the kernels of a CUDA graph the operators of an eager step, by aligning the two sequences.

A graph's kernels share the correlation id of its launch and belong to no operator: names, modules and shapes are lost.
Capture keeps the order of launches, so the same step traced outside its graph tells them. The sequences are compared
by (name, grid, block), then what lies between matches by name alone; kernels that only one side has stay out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from ridgeline.step_view import Kernel


def aligned(kernels: Sequence[Kernel], eager: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The kernels, those inside graphs with call, op, module, source, phase and work of their like in `eager`."""
    inside = [place for place, kernel in enumerate(kernels) if kernel.in_graph and kernel.call is None]
    inside.sort(key=lambda place: _node_order(kernels[place]))
    source = [kernel for kernel in eager if kernel.call is not None or kernel.op]
    done = list(kernels)
    for ours, theirs in matches([kernels[place] for place in inside], source):
        done[inside[ours]] = _told(kernels[inside[ours]], source[theirs])
    return tuple(done)


def matches(left: Sequence[Kernel], right: Sequence[Kernel]) -> Iterator[tuple[int, int]]:
    """Pairs of places, rising on both sides, that hold the same kernel."""
    reached = (0, 0)
    for i, j, size in (*_blocks(left, right, _launched), (len(left), len(right), 0)):
        between = _blocks(left[reached[0] : i], right[reached[1] : j], _name)
        yield from ((reached[0] + a + k, reached[1] + b + k) for a, b, n in between for k in range(n))
        yield from ((i + k, j + k) for k in range(size))
        reached = (i + size, j + size)


def _blocks(
    left: Sequence[Kernel], right: Sequence[Kernel], key: Callable[[Kernel], Hashable]
) -> list[tuple[int, int, int]]:
    matcher = SequenceMatcher(None, [key(kernel) for kernel in left], [key(kernel) for kernel in right], autojunk=False)
    return [(block.a, block.b, block.size) for block in matcher.get_matching_blocks() if block.size]


def _launched(kernel: Kernel) -> Hashable:
    activity = kernel.activity
    return activity.name, activity.grid, activity.block, activity.bytes


def _name(kernel: Kernel) -> Hashable:
    """A graph does copies and fills by kernels of its own, so these are compared by kind."""
    category = kernel.known.category
    return category if category in ("memcpy", "memset") else kernel.activity.name


def _node_order(kernel: Kernel) -> tuple[float, int]:
    """Nodes are numbered as they were captured, so as the eager step launched them; streams may run them otherwise."""
    node = kernel.activity.graph_node
    return (kernel.activity.start_s, 0) if node is None else (0.0, node)


def _told(kernel: Kernel, like: Kernel) -> Kernel:
    known = like.known if like.activity.name == kernel.activity.name else kernel.known
    return replace(
        kernel,
        known=known,
        call=like.call,
        op=like.op,
        module=like.module or kernel.module,
        source=like.source,
        phase=like.phase,
        shapes=like.shapes,
        flops=like.flops,
        bytes=like.bytes,
    )
