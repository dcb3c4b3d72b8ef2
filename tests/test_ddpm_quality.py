"""benchmarks/ddpm_quality.py: runs become rows, a killed run goes on, and verdicts follow from seeds."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmark_scripts import FOLDER, in_process, load
from ridgeline.errors import EnvironmentUnusable, UsageError, VerificationFailed
from ridgeline.models.ddpm_unet import UNetConfig
from ridgeline.workloads.settings import PRESETS

quality, verdicts, curves = load("ddpm_quality"), load("_learned"), load("_curves")

SMALL = UNetConfig(image_size=8, channels=(8,), blocks=1, attention_resolutions=(), heads=1, groups=2)
KILLED_STEPS = 24


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(quality, "call_apart", in_process)
    for name, count in (("train", 10), ("val", 4)):
        np.savez(f"{name}.npz", np.random.default_rng(count).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8))


@pytest.fixture
def small(monkeypatch):
    """A network that is smaller than any preset."""
    monkeypatch.setitem(PRESETS, "tiny", SMALL)


def options(*more: str, out: str = "rows.jsonl", runs: str = "runs", steps: int = 4) -> list[str]:
    places = ["--data", "train.npz", "--val", "val.npz", "--runs", runs, "--out", out]
    return [
        *places,
        "--preset",
        "tiny",
        "--batch",
        "3",
        "--device",
        "cpu",
        "--steps",
        f"{steps}",
        "--every",
        "2",
        *more,
    ]


def rows(path: str = "rows.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def val_losses(path: str) -> dict[int, float]:
    return {row["extra"]["step"]: row["extra"]["val_loss"] for row in rows(path)}


# --- runs ------------------------------------------------------------------------------------------------------------


def test_runs_become_rows_a_table_and_curves_and_are_not_repeated(small, capsys):
    arguments = options("--recipe", "eager", "bf16", "--seeds", "0", "1", "2")
    assert quality.main(arguments) == 0
    printed = capsys.readouterr().out
    found = rows()
    order = [(row["recipe"], row["extra"]["seed"], row["extra"]["step"]) for row in found]
    assert order == [(name, seed, step) for seed in range(3) for name in ("eager", "bf16") for step in (2, 4)]
    for row in found:
        assert (row["subject"], row["gpu"], row["dtype"], row["batch"]) == ("ddpm-quality", "cpu", "bf16", 3)
        assert row["stack"] == ("eager" if row["recipe"] == "eager" else "ridgeline")
        assert 0 < row["extra"]["val_loss"] < 3 and row["extra"]["train_s"] > 0
        assert bool(row["extra"]["report"]) == (row["recipe"] == "bf16")
    bf16 = next(line for line in printed.splitlines() if re.match(r"bf16 +3 ", line))
    assert "yes" in bf16  # without a GPU the two compute the same
    assert "fp8 within 0.5 % of bf16: too few seeds (0 of 3)" in printed
    assert quality.main([*arguments, "--plot", "curves.svg"]) == 0
    assert capsys.readouterr().out.count(": complete\n") == 6 and rows() == found
    svg = ET.fromstring(Path("curves.svg").read_text())
    drawn = [path for path in svg.iter("{http://www.w3.org/2000/svg}path") if "seed" in path.get("class", "")]
    assert len(drawn) == 2 * 2 * 3  # panels, recipes, seeds
    assert quality.main(["--out", "rows.jsonl"]) == 0  # trains nothing
    assert capsys.readouterr().out.strip() in printed


def test_a_killed_run_goes_on_as_if_it_had_not_been(capsys):
    alone = ["--recipe", "eager", "--seeds", "0"]
    command = [sys.executable, str(FOLDER / "ddpm_quality.py"), *options(*alone, steps=KILLED_STEPS)]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    while not Path("rows.jsonl").exists():
        assert child.poll() is None, "the script ended before its first row"
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)  # the script, and the process that trains
    child.wait()
    before = rows()
    assert len(before) < KILLED_STEPS // 2
    assert quality.main(options(*alone, steps=KILLED_STEPS)) == 0
    begun = re.search(rf"eager, seed 0: from step (\d+) of {KILLED_STEPS}", capsys.readouterr().out)
    assert begun is not None and 2 <= int(begun[1]) < KILLED_STEPS
    assert rows()[: len(before)] == before
    whole = options(*alone, out="whole.jsonl", runs="whole", steps=KILLED_STEPS)
    assert quality.main(whole) == 0
    assert val_losses("rows.jsonl") == val_losses("whole.jsonl")
    assert len(rows()) == KILLED_STEPS // 2  # none twice


def test_force_begins_anew_and_the_last_row_counts(small):
    alone = options("--recipe", "eager", "--seeds", "0")
    quality.main(alone)
    stale = [{**row, "extra": {**row["extra"], "val_loss": 9.0}} for row in rows()]
    true = val_losses("rows.jsonl")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stale))
    quality.main(alone)
    assert rows() == stale
    quality.main([*alone, "--force"])
    conditions = quality.newest_conditions(Path("rows.jsonl"))
    points = quality.read_points(Path("rows.jsonl"), conditions)
    assert {point.step: point.val_loss for point in points} == true and len(rows()) == 4


def test_runs_of_other_conditions_are_apart(small, capsys):
    quality.main(options("--recipe", "eager", "--seeds", "0"))
    with pytest.raises(
        UsageError, match=r"run in 'runs/eager-seed0' has another steps: pass --force, or another --runs"
    ):
        quality.main(options("--recipe", "eager", "--seeds", "0", steps=6))
    capsys.readouterr()
    quality.main(options("--recipe", "eager", "--seeds", "0", runs="longer", steps=6))
    assert "eager, seed 0: from step 0 of 6" in capsys.readouterr().out
    old = quality.Conditions("train.npz", "val.npz", 4, 3, "tiny", None, "cpu")
    assert len(quality.read_points(Path("rows.jsonl"), old)) == 2
    assert len(quality.read_points(Path("rows.jsonl"), replace(old, steps=6))) == 3


def test_a_run_that_fails_is_named_and_the_others_go_on(small, monkeypatch, capsys):
    def call(work, *, budget_s):
        (job,) = work.args
        if job.settings.recipe == "bf16":
            raise VerificationFailed("the loss became nan at step 3")
        work()

    monkeypatch.setattr(quality, "call_apart", call)
    assert quality.main(options("--recipe", "bf16", "eager", "--seeds", "5")) == 1
    assert capsys.readouterr().err.strip().endswith("bf16, seed 5: the loss became nan at step 3")
    assert {row["recipe"] for row in rows()} == {"eager"}


def test_a_run_whose_script_has_ended_ends_too(small, monkeypatch):
    class Gone:
        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr(quality.multiprocessing, "parent_process", Gone)
    kept = []
    monkeypatch.setattr(quality, "call_apart", lambda work, *, budget_s: kept.append(work))
    quality.main(options("--recipe", "eager", "--seeds", "0"))
    with pytest.raises(EnvironmentUnusable, match="has ended, and another may go on with it"):
        kept[0]()


def test_a_run_waits_for_another_in_its_folder(small):
    held = Path("runs/eager-seed0.lock")
    held.parent.mkdir()
    alone = quality.main, options("--recipe", "eager", "--seeds", "0")
    with held.open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = pool.submit(*alone)
        with pytest.raises(TimeoutError):
            done.result(timeout=0.3)
        assert not Path("rows.jsonl").exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert done.result(timeout=60) == 0
    assert len(rows()) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--data", "train.npz"), "--val is needed"),
        (options("--seeds", "0", runs="train.npz/runs"), "'train.npz/runs' cannot be written (Not a directory)"),
        (options("--recipe", "int4"), "recipe must be one of auto, eager, graph, bf16"),
        (options("--seeds", "-1"), "seed must be a whole number from 0 to "),
        (options("--data", "absent.npz"), "'absent.npz' does not exist"),
        (options("--val", "absent.npz"), "'absent.npz' does not exist"),
        (["--out", "absent.jsonl"], "'absent.jsonl' has no rows of ddpm-quality"),
        (["--out", "damaged.jsonl"], "'damaged.jsonl', line 2, is no row"),
    ],
)
def test_bad_input_is_one_sentence_and_its_exit_code(arguments, says, monkeypatch, capsys):
    Path("damaged.jsonl").write_text('{"subject": "other"}\n{"subj')
    monkeypatch.setattr(sys, "argv", ["ddpm_quality.py", *arguments])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(FOLDER / "ddpm_quality.py"), run_name="__main__")
    assert stop.value.code == 2
    out, message = capsys.readouterr()
    assert message.startswith("benchmarks/ddpm_quality.py: ") and says in message and message.count("\n") == 1
    assert "from step" not in out or "cannot be written" in says


def test_a_cpu_is_taken_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = options()
    at = arguments.index("--device")
    del arguments[at : at + 2]
    with pytest.raises(EnvironmentUnusable, match="torch sees no CUDA GPU; use --device cpu"):
        quality.main(arguments)
    assert not Path("runs").exists()


# --- verdicts --------------------------------------------------------------------------------------------------------


def of(recipe: str, *losses: float, first_seed: int = 0):
    return verdicts.Learned(recipe, dict(enumerate(losses, first_seed)), 60.0)


EAGER = of("eager", 0.0300, 0.0302, 0.0304)  # mean 0.0302, spread 0.0004


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ((0.0300, 0.0302, 0.0304), "yes"),
        ((0.0304, 0.0306, 0.03075), "yes"),  # 0.00038 above
        ((0.0304, 0.0306, 0.0309), "no, worse"),  # 0.00043 above
        ((0.0296, 0.0298, 0.03005), "yes"),
        ((0.0296, 0.0298, 0.0299), "no, better"),
        ((0.0300, 0.0302), "too few seeds (2 of 3)"),
    ],
)
def test_a_recipe_learns_as_eager_does_within_the_spread_of_eagers_seeds(losses, says):
    assert verdicts.verdict(of("bf16", *losses), EAGER) == says


def test_only_seeds_that_both_have_are_compared():
    moved = of("bf16", 0.0302, 0.0304, 0.9, first_seed=1)
    assert verdicts.pairs(moved, EAGER) == [(0.0302, 0.0302), (0.0304, 0.0304)]
    assert verdicts.verdict(moved, EAGER) == "too few seeds (2 of 3)"
    assert verdicts.verdict(moved, None) == verdicts.pair_verdict(None, EAGER) == "too few seeds (0 of 3)"
    assert verdicts.verdict(of("bf16", 0.0300, 0.0302, 0.0304, 0.9), EAGER) == "yes"


@pytest.mark.parametrize(
    ("factor", "says"),
    [(1.0049, "yes (+0.49 %)"), (1.0051, "no (+0.51 %)"), (0.9951, "yes (-0.49 %)"), (0.99, "no (-1.00 %)")],
)
def test_two_recipes_are_within_half_a_percent_or_not(factor, says):
    bf16 = of("bf16", 0.030, 0.031, 0.032)
    fp8 = of("fp8", *(factor * loss for loss in bf16.losses.values()))
    assert verdicts.pair_verdict(fp8, bf16) == says


def test_the_table_says_what_rows_say_and_leaves_unfinished_runs_out():
    points = [
        verdicts.Point(recipe, seed, step, loss + 0.001 * (100 - step), 0.0, step / 10)
        for recipe, losses in (("eager", (0.0300, 0.0302, 0.0304)), ("fp8", (0.0310, 0.0312, 0.0314)))
        for seed, loss in enumerate(losses)
        for step in (50, 100)
    ]
    points.append(verdicts.Point("bf16", 0, 50, 0.03, 0.0, 5.0))
    text = verdicts.table(points, 100, "a title")
    lines = (re.split(r"  +", line.strip()) for line in text.splitlines())
    cells = {line[0]: line for line in lines if len(line) >= 5}
    assert cells["eager"] == ["eager", "3", "0.030200", "0.000400", "10.0 s"]
    fp8 = ["3", "0.031200", "0.000400", "+3.31 %", "+2.50", "+3.29 % to +3.33 %", "no, worse", "10.0 s"]
    assert cells["fp8"] == ["fp8", *fp8]
    assert "bf16" not in cells and text.startswith("a title")


# --- curves ----------------------------------------------------------------------------------------------------------


def test_curves_without_the_plain_recipe_and_with_odd_names_are_whole():
    runs = {"<&\"'>": {0: [(10, 0.5)]}, "fp8": {0: [(10, 0.6), (20, 0.4)], 1: [(10, 0.6)]}}
    svg = ET.fromstring(curves.picture(runs, plain="eager", title="a & b"))
    texts = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "a & b" in texts and "<&\"'>, 1 seed" in texts and "fp8, 2 seeds" in texts
    assert not any("difference" in text for text in texts)
    labels = [group.get("aria-label") for group in svg.iter("{http://www.w3.org/2000/svg}g") if group.get("aria-label")]
    assert labels[1] == "fp8, mean of 2 seeds: 0.40000 at step 20"


def test_curves_are_readable_on_light_and_dark_grounds():
    style = curves.picture({"eager": {0: [(1, 1.0)]}}, plain="eager", title="").partition("<style>")[2]
    assert "prefers-color-scheme: dark" in style.partition("</style>")[0]


def test_shares_are_of_the_other_curve_where_both_are():
    assert curves.share_of([(1, 2.0), (2, 3.0)], [(2, 2.0), (3, 1.0)]) == [(2, 50.0)]
    assert curves.mean_curve({0: [(1, 1.0), (2, 2.0)], 1: [(1, 3.0)]}) == [(1, 2.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 5000, [0, 1000, 2000, 3000, 4000, 5000]),
        (0.031, 0.082, [0.04, 0.05, 0.06, 0.07, 0.08]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low, high, found):
    assert curves.ticks(low, high) == pytest.approx(found)
