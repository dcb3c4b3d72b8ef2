"""The timing protocol on the CPU, its refusals, nvidia-smi's text, and CUDA-graph replay over a fake graph."""

import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import timing
from ridgeline.cudagraph import Captured, capture
from ridgeline.errors import EnvironmentUnusable, NotEngaged
from ridgeline.timing import Timing, differs, gpu_state, parse_gpu_state, time_callable, time_many


def _sleep_2ms():
    time.sleep(0.002)


def test_a_known_delay_is_timed():
    result = time_callable(_sleep_2ms, warmup=1, repeats=9, method="host", log_clocks=False)
    assert 0.002 <= result.low_s <= result.median_s <= result.high_s <= result.p90_s < 0.2
    assert (result.n, result.method, result.l2) == (9, "host", "warm")
    assert result.spread_s == result.high_s - result.low_s


def test_candidates_are_interleaved_and_rotated():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    results = time_many(calls, warmup=1, repeats=5, method="host", log_clocks=False)
    assert list(results) == ["a", "b", "c"]
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc" + "bca"


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=5, max_size=40))
def test_statistics_are_inclusive_quantiles(samples):
    result = timing._statistics(samples, "host", "warm", None, None)
    twentieths = statistics.quantiles(samples, n=20, method="inclusive")
    expected = [twentieths[i] for i in (4, 9, 14, 17)]
    assert [result.low_s, result.median_s, result.high_s, result.p90_s] == pytest.approx(expected)


class VirtualGpu:
    """A clock in milliseconds that calls and events move and read."""

    def __init__(self):
        self.now_ms, self.log = 0.0, []

    def call(self, name, duration_ms):
        def run():
            self.log.append(name)
            self.now_ms += duration_ms

        return run

    def event(self, enable_timing):
        assert enable_timing
        gpu = self

        class Event:
            def record(self):
                gpu.log.append("|")
                self.at_ms = gpu.now_ms

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

        return Event()


@pytest.mark.parametrize(("l2", "log"), [("cold", "E|a|E|b|"), ("warm", "Ea|a|Eb|b|")])
def test_events_enclose_one_call_after_the_eviction(monkeypatch, l2, log):
    gpu = VirtualGpu()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: gpu.log.append("S"))
    monkeypatch.setattr("torch.cuda.Event", gpu.event)
    monkeypatch.setattr(timing, "evictor", lambda: gpu.call("E", 7.0))
    calls = {"a": gpu.call("a", 2.0), "b": gpu.call("b", 3.0)}
    results = time_many(calls, warmup=1, repeats=5, l2=l2, log_clocks=False)
    text = "".join(gpu.log)
    assert text.startswith("ab" + log)
    assert text.endswith("|S")
    assert text.count("S") == 1
    assert results["a"].median_s == pytest.approx(2e-3)
    assert results["b"].median_s == pytest.approx(3e-3)
    assert {(r.method, r.l2) for r in results.values()} == {("cuda-event", l2)}


