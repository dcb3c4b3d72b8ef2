"""Errors of ways to compute against float64: what a row of them holds, and rows as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline import units
from ridgeline.errors import UsageError
from ridgeline.text_tables import Column, Facts, Section, markdown, terminal

SUBJECT = "error:"  # and the op's name


@dataclass(frozen=True)
class Result:
    """Errors of one way to compute one problem; fp8_error.py explains the fields."""

    op: str
    computed: str
    reduction: int
    data: str
    operands: str
    promote: int | None
    summed: int | None
    parts: int | None
    outputs: int
    rms: float
    largest: float
    bias: float
    rounding_rms: float
    allowed_rms: float | None
    allowed_largest: float | None

    @property
    def name(self) -> str:
        return f"{self.op} of {self.reduction:,} products, {self.data}, {self.operands}, {self.computed}"

    @property
    def share_of_allowed(self) -> float | None:
        """The larger of both errors as a share of its allowance; None where nothing is judged."""
        if self.allowed_rms is None or self.allowed_largest is None:
            return None
        return max(self.rms / self.allowed_rms, self.largest / self.allowed_largest)

    @property
    def beyond(self) -> bool:
        return self.share_of_allowed is not None and self.share_of_allowed > 1


def results_of(rows: Iterable[Mapping[str, Any]]) -> list[Result]:
    return [Result(row["subject"].removeprefix(SUBJECT), **row["extra"]) for row in rows]


def newest_rows(path: Path) -> list[dict[str, Any]]:
    """Those of the last run in a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["subject"].startswith(SUBJECT)]
        results_of(rows)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}): pass another --rows") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"'{path}' has a line that is no row ({error}): mend it, or pass another --rows") from error
    if not rows:
        raise UsageError(f"'{path}' has no rows of errors: measure with --out first")
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def in_terminal(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each result."""
    columns = (
        Column("products", lambda one: f"{one.reduction:,}"),
        Column("data", lambda one: one.data, numeric=False),
        Column("operands", lambda one: one.operands, numeric=False),
        Column("computed", lambda one: one.computed, numeric=False),
        Column("summed", lambda one: "" if one.summed is None else f"{one.summed:,}", rank=1),
        Column("RMS error", lambda one: _percent(one.rms)),
        Column("allowed", lambda one: _percent(one.allowed_rms)),
        Column("rounding", lambda one: _percent(one.rounding_rms), rank=2),
        Column("largest", lambda one: _percent(one.largest)),
        Column("allowed", lambda one: _percent(one.allowed_largest)),
        Column("bias", lambda one: _percent(one.bias, sign=True)),
    )
    sections = [Section(op, columns, tuple(found), judgement(found)) for op, found in _by_op(rows)]
    return terminal(_facts(rows), sections, bold="", width=None, color=None)


def in_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table for each op: a line for each problem, a column for each way to compute it."""
    sections = []
    for op, found in _by_op(rows):
        lines: dict[tuple[int, str, str], dict[str, Result]] = {}
        for one in found:
            lines.setdefault((one.reduction, one.data, one.operands), {})[one.computed] = one
        columns = [
            Column("products", lambda line: f"{line[0][0]:,}"),
            Column("data", lambda line: line[0][1], numeric=False),
            Column("operands", lambda line: line[0][2], numeric=False),
            *(
                Column(name, lambda line, name=name: _cell(line[1].get(name)))
                for name in dict.fromkeys(one.computed for one in found)
            ),
        ]
        note = "Percent of the RMS of the result: RMS error / largest error / bias. " + judgement(found)
        sections.append(Section(op, tuple(columns), tuple(lines.items()), note))
    return markdown(_facts(rows), sections)


def judgement(results: Iterable[Result]) -> str:
    """How many keep to their allowance, and how near the nearest comes to it."""
    shares = [one.share_of_allowed for one in results if one.share_of_allowed is not None]
    kept = sum(share <= 1 for share in shares)
    most = f"; the largest error is {units.percent(max(shares))} of what is allowed" if shares else ""
    return f"{kept} of {len(shares)} judged results err no more than allowed{most}."


def _facts(rows: Sequence[Mapping[str, Any]]) -> Facts:
    """Where and when they were measured."""
    names = (("GPU", "gpu"), ("driver", "driver"), ("torch", "torch"), ("Triton", "triton"), ("commit", "commit"))
    return [(title, str(rows[0][name])) for title, name in (*names, ("date", "date"))]


def _by_op(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Result]]]:
    found: dict[str, list[Result]] = {}
    for one in results_of(rows):
        found.setdefault(one.op, []).append(one)
    return list(found.items())


def _cell(one: Result | None) -> str:
    """An error that is not allowed is marked."""
    if one is None:
        return ""
    return f"{100 * one.rms:.3f} / {100 * one.largest:.2f} / {100 * one.bias:+.3f}" + ("!" if one.beyond else "")


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "" if value is None else f"{100 * value:{'+' if sign else ''}.4f} %"
