"""Replays that differ are found, and a graph whose early launches make them differ is made again without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline import compiler, lowering, replay_check, runner
from ridgeline.cudagraph import Captured
from ridgeline.models import YOLO26, fuse, randomise_
from ridgeline.recipe import Recipe
from ridgeline.replay_check import LEAST, REPLAYS, unsteady

X = torch.randn(1, 8, 6, 6)


class Graph:
    """Each replay writes what `value` makes of the replay's number."""

    def __init__(self, out: Tensor, value: Callable[[int], Any]) -> None:
        self.out, self.value, self.replays = out, value, 0

    def replay(self) -> None:
        self.out.copy_(torch.as_tensor(self.value(self.replays)))
        self.replays += 1

    def pool(self) -> Any:
        return (0, 0)


def captured(value: Callable[[int], Any], dtype: torch.dtype = torch.float16) -> Captured:
    out = torch.zeros(3, dtype=dtype)
    return Captured((), {"boxes": [out, "no tensor"]}, Graph(out, value))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a replay takes, without replays to find out."""
    timing = SimpleNamespace(median_s=1e-4)
    monkeypatch.setattr(replay_check, "time_callable", lambda *_args, **_choices: timing)
    return timing


def check(value: Callable[[int], Any], dtype: torch.dtype = torch.float16) -> int:
    different, replays = unsteady(captured(value, dtype), evict=lambda: None)
    assert replays == REPLAYS
    return different


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_one_result_is_steady_and_another_bit_is_found(dtype: torch.dtype):
    assert check(lambda _: 1, dtype) == 0
    assert check(lambda i: int(i != 7), dtype) == 1
    assert check(lambda i: int(i % 4 != 2), dtype) == REPLAYS // 4


def test_bits_are_compared_and_not_numbers():
    assert check(lambda _: torch.nan) == 0
    assert check(lambda i: -0.0 if i == 9 else 0.0) == 1
    assert check(lambda i: 1 + 1j * (i == 9), torch.complex64) == 1


def test_every_second_replay_finds_its_weights_in_memory():
    log: list[str] = []
    graph = captured(lambda i: log.append("R") or 0)
    unsteady(graph, evict=lambda: log.append("E"))
    assert "".join(log) == "R" + "RER" * (REPLAYS // 2)


def test_a_slow_graph_is_replayed_less_often(clock: SimpleNamespace):
    clock.median_s = 0.02
    assert unsteady(captured(lambda _: 0), evict=lambda: None) == (0, 25)
    clock.median_s = 9.0
    assert unsteady(captured(lambda _: 0), evict=lambda: None) == (0, LEAST)


# --- what a runner makes of it ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.conv(x))


@pytest.fixture
def lowered():
    graph_module, report = lowering.lower(Net().eval(), (X,), Recipe(dtype="fp32"))
    for node in graph_module.graph.nodes:
        if "pdl" in node.kwargs:
            node.kwargs = {**node.kwargs, "pdl": True}  # as on sm_90
    return graph_module, report


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether kernels started early in each of the graphs that were captured."""
    graphs: list[bool] = []

    def make(graph_module: Any, report: Any, inputs: Any, _recipe: Recipe) -> runner.Runner:
        early = lowering.launches_early(graph_module)
        graphs.append(early)
        seen = captured((lambda i: i % 2) if early else (lambda _: 0))
        return runner.Runner(graph_module, report, seen.replay, seen)

    monkeypatch.setattr(runner, "_made", make)
    monkeypatch.setattr(runner, "unsteady", lambda graph: unsteady(graph, evict=lambda: None))
    return graphs


def test_a_graph_whose_replays_differ_is_made_again_without_early_launch(lowered, made, caplog):
    with caplog.at_level(logging.WARNING):
        found = runner.make_runner(*lowered, (X,), Recipe(dtype="fp32"))
    assert made == [True, False]
    assert f"early launch dropped: 32 of {REPLAYS} replays" in "\n".join(found.report.lines())
    assert "early launch is dropped, for 32 of 64" in caplog.text


def test_a_graph_that_waits_is_left_alone(lowered, made):
    graph_module, report = lowered
    lowering.choose_(graph_module, Recipe(dtype="fp32"), torch.device("cpu"))
    stale = replace(report, early_launch_dropped="on another GPU")
    found = runner.make_runner(graph_module, stale, (X,), Recipe(dtype="fp32"))
    assert made == [False] and found.report.early_launch_dropped is None


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["n", "s", "x"])
def test_yolo26_gives_one_result_a_thousand_times(scale: str):
    """x did not, with early launch and cold weights: `compile` finds that and drops early launch."""
    model, (image,) = compiler.on_gpu(fuse(randomise_(YOLO26(scale))), (torch.rand(1, 3, 640, 640),))
    fast = compiler.compile(model, image, verify=False)
    replay = fast.replayer(image)
    first = replay().clone()
    assert all(torch.equal(replay(), first) for _ in range(1000))
