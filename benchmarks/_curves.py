"""Validation losses over training steps as a hand-written SVG that stands alone, readable on light and dark grounds.

Two panels: the losses, and how far they are from the mean of one recipe, in percent, which is where recipes can be told
apart. A thin line is a seed, a thick one with dots the mean of those that have come so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import mean

Curve = Sequence[tuple[int, float]]  # (step, loss), by step
Runs = Mapping[str, Mapping[int, Curve]]  # by recipe and seed

WIDTH, MARGIN, LEFT = 1040, 24, 84
HEAD, PANEL, GAP, FOOT = 104, 300, 62, 46  # heights above the first panel, of a panel, between panels, and below
# colour slots of report.css, and dashes for those who cannot tell colours apart
STYLES = ((0, ""), (2, "9 4"), (4, "2 4"), (3, "12 3 2 3"), (6, "5 2"), (5, ""), (1, "9 4"), (8, "2 4"))
LEAST_SHARE = 0.5  # percent either way that the lower panel shows at least
LETTER = 7.6  # width of a legend letter

_CSS = """
svg { min-width: 0; width: auto; }
.curve { fill: none; stroke: var(--k); stroke-width: 2.4; stroke-linejoin: round; }
.seed { fill: none; stroke: var(--k); stroke-width: 1; opacity: .55; }
.zero { stroke: var(--soft); stroke-width: 1; }
"""


@dataclass(frozen=True)
class Panel:
    """A frame: steps across, values up, `scale` makes a value what is drawn in equal parts."""

    top: float
    steps: tuple[int, int]
    values: tuple[float, float]
    scale: Callable[[float], float] = float

    def x(self, step: float) -> float:
        first, last = self.steps
        return LEFT + (step - first) / (last - first) * (WIDTH - MARGIN - LEFT)

    def y(self, value: float) -> float:
        low, high = map(self.scale, self.values)
        return self.top + PANEL - (self.scale(value) - low) / (high - low) * PANEL


def picture(runs: Runs, *, plain: str, title: str) -> str:
    """The curves as a file's text; the lower panel is left out where `plain`, its zero, has no runs."""
    means = {recipe: mean_curve(seeds) for recipe, seeds in runs.items()}
    last = max((step for curve in means.values() for step, _ in curve), default=1)
    shares = (
        {recipe: {seed: share_of(c, means[plain]) for seed, c in seeds.items()} for recipe, seeds in runs.items()}
        if plain in means
        else {}
    )
    panels = [*_losses(runs, means, last), *_shares(shares, last, plain)]
    height = HEAD + PANEL + (GAP + PANEL if shares else 0) + FOOT
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    style = files("ridgeline").joinpath("assets", "report.css").read_text(encoding="utf-8")
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(title)}</title>",
            f"<style>{escape(style + _CSS, quote=False)}</style>",
            f'<rect width="{WIDTH}" height="{height}" style="fill: var(--surface)"/>',
            f'<text class="strong" x="{MARGIN}" y="34" style="font-size: 16px">{escape(title)}</text>',
            *_legend(runs),
            *panels,
            f'<text x="{WIDTH - MARGIN}" y="{height - 12}" text-anchor="end">step</text>',
            "</svg>\n",
        )
    )


def mean_curve(seeds: Mapping[int, Curve]) -> Curve:
    """The mean of the seeds at each step that one of them has."""
    by_step: dict[int, list[float]] = {}
    for curve in seeds.values():
        for step, loss in curve:
            by_step.setdefault(step, []).append(loss)
    return [(step, mean(losses)) for step, losses in sorted(by_step.items())]


def share_of(curve: Curve, zero: Curve) -> Curve:
    """How far a curve is from another, in percent of that, at the steps that both have."""
    losses = dict(zero)
    return [(step, 100 * (loss / losses[step] - 1)) for step, loss in curve if step in losses]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two, about so many."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * n for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _losses(runs: Runs, means: Mapping[str, Curve], last: int) -> Iterator[str]:
    values = [loss for seeds in runs.values() for curve in seeds.values() for _, loss in curve]
    panel = Panel(HEAD, (0, last), (min(values) / 1.02, max(values) * 1.02), math.log)
    yield from _frame(panel, ticks(*panel.values), "validation loss of the averaged weights", "{:g}")
    yield from _curves(runs, means, panel, "{:.5f}")


