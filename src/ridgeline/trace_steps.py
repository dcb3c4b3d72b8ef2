"""Find the steps of a traced loop."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, pairwise

from ridgeline.trace import Call, Range, Trace

MARK = "ridgeline.step"  # a record_function of this name around each step

_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#.*")
_BACKWARD = "autograd::engine::evaluate_function: "

Window = tuple[float, float]  # start and end in seconds


def step_windows(trace: Trace) -> tuple[Window, ...]:
    """Start and end of each step on the host, in order; the whole trace where nothing tells steps apart.

    The GPU may run a step's kernels after the host has left its window.
    """
    return windows(trace.ranges, trace.calls) or (_whole(trace),)


def windows(ranges: Sequence[Range], calls: Sequence[Call] = ()) -> tuple[Window, ...]:
    """The steps that `ranges` (sorted by start) tell of: by the profiler's own, else marks, else optimizer steps.

    `calls`, sorted too, tell optimizers of one class apart.
    """
    profiler = tuple((r.start_s, r.end_s) for r in ranges if _PROFILER_STEP.fullmatch(r.name))
    return profiler or _between_marks([r for r in ranges if r.name == MARK]) or _between_optimizers(ranges, calls)


def _between_marks(marks: Sequence[Range]) -> tuple[Window, ...]:
    """From each mark to the next. A mark that spans its step, instead of ending it, makes a window of the last too."""
    between = tuple((a.start_s, b.start_s) for a, b in pairwise(marks))
    if not marks:
        return ()
    last = marks[-1]
    spans = not between or last.duration_s > (between[-1][1] - between[-1][0]) / 2
    return (*between, (last.start_s, last.end_s)) if spans and last.duration_s else between


def _between_optimizers(ranges: Sequence[Range], calls: Sequence[Call]) -> tuple[Window, ...]:
    """From the end of an optimizer's step to the end of its next; of several optimizers, the one that ends the loop."""
    steps = [r for r in ranges if _OPTIMIZER_STEP.fullmatch(r.name)]
    same = [r for r in steps if r.name == steps[-1].name]
    ends = [r.end_s for r in same[:: -_optimizers_a_step(same, calls)]]
    return tuple(pairwise(reversed(ends)))


def _optimizers_a_step(steps: Sequence[Range], calls: Sequence[Call]) -> int:
    """How many optimizers of one class take turns: those of one backward pass, or with parameters of their own.

    It is the period in which what tells them apart repeats. Where nothing repeats, as when some parameters have no
    gradient in some steps, every one of `steps` ends a step of the loop.
    """
    backwards = [call.start_s for call in calls if call.name.startswith(_BACKWARD)]
    starts = [call.start_s for call in calls]
    known = [step for step in steps if backwards and backwards[0] < step.start_s and step.end_s <= calls[-1].end_s]
    told: list[tuple[bool, object]] = []
    before = 0
    for step in known:
        passed = bisect_left(backwards, step.start_s)
        inside = calls[bisect_left(starts, step.start_s) : bisect_left(starts, step.end_s)]
        told.append((passed > before, max((call.lists[0] for call in inside if call.lists), key=len, default=())))
        before = passed
    periods = range(1, (len(told) + 1) // 2 + 1)
    return next((n for n in periods if all(a == b for a, b in zip(told, told[n:], strict=False))), 1)


def _whole(trace: Trace) -> Window:
    events = list(chain(trace.activities, trace.calls, trace.launches))
    return min((e.start_s for e in events), default=0.0), max((e.end_s for e in events), default=0.0)
