"""Measure the ceilings that every other row is held against, and append them as rows.

python benchmarks/ceilings.py --out benchmarks/results/ceilings.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import _rows
from ridgeline import units
from ridgeline.ceilings import Ceilings, measure_ceilings
from ridgeline.errors import RidgelineError
from ridgeline.specs import DeviceSpec, find_spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="append rows to this JSONL file")
    out = parser.parse_args().out
    try:
        where, ceilings = _rows.machine(), measure_ceilings()
        spec = find_spec(ceilings.gpu)
    except RidgelineError as error:
        print(f"benchmarks/ceilings.py: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(ceilings.lines()))
    _rows.append(out, [_row(where, ceilings, *line) for line in _lines(ceilings, spec)])
    return 0


def _lines(ceilings: Ceilings, spec: DeviceSpec) -> list[tuple[str, float, str, str]]:
    """(what, value in SI units, the value as text, the data sheet's as text)."""
    bandwidth = ceilings.peaks["bandwidth"]
    lines = [("copy, read and written", bandwidth, units.bandwidth(bandwidth), units.bandwidth(spec.bandwidth))]
    for pipe, rate in ceilings.peaks.items():
        if pipe != "bandwidth":
            lines.append((f"matmul, {pipe}", rate, units.rate(rate), units.rate(spec.rate(pipe))))
    for shape, rate in ceilings.conv.items():
        pipe = shape.split()[0]
        lines.append((f"3x3 convolution NHWC, {shape}", rate, units.rate(rate), units.rate(spec.rate(pipe))))
    for what, value_s in (
        ("one more dependent kernel in a CUDA graph", ceilings.kernel_gap_s),
        ("a CUDA graph of one kernel", ceilings.graph_launch_s),
    ):
        lines.append((what, value_s, units.seconds(value_s), ""))
    return lines


def _row(where: _rows.Machine, ceilings: Ceilings, what: str, value: float, text: str, sheet: str) -> _rows.Row:
    extra = {"value": value, "text": text, "sheet": sheet, "drift": ceilings.drift}
    return _rows.plain_row(
        where, subject="ceilings", stack="torch", recipe=what, stack_version=torch.__version__,
        clocks_mhz=ceilings.clocks_mhz, region="kernel", extra=extra,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
