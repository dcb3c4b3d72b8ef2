"""Write the README's tables from the rows in benchmarks/results/; with --check, fail when they differ.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. Of every line of a table the newest row counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from ridgeline import units

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table is out of date")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    fresh = BLOCK.sub(lambda m: m[1] + TABLES[m["name"]](read_rows()) + m[3], text)
    if fresh == text:
        return 0
    if check:
        print("README.md: tables differ from benchmarks/results; run `make format`", file=sys.stderr)
        return 1
    README.write_text(fresh, encoding="utf-8")
    return 0


def read_rows() -> list[dict]:
    """All rows, oldest first; a line that is not a JSON object is an error naming the file and line."""
    rows = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path.name}:{number}: not a JSON row: {error}") from error
    return sorted(rows, key=lambda row: row["date"])


def ceilings(rows: list[dict]) -> str:
    """What this project measured of the GPU it is developed on, beside the data sheet."""
    newest = {
        row["recipe"]: row for row in rows if row["subject"] == "ceilings" and not row["recipe"].startswith("3x3")
    }
    lines = [f"| {row['recipe']} | {row['extra']['text']} | {row['extra']['sheet']} |" for row in newest.values()]
    return _table("what | measured | data sheet", lines)


def conv_kernels(rows: list[dict]) -> str:
    """The fused convolution beside cuDNN with its separate activation, of one run; small shapes count as networks."""
    rows = [row for row in rows if row["subject"] == "kernel:conv2d_act" and row["shape"].startswith("UNet")]
    if not rows:
        return _table("shape | cuDNN + SiLU | ridgeline", [])
    run = rows[-1]["run"]
    by_shape: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        if row["run"] == run:
            by_shape.setdefault((row["shape"], row["dtype"]), {})[row["stack"]] = row
    lines = []
    for (shape, dtype), stacks in by_shape.items():
        ours, rival = stacks.get("ridgeline"), stacks.get("eager")
        if ours and rival:
            cells = (f"{shape} {dtype}", units.seconds(rival["median_s"]), units.seconds(ours["median_s"]))
            lines.append(f"| {' | '.join(cells)} | {rival['median_s'] / ours['median_s']:.2f} |")
    return _table("shape | cuDNN + SiLU | ridgeline | ratio", lines)


def detectors(rows: list[dict]) -> str:
    """Whole detectors beside eager PyTorch and torch.compile, each as one CUDA graph, of each one's newest run."""
    rows = [row for row in rows if row["subject"].startswith("yolo26") and row["region"] == "model"]
    newest = {(row["subject"], row["dtype"], row["batch"]): row["run"] for row in rows}
    lines = []
    for (subject, dtype, batch), run in newest.items():
        seconds: dict[tuple[str, str], float] = {}
        for row in rows:
            if (row["subject"], row["dtype"], row["batch"], row["run"]) == (subject, dtype, batch, run):
                place = row["stack"] if row["stack"] != "ridgeline" else row["recipe"]
                seconds[place, row["l2"]] = min(row["median_s"], seconds.get((place, row["l2"]), row["median_s"]))
        ours = seconds["compile", "warm"]
        rivals = [seconds[stack, "warm"] for stack in ("eager", "torch.compile") if (stack, "warm") in seconds]
        places = (("eager", "warm"), ("torch.compile", "warm"), ("compile", "warm"), ("compile", "cold"))
        cells = (units.seconds(seconds[place]) if place in seconds else "" for place in places)
        lines.append(f"| {subject} {dtype}, batch {batch} | {' | '.join(cells)} | {min(rivals) / ours:.1f} |")
    return _table("640x640 image to 300 detections | eager | torch.compile | ridgeline | L2 cold | ratio", lines)


def _table(header: str, lines: list[str]) -> str:
    if not lines:
        return ""
    columns = header.count("|") + 1
    return "\n".join([f"| {header} |", "|---" * columns + "|", *lines]) + "\n"


TABLES = {"detectors": detectors, "ceilings": ceilings, "conv-kernels": conv_kernels}

if __name__ == "__main__":
    sys.exit(main())
