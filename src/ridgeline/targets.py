"""What a user names as MODEL: a built-in network, `package.module:callable` or `file.py:callable`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models import DETECTOR_INPUT_PIXELS, MODELS, YOLO26_NAMES, build
from ridgeline.models.yolo26 import YOLO26


def _noise_loss(module: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(module(x, t).float(), torch.randn_like(x))


def _raw_heads_loss(module: nn.Module, x: Tensor) -> Tensor:
    """Stands in for the detector's loss: what comes before it is the same, assigning targets is not costed."""
    assert isinstance(module, YOLO26)
    features = module.features(x)
    raw = [maps for head in module.heads for maps in module.detect.raw(features, head)]
    return torch.stack([maps.float().square().mean() for maps in raw]).sum()


@dataclass(frozen=True)
class Target:
    """A module with example inputs; `loss(module, *inputs)` gives the scalar to train on, None when none was named."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None = None


def resolve(text: str, *, batch: int | None = None, train: bool = False) -> Target:
    """Build the module that `text` names.

    A callable returns `(module, inputs)` or `(module, inputs, loss)`; `inputs` is a tensor or a tuple of tensors.
    `batch` is passed on when the callable takes an argument of that name, and refused otherwise. `train` asks a
    built-in detector for its training form: both heads, batch norms in place. An exception inside the callable passes.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"--batch must be at least 1, got {batch}")
    if text in MODELS:
        return _built_in(text, batch, train)
    where, _, attribute = text.rpartition(":")
    if not where or not attribute:
        raise UsageError(
            f"unknown model {text!r}: built in are {', '.join(MODELS)}; "
            f"name your own as package.module:callable or file.py:callable"
        )
    # what `python file.py` and `python -m package.module` would find
    folder = str(Path(where).resolve().parent if where.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        builder = getattr(_import(where, text), attribute, None)
        if not callable(builder):
            raise UsageError(f"{text}: {where} has no callable named {attribute!r}")
        return _target(text, builder(**_arguments(builder, batch, text)))
    finally:
        sys.path.remove(folder)


def _built_in(name: str, batch: int | None, train: bool) -> Target:
    if train and name in YOLO26_NAMES:
        images = torch.zeros((batch or 1, 3, DETECTOR_INPUT_PIXELS, DETECTOR_INPUT_PIXELS))
        return Target(name, build(name), (images,), _raw_heads_loss)
    module, inputs = MODELS[name]() if batch is None else MODELS[name](batch)
    return Target(name, module, inputs, _noise_loss if name == "ddpm-cifar10" else None)


def _arguments(builder: Callable[..., object], batch: int | None, text: str) -> dict[str, int]:
    arguments = {} if batch is None else {"batch": batch}
    try:
        inspect.signature(builder).bind(**arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell its signature
        how = "without arguments" if batch is None else f"with batch={batch} (--batch)"
        raise UsageError(
            f"{text} cannot be called {how}: {error}; batch is the one argument it may ask for, others need defaults"
        ) from error
    return arguments


def _import(where: str, text: str) -> object:
    if where.endswith(".py"):
        return _import_file(Path(where), text)
    if where.startswith("."):
        raise UsageError(f"{text}: {where} is relative to no package: name package.module:callable or file.py:callable")
    try:
        return importlib.import_module(where)
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"{text}: cannot import {where}: {error}") from error


def _import_file(path: Path, text: str) -> object:
    # the prefix keeps a file called json.py from taking the place of a module that others import
    spec = importlib.util.spec_from_file_location(f"_ridgeline_target_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, OSError) as error:
        raise UsageError(f"{text}: cannot import {path}: {error}") from error
    return module


def _target(name: str, built: object) -> Target:
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise UsageError(
            f"{name}: the callable must return (module, inputs) or (module, inputs, loss), got {_kind(built)}"
        )
    module, inputs, *rest = cast("tuple[Any, ...]", built)
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name}: the first value returned must be a torch.nn.Module, got {_kind(module)}")
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise UsageError(f"{name}: the inputs returned must be tensors, got {', '.join(map(_kind, inputs)) or 'none'}")
    loss: Any = rest[0] if rest else None
    if loss is not None and not callable(loss):
        raise UsageError(f"{name}: the third value returned must be a callable loss, got {_kind(loss)}")
    return Target(name, module, tuple(inputs), cast("Callable[..., Tensor] | None", loss))


def _kind(value: object) -> str:
    return type(value).__name__
