"""Find the steps of a traced loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, pairwise

from ridgeline.trace import Range, Trace

MARK = "ridgeline.step"  # a record_function of this name around each step

_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#.*")

Window = tuple[float, float]  # start and end in seconds


def step_windows(trace: Trace) -> tuple[Window, ...]:
    """Start and end of each step on the host, in order; the whole trace where nothing tells steps apart.

    The GPU may run a step's kernels after the host has left its window.
    """
    return windows(trace.ranges) or (_whole(trace),)


def windows(ranges: Sequence[Range]) -> tuple[Window, ...]:
    """The steps that `ranges` (sorted by start) tell of: by the profiler's own, else marks, else optimizer steps."""
    profiler = tuple((r.start_s, r.end_s) for r in ranges if _PROFILER_STEP.fullmatch(r.name))
    return profiler or _between_marks([r for r in ranges if r.name == MARK]) or _between_optimizers(ranges)


def _between_marks(marks: Sequence[Range]) -> tuple[Window, ...]:
    """From each mark to the next. A mark that spans its step, instead of ending it, makes a window of the last too."""
    between = tuple((a.start_s, b.start_s) for a, b in pairwise(marks))
    if not marks:
        return ()
    last = marks[-1]
    spans = not between or last.duration_s > (between[-1][1] - between[-1][0]) / 2
    return (*between, (last.start_s, last.end_s)) if spans and last.duration_s else between


def _between_optimizers(ranges: Sequence[Range]) -> tuple[Window, ...]:
    """From the end of an optimizer's step to the end of its next; of several optimizers, the one that ends the loop."""
    steps = [r for r in ranges if _OPTIMIZER_STEP.fullmatch(r.name)]
    ends = [r.end_s for r in steps if r.name == steps[-1].name]
    return tuple(pairwise(ends))


def _whole(trace: Trace) -> Window:
    events = list(chain(trace.activities, trace.calls, trace.launches))
    return min((e.start_s for e in events), default=0.0), max((e.end_s for e in events), default=0.0)
