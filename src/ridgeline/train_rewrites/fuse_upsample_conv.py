"""Upsampling to twice the size and its 3 x 3 convolution become upsample_conv2d, where all passes together are faster.

The tuned tables decide: ours must be faster than PyTorch's kernels on the upsampled map, and than the faster of both
kernels of the same convolution alone, as use_convolutions would place it, of which the copy of the map is not charged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import Op, conv2d_fprop, upsample_conv2d, upsample_conv2d_dgrad, upsample_conv2d_wgrad
from ridgeline.train_rewrites._match import finish, is_channels_last
from ridgeline.train_rewrites.convolution_calls import Convolution, ConvolutionCall, convolution_calls
from ridgeline.train_rewrites.expand_upsample import whole_upsamplings
from ridgeline.train_rewrites.use_convolutions import PASSES, Pass

_FILTER, _PADDING = (3, 3), (1, 1)


@dataclass(frozen=True)
class _Site:
    """A convolution that alone reads an upsampled map: the operands in the dtype of its result, which autocast chose.

    x is the map before it was upsampled.
    """

    call: ConvolutionCall
    x_node: fx.Node
    x: Tensor
    weight: Tensor


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every upsampling and its convolution of which the tables say that it pays; returns how many.

    Does not fire on: other modes and factors than nearest and 2, maps or weights in another layout than channels_last,
    an upsampled map that something else reads too, filters other than 3 x 3 of stride 1 and padding 1, dilation,
    groups, channels that 8 or filters that 16 does not divide, fp32, a GPU or shapes that were not tuned in all passes,
    shapes where the convolution of the upsampled map is faster.
    """
    paying = 0
    for site in list(_sites(graph_module)):
        passes = _passes(site)
        if not _pays(site, passes):
            continue
        paying += 1
        node, given = site.call.node, site.call.given
        operands = (site.x_node, given["weight"], given["bias"], site.x.dtype)
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_function(upsample_convolve, operands)
        new.meta |= {"example_value": site.call.y, PASSES: passes}
        node.replace_all_uses_with(new)
    finish(graph_module)
    return paying


def upsample_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """upsample_conv2d of operands cast to `dtype`; a bias is added in fp32 as it comes."""
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return upsample_conv2d.OP(x, weight.to(dtype), bias)


@dataclass(frozen=True)
class UpsampledConvolution(Convolution):
    """The shapes of a convolution of an upsampled map; `x` is the map before."""

    def problems(self) -> Iterator[tuple[Op, dict[str, Any]]]:
        n, _, h, w = self.x
        x, dy = self._normal(self.x), self._normal((n, self.weight[0], 2 * h, 2 * w))
        weight = self._normal(self.weight)
        weight *= weight[0].numel() ** -0.5
        yield upsample_conv2d.OP, {"x": x, "weight": weight}
        yield upsample_conv2d_dgrad.OP, {"dy": dy, "weight": weight}
        yield upsample_conv2d_wgrad.OP, {"dy": dy, "x": x}


def upsampled_convolutions_of(graph_module: fx.GraphModule) -> tuple[UpsampledConvolution, ...]:
    """Every distinct one that could be replaced."""
    found = (
        UpsampledConvolution(tuple(s.x.shape), tuple(s.weight.shape), _PADDING, s.x.dtype, s.x.device)
        for s in _sites(graph_module)
    )
    return tuple(dict.fromkeys(found))


def _sites(graph_module: fx.GraphModule) -> Iterator[_Site]:
    doubled = {node: x for node, x, factor in whole_upsamplings(graph_module) if factor == 2 and len(node.users) == 1}
    for call in convolution_calls(graph_module):
        conv, x_node = call.problem, doubled.get(call.given["input"])
        if conv is None or x_node is None:
            continue
        fits = (
            conv.filter == _FILTER
            and conv.padding == _PADDING
            and conv.stride == conv.dilation == (1, 1)
            and conv.groups == 1
            and call.y.dtype in upsample_conv2d.DTYPES
            and not (conv.c % 8 or conv.k % 16)
            and is_channels_last(call.weight)
        )
        if fits:
            dtype = call.y.dtype
            yield _Site(call, x_node, x_node.meta["example_value"].to(dtype), call.weight.to(dtype))


def _passes(site: _Site) -> tuple[Pass, ...]:
    """Every pass that was tuned, by the faster kernel, but the first by ours: it stands for all three in the graph."""
    found = []
    for name, (row, wins) in upsample_conv2d.choice(site.x, site.weight).items():
        ours, rival_s = wins or name == "fprop", conv2d_fprop.rival_seconds(row)
        found.append(Pass(name, ours, row.seconds if ours else rival_s, rival_s))
    return tuple(found)


def _pays(site: _Site, passes: tuple[Pass, ...]) -> bool:
    """Whether all three passes were tuned, and take less together than the fastest that they replace."""
    n, c, h, w = site.x.shape
    alone = conv2d_fprop.choice(site.x.new_empty((n, c, 2 * h, 2 * w)), site.weight, _PADDING)
    alone_s = {name: min(row.seconds, conv2d_fprop.rival_seconds(row)) for name, (row, _) in alone.items()}
    replaced_s = sum(min(one.rival_s, alone_s.get(one.name, one.rival_s)) for one in passes)
    return len(passes) == 3 and sum(one.seconds for one in passes) < replaced_s
