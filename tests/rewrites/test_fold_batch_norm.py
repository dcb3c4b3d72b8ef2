"""Batch norm folds into a convolution exactly where the norm is a constant map of the convolution's result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import BY_NAME, check, image, net, rewritten, targets
from ridgeline.graph import export
from ridgeline.models.blocks import Conv
from ridgeline.rewrites.fold_batch_norm import fold

X = image(2, 6, 5, 7)


@pytest.mark.parametrize(
    ("conv", "norm"),
    [
        (nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8)),
        (nn.Conv2d(6, 8, 3, bias=True), nn.BatchNorm2d(8)),
        (nn.Conv2d(6, 8, 1, stride=2), nn.BatchNorm2d(8, affine=False)),
        (nn.Conv2d(6, 6, 3, groups=6, padding=1, bias=False), nn.BatchNorm2d(6, eps=1e-3)),
        (nn.Conv2d(6, 6, 3, groups=3, dilation=2, bias=False), nn.BatchNorm2d(6)),
    ],
    ids=["plain", "bias", "no affine", "depthwise", "grouped and dilated"],
)
def test_fires(conv, norm):
    graph_module, found = rewritten(
        net(lambda m, x: m.norm(m.conv(x)), conv=conv, norm=norm), [X], "fold_batch_norm", sites=1
    )
    assert found["batch_norm"] == 0 and found["conv2d"] == 1
    assert {name for name, _ in graph_module.named_buffers()} == {"conv_folded_weight", "conv_folded_bias"}
    assert not list(graph_module.named_parameters()), "what the graph no longer reads should go"


def test_weights_keep_their_layout():
    module = net(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(6, 8, 3), norm=nn.BatchNorm2d(8))
    graph_module, _ = rewritten(module.to(memory_format=torch.channels_last), [X], "fold_batch_norm", sites=1)
    weight = graph_module.get_buffer("conv_folded_weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_one_convolution_under_two_norms_is_folded_twice():
    module = net(
        lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x)),
        conv=nn.Conv2d(6, 8, 3, bias=False), a=nn.BatchNorm2d(8), b=nn.BatchNorm2d(8),
    )  # fmt: skip
    _, found = rewritten(module, [X], "fold_batch_norm", sites=2)
    assert found["batch_norm"] == 0


def test_equals_the_modules_own_folding():
    block = net(lambda m, x: m.conv(x), conv=Conv(6, 8, 3)).conv
    weight, bias = fold(
        block.conv.weight, None, block.bn.weight, block.bn.bias, block.bn.running_mean, block.bn.running_var,
        eps=block.bn.eps,
    )  # fmt: skip
    block.fold_()
    torch.testing.assert_close(weight, block.conv.weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(bias, block.conv.bias, rtol=1e-6, atol=1e-7)


def layers():
    return {"conv": nn.Conv2d(6, 6, 1), "norm": nn.BatchNorm2d(6), "other": nn.BatchNorm2d(6)}


def norm_of(m, y, **replaced):
    n = m.norm
    given = {
        "running_mean": n.running_mean, "running_var": n.running_var, "weight": n.weight, "bias": n.bias, "eps": n.eps,
    }  # fmt: skip
    return F.batch_norm(y, **{**given, **replaced})


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (y := m.conv(x)) + m.norm(y),
        lambda m, x: m.norm(F.relu(m.conv(x))),
        lambda m, x: m.norm(F.conv2d(x, m.conv.weight * 2)),
        lambda m, x: m.norm(F.conv2d(x, m.conv.weight, m.conv.bias * 2)),
        lambda m, x: norm_of(m, m.conv(x), weight=m.norm.weight * 2),
        lambda m, x: norm_of(m, m.conv(x), bias=m.norm.bias * 2),
        lambda m, x: norm_of(m, m.conv(x), running_var=m.norm.running_var.abs()),
        lambda m, x: norm_of(m, m.conv(x), running_mean=None, running_var=None, training=True),
        lambda m, x: m.norm(F.conv_transpose2d(x, m.conv.weight)),
        lambda m, x: m.norm(m.conv(m.norm(x)).flatten(2).unflatten(2, (5, 7))),
    ],
    ids=[
        "conv read by two", "activation between", "computed weight", "computed bias", "computed gain", "computed shift",
        "computed variance", "batch statistics", "transposed", "views between",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    module = net(forward, **layers())
    before = targets(export(module, [X]))
    _, after = rewritten(module, [X], "fold_batch_norm", sites=0)
    assert after == before


def test_does_not_fire_in_train_mode():
    module = net(lambda m, x: m.norm(m.conv(x)), **layers()).train()
    graph_module = export(module, [X])
    assert BY_NAME["fold_batch_norm"](graph_module) == 0
    assert targets(graph_module)["batch_norm"] == 1


def test_does_not_fire_without_a_batch_axis():
    # [6, 6, 7]: the norm's channels are the map's rows, of which there happen to be as many as filters
    module = net(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(6, 6, 1), norm=nn.BatchNorm1d(6))
    rewritten(module, [image(6, 6, 7)], "fold_batch_norm", sites=0)


def test_statistics_of_all_sizes_are_folded_in_float64():
    module = net(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(6, 4, 1), norm=nn.BatchNorm2d(4, eps=1e-12))
    module.norm.running_var.copy_(torch.tensor([1e-8, 1e-3, 1.0, 1e8]))
    module.norm.running_mean.copy_(torch.tensor([1e-4, -1.0, 100.0, 1e3]))
    graph_module = export(module, [X])
    assert BY_NAME["fold_batch_norm"](graph_module) == 1
    check(graph_module, module, [X])
