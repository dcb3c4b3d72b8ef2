"""nearest upsample by 2 → concat → 1x1 convolution becomes one kernel that indexes both sources."""

from __future__ import annotations

import torch
from torch import fx

from ridgeline.kernels import conv2d_act, upsample_concat_conv_act
from ridgeline.kernels.upsample_concat_conv_act import CHANNEL_STEP
from ridgeline.rewrites._match import argument, calls, finish, only_user, replace, value

_aten = torch.ops.aten


def apply(graph_module: fx.GraphModule) -> int:
    """Replace conv1x1(cat([upsample2(a), b])); returns how many. Runs after `fuse_conv_act`.

    Does not fire on: other factors or modes, another order or number of sources, a concat or upsampled map that
    someone else reads, a residual, padding, channels that are no multiple of the matrix instruction's step.
    """
    sites = 0
    upsamples = set(calls(graph_module, _aten.upsample_nearest2d.vec))
    for conv in calls(graph_module, conv2d_act.OP.overload):
        source, weight, bias, residual = conv.args
        plain = set(conv.kwargs["stride"]) == {1} and set(conv.kwargs["padding"]) == {0} and residual is None
        pair = _sources(source, conv, upsamples) if plain and value(weight).shape[2:] == (1, 1) else None
        if pair is None:
            continue
        choices = {name: conv.kwargs[name] for name in ("act", "precision", "pdl") if name in conv.kwargs}
        with graph_module.graph.inserting_before(conv):
            fused = graph_module.graph.call_function(
                upsample_concat_conv_act.OP.overload, (*pair, weight, bias), choices
            )
        replace(conv, fused)
        sites += 1
    finish(graph_module)
    return sites


def _sources(cat: fx.Node, conv: fx.Node, upsamples: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """(coarse, fine) of a concat that only `conv` reads."""
    if cat.target is not _aten.cat.default or argument(cat, 1, 0) != 1 or only_user(cat, conv.target) is not conv:
        return None
    if len(cat.args[0]) != 2:
        return None
    upsample, fine = cat.args[0]
    if upsample not in upsamples or only_user(upsample, cat.target) is not cat:
        return None
    coarse, _, factors = upsample.args
    # a factor of 2.1 may also double the size, and reads other pixels
    if factors not in (None, [2.0, 2.0]) or value(coarse).dtype != value(fine).dtype:
        return None
    doubled = [2 * side for side in value(coarse).shape[2:]] == list(value(upsample).shape[2:])
    aligned = value(coarse).shape[1] % CHANNEL_STEP == 0 == value(fine).shape[1] % CHANNEL_STEP
    return (coarse, fine) if doubled and aligned else None
