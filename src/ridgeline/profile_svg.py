"""The roofline of a profile as hand-written SVG: every dot is a kernel group at the rate that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ridgeline import units
from ridgeline.profile_record import Point, Profile
from ridgeline.report import one_line
from ridgeline.roofline_axes import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
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
from ridgeline.text_cut import cut

# Categories that keep their colour from profile to profile, as report_svg has them. Other categories borrow the
# colours this profile has no use for, last first. 0 is grey.
_FIXED_SLOTS = {
    "conv": 1,
    "layout": 2,
    "copy": 3,
    "gemm": 4,
    "attention": 5,
    "norm": 6,
    "pointwise": 7,
    "reduction": 8,
    "optimizer": 9,
}
UNCLASSED = "unknown"
_DIM = 1e-3  # of the points' time: the smallest kernels of a step run at a millionth of the peak
_SPOKEN_NAME = 60  # characters of a kernel's name that a tooltip and a screen reader need


def category_slots(profile: Profile) -> dict[str, int]:
    """The colour slot (0 to 9) of every category, most time first; late comers share slot 0."""
    seconds: dict[str, float] = {}
    for row in profile.by_name:
        seconds[row.category] = seconds.get(row.category, 0.0) + row.total_s
    for lane in profile.timeline:
        if lane.stream >= 0:  # the others are gaps, drawn without a colour
            seconds.setdefault(lane.category, 0.0)
    order = sorted(seconds, key=lambda name: -seconds[name])
    taken = {_FIXED_SLOTS[name] for name in order if name in _FIXED_SLOTS}
    free = [slot for slot in _FIXED_SLOTS.values() if slot not in taken]
    slots = {UNCLASSED: 0}
    for name in order:
        slots[name] = _FIXED_SLOTS[name] if name in _FIXED_SLOTS else free.pop() if free else 0
    slots[UNCLASSED] = 0
    return slots


def point_categories(profile: Profile) -> dict[str, str]:
    """Category by a point's name, which is a kernel's name alone or with its shapes."""
    named = {row.name: row.category for row in profile.by_name}
    return named | {f"{row.name} {row.shapes}".strip(): row.category for row in profile.kernels}


def place(point: Point) -> Place:
    """Where a point stands: its intensity, and the rate it was measured at; 0 where it moves or takes nothing."""
    intensity = point.flops / point.bytes if point.bytes > 0 else 0.0
    return Place(intensity, point.flops / point.seconds if point.seconds > 0 else 0.0)


def has_roofs(profile: Profile) -> bool:
    """Whether there is a roof to draw: a profile of an unknown GPU has none."""
    return profile.peaks.get("bandwidth", 0.0) > 0


def of_roof(point: Point, peaks: Mapping[str, float]) -> float | None:
    """Roofline time over measured time; None without the ceilings. Above 1: the ceiling is not this kernel's."""
    if point.seconds <= 0 or not (peaks.get("bandwidth", 0.0) > 0 and peaks.get(point.pipe, 0.0) > 0):
        return None
    return max(point.flops / peaks[point.pipe], point.bytes / peaks["bandwidth"]) / point.seconds


def dim_points(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Points on the plot proper of so little time that they must not stretch the axes: they may stand on its edge."""
    total_s = sum(point.seconds for point in points)
    return tuple(point for point in points if place(point).inside and point.seconds < _DIM * total_s)


def roofline_plot(profile: Profile, points: tuple[Point, ...]) -> str:
    """Log-log roofline with one dot a point, in the order given. The profile must have roofs."""
    peaks = {pipe: peak for pipe, peak in profile.peaks.items() if peak > 0}
    pipes = fastest_first((point.pipe for point in points if point.pipe != "bandwidth"), peaks)
    dim = frozenset(dim_points(points))
    telling = [place(point) for point in points if point not in dim]
    axes = axes_for(telling or [place(point) for point in points], peaks, pipes)
    style, kind = ("measured", "measured ") if profile.peaks_measured else ("sheet", "")
    parts = [
        f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
        f'aria-label="Roofline of {_text(profile.subject)} on {_text(profile.gpu)}, one point per kernel and shape">',
        *grid(axes, "measured FLOP/s"),
        *roof_set(peaks, pipes, axes, style, lambda pipe: kind + pipe.replace("_", " "), above=True),
        *ridges(peaks, pipes, axes),
        '<g class="points">',
        *_dots(profile, points, axes),
        "</g></svg>",
    ]
    return "\n".join(parts)


def _dots(profile: Profile, points: tuple[Point, ...], axes: Axes) -> list[str]:
    slots, categories = category_slots(profile), point_categories(profile)
    places = [place(point) for point in points]
    longest_s = max((point.seconds for point in points), default=0.0)
    dots = []
    for point, at, (x, y) in zip(points, places, positions(places, axes), strict=True):
        if at.inside:
            x, y = min(max(x, axes.left), WIDTH - RIGHT), min(max(y, TOP), HEIGHT - BOTTOM)
        slot = slots[categories.get(point.name, UNCLASSED)]
        spoken = (
            f"{cut(point.name, _SPOKEN_NAME, 'middle')}, {units.si(at.intensity, 'FLOP/B')}, {units.rate(at.rate)}, "
            f"{units.seconds(point.seconds)}"
        )
        dots.append(
            f'<circle class="k{slot}" cx="{x:.1f}" cy="{y:.1f}" r="{radius(point.seconds, longest_s):.1f}" '
            f'tabindex="0" role="img"><title>{_text(spoken)}</title></circle>'
        )
    return dots


def _text(text: str) -> str:
    return escape(one_line(text))
