"""Tune the kernels that a training step would use, for the user's tables; the passes of its convolutions so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline import tuned, tuning
from ridgeline.errors import EnvironmentUnusable
from ridgeline.step_recipe import DTYPES, StepRecipe
from ridgeline.train_rewrites import BY_NAME
from ridgeline.train_rewrites.use_convolutions import Convolution, convolutions_of


def tune_step(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    recipe: StepRecipe,
    *,
    width: int | None = tuning.WIDTH,
    budget_s: float | None = None,
    force: bool = False,
    progress: tuning.Progress | None = None,
) -> tuple[tuned.Row, ...]:
    """Time every pass of every distinct convolution of `loss(model, batch)` beside PyTorch's own kernel.

    The loss is computed once, without gradients kept. Choices are those of `tuning.tune_all`. Raises
    EnvironmentUnusable where the model is on no GPU.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise EnvironmentUnusable(f"tune: the model must be on a GPU, got {device}: move it and its batch to cuda")
    problems = chain.from_iterable(found.problems() for found in convolutions(model, loss, batch, recipe))
    return tuning.tune_all(problems, width=width, budget_s=budget_s, force=force, progress=progress)


def convolutions(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, recipe: StepRecipe
) -> tuple[Convolution, ...]:
    """The distinct convolutions of the graphs that torch.compile would get, after the recipe's other rewrites."""
    found: dict[Convolution, None] = {}

    def collect(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten = _copy(graph_module)
        for name, rewrite in BY_NAME.items():
            if name in recipe.rewrites and name != "use_convolutions":
                rewrite.apply(rewritten)
        found.update(dict.fromkeys(convolutions_of(rewritten)))
        # what runs is the user's own
        return graph_module.forward

    device = next(model.parameters()).device
    compiled = torch.compile(loss, dynamic=False, backend=collect)
    with torch.enable_grad(), torch.autocast(device.type, DTYPES[recipe.dtype], enabled=recipe.dtype != "fp32"):
        compiled(model, batch)
    return tuple(found)


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)
