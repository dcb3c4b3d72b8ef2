"""Whether a trace holds all of the GPU's work: asked before anything is concluded from it.

A profiler can lose kernels and still report success: a session opened before a CUDA graph was captured loses all of
the graph's. Two things give that away: launches that left no record, and event-timed GPU time that the trace's cannot
be brought to. The second says nothing where the GPU waits for the host, whose pace is another each time: there every
pause must have a launch that came late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline import units
from ridgeline.errors import EnvironmentUnusable
from ridgeline.overlap import Interval, between, cut, length, union
from ridgeline.step_span import Span, busiest_device, launches_of, representative
from ridgeline.trace import Activity, Launch, Trace

LEAST, MOST = 0.95, 1.02
_LOST = 0.05  # part of the launches without a record that is an accident of where the trace was cut
_WITHIN_GRAPH_S = 5e-6  # between kernels of one graph, under a profiler; what is longer hides a kernel
_BESIDE_GRAPH_S = 20e-6  # before and after a graph, where the host is ahead
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
_REMEDY = (
    "open no profiler session before the capture (or set TEARDOWN_CUPTI=0), and let nothing else use CUPTI;"
    " then profile again"
)
_ALONE = "see in nvidia-smi's list of processes that none but yours uses it"


def check(trace: Trace, gpu_s: float | None) -> float | None:
    """Part of the event-timed time of a step that the trace accounts for; None where `gpu_s` is.

    gpu_s   seconds a step between CUDA events around several steps in a row, unprofiled

    Events count the pauses between kernels too, and a profiler stretches those, but not the kernels. So the trace's
    time lies between that of its kernels alone and that with all pauses: where the kernels alone do not account for
    gpu_s, as much of the pauses is counted as it takes, if they suffice. In a step that waits for its host a pause may
    have been any length unprofiled: it is 1 there, once no pause is left that could hide a kernel.
    Raises EnvironmentUnusable where launches left no kernels, or the ratio leaves [LEAST, MOST]. Another process on the
    GPU makes it leave them too: events count the time of both, and what the other took differs between the runs.
    """
    _no_graph_without_kernels(trace)
    _no_launches_without_kernels(trace)
    activities, launches = busiest_device(trace), launches_of(trace)
    span = representative(trace, activities, launches)
    if span is None:
        raise EnvironmentUnusable(
            f"{trace.path}: the trace has no GPU work; record with ProfilerActivity.CUDA, and {_REMEDY}"
        )
    if gpu_s is None:
        return None
    if gpu_s <= 0:
        raise ValueError(f"check: gpu_s must be above 0, got {gpu_s}")
    time = _time_of(span, activities, launches)
    coverage = time.busy_s / gpu_s
    if coverage < LEAST:
        coverage = 1.0 if _is_host_bound(span, time) else min(1.0, (time.busy_s + time.pauses_s) / gpu_s)
    if LEAST <= coverage <= MOST:
        return coverage
    told = (
        f"{trace.path}: a step has {units.seconds(time.busy_s)} of GPU work and {units.seconds(time.pauses_s)} of "
        f"pauses in the trace, and {units.seconds(gpu_s)} by events ({units.percent(coverage)} covered)"
    )
    if coverage < LEAST:
        raise EnvironmentUnusable(
            f"{told}, so kernels are missing, or another process used this GPU while the steps were timed: {_ALONE};"
            f" {_REMEDY}"
        )
    raise EnvironmentUnusable(
        f"{told}, so the trace is of slower or other steps than were timed:"
        f" let the GPU warm up, {_ALONE}, and profile again"
    )


@dataclass(frozen=True)
class _Time:
    """The GPU's time in one step."""

    busy_s: float  # the union of its work
    pauses_s: float  # what no missing kernel explains
    late_s: float  # of the pauses: until the host had launched what came next
    hidden_s: float  # what is left: pauses beside kernels of graphs that are too long to be pauses
    graphs_s: float  # of the work: what graphs launched


