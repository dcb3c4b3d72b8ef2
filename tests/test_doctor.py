"""The diagnosis with and without a GPU, and the measured ceilings: formulas, storage, report."""

import dataclasses
import json
import os

import pytest
import torch

from ridgeline import ceilings, doctor
from ridgeline.cache import cache_path, write_json
from ridgeline.ceilings import Ceilings, load_ceilings, measure_ceilings, pipes_of
from ridgeline.doctor import Check, Diagnosis, diagnose
from ridgeline.errors import EnvironmentUnusable
from ridgeline.specs import ACCUMULATE, find_spec
from ridgeline.timing import GpuState, Timing

STATE = GpuState("NVIDIA H200", "580.159.04", 1980, 3201, 34, 118, 700, 0)
CEILINGS = Ceilings(
    gpu="NVIDIA H200",
    date="2026-01-02T03:04:05+00:00",
    torch="2.11.0+cu130",
    driver="580.159.04",
    clocks_mhz=1980,
    temperature_c=40,
    power_limit_w=700,
    utilization_percent=0,
    peaks={"bandwidth": 4.28e12, "tensor_bf16": 673e12, "tensor_fp8": 1335e12},
    conv={"tensor_bf16 32x256x64x64": 669e12},
    kernel_gap_s=0.94e-6,
    graph_launch_s=4.4e-6,
    drift=0.001,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "gpu_state", lambda: None)


class Properties:
    name, major, minor, multi_processor_count, L2_cache_size = "NVIDIA H200", 9, 0, 132, 2**20


@pytest.fixture
def fake_gpu(monkeypatch):
    properties = type("OneGpu", (Properties,), {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: properties.name)
    monkeypatch.setattr(doctor, "gpu_state", lambda: STATE)
    monkeypatch.setattr(ceilings, "gpu_state", lambda: STATE)
    return properties


def _row(diagnosis, name):
    return next(row for row in diagnosis.rows if row.name == name)


def test_a_missing_gpu_is_no_problem(no_gpu):
    diagnosis = diagnose()
    assert diagnosis.problems == []
    assert diagnosis.exit_code == 0
    assert "works without a GPU" in _row(diagnosis, "GPU").advice
    assert torch.__version__ in _row(diagnosis, "torch").value
    text = "\n".join(diagnosis.lines())
    assert all(name in text for name in ("Python", "torch", "Triton", "numpy", "driver", "cache folder"))


def test_measuring_needs_a_gpu(no_gpu):
    with pytest.raises(EnvironmentUnusable, match="torch sees none"):
        diagnose(measure=True)


def test_a_driver_that_torch_cannot_use_is_a_problem(no_gpu, monkeypatch):
    monkeypatch.setattr(doctor, "gpu_state", lambda: STATE)
    monkeypatch.setattr(ceilings, "gpu_state", lambda: STATE)
    diagnosis = diagnose()
    assert diagnosis.exit_code == 3
    assert diagnosis.problems == [
        "torch cannot use the NVIDIA H200 that the driver sees: "
        "install a CUDA build of torch that driver 580.159.04 supports"
    ]


def test_a_known_gpu_has_its_data_sheet(fake_gpu):
    diagnosis = diagnose()
    assert diagnosis.problems == []
    assert _row(diagnosis, "GPU").value == "NVIDIA H200, sm_90, 132 SMs"
    assert _row(diagnosis, "data sheet").value.startswith("NVIDIA H200: NVIDIA H200 data sheet")
    assert "--measure" in _row(diagnosis, "ceilings").advice


def test_an_unknown_gpu_is_a_problem_with_the_way_out(fake_gpu):
    fake_gpu.name = "NVIDIA H100 NVL"
    diagnosis = diagnose()
    assert diagnosis.exit_code == 3
    assert "'NVIDIA H100 NVL'" in diagnosis.problems[0]
    assert "--gpu FILE.toml" in diagnosis.problems[0]


def test_triton_missing(no_gpu, monkeypatch):
    monkeypatch.setattr(doctor, "triton", None)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    assert diagnose().problems == ["Triton does not import, so no kernel can run: pip install triton"]
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    assert diagnose().problems == []


def test_an_unwritable_cache_is_a_problem(no_gpu, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "file"))
    (problem,) = diagnose().problems
    assert "set RIDGELINE_CACHE_DIR" in problem


