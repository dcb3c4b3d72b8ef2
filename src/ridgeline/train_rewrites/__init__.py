"""PIPELINE: rewrites of the graphs that dynamo finds in a training step, before gradients are made.

Their ops have gradients, so forward and backward change together. A graph here is one of torch's own functions, as the
user's code called them, not of aten: autocast is still to come, and `example_value` is what each node returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ridgeline.train_rewrites import (
    expand_upsample,
    fuse_attention,
    fuse_group_norm_silu,
    fuse_upsample_conv,
    keep_channels_last,
    merge_linears,
    read_concats,
    use_convolutions,
)


@dataclass(frozen=True)
class TrainRewrite:
    """A change to a training graph: `apply(graph_module)` returns how many sites it changed."""

    name: str
    apply: Callable[[fx.GraphModule], int]


PIPELINE = (
    TrainRewrite("fuse_upsample_conv", fuse_upsample_conv.apply),
    TrainRewrite("expand_upsample", expand_upsample.apply),
    TrainRewrite("fuse_group_norm_silu", fuse_group_norm_silu.apply),
    TrainRewrite("fuse_attention", fuse_attention.apply),
    TrainRewrite("merge_linears", merge_linears.apply),
    TrainRewrite("keep_channels_last", keep_channels_last.apply),
    TrainRewrite("use_convolutions", use_convolutions.apply),
    TrainRewrite("read_concats", read_concats.apply),
)
BY_NAME = {rewrite.name: rewrite for rewrite in PIPELINE}
