"""letterbox → convolution becomes one kernel that reads the frame's bytes."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ridgeline.kernels import conv2d_act, letterbox_conv_act
from ridgeline.kernels._letterbox import has_weights
from ridgeline.kernels.letterbox_conv_act import MAX_FILTER_ROWS, MAX_ROW_ELEMENTS
from ridgeline.rewrites._match import add_constant, calls, constant, finish, only_user, replace


def apply(graph_module: fx.GraphModule) -> int:
    """Replace conv2d_act(letterbox(frame)); returns how many. Runs after `fuse_conv_act`.

    BGR frames meet a filter with its channels flipped. Does not fire on: a canvas that someone else reads, a residual,
    tables or weights that are computed, filters larger than the kernel unrolls.
    """
    sites = 0
    canvases = set(calls(graph_module, torch.ops.ridgeline.letterbox.default))
    for conv in calls(graph_module, conv2d_act.OP.overload):
        canvas, weight_node, bias, residual = conv.args
        if canvas not in canvases or only_user(canvas, conv.target) is not conv or residual is not None:
            continue
        frame, rows, columns = canvas.args
        weight, *tables = (constant(graph_module, node) for node in (weight_node, rows, columns))
        known = [table for table in tables if table is not None]
        if weight is None or not _unrolls(weight) or len(known) != len(tables):
            continue
        if canvas.kwargs.get("reverse", False):
            flipped = weight.flip(1).contiguous(memory_format=torch.channels_last)
            weight_node = add_constant(graph_module, flipped, near=conv, name=f"{weight_node.target}_bgr")
        choices = {**conv.kwargs, "blend": any(map(has_weights, known))}
        with graph_module.graph.inserting_before(conv):
            fused = graph_module.graph.call_function(
                letterbox_conv_act.OP.overload, (frame, weight_node, bias, rows, columns), choices
            )
        replace(conv, fused)
        sites += 1
    finish(graph_module)
    return sites


def _unrolls(weight: Tensor) -> bool:
    _, c, r, s = weight.shape
    return r <= MAX_FILTER_ROWS and s * c <= MAX_ROW_ELEMENTS
