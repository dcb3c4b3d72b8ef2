"""Linear layers of one input become one product each way; the same numbers, and only where that is meant to pay."""

import operator
from collections import Counter
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from graphs import targets
from ridgeline.models.ddpm_unet import UNet, UNetConfig
from ridgeline.train_backend import TrainBackend

NAMES = ("merge_linears",)
PRODUCTS = ("mm", "addmm", "bmm")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class Layers(nn.Module):
    """Layers of other widths; `forward` gets what each makes of `read(x)`."""

    def __init__(self, forward, *, count=4, bias=True):
        super().__init__()
        self.combine = forward
        self.layers = nn.ModuleList(nn.Linear(8, 4 + 2 * i, bias=bias) for i in range(count))

    def forward(self, x):
        return self.combine(self, x)


def summed(model, x):
    return reduce(operator.add, (layer(x).sin().sum() for layer in model.layers))


def gradients(model, inputs, loss):
    loss.backward()
    return [loss.detach(), *(t.grad for t in (*inputs, *model.parameters()) if t.grad is not None)]


def untouched(model, *inputs):
    """Loss and all gradients of the module itself."""
    return gradients(model, inputs, model(*inputs).square().sum())


def trained(model, *inputs):
    """The same by graphs, the products in both of them, and the sites."""
    called = Counter()

    def counted(graph_module, _):
        called.update(targets(graph_module))
        return make_boxed_func(graph_module)

    model.zero_grad()
    backend = TrainBackend(NAMES, aot_autograd(fw_compiler=counted))
    loss = torch.compile(model, backend=backend, dynamic=False)(*inputs).square().sum()
    return gradients(model, inputs, loss), sum(called[name] for name in PRODUCTS), backend.sites["merge_linears"]


def run_forward(model, *inputs):
    """Sites in the forward graph, the result of which must be the module's own."""
    backend = TrainBackend(NAMES, lambda graph_module, _: graph_module)
    with torch.no_grad():
        actual = torch.compile(model, backend=backend, dynamic=False)(*inputs)
        torch.testing.assert_close(actual, model(*inputs))
    return backend.sites["merge_linears"]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("shape", "bias"), [((3, 8), True), ((2, 3, 8), False)], ids=str)
def test_equals_single_layers(shape, bias):
    torch.manual_seed(0)
    model = Layers(summed, bias=bias)
    expected = untouched(model, drawn(*shape).requires_grad_())
    actual, products, sites = trained(model, drawn(*shape).requires_grad_())
    # the product, and the gradients of weight and input, of 4 layers
    assert (products, sites) == (3, 3)
    assert len(actual) == 2 + 4 * (1 + bias)
    torch.testing.assert_close(actual, expected)


def test_layers_may_come_late_and_be_called_by_name():
    def forward(model, x):
        y = model.layers[0](x).sum()
        for layer in model.layers[1:]:
            y = F.linear(bias=layer.bias * 1, weight=layer.weight, input=x).sum() * y.cos()
            y = F.linear(x, bias=layer.bias, weight=layer.weight).sum() + y
        return y

    torch.manual_seed(0)
    model = Layers(forward)
    expected = untouched(model, drawn(3, 8).requires_grad_())
    actual, products, sites = trained(model, drawn(3, 8).requires_grad_())
    # of 7 calls; a bias that is computed comes too late
    assert (products, sites) == (3 * (7 - 3), 3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def three_without_bias(model, x):
    return summed(model, x) + reduce(operator.add, (F.linear(x, layer.weight).sum() for layer in model.layers))


LEFT = {
    "three layers": (summed, {"count": 3}, (3, 8)),
    "rows enough to fill a GPU": (summed, {}, (1025, 8)),
    "another input each": (
        lambda m, x: reduce(operator.add, (f(x * i).sum() for i, f in enumerate(m.layers))), {}, (3, 8),
    ),
    "weights made in the graph": (
        lambda m, x: reduce(operator.add, (F.linear(x, f.weight * 2).sum() for f in m.layers)), {}, (3, 8),
    ),
    "three with a bias and three without": (three_without_bias, {"count": 3}, (3, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_does_not_fire_on(name):
    forward, options, shape = LEFT[name]
    assert run_forward(Layers(forward, **options), drawn(*shape)) == 0


def test_autocast_casts_the_joined_operands():
    torch.manual_seed(0)
    model, x = Layers(summed), drawn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = untouched(model, x)
        actual, products, sites = trained(model, x)
    assert (products, sites) == (2, 3)
    # each product has few terms, which sum to the same bf16 numbers
    torch.testing.assert_close(actual, expected, rtol=2**-8, atol=2**-8)


def test_every_projection_of_a_unet():
    torch.manual_seed(0)
    config = UNetConfig(image_size=4, channels=(8,), blocks=1, attention_resolutions=(), heads=2, groups=4)
    model = UNet(config).to(memory_format=torch.channels_last).eval()
    blocks = sum("scale_shift.weight" in name for name, _ in model.named_parameters())
    assert run_forward(model, drawn(2, 3, 4, 4), torch.tensor([3, 700])) == blocks - 1
