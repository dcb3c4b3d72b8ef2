"""Convolutions get dense channels_last operands and gradients, whatever made them; numbers are equal to the bit."""

import re
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.layout_copies import LayoutWatch
from ridgeline.train_backend import TrainBackend, inductor

NAMES = ("keep_channels_last",)
CHANNELS_LAST = torch.channels_last
aten = torch.ops.aten
OPERANDS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class Toy(nn.Module):
    """Two levels of a U-Net with all that breaks layouts: concatenations, pooling, attention, a skip, upsampling."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.mid = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.qkv = nn.Linear(8, 24)
        self.up, self.skip, self.up2 = (
            nn.Conv2d(16, 8, 3, padding=1),
            nn.Conv2d(16, 8, 1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.out = nn.ConvTranspose2d(16, 3, 3, padding=1)

    def forward(self, x):
        a = self.stem(x)
        h = F.avg_pool2d(self.down(F.silu(a)) + a, 2)
        q, k, v = self.qkv(h.flatten(2).transpose(1, 2)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        rows = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = F.interpolate(self.mid(h + rows.transpose(1, 2).unflatten(2, h.shape[2:])), scale_factor=2.0)
        h = torch.cat((h, a), dim=1)
        h = torch.cat((self.up2(F.silu(self.up(h))) + self.skip(h), a), dim=1)
        return self.out(F.silu(h))


class Operands(TorchDispatchMode):
    """Counts the maps that go into convolutions, and those that these would have to copy."""

    def __init__(self):
        super().__init__()
        self.seen, self.other = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = args[: OPERANDS.get(func, 0)]
        self.seen += len(operands)
        self.other += [t.stride() for t in operands if not t.is_contiguous(memory_format=CHANNELS_LAST)]
        return func(*args, **(kwargs or {}))


def image(channels=3, layout=CHANNELS_LAST):
    x = torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=layout)


def toy():
    torch.manual_seed(0)
    return Toy().to(memory_format=CHANNELS_LAST)


def loss(model, x):
    return model(x).square().mean()


def untouched(model, x, fn=loss):
    """Loss and gradients of the module itself, and the operands of its convolutions."""
    operands = Operands()
    with operands:
        value = fn(model, x)
        value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())], operands


def trained(model, x, fn=loss):
    """The same by graphs of PyTorch's own kernels, and the sites in them."""
    torch._dynamo.reset()
    operands = Operands()

    def watched(graph_module, _):
        def run(*args):
            with operands:
                return graph_module(*args)

        return make_boxed_func(run)

    backend = TrainBackend(NAMES, aot_autograd(fw_compiler=watched))
    value = torch.compile(fn, backend=backend, dynamic=False)(model, x)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())], operands, backend.sites["keep_channels_last"]


def test_all_operands_become_dense_and_numbers_stay():
    expected, before = untouched(toy(), image())
    actual, after, sites = trained(toy(), image())
    assert sites == 7
    assert (after.seen, len(before.other), after.other) == (before.seen, 3, [])
    # a convolution in another layout sums in another order on a CPU
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def assert_equal_to_the_bit(fn, copied):
    """Gradients of two layers; and of the operands, where `copied` were not dense, all are."""
    (expected, before), (actual, after, _) = untouched(toy(), image(), fn), trained(toy(), image(), fn)
    assert (len(before.other), after.other) == (copied, [])
    found = [(a, b) for a, b in zip(actual, expected, strict=True) if b is not None]
    assert len(found) == 5 and all(torch.equal(a, b) for a, b in found)


def test_slices_are_made_dense_and_numbers_equal_to_the_bit():
    def both(model, x):
        return F.silu(
            torch.cat((model.stem(x), model.up(torch.cat((x, x[:, :2]), dim=1).repeat(1, 4, 1, 1)[:, 2:18])), 1)
        )

    def fn(model, x):
        y = both(model, x)
        return (y * y.roll(1, 1)).mean()

    assert_equal_to_the_bit(fn, 4)


def test_results_may_be_overwritten():
    def fn(model, x):
        y = F.silu(model.stem(x), inplace=True)
        return (torch.cat((model.up2(y), y), dim=1).square() * x[:, :1]).mean()

    assert_equal_to_the_bit(fn, 2)


@pytest.mark.parametrize(
    ("fn", "layout"),
    [
        (lambda m, x: m.stem(x), torch.contiguous_format),
        (lambda m, x: m.qkv(F.avg_pool2d(x, 1).repeat(1, 3, 1, 1)[:, :8].permute(0, 2, 3, 1)), CHANNELS_LAST),
        (lambda m, x: F.conv1d(x.flatten(2), m.stem.weight.flatten(2)), CHANNELS_LAST),
    ],
    ids=["another layout", "no convolution", "one axis"],
)
def test_does_not_fire_on(fn, layout):
    model = toy().to(memory_format=layout)
    assert trained(model, image(layout=layout), lambda m, x: fn(m, x).sum())[2] == 0


def test_no_gradient_is_asked_for_where_none_is_needed():
    model = toy().requires_grad_(False)
    backend = TrainBackend(NAMES, aot_eager)
    y = torch.compile(model, backend=backend, dynamic=False)(image())
    assert torch.equal(y, model(image())) and not y.requires_grad and backend.sites["keep_channels_last"] == 7


class Concatenated(nn.Module):
    """Gradients of what `main` and `skip` read together are slices of a sum; those of what `last` reads, of one map."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(4))
        self.main, self.skip, self.last = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        a, b, c, d = (part(x) for part in self.parts)
        both = torch.cat((a, b), dim=1)
        return (self.main(both) * self.skip(both) * self.last(torch.cat((c, d), dim=1))).sum()


def test_inductor_writes_slices_of_a_sum_dense_in_the_kernel_that_adds():
    """Slices of what a convolution returned, the gradient of `last`, are copied, once for the products of each."""
    torch.manual_seed(0)
    model, x = Concatenated().to(memory_format=CHANNELS_LAST), image(channels=4)
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    watch = LayoutWatch()
    compiled = torch.compile(model, backend=TrainBackend(NAMES, inductor("default", watch.see)), dynamic=False)
    with patch("torch._inductor.config.fx_graph_cache", new=False):
        _, (_, code) = run_and_get_code(lambda: compiled(x).backward())
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    kernels = re.findall(r"^ +cpp_fused_(\w+?)_\d+\(", code, re.MULTILINE)
    assert sorted(kernel for kernel in kernels if "slice" in kernel) == [
        *["add_clone_convolution_backward_slice"] * 2,
        *["clone_convolution_backward_slice"] * 2,
    ]
    # views are what convolutions would copy
    assert "convolution_backward.default(reinterpret_tensor" not in code
    assert watch.in_words() == "0 layout copies in 2 compiled graphs"


@pytest.mark.gpu
def test_no_map_is_copied_on_a_gpu():
    """What convolutions do not find dense they copy by an operator of its own, which profiles show with shapes."""
    model, x = toy().cuda(), image().cuda()
    compiled = torch.compile(loss, backend=TrainBackend(NAMES, inductor("default")), dynamic=False)
    compiled(model, x).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        compiled(model, x).backward()
    events = [event for event in profile.events() if event.input_shapes and len(event.input_shapes[0]) == 4]
    assert [event.name for event in events].count("aten::convolution_backward") == 7
    assert [e.input_shapes[0] for e in events if e.name == "aten::copy_" and e.input_shapes[0][2:] == [8, 8]] == []
