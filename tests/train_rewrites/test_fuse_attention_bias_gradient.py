"""Gradients of the biases of q, k and v that attention sums: where the pass fires, and that gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.kernels import attention_packed, attention_packed_backward, conv2d_fprop
from ridgeline.kernels._attention_packed_call import attention_sample
from ridgeline.train_backend import fuse
from ridgeline.train_rewrites import fuse_attention_bias_gradient, overlap_weight_gradients

BACKWARD, SUMMED = attention_packed_backward.OP.overload, attention_packed_backward.SUMMED
SUM = torch.ops.aten.sum.dim_IntList
N, T, HEADS, D = 2, 6, 1, 8
WIDTH = 3 * HEADS * D
ARGUMENTS = attention_sample("", N, T, HEADS, D, backward=True).arguments(torch.float16, "cpu")
TENSORS = [ARGUMENTS[name] for name in ("dout", "qkv", "out", "lse")]


def traced(of_dqkv: Callable[[Tensor], Any]) -> fx.GraphModule:
    """A graph of aten operators of what a function makes of dqkv."""

    def both(*tensors: Tensor) -> tuple[Tensor, Any]:
        dqkv = attention_packed_backward.OP(*tensors, heads=HEADS)
        return dqkv, of_dqkv(dqkv)

    return make_fx(both, tracing_mode="fake")(*TENSORS)


def count(graph_module: fx.GraphModule, target: Any) -> int:
    return len(graph_module.graph.find_nodes(op="call_function", target=target))


FIRES: dict[str, Callable[[Tensor], Tensor]] = {
    "of a map": lambda x: x.view(N, 2, 3, WIDTH).permute(0, 3, 1, 2).sum((0, 2, 3), dtype=torch.float32),
    "of rows": lambda x: x.view(-1, WIDTH).sum(0, keepdim=True),
    "of columns": lambda x: x.view(-1, WIDTH).t().unsqueeze(0).sum(2, dtype=torch.float32),
    "of tokens": lambda x: x.sum((0, -2), keepdim=True, dtype=torch.float32),
}


@pytest.mark.parametrize("of_dqkv", FIRES.values(), ids=FIRES)
def test_it_fires_behind_views(of_dqkv: Callable[[Tensor], Tensor]):
    graph_module = traced(of_dqkv)
    dqkv, expected = graph_module(*TENSORS)
    assert fuse_attention_bias_gradient.apply(graph_module) == 1
    assert (count(graph_module, BACKWARD), count(graph_module, SUMMED), count(graph_module, SUM)) == (0, 1, 1)
    (total,) = graph_module.graph.find_nodes(op="call_function", target=SUM)
    assert total.args[0].meta["val"].shape == (N, WIDTH) and total.args[1] == [0]
    same, found = graph_module(*TENSORS)
    assert torch.equal(same, dqkv)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=4e-3)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "of images": lambda x: x.sum(0),
    "of tokens of an image": lambda x: x.sum(1),
    "of channels": lambda x: x.sum(2),
    "of all": lambda x: x.sum((0, 1, 2)),
    "of all, unsaid": lambda x: torch.ops.aten.sum.dim_IntList(x, []),
    "of channels apart": lambda x: x.view(N, T, 3, HEADS * D).sum((0, 1)),
    "of memory read as another map": lambda x: x.view(N, WIDTH, T).sum((0, 2)),
    "of a map that is copied": lambda x: x.view(N, 2, 3, WIDTH).permute(0, 3, 1, 2).contiguous().sum((0, 2, 3)),
    "of a part": lambda x: x[:, :, :D].sum((0, 1)),
    "of some tokens": lambda x: x[:, 1:].sum((0, 1)),
    "of what is changed": lambda x: (2 * x).sum((0, 1)),
    "of what is cast": lambda x: x.float().sum((0, 1)),
}


@pytest.mark.parametrize("of_dqkv", OTHERS.values(), ids=OTHERS)
def test_it_does_not_fire_on_others(of_dqkv: Callable[[Tensor], Any]):
    graph_module = traced(of_dqkv)
    before = graph_module.code
    assert fuse_attention_bias_gradient.apply(graph_module) == 0
    assert graph_module.code == before and count(graph_module, SUMMED) == 0


def test_two_sums_of_one_attention():
    graph_module = traced(lambda x: (x.sum((0, 1)), x.flatten(0, 1).sum(0, dtype=torch.float32), x.sum(2)))
    _, (narrow, wide, others) = graph_module(*TENSORS)
    assert fuse_attention_bias_gradient.apply(graph_module) == 2 and count(graph_module, SUMMED) == 1
    _, found = graph_module(*TENSORS)
    for one, expected in zip(found, (narrow, wide, others), strict=True):
        torch.testing.assert_close(one, expected, rtol=2e-3, atol=4e-3)


class Attention(nn.Module):
    """Of the pixels of a map, its q, k and v by a layer with a bias."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 16) * 0.3), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.linear:
            qkv = F.linear(x.flatten(2).transpose(1, 2), self.weight, self.bias)
        else:
            made = conv2d_fprop.OP(x, self.weight[..., None, None], self.bias, padding=[0, 0])
            qkv = made.permute(0, 2, 3, 1).flatten(1, 2)
        return attention_packed.OP(qkv, heads=HEADS)[0]


