"""Exports of Nsight Systems become the same records as Kineto traces, whatever columns the version wrote."""

import sqlite3
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError
from ridgeline.trace import Activity, Device, Launch, Range, SyncEdge
from ridgeline.trace_reader import read_trace
from ridgeline.trace_steps import step_windows

PROCESS = 3 << 48 | 77 << 24  # globalPid; a globalTid adds the thread
OTHER = 3 << 48 | 78 << 24
START = 10**12  # ns
NS = 1e-9

TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "ENUM_CUDA_MEM_KIND": "id INTEGER, name TEXT, label TEXT",
    "TARGET_INFO_GPU": "id INT, name TEXT, totalMemory INT, smCount INT, computeMajor INT, computeMinor INT",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INT, cudaId INT, pid INT",
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT, "
        "demangledName INT, shortName INT, registersPerThread INT, gridX INT, gridY INT, gridZ INT, blockX INT, "
        "blockY INT, blockZ INT, staticSharedMemory INT, dynamicSharedMemory INT, graphNodeId INT"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT, bytes INT, copyKind INT, "
        "srcKind INT, dstKind INT, graphNodeId INT"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT, value INT, bytes INT"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT, end INT, globalTid INT, correlationId INT, nameId INT",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start INT, end INT, correlationId INT, globalPid INT, syncType INT",
    "NVTX_EVENTS": "start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT",
}
KERNEL = (7, PROCESS, 1, 1, 40, 264, 1, 1, 128, 2, 1, 1024, 2048)  # correlation to dynamic shared memory
ROWS = {
    "StringIds": [(1, "void conv<float>"), (2, "cudaLaunchKernel_v7000"), (3, "ridgeline.step")],
    "META_DATA_EXPORT": [("EXPORT_PRODUCT_VERSION", "2026.1.1")],
    "ENUM_CUDA_MEM_KIND": [(0, "PAGEABLE", "Pageable"), (1, "PINNED", "Pinned"), (2, "DEVICE", "Device")],
    "TARGET_INFO_GPU": [(0, "NVIDIA L4", 24 * 10**9, 58, 8, 9), (1, "NVIDIA H200", 150_109_880_320, 132, 9, 0)],
    "TARGET_INFO_CUDA_DEVICE": [(0, 1, 77), (1, 0, 77)],
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        (START + 9000, START + 12000, 0, 1, 13, *KERNEL, 5 << 32 | 6),
        (START + 3000, START + 8000, 0, 1, 13, *KERNEL, None),
        (START + 1, START + 2, 0, 1, 13, 7, OTHER, *KERNEL[2:], None),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [(START + 2000, START + 2500, 0, 14, 8, PROCESS, 4096, 1, 0, 2, None)],
    "CUPTI_ACTIVITY_KIND_MEMSET": [(START + 2600, START + 2700, 0, 14, 9, PROCESS, 0, 64)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [
        (START + 1000, START + 1500, PROCESS | 99, 7, 2),
        (START + 2, START + 3, OTHER | 99, 7, 2),
    ],
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": [(START + 5000, START + 8000, 10, PROCESS, 3)],
    "NVTX_EVENTS": [
        (START + 1000, START + 6000, 59, None, 3, PROCESS | 99),
        (START + 6000, START + 9000, 59, "ridgeline.step", None, PROCESS | 99),
        (START + 500, None, 34, "a mark", None, PROCESS | 99),  # is no range, and yet the first event
    ],
}


def export(path, tables=TABLES, rows=ROWS):
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        for name, columns in tables.items():
            database.execute(f"CREATE TABLE {name} ({columns})")
            for row in rows.get(name, ()):
                database.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
    return path


def without(tables, *columns):
    """The tables and rows of a version that did not know `columns`."""
    fewer, rows = {}, {}
    for name, text in tables.items():
        named = text.split(", ")
        kept = [i for i, column in enumerate(named) if column.split()[0] not in columns]
        fewer[name] = ", ".join(named[i] for i in kept)
        rows[name] = [tuple(row[i] for i in kept) for row in ROWS[name]]
    return fewer, rows


def test_every_record(tmp_path):
    path = export(tmp_path / "run.sqlite")
    seen = []
    made = read_trace(path, progress=lambda done, size: seen.append((done, size)))
    copy, fill, first, second = made.activities
    assert first == Activity(
        id=1,
        kind="kernel",
        name="void conv<float>",
        start_s=2500 * NS,
        duration_s=5000 * NS,
        device=0,
        stream=13,
        correlation=7,
        grid=(264, 1, 1),
        block=(128, 2, 1),
        registers=40,
        shared_bytes=3072,
        blocks_per_sm=2.0,
    )
    assert (second.id, second.graph_node) == (0, 5 << 32 | 6)
    assert (copy.name, copy.bytes, copy.stream, copy.kind) == ("Memcpy HtoD (Pageable -> Device)", 4096, 14, "memcpy")
    assert (fill.name, fill.bytes, fill.correlation, fill.kind) == ("Memset (Device)", 64, 9, "memset")
    assert made.launches == (Launch(4, "cudaLaunchKernel", 500 * NS, 500 * NS, 99, 7),)
    assert made.ranges == (
        Range(5, "ridgeline.step", 500 * NS, 5000 * NS, 99),
        Range(6, "ridgeline.step", 5500 * NS, 3000 * NS, 99),
    )
    assert made.syncs == (SyncEdge(8, "Stream Sync", 4500 * NS, 3000 * NS, 10),)
    assert made.devices[0] == Device("NVIDIA H200", 132, 150_109_880_320, (9, 0))  # CUDA's numbers, not the driver's
    assert made.metadata == {"EXPORT_PRODUCT_VERSION": "2026.1.1", "processes": "2"}
    assert (made.source, made.options) == ("nsys", {"cuda_sync_events"})
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert len(step_windows(made)) == 2


def test_an_older_version_knew_less(tmp_path):
    old = without(TABLES, "globalPid", "graphNodeId", "srcKind", "computeMajor", "smCount", "eventType")
    made = read_trace(export(tmp_path / "old.sqlite", *old))
    assert len([a for a in made.activities if a.kind == "kernel"]) == 3
    assert {a.graph_node for a in made.activities} == {None}
    assert {a.name for a in made.activities if a.kind == "memcpy"} == {"Memcpy HtoD"}
    assert made.devices[0] == Device("NVIDIA H200", 0, 150_109_880_320, (0, 0))
    assert made.activities[0].blocks_per_sm == 0.0


def test_the_kernels_are_enough(tmp_path):
    only = {"CUPTI_ACTIVITY_KIND_KERNEL": "start INT, end INT"}
    path = export(tmp_path / "bare.sqlite", only, {"CUPTI_ACTIVITY_KIND_KERNEL": [(START, START + 1000)]})
    made = read_trace(path.rename(tmp_path / "bare.db"))  # told by its content
    assert [(a.name, a.grid, a.start_s) for a in made.activities] == [("unknown", (1, 1, 1), 0.0)]
    assert made.devices == ()


def test_nonsense_is_counted(tmp_path):
    rows = {name: list(rows) for name, rows in ROWS.items()}
    day_ns = 24 * 3600 * 10**9
    for start, end in ((START + 10, START + 5), (START + 10, START + day_ns)):
        rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((start, end, 0, 1, 13, *KERNEL, None))
    rows["CUPTI_ACTIVITY_KIND_KERNEL"] += [(start, 5, 0, 1, 13, *KERNEL, None) for start in ("soon", None, 9e999)]
    made = read_trace(export(tmp_path / "run.sqlite", rows=rows))
    assert made.metadata["clamped_durations"] == "2"
    assert made.metadata["malformed_events"] == "3"
    assert len([a for a in made.activities if a.kind == "kernel"]) == 4


def test_graphs_recorded_as_one_block_are_refused(tmp_path):
    graphs = {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INT, end INT, globalPid INT, graphId INT"}
    rows = {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [(START, START + 5, PROCESS, 1)]}
    with pytest.raises(EnvironmentUnusable, match="--cuda-graph-trace=node"):
        read_trace(export(tmp_path / "graphs.sqlite", graphs, rows))


@pytest.mark.parametrize(
    ("tables", "error", "complaint"),
    [
        ({}, UsageError, "without CUDA activity: record with nsys profile --trace=cuda,nvtx"),
        ({"NVTX_EVENTS": TABLES["NVTX_EVENTS"]}, EnvironmentUnusable, "nsys profile --trace=cuda,nvtx"),
    ],
    ids=["another database", "no CUDA"],
)
def test_what_has_no_kernels_is_refused(tmp_path, tables, error, complaint):
    with pytest.raises(error, match=complaint):
        read_trace(export(tmp_path / "run.sqlite", tables))


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"{}"])
def test_what_is_no_database_is_refused(tmp_path, content):
    path = tmp_path / "run.sqlite"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.sqlite is"):
        read_trace(path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return export(tmp_path_factory.mktemp("garbage") / "run.sqlite")


VALUES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=4) | st.binary(max_size=4)


