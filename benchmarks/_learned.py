"""What recipes learned: their final validation losses, held against each other, as a table.

A recipe is as good as another where their mean losses, over the seeds that both have, differ by no more than the
other's own seeds do, from the lowest to the highest. The range, not the standard deviation: of two draws of three
normal losses each, the means differ by more than the deviation of one draw in 35 % of cases, by more than its range in
14 %. Seeds that give both recipes the same weights and images make that rarer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ridgeline import units
from ridgeline.text_tables import Column, Section, terminal

PLAIN = "eager"  # what others are held against
PAIR = ("fp8", "bf16")  # held against each other too
PAIR_LIMIT = 0.005  # of the loss
MIN_SEEDS = 3  # fewer say nothing of a spread


@dataclass(frozen=True)
class Point:
    """One validation: losses of the averaged weights and of the weights, and seconds of training up to there."""

    recipe: str
    seed: int
    step: int
    val_loss: float
    val_loss_without_ema: float
    train_s: float


@dataclass(frozen=True)
class Learned:
    """What a recipe came to: final losses by seed, and seconds of training of a run."""

    recipe: str
    losses: Mapping[int, float]
    train_s: float

    @property
    def mean(self) -> float:
        return mean(self.losses.values())

    @property
    def spread(self) -> float:
        """Between the best and the worst seed."""
        return max(self.losses.values()) - min(self.losses.values())


def learned(points: Iterable[Point], steps: int) -> dict[str, Learned]:
    """What each recipe came to after all steps, in the order of first appearance; unfinished runs are left out."""
    final: dict[str, list[Point]] = {}
    for point in points:
        if point.step == steps:
            final.setdefault(point.recipe, []).append(point)
    return {
        name: Learned(name, {p.seed: p.val_loss for p in found}, mean(p.train_s for p in found))
        for name, found in final.items()
    }


def pairs(one: Learned | None, other: Learned | None) -> list[tuple[float, float]]:
    """The losses of two recipes at the seeds that both have."""
    if one is None or other is None:
        return []
    return [(loss, other.losses[seed]) for seed, loss in sorted(one.losses.items()) if seed in other.losses]


def difference(losses: Sequence[tuple[float, float]]) -> float:
    """Of the first's mean to the second's, as a share of the second's."""
    return mean(mine for mine, _ in losses) / mean(theirs for _, theirs in losses) - 1


def verdict(recipe: Learned, plain: Learned | None) -> str:
    """Whether a recipe learns what the plain one learns."""
    both = pairs(recipe, plain)
    if plain is None or len(both) < MIN_SEEDS:
        return _too_few(len(both))
    share = difference(both)
    if abs(share) <= plain.spread / plain.mean:
        return "yes"
    return "no, worse" if share > 0 else "no, better"


def pair_verdict(one: Learned | None, other: Learned | None) -> str:
    """Whether the mean losses of two recipes are within `PAIR_LIMIT` of each other."""
    both = pairs(one, other)
    if len(both) < MIN_SEEDS:
        return _too_few(len(both))
    share = difference(both)
    return f"{'yes' if abs(share) <= PAIR_LIMIT else 'no'} ({_percent(share)})"


def table(points: Iterable[Point], steps: int, title: str) -> str:
    """Final losses of each recipe beside the plain one's, for a terminal."""
    found = learned(points, steps)
    plain = found.get(PLAIN)

    def to_plain(one: Learned) -> str:
        both = pairs(one, plain)
        return _percent(difference(both)) if both and one is not plain else ""

    def by_seed(one: Learned) -> str:
        shares = sorted(mine / theirs - 1 for mine, theirs in pairs(one, plain))
        return f"{_percent(shares[0])} to {_percent(shares[-1])}" if shares and one is not plain else ""

    def in_spreads(one: Learned) -> str:
        both = pairs(one, plain)
        if plain is None or one is plain or not both or not plain.spread:
            return ""
        return f"{difference(both) * plain.mean / plain.spread:+.2f}"

    columns = (
        Column("recipe", lambda one: one.recipe, numeric=False),
        Column("seeds", lambda one: str(len(one.losses))),
        Column("final loss", lambda one: f"{one.mean:.6f}"),
        Column("spread", lambda one: f"{one.spread:.6f}"),
        Column(f"to {PLAIN}", to_plain),
        Column("in its spreads", in_spreads),
        Column("seed by seed", by_seed, rank=1),
        Column(f"as {PLAIN}", lambda one: "" if one is plain else verdict(one, plain), numeric=False),
        Column("training", lambda one: units.seconds(one.train_s)),
    )
    note = f"{PAIR[0]} within {units.percent(PAIR_LIMIT)} of {PAIR[1]}: {pair_verdict(*map(found.get, PAIR))}"
    return terminal((), [Section(title, columns, tuple(found.values()), note)], bold="", width=None, color=None).strip()


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _too_few(seeds: int) -> str:
    return f"too few seeds ({seeds} of {MIN_SEEDS})"
