"""Which of many nested stretches of host time were open at a moment: operators, ranges, Python frames by thread."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

# Kineto rounds to nanoseconds, so a child may seem to outlive its parent by one
_ROUNDING_S = 2e-9


class Stretch(Protocol):
    """What `Nesting` needs of an event; `trace.Call` and `trace.Range` have it."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def thread(self) -> int: ...


T = TypeVar("T", bound=Stretch)


class Nesting(Generic[T]):
    """Properly nested events of every thread, for questions about moments and about each other."""

    def __init__(self, events: Iterable[T]) -> None:
        by_thread: defaultdict[int, list[T]] = defaultdict(list)
        for event in events:
            by_thread[event.thread].append(event)
        self._events: dict[int, list[T]] = {}
        self._starts: dict[int, list[float]] = {}
        self._parents: dict[int, list[int]] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by id(): where an event stands
        for thread, own in by_thread.items():
            own.sort(key=lambda event: (event.start_s, -event.end_s))
            self._events[thread] = own
            self._starts[thread] = [event.start_s for event in own]
            self._parents[thread] = _parents(own)
            self._places.update((id(event), (thread, place)) for place, event in enumerate(own))

    def around(self, thread: int, moment_s: float) -> Iterator[T]:
        """The events open at a moment, the innermost first."""
        place = bisect_right(self._starts.get(thread, ()), moment_s) - 1
        return self._open(thread, place, moment_s)

    def enclosing(self, event: T) -> Iterator[T]:
        """The event itself, then those around it, the innermost first. Raises KeyError for an event not given."""
        thread, place = self._places[id(event)]
        while place >= 0:
            yield self._events[thread][place]
            place = self._parents[thread][place]

    def _open(self, thread: int, place: int, moment_s: float) -> Iterator[T]:
        while place >= 0:
            event = self._events[thread][place]
            if event.end_s + _ROUNDING_S >= moment_s:
                yield event
            place = self._parents[thread][place]


def _parents(events: list[T]) -> list[int]:
    """For each event in order of start the place of the innermost one that is open around it, -1 for none."""
    parents: list[int] = []
    stack: list[int] = []
    for place, event in enumerate(events):
        while stack and events[stack[-1]].end_s + _ROUNDING_S < event.end_s:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(place)
    return parents
