"""Nearest-neighbour upsampling by a whole factor becomes an expanded view: its gradient is a sum, not a scatter.

Inductor makes the gradient of an indexed read an `index_put` over zeros, with atomics; of an expand it makes a sum that
it fuses with its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.train_rewrites._match import arguments, calls, finish, is_channels_last, value


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every F.interpolate(x, scale or size, mode="nearest") of a channels_last map; returns how many.

    Does not fire on: other modes, factors that are not whole or differ, other layouts, maps without two axes.
    """
    sites = 0
    for node, x, factor in whole_upsamplings(graph_module):
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_function(expand_nearest, (x, factor))
        new.meta["example_value"] = value(node)
        node.replace_all_uses_with(new)
        graph_module.graph.erase_node(node)
        sites += 1
    finish(graph_module)
    return sites


def whole_upsamplings(graph_module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """(node, its x, the factor) of every upsampling that `apply` fires on; nodes may be replaced meanwhile."""
    for node in calls(graph_module, F.interpolate):
        given = arguments(node, F.interpolate)
        x, y = value(given["input"]), value(node)
        if given["mode"] != "nearest" or x is None or y is None or not is_channels_last(x):
            continue
        factor = y.shape[2] // x.shape[2]
        whole = tuple(y.shape[2:]) == (factor * x.shape[2], factor * x.shape[3])
        # a scale that was rounded reads other pixels than the whole factor does
        exact = given["scale_factor"] is None or _all_equal(given["scale_factor"], factor)
        if whole and exact and factor >= 2:
            yield node, given["input"], factor


def expand_nearest(x: Tensor, factor: int) -> Tensor:
    """Each pixel of x [N, C, H, W] as factor x factor equal ones, channels_last."""
    n, c, h, w = x.shape
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None]
    return pixels.expand(n, h, factor, w, factor, c).reshape(n, h * factor, w * factor, c).permute(0, 3, 1, 2)


def _all_equal(scale: float | Sequence[float], factor: int) -> bool:
    return all(s == factor for s in (scale if isinstance(scale, Sequence) else (scale,)))
