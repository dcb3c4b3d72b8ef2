"""A report as terminal tables, CSV, Markdown or JSON. It imports rich (0.2 s), so import it when a table is due."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields

from ridgeline import units
from ridgeline.report import (
    ABSENT,
    NO_MODULE,
    Pair,
    Report,
    Row,
    bytes_text,
    count_text,
    intensity_text,
    kinds_compared,
    layers_compared,
    one_line,
    phases_compared,
    seconds_text,
    share_text,
    summary,
    to_dict,
    top,
)
from ridgeline.text_tables import Column, Section, markdown, terminal

FORMATS = ("table", "json", "csv", "md")
_LIMITER_STYLES = {"compute": "magenta", "memory": "cyan"}


def render(
    report: Report,
    output_format: str = "table",
    *,
    max_rows: int = 20,
    width: int | None = None,
    color: bool | None = None,
) -> str:
    """The report in one of FORMATS, without a last newline.

    `max_rows` cuts the long tables of "table" and "md", never "csv" or "json".
    `width` and `color` default to what stdout is: plain text off a terminal or under NO_COLOR.
    Raises ValueError on another format or a negative `max_rows`.
    """
    if max_rows < 0:
        raise ValueError(f"render: max_rows must not be negative, got {max_rows}")
    match output_format:
        case "table":
            return terminal(facts(report), _sections(report, max_rows), bold="fused floor", width=width, color=color)
        case "json":
            return json.dumps(to_dict(report), allow_nan=False, indent=1, ensure_ascii=False)
        case "csv":
            return _csv(report)
        case "md":
            return markdown(facts(report), _sections(report, max_rows))
    raise ValueError(f"render: format must be one of {', '.join(FORMATS)}, got {output_format!r}")


def facts(report: Report) -> tuple[tuple[str, str], ...]:
    """The headline as (label, text) pairs: what was looked at, then the numbers that matter."""
    total = summary(report)
    unknown = ", ".join(f"{unknown.op} ({unknown.calls} calls)" for unknown in report.unknown)
    saved_s = total.unfused_s - total.floor_s
    wave_loss = share_text(total.wave_loss_s, total.floor_s)
    return (
        ("model", f"{report.subject}, {'training step' if report.train else 'inference'}"),
        ("GPU", f"{report.gpu}, {report.sm_count} SMs"),
        ("ceilings", _ceilings(report)),
        ("dtype, batch", f"{report.dtype}, {report.batch}"),
        ("parameters", f"{count_text(report.parameters)} in {units.nbytes(report.weight_bytes)}"),
        ("work", units.flops(total.flops)),
        ("traffic", f"{units.nbytes(total.unfused_bytes)} unfused, {units.nbytes(total.fused_bytes)} fused"),
        ("unfused sum", f"{units.seconds(total.unfused_s)} in {total.unfused_kernels} kernels"),
        ("fused floor", f"{units.seconds(total.floor_s)} in {total.fused_kernels} kernels"),
        ("fusion saves", f"{units.seconds(saved_s)} ({share_text(saved_s, total.unfused_s)} of the unfused sum)"),
        ("dependent chain", f"{total.unfused_chain_length} kernels unfused, {total.chain_length} fused"),
        ("floor bound by", f"compute {units.percent(total.compute_share)}, memory {units.percent(total.memory_share)}"),
        ("wave quantisation", f"+{units.seconds(total.wave_loss_s)} ({wave_loss} of the floor)"),
        ("unknown ops", unknown or "none"),
    )


def _ceilings(report: Report) -> str:
    pipes = dict.fromkeys(row.pipe for row in report.fused_rows if row.flops and row.pipe in report.peaks)
    parts = [f"{pipe.replace('_', ' ')} {units.rate(report.peaks[pipe])}" for pipe in pipes]
    parts.append(f"memory {units.bandwidth(report.peaks['bandwidth'])}")
    return f"{', '.join(parts)} ({report.gpu_source})"


def _sections(report: Report, max_rows: int) -> list[Section]:
    pairs = layers_compared(report)
    longest = {pair.name for pair in sorted(pairs, key=lambda pair: -pair.row.seconds)[:max_rows]}
    kernels = top(report.fused_rows, max_rows)
    sections = [_compared("Per class", "class", report, kinds_compared(report))]
    if report.train:
        sections.append(_compared("Per phase", "phase", report, phases_compared(report)))
    layers = tuple(pair for pair in pairs if pair.name in longest)  # network order reads better than that of seconds
    sections.append(_compared("Per layer", "layer", report, layers, hidden=len(pairs) - len(layers)))
    hidden = len(report.fused_rows) - len(kernels)
    sections.append(Section("Fused kernels, most seconds first", _kernel_columns(report), kernels, _more(hidden)))
    return sections


def _compared(title: str, key_title: str, report: Report, pairs: tuple[Pair, ...], *, hidden: int = 0) -> Section:
    """Fused beside unfused, one line a group."""
    columns = (
        Column(key_title, lambda pair: one_line(pair.name) or NO_MODULE, numeric=False, cut="start"),
        Column("kernels", lambda pair: f"{_calls(pair.unfused)} → {_calls(pair.fused)}", rank=4),
        Column("FLOPs", lambda pair: count_text(pair.row.flops), rank=3),
        Column("bytes", lambda pair: bytes_text(pair.unfused), rank=6),
        Column("fused bytes", lambda pair: bytes_text(pair.fused), rank=5),
        Column("FLOP/B", lambda pair: intensity_text(pair.row), rank=1),
        Column("unfused", lambda pair: _seconds(pair.unfused)),
        Column("fused", lambda pair: _seconds(pair.fused)),
        Column(
            "of floor", lambda pair: share_text(pair.fused.seconds, report.floor_s) if pair.fused else ABSENT, rank=1
        ),
        Column("limiter", lambda pair: pair.row.limiter, numeric=False, rank=2, styles=_LIMITER_STYLES),
    )
    return Section(title, columns, pairs, _more(hidden))


def _kernel_columns(report: Report) -> tuple[Column, ...]:
    columns = [
        Column("layer", lambda row: one_line(row.layer) or NO_MODULE, numeric=False, cut="start"),
        Column("class", lambda row: one_line(row.kind), numeric=False, rank=2),
        Column("shape", lambda row: one_line(row.shape), numeric=False, rank=9, cut="end"),
        Column("calls", lambda row: str(row.calls), rank=12),
        Column("FLOPs", lambda row: count_text(row.flops), rank=5),
        Column("bytes", lambda row: units.nbytes(row.bytes), rank=6),
        Column("FLOP/B", intensity_text, rank=4),
        Column("compute", lambda row: seconds_text(row.compute_s), rank=11),
        Column("memory", lambda row: seconds_text(row.memory_s), rank=10),
        Column("waves", lambda row: f"{row.waves:.2f}" if row.tiles else ABSENT, rank=8),
        Column("SM use", lambda row: units.percent(row.wave_efficiency, 0) if row.tiles else ABSENT, rank=7),
        Column("limiter", lambda row: row.limiter, numeric=False, rank=1, styles=_LIMITER_STYLES),
        Column("seconds", lambda row: seconds_text(row.seconds)),
    ]
    if report.train:
        columns.insert(1, Column("phase", lambda row: row.phase, numeric=False, rank=3))
    return tuple(columns)


# Names carry their unit; `seconds` is the roofline time of all `calls`.
_CSV_HEADER = (
    "schedule", "layer", "phase", "kind", "op", "shape", "calls", "flops", "read_bytes", "write_bytes",
    "intensity_flop_per_byte", "pipe", "compute_seconds", "memory_seconds", "seconds", "limiter",
    "tiles", "waves", "wave_efficiency",
)  # fmt: skip


def _csv(report: Report) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    for schedule, rows in (("unfused", report.rows), ("fused", report.fused_rows)):
        for row in rows:
            cells = {field.name: getattr(row, field.name) for field in fields(row)}
            cells |= {
                "schedule": schedule,
                "intensity_flop_per_byte": row.intensity,
                "compute_seconds": row.compute_s,
                "memory_seconds": row.memory_s,
            }
            writer.writerow([_csv_cell(cells[name]) for name in _CSV_HEADER])
    return out.getvalue().rstrip("\n")


def _csv_cell(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return one_line(value) if isinstance(value, str) else value


def _more(hidden: int) -> str:
    return f"… {hidden} more rows; --format csv shows all" if hidden > 0 else ""


def _calls(row: Row | None) -> int:
    return row.calls if row else 0


def _seconds(row: Row | None) -> str:
    return seconds_text(row.seconds) if row else ABSENT
