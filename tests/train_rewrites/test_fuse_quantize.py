"""Which quantisations of an aten graph become part of a norm, and that the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from fp8_steps import fp8_by_reference
from graphs import targets
from ridgeline.kernels import group_norm_silu, group_norm_silu_backward, quantize_fp8
from ridgeline.train_rewrites import fuse_quantize
from ridgeline.train_rewrites.fuse_quantize import quantised_by

ROWS = 2


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    with fp8_by_reference():
        yield


def image(c: int = 32, h: int = 8, w: int = 8, seed: int = 1) -> Tensor:
    x = torch.randn(2, c, h, w, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def vectors(c: int = 32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(c, generator=g), torch.randn(c, generator=g)


def state() -> tuple[Tensor, Tensor, Tensor]:
    """Scale, amax, counts of two tensors."""
    return torch.tensor([100.0, 5000.0]), torch.zeros(ROWS), torch.zeros(ROWS, 3, dtype=torch.int64)


def quantize(y: Tensor, of: tuple[Tensor, ...], row: int = 0, fp8_format: str = "e4m3", quads: bool = True) -> Any:
    return quantize_fp8.OP(y, *of, row=row, fp8_format=fp8_format, quads=quads)


def norm(x: Tensor, gamma: Tensor, beta: Tensor, *others: Tensor) -> Tensor:
    return group_norm_silu.OP(x, gamma, beta, *others, groups=4)


def norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, *others: Tensor | None) -> Any:
    return group_norm_silu_backward.OP(dy, x, gamma, beta, *others, groups=4)


def traced(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The graph of aten operators that a compiler is given."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def leaves(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def rewritten(function: Callable[..., Any], *inputs: Any, sites: int) -> fx.GraphModule:
    """The graph after the pass; what it returns and records is what it was before, but for FP8's rounding."""
    graph_module = traced(function, *inputs, state())
    before, after = state(), state()
    expected = leaves(graph_module(*inputs, before))
    assert fuse_quantize.apply(graph_module) == sites
    actual = leaves(graph_module(*inputs, after))
    promised = [node.meta["val"] for node in graph_module.graph.output_node().all_input_nodes]
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        # nothing is rounded to the dtype of x in between, so that a code may be its neighbour
        step = {torch.float8_e5m2: 2**-2, torch.float8_e4m3fn: 2**-3}.get(a.dtype, 1e-5)
        assert ((a.float() - b.float()).abs() <= step * b.float().abs() + 1e-6).all()
        assert any(value.shape == a.shape and value.stride() == a.stride() for value in promised)
    torch.testing.assert_close(after[1], before[1], rtol=1e-5, atol=0)
    assert torch.equal(after[2][:, 2], before[2][:, 2])
    return graph_module


# --- forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quads", [True, False])
@pytest.mark.parametrize("extra", [0, 2], ids=["plain", "scale and shift"])
def test_a_norm_that_only_a_quantisation_reads(quads: bool, extra: int):
    others = [torch.randn(2, 32, generator=torch.Generator().manual_seed(n)) for n in range(extra)]

    def forward(x: Tensor, gamma: Tensor, beta: Tensor, others: Any, of: Any) -> Any:
        return quantize(norm(x, gamma, beta, *others), of, row=1, quads=quads)

    graph_module = rewritten(forward, image(), *vectors(), others, sites=1)
    assert targets(graph_module)["group_norm_silu_fp8"] == 1
    assert targets(graph_module)["group_norm_silu"] == targets(graph_module)["quantize_fp8"] == 0
    assert quantised_by(graph_module) == {"norms": 1}


def test_every_norm_of_a_graph():
    def forward(x: Tensor, gamma: Tensor, beta: Tensor, of: Any) -> Any:
        return [quantize(norm(x * (row + 1), gamma, beta), of, row=row) for row in range(ROWS)]

    graph_module = rewritten(forward, image(), *vectors(), sites=2)
    rows = [node.kwargs["row"] for node in graph_module.graph.nodes if "group_norm_silu_fp8" in str(node.target)]
    assert rows == [0, 1]


FORWARD_LEFT = {
    "read by another too": (lambda y, of: (quantize(y, of), y), image()),
    "quantised twice": (lambda y, of: [quantize(y, of, row=row) for row in range(ROWS)], image()),
    "quantised after something else": (lambda y, of: quantize(y * 2, of), image()),
    "another format": (lambda y, of: quantize(y, of, fp8_format="e5m2"), image()),
    "a slab that no program holds": (lambda y, of: quantize(y, of), image(h=128, w=128)),
}


