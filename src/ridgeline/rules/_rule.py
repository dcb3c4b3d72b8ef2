"""What a rule is, and what rules share: savings within bounds, the edits behind them, evidence, what follows a gap.

A rule is a pure function of a Step: it yields a Finding where its signal is there, an Abstention where it cannot look,
nothing where all is well. Its docstring says when its estimate holds. The durations in the step that rules are given
are those of the unprofiled step (`explain` takes the profiler's own time out of the gaps first), so they need not
correct anything.

`Step.settings` that rules read (text; a missing one means "nobody wrote it down"):

    torch                     version, "2.11.0+cu128"
    recompiles                recompilations of compiled code while the run was watched;  recompile_s, their seconds
    steps                     steps that the run was watched for
    distinct_shapes           of batches that a DataLoader gave to the steps watched;  usual_shape_share, the share of
                              these steps whose batch had the most frequent one
    memory_reserved_bytes     of torch's allocator;  memory_allocated_bytes, of these in use
    memory_peak_bytes         most memory in use;  memory_total_bytes, what the GPU has
    sm_clock_mhz              under load;  sm_clock_max_mhz, the most it may
    throttle_reasons          why the clock was held down under load, "" where it was not
    cpus                      cores that the process may use;  threads, of torch;  loader_workers, of a DataLoader
    validations               how often the run left its steps to validate, where it was seen to its end
    validation_share          part of that run's time that validation took, 0 to 1; missing where there was none
    traced_steps              steps in the trace
    coverage                  kernel time of the trace over event-timed GPU time
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from statistics import median

from ridgeline.errors import UsageError
from ridgeline.finding import Abstention, Edit, Finding, Saving
from ridgeline.step_view import Gap, Kernel, Step, Sync

Rule = Callable[[Step], Iterable[Finding | Abstention]]

NOTABLE = 0.005  # part of a step below which nothing is said: repeated timings differ by about as much
INPUT_BOUND = 0.5  # part of a step spent waiting for the loader from which on nothing else sets its pace
MOST_EVIDENCE = 20
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
LATE_S = 10e-6  # a kernel that starts sooner after its launch had nothing queued before it
LAUNCH_CAUSES = ("launch", "unknown")  # of gaps that a late host may have made
STALL_S = 200e-6  # a gap that long is no launch
TYPICAL_LAUNCH_S = 5e-6  # of an eager launch, where the trace has none to measure
GRAPH_GAP_S = 1e-6  # between dependent kernels of a CUDA graph


def notable(step: Step, seconds: float) -> bool:
    """Whether so much of the step is worth a finding: of the step without its launch gaps, which a graph closes.

    What the host's lateness hides today is the step once that is mended.
    """
    launch_s = gap_total(step, gaps_of(step, *LAUNCH_CAUSES))
    return seconds > 0.0 and seconds >= NOTABLE * (step.duration_s - launch_s)


def part_of_step(step: Step, seconds: float) -> float:
    """Of the unprofiled step, as all shares that are told; of the traced one where nobody timed it."""
    return seconds / (step.wall_s or step.duration_s)


def saving(low_s: float, mid_s: float, high_s: float, *, cap_s: float) -> Saving:
    """The interval, each end capped by `cap_s`: the time in which nothing else runs."""
    low_s, mid_s, high_s = (max(0.0, min(value_s, cap_s)) for value_s in (low_s, mid_s, high_s))
    return Saving(min(low_s, mid_s), mid_s, max(mid_s, high_s))


def seconds_of(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.seconds for kernel in kernels)


def exposed_of(kernels: Iterable[Kernel]) -> float:
    """What removing the kernels saves at most."""
    return sum(kernel.exposed_s for kernel in kernels)


def evidence(kernels: Iterable[Kernel]) -> tuple[int, ...]:
    """Ids of the longest kernels, the longest first."""
    ordered = sorted(kernels, key=lambda kernel: (-kernel.seconds, kernel.activity.id))
    return tuple(kernel.activity.id for kernel in ordered[:MOST_EVIDENCE])


def gap_evidence(step: Step, gaps: Iterable[int]) -> tuple[int, ...]:
    """Ids of the events that explain the gaps, those of the longest gap first; without such, of the kernels after."""
    ids: dict[int, None] = {}
    for index in sorted(gaps, key=lambda index: (-step.gaps[index].duration_s, index))[:MOST_EVIDENCE]:
        after = kernel_after(step, step.gaps[index])
        ids |= dict.fromkeys(step.gaps[index].evidence or ((after.activity.id,) if after else ()))
    return tuple(ids)[:MOST_EVIDENCE]


def removed(kernels: Iterable[Kernel]) -> Edit:
    """The step without the kernels."""
    return Edit(seconds={kernel.activity.id: 0.0 for kernel in kernels})


def shortened(seconds: Mapping[int, float]) -> Edit:
    """The step with the activities of these ids taking so long instead."""
    return Edit(seconds=dict(seconds))


def closed(step: Step, gaps: Iterable[int], saved_s: float) -> Edit:
    """The step with `saved_s` taken from the gaps together, from each in proportion to its length."""
    gaps = tuple(gaps)
    total_s = gap_total(step, gaps)
    left = 1.0 - min(saved_s / total_s, 1.0) if total_s else 1.0
    return Edit(gaps={index: step.gaps[index].duration_s * left for index in gaps})


def input_bound(step: Step) -> bool:
    """Whether the loader sets the pace of the step."""
    return gap_total(step, gaps_of(step, "loader")) >= INPUT_BOUND * step.duration_s


def gap_total(step: Step, gaps: Iterable[int]) -> float:
    return sum(step.gaps[index].duration_s for index in gaps)


def gaps_of(step: Step, *causes: str) -> tuple[int, ...]:
    """Indices of the gaps with one of these causes."""
    return tuple(index for index, gap in enumerate(step.gaps) if gap.cause in causes)


def kernel_after(step: Step, gap: Gap) -> Kernel | None:
    """The first kernel to start at the end of the gap; None at the end of the step."""
    position = bisect_left(step.kernels, gap.start_s, key=lambda kernel: kernel.activity.start_s)
    return step.kernels[position] if position < len(step.kernels) else None


def bubble_of(step: Step, sync: Sync) -> int | None:
    """Index of the gap in which the GPU idled after the wait; None where it did not."""
    ended_s = sync.launch.end_s
    for index, gap in enumerate(step.gaps):
        after = kernel_after(step, gap)
        end_s = after.activity.start_s if after else gap.start_s + gap.duration_s
        if sync.launch.id in gap.evidence or gap.start_s <= ended_s < end_s:
            return index
    return None


def launch_cost_s(step: Step) -> float:
    """Median time that the host spends in one launch."""
    durations = [launch.duration_s for launch in step.launches if launch.name in LAUNCHES]
    return median(durations) if durations else TYPICAL_LAUNCH_S


def lead_s(step: Step) -> dict[int, float]:
    """By activity id: how long before the activity's start its launch was over; without those of CUDA graphs."""
    ended_s = {launch.correlation: launch.end_s for launch in step.launches}
    return {
        kernel.activity.id: kernel.activity.start_s - ended_s[kernel.activity.correlation]
        for kernel in step.kernels
        if not kernel.in_graph and kernel.activity.correlation in ended_s
    }


