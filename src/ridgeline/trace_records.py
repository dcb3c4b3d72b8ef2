"""Rows that a reader gathered as the records of `trace`.

A large trace makes records by the million. The constructor of a frozen dataclass sets each field by a call; here the
fields go into an instance of an equal class that is not frozen, which then changes its class: 1.2 µs for an Activity of
15 fields, where its own constructor takes 5.8 µs (Python 3.11, a Xeon at 2.5 GHz under load).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

from ridgeline.trace import Activity, Call, Launch, Range, SyncEdge

# start_us, duration_us, number, name, thread, fixed: what recurs from step to step, then counters; sorts by start
Row = tuple[Any, ...]
T = TypeVar("T")


def maker(record: type[T]) -> Callable[..., T]:
    """A function like the constructor of `record`, a frozen dataclass with slots; it takes its fields by position."""
    members = [(f.name, f.type, field(default=f.default)) for f in fields(record)]  # pyright: ignore[reportArgumentType]
    open_record = make_dataclass(record.__name__, members, slots=True)  # pyright: ignore[reportArgumentType]

    def make(*values: object) -> T:
        made = open_record(*values)
        made.__class__ = record  # allowed between classes with the same slots
        return made  # pyright: ignore[reportReturnType]

    return make


activity = maker(Activity)
call = maker(Call)
launch = maker(Launch)
range_ = maker(Range)

# These replace the rows one by one, because both at once would fill the memory.


def activities(rows: list[Any], first_us: float) -> tuple[Activity, ...]:
    """`fixed` is kind, device, stream, then an Activity's fields from `grid` on; the counter is its correlation."""
    for i, (start_us, duration_us, number, name, _, fixed, correlation) in enumerate(rows):
        kind, device, stream, *rest = fixed
        start_s, duration_s = round(start_us - first_us, 3) / 1e6, duration_us / 1e6
        rows[i] = activity(number, kind, name, start_s, duration_s, device, stream, correlation, *rest)
    return tuple(rows)


def calls(rows: list[Any], first_us: float) -> tuple[Call, ...]:
    """`fixed` is a Call's fields from `shapes` on; the counters are its external id, sequence and forward thread."""
    for i, (start_us, duration_us, number, name, thread, fixed, *counters) in enumerate(rows):
        start_s, duration_s = round(start_us - first_us, 3) / 1e6, duration_us / 1e6
        rows[i] = call(number, name, start_s, duration_s, thread, *counters, *fixed)
    return tuple(rows)


def launches(rows: list[Any], first_us: float) -> tuple[Launch, ...]:
    """The counters are correlation and external id."""
    for i, (start_us, duration_us, number, name, thread, _, *counters) in enumerate(rows):
        rows[i] = launch(number, name, round(start_us - first_us, 3) / 1e6, duration_us / 1e6, thread, *counters)
    return tuple(rows)


def ranges(rows: list[Any], first_us: float) -> tuple[Range, ...]:
    for i, (start_us, duration_us, number, name, thread, _) in enumerate(rows):
        rows[i] = range_(number, name, round(start_us - first_us, 3) / 1e6, duration_us / 1e6, thread)
    return tuple(rows)


def syncs(rows: list[Any], first_us: float) -> tuple[SyncEdge, ...]:
    """`fixed` is the kind alone; the counter is the correlation."""
    return tuple(
        SyncEdge(number, kind, round(start_us - first_us, 3) / 1e6, duration_us / 1e6, correlation)
        for start_us, duration_us, number, _, _, (kind,), correlation in rows
    )
