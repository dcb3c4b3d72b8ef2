"""benchmarks/loops.py: programs of the pages run as they are, rows as they come, a library that is missing is named."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmark_scripts import FOLDER, in_process, load
from loop_stand_ins import STAND_INS, put
from ridgeline import bench
from ridgeline.errors import UsageError, VerificationFailed
from ridgeline.timing import Timing

script = load("loops")

QUICK = ("--batch", "2", "--steps", "10", "--warmup", "3", "--out", "rows.jsonl")
ON_CPU = (*QUICK, "--device", "cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "call_apart", in_process)
    for library in STAND_INS:
        put(monkeypatch, library)
        monkeypatch.setitem(sys.modules, f"{library}_loop", None)  # leaves again what the script puts there


def rows() -> list[dict]:
    return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]


# --- runs ------------------------------------------------------------------------------------------------------------


def test_both_sides_of_each_loop_leave_rows(capsys):
    assert script.main([*ON_CPU]) == 0
    found = rows()
    assert [(row["subject"], row["recipe"], row["stack"], row["shape"]) for row in found] == [
        ("loop:timm", "as it was", "eager", "2x3x224x224"),
        ("loop:timm", "changed", "ridgeline", "2x3x224x224"),
        ("loop:diffusers", "as it was", "eager", "2x3x32x32"),
        ("loop:diffusers", "changed", "ridgeline", "2x3x32x32"),
    ]
    for row in found:
        assert (row["gpu"], row["region"], row["dtype"], row["n"]) == ("cpu", "step", "bf16", 5)
        extra = row["extra"]
        assert extra["images_per_s"] == pytest.approx(2 / row["median_s"])
        assert math.isfinite(extra["loss"]) and extra["steps"] == 10
        library = row["subject"].removeprefix("loop:")
        assert extra["versions"] == {"torch": torch.__version__, library: "0"}
        assert (script._rows.ROOT / extra["page"]).exists()
        assert extra["times_faster"] is None  # both are eager steps without a GPU
    printed = capsys.readouterr().out
    assert "SLOWER" not in printed and "faster" not in printed and "as fast" not in printed


def test_both_sides_take_the_same_steps():
    script.main(ON_CPU)
    before, after = rows()[:2]
    assert before["extra"]["report"] == []
    # three to warm up, then an untimed run and five timed ones of two each
    assert after["extra"]["report"][0] == "0 steps replayed from 0 graphs, 15 run eagerly"
    # the same weights, batches and order: a step more or less would show
    assert after["extra"]["loss"] == pytest.approx(before["extra"]["loss"], rel=1e-4)


def test_a_library_that_is_missing_is_said_and_the_other_is_timed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert script.main(ON_CPU) == 1
    message = capsys.readouterr().err
    assert message.startswith("timm as it was: timm cannot be imported (") and message.count("\n") == 1
    assert "`pip install timm`, or leave its loop out by --library" in message
    assert {row["subject"] for row in rows()} == {"loop:diffusers"}


def test_a_loss_that_is_not_finite_is_no_measurement(monkeypatch):
    def infinite(library, shape, count, *, pinned):
        return [torch.full(shape, math.inf)]

    monkeypatch.setattr(script._loops, "batches", infinite)
    with pytest.raises(VerificationFailed, match="the loss of the last step is nan: these steps train nothing"):
        script.measure(script.Job("diffusers", "as it was", 2, "cpu", bench.Protocol(warmup=1, steps_a_run=1)))


def test_a_program_that_does_not_end_with_its_loop_is_refused():
    with pytest.raises(UsageError, match=r"must end with its `for` loop, got `step\.check_engaged"):
        script._loop_alone("for batch in loader:\n    step(batch)\nstep.check_engaged()", "timm")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--library", "torchvision"), 2, "library must be one of timm, diffusers, got 'torchvision'"),
        (("--batch", "0"), 2, "batch must be at least 1, got 0"),
        (("--steps", "12"), 2, "steps must be a multiple of 5"),
        (("--warmup", "0"), 2, "warmup at least 1, got 50 and 0"),
        (("--budget-s", "0", "--device", "cpu"), 2, "a budget must be more than 0 s"),
        pytest.param(
            (),
            3,
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told"),
        ),
    ],
)
def test_bad_input_is_one_sentence_and_its_exit_code(arguments, code, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loops.py", *arguments])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(FOLDER / "loops.py"), run_name="__main__")
    assert stop.value.code == code
    message = capsys.readouterr().err
    assert message.startswith("benchmarks/loops.py: ") and says in message and message.count("\n") == 1


# --- words -----------------------------------------------------------------------------------------------------------


def measured(side: str, low_s: float, high_s: float) -> script.Measured:
    """Runs of ten steps that took from `low_s` to `high_s`."""
    timing = Timing((low_s + high_s) / 2, low_s, high_s, high_s, 5, "host", "warm")
    report = ("65 steps replayed from 1 graphs, 0 run eagerly",) if side == "changed" else ()
    return script.Measured(script.Job("timm", side, 128), timing, bench.Traced(0.01, 321.0, 2.0), 2.3, report, "1.0")


BEFORE = measured("as it was", 0.29, 0.31)


@pytest.mark.parametrize(
    ("low_s", "high_s", "says"),
    [
        (0.14, 0.16, "2.00 times faster"),
        (0.39, 0.41, "SLOWER: 0.750 times as fast"),
        (0.28, 0.30, "no difference beyond the spread of the runs (1.034 times as fast)"),
    ],
)
def test_a_loop_is_faster_slower_or_neither(low_s, high_s, says):
    after = measured("changed", low_s, high_s)
    assert script.beside(after, BEFORE) == says
    assert script.lines(after, BEFORE)[1:] == [f"  {says}", "  65 steps replayed from 1 graphs, 0 run eagerly"]


def test_what_is_printed_of_a_gpu():
    assert script.lines(BEFORE, None) == [
        "timm 1.0 as it was, batch 128: 30.0 ms a step (spread 2.00 ms), 4,267 images/s, GPU busy 10.0 ms in 321 "
        "kernels, loss 2.300"
    ]


def test_a_row_holds_what_a_gpu_showed():
    where = script._rows.Machine("r", "c", "d", "NVIDIA H200", "1", "2", "3", 700.0)
    row = script.results_row(where, measured("changed", 0.14, 0.16), BEFORE)
    assert (row.median_s, row.gpu_busy_s, row.batch, row.stack_version) == (pytest.approx(0.015), 0.01, 128, "c")
    assert row.extra["times_faster"] == pytest.approx(2)
    assert (row.extra["kernels"], row.extra["waits"], row.extra["loss"]) == (321, 2, 2.3)
    assert row.extra["versions"] == {"torch": "2", "timm": "1.0"}


@pytest.mark.gpu
def test_gpu_loops_are_graphs_with_their_time():
    assert script.main(QUICK) == 0
    for row in rows():
        assert row["gpu_busy_s"] > 0
        if row["recipe"] == "changed":
            assert row["extra"]["times_faster"] > 0
            assert row["extra"]["report"][0] == "20 steps replayed from 1 graphs, 0 run eagerly"
