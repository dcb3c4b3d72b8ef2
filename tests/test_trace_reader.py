"""Kineto traces become records whatever their layout, what is no whole trace is refused, and garbage never crashes."""

import gc
import gzip
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import trace_kineto
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError
from ridgeline.trace import Activity, Call, Device, Launch, Range, SyncEdge
from ridgeline.trace_reader import read_trace
from traces_made import annotation, frame, kernel, launch, memcpy, memset, op, sync_edge, trace, write

CONV_INPUTS = [((2, 3, 8, 8), "float"), ((8, 3, 3, 3), "float"), ((), "ScalarList")]
EVENTS = [
    annotation("ProfilerStep#0", 100, 900),
    op("aten::conv2d", 110, 50, external_id=3, sequence=(7, 0), inputs=CONV_INPUTS),
    op("aten::_foreach_add_", 180, 9, external_id=4),
    {**frame("net.py(12): forward", 105, 700), "args": {"Python id": 1}},
    launch(120, 5, correlation=9, external_id=3),
    launch(190, 5, correlation=10, external_id=4, name="cuLaunchKernel"),
    {"ph": "s", "id": 9, "pid": 100, "tid": 100, "ts": 120, "cat": "ac2g", "name": "ac2g"},
    kernel("void f<{lambda(int)#1}>", 130, 40, correlation=9, external_id=3, grid=(66, 2, 1)),
    kernel("plain", 200, 40, correlation=10, stream=9, extra={"graph node id": 5, "device": 1, "block": [32, 2, 1]}),
    memcpy("Memcpy HtoD (Pageable -> Device)", 250.5, 10.25, size_bytes=4096, correlation=11),
    memset(270, 2, size_bytes=64, correlation=12),
    sync_edge("Stream Sync", 300, 20, correlation=13),
    annotation('a "name" with \\ in it', 400, 1),
]
TENSOR_LIST = {"Input Dims": [[[4], [2, 2]], []], "Input type": ["TensorList", "Scalar"], "Concrete Inputs": ["", "1"]}
EVENTS[2]["args"] |= TENSOR_LIST


@pytest.fixture
def read(tmp_path):
    """What is read of a trace with these events."""

    def read(events, name="made.json", indent=2, **about):
        return read_trace(write(tmp_path / name, trace(events, **about), indent=indent))

    return read


def records(read):
    """Everything of a trace that does not depend on its file."""
    return replace(read, path="")


def us(seconds: float) -> float:
    return round(seconds * 1e6, 6)


def test_activities(read):
    first, second, copy, fill = read(EVENTS).activities
    assert first == Activity(
        id=8,  # the position in the file: its first event is a label
        kind="kernel",
        name="void f<{lambda(int)#1}>",
        start_s=30e-6,
        duration_s=40e-6,
        device=0,
        stream=7,
        correlation=9,
        grid=(66, 2, 1),
        block=(128, 1, 1),
        registers=64,
        shared_bytes=0,
        blocks_per_sm=1.0,
    )
    assert (second.device, second.stream, second.block, second.graph_node) == (1, 9, (32, 2, 1), 5)
    assert (copy.kind, copy.name, copy.bytes) == ("memcpy", "Memcpy HtoD (Pageable -> Device)", 4096)
    assert (us(copy.start_s), us(copy.duration_s), us(copy.end_s)) == (150.5, 10.25, 160.75)
    assert (fill.kind, fill.name, fill.bytes, fill.grid) == ("memset", "Memset (Device)", 64, ())


def test_the_host(read):
    made = read(EVENTS)
    conv, add = made.calls
    assert conv == Call(
        id=2,
        name="aten::conv2d",
        start_s=10e-6,
        duration_s=50e-6,
        thread=100,
        external_id=3,
        sequence=7,
        shapes=((2, 3, 8, 8), (8, 3, 3, 3), ()),
        dtypes=("float", "float", "ScalarList"),
        strides=((192, 64, 8, 1), (27, 9, 3, 1), ()),
        concrete=("", "", ""),
    )
    assert (add.shapes, add.lists, add.concrete, add.sequence) == (((), ()), (((4,), (2, 2)),), ("", "1"), -1)
    assert made.launches == (
        Launch(5, "cudaLaunchKernel", 20e-6, 5e-6, 100, 9, 3),
        Launch(6, "cuLaunchKernel", 90e-6, 5e-6, 100, 10, 4),
    )
    assert [(r.name, r.id) for r in made.ranges] == [("ProfilerStep#0", 1), ('a "name" with \\ in it', 13)]
    assert made.frames == (Range(4, "net.py(12): forward", 5e-6, 700e-6, 100),)
    assert made.syncs == (SyncEdge(12, "Stream Sync", 200e-6, 20e-6, 13),)


