"""Norms of a dynamo graph become one op: same loss and gradients as the untouched module, and only where that is so."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends.debugging import aot_eager

from graphs import by_reference
from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites import fuse_group_norm_silu

NAMES = ("fuse_group_norm_silu",)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Dynamo gives up on a function that it compiled eight times; kernels are tested in tests/kernels."""
    torch._dynamo.reset()
    with by_reference():
        yield


class Block(nn.Module):
    """Every form that the rewrite takes, one after the other, in `forward`."""

    def __init__(self, body, *, groups=4, channels=16):
        super().__init__()
        self.body, self.norm = body, nn.GroupNorm(groups, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.film = nn.Linear(8, 2 * channels)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x, e):
        w, b = self.film(e)[:, :, None, None].chunk(2, dim=1)
        return self.body(self, self.conv(x), w, b)


TAKEN = {
    "norm alone": lambda m, x, _w, _b: m.conv(m.norm(x)),
    "silu": lambda m, x, _w, _b: m.conv(F.silu(m.norm(x))),
    "scale and shift": lambda m, x, w, b: m.conv(F.silu((w + 1) * m.norm(x) + b)),
    "scale and shift, the other way round": lambda m, x, w, b: m.conv(F.silu(b + m.norm(x) * (1 + w))),
    "shift alone": lambda m, x, _w, b: F.silu(m.norm(x) + b),
    "no activation": lambda m, x, w, b: m.norm(x) * (1 + w) + b,
    "read by two": lambda m, x, _w, _b: m.conv(y := F.silu(m.norm(x))) + y,
    "what lies between is read by two": lambda m, x, _w, _b: (y := m.norm(x)) + F.silu(y),
    "dropout in evaluation": lambda m, x, _w, _b: F.dropout(F.silu(m.norm(x)), 0.5, training=False),
    "a product that is no 1 + scale": lambda m, x, w, b: F.silu(w * m.norm(x) + b),
    "silu before shift": lambda m, x, _w, b: F.silu(m.norm(x)) + b,
}
LEFT = {
    "another layout": (lambda m, x, _w, _b: m.norm(x.contiguous()), torch.contiguous_format),
    "three axes": (lambda m, x, _w, _b: m.norm(x.flatten(2)), torch.channels_last),
    "no weight": (lambda m, x, _w, _b: F.group_norm(x, 4), torch.channels_last),
}


def gradients(fn, module, *inputs):
    module.zero_grad()
    loss = fn(*inputs).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


def block_inputs(layout=torch.channels_last):
    torch.manual_seed(0)
    return torch.randn(2, 16, 6, 6).contiguous(memory_format=layout), torch.randn(2, 8)


@pytest.mark.parametrize("name", TAKEN)
def test_equals_the_module(name):
    x, e = block_inputs()
    module = Block(TAKEN[name]).to(memory_format=torch.channels_last)
    expected = gradients(module, module, x, e)
    backend = TrainBackend(NAMES, aot_eager)
    actual = gradients(torch.compile(module, backend=backend), module, x, e)
    assert backend.sites == {"fuse_group_norm_silu": 1}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_does_not_fire_on(name):
    body, layout = LEFT[name]
    x, e = block_inputs(layout)
    module = Block(body).to(memory_format=layout)
    expected = gradients(module, module, x, e)
    backend = TrainBackend(NAMES, aot_eager)
    actual = gradients(torch.compile(module, backend=backend), module, x, e)
    assert backend.sites == {"fuse_group_norm_silu": 0}
    torch.testing.assert_close(actual, expected)


def test_dropout_draws_another_mask_at_every_site_and_step():
    x, e = block_inputs()
    module = Block(lambda m, x, _w, _b: torch.stack([F.dropout(F.silu(m.norm(x)), 0.5) for _ in range(2)]))
    module.to(memory_format=torch.channels_last).train()
    backend = TrainBackend(NAMES, aot_eager)
    compiled = torch.compile(module, backend=backend)
    masks = [compiled(x, e) == 0 for _ in range(2)]
    assert backend.sites == {"fuse_group_norm_silu": 2}
    for a, b in ((masks[0][0], masks[0][1]), (masks[0][0], masks[1][0]), (masks[0][1], masks[1][1])):
        assert 0.4 < a.float().mean() < 0.6 and 0.3 < (a != b).float().mean() < 0.7


def test_every_norm_of_a_unet():
    """Two a block, one an attention, and the last one."""
    torch.manual_seed(0)
    config = dataclasses.replace(TINY, image_size=4, channels=(8, 16), blocks=1, attention_resolutions=(), dropout=0.0)
    model = UNet(config).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    t = torch.tensor([3, 700])
    expected = gradients(model, model, x, t)
    backend = TrainBackend(("expand_upsample", *NAMES), aot_eager)
    actual = gradients(torch.compile(model, backend=backend), model, x, t)
    norms = sum(isinstance(module, nn.GroupNorm) for module in model.modules())
    assert backend.sites == {"expand_upsample": 1, "fuse_group_norm_silu": norms}
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("body", "cast"), [("alone", True), ("conv", False)])
def test_fp32_results_under_autocast_stay_fp32(body, cast):
    """CUDA's autocast computes norms in fp32; a CPU's does not, so the graph is told what a GPU would have returned."""
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    norm = graph.call_function(F.group_norm, (x, 4, weight, bias))
    result = norm if body == "alone" else graph.call_function(torch.conv2d, (norm, weight))
    graph.output(result)
    x.meta["example_value"] = torch.empty(2, 16, 4, 4, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    norm.meta["example_value"] = x.meta["example_value"].float()
    module = fx.GraphModule(nn.Module(), graph)
    assert fuse_group_norm_silu.apply(module) == 1
    assert ("to" in [node.target for node in module.graph.nodes]) == cast
