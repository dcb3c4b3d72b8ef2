"""A trace that lacks part of the GPU's work is refused before anything is concluded from it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import traces_made as made
from ridgeline.completeness import check
from ridgeline.errors import EnvironmentUnusable
from ridgeline.trace import Activity, Launch, Range, Trace
from ridgeline.trace_reader import read_trace

REAL = Path(__file__).parent / "fixtures" / "traces"


def graph_replay(kernels: int, *, gap_us: float = 1.0) -> Trace:
    """One graph of 10 µs kernels with equal pauses."""
    pitch_s = (10 + gap_us) * 1e-6
    activities = [Activity(i, "kernel", "k", 20e-6 + i * pitch_s, 10e-6, 0, 7, 9) for i in range(kernels)]
    launch = Launch(500, "cudaGraphLaunch", 0.0, 5e-6, 1, 9)
    return Trace("graph.json", "kineto", (), tuple(activities), launches=(launch,))


def test_graph_launches_without_kernels_are_named_with_both_remedies(tmp_path: Path) -> None:
    events = [
        made.op("aten::empty", 0, 10, external_id=1),
        made.launch(20, 5, correlation=1, name="cudaGraphLaunch"),
        made.launch(40, 5, correlation=2, name="cudaGraphLaunch"),
        made.kernel("copy_kernel", 10, 5, correlation=7),
    ]
    trace = read_trace(made.write(tmp_path / "made.json", made.trace(events)))
    with pytest.raises(EnvironmentUnusable, match="2 of 2 CUDA graph launches left no kernels") as refused:
        check(trace, 0.01)
    assert "before the capture" in str(refused.value) and "CUPTI" in str(refused.value)
    assert refused.value.exit_code == 3


def test_a_trace_without_gpu_work_is_refused() -> None:
    with pytest.raises(EnvironmentUnusable, match="no GPU work"):
        check(Trace("cpu.json", "kineto", (), ()), 0.01)


def test_nobody_timed_it() -> None:
    assert check(graph_replay(10), None) is None


@pytest.mark.parametrize("timed_us", [98.1, 100.0, 104.0])
def test_kernels_that_account_for_the_time_give_their_own_ratio(timed_us: float) -> None:
    assert check(graph_replay(10), timed_us * 1e-6) == pytest.approx(100 / timed_us)


def test_pauses_count_as_far_as_needed() -> None:
    assert check(graph_replay(10), 108e-6) == 1.0  # 100 µs of kernels, 9 µs of pauses


@pytest.mark.parametrize("kernels", [8, 5])
def test_missing_kernels_are_missed(kernels: int) -> None:
    with pytest.raises(EnvironmentUnusable, match="kernels are missing, or another process used this GPU") as refused:
        check(graph_replay(kernels), 109e-6)
    assert "nvidia-smi's list of processes" in str(refused.value)


def test_a_long_pause_inside_a_graph_hides_a_kernel() -> None:
    """With its first and last kernel in place a graph spans the right time, and yet lacks half of its work."""
    with pytest.raises(EnvironmentUnusable, match="kernels are missing"):
        check(graph_replay(5, gap_us=14), 106e-6)


def test_more_work_than_was_timed_is_another_step() -> None:
    with pytest.raises(EnvironmentUnusable, match="slower or other steps"):
        check(graph_replay(10), 80e-6)


def launched(count: int, *, lost: int, capture: bool = False) -> Trace:
    """Kernels and their launches, the first `lost` of which left no kernel."""
    launches = [Launch(100 + i, "cudaLaunchKernel", i * 10e-6, 5e-6, 1, i + 1) for i in range(count)]
    if capture:
        begin = Launch(90, "cudaStreamBeginCapture", -1e-6, 0.5e-6, 1, 900)
        end = Launch(91, "cudaStreamEndCapture", lost * 10e-6 - 2e-6, 1e-6, 1, 901)
        launches = sorted([begin, end, *launches], key=lambda each: each.start_s)
    kernels = [Activity(i, "kernel", "k", 5e-6 + i * 10e-6, 8e-6, 0, 7, i + 1) for i in range(lost, count)]
    return Trace("eager.json", "kineto", (), tuple(kernels), launches=tuple(launches))


def test_launches_that_left_no_kernel_are_counted() -> None:
    with pytest.raises(EnvironmentUnusable, match=r"10 of \d+ kernel launches left no kernel"):
        check(launched(40, lost=10), None)


@pytest.mark.parametrize("trace", [launched(40, lost=1), launched(40, lost=10, capture=True)], ids=["few", "capture"])
def test_a_launch_cut_off_or_captured_is_no_loss(trace: Trace) -> None:
    assert check(trace, None) is None


def waiting(*, kept: slice = slice(None), late_us: float = 840.0, steps: int = 4) -> Trace:
    """Steps of a graph of ten 10 µs kernels and one kernel by itself, 1 ms apart; the host launches both `late_us` in.

    `kept` are the graph's kernels that the profiler saw.
    """
    launches, activities, ranges = [], [], []
    for step in range(steps):
        begin_s, alone, graph = step * 1e-3, 1 + 2 * step, 2 + 2 * step
        launched_s = begin_s + late_us * 1e-6
        ranges.append(Range(10_000 + step, f"ProfilerStep#{step}", begin_s, 1e-3, 1))
        launches.append(Launch(alone, "cudaLaunchKernel", launched_s, 2e-6, 1, alone))
        launches.append(Launch(graph, "cudaGraphLaunch", launched_s + 2e-6, 2e-6, 1, graph))
        # it takes 121 µs, so that all of the graph is launched long before it begins
        activities.append(Activity(100 * alone, "kernel", "k", launched_s + 4e-6, 121e-6, 0, 7, alone))
        starts = [begin_s + 0.97e-3 + i * 11e-6 for i in range(10)]
        activities += [Activity(100 * graph, "kernel", "k", start_s, 10e-6, 0, 7, graph) for start_s in starts[kept]]
    return Trace("waits.json", "kineto", (), tuple(activities), launches=tuple(launches), ranges=tuple(ranges))


@pytest.mark.parametrize("timed_us", [400.0, 999.0, 5020.0])
def test_a_step_that_waits_for_its_host_may_take_any_time(timed_us: float) -> None:
    """Its pauses are the host's, which the profiler slows, and another process beside it may slow more."""
    assert check(waiting(), timed_us * 1e-6) == 1.0


