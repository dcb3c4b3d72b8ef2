"""Whether a trace holds all of the GPU's work: asked before anything is concluded from it.

A profiler can lose kernels and still report success: a session opened before a CUDA graph was captured loses all of
the graph's. Two things give that away: launches that left no record, and event-timed GPU time that the trace's cannot
be brought to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ridgeline import units
from ridgeline.errors import EnvironmentUnusable
from ridgeline.overlap import Interval, between, cut, length, union
from ridgeline.step_span import Span, busiest_device, launches_of, representative
from ridgeline.trace import Launch, Trace

LEAST, MOST = 0.95, 1.02
_LOST = 0.05  # part of the launches without a record that is an accident of where the trace was cut
_WITHIN_GRAPH_S = 5e-6  # between kernels of one graph, under a profiler; what is longer hides a kernel
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
_REMEDY = (
    "open no profiler session before the capture (or set TEARDOWN_CUPTI=0), and let nothing else use CUPTI;"
    " then profile again"
)


def check(trace: Trace, gpu_s: float | None) -> float | None:
    """GPU time of a step in the trace over its event-timed time; None where `gpu_s` is.

    gpu_s   seconds a step between CUDA events around several steps in a row, unprofiled

    Events count the pauses between kernels too, and a profiler stretches those, but not the kernels. So the trace's
    time lies between that of its kernels alone and that with all pauses: where the kernels alone do not account for
    gpu_s, as much of the pauses is counted as it takes, if they suffice.
    Raises EnvironmentUnusable where launches left no kernels, or the ratio leaves [LEAST, MOST].
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
    busy_s, reached_s = _interval(span)
    coverage = busy_s / gpu_s
    if coverage < LEAST:
        coverage = min(1.0, reached_s / gpu_s)
    if LEAST <= coverage <= MOST:
        return coverage
    told = f"{trace.path}: a step has {units.seconds(busy_s)} of GPU work in the trace and {units.seconds(gpu_s)} by"
    if coverage < LEAST:
        raise EnvironmentUnusable(
            f"{told} events ({units.percent(coverage)} covered), so kernels are missing: {_REMEDY}"
        )
    raise EnvironmentUnusable(
        f"{told} events ({units.percent(coverage)}), so the trace is of slower or other steps than were timed:"
        " let the GPU warm up, see that nothing else uses it, and profile again"
    )


def _interval(span: Span) -> tuple[float, float]:
    """GPU time of a step: the union of its work, and that with every pause that a missing kernel does not explain."""
    covered = union((activity.start_s, activity.end_s) for activity in span.activities)
    graphs = Counter(activity.correlation for activity in span.activities if activity.correlation)
    by_start = {activity.start_s: activity for activity in span.activities}
    by_end = {activity.end_s: activity for activity in span.activities}
    pauses_s = 0.0
    for start_s, end_s in between(covered, span.start_s, span.end_s):
        before, after = by_end.get(start_s), by_start.get(end_s)
        within_graph = before and after and before.correlation == after.correlation and graphs[after.correlation] > 1
        pauses_s += min(end_s - start_s, _WITHIN_GRAPH_S) if within_graph else end_s - start_s
    busy_s = length(covered)
    return busy_s, busy_s + pauses_s


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
