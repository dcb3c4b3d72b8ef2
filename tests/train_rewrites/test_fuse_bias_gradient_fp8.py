"""Bias gradients of steps in FP8: which norms sum for which weight gradients, and that the graph computes the same."""

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
from ridgeline.kernels import conv2d_wgrad_fp8, group_norm_silu_backward, group_norm_silu_backward_fp8, quantize_fp8
from ridgeline.kernels._quads import to_quads
from ridgeline.launches import kernel_calls, planned
from ridgeline.train_rewrites import fuse_bias_gradient, fuse_quantize
from ridgeline.train_rewrites.fuse_quantize import quantised_by

C = 32
SUMMED = group_norm_silu_backward_fp8.SUMMED
WGRAD = conv2d_wgrad_fp8.OP.overload
Use = Callable[[Tensor, Any], Any]  # of dx, and of what is given


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    with fp8_by_reference():
        yield


def image(seed: int, side: int = 8) -> Tensor:
    x = torch.randn(2, C, side, side, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def given(side: int = 8) -> dict[str, Any]:
    """dy, x, gamma, beta of a norm; quads of another map; the state of two tensors."""
    generator = torch.Generator().manual_seed(2)
    gamma, beta = torch.randn(2, C, generator=generator)
    quads = to_quads((image(5, side) * 16).to(torch.float8_e4m3fn), beside=True)
    state = (torch.tensor([500.0, 1000.0]), torch.zeros(2), torch.zeros(2, 3, dtype=torch.int64))
    inverse = torch.tensor([1 / 500, 1 / 1000])
    return {"maps": (image(3, side), image(4, side), gamma, beta), "quads": quads, "state": state, "inverse": inverse}


def quantize(dx: Tensor, all_: Any, row: int = 0) -> Any:
    return quantize_fp8.OP(dx, *all_["state"], row=row, fp8_format="e5m2", quads=True)


def wgrad(dx: Tensor, all_: Any, row: int = 0) -> tuple[Tensor, Tensor]:
    """dw, db of a convolution whose result had the gradient dx."""
    dy_quads = quantize(dx, all_, row)[1]
    return conv2d_wgrad_fp8.OP(dy_quads, all_["quads"], all_["inverse"], kernel_size=[3, 3], dy_row=row, x_row=1)


def rewritten(use: Use, sites: int, *, side: int = 8) -> fx.GraphModule:
    """The graph after both passes. What it returns is what it was, but for a sum of what is not rounded to e5m2."""

    def backward(all_: Any) -> Any:
        dx, *others = group_norm_silu_backward.OP(*all_["maps"], groups=4)
        return use(dx, all_), others[:2]

    ours, theirs = given(side), given(side)
    graph_module = make_fx(backward, tracing_mode="fake")(ours)
    expected = tree_leaves(graph_module(theirs))
    fuse_quantize.apply(graph_module)
    assert fuse_bias_gradient.apply(graph_module) == sites
    actual = tree_leaves(graph_module(ours))
    promised = [node.meta["val"] for node in graph_module.graph.output_node().all_input_nodes]
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert any((v.dtype, v.shape, v.stride()) == (a.dtype, a.shape, a.stride()) for v in promised)
        # 128 pixels, each rounded by 3 %
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=0.05 * float(b.float().abs().max()))
    torch.testing.assert_close(ours["state"][1], theirs["state"][1], rtol=1e-5, atol=0)
    return graph_module


def wgrads(graph_module: fx.GraphModule) -> list[bool]:
    """Of each weight gradient in FP8 whether it computes db."""
    found = graph_module.graph.find_nodes(op="call_function", target=WGRAD)
    for node in found:
        assert (node.meta["val"][1].numel() > 0) == node.kwargs.get("bias", True)
    return [node.kwargs.get("bias", True) for node in found]


