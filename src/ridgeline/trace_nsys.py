"""An Nsight Systems export (`nsys export --type sqlite`) as a `Trace`: kernels, copies, fills, CUDA calls, NVTX ranges.

Tables and columns: "SQLite Export Schema Reference" of the Nsight Systems documentation. A table is there only where
something was recorded for it, and columns come and go with the version. Times are nanoseconds.
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.trace import LONGEST_EVENT_S, Activity, Device, Launch, Range, SyncEdge, Trace
from ridgeline.trace_records import activity, launch, range_
from ridgeline.trace_stream import Progress

KERNELS, COPIES, FILLS, CUDA_CALLS, WAITS = (
    f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION")
)
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # whole replays, recorded instead of the kernels in them
NVTX = "NVTX_EVENTS"
EVENT_TABLES = (KERNELS, COPIES, FILLS, CUDA_CALLS, NVTX, WAITS)

NVTX_RANGES = (59, 60)  # eventType of push/pop and start/end; others are marks, domains and names

# CUpti_ActivityMemcpyKind and CUpti_ActivitySynchronizationType, in the words of Kineto's traces
COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH"}
WAIT_KINDS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}

_PLACE = {"deviceId": 0, "streamId": 0, "correlationId": 0}
_PROCESS_BITS = 24  # a global thread id is the process's id, shifted left by this, and the thread's
_VERSION = re.compile(r"(_ptsz|_ptds)?_v\d+$")  # of "cudaLaunchKernel_v7000"

Record = Any
Event = tuple[int, float, float]  # its number, start and duration in seconds


def read_nsys(path: Path, *, progress: Progress | None = None) -> Trace:
    """Read the export at `path`; of several processes the one with the most kernels. Raises UsageError.

    An event's `id` is its number in the order of EVENT_TABLES, each by row. There are no operators: only NVTX ranges
    tell what a kernel is for.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.text_factory = lambda text: text.decode("utf-8", "replace")
            return _trace(path, _Export(path, database, progress))
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a damaged table's name
        raise UsageError(f"{path} is no readable SQLite file ({error}): export the report again") from None


