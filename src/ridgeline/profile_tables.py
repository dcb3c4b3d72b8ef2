"""A `Step` as tables: kernels by name and by (name, shapes), copies, waits, waterfall, timeline, roofline points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, pstdev

from ridgeline import units
from ridgeline.kernel_costs import pipe_of
from ridgeline.kernel_names import short_name
from ridgeline.overlap import alone_and_shared
from ridgeline.profile_record import UNTRACED, Bar, CopyRow, KernelRow, Lane, Point, Profile, SyncRow, WallTime
from ridgeline.step_edit import unprofiled
from ridgeline.step_view import CAUSES, Ceilings, Kernel, Step

MOST_LANES = 3000
IDLE_STREAM = -1  # of the lanes that are gaps
_IDLE_BARS = {
    "loader": "loader",
    "sync": "sync bubble",
    "launch": "launch gap",
    "copy": "blocking copy",
    "compile": "compilation",
    "unknown": "idle, cause unknown",
}
_ABOVE_ROOF = 1.05  # of its roofline time a kernel cannot take less by measurement error alone
_ROUNDING_S = 1e-9
_TENSOR_CORE = {True: "yes", False: "no", None: "unknown"}


def profile_of(
    step: Step,
    *,
    subject: str,
    command: str,
    environment: Mapping[str, str],
    wall: WallTime | None,
    coverage: float | None,
    gpu: str = "",
) -> Profile:
    """Everything a report shows of a step but findings, which `explain` adds.

    gpu   that the trace is from; default: that of the ceilings
    `extra` names kernels above their roof ("above_roof"), what no rule of names knows ("unknown_kernels"), and that the
    ceilings are another GPU's ("caution").
    """
    ceilings = step.ceilings
    gpu = gpu or (ceilings.gpu if ceilings else "")
    ceilings_gpu = ceilings.gpu if ceilings and ceilings.gpu != gpu else ""
    truth = unprofiled(step)  # as rules see it, so that their shares and these are of one step
    busy_s = step.busy_s
    worked_s = sum(kernel.seconds for kernel in step.kernels)
    rows = kernel_rows(step, lambda kernel: (kernel.activity.name, kernel.shapes))
    idle = dict(_totals((gap.cause, gap.duration_s) for gap in truth.gaps))
    return Profile(
        subject=subject,
        command=command,
        gpu=gpu,
        environment=dict(environment),
        wall=wall,
        traced_step_s=step.duration_s,
        busy_s=busy_s,
        idle={cause: idle[cause] for cause in CAUSES if cause in idle},
        overlap_s=max(worked_s - busy_s, 0.0),
        kernels=rows,
        by_name=tuple(replace(row, shapes="") for row in kernel_rows(step, lambda kernel: kernel.activity.name)),
        copies=copy_rows(step),
        syncs=sync_rows(truth),
        waterfall=waterfall(truth),
        timeline=timeline(step),
        points=points(step),
        peaks={**ceilings.peaks, "bandwidth": ceilings.bandwidth} if ceilings else {},
        peaks_measured=bool(ceilings and ceilings.measured),
        attributed_share=_share(step.kernels, lambda kernel: bool(kernel.op)),
        module_share=_share(step.kernels, lambda kernel: bool(kernel.module)),
        coverage=coverage,
        floor_s=_floor_s(step),
        findings=(),
        abstentions=(),
        extra=_notes(step, rows, gpu, ceilings_gpu),
        ceilings_gpu=ceilings_gpu,
    )


def kernel_rows(step: Step, key: Callable[[Kernel], object]) -> tuple[KernelRow, ...]:
    """Kernels, copies and fills grouped by `key`, the largest total first."""
    groups: defaultdict[object, list[Kernel]] = defaultdict(list)
    for kernel in step.kernels:
        groups[key(kernel)].append(kernel)
    rows = (_row(kernels, step.ceilings) for kernels in groups.values())
    return tuple(sorted(rows, key=lambda row: (-row.total_s, row.name, row.shapes)))


def copy_rows(step: Step) -> tuple[CopyRow, ...]:
    """Copies and fills by name, the largest total first."""
    groups: defaultdict[str, list[Kernel]] = defaultdict(list)
    for kernel in step.kernels:
        if kernel.known.category in ("memcpy", "memset"):
            groups[kernel.activity.name].append(kernel)
    rows = (
        CopyRow(
            name=name,
            count=len(kernels),
            total_s=_seconds(kernels),
            bytes=sum(kernel.activity.bytes for kernel in kernels),
            exposed_s=sum(kernel.exposed_s for kernel in kernels),
        )
        for name, kernels in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.total_s, row.name)))


def sync_rows(step: Step) -> tuple[SyncRow, ...]:
    """Waits of the host by place, the largest bubble first."""
    groups: defaultdict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for sync in step.syncs:
        call = sync.call.name if sync.call else sync.launch.name
        groups[call, sync.source, sync.under].append((sync.waited_s, sync.bubble_s))
    rows = (
        SyncRow(call, source, under, len(waits), sum(w for w, _ in waits), sum(b for _, b in waits))
        for (call, source, under), waits in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.bubble_s, -row.waited_s, row.call, row.source)))


def waterfall(step: Step) -> tuple[Bar, ...]:
    """Where the step goes: work by category, time shared evenly where kernels overlap, then idle time by cause.

    What the unprofiled step takes beyond the traced one stands last.
    """
    _, shared = alone_and_shared([(kernel.activity.start_s, kernel.activity.end_s) for kernel in step.kernels])
    categories = (kernel.known.category for kernel in step.kernels)
    work = [Bar(name, seconds, idle=False) for name, seconds in _totals(zip(categories, shared, strict=True))]
    idle = [
        Bar(n, seconds, idle=True) for n, seconds in _totals((_IDLE_BARS[g.cause], g.duration_s) for g in step.gaps)
    ]
    beyond_s = (step.wall_s or 0.0) - step.duration_s
    untraced = [Bar(UNTRACED, beyond_s, idle=True)] if beyond_s > _ROUNDING_S else []
    return (*work, *idle, *untraced)


def timeline(step: Step) -> tuple[Lane, ...]:
    """Activities and gaps by start, at most MOST_LANES: what is too short to be seen merges with its neighbours."""
    lanes = [
        Lane(
            start_s=kernel.activity.start_s - step.start_s,
            duration_s=kernel.seconds,
            stream=kernel.activity.stream,
            name=kernel.activity.name,
            category=kernel.known.category,
        )
        for kernel in step.kernels
    ]
    lanes += [
        Lane(gap.start_s - step.start_s, gap.duration_s, IDLE_STREAM, _IDLE_BARS[gap.cause], gap.cause)
        for gap in step.gaps
    ]
    longest_s = step.duration_s / (100 * MOST_LANES)
    while len(lanes) > MOST_LANES:
        lanes = _merged(lanes, longest_s)
        longest_s *= 2
    return tuple(sorted(lanes, key=lambda lane: (lane.start_s, lane.stream)))


def points(step: Step) -> tuple[Point, ...]:
    """Groups of kernels, by name and shapes, whose work is known."""
    groups: defaultdict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in step.kernels:
        if kernel.flops and kernel.bytes:
            groups[kernel.activity.name, kernel.shapes, pipe_of(kernel.known)].append(kernel)
    found = (
        Point(
            name=f"{name} {shapes}".strip(),
            flops=sum(kernel.flops or 0.0 for kernel in kernels),
            bytes=sum(kernel.bytes or 0.0 for kernel in kernels),
            seconds=_seconds(kernels),
            pipe=pipe,
        )
        for (name, shapes, pipe), kernels in groups.items()
    )
    return tuple(sorted(found, key=lambda point: (-point.seconds, point.name)))


def _row(kernels: Sequence[Kernel], ceilings: Ceilings | None) -> KernelRow:
    times = [kernel.seconds for kernel in kernels]
    shapes = {kernel.shapes for kernel in kernels}
    first = kernels[0]
    worked = [kernel for kernel in kernels if kernel.flops is not None and kernel.bytes]
    flops = sum(kernel.flops or 0.0 for kernel in worked)
    moved = sum(kernel.bytes or 0.0 for kernel in worked)
    roofed = [kernel for kernel in kernels if kernel.floor_s is not None and kernel.seconds]
    return KernelRow(
        name=first.activity.name,
        shapes=first.shapes if len(shapes) == 1 else "",
        count=len(kernels),
        total_s=sum(times),
        mean_s=fmean(times),
        median_s=median(times),
        min_s=min(times),
        max_s=max(times),
        sigma_s=pstdev(times),
        grid=_one({"x".join(map(str, kernel.activity.grid)) for kernel in kernels}, "various"),
        category=first.known.category,
        dtype=_one({kernel.known.dtype for kernel in kernels}, "various"),
        layout=_one({kernel.known.layout for kernel in kernels}, "various"),
        tensor_core=_one({_TENSOR_CORE[kernel.known.tensor_core] for kernel in kernels}, "unknown"),
        phase=_most(kernels, lambda kernel: kernel.phase),
        op=_most(kernels, lambda kernel: kernel.op),
        module=_most(kernels, lambda kernel: kernel.module),
        intensity=flops / moved if moved else None,
        bound=_bound(worked, ceilings),
        of_roof=sum(k.floor_s or 0.0 for k in roofed) / _seconds(roofed) if roofed else None,
        exposed_s=sum(kernel.exposed_s for kernel in kernels),
    )


def _bound(kernels: Iterable[Kernel], ceilings: Ceilings | None) -> str:
    """What limits most of the kernels' roofline time."""
    if ceilings is None:
        return ""
    roofs = [(kernel.floor_s, (kernel.bytes or 0.0) / ceilings.bandwidth) for kernel in kernels]
    votes = _totals(("memory" if floor <= memory else "compute", floor) for floor, memory in roofs if floor is not None)
    return votes[0][0] if votes else ""