def test_what_the_file_says_of_itself(read):
    made = read(EVENTS, rank=1)
    assert made.source == "kineto"
    assert made.devices == (Device("NVIDIA H200", 132, 150_109_880_320, (9, 0)),)
    assert made.options == {"record_shapes", "with_stack", "cuda_sync_events"}
    assert made.rank == 1
    assert made.metadata["baseTimeNanoseconds"] == "1790857026000000000"
    assert json.loads(made.metadata["distributedInfo"])["world_size"] == 2
    assert "malformed_events" not in made.metadata
    bare = read([kernel("k", 0, 1)], options={}, devices=())
    assert (bare.options, bare.rank, bare.devices) == (frozenset(), None, ())


def reordered(event):
    return {key: event[key] for key in sorted(event, reverse=True)}


def reordered_args(event):
    return {**event, "args": reordered(event.get("args", {}))}


@pytest.mark.parametrize("indent", [None, 0, 1, 2, "\t"])
@pytest.mark.parametrize("order", [dict, reordered, reordered_args], ids=lambda order: order.__name__)
def test_layout_does_not_matter(read, indent, order):
    assert records(read([order(e) for e in EVENTS], indent=indent)) == records(read(EVENTS, name="made.json.gz"))


def test_a_bare_array_is_a_trace(read, tmp_path):
    path = tmp_path / "array.json"
    path.write_text(json.dumps(trace(EVENTS)["traceEvents"]))
    assert read_trace(path).activities == read(EVENTS).activities


def test_times_and_order(read):
    made = read([kernel("late", 5000, 1), kernel("early", 4000.125, 2.5), annotation("a", 3000, 4000)])
    assert [(a.name, us(a.start_s), us(a.duration_s)) for a in made.activities] == [
        ("early", 1000.125, 2.5),
        ("late", 2000, 1),
    ]


def test_nonsense_durations_are_clamped_and_counted(read):
    bad = [op("aten::add", 10 + i, d, external_id=i) for i, d in enumerate((-5, 9.3e15, math.nan, math.inf))]
    made = read([kernel("k", 0, 1), *bad, op("aten::mul", 20, 7, external_id=9)])
    assert [us(call.duration_s) for call in made.calls] == [0, 0, 0, 0, 7]
    assert made.metadata["clamped_durations"] == "4"


def test_records_of_another_clock_are_dropped_and_counted(read):
    made = read([kernel("k", 5e12, 1), kernel("stray", 1, 1), op("aten::add", 4e15, 1, external_id=1)])
    assert [a.name for a in made.activities] == ["k"]
    assert made.activities[0].start_s == 0
    assert made.metadata["malformed_events"] == "2"


@pytest.mark.parametrize("indent", [None, 2], ids=["compact", "as Kineto"])
@pytest.mark.parametrize(
    "broken",
    [
        {"ts": "now"},
        {"ts": math.nan},
        {"ts": None},
        {"name": None},
        {"name": ["k"]},
        {"tid": "main"},
        {"args": None},
        {"args": [1]},
        {"args": {"Input Dims": 3}},
        {"args": {"Input Dims": [["x"]]}},
        {"args": {"External id": "x"}},
        {"dur": "long"},
    ],
    ids=str,
)
def test_malformed_events_are_counted(read, broken, indent):
    made = read([kernel("k", 0, 1), {**op("aten::add", 1, 1, external_id=1), **broken}], indent=indent)
    assert made.metadata["malformed_events"] == "1"
    assert len(made.activities) == 1
    assert made.calls == ()


def test_unknown_blocks_per_sm(read):
    (activity,) = read([kernel("k", 0, 1, extra={"blocks per SM": "inf"})]).activities
    assert activity.blocks_per_sm == 0.0


