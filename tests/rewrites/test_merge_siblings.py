"""1x1 convolutions of one input merge when nothing but their filters differs."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from graphs import image, net, rewritten
from ridgeline.models.blocks import C3k

X = image(2, 8, 5, 7)


def points(count=3, **choices):
    names = "abcd"[:count]
    return {name: nn.Conv2d(8, 4 + 2 * i, 1, **choices) for i, name in enumerate(names)}


def merged(forward, sites, **layers):
    return rewritten(net(forward, **layers), [X], "fuse_conv_act", "merge_siblings", sites=sites)


@pytest.mark.parametrize("bias", [True, False])
def test_fires(bias):
    graph_module, found = merged(lambda m, x: (F.silu(m.a(x)), F.silu(m.b(x)), F.silu(m.c(x))), 2, **points(bias=bias))
    assert found == {"conv2d_act": 1, "slice": 3}
    assert {name: tuple(b.shape) for name, b in graph_module.named_buffers()} == {
        "a_weight_packed_merged": (18, 8, 1, 1), **({"a_weight_packed_merged_bias": (18,)} if bias else {}),
    }  # fmt: skip


def test_siblings_far_apart_and_in_use_already():
    """b is written down after a's result has been used, and moves up to a."""
    _, found = merged(lambda m, x: (y := F.relu(m.a(x)), m.d(x * 2), y.sum(), m.b(x)), 1, **points(4))
    assert found["conv2d_act"] == 2 and found["slice"] == 2


def test_groups_by_activation_and_stride():
    def forward(m, x):
        pairs = [(F.silu(m.a(x)), m.b(x)), (F.silu(m.c(x)), m.d(x))]
        return pairs, F.conv2d(x, m.a.weight, stride=2), F.conv2d(x, m.b.weight, stride=2)

    _, found = merged(forward, 3, **points(4))
    assert found == {"conv2d_act": 3, "slice": 6}


def test_fires_on_c3k():
    _, found = rewritten(
        net(lambda m, x: m.block(x), block=C3k(8)), [X], "fold_batch_norm", "fuse_conv_act", "merge_siblings", sites=1
    )
    assert found["conv2d_act"] == 6  # of seven


def test_one_convolution_called_twice():
    _, found = merged(lambda m, x: (m.a(x), m.a(x) * 2), 1, **points(1))
    assert found["conv2d_act"] == 1


@pytest.mark.parametrize(
    ("forward", "kernels"),
    [
        (lambda m, x: (m.a(x), F.silu(m.b(x))), 2),
        (lambda m, x: (m.a(x), m.b(x * 2)), 2),
        (lambda m, x: (m.a(x), F.conv2d(x, m.b.weight, m.b.bias, stride=2)), 2),
        (lambda m, x: (m.a(x), F.conv2d(x, m.b.weight, m.b.bias, padding=1)), 2),
        (lambda m, x: (m.a(x), F.conv2d(x, m.b.weight)), 2),
        (lambda m, x: (m.same(x) + x, m.other(x) + x), 2),
        (lambda m, x: (m.three(x), m.three(x)), 2),
        (lambda m, x: (m.deep(x), m.deep(x)), 2),
        (lambda m, x: (m.a(x), m.b(F.relu(x))), 2),
    ],
    ids=["activation", "input", "stride", "padding", "bias", "residual", "3x3", "depthwise", "input after relu"],
)
def test_does_not_fire_when_they_differ_in(forward, kernels):
    extra = {
        "same": nn.Conv2d(8, 8, 1), "other": nn.Conv2d(8, 8, 1), "three": nn.Conv2d(8, 8, 3),
        "deep": nn.Conv2d(8, 8, 1, groups=8),
    }  # fmt: skip
    _, found = merged(forward, 0, **points(), **extra)
    assert found["conv2d_act"] + found["depthwise_conv2d_act"] == kernels


def test_results_are_views_that_readers_accept():
    """Reshapes, norms, pools and further kernels read a slice as they read a map of its own."""

    def forward(m, x):
        a, b = m.a(x), m.b(x)
        tokens = a.flatten(2).transpose(1, 2)
        return (
            tokens @ tokens.transpose(1, 2),
            F.max_pool2d(b, 2),
            F.group_norm(b, 2),
            b.view(2, -1, 35),
            a.mean((2, 3)),
        )

    merged(forward, 1, **points())


def test_rows_of_one_pixel_that_a_view_takes_apart():
    """A dense [2, 4, 1, 1] may be viewed as [8]; a slice of a wider map may not."""
    module = net(lambda m, x: (m.a(x).view(-1), m.b(x)), **points())
    rewritten(module, [image(2, 8, 1, 1)], "fuse_conv_act", "merge_siblings", sites=1)
