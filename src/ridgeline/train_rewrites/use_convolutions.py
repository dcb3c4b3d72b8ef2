"""Convolutions whose three passes together were measured faster here than in cuDNN become conv2d_fprop.

Which pass runs where is decided by the tuned tables: `conv2d_fprop.choice`. An untuned shape stays PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ridgeline import units
from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import Op, conv2d_dgrad, conv2d_fprop, conv2d_wgrad
from ridgeline.train_rewrites._match import calls, finish, is_channels_last, only_user, value

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


PASSES = "passes"  # of a node that was put in: what the tables say of each


@dataclass(frozen=True)
class Pass:
    """Who computes one pass of a convolution in a step, and what it takes, by the tables."""

    name: str  # "fprop", "dgrad", "wgrad"
    ours: bool
    seconds: float
    rival_s: float


@dataclass(frozen=True)
class ConvolutionCall:
    """A call of conv2d: its operands by name, and what they and the result are when dynamo runs it."""

    kind: ClassVar[str] = "convolution"

    node: fx.Node
    given: dict[str, Any]
    x: Tensor
    weight: Tensor
    y: Tensor

    @property
    def problem(self) -> ConvProblem | None:
        """None where the padding is given in words."""
        if isinstance(self.given["padding"], str):
            return None
        x, weight = self.x, self.weight
        sizes = x.shape[0], x.shape[1], weight.shape[0], tuple(x.shape[2:]), tuple(weight.shape[2:])
        return ConvProblem(*sizes, *(self.given[name] for name in ("stride", "padding", "dilation", "groups")))

    @property
    def adjacent(self) -> bool:
        """Whether the channels of a pixel are, once the map is channels_last."""
        return True

    @property
    def sole_source(self) -> fx.Node | None:
        """What makes the map, if nothing but this layer reads it."""
        node = self.given["input"]
        return node if only_user(node) is self.node else None

    def map_node(self) -> fx.Node:
        """The node of the map."""
        return self.given["input"]

    def result_node(self, of_map: fx.Node) -> fx.Node:
        """A map as the call returned it."""
        return of_map

    def in_its_words(self, reason: str) -> str:
        """Why a pass has no kernel, as the layer's user would say it."""
        return reason


@dataclass(frozen=True)
class _Site:
    """A convolution that conv2d_fprop can compute: its operands in the dtype of its result, which autocast chose."""

    node: fx.Node
    given: dict[str, Any]
    padding: tuple[int, int]
    stride: int
    x: Tensor
    weight: Tensor


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every convolution of which the tables say that it pays; returns how many.

    Does not fire on: other strides than 1 and 2; with stride 2 maps that it does not halve, and channels that 16 does
    not divide; dilation, groups, weights in another layout than channels_last, fp32; channels or filters that 8 does
    not divide, unless they are fewer, 8 divides the others, and the filter is 7 x 7 at most; a GPU or shapes that were
    not tuned, shapes where cuDNN is faster.
    """
    paying = 0
    for site in list(_sites(graph_module)):
        passes = _passes(site)
        if not _pays(passes):
            continue
        paying += 1
        operands = (site.given["input"], site.given["weight"], site.given["bias"])
        with graph_module.graph.inserting_before(site.node):
            new = graph_module.graph.call_function(convolve, (*operands, site.padding, site.stride, site.x.dtype))
        new.meta |= {"example_value": value(site.node), PASSES: passes}
        site.node.replace_all_uses_with(new)
    finish(graph_module)
    return paying


def in_words(graph_module: fx.GraphModule) -> str:
    """Which passes of the convolutions replaced run where, and what that saves by the tables; "" where none was."""
    passes = [found for node in graph_module.graph.nodes for found in node.meta.get(PASSES, ())]
    if not passes:
        return ""
    counts = [f"{name} {sum(one.name == name and one.ours for one in passes)}" for name in ("fprop", "dgrad", "wgrad")]
    chosen_s, theirs_s = sum(one.seconds for one in passes), sum(one.rival_s for one in passes)
    known = (
        f"{len(passes)} passes of convolutions take {units.seconds(chosen_s)} for PyTorch's {units.seconds(theirs_s)}"
    )
    return f"{known} by the tables: {', '.join(counts)} by this project's kernels, the others by PyTorch's"


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], stride: int, dtype: torch.dtype
) -> Tensor:
    """conv2d_fprop of operands cast to `dtype`; a bias is added in fp32 as it comes."""
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return conv2d_fprop.OP(x, weight.to(dtype), bias, padding=list(padding), stride=stride)


@dataclass(frozen=True)
class Convolution:
    """The shapes of a convolution that could be replaced: what its passes are tuned on."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    padding: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    stride: int = 1

    @property
    def problem(self) -> ConvProblem:
        n, c, *image = self.x
        k, _, *filter_size = self.weight
        return ConvProblem(n, c, k, tuple(image), tuple(filter_size), self.stride, self.padding)

    def problems(self) -> Iterator[tuple[Op, dict[str, Any]]]:
        """Each pass on normal data, for `tuning.tune_all`."""
        conv = self.problem
        x, dy = self._normal(self.x), self._normal((conv.n, conv.k, *conv.out))
        weight = self._normal(self.weight)
        weight *= weight[0].numel() ** -0.5
        choices = {"padding": self.padding, "stride": self.stride}
        yield conv2d_fprop.OP, {"x": x, "weight": weight, **choices}
        yield conv2d_dgrad.OP, {"dy": dy, "weight": weight, **choices}
        yield conv2d_wgrad.OP, {"dy": dy, "x": x, "kernel_size": conv.filter, **choices}

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=torch.channels_last)
        return made.normal_(generator=torch.Generator(self.device).manual_seed(0))


