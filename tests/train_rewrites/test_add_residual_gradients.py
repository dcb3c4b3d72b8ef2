"""The gradient of a residual branch goes through the norm's backward: same numbers, one addition less."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from graphs import by_reference, targets
from ridgeline.kernels import group_norm_silu_backward
from ridgeline.train_backend import TrainBackend

NAMES = ("fuse_group_norm_silu", "add_residual_gradients")
BACKWARD = group_norm_silu_backward.OP.overload


@pytest.fixture(autouse=True)
def reference_kernels():
    with by_reference():
        yield


class Net(nn.Module):
    """Layers for `body(model, x)`, whose x is what a convolution made."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.conv_in, self.conv, self.linear = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.norm, self.film = nn.GroupNorm(2, 8), nn.Linear(4, 16)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.body(self, self.conv_in(x))


def attention(model, x):
    """Its gradient is NCHW where it comes out of the transpose."""
    rows = model.linear(model.norm(x).flatten(2).transpose(1, 2))
    return x.flatten(2) * rows.transpose(1, 2)


def block(model, x):
    w, b = model.film(torch.ones(2, 4))[:, :, None, None].chunk(2, dim=1)
    return F.dropout(F.silu(model.norm(x) * (1 + w) + b), 0.25) + x


TAKEN = {
    "norm alone": lambda m, x: m.conv(m.norm(x)) + x,
    "silu": lambda m, x: m.conv(F.silu(m.norm(x))) + x,
    "scale, shift and dropout": block,
    "another layout": attention,
    "a slice": lambda m, x: torch.cat((m.conv(m.norm(x)), x), dim=1).sin(),
}
LEFT = {
    "nobody else reads x": lambda m, x: m.conv(m.norm(x)),
    "two others read x": lambda m, x: m.conv(m.norm(x)) * x + x.cos(),
    "x is read before": lambda m, x: x.cos() + m.conv(m.norm(x)),
    "x is a concatenation": lambda m, x: m.norm(y := torch.cat((x[:, :3], x[:, 3:]), dim=1)) + y,
}


def trained(names, body):
    """Loss and gradients, sites, additions in the backward graph, and the residuals that norms get there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(body).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    graphs = []

    def kept(graph_module, _):
        graphs.append(graph_module)
        return make_boxed_func(graph_module)

    backend = TrainBackend(names, aot_autograd(fw_compiler=kept))
    loss = torch.compile(model, backend=backend, dynamic=False)(x).square().mean()
    loss.backward()
    residuals = [node.args[8] for node in graphs[1].graph.nodes if node.target is BACKWARD and len(node.args) > 8]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients], backend.sites[NAMES[1]], targets(graphs[1])["add"], residuals


@pytest.mark.parametrize("name", TAKEN)
def test_equals_the_sum_of_two_gradients(name):
    expected, none, additions, without = trained(NAMES[:1], TAKEN[name])
    actual, sites, left, residuals = trained(NAMES, TAKEN[name])
    assert (none, without, sites, len(residuals), additions - left) == (0, [], 1, 1, 1)
    assert residuals[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", LEFT)
def test_does_not_fire_where(name):
    _, sites, _, residuals = trained(NAMES, LEFT[name])
    assert (sites, residuals) == (0, [])
