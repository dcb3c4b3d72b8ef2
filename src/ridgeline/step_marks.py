"""Marks at the end of a loop's steps. Nobody listens outside of a profile, and a mark then costs one call."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[], object]

_listeners: list[Listener] = []  # of this process; `ridgeline profile` puts one here


def mark_step() -> None:
    """Say that a step of the loop ends here.

    For loops in which no `torch.optim` optimizer steps: inference, or an optimizer inside a CUDA graph. Where it is
    called, marks alone tell steps apart. It may end the process, as `ridgeline profile` does once it has seen enough.
    """
    for listener in _listeners:
        listener()


def listen(listener: Listener) -> None:
    """Call `listener` at each mark from now on."""
    _listeners.append(listener)
