"""Rules about kernels on traces taken on an H200: what they find in real steps, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.attribution import step_of
from ridgeline.finding import Abstention, Finding
from ridgeline.rules import RULES
from ridgeline.trace_reader import read_trace
from rules.steps_made import H200

TRACES = Path(__file__).parents[1] / "fixtures" / "traces"
FORMS = {"L", "K"}


def judged(name: str, *, eager: str = "") -> dict[str, Finding | Abstention]:
    """The first thing that each rule says about the step, by id."""
    like = read_trace(TRACES / f"{eager}.json.gz") if eager else None
    step = step_of(read_trace(TRACES / f"{name}.json.gz"), ceilings=H200, eager=like)
    said = [found for rule in RULES for found in rule(step)]
    assert all(set(found.evidence) <= {k.activity.id for k in step.kernels} for found in said if _of_kernels(found))
    assert all(found.saving.high_s <= step.duration_s for found in said if _of_kernels(found) and found.saving)
    return {found.rule: found for found in reversed(said) if found.rule[0] in FORMS}


def _of_kernels(found) -> bool:
    return isinstance(found, Finding) and found.rule[0] in FORMS


def findings(said) -> set[str]:
    return {rule for rule, found in said.items() if isinstance(found, Finding)}


def test_the_baseline_shows_the_write_ups_steps():
    said = judged("ddpm-baseline")
    # conversions around convolutions, the optimizer, FP8; casts of weights and split norms besides
    assert {"L1", "L5", "L9", "K1", "K4", "K9", "K10", "K19"} <= findings(said)
    assert not {"L3", "L6", "L8", "L10", "K2", "K8", "K17"} & findings(said)
    assert said["L1"].title.startswith("385 layout conversions")
    assert said["L1"].saving.low_s == 0  # NHWC group norms may take all of it back, as they did on this GPU
    assert "index → mul → index → mul → add" in said["K1"].note  # the noise
    assert "copy_ → mse_loss" in said["K1"].note  # and the loss
    assert said["K4"].title.startswith("23 bias additions and 14 residual additions")  # which Inductor split off
    assert said["K10"].title.startswith("clip and average pass over the parameters beside the optimizer: 8 kernels")
    # what the default recipe does not do: sums within convolutions, weights kept in 16 bits
    for rule in ("L1", "L5", "L9", "K4"):
        assert said[rule].verb == 'ridgeline.compile_step(…, recipe="bf16")'
    for rule in ("K1", "K9"):
        assert said[rule].verb == "ridgeline.compile_step(model, loss, optimizer, batch)"
    assert "torch.optim.AdamW" in said["K9"].fix
    assert "3x3 256→256 at 16x16" in said["K19"].note and "1x1" not in said["K19"].note


def test_channels_last_moves_the_conversions():
    said = judged("ddpm-graph", eager="ddpm-graph-operators")
    assert {"L3", "L5", "K19"} <= findings(said)
    assert not {"L1", "K8", "K9"} & findings(said)
    # 63 strided copies and some of cuDNN's own, 2.7 ms of this step's 21.7
    assert said["L3"].saving.mid_s == pytest.approx(2.8e-3, rel=0.05)


def test_a_graph_alone_has_no_shapes_and_rules_say_so():
    said = judged("ddpm-graph")
    assert {"L3", "L5", "L9", "L11", "K1", "K4", "K16", "K19", "K20"} <= set(said) - findings(said)


def test_an_eager_detector():
    said = judged("yolo26n-eager")
    assert {"L1", "K1", "K4", "K5", "K7"} <= findings(said)
    assert not {"L8", "L9", "K2", "K8", "K9", "K10", "K11"} & findings(said)
    assert said["K4"].title.startswith("102 bias additions and 20 residual additions")
    assert said["K5"].title.startswith("28 concat copy kernels")


def test_an_fp32_training_step():
    said = judged("syncing")
    assert {"L1", "L8", "K3", "K8"} <= findings(said)
    assert said["K3"].verb == 'ridgeline.compile_step(…, recipe="bf16")'  # which fuses norms and activations
    assert not {"L9", "L10", "K19", "K9"} & findings(said)


def test_a_step_that_waits_for_its_loader_has_no_kernel_worth_a_word():
    assert not findings(judged("loader-bound"))


def test_kernels_of_no_length_break_no_rule():
    # Kineto clamps durations that came out negative to zero
    full = step_of(read_trace(TRACES / "yolo26n-eager.json.gz"), ceilings=H200)
    still = [replace(k, activity=replace(k.activity, duration_s=0.0), exposed_s=0.0) for k in full.kernels]
    for step in (replace(full, kernels=tuple(still)), replace(full, kernels=tuple(still), trained=True)):
        said = {found.rule for rule in RULES for found in rule(step) if _of_kernels(found)}
        # what is left is the launches
        assert said <= {"K1", "K4", "K5", "K7"}