@settings(deadline=None, max_examples=40)
@given(table=st.sampled_from(sorted(ROWS)), column=st.integers(0, 18), value=VALUES)
def test_no_value_of_a_column_crashes(tmp_path_factory, table, column, value):
    path = tmp_path_factory.getbasetemp() / "value.sqlite"
    rows = {name: list(rows) for name, rows in ROWS.items()}
    row = list(rows[table][0])
    row[column % len(row)] = value
    rows[table][0] = tuple(row)
    try:
        read_trace(export(path, rows=rows))
    except (RidgelineError, sqlite3.IntegrityError):  # the latter while it is made
        return


def test_a_table_whose_name_is_no_text_is_refused(tmp_path):
    path = export(tmp_path / "run.sqlite")
    path.write_bytes(path.read_bytes().replace(b"tableNVTX_EVENTS", b"tableNVTX_EVEN\x80S"))
    with pytest.raises(UsageError, match="is no readable SQLite file"):
        read_trace(path)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_damage_never_crashes(tmp_path_factory, whole, data):
    content = whole.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    put = data.draw(st.binary(max_size=200))
    path = tmp_path_factory.getbasetemp() / "damaged.sqlite"
    path.write_bytes(content[:at] + put + content[at + len(put) :])
    try:
        read_trace(path)
    except RidgelineError as refusal:
        assert str(path) in str(refusal)
