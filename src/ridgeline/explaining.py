"""Explain a trace, anybody's: read it, attribute it, check that it is whole, and rank what would make its step faster.

Beside a trace NAME.json.gz, NAME.facts.json holds what it cannot say itself: the time of unprofiled steps, the GPU time
by events, clocks and switches. Without them the traced time is the only one, and savings of idle time are bounds.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ridgeline import explainer, units
from ridgeline.attribution import step_of
from ridgeline.cache import cache_path, read_json
from ridgeline.completeness import check
from ridgeline.errors import UsageError
from ridgeline.graph_alignment import matches
from ridgeline.profile_json import read_profile
from ridgeline.profile_plan import Facts, facts_beside, read_facts
from ridgeline.profile_record import Profile, WallTime
from ridgeline.profile_tables import profile_of
from ridgeline.scorecard import scored
from ridgeline.specs import ACCUMULATE, find_spec
from ridgeline.step_span import busiest_device, launches_of, representative
from ridgeline.step_view import Ceilings, Step, Sync
from ridgeline.trace import Device, Trace
from ridgeline.trace_reader import read_trace
from ridgeline.trace_steps import step_windows
from ridgeline.trace_stream import Progress

_STATE = (
    ("SM clock", "sm_clock_mhz", "MHz"),
    ("memory clock", "memory_clock_mhz", "MHz"),
    ("temperature", "temperature_c", "°C"),
    ("power limit", "power_limit_w", "W"),
)
_FRAME = re.compile(r"(?P<folder>.*/)?(?P<file>[^/<]+\.pyx?)\((?P<line>\d+)\): (?P<function>.*)")
# Least part of a graph's kernel time that operators of the same step must have the like of. In the traces of
# tests/fixtures it is 100 % for the same step, 42 % for the same network in another layout, 1 % for another network.
ALIGNED = 0.7
_OTHER_STEP = 0.1  # part of its kernels by which a step may differ from itself, as outside its graph
_SAVED = b'{"schema_version":'  # how `profile_json.write_profile` begins


@dataclass(frozen=True)
class Subject:
    """What a profile is of, and what is known of it beside its trace."""

    name: str
    command: str
    facts: Facts | None = None
    operators: Trace | None = None  # of the same step outside its CUDA graph, as far as anybody knows
    stacks: Trace | None = None  # of the same step with Python frames


def explain(
    path: str | Path,
    *,
    facts: str | Path | None = None,
    operators: str | Path | None = None,
    gpu: str | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> Profile:
    """The profile, with findings, of a trace file, or of a run that was saved.

    facts      what `ridgeline profile` wrote beside its trace; default: NAME.facts.json, where it is there
    operators  a trace of the same step outside its CUDA graph, for the names of the kernels inside
    gpu        whose ceilings count; default: the one that the trace names, which it stays a profile of
    With it comes what the user's scorecard holds of this subject. Raises UsageError for what cannot be read, facts of
    another trace, and operators of another step, which name less than ALIGNED of the graph's kernel time or find no
    graph; EnvironmentUnusable for a trace from which kernels are missing.
    """
    path = Path(path)
    if is_saved_profile(path):
        if (facts, operators, gpu) != (None, None, None):
            raise UsageError(f"{path} is a saved profile, which is explained already: name its trace instead")
        return scored(read_profile(path))
    beside = facts_beside(path)
    known = _facts(Path(facts)) if facts is not None else _facts(beside) if beside.exists() else None
    name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    trace = read_trace(path, progress=progress)
    if known is not None:
        # the name of a file beside the trace says whose facts they are
        _require_facts_of(trace, known, name if facts is not None else "", Path(facts or beside))
    eager = read_trace(operators, progress=progress) if operators is not None else None
    if eager is not None:
        _require_operators_of(trace, eager)
    return scored(explained(trace, Subject(name, command or f"ridgeline explain {path}", known, eager), gpu=gpu))


def explained(trace: Trace, subject: Subject, *, gpu: str | None = None) -> Profile:
    """The profile, with findings, of a trace that was read. Raises EnvironmentUnusable where kernels are missing."""
    facts = subject.facts
    coverage = check(trace, facts.gpu_s if facts else None)
    ceilings = ceilings_of(trace.devices, gpu)
    settings = dict(facts.settings) if facts else {}
    settings["traced_steps"] = str(len(step_windows(trace)))
    if coverage is not None:
        settings["coverage"] = str(coverage)
    step = step_of(
        trace,
        wall_s=facts.wall.median_s if facts else None,
        ceilings=ceilings,
        eager=subject.operators,
        settings=settings,
    )
    if facts and facts.parameters:
        step = replace(step, parameters=facts.parameters)
    stacks = subject.stacks or trace
    if subject.stacks is not None:
        step = with_sources(step, step_of(stacks, ceilings=ceilings))
    step = with_functions(step, stacks)
    own_gpu = _gpu_of(trace.devices)
    profile = profile_of(
        step,
        subject=subject.name,
        command=subject.command,
        environment=dict(facts.environment) if facts else {},
        wall=facts.wall if facts else None,
        coverage=coverage,
        gpu=own_gpu or ("" if ceilings else "unknown GPU"),
    )
    findings, abstentions, remaining_s = explainer.explain(step)
    return replace(profile, findings=findings, abstentions=abstentions, remaining_s=remaining_s)


def is_saved_profile(path: Path) -> bool:
    """Whether the file begins as a saved profile does; False also for one that cannot be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(len(_SAVED)) == _SAVED
    except (OSError, EOFError, zlib.error):  # the reader of traces says what is wrong
        return False


