"""Tune the kernels that a training step would use, for the user's tables: its convolutions and attentions, every pass.

For a step in FP8 those of its linear layers too, as the 1x1 convolutions that they then are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline import tuned, tuning
from ridgeline.errors import EnvironmentUnusable
from ridgeline.step_recipe import DTYPES, StepRecipe
from ridgeline.train_rewrites import BY_NAME, fp8_linears, fp8_passes, fp8_prices
from ridgeline.train_rewrites._match import copied
from ridgeline.train_rewrites.fuse_attention import Attention, attentions_of
from ridgeline.train_rewrites.fuse_upsample_conv import upsampled_convolutions_of
from ridgeline.train_rewrites.use_convolutions import Convolution, convolutions_of

# rewrites that place what is tuned here
_BY_TABLES = ("fuse_upsample_conv", "fuse_attention", "use_convolutions")


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
    """Time every pass of every distinct convolution and attention of `loss(model, batch)` beside PyTorch's own kernel.

    With a recipe in FP8, those in FP8 too. The loss is computed once, without gradients kept. Choices are those of
    `tuning.tune_all`. Raises EnvironmentUnusable where the model is on no GPU, or on one that has no kernels in FP8.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise EnvironmentUnusable(f"tune: the model must be on a GPU, got {device}: move it and its batch to cuda")
    arch = fp8_passes.architecture_of(device)
    if recipe.fp8 != "never" and arch not in fp8_passes.ARCHITECTURES:
        known = fp8_passes.listed(fp8_passes.ARCHITECTURES)
        raise EnvironmentUnusable(f"tune: FP8 kernels are for {known}, and the GPU is {arch}: tune in bf16")
    found = tunable(model, loss, batch, recipe)
    problems = chain.from_iterable(one.problems() for one in found)
    if recipe.fp8 != "never":
        # upsampled ones have no FP8 kernel
        fp8 = (one for one in found if type(one) is Convolution and fp8_passes.takes(one))
        problems = chain(problems, chain.from_iterable(map(fp8_prices.problems, fp8)))
    return tuning.tune_all(problems, width=width, budget_s=budget_s, force=force, progress=progress)


def convolutions(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, recipe: StepRecipe
) -> tuple[Convolution, ...]:
    """The distinct convolutions of the graphs that torch.compile would get, after the recipe's other rewrites.

    With a recipe in FP8, the linear layers that it takes are among them.
    """
    return tuple(one for one in tunable(model, loss, batch, recipe) if isinstance(one, Convolution))


def tunable(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, recipe: StepRecipe
) -> tuple[Convolution | Attention, ...]:
    """`convolutions`, and the distinct attentions of the same graphs."""
    found: dict[Convolution | Attention, None] = {}

    def collect(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten = copied(graph_module)
        for name, rewrite in BY_NAME.items():
            if name in recipe.rewrites and name not in _BY_TABLES:
                rewrite.apply(rewritten)
        # what follows an upsampling is tuned both ways
        found.update(dict.fromkeys((*upsampled_convolutions_of(graph_module), *convolutions_of(rewritten))))
        found.update(dict.fromkeys(attentions_of(graph_module)))
        if recipe.fp8 != "never":
            found.update(dict.fromkeys(fp8_linears.convolutions_of(rewritten)))
        # what runs is the user's own
        return graph_module.forward

    device = next(model.parameters()).device
    compiled = torch.compile(loss, dynamic=False, backend=collect)
    with torch.enable_grad(), torch.autocast(device.type, DTYPES[recipe.dtype], enabled=recipe.dtype != "fp32"):
        compiled(model, batch)
    return tuple(found)