def test_the_host_timer_waits_for_the_gpu_on_both_sides(monkeypatch):
    log = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: log.append("S"))
    monkeypatch.setattr(timing, "evictor", lambda: lambda: log.append("E"))
    monkeypatch.setattr(timing, "gpu_state", lambda: parse_gpu_state("T4, 535, 1590, 5001, 40, 60, 70, 3, 1590"))
    result = time_callable(lambda: log.append("a"), warmup=1, repeats=5, l2="cold", method="host")
    assert "".join(log) == "a" + "ESaS" * 5
    assert (result.clocks_mhz, result.temperature_c) == (1590, 40)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 4}, "repeats must be at least 5, got 4"),
        ({"warmup": 0}, "warmup must be at least 1, got 0"),
        ({"l2": "hot"}, "l2 must be 'warm' or 'cold', got 'hot'"),
        ({"method": "wall"}, "got 'wall'"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        time_callable(lambda: None, **settings)


def test_nothing_to_time_is_refused():
    with pytest.raises(ValueError, match="no calls"):
        time_many({})
    with pytest.raises(ValueError, match="'a' must be callable, got Tensor"):
        time_many({"a": torch.ones(1)})


@pytest.mark.parametrize("settings", [{"l2": "cold"}, {"method": "cuda-event"}])
def test_gpu_settings_need_a_gpu(settings, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvironmentUnusable, match="needs a GPU"):
        time_callable(lambda: None, **settings)


def _timing(low_s, high_s, method="host", l2="warm"):
    return Timing((low_s + high_s) / 2, low_s, high_s, high_s, 9, method, l2)


def test_differs_only_when_the_intervals_are_apart():
    assert differs(_timing(1.0, 2.0), _timing(2.1, 3.0))
    assert differs(_timing(2.1, 3.0), _timing(1.0, 2.0))
    assert not differs(_timing(1.0, 2.0), _timing(2.0, 3.0))
    assert not differs(_timing(1.0, 4.0), _timing(2.0, 3.0))
    with pytest.raises(ValueError, match="cannot compare host/warm with cuda-event/cold"):
        differs(_timing(1.0, 2.0), _timing(1.0, 2.0, "cuda-event", "cold"))


def test_nvidia_smi_text():
    state = parse_gpu_state(
        "NVIDIA H200, 580.159.04, 1980, 3201, 34, 118.52, 700.00, 0, 1980\nNVIDIA H200, 580, 1, 1, 1, 1, 1, 1, 1\n"
    )
    assert state is not None
    assert (state.name, state.driver) == ("NVIDIA H200", "580.159.04")
    assert (state.sm_clock_mhz, state.memory_clock_mhz, state.temperature_c) == (1980, 3201, 34)
    assert (state.power_w, state.power_limit_w, state.utilization_percent) == (118.52, 700, 0)
    assert state.sm_clock_max_mhz == 1980
    unknown = parse_gpu_state("Orin, 540.4.0, [N/A], [N/A], [N/A], [Not Supported], [N/A], [N/A], [N/A]")
    assert unknown is not None
    assert (unknown.sm_clock_mhz, unknown.power_w) == (None, None)
    assert parse_gpu_state("No devices were found\n") is None
    assert parse_gpu_state("") is None


def _fake_nvidia_smi(folder, monkeypatch, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_gpu_state_runs_nvidia_smi(tmp_path, monkeypatch):
    _fake_nvidia_smi(tmp_path, monkeypatch, "echo 'Tesla T4, 535.1, 1590, 5001, 40, 60, 70, 3, 1590'")
    state = gpu_state()
    assert state is not None
    assert (state.name, state.utilization_percent) == ("Tesla T4", 3)
    _fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed' ; exit 9")
    assert gpu_state() is None


def test_gpu_state_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state() is None


# --- capture -----------------------------------------------------------------------------------------------------


class FakeGraph:
    """Doubles the input buffer into the output buffer, as a captured `2 * x` would."""

    def __init__(self, inputs, output):
        self.inputs, self.output, self.replays = inputs, output, 0

    def replay(self):
        self.replays += 1
        self.output.copy_(2 * self.inputs[0])


@pytest.fixture
def captured():
    inputs, output = (torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)), torch.zeros(2, 3)
    return Captured(inputs, output, FakeGraph(inputs, output))


def test_replay_fills_the_static_buffers(captured):
    x, labels = torch.arange(6.0).reshape(3, 2).t(), torch.arange(4)
    assert captured.replay(x, labels) is captured.outputs
    torch.testing.assert_close(captured.outputs, 2 * x)
    assert captured.inputs[1].tolist() == [0, 1, 2, 3]
    captured.inputs[0].fill_(5)
    assert captured.replay().unique().tolist() == [10]
    assert captured.graph.replays == 2


@pytest.mark.parametrize(
    ("new_inputs", "message"),
    [
        ((torch.ones(2, 3),), "captured with 2 inputs, got 1"),
        ((torch.ones(2, 4), torch.ones(4).long()), r"input 0 must be float32 \[2, 3\] on cpu .* got float32 \[2, 4\]"),
        ((torch.ones(2, 3), torch.ones(4)), r"input 1 must be int64 \[4\] .* got float32 \[4\]"),
        ((torch.ones(2, 3, device="meta"), torch.ones(4).long()), "on meta"),
        ((torch.ones(1, 3), torch.ones(4).long()), "input 0"),  # broadcasting would have been silent
    ],
)
def test_replay_refuses_other_inputs_and_leaves_the_buffers(captured, new_inputs, message):
    with pytest.raises(ValueError, match=message):
        captured.replay(*new_inputs)
    assert captured.graph.replays == 0
    assert captured.inputs[0].count_nonzero() == 0


def test_capture_needs_a_gpu_and_a_warm_up(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvironmentUnusable, match="needs a GPU"):
        capture(torch.neg, (torch.ones(1),))
    with pytest.raises(ValueError, match=r"warmup must be at least 1 .*, got 0"):
        capture(torch.neg, (torch.ones(1),), warmup=0)


def test_capture_refuses_inputs_off_the_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match=r"input 0 must be on the current GPU, got float32 \[1\] on cpu"):
        capture(torch.neg, (torch.ones(1),))


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_event_and_host_timers_agree_on_a_large_copy():
    # the host timer also sees one launch and one synchronisation, about 13 µs on an H200: 1 GiB makes that 2.5 %
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    results = {m: time_callable(lambda: y.copy_(x), repeats=20, l2="cold", method=m) for m in ("cuda-event", "host")}
    assert results["host"].median_s == pytest.approx(results["cuda-event"].median_s, rel=0.05)
    assert results["host"].clocks_mhz is None or results["host"].clocks_mhz > 100


@pytest.mark.gpu
def test_cold_is_no_faster_than_warm_on_data_that_fits_in_l2():
    x = torch.randn(2**20, device="cuda")  # 4 MiB
    y = torch.empty_like(x)
    cold, warm = (time_callable(lambda: torch.neg(x, out=y), l2=l2, repeats=100) for l2 in ("cold", "warm"))
    assert warm.median_s < cold.median_s


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs():
    weight = torch.randn(64, 64, device="cuda")
    x, other = torch.randn(2, 8, 64, device="cuda")
    graph = capture(lambda t: t @ weight, (x,))
    torch.testing.assert_close(graph.replay(), x @ weight)
    torch.testing.assert_close(graph.replay(other), other @ weight)


@pytest.mark.gpu
def test_a_synchronising_call_is_not_engaged():
    x = torch.ones(4, device="cuda")
    with pytest.raises(NotEngaged, match="cannot become a CUDA graph"):
        capture(lambda t: t.sum().item(), (x,))
    torch.testing.assert_close(capture(torch.neg, (x,)).replay(), -x)  # the failed capture left no trace
