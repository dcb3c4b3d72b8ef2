"""The verbs `train ddpm` and `sample`: options reach the library, results go to stdout, progress to stderr."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from image_set_files import pictures

from ridgeline import cli_train
from ridgeline.cli import main
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.workloads import training
from ridgeline.workloads.checkpoint import save_checkpoint
from ridgeline.workloads.run_log import Line
from ridgeline.workloads.settings import DTYPES, PRESETS, RECIPES, Settings


def run(*argv: str) -> int:
    arguments = parser().parse_args(argv)
    return arguments.run(arguments)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ridgeline")
    cli_train.add_commands(parser.add_subparsers(dest="verb"))
    return parser


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    np.savez("x.npz", pictures(8))


def test_training_then_sampling(capsys):
    options = ("--preset", "tiny", "--batch", "2", "--log-every", "2", "--save-every", "2", "--sample-every", "0")
    assert run("train", "ddpm", "--data", "x.npz", "--out", "run", "--steps", "4", "--device", "cpu", *options) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["step"], result["checkpoint"], result["val_loss"]) == (4, "run/step-00000004.pt", None)
    assert captured.err.splitlines()[1].startswith("step 4/4 loss ")
    assert run("train", "ddpm", "--out", "run", "--resume", "--steps", "6", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "run/step-00000006.pt"
    sampling = ("sample", "--checkpoint", "run/step-00000006.pt", "--n", "4", "--steps", "2", "--device", "cpu")
    assert run(*sampling, "--out", "grid.png") == 0
    assert capsys.readouterr().out == "grid.png\n"
    assert cv2.imread("grid.png").shape == (17, 17, 3)


@pytest.fixture
def boards(monkeypatch):
    """Reads what TensorBoard was given, (name, step) -> value; a stand-in takes it where the package is absent."""
    if importlib.util.find_spec("tensorboard") is not None:
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

        def read(folder: Path) -> dict[tuple[str, int], float]:
            events = reader.EventAccumulator(str(folder))
            events.Reload()
            return {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}

        return read

    written: dict[Path, dict[tuple[str, int], float]] = {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            kept = {key: value for key, value in written.get(Path(folder), {}).items() if key[1] < purge_step}
            self.scalars = written[Path(folder)] = kept

        def add_scalar(self, name, value, step):
            self.scalars[name, step] = value

        def close(self):
            """Nothing is held back."""

    module = types.ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return written.__getitem__


def test_the_log_goes_to_tensorboard_too(boards):
    options = ("--preset", "tiny", "--batch", "2", "--log-every", "2", "--save-every", "2", "--sample-every", "0")
    train = ("train", "ddpm", "--out", "run", "--device", "cpu", "--tensorboard")
    assert run(*train, "--data", "x.npz", "--val", "x.npz", "--val-every", "2", "--steps", "2", *options) == 0
    assert run(*train, "--resume", "--steps", "4") == 0
    lines = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 4]
    logged = {
        (name, line["step"]): value
        for line in lines
        for name, value in line.items()
        if name != "step" and value is not None
    }
    assert boards(Path("run/tensorboard")) == pytest.approx(logged)


def test_every_setting_has_an_option_and_unset_options_are_not_given():
    arguments = vars(parser().parse_args(["train", "ddpm", "--out", "run"]))
    names = {field.name for field in fields(Settings)}
    assert names == set(arguments) - cli_train.NOT_SETTINGS
    assert all(arguments[name] is None for name in names)


def test_choices_are_those_of_the_library():
    arguments = ["train", "ddpm", "--out", "run"]
    assert cli_train.RECIPES == RECIPES
    for option, names in (("--preset", PRESETS), ("--dtype", DTYPES)):
        for name in names:
            parser().parse_args([*arguments, option, name])
        with pytest.raises(SystemExit):
            parser().parse_args([*arguments, option, "other"])


def test_flags_reach_the_settings(monkeypatch, capsys):
    seen = []
    result = training.Result(3, None, None, None)
    monkeypatch.setattr(training, "train", lambda settings, out, **rest: seen.append(settings) or result)
    flags = ("--skip-bad", "--no-flip", "--tensorboard", "--ema-decay", "0.5", "--weight-decay", "0.1")
    run("train", "ddpm", "--data", "x.npz", "--out", "run", "--steps", "3", *flags)
    assert seen == [Settings("x.npz", 3, skip_bad=True, flip=False, tensorboard=True, ema_decay=0.5, weight_decay=0.1)]


def test_refusals_are_the_librarys():
    with pytest.raises(UsageError, match="--data is needed"):
        run("train", "ddpm", "--out", "run", "--steps", "3")
    with pytest.raises(UsageError, match=r"'x\.pt' does not exist"):
        run("sample", "--checkpoint", "x.pt")


def test_a_run_with_tensorboard_goes_on_where_it_is_absent(monkeypatch, boards):
    options = ("--preset", "tiny", "--batch", "2", "--sample-every", "0", "--device", "cpu")
    train = ("train", "ddpm", "--out", "run", *options)
    assert run(*train, "--data", "x.npz", "--steps", "1", "--tensorboard") == 0
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EnvironmentUnusable, match="pass --no-tensorboard"):
        run(*train, "--resume", "--steps", "2")
    assert run(*train, "--resume", "--steps", "2", "--no-tensorboard") == 0


def test_refusals_name_their_verb_once(capsys):
    saved = str(save_checkpoint(Path(), 1, {}))
    for argv, code, says in (
        (
            "train ddpm --out run --data x.npz --steps 2 --batch 0",
            2,
            "train: batch must be a whole number of at least 1",
        ),
        ("train ddpm --out run --data x.npz --steps 2 --seed -1", 2, "train: seed must be a whole number from 0 to "),
        (
            f"train ddpm --out run --data x.npz --steps 2 --seed {10**20}",
            2,
            "train: seed must be a whole number from 0",
        ),
        ("train ddpm --out run --data x.npz --steps 2 --val-every 1", 2, "train: --val-every asks for validations"),
        (
            "train ddpm --out run --data x.npz --steps 2 --recipe fp8 --device cpu",
            3,
            "train: --recipe fp8: a CUDA graph",
        ),
        (f"sample --checkpoint {saved} --seed -1 --device cpu", 2, "sample: seed must be a whole number from 0 to "),
        (f"sample --checkpoint {saved} --seed {10**20} --device cpu", 2, "sample: seed must be a whole number from 0"),
        (f"sample --checkpoint {saved} --n 0", 2, "sample: n must be at least 1 and at most 1000000, got 0"),
        (f"sample --checkpoint {saved} --out new/x.png", 2, "sample: cannot write 'new/x.png' ('new' is no folder)"),
        (f"sample --checkpoint {saved} --out x.jpg", 2, "sample: 'x.jpg' must end in .png"),
        ("sample --checkpoint cache", 2, "sample: checkpoint 'cache' is a folder: give the .pt file"),
    ):
        Path("cache").mkdir(exist_ok=True)
        assert main(argv.split()) == code, argv
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith(f"ridgeline {says}"), (argv, shown.err)
        assert shown.err.count("\n") == 1
    assert not any(Path(name).exists() for name in ("run", "new", "x.jpg"))


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli_train._progress(10, 128) as report:
        report(Line(10, 0.25, 1e-4, 1.0, 1234.5))
    shown = capsys.readouterr().err
    assert "10/10" in shown and "loss 0.2500 lr 1.00e-04 1234 images/s" in shown


def test_nothing_heavy_is_loaded_before_a_verb_runs():
    code = "import sys, ridgeline.cli_train; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ridgeline" in loaded
    assert not {"torch", "numpy", "cv2", "rich"} & set(loaded)


def test_sigint_leaves_a_run_that_can_be_resumed(monkeypatch):
    def interrupt(line):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cli_train, "_numbers", interrupt)
    torch.manual_seed(0)
    options = ("--preset", "tiny", "--batch", "2", "--log-every", "1", "--device", "cpu")
    with pytest.raises(KeyboardInterrupt):
        run("train", "ddpm", "--data", "x.npz", "--out", "run", "--steps", "4", *options)
    assert Path("run/step-00000001.pt").exists()


def test_a_line_of_text_says_how_long_is_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with cli_train._progress(5000, 128) as report:
        report(Line(1000, 0.25, 1e-4, 1.0, 64.0))
        report(Line(5000, 0.25, 1e-4, 1.0, None))
    first, last = capsys.readouterr().err.splitlines()
    assert first == "step 1000/5000 loss 0.2500 lr 1.00e-04 64 images/s 2:13:20 left"  # 4,000 steps of two seconds
    assert last == "step 5000/5000 loss 0.2500 lr 1.00e-04"
