"""Time the rungs of the training ladder, each in a process of its own: wall and GPU-busy time of a whole step.

Several can be compiled side by side; they are timed one at a time, when none of them compiles any more.

Warm-up steps and an untimed run, then runs of timed steps, synchronised between runs only, so that the host may run
ahead as in training. Then traced steps, for the time in which the GPU works. A process of its own keeps what one rung
compiles, allocates, traces or breaks from the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton

from ridgeline.errors import EnvironmentUnusable, RidgelineError
from ridgeline.overlap import length, union
from ridgeline.own_process import Wait, in_turn
from ridgeline.timing import Timing, gpu_state, time_callable
from ridgeline.workloads.ddpm_ladder import Conditions, Rung, Step, build

BUDGET_S = 300.0

# the host stands still in these until the GPU is done; the synchronisation that ends a trace is none of them
_WAITS = frozenset({"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"})


@dataclass(frozen=True)
class Protocol:
    """How many steps are taken; by default the write-up's: 5 to warm up, 50 timed ones."""

    warmup: int = 5
    runs: int = 5
    steps_a_run: int = 10
    traced: int = 5

    @property
    def timed(self) -> int:
        return self.runs * self.steps_a_run


@dataclass(frozen=True)
class Traced:
    """Of one step: seconds in which at least one kernel or copy ran, kernels, and waits of the host for the GPU."""

    busy_s: float
    kernels: float
    waits: float


@dataclass(frozen=True)
class Machine:
    """Where a rung was timed; None where nobody says."""

    device: str  # the GPU as its driver prints it, or "cpu"
    driver: str | None
    power_limit_w: float | None
    torch: str
    triton: str


@dataclass(frozen=True)
class Measured:
    """One rung on one machine. `timing` is of a run of several steps; `traced` is None without a GPU."""

    rung: Rung
    conditions: Conditions
    protocol: Protocol
    machine: Machine
    timing: Timing
    traced: Traced | None
    findings: tuple[str, ...] = ()
    rewrites: dict[str, int] = field(default_factory=dict)  # sites that the rung's rewrites changed
    memory_bytes: int | None = None  # most that PyTorch held on the GPU, memory of graphs included; None off one

    @property
    def wall_s(self) -> float:
        """Of one step, the median over the runs."""
        return self.timing.median_s / self.protocol.steps_a_run

    @property
    def spread_s(self) -> float:
        return self.timing.spread_s / self.protocol.steps_a_run


@dataclass(frozen=True)
class Missing:
    """A rung without numbers, why in one sentence, and the exit code that says so."""

    rung: Rung
    reason: str
    exit_code: int


def require_gpu() -> None:
    """Raise EnvironmentUnusable where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise EnvironmentUnusable(
            "the ladder is timed on a GPU and torch sees none: run it on one, or ask `ridgeline doctor` why not; "
            "`ridgeline roofline ddpm-cifar10 --train` says what the step costs"
        )


def climb(
    rungs: Sequence[Rung],
    conditions: Conditions,
    protocol: Protocol = Protocol(),
    *,
    budget_s: float = BUDGET_S,
    at_once: int = 1,
) -> Iterator[Measured | Missing]:
    """Measure one rung after another, each given up after `budget_s` seconds, compilation included.

    `at_once` of them are compiled side by side, and all stay on the GPU until the last of them is timed. Raises
    EnvironmentUnusable at once, and not a rung at a time, where there is no GPU and the conditions ask for one.
    """
    if torch.device(conditions.device).type == "cuda":
        require_gpu()
    return _climbed(rungs, conditions, protocol, budget_s, at_once)


def _climbed(
    rungs: Sequence[Rung], conditions: Conditions, protocol: Protocol, budget_s: float, at_once: int
) -> Iterator[Measured | Missing]:
    works = [partial(measure, rung, conditions, protocol) for rung in rungs]
    for rung, found in zip(rungs, in_turn(works, budget_s=budget_s, at_once=at_once), strict=True):
        yield Missing(rung, str(found), found.exit_code) if isinstance(found, RidgelineError) else found


def measure(rung: Rung, conditions: Conditions, protocol: Protocol = Protocol(), wait: Wait = lambda: None) -> Measured:
    """Build a rung's step, `wait` for its turn, time and trace it, in this process, which may be slow afterwards."""
    built = build(rung, conditions)
    on_gpu = torch.device(conditions.device).type == "cuda"
    if on_gpu:
        # what compiling held is not the step's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(protocol.warmup):
        built.step()
    if on_gpu:
        torch.cuda.synchronize()
    wait()

    def run() -> None:
        for _ in range(protocol.steps_a_run):
            built.step()

    timing = time_callable(run, warmup=1, repeats=protocol.runs, method="host")
    memory = torch.cuda.max_memory_reserved() if on_gpu else None
    traced = trace(built.step, protocol.traced) if on_gpu else None
    machine = _machine(on_gpu)
    return Measured(rung, conditions, protocol, machine, timing, traced, built.findings, built.rewrites, memory)


def trace(step: Step, steps: int) -> Traced:
    """Take so many steps under torch's profiler. Raises EnvironmentUnusable for a trace without GPU events."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return counted(profile.events() or (), steps)


def counted(events: Iterable[Any], steps: int) -> Traced:
    """The profiler's events of `steps` steps, as of one step."""
    events = list(events)
    on_gpu = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    if not on_gpu:
        raise EnvironmentUnusable("the trace has no GPU events: another profiler may hold the device, close it")
    busy_us = length(union((e.time_range.start, e.time_range.end) for e in on_gpu))
    return Traced(
        busy_s=busy_us * 1e-6 / steps,
        kernels=sum(not e.name.startswith("Mem") for e in on_gpu) / steps,  # Memcpy, Memset
        waits=sum(e.name in _WAITS for e in events) / steps,
    )


def _machine(on_gpu: bool) -> Machine:
    state = gpu_state() if on_gpu else None
    return Machine(
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        driver=state.driver if state else None,
        power_limit_w=state.power_limit_w if state else None,
        torch=torch.__version__,
        triton=triton.__version__,
    )
