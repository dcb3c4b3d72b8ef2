"""Layout changes that the graphs of a compiled step ask for: those inside convolutions, and copies to another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.train_rewrites._match import is_channels_last

_ATEN = torch.ops.aten
# operands that a convolution copies where they are not dense in its own order, by their position; input and weight,
# which decide what that order is, come last
_OPERANDS: dict[Any, dict[str, int]] = {
    _ATEN.convolution.default: {"input": 0, "weight": 1},
    _ATEN.convolution_backward.default: {"grad_output": 0, "input": 1, "weight": 2},
}
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_MOST_SHOWN = 3


@dataclass(frozen=True)
class LayoutCopy:
    """A map that some operator of a graph has to copy for its layout alone."""

    operator: str
    operand: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operand} of {self.operator}, {list(self.shape)} with strides {list(self.strides)}"


class LayoutWatch:
    """Looks at graphs before they are compiled: `see` each, then ask for `in_words`."""

    def __init__(self) -> None:
        self.graphs = 0
        self.found: list[LayoutCopy] = []

    def see(self, graph_module: fx.GraphModule) -> None:
        self.graphs += 1
        self.found += layout_copies(graph_module.graph)

    def in_words(self) -> str:
        """One line for a report; empty until a graph was seen, as none is that a cache answers for."""
        if not self.graphs:
            return ""
        shown = "; ".join(map(str, self.found[:_MOST_SHOWN]))
        more = f"; and {len(self.found) - _MOST_SHOWN} more" if len(self.found) > _MOST_SHOWN else ""
        count = f"{len(self.found)} layout copies in {self.graphs} compiled graphs"
        return f"{count}: {shown}{more}" if self.found else count


def layout_copies(graph: fx.Graph) -> list[LayoutCopy]:
    """The layout changes inside a graph of aten operators whose nodes have fake values (`meta["val"]`).

    Counted are operands of 2-D convolutions that are not dense in the order in which the convolution works, and copies
    from channels_last to NCHW or back. A copy that keeps the order is not: it makes a slice dense, which a compiler
    does in the kernel that computes its values. Inputs of the graph are given, and still count where a convolution
    copies them.
    """
    return [copy for node in graph.nodes if node.op == "call_function" for copy in _of_node(node)]


def _of_node(node: fx.Node) -> Iterator[LayoutCopy]:
    if node.target in _OPERANDS:
        yield from _of_convolution(node)
    elif node.target in _COPIES:
        source, result = _map(node.args[0]), _map(node)
        if source is not None and result is not None and _changes_order(source, result):
            yield _copy(node, "input", source)


def _of_convolution(node: fx.Node) -> Iterator[LayoutCopy]:
    operands = {name: _map(node.args[position]) for name, position in _OPERANDS[node.target].items()}
    # cuDNN's rule: one of the two is enough
    deciding = (operands["input"], operands["weight"])
    nhwc = any(t is not None and is_channels_last(t) and not t.is_contiguous() for t in deciding)
    for name, operand in operands.items():
        if operand is not None and not (is_channels_last(operand) if nhwc else operand.is_contiguous()):
            yield _copy(node, name, operand)


def _changes_order(source: Tensor, result: Tensor) -> bool:
    """Whether one is NCHW and the other channels_last; what is both at once, or neither, changes nothing."""
    for a, b in ((source, result), (result, source)):
        if a.is_contiguous() and not is_channels_last(a) and is_channels_last(b) and not b.is_contiguous():
            return True
    return False


def _map(node: Any) -> Tensor | None:
    """The fake value of a node that is a map [N, C, H, W]."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) and found.dim() == 4 else None


def _copy(node: fx.Node, operand: str, tensor: Tensor) -> LayoutCopy:
    operator = str(node.target).removeprefix("aten.").removesuffix(".default")
    return LayoutCopy(operator, operand, tuple(tensor.shape), tuple(tensor.stride()))
