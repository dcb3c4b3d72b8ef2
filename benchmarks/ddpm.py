"""Append rows of the DDPM training ladder to a results file; what is timed, and how, is `ridgeline bench ddpm`'s.

python benchmarks/ddpm.py --out benchmarks/results/ddpm.jsonl
python benchmarks/ddpm.py --rung writeup-3 writeup-5 --data cifar-10-python.tar.gz
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import _rows
from ridgeline import bench, bench_table
from ridgeline.errors import RidgelineError
from ridgeline.workloads import ddpm_ladder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rung", nargs="+", default=list(ddpm_ladder.BY_NAME), help="default: all, in order")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--data", type=Path, help="CIFAR-10 in any form; default: 50,000 random images of its size")
    parser.add_argument("--budget-s", type=float, default=bench.BUDGET_S, help="for one rung, compilation included")
    parser.add_argument("--at-once", type=int, default=1, help="rungs compiled side by side; timed one at a time")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file as they come")
    a = parser.parse_args()
    where = _rows.machine()
    rungs = ddpm_ladder.chosen(a.rung)
    conditions = ddpm_ladder.Conditions(batch=a.batch, data=a.data)
    before = None
    failed = 0
    for result in bench.climb(rungs, conditions, budget_s=a.budget_s, at_once=a.at_once):
        if isinstance(result, bench.Missing):
            failed += 1
            print(f"{result.rung.name}: {result.reason}", file=sys.stderr, flush=True)
            continue
        shown = bench_table.ladder_row(result, before)
        print(f"{bench_table.line(shown)}  {shown.change}: {shown.why}", flush=True)
        if a.out:
            _rows.append(a.out, [results_row(where, result)])
        before = result
    return 1 if failed else 0


def results_row(where: _rows.Machine, measured: bench.Measured) -> _rows.Row:
    """The rung in the schema of the results files."""
    rung, batch, traced = measured.rung, measured.conditions.batch, measured.traced
    assert traced is not None  # `_rows.machine` saw a GPU
    network = measured.conditions.network
    extra = {
        **asdict(rung),
        "kernels": traced.kernels,
        "waits": traced.waits,
        "findings": list(measured.findings),
        "sites": measured.rewrites,
        "memory_bytes": measured.memory_bytes,
        "images_per_s": batch / measured.wall_s,
        "steps": measured.protocol.timed,
    }
    return _rows.row(
        where,
        measured.timing,
        calls=measured.protocol.steps_a_run,
        subject="ddpm-cifar10",
        stack="ridgeline" if rung.graph == "step" else "torch.compile",
        stack_version=where.commit if rung.graph == "step" else torch.__version__,
        recipe=rung.name,
        dtype="bf16",
        batch=batch,
        shape=f"{batch}x{network.in_channels}x{network.image_size}x{network.image_size}",
        region="step",
        gpu_busy_s=traced.busy_s,
        extra=extra,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/ddpm.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
