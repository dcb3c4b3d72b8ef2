"""What a profiled process is told, and what it leaves behind: records that parent and child exchange as JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.atomic import write_file
from ridgeline.errors import UsageError
from ridgeline.plain import from_plain, to_plain
from ridgeline.profile_record import WallTime

TRACE = "trace.json.gz"  # what a watched process calls its trace
FACTS = ".facts.json"  # what the name of a trace gets in place of .json.gz, for what the trace cannot say
LONGEST_SETTLING = 10  # steps after which the timing begins also where they still vary
PROFILER_WARMUP = 2  # steps that run under the profiler before those that count


@dataclass(frozen=True)
class Plan:
    """One run of a process: leave out `skip` steps, then time or trace `steps` of them."""

    kind: str  # "time" or "trace"
    folder: str  # where the process leaves what it found
    steps: int
    skip: int | None = None  # None: until the time of a step settles
    warmup: int = PROFILER_WARMUP  # traced steps that are thrown away, after `skip`
    stacks: bool = False  # record Python frames
    to_end: bool = False  # let the process run on when all is seen
    max_bytes: int = 50 * 2**20  # a longer trace is taken again, of one step


@dataclass(frozen=True)
class Facts:
    """What a process knows of its unprofiled steps and of itself."""

    wall: WallTime
    seen: int  # steps that the process made while it was watched
    first: int  # the step after which timing began: what a traced run leaves out
    complete: bool  # as many steps as planned were timed
    gpu: str  # "" on the CPU
    gpu_s: float | None = None  # seconds a step between CUDA events, several steps in a row; None where nobody timed it
    settings: Mapping[str, str] = field(default_factory=dict)  # as `Step.settings`
    environment: Mapping[str, str] = field(default_factory=dict)  # for people: versions, driver, clocks, power
    parameters: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape and dtype of those the optimizer updates
    name: str = ""  # of the trace that they are facts of; "" where they are known by the place they lie in
    kernels: int | None = None  # kernels, copies and fills in the step of that trace; None where nobody counted


@dataclass(frozen=True)
class Traced:
    """What a process says of its finished trace."""

    steps: int
    complete: bool  # as many as planned, or as many as the cap on the file's size allows
    note: str = ""  # what is not as planned


def facts_beside(trace: Path) -> Path:
    """`NAME.facts.json` for a trace `NAME.json`, `NAME.json.gz` or `NAME.sqlite`."""
    name = trace.name.removesuffix(".gz")
    return trace.with_name(name[: name.rfind(".")] + FACTS if "." in name else name + FACTS)


def result_path(folder: Path, kind: str) -> Path:
    """Where a process leaves the `Facts` ("time") or the `Traced` ("trace") that it found; written last."""
    return folder / {"time": "timed.json", "trace": "traced.json"}[kind]


def write_record(path: Path, record: Plan | Facts | Traced) -> None:
    """Whole or not at all: who finds the file can read it."""
    text = json.dumps(to_plain(record), indent=1, allow_nan=False) + "\n"
    write_file(path, lambda file: file.write(text.encode()))


def read_plan(path: Path) -> Plan:
    return from_plain(Plan, json.loads(path.read_text(encoding="utf-8")))


def read_traced(path: Path) -> Traced:
    return from_plain(Traced, json.loads(path.read_text(encoding="utf-8")))


def read_facts(path: Path) -> Facts:
    """What `write_record` wrote. Raises UsageError for a file that holds anything else."""
    try:
        return from_plain(Facts, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}): name the facts of this trace with --facts") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} holds no facts of a profile ({error}): leave --facts out") from error
