"""How a step would run if the host did not wait: its launches and waits replayed against the GPU's queue.

The host goes from launch to launch and stops at each wait until the GPU has run dry; a kernel starts when the one
before it has ended and its launch has come. The profiler slows the host, so its time between launches is scaled, by the
one factor with which the replay takes as long as the unprofiled step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ridgeline.finding import Edit
from ridgeline.rules._rule import GRAPH_GAP_S, LATE_S, kernel_after, lead_s
from ridgeline.step_view import Kernel, Step, Sync

_HALVINGS = 30  # of the factor's interval: far below a microsecond of any step
_SLOWEST = 2.0  # times the traced host: beyond that the replay has missed what the step waits for
_LATENCY_S = 2e-6  # from a launch to its kernel on an idle GPU, where the trace has no such pair


@dataclass(frozen=True)
class Pace:
    """The step's host and GPU, ready to be replayed without some of its waits."""

    step: Step
    events: tuple[tuple[float, float, Kernel | Sync], ...]  # begin and end on the host, in its order
    tail_s: float  # host time from the last event to the end of the step
    latency_s: float
    factor: float  # host time of the unprofiled step over that of the trace

    def without(self, syncs: Collection[Sync]) -> tuple[Edit, float]:
        """The step's gaps when the host no longer stops at these waits, and the seconds that this saves together."""
        before, before_s = _replayed(self, self.factor, ())
        after, after_s = _replayed(self, self.factor, {sync.launch.id for sync in syncs})
        saved_s = max(0.0, before_s - after_s)
        shrunk = {id_: max(0.0, idle_s - after.get(id_, 0.0)) for id_, idle_s in before.items()}
        total_s = sum(shrunk.values())
        if not saved_s or not total_s:
            return Edit(), 0.0
        # idle time may also move to a later kernel: what shrinks is scaled to what the step gains
        share = saved_s / total_s
        idle_s: defaultdict[int, float] = defaultdict(float)
        for gap in self.step.gaps:
            idle_s[_next_id(kernel_after(self.step, gap))] += gap.duration_s
        gaps, freed_s = {}, 0.0
        for index, gap in enumerate(self.step.gaps):
            id_ = _next_id(kernel_after(self.step, gap))
            taken_s = min(gap.duration_s, share * shrunk.get(id_, 0.0) * gap.duration_s / (idle_s[id_] or 1.0))
            if taken_s > 0.0:
                gaps[index] = gap.duration_s - taken_s
                freed_s += taken_s
        return Edit(gaps=gaps), freed_s

    def catch_up_s(self, sync: Sync) -> float:
        """From the wait's end until the host's next kernel can start: how long it leaves a GPU idle that it drained."""
        waited_s = sync.launch.end_s
        ends = (end_s for _, end_s, event in self.events if isinstance(event, Kernel) and end_s > waited_s)
        return self.factor * (next(ends, waited_s) - waited_s) + self.latency_s


def pace_of(step: Step) -> Pace | None:
    """The step's pace; None where no host time between launches explains how long it takes, as in a CUDA graph.

    None also where launches fall into a wait: then another thread makes them, and the wait holds up less than it seems.
    """
    launches = {launch.correlation: launch for launch in step.launches}
    events: list[tuple[float, float, Kernel | Sync]] = [
        (launch.start_s, launch.end_s, kernel)
        for kernel in step.kernels
        if (launch := launches.get(kernel.activity.correlation)) is not None and not kernel.in_graph
    ]
    if not events or 2 * len(events) < len(step.kernels):
        return None
    events += [(sync.launch.start_s, sync.launch.end_s, sync) for sync in step.syncs]
    events.sort(key=lambda event: event[:2])
    if any(isinstance(one[2], Sync) and other[0] < one[1] for one, other in pairwise(events)):
        return None
    late = [lead for lead in lead_s(step).values() if 0.0 < lead < LATE_S]
    # gaps of an unprofiled step are shorter than those of its trace: where it ends in the trace is not its duration
    end_s = max((kernel.activity.end_s for kernel in step.kernels), default=step.start_s)
    if step.gaps and kernel_after(step, step.gaps[-1]) is None:
        end_s = max(end_s, events[-1][1])
    pace = Pace(step, tuple(events), max(0.0, end_s - events[-1][1]), median(late) if late else _LATENCY_S, 1.0)
    return _fitted(pace, lambda factor: _replayed(pace, factor, ())[1])


def _fitted(pace: Pace, length_s: Callable[[float], float]) -> Pace | None:
    low, high = 0.0, _SLOWEST
    wanted_s = pace.step.duration_s
    if not length_s(low) < wanted_s <= length_s(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if length_s(middle) < wanted_s else (low, middle)
    return Pace(pace.step, pace.events, pace.tail_s, pace.latency_s, high)


def _replayed(pace: Pace, factor: float, skipped: Collection[int]) -> tuple[dict[int, float], float]:
    """Idle time before each kernel by its id (-1: the end of the step), and the step's length."""
    host_s = free_s = 0.0  # where the host is, and when the GPU has done what was launched
    traced_s = pace.step.start_s
    idle: dict[int, float] = {}
    for begin_s, end_s, event in pace.events:
        if isinstance(event, Sync):
            host_s += factor * max(0.0, begin_s - traced_s)
            if event.launch.id not in skipped:
                host_s = max(host_s, free_s) + factor * _overhead_s(event)
        else:
            host_s += factor * max(0.0, end_s - traced_s)
            start_s = max(free_s + GRAPH_GAP_S if idle else 0.0, host_s + pace.latency_s)
            idle[event.activity.id] = start_s - free_s
            # what runs beside other work adds no more than the time in which it runs alone
            free_s = start_s + event.exposed_s
        traced_s = max(traced_s, end_s)
    length_s = max(free_s, host_s + factor * pace.tail_s)
    idle[-1] = length_s - free_s
    return idle, length_s


def _overhead_s(sync: Sync) -> float:
    """What the wait's own call takes the host besides waiting."""
    return max(0.0, sync.launch.duration_s - sync.waited_s)


def _next_id(kernel: Kernel | None) -> int:
    return kernel.activity.id if kernel else -1
