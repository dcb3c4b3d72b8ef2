"""Arithmetic of overlapping intervals of GPU work: what is covered, what runs alone, what is left between.

Intervals are (start, end) in seconds; they may overlap, since streams and copy engines work side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The covered stretches in order; those that touch are one, empty ones are none."""
    covered: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((start, end))
    return covered


def length(intervals: Iterable[Interval]) -> float:
    """Total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def between(covered: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """What `covered`, a union, leaves free of [start, end]."""
    free: list[Interval] = []
    reached = start
    for first, last in covered:
        if first >= end:
            break
        if first > reached:
            free.append((reached, first))
        reached = max(reached, last)
    if reached < end:
        free.append((reached, end))
    return free


def cut(interval: Interval, parts: Sequence[Interval]) -> list[Interval]:
    """The stretches of `interval` that lie inside `parts`, a union."""
    start, end = interval
    return [(max(start, a), min(end, b)) for a, b in parts if min(end, b) > max(start, a)]


def alone_and_shared(intervals: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """For each interval: how long nothing else runs, and its length with time shared evenly among those that run.

    The shared lengths add up to the length of the union.
    """
    alone, shared = [0.0] * len(intervals), [0.0] * len(intervals)
    # ends sort before starts at the same moment, so intervals that touch do not overlap
    edges = sorted(
        edge
        for place, (start, end) in enumerate(intervals)
        if end > start
        for edge in ((start, 1, place), (end, 0, place))
    )
    running: set[int] = set()
    previous = 0.0
    for moment, begins, place in edges:
        if running and moment > previous:
            for one in running:
                shared[one] += (moment - previous) / len(running)
            if len(running) == 1:
                alone[next(iter(running))] += moment - previous
        previous = moment
        if begins:
            running.add(place)
        else:
            running.discard(place)
    return alone, shared
