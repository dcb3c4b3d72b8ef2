"""The backward of a norm beside a residual branch adds that branch's gradient as it stores its own.

In y = x + f(norm(x)) two gradients reach x. Autograd adds them in a pass of its own, two reads and a write; the norm's
kernel has its part in registers, and reads the other one once. The sum is rounded once, not twice.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function

from ridgeline.kernels import group_norm_silu, group_norm_silu_backward
from ridgeline.train_rewrites._match import calls, finish, value


def apply(graph_module: fx.GraphModule) -> int:
    """Hand x on through every group_norm_silu whose x one other node reads, after it; returns how many.

    Does not fire on: more readers, whose gradients take a pass to be added anyway; a concatenation, since who reads
    its parts adds to slices of the gradient in passes that are needed in any case.
    """
    sites = 0
    for node in calls(graph_module, group_norm_silu.OP.overload):
        x = node.args[0]
        other = _other_reader(node)
        if other is None or not isinstance(x, fx.Node) or x.target is torch.cat:
            continue
        choices = dict(node.kwargs)
        with graph_module.graph.inserting_before(node):
            both = graph_module.graph.call_function(norm_and_input, node.args, choices)
            norm, through = (graph_module.graph.call_function(getitem, (both, index)) for index in (0, 1))
        for new, old in ((norm, node), (through, x)):
            new.meta["example_value"] = value(old)
        other.replace_input_with(x, through)
        node.replace_all_uses_with(norm)
        sites += 1
    finish(graph_module)
    return sites


def norm_and_input(x: Tensor, *operands: Tensor | None, **choices: Any) -> tuple[Tensor, Tensor]:
    """group_norm_silu(x, *operands, **choices) and x itself, the gradient of which comes back through the norm."""
    return _NormAndInput.apply(choices, x, *operands)  # pyright: ignore[reportReturnType]


class _NormAndInput(Function):
    @staticmethod
    def forward(choices: dict[str, Any], x: Tensor, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        return group_norm_silu.OP(x, *operands, **choices), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        ctx.choices, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # a branch that transposes hands back another layout
        dy, residual = (grad.contiguous(memory_format=torch.channels_last) for grad in grad_outputs)
        tensors = ctx.saved_tensors
        operands = (*tensors, *[None] * (7 - len(tensors)))
        gradients = group_norm_silu_backward.OP(dy, *operands, residual, **ctx.choices)
        # seed and offset have none, nor what was not given
        found = (*gradients, None, None)
        return (None, *(grad if given is not None else None for given, grad in zip(tensors, found, strict=False)))


def _other_reader(norm: fx.Node) -> fx.Node | None:
    """The one node that reads the norm's input besides it, if it comes later and the norm reads it once."""
    x = norm.args[0]
    if not isinstance(x, fx.Node) or len(x.users) != 2 or norm.all_input_nodes.count(x) != 1:
        return None
    (other,) = (user for user in x.users if user is not norm)
    return other if norm < other else None
