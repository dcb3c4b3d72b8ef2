"""Time how fast traces are read, and in how much memory, beside json.loads; it needs no GPU.

    python benchmarks/trace_reader.py --out benchmarks/results/trace_reader.jsonl
    python benchmarks/trace_reader.py --trace ddpm-baseline --mb 1000 --alone

A trace of tests/fixtures/traces is repeated, its steps one behind the other in time, until its JSON is as large as
asked, laid out as torch.profiler does. Each reader has a process of its own: its time is the median of --repeats reads,
its memory what the process held at most above what it held before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _rows
from ridgeline import units
from ridgeline.errors import RidgelineError, UsageError
from ridgeline.own_process import call_apart
from ridgeline.timing import Timing, time_callable
from ridgeline.trace_reader import read_trace

TRACES = _rows.ROOT / "tests" / "fixtures" / "traces"
APART_US = 1000  # between repetitions
IDENTITIES = ("correlation", "External id")
NEVER_AGAIN = 10_000_000  # what identities of one repetition are apart from those of the next
BYTES_A_MB = 10**6


@dataclass(frozen=True)
class Read:
    """How long a file took, and how many bytes the process grew at most."""

    timing: Timing
    grown_bytes: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = sorted(path.name.removesuffix(".json.gz") for path in TRACES.glob("*.json.gz"))
    parser.add_argument("--trace", nargs="+", default=["ddpm-baseline", "yolo26n-eager", "syncing"], choices=known)
    parser.add_argument("--mb", type=int, default=100, help="megabytes of JSON (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="reads of each (default %(default)s)")
    parser.add_argument(
        "--alone", action="store_true", help="without json.loads, which takes gigabytes of large traces"
    )
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args(argv)
    if a.mb < 1:
        raise UsageError(f"--mb must be at least 1, got {a.mb}")
    where = _rows.machine("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in a.trace:
            path = Path(folder) / f"{name}.json"
            repeat(TRACES / f"{name}.json.gz", a.mb * BYTES_A_MB, path)
            for stack, reader in list(READERS.items())[: 1 if a.alone else None]:
                found = call_apart(partial(timed, reader, path, a.repeats), budget_s=3600)
                rows.append(row(where, name, stack, path.stat().st_size, found))
            path.unlink()
    if a.out:
        _rows.append(a.out, rows)
    return 0


def timed(reader: Callable[[Path], object], path: Path, repeats: int) -> Read:
    before = _most_held()
    timing = time_callable(partial(reader, path), warmup=1, repeats=repeats, method="host")
    return Read(timing, _most_held() - before)


def by_json(path: Path) -> None:
    json.loads(path.read_bytes())


READERS = {"ridgeline": read_trace, "json.loads": by_json}


def row(where: _rows.Machine, name: str, stack: str, size: int, found: Read) -> _rows.Row:
    rate = size / found.timing.median_s
    print(
        f"{name:<22} {units.nbytes(size):>8}  {stack:<10} {units.bandwidth(rate):>9}  "
        f"{units.nbytes(found.grown_bytes)} of memory",
        flush=True,
    )
    extra = {"bytes": size, "bytes_per_s": rate, "grown_bytes": found.grown_bytes}
    return _rows.row(
        where, found.timing, subject="trace-reader", stack=stack, stack_version=where.commit, dtype="", shape=name,
        region="file", extra=extra,
    )  # fmt: skip


def repeat(fixture: Path, size: int, path: Path) -> None:
    """Write the trace of `fixture` again and again until it has `size` bytes."""
    whole = json.loads(gzip.decompress(fixture.read_bytes()))
    events = whole.pop("traceEvents")
    times = [event["ts"] for event in events if "ts" in event]
    span_us = max(times) - min(times) + APART_US
    with path.open("w", encoding="utf-8") as file:
        head = json.dumps(whole)[:-1] + ', "traceEvents": [\n'
        written, turn = file.write(head), 0
        while written < size:
            for event in _again(events, turn, span_us):
                written += file.write(("" if written == len(head) else ",\n") + "  " + json.dumps(event))
            turn += 1
        file.write("\n]}")


def _again(events: list[dict[str, Any]], turn: int, span_us: float) -> Iterator[dict[str, Any]]:
    for event in events:
        moved = dict(event)
        if "ts" in moved:
            moved["ts"] += turn * span_us
        if moved.get("ph") in ("s", "f") and isinstance(moved.get("id"), int):
            moved["id"] += turn * NEVER_AGAIN
        arguments = moved.get("args")
        if isinstance(arguments, dict):
            moved["args"] = {
                key: value + turn * NEVER_AGAIN if key in IDENTITIES and isinstance(value, int) else value
                for key, value in arguments.items()
            }
        yield moved


def _most_held() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/trace_reader.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
