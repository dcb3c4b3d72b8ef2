"""Attention over a map's positions with its depthwise position term becomes one kernel that reads qkv in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import attention_position, depthwise_conv2d_act
from ridgeline.rewrites._match import (
    add_constant,
    argument,
    calls,
    constant,
    finish,
    replace,
    value,
)

_aten = torch.ops.aten
_CHANNEL_STEP = 16  # the kernel's blocks of query, key and value channels


def apply(graph_module: fx.GraphModule) -> int:
    """Replace softmax(q^T k · s) v + depthwise(v) on a [N, heads (2 kd + hd), H, W] map; returns how many.

    Runs before `fuse_conv_act`, which would take the depthwise convolution. Does not fire on: another order of q, k
    and v, another scale than kd^-0.5, masks, scores that someone else reads, a position term of rows and columns
    swapped, channels or dtypes that the kernel refuses.
    """
    sites = 0
    reshapes = set(calls(graph_module, _aten.reshape.default))
    for add in calls(graph_module, _aten.add.Tensor):
        found = _match(graph_module, add)
        if found is None or not reshapes.issuperset(found[0].users):
            continue
        qkv, weight, bias, choices = found
        stem = str(weight.target)
        packed = depthwise_conv2d_act.pack(constant(graph_module, weight))
        arguments = (
            qkv,
            add_constant(graph_module, packed, near=add, name=f"{stem}_packed"),
            add_constant(graph_module, constant(graph_module, bias), near=add, name=f"{stem}_bias"),
        )
        with graph_module.graph.inserting_before(add):
            fused = graph_module.graph.call_function(attention_position.OP.overload, arguments, choices)
        replace(add, fused)
        fused.meta["val"] = torch.empty_like(value(add), memory_format=torch.channels_last)
        sites += 1
    finish(graph_module)
    return sites


def _match(graph_module: fx.GraphModule, add: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, dict[str, Any]] | None:
    """(qkv map, position weight, position bias, choices) of the attention whose result `add` is."""
    rows = _is(add.args[0], _aten.reshape.default)
    position = _is(add.args[1], _aten.conv2d.default)
    product = rows and _is(rows.args[0], _aten.matmul.default)
    if not position or not product or add.kwargs:
        return None
    v, weights = product.args
    softmax = _transposed(weights, _aten.softmax.int)
    scores = softmax and softmax.args[1] in (-1, 3) and _is(softmax.args[0], _aten.mul.Tensor)
    logits = scores and _is(scores.args[0], _aten.matmul.default)
    if not logits:
        return None
    split = _is(v.args[0], _aten.split_with_sizes.default)
    q, k = logits.args[0].args[0] if _transposed(logits.args[0], None) else None, logits.args[1]
    if not split or [_part(node) for node in (q, k, v)] != [(split, 0), (split, 1), (split, 2)] or split.args[2] != 2:
        return None
    heads_view = _is(split.args[0], _aten.reshape.default)
    v_map = _is(position.args[0], _aten.reshape.default)
    key, same_key, channels = split.args[1]
    if not heads_view or not v_map or v_map.args[0] is not v or key != same_key or scores.args[1] != key**-0.5:
        return None
    qkv, heads = heads_view.args[0], value(split.args[0]).shape[1]
    if value(qkv).dim() != 4 or value(qkv).dtype not in attention_position.FLOATS or key % _CHANNEL_STEP:
        return None
    n, _, h, w = value(qkv).shape
    shapes = {split.args[0]: (n, heads, 2 * key + channels, h * w), add: (n, heads * channels, h, w)}
    if any(value(node).shape != shape for node, shape in shapes.items()) or channels % _CHANNEL_STEP:
        return None
    weight, bias = position.args[1], argument(position, 2)
    constants = constant(graph_module, weight) is not None and constant(graph_module, bias) is not None
    # stride, padding, dilation, groups of a depthwise 3x3 that keeps the map's size
    geometry = [argument(position, index, [1, 1]) for index in (3, 4, 5)] + [argument(position, 6, 1)]
    same = value(weight).shape == (heads * channels, 1, 3, 3) and geometry == [[1, 1]] * 3 + [heads * channels]
    private = all(len(node.users) == 1 for node in (logits, scores, softmax, weights, product, position, q, k))
    if not (same and constants and private):
        return None
    return qkv, weight, bias, {"heads": heads, "key_channels": key}


def _is(node: Any, *targets: Callable) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets else None


def _transposed(node: Any, target: Callable | None) -> fx.Node | None:
    """The source of a transpose of the last two axes, when it calls `target` (None: any)."""
    swap = _is(node, _aten.transpose.int)
    if swap is None or {axis % 4 for axis in swap.args[1:]} != {2, 3}:
        return None
    return swap.args[0] if target is None else _is(swap.args[0], target)


def _part(node: Any) -> tuple[Any, Any]:
    return (node.args[0], node.args[1]) if isinstance(node, fx.Node) and len(node.args) == 2 else (None, None)
