"""profile: time a step, trace it, explain it. A command or target runs in processes of its own, a callable in this one.

Times come first and from a process that never profiled: one that did may stay slow.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline import profile_loop
from ridgeline.errors import EnvironmentUnusable, NotEngaged, UsageError
from ridgeline.explaining import Subject, explained, kernels_of_step
from ridgeline.profile_json import write_profile
from ridgeline.profile_plan import (
    LONGEST_SETTLING,
    PROFILER_WARMUP,
    TRACE,
    Facts,
    Plan,
    facts_beside,
    read_facts,
    result_path,
    write_record,
)
from ridgeline.profile_record import Profile
from ridgeline.profile_run import CommandFailed, Say, fitted, time_steps, trace_steps
from ridgeline.profile_steps import Recorder, Timer, Tracer
from ridgeline.scorecard import scored
from ridgeline.trace import Trace
from ridgeline.trace_reader import GRAPH_LAUNCHES, read_trace

RUNS = Path("ridgeline-profile")  # folder of the runs that nobody named
PROFILE = "run.json"  # the saved profile in a run's folder
_OPERATORS, _STACKS = "operators.json.gz", "stacks.json.gz"


@dataclass(frozen=True)
class Choices:
    """How a profile is taken."""

    steps: int = 30  # timed ones
    active: int = 3  # traced ones
    skip: int | None = None  # steps before the timed ones; None: until their time settles, at most ten
    stacks: bool = False  # a further short run for file:line
    to_end: bool = False  # let the command run on after its steps were seen

    def __post_init__(self) -> None:
        for name, least, value in (("steps", 1, self.steps), ("active", 1, self.active), ("skip", 1, self.skip)):
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")

    def plan(self, kind: str) -> Plan:
        steps = self.steps if kind == "time" else self.active
        return Plan(kind, folder="", steps=steps, skip=self.skip, to_end=self.to_end)


def profile(
    fn: Callable[..., object],
    inputs: Sequence[Any] = (),
    *,
    steps: int = 30,
    active: int = 3,
    stacks: bool = False,
    folder: str | Path | None = None,
) -> Profile:
    """Profile `fn(*inputs)`, one step of a loop: warm up, time `steps` of them, then trace `active`.

    Every call is real: what `fn` trains, trains on. A captured step with `launch_operators(*inputs)`, such as a
    `TrainStep`, is traced outside its graph too, for the names of its kernels. `stacks` traces once more, for source
    lines. `folder` keeps traces and profile, in the form that `ridgeline explain` and `ridgeline diff` read. This
    process may be slow afterwards: time nothing else in it. Raises EnvironmentUnusable without a GPU.
    """
    require_gpu()
    choices = Choices(steps=steps, active=active, stacks=stacks)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if folder is not None:
        return _in_this_process(fn, inputs, choices, made(Path(folder)), name)
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as own:
        return _in_this_process(fn, inputs, choices, Path(own), name)


def profile_command(
    command: Sequence[str], folder: Path, choices: Choices, *, name: str, shown: str, say: Say
) -> Profile:
    """Profile the steps of a command; traces and profile go to `folder`.

    `name` says what the profile is of, `shown` is the command line that makes it again. Raises CommandFailed with the
    exit code of a command that failed by itself, UsageError for one without steps, EnvironmentUnusable for one that
    used no GPU.
    """
    facts = record_command(command, folder, choices, say=say)
    say("reading the trace")
    return finish(folder, Subject(name, shown, facts), read_trace(folder / TRACE))


def profile_target(text: str, folder: Path, choices: Choices, *, name: str, shown: str, say: Say) -> Profile:
    """Profile what `file.py:build` returns, or a built-in network; see `profile_loop.step_for`."""
    # enough for the timed and the traced run, and for a trace that is taken again
    most = (choices.skip or LONGEST_SETTLING) + choices.steps + 2 * (PROFILER_WARMUP + choices.active) + 2
    command = [sys.executable, "-m", profile_loop.__name__, text, str(most)]
    facts = record_command(command, folder, choices, say=say)
    say("reading the trace")
    trace = read_trace(folder / TRACE)
    if any(launch.name.startswith(GRAPH_LAUNCHES) for launch in trace.launches):
        try:
            plan = fitted(replace(choices.plan("trace"), stacks=choices.stacks), facts)
            trace_steps([*command, profile_loop.OPERATORS], plan, folder / _OPERATORS, say=say)
        except CommandFailed as error:
            if error.code != NotEngaged.exit_code:  # the step has no operators to launch, and its process said so
                raise
    return finish(folder, Subject(name, shown, facts), trace)


def record_command(command: Sequence[str], folder: Path, choices: Choices, *, say: Say, need_gpu: bool = True) -> Facts:
    """Time and trace the command into `folder`: trace, facts beside it and, with stacks, a second trace.

    Raises EnvironmentUnusable for a command that saw no GPU, unless there is no need of one.
    """
    facts = time_steps(command, choices.plan("time"), say=say)
    if need_gpu and not facts.gpu:
        raise EnvironmentUnusable(
            f"{shlex.join(command)} saw no GPU, so there are no kernels to profile: let it use one, with a torch that "
            f"has CUDA and without an empty CUDA_VISIBLE_DEVICES"
        )
    write_record(facts_beside(folder / TRACE), facts)
    plan = fitted(choices.plan("trace"), facts)
    traced = trace_steps(command, plan, folder / TRACE, say=say)
    if traced.note:
        say(traced.note)
    if choices.stacks:
        trace_steps(command, replace(plan, stacks=True, steps=1), folder / _STACKS, say=say)
    return facts


def finish(folder: Path, subject: Subject, trace: Trace) -> Profile:
    """Explain the trace, with those beside it in `folder`, save the profile there, and add what the scorecard holds.

    Raises EnvironmentUnusable where kernels are missing from it.
    """
    operators, stacks = (
        read_trace(folder / name) if (folder / name).exists() else None for name in (_OPERATORS, _STACKS)
    )
    if subject.facts is not None:
        # so that nobody takes them for the facts of another step
        write_record(facts_beside(folder / TRACE), replace(subject.facts, kernels=kernels_of_step(trace)))
    found = explained(trace, replace(subject, operators=operators, stacks=stacks))
    write_profile(folder / PROFILE, found)
    return scored(found)


def require_gpu() -> None:
    """Raise EnvironmentUnusable where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise EnvironmentUnusable(
            "profile needs a GPU and torch sees none: without one, `ridgeline roofline MODEL` says what a model costs "
            "and `ridgeline explain TRACE` reads a trace that was taken elsewhere"
        )