def ceilings_of(devices: Sequence[Device], gpu: str | None) -> Ceilings | None:
    """What the GPU can do: as `ridgeline doctor --measure` found here, else the data sheet.

    None where the trace names a GPU without a data sheet. Raises UsageError for a `gpu` that is none.
    """
    if gpu is None and not devices:
        return None
    try:
        spec = find_spec(gpu) if gpu is not None else find_spec(devices[0].name, sm_count=devices[0].sm_count or None)
    except UsageError:
        if gpu is not None:
            raise
        return None
    measured = _measured(spec.name)
    spec = spec.with_measured(measured) if measured else spec
    return Ceilings(
        gpu=spec.name,
        sm_count=spec.sm_count,
        bandwidth=spec.bandwidth,
        peaks={pipe: peak.rate for pipe, peak in spec.peaks.items()},
        l2_bytes=spec.l2_bytes,
        measured=bool(measured),
    )


def kernels_of_step(trace: Trace) -> int:
    """How many kernels, copies and fills the trace's representative step has; 0 without any."""
    span = representative(trace, busiest_device(trace), launches_of(trace))
    return len(span.activities) if span else 0


def _require_facts_of(trace: Trace, facts: Facts, name: str, path: Path) -> None:
    """Raise UsageError for facts of another trace: by `name`, "" where it does not count, by GPU, by kernels a step."""
    if name and facts.name and facts.name != name:
        raise UsageError(
            f"{path} has the facts of {facts.name!r} and the trace is {name!r}: name its own facts, or leave --facts "
            f"out"
        )
    gpu = _gpu_of(trace.devices)
    if gpu and facts.gpu and gpu.casefold() != _gpu_named(facts.gpu).casefold():
        raise UsageError(
            f"{path} has the facts of a step on {facts.gpu} and {trace.path} is from {gpu}: name its own facts"
        )
    count = kernels_of_step(trace)
    if facts.kernels and abs(count - facts.kernels) > _OTHER_STEP * facts.kernels:
        raise UsageError(
            f"{path} has the facts of a step of {facts.kernels} kernels and that of {trace.path} has {count}: name its "
            f"own facts"
        )


def _require_operators_of(trace: Trace, eager: Trace) -> None:
    """Raise UsageError where there is nothing to name in the trace, or `eager` is of another step."""
    kernels = [kernel for kernel in step_of(trace, eager=eager).kernels if kernel.in_graph]
    if not kernels:
        raise UsageError(f"{trace.path} holds no CUDA graph, whose kernels --operators would name: leave it out")
    total_s = sum(kernel.seconds for kernel in kernels)
    share = sum(kernel.seconds for kernel in kernels if kernel.call is not None) / total_s if total_s else 1.0
    if share < ALIGNED:
        raise UsageError(
            f"{eager.path} is of another step than {trace.path}: it has the like of {units.percent(share)} of the "
            f"graph's kernel time, and {units.percent(ALIGNED, 0)} is the least; trace the same step outside its graph"
        )


