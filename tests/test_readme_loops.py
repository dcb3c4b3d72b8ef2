"""The loops that README and how-to change: each text is run as it was and as it becomes, to the same weights.

timm and diffusers need not be installed: networks of their interfaces, small enough for a CPU, stand in for theirs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmark_scripts import load
from loop_stand_ins import STAND_INS, put
from ridgeline.train_step import TrainStep

loops = load("_loops")


@pytest.fixture(params=list(STAND_INS))
def library(request, monkeypatch) -> str:
    put(monkeypatch, request.param)
    return request.param


def run(program: str, library: str, device: str = "cpu") -> dict[str, Any]:
    """The program's names after it ran on the same seed and batches."""
    torch.manual_seed(0)
    names = {"device": device, "loader": loops.batches(library, (6, 3, 8, 8), 4), "__name__": "example"}
    exec(compile(program, f"<{library} loop>", "exec"), names)
    return names


def differing(library: str, diff: str, *, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
    """Tensors of the model, and the last loss, that the two sides of a change do not agree on."""
    before, after = run(loops.side(diff, "-"), library), run(loops.side(diff, "+"), library)
    expected = {**before["model"].state_dict(), "loss": before["value"].detach()}
    actual = {**after["model"].state_dict(), "loss": after["value"]}
    assert expected.keys() == actual.keys()
    return [name for name, value in expected.items() if not torch.allclose(actual[name], value, rtol=rtol, atol=atol)]


def test_a_changed_loop_computes_the_same_bits(library):
    assert differing(library, loops.loop_of(library).replace("AdamW(", "SGD(")) == []


def test_a_changed_loop_trains_to_the_same_weights(library):
    # AdamW with its learning rate on the device rounds in another order
    assert differing(library, loops.loop_of(library), rtol=1e-5, atol=1e-6) == []


def test_another_loop_would_be_seen(library):
    diff = loops.loop_of(library)
    faster = diff.replace("+step = ", "+optimizer.param_groups[0]['lr'] *= 1.1\n+step = ")
    parameters = [name for name, _ in run(loops.side(diff, "+"), library)["model"].named_parameters()]
    assert set(parameters) <= set(differing(library, faster, rtol=1e-5, atol=1e-6))


def test_five_lines_change_the_loop_of_the_front_page():
    assert len([line for line in loops.loop_of("timm").splitlines() if line.startswith("+")]) == 5


@pytest.mark.gpu
def test_a_changed_loop_is_captured(library):
    step = run(loops.side(loops.loop_of(library), "+"), library, device="cuda")["step"]
    assert isinstance(step, TrainStep)
    step.check_engaged()
    assert step.report.eager_steps == 0
