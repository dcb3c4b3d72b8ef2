"""The verb `bench` of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ridgeline.late_import import late_import

FORMATS = ("table", "json", "csv", "md")


def add_commands(verbs: argparse._SubParsersAction) -> None:
    """Register `bench`."""
    text = "time a workload as it is tuned step by step"
    bench = verbs.add_parser("bench", help=text, description=_sentence(text))
    workloads = bench.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    _add_ddpm(workloads)


def bench_ddpm(a: argparse.Namespace) -> int:
    bench, ladder, table = _module("bench"), _module("workloads.ddpm_ladder"), _module("bench_table")
    every = ladder.RUNGS if a.ladder else ladder.RUNGS[-1:]
    rungs = ladder.chosen(a.rung) if a.rung else every
    conditions = ladder.Conditions(batch=a.batch, data=a.data)
    bench.require_gpu()
    # what cannot be read or written is refused before minutes are spent, and the set is decoded for all rungs
    if a.data is not None:
        ladder.images_of(conditions)
    if a.out is not None:
        table.append_rows(a.out, ())
    results: list[Any] = []
    measured: list[Any] = []
    for result in bench.climb(rungs, conditions, budget_s=a.budget_s, at_once=a.at_once):
        results.append(result)
        if isinstance(result, bench.Missing):
            _say(f"{result.rung.name}: {result.reason}")
            continue
        measured.append(result)
        row = table.ladder_rows(measured[-2:])[-1]
        _say(table.line(row))
        if a.out is not None:
            table.append_rows(a.out, [row])
    if measured:
        print(table.render(results, a.format))
    return next((result.exit_code for result in results if isinstance(result, bench.Missing)), 0)


def tune_ddpm(batch: int, dtype: str, **choices: Any) -> tuple[Any, ...]:
    """Tuned rows of the DDPM training step, for the verb `tune`; see `ddpm_ladder.tune`."""
    ladder = _module("workloads.ddpm_ladder")
    return ladder.tune(ladder.Conditions(batch=batch), dtype, **choices)


def _add_ddpm(workloads: argparse._SubParsersAction) -> None:
    text = "the training step of the CIFAR-10 diffusion network: wall and GPU-busy time, and why they changed"
    p = workloads.add_parser("ddpm", help=text, description=_sentence(text))
    p.set_defaults(run=bench_ddpm)
    which = p.add_mutually_exclusive_group()
    which.add_argument(
        "--ladder", action="store_true", help="the write-up's rungs, then ridgeline's own; default: the last rung alone"
    )
    which.add_argument("--rung", nargs="+", metavar="NAME", help="these, in this order; an unknown one lists them all")
    p.add_argument("--data", type=Path, metavar="PATH", help="images, as for `train`; default: 50,000 random ones")
    p.add_argument("--batch", type=int, default=128, help="images a step (default %(default)s)")
    p.add_argument(
        "--budget-s", type=float, default=300.0, metavar="SECONDS", help="for a rung, with compilation (default 300)"
    )
    p.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="rungs compiled side by side, each in its own GPU memory; still timed one at a time (default %(default)s)",
    )
    p.add_argument("--format", choices=FORMATS, default="table", help="of stdout (default %(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="add a JSON object a rung to this file, as they come")


def _say(text: str) -> None:
    print(f"ridgeline bench: {text}", file=sys.stderr, flush=True)


def _module(name: str) -> Any:
    """A module of ridgeline, at the call: these load torch, and `ridgeline --help` must not."""
    return late_import(f"ridgeline.{name}")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