def _shares(shares: Runs, last: int, plain: str) -> Iterator[str]:
    if not shares:
        return
    largest = max(
        (abs(value) for seeds in shares.values() for curve in seeds.values() for _, value in curve), default=0
    )
    edge = max(LEAST_SHARE, 1.05 * largest)
    panel = Panel(HEAD + PANEL + GAP, (0, last), (-edge, edge))
    yield from _frame(panel, ticks(-edge, edge), f"difference to the mean of {plain}, %", "{:+g}")
    zero = panel.y(0)
    yield f'<path class="zero" d="M{LEFT} {zero:.1f}H{WIDTH - MARGIN}"/>'
    yield from _curves(shares, {recipe: mean_curve(seeds) for recipe, seeds in shares.items()}, panel, "{:+.2f} %")


def _frame(panel: Panel, levels: Sequence[float], caption: str, number: str) -> Iterator[str]:
    bottom = panel.top + PANEL
    yield f'<text class="strong" x="{LEFT}" y="{panel.top - 10:.0f}">{escape(caption)}</text>'
    yield '<g class="grid">'
    for level in levels:
        yield f'<path d="M{LEFT} {panel.y(level):.1f}H{WIDTH - MARGIN}"/>'
    for step in ticks(*panel.steps):
        yield f'<path d="M{panel.x(step):.1f} {panel.top}V{bottom}"/>'
    yield "</g>"
    for level in levels:
        text = number.format(round(level, 10)) if level else "0"
        yield f'<text x="{LEFT - 8}" y="{panel.y(level) + 4:.1f}" text-anchor="end">{text}</text>'
    for step in ticks(*panel.steps):
        yield f'<text x="{panel.x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step:,.0f}</text>'


def _curves(runs: Runs, means: Mapping[str, Curve], panel: Panel, number: str) -> Iterator[str]:
    for index, (recipe, seeds) in enumerate(runs.items()):
        slot, dashes = STYLES[index % len(STYLES)]
        for seed, curve in seeds.items():
            if curve:
                said = f"{_text(recipe)}, seed {seed}"
                yield f'<path class="k{slot} seed" d="{_path(curve, panel)}"><title>{said}</title></path>'
        if not means[recipe]:
            continue
        step, value = means[recipe][-1]
        said = f"{_text(recipe)}, mean of {_count(seeds)}: {number.format(value)} at step {step:,}"
        yield f'<g role="img" aria-label="{said}"><title>{said}</title>'
        yield f'<path class="k{slot} curve" stroke-dasharray="{dashes}" d="{_path(means[recipe], panel)}"/>'
        for step, value in means[recipe]:
            yield f'<circle class="k{slot}" cx="{panel.x(step):.1f}" cy="{panel.y(value):.1f}" r="3"/>'
        yield "</g>"


def _path(curve: Curve, panel: Panel) -> str:
    return "M" + "L".join(f"{panel.x(step):.1f} {panel.y(value):.1f}" for step, value in curve)


def _legend(runs: Runs) -> Iterator[str]:
    x, y = float(LEFT), 62
    for index, (recipe, seeds) in enumerate(runs.items()):
        slot, dashes = STYLES[index % len(STYLES)]
        label = f"{recipe}, {_count(seeds)}"
        yield f'<path class="k{slot} curve" stroke-dasharray="{dashes}" d="M{x:.0f} {y - 4}h34"/>'
        yield f'<text x="{x + 42:.0f}" y="{y}">{_text(label)}</text>'
        x += 72 + LETTER * len(label)


def _count(seeds: Mapping[int, Curve]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def _text(text: str) -> str:
    return escape(text)
