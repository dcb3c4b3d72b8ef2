"""Counters of a step's FP8 tensors, looked at now and then without waiting: which layers had better return to bf16.

Every `review_every` steps the totals of `fp8_scaling.DelayedScaling` are copied to the host; a later step, when they
have come, compares what was counted since the last look with limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.fp8_scaling import DelayedScaling
from ridgeline.kernels._scale_fp8 import TOTALS


@dataclass(frozen=True)
class Fp8Limits:
    """What may be counted of a tensor between two reviews; a layer that exceeds one returns to bf16.

    review_every     steps from one review to the next
    overflow_share   of its elements that saturated
    underflow_share  of its elements that were not zero and became zero
    nonfinite_share  of its steps that found an infinite or NaN magnitude
    """

    review_every: int = 500
    overflow_share: float = 0.01
    underflow_share: float = 0.25
    nonfinite_share: float = 0.01

    def __post_init__(self) -> None:
        if self.review_every < 1:
            raise UsageError(f"Fp8Limits: review_every must be at least 1 step, got {self.review_every}")
        for name in ("overflow_share", "underflow_share", "nonfinite_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"Fp8Limits: {name} must lie between 0 and 1, got {getattr(self, name)}")


class Review:
    """Reads the totals of `scaling`: call `look_` before each step, `note_step` after it.

    What is counted before the first window of steps has passed, while scales find their size, is not judged.
    """

    def __init__(self, scaling: DelayedScaling, limits: Fp8Limits) -> None:
        self._scaling, self._limits = scaling, limits
        self._totals = dict(scaling.named_tensors())["totals"]
        self.begin()

    def begin(self) -> None:
        """Start anew, as after other totals were loaded."""
        self._before: Tensor | None = None
        self._read: tuple[Tensor, torch.cuda.Event | torch.Event | None] | None = None
        self._steps_left = self._scaling.rule.window

    def note_step(self) -> None:
        self._steps_left -= 1

    def look_(self) -> dict[str, str]:
        """The tensors beyond a limit, each with the figures; empty while nothing has been read. Does not wait."""
        if self._read is None:
            if self._steps_left <= 0:
                self._steps_left = self._limits.review_every
                self._read = _start_reading(self._totals)
            return {}
        totals, event = self._read
        if event is not None and not event.query():
            return {}
        before, self._before, self._read = self._before, totals, None
        # totals that fell were put back, as `verify` does
        return {} if before is None else dict(self._beyond((totals - before).clamp(min=0).tolist()))

    def _beyond(self, counted: list[list[int]]) -> Iterator[tuple[str, str]]:
        limits = self._limits
        for name, row in zip(self._scaling.formats, counted, strict=True):
            overflows, underflows, elements, nonfinite, updates = row
            for words, part, whole, limit in (
                ("of its elements saturated", overflows, elements, limits.overflow_share),
                ("of its elements vanished", underflows, elements, limits.underflow_share),
                ("of its steps were not finite", nonfinite, updates, limits.nonfinite_share),
            ):
                if whole and part / whole > limit:
                    yield name, f"{part / whole:.3g} {words} in {updates} steps, and {limit:.3g} may"
                    break


def _start_reading(totals: Tensor) -> tuple[Tensor, torch.cuda.Event | torch.Event | None]:
    """A copy on the host, and what says when it is there."""
    assert totals.shape[1] == len(TOTALS)
    if not totals.is_cuda:
        return totals.clone(), None
    host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
    host.copy_(totals, non_blocking=True)
    return host, torch.cuda.current_stream(totals.device).record_event()