def _most(kernels: Iterable[Kernel], of: Callable[[Kernel], str]) -> str:
    """The value that has most of the time, "" where none has any."""
    named = _totals((of(kernel), kernel.seconds) for kernel in kernels if of(kernel))
    return named[0][0] if named else ""


def _totals(pairs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sums by name, the largest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in pairs:
        sums[name] += value
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))


def _one(values: set[str], otherwise: str) -> str:
    return values.pop() if len(values) == 1 else otherwise


def _seconds(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.seconds for kernel in kernels)


def _share(kernels: Sequence[Kernel], belongs: Callable[[Kernel], bool]) -> float:
    total_s = _seconds(kernels)
    return _seconds(kernel for kernel in kernels if belongs(kernel)) / total_s if total_s else 0.0


def _floor_s(step: Step) -> float | None:
    """Roofline time of all kernels, those without a formula at their own time; None without ceilings."""
    if step.ceilings is None:
        return None
    return sum(kernel.seconds if kernel.floor_s is None else kernel.floor_s for kernel in step.kernels)


def _notes(step: Step, rows: Sequence[KernelRow], gpu: str, ceilings_gpu: str) -> dict[str, str]:
    notes = _caution(gpu, ceilings_gpu)
    above = [row for row in rows if row.of_roof is not None and row.of_roof > _ABOVE_ROOF]
    if above and not ceilings_gpu:  # above another GPU's roof nothing needs an explanation
        shown = "; ".join(
            f"{short_name(row.name)} ({row.shapes}) at {row.of_roof:.2f} of its roof" for row in above[:10]
        )
        notes["above_roof"] = (
            f"{shown}; likely causes: data still in L2, tensors read in part, a Winograd kernel, or a narrower dtype"
            " than the operands show"
        )
    unknown = [kernel for kernel in step.kernels if kernel.known.category == "unknown"]
    if unknown:
        share = units.percent(_share(step.kernels, lambda kernel: kernel.known.category == "unknown"))
        names = sorted({kernel.activity.name for kernel in unknown})
        notes["unknown_kernels"] = f"{share} of kernel time: {', '.join(map(short_name, names[:10]))}"
    return notes


def _caution(gpu: str, ceilings_gpu: str) -> dict[str, str]:
    if not ceilings_gpu:
        return {}
    said = (
        f"the trace is from {gpu} and the ceilings are those of {ceilings_gpu}: shares of the roof, and savings"
        " reckoned by it, hold the times of one GPU against what another one can do"
    )
    return {"caution": said}


def _merged(lanes: Sequence[Lane], longest_s: float) -> list[Lane]:
    """Neighbours of one stream as one lane, named by the longer, as long as that stays below `longest_s`."""
    merged: list[Lane] = []
    for lane in sorted(lanes, key=lambda lane: (lane.stream, lane.start_s)):
        last = merged[-1] if merged else None
        if last and last.stream == lane.stream:
            end_s = max(last.start_s + last.duration_s, lane.start_s + lane.duration_s)
            if end_s - last.start_s < longest_s:
                longer = last if last.duration_s >= lane.duration_s else lane
                merged[-1] = replace(longer, start_s=last.start_s, duration_s=end_s - last.start_s)
                continue
        merged.append(lane)
    return merged