def _time_of(span: Span, activities: Sequence[Activity], launches: Mapping[int, Launch]) -> _Time:
    covered = union((activity.start_s, activity.end_s) for activity in span.activities)
    kernels = Counter(activity.correlation for activity in activities if activity.correlation)
    by_start = {activity.start_s: activity for activity in activities}  # the next step's first too
    by_end = {activity.end_s: activity for activity in span.activities}
    pauses_s = late_s = hidden_s = 0.0
    for start_s, end_s in between(covered, span.start_s, span.end_s):
        pause_s = end_s - start_s
        before, after = by_end.get(start_s), by_start.get(end_s)
        launch = launches.get(after.correlation) if after else None
        within = before and after and before.correlation == after.correlation
        launched_s = min(end_s, launch.end_s) if launch and not within else start_s
        waited_s = max(0.0, launched_s - start_s)
        # what was launched alone is missed by its launch, so that only a graph's kernels can go unnoticed
        graphs = any(side and kernels[side.correlation] > 1 for side in (before, after))
        longest_s = (_WITHIN_GRAPH_S if within else _BESIDE_GRAPH_S) if graphs else pause_s
        allowed_s = min(pause_s, waited_s + longest_s)
        pauses_s += allowed_s
        late_s += waited_s
        hidden_s += pause_s - allowed_s
    graphs_s = sum(each.end_s - each.start_s for each in span.activities if kernels[each.correlation] > 1)
    return _Time(length(covered), pauses_s, late_s, hidden_s, graphs_s)


def _is_host_bound(span: Span, time: _Time) -> bool:
    """Whether time by events is the host's, and no pause in the trace hides a kernel.

    A step that no other follows ends with its last kernel, so that one which is missing there leaves no pause. Where
    graphs do most of the work, their last kernels could go unseen in the wait for the next launch.
    """
    noticeable_s = (1 - LEAST) * span.duration_s
    return span.whole and 2 * time.graphs_s <= time.busy_s and time.late_s > noticeable_s >= time.hidden_s


def _no_graph_without_kernels(trace: Trace) -> None:
    seen = {activity.correlation for activity in trace.activities}
    graphs = [launch for launch in trace.launches if launch.name.startswith(("cudaGraphLaunch", "cuGraphLaunch"))]
    empty = [launch for launch in graphs if launch.correlation not in seen]
    if empty and len(empty) > _LOST * len(graphs):
        raise EnvironmentUnusable(
            f"{trace.path}: {len(empty)} of {len(graphs)} CUDA graph launches left no kernels in the trace,"
            f" so most of the GPU's time is not in it: {_REMEDY}"
        )


def _no_launches_without_kernels(trace: Trace) -> None:
    seen = {activity.correlation for activity in trace.activities if activity.correlation}
    if not seen:
        return  # a trace without correlation ids cannot be asked
    last_s = max(activity.start_s for activity in trace.activities)
    captures = _captures(trace.launches)
    launched = [
        launch
        for launch in trace.launches
        # later ones may be cut off with the trace, those into a graph under capture run nothing
        if launch.name.startswith(_LAUNCHES)
        and launch.end_s < last_s
        and not cut((launch.start_s, launch.end_s), captures)
    ]
    lost = [launch for launch in launched if launch.correlation not in seen]
    if len(lost) > _LOST * len(launched):
        raise EnvironmentUnusable(
            f"{trace.path}: {len(lost)} of {len(launched)} kernel launches left no kernel in the trace: synchronise"
            " before the profiler stops, record fewer steps so that its buffers suffice, and profile again"
        )


def _captures(launches: Sequence[Launch]) -> list[Interval]:
    """When launches went into a graph under capture."""
    captures: list[Interval] = []
    begin_s = None
    for launch in launches:
        if launch.name.startswith(("cudaStreamBeginCapture", "cuStreamBeginCapture")):
            begin_s = launch.start_s
        elif launch.name.startswith(("cudaStreamEndCapture", "cuStreamEndCapture")) and begin_s is not None:
            captures.append((begin_s, launch.end_s))
            begin_s = None
    return union(captures)
