"""Where Triton cannot be imported, what needs no kernel works, and all else is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from ridgeline.models import build as build_model
from ridgeline.workloads.draw import save_image

HIDDEN = 'import sys; sys.modules["triton"] = None'
REFUSAL = "this needs kernels, and Triton cannot be imported: pip install triton"


def child(statement: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{HIDDEN}\n{statement}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return child("from ridgeline.cli import main\nsys.exit(main(sys.argv[1:]))", *arguments)


def test_detection_works(tmp_path):
    weights, picture = tmp_path / "n.pt", tmp_path / "grey.png"
    torch.save(build_model("yolo26n").state_dict(), weights)
    save_image(picture, np.full((32, 64, 3), 128, np.uint8))
    arguments = ("--weights", str(weights), "--size", "64", "--device", "cpu", "--out", str(tmp_path / "out"))
    done = command("detect", str(picture), *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["image"] == str(picture)
    assert "plain PyTorch" in done.stderr


@pytest.mark.parametrize(
    "verb",
    [("verify", "yolo26n"), ("sass", "conv2d_act"), ("tune", "yolo26n"), ("cache", "ls"), ("bench", "ddpm")],
    ids=lambda v: v[0],
)
def test_what_needs_kernels_says_so(verb):
    done = command(*verb)
    assert done.returncode == 3
    assert done.stderr.startswith(f"ridgeline {verb[0]}: {REFUSAL}") and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_python_is_told_the_same_and_other_missing_modules_keep_their_error():
    told = "import ridgeline\ntry: ridgeline.compile\nexcept ridgeline.errors.EnvironmentUnusable as e: print(e)"
    done = child(told)
    assert done.stdout.startswith(REFUSAL), done.stderr
    done = child('sys.modules["numpy"] = None\nimport ridgeline\nridgeline.workloads')
    assert "ModuleNotFoundError: import of numpy halted" in done.stderr