def without(rule: str, step: Step, option: str) -> Iterable[Abstention]:
    """The abstention of a rule whose option the trace was not recorded with; nothing where it was."""
    if option not in step.options:
        yield Abstention(rule, f"the trace was recorded without {option}")


def unset(rule: str, step: Step, names: Sequence[str], *, remedy: str) -> Iterable[Abstention]:
    """The abstention of a rule whose settings nobody wrote down; nothing where they are there."""
    missing = [name for name in names if name not in step.settings]
    if missing:
        yield Abstention(rule, f"the profile does not say {' and '.join(missing)}: {remedy}")


def numbers(rule: str, step: Step, names: Sequence[str], *, remedy: str) -> Generator[Abstention, None, list[float]]:
    """`yield from` it for settings as numbers, in order; where some are missing it abstains, and there are none."""
    missing = tuple(unset(rule, step, names, remedy=remedy))
    yield from missing
    return [] if missing else [number(step, name) for name in names]


def number(step: Step, name: str) -> float:
    """A setting as a number. Raises UsageError where it is none."""
    text = step.settings[name]
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"settings: {name} must be a number, got {text!r}; profile again") from error


def plural(count: int, noun: str) -> str:
    """`plural(2, "copy") == "2 copies"`."""
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun if count == 1 else many}"
