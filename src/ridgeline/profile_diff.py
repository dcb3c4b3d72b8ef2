"""Two profiles of one thing side by side: what differs, by how much, and whether the spread allows to say so.

A figure differs only where its two intervals do not overlap. The wall's interval are the quartiles of its unprofiled
steps. A kernel row's are those of one launch, as a normal spread of its sigma has them, times the launches: clocks move
all launches of a step together. One launch has no spread, so nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ridgeline import units
from ridgeline.errors import UsageError
from ridgeline.profile_record import KernelRow, Profile, WallTime
from ridgeline.profile_summary import duration
from ridgeline.report import ABSENT

QUARTILE_SIGMAS = 0.6745  # half of a normal distribution lies within so many sigma of its mean

Interval = tuple[float, float]


@dataclass(frozen=True)
class Change:
    """One figure of both profiles, in seconds; a side is None where that profile does not have it."""

    name: str
    before_s: float | None
    after_s: float | None
    before_range: Interval | None = None
    after_range: Interval | None = None
    before_count: int = 0  # launches; 0 for a figure that counts none
    after_count: int = 0

    @property
    def delta_s(self) -> float:
        """Seconds gained (negative) or lost; a side that is missing counts as no time."""
        return (self.after_s or 0.0) - (self.before_s or 0.0)

    @property
    def ratio(self) -> float | None:
        """After over before; None where there is no time to compare with."""
        return self.after_s / self.before_s if self.before_s and self.after_s is not None else None

    @property
    def differs(self) -> bool | None:
        """Whether the intervals lie apart; None: unknown. A kernel that one side never launches does differ."""
        if self.before_count != self.after_count and 0 in (self.before_count, self.after_count):
            return True
        if self.before_range is None or self.after_range is None:
            return None
        return self.before_range[1] < self.after_range[0] or self.after_range[1] < self.before_range[0]


@dataclass(frozen=True)
class Setting:
    """One line of the environment that is not equal."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Diff:
    """What changed from one profile to another. The lists are sorted by the seconds that moved, most first."""

    subject: str
    settings: tuple[Setting, ...]
    totals: tuple[Change, ...]  # wall, step, busy, idle, idle by cause, copies, overlap
    categories: tuple[Change, ...]
    names: tuple[Change, ...]
    kernels: tuple[Change, ...]  # by name and shapes


def diff_profiles(before: Profile, after: Profile, *, allow_unlike: bool = False) -> Diff:
    """Compare two profiles. Raises UsageError for those of different GPUs or subjects, unless `allow_unlike`."""
    for what, first, second in (("GPU", before.gpu, after.gpu), ("subject", before.subject, after.subject)):
        if first != second and not allow_unlike:
            raise UsageError(
                f"the profiles are not of one {what}: {first!r} and {second!r}; "
                "profile both alike, or allow it with --unlike (allow_unlike=True)"
            )
    return Diff(
        subject=before.subject if before.subject == after.subject else f"{before.subject} and {after.subject}",
        settings=_settings(before, after),
        totals=_totals(before, after),
        categories=_grouped(before, after, lambda row: row.category),
        names=_grouped(before, after, lambda row: row.name),
        kernels=_grouped(before, after, lambda row: f"{row.name} {row.shapes}".strip()),
    )


def verdict(change: Change) -> str:
    """In a word: "faster", "slower", "same" (the intervals overlap), "new", "gone", "?" (no spread is known)."""
    if change.before_s is None or change.after_s is None:
        return "new" if change.before_s is None else "gone"
    if change.differs is None:
        return "?"
    if not change.differs or change.delta_s == 0:
        return "same"
    return "slower" if change.delta_s > 0 else "faster"


def change_text(change: Change) -> str:
    """`"+4.92 ms (+10.0 %)"`, the sign included."""
    delta = f"{'+' if change.delta_s > 0 else ''}{duration(change.delta_s)}"
    if change.ratio is None:
        return delta
    share = change.ratio - 1
    return f"{delta} ({'+' if share > 0 else ''}{units.percent(share)})"


def interval_text(interval: Interval | None) -> str:
    return f"{duration(interval[0])} to {duration(interval[1])}" if interval else ABSENT


def _settings(before: Profile, after: Profile) -> tuple[Setting, ...]:
    first = {
        "subject": before.subject,
        "GPU": before.gpu,
        "ceilings of": before.ceilings_gpu or before.gpu,
        "command": before.command,
        **before.environment,
    }
    second = {
        "subject": after.subject,
        "GPU": after.gpu,
        "ceilings of": after.ceilings_gpu or after.gpu,
        "command": after.command,
        **after.environment,
    }
    names = dict.fromkeys([*first, *second])
    pairs = ((name, first.get(name, ABSENT), second.get(name, ABSENT)) for name in names)
    return tuple(Setting(name, old, new) for name, old, new in pairs if old != new)


def _totals(before: Profile, after: Profile) -> tuple[Change, ...]:
    causes = dict.fromkeys([*before.idle, *after.idle])
    rows = [
        Change("wall", _median(before.wall), _median(after.wall), _quartiles(before.wall), _quartiles(after.wall)),
        Change("step", before.traced_step_s, after.traced_step_s),
        Change("busy", before.busy_s, after.busy_s),
        Change("idle", sum(before.idle.values()), sum(after.idle.values())),
        *(Change(f"idle:{cause}", before.idle.get(cause, 0.0), after.idle.get(cause, 0.0)) for cause in causes),
        Change("copies", sum(row.total_s for row in before.copies), sum(row.total_s for row in after.copies)),
        Change("overlap", before.overlap_s, after.overlap_s),
    ]
    return tuple(rows)


def _grouped(before: Profile, after: Profile, key: Callable[[KernelRow], str]) -> tuple[Change, ...]:
    first, second = _groups(before.kernels, key), _groups(after.kernels, key)
    changes = []
    for name in dict.fromkeys([*first, *second]):
        old, new = first.get(name, []), second.get(name, [])
        changes.append(
            Change(
                name,
                _total_s(old),
                _total_s(new),
                _range(old),
                _range(new),
                sum(row.count for row in old),
                sum(row.count for row in new),
            )
        )
    return tuple(sorted(changes, key=lambda change: -abs(change.delta_s)))


def _groups(rows: Iterable[KernelRow], key: Callable[[KernelRow], str]) -> dict[str, list[KernelRow]]:
    groups: dict[str, list[KernelRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _total_s(rows: list[KernelRow]) -> float | None:
    return sum(row.total_s for row in rows) if rows else None


def _range(rows: list[KernelRow]) -> Interval | None:
    """Sum of the rows' intervals; None where a row of a single launch holds more than half of the time."""
    total_s = sum(row.total_s for row in rows)
    if not rows or sum(row.total_s for row in rows if row.count == 1) > total_s / 2:
        return None
    half_s = sum(QUARTILE_SIGMAS * row.sigma_s * row.count for row in rows)
    return max(total_s - half_s, 0.0), total_s + half_s


def _median(wall: WallTime | None) -> float | None:
    return wall.median_s if wall else None


def _quartiles(wall: WallTime | None) -> Interval | None:
    return (wall.low_s, wall.high_s) if wall else None
