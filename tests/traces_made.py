"""Synthetic Kineto traces: events as PyTorch's profiler writes them, in microseconds, and the file around them.

made = trace([op("aten::conv2d", 0, 90, external_id=1), launch(10, 5, correlation=7, external_id=1),
              kernel("sm90_xmma_fprop…", 20, 60, correlation=7, external_id=1)])
path = write(tmp_path / "made.json.gz", made)
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

PROCESS = 100  # pid of the host; a GPU's events carry its device index there
THREAD = 100  # tid of the main thread
H200 = {
    "id": 0,
    "name": "NVIDIA H200",
    "totalGlobalMem": 150_109_880_320,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerBlock": 1024,
    "warpSize": 32,
    "numSms": 132,
}
OPTIONS = {"record_shapes": 1, "with_stack": 1}

Event = dict[str, object]
Dims = Sequence[int]


def kernel(
    name: str,
    start_us: float,
    duration_us: float,
    *,
    correlation: int = 0,
    external_id: int = 0,
    stream: int = 7,
    grid: Dims = (132, 1, 1),
    extra: Mapping[str, object] = {},
) -> Event:
    """A kernel; `extra` overrides or adds args: {"block": [256, 1, 1], "graph node id": 3, "device": 1}."""
    blocks = grid[0] * grid[1] * grid[2]
    args: Event = {
        "device": 0,
        "context": 1,
        "stream": stream,
        "correlation": correlation,
        "queued": 0,
        "registers per thread": 64,
        "shared memory": 0,
        "blocks per SM": blocks / 132,
        "warps per SM": blocks * 4 / 132,
        "grid": list(grid),
        "block": [128, 1, 1],
        "est. achieved occupancy %": 50,
    }
    return _gpu_event("kernel", name, (start_us, duration_us), {**_external(external_id), **args, **extra})


def memcpy(
    name: str,
    start_us: float,
    duration_us: float,
    *,
    size_bytes: int,
    correlation: int = 0,
    external_id: int = 0,
    stream: int = 7,
) -> Event:
    """A copy, `name` as Kineto has it: "Memcpy HtoD (Pageable -> Device)"."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "bytes": size_bytes}
    return _gpu_event("gpu_memcpy", name, (start_us, duration_us), {**_external(external_id), **args})


def memset(
    start_us: float,
    duration_us: float,
    *,
    size_bytes: int,
    correlation: int = 0,
    external_id: int = 0,
    stream: int = 7,
) -> Event:
    """A fill."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "bytes": size_bytes}
    return _gpu_event("gpu_memset", "Memset (Device)", (start_us, duration_us), {**_external(external_id), **args})


def launch(
    start_us: float,
    duration_us: float,
    *,
    correlation: int,
    external_id: int = 0,
    name: str = "cudaLaunchKernel",
    thread: int = THREAD,
) -> Event:
    """A call of the CUDA runtime or, where `name` begins with "cu" and a capital, of the driver."""
    category = "cuda_driver" if name[2:3].isupper() else "cuda_runtime"
    args = {**_external(external_id), "cbid": 211, "correlation": correlation}
    return _event(category, name, (start_us, duration_us), thread, args)


def op(
    name: str,
    start_us: float,
    duration_us: float,
    *,
    external_id: int,
    thread: int = THREAD,
    sequence: tuple[int, int] = (-1, 0),
    inputs: Sequence[tuple[Dims, str]] = (),
    extra: Mapping[str, object] = {},
) -> Event:
    """An operator; `sequence` is (number, forward thread), `inputs` (dims, type), e.g. ((2, 3, 8, 8), "float").

    A non-tensor has dims () and type "Scalar" or "ScalarList"; strides are those of contiguous tensors unless
    `extra` gives "Input Strides", and `extra` gives "Concrete Inputs" where they matter.
    """
    args: Event = {"External id": external_id, "Record function id": 0, "Ev Idx": external_id}
    if sequence[0] >= 0:
        args |= {"Sequence number": sequence[0], "Fwd thread id": sequence[1]}
    if inputs:
        args["Concrete Inputs"] = ["" for _ in inputs]
        args["Input type"] = [kind for _, kind in inputs]
        args["Input Strides"] = [_contiguous(dims) for dims, _ in inputs]
        args["Input Dims"] = [list(dims) for dims, _ in inputs]
    return _event("cpu_op", name, (start_us, duration_us), thread, {**args, **extra})


def annotation(name: str, start_us: float, duration_us: float, *, thread: int = THREAD) -> Event:
    """A record_function range: "ProfilerStep#3", "Optimizer.step#AdamW.step", "ridgeline.step"."""
    return _event("user_annotation", name, (start_us, duration_us), thread, {"External id": 0})


def frame(name: str, start_us: float, duration_us: float, *, thread: int = THREAD) -> Event:
    """A Python frame: "net.py(12): forward", "nn.Module: Conv2d_0"."""
    return _event("python_function", name, (start_us, duration_us), thread, {"Python id": 1, "Python parent id": None})


def sync_edge(kind: str, start_us: float, duration_us: float, *, correlation: int) -> Event:
    """A wait that CUPTI recorded: "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event"."""
    args = {"cuda_sync_kind": kind, "stream": 7, "correlation": correlation, "device": 0}
    return _gpu_event("cuda_sync", kind, (start_us, duration_us), args)


def trace(
    events: Sequence[Event],
    *,
    devices: Sequence[Mapping[str, object]] = (H200,),
    options: Mapping[str, int] = OPTIONS,
    rank: int | None = None,
) -> dict[str, object]:
    """The whole file as Kineto lays it out; with a `rank`, that of one process of several."""
    distributed = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    named = {"ph": "M", "name": "process_name", "ts": 0.0, "pid": PROCESS, "tid": 0, "args": {"name": "python"}}
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e9}
    return {
        "schemaVersion": 1,
        "deviceProperties": [dict(device) for device in devices],
        **distributed,
        **options,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
        "traceEvents": [named, *events, end],
        "traceName": "made.json",
    }


def write(path: Path, made: Mapping[str, object], *, indent: int | None = 2) -> Path:
    """Write `made` to `path`, compressed where its name ends in .gz; returns `path`."""
    text = json.dumps(made, indent=indent).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def _gpu_event(category: str, name: str, time_us: tuple[float, float], args: Event) -> Event:
    return {**_event(category, name, time_us, 0, args), "pid": args["device"], "tid": args["stream"]}


def _event(category: str, name: str, time_us: tuple[float, float], thread: int, args: Mapping[str, object]) -> Event:
    start_us, duration_us = time_us
    head: Event = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread}
    return {**head, "ts": start_us, "dur": duration_us, "args": dict(args)}


def _external(external_id: int) -> Event:
    return {"External id": external_id} if external_id else {}


def _contiguous(dims: Dims) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(dims):
        strides.insert(0, step)
        step *= size
    return strides
