"""The log-log frame of a roofline plot as SVG: axes, grid, and the roofs over them. Coordinates are SVG user units."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from ridgeline import units
from ridgeline.report import one_line

WIDTH, HEIGHT = 1040, 500
LEFT, RIGHT, TOP, BOTTOM = 62, 8, 34, 54
# Copies and the like have no place on a logarithmic axis: below this intensity, kernels get a strip left of it.
LOWEST_INTENSITY = 0.1  # FLOP/B
STRIP = 36


@dataclass(frozen=True)
class Place:
    """Where a kernel stands: FLOP/B across, FLOP/s up."""

    intensity: float
    rate: float

    @property
    def inside(self) -> bool:
        """Whether it stands on the plot proper and not in the strip."""
        return self.intensity >= LOWEST_INTENSITY and self.rate > 0


@dataclass(frozen=True)
class Axes:
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


def axes_for(places: Sequence[Place], peaks: Mapping[str, float], pipes: Sequence[str]) -> Axes:
    """A frame that shows every place, the ridges of `pipes`, and enough of the slope to tell a roofline by."""
    working = [place for place in places if place.inside]
    levels = [peaks[pipe] for pipe in pipes] or [peaks["bandwidth"]]
    ridges = [peak / peaks["bandwidth"] for peak in levels]
    intensities = [place.intensity for place in working] or ridges
    # at least a decade and a half of slope, else a report without memory-bound kernels would show no roofline
    low, high = min(*intensities, *ridges, max(ridges) / 15) / 2, max(max(intensities) * 2, max(ridges) * 8)
    rates = [place.rate for place in working]
    bottom = min([*rates, low * peaks["bandwidth"]]) / 1.5
    left = LEFT if all(place.inside for place in places) else LEFT + STRIP
    return Axes(left, (low, high), (bottom, max([*rates, *levels]) * 2))


def positions(places: Sequence[Place], axes: Axes) -> Iterator[tuple[float, float]]:
    """x and y of every place; those without intensity stand in the strip, evenly spaced from the bottom."""
    idle_step = (HEIGHT - BOTTOM - TOP) / (sum(not place.inside for place in places) + 1)
    idle_y = float(HEIGHT - BOTTOM)
    for place in places:
        if place.inside:
            yield axes.x(place.intensity), axes.y(place.rate)
        else:
            idle_y -= idle_step
            yield LEFT + STRIP / 2, idle_y


def radius(seconds: float, longest_s: float) -> float:
    """Of a dot whose area is its share of the time, but large enough to be hit."""
    return max(13 * math.sqrt(seconds / longest_s), 2.2) if longest_s else 2.2


def fastest_first(used: Iterable[str], peaks: Mapping[str, float]) -> list[str]:
    """The pipes among `used` that have a peak, each once; of equal ones, the first used stays first."""
    return sorted((pipe for pipe in dict.fromkeys(used) if pipe in peaks), key=lambda pipe: -peaks[pipe])


def grid(axes: Axes, rate_title: str) -> Iterator[str]:
    """Lines, axes and their titles; `rate_title` is that of the upward axis."""
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
    yield f'<text x="0" y="{TOP - 18}">{_text(rate_title)}</text></g>'


def roof_set(
    ceilings: Mapping[str, float],
    pipes: Collection[str],
    axes: Axes,
    style: str,
    label: Callable[[str], str],
    *,
    above: bool,
) -> Iterator[str]:
    """The slanted bandwidth roof and one flat roof for each distinct peak, notes `above` or below the lines."""
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


def ridges(peaks: Mapping[str, float], pipes: Collection[str], axes: Axes) -> Iterator[str]:
    """Where each flat roof meets the slope."""
    for index, peak in enumerate(_levels(peaks, pipes)):
        ridge = peak / peaks["bandwidth"]
        x = axes.x(ridge)
        # one line of text lower for each further ridge: neighbours may be close
        y = HEIGHT - BOTTOM - 10 - 17 * index
        yield f'<path class="ridge" d="M{x:.1f} {axes.y(peak):.1f}V{HEIGHT - BOTTOM}"/>'
        yield f'<circle class="ridge" cx="{x:.1f}" cy="{axes.y(peak):.1f}" r="4"/>'
        yield f'<text class="note" x="{x + 6:.1f}" y="{y}">ridge {units.si(ridge, "FLOP/B")}</text>'


def _levels(ceilings: Mapping[str, float], pipes: Collection[str]) -> list[float]:
    """Distinct peaks, highest first: pipes of equal speed share a roof."""
    return sorted({ceilings[pipe] for pipe in pipes}, reverse=True)


def _decades(bounds: tuple[float, float]) -> list[float]:
    low, high = bounds
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _minor_ticks(axes: Axes, bottom: float) -> str:
    low, high = axes.intensity_range
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    values = (digit * 10.0**power for power in powers for digit in range(2, 10))
    return "".join(f"M{axes.x(value):.1f} {bottom}v4" for value in values if low <= value <= high)


def _text(text: str) -> str:
    return escape(one_line(text))
