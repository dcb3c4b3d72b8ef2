"""Sections of a page: roofline reports and detection pictures. `page` and `write_html` are those of `html_page`."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ridgeline import units
from ridgeline.html_page import Column, Section, bar_cell, cell, page, table, text, write_html
from ridgeline.report import (
    ABSENT,
    NO_MODULE,
    Pair,
    Report,
    Row,
    Summary,
    by_kind,
    bytes_text,
    count_text,
    intensity_text,
    kinds_compared,
    layers_compared,
    phases_compared,
    seconds_text,
    share_text,
    summary,
    top,
)
from ridgeline.report_svg import has_place, kind_slots, roofline_plot, time_bars
from ridgeline.roofline_axes import LOWEST_INTENSITY

# A training step has thousands of operators; the longest tell the story and keep the page under 300 kB.
MAX_KERNELS = 400
MAX_OPERATORS = 400

__all__ = ["Section", "detection_section", "page", "report_section", "write_html"]


def report_section(report: Report, *, command: str | None = None) -> Section:
    """Headline, roofline, time by kind, tables with their limits, and `command` as the line that reproduces it."""
    total = summary(report)
    key = f"{report.subject}|{report.gpu}|{report.dtype}|{report.batch}|{report.train}"
    ident = "r" + hashlib.sha256(key.encode(errors="replace")).hexdigest()[:8]
    slots = kind_slots(report)
    meta = f"{report.gpu}, {report.dtype}, batch {report.batch}, {'training step' if report.train else 'inference'}"
    body = (
        f'<h2>{text(report.subject)}</h2><p class="meta">{text(meta)}</p>',
        _lede(report, total),
        _strip(report, total),
        _plot(report, slots),
        _comparisons(report, slots),
        _kernel_table(report, slots),
        _operator_table(report, slots),
        _ceilings(report),
        _limits(report),
        _reproduce(command),
    )
    return Section(ident, f"{report.subject} on {report.gpu}", f'<section id="{ident}">{"".join(body)}</section>')


def detection_section(
    images: Sequence[tuple[str, bytes, Sequence[Mapping[str, Any]]]],
    *,
    title: str = "Detections",
    note: str | None = None,
    command: str | None = None,
) -> Section:
    """Pictures with what was found in them: (name, JPEG bytes, detections), each with `label`, `score` and `box`.

    `box` is x1, y1, x2, y2 in pixels of the picture; `note` is a paragraph above the pictures.
    Raises ValueError on bytes that are not a JPEG.
    """
    parts = [f"<h2>{text(title)}</h2>"]
    if note:
        parts.append(f'<p class="lede">{text(note)}</p>')
    for name, jpeg, detections in images:
        if not jpeg.startswith(b"\xff\xd8\xff"):
            raise ValueError(f"detection_section: {name} must be JPEG bytes, got {jpeg[:4]!r}")
        counts = Counter(str(found["label"]) for found in detections)
        content = ", ".join(f"{count} {label}" for label, count in counts.most_common()) or "nothing found"
        caption = text(f"{name}: {content}")
        columns = (
            Column("object", lambda found: f"<td>{text(str(found['label']))}", textual=True),
            Column("score", lambda found: f"<td>{float(found['score']):.3f}"),
            Column("box, pixels", lambda found: f"<td>{' '.join(f'{float(edge):.0f}' for edge in found['box'])}"),
        )
        picture = base64.b64encode(jpeg).decode()
        parts.append(
            f'<div class="photos"><figure><img src="data:image/jpeg;base64,{picture}" '
            f'alt="{caption}"><figcaption>{caption}</figcaption></figure>'
            f"{table(f'Objects in {name}', columns, detections)}</div>"
        )
    parts.append(_reproduce(command))
    return Section("detections", title, f'<section id="detections">{"".join(parts)}</section>')


def _lede(report: Report, total: Summary) -> str:
    saved_s = total.unfused_s - total.floor_s
    unknown = f" {total.unknown_calls} calls have no cost formula and are not counted." if total.unknown_calls else ""
    said = (
        f"No schedule of these {total.fused_kernels} fused kernels runs faster than {units.seconds(total.floor_s)} "
        f"on the {report.gpu}. With one kernel per operator the bound is {units.seconds(total.unfused_s)}: "
        f"fusion is worth {units.seconds(saved_s)} ({share_text(saved_s, total.unfused_s)}) by moving "
        f"{units.nbytes(total.fused_bytes)} instead of {units.nbytes(total.unfused_bytes)}.{unknown}"
    )
    return f'<p class="lede">{text(said)}</p>'


def _strip(report: Report, total: Summary) -> str:
    chain = "{} kernels, {} in the longest chain".format
    weights = f"{count_text(report.parameters)} parameters, {units.nbytes(report.weight_bytes)}"
    shares = f"of the floor; {units.percent(total.compute_share, 0)} compute-bound"
    waves = f"over the floor, on {report.sm_count} SMs"
    facts = (
        ("Fused floor", units.seconds(total.floor_s), chain(total.fused_kernels, total.chain_length)),
        ("Unfused bound", units.seconds(total.unfused_s), chain(total.unfused_kernels, total.unfused_chain_length)),
        ("Work", units.flops(total.flops), weights),
        ("Memory-bound", units.percent(total.memory_share, 0), shares),
        ("Wave quantisation", f"+{units.seconds(total.wave_loss_s)}", waves),
    )
    items = "".join(
        f'<div><dt>{name}</dt><dd class="big">{text(value)}</dd><dd>{text(note)}</dd></div>'
        for name, value, note in facts
    )
    return f'<dl class="strip">{items}</dl>'


def _plot(report: Report, slots: dict[str, int]) -> str:
    drawn = dict.fromkeys(row.kind for row in by_kind(report.fused_rows))
    legend = "".join(f'<li class="k{slots[kind]}">{text(kind)}</li>' for kind in drawn)
    low = sum(not has_place(row) for row in top(report.fused_rows, MAX_KERNELS))
    strip = f" Kernels below {LOWEST_INTENSITY} FLOP/B ({low}) stand left of the axis." if low else ""
    roofs = "solid roofs: data sheet" + ("; dashed: measured on this GPU" if report.measured else "")
    figure = roofline_plot(report, max_points=MAX_KERNELS)
    return (
        "<h3>Roofline</h3>"
        '<p class="note">Each point is one fused kernel; its area is its share of the time. '
        "The table of fused kernels below holds the same points.</p>"
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="Roofline plot">{figure}</div>'
        f'<ul class="legend" aria-label="Kernel classes">{legend}</ul>'
        "<figcaption>Nothing was timed for this plot: a point sits on its roof, where a perfect kernel of that "
        f"intensity would run, and names what bounds it ({roofs}).{strip}</figcaption></figure>"
    )


def _comparisons(report: Report, slots: dict[str, int]) -> str:
    parts = [
        f'<h3>Where the time goes</h3><figure><div class="scroll">{time_bars(report)}</div></figure>',
        _compared("Time per class", "class", kinds_compared(report), report, lambda pair: _kind_cell(pair.name, slots)),
    ]
    if report.train:
        phases = phases_compared(report)
        parts.append("<h3>Per phase</h3>")
        parts.append(_compared("Time per phase", "phase", phases, report, lambda pair: f"<td>{text(pair.name)}"))
    parts.append(
        "<h3>Per layer</h3>"
        '<p class="note">In network order. A fused kernel counts in the layer of its main operator.</p>'
    )
    layers = layers_compared(report)
    parts.append(
        _compared("Time per layer", "layer", layers, report, lambda pair: f"<td>{text(pair.name or NO_MODULE)}")
    )
    return "".join(parts)


def _compared(
    caption: str, key_title: str, pairs: tuple[Pair, ...], report: Report, name_cell: Callable[[Pair], str]
) -> str:
    longest_s = max((row.seconds for pair in pairs for row in (pair.unfused, pair.fused) if row), default=0.0)
    columns = (
        Column(key_title, name_cell, textual=True),
        Column("limiter", lambda pair: _limiter(pair.row), textual=True),
        Column("unfused", lambda pair: _time_cell(pair.unfused, longest_s)),
        Column("fused", lambda pair: _time_cell(pair.fused, longest_s)),
        Column(
            "of floor", lambda pair: f"<td>{share_text(pair.fused.seconds, report.floor_s) if pair.fused else ABSENT}"
        ),
        Column("kernels", lambda pair: f"<td>{pair.unfused.calls if pair.unfused else 0}"),
        Column("fused kernels", lambda pair: f"<td>{pair.fused.calls if pair.fused else 0}"),
        Column("FLOPs", lambda pair: f"<td>{count_text(pair.row.flops)}"),
        Column("bytes", lambda pair: f"<td>{bytes_text(pair.unfused)}"),
        Column("fused bytes", lambda pair: f"<td>{bytes_text(pair.fused)}"),
        Column("FLOP/B", lambda pair: f"<td>{intensity_text(pair.row)}"),
    )
    return table(caption, columns, pairs)


def _kernel_table(report: Report, slots: dict[str, int]) -> str:
    """The table twin of the roofline: row i is point i."""
    rows = top(report.fused_rows, MAX_KERNELS)
    longest_s = rows[0].seconds if rows else 0.0
    columns = (
        Column("layer", lambda row: f"<td>{text(row.layer or NO_MODULE)}", textual=True),
        *_phase_columns(report),
        Column("class", lambda row: _kind_cell(row.kind, slots), textual=True),
        Column("time", lambda row: _time_cell(row, longest_s)),
        Column("limiter", _limiter, textual=True),
        Column("FLOPs", lambda row: f"<td>{count_text(row.flops)}"),
        Column("bytes", lambda row: f"<td>{units.nbytes(row.bytes)}"),
        Column("FLOP/B", lambda row: f"<td>{intensity_text(row)}"),
        Column("FLOP/s", lambda row: f"<td>{count_text(row.attainable)}"),
        Column("compute", lambda row: f"<td>{seconds_text(row.compute_s)}"),
        Column("memory", lambda row: f"<td>{seconds_text(row.memory_s)}"),
        Column("waves", lambda row: f"<td>{f'{row.waves:.2f}' if row.tiles else ABSENT}"),
        Column("SM use", lambda row: f"<td>{units.percent(row.wave_efficiency, 0) if row.tiles else ABSENT}"),
        Column("shape", lambda row: f"<td>{text(_shape(row))}", textual=True),
    )
    return (
        "<h3>Fused kernels</h3>"
        '<p class="note">Every pointwise operator, copy and concat is folded into the kernel that makes or takes its '
        "data. Time is the larger of compute and memory; FLOP/s is what that time attains. Waves are output tiles per "
        f"streaming multiprocessor; SM use is the share of SM time they fill.{_cut(report.fused_rows, rows)}</p>"
        + table("fused kernels", columns, rows, style="kernels long")
    )


def _operator_table(report: Report, slots: dict[str, int]) -> str:
    columns = (
        Column("layer", lambda row: f"<td>{text(row.layer or NO_MODULE)}", textual=True),
        *_phase_columns(report),
        Column("operator", lambda row: cell("l", row.op), textual=True),
        Column("class", lambda row: _kind_cell(row.kind, slots), textual=True),
        Column("time", lambda row: f"<td>{seconds_text(row.seconds)}"),
        Column("limiter", _limiter, textual=True),
        Column("FLOPs", lambda row: f"<td>{count_text(row.flops)}"),
        Column("bytes", lambda row: f"<td>{units.nbytes(row.bytes)}"),
        Column("FLOP/B", lambda row: f"<td>{intensity_text(row)}"),
        Column("shape", lambda row: f"<td>{text(_shape(row))}", textual=True),
    )
    longest = {id(row) for row in top(report.rows, MAX_OPERATORS)}
    rows = tuple(row for row in report.rows if id(row) in longest)
    return (
        f"<details><summary>Unfused: {len(report.rows)} operators in the order they run</summary>"
        f'<p class="note">One kernel an operator, as PyTorch runs them.{_cut(report.rows, rows)}</p>'
        + table("operators", columns, rows, style="long")
        + "</details>"
    )


def _phase_columns(report: Report) -> tuple[Column, ...]:
    return (Column("phase", lambda row: cell("l", row.phase), textual=True),) if report.train else ()


def _cut(rows: tuple[Row, ...], shown: tuple[Row, ...]) -> str:
    """What a shortened table leaves out, in words."""
    hidden_s = sum(row.seconds for row in rows) - sum(row.seconds for row in shown)
    hidden = len(rows) - len(shown)
    return f" The {hidden} shortest ({units.seconds(hidden_s)} together) are in --format csv only." if hidden else ""


def _ceilings(report: Report) -> str:
    measured = report.measured or {}
    bandwidth = report.peaks["bandwidth"]
    used = {row.pipe for row in report.fused_rows if row.flops}
    columns = (
        Column("ceiling", lambda name: f"<td>{text(name.replace('_', ' '))}", textual=True),
        Column("data sheet", lambda name: f"<td>{_ceiling(name, report.peaks[name])}"),
        Column("measured", lambda name: f"<td>{_ceiling(name, measured[name]) if name in measured else ABSENT}"),
        Column(
            "ridge, FLOP/B",
            lambda name: f"<td>{count_text(report.peaks[name] / bandwidth) if name in used else ABSENT}",
        ),
    )
    names = [name for name in report.peaks if name in used or name == "bandwidth"]
    source = text(f"{report.gpu}, {report.sm_count} streaming multiprocessors. Source: {report.gpu_source}.")
    return f'<h3>Ceilings</h3><p class="note">{source}</p>{table("Ceilings", columns, names)}'


def _ceiling(name: str, value: float) -> str:
    return units.bandwidth(value) if name == "bandwidth" else units.rate(value)


def _limits(report: Report) -> str:
    if report.unknown:
        names = ", ".join(f"<code>{text(unknown.op)}</code> ({unknown.calls} calls)" for unknown in report.unknown)
        coverage = f"Operators without a cost formula, counted and never guessed: {names}."
    else:
        coverage = "Operators without a cost formula: none."
    return (
        '<h3>What was not looked at</h3><ul class="limits">'
        f"<li>{coverage}</li>"
        "<li>Bytes are compulsory: every input read once and every output written once, from memory. "
        "Kernels that read data again move more.</li>"
        "<li>There is no cache model: data that stays in L2 between kernels can beat the memory bound.</li>"
        "<li>Waves are those of the output tile and the split of the reduction that fill the multiprocessors best: "
        "a real kernel may choose worse.</li>"
        "<li>Nothing ran: launch gaps, clocks, power and overlap between kernels are not in these numbers.</li>"
        "</ul>"
    )


def _reproduce(command: str | None) -> str:
    return f"<h3>How to reproduce</h3><pre><code>{text(command)}</code></pre>" if command else ""


def _kind_cell(kind: str, slots: dict[str, int]) -> str:
    return cell(f"k{slots[kind]}", kind)


def _limiter(row: Row) -> str:
    return cell(row.limiter[0], row.limiter)


def _time_cell(row: Row | None, longest_s: float) -> str:
    """A duration over a bar of its share of the longest."""
    if row is None:
        return f"<td>{ABSENT}"
    return bar_cell(seconds_text(row.seconds), row.seconds / longest_s if longest_s else 0.0)


def _shape(row: Row) -> str:
    return f"{row.calls} of {row.shape}" if row.calls > 1 else row.shape
