"""Which sums of an aten graph become part of a convolution, and that the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphs import targets
from ridgeline.kernels import conv2d_dgrad, conv2d_fp8, conv2d_fprop
from ridgeline.train_rewrites import fuse_residual_add
from ridgeline.train_rewrites._operators import arguments
from ridgeline.train_rewrites.fuse_residual_add import residuals

E4M3 = torch.float8_e4m3fn


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


X, OTHER = tensor(2, 16, 6, 5), tensor(2, 16, 6, 5, seed=1)
WEIGHT, POINTWISE, BIAS = tensor(16, 16, 3, 3, seed=2), tensor(16, 16, 1, 1, seed=3), torch.linspace(-1, 1, 16)


def fprop(x: Tensor, weight: Tensor = WEIGHT, bias: Tensor | None = None, **choices: Any) -> Tensor:
    return conv2d_fprop.OP(x, weight, bias, padding=[weight.shape[2] // 2] * 2, **choices)


def dgrad(dy: Tensor) -> Tensor:
    return conv2d_dgrad.OP(dy, WEIGHT, padding=[1, 1])


def tokens(y: Tensor) -> Tensor:
    """Its pixels, one behind the other."""
    return y.permute(0, 2, 3, 1).reshape(y.shape[0], -1, y.shape[1])


def fp8(x: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    narrow = x.to(E4M3), weight.to(E4M3)
    return conv2d_fp8.OP(*narrow, torch.tensor([1.0, 0.5]), BIAS, x_row=0, weight_row=1, padding=[1, 1])


def traced(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The graph of aten operators that a compiler is given."""
    # weights are attributes
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def rewritten(function: Callable[..., Any], *inputs: Tensor, sites: int) -> fx.GraphModule:
    """The graph after the pass; what it returns, and the strides that it promises, are what they were before."""
    graph_module = traced(function, *inputs)
    expected = graph_module(*inputs)
    already = residuals(graph_module)
    assert fuse_residual_add.apply(graph_module) == sites
    assert residuals(graph_module) == sites + already
    actual = graph_module(*inputs)
    (returned,) = graph_module.graph.output_node().all_input_nodes
    assert actual.stride() == expected.stride() == returned.meta["val"].stride()
    assert actual.dtype == expected.dtype == returned.meta["val"].dtype
    # a sum of bf16 is rounded once, not twice
    step = 2**-7 if actual.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(actual, expected, rtol=step, atol=step)
    for node in graph_module.graph.nodes:
        given = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]
        if "eager_input_vals" in node.meta and given:
            args, kwargs = node.meta["eager_input_vals"]
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            assert [v.stride() for v in values] == [n.meta["val"].stride() for n in given]
    return graph_module


def call_with_residual(graph_module: fx.GraphModule) -> dict[str, Any]:
    """The arguments of the only convolution that adds a map."""
    calls = (node for node in graph_module.graph.nodes if "ridgeline.conv2d" in str(node.target))
    (given,) = (given for given in map(arguments, calls) if given["residual"] is not None)
    return given


SUMS = {
    "forward": lambda x, other: fprop(x) + other,
    "the other first": lambda x, other: other + fprop(x, bias=BIAS),
    "a gradient": lambda x, other: dgrad(x) + other,
    "in FP8": lambda x, other: fp8(x) + other.bfloat16(),
    "computed behind the convolution": lambda x, other: fprop(x) + other * 2,
    "read by others before and after": lambda x, other: fprop(other) + other,
    "of tokens": lambda x, other: tokens(fprop(x)) + tokens(other),
    "of tokens, the other first": lambda x, other: tokens(other * 2) + tokens(fprop(x, bias=BIAS)),
    "of rows of tokens": lambda x, other: tokens(fprop(x)).view(2, 3, 10, 16) + tokens(other).view(2, 3, 10, 16),
    "of tokens, twice": lambda x, other: tokens(fprop(x)) + tokens(dgrad(other)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_becomes_part_of_the_convolution(name: str):
    graph_module = rewritten(SUMS[name], X, OTHER, sites=1)
    assert targets(graph_module)["add"] == 0


@pytest.mark.parametrize("wide_first", [True, False])
def test_of_two_the_one_with_more_products_adds(wide_first: bool):
    def forward(x: Tensor, other: Tensor) -> Tensor:
        first, second = (WEIGHT, POINTWISE) if wide_first else (POINTWISE, WEIGHT)
        return fprop(x, first) + fprop(other, second)

    given = call_with_residual(rewritten(forward, X, OTHER, sites=1))
    assert given["weight"].meta["val"].shape == WEIGHT.shape


def test_of_equals_the_later_one_adds():
    graph_module = rewritten(lambda x, other: fprop(x) + fprop(other), X, OTHER, sites=1)
    _, other = graph_module.graph.find_nodes(op="placeholder")
    assert call_with_residual(graph_module)["x"] is other


def test_of_three_two_add():
    graph_module = rewritten(lambda x, other: fprop(x) + fprop(other) + dgrad(other), X, OTHER, sites=2)
    assert targets(graph_module)["add"] == 0


def test_a_convolution_adds_one_map():
    graph_module = rewritten(lambda x, other: fprop(x) + other + x, X, OTHER, sites=1)
    assert targets(graph_module)["add"] == 1


def read_twice(x: Tensor, other: Tensor) -> Tensor:
    y = fprop(x)
    return (y + other) * y


LEFT = {
    "read by another too": (read_twice, OTHER),
    "added to itself": (lambda x, _: (y := fprop(x)) + y, OTHER),
    "with a factor": (lambda x, other: torch.add(fprop(x), other, alpha=2), OTHER),
    "a number": (lambda x, _: fprop(x) + 1.0, OTHER),
    "one number a channel": (lambda x, other: fprop(x) + other, OTHER[:, :, :1, :1]),
    "of another dtype": (lambda x, other: fprop(x) + other, OTHER.bfloat16()),
    "another layout": (lambda x, other: fprop(x) + other, OTHER.contiguous()),
    "a slice of channels": (lambda x, other: fprop(x) + other[:, :16], tensor(2, 32, 6, 5)),
    "cast in between": (lambda x, other: fprop(x).bfloat16() + other, OTHER.bfloat16()),
    "by stride 2": (lambda x, other: fprop(x, stride=2) + other, tensor(2, 16, 3, 2)),
    "no convolution": (lambda x, other: x + other, OTHER),
    "of tokens that another reads": (lambda x, other: (y := tokens(fprop(x))) * (y + tokens(other)), OTHER),
    "of a map whose tokens another reads": (lambda x, o: (y := fprop(x)).sum() * (tokens(y) + tokens(o)), OTHER),
    "of tokens turned": (lambda x, o: tokens(fprop(x)).transpose(1, 2) + tokens(o).transpose(1, 2), OTHER),
    "of tokens in another layout": (
        lambda x, other: tokens(fprop(x)) + other.flatten(2).transpose(1, 2),
        OTHER.contiguous(),
    ),
    "of tokens and one": (lambda x, other: tokens(fprop(x)) + tokens(other)[:, :1], OTHER),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_sum_stays_that_is(name: str):
    forward, other = LEFT[name]
    x = X[:, :, :, :4].contiguous(memory_format=torch.channels_last) if "stride" in name else X
    graph_module = rewritten(forward, x, other, sites=0)
    assert targets(graph_module)["add"] == 1