@pytest.mark.parametrize("indent", [None, 2], ids=["compact", "as Kineto"])
def test_operators_are_kept_for_the_first_whole_steps(read, monkeypatch, indent):
    monkeypatch.setattr(trace_kineto, "_BOUNDS", {"cpu_op": 500, "python_function": 900})
    monkeypatch.setattr("ridgeline.trace_stream.BLOCK_BYTES", 20_000)
    steps = []
    for i in range(20):
        steps.append(annotation(f"ProfilerStep#{i}", 1000 * i, 1000))
        steps += [op("aten::add", 1000 * i + j, 1, external_id=i * 100 + j + 1) for j in range(100)]
        steps += [frame("f.py(1): f", 1000 * i + j, 1) for j in range(200)]
        steps += [kernel("k", 1000 * i + j, 1, correlation=i) for j in range(5)]
    random.Random(0).shuffle(steps)
    made = read(steps, indent=indent)
    assert len(made.activities) == 100
    assert len(made.ranges) == 20
    # room for 500 operators is five steps, for 900 frames four and a half
    assert made.metadata["steps_with_calls"] == "4 of 20"
    assert float(made.metadata["calls_until_s"]) == pytest.approx(4e-3)
    assert len(made.calls) == 400
    assert len(made.frames) == 800
    assert max(call.start_s for call in made.calls) < 4e-3
    assert int(made.metadata["dropped_calls"]) == 20 * 300 - 1200


def test_progress_reaches_the_size_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.trace_stream.BLOCK_BYTES", 3000)
    monkeypatch.setattr("ridgeline.trace_stream.PACKED_BYTES", 500)
    for name in ("made.json", "made.json.gz"):
        path = write(tmp_path / name, trace(EVENTS * 20))
        seen = []
        read_trace(path, progress=lambda done, size, seen=seen: seen.append((done, size)))
        assert len(seen) > 3
        assert seen == sorted(seen)
        assert {size for _, size in seen} == {path.stat().st_size}
        assert seen[-1][0] == path.stat().st_size


def test_blocks_may_end_anywhere(read, monkeypatch):
    whole = records(read(EVENTS, name="whole.json"))
    for block_bytes in (1, 7, 64, 500, 1501):
        monkeypatch.setattr("ridgeline.trace_stream.BLOCK_BYTES", block_bytes)
        assert records(read(EVENTS)) == whole
        assert records(read(EVENTS, name="made.json.gz")) == whole


def test_gzip_of_several_members(read, tmp_path):
    text = json.dumps(trace(EVENTS), indent=2).encode()
    path = tmp_path / "joined.json.gz"
    path.write_bytes(gzip.compress(text[:3000]) + gzip.compress(text[3000:]) + b"\0" * 100)
    assert records(read_trace(path)) == records(read(EVENTS))