@pytest.mark.parametrize(
    ("text", "user", "value", "advised"),
    [
        ("RmProfilingAdminOnly: 1\n", 1000, "allowed to root only", True),
        ("A: 2\nRmProfilingAdminOnly: 1\n", 0, "allowed to root", False),
        ("RmProfilingAdminOnly: 0\n", 1000, "allowed to every user", False),
        ("Other: 1\n", 1000, "unknown", False),
    ],
)
def test_counter_permission(tmp_path, monkeypatch, text, user, value, advised):
    (tmp_path / "params").write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    row = doctor._counters(tmp_path / "params")
    assert (row.ok, row.value, bool(row.advice)) == (True, value, advised)


def test_lines_mark_the_bad_rows():
    diagnosis = Diagnosis((Check("a", "1"), Check("long name", "2", False, "do this")))
    assert list(diagnosis.lines()) == ["ok   a          1", "BAD  long name  2", " " * 16 + "do this"]
    assert json.loads(diagnosis.to_json())["problems"] == ["do this"]


# --- ceilings ----------------------------------------------------------------------------------------------------


def test_ceilings_survive_storage(fake_gpu):
    assert load_ceilings("NVIDIA H200") is None
    write_json(cache_path("ceilings", "NVIDIA H200"), dataclasses.asdict(CEILINGS))
    assert load_ceilings("NVIDIA H200") == CEILINGS
    assert load_ceilings("NVIDIA L4") is None
    diagnosis = diagnose()
    assert diagnosis.ceilings == CEILINGS
    assert json.loads(diagnosis.to_json())["ceilings"]["peaks"]["tensor_bf16"] == 673e12
    text = "\n".join(diagnosis.lines())
    for figure in ("4.28 TB/s", "673 TFLOP/s", "1.33 PFLOP/s", "669 TFLOP/s", "940 ns", "4.40 µs", "1980 MHz", "700 W"):
        assert figure in text
    assert "caution" not in text


@pytest.mark.parametrize("stored", [[], {"schema": 1}, {**dataclasses.asdict(CEILINGS), "schema": 0}])
def test_ceilings_of_another_format_are_ignored(stored, caplog):
    write_json(cache_path("ceilings", "NVIDIA H200"), stored)
    assert load_ceilings("NVIDIA H200") is None
    assert "not in this version's format" in caplog.text


def test_unsteady_measurements_carry_a_caution():
    shaky = dataclasses.replace(CEILINGS, drift=-0.08, utilization_percent=40)
    assert len(shaky.cautions) == 2
    assert "-8.0 %" in shaky.cautions[0]
    assert "40 % busy" in shaky.cautions[1]
    assert sum("caution" in line for line in shaky.lines()) == 2


def test_ceilings_fit_into_a_spec():
    spec = find_spec("H200").with_measured(CEILINGS.peaks)
    assert (spec.rate("tensor_fp8"), spec.bandwidth) == (1335e12, 4.28e12)


def test_pipes_by_compute_capability():
    assert pipes_of((7, 5)) == ("tensor_fp16", "cuda_fp32")
    assert pipes_of((8, 6)) == ("tensor_bf16", "tensor_fp16", "tensor_tf32", "cuda_fp32")
    assert "tensor_fp8" in pipes_of((8, 9))
    assert set(pipes_of((9, 0))) < set(ACCUMULATE)


def _one_millisecond(fn, device, *, l2="cold"):
    """Runs the call, so that its shapes and dtypes are checked, and claims that it took 1 ms."""
    fn()
    return Timing(1e-3, 1e-3, 1e-3, 1e-3, 5, "host", "warm")


