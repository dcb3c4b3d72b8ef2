"""Tune the kernels that a training step would use, for the user's tables: convolutions, attentions and norms.

Linear layers over tokens are tuned as the 1x1 convolutions that they are. Norms come last: which of them
quantise depends on the convolutions that run in FP8, and that on the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline import tuned, tuning
from ridgeline.errors import EnvironmentUnusable
from ridgeline.fp8_step import Fp8Step, chooser
from ridgeline.kernels import NORMS
from ridgeline.launches import problems_of
from ridgeline.step_recipe import DTYPES, StepRecipe
from ridgeline.step_state import Snapshot, flatten, rebuild
from ridgeline.train_backend import TrainBackend, only_watched
from ridgeline.train_rewrites import BY_NAME, fp8_passes, fp8_prices, linear_layers
from ridgeline.train_rewrites._match import copied
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fuse_attention import Attention, attentions_of
from ridgeline.train_rewrites.fuse_upsample_conv import upsampled_convolutions_of
from ridgeline.train_rewrites.use_convolutions import convolutions_of

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
    """Time every pass of every distinct convolution, linear layer and attention of `loss(model, batch)`.

    Beside PyTorch's own kernels, and with a recipe in FP8 those in FP8 too. Then the norms of the step as it would be
    compiled with these rows. The loss is computed twice, uncompiled, without gradients kept; parameters, buffers and
    random generators are afterwards as before. Choices are those of `tuning.tune_all`; norms join the total of
    `progress` when all else is tuned. Raises EnvironmentUnusable where the model is on no GPU, or on one that has no
    kernels in FP8, UsageError for a batch that `compile_step` does not take.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise EnvironmentUnusable(f"the model must be on a GPU, got {device}: move it and its batch to cuda")
    arch = fp8_passes.architecture_of(device)
    if recipe.fp8 != "never" and arch not in fp8_passes.ARCHITECTURES:
        known = fp8_passes.listed(fp8_passes.ARCHITECTURES)
        raise EnvironmentUnusable(f"FP8 kernels are for {known}, and the GPU is {arch}: tune in bf16")
    found = tunable(model, loss, batch, recipe)
    problems = chain.from_iterable(one.problems() for one in found)
    if recipe.fp8 != "never":
        # upsampled ones have no FP8 kernel
        fp8 = (one for one in found if type(one) is Convolution and fp8_passes.takes(one))
        problems = chain(problems, chain.from_iterable(map(fp8_prices.problems, fp8)))
    norms = norm_problems(model, loss, batch, recipe)
    return tuning.tune_all(problems, norms, width=width, budget_s=budget_s, force=force, progress=progress)


def convolutions(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, recipe: StepRecipe
) -> tuple[Convolution, ...]:
    """The distinct convolutions of the graphs that torch.compile would get, after the recipe's other rewrites.

    Linear layers that can become convolutions are among them.
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
            # which takes tokens that have gaps between them too
            layers = linear_layers.convolutions_of(rewritten)
            found.update(dict.fromkeys(layer for layer in layers if fp8_passes.takes(layer)))
        # what runs is the user's own
        return graph_module.forward

    with _as_in_a_step(model, loss, recipe):
        _compute(model, loss, batch, recipe, collect)
    return tuple(found)


def norm_problems(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, recipe: StepRecipe
) -> Iterator[tuning.Problem]:
    """Every norm, forward and backward, of the graphs that Inductor would be given by the tables as they are then."""
    device = next(model.parameters()).device
    layers = None
    if recipe.fp8 != "never":
        layers = Fp8Step(device, choose=chooser(recipe.fp8), passes=recipe.fp8_passes)
    graphs: list[fx.GraphModule] = []
    backend = TrainBackend(recipe.rewrites, only_watched(recipe.compile_mode, graphs.append), fp8=layers)

    def collect(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        backend(copied(graph_module), inputs)
        return graph_module.forward

    with _as_in_a_step(model, loss, recipe):
        if layers is not None:
            layers.open_(model.named_parameters())
        _compute(model, loss, batch, recipe, collect)
    yield from chain.from_iterable(problems_of(graph, NORMS) for graph in graphs)


def _compute(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    recipe: StepRecipe,
    collect: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> None:
    """Compute the loss as a step does; `collect` gets dynamo's graphs, and returns what runs in their place."""
    device = next(model.parameters()).device
    leaves, structure = flatten(batch)
    placed = rebuild(structure, (_laid_out(leaf.to(device), recipe) for leaf in leaves))
    compiled = torch.compile(loss, dynamic=False, backend=collect)
    autocast = torch.autocast(device.type, DTYPES[recipe.dtype], enabled=recipe.dtype != "fp32")
    with torch.enable_grad(), autocast:
        compiled(model, placed)


@contextmanager
def _as_in_a_step(model: nn.Module, loss: object, recipe: StepRecipe) -> Iterator[None]:
    """Weights and buffers lie as a step lays them out; afterwards they, and random generators, are as before."""
    modules = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    snapshot = Snapshot(tensors, next(model.parameters()).device, recipe.generators)
    memory = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in memory:
            tensor.data = _laid_out(data, recipe)
        yield
    finally:
        for tensor, data in memory:
            tensor.data = data
        snapshot.restore_()


def _laid_out(tensor: Tensor, recipe: StepRecipe) -> Tensor:
    """In the layout of the recipe."""
    wanted = recipe.channels_last and tensor.dim() == 4
    return tensor.contiguous(memory_format=torch.channels_last) if wanted else tensor
