"""A chain of equal stride-1 max pools, concatenated with its input, becomes one kernel (SPPF)."""

from __future__ import annotations

import torch
from torch import fx

from ridgeline.kernels import max_pool_chain
from ridgeline.rewrites._match import argument, calls, finish, replace, value

_aten = torch.ops.aten


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every cat([x, p(x), p(p(x)), …], dim=1); returns how many.

    Does not fire on: pools of even size, other stride or padding than "same", ceil mode, dilation, another order,
    maps without a batch axis, dtypes and windows that the kernel refuses.
    """
    sites = 0
    for cat in calls(graph_module, _aten.cat.default):
        first, *pools = cat.args[0]
        if argument(cat, 1, 0) != 1 or not pools or any(pool.target is not _aten.max_pool2d.default for pool in pools):
            continue
        if value(first).dim() != 4 or value(first).dtype not in max_pool_chain.FLOATS:
            continue
        size = _same_size(pools[0])
        sources = [first, *pools[:-1]]
        chained = all(pool.args[0] is source for pool, source in zip(pools, sources, strict=True))
        if size is None or not chained or any(pool.args[1:] != pools[0].args[1:] for pool in pools):
            continue
        if len(pools) * (size - 1) >= max_pool_chain.WIDEST_WINDOW:
            continue
        with graph_module.graph.inserting_before(cat):
            fused = graph_module.graph.call_function(
                max_pool_chain.OP.overload, (first,), {"size": size, "count": len(pools)}
            )
        replace(cat, fused)
        sites += 1
    finish(graph_module)
    return sites


def _same_size(pool: fx.Node) -> int | None:
    """The window of a stride-1 pool that keeps the map's size; None for any other."""
    kernel, stride, padding = (
        list(argument(pool, index, default)) for index, default in ((1, ()), (2, ()), (3, (0, 0)))
    )
    square = len(set(kernel)) == 1 and kernel[0] % 2 == 1 and set(stride) == {1} and set(padding) == {kernel[0] // 2}
    return kernel[0] if square and len(pool.args) <= 4 else None
