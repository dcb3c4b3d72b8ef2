"""A diff of two profiles as terminal tables, Markdown or JSON. It imports rich, so import it when a table is due."""

from __future__ import annotations

import json
from typing import Any

from ridgeline.plain import to_plain
from ridgeline.profile_diff import Change, Diff, change_text, interval_text, verdict
from ridgeline.profile_summary import duration
from ridgeline.report import ABSENT, one_line
from ridgeline.text_tables import Column, Section, markdown, terminal

FORMATS = ("table", "json", "md")
_STYLES = {"faster": "green", "slower": "red", "gone": "green", "new": "red"}


def render_diff(
    diff: Diff,
    output_format: str = "table",
    *,
    max_rows: int = 20,
    width: int | None = None,
    color: bool | None = None,
) -> str:
    """The diff in one of FORMATS, without a last newline; `max_rows` cuts the tables of "table" and "md".

    Raises ValueError on another format or a negative `max_rows`.
    """
    if max_rows < 0:
        raise ValueError(f"render_diff: max_rows must not be negative, got {max_rows}")
    match output_format:
        case "table":
            return terminal(_headline(diff), _sections(diff, max_rows), bold="wall", width=width, color=color)
        case "md":
            return markdown(_headline(diff), _sections(diff, max_rows))
        case "json":
            return json.dumps({"schema_version": 1, **_plain(diff)}, allow_nan=False, ensure_ascii=True)
    raise ValueError(f"render_diff: format must be one of {', '.join(FORMATS)}, got {output_format!r}")


def _headline(diff: Diff) -> list[tuple[str, str]]:
    wall = diff.totals[0]
    if wall.before_s is None or wall.after_s is None:
        said = "not timed in both profiles: the traced step stands for it, profiler included"
    elif wall.differs:
        said = f"{verdict(wall)}: {change_text(wall)}, the quartiles lie apart"
    else:
        said = f"no difference can be told: {change_text(wall)} lies within the quartiles"
    return [("subject", diff.subject), ("wall", said)]


def _sections(diff: Diff, max_rows: int) -> list[Section]:
    tables = (
        ("Totals", "figure", diff.totals, len(diff.totals)),
        ("By class", "class", diff.categories, max_rows),
        ("By kernel name", "kernel", diff.names, max_rows),
        # without recorded shapes the last table would repeat the one before
        ("By kernel and shape", "kernel", diff.kernels if diff.kernels != diff.names else (), max_rows),
    )
    sections = [_table(title, key, changes, rows) for title, key, changes, rows in tables if changes]
    facts = [(setting.name, f"{setting.before} → {setting.after}") for setting in diff.settings]
    return [*sections, Section("What was not equal", facts=facts or [("", "nothing that the profiles wrote down")])]


def _table(title: str, key: str, changes: tuple[Change, ...], max_rows: int) -> Section:
    columns = (
        Column(key, lambda change: one_line(change.name), numeric=False, cut="middle"),
        Column("before", lambda change: _seconds(change.before_s)),
        Column("after", lambda change: _seconds(change.after_s)),
        Column("change", change_text),
        Column("verdict", verdict, numeric=False, styles=_STYLES),
        Column("launches", _launches, rank=1),
        Column("before, interval", lambda change: interval_text(change.before_range), rank=2),
        Column("after, interval", lambda change: interval_text(change.after_range), rank=3),
    )
    shown = changes[:max_rows]
    hidden = len(changes) - len(shown)
    note = f"… {hidden} more rows that changed less; --format json has all" if hidden else ""
    return Section(title, columns, shown, note=note)


def _plain(diff: Diff) -> dict[str, Any]:
    """The diff as plain JSON types, each change with its verdict."""
    data = to_plain(diff)
    for name in ("totals", "categories", "names", "kernels"):
        for entry, change in zip(data[name], getattr(diff, name), strict=True):
            entry |= {"delta_s": change.delta_s, "verdict": verdict(change)}
    return data


def _seconds(value_s: float | None) -> str:
    return ABSENT if value_s is None else duration(value_s)


def _launches(change: Change) -> str:
    if not change.before_count and not change.after_count:
        return ABSENT
    return f"{change.before_count} → {change.after_count}"
