"""The roofline plot and the time bars as hand-written SVG, coloured by the page's CSS variables.

Both figures are well-formed XML, need no script and no font of their own; coordinates are SVG user units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from ridgeline import units
from ridgeline.report import NO_MODULE, Report, Row, by_kind, one_line, top

WIDTH, HEIGHT = 1040, 500
LEFT, RIGHT, TOP, BOTTOM = 62, 8, 34, 54
# Copies and the like have no place on a logarithmic axis: below this intensity, kernels get a strip left of it.
LOWEST_INTENSITY = 0.1  # FLOP/B
STRIP = 36
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
    axes = _axes(report, kernels)
    slots = kind_slots(report)
    parts = [
        f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
        f'aria-label="Roofline of {_text(report.subject)} on {_text(report.gpu)}, one point per fused kernel">',
        *_grid(axes),
        *_roofs(report, axes),
        '<g class="points">',
        *_points(kernels, axes, slots),
        "</g></svg>",
    ]
    return "\n".join(parts)


def has_place(row: Row) -> bool:
    """Whether a kernel stands on the plot proper and not in the strip."""
    return row.intensity >= LOWEST_INTENSITY and row.attainable > 0


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


@dataclass(frozen=True)
class _Axes:
    """Log-log frame: intensity in FLOP/B across, FLOP/s up."""

    left: float
    intensity_range: tuple[float, float]
    rate_range: tuple[float, float]

    def x(self, intensity: float) -> float:
        low, high = map(math.log10, self.intensity_range)
        return self.left + (math.log10(intensity) - low) / (high - low) * (WIDTH - RIGHT - self.left)

    def y(self, rate: float) -> float:
        low, high = map(math.log10, self.rate_range)
        return HEIGHT - BOTTOM - (math.log10(rate) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)


def _axes(report: Report, kernels: tuple[Row, ...]) -> _Axes:
    working = [row for row in kernels if has_place(row)]
    peaks = [report.peaks[pipe] for pipe in _pipes(report)] or [report.peaks["bandwidth"]]
    ridges = [peak / report.peaks["bandwidth"] for peak in peaks]
    intensities = [row.intensity for row in working] or ridges
    # at least a decade and a half of slope, else a report without memory-bound kernels would show no roofline
    low, high = min(*intensities, *ridges, max(ridges) / 15) / 2, max(max(intensities) * 2, max(ridges) * 8)
    rates = [row.attainable for row in working]
    bottom = min([*rates, low * report.peaks["bandwidth"]]) / 1.5
    left = LEFT if all(map(has_place, kernels)) else LEFT + STRIP
    return _Axes(left, (low, high), (bottom, max([*rates, *peaks]) * 2))


def _pipes(report: Report) -> list[str]:
    """Pipes the fused kernels use and the data sheet knows, fastest first."""
    used = dict.fromkeys(row.pipe for row in report.fused_rows if row.flops and row.pipe in report.peaks)
    return sorted(used, key=lambda pipe: -report.peaks[pipe])


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield '<g class="grid">'
    for value in _decades(axes.intensity_range):
        yield f'<path d="M{axes.x(value):.1f} {TOP}V{bottom}"/>'
    for value in _decades(axes.rate_range):
        yield f'<path d="M{axes.left} {axes.y(value):.1f}H{right}"/>'
    yield "</g>"
    yield f'<path class="axis" d="M{axes.left} {TOP}V{bottom}H{right}{_minor_ticks(axes, bottom)}"/>'
    yield '<g class="ticks">'
    for value in _decades(axes.intensity_range):
        label = f"{value:g}" if value < 1 else units.si(value, "", 1).strip()
        yield f'<text x="{axes.x(value):.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>'
    for value in _decades(axes.rate_range):
        label = units.si(value, "", 1)
        yield f'<text x="{LEFT - 10}" y="{axes.y(value) + 4:.1f}" text-anchor="end">{label}</text>'
    middle = (axes.left + right) / 2
    yield f'<text x="{middle:.0f}" y="{bottom + 42}" text-anchor="middle">arithmetic intensity, FLOP per byte</text>'
    if axes.left > LEFT:
        yield f'<text x="{LEFT + STRIP / 2:.0f}" y="{bottom + 20}" text-anchor="middle">&lt;{LOWEST_INTENSITY}</text>'
        yield f'<rect class="strip" x="{LEFT}" y="{TOP}" width="{STRIP - 6}" height="{bottom - TOP}"/>'
    yield f'<text x="0" y="{TOP - 18}">attainable FLOP/s</text></g>'


def _decades(bounds: tuple[float, float]) -> list[float]:
    low, high = bounds
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _minor_ticks(axes: _Axes, bottom: float) -> str:
    low, high = axes.intensity_range
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    values = (digit * 10.0**power for power in powers for digit in range(2, 10))
    return "".join(f"M{axes.x(value):.1f} {bottom}v4" for value in values if low <= value <= high)


def _roofs(report: Report, axes: _Axes) -> Iterator[str]:
    pipes = _pipes(report)
    yield from _roof_set(report.peaks, pipes, axes, "sheet", lambda pipe: pipe.replace("_", " "), above=True)
    if report.measured and "bandwidth" in report.measured:
        known = [pipe for pipe in pipes if pipe in report.measured]
        yield from _roof_set(report.measured, known, axes, "measured", lambda _: "measured", above=False)
    for index, peak in enumerate(_levels(report.peaks, pipes)):
        ridge = peak / report.peaks["bandwidth"]
        x = axes.x(ridge)
        # one line of text lower for each further ridge: neighbours may be close
        y = HEIGHT - BOTTOM - 10 - 17 * index
        yield f'<path class="ridge" d="M{x:.1f} {axes.y(peak):.1f}V{HEIGHT - BOTTOM}"/>'
        yield f'<circle class="ridge" cx="{x:.1f}" cy="{axes.y(peak):.1f}" r="4"/>'
        yield f'<text class="note" x="{x + 6:.1f}" y="{y}">ridge {units.si(ridge, "FLOP/B")}</text>'


def _roof_set(
    ceilings: dict[str, float],
    pipes: list[str],
    axes: _Axes,
    style: str,
    label: Callable[[str], str],
    *,
    above: bool,
) -> Iterator[str]:
    """The slanted bandwidth roof and one flat roof for each distinct peak."""
    bandwidth = ceilings["bandwidth"]
    levels = _levels(ceilings, pipes)
    low, high = axes.intensity_range
    start = max(low, axes.rate_range[0] / bandwidth)
    summit = min(levels[0] / bandwidth if levels else high, high)
    path = f"M{axes.x(start):.1f} {axes.y(start * bandwidth):.1f}L{axes.x(summit):.1f} {axes.y(summit * bandwidth):.1f}"
    for peak in levels:
        path += f"M{axes.x(peak / bandwidth):.1f} {axes.y(peak):.1f}H{WIDTH - RIGHT}"
    yield f'<path class="roof {style}" d="{path}"/>'
    for peak in levels:
        names = ", ".join(dict.fromkeys(label(pipe) for pipe in pipes if ceilings[pipe] == peak))
        y = axes.y(peak) + (-17 if above else 20)
        text = _text(f"{names} {units.rate(peak)}")
        yield f'<text class="note" x="{WIDTH - RIGHT}" y="{y:.1f}" text-anchor="end">{text}</text>'
    # the middle of the longest stretch between ridges keeps the label clear of the flat roofs
    stops = [start, *(peak / bandwidth for peak in reversed(levels) if start < peak / bandwidth < summit), summit]
    first, last = max(pairwise(stops), key=lambda stretch: stretch[1] / stretch[0])
    middle = math.sqrt(first * last)
    x, y = axes.x(middle), axes.y(middle * bandwidth)
    run, rise = axes.x(summit) - axes.x(start), axes.y(start * bandwidth) - axes.y(summit * bandwidth)
    turn = math.degrees(math.atan2(rise, run))
    prefix = "memory" if above else "measured"
    yield (
        f'<text class="note" transform="translate({x:.1f} {y:.1f}) rotate({-turn:.1f})" y="{-18 if above else 26}" '
        f'text-anchor="middle">{prefix} {units.bandwidth(bandwidth)}</text>'
    )


def _levels(ceilings: dict[str, float], pipes: list[str]) -> list[float]:
    """Distinct peaks, highest first: pipes of equal speed share a roof."""
    return sorted({ceilings[pipe] for pipe in pipes}, reverse=True)


def _points(kernels: tuple[Row, ...], axes: _Axes, slots: dict[str, int]) -> Iterator[str]:
    longest_s = kernels[0].seconds if kernels else 0.0
    idle_step = (HEIGHT - BOTTOM - TOP) / (sum(not has_place(row) for row in kernels) + 1)
    idle_y = HEIGHT - BOTTOM
    for row in kernels:
        if has_place(row):
            x, y = axes.x(row.intensity), axes.y(row.attainable)
        else:
            idle_y -= idle_step
            x, y = LEFT + STRIP / 2, idle_y
        radius = max(13 * math.sqrt(row.seconds / longest_s), 2.2) if longest_s else 2.2
        yield (
            f'<circle class="k{slots[row.kind]}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" tabindex="0" role="img">'
            f"<title>{_text(_spoken(row))}</title></circle>"
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
