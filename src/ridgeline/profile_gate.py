"""Limits on what a diff may show, for continuous integration: `"wall>3%"`, `"category:layout>0.5ms"`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ridgeline.errors import UsageError
from ridgeline.kernel_names import CATEGORIES
from ridgeline.profile_diff import Change, Diff, change_text
from ridgeline.profile_summary import duration
from ridgeline.step_view import CAUSES

_LIMIT = re.compile(r"(?P<figure>[a-z]+(?::.+?)?)\s*>\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|ns|us|µs|ms|s)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_FORM = "write FIGURE>NUMBER with %, ns, us, ms or s, such as wall>3% or category:layout>0.5ms"


@dataclass(frozen=True)
class Limit:
    """A figure of a diff and by how much it may grow: a share of what it was, or seconds."""

    figure: str
    share: float | None
    seconds: float | None


def parse_limit(expression: str) -> Limit:
    """The limit that `expression` spells. Raises UsageError for anything else."""
    match = _LIMIT.fullmatch(expression.strip())
    if not match:
        raise UsageError(f"{expression!r} is no limit: {_FORM}")
    number, unit = float(match["number"]), match["unit"]
    if unit == "%":
        return Limit(match["figure"], number / 100, None)
    return Limit(match["figure"], None, number * _SECONDS[unit])


def exceeds(diff: Diff, expression: str) -> str | None:
    """One sentence that says how a figure grew beyond the limit; None where it did not, or where its spread hides it.

    A figure without a known spread is judged by its number alone. Raises UsageError for an expression that is no
    limit, or names a figure that the profiles lack.
    """
    limit = parse_limit(expression)
    change = _figure(diff, limit.figure)
    allowed_s = limit.seconds if limit.seconds is not None else (limit.share or 0.0) * (change.before_s or 0.0)
    if change.differs is False or change.delta_s <= allowed_s:
        return None
    basis = "" if change.differs else ", judged without a spread"
    before, after = duration(change.before_s or 0.0), duration(change.after_s or 0.0)
    return f"{limit.figure} grew from {before} to {after}, {change_text(change)}, beyond {expression.strip()}{basis}"


def _figure(diff: Diff, figure: str) -> Change:
    kind, _, name = figure.partition(":")
    if kind == "category":
        return _named(figure, name, diff.categories, CATEGORIES)
    if kind == "idle" and name:
        return _named(figure, figure, diff.totals, tuple(f"idle:{cause}" for cause in CAUSES))
    if kind == "kernel":
        return _named(figure, name, diff.names, ())
    totals = {change.name: change for change in diff.totals if ":" not in change.name}
    if figure not in totals:
        raise UsageError(
            f"{figure!r} is no figure of a diff: use {', '.join(totals)}, idle:CAUSE, category:NAME or kernel:NAME"
        )
    change = totals[figure]
    if change.before_s is None or change.after_s is None:
        raise UsageError(f"{figure} was not timed in both profiles: profile again, or limit step instead")
    return change


def _named(figure: str, name: str, changes: tuple[Change, ...], known: tuple[str, ...]) -> Change:
    """The change of that name. One that is known but in neither profile did not grow; an unknown one is a mistake."""
    found = next((change for change in changes if change.name == name), None)
    if found is None and name not in known:
        have = ", ".join(known) if known else "the names that the table of kernels prints in full in --format csv"
        raise UsageError(f"{figure!r} is in neither profile: use one of {have}")
    return found or Change(name, 0.0, 0.0)
