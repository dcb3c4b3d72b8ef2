"""benchmarks/_over_parameters.py: rows of every config, PyTorch and a copy, of which the best stands last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmark_scripts import load
from ridgeline.cost import Cost
from ridgeline.kernels.grad_norm import CONFIGS
from ridgeline.timing import Timing

shared, rows_of = load("_over_parameters"), load("_rows")


@pytest.mark.parametrize("script", ["grad_norm", "adamw_ema"])
def test_scripts_are_whole(script: str):
    assert load(script).main is shared.main


def test_every_config_beside_pytorch_and_a_copy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    seconds = {config: 1e-4 * (5 - i) for i, config in enumerate(CONFIGS)} | {None: 1e-3}

    def time_many(calls, *, repeats):
        assert list(calls) == [*map(str, seconds), "copy"] and repeats == 7
        taken = {str(config): each for config, each in seconds.items()} | {"copy": 1e-4}
        return {name: Timing(taken[name], 0.0, 0.0, 0.0, repeats, "events", "warm", None) for name in calls}

    monkeypatch.setattr(shared, "time_many", time_many)
    monkeypatch.setattr(shared, "repeat", lambda call: SimpleNamespace(replay=call))
    monkeypatch.setattr(shared, "COPY_BYTES", 1000)
    described = {"subject": "kernel:grad_norm", "dtype": "bf16", "shape": "3 tensors"}
    rows = shared.rows_beside_copy(
        rows_of.machine("cpu"), dict.fromkeys(seconds, lambda: None), Cost(0, 500, 0), repeats=7, rival="foreach norm",
        device="cpu", **described,
    )  # fmt: skip
    assert [(row.stack, row.recipe) for row in rows] == [
        ("eager", "foreach norm"),
        ("ridgeline", "default"),
        *[("ridgeline", "config")] * (len(CONFIGS) - 1),
    ]
    assert rows[-1].median_s == pytest.approx(min(each for config, each in seconds.items() if config) / shared.CALLS)
    assert rows[0].extra["config"] is None and rows[-1].extra["config"]["block"] == CONFIGS[-1].block
    for row in rows:
        assert row.extra["copy_rate"] == pytest.approx(2000 / 1e-4)
        assert row.extra["share_of_copy"] == pytest.approx(500 / row.median_s / row.extra["copy_rate"])
    assert capsys.readouterr().out.count("of copy") == len(rows)
