"""Read what a profiler wrote: Kineto's JSON, plain or gzip, or Nsight Systems' SQLite export."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.trace import Trace
from ridgeline.trace_kineto import read_kineto
from ridgeline.trace_nsys import read_nsys
from ridgeline.trace_stream import Progress

TRACE_ENDINGS = (".json", ".json.gz", ".sqlite")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


def read_trace(path: str | Path, *, progress: Progress | None = None) -> Trace:
    """Read the trace of one process. `progress` is called with the bytes read so far and the size of the file.

    Raises UsageError for a file that is no whole trace, EnvironmentUnusable for a trace without kernels.
    """
    path = Path(path)
    _refuse_other_files(path)
    read = read_nsys if _begins_with(path, b"SQLite format 3") or path.suffix == ".sqlite" else read_kineto
    with _no_collection():
        trace = read(path, progress=progress)
    if not any(activity.kind == "kernel" for activity in trace.activities):
        raise EnvironmentUnusable(f"{path} holds no kernels: {_why_no_kernels(trace)}")
    return trace


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from looking for cycles: a reader makes records by the million, none of them in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _refuse_other_files(path: Path) -> None:
    if path.is_dir():
        traces = sorted(file.name for file in path.iterdir() if file.name.endswith(TRACE_ENDINGS))
        of = f"{len(traces)} traces, one of each process, such as {traces[0]}" if traces else "no trace"
        raise UsageError(f"{path} is a folder with {of}: name one file that ends in {', '.join(TRACE_ENDINGS)}")
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise UsageError(f"{path} must be exported first: nsys export --type sqlite {path.name}")
    if path.suffix == ".ncu-rep":
        raise UsageError(
            f"{path} is a report of Nsight Compute, which has no timeline: give one of torch.profiler or nsys"
        )


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _why_no_kernels(trace: Trace) -> str:
    graphs = sum(launch.name.startswith(GRAPH_LAUNCHES) for launch in trace.launches)
    if trace.source == "nsys":
        if graphs or "graphs_without_kernels" in trace.metadata:
            return "Nsight Systems recorded each CUDA graph as one block; record it again with --cuda-graph-trace=node"
        return "record it again with nsys profile --trace=cuda,nvtx"
    if graphs:
        return (
            f"it has {graphs} launches of CUDA graphs and nothing that ran in them, as when a profiler was opened "
            "before the capture; open the first profiler after it, or capture in a process that never profiled"
        )
    if trace.launches:
        return (
            f"it has {len(trace.launches)} CUDA calls and nothing that ran on the GPU; let no other profiler attach to "
            "the process, and call torch.cuda.synchronize() before the profiler stops"
        )
    return "record it with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on a machine with a GPU"
