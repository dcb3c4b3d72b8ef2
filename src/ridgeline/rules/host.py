"""H9-H11, H14, W1: the host is late with its launches, or the GPU pauses between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile

from ridgeline import units
from ridgeline.finding import Abstention, Finding
from ridgeline.rules._rule import (
    GRAPH_GAP_S,
    LATE_S,
    LAUNCH_CAUSES,
    MOST_EVIDENCE,
    STALL_S,
    closed,
    gap_evidence,
    gap_total,
    kernel_after,
    launch_cost_s,
    lead_s,
    notable,
    number,
    plural,
    saving,
)
from ridgeline.rules.syncs import kind_of
from ridgeline.step_view import Gap, Step, Sync

_BUSY = 0.85  # part of the step that the GPU works in a step that is not bound by launches
_USUAL = 0.9  # part of the steps whose batches must have one shape, for a graph to be worth capturing
_QUEUED_GAP_S = 5e-6  # between kernels that are already queued; longer ones have another cause
_STEPS_WITHOUT_ENDS = 2  # traced steps from which one is followed by another
_INPUT_BYTES = 1024  # a smaller upload is a constant made within the step, not its images or labels
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocHost", "cuMemAlloc", "cuMemFree")


def launch_bound(step: Step) -> Iterable[Finding | Abstention]:
    """H9: most kernels start as soon as they are launched, and the GPU idles before them: the host sets the pace.

    Holds for eager steps whose unprofiled time is known; the profiler makes every host slower.
    """
    leads = lead_s(step)
    if not leads:
        if not any(kernel.in_graph for kernel in step.kernels):
            yield Abstention("H9", "the trace has no launches: record the CPU's activities beside the GPU's")
        return
    late = sum(lead < LATE_S for lead in leads.values())
    gaps = _launch_gaps(step, leads).late
    idle_s = gap_total(step, gaps)
    if late <= len(leads) / 2 or step.busy_s >= _BUSY * step.duration_s or not notable(step, idle_s):
        return
    mid_s = sum(max(0.0, step.gaps[index].duration_s - GRAPH_GAP_S) for index in gaps)
    yield Finding(
        rule="H9",
        title=f"launch-bound: {late} of {len(leads)} launches find an idle GPU, which idles"
        f" {units.seconds(idle_s)} a step",
        fix="Launch less: fuse kernels by compiling, raise the batch, or capture the step in one CUDA graph.",
        verb="ridgeline.compile_step" if step.trained else "ridgeline.compile",
        saving=saving(idle_s / 2, mid_s, idle_s, cap_s=idle_s),
        effort="M",
        confidence="modelled",
        wrong_if="the host is slow only under the profiler, or the idle time has another cause",
        evidence=gap_evidence(step, gaps),
        edit=closed(step, gaps, mid_s),
        note=f"idle time before late kernels; one launch takes the host {units.seconds(launch_cost_s(step))}",
    )


def queued_gaps(step: Step) -> Iterable[Finding | Abstention]:
    """H10: the host is far ahead, and yet the GPU pauses a microsecond or more between kernels.

    Holds for eager launches on one stream; kernels of a graph follow one another in about a microsecond.
    """
    gaps = _launch_gaps(step, lead_s(step)).queued
    mid_s = sum(max(0.0, step.gaps[index].duration_s - GRAPH_GAP_S) for index in gaps)
    if not notable(step, mid_s):
        return
    yield Finding(
        rule="H10",
        title=f"{plural(len(gaps), 'pause')} of {units.seconds(gap_total(step, gaps) / len(gaps))} between kernels"
        " that are queued already",
        fix="Replay the kernels from a CUDA graph, or make fewer, larger ones by fusion.",
        verb="ridgeline.compile_step" if step.trained else "ridgeline.compile",
        saving=saving(mid_s / 2, mid_s, gap_total(step, gaps), cap_s=gap_total(step, gaps)),
        effort="M",
        confidence="modelled",
        wrong_if="the pauses are the GPU's own floor between dependent kernels, which no launch method shortens",
        evidence=gap_evidence(step, gaps),
        edit=closed(step, gaps, mid_s),
        note=f"each pause less the {units.seconds(GRAPH_GAP_S)} that stays within a graph",
    )


def allocations(step: Step) -> Iterable[Finding | Abstention]:
    """H11: memory is allocated or freed through the driver within the step, which stops the GPU.

    Holds after warm-up, when the caching allocator should have all it needs.
    """
    calls = [launch for launch in step.launches if launch.name.startswith(_ALLOCATIONS) and "Async" not in launch.name]
    if not calls:
        return
    gaps = {}  # by index: idle time while an allocation ran
    for index, gap in enumerate(step.gaps):
        end_s = _end_s(step, gap)
        shared_s = sum(max(0.0, min(call.end_s, end_s) - max(call.start_s, gap.start_s)) for call in calls)
        if shared_s > 0.0:
            gaps[index] = min(shared_s, gap.duration_s)
    mid_s = sum(gaps.values())
    if not notable(step, mid_s):
        return
    yield Finding(
        rule="H11",
        title=f"{plural(len(calls), 'driver allocation')} in the step: the GPU idles {units.seconds(mid_s)} for them",
        fix="Keep shapes fixed, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and warm up with the largest"
        " batch.",
        verb="ridgeline.compile_step" if step.trained else "ridgeline.compile",
        saving=saving(0.0, mid_s, gap_total(step, gaps), cap_s=gap_total(step, gaps)),
        effort="S",
        confidence="modelled",
        wrong_if="the step is one of the first, in which the allocator still grows",
        evidence=tuple(call.id for call in sorted(calls, key=lambda call: (-call.duration_s, call.id)))[:MOST_EVIDENCE],
        edit=closed(step, gaps, mid_s),
        note="idle time while the driver allocates or frees; at most the whole gaps around it",
    )


def python_stalls(step: Step) -> Iterable[Finding | Abstention]:
    """H14: the GPU idles long while the host is in no operator and no CUDA call: logging, plots, garbage collection.

    Holds for stalls that come with every step; a rare one may have fallen into the step that was traced. Abstains where
    the trace has one step alone: what lies at its ends is the profiler's as likely as the loop's.
    """
    long = [i for i, gap in enumerate(step.gaps) if gap.cause in LAUNCH_CAUSES and gap.duration_s >= STALL_S]
    if long and not step.calls:
        yield Abstention("H14", "the trace has no operators of the host: record the CPU's activities beside the GPU's")
        return
    if long and "traced_steps" in step.settings and number(step, "traced_steps") < _STEPS_WITHOUT_ENDS:
        yield Abstention("H14", "the trace holds one step, whose ends are the profiler's own: trace two or more")
        return
    spans = _host_spans(step)
    stalls = [index for index in long if not _is_filled(step.gaps[index], _end_s(step, step.gaps[index]), spans)]
    idle_s = gap_total(step, stalls)
    if not notable(step, idle_s):
        return
    yield Finding(
        rule="H14",
        title=f"the GPU idles {units.seconds(idle_s)} while the host runs Python outside any operator",
        fix="Move logging, metrics and plots to every so many steps, and freeze the garbage collector after warm-up."
        " A profile with stacks names the lines.",
        verb="",
        saving=saving(0.0, idle_s / 2, idle_s, cap_s=idle_s),
        effort="S",
        confidence="bound",
        wrong_if="the stall is a rare event that the traced step happened to contain",
        evidence=gap_evidence(step, stalls),
        edit=closed(step, stalls, idle_s / 2),
        note="the length of these gaps",
    )


def no_graph(step: Step) -> Iterable[Finding | Abstention]:
    """W1: launch gaps in a step that one CUDA graph could replay.

    Holds for static shapes and a step without waits that its data asks for; abstains where it has such waits.
    """
    if not step.kernels or sum(kernel.in_graph for kernel in step.kernels) > len(step.kernels) / 2:
        return
    launch_gaps = _launch_gaps(step, lead_s(step))
    gaps = (*launch_gaps.late, *launch_gaps.queued)
    idle_s = gap_total(step, gaps)
    if not notable(step, idle_s):
        return
    names = dict.fromkeys(sync.call.name for sync in step.syncs if sync.call and _is_obstacle(step, sync))
    if names:
        yield Abstention("W1", f"a graph cannot hold waits for the GPU ({', '.join(names)}): see H6 first")
        return
    shapes, usual = _batches(step)
    if shapes > 1 and usual < _USUAL:
        yield Abstention("W1", f"batches come in {shapes:.0f} shapes and a graph holds one: pad or bucket them first")
        return
    uploads = sum(k.activity.bytes for k in step.kernels if "HtoD" in k.activity.name)
    # the input goes once more through memory, into the graph's own buffer
    copies_s = 2 * uploads / step.ceilings.bandwidth if step.ceilings else 0.0
    mid_s = sum(max(0.0, step.gaps[index].duration_s - GRAPH_GAP_S) for index in gaps) - copies_s
    reads = " Reads of values on the host (H5, H7, H8) must leave the step first." if step.syncs else ""
    others = f" Drop or pad the batches of other shapes, {units.percent(1 - usual)} of all." if shapes > 1 else ""
    yield Finding(
        rule="W1",
        title=f"no CUDA graph: {units.seconds(idle_s)} a step pass between launches",
        fix=f"Capture the whole step once and replay it with one launch.{reads}{others}",
        verb="ridgeline.compile_step" if step.trained else "ridgeline.compile",
        saving=saving(idle_s / 2, mid_s, idle_s, cap_s=idle_s),
        effort="S",
        confidence="modelled",
        wrong_if="shapes change from batch to batch, or the step has parts that cannot be captured",
        evidence=gap_evidence(step, gaps),
        edit=closed(step, gaps, mid_s),
        note=f"launch gaps, less {units.seconds(GRAPH_GAP_S)} each and the copy into the graph's input",
    )


def _batches(step: Step) -> tuple[float, float]:
    """How many shapes batches come in, one where nobody looked, and the share of the most frequent one."""
    known = step.settings
    shapes = number(step, "distinct_shapes") if "distinct_shapes" in known else 1.0
    return shapes, number(step, "usual_shape_share") if "usual_shape_share" in known else 0.0


def _is_obstacle(step: Step, sync: Sync) -> bool:
    """Whether the step's own work asks for the wait: not the arrival of its input, nor a bare synchronisation."""
    if sync.call is None or kind_of(step, sync) != "H6":
        return False
    launched_s = {launch.correlation: launch.start_s for launch in step.launches}
    for kernel in step.kernels:
        if "HtoD" in kernel.activity.name and kernel.activity.bytes >= _INPUT_BYTES:
            asked_s = kernel.call.start_s if kernel.call else launched_s.get(kernel.activity.correlation, -1.0)
            if sync.call.start_s <= asked_s <= sync.launch.start_s:
                return False
    return True


