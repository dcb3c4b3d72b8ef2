"""Time or trace the steps of a loop that somebody else runs: both are told of each step's end, and say when to stop."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from ridgeline.gpu_watch import GpuWatch, Load, under_load
from ridgeline.profile_batches import BatchWatch
from ridgeline.profile_plan import LONGEST_SETTLING, TRACE, Facts, Plan, Traced, result_path, write_record
from ridgeline.profile_record import WallTime
from ridgeline.step_clock import StepClock
from ridgeline.timing import GpuState, gpu_state
from ridgeline.validation_time import ValidationTime

_SETTLED = 1.1  # steps whose times differ by no more than this factor
_SETTLED_STEPS = 3  # so many of them in a row
# as traces spell them
_DTYPE_WORDS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


class Recorder(Protocol):
    """What watches the steps of one process."""

    def step(self) -> bool:
        """A step ended; True once enough were seen."""
        ...

    def finish(self) -> None:
        """Write what was seen: when it is enough, and when the process ends before."""
        ...


class Timer:
    """Times unprofiled steps and writes `Facts`, the GPU's clocks meanwhile among them.

    `parameters` are those that the loop trains, where it trains, and `device` is theirs: torch's number of the GPU,
    None for the current one. `batches` saw what a DataLoader gave it.
    """

    def __init__(self, plan: Plan, *, on_gpu: bool) -> None:
        self._plan = plan
        self._clock = StepClock(on_gpu=on_gpu)
        self._on_gpu = on_gpu
        self._seen = 0
        self._first: int | None = None  # the step after which timing began
        self._compiled = (0, 0.0)  # before the timed steps
        self._gpu: GpuWatch | None = None
        self._facts: Facts | None = None
        self.parameters: tuple[tuple[tuple[int, ...], str], ...] = ()
        self.device: int | None = None
        self.batches = BatchWatch()

    def step(self) -> bool:
        if self._on_gpu and self._gpu is None:
            self._gpu = GpuWatch(self.device)  # which takes longer than a step, and no step has begun to be timed
        self._clock.mark()
        self._seen += 1
        if self._first is None:
            self._compiled = compilations()
            self._first = self._seen if self._is_settled() else None
            if self._gpu is not None and self._first is not None:
                self._gpu.begin()
        elif self._gpu is not None:
            self._gpu.take()
        return self._first is not None and self._seen - self._first >= self._plan.steps

    def finish(self) -> None:
        readings = self._gpu.stop() if self._gpu is not None else ()
        wall = self._wall()
        if wall is None:
            return
        # steps too short for a reading are followed by one; that it finds the GPU idle it says itself
        state = (readings[-1] if readings else gpu_state(self.device)) if self._on_gpu else None
        load = under_load(readings or ((state,) if state else ()))
        again, again_s = (now - before for now, before in zip(compilations(), self._compiled, strict=True))
        watched = {"recompiles": str(again), "recompile_s": str(again_s), "steps": str(wall.n)}
        self._facts = Facts(
            wall=wall,
            seen=self._seen,
            first=self._begin(),
            complete=self._first is not None and self._seen - self._first >= self._plan.steps,
            gpu=torch.cuda.get_device_name() if self._on_gpu else "",
            gpu_s=wall.median_s if self._on_gpu else None,
            settings={**settings(on_gpu=self._on_gpu, load=load), **watched, **self.batches.settings()},
            environment=environment(on_gpu=self._on_gpu, state=load.state if load else state),
            parameters=self.parameters,
        )
        self._write(self._facts)

    def saw_end(self, validation: ValidationTime) -> None:
        """Add what was seen of the whole run to the facts, after `finish`."""
        if self._facts is not None:
            whole = {**validation.settings(step_s=self._facts.wall.median_s), **self.batches.settings()}
            self._write(replace(self._facts, settings={**self._facts.settings, **whole}))

    def _write(self, facts: Facts) -> None:
        write_record(result_path(Path(self._plan.folder), "time"), facts)

    def _is_settled(self) -> bool:
        if self._plan.skip is not None:
            return self._seen >= self._plan.skip
        recent = self._clock.host_seconds()[-_SETTLED_STEPS:]
        settled = len(recent) == _SETTLED_STEPS and max(recent) <= _SETTLED * min(recent)
        return settled or self._seen >= LONGEST_SETTLING

    def _begin(self) -> int:
        """The step after which what counts begins. Of a loop that ended early, the second half if that is more."""
        half = (self._seen + 1) // 2
        if self._first is None or self._seen < self._first + self._plan.steps:
            return min(self._first or half, half)
        return self._first

    def _wall(self) -> WallTime | None:
        seconds = self._clock.seconds()[self._begin() - 1 :]
        return wall_time(seconds) if seconds else None


class Tracer:
    """Traces steps with shapes and writes `Traced`. `profiler` is torch's, called with its arguments."""

    def __init__(self, plan: Plan, *, on_gpu: bool, profiler: Callable[..., Any] = profile) -> None:
        self._plan = plan
        self._on_gpu = on_gpu
        self._make = partial(profiler, **_profiler_arguments(plan, on_gpu=on_gpu))
        self._path = Path(plan.folder) / TRACE
        self._seen = 0  # steps before the profiler began
        self._running: Any = None
        self._warmup, self._active = plan.warmup, plan.steps
        self._under = 0  # steps that ended under the running profiler
        self._traced: Traced | None = None

    def step(self) -> bool:
        if self._running is None:
            self._seen += 1
            if self._seen >= (self._plan.skip or 1):
                self._start()
            return False
        self._under += 1
        last = self._warmup + self._active
        if self._on_gpu and self._under in (self._warmup, last):
            # kernels that have yet to run would miss the trace, and those of earlier steps get into it
            torch.cuda.synchronize()
        self._running.step()
        if self._under < last:
            return False
        self._stop()
        if self._active == 1 or self._path.stat().st_size <= self._plan.max_bytes:
            return True
        self._warmup, self._active = 1, 1
        self._start()
        return False

    def finish(self) -> None:
        if self._running is not None:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._stop()
        if self._traced is not None:
            write_record(result_path(Path(self._plan.folder), "trace"), self._traced)

    def _start(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        steps = schedule(wait=0, warmup=self._warmup, active=self._active, repeat=1)
        self._running = self._make(schedule=steps, on_trace_ready=self._write)
        self._under = 0
        self._running.start()

    def _stop(self) -> None:
        """End the profiler; in the midst of the steps that count, it writes those it has."""
        running, self._running = self._running, None
        running.stop()

    def _write(self, profiler: Any) -> None:
        steps = min(self._active, self._under - self._warmup)
        if steps < 1:  # the process ended within the first
            return
        profiler.export_chrome_trace(str(self._path))
        cut = self._active < self._plan.steps
        note = f"one step was traced, because {self._plan.steps} made a file beyond the cap" if cut else ""
        self._traced = Traced(steps, complete=steps == self._active, note=note)


class Follower:
    """Counts the steps of a process that is not watched, so that all processes of a group stop after the same one."""

    def __init__(self, plan: Plan) -> None:
        self._left = (plan.skip or LONGEST_SETTLING) + plan.steps + (plan.warmup if plan.kind == "trace" else 0)

    def step(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def finish(self) -> None:
        """There is nothing to write."""


def recorder_for(plan: Plan, *, on_gpu: bool, rank: int, world: int) -> Recorder:
    """What watches this process: of a group the process of rank 0 is watched, by a schedule that all can follow."""
    if world > 1:
        plan = replace(plan, skip=plan.skip or LONGEST_SETTLING, max_bytes=2**62)
    if rank:
        return Follower(plan)
    return Timer(plan, on_gpu=on_gpu) if plan.kind == "time" else Tracer(plan, on_gpu=on_gpu)


def parameters_of(tensors: Iterable[Tensor]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and dtype of each, spelled as traces do."""
    return tuple((tuple(each.shape), _DTYPE_WORDS.get(each.dtype, "")) for each in tensors)


def wall_time(seconds: list[float]) -> WallTime:
    """Median and quartiles; of fewer than four steps the extremes."""
    if len(seconds) < 4:
        return WallTime(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
    low_s, median_s, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
    return WallTime(median_s, low_s, high_s, len(seconds))


def settings(*, on_gpu: bool, load: Load | None) -> dict[str, str]:
    """What rules want to know of the process, as text (see `rules._rule`)."""
    found: dict[str, object] = {
        "torch": torch.__version__,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if on_gpu:
        found |= {
            "memory_reserved_bytes": torch.cuda.max_memory_reserved(),
            "memory_allocated_bytes": torch.cuda.max_memory_allocated(),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(),
            "memory_total_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        }
    if load is not None:
        clocks = {
            "sm_clock_mhz": load.state.sm_clock_mhz,
            "sm_clock_max_mhz": load.state.sm_clock_max_mhz,
            "throttle_reasons": load.throttled,
        }
        found |= {name: value for name, value in clocks.items() if value is not None}
    return {name: str(value) for name, value in found.items()}


def compilations() -> tuple[int, float]:
    """How often torch.compile compiled in this process so far, and the seconds that took."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0.0
    times = dynamo.compilation_time_metrics.get("_compile.compile_inner", [])
    return len(times), float(sum(times))


def environment(*, on_gpu: bool, state: GpuState | None) -> Mapping[str, str]:
    """Versions, driver, clocks and switches, for the head of a report."""
    found = {"torch": torch.__version__, "Python": platform.python_version()}
    if on_gpu:
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        found["TF32"] = f"convolutions {_on(torch.backends.cudnn.allow_tf32)}, products " + _on(
            torch.backends.cuda.matmul.allow_tf32
        )
    if state is not None:
        found |= {
            "driver": state.driver,
            "SM clock": _measured(state.sm_clock_mhz, "MHz"),
            "memory clock": _measured(state.memory_clock_mhz, "MHz"),
            "temperature": _measured(state.temperature_c, "°C"),
            "power": f"{_measured(state.power_w, 'W')} of {_measured(state.power_limit_w, 'W')}",
        }
    return found


def _profiler_arguments(plan: Plan, *, on_gpu: bool) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    options = _ExperimentalConfig(enable_cuda_sync_events=True)
    return {
        "activities": activities,
        "record_shapes": True,
        "with_stack": plan.stacks,
        "experimental_config": options if on_gpu else None,
    }


def _on(switch: object) -> str:
    return "on" if switch else "off"


def _measured(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:g} {unit}"
