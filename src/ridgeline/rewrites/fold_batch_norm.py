"""conv → batch norm in eval mode becomes one conv: exact up to rounding, folded in float64."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ridgeline.rewrites._match import add_constant, argument, calls, constant, finish, only_user, replace, value

_aten = torch.ops.aten


def apply(graph_module: fx.GraphModule) -> int:
    """Fold every batch norm that alone reads a convolution with constant weights; returns how many.

    Does not fire on: batch statistics, weights or statistics that are computed or written, maps without a batch axis.
    """
    sites = 0
    for conv in calls(graph_module, _aten.conv2d.default):
        norm = only_user(conv, _aten.batch_norm.default)
        weight = constant(graph_module, conv.args[1])
        if norm is None or weight is None or value(conv).dim() != 4 or norm.args[5]:  # args[5]: training
            continue
        # bias, gain, shift, mean, var; the first three may be absent, which is not the same as computed
        given = (argument(conv, 2), *norm.args[1:5])
        vectors = [constant(graph_module, node) for node in given]
        if any(node is not None and vector is None for node, vector in zip(given, vectors, strict=True)):
            continue
        folded = fold(weight, *vectors, eps=norm.args[7])
        _replace(graph_module, conv, norm, folded)
        sites += 1
    finish(graph_module)
    return sites


def fold(
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(weight, bias) of the convolution that equals conv followed by the norm; weight [K, C/g, R, S], the rest [K].

    In float64: half-precision statistics would cost the last bits of every weight.
    """
    scale = torch.rsqrt(var.double() + eps)
    if gain is not None:
        scale = scale * gain.double()
    folded_bias = -mean.double() * scale if bias is None else (bias.double() - mean.double()) * scale
    if shift is not None:
        folded_bias = folded_bias + shift.double()
    folded = (weight.double() * scale[:, None, None, None]).to(weight.dtype)
    return folded.contiguous(memory_format=_format(weight)), folded_bias.to(weight.dtype)


def _replace(graph_module: fx.GraphModule, conv: fx.Node, norm: fx.Node, folded: tuple[Tensor, Tensor]) -> None:
    stem = str(conv.args[1].target).removesuffix(".weight")
    weight, bias = (
        add_constant(graph_module, tensor, near=conv, name=f"{stem}_folded_{part}")
        for part, tensor in zip(("weight", "bias"), folded, strict=True)
    )
    conv.args = (conv.args[0], weight, bias, *conv.args[3:])
    replace(norm, conv)


def _format(weight: Tensor) -> torch.memory_format:
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
