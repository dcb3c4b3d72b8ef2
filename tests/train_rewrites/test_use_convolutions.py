"""Which convolutions of a training graph become conv2d_fprop, by tables that a test makes up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ridgeline import train_tuning
from ridgeline.errors import EnvironmentUnusable
from ridgeline.kernels import PASSES, conv2d_fprop
from ridgeline.models.ddpm_unet import TINY
from ridgeline.step_recipe import NAMED
from ridgeline.train_rewrites import fp8_passes, use_convolutions
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.use_convolutions import convolutions_of, convolve
from ridgeline.workloads import ddpm_ladder
from shared_kernels import plant_rows

FAST = {"conv2d_fprop": (1e-5, 2e-5), "conv2d_dgrad": (1e-5, 2e-5), "conv2d_wgrad": (1e-5, 2e-5)}


def tables(monkeypatch, seconds):
    plant_rows(monkeypatch, seconds, conv2d_fprop)


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[list[fx.GraphModule], list[int]]:
    """The graphs of a call under autocast, rewritten, and how many sites changed in each."""
    graphs, sites = [], []

    def backend(graph_module, _inputs):
        sites.append(use_convolutions.apply(graph_module))
        graphs.append(graph_module)
        return graph_module.forward

    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(function, backend=backend)(*inputs)
    return graphs, sites


def conv(c: int = 16, k: int = 8, size: int = 3, **choices) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(c, k, size, **{"padding": size // 2, **choices}).to(memory_format=torch.channels_last)


def image(c: int = 16, side: int = 6) -> Tensor:
    return torch.randn(2, c, side, side, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=torch.channels_last
    )


def test_a_convolution_that_pays_is_replaced(monkeypatch):
    tables(monkeypatch, FAST)
    layer, x = conv(), image()
    (graph_module,), sites = traced(layer, x)
    assert sites == [1]
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [convolve]
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    (y,) = graph_module(*(layer.weight, layer.bias, x)[: len(list(graph_module.graph.find_nodes(op="placeholder")))])
    # the bias is added in fp32 and the sum rounded once: one step of bf16 at most
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    assert y.dtype == torch.bfloat16


def test_gradients_reach_fp32_weights(monkeypatch):
    tables(monkeypatch, FAST)
    layer, twin, x = conv(), conv(), image()
    sites = []

    def backend(graph_module, _inputs):
        sites.append(use_convolutions.apply(graph_module))
        return graph_module.forward

    torch.compiler.reset()
    # both gradients by PyTorch here: the tables do not know a CPU's
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(layer, backend=backend)(x).float().square().sum().backward()
        twin(x).float().square().sum().backward()
    assert sites == [1]
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and ours.grad.dtype == torch.float32
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-6, atol=2**-5 * theirs.grad.abs().max().item())


@pytest.mark.parametrize(
    ("seconds", "sites"),
    [
        (FAST, 1),
        ({}, 0),  # never tuned
        ({**FAST, "conv2d_fprop": (3e-5, 2e-5)}, 1),  # the other passes make up for the first
        ({"conv2d_fprop": (3e-5, 2e-5)}, 0),
        ({"conv2d_fprop": (1e-5, 2e-5)}, 1),
        # what loses runs in PyTorch and costs nothing
        ({**FAST, "conv2d_dgrad": (9e-5, 2e-5), "conv2d_wgrad": (9e-5, 2e-5)}, 1),
        ({"conv2d_dgrad": (1e-5, 2e-5), "conv2d_wgrad": (1e-5, 2e-5)}, 0),  # the forward pass must be known
    ],
)
def test_all_passes_together_decide(monkeypatch, seconds, sites):
    tables(monkeypatch, seconds)
    assert traced(conv(), image())[1] == [sites]


@pytest.mark.parametrize(
    "layer",
    [
        conv(stride=3),
        conv(stride=(1, 2)),
        conv(stride=2, padding=0),
        conv(c=24, stride=2),
        conv(dilation=2, padding=2),
        conv(groups=2),
        conv(k=12),
        conv(c=20),
        conv(c=3, k=5),
        conv(c=3, size=9),
        conv(c=3, stride=2),
        conv(padding="same"),
        conv(size=1, padding=1),
        nn.Conv2d(16, 8, 3, padding=1),
    ],
    ids=[
        "stride",
        "two strides",
        "no half",
        "channels of phases",
        "dilation",
        "groups",
        "filters",
        "channels",
        "few of both",
        "few channels under a large filter",
        "few channels by 2",
        "padding in words",
        "wide padding",
        "NCHW weight",
    ],
)
def test_what_the_kernels_cannot_compute_stays(monkeypatch, layer):
    tables(monkeypatch, FAST)
    assert traced(layer, image(layer.in_channels, 8))[1] == [0]


@pytest.mark.parametrize("size", [1, 3])
def test_a_convolution_of_stride_2_is_replaced_where_it_halves_the_map(monkeypatch, size):
    tables(monkeypatch, FAST)
    assert traced(conv(size=size, stride=2), image(side=7))[1] == [0]
    layer, twin, x = conv(size=size, stride=2), conv(size=size, stride=2), image()
    sites = []

    def backend(graph_module, _inputs):
        sites.append(use_convolutions.apply(graph_module))
        return graph_module.forward

    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = torch.compile(layer, backend=backend)(x), twin(x)
    assert sites == [1] and y.shape == (2, 8, 3, 3)
    # the bias is added in fp32 and the sum rounded once: one step of bf16 at most
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-6, atol=2**-5 * theirs.grad.abs().max().item())
    tables(monkeypatch, {})
    assert traced(layer, x)[1] == [0]


@pytest.mark.parametrize(("c", "k"), [(3, 16), (16, 3)])
def test_a_first_and_a_last_layer_are_replaced(monkeypatch, c, k):
    """Of an fp32 image that is not channels_last, which the layer's operands are cast for."""
    tables(monkeypatch, FAST)
    layer, x = conv(c, k), image(c).contiguous()
    (graph_module,), sites = traced(layer, x)
    assert sites == [1]
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    (y,) = graph_module(layer.weight, layer.bias, x)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    tables(monkeypatch, {})
    assert traced(layer, x)[1] == [0]


