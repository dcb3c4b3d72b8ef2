"""Call a function in a fresh process within a time budget: what it leaves, breaks or hangs stays there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError

_LONGEST_S = 24 * 3600  # the system's wait takes no number of any size

T = TypeVar("T")


class OverBudget(RidgelineError):
    """A call took longer than it was given (exit 1)."""

    exit_code = 1


def call_apart(work: Callable[[], T], *, budget_s: float) -> T:
    """What `work()` returns in a process of its own, which is over afterwards; `work` and its result must pickle.

    Raises the RidgelineError that `work` raises, EnvironmentUnusable where the process ends in any other way (its
    stderr, which is this one's, says why), OverBudget after `budget_s` seconds, UsageError for no such time.
    """
    check_budget(budget_s)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(theirs, work))
    child.start()
    theirs.close()
    try:
        if not ours.poll(budget_s):
            raise OverBudget(f"given up after {budget_s:g} s: raise the budget")
        answer = ours.recv()
    except EOFError as error:
        child.join()
        raise EnvironmentUnusable(
            f"its process ended with exit code {child.exitcode}: what it said on stderr tells why"
        ) from error
    finally:
        child.kill()
        child.join()
    if isinstance(answer, RidgelineError):
        raise answer
    return answer


def check_budget(budget_s: float) -> None:
    """Raise UsageError for what is no time to wait."""
    if not 0 < budget_s <= _LONGEST_S:
        raise UsageError(f"a budget must be more than 0 s and at most a day, got {budget_s:g} s")


def _send(pipe: Connection, work: Callable[[], object]) -> None:
    """The child's side. A refusal is an answer; any other exception ends the process with its traceback."""
    try:
        answer = work()
    except RidgelineError as error:
        answer = error
    pipe.send(answer)
