"""Print where the replays of a compiled YOLO26 spend their time, kernel by kernel.

    python benchmarks/kernel_table.py --scale n --weights yolo26n.pt

Columns: launches a replay, total and share of the sum, average, median, least, most, standard deviation of all
launches, and deviation over average: above 1, one name stands for very different work. Durations come from the
profiler, which sees a kernel from its start: with programmatic launch that includes waiting for the kernel before, so
the sum exceeds the time of a replay. `--no-pdl` shows each kernel's own time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ridgeline import compiler
from ridgeline.errors import RidgelineError
from ridgeline.models.weights import yolo26_from
from ridgeline.models.yolo26 import SCALES, YOLO26, fuse, randomise_
from ridgeline.recipe import Recipe

HEADER = ("kernel", "count", "total µs", "%", "avg", "median", "min", "max", "std", "std/avg")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="n")
    parser.add_argument("--weights", type=Path, help="an official checkpoint of --scale; default: seeded random ones")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--replays", type=int, default=20)
    a = parser.parse_args()
    try:
        model = fuse(randomise_(YOLO26(a.scale))) if a.weights is None else yolo26_from(a.weights)
        model, (image,) = compiler.on_gpu(model, (torch.rand(1, 3, 640, 640),))
        recipe = Recipe(dtype=a.dtype, pdl=not a.no_pdl, side_streams=0)
        replay = compiler.compile(model, image, recipe).replayer(image)
    except RidgelineError as error:
        print(f"benchmarks/kernel_table.py: {error}", file=sys.stderr)
        return error.exit_code
    replay()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(a.replays):
            replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    print("\n".join(table(events, a.replays)))
    return 0


def table(events: list[dict[str, Any]], replays: int) -> list[str]:
    """Markdown lines from a trace's GPU events, the most expensive kernel first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in GPU_CATEGORIES:
            durations[event["name"]].append(event["dur"])
    everything = sum(map(sum, durations.values()))
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for name, found in sorted(durations.items(), key=lambda item: -sum(item[1])):
        average, deviation = statistics.mean(found), statistics.pstdev(found)
        numbers = (average, statistics.median(found), min(found), max(found), deviation, deviation / average)
        cells = [
            name,
            f"{len(found) / replays:g}",
            f"{sum(found) / replays:.1f}",
            f"{100 * sum(found) / everything:.1f}",
        ]
        lines.append(f"| {' | '.join(cells + [f'{number:.2f}' for number in numbers])} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
