"""PIPELINE: the rewrites in order. Exact ones first, the mutating one last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ridgeline.rewrites import (
    fold_batch_norm,
    functionalize,
    fuse_attention,
    fuse_conv_act,
    fuse_conv_chain,
    fuse_detect,
    fuse_letterbox,
    fuse_max_pools,
    fuse_upsample_concat,
    merge_siblings,
    write_into_concat,
)


@dataclass(frozen=True)
class Rewrite:
    """A change to a graph: `apply(graph_module)` returns how many sites it changed."""

    name: str
    apply: Callable[[fx.GraphModule], int]


PIPELINE = (
    Rewrite("functionalize", functionalize.apply),
    Rewrite("fold_batch_norm", fold_batch_norm.apply),
    Rewrite("fuse_attention", fuse_attention.apply),
    Rewrite("fuse_detect", fuse_detect.apply),
    Rewrite("fuse_max_pools", fuse_max_pools.apply),
    Rewrite("fuse_conv_act", fuse_conv_act.apply),
    Rewrite("fuse_letterbox", fuse_letterbox.apply),
    Rewrite("merge_siblings", merge_siblings.apply),
    Rewrite("fuse_upsample_concat", fuse_upsample_concat.apply),
    Rewrite("fuse_conv_chain", fuse_conv_chain.apply),
    Rewrite("write_into_concat", write_into_concat.apply),
)
