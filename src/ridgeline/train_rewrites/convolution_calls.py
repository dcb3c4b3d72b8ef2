"""The convolutions that a training graph calls, and their shapes: what rewrites and tuning look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import Op, conv2d_dgrad, conv2d_fprop, conv2d_wgrad
from ridgeline.train_rewrites._match import calls, only_user, value

CONVOLUTIONS = (torch.conv2d, torch.nn.functional.conv2d)
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


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


def convolution_calls(graph_module: fx.GraphModule) -> Iterator[ConvolutionCall]:
    """Every 2-D convolution of a batch of maps, in the order of the graph; nodes may be replaced meanwhile."""
    for node in calls(graph_module, *CONVOLUTIONS):
        given = {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        x, weight, y = value(given["input"]), value(given["weight"]), value(node)
        if x is not None and weight is not None and y is not None and x.dim() == 4:
            yield ConvolutionCall(node, given, x, weight, y)