def test_the_choice_and_its_price_are_told(monkeypatch):
    tables(monkeypatch, {**FAST, "conv2d_dgrad": (9e-5, 2e-5)})
    (graph_module,), _ = traced(conv(), image())
    assert use_convolutions.in_words(graph_module) == (
        "3 passes of convolutions take 40.0 µs for PyTorch's 60.0 µs by the tables: fprop 1, dgrad 0, wgrad 1 by this "
        "project's kernels, the others by PyTorch's"
    )
    tables(monkeypatch, {})
    (untouched,), _ = traced(conv(), image())
    assert use_convolutions.in_words(untouched) == ""


def test_fp32_stays(monkeypatch):
    tables(monkeypatch, FAST)
    sites = []
    torch.compiler.reset()
    torch.compile(conv(), backend=lambda g, _: sites.append(use_convolutions.apply(g)) or g.forward)(image())
    assert sites == [0]


def test_tuning_finds_each_convolution_once():
    first, second = conv(), conv()

    def both(x):
        return F.silu(first(x)) + second(x)

    found = []
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(both, backend=lambda g, _: found.append(convolutions_of(g)) or g.forward)(image())
    expected = Convolution((2, 16, 6, 6), (8, 16, 3, 3), (1, 1), torch.bfloat16, torch.device("cpu"))
    assert found == [(expected,)]
    problems = list(expected.problems())
    assert [op for op, _ in problems] == list(PASSES)
    for op, arguments in problems:
        assert op.reference(**arguments).dtype == torch.bfloat16


def test_the_passes_of_stride_2_are_tuned_on_half_the_map():
    one = Convolution((2, 16, 6, 8), (8, 16, 3, 3), (1, 1), torch.bfloat16, torch.device("cpu"), stride=2)
    given = {op.name: arguments for op, arguments in one.problems()}
    assert given["conv2d_dgrad"]["dy"].shape == given["conv2d_wgrad"]["dy"].shape == (2, 8, 3, 4)
    assert [op.key(**arguments) for op, arguments in one.problems()] == [
        "padding 1 1, stride 2, weight 8x16x3x3, x 2x16x6x8",
        "dy 2x8x3x4, padding 1 1, stride 2, weight 8x16x3x3",
        "dy 2x8x3x4, kernel_size 3 3, padding 1 1, stride 2, x 2x16x6x8",
    ]
    assert not fp8_passes.takes(replace(one, weight=(16, 16, 3, 3)))
    assert fp8_passes.takes(replace(one, weight=(16, 16, 3, 3), stride=1))


def test_the_ddpm_networks_convolutions_are_all_found(monkeypatch):
    monkeypatch.setitem(ddpm_ladder.PRESETS, "tiny", replace(TINY, channels=(16,), blocks=1, attention_resolutions=()))
    conditions = ddpm_ladder.Conditions(batch=1, device="cpu", preset="tiny")
    torch.compiler.reset()
    found = ddpm_ladder.convolutions_of(conditions, NAMED["bf16"])
    model = ddpm_ladder.UNet(conditions.network)
    weights = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Conv2d)}
    assert {(16, 3, 3, 3), (3, 16, 3, 3)} < weights
    # and the linear layers of its attention
    assert {one.weight for one in found} == weights | {(48, 16, 1, 1), (16, 16, 1, 1)}


def test_a_step_is_tuned_on_a_gpu_alone():
    with pytest.raises(EnvironmentUnusable, match=r"^the model must be on a GPU, got cpu: move it"):
        train_tuning.tune_step(conv(), lambda m, x: m(x).sum(), image(), NAMED["bf16"])