def _gpu_of(devices: Sequence[Device]) -> str:
    """The GPU that a trace names, spelled as its data sheet where there is one; "" where it names none."""
    return _gpu_named(devices[0].name, devices[0].sm_count or None) if devices else ""


def _gpu_named(name: str, sm_count: int | None = None) -> str:
    try:
        return find_spec(name, sm_count=sm_count).name
    except UsageError:
        return name


def with_sources(step: Step, stacked: Step) -> Step:
    """The step with the source lines and modules of the same step traced with stacks, where it lacks them."""
    kernels = list(step.kernels)
    for ours, theirs in matches(step.kernels, stacked.kernels):
        kernel, like = kernels[ours], stacked.kernels[theirs]
        kernels[ours] = replace(kernel, source=kernel.source or like.source, module=kernel.module or like.module)
    syncs = list(step.syncs)
    words = [[_wait(sync) for sync in each.syncs] for each in (step, stacked)]
    for block in SequenceMatcher(None, *words, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            sync = syncs[block.a + k]
            syncs[block.a + k] = replace(sync, source=sync.source or stacked.syncs[block.b + k].source)
    return replace(step, kernels=tuple(kernels), syncs=tuple(syncs))


def with_functions(step: Step, stacks: Trace) -> Step:
    """The step with its lines told as what they are, the first ones of functions: "step (train.py:115)"."""
    functions: dict[str, str] = {}
    for frame in stacks.frames:
        if found := _FRAME.fullmatch(frame.name):
            function = f"{found['function']} ({found['file']}:{found['line']})"
            # lines of the step name a file by its path, of one outside the working folder by its last part
            functions[f"{found['folder'] or ''}{found['file']}:{found['line']}"] = function
            functions.setdefault(f"{found['file']}:{found['line']}", function)
    kernels = (replace(kernel, source=functions.get(kernel.source, kernel.source)) for kernel in step.kernels)
    syncs = (replace(sync, source=functions.get(sync.source, sync.source)) for sync in step.syncs)
    return replace(step, kernels=tuple(kernels), syncs=tuple(syncs))


def _wait(sync: Sync) -> tuple[str, str, str]:
    return sync.launch.name, sync.call.name if sync.call else "", sync.under


def _measured(gpu: str) -> dict[str, float]:
    """Peaks that were measured on this GPU and stored by `ceilings`, which loads torch; {} without any."""
    stored = read_json(cache_path("ceilings", gpu))
    peaks = stored.get("peaks") if isinstance(stored, dict) else None
    if not isinstance(peaks, dict):
        return {}
    known = {*ACCUMULATE, "bandwidth"}
    return {
        name: float(value)
        for name, value in peaks.items()
        if name in known and isinstance(value, float | int) and math.isfinite(value) and value > 0
    }


def _facts(path: Path) -> Facts:
    """What is written there: by `ridgeline profile`, or by benchmarks/traces.py, which times one step at a time."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return read_facts(path)  # which says what is wrong
    if not isinstance(data, dict) or "alone" not in data:
        return read_facts(path)
    try:
        return _facts_of_one_step(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} holds no facts of a profile ({error!r}): leave --facts out") from error


def _facts_of_one_step(data: Mapping[str, Any]) -> Facts:
    alone, state = data["alone"], data["state"] or {}
    words = {"torch": data["torch"], "cuDNN": data["cudnn"], "driver": state.get("driver")}
    for name, key, unit in _STATE:
        words[name] = f"{state[key]:g} {unit}" if state.get(key) is not None else None
    clocks = {name: state.get(name) for name in ("sm_clock_mhz", "sm_clock_max_mhz")}
    settings = {"torch": data["torch"], **clocks, **data["settings"]}
    return Facts(
        wall=WallTime(*(float(alone[name]) for name in ("median_s", "low_s", "high_s")), n=int(alone["n"])),
        seen=int(alone["n"]),
        first=0,
        complete=True,
        gpu=str(data["gpu"]),
        name=str(data.get("name", "")),
        gpu_s=float(data["in_a_row_s"]),
        settings={name: str(value) for name, value in settings.items() if value is not None},
        environment={name: str(value) for name, value in words.items() if value is not None},
    )
