"""The table of promises and measurements: made of real traces, and as the documentation shows it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from ridgeline.profile_record import Calibration

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("calibration", ROOT / "benchmarks" / "calibration.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def rows(script):
    return tuple(script.rows())


def test_the_page_shows_what_explain_says(script, rows):
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.table(rows) == page.partition(script.BEGIN)[2].partition(script.END)[0]


def test_seven_of_ten_promises_hold_once_a_step_is_one_graph(script, rows):
    captured = [row.calibration for row in rows if row.after in script.GRAPHS]
    assert len(captured) >= 6
    assert sum(c.hit for c in captured) >= 0.7 * len(captured)


def test_every_miss_says_why(rows):
    assert [row for row in rows if not row.calibration.hit and not row.why] == []


def test_a_miss_is_counted_as_one(script):
    held = script.Row("W1", "a", script.GRAPHS[0], "clock", Calibration("W1", 1e-3, 2e-3, 3e-3, 2.5e-3))
    missed = script.Row("L1", "a", "b", "clock", Calibration("L1", 1e-3, 2e-3, 3e-3, 4e-3), "it rained")
    said = script.table([held, missed])
    assert "| W1 | a → yolo26n-graph | clock | 2.000 (1.000 to 3.000) | 2.500 | held |" in said
    assert "**missed**: it rained" in said
    assert "1 of 1 intervals held (100 %) after the step became one graph, 1 of 2 intervals held (50 %) in all" in said
