"""Lower a module to a graph of fused kernels: copy, export, rewrite, choose, repair layouts."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from ridgeline.compile_report import GraphReport, describe
from ridgeline.errors import NotEngaged
from ridgeline.graph import export, memory, mutated, origin, repair_layout
from ridgeline.kernels import BY_OVERLOAD
from ridgeline.recipe import Recipe
from ridgeline.rewrites import PIPELINE, round_weights

_PDL_CAPABILITY = (9, 0)


def lower(
    module: nn.Module, inputs: Sequence[Tensor], recipe: Recipe, *, explore: str = ""
) -> tuple[fx.GraphModule, GraphReport]:
    """The module as a graph of fused kernels in the recipe's dtype, not yet captured; `module` is untouched.

    `explore` makes every fusion that may pay, also where measured times speak against it: what `tune` measures. It says
    whether a chain may begin with two 3x3 convolutions: "pairs", or "chains" for not; "" heeds the times.
    """
    return lower_prepared(_prepared(module, recipe.torch_dtype), inputs, recipe, explore=explore)


def lower_prepared(
    module: nn.Module, inputs: Sequence[Tensor], recipe: Recipe, *, explore: str = ""
) -> tuple[fx.GraphModule, GraphReport]:
    """The same for a module whose weights already have the dtype and layout they are to run in.

    Raises NotEngaged where the module cannot be exported, or writes to its inputs or to a state of its own.
    """
    cast_inputs = [cast(tensor, recipe.torch_dtype) for tensor in inputs]
    graph_module = export(module, cast_inputs)
    _refuse_writes(graph_module, type(module).__name__)
    # what a rewrite may need to know beside the graph
    graph_module.meta.update(precision=recipe.precision, explore=explore)
    sites = [(r.name, r.apply(graph_module)) for r in PIPELINE if r.name in recipe.rewrites]
    choose_(graph_module, recipe, inputs[0].device)
    if inputs[0].is_cuda:
        round_weights.apply(graph_module)
    repair_layout(graph_module, BY_OVERLOAD)
    return graph_module, describe(graph_module, sites, cast_inputs)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating inputs in the recipe's dtype, images channels-last."""
    return channels_last(tensor.to(dtype)) if tensor.is_floating_point() else tensor


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def choose_(graph_module: fx.GraphModule, recipe: Recipe, device: torch.device) -> None:
    """Write the recipe's choices into every kernel call, in place."""
    has_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY
    choices = {"precision": recipe.precision, "pdl": recipe.pdl and has_pdl}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in BY_OVERLOAD:
            known = {argument.name for argument in node.target._schema.arguments}
            node.kwargs = {**node.kwargs, **{name: value for name, value in choices.items() if name in known}}
    graph_module.recompile()


def launches_early(graph_module: fx.GraphModule) -> bool:
    """Whether a kernel call starts before its predecessor has ended."""
    return any(node.kwargs.get("pdl") for node in graph_module.graph.nodes)


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy for inference in `dtype`, filters channels-last."""
    prepared = copy.deepcopy(module).eval().requires_grad_(False).to(dtype)
    for part, original in zip(prepared.modules(), module.modules(), strict=True):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            # statistics are folded in float64: fp16 would cut their digits first, and a variance above 65504
            part.float().load_state_dict(original.state_dict())
    for tensor in (*prepared.parameters(), *prepared.buffers()):
        tensor.data = channels_last(tensor.data)
    return prepared


def _refuse_writes(graph_module: fx.GraphModule, name: str) -> None:
    """A replay would write to buffers of its own: the caller's tensor would stay as it was, a state would run away."""
    sources = {"placeholder": "its input", "get_attr": "its own"}
    owners = {i: node for node in graph_module.graph.nodes if node.op in sources for i in memory(node)}
    for node in graph_module.graph.nodes:
        for target in mutated(node):
            for identity in memory(target) & owners.keys():
                owner = owners[identity]
                raise NotEngaged(
                    f"{name} writes to {sources[owner.op]} {owner.target} in place, by {node.target} in "
                    f"{origin(node)}: let it write to a clone"
                )