def made(folder: Path) -> Path:
    """The folder, made if need be. Raises UsageError where it cannot be, or holds a profile already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder} ({error.strerror}): name another folder with --out") from error
    if (folder / PROFILE).exists():
        raise UsageError(f"{folder} holds a profile already, which stays: name another folder with --out")
    return folder


def next_folder(name: str, *, within: Path = RUNS) -> Path:
    """`within/NAME-1`, or with the first number that is free; made."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip("-.") or "run"
    number = 1
    while (within / f"{safe}-{number}").exists():
        number += 1
    return made(within / f"{safe}-{number}")


def name_of(command: Sequence[str]) -> str:
    """What a person would call the command: its script or module, without the interpreter."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and place + 1 < len(command):
            return command[place + 1]
    return Path(command[0]).name


def _in_this_process(
    fn: Callable[..., object], inputs: Sequence[Any], choices: Choices, folder: Path, name: str
) -> Profile:
    plan = replace(choices.plan("time"), folder=str(folder))
    drive(Timer(plan, on_gpu=True), fn, inputs)
    facts = read_facts(result_path(folder, "time"))
    result_path(folder, "time").rename(facts_beside(folder / TRACE))
    plan = fitted(choices.plan("trace"), facts)
    launch = getattr(fn, "launch_operators", None)
    # the step itself first: it is the one whose process should not have profiled before
    runs = [(TRACE, fn, False)]
    runs += [(_OPERATORS, launch, choices.stacks)] if launch else []
    runs += [(_STACKS, fn, True)] if choices.stacks else []
    for kept, step, with_stacks in runs:
        with tempfile.TemporaryDirectory(prefix="ridgeline-") as own:
            drive(Tracer(replace(plan, folder=own, skip=1, stacks=with_stacks), on_gpu=True), step, inputs)
            shutil.move(Path(own) / TRACE, folder / kept)
    return finish(folder, Subject(name, f"ridgeline.profile({name}, …)", facts), read_trace(folder / TRACE))


def drive(recorder: Recorder, step: Callable[..., object], inputs: Sequence[Any] = ()) -> None:
    """Make steps until the recorder has seen enough."""
    done = False
    while not done:
        step(*inputs)
        done = recorder.step()
    recorder.finish()
