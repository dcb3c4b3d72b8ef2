"""Time the three passes of the DDPM network's convolutions beside cuDNN, after tuning what is not tuned yet.

    python benchmarks/conv2d.py --out benchmarks/results/kernels.jsonl
    python benchmarks/conv2d.py --batch 64 --dtype fp16
    python benchmarks/conv2d.py --fp8

With --fp8 all passes run in FP8 instead, beside cuDNN's in bf16; the row also has the time of quantising the maps that
the pass reads in a pass of its own, which a step leaves to their producers.

Each result is checked against float64 first. Each call is captured 20 times in one CUDA graph, ours and cuDNN's (its
benchmark mode on) interleaved. "in a step" is what the recipe runs: the faster of the two by the tuned tables. New
configs go into the user's tables, see `ridgeline cache export`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import _rows
from kernels import CALLS, repeat, version
from ridgeline import units
from ridgeline.errors import RidgelineError, VerificationFailed
from ridgeline.kernels import Op, conv2d_dgrad, conv2d_fprop, conv2d_wgrad_fp8
from ridgeline.kernels._op import dtype_name, tuned_row
from ridgeline.numerics import compare, to_float64
from ridgeline.step_recipe import NAMED
from ridgeline.timing import time_many
from ridgeline.train_rewrites import fp8_passes, fp8_prices
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.tuning import tune_all
from ridgeline.workloads import ddpm_ladder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--fp8", action="store_true", help="time the FP8 kernels in place of the bf16 ones")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file as they come")
    a = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    try:
        where = _rows.machine()
        calls = calls_of(ddpm_ladder.Conditions(batch=a.batch), a.dtype, fp8=a.fp8)
        tune_all((call.op, call.arguments) for call in calls)
        ratios = []
        for call in calls:
            rows, ratio = bench(call, where, a.batch)
            ratios.append(ratio)
            if a.out:
                _rows.append(a.out, rows)
    except RidgelineError as error:
        print(f"benchmarks/conv2d.py: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{len(ratios)} passes: cuDNN's time over ours {min(ratios):.2f} to {max(ratios):.2f}, geometric mean "
        f"{geometric_mean(ratios):.3f}; of what a step runs {geometric_mean(max(r, 1.0) for r in ratios):.3f}"
    )
    return 0


@dataclass(frozen=True)
class Call:
    """One pass by a kernel of ours, and the call of cuDNN that computes the same; `quantize` makes the FP8 map."""

    op: Op
    arguments: dict[str, Any]
    dtype: str
    theirs: Callable[[], torch.Tensor]
    quantize: Callable[[], object] | None = None


def calls_of(conditions: ddpm_ladder.Conditions, dtype: str, *, fp8: bool) -> list[Call]:
    """All passes of the network's distinct convolutions; in FP8 of those that have such kernels."""
    found = ddpm_ladder.convolutions_of(conditions, NAMED["bf16" if fp8 else dtype])
    if fp8:
        found = tuple(conv for conv in found if type(conv) is Convolution and fp8_passes.takes(conv))
    return [call for convolution in found for call in passes(convolution, fp8=fp8)]


def passes(convolution: Convolution, *, fp8: bool) -> Iterator[Call]:
    """All three passes; in FP8 those that have a kernel for these sizes."""
    given = dict(convolution.problems())
    if not fp8:
        for op, arguments in given.items():
            yield Call(op, arguments, dtype_name(convolution.dtype), _rival(op, arguments))
        return
    x, dy = given[conv2d_fprop.OP]["x"], given[conv2d_dgrad.OP]["dy"]
    read = ((x, "e4m3"),), ((dy, "e5m2"),), ((x, "e4m3"), (dy, "e5m2"))
    of_bf16 = zip(given.items(), read, strict=True)
    for (op, arguments), (rival, maps) in zip(fp8_prices.problems(convolution), of_bf16, strict=False):
        quantize = partial(fp8_prices.quantised, *maps, quads=op is conv2d_wgrad_fp8.OP)
        yield Call(op, arguments, f"fp8 {maps[-1][1]}", _rival(*rival), quantize)


def _rival(op: Op, arguments: dict[str, Any]) -> Callable[[], torch.Tensor]:
    assert op.launcher.rival is not None
    return op.launcher.rival(**arguments)


def bench(call: Call, where: _rows.Machine, batch: int) -> tuple[list[_rows.Row], float]:
    """Check and time one pass; prints a line, returns rows and cuDNN's time over ours."""
    op, arguments = call.op, call.arguments
    launch = op.launcher.plan(**arguments)
    launch.output.fill_(float("nan"))
    launch.run()
    eager = op.reference(**arguments)
    eps = None if op.eps is None else op.eps(**arguments)
    exact = op.reference(**to_float64(arguments))
    verdict = compare(launch.output, exact, eager, error_factor=op.error_factor, eps=eps)
    if not verdict.passed:
        raise VerificationFailed(f"{op.name} {op.key(**arguments)}: {verdict.reason}")
    graphs = {"ridgeline": repeat(launch.run), "eager": repeat(call.theirs)}
    graphs |= {"quantize": repeat(call.quantize)} if call.quantize else {}
    timings = time_many({name: graph.replay for name, graph in graphs.items()}, repeats=50)
    seconds = {name: timing.median_s / CALLS for name, timing in timings.items()}
    cost, row = op.cost(**arguments), tuned_row(op, **arguments)
    extra = {"flops": cost.flops, "bytes": cost.bytes, "quantize_s": seconds.get("quantize")}
    rows = [
        _rows.row(
            where,
            timings[stack],
            calls=CALLS,
            subject=f"kernel:{op.name}",
            stack=stack,
            recipe="tuned" if stack == "ridgeline" else "cuDNN",
            dtype=call.dtype if stack == "ridgeline" or not call.quantize else "bf16",
            batch=batch,
            shape=op.key(**arguments),
            region="kernel",
            stack_version=version(stack),
            extra={**extra, "config": dict(row.config) if row and stack == "ridgeline" else None},
        )
        for stack in ("ridgeline", "eager")
    ]
    words = [
        f"{name} {units.seconds(s)}" + ("" if name == "quantize" else f" {units.rate(cost.flops / s)}")
        for name, s in seconds.items()
    ]
    print(f"{op.name} {call.dtype} {op.key(**arguments)}: {', '.join(words)}", flush=True)
    return rows, seconds["eager"] / seconds["ridgeline"]


if __name__ == "__main__":
    sys.exit(main())
