"""Rows of benchmarks/results/*.jsonl: the one schema, and what a run knows about its machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline.errors import EnvironmentUnusable, RidgelineError
from ridgeline.timing import Timing, gpu_state

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Machine:
    """What all rows of one run share. `run` groups everything that was timed together."""

    run: str
    commit: str
    date: str
    gpu: str
    driver: str
    torch: str
    triton: str
    power_limit_w: float | None


@dataclass(frozen=True)
class Row:
    """One line of a results file; times in seconds, of one call. None where a field does not apply."""

    subject: str  # "kernel:conv2d_act", "yolo26n"
    stack: str  # "ridgeline", "eager"
    recipe: str
    dtype: str
    batch: int
    gpus: int
    shape: str
    region: str  # "kernel", "model", "tensor-to-boxes", "frame-to-boxes", "step"
    l2: str | None
    median_s: float | None
    p90_s: float | None
    spread_s: float | None
    gpu_busy_s: float | None
    n: int
    run: str
    commit: str
    date: str
    gpu: str
    driver: str
    torch: str
    triton: str
    stack_version: str
    clocks_mhz: float | None
    power_limit_w: float | None
    extra: dict[str, Any] = field(default_factory=dict)


def machine(device: str = "cuda") -> Machine:
    """Look once, before the first timing; a CPU is `gpu="cpu"`. Raises EnvironmentUnusable for a GPU that is not."""
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise EnvironmentUnusable("this benchmark times GPU kernels and torch sees no CUDA device: run it on one")
    state = gpu_state() if on_gpu else None
    return Machine(
        run=uuid.uuid4().hex[:12],
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu=torch.cuda.get_device_name() if on_gpu else "cpu",
        driver=state.driver if state else "unknown",
        torch=torch.__version__,
        triton=triton.__version__,
        power_limit_w=state.power_limit_w if state else None,
    )


def row(where: Machine, timing: Timing, *, calls: int = 1, **described: Any) -> Row:
    """A row from a timing of `calls` calls in a row and the fields that say what they were."""
    fields: dict[str, Any] = {
        "recipe": "default",
        "batch": 1,
        "gpus": 1,
        "gpu_busy_s": None,
        **asdict(where),
        **described,
    }
    return Row(
        l2=timing.l2,
        median_s=timing.median_s / calls,
        p90_s=timing.p90_s / calls,
        spread_s=timing.spread_s / calls,
        n=timing.n,
        clocks_mhz=timing.clocks_mhz,
        **fields,
    )


def plain_row(where: Machine, **described: Any) -> Row:
    """A row of something that has no time of its own: a rate, an accuracy; the value is in `extra`."""
    empty = dict.fromkeys(("median_s", "p90_s", "spread_s", "gpu_busy_s", "l2", "clocks_mhz"))
    fields: dict[str, Any] = {"dtype": "", "batch": 0, "gpus": 1, "shape": "", "n": 0, **empty}
    return Row(**{**fields, **asdict(where), **described})


def append(path: Path, rows: list[Row]) -> None:
    """Add the rows at the end of a results file in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(each)) + "\n" for each in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def filed(script: str, measure: Callable[[], list[Row]], out: Path | None) -> int:
    """A script's exit code: its rows are measured, and added to `out` if it is given; or one sentence on stderr."""
    try:
        rows = measure()
    except RidgelineError as error:
        print(f"benchmarks/{script}: {error}", file=sys.stderr)
        return error.exit_code
    if out:
        append(out, rows)
        print(f"{len(rows)} rows appended to {out}", file=sys.stderr)
    return 0


def _commit() -> str:
    """Short hash, "+" behind it when files differ from it; "unknown" outside a git checkout.

    RIDGELINE_COMMIT names it where the files travelled without their history.
    """
    if named := os.environ.get("RIDGELINE_COMMIT"):
        return named
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
