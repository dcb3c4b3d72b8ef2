"""Time the training loops that pages change in a few lines, as they were and changed, on the libraries they are of.

    python benchmarks/loops.py --out benchmarks/results/loops.jsonl
    python benchmarks/loops.py --library timm --batch 64

Each program is taken out of its page and run whole, unchanged, in a process of its own, over a loader of a few batches:
there PyTorch warms up, and the changed program compiles and captures its step. Then the program's own `for` statement
runs again, as it would in further epochs: over as many batches as a run has, timed, and over single ones, traced. An
epoch is synchronised with the GPU at its ends, and inside where the program itself waits, as its `.to(device)` does.
Images are random and in pinned memory, where a DataLoader would leave them, so that the loader takes no time.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

import _loops
import _rows
from _protocol import protocol_of
from ridgeline import bench, units
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError, VerificationFailed
from ridgeline.own_process import call_apart
from ridgeline.timing import Timing, differs, time_callable

BEFORE, AFTER = "as it was", "changed"
SIGNS = {BEFORE: "-", AFTER: "+"}
BATCHES = 4  # that the loader hands out in turn


@dataclass(frozen=True)
class Job:
    """One side of one library's loop. Refuses with UsageError what cannot be."""

    library: str
    side: str
    batch: int
    device: str = "cuda"
    protocol: bench.Protocol = field(default_factory=bench.Protocol)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch must be at least 1, got {self.batch}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, *_loops.LOOPS[self.library].image)


@dataclass(frozen=True)
class Measured:
    """`timing` is of a run of several steps; `traced` is None without a GPU."""

    job: Job
    timing: Timing
    traced: bench.Traced | None
    loss: float  # of the last timed step
    report: tuple[str, ...]  # of the compiled step; none of a loop as it was
    version: str  # the library's

    @property
    def wall_s(self) -> float:
        return self.timing.median_s / self.job.protocol.steps_a_run


@dataclass
class Loader:
    """An epoch is `steps` batches, the same few in turn."""

    batches: list[Any]
    steps: int

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self.batches), self.steps)


def main(argv: list[str] | None = None) -> int:
    a = _arguments(argv)
    planned = {library: jobs(a, library) for library in a.library}
    where = _rows.machine(a.device)
    failed = 0
    for library, its_jobs in planned.items():
        before: Measured | None = None
        for job in its_jobs:
            try:
                measured = call_apart(partial(measure, job), budget_s=a.budget_s)
            except UsageError:
                raise
            except RidgelineError as error:
                failed += 1
                print(f"{library} {job.side}: {error}", file=sys.stderr, flush=True)
                break
            print("\n".join(lines(measured, before)), flush=True)
            if a.out:
                _rows.append(a.out, [results_row(where, measured, before)])
            before = measured
    return 1 if failed else 0


def jobs(a: argparse.Namespace, library: str) -> list[Job]:
    """The loop as it was, then changed."""
    if library not in _loops.LOOPS:
        raise UsageError(f"library must be one of {', '.join(_loops.LOOPS)}, got {library!r}")
    protocol = protocol_of(a.steps, a.warmup)
    batch = _loops.LOOPS[library].batch if a.batch is None else a.batch
    return [Job(library, side, batch, a.device, protocol) for side in SIGNS]


def measure(job: Job) -> Measured:
    """Run the program, then time and trace its loop, in this process. Raises NotEngaged for a step without a graph."""
    on_gpu = torch.device(job.device).type == "cuda"
    library = _imported(job.library)
    text = _loops.side(_loops.loop_of(job.library), SIGNS[job.side])
    batches = _loops.batches(job.library, job.shape, BATCHES, pinned=on_gpu)
    loader = Loader(batches, steps=job.protocol.warmup)
    program = ModuleType(f"{job.library}_loop")
    sys.modules[program.__name__] = program  # torch.compile imports the module of what it inlines
    names = vars(program)
    names.update(device=job.device, loader=loader)
    torch.manual_seed(0)
    exec(compile(text, f"<{job.library} loop>", "exec", dont_inherit=True), names)

    run = partial(exec, _loop_alone(text, job.library), names)
    loader.steps = job.protocol.steps_a_run
    timing = time_callable(run, warmup=1, repeats=job.protocol.runs, method="host")
    loss = names["value"].item()
    if not math.isfinite(loss):
        raise VerificationFailed(f"the loss of the last step is {loss}: these steps train nothing")
    loader.steps = 1
    traced = bench.trace(run, job.protocol.traced) if on_gpu else None
    report: list[str] = []
    if job.side == AFTER:
        report = names["step"].report.lines()
        if on_gpu:
            names["step"].check_engaged()
    return Measured(job, timing, traced, loss, tuple(report), library.__version__)


