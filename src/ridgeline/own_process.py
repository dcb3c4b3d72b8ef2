"""Call a function in a fresh process within a time budget: what it leaves, breaks or hangs stays there.

Several may prepare side by side and then work one at a time: see `in_turn`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError

_LONGEST_S = 24 * 3600  # the system's wait takes no number of any size

T = TypeVar("T")


class OverBudget(RidgelineError):
    """A call took longer than it was given (exit 1)."""

    exit_code = 1


Wait = Callable[[], None]


class Apart(Generic[T]):
    """`work(wait)` in a process of its own, which is over when this is closed; `work` and its result must pickle.

    `work` calls `wait()` once it is prepared, and goes on when `result` is asked for. It has `budget_s` seconds until
    it waits, and as many from there on. Raises UsageError for no such time.
    """

    def __init__(self, work: Callable[[Wait], T], *, budget_s: float) -> None:
        check_budget(budget_s)
        self._budget_s = budget_s
        self._rang = False  # its time was up
        self._answer: Any = None
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_send, args=(theirs, work))
        self._child.start()
        theirs.close()
        self._alarm = self._set_alarm()

    def prepare(self) -> None:
        """Return when `work` waits or is over, with whatever result; a second call does nothing."""
        if self._answer is not None:
            return
        try:
            self._answer = self._pipe.recv()
        except EOFError:
            self._child.join()
            text = f"its process ended with exit code {self._child.exitcode}: what it said on stderr tells why"
            late = OverBudget(f"given up after {self._budget_s:g} s: raise the budget")
            self._answer = (_FAILED, late if self._rang else EnvironmentUnusable(text))
        self._alarm.cancel()

    def result(self) -> T:
        """What `work` returns.

        Raises the RidgelineError that it raises, EnvironmentUnusable where the process ends in any other way (its
        stderr, which is this one's, says why), OverBudget when its time is up.
        """
        self.prepare()
        if self._answer[0] == _WAITS:
            self._answer, self._alarm = None, self._set_alarm()
            # of a process that has ended meanwhile the answer says so
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
            self.prepare()
        kind, answer = self._answer
        if kind == _FAILED:
            raise answer
        return answer

    def close(self) -> None:
        self._alarm.cancel()
        self._child.kill()
        self._child.join()
        self._pipe.close()

    def _set_alarm(self) -> threading.Timer:
        alarm = threading.Timer(self._budget_s, self._ring)
        alarm.daemon = True
        alarm.start()
        return alarm

    def _ring(self) -> None:
        # what waits for its turn is not late, only not asked yet
        if not self._pipe.poll():
            self._rang = True
            self._child.kill()


def call_apart(work: Callable[[], T], *, budget_s: float) -> T:
    """What `work()` returns in a process of its own, which is over afterwards: `Apart` without a wait."""
    call = Apart(partial(_without_waiting, work), budget_s=budget_s)
    try:
        return call.result()
    finally:
        call.close()


def in_turn(works: Sequence[Callable[[Wait], T]], *, budget_s: float, at_once: int = 1) -> Iterator[T | RidgelineError]:
    """What each of `works` returns or raises, in their order, of processes as in `Apart`.

    `at_once` of them prepare side by side. When all of these wait or are over, they go on one at a time.
    """
    check_budget(budget_s)
    if at_once < 1:
        raise UsageError(f"at least 1 must prepare at once, got {at_once}")
    for start in range(0, len(works), at_once):
        calls = [Apart(work, budget_s=budget_s) for work in works[start : start + at_once]]
        try:
            for call in calls:
                call.prepare()
            for call in calls:
                try:
                    yield call.result()
                except RidgelineError as error:
                    yield error
        finally:
            for call in calls:
                call.close()


def check_budget(budget_s: float) -> None:
    """Raise UsageError for what is no time to wait."""
    if not 0 < budget_s <= _LONGEST_S:
        raise UsageError(f"a budget must be more than 0 s and at most a day, got {budget_s:g} s")


_WAITS, _DONE, _FAILED = "waits", "done", "failed"


def _without_waiting(work: Callable[[], T], _wait: Wait) -> T:
    return work()


def _send(pipe: Connection, work: Callable[[Wait], object]) -> None:
    """The child's side. A refusal is an answer; any other exception ends the process with its traceback."""

    def wait() -> None:
        pipe.send((_WAITS, None))
        pipe.recv()

    try:
        answer = (_DONE, work(wait))
    except RidgelineError as error:
        answer = (_FAILED, error)
    pipe.send(answer)