@pytest.mark.parametrize("name", FORWARD_LEFT)
def test_a_norm_stays_that_is(name: str):
    read, x = FORWARD_LEFT[name]

    def forward(x: Tensor, gamma: Tensor, beta: Tensor, of: Any) -> Any:
        return read(norm(x, gamma, beta), of)

    graph_module = rewritten(forward, x, *vectors(), sites=0)
    assert targets(graph_module)["group_norm_silu"] == 1
    assert set(quantised_by(graph_module)) == {"passes of their own"}


def test_a_scale_on_another_device_is_left():
    graph_module = traced(lambda x, gamma, beta, of: quantize(norm(x, gamma, beta), of), image(), *vectors(), state())
    (quantisation,) = graph_module.graph.find_nodes(op="call_function", target=quantize_fp8.OP.overload)
    scale = quantisation.args[1]
    scale.meta["val"] = torch.empty(ROWS, device="meta")
    assert fuse_quantize.apply(graph_module) == 0


# --- backward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True], ids=["alone", "read by another too"])
@pytest.mark.parametrize("quads", [True, False])
def test_a_gradient_that_a_quantisation_reads(keep: bool, quads: bool):
    """In bf16 it is kept for others alone."""
    none = [None] * 4

    def backward(dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor, of: Any) -> Any:
        dx, dgamma, dbeta, *_ = norm_backward(dy, x, gamma, beta, *none, residual)
        return quantize(dx, of, fp8_format="e5m2", quads=quads), dgamma, dbeta, *([dx.sum((0, 2, 3))] if keep else [])

    graph_module = rewritten(backward, image(seed=3), image(), *vectors(), image(seed=4), sites=1)
    (new,) = graph_module.graph.find_nodes(op="call_function", target=fuse_quantize._NORM_BACKWARD_FP8)
    assert new.kwargs["keep"] == keep and new.kwargs["quads"] == quads
    assert targets(graph_module)["group_norm_silu_backward"] == targets(graph_module)["quantize_fp8"] == 0
    assert quantised_by(graph_module) == {"gradients of norms": 1}
    assert new.meta["val"][0].shape == (image().shape if keep else (0,))


def test_gradients_of_scale_and_shift_stay_in_their_places():
    extra = [torch.randn(2, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]

    def backward(dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, extra: Any, of: Any) -> Any:
        dx, *others = norm_backward(dy, x, gamma, beta, *extra)
        return quantize(dx, of, row=1, fp8_format="e5m2"), others

    graph_module = rewritten(backward, image(seed=3), image(), *vectors(), extra, sites=1)
    assert targets(graph_module)["group_norm_silu_backward_fp8"] == 1


BACKWARD_LEFT = {
    "another format": (lambda dx, of: quantize(dx, of), image()),
    "a sum with another gradient": (lambda dx, of: quantize(dx + 1, of, fp8_format="e5m2"), image()),
    "a slab that no program holds": (lambda dx, of: quantize(dx, of, fp8_format="e5m2"), image(h=128, w=128)),
    "a scale that comes later": (lambda dx, of: quantize(dx, (of[0] * 1, *of[1:]), fp8_format="e5m2"), image()),
}


@pytest.mark.parametrize("name", BACKWARD_LEFT)
def test_a_gradient_stays_that_is(name: str):
    read, x = BACKWARD_LEFT[name]

    def backward(dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, of: Any) -> Any:
        dx, *others = norm_backward(dy, x, gamma, beta)
        return read(dx, of), others[:2]

    graph_module = rewritten(backward, x * 0.5, x, *vectors(), sites=0)
    assert targets(graph_module)["group_norm_silu_backward"] == 1


# --- for Inductor --------------------------------------------------------------------------------------------------


def test_inputs_keep_the_strides_that_were_asked_for():
    """Inductor reads them from `eager_input_vals`, and without these gives whatever order its neighbours prefer."""

    def both(dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, of: Any) -> Any:
        forward = quantize(norm(x + 1, gamma, beta), of)
        return forward, quantize(norm_backward(dy, x + 1, gamma, beta)[0], of, row=1, fp8_format="e5m2")

    graph_module = rewritten(both, image(seed=3), image(), *vectors(), sites=2)
    for node in graph_module.graph.nodes:
        if "_fp8" in str(node.target):
            args, kwargs = node.meta["eager_input_vals"]
            assert len(args) == len(node.args) and kwargs.keys() == node.kwargs.keys()
            maps = [value for value in args if isinstance(value, Tensor) and value.dim() == 4]
            assert maps and all(value.is_contiguous(memory_format=torch.channels_last) for value in maps)
