"""The one timing protocol of the project; no other file reads a clock or makes a timing event.

GPU ("cuda-event"): every sample first reads a buffer of several times the L2, which evicts what L2 held and gives the
host time to run ahead, so that launch cost stays out of short samples. "cold" then times the call; "warm" runs it once
untimed and times the second run. Reading, not writing, so that no dirty lines are written back in the timed region.
Host ("host"): wall time of the call, synchronised with the GPU on both sides if there is one.
Candidates are interleaved round by round, so that drifting clocks hit all of them alike.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ridgeline.errors import EnvironmentUnusable

MIN_REPEATS = 5  # quartiles of fewer samples mean nothing

L2 = Literal["warm", "cold"]
Method = Literal["cuda-event", "host"]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Order statistics of `n` samples of one call; [low_s, high_s] is the interquartile range."""

    median_s: float
    low_s: float
    high_s: float
    p90_s: float
    n: int
    method: Method
    l2: L2
    clocks_mhz: float | None = None  # SM clock right after the last sample; None without nvidia-smi
    temperature_c: float | None = None

    @property
    def spread_s(self) -> float:
        return self.high_s - self.low_s


def time_callable(
    fn: Call,
    *,
    warmup: int = 5,
    repeats: int = 50,
    l2: L2 = "warm",
    method: Method | None = None,
    log_clocks: bool = True,
) -> Timing:
    """Time one call; for a comparison use `time_many`. See there for the arguments."""
    return time_many({"": fn}, warmup=warmup, repeats=repeats, l2=l2, method=method, log_clocks=log_clocks)[""]


def time_many(
    calls: Mapping[str, Call],
    *,
    warmup: int = 5,
    repeats: int = 50,
    l2: L2 = "warm",
    method: Method | None = None,
    log_clocks: bool = True,
) -> dict[str, Timing]:
    """Time several calls, interleaved: each round runs every call once, beginning with another one each time.

    `method` defaults to "cuda-event" where torch sees a GPU, else "host". `log_clocks` asks nvidia-smi once.
    Raises ValueError for settings that cannot give a number, EnvironmentUnusable for GPU settings without a GPU.
    """
    method = _settle(calls, warmup, repeats, l2, method)
    for fn in calls.values():
        for _ in range(warmup):
            fn()
    sample = _sample_events if method == "cuda-event" else _sample_host
    samples = sample(calls, repeats, l2)
    state = gpu_state() if log_clocks and torch.cuda.is_available() else None
    clocks = (state.sm_clock_mhz, state.temperature_c) if state else (None, None)
    return {name: _statistics(values, method, l2, *clocks) for name, values in samples.items()}


def differs(a: Timing, b: Timing) -> bool:
    """True only when the interquartile ranges do not overlap. Raises ValueError for timings of different methods."""
    if (a.method, a.l2) != (b.method, b.l2):
        raise ValueError(f"differs: cannot compare {a.method}/{a.l2} with {b.method}/{b.l2}: time both the same way")
    return a.high_s < b.low_s or b.high_s < a.low_s


@dataclass(frozen=True, slots=True)
class GpuState:
    """What nvidia-smi says of one GPU; None where it does not say."""

    name: str
    driver: str
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    utilization_percent: float | None
    sm_clock_max_mhz: float | None = None
    clock_reasons: tuple[str, ...] | None = None  # why the clocks are as low as they are, in NVIDIA's words


# in GpuState's order
_QUERY = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,power.limit,utilization.gpu,clocks.max.sm"
# drivers before 535 know the second name alone; where neither is known the rest is asked for
_REASONS = (",clocks_event_reasons.active", ",clocks_throttle_reasons.active", "")
# NVML's nvmlClocksEventReason…, from bit 0 on
_REASON_WORDS = (
    *("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting"),
)


def gpu_state(device: int | None = None) -> GpuState | None:
    """Clocks, temperature and power of torch's `device` (default: the current one); None without an NVIDIA driver.

    Where torch sees no GPU this is nvidia-smi's first one, so that a driver with an unusable torch is still noticed.
    """
    answered = gpu_query(device)
    return parse_gpu_state(answered[1]) if answered else None


