"""How much of a run its validation takes, of a script that knows nothing of it: the time in eval mode between steps.

A stretch begins where some module goes into eval mode, and ends where one goes into train mode, or with the next step.
One that a step ends has that step's time in it, which is no validation: so a part that a loop keeps in eval mode, such
as frozen norms, adds next to nothing. Validation without `eval()` is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ridgeline.step_clock import StepClock

_STEPS, _EVAL, _LATE = "steps", "eval", "late"  # late: steps again, and nobody said so before the first was over


class ValidationTime:
    """The stretches of a run that begins now."""

    def __init__(self) -> None:
        self._clock = StepClock(on_gpu=False)
        self._kinds: list[str] = []  # of what begins at each mark of the clock
        self._turn(_STEPS)

    def watch_(self, module: Any) -> None:
        """Replace `train` of the class, `torch.nn.Module`, by one that tells of its calls; `eval` calls it."""
        module.train = _telling(module.train, self.switched)

    def switched(self, training: bool) -> None:
        """A module goes into train mode, or into eval mode."""
        if training == (self._kinds[-1] == _EVAL):
            self._turn(_STEPS if training else _EVAL)

    def stepped(self) -> None:
        """A step ended."""
        if self._kinds[-1] == _EVAL:
            self._turn(_LATE)

    def settings(self, *, step_s: float) -> dict[str, str]:
        """`validations` and, where there are any, `validation_share` of the run that ends now, as `Step.settings`.

        step_s  median time of a step
        """
        self._turn(_STEPS)
        seconds = self._clock.host_seconds()
        stretches_s = [
            max(0.0, length_s - step_s) if after == _LATE else length_s
            for kind, after, length_s in zip(self._kinds, self._kinds[1:], seconds, strict=False)
            if kind == _EVAL
        ]
        found = {"validations": str(len(stretches_s))}
        if stretches_s:
            found["validation_share"] = str(sum(stretches_s) / sum(seconds))
        return found

    def _turn(self, kind: str) -> None:
        self._kinds.append(kind)
        self._clock.mark()


def _telling(train: Callable[..., Any], told: Callable[[bool], object]) -> Callable[..., Any]:
    @functools.wraps(train)
    def telling(module: Any, mode: bool = True) -> Any:
        # traced by torch.compile this is the `train` that it was: a clock would break the graph
        if not torch.compiler.is_compiling():
            told(bool(mode))
        return train(module, mode)

    return telling