def convolutions_of(graph_module: fx.GraphModule) -> tuple[Convolution, ...]:
    """Every distinct convolution that could be replaced."""
    sites = _sites(graph_module)
    found = (
        Convolution(tuple(s.x.shape), tuple(s.weight.shape), s.padding, s.x.dtype, s.x.device, s.stride) for s in sites
    )
    return tuple(dict.fromkeys(found))


def convolution_calls(graph_module: fx.GraphModule) -> Iterator[ConvolutionCall]:
    """Every 2-D convolution of a batch of maps, in the order of the graph; nodes may be replaced meanwhile."""
    for node in calls(graph_module, torch.conv2d, torch.nn.functional.conv2d):
        given = {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        x, weight, y = value(given["input"]), value(given["weight"]), value(node)
        if x is not None and weight is not None and y is not None and x.dim() == 4:
            yield ConvolutionCall(node, given, x, weight, y)


def _sites(graph_module: fx.GraphModule) -> Iterator[_Site]:
    for call in convolution_calls(graph_module):
        conv = call.problem
        if conv is None:
            continue
        node, given, x, weight, y = call.node, call.given, call.x, call.weight, call.y
        top, left = conv.padding  # pyright: ignore[reportGeneralTypeIssues]
        fits = (
            conv2d_fprop.takes(conv)
            and conv.dilation == (1, 1)
            and conv.groups == 1
            and y.dtype in conv2d_fprop.DTYPES
            and all(p < size for p, size in zip((top, left), conv.filter, strict=True))
            and is_channels_last(weight)
        )
        if fits:
            stride = conv.stride[0]  # pyright: ignore[reportIndexIssue]
            yield _Site(node, given, (top, left), stride, x.to(y.dtype), weight.to(y.dtype))


def _passes(site: _Site) -> tuple[Pass, ...]:
    """Every pass that was tuned, by the faster kernel, but the first by ours: it stands for all three in the graph."""
    found = []
    for name, (row, wins) in conv2d_fprop.choice(site.x, site.weight, site.padding, site.stride).items():
        ours, rival_s = wins or name == "fprop", conv2d_fprop.rival_seconds(row)
        found.append(Pass(name, ours, row.seconds if ours else rival_s, rival_s))
    return tuple(found)


def _pays(passes: tuple[Pass, ...]) -> bool:
    faster = sum(one.seconds for one in passes) < sum(one.rival_s for one in passes)
    return faster and any(one.name == "fprop" for one in passes)
