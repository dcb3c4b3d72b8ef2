"""conv → (SiLU) → (+ residual) becomes one kernel: `conv2d_act`, or its depthwise twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import conv2d_act, depthwise_conv2d_act
from ridgeline.rewrites._match import (
    add_constant,
    argument,
    calls,
    constant,
    finish,
    only_user,
    replace,
    value,
)

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every convolution that the kernels can run; returns how many.

    Does not fire on: transposed or dilated convolutions, groups other than 1 and depthwise, weights that are computed,
    maps without a batch axis, other dtypes. Does not swallow: a residual of another shape or dtype or with a factor,
    an activation or sum of what someone else reads too.
    """
    sites = 0
    for conv in calls(graph_module, _aten.conv2d.default):
        weight = constant(graph_module, conv.args[1])
        bias = constant(graph_module, argument(conv, 2))
        if weight is None or (argument(conv, 2) is not None and bias is None) or not _runs(conv, weight):
            continue
        last, act, residual = _epilogue(conv)
        with graph_module.graph.inserting_before(last):
            fused = _call(graph_module, conv, weight, bias, last=last, act=act, residual=residual)
        replace(last, fused)
        sites += 1
    finish(graph_module)
    return sites


def _runs(conv: fx.Node, weight: Tensor) -> bool:
    x, groups = value(conv.args[0]), argument(conv, 6, 1)
    depthwise = groups == x.shape[1] == weight.shape[0]
    plain = x.dim() == 4 and _pair(argument(conv, 5, 1)) == [1, 1] and 0 not in weight.shape
    return plain and (groups == 1 or depthwise) and x.dtype in _FLOATS


def _epilogue(conv: fx.Node) -> tuple[fx.Node, str, fx.Node | None]:
    """The last node the kernel can swallow, its activation, and the other summand if there is one."""
    silu = only_user(conv, _aten.silu.default)
    last, act = (conv, "none") if silu is None else (silu, "silu")
    add = only_user(last, _aten.add.Tensor)
    if add is None or add.kwargs or len(add.args) != 2:
        return last, act, None
    other = add.args[1] if add.args[0] is last else add.args[0]
    same = isinstance(other, fx.Node) and isinstance(other.meta.get("val"), Tensor) and other is not last
    if same and value(other).shape == value(last).shape and value(other).dtype == value(last).dtype:
        return add, act, other
    return last, act, None


def _call(
    graph_module: fx.GraphModule,
    conv: fx.Node,
    weight: Tensor,
    bias: Tensor | None,
    *,
    last: fx.Node,
    act: str,
    residual: fx.Node | None,
) -> fx.Node:
    depthwise = argument(conv, 6, 1) > 1
    packed = depthwise_conv2d_act.pack(weight) if depthwise else weight.contiguous(memory_format=torch.channels_last)
    stem = str(conv.args[1].target)
    weight_node = add_constant(graph_module, packed, near=last, name=f"{stem}_packed")
    bias_node = None if bias is None else add_constant(graph_module, bias, near=last, name=f"{stem}_bias")
    choices: dict[str, Any] = {
        "stride": _pair(argument(conv, 3, 1)),
        "padding": _pair(argument(conv, 4, 0)),
        "act": act,
    }
    op = depthwise_conv2d_act.OP if depthwise else conv2d_act.OP
    return graph_module.graph.call_function(op.overload, (conv.args[0], weight_node, bias_node, residual), choices)


def _pair(number: int | list[int]) -> list[int]:
    return [number, number] if isinstance(number, int) else (list(number) * 2 if len(number) == 1 else list(number))
