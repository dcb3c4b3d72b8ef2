"""conv → (SiLU) → (+ residual): what one kernel swallows, and what it must leave."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import BY_NAME, KERNELS, check, image, net, rewritten, targets
from ridgeline.graph import export, repair_layout
from ridgeline.kernels._nhwc import pixel_pitch

X = image(2, 8, 5, 7)


def layers(**extra):
    return {
        "conv": nn.Conv2d(8, 8, 3, padding=1), "point": nn.Conv2d(8, 8, 1, bias=False),
        "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8), **extra,
    }  # fmt: skip


def call_of(graph_module):
    """The keyword arguments and whether there is a residual, of the one fused call."""
    (node,) = [n for n in graph_module.graph.nodes if "ridgeline" in str(n.target)]
    return {"residual": node.args[3] is not None, **node.kwargs}


@pytest.mark.parametrize(
    ("forward", "kernel", "choices"),
    [
        (lambda m, x: m.conv(x), "conv2d_act", {"act": "none", "stride": [1, 1], "padding": [1, 1]}),
        (lambda m, x: F.silu(m.point(x)), "conv2d_act", {"act": "silu", "padding": [0, 0]}),
        (lambda m, x: F.silu(m.conv(x)) + x, "conv2d_act", {"act": "silu", "residual": True}),
        (lambda m, x: x + m.conv(x), "conv2d_act", {"act": "none", "residual": True}),
        (lambda m, x: x + F.silu(m.depthwise(x)), "depthwise_conv2d_act", {"act": "silu", "residual": True}),
        (lambda m, x: F.conv2d(x, m.conv.weight, stride=(2, 1), padding=(0, 2)), "conv2d_act",
         {"stride": [2, 1], "padding": [0, 2]}),
        (lambda m, x: F.relu(m.conv(x)), "conv2d_act", {"act": "none", "residual": False}),
        (lambda m, x: F.silu(m.conv(x)) * 2 + x, "conv2d_act", {"act": "silu", "residual": False}),
    ],
    ids=["conv", "1x1 silu", "silu + x", "x + conv", "depthwise", "strides", "relu stays", "product between"],
)  # fmt: skip
def test_fires(forward, kernel, choices):
    graph_module, found = rewritten(net(forward, **layers()), [X], "fuse_conv_act", sites=1)
    assert found[kernel] == 1 and found["conv2d"] == found["silu"] == 0
    seen = call_of(graph_module)
    assert {name: seen[name] for name in choices} == choices


def test_in_place_activation_and_sum_after_functionalize():
    module = net(lambda m, x: F.silu(m.conv(x), inplace=True).add_(x), **layers())
    _, found = rewritten(module, [X], "functionalize", "fuse_conv_act", sites=1)
    assert found == {"conv2d_act": 1}


def test_sum_of_two_convolutions_belongs_to_one_of_them():
    module = net(lambda m, x: m.conv(x) + F.silu(m.point(x)), **layers())
    _, found = rewritten(module, [X], "fuse_conv_act", sites=2)
    assert found == {"conv2d_act": 2}


def test_weights_are_packed_once_for_the_kernel():
    graph_module, _ = rewritten(net(lambda m, x: m.depthwise(m.conv(x)), **layers()), [X], "fuse_conv_act", sites=2)
    assert graph_module.get_buffer("conv_weight_packed").is_contiguous(memory_format=torch.channels_last)
    assert graph_module.get_buffer("depthwise_weight_packed").permute(2, 3, 1, 0).is_contiguous()


@pytest.mark.parametrize(
    ("forward", "fused"),
    [
        (lambda m, x: (y := m.conv(x), F.silu(y)), {"conv2d_act": 1, "silu": 1}),
        (lambda m, x: (y := F.silu(m.conv(x)), y + x), {"conv2d_act": 1, "add": 1}),
        (lambda m, x: torch.add(m.conv(x), x, alpha=2), {"conv2d_act": 1, "add": 1}),
        (lambda m, x: m.conv(x) + x[:, :1], {"conv2d_act": 1, "slice": 1, "add": 1}),
        (lambda m, x: m.conv(x) + x[:1], {"conv2d_act": 1, "slice": 1, "add": 1}),
        (lambda m, x: m.conv(x) + 1.0, {"conv2d_act": 1, "add": 1}),
        (lambda m, x: (y := m.conv(x)) + y, {"conv2d_act": 1, "add": 1}),
        (lambda m, x: m.conv(x[:1]) + x, {"slice": 1, "conv2d_act": 1, "add": 1}),
        (lambda m, x: F.silu(m.conv(x) + x), {"conv2d_act": 1, "silu": 1}),
    ],
    ids=[
        "conv read by two", "activation read by two", "alpha", "broadcast over channels", "broadcast over batch",
        "a number", "itself", "the sum is larger", "activation after the sum",
    ],
)  # fmt: skip
def test_swallows_no_more_than_it_may(forward, fused):
    _, found = rewritten(net(forward, **layers()), [X], "fuse_conv_act", sites=1)
    assert found == fused


def test_residual_of_another_dtype_stays_outside():
    module = net(lambda m, x: m.conv(x).add(x.double()).float(), **layers())
    _, found = rewritten(module, [X], "fuse_conv_act", sites=1)
    assert found["add"] == 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.conv2d(x, m.conv.weight, dilation=2),
        lambda m, x: F.conv2d(x, m.conv.weight[:, :4], groups=2),
        lambda m, x: F.conv2d(x, m.grouped.weight, groups=2),
        lambda m, x: F.conv2d(x, m.multiplied.weight, groups=8),
        lambda m, x: F.conv_transpose2d(x, m.conv.weight),
        lambda m, x: F.conv2d(x, m.conv.weight * 2),
        lambda m, x: F.conv2d(x, m.conv.weight, m.conv.bias + 1),
        lambda m, x: m.point(x[0]),
        lambda m, x: F.conv1d(x.flatten(2), m.point.weight[..., 0]),
        lambda m, x: F.conv2d(x, m.conv.weight, padding="same"),
    ],
    ids=[
        "dilated", "sliced weight", "grouped", "channel multiplier", "transposed", "computed weight", "computed bias",
        "no batch axis", "1d", "padding by name",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    module = net(
        forward,
        **layers(
            grouped=nn.Conv2d(8, 8, 3, groups=2, bias=False), multiplied=nn.Conv2d(8, 16, 3, groups=8, bias=False)
        ),
    )
    before = targets(export(module, [X]))
    _, after = rewritten(module, [X], "fuse_conv_act", sites=0)
    assert after == before


def test_does_not_fire_in_float64():
    graph_module = export(net(lambda m, x: m.conv(x), **layers()).double(), [X.double()])
    assert BY_NAME["fuse_conv_act"](graph_module) == 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.conv(x.contiguous()),
        lambda m, x: m.conv(x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(2, 8, 5, 7).contiguous()),
        lambda m, x: m.conv(x.transpose(2, 3)),
        lambda m, x: m.point(x[:, :, ::2]) + x.contiguous()[:, :, ::2],
        lambda m, x: m.conv(x[:1].expand(2, 8, 5, 7)),
        lambda m, x: m.conv(x.roll(1, 1)[:, [0, 2, 4, 6, 1, 3, 5, 7]]),
    ],
    ids=["NCHW", "reshaped", "rows and columns swapped", "every second row, residual too", "expanded", "gathered"],
)
def test_maps_reach_the_kernel_in_a_layout_it_reads(forward):
    graph_module, _ = rewritten(net(forward, **layers()), [X], "fuse_conv_act", sites=1)
    (node,) = [n for n in graph_module.graph.nodes if "conv2d_act" in str(n.target)]
    for source in node.all_input_nodes:
        assert source.op == "get_attr" or pixel_pitch(source.meta["val"]) is not None


def test_slices_of_channels_need_no_copy():
    module = net(lambda m, x: m.narrow(x[:, 2:6]), narrow=nn.Conv2d(4, 3, 1))
    _, found = rewritten(module, [X], "fuse_conv_act", sites=1)
    assert found == {"slice": 1, "conv2d_act": 1}


def test_reads_its_input_when_the_convolution_did():
    """relu_ writes over x between the convolution and the sum that would swallow it."""
    module = net(lambda m, x: ((y := m.point(x)), (s := m.conv(y)), F.relu_(y) + s)[2], **layers())
    graph_module = export(module, [X])
    assert BY_NAME["fuse_conv_act"](graph_module) == 0  # without functionalize: hands off
    check(graph_module, module, [X])
    _, found = rewritten(module, [X], "functionalize", "fuse_conv_act", sites=2)
    assert found == {"conv2d_act": 2, "relu": 1}


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (3, 8, 1, 9), (2, 8, 9, 1)])
def test_maps_with_axes_of_one(shape):
    rewritten(net(lambda m, x: x + F.silu(m.conv(x)), **layers()), [image(*shape)], "fuse_conv_act", sites=1)


def test_under_the_interpreter_or_on_a_gpu_the_kernels_give_the_same():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = net(lambda m, x: x + F.silu(m.depthwise(F.silu(m.conv(x.transpose(2, 3))))).transpose(2, 3), **layers())
    graph_module = export(module.to(device), [X.to(device)])
    assert BY_NAME["fuse_conv_act"](graph_module) == 2
    repair_layout(graph_module, KERNELS)
    with torch.no_grad():
        torch.testing.assert_close(graph_module(X.to(device)), module(X.to(device)), rtol=2e-3, atol=2e-3)
