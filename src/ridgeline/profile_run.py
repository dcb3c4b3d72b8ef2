"""Run a command once for its times and once for its trace, its steps watched by `profile_child`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.profile_child import STARTED
from ridgeline.profile_plan import TRACE, Facts, Plan, Traced, read_facts, read_traced, result_path, write_record

Say = Callable[[str], object]

_LOOK_S = 0.2  # how often a running process is looked at
_GRACE_S = 30.0  # for a process that saw enough to end by itself, and then again after SIGTERM
_SIGNALLED = 128  # what shells add to the number of the signal that ended a process

_MARKS = (
    "its steps are those of a torch.optim optimizer; in other loops call ridgeline.mark_step() at the end of each step"
)
# `import ridgeline` fails in a Python that lacks it: such a process runs as ever, unwatched
_SITECUSTOMIZE = '''"""Start hook of `ridgeline profile`; hands over to the environment's own sitecustomize."""
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_here = Path(__file__).parent
_next = PathFinder.find_spec("sitecustomize", [place for place in sys.path if Path(place) != _here])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(module_from_spec(_next))
try:
    from ridgeline.profile_child import start
except ImportError:
    pass
else:
    start(_here / "plan.json")
'''


class CommandFailed(Exception):
    """The command ended by itself with an exit code of its own, `code`."""

    def __init__(self, code: int, kind: str) -> None:
        when = {"time": "timed", "trace": "traced"}[kind]
        super().__init__(f"the command failed with exit code {code} in its {when} run, so there is nothing to show")
        self.code = code


def time_steps(command: Sequence[str], plan: Plan, *, say: Say) -> Facts:
    """Run the command under a plan of kind "time".

    Raises UsageError for a command that cannot be run or made no steps, CommandFailed for one that failed.
    """
    say(f"timing {plan.steps} steps of {shlex.join(command)}")
    with _hooked(plan) as own:
        code = _run(command, own)
        path = result_path(Path(own.folder), own.kind)
        facts = read_facts(path) if path.exists() else None
        if code and (own.to_end or facts is None or not facts.complete):
            raise CommandFailed(code, own.kind)
        if facts is None:
            raise UsageError(_no_steps(command, Path(own.folder)))
        return facts


def trace_steps(command: Sequence[str], plan: Plan, trace: Path, *, say: Say) -> Traced:
    """Run the command under a plan of kind "trace" and put its trace at `trace`; raises as `time_steps` does."""
    say(f"tracing {plan.steps} steps{' with stacks' if plan.stacks else ''} of {shlex.join(command)}")
    with _hooked(plan) as own:
        code = _run(command, own)
        path = result_path(Path(own.folder), own.kind)
        traced = read_traced(path) if path.exists() else None
        if code and (own.to_end or traced is None or not traced.complete):
            raise CommandFailed(code, own.kind)
        if traced is None:
            raise UsageError(
                f"{shlex.join(command)} ended before a step could be traced after {plan.skip}: let it make "
                f"{(plan.skip or 1) + plan.warmup + plan.steps} steps"
            )
        shutil.move(Path(own.folder) / TRACE, trace)
        return traced


def fitted(plan: Plan, facts: Facts) -> Plan:
    """The plan of a traced run of a loop of which `facts` tells the steps."""
    if facts.complete:
        return replace(plan, skip=facts.first)
    # the loop ended by itself after so many: its last steps are traced
    steps = max(1, min(plan.steps, facts.seen - 1))
    warmup = max(0, min(plan.warmup, facts.seen - 1 - steps))
    return replace(plan, skip=max(1, min(facts.first, facts.seen - warmup - steps)), warmup=warmup, steps=steps)


@contextmanager
def _hooked(plan: Plan) -> Iterator[Plan]:
    """The plan with a folder of its own, from which processes start as `profile_child` says; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        own = replace(plan, folder=folder)
        write_hook(Path(folder), own)
        yield own


def _run(command: Sequence[str], plan: Plan) -> int:
    """The command's exit code, as a shell would tell it."""
    try:
        process = subprocess.Popen(command, env=_environment(plan.folder))
    except OSError as error:
        raise UsageError(
            f"cannot run {command[0]} ({error.strerror}): give the command as the shell would find it, such as "
            f"`ridgeline profile -- python train.py`"
        ) from error
    try:
        code = _watch(process, result_path(Path(plan.folder), plan.kind), to_end=plan.to_end)
    except KeyboardInterrupt:
        # the terminal interrupts both: the command ends as it does without this
        process.wait()
        raise
    return code if code >= 0 else _SIGNALLED - code


def write_hook(folder: Path, plan: Plan) -> None:
    """Make `folder` one that, in PYTHONPATH, has each Python process start as `profile_child` says."""
    write_record(folder / "plan.json", plan)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")


def _environment(hook: str) -> dict[str, str]:
    paths = [hook, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _watch(process: subprocess.Popen[bytes], result: Path, *, to_end: bool) -> int:
    """Wait for the process. One that saw enough and does not end by itself, as where others wait for it, is ended."""
    while True:
        try:
            return process.wait(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if to_end or not result.exists():
                continue
        for end in (process.terminate, process.kill):
            try:
                return process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                end()


def _no_steps(command: Sequence[str], folder: Path) -> str:
    words = shlex.join(command)
    if not (folder / STARTED).exists():
        return (
            f"{words} started no Python that imports ridgeline: use the one it is installed in, without -I, -E or -S, "
            f"and let PYTHONPATH through to it"
        )
    return f"{words} ended before two of its steps were seen: {_MARKS}"