def _imported(library: str) -> ModuleType:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise EnvironmentUnusable(
            f"{library} cannot be imported ({error}): `pip install {library}`, or leave its loop out by --library"
        ) from error


def _loop_alone(text: str, library: str) -> CodeType:
    """The last statement of a program, which is its loop."""
    *_, loop = ast.parse(text).body
    if not isinstance(loop, ast.For):
        raise UsageError(f"the program of {library} must end with its `for` loop, got `{ast.unparse(loop)}`")
    return compile(ast.Module([loop], type_ignores=[]), f"<{library} loop>", "exec", dont_inherit=True)


def lines(measured: Measured, before: Measured | None) -> list[str]:
    """What is printed of one side: its numbers, how it stands beside the other, and the step's own report."""
    job, traced = measured.job, measured.traced
    spread_s = measured.timing.spread_s / job.protocol.steps_a_run
    numbers = [
        f"{units.seconds(measured.wall_s)} a step (spread {units.seconds(spread_s)})",
        f"{job.batch / measured.wall_s:,.0f} images/s",
    ]
    if traced:
        numbers.append(f"GPU busy {units.seconds(traced.busy_s)} in {traced.kernels:,.0f} kernels")
    numbers.append(f"loss {measured.loss:.3f}")
    found = [f"{job.library} {measured.version} {job.side}, batch {job.batch}: {', '.join(numbers)}"]
    if before is not None and traced is not None:  # without a GPU both are eager steps
        found.append(f"  {beside(measured, before)}")
    return found + [f"  {line}" for line in measured.report]


def beside(changed: Measured, before: Measured) -> str:
    """How the changed loop stands beside the one before, in words."""
    times = before.wall_s / changed.wall_s
    if not differs(changed.timing, before.timing):
        return f"no difference beyond the spread of the runs ({times:.3f} times as fast)"
    return f"{times:.2f} times faster" if times > 1 else f"SLOWER: {times:.3f} times as fast"


def results_row(where: _rows.Machine, measured: Measured, before: Measured | None) -> _rows.Row:
    """One side of a loop in the schema of the results files."""
    job, traced = measured.job, measured.traced
    ours = job.side == AFTER
    extra: dict[str, Any] = {
        "images_per_s": job.batch / measured.wall_s,
        "times_faster": before.wall_s / measured.wall_s if before and traced else None,
        "kernels": traced.kernels if traced else None,
        "waits": traced.waits if traced else None,
        "loss": measured.loss,
        "versions": {"torch": where.torch, job.library: measured.version},
        "page": _loops.LOOPS[job.library].page.relative_to(_rows.ROOT).as_posix(),
        "report": list(measured.report),
        "steps": job.protocol.timed,
    }
    return _rows.row(
        where,
        measured.timing,
        calls=job.protocol.steps_a_run,
        subject=f"loop:{job.library}",
        stack="ridgeline" if ours else "eager",
        stack_version=where.commit if ours else where.torch,
        recipe=job.side,
        dtype="bf16",
        batch=job.batch,
        shape="x".join(map(str, job.shape)),
        region="step",
        gpu_busy_s=traced.busy_s if traced else None,
        extra=extra,
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", nargs="+", default=list(_loops.LOOPS), help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="images a step; default: 128 of each")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script, eagerly")
    parser.add_argument("--steps", type=int, default=50, help="timed, in five runs (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default %(default)s)")
    parser.add_argument("--budget-s", type=float, default=bench.BUDGET_S, help="for one side, compilation included")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file as they come")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/loops.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
