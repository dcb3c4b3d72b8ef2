"""The roofline plot and the time bars as hand-written SVG, coloured by the page's CSS variables.

Both figures are well-formed XML, need no script and no font of their own; coordinates are SVG user units.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ridgeline import units
from ridgeline.report import NO_MODULE, Report, Row, by_kind, one_line, top
from ridgeline.roofline_axes import (
    HEIGHT,
    WIDTH,
    Axes,
    Place,
    axes_for,
    fastest_first,
    grid,
    positions,
    radius,
    ridges,
    roof_set,
)

BAR_LEFT = 84

# Kinds that keep their colour from report to report. Other kinds borrow the colours this report has no use for, last
# first, because the first are the ones a second report on the same page will show. 0 is grey.
_FIXED_SLOTS = {
    "conv3x3": 1,
    "conv1x1": 2,
    "depthwise": 3,
    "matmul": 4,
    "attention": 5,
    "norm": 6,
    "pointwise": 7,
    "concat": 8,
    "pool": 9,
}


def kind_slots(report: Report) -> dict[str, int]:
    """The colour slot (0 to 9) of every kind in the report, fused kernels first; late comers share slot 0."""
    kinds = dict.fromkeys(row.kind for row in by_kind(report.fused_rows) + by_kind(report.rows))
    taken = {_FIXED_SLOTS[kind] for kind in kinds if kind in _FIXED_SLOTS}
    free = [slot for slot in _FIXED_SLOTS.values() if slot not in taken]
    return {kind: _FIXED_SLOTS[kind] if kind in _FIXED_SLOTS else (free.pop() if free else 0) for kind in kinds}


def roofline_plot(report: Report, *, max_points: int = 600) -> str:
    """Log-log roofline: data sheet roofs solid, measured ones dashed, one dot a fused kernel, longest first.

    A static report has no measured times, so every dot sits on its roof at (intensity, attainable FLOP/s).
    """
    kernels = top(report.fused_rows, max_points)
    pipes = fastest_first((row.pipe for row in report.fused_rows if row.flops), report.peaks)
    axes = axes_for(list(map(_place, kernels)), report.peaks, pipes)
    slots = kind_slots(report)
    parts = [
        f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
        f'aria-label="Roofline of {_text(report.subject)} on {_text(report.gpu)}, one point per fused kernel">',
        *grid(axes, "attainable FLOP/s"),
        *_roofs(report, axes, pipes),
        '<g class="points">',
        *_points(kernels, axes, slots),
        "</g></svg>",
    ]
    return "\n".join(parts)


def has_place(row: Row) -> bool:
    """Whether a kernel stands on the plot proper and not in the strip."""
    return _place(row).inside


def time_bars(report: Report) -> str:
    """Where the time goes by kind: the unfused sum above the fused floor, on one scale."""
    slots = kind_slots(report)
    order = [row.kind for row in by_kind(report.rows + report.fused_rows)]
    bars = (("unfused", report.rows, report.unfused_s), ("fused", report.fused_rows, report.floor_s))
    longest_s = max(report.unfused_s, report.floor_s) or 1.0
    parts = [
        f'<svg class="bars" viewBox="0 0 {WIDTH} 108" role="group" '
        f'aria-label="Roofline time of {_text(report.subject)} by kind, unfused and fused">'
    ]
    for index, (name, rows, total_s) in enumerate(bars):
        y = 4 + 54 * index
        parts.append(f'<text x="0" y="{y + 18}" class="strong">{name}</text>')
        parts.append(f'<text x="0" y="{y + 35}">{units.seconds(total_s)}</text>')
        segments = {row.kind: row for row in by_kind(rows)}
        x = float(BAR_LEFT)
        for row in (segments[kind] for kind in order if kind in segments):
            width = row.seconds / longest_s * (WIDTH - BAR_LEFT)
            parts.append(_segment(row, x, y, width, slots[row.kind], row.seconds / total_s if total_s else 0.0))
            x += width
    parts.append("</svg>")
    return "\n".join(parts)


def _segment(row: Row, x: float, y: float, width: float, slot: int, share: float) -> str:
    label = f"{row.kind}: {units.seconds(row.seconds)}, {units.percent(share)}"
    # a pixel of air between neighbours keeps them apart for readers who cannot tell the colours apart
    rect = f'<rect class="k{slot}" x="{x:.1f}" y="{y}" width="{max(width - 1, 0.4):.1f}" height="44"/>'
    name = _text(row.kind)
    inside = f'<text x="{x + 8:.1f}" y="{y + 27}">{name}</text>' if width > 7 * len(row.kind) + 16 else ""
    return f'<g role="img" aria-label="{_text(label)}"><title>{_text(label)}</title>{rect}{inside}</g>'


def _place(row: Row) -> Place:
    return Place(row.intensity, row.attainable)


def _roofs(report: Report, axes: Axes, pipes: list[str]) -> Iterator[str]:
    yield from roof_set(report.peaks, pipes, axes, "sheet", lambda pipe: pipe.replace("_", " "), above=True)
    if report.measured and "bandwidth" in report.measured:
        known = [pipe for pipe in pipes if pipe in report.measured]
        yield from roof_set(report.measured, known, axes, "measured", lambda _: "measured", above=False)
    yield from ridges(report.peaks, pipes, axes)


def _points(kernels: tuple[Row, ...], axes: Axes, slots: dict[str, int]) -> Iterator[str]:
    longest_s = kernels[0].seconds if kernels else 0.0
    for row, (x, y) in zip(kernels, positions(list(map(_place, kernels)), axes), strict=True):
        yield (
            f'<circle class="k{slots[row.kind]}" cx="{x:.1f}" cy="{y:.1f}" r="{radius(row.seconds, longest_s):.1f}" '
            f'tabindex="0" role="img"><title>{_text(_spoken(row))}</title></circle>'
        )


def _spoken(row: Row) -> str:
    """What a tooltip and a screen reader say of a kernel."""
    # the end of a module path tells more than its start
    layer = row.layer or NO_MODULE
    layer = layer if len(layer) <= 48 else "…" + layer[-47:]
    return (
        f"{layer} {row.kind}, {units.si(row.intensity, 'FLOP/B')}, {units.rate(row.attainable)}, "
        f"{units.seconds(row.seconds)}, {row.limiter}"
    )


def _text(text: str) -> str:
    return escape(one_line(text))
