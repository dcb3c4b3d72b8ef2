"""benchmarks/train_nets.py: the rival first, rows as they come, and a slower recipe called slower."""

from __future__ import annotations

import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmark_scripts import FOLDER, load, one_by_one
from ridgeline import bench
from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.timing import Timing

script = load("train_nets")

QUICK = ("--size", "32", "--batch", "2", "--steps", "5", "--warmup", "1")
ON_CPU = (*QUICK, "--device", "cpu")


class Small(nn.Sequential):
    """One block of what the real networks are made of."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, script.CLASSES),
        )


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "in_turn", one_by_one)


@pytest.fixture
def small(monkeypatch):
    """The two networks' optimizers on a network that takes no time."""
    monkeypatch.setattr(script, "NETS", {name: replace(net, build=Small) for name, net in script.NETS.items()})


def rows() -> list[dict]:
    return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]


# --- runs ------------------------------------------------------------------------------------------------------------


def test_each_network_runs_the_rival_then_each_recipe_and_leaves_rows(small, capsys):
    assert script.main([*ON_CPU, "--recipe", "bf16", "fp8", "--out", "rows.jsonl"]) == 0
    found = rows()
    assert [(row["subject"], row["recipe"], row["stack"]) for row in found] == [
        (net, recipe, "torch.compile" if recipe == "writeup-5" else "ridgeline")
        for net in ("resnet50", "convnext_t")
        for recipe in ("writeup-5", "bf16", "fp8")
    ]
    for row in found:
        assert (row["shape"], row["gpu"], row["region"], row["n"]) == ("2x3x32x32", "cpu", "step", 5)
        assert row["extra"]["images_per_s"] == pytest.approx(2 / row["median_s"])
        first, last = row["extra"]["losses"]
        assert first == pytest.approx(math.log(script.CLASSES), rel=0.1) and last < first
        assert row["extra"]["of_rival"] is None  # nothing to compare without a GPU
    printed = capsys.readouterr().out
    assert printed.count("every step runs eagerly: the model is on the cpu") == 6
    assert "SLOWER" not in printed and "faster" not in printed


def test_a_recipe_that_comes_to_nothing_is_named_and_the_rest_is_kept(small, monkeypatch, capsys):
    measure = script.measure

    def refusing(job, wait):
        if job.recipe == "bf16":
            raise NotEngaged("compile_step: no graph")
        return measure(job, wait)

    monkeypatch.setattr(script, "measure", refusing)
    arguments = ["--net", "resnet50", *ON_CPU, "--recipe", "bf16", "fp32", "--out", "rows.jsonl"]
    assert script.main(arguments) == 1
    assert capsys.readouterr().err == "resnet50 bf16: compile_step: no graph\n"
    assert [row["recipe"] for row in rows()] == ["writeup-5", "fp32"]


def test_a_loss_that_is_not_finite_is_no_measurement(small, monkeypatch):
    monkeypatch.setattr(script, "_loss", lambda model, batch: model(batch[0]).mean() * math.inf)
    with pytest.raises(VerificationFailed, match="these steps train nothing"):
        script.measure(script.Job("resnet50", "bf16", 2, 32, "cpu", bench.Protocol(warmup=1, steps_a_run=1)))


@pytest.mark.parametrize("name", script.NETS)
def test_optimizers_take_the_real_networks(name):
    net = script.NETS[name]
    module = net.build()
    held = sum(p.numel() for group in net.optimizer(module.parameters()).param_groups for p in group["params"])
    assert held == sum(p.numel() for p in module.parameters()) > 25e6


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--net", "vgg"), 2, "net must be one of resnet50, convnext_t, got 'vgg'"),
        (("--recipe", "int4"), 2, "recipe must be one of bf16, fp8"),
        (("--batch", "0"), 2, "batch must be at least 1"),
        (("--size", "16"), 2, "size at least 32, got 128 and 16"),
        (("--steps", "12"), 2, "steps must be a multiple of 5"),
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
    monkeypatch.setattr(sys, "argv", ["train_nets.py", *arguments])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(FOLDER / "train_nets.py"), run_name="__main__")
    assert stop.value.code == code
    message = capsys.readouterr().err
    assert message.startswith("benchmarks/train_nets.py: ") and says in message and message.count("\n") == 1


# --- words -----------------------------------------------------------------------------------------------------------


def measured(recipe: str, low_s: float, high_s: float) -> script.Measured:
    """Runs of ten steps that took from `low_s` to `high_s`."""
    timing = Timing((low_s + high_s) / 2, low_s, high_s, high_s, 5, "host", "warm")
    job = script.Job("resnet50", recipe, 128)
    traced = bench.Traced(0.048, 1234.0, 0.0)
    memory = script.Memory(12_000_000_000, 20_000_000_000)
    return script.Measured(job, timing, traced, memory, (6.9, 6.5), {"use_convolutions": 3}, ("3 graphs",))


RIVAL = measured("writeup-5", 0.49, 0.51)


@pytest.mark.parametrize(
    ("low_s", "high_s", "says"),
    [
        (0.52, 0.53, "SLOWER than writeup-5: 1.050 of its time"),
        (0.44, 0.46, "faster than writeup-5: 0.900 of its time"),
        (0.50, 0.52, "no difference to writeup-5 beyond the spread of the runs (1.020 of its time)"),
    ],
)
def test_a_recipe_is_slower_faster_or_neither(low_s, high_s, says):
    ours = measured("bf16", low_s, high_s)
    assert script.beside(ours, RIVAL) == says
    assert f"  {says}" in script.lines(ours, RIVAL)


def test_what_is_printed_of_a_gpu():
    numbers, report = script.lines(RIVAL, None)
    assert numbers == (
        "resnet50 writeup-5, batch 128: 50.0 ms a step (spread 2.00 ms), 2,560 images/s, GPU busy 48.0 ms in 1,234 "
        "kernels, peak 12.0 GB, 20.0 GB reserved, loss 6.900 to 6.500"
    )
    assert report == "  3 graphs"


def test_a_row_holds_what_a_gpu_showed():
    where = script._rows.Machine("r", "c", "d", "NVIDIA H200", "1", "2", "3", 700.0)
    row = script.results_row(where, measured("fp8", 0.39, 0.41), RIVAL)
    assert (row.median_s, row.gpu_busy_s, row.dtype, row.stack_version) == (pytest.approx(0.04), 0.048, "bf16", "c")
    assert row.extra["of_rival"] == pytest.approx(0.8)
    assert (row.extra["peak_bytes"], row.extra["reserved_bytes"], row.extra["kernels"]) == (12e9, 20e9, 1234)
    assert row.extra["sites"] == {"use_convolutions": 3} and row.extra["steps"] == 50


def test_no_networks_are_halved_to_nothing():
    with pytest.raises(UsageError, match="size at least 32"):
        script.Job("convnext_t", "bf16", 64, 31)


@pytest.mark.gpu
def test_gpu_steps_are_graphs_with_their_time_and_memory():
    arguments = ["--net", "resnet50", "--size", "64", "--batch", "8", "--steps", "5", "--out", "rows.jsonl"]
    assert script.main(arguments) == 0
    for row in rows():
        assert row["gpu_busy_s"] > 0
        # weights, momentum and gradients in fp32
        assert row["extra"]["peak_bytes"] > 3 * 4 * 25e6 and row["extra"]["reserved_bytes"] > 2 * 4 * 25e6
        assert "replayed from 1 graphs" in row["extra"]["report"][0]
