"""Convolutions of channels_last maps get their operands and the gradient of their result dense and channels_last.

The gradient of a concatenation is slices of one tensor, pixels of which lie further apart than a map's do, and that of
a transpose may be NCHW. A convolution's backward copies such a gradient twice, once a product, in kernels of its own.
Asked for in the graph, the layout is what Inductor's fused kernel writes in the first place. Values are equal to the
bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ridgeline.train_rewrites._match import calls, finish, is_channels_last, value


def apply(graph_module: fx.GraphModule) -> int:
    """Watch every 2-D convolution whose result is channels_last, transposed ones too; returns how many.

    Only what comes in another layout is changed, which for gradients shows when they are made.
    """
    sites = 0
    for node in calls(graph_module, torch.conv2d, torch.conv_transpose2d):
        y = value(node)
        if y is None or not is_channels_last(y):
            continue
        _make_dense(graph_module.graph, node)
        with graph_module.graph.inserting_after(node):
            kept = graph_module.graph.call_function(keep_gradient, (node,))
        kept.meta["example_value"] = y
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
        sites += 1
    finish(graph_module)
    return sites


def keep_gradient(y: Tensor) -> Tensor:
    """y itself; its gradient arrives dense and channels_last, whoever makes it."""
    if y.requires_grad:
        # not a Function, whose result users could not overwrite: layers with inplace=True do
        y.register_hook(_dense)
    return y


def _dense(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


def _make_dense(graph: fx.Graph, node: fx.Node) -> None:
    """Before its convolution, turn a map that is not dense and channels_last; one that is needs nothing."""
    given = node.args[0] if node.args else node.kwargs["input"]
    x = value(given)
    if x is None or x.dim() != 4 or is_channels_last(x):
        return
    with graph.inserting_before(node):
        dense = graph.call_method("contiguous", (given,), {"memory_format": torch.channels_last})
    dense.meta["example_value"] = x.contiguous(memory_format=torch.channels_last)
    node.replace_input_with(given, dense)  # pyright: ignore[reportArgumentType] - a node, since it has a value
