"""Write the tables of README.md and pages in docs/ from the rows in benchmarks/results/; --check fails if they differ.

A table, or a sentence, stands between `<!-- table:NAME -->` and `<!-- /table -->`; without rows there is nothing
between. Of every line of a table the newest row counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO

from ridgeline import units
from ridgeline.atomic import write_file
from ridgeline.workloads import ddpm_ladder

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "howto-ddpm-ladder.md",
    ROOT / "docs" / "howto-train-step.md",
    ROOT / "docs" / "howto-fp8.md",
)
RESULTS = ROOT / "benchmarks" / "results"
STEPS = ("writeup-0", "writeup-3", "writeup-5", "side-stream", "own-fp8")  # on the front page
SCALES, RIVALS, OURS = "nsmlx", ("eager", "torch.compile"), "ridgeline"
_FORWARD = re.compile(r"padding \d \d, weight (?P<k>\d+)x(?P<c>\d+)x(?P<size>\d)x\d, x \d+x\d+x(?P<side>\d+)x\d+")
NETS = {"resnet50": "ResNet-50", "convnext_t": "ConvNeXt-T"}
BLOCK = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="write the tables of the front pages from benchmarks/results")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table is out of date")
    check = parser.parse_args().check
    rows = read_rows()
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    fresh = {page: BLOCK.sub(lambda m: m[1] + TABLES[m["name"]](rows) + m[3], text) for page, text in pages.items()}
    stale = [page for page in PAGES if fresh[page] != pages[page]]
    for page in () if check else stale:
        write_file(page, partial(_write, fresh[page]))
    if check and stale:
        names = ", ".join(page.relative_to(ROOT).as_posix() for page in stale)
        print(f"{names}: tables differ from benchmarks/results; run `make format`", file=sys.stderr)
        return 1
    return 0


def _write(text: str, file: IO[bytes]) -> None:
    file.write(text.encode())


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


def fp8_kernels(rows: list[dict]) -> str:
    """Passes of 3x3 convolutions in FP8, of the newest run: rates, and cuDNN's time in bf16 over ours."""
    rows = [row for row in rows if row["subject"] in ("kernel:conv2d_fp8", "kernel:conv2d_wgrad_fp8")]
    rows = [row for row in rows if row["run"] == rows[-1]["run"]]
    lines: dict[str, list[str]] = {}
    layer = ""
    # each pass is followed by its rival, and each layer's begin with the forward one
    for ours, rival in zip(rows[::2], rows[1::2], strict=False):
        if (found := _FORWARD.fullmatch(ours["shape"])) and ours["dtype"] == "fp8 e4m3":
            layer = f"{found['c']} to {found['k']} at {found['side']}²" if found["size"] == "3" else ""
        if layer and (ours["stack"], rival["stack"]) == (OURS, "eager"):
            rate = units.rate(ours["extra"]["flops"] / ours["median_s"])
            lines.setdefault(layer, []).append(f"{rate}, {rival['median_s'] / ours['median_s']:.2f}")
    header = "channels and map | forward | gradient of the map | of the weight"
    return _table(header, [f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items() if len(cells) == 3])


def detectors(rows: list[dict]) -> str:
    """Whole detectors beside eager PyTorch and torch.compile, each as one CUDA graph, each of its newest run.

    A rival that the newest run of a detector left out keeps its row of an earlier run on the same machine, starred: a
    ratio to the rivals that happened to be there would flatter.
    """
    rows = [row for row in rows if row["subject"].startswith("yolo26") and row["region"] == "model"]
    subjects = {(row["dtype"], SCALES.index(row["subject"][-1]), row["batch"], row["subject"]) for row in rows}
    lines = []
    for dtype, _, batch, subject in sorted(subjects):
        here = [row for row in rows if (row["dtype"], row["batch"], row["subject"]) == (dtype, batch, subject)]
        ours = _newest(here, "compile", "warm")
        if ours is None:
            continue
        same = [row for row in here if all(row[name] == ours[name] for name in ("gpu", "driver", "torch"))]
        rivals = {stack: row for stack in RIVALS if (row := _newest(same, stack, "warm"))}
        cells = [f"{subject} {dtype}, batch {batch}"]
        cells += [_beside(rivals[stack], ours["run"]) if stack in rivals else "" for stack in RIVALS]
        cold = _newest([row for row in here if row["run"] == ours["run"]], "compile", "cold")
        cells += [units.seconds(ours["median_s"]), units.seconds(cold["median_s"]) if cold else ""]
        if rivals:
            best = min(rivals, key=lambda stack: rivals[stack]["median_s"])
            cells.append(f"{rivals[best]['median_s'] / ours['median_s']:.1f} to {best}")
        else:
            cells.append("")
        lines.append(f"| {' | '.join(cells)} |")
    return _table("640x640 image to 300 detections | eager | torch.compile | ridgeline | L2 cold | ratio", lines)


