"""What a step would take if parts of it were shorter, and the step as it runs without a profiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ridgeline.finding import Edit
from ridgeline.step_view import Step

# gaps that the host makes by being late: the profiler slows the host, so its own time lies in these
_HOST_CAUSES = ("launch", "sync", "unknown", "compile")

_Key = TypeVar("_Key")


def remaining_s(step: Step, edit: Edit) -> float:
    """Duration of the step after the edit: the union of what still runs, and the gaps that are left.

    Work that is shortened still starts where it did, so a kernel frees only time in which nothing else runs. An edit
    never lengthens anything.
    """
    busy_s, covered_s = 0.0, float("-inf")
    for kernel in step.kernels:  # by start, which no edit moves
        activity = kernel.activity
        end_s = activity.start_s + min(edit.seconds.get(activity.id, activity.duration_s), activity.duration_s)
        if end_s > covered_s:
            busy_s += end_s - max(activity.start_s, covered_s)
            covered_s = end_s
    idle_s = sum(min(edit.gaps.get(i, gap.duration_s), gap.duration_s) for i, gap in enumerate(step.gaps))
    return busy_s + idle_s


def both(first: Edit, second: Edit) -> Edit:
    """Both edits at once: where they touch the same thing, the shorter duration holds, not the two reductions."""
    return Edit(_shorter(first.seconds, second.seconds), _shorter(first.gaps, second.gaps))


def unprofiled(step: Step) -> Step:
    """The step with the profiler's own time taken out of its gaps, so that it takes `wall_s`.

    The gaps that the host makes give way first, in proportion, then the others. Starts stay those of the trace, and so
    do the kernels: the profiler slows the host, not the GPU. A step that nobody timed, or that was no slower under the
    profiler, stays as it is.
    """
    if step.wall_s is None:
        return step
    excess_s = step.duration_s - step.wall_s
    factors: dict[bool, float] = {}
    for of_host in (True, False):
        idle_s = sum(gap.duration_s for gap in step.gaps if (gap.cause in _HOST_CAUSES) == of_host)
        taken_s = min(max(excess_s, 0.0), idle_s)
        factors[of_host] = 1.0 - taken_s / idle_s if idle_s else 1.0
        excess_s -= taken_s
    gaps = tuple(replace(gap, duration_s=gap.duration_s * factors[gap.cause in _HOST_CAUSES]) for gap in step.gaps)
    shrunk_s = step.idle_s - sum(gap.duration_s for gap in gaps)
    syncs = tuple(replace(sync, bubble_s=sync.bubble_s * factors[True]) for sync in step.syncs)
    return replace(step, duration_s=step.duration_s - shrunk_s, gaps=gaps, syncs=syncs)


def _shorter(first: Mapping[_Key, float], second: Mapping[_Key, float]) -> dict[_Key, float]:
    joined = dict(first)
    for key, value_s in second.items():
        joined[key] = min(value_s, joined.get(key, value_s))
    return joined