def gradients(module: nn.Module, x: Tensor, *passes: Callable[[fx.GraphModule], Any]) -> tuple[Any, fx.GraphModule]:
    """(gradients of parameters, the backward's graph) of the mean square, by the graph that `passes` change."""
    module.zero_grad()
    graphs = []

    def forward(graph_module, _inputs):
        return graph_module.forward

    def backward(graph_module, _inputs):
        for one in passes:
            one(graph_module)
        graphs.append(graph_module)
        return graph_module.forward

    def compiler(graph_module, inputs):
        return aot_module_simplified(graph_module, inputs, fw_compiler=forward, bw_compiler=backward)

    torch._dynamo.reset()
    compiled = torch.compile(lambda m, x: m(x).float().square().mean(), backend=compiler, dynamic=False)
    compiled(module, x).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}, graphs[0]


@pytest.mark.parametrize("linear", [False, True], ids=["convolution", "linear layer"])
def test_a_layer_before_an_attention_gets_its_sum(linear: bool):
    torch.manual_seed(0)
    module = Attention(linear=linear)
    x = torch.randn(N, 16, 2, 3).contiguous(memory_format=torch.channels_last)
    plain, _ = gradients(module, x)
    fused, graph_module = gradients(module, x, fuse)
    assert count(graph_module, SUMMED) == 1 and count(graph_module, BACKWARD) == 0
    assert torch.equal(plain["weight"], fused["weight"])
    torch.testing.assert_close(plain["bias"], fused["bias"], rtol=1e-4, atol=1e-6)
    assert not fused["bias"][HEADS * D : 2 * HEADS * D].any()
    # what is left of the sum still runs beside the rest
    assert overlap_weight_gradients.apply(graph_module) == 2
    assert count(graph_module, overlap_weight_gradients.twin_of(SUM)) == 1


@pytest.mark.gpu
def test_a_layer_before_an_attention_gets_its_sum_on_a_gpu():
    torch.manual_seed(0)
    module = Attention(linear=False).to("cuda", torch.bfloat16)
    x = torch.randn(64, 16, 8, 8, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    plain, _ = gradients(module, x)
    fused, graph_module = gradients(module, x, fuse)
    assert count(graph_module, SUMMED) == 1
    assert torch.equal(plain["weight"], fused["weight"])
    torch.testing.assert_close(plain["bias"], fused["bias"], rtol=2e-2, atol=5e-3 * float(plain["bias"].abs().max()))
