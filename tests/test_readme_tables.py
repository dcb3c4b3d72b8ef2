"""The tables of the front pages say what the rows say: the newest of each, rivals of their own newest run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readme = load()


def detector(run: str, stack: str, recipe: str, microseconds: float, **other: Any) -> dict[str, Any]:
    row = {
        "subject": "yolo26s",
        "region": "model",
        "dtype": "fp16",
        "batch": 1,
        "gpu": "A",
        "driver": "1",
        "torch": "2",
    }
    return {**row, "run": run, "stack": stack, "recipe": recipe, "l2": "warm", "median_s": microseconds * 1e-6, **other}


def cells(table: str) -> list[list[str]]:
    _, _, *lines = table.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


OLD = [
    detector("old", "ridgeline", "compile", 90.0),
    detector("old", "eager", "eager NHWC", 700.0),
    detector("old", "torch.compile", "torch.compile default", 300.0),
]
NEW = [
    detector("new", "ridgeline", "compile", 100.0),
    detector("new", "ridgeline", "compile, no PDL", 80.0),
    detector("new", "ridgeline", "compile", 120.0, l2="cold"),
    detector("new", "eager", "eager NCHW", 900.0),
    detector("new", "eager", "eager NHWC", 800.0),
]


def test_the_newest_run_counts_and_a_faster_rival_is_not_forgotten():
    (row,) = cells(readme.detectors([*OLD, *NEW]))
    assert row == ["yolo26s fp16, batch 1", "800 µs", "300 µs*", "100 µs", "120 µs", "3.0 to torch.compile"]


def test_a_rival_of_another_machine_is_no_rival():
    (row,) = cells(readme.detectors([*({**row, "driver": "0"} for row in OLD), *NEW]))
    assert row[1:] == ["800 µs", "", "100 µs", "120 µs", "8.0 to eager"]


def test_no_cold_time_of_another_run():
    (row,) = cells(readme.detectors([*NEW, *OLD]))
    assert row[3:] == ["90.0 µs", "", "3.3 to torch.compile"]


def test_detectors_stand_by_dtype_and_size():
    rows = [
        detector("1", "ridgeline", "compile", 1.0, subject=f"yolo26{scale}", dtype=dtype)
        for dtype in ("tf32", "fp16")
        for scale in "xn"
    ]
    names = [row[0] for row in cells(readme.detectors(rows))]
    assert names == [f"yolo26{scale} {dtype}, batch 1" for dtype in ("fp16", "tf32") for scale in "nx"]


def rung(name: str, ms: float, run: str = "1") -> dict[str, Any]:
    times = {"median_s": ms * 1e-3, "spread_s": 1e-3, "gpu_busy_s": 0.5e-3}
    extra = {"change": f"as {name}", "kernels": 1234.0}
    return {"subject": "ddpm-cifar10", "region": "step", "recipe": name, "run": run, **times, "extra": extra}


def test_rungs_stand_in_order_beside_the_write_up():
    """A star marks what the newest run left out."""
    table = readme.ladder([rung("one-pass", 7.0), rung("writeup-5", 9.0), rung("writeup-5", 8.0, "2")])
    assert cells(table) == [
        ["writeup-5", "as writeup-5", "8.00 ms", "1.00 ms", "500 µs", "1,234", "133.60 ms"],
        ["one-pass", "as one-pass", "7.00 ms*", "1.00 ms", "500 µs", "1,234", ""],
    ]


def loop(run: str, recipe: str, ms: float, gpu: str = "NVIDIA L4") -> dict[str, Any]:
    extra = {"versions": {"torch": "2.11.0", "timm": "1.0.31"}}
    row = {"subject": "loop:timm", "recipe": recipe, "run": run, "gpu": gpu, "shape": "128x3x224x224"}
    return {**row, "median_s": ms * 1e-3, "extra": extra}


LOOPS = [
    loop("1", "as it was", 30.0),
    loop("1", "changed", 15.0),
    loop("2", "as it was", 24.0),
    loop("2", "changed", 10.0),
    loop("3", "as it was", 9.0),
    loop("4", "as it was", 8000.0, "cpu"),
    loop("4", "changed", 8000.0, "cpu"),
]


def test_a_loop_is_told_of_in_its_newest_whole_run_on_a_gpu():
    assert readme.TABLES["loop-timm"](LOOPS) == (
        "A step of 128x3x224x224 on one NVIDIA L4, torch 2.11.0 and timm 1.0.31: 24.0 ms as it was, 10.0 ms changed, "
        "2.40 times as fast.\n"
    )


@pytest.mark.parametrize("rows", [[], LOOPS[:1], LOOPS[4:]], ids=["none", "half", "half and a CPU"])
def test_nothing_is_told_of_a_loop_without_both_rows(rows):
    assert readme.TABLES["loop-timm"](rows) == ""
    assert readme.TABLES["loop-diffusers"](LOOPS) == ""


def test_a_network_is_shown_in_its_newest_run_of_both_recipes():
    def step(run: str, recipe: str, ms: float, gpu: str = "NVIDIA L4") -> dict:
        row = {"subject": "resnet50", "region": "step", "recipe": recipe, "run": run, "gpu": gpu}
        return {**row, "shape": "8x3x224x224", "median_s": ms * 1e-3}

    rows = [step("1", "writeup-5", 9.0), step("1", "bf16", 3.0), step("2", "writeup-5", 8.0), step("2", "bf16", 4.0)]
    rows += [step("3", "bf16", 1.0), step("4", "writeup-5", 1.0, "cpu"), step("4", "bf16", 1.0, "cpu")]
    assert "| ResNet-50, 8x3x224x224 | 8.00 ms | 4.00 ms | 2.00 |" in readme.TABLES["nets"](rows)
    assert readme.TABLES["nets"](rows[4:]) == ""


def test_fp8_layers_have_a_line_of_three_passes_each():
    def passes(run: str, shape: str, dtype: str, ours: float, theirs: float, op: str = "conv2d_fp8") -> list[dict]:
        row = {"subject": f"kernel:{op}", "shape": shape, "run": run, "extra": {"flops": 2e9}}
        mine = {**row, "stack": "ridgeline", "dtype": dtype, "median_s": ours * 1e-6}
        return [mine, {**row, "stack": "eager", "dtype": "bf16", "median_s": theirs * 1e-6}]

    def layer(run: str, size: int) -> list[dict]:
        forward = f"padding 1 1, weight 32x64x{size}x{size}, x 8x64x16x16"
        back = f"padding 1 1, weight 64x32x{size}x{size}, x 8x32x16x16"
        rows = passes(run, forward, "fp8 e4m3", 2.0, 3.0) + passes(run, back, "fp8 e5m2", 4.0, 4.0)
        return rows + passes(run, "dy, x", "fp8 e5m2", 8.0, 4.0, "conv2d_wgrad_fp8")

    rows = [*layer("1", 3), *layer("2", 3)[:2], *layer("2", 1), *layer("2", 3)[2:]]
    assert readme.TABLES["fp8-kernels"](layer("1", 3)).splitlines()[2:] == [
        "| 64 to 32 at 16² | 1.00 PFLOP/s, 1.50 | 500 TFLOP/s, 1.00 | 250 TFLOP/s, 0.50 |"
    ]
    # of the newest run, 3x3 filters, whole lines
    assert readme.TABLES["fp8-kernels"](rows) == readme.TABLES["fp8-kernels"]([]) == ""


def test_a_stale_page_is_seen_and_written_again(tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "README.md", tmp_path / "results"
    results.mkdir()
    (results / "a.jsonl").write_text(json.dumps({**rung("one-pass", 7.0), "date": "2026"}), encoding="utf-8")
    page.write_text("<!-- table:ladder -->\nold\n<!-- /table -->\nkept\n", encoding="utf-8")
    for name, value in {"ROOT": tmp_path, "PAGES": (page,), "RESULTS": results}.items():
        monkeypatch.setattr(readme, name, value)
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 1
    assert "README.md: tables differ" in capsys.readouterr().err and "old" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["readme.py"])
    assert readme.main() == 0
    text = page.read_text(encoding="utf-8")
    assert "7.00 ms" in text and "old" not in text and text.endswith("kept\n")
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 0


def test_a_broken_row_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}\n{half", encoding="utf-8")
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"a\.jsonl:2: not a JSON row"):
        readme.read_rows()
