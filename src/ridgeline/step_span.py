"""The representative step of a trace: its window on the host, its window on the GPU, and what ran within.

The GPU runs behind the host, so a step's kernels are not those of its window on the host. On the GPU a step lasts from
its first kernel to the first kernel of the next step: in a steady loop that is the period, wherever the host was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.trace import Activity, Launch, Trace
from ridgeline.trace_steps import step_windows, windows


@dataclass(frozen=True)
class Span:
    """One step. Activities are those that start within [start_s, end_s); one that runs on ends with the step."""

    index: int
    host: tuple[float, float]  # start and end of the step on the host
    start_s: float
    end_s: float
    activities: tuple[Activity, ...]
    whole: bool  # a further step follows, so that start and end are those of a period

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def launches_of(trace: Trace) -> dict[int, Launch]:
    """The launch behind each correlation id."""
    return {launch.correlation: launch for launch in trace.launches if launch.correlation}


def busiest_device(trace: Trace) -> list[Activity]:
    """The activities of the GPU that worked longest: steps are told of one GPU."""
    seconds: defaultdict[int, float] = defaultdict(float)
    for activity in trace.activities:
        seconds[activity.device] += activity.duration_s
    device = max(seconds, key=lambda each: (seconds[each], -each), default=0)
    return [activity for activity in trace.activities if activity.device == device]


def representative(trace: Trace, activities: Sequence[Activity], launches: Mapping[int, Launch]) -> Span | None:
    """The step of median duration among whole ones, else the last; None where the GPU did nothing."""
    spans = spans_of(trace, activities, launches)
    ranked = sorted((span for span in spans if span.whole), key=lambda span: span.duration_s) or spans[-1:]
    return ranked[(len(ranked) - 1) // 2] if ranked else None


def spans_of(trace: Trace, activities: Sequence[Activity], launches: Mapping[int, Launch]) -> list[Span]:
    """Every step in which the GPU worked; work outside all steps is one by itself. `activities` are sorted by start."""
    hosts, marked = step_windows(trace), bool(windows(trace.ranges, trace.calls))
    first = _first_work(hosts, activities, launches)
    if not first and activities:
        hosts, marked = ((activities[0].start_s, max(activity.end_s for activity in activities)),), False
        first = {0: activities[0].start_s}
    starts = [activity.start_s for activity in activities]
    spans: list[Span] = []
    order = sorted(first)
    for place, index in enumerate(order):
        follower = first[order[place + 1]] if place + 1 < len(order) else None
        start_s = first[index]
        # what comes before the first kernel of a single step is part of it, for no step before it is known: the time
        # where somebody marked its begin, else the copy of its input
        if len(hosts) == 1:
            start_s = min(start_s, hosts[index][0] if marked else activities[0].start_s)
        inside = activities[bisect_left(starts, start_s) : bisect_left(starts, follower or float("inf"))]
        last_s = max(activity.end_s for activity in inside)
        end_s = follower if follower is not None else max(last_s, hosts[index][1]) if marked else last_s
        clipped = tuple(_until(activity, end_s) for activity in inside)
        spans.append(Span(index, hosts[index], start_s, end_s, clipped, whole=follower is not None))
    return spans


def _first_work(
    hosts: Sequence[tuple[float, float]], activities: Sequence[Activity], launches: Mapping[int, Launch]
) -> dict[int, float]:
    """When the first kernel that each step launched began, by index of the step; a copy only where no kernel is.

    Steps whose first kernel began no later than that of a step before are left out.
    """
    begins = [begin for begin, _ in hosts]
    kernels: dict[int, float] = {}
    others: dict[int, float] = {}
    for activity in activities:
        launch = launches.get(activity.correlation)
        moment_s = launch.start_s if launch else activity.start_s
        index = bisect_left(begins, moment_s + 1e-12) - 1
        if index < 0 or moment_s > hosts[index][1]:
            continue
        first = kernels if activity.kind == "kernel" else others
        first[index] = min(first.get(index, activity.start_s), activity.start_s)
    found = {**others, **kernels}
    rising: dict[int, float] = {}
    for index in sorted(found):
        if not rising or found[index] > max(rising.values()):
            rising[index] = found[index]
    return rising


def _until(activity: Activity, end_s: float) -> Activity:
    return activity if activity.end_s <= end_s else replace(activity, duration_s=end_s - activity.start_s)