class _Export:
    """One process's rows in an open database."""

    def __init__(self, path: Path, database: sqlite3.Connection, progress: Progress | None) -> None:
        self.database = database
        self.progress = progress
        self.file_bytes = path.stat().st_size
        self.tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not self.tables & {*EVENT_TABLES, GRAPHS}:
            raise UsageError(
                f"{path} is an SQLite file without CUDA activity: record with nsys profile --trace=cuda,nvtx and "
                "export with nsys export --type sqlite"
            )
        self.process: int | None = None
        self.processes = self.find_processes()
        self.process = self.processes[0] if self.processes else None
        self.first_ns = min(filter(None, map(self.first, EVENT_TABLES)), default=0)
        self.events = self.malformed = self.clamped = 0

    def rows(self, table: str, **columns: object) -> Iterator[tuple[Any, ...]]:
        """The named columns of each row; the given value where a column is missing or empty."""
        there = self.columns(table)
        if not there:
            return
        wanted = ", ".join(f'"{name}"' if name in there else "NULL" for name in columns)
        defaults = tuple(columns.values())
        for row in self.database.execute(f'SELECT {wanted} FROM "{table}"{self.where(there)}'):
            yield tuple([default if value is None else value for value, default in zip(row, defaults, strict=True)])

    def where(self, there: set[str]) -> str:
        """The condition that leaves this process's rows of a table with the columns `there`."""
        owner = next((name for name in ("globalPid", "globalTid") if name in there), None)
        return f' WHERE "{owner}" >> {_PROCESS_BITS} = {self.process}' if owner and self.process is not None else ""

    def first(self, table: str) -> int | None:
        there = self.columns(table)
        if "start" not in there:
            return None
        ((start,),) = self.database.execute(f'SELECT min("start") FROM "{table}"{self.where(there)}')
        return start if isinstance(start, int) else None

    def columns(self, table: str) -> set[str]:
        return {name for _, name, *_ in self.database.execute(f'PRAGMA table_info("{table}")')}

    def find_processes(self) -> list[int]:
        """The processes that launched kernels, the busiest first; empty where the export does not say."""
        if "globalPid" not in self.columns(KERNELS):
            return []
        counted = self.database.execute(
            f'SELECT "globalPid" >> {_PROCESS_BITS} AS process FROM {KERNELS} GROUP BY process ORDER BY count(*) DESC'
        )
        return [process for (process,) in counted if isinstance(process, int)]

    def records(self, table: str, make: Callable[..., Record | None], **columns: object) -> list[Record]:
        """What `make(event, *columns)` says of each row; None stands for what is no event."""
        made = []
        for start_ns, end_ns, *fields in self.rows(table, start=None, end=None, **columns):
            number, self.events = self.events, self.events + 1
            try:
                if not math.isfinite(start_ns):
                    raise ValueError(f"no time: {start_ns}")
                event = (number, (start_ns - self.first_ns) * 1e-9, self.duration_s(start_ns, end_ns))
                record = make(event, *fields)
            except (TypeError, ValueError, OverflowError):  # SQLite keeps any type in any column
                self.malformed += 1
            else:
                made += [record] if record else []
        if self.progress:
            self.progress(self.file_bytes * (EVENT_TABLES.index(table) + 1) // len(EVENT_TABLES), self.file_bytes)
        return made

    def duration_s(self, start_ns: int, end_ns: int | None) -> float:
        duration_s = 0.0 if end_ns is None else (end_ns - start_ns) * 1e-9
        if 0 <= duration_s <= LONGEST_EVENT_S:
            return duration_s
        self.clamped += 1
        return 0.0


def _trace(path: Path, export: _Export) -> Trace:
    names = {key: sys.intern(str(value)) for key, value in export.rows("StringIds", id=0, value="")}
    devices = _devices(export)
    activities = [
        *_kernels(export, names, devices[0].sm_count if devices else 0),
        *_copies(export),
        *_fills(export),
    ]
    launches, ranges, syncs = _launches(export, names), _ranges(export, names), _waits(export)
    metadata = {key: str(value) for key, value in export.rows("META_DATA_EXPORT", name="", value="")}
    counts = {
        "processes": len(export.processes) if len(export.processes) > 1 else 0,
        "graphs_without_kernels": sum(1 for _ in export.rows(GRAPHS, start=None)),
        "malformed_events": export.malformed,
        "clamped_durations": export.clamped,
    }
    return Trace(
        path=str(path),
        source="nsys",
        devices=devices,
        activities=_by_start(activities),
        launches=_by_start(launches),
        ranges=_by_start(ranges),
        syncs=_by_start(syncs),
        options=frozenset({"cuda_sync_events"} if syncs else ()),
        metadata=metadata | {name: str(count) for name, count in counts.items() if count},
    )


def _kernels(export: _Export, names: dict[int, str], sm_count: int) -> list[Activity]:
    def make(event: Event, name: int, *fields: int) -> Activity:
        device, stream, correlation, gx, gy, gz, bx, by, bz, registers, static, dynamic, node = map(int, fields)
        number, start_s, duration_s = event
        place = (start_s, duration_s, device, stream, correlation)
        blocks_per_sm = gx * gy * gz / sm_count if sm_count else 0.0
        held = ((gx, gy, gz), (bx, by, bz), registers, static + dynamic, blocks_per_sm)
        return activity(number, "kernel", names.get(name, "unknown"), *place, *held, 0, node or None)

    shape = dict.fromkeys(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), 1)
    held = dict.fromkeys(("registersPerThread", "staticSharedMemory", "dynamicSharedMemory", "graphNodeId"), 0)
    return export.records(KERNELS, make, demangledName=-1, **_PLACE, **shape, **held)


