"""A profile as terminal tables, Markdown, CSV or JSON. It imports rich (0.2 s), so import it when a table is due."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline import units
from ridgeline.finding import Finding
from ridgeline.profile_csv import to_csv
from ridgeline.profile_json import to_json
from ridgeline.profile_record import Bar, KernelRow, Profile
from ridgeline.profile_summary import (
    basis,
    calibration_text,
    effort,
    environment,
    evidence_text,
    headline,
    limits,
    share_text,
    spent,
    spread,
    step_s,
    worth_text,
)
from ridgeline.report import ABSENT, count_text, one_line
from ridgeline.text_tables import Column, Section, markdown, terminal

FORMATS = ("table", "json", "csv", "md")
BAR_WIDTH = 24  # characters of the longest bar in the waterfall
_BOUND_STYLES = {"compute": "magenta", "memory": "cyan"}
_CORE_STYLES = {"no": "yellow"}


def render(
    profile: Profile,
    output_format: str = "table",
    *,
    max_rows: int = 20,
    width: int | None = None,
    color: bool | None = None,
) -> str:
    """The profile in one of FORMATS, without a last newline.

    `max_rows` cuts the long tables of "table" and "md", never "csv" or "json".
    `width` and `color` default to what stdout is: plain text off a terminal or under NO_COLOR.
    Raises ValueError on another format or a negative `max_rows`.
    """
    if max_rows < 0:
        raise ValueError(f"render: max_rows must not be negative, got {max_rows}")
    match output_format:
        case "table":
            return terminal(headline(profile), _sections(profile, max_rows), bold="step", width=width, color=color)
        case "json":
            return to_json(profile)
        case "csv":
            return to_csv(profile)
        case "md":
            return markdown(headline(profile), _sections(profile, max_rows))
    raise ValueError(f"render: format must be one of {', '.join(FORMATS)}, got {output_format!r}")


def _sections(profile: Profile, max_rows: int) -> list[Section]:
    """Everything below the headline, in the order a reader needs it; what is empty is left out."""
    by_name = profile.by_name[:max_rows]
    # without recorded shapes the second table would repeat the first
    shaped = profile.kernels if any(row.shapes for row in profile.kernels) else ()
    by_shape = shaped[:max_rows]
    sections = [
        Section("Environment", facts=environment(profile)),
        Section("Where the step goes", _waterfall_columns(profile), profile.waterfall, note=basis(profile)),
        _findings(profile),
        Section("Promised and brought", facts=[(c.rule, calibration_text(c)) for c in profile.calibrations]),
        Section(
            "Kernels by name, most time first",
            _kernel_columns(profile, by_shape=False),
            by_name,
            note=_more(profile.by_name, by_name),
        ),
        Section(
            "Kernels by name and shape",
            _kernel_columns(profile, by_shape=True),
            by_shape,
            note=_more(shaped, by_shape),
        ),
        Section("Copies and fills", _COPY_COLUMNS, profile.copies),
        Section("Host waits for the GPU", _SYNC_COLUMNS, profile.syncs),
        Section("What was not looked at", facts=[("", line) for line in limits(profile)]),
        Section("How to reproduce", facts=[("", profile.command)]),
    ]
    return [section for section in sections if section.items or section.facts]


def _findings(profile: Profile) -> Section:
    facts: list[tuple[str, str]] = []
    gone = spent(profile)
    for index, finding in enumerate(profile.findings):
        if finding in gone:
            continue
        facts += [("", "")] if facts else []
        facts += _finding_facts(finding, profile.remaining_s[index] if index < len(profile.remaining_s) else None)
    if gone:
        named = "; ".join(f"{finding.rule} {finding.title}" for finding in gone)
        facts += [("", ""), ("besides", f"nothing is left, after the fixes above, of {named}")]
    return Section(f"Findings ({len(profile.findings)})", facts=facts or [("", "none")])


def _finding_facts(finding: Finding, remaining_s: float | None) -> list[tuple[str, str]]:
    left = f"; {units.seconds(remaining_s)} left with all fixes so far" if remaining_s is not None else ""
    return [
        (finding.rule, finding.title),
        ("worth", f"{worth_text(finding)}, {effort(finding)}, {finding.confidence}{left}"),
        ("fix", f"{finding.fix} {finding.verb}".rstrip()),
        ("wrong if", finding.wrong_if),
        ("evidence", evidence_text(finding)),
    ]


def _waterfall_columns(profile: Profile) -> tuple[Column, ...]:
    longest_s = max((bar.seconds for bar in profile.waterfall), default=0.0) or 1.0
    whole_s = step_s(profile) or 1.0

    def drawn(bar: Bar) -> str:
        return ("░" if bar.idle else "█") * max(round(bar.seconds / longest_s * BAR_WIDTH), 0)

    return (
        Column("part", lambda bar: one_line(bar.name), numeric=False),
        Column("time", lambda bar: units.seconds(bar.seconds)),
        Column("of the step", lambda bar: units.percent(bar.seconds / whole_s)),
        Column("", drawn, numeric=False, rank=1),
    )


def _kernel_columns(profile: Profile, *, by_shape: bool) -> tuple[Column, ...]:
    whole_s = step_s(profile) or 1.0
    name = Column("kernel", lambda row: one_line(row.name), numeric=False, cut="middle")
    shapes = Column("shapes", lambda row: one_line(row.shapes) or ABSENT, numeric=False, rank=12, cut="end")
    return (
        name,
        *([shapes] if by_shape else []),
        Column("count", lambda row: str(row.count), rank=2),
        Column("total", lambda row: units.seconds(row.total_s)),
        Column("%", lambda row: units.percent(row.total_s / whole_s), rank=1),
        Column("avg", lambda row: units.seconds(row.mean_s), rank=5),
        Column("median", lambda row: units.seconds(row.median_s), rank=14),
        Column("min", lambda row: units.seconds(row.min_s), rank=15),
        Column("max", lambda row: units.seconds(row.max_s), rank=16),
        Column("σ", lambda row: units.seconds(row.sigma_s), rank=17),  # noqa: RUF001
        Column("σ/avg", _number(spread), rank=9),  # noqa: RUF001
        Column("grid", lambda row: one_line(row.grid) or ABSENT, numeric=False, rank=18),
        Column("class", lambda row: one_line(row.category), numeric=False, rank=4),
        Column("dtype", lambda row: row.dtype or ABSENT, numeric=False, rank=10),
        Column("layout", lambda row: row.layout or ABSENT, numeric=False, rank=11),
        Column("tensor core", lambda row: row.tensor_core, numeric=False, rank=8, styles=_CORE_STYLES),
        Column("FLOP/B", lambda row: count_text(row.intensity or 0.0), rank=13),
        Column("bound", lambda row: row.bound or ABSENT, numeric=False, rank=7, styles=_BOUND_STYLES),
        Column("of roof", lambda row: share_text(row.of_roof), rank=3),
        Column("exposed", lambda row: units.seconds(row.exposed_s), rank=20),
        Column("phase", lambda row: row.phase, numeric=False, rank=19),
        Column("operator", lambda row: one_line(row.op) or ABSENT, numeric=False, rank=21, cut="end"),
        Column("module", lambda row: one_line(row.module) or ABSENT, numeric=False, rank=22, cut="start"),
    )


_COPY_COLUMNS = (
    Column("name", lambda row: one_line(row.name), numeric=False, cut="middle"),
    Column("count", lambda row: str(row.count)),
    Column("total", lambda row: units.seconds(row.total_s)),
    Column("bytes", lambda row: units.nbytes(row.bytes), rank=1),
    Column("rate", lambda row: units.bandwidth(row.bytes / row.total_s) if row.total_s else ABSENT, rank=2),
    Column("exposed", lambda row: units.seconds(row.exposed_s), rank=3),
)
_SYNC_COLUMNS = (
    Column("call", lambda row: one_line(row.call), numeric=False, cut="end"),
    Column("where", lambda row: one_line(row.source) or ABSENT, numeric=False, rank=1, cut="start"),
    Column("under", lambda row: one_line(row.under) or ABSENT, numeric=False, rank=3, cut="end"),
    Column("count", lambda row: str(row.count)),
    Column("host waited", lambda row: units.seconds(row.waited_s), rank=2),
    Column("GPU bubble", lambda row: units.seconds(row.bubble_s)),
)


def _number(value: Callable[[KernelRow], float | None]) -> Callable[[KernelRow], str]:
    def text(row: KernelRow) -> str:
        number = value(row)
        return ABSENT if number is None else f"{number:.2f}"

    return text


def _more(rows: tuple[KernelRow, ...], shown: tuple[KernelRow, ...]) -> str:
    hidden_s = sum(row.total_s for row in rows[len(shown) :])
    hidden = len(rows) - len(shown)
    return f"… {hidden} more rows ({units.seconds(hidden_s)}); --format csv shows all" if hidden else ""
