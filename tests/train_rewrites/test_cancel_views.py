"""Which views of an aten graph are the map that they came from, and that the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphs import targets
from ridgeline.kernels import conv2d_fprop
from ridgeline.train_rewrites import cancel_views, fuse_residual_add

SHAPE = 2, 16, 6, 5
WEIGHT = torch.linspace(-1, 1, 16 * 16).reshape(16, 16, 1, 1)


def image(seed: int = 0) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def rewritten(function: Callable[..., Any], *inputs: Tensor, cancelled: int) -> fx.GraphModule:
    """The graph after the pass, which computes to the bit what it did, in the strides it did."""
    graph_module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    expected = graph_module(*inputs)
    assert cancel_views.apply(graph_module) == cancelled
    found = graph_module(*inputs)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    return graph_module


# how many views are like one before them
BACK: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "by tokens": (lambda y: y.flatten(2).transpose(1, 2).transpose(1, 2).unflatten(2, y.shape[2:]), 2),
    "by pixels": (lambda y: y.permute(0, 2, 3, 1).reshape(-1, 16).view(2, 6, 5, 16).permute(0, 3, 1, 2), 2),
    "by an axis more": (lambda y: y[None].squeeze(0), 1),
    "as it is": (lambda y: y.view(y.shape), 1),
}


@pytest.mark.parametrize("name", BACK)
def test_a_map_seen_from_its_views_is_the_map(name: str):
    back, cancelled = BACK[name]
    graph_module = rewritten(lambda x: back(x.relu()) * 2, image(), cancelled=cancelled)
    assert set(targets(graph_module)) == {"relu", "mul"}


def test_a_matrix_is_the_weight_that_was_seen_as_filters():
    matrix = torch.linspace(-1, 1, 40).reshape(8, 5)
    graph_module = rewritten(lambda w: w.relu()[:, :, None, None].squeeze(3).squeeze(2) + 1, matrix, cancelled=2)
    assert set(targets(graph_module)) == {"relu", "add"}


def test_what_a_graph_returns_stays_its_view():
    graph_module = rewritten(lambda x: x.relu().flatten(2).unflatten(2, x.shape[2:]), image(), cancelled=0)
    assert targets(graph_module)["view"] == 2


LEFT: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "other strides": (lambda x: x.relu().transpose(2, 3) + 1, torch.zeros(2, 3, 4, 4)),
    "another order": (lambda x: x.relu().permute(1, 0, 2, 3) + 1, torch.zeros(2, 2, 4, 4)),
    "a part": (lambda x: x.relu()[:, :8] + 1, image()),
    "a copy between": (lambda x: x.relu().permute(0, 2, 3, 1).clone().permute(0, 3, 1, 2) + 1, image()),
    "another dtype": (lambda x: x.relu().view(torch.int32) + 1, image()),
    "repeated": (lambda x: x.relu().expand(2, 16, 6, 5) + 1, image()[:1]),
}


@pytest.mark.parametrize("name", LEFT)
def test_stays(name: str):
    function, x = LEFT[name]
    rewritten(function, x, cancelled=0)


def test_a_convolution_behind_views_adds_the_residual_before_them():
    """As a linear layer's result is added to the map of its tokens."""

    def forward(x: Tensor, other: Tensor) -> Tensor:
        y = conv2d_fprop.OP(x, WEIGHT, None, padding=[0, 0]).permute(0, 2, 3, 1).reshape(2, 30, 16)
        return other.view(other.shape) + y.transpose(1, 2).unflatten(2, (6, 5))

    inputs = image(), image(1)
    graph_module = rewritten(forward, *inputs, cancelled=2)
    expected = graph_module(*inputs)
    assert fuse_residual_add.apply(graph_module) == 1 and targets(graph_module)["add"] == 0
    torch.testing.assert_close(graph_module(*inputs), expected)


def test_a_view_of_several_readers_goes_from_all_but_the_result():
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu()
        same = y.flatten(2).unflatten(2, (6, 5))
        return same, same * 2

    graph_module = make_fx(forward, tracing_mode="fake")(image())
    assert cancel_views.apply(graph_module) == 1
    relu, view, last, double = (node for node in graph_module.graph.nodes if node.op == "call_function")
    assert double.args[0] is relu and last.args[0] is view
    assert all(torch.equal(a, b) for a, b in zip(graph_module(image()), forward(image()), strict=True))
