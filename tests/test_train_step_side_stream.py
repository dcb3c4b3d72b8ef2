"""Compiled steps: that each is, weight gradients on a second stream, and what the caller is told without one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.optim import AdamW

import recorded_graph
from ridgeline import step_program
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.side_stream import ReadEarly
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import StepRecipe
from ridgeline.step_state import flatten
from steps import batches, loss, net, train_step


def test_a_side_stream_whose_results_are_read_early_is_left_out(monkeypatch):
    torch._dynamo.reset()  # which skips for good what it saw inside a recorded graph
    made = []

    def inductor(_mode, _watch, overlapped):
        made.append(overlapped is not None)

        def read_early(*_inputs):
            raise ReadEarly("gradients are copied")

        return lambda graph_module, _: read_early if made[-1] else graph_module.forward

    monkeypatch.setattr(step_program, "inductor", inductor)
    choices = {"compile": "loss", "channels_last": True, "side_stream": True, "capture": recorded_graph.capture}
    model = net(dropout=0.0)
    step = train_step(model, AdamW(model.parameters(), lr=1e-2), batches(1)[0], **choices)
    for batch in batches(3):
        step(batch)
    assert (made, step.report.replays, step.report.eager_steps) == ([True, False], 3, 0)
    assert "without a side stream: gradients are copied" in " ".join(step.report.lines())
    torch._dynamo.reset()
    model = net(dropout=0.0)
    with pytest.raises(ReadEarly, match="copied"):
        train_step(model, AdamW(model.parameters(), lr=1e-2), batches(1)[0], require=True, **choices)(batches(1)[0])


def test_a_side_stream_needs_channels_last():
    with pytest.raises(UsageError, match="side_stream=True needs channels_last=True"):
        StepRecipe(side_stream=True)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), NotEngaged("capture: CUDA error: out of memory")]
)
def test_a_side_stream_that_takes_too_much_memory_is_left_out(error, monkeypatch):
    monkeypatch.setattr(step_program, "inductor", lambda *_: lambda graph_module, _: graph_module.forward)
    calls = []

    def capture(*arguments, **choices):
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return recorded_graph.capture(*arguments, **choices)

    model = net(dropout=0.0)
    choices = {"compile": "loss", "channels_last": True, "capture": capture}
    step = train_step(model, AdamW(model.parameters(), lr=1e-2), batches(1)[0], side_stream=True, **choices)
    for batch in batches(3):
        step(batch)
    assert (len(calls), step.report.replays) == (2, 3)
    assert "without a side stream: it takes more memory than there is" in " ".join(step.report.lines())
    calls.clear()
    # a step that has none is not tried again
    with contextlib.suppress(torch.OutOfMemoryError):
        train_step(model, AdamW(model.parameters(), lr=1e-2), batches(1)[0], **choices)(batches(1)[0])
    assert len(calls) == 1


def test_every_step_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """Dynamo alone would run the ninth of equal ones as it stands, with a warning."""
    compiled = []

    def inductor(*_):
        def compiler(graph_module, _inputs):
            compiled.append(graph_module)
            return graph_module.forward

        return compiler

    monkeypatch.setattr(step_program, "inductor", inductor)
    torch._dynamo.reset()
    leaves, structure = flatten(batches(1)[0])
    for number in range(1, 11):
        model = net(dropout=0.0)
        parts = Parts(model, loss, AdamW(model.parameters(), lr=1e-2))
        StepProgram(parts, StepRecipe(dtype="fp32")).run(leaves, structure, compiled=True)
        assert len(compiled) == number
