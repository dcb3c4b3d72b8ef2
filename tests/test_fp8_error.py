"""benchmarks/fp8_error.py: rows are whole, cut-off sums show as bias, and what cannot be measured is said."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmark_scripts import FOLDER, load
from ridgeline.errors import VerificationFailed
from ridgeline.kernels._quads import from_quads
from ridgeline.kernels.conv2d_wgrad_fp8 import wgrad_fp8_sample

script, tables = load("fp8_error"), load("_error_tables")

ON_CPU = ("--device", "cpu", "--channels", "16", "--width", "16", "--side", "8")
TAPS = 9


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(path: str = "rows.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def cut(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The first bits of each number, the others cut off."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


def short_sums(bits: int):
    """Stands in for the weight gradient: sums of so many bits, 32 products at a time, promoted as asked for."""

    def compute(problem, arguments, _variant):
        dy, x = (from_quads(arguments[name], beside=name == "x").float() for name in ("dy", "x"))
        patches = F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 32, TAPS * problem.channels)
        steps = dy.permute(0, 2, 3, 1).reshape(-1, 32, problem.channels).transpose(1, 2) @ patches
        spans = steps.split((arguments["promote"] or problem.reduction) // 32)
        total = torch.zeros_like(steps[0])
        for span in spans:
            acc = torch.zeros_like(total)
            for step in span:
                acc = cut(acc + step, bits)
            total += acc
        dw = total.reshape(problem.channels, problem.channels, 3, 3) * arguments["inverse"].prod()
        return script.Computed(dw.bfloat16())

    return compute


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", [False, True])
def test_cut_off_bits_show_as_bias_and_rounding_to_nearest_does_not(positive):
    exact = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = exact.abs() if positive else exact
    _, _, bias, rounding = script.errors(exact.bfloat16(), exact)
    assert abs(bias) < 5e-5 and rounding == script.errors(exact.bfloat16(), exact)[0]
    # eight bits hold 1/256 to 1/128 of a number in the last one, of which half is cut off
    _, _, bias, _ = script.errors(cut(exact, 8), exact)
    assert -(2**-8) < bias < -(2**-9)
    assert script.errors(1.25 * exact, exact)[2] == pytest.approx(0.25)


def test_errors_are_relative_to_the_root_mean_square_of_the_result():
    exact = torch.tensor([3.0, -4.0, 0.0, 0.0], dtype=torch.float64)
    rms, largest, bias, _ = script.errors(torch.tensor([3.0, -4.0, 0.0, 1.0]), exact)
    assert (rms, largest, bias) == (pytest.approx(0.5 / 2.5), pytest.approx(1 / 2.5), 0.0)


def test_short_sums_are_biased_and_promotion_bounds_that(monkeypatch):
    monkeypatch.setattr(script.WeightGradient, "compute", short_sums(13))
    monkeypatch.setattr(script, "OPERANDS", ("given",))  # the interpreter would quantise for seconds
    problem = script.WeightGradient(images=32, channels=16, side=8)
    variants, _ = problem.variants([0, 128])
    results = {(r.data, r.computed): r for r in script.measure(problem, variants, "cpu")}
    bias = {key: result.bias for key, result in results.items()}
    # 64 steps of positive products cut the sum 64 times, four steps four times
    assert bias["positive", "promote 0"] < -2e-3
    assert -4e-4 < bias["positive", "promote 128"] < -5e-5
    assert abs(bias["positive", "bf16"]) < 1e-4
    # the cut is toward zero, so sums of both signs shrink too
    assert bias["normal", "promote 0"] < bias["normal", "promote 128"] < 1e-4
    # what is allowed follows the length of a sum
    long, short = (results["positive", f"promote {promote}"].allowed_rms for promote in (0, 128))
    assert long - short == pytest.approx(1.25 * (2048 - 128) / 32 * 2.0**-13, rel=1e-3)


@pytest.mark.parametrize(
    ("promote", "unsplit", "summed", "parts"),
    [(0, False, 6 * 1024, 22), (0, True, 131_072, 1), (256, False, 256, 22)],
)
def test_sums_are_as_long_as_the_launch_makes_them(promote, unsplit, summed, parts):
    # 132 multiprocessors share two tiles of channels and three columns of filters: 22 parts, 128 images: 6 a part
    problem = script.WeightGradient(images=128, channels=128, side=32)
    shape = problem.shapes[0]
    arguments = wgrad_fp8_sample("", shape, (128, 3, 3), promote=promote).arguments(torch.float8_e4m3fn, "meta")
    launch, *found = problem.launch(arguments, script.Variant("", promote, unsplit))
    assert found == [summed, parts] and len(launch.parts[0].output) == parts


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_whole_rows_of_both_ops_and_the_same_tables_from_them(capsys):
    assert script.main([*ON_CPU, "--images", "2", "--promote", "0", "128", "--out", "rows.jsonl"]) == 0
    printed = capsys.readouterr().out
    found = rows()
    forward, gradient = ("bf16", "fp8"), ("bf16", "promote 0", "promote 0, unsplit", "promote 128")
    assert [(r["subject"], r["extra"]["data"], r["extra"]["operands"], r["recipe"]) for r in found] == [
        (f"error:{op}", data, operands, recipe)
        for op, recipes in (("conv2d_fp8", forward), ("conv2d_wgrad_fp8", gradient))
        for data in ("normal", "positive")
        for operands in ("given", "quantised")
        for recipe in recipes
    ]
    for row in found:
        assert set(row) == set(script._rows.Row.__dataclass_fields__) and row["gpu"] == "cpu"
        extra = row["extra"]
        assert extra["reduction"] == (144 if row["subject"] == "error:conv2d_fp8" else 128)
        assert (extra["outputs"], extra["summed"], extra["parts"]) == (
            (4 * 16 * 256, None, None) if row["subject"] == "error:conv2d_fp8" else (TAPS * 256, None, None)
        )
        if extra["operands"] == "given" or row["dtype"] == "bf16":
            # references run here: what is left is rounding to bf16
            assert extra["rms"] == pytest.approx(extra["rounding_rms"], rel=0.02) and 1e-3 < extra["rms"] < 2e-3
            assert extra["rms"] < extra["allowed_rms"] < 0.02 and extra["largest"] < extra["allowed_largest"]
        else:
            assert extra["rms"] > 2e-3 and extra["allowed_rms"] is None
    assert {row["dtype"] for row in found} == {"bf16", "fp8 e4m3 e4m3", "fp8 e5m2 e4m3"}
    assert script.main(["--rows", "rows.jsonl"]) == 0
    assert capsys.readouterr().out == printed  # nothing measured, the same said


def test_a_promotion_that_does_not_divide_is_left_out_with_its_reason(capsys):
    assert script.main([*ON_CPU, "--images", "1", "--promote", "256", "1024", "100", "--out", "rows.jsonl"]) == 0
    said = "conv2d_wgrad_fp8: promote must be 0, or a multiple of 128 that divides 256, got"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"64 products, promote 1024 left out: {said} 1024",
        f"64 products, promote 100 left out: {said} 100",
    ]
    of_gradient = [row["recipe"] for row in rows() if row["subject"] == "error:conv2d_wgrad_fp8"]
    assert set(of_gradient) == {"bf16", "promote 256"}


def test_errors_beyond_what_is_allowed_are_kept_marked_and_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(script.WeightGradient, "compute", short_sums(4))
    arguments = [*ON_CPU, "--images", "2", "--promote", "128", "--out", "rows.jsonl", "--markdown"]
    with pytest.raises(
        VerificationFailed, match=r"2 of 16 results err .* first conv2d_wgrad_fp8 of 128 products, normal"
    ):
        script.main(arguments)
    marked = [line for line in capsys.readouterr().out.splitlines() if "!" in line]
    assert [line.split(" | ")[:3] for line in marked] == [
        ["| 128", "normal", "given"],
        ["| 128", "positive", "given"],
    ]
    assert len(rows()) == 16


def test_a_result_that_is_not_finite_is_no_measurement(monkeypatch):
    problem = script.Forward(channels=16, filters=16)
    wrong = torch.full((4, 16, 16, 16), float("nan"), dtype=torch.bfloat16)
    monkeypatch.setattr(script.Forward, "compute", lambda *_: script.Computed(wrong))
    with pytest.raises(VerificationFailed, match="not finite: conv2d_fp8 of 144 products, normal, given, fp8"):
        list(script.measure(problem, [script.Variant("fp8")], "cpu"))


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--device", "tpu"), 2, "device must be cuda or cpu, got 'tpu'"),
        (("--images", "4", "0"), 2, "images must be at least 1, got 0"),
        (("--promote", "-128"), 2, "promote must be at least 0, got -128"),
        (("--channels", "128", "24"), 2, "multiples of 16, got 24"),
        (("--side", "6"), 2, "conv2d_wgrad_fp8: quads need a multiple of 4 rows, got 6"),
        (("--side", "12"), 2, "conv2d_wgrad_fp8: quads need a power of two of columns, from 4 to 128, got 12"),
        (("--rows", "absent.jsonl"), 2, "'absent.jsonl' cannot be read (No such file or directory)"),
        (("--rows", "damaged.jsonl"), 2, "'damaged.jsonl' has a line that is no row"),
        (("--rows", "other.jsonl"), 2, "'other.jsonl' has no rows of errors"),
        (("--rows", "other.jsonl", "--out", "o"), 2, "pass one of the two"),
        pytest.param(
            (),
            3,
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told"),
        ),
    ],
)
def test_bad_input_is_one_sentence_and_its_exit_code(arguments, code, says, monkeypatch, capsys):
    Path("damaged.jsonl").write_text('{"subject": "error:conv2d_fp8", "extra": {"rms": 1}}\n')
    Path("other.jsonl").write_text('{"subject": "ceilings"}\n')
    monkeypatch.setattr(sys, "argv", ["fp8_error.py", *arguments])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(FOLDER / "fp8_error.py"), run_name="__main__")
    assert stop.value.code == code
    message = capsys.readouterr().err
    assert message.startswith("benchmarks/fp8_error.py: ") and says in message and message.count("\n") == 1


# --- tables ----------------------------------------------------------------------------------------------------------

ROW = {"run": "b", "gpu": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "commit": "c", "date": "d"}
RESULT = tables.Result(
    "conv2d_wgrad_fp8", "promote 128", 131072, "positive", "given", 128, 128, 22, 9216,
    0.00174, 0.0052, -0.00031, 0.0017, 0.0123, 0.026,
)  # fmt: skip


def row_of(result, **other: str) -> dict:
    extra = {name: value for name, value in asdict(result).items() if name != "op"}
    return {**ROW, **other, "subject": f"error:{result.op}", "extra": extra}


def test_the_documentation_has_a_line_a_problem_and_a_column_a_way():
    never = replace(RESULT, computed="promote 0", promote=0, rms=0.3, bias=-0.3)
    text = tables.in_markdown([row_of(RESULT), row_of(never)])
    assert "| GPU | NVIDIA H200 |" in text
    assert "| products | data | operands | promote 128 | promote 0 |" in text
    assert "| 131,072 | positive | given | 0.174 / 0.52 / -0.031 | 30.000 / 0.52 / -30.000! |" in text
    assert "1 of 2 judged results err no more than allowed" in text


def test_only_the_newest_run_of_a_file_counts():
    old, new = row_of(replace(RESULT, bias=0.5), run="a"), row_of(RESULT)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (old, {"subject": "ceilings"}, new)))
    assert tables.results_of(tables.newest_rows(Path("rows.jsonl"))) == [RESULT]


@pytest.mark.gpu
def test_gpu_sums_are_as_long_as_rows_say():
    assert script.main(["--channels", "128", "--images", "32", "--out", "rows.jsonl"]) == 0
    found = {row["recipe"]: row["extra"] for row in rows() if row["extra"]["operands"] == "given"}
    assert found["fp8"]["summed"] == 1152
    assert [found[f"promote {p}"]["summed"] for p in (128, 256, 1024)] == [128, 256, 1024]
    unsplit, split = found["promote 0, unsplit"], found["promote 0"]
    assert (unsplit["parts"], unsplit["summed"]) == (1, 32_768)
    assert split["parts"] > 1 and split["summed"] < 32_768
    # positive data come last, so these are theirs
    assert unsplit["bias"] < split["bias"] < 0
