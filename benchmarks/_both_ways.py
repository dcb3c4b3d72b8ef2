"""What benchmarks of an op with a backward share: its command line, its launches, and rows beside a copy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import _rows
from kernels import CALLS, repeat, right_launches, version
from ridgeline import units
from ridgeline.cost import Cost
from ridgeline.errors import UsageError, VerificationFailed
from ridgeline.kernels import Sample
from ridgeline.kernels._op import DTYPES, Op
from ridgeline.timing import time_many

COPY_BYTES = 2**30


@dataclass(frozen=True)
class Job:
    """One problem with what all of its rows share."""

    sample: Sample  # of the backward
    dtype: str
    arguments: dict[str, Any]

    def without(self, *names: str) -> dict[str, Any]:
        """The arguments but these, such as the forward's among the backward's."""
        return {name: value for name, value in self.arguments.items() if name not in names}


@dataclass(frozen=True)
class Call:
    """Something to time, and the row it becomes."""

    what: str  # "forward", "backward", "forward+backward"
    stack: str
    recipe: str
    run: Callable[[], Any]
    config: Any = None


# bench(job, where, configs=, compiled=, repeats=)
Bench = Callable[..., list[_rows.Row]]


def main(script: str, doc: str | None, op: Op, bench: Bench, *, dtypes: Sequence[str], sample: str) -> int:
    """Run `bench` on the samples of real size of `op`, the backward; `sample` is which by default."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=["bf16"])
    parser.add_argument("--sample", default=sample, help="only samples whose reason contains this")
    parser.add_argument("--configs", type=int, default=1, help="tiles tried for each pass (default %(default)s: ours)")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the reference (slow)")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()

    def rows() -> list[_rows.Row]:
        where = _rows.machine()
        samples = [s for s in op.samples if s.real_size and a.sample in s.why]
        if not samples:
            raise UsageError(f"no sample of real size has {a.sample!r} in its reason")
        found = []
        for dtype in a.dtype:
            for each in samples:
                job = Job(each, dtype, each.arguments(DTYPES[dtype], "cuda"))
                found += bench(job, where, configs=a.configs, compiled=a.compile, repeats=a.repeats)
        return found

    return _rows.filed(script, rows, a.out)


def own_calls(what: str, op: Op, arguments: dict[str, Any], configs: int) -> list[Call]:
    """Those of the first `configs` configs whose result is right; the default must be."""
    found = list(right_launches(op, arguments, configs, eps=None))
    default = op.launcher.candidates(**arguments)[0]
    if not found or found[0][0] != default:
        raise VerificationFailed(f"{op.name}: the default {default} is wrong or does not build")
    return [
        Call(what, "ridgeline", "config" if index else "default", launch.run, config)
        for index, (config, launch) in enumerate(found)
    ]


def rows_beside_copy(
    job: Job,
    calls: Sequence[Call],
    costs: Mapping[str, Cost],
    where: _rows.Machine,
    *,
    subject: str,
    batch: int,
    repeats: int,
) -> list[_rows.Row]:
    """Time all calls and a copy, interleaved; prints a line a row. `costs` are by what is timed."""
    by_name = {f"{call.what} {call.stack} {call.recipe} {call.config}": call for call in calls}
    timed = {name: repeat(call.run).replay for name, call in by_name.items()}
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # in a graph it would be left to a copy engine, which takes half as long again as the multiprocessors
    timed["copy"] = lambda: target.copy_(source)
    timings = time_many(timed, repeats=repeats)
    copy_rate = 2 * COPY_BYTES / timings["copy"].median_s
    print(f"{job.dtype} {job.sample.why}, copy {units.bandwidth(copy_rate)}")

    def row(name: str) -> _rows.Row:
        call, timing = by_name[name], timings[name]
        cost = costs[call.what]
        rate = cost.bytes * CALLS / timing.median_s
        print(
            f"  {call.what:<16} {call.stack:<13} {call.recipe:<13} {units.seconds(timing.median_s / CALLS):>9} "
            f"{units.bandwidth(rate):>10} {units.percent(rate / copy_rate):>6} of copy  {call.config or ''}",
            flush=True,
        )
        return _rows.row(
            where,
            timing,
            calls=CALLS,
            subject=subject,
            stack=call.stack,
            recipe=call.recipe,
            dtype=job.dtype,
            batch=batch,
            shape=job.sample.why,
            region=call.what,
            stack_version=version(call.stack),
            extra={
                "flops": cost.flops,
                "bytes": cost.bytes,
                "bytes_per_s": rate,
                "copy_rate": copy_rate,
                "share_of_copy": rate / copy_rate,
                "calls_per_graph": CALLS,
                "config": None if call.config is None else asdict(call.config),
            },
        )

    # the README's table takes a stack's last row, so the fastest comes last
    return [
        row(name) for name in sorted(by_name, key=lambda n: (by_name[n].what, by_name[n].stack, -timings[n].median_s))
    ]
