"""Errors to plant in the pipeline of rewrites, for tests that a wrong build is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from ridgeline import compiler, lowering
from ridgeline.kernels import conv2d_act
from ridgeline.rewrites import PIPELINE, Rewrite
from ridgeline.rewrites._match import add_constant, calls, constant, finish


def plant(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[fx.GraphModule], int]) -> None:
    """Let the rewrite `name` also do what `wrong` does."""

    def both(right: Callable[[fx.GraphModule], int]) -> Callable[[fx.GraphModule], int]:
        return lambda graph_module: right(graph_module) + wrong(graph_module)

    pipeline = tuple(Rewrite(name, both(r.apply)) if r.name == name else r for r in PIPELINE)
    for module in (lowering, compiler):
        monkeypatch.setattr(module, "PIPELINE", pipeline)


def scale_a_weight(index: int, factor: float = 1.01) -> Callable[[fx.GraphModule], int]:
    """A rewrite that multiplies weight and bias of the convolution `index`, in graph order, by `factor`."""

    def apply(graph_module: fx.GraphModule) -> int:
        convolutions = list(calls(graph_module, torch.ops.aten.conv2d.default, conv2d_act.OP.overload))
        node = convolutions[index]
        scaled = []
        for argument in node.args[1:3]:
            tensor = constant(graph_module, argument)
            scaled.append(
                None if tensor is None else add_constant(graph_module, tensor * factor, near=node, name="planted")
            )
        node.args = (node.args[0], *scaled, *node.args[3:])
        finish(graph_module)
        return 1

    return apply
