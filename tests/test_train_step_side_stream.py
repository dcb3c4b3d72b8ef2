"""Weight gradients on a second stream: when a step goes without, and what the caller is told then."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.optim import AdamW

import recorded_graph
from ridgeline import step_program
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.side_stream import ReadEarly
from ridgeline.step_recipe import StepRecipe
from steps import batches, net, train_step


def test_a_side_stream_whose_results_are_read_early_is_left_out(monkeypatch):
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
