"""Marks at the end of a loop's steps. Nobody listens outside of a profile, and a mark then costs one call."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[], object]

_listeners: list[Listener] = []  # of this process; `ridgeline profile` puts one here
_of_steps: list[Listener] = []  # likewise, of steps that this project took


def mark_step() -> None:
    """Say that a step of the loop ends here.

    For loops in which neither a `torch.optim` optimizer nor a `compile_step` steps: inference, or an optimizer inside a
    CUDA graph of somebody else's. Where it is called, marks alone tell steps apart. It may end the process, as
    `ridgeline profile` does once it has seen enough.
    """
    for listener in _listeners:
        listener()


def step_taken() -> None:
    """Say that a `TrainStep` took a step, whose optimizer nobody sees step where it is inside a CUDA graph."""
    for listener in _of_steps:
        listener()


def listen(listener: Listener, *, steps: Listener) -> None:
    """Call `listener` at each mark from now on, and `steps` at each step taken."""
    _listeners.append(listener)
    _of_steps.append(steps)
