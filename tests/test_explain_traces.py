"""explain on steps traced on an H200: what it must find there, and what it must not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from ridgeline.attribution import step_of
from ridgeline.explainer import Explanation, explain
from ridgeline.trace_reader import read_trace
from rules.steps_made import H200

TRACES = Path(__file__).parent / "fixtures" / "traces"


@cache
def explained(name: str) -> Explanation:
    return explain(step_of(read_trace(TRACES / f"{name}.json.gz"), wall_s=wall_s(name), ceilings=H200))


def wall_s(name: str) -> float:
    """Median of the steps timed without a profiler."""
    return json.loads((TRACES / f"{name}.facts.json").read_text(encoding="utf-8"))["alone"]["median_s"]


def found(name: str, rule: str):
    (finding,) = [finding for finding in explained(name)[0] if finding.rule == rule]
    return finding


def rules_of(name: str) -> set[str]:
    return {finding.rule for finding in explained(name)[0]}


def test_a_starved_loop_is_input_bound_before_all_else():
    findings, _, _ = explained("loader-bound")
    assert findings[0].rule == "H1"
    assert findings[0].title.startswith("input-bound 9")
    assert all(finding.saving.low_s == 0.0 for finding in findings[1:] if finding.saving)


def test_waits_are_told_apart():
    assert {"H5", "H6", "H7"} <= rules_of("syncing")
    assert "H8" not in rules_of("syncing")
    (obstacle,) = [word for word in explained("syncing")[1] if word.rule == "W1"]
    assert "aten::index" in obstacle.reason


def test_the_waits_of_a_syncing_loop_come_before_its_launches():
    # the read of the norm keeps the host from the optimizer's launches: 1.1 ms of a step of 6.5, replayed
    saving = found("syncing", "H7").saving
    assert saving.mid_s == pytest.approx(1.15e-3, rel=0.05)
    assert saving.mid_s / 2 <= saving.low_s and saving.high_s <= 1.1 * saving.mid_s
    ranked = [finding.rule for finding in explained("syncing")[0]]
    assert ranked.index("H7") < ranked.index("H9")


def test_the_baseline_shows_the_write_ups_six_steps_each_with_a_saving():
    ranked = [finding for finding in explained("ddpm-baseline")[0] if finding.saving and finding.saving.mid_s > 0]
    # layout, read, optimizer, noise and loss, graph, FP8
    assert {"L1", "H5", "K9", "K1", "W1", "K19"} <= {finding.rule for finding in ranked}
    read = found("ddpm-baseline", "H5")
    assert "hidden today" in read.title and read.saving.high_s < 10e-6
    assert "were the GPU at work by then, it would idle 21" in read.note  # µs: 219
    for rule in ("L1", "K9", "K1", "K19"):
        assert "hidden behind the host's launches today" in found("ddpm-baseline", rule).note


@pytest.mark.parametrize("name", ["yolo26n-eager", "ddpm-baseline"])
def test_eager_steps_lack_a_graph(name):
    assert {"W1", "H9"} <= rules_of(name)


@pytest.mark.parametrize("name", ["yolo26n-graph", "ddpm-graph"])
def test_replayed_steps_have_theirs(name):
    assert not {"W1", "H9", "H10"} & rules_of(name)


def test_what_a_graph_brings_lies_within_what_was_promised():
    # the replayed detector does what the eager one does, and nothing besides
    saving = found("yolo26n-eager", "W1").saving
    assert found("yolo26n-eager", "H9").within == "W1"
    assert saving.low_s <= wall_s("yolo26n-eager") - wall_s("yolo26n-graph") <= saving.high_s


@pytest.mark.parametrize(
    "name", ["loader-bound", "syncing", "yolo26n-eager", "yolo26n-graph", "ddpm-baseline", "ddpm-graph"]
)
def test_savings_stay_within_the_step(name):
    findings, _, left_s = explained(name)
    saved_s = sum(finding.saving.mid_s for finding in findings if finding.saving)
    assert wall_s(name) - saved_s == pytest.approx(left_s[-1])
    assert left_s[-1] > 0
