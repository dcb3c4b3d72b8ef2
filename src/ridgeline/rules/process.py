"""H12, H13, H15, W2-W6: what a profile says of the whole process: warm-up, shapes, cores, clocks, memory, completeness.

Most of it stands in no single step, so these rules read `Step.settings`, and abstain where nobody wrote it down. None
promises seconds of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, pstdev

from ridgeline import units
from ridgeline.finding import Abstention, Finding
from ridgeline.rules._rule import LAUNCHES, MOST_EVIDENCE, gap_evidence, gap_total, gaps_of, notable, numbers
from ridgeline.step_view import Step

COVERED = (0.95, 1.02)  # kernel time over event-timed GPU time, within which a trace is whole
_LOADING = ("cuModuleLoad", "cuLibraryLoad", "cuLinkCreate", "Runtime Triggered Module Loading")
_FULL_CLOCK = 0.93  # of the highest: GPUs hold a little less under load
_SPREAD = 1.0  # standard deviation of launch times over their mean, from which on the host is disturbed
_SEVERAL = 2  # graphs of a step
_ROOMY = 0.5  # part of memory in use, below which a larger batch is worth trying
_VALIDATION = 0.2  # part of the run, from which on validation is worth a thought
_NO_THROTTLE = ("", "none", "not active")


def warming_up(step: Step) -> Iterable[Finding | Abstention]:
    """H12: kernels are compiled or loaded within the traced step.

    Holds for any step; it costs nothing once the step is warm, so no saving is given.
    """
    gaps = gaps_of(step, "compile")
    loads = [launch for launch in step.launches if launch.name.startswith(_LOADING)]
    seconds = max(gap_total(step, gaps), sum(launch.duration_s for launch in loads))
    if not notable(step, seconds):
        return
    ids = (*gap_evidence(step, gaps), *(launch.id for launch in loads))
    yield Finding(
        rule="H12",
        title=f"compiling and loading kernels took {units.seconds(seconds)} of the traced step",
        fix="Profile later steps; to start faster, keep compiled kernels in a cache between runs.",
        verb="ridgeline.tune",
        saving=None,
        effort="S",
        confidence="measured",
        wrong_if="new kernels keep coming: then see H13",
        evidence=tuple(dict.fromkeys(ids))[:MOST_EVIDENCE],
        note="start-up time: nothing of it is left in a warm step",
    )


def recompiles(step: Step) -> Iterable[Finding | Abstention]:
    """H13: compiled code is compiled again while the run goes on, mostly for new shapes.

    Holds for runs that were watched for at least some hundred steps; on long runs the cost may be paid off.
    """
    names = ("recompiles", "recompile_s", "steps")
    known = yield from numbers("H13", step, names, remedy="profile a run of more steps under `ridgeline profile`")
    if not known or known[0] < 1:
        return
    count, seconds, steps = known
    yield Finding(
        rule="H13",
        title=f"{count:.0f} recompilations in {steps:.0f} steps took {units.seconds(seconds)},"
        f" {units.seconds(seconds / max(steps, 1.0))} a step",
        fix="Drop the short last batch, pad or bucket shapes, or mark the changing dimension as dynamic.",
        verb="",
        saving=None,  # these seconds lie in other steps than the median one
        effort="S",
        confidence="measured",
        wrong_if="the run is so long that all shapes are met early on",
        evidence=(),
        note="spread over the steps watched; none of it lies in a typical step",
    )


def disturbed_host(step: Step) -> Iterable[Finding | Abstention]:
    """H15: more threads than cores, and launches that take very different times.

    Holds where no other process uses the cores; only a run with fewer threads tells what it costs.
    """
    known = yield from numbers("H15", step, ("cpus", "threads"), remedy="take the profile with `ridgeline profile`")
    durations = [launch.duration_s for launch in step.launches if launch.name in LAUNCHES]
    if not known or len(durations) < 2:
        return
    cpus, threads = known
    workers = float(step.settings.get("loader_workers", "0") or 0)
    spread = pstdev(durations) / mean(durations)
    if threads + workers <= cpus or spread <= _SPREAD:
        return
    longest = sorted((launch for launch in step.launches if launch.name in LAUNCHES), key=lambda la: -la.duration_s)
    yield Finding(
        rule="H15",
        title=f"{threads:.0f} threads and {workers:.0f} loader workers share {cpus:.0f} cores, and launch times spread"
        f" {spread:.1f} times their mean",
        fix="Lower OMP_NUM_THREADS or the number of workers, and time the step again.",
        verb="",
        saving=None,
        effort="S",
        confidence="unknown",
        wrong_if="the spread comes from the profiler or from other processes",
        evidence=tuple(launch.id for launch in longest[:MOST_EVIDENCE]),
    )


def many_graphs(step: Step) -> Iterable[Finding | Abstention]:
    """W2: several CUDA graphs replayed in one step, with memory reserved well beyond what is in use.

    Holds for graphs that each keep a pool of their own; costs memory, not time.
    """
    graphs = sum("GraphLaunch" in launch.name for launch in step.launches)
    if graphs < _SEVERAL:
        return
    names = ("memory_reserved_bytes", "memory_allocated_bytes")
    known = yield from numbers("W2", step, names, remedy="take the profile with `ridgeline profile`")
    if not known:
        return
    reserved, allocated = known
    if reserved <= 2 * allocated:
        return
    yield Finding(
        rule="W2",
        title=f"{graphs} CUDA graphs a step, and {units.nbytes(reserved)} of memory reserved, of which"
        f" {units.nbytes(allocated)} are in use",
        fix="Let the graphs share one memory pool, and bucket the shapes.",
        verb="ridgeline.compile_step" if step.trained else "ridgeline.compile",
        saving=None,
        effort="M",
        confidence="measured",
        wrong_if="the graphs replay interleaved, so that they may not share memory",
        evidence=(),
        note="memory, not time",
    )


def low_clocks(step: Step) -> Iterable[Finding | Abstention]:
    """W3: the GPU ran below its clock, for heat or power.

    Holds for clocks read under load; whatever was timed in that state was timed on a slower GPU.
    """
    names = ("sm_clock_mhz", "sm_clock_max_mhz")
    remedy = "take the profile with `ridgeline profile` where nvidia-smi shows clocks, of enough --steps for a reading"
    known = yield from numbers("W3", step, names, remedy=remedy)
    if not known:
        return
    clock, most = known
    reasons = step.settings.get("throttle_reasons", "")
    throttled = reasons.strip().lower() not in _NO_THROTTLE
    if clock >= _FULL_CLOCK * most and not throttled:
        return
    why = f" ({reasons})" if throttled else ""
    yield Finding(
        rule="W3",
        title=f"the GPU ran at {clock:.0f} MHz of {most:.0f} MHz{why}",
        fix="Let it cool, or lift its power limit, and take the profile again; compare only runs at equal clocks.",
        verb="ridgeline doctor",
        saving=None,
        effort="S",
        confidence="measured",
        wrong_if="the clock was read while the GPU was idle",
        evidence=(),
    )


def memory_headroom(step: Step) -> Iterable[Finding | Abstention]:
    """W4: a training step leaves half of the memory unused, so a larger batch may use the GPU better.

    Holds for training alone; only two more runs at other batches tell what it brings.
    """
    if not step.trained:
        return
    names = ("memory_peak_bytes", "memory_total_bytes")
    known = yield from numbers("W4", step, names, remedy="take the profile with `ridgeline profile`")
    if not known:
        return
    peak, total = known
    if peak >= _ROOMY * total:
        return
    yield Finding(
        rule="W4",
        title=f"the step uses {units.nbytes(peak)} of {units.nbytes(total)} memory",
        fix="Time the step at two larger batches; if the time per image falls, scale the learning rate and use one.",
        verb="",
        saving=None,
        effort="M",
        confidence="unknown",
        wrong_if="the GPU is already busy with full waves, or the batch may not change for accuracy",
        evidence=(),
    )


def validation_share(step: Step) -> Iterable[Finding | Abstention]:
    """W5: validation takes a large part of the run.

    Holds for training runs that were profiled to their end; of a few steps nobody knows how many are in an epoch.
    """
    if not step.trained:
        return
    if step.settings.get("validations") == "0":
        yield Abstention(
            "W5", "no module went into eval mode between steps: validation without model.eval() is not seen"
        )
        return
    remedy = "a few steps do not tell; profile the script to its end with `ridgeline profile --to-end`"
    known = yield from numbers("W5", step, ("validation_share",), remedy=remedy)
    if not known or known[0] < _VALIDATION:
        return
    yield Finding(
        rule="W5",
        title=f"validation takes {units.percent(known[0])} of the run",
        fix="Validate less often, in larger batches, and on a compiled model.",
        verb="ridgeline.compile",
        saving=None,
        effort="S",
        confidence="measured",
        wrong_if="early stopping needs every validation, or what ran in eval mode was none",
        evidence=(),
    )


def incomplete(step: Step) -> Iterable[Finding | Abstention]:
    """W6: the trace does not hold all of the GPU's work, so that nothing else may be concluded from it.

    Holds wherever the GPU's time was also taken by events.
    """
    known = yield from numbers("W6", step, ("coverage",), remedy="take the profile with `ridgeline profile`")
    if not known or COVERED[0] <= known[0] <= COVERED[1]:
        return
    yield Finding(
        rule="W6",
        title=f"the trace holds {units.percent(known[0])} of the GPU's time",
        fix="Profile again: no profiler session before a graph is captured, and a synchronised start and end.",
        verb="ridgeline profile",
        saving=None,
        effort="S",
        confidence="measured",
        wrong_if="another process used the GPU while it was timed",
        evidence=(),
    )
