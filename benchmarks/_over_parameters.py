"""What benchmarks of kernels over all parameters of a network share: their command line, and rows beside a copy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import _rows
from ridgeline import units
from ridgeline.cost import Cost
from ridgeline.cudagraph import Captured, capture
from ridgeline.timing import time_many

CALLS = 10  # in one graph, so that its launch is not in the numbers
COPY_BYTES = 2**30

Bench = Callable[[_rows.Machine, int], list[_rows.Row]]


def main(script: str, doc: str | None, bench: Bench) -> int:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()
    return _rows.filed(script, lambda: bench(_rows.machine(), a.repeats), a.out)


def rows_beside_copy(
    where: _rows.Machine,
    calls: Mapping[Any, Callable[[], object]],
    work: Cost,
    *,
    repeats: int,
    rival: str,
    device: str = "cuda",
    **described: Any,
) -> list[_rows.Row]:
    """Time a call of each config, the default first, that of PyTorch, whose config is None, and a copy, interleaved.

    Prints a line a row. `rival` is what PyTorch's row is called; `described` are fields that all rows have.
    """
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = {str(config): repeat(call).replay for config, call in calls.items()}
    timings = time_many(timed | {"copy": lambda: target.copy_(source)}, repeats=repeats)
    copy_rate = 2 * COPY_BYTES / timings["copy"].median_s
    default, *others = (config for config in calls if config is not None)
    best = min((default, *others), key=lambda config: timings[str(config)].median_s)
    rows = []
    # a stack's last row is its best
    for config in (None, *(c for c in (default, *others) if c != best), best):
        timing = timings[str(config)]
        share = work.bytes * CALLS / timing.median_s / copy_rate
        recipe = rival if config is None else "default" if config == default else "config"
        rows.append(
            _rows.row(
                where,
                timing,
                calls=CALLS,
                stack="eager" if config is None else "ridgeline",
                recipe=recipe,
                region="kernel",
                stack_version=f"torch {torch.__version__}",
                extra={
                    "bytes": work.bytes,
                    "copy_rate": copy_rate,
                    "share_of_copy": share,
                    "config": None if config is None else asdict(config),
                },
                **described,
            )
        )
        name = "PyTorch" if config is None else str(config)
        print(f"{name:<45} {units.seconds(timing.median_s / CALLS):>9}  {units.percent(share)} of copy", flush=True)
    print(f"copy {units.bandwidth(copy_rate)}, {units.nbytes(work.bytes)} a call, {described['shape']}")
    return rows


def repeat(call: Callable[[], object]) -> Captured:
    def several() -> None:
        for _ in range(CALLS):
            call()

    return capture(several, ())
