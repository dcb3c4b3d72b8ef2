"""What callers pass as a module's inputs, checked where it comes in."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ridgeline.errors import UsageError


def tensors(inputs: Any, *, of: str) -> tuple[Tensor, ...]:
    """A tensor, or those of a tuple or list, as a tuple. Raises UsageError, which begins with `of`, for all else."""
    given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    if not given:
        raise UsageError(f"{of}: the module's inputs are needed, at least one tensor, got none")
    if not all(isinstance(value, Tensor) for value in given):
        kinds = ", ".join(type(value).__name__ for value in given)
        raise UsageError(f"{of}: inputs must be a tensor or a tuple of tensors, got {kinds}")
    return given


def check_fit(module: nn.Module, inputs: tuple[Tensor, ...], *, of: str) -> None:
    """Raise UsageError, which begins with `of`, for another number of inputs than the module's forward pass takes."""
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # compiled code that does not tell
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise UsageError(
            f"{of}: {type(module).__name__} is called with {signature}, and got {len(inputs)} inputs: {error}"
        ) from error
