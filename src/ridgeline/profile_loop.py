"""Run what a callable of the user builds, step after step: `python -m ridgeline.profile_loop TARGET STEPS`.

The process that `ridgeline profile file.py:build` watches. Refusals go to stderr, with their exit code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline.errors import NotEngaged, RidgelineError, UsageError
from ridgeline.models import MODELS
from ridgeline.step_marks import mark_step
from ridgeline.targets import resolve

OPERATORS = "--operators"  # as last argument: launch the operators of a captured step one by one

Step = Callable[[], object]


def main(argv: list[str]) -> int:
    """0, or the exit code of a refusal."""
    target, steps, *rest = argv
    try:
        run(step_for(target, operators=rest == [OPERATORS]), int(steps))
    except RidgelineError as error:
        sys.stderr.write(f"ridgeline profile: {error}\n")
        return error.exit_code
    return 0


def run(step: Step, steps: int) -> None:
    """Make the steps, each marked, so that who watches the process can tell them apart."""
    for _ in range(steps):
        step()
        mark_step()


def step_for(text: str, *, device: str = "cuda", operators: bool = False) -> Step:
    """The step that `text` names: a built-in network, or what `file.py:build` or `package.module:build` returns.

    That is a callable step, `(callable, inputs)`, or `(module, inputs, loss)`. A module and its inputs are moved to the
    device; it is called without gradients or, with a loss, goes forward and backward. `operators` asks for what runs
    inside the CUDA graph of a captured step, one by one. Raises UsageError for anything else, NotEngaged where a step
    has no such operators.
    """
    if text in MODELS:
        target = resolve(text)
        built: object = (target.module, target.inputs)
    else:
        built = _call(text)
    fn, inputs, *rest = built if isinstance(built, tuple) and len(built) in (2, 3) else (built, ())
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if not callable(fn) or (rest and not (isinstance(fn, nn.Module) and callable(rest[0]))):
        kinds = ", ".join(type(each).__name__ for each in (fn, *rest))
        raise UsageError(f"{text} must return a step, (callable, inputs) or (module, inputs, loss), got {kinds}")
    if operators:
        launch = getattr(fn, "launch_operators", None)
        if launch is None:
            raise NotEngaged(f"{text} has no launch_operators(), so kernels in its graph are known by name alone")
        return partial(launch, *inputs)
    if not isinstance(fn, nn.Module):
        return partial(fn, *inputs)
    module = fn.to(device)
    inputs = tuple(each.to(device) if isinstance(each, torch.Tensor) else each for each in inputs)
    return partial(_forward_backward, module, inputs, rest[0]) if rest else partial(_forward, module, inputs)


def _forward(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.no_grad():
        module(*inputs)


def _forward_backward(module: nn.Module, inputs: tuple[Any, ...], loss: Any) -> None:
    loss(module, *inputs).backward()
    module.zero_grad(set_to_none=True)


def _call(text: str) -> object:
    """What the named callable returns. What it raises passes: it is the user's own code."""
    where, _, attribute = text.rpartition(":")
    if not where or not attribute:
        raise UsageError(
            f"unknown target {text!r}: name your own as file.py:callable or package.module:callable, one of "
            f"{', '.join(MODELS)}, or give a command after --"
        )
    # what `python file.py` and `python -m package.module` would find
    sys.path.insert(0, str(Path(where).resolve().parent if where.endswith(".py") else Path.cwd()))
    try:
        builder = getattr(_load(where), attribute, None)
    except (ImportError, SyntaxError, OSError) as error:
        raise UsageError(f"{text}: cannot import {where}: {error}") from error
    if not callable(builder):
        raise UsageError(f"{text}: {where} has no callable named {attribute!r}")
    return builder()


def _load(where: str) -> object:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    # the prefix keeps a file called json.py from taking the place of a module that others import
    spec = importlib.util.spec_from_file_location(f"_ridgeline_target_{Path(where).stem}", where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
