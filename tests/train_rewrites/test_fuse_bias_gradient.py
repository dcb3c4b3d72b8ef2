"""Bias gradients that norms sum: where the pass fires, and that gradients stay what they were."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_module_simplified

from ridgeline.kernels import conv2d_fprop, group_norm_silu, group_norm_silu_backward
from ridgeline.kernels._group_norm_silu_call import Config
from ridgeline.train_rewrites import fuse_bias_gradient

SUMMED = group_norm_silu_backward.SUMMED


class Ours(nn.Module):
    """A convolution by the project's op; its bias is added in fp32."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16, 3, 3) * 0.1), nn.Parameter(torch.randn(16))

    def forward(self, x):
        weight = self.weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
        return conv2d_fprop.OP(x, weight, self.bias, padding=[1, 1])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return group_norm_silu.OP(x, self.gamma, self.beta, groups=4)


def theirs():
    return nn.Conv2d(16, 16, 3, padding=1).bfloat16()


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in layers)).to(memory_format=torch.channels_last)


def gradients(module, x, *, fuse):
    """(gradients of x and parameters, sites, the backward's graph) of the mean square, by the passes' graphs."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    found: dict = {"sites": 0}

    def forward(graph_module, _inputs):
        return graph_module.forward

    def backward(graph_module, _inputs):
        if fuse:
            found["sites"] = fuse_bias_gradient.apply(graph_module)
        found["graph"] = graph_module.graph
        return graph_module.forward

    def compiler(graph_module, inputs):
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
        return aot_module_simplified(
            graph_module, inputs, fw_compiler=forward, bw_compiler=backward, decompositions=table
        )

    torch._dynamo.reset()
    compiled = torch.compile(lambda m, x: m(x).float().square().mean(), backend=compiler, dynamic=False)
    compiled(module, x).backward()
    return [x.grad, *(p.grad for p in module.parameters())], found["sites"], found["graph"]


def sums(graph):
    """Sums over images and pixels in a graph, PyTorch's convolutions' own included."""
    masks = [
        n.args[10] for n in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    ]
    sums = [n.args[1] for n in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)]
    return sum(mask[2] for mask in masks) + sum(axes == [0, 2, 3] for axes in sums)


def batch():
    x = torch.randn(3, 16, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("convolution", [Ours, theirs])
def test_a_bias_before_a_norm_gets_the_norms_sum(convolution):
    module = net(convolution, Norm, convolution)
    plain, _, before = gradients(module, batch(), fuse=False)
    fused, sites, graph = gradients(module, batch(), fuse=True)
    assert sites == 1  # the last convolution's gradient is not a norm's
    assert len(graph.find_nodes(op="call_function", target=SUMMED)) == 1
    assert sums(before) - sums(graph) == 1
    names = ["x", *(name for name, _ in module.named_parameters())]
    for name, a, b in zip(names, plain, fused, strict=True):
        if name == "0.bias":
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3 * float(a.abs().max()))
            assert a.dtype == b.dtype
        else:
            assert torch.equal(a, b), name


def test_two_convolutions_of_one_result_read_one_sum():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.norm = Ours(), Ours(), Norm()

        def forward(self, x):
            return self.norm(self.left(x) + self.right(x))

    module = net(Both)
    plain, _, _ = gradients(module, batch(), fuse=False)
    fused, sites, graph = gradients(module, batch(), fuse=True)
    assert sites >= 1 and len(graph.find_nodes(op="call_function", target=SUMMED)) == 1
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3 * float(a.abs().max()))


def test_it_does_not_fire_where_something_lies_between():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    assert gradients(net(Ours, Doubled, Norm), batch(), fuse=True)[1] == 0
    assert gradients(net(Norm), batch(), fuse=True)[1] == 0


@pytest.mark.parametrize(("axes", "keep"), [([0, 2], False), ([0, 2, 3], True), ([1, 2, 3], False)])
def test_it_does_not_fire_on_other_sums(axes, keep):
    graph = fx.Graph()
    dy, x, vector = (graph.placeholder(name) for name in ("dy", "x", "vector"))
    norm = graph.call_function(group_norm_silu_backward.OP.overload, (dy, x, vector, vector), {"groups": 4})
    dx = graph.call_function(operator.getitem, (norm, 0))
    graph.output(graph.call_function(torch.ops.aten.sum.dim_IntList, (dx, axes, keep)))
    assert fuse_bias_gradient.apply(fx.GraphModule({}, graph)) == 0


@pytest.mark.parametrize("place", [0, 1])
def test_the_summed_operator_is_the_other_and_a_sum(place):
    """A map with pixels beside the tile, and one without."""
    sample = group_norm_silu_backward.SAMPLES[place].arguments(torch.float32, "cpu")
    dx, *others = group_norm_silu_backward.OP(**sample)
    summed, total, *rest = SUMMED(**sample)
    assert torch.equal(dx, summed) and all(map(torch.equal, others, rest))
    torch.testing.assert_close(total, dx.sum((0, 2, 3)))
    outcome = torch.library.opcheck(SUMMED, (), sample, test_utils=("test_schema", "test_faketensor"))
    assert set(outcome.values()) == {"SUCCESS"}


def test_a_norm_in_two_passes_is_summed_by_pytorch(monkeypatch):
    """Its slab fits no program, so that dx is read once more."""
    sample = group_norm_silu_backward.SAMPLES[0].arguments(torch.float32, "cpu")
    config = Config(8, 16, 1)
    assert "ROWS" not in group_norm_silu_backward.plan(config=config, sum_dx=True, **sample).constants
    monkeypatch.setattr(group_norm_silu_backward, "default_config", lambda *_: config)
    dx, total, *_ = SUMMED(**sample)
    torch.testing.assert_close(total, dx.sum((0, 2, 3)))