def _newest(rows: list[dict], place: str, l2: str) -> dict | None:
    """The fastest row of a rival's stack, or of a recipe of ours, in the newest run that timed it."""
    found = [
        row for row in rows if row["l2"] == l2 and place == (row["recipe"] if row["stack"] == OURS else row["stack"])
    ]
    return min((row for row in found if row["run"] == found[-1]["run"]), key=lambda row: row["median_s"], default=None)


def _beside(row: dict, run: str) -> str:
    return units.seconds(row["median_s"]) + ("" if row["run"] == run else "*")


def ladder(rows: list[dict], names: Iterable[str] = ddpm_ladder.BY_NAME) -> str:
    """Rungs of the DDPM training step that have rows, beside the write-up's own times; newest row of each.

    A star marks the time of one that the newest run left out.
    """
    rows = [row for row in rows if row["subject"] == "ddpm-cifar10" and row["region"] == "step"]
    newest = {row["recipe"]: row for row in rows}
    lines = []
    for name in names:
        rung = ddpm_ladder.BY_NAME[name]
        if row := newest.get(name):
            times = [
                _beside(row, rows[-1]["run"]),
                *(units.seconds(row[field]) for field in ("spread_s", "gpu_busy_s")),
            ]
            theirs = "" if rung.writeup_s is None else units.seconds(rung.writeup_s, digits=5)
            cells = (name, row["extra"]["change"], *times, f"{row['extra']['kernels']:,.0f}", theirs)
            lines.append(f"| {' | '.join(cells)} |")
    return _table(
        f"rung | what it changes | wall | spread | GPU busy | kernels | write-up, {ddpm_ladder.WRITEUP_GPU}", lines
    )


def nets(rows: list[dict]) -> str:
    """Training steps of other networks in a recipe of ours beside torch.compile in one graph, of its newest run."""
    runs: dict[str, dict[str, dict[str, dict]]] = {}
    for row in rows:
        if row["subject"] in NETS and row["region"] == "step" and row["gpu"] != "cpu":
            runs.setdefault(row["subject"], {}).setdefault(row["run"], {})[row["recipe"]] = row
    lines = []
    for subject, by_run in runs.items():
        both = [recipes for recipes in by_run.values() if {"writeup-5", "bf16"} <= recipes.keys()]
        if both:
            rival, ours = both[-1]["writeup-5"], both[-1]["bf16"]
            cells = (
                f"{NETS[subject]}, {ours['shape']}",
                units.seconds(rival["median_s"]),
                units.seconds(ours["median_s"]),
            )
            lines.append(f"| {' | '.join(cells)} | {rival['median_s'] / ours['median_s']:.2f} |")
    return _table('images a step | `"writeup-5"` | `"bf16"` | ratio', lines)


def loop(rows: list[dict], library: str) -> str:
    """A sentence on a library's loop as it was and changed, of the newest run that timed both on a GPU."""
    runs: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["subject"] == f"loop:{library}" and row["gpu"] != "cpu":
            runs.setdefault(row["run"], {})[row["recipe"]] = row
    both = [sides for sides in runs.values() if {"as it was", "changed"} <= sides.keys()]
    if not both:
        return ""
    before, after = both[-1]["as it was"], both[-1]["changed"]
    versions = " and ".join(f"{name} {number}" for name, number in after["extra"]["versions"].items())
    return (
        f"A step of {after['shape']} on one {after['gpu']}, {versions}: {units.seconds(before['median_s'])} as it was, "
        f"{units.seconds(after['median_s'])} changed, {before['median_s'] / after['median_s']:.2f} times as fast.\n"
    )


def _table(header: str, lines: list[str]) -> str:
    if not lines:
        return ""
    columns = header.count("|") + 1
    return "\n".join([f"| {header} |", "|---" * columns + "|", *lines]) + "\n"


TABLES = {  # as they stand in PAGES
    "loop-timm": partial(loop, library="timm"),
    "detectors": detectors,
    "steps": partial(ladder, names=STEPS),
    "ceilings": ceilings,
    "conv-kernels": conv_kernels,
    "ladder": ladder,
    "loop-diffusers": partial(loop, library="diffusers"),
    "nets": nets,
    "fp8-kernels": fp8_kernels,
}

if __name__ == "__main__":
    sys.exit(main())