def test_a_large_trace_stays_out_of_memory(tmp_path):
    """Reading 16 MB takes less than 16 MB of memory above what Python takes."""
    path = tmp_path / "large.json"
    unit = json.dumps(EVENTS, indent=2)[1:-1]
    path.write_text('{"traceEvents": [' + ",".join([unit] * (16_000_000 // len(unit))) + "]}")
    program = (
        "import resource, sys; from ridgeline.trace_reader import read_trace\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); trace = read_trace(sys.argv[1]); print(len(trace.activities), (peak() - before) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    activities, grown_bytes = map(int, done.stdout.split())
    assert activities == 4 * (16_000_000 // len(unit))
    assert grown_bytes < 16_000_000


def test_garbage_collection_is_on_again(read, tmp_path):
    assert gc.isenabled()
    read(EVENTS)
    assert gc.isenabled()
    with pytest.raises(UsageError):
        read_trace(tmp_path / "absent.json")
    assert gc.isenabled()


TEXT = json.dumps(trace(EVENTS), indent=2).encode()
CUT = TEXT[: TEXT.index(b'"plain"')]  # within the ninth of the events, before which stands a label


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("cut.json", CUT, "is cut off after 9 whole events"),
        ("cut.json", TEXT[: TEXT.rindex(b"]")], "is cut off after 15 whole events"),
        ("cut.json.gz", gzip.compress(TEXT)[:-40], "is cut off after"),
        ("head.json", TEXT[:200], 'has no "traceEvents"'),
        ("broken.json", TEXT.replace(b'"ph": "s"', b'"ph"; "s"'), "is not valid JSON soon after event"),
        ("broken.json.gz", b"\x1f\x8b\x08\0" + bytes(range(200)), "is damaged"),
        ("crc.json.gz", gzip.compress(TEXT)[:-8] + bytes(8), "is damaged"),
        ("empty.json", b"", "is empty"),
        ("blank.json", b" \n\n", "is empty"),
        ("empty.json.gz", b"", "is empty"),
        ("plain.json.gz", TEXT, "ends in .gz and is not gzip"),
        ("binary.json", bytes(range(256)), "is not JSON: it begins with"),
        ("text.json", b"Traceback (most recent call last):", "is not JSON: it begins with b'Traceback (m'"),
        ("et.json", b'{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [{"id": 1}]}', "is an execution trace"),
        ("other.json", b'{"benchmarks": []}', 'has no "traceEvents"'),
        ("nested.json", b'{"a": {"traceEvents": []}}', "is damaged before its first event"),
        ("deep.json", b'{"traceEvents": [' + b"[" * 100_000, "is cut off after 0 whole events"),
        ("run.nsys-rep", b"QDSTRM", "nsys export --type sqlite run.nsys-rep"),
        ("run.ncu-rep", b"NVR", "is a report of Nsight Compute"),
    ],
)
def test_what_is_no_whole_trace_is_refused(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(complaint)) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


def test_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is a folder with no trace"):
        read_trace(tmp_path)
    for rank in (1, 0):
        write(tmp_path / f"rank{rank}.json.gz", trace(EVENTS, rank=rank))
    with pytest.raises(UsageError, match=r"2 traces, one of each process, such as rank0\.json\.gz"):
        read_trace(str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot read .*absent\.json: No such file"):
        read_trace(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("events", "remedy"),
    [
        ([op("aten::add", 0, 1, external_id=1)], "ProfilerActivity.CUDA"),
        ([], "ProfilerActivity.CUDA"),
        ([launch(0, 9, correlation=9, name="cudaGraphLaunch")] * 5, "5 launches of CUDA graphs"),
        ([launch(0, 9, correlation=1)], "1 CUDA calls and nothing that ran on the GPU"),
    ],
    ids=["operators only", "nothing", "graph launches", "launches"],
)
def test_a_trace_without_kernels_is_refused(read, events, remedy):
    with pytest.raises(EnvironmentUnusable, match=remedy) as refused:
        read(events)
    assert refused.value.exit_code == 3


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("garbage")


def refuse_or_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        read_trace(path)
    except RidgelineError as refusal:
        assert str(path) in str(refusal)


@settings(deadline=None, max_examples=60)
@given(content=st.binary(max_size=200), wrap=st.booleans(), name=st.sampled_from(["g.json", "g.json.gz"]))
def test_bytes_never_crash(scratch, content, wrap, name):
    text = b'{"traceEvents": [' + content + b"]}" if wrap else content
    refuse_or_read(scratch / name, gzip.compress(text, 1) if wrap and name.endswith("gz") else text)


@settings(deadline=None, max_examples=100)
@given(at=st.integers(0, len(TEXT) - 1), length=st.integers(0, 30), put=st.binary(max_size=8))
def test_damage_never_crashes(scratch, at, length, put):
    refuse_or_read(scratch / "g.json", TEXT[:at] + put + TEXT[at + length :])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=100)
@given(
    event=st.sampled_from(EVENTS),
    field=st.sampled_from(["cat", "ph", "name", "ts", "dur", "tid", "pid", "args"]),
    argument=st.sampled_from(["grid", "block", "Input Dims", "Input type", "correlation", "stream", "External id"]),
    value=JSON,
    indent=st.sampled_from([None, 2]),
)
def test_no_value_of_a_field_crashes(scratch, event, field, argument, value, indent):
    events = [{**event, field: value}, {**event, "args": {**event.get("args", {}), argument: value}}, value, *EVENTS]
    refuse_or_read(scratch / "g.json", json.dumps(trace(events), indent=indent).encode())
