"""Rules of the whole process (H12, H13, H15, W2-W6): they fire, keep silent, or say what they would need."""

from __future__ import annotations

import pytest

from ridgeline.errors import UsageError
from ridgeline.finding import Abstention, Finding
from ridgeline.rules import RULES, process
from rules.steps_made import idle, step, work

UNEVEN = [work(100, launch_us=us) for us in (2.0, 2.0, 2.0, 2.0, 90.0)]
EVEN = [work(100, launch_us=4.0) for _ in range(5)]
CROWDED = {"cpus": "4", "threads": "4", "loader_workers": "8"}
RECOMPILED = {"recompiles": "9", "recompile_s": "27.0", "steps": "300"}
GRAPHS = {"memory_reserved_bytes": "38.2e9", "memory_allocated_bytes": "11.4e9"}
CLOCKS = {"sm_clock_mhz": "1200", "sm_clock_max_mhz": "1980"}
MEMORY = {"memory_peak_bytes": "20e9", "memory_total_bytes": "140e9"}
REPLAYED = work(100, in_graph=True)
REPLAYS = [work(100, launch="cudaGraphLaunch") for _ in range(9)]  # of nine graphs

FIRING = [
    (process.warming_up, step(work(500), idle(80, "compile", runtime="cuModuleLoadData"), work(400)), "80.0 µs"),
    (process.warming_up, step(work(500), idle(80, "launch", runtime="cuLibraryLoadData"), work(400)), "80.0 µs"),
    (process.recompiles, step(work(900), settings=RECOMPILED), "90.0 ms a step"),
    (process.disturbed_host, step(*UNEVEN, settings=CROWDED), "4 threads and 8 loader workers share 4 cores"),
    (process.many_graphs, step(*REPLAYS, settings=GRAPHS), "9 CUDA graphs a step, and 38.2 GB of memory"),
    (process.low_clocks, step(work(900), settings=CLOCKS), "1200 MHz of 1980 MHz"),
    (
        process.low_clocks,
        step(work(900), settings={**CLOCKS, "sm_clock_mhz": "1980", "throttle_reasons": "sw_power_cap in 40.0 %"}),
        "1980 MHz of 1980 MHz (sw_power_cap in 40.0 %)",
    ),
    (process.memory_headroom, step(work(900), trained=True, settings=MEMORY), "20.0 GB of 140 GB"),
    (
        process.validation_share,
        step(work(900), trained=True, settings={"validations": "3", "validation_share": "0.4"}),
        "40.0 % of the run",
    ),
    (process.incomplete, step(work(900), settings={"coverage": "0.61"}), "61.0 %"),
    (process.incomplete, step(work(900), settings={"coverage": "1.3"}), "130.0 %"),
]
SILENT = [
    (process.warming_up, step(work(500), idle(80), work(400))),
    (process.recompiles, step(work(900), settings={**RECOMPILED, "recompiles": "0"})),
    (process.disturbed_host, step(*EVEN, settings=CROWDED)),  # crowded, but it does not show
    (process.disturbed_host, step(*UNEVEN, settings={"cpus": "16", "threads": "4", "loader_workers": "8"})),
    (process.many_graphs, step(work(900), settings=GRAPHS)),  # this step replays none
    (process.many_graphs, step(REPLAYS[0], settings=GRAPHS)),
    (process.many_graphs, step(*REPLAYS, settings={**GRAPHS, "memory_allocated_bytes": "30e9"})),
    (process.low_clocks, step(work(900), settings={**CLOCKS, "sm_clock_mhz": "1935", "throttle_reasons": "None"})),
    (process.low_clocks, step(work(900), settings={**CLOCKS, "sm_clock_mhz": "1935", "throttle_reasons": ""})),
    (process.memory_headroom, step(work(900), trained=True, settings={**MEMORY, "memory_peak_bytes": "100e9"})),
    (process.memory_headroom, step(work(900), settings=MEMORY)),  # inference at batch 1 has room by nature
    (process.validation_share, step(work(900), trained=True, settings={"validation_share": "0.05"})),
    (process.validation_share, step(work(900))),  # inference is never validated
    (process.incomplete, step(work(900), settings={"coverage": "0.99"})),
]
# what each needs to know, of a step that gives it a reason to look
NEEDS = [
    (process.recompiles, "recompiles"),
    (process.disturbed_host, "cpus"),
    (process.many_graphs, "memory_reserved_bytes"),
    (process.low_clocks, "sm_clock_mhz"),
    (process.memory_headroom, "memory_peak_bytes"),
    (process.validation_share, "--to-end"),
    (process.incomplete, "coverage"),
]


@pytest.mark.parametrize(("rule", "made", "text"), FIRING)
def test_fires_without_promising_seconds(rule, made, text):
    (finding,) = rule(made)
    assert isinstance(finding, Finding)
    assert text in finding.title
    assert finding.saving is None
    assert finding.rule == rule.__doc__.partition(":")[0]


@pytest.mark.parametrize(("rule", "made"), SILENT)
def test_keeps_silent(rule, made):
    assert list(rule(made)) == []


@pytest.mark.parametrize(("rule", "name"), NEEDS)
def test_says_what_it_would_need(rule, name):
    (word,) = rule(step(*REPLAYS, trained=True))
    assert isinstance(word, Abstention)
    assert name in word.reason


def test_a_run_without_eval_mode_says_that_its_validation_was_not_seen():
    (word,) = process.validation_share(step(work(900), trained=True, settings={"validations": "0"}))
    assert isinstance(word, Abstention)
    assert "model.eval()" in word.reason


def test_every_rule_is_tried():
    mine = {rule for rule in RULES if rule.__module__ == process.__name__}
    assert {rule for rule, *_ in FIRING} == mine
    assert {rule for rule, _ in SILENT} == mine


def test_a_setting_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="coverage must be a number, got 'most'"):
        list(process.incomplete(step(work(900), settings={"coverage": "most"})))