def test_rates_count_work_by_the_formula(monkeypatch):
    monkeypatch.setattr(ceilings, "_time", _one_millisecond)
    assert ceilings._copy_bandwidth("cpu", 4096) == pytest.approx(2 * 4096 / 1e-3)
    for pipe in pipes_of((9, 0)):
        assert ceilings._matmul_rate(pipe, (32, 48, 64), "cpu") == pytest.approx(2 * 32 * 48 * 64 / 1e-3), pipe
    assert ceilings._conv_rate("tensor_bf16", (1, 16, 8, 8), "cpu") == pytest.approx(2 * 64 * 16 * 16 * 9 / 1e-3)


def test_the_cpu_clock_gives_a_plausible_rate():
    rate = ceilings._matmul_rate("cuda_fp32", (256, 256, 256), "cpu")
    assert 1e6 < rate < 1e14


def test_switches_return_to_what_they_were():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), ceilings._set(matmul, "fp32_precision", "tf32"):
        assert matmul.fp32_precision == "tf32"
        _ = 1 / 0
    assert matmul.fp32_precision == before


def test_measurement_joins_the_parts_and_stores_them(fake_gpu, monkeypatch):
    rates = iter([100.0, 400.0, 300.0, 200.0])  # the first sweep, bf16; then constant

    monkeypatch.setattr(ceilings, "_copy_bandwidth", lambda device, size: size / 1e-3)
    monkeypatch.setattr(ceilings, "_matmul_rate", lambda pipe, mnk, device: next(rates, 380.0))
    monkeypatch.setattr(ceilings, "_conv_rate", lambda pipe, nchw, device: 7.0)
    monkeypatch.setattr(ceilings, "_graph_costs", lambda: (1e-6, 4e-6))
    measured = measure_ceilings()
    assert measured.peaks["bandwidth"] >= 2**30 / 1e-3
    assert measured.peaks["tensor_bf16"] == 400.0
    assert set(measured.peaks) == {"bandwidth", *pipes_of((9, 0))}
    assert measured.conv == {"tensor_bf16 32x256x64x64": 7.0, "tensor_bf16 32x512x32x32": 7.0}
    assert measured.drift == pytest.approx(-0.05)
    assert (measured.driver, measured.power_limit_w) == (STATE.driver, 700)
    assert load_ceilings("NVIDIA H200") == measured
    assert diagnose(measure=True).ceilings is not None


def test_graph_costs_are_a_difference_of_chains(monkeypatch):
    class Recorded:
        def __init__(self, fn):
            counter = type(
                "Counter", (), {"kernels": 0, "neg_": lambda self: setattr(self, "kernels", self.kernels + 1)}
            )()
            fn(counter)
            self.kernels = counter.kernels

        def replay(self):
            return self.kernels

    def clock(fn, device, *, l2):
        seconds = 3e-6 + 1e-6 * fn()
        return Timing(seconds, seconds, seconds, seconds, 5, "cuda-event", l2)

    monkeypatch.setattr("torch.randn", lambda *_, **__: None)
    monkeypatch.setattr(ceilings, "capture", lambda fn, inputs: Recorded(fn))
    monkeypatch.setattr(ceilings, "_time", clock)
    kernel_gap_s, graph_launch_s = ceilings._graph_costs()
    assert kernel_gap_s == pytest.approx(1e-6)
    assert graph_launch_s == pytest.approx(4e-6)


@pytest.mark.gpu
@pytest.mark.slow
def test_measured_ceilings_lie_below_the_data_sheet():
    measured = measure_ceilings()
    spec = find_spec(measured.gpu)
    assert 0.5 * spec.bandwidth < measured.peaks["bandwidth"] < spec.bandwidth
    for pipe in measured.peaks.keys() - {"bandwidth"}:
        assert 0.3 * spec.rate(pipe) < measured.peaks[pipe] < 1.05 * spec.rate(pipe), pipe
    assert 1e-7 < measured.kernel_gap_s < 1e-5
    assert 1e-6 < measured.graph_launch_s < 1e-4
