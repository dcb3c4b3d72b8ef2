"""What only a GPU can show of `capture`; its checks and refusals run against fakes in test_doctor and here."""

import gc

import pytest
import torch

from ridgeline.cudagraph import Captured, capture, pool_bytes


class Counter:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1

    def pool(self):
        return (0, 1)


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


@pytest.mark.gpu
def test_the_pool_holds_what_a_graph_allocates():
    x = torch.zeros(1 << 20, device="cuda")
    small, large = (capture(lambda x, n=n: (x[:n] + 1) * 2, (x,)) for n in (256, 1 << 20))
    assert pool_bytes(small) >= 256 * 4
    assert pool_bytes(large) >= 4 << 20 and pool_bytes(large) > pool_bytes(small)


def test_the_pool_of_another_graph_does_not_count(monkeypatch):
    segments = [{"total_size": 4, "segment_pool_id": (0, 1)}, {"total_size": 2, "segment_pool_id": (0, 0)}]
    segments.append({"total_size": 8, "segment_pool_id": (0, 1)})
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert pool_bytes(Captured((), None, Counter())) == 12