@dataclass(frozen=True)
class _LaunchGaps:
    """Indices of the gaps before kernels launched late, and of those before kernels that were queued."""

    late: tuple[int, ...]
    queued: tuple[int, ...]


def _launch_gaps(step: Step, leads: dict[int, float]) -> _LaunchGaps:
    late, queued = [], []
    for index, gap in enumerate(step.gaps):
        after = kernel_after(step, gap)
        lead = leads.get(after.activity.id) if after else None
        if lead is None or gap.cause not in LAUNCH_CAUSES:
            continue
        # launched before the GPU fell idle: it did not wait for the host
        if lead >= max(LATE_S, _end_s(step, gap) - gap.start_s):
            if gap.duration_s <= _QUEUED_GAP_S:
                queued.append(index)
        else:
            late.append(index)
    return _LaunchGaps(tuple(late), tuple(queued))


def _host_spans(step: Step) -> list[tuple[float, float]]:
    """When the host is in an operator or a CUDA call: disjoint stretches, by start."""
    spans: list[tuple[float, float]] = []
    for start_s, end_s in sorted((event.start_s, event.end_s) for event in (*step.calls, *step.launches)):
        if spans and start_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end_s))
        else:
            spans.append((start_s, end_s))
    return spans


def _is_filled(gap: Gap, end_s: float, spans: list[tuple[float, float]]) -> bool:
    """Whether the stretches fill at least half of the gap."""
    first = bisect_left(spans, gap.start_s, key=lambda span: span[1])
    filled_s = 0.0
    for start_s, stop_s in takewhile(lambda span: span[0] < end_s, islice(spans, first, None)):
        filled_s += min(stop_s, end_s) - max(start_s, gap.start_s)
    return filled_s >= (end_s - gap.start_s) / 2


def _end_s(step: Step, gap: Gap) -> float:
    """Where the gap ended in the trace: its duration may have been corrected since."""
    after = kernel_after(step, gap)
    return after.activity.start_s if after else gap.start_s + gap.duration_s
