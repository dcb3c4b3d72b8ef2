"""A step's timeline as compact JSON for the page's canvas: whole nanoseconds, names said once."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ridgeline.profile_record import Lane, Profile
from ridgeline.profile_svg import category_slots
from ridgeline.report import one_line
from ridgeline.text_cut import cut

MAX_LANES = 6500  # at about 14 characters each; a page is to stay under 500 KB
MAX_NAME = 120
IDLE_ROW = "idle"
_NANOSECOND = 1e-9


@dataclass(frozen=True)
class Timeline:
    """What the page draws, and how much of the step it had to leave out."""

    json: str  # safe inside a <script> element, which it cannot end
    lanes: int
    rows: int
    hidden: int
    hidden_s: float


def timeline(profile: Profile) -> Timeline:
    """One row a stream, the busiest first, then one of idle gaps (lanes of a negative stream).

    Of each lane the row lists three numbers: nanoseconds since the start of the one before it, its duration, the
    index of its name. Beyond MAX_LANES the shortest are left out.
    """
    ordered = sorted(profile.timeline, key=lambda lane: -lane.duration_s)
    shown, hidden = ordered[:MAX_LANES], ordered[MAX_LANES:]
    slots = category_slots(profile)
    names: dict[tuple[str, str], int] = {}
    rows = [(title, _packed(lanes, names)) for title, lanes in _rows(shown)]
    categories = list(dict.fromkeys(category for _, category in names))
    data = {
        "end": _ns(max([profile.traced_step_s, *(lane.start_s + lane.duration_s for lane in shown)])),
        "categories": [[one_line(name), slots.get(name, 0)] for name in categories],
        "names": [[one_line(cut(name, MAX_NAME, "middle")), categories.index(category)] for name, category in names],
        "rows": rows,
    }
    # "</script>" in a name would end the element, and "<!--" with "<script" hide its end
    text = re.sub(r"<(?=[/!s])", r"\\u003c", json.dumps(data, separators=(",", ":")), flags=re.IGNORECASE)
    return Timeline(text, len(shown), len(rows), len(hidden), sum(lane.duration_s for lane in hidden))


def _rows(lanes: list[Lane]) -> list[tuple[str, list[Lane]]]:
    by_stream: dict[int, list[Lane]] = {}
    for lane in lanes:
        by_stream.setdefault(max(lane.stream, -1), []).append(lane)
    idle = by_stream.pop(-1, [])
    busiest = sorted(by_stream, key=lambda stream: -sum(lane.duration_s for lane in by_stream[stream]))
    rows = [(f"stream {stream}", by_stream[stream]) for stream in busiest]
    return rows + ([(IDLE_ROW, idle)] if idle else [])


def _packed(lanes: list[Lane], names: dict[tuple[str, str], int]) -> list[int]:
    numbers: list[int] = []
    before_ns = 0
    for lane in sorted(lanes, key=lambda lane: lane.start_s):
        start_ns = _ns(lane.start_s)
        name = names.setdefault((lane.name, lane.category), len(names))
        numbers += [start_ns - before_ns, _ns(lane.duration_s), name]
        before_ns = start_ns
    return numbers


def _ns(seconds: float) -> int:
    return round(seconds / _NANOSECOND)
