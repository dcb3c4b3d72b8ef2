"""What only a GPU can show of `capture`; its checks and refusals run against fakes in test_doctor and here."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from ridgeline.cudagraph import Captured, capture, pool_bytes
from ridgeline.errors import NotEngaged


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


class Stream:
    def wait_stream(self, other):
        """Nothing runs beside it."""


class Graph:
    """As torch.cuda.CUDAGraph, of which it notes what happened in which order."""

    def __init__(self, events):
        self.events = events

    def register_generator_state(self, generator):
        self.events.append(("register", generator))


@pytest.fixture
def events(monkeypatch):
    """What `capture` does to a GPU that is not there."""
    noted = []

    @contextlib.contextmanager
    def record(graph, **_):
        assert isinstance(graph, Graph)
        noted.append("begin")
        yield

    fakes = {
        "is_available": lambda: True, "Stream": Stream, "current_stream": Stream,
        "stream": contextlib.nullcontext, "CUDAGraph": lambda: Graph(noted), "graph": record,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return noted


def test_generators_are_registered_before_the_capture_begins(events):
    generators = [SimpleNamespace(device=torch.device("cuda")) for _ in range(2)]
    capture(lambda: events.append("call"), (), warmup=1, generators=generators)
    assert events == [("register", generators[0]), ("register", generators[1]), "call", "begin", "call"]
    with pytest.raises(ValueError, match=r"generators must be on the GPU, got one on cpu.*torch.Generator\('cuda'\)"):
        capture(lambda: None, (), generators=[torch.Generator()])


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("Attempt to increase offset for a CUDA generator not in capture mode", "name the generators .* `generators`"),
        ("operation not permitted when stream is capturing", "keep .item.* out of it"),
    ],
)
def test_a_failed_capture_names_the_way_out(events, reason, way_out):
    def refused():
        if "begin" in events:
            raise RuntimeError(reason)

    with pytest.raises(NotEngaged, match=rf"cannot become a CUDA graph \({reason}\): {way_out}"):
        capture(refused, ())


@pytest.mark.gpu
def test_replays_advance_the_generators_of_a_graph():
    mine, twin = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    captured = capture(lambda: torch.rand(4, device="cuda", generator=mine), (), warmup=1, generators=[mine])
    mine.manual_seed(5)
    for _ in range(3):
        assert torch.equal(captured.replay(), torch.rand(4, device="cuda", generator=twin))
    assert torch.equal(mine.get_state(), twin.get_state())


@pytest.mark.gpu
def test_a_generator_that_the_graph_does_not_know_never_repeats_itself():
    """PyTorch refuses it at the capture; a version that registers what it sees is right too."""
    generator = torch.Generator("cuda")
    try:
        captured = capture(lambda: torch.rand(4, device="cuda", generator=generator), ())
    except NotEngaged as error:
        assert "cannot become a CUDA graph" in str(error)
    else:
        assert not torch.equal(captured.replay().clone(), captured.replay())


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