def _copies(export: _Export) -> list[Activity]:
    memory = {kind: str(label) for kind, label in export.rows("ENUM_CUDA_MEM_KIND", id=0, label="")}

    def make(event: Event, kind: int, source: int, target: int, *fields: int) -> Activity:
        ends = f" ({memory[source]} -> {memory[target]})" if source in memory and target in memory else ""
        name = sys.intern(f"Memcpy {COPY_KINDS.get(kind, 'PtoP')}{ends}")
        return _moved(event, "memcpy", name, *map(int, fields))

    return export.records(COPIES, make, copyKind=0, srcKind=-1, dstKind=-1, **_PLACE, bytes=0, graphNodeId=0)


def _fills(export: _Export) -> list[Activity]:
    def make(event: Event, *fields: int) -> Activity:
        return _moved(event, "memset", "Memset (Device)", *map(int, fields))

    return export.records(FILLS, make, **_PLACE, bytes=0, graphNodeId=0)


def _moved(event: Event, kind: str, name: str, *fields: int) -> Activity:
    number, start_s, duration_s = event
    device, stream, correlation, size_bytes, node = fields
    place = (start_s, duration_s, device, stream, correlation)
    return activity(number, kind, name, *place, (), (), 0, 0, 0.0, size_bytes, node or None)


def _launches(export: _Export, names: dict[int, str]) -> list[Launch]:
    plain = {key: sys.intern(_VERSION.sub("", name)) for key, name in names.items() if name.startswith("cu")}

    def make(event: Event, name: int, thread: int, correlation: int) -> Launch:
        number, start_s, duration_s = event
        return launch(number, plain.get(name, "unknown"), start_s, duration_s, _thread(thread), int(correlation))

    return export.records(CUDA_CALLS, make, nameId=-1, globalTid=0, correlationId=0)


def _ranges(export: _Export, names: dict[int, str]) -> list[Range]:
    def make(event: Event, kind: int, thread: int, text: str | None, text_id: int | None) -> Range | None:
        name = text if text is not None else names.get(text_id if text_id is not None else -1)
        if kind not in NVTX_RANGES or name is None:
            return None
        number, start_s, duration_s = event
        return range_(number, sys.intern(name), start_s, duration_s, _thread(thread))

    return export.records(NVTX, make, eventType=NVTX_RANGES[0], globalTid=0, text=None, textId=None)


def _waits(export: _Export) -> list[SyncEdge]:
    def make(event: Event, kind: int, correlation: int) -> SyncEdge:
        number, start_s, duration_s = event
        return SyncEdge(number, WAIT_KINDS.get(kind, "unknown"), start_s, duration_s, int(correlation))

    return export.records(WAITS, make, syncType=0, correlationId=0)


def _devices(export: _Export) -> tuple[Device, ...]:
    """The GPUs in the order in which CUDA numbers them, so that an activity's `device` is an index."""
    columns = {"id": 0, "name": "unknown", "smCount": 0, "totalMemory": 0, "computeMajor": 0, "computeMinor": 0}
    try:
        order = {gpu: int(number) for gpu, number in export.rows("TARGET_INFO_CUDA_DEVICE", gpuId=-1, cudaId=0)}
        gpus = sorted(export.rows("TARGET_INFO_GPU", **columns), key=lambda gpu: (order.get(gpu[0], 0), int(gpu[0])))
        return tuple(
            Device(str(name), int(sms), int(memory), (int(major), int(minor)))
            for _, name, sms, memory, major, minor in gpus
        )
    except (TypeError, ValueError, OverflowError):
        return ()  # the GPU stays unknown


def _thread(global_id: int) -> int:
    return global_id & ((1 << _PROCESS_BITS) - 1)


def _by_start(records: list[Record]) -> tuple[Record, ...]:
    return tuple(sorted(records, key=attrgetter("start_s")))
