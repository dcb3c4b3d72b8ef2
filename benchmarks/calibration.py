"""Hold what `explain` promises against what was measured, in docs/explanation-findings.md; --check says if it differs.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --check

A pair is a step before and after a fix, on one GPU: two traces of tests/fixtures/traces, or a trace and rows of
benchmarks/results. It needs no GPU. Several fixes made at once are scored together, and apart where kernels tell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline import units
from ridgeline.explaining import explain
from ridgeline.profile_record import Calibration, KernelRow, Profile
from ridgeline.scorecard import calibrate

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation-findings.md"
TRACES = ROOT / "tests" / "fixtures" / "traces"
YOLO_ROWS = ROOT / "benchmarks" / "results" / "yolo26.jsonl"
BEGIN, END = "<!-- calibration -->\n", "<!-- /calibration -->"
LADDER_ROWS = ROOT / "benchmarks" / "results" / "ddpm.jsonl"
OPERATORS = {"ddpm-graph": "ddpm-graph-operators", "yolo26n-graph": "yolo26n-eager"}
# what the graph of step 5 fixed of step 0: the read, the launches, the optimizer, the layout, noise and loss
STEP_5 = ("H5", "W1", "K9", "L1", "K1")
GRAPHS = ("yolo26n-graph", "ddpm-graph")
MADE_OVER = ("layout", "norm", "conv", "copy")  # categories that change with the layout


@dataclass(frozen=True)
class Row:
    """One pair: which fix, what was compared and how, the promise beside the truth, and why that was missed."""

    fix: str
    before: str
    after: str
    measure: str
    calibration: Calibration
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the calibration table into docs/explanation-findings.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the table is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    fresh = before + BEGIN + table(rows()) + END + rest.partition(END)[2]
    if fresh == text:
        return 0
    if check:
        print(f"{PAGE.name}: the table differs from what explain says; run benchmarks/calibration.py", file=sys.stderr)
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


def table(found: Iterable[Row]) -> str:
    """The pairs as Markdown, and how many intervals held."""
    found = tuple(found)
    lines = ["", "| fix | before → after | measured by | promised | brought | |", "|---|---|---|--:|--:|---|"]
    for row in found:
        c = row.calibration
        promised = f"{_ms(c.mid_s)} ({_ms(c.low_s)} to {_ms(c.high_s)})"
        verdict = "held" if c.hit else f"**missed**: {row.why}"
        lines.append(
            f"| {row.fix} | {row.before} → {row.after} | {row.measure} | {promised} | {_ms(c.realised_s)} | {verdict} |"
        )
    captured = [row for row in found if row.after in GRAPHS]
    counted = f"{_held(captured)} after the step became one graph, {_held(found)} in all. Times in ms a step."
    return "\n".join([*lines, "", counted, "", ""])


def _held(found: Sequence[Row]) -> str:
    hits = sum(row.calibration.hit for row in found)
    return f"{hits} of {len(found)} intervals held ({units.percent(hits / len(found), 0)})"


def rows() -> Iterator[Row]:
    """Every pair there is."""
    yield from _graphs()
    yield from _step_5()
    yield from _rungs()
    yield from _detector()


def _graphs() -> Iterator[Row]:
    for name in ("yolo26n", "ddpm"):
        before, after = {"yolo26n": "yolo26n-eager", "ddpm": "ddpm-graph-operators"}[name], f"{name}-graph"
        alike = replace(profile(after), subject=before)  # one step, with its graph and without
        yield Row("W1", before, after, "clock", calibrate(profile(before), "W1", alike))


def _step_5() -> Iterator[Row]:
    """The write-up's step 0 against its step 5, together and by the kernels of each fix."""
    before, after = profile("ddpm-baseline"), profile("ddpm-graph")
    pair = ("ddpm-baseline", "ddpm-graph")
    yield Row(", ".join(STEP_5), *pair, "clock", together(before, STEP_5, _clock_s(before) - _clock_s(after)))
    idle_s = _idle_s(before) - _idle_s(after)
    yield Row("W1", *pair, "idle time", together(before, ("H5", "W1"), idle_s))
    changed = [_kernels_s(each, lambda row: row.phase == "optimizer") for each in (before, after)]
    yield Row("K9", *pair, "optimizer kernels", together(before, ("K9",), changed[0] - changed[1]))
    changed = [_kernels_s(each, lambda row: row.category in MADE_OVER) for each in (before, after)]
    why = "group norms and their copies took more than the conversions had"
    measure = ", ".join(MADE_OVER) + " kernels"
    yield Row("L1", *pair, measure, together(before, ("L1",), changed[0] - changed[1]), why)


