"""Gradients that a norm's backward adds: where the pass fires, and that the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from graphs import by_reference, targets
from ridgeline.kernels import conv2d_dgrad, group_norm_silu_backward
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites import fuse_gradient_add
from ridgeline.train_rewrites._operators import arguments

NORM = group_norm_silu_backward.OP


def tensor(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


DY, X, OTHER = tensor(2, 16, 4, 5), tensor(2, 16, 4, 5, seed=1), tensor(2, 8, 4, 5, seed=2)
WEIGHT, GAMMA = tensor(8, 16, 1, 1, seed=3), torch.linspace(0.5, 1.5, 16)


def norm(dy: Tensor, x: Tensor, *residual: Tensor | None) -> tuple[Tensor, ...]:
    return NORM(dy, x, GAMMA, GAMMA, *([None] * 4), *residual, groups=4)


def branch(dy: Tensor) -> Tensor:
    return conv2d_dgrad.OP(dy, WEIGHT, padding=[0, 0])


def rewritten(function: Callable[..., Any], sites: int) -> fx.GraphModule:
    """The graph after the pass; what it returns is what it was."""
    inputs = (DY, X, OTHER)
    # weights are attributes
    graph_module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    expected = graph_module(*inputs)
    assert fuse_gradient_add.apply(graph_module) == sites
    torch.testing.assert_close(graph_module(*inputs), expected)
    return graph_module


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "branch first"])
def test_a_branch_behind_the_norm_moves_before_it(first: bool):
    def backward(dy: Tensor, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        dx, dgamma, *_ = norm(dy, x)
        way = branch(other * 2)
        return (dx + way if first else way + dx), dgamma

    graph_module = rewritten(backward, sites=1)
    (node,) = graph_module.graph.find_nodes(op="call_function", target=NORM.overload)
    assert arguments(node)["residual"].target is conv2d_dgrad.OP.overload
    assert not graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    # Inductor asks these for strides
    assert node.meta["eager_input_vals"][0][8].is_contiguous(memory_format=torch.channels_last)


def test_a_slice_is_made_dense():
    graph_module = rewritten(lambda dy, x, other: norm(dy, x)[0] + torch.cat((x, branch(other)), 1)[:, 16:], sites=1)
    (node,) = graph_module.graph.find_nodes(op="call_function", target=NORM.overload)
    residual = arguments(node)["residual"]
    assert residual.target is torch.ops.aten.clone.default
    assert residual.meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_of_two_norms_one_adds_the_other():
    def backward(dy: Tensor, x: Tensor, _other: Tensor) -> Tensor:
        return norm(dy, x)[0] + norm(x, dy)[0]

    rewritten(backward, sites=1)


SILENT: dict[str, Callable[..., Any]] = {
    "dx has other readers": lambda dy, x, other: ((dx := norm(dy, x)[0]) + branch(other), dx),
    "the norm has a part in it": lambda dy, x, _other: (dx := norm(dy, x))[0] + dx[1][None, :, None, None] * x,
    "a residual already": lambda dy, x, other: norm(dy, x, x)[0] + branch(other),
    "another layout": lambda dy, x, other: norm(dy, x)[0] + branch(other).contiguous(),
    "another shape": lambda dy, x, other: norm(dy, x)[0] + branch(other)[:1],
    "another dtype": lambda dy, x, other: norm(dy, x)[0] + branch(other).double(),
    "a factor": lambda dy, x, other: torch.add(norm(dy, x)[0], branch(other), alpha=2),
    "a number": lambda dy, x, _other: norm(dy, x)[0] + 1.0,
    "another result": lambda dy, x, _other: norm(dy, x)[1] + GAMMA,
}


@pytest.mark.parametrize("backward", SILENT.values(), ids=SILENT)
def test_it_does_not_fire(backward: Callable[..., Any]):
    rewritten(backward, sites=0)


# --- whole blocks ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers for `body(model, x)`, whose x is what a convolution made."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.conv_in, self.conv = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.film = nn.GroupNorm(2, 8), nn.Linear(4, 16)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.conv_in(x))


def block(model: Any, x: Tensor) -> Tensor:
    w, b = model.film(torch.ones(2, 4))[:, :, None, None].chunk(2, dim=1)
    return F.dropout(F.silu(model.norm(x) * (1 + w) + b), 0.25) + x


def trained(body: Callable[..., Tensor], *, fuse: bool) -> tuple[list[Tensor], int, int]:
    """Loss and gradients, additions in the backward graph, and the residuals that norms get there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(body).to(memory_format=torch.channels_last)
    graphs = []

    def kept(graph_module: fx.GraphModule, _: Any) -> Any:
        if fuse:
            fuse_gradient_add.apply(graph_module)
        graphs.append(graph_module)
        return make_boxed_func(graph_module)

    backend = TrainBackend(("fuse_group_norm_silu",), aot_autograd(fw_compiler=kept))
    loss = torch.compile(model, backend=backend, dynamic=False)(tensor(2, 3, 4, 4)).square().mean()
    loss.backward()
    norms = graphs[1].graph.find_nodes(op="call_function", target=NORM.overload)
    residuals = sum(arguments(node)["residual"] is not None for node in norms)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients], targets(graphs[1])["add"], residuals


BLOCKS: dict[str, Callable[..., Tensor]] = {
    "norm alone": lambda m, x: m.conv(m.norm(x)) + x,
    "silu": lambda m, x: m.conv(F.silu(m.norm(x))) + x,
    "scale, shift and dropout": block,
    "a concatenation": lambda m, x: m.norm(y := torch.cat((x[:, :3], x[:, 3:]), dim=1)) + y,
}


@pytest.mark.parametrize("body", BLOCKS.values(), ids=BLOCKS)
def test_a_residual_block_learns_the_same(body: Callable[..., Tensor]):
    with by_reference():
        expected, additions, none = trained(body, fuse=False)
        actual, left, residuals = trained(body, fuse=True)
    assert (none, residuals, additions - left) == (0, 1, 1)
    torch.testing.assert_close(actual, expected)
