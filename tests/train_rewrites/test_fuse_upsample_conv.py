"""Which upsamplings and convolutions of a training graph become upsample_conv2d, by tables that a test makes up."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from ridgeline.kernels import PASSES, UPSAMPLED, conv2d_fprop, upsample_conv2d
from ridgeline.models.ddpm_unet import TINY
from ridgeline.step_recipe import NAMED
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites import fuse_upsample_conv, use_convolutions
from ridgeline.train_rewrites.fuse_upsample_conv import (
    UpsampledConvolution,
    upsample_convolve,
    upsampled_convolutions_of,
)
from ridgeline.workloads import ddpm_ladder
from shared_kernels import plant_rows

NAMES = [op.name for op in UPSAMPLED]
FAST = dict.fromkeys(NAMES, (1e-5, 2e-5))


def tables(monkeypatch, seconds):
    plant_rows(monkeypatch, seconds, upsample_conv2d, conv2d_fprop)


class Upsample(nn.Module):
    """As the DDPM network has it."""

    def __init__(self, c=16, k=32, size=3, how=None, **choices):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(c, k, size, **{"padding": size // 2, **choices})
        self.to(memory_format=torch.channels_last)
        self.how = how or {"scale_factor": 2.0, "mode": "nearest"}

    def forward(self, x):
        return self.conv(F.interpolate(x, **self.how))


class ReadTwice(Upsample):
    def forward(self, x):
        large = F.interpolate(x, **self.how)
        return self.conv(large) + large.mean()


class BeforeSilu(Upsample):
    def forward(self, x):
        return self.conv(F.silu(F.interpolate(x, **self.how)))


def image(c=16, side=6):
    return torch.randn(2, c, side, side, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=torch.channels_last
    )


def traced(function, x, *, autocast=True):
    """The graph of a call, rewritten, and how many sites changed."""
    found = []

    def backend(graph_module, _inputs):
        found.append((graph_module, fuse_upsample_conv.apply(graph_module)))
        return graph_module.forward

    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.compile(function, backend=backend, dynamic=False)(x)
    ((graph_module, sites),) = found
    return graph_module, sites


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "how", [{"scale_factor": 2.0}, {"scale_factor": (2, 2), "mode": "nearest"}, {"size": (12, 12)}]
)
def test_upsampling_and_its_convolution_become_one_call(monkeypatch, how):
    tables(monkeypatch, FAST)
    graph_module, sites = traced(Upsample(how=how), image())
    assert sites == 1
    assert targets(graph_module) == [upsample_convolve]


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_graph_as_it_was(monkeypatch, bias):
    tables(monkeypatch, {})
    layer, x = Upsample(bias=bias), image()

    def step(sites):
        backend = TrainBackend(("fuse_upsample_conv",), aot_eager)
        torch.compiler.reset()
        given = x.clone(memory_format=torch.channels_last).requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.compile(layer, backend=backend, dynamic=False)(given)
        y.float().square().sum().backward()
        assert backend.sites == {"fuse_upsample_conv": sites}
        return y, given.grad, *(p.grad.clone() for p in layer.parameters())

    before = step(0)
    tables(monkeypatch, FAST)
    after = step(1)
    for ours, theirs in zip(after, before, strict=True):
        assert ours.dtype == theirs.dtype
        # y is rounded once here; its gradient is twice y, and sums of it round as they do
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6 * theirs.abs().max().item())


def test_gradients_are_exact_in_float64():
    """The call alone through AOTAutograd: what autocast rounds is left out."""
    layer, x = Upsample().double(), image().double()
    inputs = [x, layer.conv.weight, layer.conv.bias]

    def gradients(function):
        given = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in inputs]
        torch.compiler.reset()
        torch.compile(function, backend=aot_eager, dynamic=False)(*given).square().sum().backward()
        return [t.grad for t in given]

    ours = gradients(lambda *operands: upsample_convolve(*operands, torch.float64))
    theirs = gradients(lambda x, weight, bias: F.conv2d(F.interpolate(x, scale_factor=2.0), weight, bias, padding=1))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-11)


ALONE = dict.fromkeys([op.name for op in PASSES], (3e-5, 3e-5))


@pytest.mark.parametrize(
    ("seconds", "sites"),
    [
        (FAST, 1),
        ({}, 0),  # never tuned
        *(({name: FAST[name] for name in NAMES if name != missing}, 0) for missing in NAMES),
        ({**FAST, NAMES[0]: (3e-5, 2e-5)}, 1),  # the other passes make up for the first
        ({**FAST, NAMES[0]: (5e-5, 2e-5)}, 0),
        # what loses runs in PyTorch and costs nothing
        ({**FAST, NAMES[1]: (9e-5, 2e-5), NAMES[2]: (9e-5, 2e-5)}, 1),
        ({**FAST, **ALONE}, 1),
        # the convolution alone, by whichever kernel, is faster than ours
        ({**FAST, **ALONE, "conv2d_fprop": (1e-6, 3e-5), "conv2d_dgrad": (3e-5, 1e-6)}, 0),
        ({**FAST, "conv2d_fprop": (1e-6, 3e-5)}, 1),
    ],
)
def test_all_passes_together_decide(monkeypatch, seconds, sites):
    tables(monkeypatch, seconds)
    assert traced(Upsample(), image())[1] == sites


OTHERS = {
    "bilinear": Upsample(how={"scale_factor": 2.0, "mode": "bilinear"}),
    "3 times": Upsample(how={"scale_factor": 3.0}),
    "4 columns": Upsample(how={"scale_factor": (2.0, 4.0)}),
    "odd size": Upsample(how={"size": (13, 12)}),
    "stride": Upsample(stride=2),
    "dilation": Upsample(dilation=2),
    "no padding": Upsample(padding=0),
    "padding in words": Upsample(padding="same"),
    "1 x 1": Upsample(size=1),
    "5 x 5": Upsample(size=5),
    "groups": Upsample(groups=2),
    "channels": Upsample(c=20),
    "filters": Upsample(k=24),
    "NCHW weight": Upsample().to(memory_format=torch.contiguous_format),
    "read twice": ReadTwice(),
    "something between": BeforeSilu(),
}


@pytest.mark.parametrize("layer", OTHERS.values(), ids=OTHERS)
def test_does_not_fire_on_what_the_kernels_cannot_compute(monkeypatch, layer):
    tables(monkeypatch, FAST)
    graph_module, sites = traced(layer, image(layer.conv.in_channels))
    assert sites == 0
    assert F.interpolate in targets(graph_module)


def test_does_not_fire_on_other_layouts_and_dtypes(monkeypatch):
    tables(monkeypatch, FAST)
    assert traced(Upsample(), image().contiguous())[1] == 0
    assert traced(Upsample(), image(), autocast=False)[1] == 0


def test_an_upsampling_that_stays_is_expanded_as_before(monkeypatch):
    tables(monkeypatch, {})
    backend = TrainBackend(("fuse_upsample_conv", "expand_upsample"), aot_eager)
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(Upsample(), backend=backend, dynamic=False)(image())
    assert backend.sites == {"fuse_upsample_conv": 0, "expand_upsample": 1}


def test_the_choice_and_its_price_are_told(monkeypatch):
    tables(monkeypatch, {**FAST, NAMES[1]: (9e-5, 2e-5)})
    graph_module, _ = traced(Upsample(), image())
    assert use_convolutions.in_words(graph_module) == (
        "3 passes of convolutions take 40.0 µs for PyTorch's 60.0 µs by the tables: fprop 1, dgrad 0, wgrad 1 by this "
        "project's kernels, the others by PyTorch's"
    )


def test_tuning_finds_each_once():
    first, second, x = Upsample(), Upsample(), image()
    found = []
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(
            lambda x: first(x) + second(x),
            backend=lambda g, _: found.append(upsampled_convolutions_of(g)) or g.forward,
            dynamic=False,
        )(x)
    expected = UpsampledConvolution((2, 16, 6, 6), (32, 16, 3, 3), (1, 1), torch.bfloat16, torch.device("cpu"))
    assert found == [(expected,)]
    problems = list(expected.problems())
    assert [op for op, _ in problems] == list(UPSAMPLED)
    for op, arguments in problems:
        assert op.reference(**arguments).dtype == torch.bfloat16


def test_the_ddpm_networks_upsamplings_are_offered_to_tune_both_ways(monkeypatch):
    network = replace(TINY, channels=(16, 16), blocks=1, attention_resolutions=())
    monkeypatch.setitem(ddpm_ladder.PRESETS, "tiny", network)
    conditions = ddpm_ladder.Conditions(batch=1, device="cpu", preset="tiny")
    torch.compiler.reset()
    found = ddpm_ladder.convolutions_of(conditions, NAMED["bf16"])
    (upsampled,) = [one for one in found if isinstance(one, UpsampledConvolution)]
    side = network.image_size // 2
    assert (upsampled.x, upsampled.weight) == ((1, 16, side, side), (16, 16, 3, 3))
    large = {one.x for one in found if not isinstance(one, UpsampledConvolution) and one.weight == upsampled.weight}
    assert (1, 16, 2 * side, 2 * side) in large
