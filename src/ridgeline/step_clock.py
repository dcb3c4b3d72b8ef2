"""The clock of a loop that somebody else runs: what passes between marks, without making the loop wait.

With a GPU a mark is an event in its queue, so the intervals are those of the GPU's own timeline; the host may be ahead.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StepClock:
    """Marks on the current stream of the current GPU where `on_gpu`, else on the host alone."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._events: list[torch.cuda.Event] = []
        self._host_s: list[float] = []

    def mark(self) -> None:
        """A step ends here."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._host_s.append(time.perf_counter())

    def host_seconds(self) -> list[float]:
        """Intervals between marks as the host saw them."""
        return [after - before for before, after in pairwise(self._host_s)]

    def seconds(self) -> list[float]:
        """Intervals between marks: the GPU's, for which this waits, else the host's."""
        if not self._events:
            return self.host_seconds()
        self._events[-1].synchronize()
        # elapsed_time counts milliseconds
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
