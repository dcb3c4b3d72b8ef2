"""Programs in a process of their own, whose Triton compiles kernels rather than interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def output_of(program: str, **environment: str) -> list[str]:
    """The lines that a program prints, which may import what tests share."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths, **environment}
    run = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()
