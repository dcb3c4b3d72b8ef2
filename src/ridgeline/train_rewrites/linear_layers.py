"""Linear layers over tokens as the 1x1 convolutions that they are, of the same memory.

tokens [N, T, C] contiguous  =  a map [N, C, h, w] channels_last, h w = T
weight [K, C]                =  filters [K, C, 1, 1]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.kernels._quads import why_not
from ridgeline.train_rewrites._match import calls, only_user, value
from ridgeline.train_rewrites.convolution_calls import Convolution, ConvolutionCall

LINEARS = (F.linear, torch.ops.aten.linear.default)
_NAMES = ("input", "weight", "bias")
_OF_1X1 = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
VIEWS = ("flatten", "unflatten", "transpose", "permute", "reshape", "view")  # methods


@dataclass(frozen=True)
class LinearCall(ConvolutionCall):
    """A call of a linear layer; x, weight and y are maps and filters, `given` has the nodes of its own operands."""

    kind = "linear layer"

    source: fx.Node | None  # the map that the tokens are a view of
    views: tuple[fx.Node, ...]  # from there to the tokens

    @property
    def adjacent(self) -> bool:
        """Whether the channels of a token are; a map is made channels_last, as any convolution's."""
        x = value(self.given["input"])
        return self.source is not None or (x is not None and x.stride(-1) == 1)

    @property
    def dense(self) -> bool:
        """Whether all tokens are, one behind the other, so that they are a map of the same memory."""
        x = value(self.given["input"])
        return self.source is not None or (x is not None and x.is_contiguous() and x.storage_offset() == 0)

    @property
    def reads_source(self) -> bool:
        """Whether the map is the source as it is, not its tokens in other rows and columns."""
        found = value(self.source)
        return found is not None and found.shape == self.x.shape

    @property
    def sole_source(self) -> fx.Node | None:
        """The source, if it is the map and nothing but this layer reads it."""
        path = (*filter(None, [self.source]), *self.views, self.node)
        alone = self.reads_source and all(only_user(one) is after for one, after in pairwise(path))
        return self.source if alone else None

    def map_node(self) -> fx.Node:
        """Where its tokens come from, or a view of them put in."""
        if self.source is not None and self.reads_source:
            return self.source
        n, c, h, w = self.x.shape
        return _view(_view(self.given["input"], "reshape", (n, h, w, c)), "permute", (0, 3, 1, 2))

    def result_node(self, of_map: fx.Node) -> fx.Node:
        """A map as the layer returned it, put in."""
        y = value(self.node)
        assert y is not None
        return _view(_view(of_map, "permute", (0, 2, 3, 1)), "reshape", tuple(y.shape))

    def in_its_words(self, reason: str) -> str:
        """It has no rows and columns of its own."""
        h, w = self.x.shape[2:]
        return f"quads need a multiple of 16 tokens, got {h * w}" if reason == why_not(h, w) else reason


def map_size(tokens: int) -> tuple[int, int] | None:
    """The rows and columns, as square as can be, of a map of so many pixels that has quads.

    None where none has: of other counts than multiples of 16.
    """
    columns = (1 << bit for bit in range(tokens.bit_length()))
    sizes = ((tokens // w, w) for w in columns if tokens % w == 0)
    return min((size for size in sizes if why_not(*size) is None), key=max, default=None)


def linear_calls(graph_module: fx.GraphModule) -> Iterator[LinearCall]:
    """Every linear layer over tokens [N, ..., C], in the order of the graph; nodes may be replaced meanwhile.

    Not those of a single row an image [N, C], embeddings of time steps or classes, nor of sizes that are not fixed.
    """
    for node in calls(graph_module, *LINEARS):
        given = dict.fromkeys(_NAMES) | dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        x, weight, y = value(given["input"]), value(given["weight"]), value(node)
        if x is None or weight is None or y is None or x.dim() < 3 or weight.dim() != 2:
            continue
        if not all(isinstance(size, int) and size for size in x.shape):
            continue
        source, views = _map_of(given["input"])
        found = value(source)
        tokens = prod(x.shape[1:-1])
        own = (1, tokens) if found is None else (found.shape[2], found.shape[3])
        size = own if why_not(*own) is None else map_size(tokens) or own
        maps = _as_map(x, size), weight[:, :, None, None], _as_map(y, size)
        yield LinearCall(node, {**given, **_OF_1X1}, *maps, source, views)


def convolutions_of(graph_module: fx.GraphModule) -> tuple[Convolution, ...]:
    """Every distinct convolution that a linear layer is."""
    shapes = (((*c.x.shape,), (*c.weight.shape,), (0, 0), c.y.dtype, c.x.device) for c in linear_calls(graph_module))
    return tuple(dict.fromkeys(Convolution(*each) for each in shapes))


def _as_map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    return tokens.reshape(tokens.shape[0], *size, tokens.shape[-1]).permute(0, 3, 1, 2)


def _view(node: fx.Node, name: str, sizes: tuple[int, ...]) -> fx.Node:
    new = node.graph.call_method(name, (node, sizes))
    found = value(node)
    if found is not None:
        new.meta["example_value"] = getattr(found, name)(sizes)
    return new


def _map_of(tokens: Any) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """The map that tokens are a view of, were it channels_last, and the views from there; else None and none.

    What dynamo knows of layouts is no help: a group norm that a rewrite has replaced returned NCHW.
    """
    views: list[fx.Node] = []
    source = tokens
    while source.op == "call_method" and source.target in VIEWS and source.all_input_nodes == [source.args[0]]:
        views.insert(0, source)
        source = source.all_input_nodes[0]
    found, shown = value(source), value(tokens)
    if not views or found is None or shown is None or found.dim() != 4 or found.dtype != shown.dtype:
        return None, ()
    like = torch.empty(found.shape, device="meta", memory_format=torch.channels_last)
    view = like
    for each in views:
        # one layout's views are copies of another
        name = "reshape" if each.target == "view" else str(each.target)
        view = getattr(view, name)(*each.args[1:], **each.kwargs)
    in_order = view.is_contiguous() and view.untyped_storage()._cdata == like.untyped_storage()._cdata
    n, c = found.shape[:2]
    if in_order and view.shape == shown.shape and (view.shape[0], view.shape[-1]) == (n, c):
        return source, tuple(views)
    return None, ()
