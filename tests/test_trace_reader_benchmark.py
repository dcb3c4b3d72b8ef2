"""benchmarks/trace_reader.py: a fixture grows to the size asked for, and both readers get rows of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmark_scripts import in_process, load
from ridgeline.errors import UsageError
from ridgeline.trace_reader import read_trace

script = load("trace_reader")


def test_a_trace_is_repeated_in_time(tmp_path: Path):
    fixture, path = script.TRACES / "ddpm-graph.json.gz", tmp_path / "grown.json"
    once = len(gzip.decompress(fixture.read_bytes()))
    script.repeat(fixture, 3 * once, path)
    assert path.stat().st_size > 3 * once
    one, several = read_trace(fixture), read_trace(path)
    turns, rest = divmod(len(several.activities), len(one.activities))
    assert turns >= 3 and rest == 0
    starts = sorted(activity.start_s for activity in several.activities)
    assert len(set(starts)) >= turns
    assert len({activity.correlation for activity in several.activities}) > len(
        {activity.correlation for activity in one.activities}
    )


def test_both_readers_have_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(script, "call_apart", in_process)
    out = tmp_path / "rows.jsonl"
    assert script.main(["--trace", "ddpm-graph", "--mb", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["subject"], row["stack"], row["shape"], row["gpu"], row["n"]) for row in rows] == [
        ("trace-reader", stack, "ddpm-graph", "cpu", 5) for stack in ("ridgeline", "json.loads")
    ]
    for row in rows:
        assert row["extra"]["bytes"] > 1e6
        assert row["extra"]["bytes_per_s"] == pytest.approx(row["extra"]["bytes"] / row["median_s"])
    assert capsys.readouterr().out.count("/s") == 2
    assert script.main(["--trace", "ddpm-graph", "--mb", "1", "--alone"]) == 0
    assert capsys.readouterr().out.count("/s") == 1
    with pytest.raises(UsageError, match="--mb must be at least 1, got 0"):
        script.main(["--mb", "0"])
