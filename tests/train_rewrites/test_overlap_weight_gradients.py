"""Weight gradients on the side stream: where the pass fires, and that gradients stay what they were."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ridgeline.errors import NotEngaged
from ridgeline.kernels import conv2d_fprop
from ridgeline.train_backend import inductor
from ridgeline.train_rewrites import overlap_weight_gradients

MM = "ridgeline.mm_beside.default"
THEIRS = "ridgeline.weight_gradient_beside.default"
OURS = "ridgeline.conv2d_wgrad_beside.default"
JOIN = "ridgeline.join_beside.default"


def gradients(function, arguments, *, overlap):
    """(gradients, operators of the backward's graph, how many were moved) of the mean square."""
    found: dict = {"operators": [], "moved": 0}
    leaves = [one.clone().requires_grad_() for one in arguments]

    def backward(graph_module, _inputs):
        if overlap:
            found["moved"] = overlap_weight_gradients.apply(graph_module)
        found["operators"] = [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]
        return nop(graph_module, None)

    compiled = aot_function(function, nop, backward, min_cut_rematerialization_partition)
    made = torch.autograd.grad(compiled(*leaves).float().square().mean(), leaves)
    return made, found["operators"], found["moved"]


def check(function, arguments):
    expected, _, _ = gradients(function, arguments, overlap=False)
    got, operators, moved = gradients(function, arguments, overlap=True)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    return operators, moved


def maps(*shape):
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def test_a_convolution_of_pytorch_is_split_and_joined_at_the_end():
    operators, moved = check(lambda x, w: F.conv2d(x, w, padding=1), (maps(2, 8, 4, 4), maps(8, 8, 3, 3)))
    assert moved == 1
    assert THEIRS in operators
    assert "aten.convolution_backward.default" in operators  # of x
    assert operators[-1] == JOIN


def test_a_weight_gradient_alone_leaves_no_call_behind():
    def function(x, w):
        return F.conv2d(x.detach(), w, padding=1) + x.sum()

    operators, moved = check(function, (maps(2, 8, 4, 4), maps(8, 8, 3, 3)))
    assert moved == 1
    assert "aten.convolution_backward.default" not in operators


def test_own_convolutions_and_linear_layers_are_taken():
    def function(x, w, linear):
        y = conv2d_fprop.OP(x.to(torch.bfloat16), w.to(torch.bfloat16), None, padding=[1, 1])
        return F.linear(y.float().permute(0, 2, 3, 1), linear)

    x, w, linear = maps(2, 8, 4, 4), maps(8, 8, 3, 3), torch.randn(5, 8)
    operators, moved = check(function, (x, w, linear))
    # the graph casts the weight's gradient to fp32, so something reads it; that of the linear layer is returned
    assert moved == 1
    assert MM in operators

    bf16 = [one.to(torch.bfloat16) for one in (x, w)]
    operators, moved = check(lambda x, w: conv2d_fprop.OP(x, w, None, padding=[1, 1]), bf16)
    assert (moved, OURS in operators or THEIRS in operators) == (1, True)


SUM = "ridgeline.sum_dim_IntList_beside.default"


@pytest.mark.parametrize(
    ("scaled", "reads", "taken"), [(False, False, 1), (True, False, 0), (False, True, 0)], ids=["ours", "fused", "read"]
)
def test_a_bias_gradient_is_taken_where_an_operator_of_ours_made_what_it_sums(scaled, reads, taken):
    def function(x, bias, w):
        y = x.to(torch.bfloat16) + (2 * bias if reads else bias)[:, None, None]
        if scaled:
            y = y.sin()
        return conv2d_fprop.OP(y.contiguous(memory_format=torch.channels_last), w, None, padding=[1, 1])

    w, bias = (one.to(torch.bfloat16) for one in (maps(8, 8, 3, 3), torch.randn(8)))
    operators, _ = check(function, (maps(2, 8, 4, 4), bias, w))
    assert operators.count(SUM) == taken


def test_what_the_graph_reads_stays():
    def function(x, w):
        return F.conv2d(x, 2 * w, padding=1)

    assert check(function, (maps(2, 8, 4, 4), maps(8, 8, 3, 3)))[1] == 0


def test_results_of_several_tensors_are_joined_one_by_one():
    graph = torch.fx.Graph()
    made = graph.call_function(torch.ops.aten.max.dim, (graph.placeholder("x"), 0))
    items = [graph.call_function(operator.getitem, (made, index)) for index in range(2)]
    assert overlap_weight_gradients._items(made) == items


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        for convolution in self.convolutions:
            x = F.silu(convolution(x))
        return self.linear(x.permute(0, 2, 3, 1)).square().mean()


def compiled_by_inductor(model, x, **choices):
    """Gradients of the parameters, and how many were moved."""
    moved = []
    backend = inductor("default", overlapped=moved.append)
    model.zero_grad()
    torch.compile(model, backend=backend, dynamic=False, **choices)(x).backward()
    return [parameter.grad for parameter in model.parameters()], sum(moved)


def test_inductor_joins_what_it_has_not_copied():
    model, x = Net().to(memory_format=torch.channels_last), maps(2, 8, 4, 4)
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    got, moved = compiled_by_inductor(model, x)
    assert moved == 4
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_inductor_joins_bias_gradients_too():
    class Linears(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.second(self.first(x)).square().mean()

    model, x = Linears(), torch.randn(2, 5, 8)
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    got, moved = compiled_by_inductor(model, x)
    # Inductor sums the gradient of the mean as it makes it
    assert moved == 3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_before_the_join_is_an_error(monkeypatch):
    # Inductor then turns the convolutions of an NCHW network channels-last, and their gradients back
    monkeypatch.setattr(overlap_weight_gradients, "INDUCTOR", {"layout_optimization": True})
    monkeypatch.setattr("torch._inductor.config.force_layout_optimization", True)
    torch._dynamo.reset()
    with pytest.raises(NotEngaged, match=r"copies those of shapes \[\(8, 8, 3, 3\).*side_stream=False"):
        compiled_by_inductor(Net(), torch.randn(2, 8, 4, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_computes_the_same_bits():
    from ridgeline.step_recipe import StepRecipe
    from ridgeline.train_step import compile_step

    losses = []
    for side_stream in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU()) for _ in range(8)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(64, 32, 8, 8, device="cuda")
        recipe = StepRecipe(channels_last=True, require=True, weight_copies="auto", side_stream=side_stream)
        step = compile_step(model, lambda net, x: (net(x) - x).square().mean(), optimizer, batch, recipe=recipe)
        losses.append([step(batch).item() for _ in range(50)])
        words = " ".join(step.report.lines())
        assert ("overlap_weight_gradients at 8 sites" in words) == side_stream, words
    assert losses[0] == losses[1]
