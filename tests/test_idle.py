"""Idle time by cause, the host's waits and their bubbles, and the sum that every step keeps."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces_made as made
from ridgeline.attribution import step_of
from ridgeline.overlap import alone_and_shared, between, cut, length, union
from ridgeline.profile_tables import profile_of
from ridgeline.step_view import CAUSES, Step
from ridgeline.trace import Activity, Launch, Range, Trace
from ridgeline.trace_reader import read_trace


def step_from(tmp_path: Path, events: list[made.Event]) -> Step:
    return step_of(read_trace(made.write(tmp_path / "made.json", made.trace(events))))


def idle_us(step: Step) -> dict[str, float]:
    causes: dict[str, float] = {}
    for gap in step.gaps:
        causes[gap.cause] = causes.get(gap.cause, 0.0) + gap.duration_s / 1e-6
    return {cause: round(duration_us, 3) for cause, duration_us in causes.items()}


def test_a_late_launch(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 20, correlation=1),
        made.launch(90, 5, correlation=2),
        made.kernel("b", 100, 20, correlation=2),
    ]
    step = step_from(tmp_path, events)
    assert idle_us(step) == {"launch": 70}
    (late,) = step.gaps
    assert late.evidence == (next(launch.id for launch in step.launches if launch.correlation == 2),)


def test_the_loader_and_the_launch_after_it_share_a_gap(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 20, correlation=1),
        made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 60),
        made.launch(90, 5, correlation=2),
        made.kernel("b", 100, 20, correlation=2),
    ]
    assert idle_us(step_from(tmp_path, events)) == {"loader": 50, "launch": 20}


def test_loading_kernels_counts_as_compilation_even_within_the_loader(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 20, correlation=1),
        made.annotation("load_batch", 40, 50),
        made.launch(50, 20, correlation=8, name="cuModuleLoadData"),
        made.launch(90, 5, correlation=2),
        made.kernel("b", 100, 20, correlation=2),
    ]
    assert idle_us(step_from(tmp_path, events)) == {"launch": 20, "loader": 30, "compile": 20}


def test_a_blocking_copy_keeps_the_gpu_waiting(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 20, correlation=1),
        made.launch(40, 60, correlation=2, name="cudaMemcpyAsync"),
        made.memcpy("Memcpy HtoD (Pageable -> Device)", 95, 10, size_bytes=4096, correlation=2),
    ]
    assert idle_us(step_from(tmp_path, events)) == {"launch": 10, "copy": 55}


def item(at_us: float, *, wait_us: float, copied_us: float) -> list[made.Event]:
    """`.item()`: a copy of 4 bytes to the host and a synchronisation."""
    return [
        made.op("aten::item", at_us, wait_us + 12, external_id=50),
        made.op("aten::_local_scalar_dense", at_us + 1, wait_us + 10, external_id=51),
        made.frame("train.py(31): main", at_us - 1, wait_us + 20),
        made.launch(at_us + 2, 5, correlation=60, external_id=51, name="cudaMemcpyAsync"),
        made.memcpy("Memcpy DtoH (Device -> Pinned)", copied_us, 2, size_bytes=4, correlation=60),
        made.launch(at_us + 8, wait_us, correlation=61, external_id=51, name="cudaStreamSynchronize"),
    ]


def test_a_wait_for_real_work_leaves_a_bubble(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 200, correlation=1),
        *item(20, wait_us=190, copied_us=211),  # ends at 218
        made.launch(240, 5, correlation=2),
        made.kernel("b", 250, 20, correlation=2),
    ]
    step = step_from(tmp_path, events)
    assert idle_us(step) == {"launch": 1, "sync": 37}
    (sync,) = step.syncs
    assert sync.call is not None and sync.call.name == "aten::item"
    assert sync.source == "train.py:31"
    assert sync.waited_s == pytest.approx(190e-6, abs=1e-9)
    assert sync.bubble_s == pytest.approx(32e-6)
    assert sync.launch.id in step.gaps[-1].evidence


def test_a_copy_to_pageable_memory_waits_by_itself_and_with_its_synchronisation_once(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 200, correlation=1),
        made.launch(20, 200, correlation=2, name="cudaMemcpyAsync"),
        made.memcpy("Memcpy DtoH (Device -> Pageable)", 211, 2, size_bytes=4, correlation=2),
        made.launch(222, 3, correlation=3, name="cudaStreamSynchronize"),
        made.launch(227, 3, correlation=4, name="cudaStreamSynchronize"),
        made.launch(240, 5, correlation=5),
        made.kernel("b", 250, 20, correlation=5),
    ]
    first, second = step_from(tmp_path, events).syncs
    assert first.waited_s == pytest.approx(203e-6)
    assert first.bubble_s == pytest.approx(25e-6)
    assert (second.waited_s, second.bubble_s) == (pytest.approx(3e-6), 0)


def test_a_wait_of_a_late_host_is_not_blamed(tmp_path: Path) -> None:
    """The GPU had run dry before the wait began: without it the next kernel would have come no sooner."""
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 20, correlation=1),
        *item(100, wait_us=5, copied_us=109),
        made.launch(140, 5, correlation=2),
        made.kernel("b", 150, 20, correlation=2),
    ]
    step = step_from(tmp_path, events)
    assert idle_us(step) == {"launch": 79 + 39}
    assert [sync.bubble_s for sync in step.syncs] == [0]


def test_recorded_waits_say_how_long_the_host_stood(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 200, correlation=1),
        made.launch(20, 195, correlation=3, name="cudaDeviceSynchronize"),
        made.sync_edge("Context Sync", 25, 185, correlation=3),
        made.launch(240, 5, correlation=2),
        made.kernel("b", 250, 20, correlation=2),
    ]
    (sync,) = step_from(tmp_path, events).syncs
    assert sync.waited_s == pytest.approx(185e-6)


def test_clipping_and_the_optimizer_are_named_around_a_wait(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1),
        made.kernel("a", 10, 200, correlation=1),
        made.frame("torch/nn/utils/clip_grad.py(200): clip_grad_norm_", 15, 220),
        *item(20, wait_us=190, copied_us=211),
        made.launch(240, 5, correlation=2),
        made.kernel("b", 250, 20, correlation=2),
    ]
    assert step_from(tmp_path, events).syncs[0].under == "clip_grad_norm_"


def test_pauses_inside_a_graph_are_its_launch(tmp_path: Path) -> None:
    events = [
        made.launch(0, 5, correlation=1, name="cudaGraphLaunch"),
        made.kernel("a", 10, 20, correlation=1),
        made.kernel("b", 31, 20, correlation=1),
    ]
    assert idle_us(step_from(tmp_path, events)) == {"launch": 1}


def test_without_launches_the_cause_is_unknown(tmp_path: Path) -> None:
    assert idle_us(step_from(tmp_path, [made.kernel("a", 0, 10), made.kernel("b", 30, 10)])) == {"unknown": 20}


def test_the_loader_of_a_real_trace_takes_most_of_its_step() -> None:
    path = Path(__file__).parent / "fixtures" / "traces" / "loader-bound.json.gz"
    step = step_of(read_trace(path))
    loader_s = sum(gap.duration_s for gap in step.gaps if gap.cause == "loader")
    assert loader_s > 0.85 * step.duration_s
    assert step.loader_s == pytest.approx(0.050, rel=0.05)


# -- the sum that every step keeps -------------------------------------------------------------------------------------

MICROSECONDS = st.integers(0, 400)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Kernels on overlapping streams, launches early and late, waits, loader ranges and steps in any arrangement."""
    activities, launches = [], []
    for correlation in range(1, draw(st.integers(2, 12))):
        start_s = draw(MICROSECONDS) * 1e-6
        kind = draw(st.sampled_from(["kernel", "kernel", "memcpy", "memset"]))
        activities.append(
            Activity(
                id=correlation,
                kind=kind,
                name=draw(st.sampled_from(["a", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)"])),
                start_s=start_s,
                duration_s=draw(st.integers(0, 80)) * 1e-6,
                device=0,
                stream=draw(st.integers(7, 9)),
                correlation=correlation,
            )
        )
        name = draw(st.sampled_from(["cudaLaunchKernel", "cudaMemcpyAsync", "cudaGraphLaunch"]))
        launch_s = max(start_s - draw(st.integers(0, 60)) * 1e-6, 0.0)
        if draw(st.booleans()):
            launches.append(Launch(100 + correlation, name, launch_s, draw(st.integers(1, 50)) * 1e-6, 1, correlation))
    for place in range(draw(st.integers(0, 4))):
        start_s, wait_s = draw(MICROSECONDS) * 1e-6, draw(st.integers(1, 90)) * 1e-6
        launches.append(Launch(200 + place, "cudaStreamSynchronize", start_s, wait_s, 1, 1000 + place))
    names = st.sampled_from(["enumerate(DataLoader)#x.__next__", "Runtime Triggered Module Loading", "mine"])
    ranges = [
        Range(300 + place, draw(names), draw(MICROSECONDS) * 1e-6, draw(st.integers(0, 90)) * 1e-6, 1)
        for place in range(draw(st.integers(0, 4)))
    ]
    steps = draw(st.integers(0, 3))
    ranges += [Range(400 + n, f"ProfilerStep#{n}", n * 130e-6, 130e-6, 1) for n in range(steps)]
    by_start = sorted(launches, key=lambda each: each.start_s)
    return Trace(
        path="drawn.json",
        source="kineto",
        devices=(),
        activities=tuple(sorted(activities, key=lambda each: each.start_s)),
        launches=tuple(by_start),
        ranges=tuple(sorted(ranges, key=lambda each: each.start_s)),
    )


@settings(max_examples=50, deadline=None)
@given(traces())
def test_rows_without_overlap_and_idle_time_make_up_the_step(trace: Trace) -> None:
    step = step_of(trace)
    profile = profile_of(step, subject="", command="", environment={}, wall=None, coverage=None)
    tolerance = 1e-12
    idle_s = sum(profile.idle.values())
    rows_s = sum(row.total_s for row in profile.kernels)
    assert rows_s - profile.overlap_s + idle_s == pytest.approx(profile.traced_step_s, abs=tolerance)
    assert sum(row.total_s for row in profile.by_name) == pytest.approx(rows_s, abs=tolerance)
    assert sum(bar.seconds for bar in profile.waterfall) == pytest.approx(profile.traced_step_s, abs=tolerance)
    covered = union((k.activity.start_s, k.activity.end_s) for k in step.kernels)
    assert length(covered) == pytest.approx(step.busy_s, abs=tolerance)
    for gap in step.gaps:
        assert gap.cause in CAUSES and gap.duration_s > 0
        # nothing ran in a gap
        assert length(cut((gap.start_s, gap.start_s + gap.duration_s), covered)) < tolerance
    for kernel in step.kernels:
        assert -tolerance <= kernel.exposed_s <= kernel.seconds + tolerance
    assert all(sync.bubble_s <= idle_s + tolerance for sync in step.syncs)


INTERVALS = st.lists(st.tuples(MICROSECONDS, MICROSECONDS).map(lambda pair: (min(pair), max(pair))), max_size=8)


@settings(max_examples=30, deadline=None)
@given(INTERVALS)
def test_overlap_agrees_with_counting_microseconds(intervals: list[tuple[int, int]]) -> None:
    running = [[i for i, (start, end) in enumerate(intervals) if start <= t < end] for t in range(401)]
    alone, shared = alone_and_shared(intervals)
    assert length(union(intervals)) == sum(bool(now) for now in running)
    assert length(between(union(intervals), 0, 400)) == 400 - sum(bool(now) for now in running)
    for i, _ in enumerate(intervals):
        assert alone[i] == sum(now == [i] for now in running)
        assert shared[i] == pytest.approx(sum(1 / len(now) for now in running if i in now))
