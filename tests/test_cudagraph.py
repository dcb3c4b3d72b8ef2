"""What only a GPU can show of `capture`; its checks and refusals run against fakes in test_doctor and here."""

import gc

import pytest
import torch

from ridgeline.cudagraph import Captured, capture


class Counter:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


def test_replay_copies_new_inputs_and_refuses_others():
    graph, buffer = Counter(), torch.zeros(2, 3)
    captured = Captured((buffer,), "out", graph)
    assert captured.replay(torch.ones(2, 3)) == "out"
    assert buffer.sum() == 6
    for wrong in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="input 0 must be"):
            captured.replay(wrong)
    with pytest.raises(ValueError, match="1 inputs, got 2"):
        captured.replay(torch.ones(2, 3), torch.ones(2, 3))
    assert (graph.replays, buffer.sum()) == (1, 6)


@pytest.mark.gpu
def test_a_graph_keeps_the_weights_that_only_its_callable_held():
    def build():
        weight = torch.randn(1024, 1024, device="cuda")
        return capture(lambda x: x @ weight, (torch.eye(1024, device="cuda"),))

    captured = build()
    first = captured.replay().clone()
    gc.collect()
    # memory given back to the allocator would be handed out here, and the next replay would read it
    garbage = [torch.full((1024, 1024), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert torch.equal(captured.replay(), first)
    assert len(garbage) == 64


@pytest.mark.gpu
def test_the_captured_callable_lives_as_long_as_its_graph():
    captured = capture(torch.neg, (torch.ones(1, device="cuda"),))
    assert captured.owner is torch.neg
