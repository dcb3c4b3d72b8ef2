"""What a user names as MODEL: a built-in network, `package.module:callable` or `file.py:callable`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models import MODELS


def _noise_loss(module: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(module(x, t).float(), torch.randn_like(x))


LOSSES: dict[str, Callable[..., Tensor]] = {"ddpm-cifar10": _noise_loss}


@dataclass(frozen=True)
class Target:
    """A module with example inputs; `loss(module, *inputs)` gives the scalar to train on, None when none was named."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None = None


def resolve(text: str, *, batch: int | None = None) -> Target:
    """Build the module that `text` names.

    A callable returns `(module, inputs)` or `(module, inputs, loss)`; `inputs` is a tensor or a tuple of tensors.
    `batch` is passed on when the callable takes an argument of that name, and refused otherwise.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"--batch must be at least 1, got {batch}")
    if text in MODELS:
        built = MODELS[text]() if batch is None else MODELS[text](batch)
        return _target(text, (*built, LOSSES[text]) if text in LOSSES else built)
    if ":" not in text:
        raise UsageError(
            f"unknown model {text!r}: built in are {', '.join(MODELS)}; "
            f"name your own as package.module:callable or file.py:callable"
        )
    where, _, attribute = text.rpartition(":")
    builder = getattr(_import(where, text), attribute, None)
    if not callable(builder):
        raise UsageError(f"{text}: {where} has no callable named {attribute!r}")
    if batch is None:
        return _target(text, builder())
    if "batch" not in inspect.signature(builder).parameters:
        raise UsageError(f"{text}: {attribute} takes no argument named 'batch', so --batch {batch} cannot be applied")
    return _target(text, builder(batch=batch))


def _import(where: str, text: str) -> object:
    if not where.endswith(".py"):
        try:
            # a package beside the caller's working directory is what `python -m` would find
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise UsageError(f"{text}: cannot import {where}: {error}") from error
        finally:
            sys.path.remove(str(Path.cwd()))
    path = Path(where)
    if not path.is_file():
        raise UsageError(f"{text}: no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module


def _target(name: str, built: object) -> Target:
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise UsageError(
            f"{name}: the callable must return (module, inputs) or (module, inputs, loss), got {_kind(built)}"
        )
    module, inputs, *rest = built
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name}: the first value returned must be a torch.nn.Module, got {_kind(module)}")
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise UsageError(f"{name}: the inputs returned must be tensors, got {', '.join(map(_kind, inputs)) or 'none'}")
    if rest and not callable(rest[0]):
        raise UsageError(f"{name}: the third value returned must be a callable loss, got {_kind(rest[0])}")
    return Target(name, module, tuple(inputs), rest[0] if rest else None)


def _kind(value: object) -> str:
    return type(value).__name__