@pytest.mark.parametrize("kept", [slice(6, None), slice(0, 10, 9)], ids=["first", "middle"])
def test_kernels_are_missed_where_the_host_was_not_late(kept: slice) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"of GPU work and .* of pauses in the trace, and 5\.02 ms by events"):
        check(waiting(kept=kept), 5.02e-3)


def test_a_step_whose_work_is_a_graphs_is_held_to_its_time() -> None:
    """A graph's last kernels would go unseen in the wait for the next launch."""
    trace = waiting()
    graphs = [activity for activity in trace.activities if activity.correlation % 2 == 0]
    launches = [launch for launch in trace.launches if launch.name == "cudaGraphLaunch"]
    with pytest.raises(EnvironmentUnusable, match="kernels are missing"):
        check(replace(trace, activities=tuple(graphs), launches=tuple(launches)), 5.02e-3)


def test_a_step_that_no_other_follows_is_held_to_its_time() -> None:
    with pytest.raises(EnvironmentUnusable, match="kernels are missing"):
        check(waiting(steps=1), 5.02e-3)


def test_kernels_launched_one_by_one_are_vouched_for_by_their_launches() -> None:
    """Ten a step, each launched when the GPU had finished the one before."""
    launches = [Launch(i, "cudaLaunchKernel", i * 100e-6, 6e-6, 1, i + 1) for i in range(40)]
    kernels = [Activity(100 + i, "kernel", "k", i * 100e-6 + 8e-6, 2e-6, 0, 7, i + 1) for i in range(40)]
    steps = [Range(200 + i, f"ProfilerStep#{i}", i * 1e-3 - 1e-6, 1e-3, 1) for i in range(4)]
    trace = Trace("eager.json", "kineto", (), tuple(kernels), launches=tuple(launches), ranges=tuple(steps))
    assert check(trace, 5.02e-3) == 1.0
    with pytest.raises(EnvironmentUnusable, match="slower or other steps"):
        check(trace, 15e-6)


def shared_gpu(other_us: float) -> Trace:
    """Steps of ten kernels launched at once; after each the GPU is another process's for `other_us`."""
    launches, activities, ranges = [], [], []
    step_s = 10 * (20 + other_us) * 1e-6
    for step in range(4):
        ranges.append(Range(900 + step, f"ProfilerStep#{step}", step * step_s, step_s, 1))
        for i in range(10):
            one = 10 * step + i + 1
            launches.append(Launch(one, "cudaLaunchKernel", step * step_s + i * 3e-6, 2e-6, 1, one))
            start_s = step * step_s + 6e-6 + i * (20 + other_us) * 1e-6
            activities.append(Activity(100 + one, "kernel", "k", start_s, 20e-6, 0, 7, one))
    return Trace("shared.json", "kineto", (), tuple(activities), launches=tuple(launches), ranges=tuple(ranges))


def test_another_process_on_the_gpu_looks_like_missing_kernels() -> None:
    """Its time is in the events, and in the trace's pauses as much as it took then: the host was not late for those."""
    alone_s, shared = 10 * 20e-6, shared_gpu(20.0)
    assert check(shared_gpu(0.0), alone_s) == pytest.approx(1.0)
    assert check(shared, 414e-6) == pytest.approx(0.966, abs=1e-3)  # it took a little more while steps were timed
    with pytest.raises(EnvironmentUnusable, match=r"78\.9 % covered.*, or another process used this GPU"):
        check(shared, 507e-6)


def test_a_gpu_time_of_zero_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="gpu_s must be above 0"):
        check(graph_replay(3), 0.0)


@pytest.mark.parametrize("name", ["yolo26n-graph", "ddpm-graph", "syncing"])
def test_real_traces_are_complete(name: str) -> None:
    timed_s = json.loads((REAL / f"{name}.facts.json").read_text())["in_a_row_s"]
    coverage = check(read_trace(REAL / f"{name}.json.gz"), timed_s)
    assert coverage is not None and 0.95 <= coverage <= 1.02


def test_a_real_graph_without_a_fifth_of_its_kernels_is_refused() -> None:
    trace = read_trace(REAL / "ddpm-graph.json.gz")
    kept = tuple(
        a for i, a in enumerate(trace.activities) if not len(trace.activities) * 0.4 < i < 0.6 * len(trace.activities)
    )
    thinned = Trace(trace.path, trace.source, trace.devices, kept, launches=trace.launches, ranges=trace.ranges)
    with pytest.raises(EnvironmentUnusable, match="kernels are missing"):
        check(thinned, 0.022137)