def gpu_query(device: int | None = None) -> tuple[list[str], str] | None:
    """The nvidia-smi command that asks for a GpuState, of the GPU as `gpu_state` says, and its answer; None without."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    which = []
    if torch.cuda.is_available():
        # torch and nvidia-smi may number GPUs differently (CUDA_VISIBLE_DEVICES), the UUID is the same
        index = torch.cuda.current_device() if device is None else device
        which = [f"--id=GPU-{str(torch.cuda.get_device_properties(index).uuid).removeprefix('GPU-')}"]
    for reasons in _REASONS:
        command = [program, f"--query-gpu={_QUERY}{reasons}", "--format=csv,noheader,nounits", *which]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return command, done.stdout
    return None


def parse_gpu_state(text: str) -> GpuState | None:
    """The first line of what `gpu_query`'s command says; None if it is not one."""
    cells = [cell.strip() for cell in text.strip().partition("\n")[0].split(",")]
    asked = len(_QUERY.split(","))
    if len(cells) not in (asked, asked + 1):
        return None
    reasons = clock_reasons(cells[asked]) if len(cells) > asked else None
    return GpuState(cells[0], cells[1], *map(_number, cells[2:asked]), clock_reasons=reasons)


def clock_reasons(mask: str) -> tuple[str, ...] | None:
    """The words for a bit mask of reasons such as "0x0000000000000004"; None for what is no mask, as "[N/A]"."""
    try:
        bits = int(mask, 0)
    except ValueError:
        return None
    words = {1 << place: word for place, word in enumerate(_REASON_WORDS)}
    return tuple(words.get(bit, hex(bit)) for bit in (1 << place for place in range(bits.bit_length())) if bits & bit)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def _settle(calls: Mapping[str, Call], warmup: int, repeats: int, l2: str, method: str | None) -> Method:
    """The method to use, once every setting makes sense."""
    if not calls:
        raise ValueError("time_many: no calls to time")
    for name, fn in calls.items():
        if not callable(fn):
            raise ValueError(f"time_many: {name!r} must be callable, got {type(fn).__name__}")
    if warmup < 1:
        raise ValueError(f"time_many: warmup must be at least 1, got {warmup}")
    if repeats < MIN_REPEATS:
        raise ValueError(f"time_many: repeats must be at least {MIN_REPEATS}, got {repeats}")
    if l2 not in ("warm", "cold"):
        raise ValueError(f"time_many: l2 must be 'warm' or 'cold', got {l2!r}")
    if method not in (None, "cuda-event", "host"):
        raise ValueError(f"time_many: method must be 'cuda-event' or 'host', got {method!r}")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (l2 == "cold" or method == "cuda-event"):
        raise EnvironmentUnusable(
            f"time_many: l2={l2!r} with method={method!r} needs a GPU and torch sees none: ask for 'warm' and 'host'"
        )
    if method == "host" or not has_gpu:
        return "host"
    return "cuda-event"


def _rounds(names: list[str], repeats: int) -> Iterator[str]:
    """Every name once a round; each round starts one later, so that no call always follows the same neighbour."""
    for i in range(repeats):
        first = i % len(names)
        yield from names[first:] + names[:first]


def _sample_host(calls: Mapping[str, Call], repeats: int, l2: str) -> dict[str, list[float]]:
    evict = evictor() if l2 == "cold" else None
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in _rounds(list(calls), repeats):
        if evict:
            evict()
        fn = calls[name]
        synchronise()
        start_s = time.perf_counter()
        fn()
        synchronise()
        samples[name].append(time.perf_counter() - start_s)
    return samples


def _sample_events(calls: Mapping[str, Call], repeats: int, l2: str) -> dict[str, list[float]]:
    evict = evictor()
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for name in _rounds(list(calls), repeats):
        fn = calls[name]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        evict()
        if l2 == "warm":
            fn()
        start.record()
        fn()
        end.record()
        pairs[name].append((start, end))
    torch.cuda.synchronize()
    # elapsed_time counts milliseconds
    return {name: [start.elapsed_time(end) / 1000 for start, end in both] for name, both in pairs.items()}


def evictor() -> Call:
    """A call that reads four times the L2 of the current GPU, at least 256 MiB (some 60 µs of lead for the host)."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.ones(max(4 * l2_bytes, 2**28) // 4, dtype=torch.float32, device="cuda")
    return buffer.sum


def _nothing() -> None:
    """Without a GPU there is nothing to wait for."""


def _statistics(
    samples: list[float], method: Method, l2: L2, clocks_mhz: float | None, temperature_c: float | None
) -> Timing:
    ordered = sorted(samples)
    low_s, median_s, high_s, p90_s = (_quantile(ordered, q) for q in (0.25, 0.5, 0.75, 0.9))
    return Timing(median_s, low_s, high_s, p90_s, len(ordered), method, l2, clocks_mhz, temperature_c)


def _quantile(ordered: list[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