def summed(graph_module: fx.GraphModule) -> fx.Node:
    (node,) = graph_module.graph.find_nodes(op="call_function", target=SUMMED)
    return node


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_the_norm_sums_what_a_weight_gradient_would(dtype: torch.dtype | None):
    """In the dtype that is asked for; in fp32 from values that were never rounded."""

    def use(dx: Tensor, all_: Any) -> Any:
        dw, db = wgrad(dx, all_)
        return dw, db if dtype is None else torch.ops.prims.convert_element_type(db, dtype)

    graph_module = rewritten(use, 1)
    assert wgrads(graph_module) == [False] and not summed(graph_module).kwargs["keep"]
    assert targets(graph_module)["convert_element_type"] == (dtype is torch.bfloat16)
    assert quantised_by(graph_module) == {"gradients of norms": 1}
    total = graph_module(given())[0][1].float()
    exact = group_norm_silu_backward.gradients(*given()["maps"], groups=4)[0].sum((0, 2, 3))
    torch.testing.assert_close(total, exact, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-4)


def test_kernels_are_found_for_what_is_called():
    """Two of the norm, two of the weight gradient, in the layout that Inductor is told to keep."""
    graph_module = rewritten(wgrad, 1)
    calls = list(kernel_calls(graph_module))
    assert [call.target for call in calls] == [SUMMED, WGRAD]
    assert [len(launch.parts) for call in calls for launch in planned(call, "meta")] == [1, 1, 2]
    for call in calls:
        args, kwargs = call.meta.get("eager_input_vals", (call.args, call.kwargs))
        assert len(args) == len(call.args) and kwargs.keys() == call.kwargs.keys()


def test_a_sum_of_the_kept_map_is_the_norms_too():
    """Which is then not kept for it."""

    def use(dx: Tensor, all_: Any) -> Any:
        return quantize(dx, all_), dx.sum((0, 2, 3))

    assert not summed(rewritten(use, 1)).kwargs["keep"]

    def use_both(dx: Tensor, all_: Any) -> Any:
        return wgrad(dx, all_), dx.sum((0, 2, 3)), 2 * dx

    graph_module = rewritten(use_both, 2)
    assert summed(graph_module).kwargs["keep"] and wgrads(graph_module) == [False]
    assert targets(graph_module)["sum"] == 0


def test_what_nothing_reads_is_not_computed():
    """With no sum, as of a convolution without a bias; also where no norm is near."""
    graph_module = rewritten(lambda dx, all_: wgrad(dx, all_)[0], 0)
    assert wgrads(graph_module) == [False] and targets(graph_module)["group_norm_silu_backward_fp8"] == 1
    assert wgrads(rewritten(lambda dx, all_: wgrad(2 * dx, all_)[0], 0)) == [False]


def test_a_gradient_that_is_changed_first_keeps_its_sum():
    graph_module = rewritten(lambda dx, all_: wgrad(2 * dx, all_), 0)
    assert wgrads(graph_module) == [True] and targets(graph_module)["group_norm_silu_backward_fp8_summed"] == 0


def test_a_gradient_that_is_quantised_by_a_pass_of_its_own_is_summed_too():
    """Beside another that the norm quantises."""
    graph_module = rewritten(lambda dx, all_: [wgrad(dx, all_, row) for row in range(2)], 2)
    assert wgrads(graph_module) == [False, False]
    assert quantised_by(graph_module) == {"gradients of norms": 1, "passes of their own": 1}


def test_of_a_map_that_no_program_holds_the_bf16_form_is_left():
    graph_module = rewritten(wgrad, 0, side=128)
    assert wgrads(graph_module) == [True] and targets(graph_module)["group_norm_silu_backward"] == 1


def test_sums_of_slices_are_slices_of_the_norms():
    """As of the two maps of a concatenation, copied or quantised. What is not every channel stays."""

    def use(dx: Tensor, all_: Any) -> Any:
        few = dx.shape[1] // 4
        first = dx[:, :few].clone(memory_format=torch.channels_last)
        return first.sum((0, 2, 3)), dx[:, few:].float().sum((0, 2, 3)), dx[:, 1:few:2].sum((0, 2, 3)), wgrad(dx, all_)

    graph_module = rewritten(use, 3)
    assert wgrads(graph_module) == [False] and targets(graph_module)["sum"] == 1
