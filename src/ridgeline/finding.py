"""Finding: what is slow, what to do, what that saves (with an interval), what it rests on, and when it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

EFFORTS = ("S", "M", "L")  # a flag or a line; an edit; a kernel or a restructuring
CONFIDENCES = ("measured", "modelled", "bound", "unknown")


@dataclass(frozen=True)
class Saving:
    """Seconds a step, from least to most; each is capped by the time in which nothing else runs."""

    low_s: float
    mid_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.low_s <= self.mid_s <= self.high_s and math.isfinite(self.high_s)):
            raise ValueError(f"Saving: 0 <= low <= mid <= high expected, got {self.low_s}, {self.mid_s}, {self.high_s}")


@dataclass(frozen=True)
class Edit:
    """What the fix changes in the step: `explain` replays it to see what is left for the other findings."""

    seconds: Mapping[int, float] = field(default_factory=dict)  # new duration by activity id; 0 removes it
    gaps: Mapping[int, float] = field(default_factory=dict)  # new duration by index in Step.gaps


@dataclass(frozen=True)
class Finding:
    """One diagnosis. `rule` is its stable id in the catalogue ("H5", "L1"), sortable and citable."""

    rule: str
    title: str  # one line: what is the case, with its number
    fix: str  # one or two sentences: what to do
    verb: str  # the ridgeline call or command that does it, "" where there is none
    saving: Saving | None  # None: the rule can name the problem but not its worth
    effort: str
    confidence: str
    wrong_if: str
    evidence: tuple[int, ...]  # event ids in the trace, the largest first, at most 20
    source: str = ""  # file:line, where known
    edit: Edit = Edit()
    note: str = ""  # how the numbers came about
    within: str = ""  # the rule whose saving counts this one's too: two sides of one thing

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS or self.confidence not in CONFIDENCES:
            raise ValueError(
                f"Finding {self.rule}: effort {self.effort!r} or confidence {self.confidence!r} is unknown"
            )


@dataclass(frozen=True)
class Abstention:
    """A rule that could not look, and what it would need."""

    rule: str
    reason: str
