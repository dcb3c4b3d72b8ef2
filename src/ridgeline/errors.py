"""Refusals: one sentence each, with the exit code the command line returns for it."""


class RidgelineError(Exception):
    """A refusal. `str(error)` is one sentence with the offending value and the way out."""

    exit_code = 2


class UsageError(RidgelineError):
    """A wrong argument or unreadable input (exit 2)."""


class EnvironmentUnusable(RidgelineError):
    """The machine lacks what the request needs, or a trace is incomplete (exit 3)."""

    exit_code = 3


class VerificationFailed(RidgelineError):
    """Numbers left their allowed error (exit 4)."""

    exit_code = 4


class NotEngaged(RidgelineError):
    """Something was requested and could not be put to work (exit 5)."""

    exit_code = 5
