"""Ctrl-C as a question that a loop asks between its steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT has come, so that a step is never cut in two; a second SIGINT interrupts at once.

    Outside the main thread, which alone may handle signals, it never has.
    """
    has_come = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def handle(_number: int, _frame: object) -> None:
        nonlocal has_come
        has_come = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: has_come
    finally:
        signal.signal(signal.SIGINT, before)
