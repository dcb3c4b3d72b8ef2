"""Import a module of the package when it is first asked for; without Triton, which kernels need, that is refused."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ridgeline.errors import EnvironmentUnusable


def late_import(name: str) -> ModuleType:
    """The module `name`. Raises EnvironmentUnusable where it needs Triton and there is none."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise EnvironmentUnusable(
            "this needs kernels, and Triton cannot be imported: pip install triton, which exists for Linux; "
            "rooflines, explain and detection in plain PyTorch work without it"
        ) from error
