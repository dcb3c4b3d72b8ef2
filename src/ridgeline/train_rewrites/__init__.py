"""PIPELINE: rewrites of the graphs that dynamo finds in a training step, before gradients are made.

Their ops have gradients, so forward and backward change together. A graph here is one of torch's own functions, as the
user's code called them, not of aten: autocast is still to come, and `example_value` is what each node returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ridgeline.train_rewrites import expand_upsample, fuse_group_norm_silu


@dataclass(frozen=True)
class TrainRewrite:
    """A change to a training graph: `apply(graph_module)` returns how many sites it changed."""

    name: str
    apply: Callable[[fx.GraphModule], int]


PIPELINE = (
    TrainRewrite("expand_upsample", expand_upsample.apply),
    TrainRewrite("fuse_group_norm_silu", fuse_group_norm_silu.apply),
)
BY_NAME = {rewrite.name: rewrite for rewrite in PIPELINE}