def _rungs() -> Iterator[Row]:
    """Rungs of the ladder, by GPU time: the walls of these host-bound rungs differ by more from run to run."""
    before = profile("ddpm-baseline")
    pairs = (("L1", "writeup-0", "writeup-1", "as above, measured once more"), ("K9", "writeup-2", "writeup-3", ""))
    for rule, first, second, why in pairs:
        brought_s = _rung_busy_s(first) - _rung_busy_s(second)
        yield Row(rule, first, second, "GPU time", together(before, (rule,), brought_s), why)
    brought_s = _rung_busy_s("one-pass") - _rung_busy_s("fused-norms")
    why = "the kernels for it also take scale, shift and dropout along"
    promised = together(profile("ddpm-graph"), ("L3", "L5"), brought_s)
    yield Row("L3, L5", "one-pass", "fused-norms", "GPU time", promised, why)
    brought_s = _rung_busy_s("writeup-5") - _rung_busy_s("writeup-7")
    why = "more went than FP8 takes off these products: 44 kernels fewer, and no trace says which"
    promised = together(profile("ddpm-graph"), ("K19",), brought_s)
    yield Row("K19", "writeup-5", "writeup-7", "GPU time", promised, why)


def _detector() -> Iterator[Row]:
    """The detector's graph of eager operators against the same in NHWC, compiled by PyTorch, and by this project."""
    before = profile("yolo26n-graph")
    every = tuple(dict.fromkeys(finding.rule for finding in before.findings if finding.saving))
    afters = (
        ("L1", ("L1",), "eager NHWC", "in NHWC the step took as long as before; no trace says what grew"),
        ("L1, K1, K4", ("L1", "K1", "K4"), "torch.compile default", "it fuses across what these rules price apart"),
        ("all", every, "compile", "527 kernels became 73, with a tile for each shape: rules price kernels one by one"),
    )
    for fix, rules, recipe, why in afters:
        brought_s = _detector_s("eager NCHW") - _detector_s(recipe)
        name = "ridgeline.compile" if recipe == "compile" else recipe
        yield Row(fix, before.subject, name, "clock", together(before, rules, brought_s), why)


@cache
def profile(name: str) -> Profile:
    operators = TRACES / f"{OPERATORS[name]}.json.gz" if name in OPERATORS else None
    return explain(TRACES / f"{name}.json.gz", operators=operators)


def together(before: Profile, rules: tuple[str, ...], realised_s: float) -> Calibration:
    """What the findings of these rules promise together, each after those before it."""
    savings = [finding.saving for finding in before.findings if finding.rule in rules and finding.saving]
    low_s, mid_s, high_s = (sum(getattr(saving, end) for saving in savings) for end in ("low_s", "mid_s", "high_s"))
    return Calibration("+".join(rules), low_s, mid_s, min(high_s, _clock_s(before)), realised_s)


def _clock_s(of: Profile) -> float:
    if of.wall is None:
        raise SystemExit(f"{of.subject}: nobody timed it, so nothing can be held against it")
    return of.wall.median_s


def _idle_s(of: Profile) -> float:
    return _clock_s(of) - of.busy_s


def _kernels_s(of: Profile, belongs: Callable[[KernelRow], bool]) -> float:
    return sum(row.total_s for row in of.kernels if belongs(row))


def _detector_s(recipe: str) -> float:
    """The newest warm row of YOLO26n in fp16 at batch 1."""
    alike = {"subject": "yolo26n", "dtype": "fp16", "batch": 1, "region": "model", "l2": "warm", "recipe": recipe}
    return _newest(YOLO_ROWS, alike)["median_s"]


def _rung_busy_s(recipe: str) -> float:
    """GPU time of a step of one of the ladder's rungs."""
    return _newest(LADDER_ROWS, {"subject": "ddpm-cifar10", "recipe": recipe})["gpu_busy_s"]


def _newest(results: Path, alike: dict[str, object]) -> dict[str, Any]:
    rows = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return max((row for row in rows if alike.items() <= row.items()), key=lambda row: row["date"])


def _ms(value_s: float) -> str:
    return f"{1000 * value_s:.3f}"


if __name__ == "__main__":
    sys.exit(main())
