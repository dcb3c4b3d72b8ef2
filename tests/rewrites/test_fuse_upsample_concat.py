"""upsample by 2 → concat → 1x1: only the exact pattern, because the kernel knows no other index rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import image, net, rewritten

COARSE, FINE = image(2, 16, 3, 5), image(2, 32, 6, 10, seed=2)


def up(x, **choices):
    return F.interpolate(x, **(choices or {"scale_factor": 2.0}))


def layers():
    return {
        "point": nn.Conv2d(48, 24, 1), "three": nn.Conv2d(48, 24, 3, padding=1), "twice": nn.Conv2d(32, 8, 1),
        "five": nn.Conv2d(64, 8, 1),
    }  # fmt: skip


def fused(forward, sites, inputs=(COARSE, FINE)):
    return rewritten(net(forward, **layers()), inputs, "fuse_conv_act", "fuse_upsample_concat", sites=sites)[1]


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, a, b: F.silu(m.point(torch.cat([up(a), b], 1))),
        lambda m, a, b: m.point(torch.cat([up(a), b], 1)),
        lambda m, a, b: m.point(torch.cat([up(a, size=(6, 10)), b], 1)),
        lambda m, a, b: F.conv2d(torch.cat([up(a), b], 1), m.point.weight),
        lambda m, a, b: m.twice(torch.cat([up(a), up(a)], 1)),
        lambda m, a, b: (b * 2, m.point(torch.cat([up(a), b], 1)), a.sum()),
    ],
    ids=["silu", "no activation", "by size", "no bias", "both upsampled", "sources read by others"],
)
def test_fires(forward):
    found = fused(forward, 1)
    assert found["upsample_concat_conv_act"] == 1 and found["cat"] == found["conv2d_act"] == 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, a, b: m.point(torch.cat([b, up(a)], 1)),
        lambda m, a, b: m.five(torch.cat([up(a), b, b[:, :16]], 1)),
        lambda m, a, b: m.point(torch.cat([up(a, scale_factor=2.0, mode="bilinear"), b], 1)),
        lambda m, a, b: m.point(torch.cat([up(a, scale_factor=2.0, mode="nearest-exact"), b], 1)),
        lambda m, a, b: m.point(torch.cat([up(a, scale_factor=(2.0, 2.1)), b], 1)),
        lambda m, a, b: m.point(torch.cat([up(a[..., :2, :4], scale_factor=(3.0, 2.5)), b], 1)),
        lambda m, a, b: m.point(c := torch.cat([up(a), b], 1)) + c[:, :24],
        lambda m, a, b: (u := up(a), m.point(torch.cat([u, b], 1))),
        lambda m, a, b: m.point(torch.cat([up(a), b], 1)) + b[:, :24],
        lambda m, a, b: m.three(torch.cat([up(a), b], 1)),
        lambda m, a, b: F.conv2d(torch.cat([up(a), b], 1), m.point.weight, stride=2),
        lambda m, a, b: F.conv2d(torch.cat([up(a), b], 1), m.point.weight, padding=1),
        lambda m, a, b: m.point(torch.cat([up(a), b], 1).relu()),
        lambda m, a, b: m.twice(torch.cat([up(a)[:, :, :3], b[:, :16, :3]], 1)),
        lambda m, a, b: F.conv2d(torch.cat([up(a[:, :8]), b], 1), m.point.weight[:, :40] * 1),
        lambda m, a, b: m.twice(torch.cat([up(a), up(a)], 1)[:, :32] * 1),
        lambda m, a, b: m.twice(torch.cat([up(a[:1]), up(a[1:])], 0).repeat(1, 2, 1, 1)),
    ],
    ids=[
        "fine first", "three sources", "bilinear", "nearest-exact", "factor 2.1", "factors 3 and 2.5", "concat in use",
        "upsampled map read by two", "residual", "3x3", "stride", "padding", "activation between", "slice between",
        "computed weight", "no convolution of the concat", "along the batch",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    assert fused(forward, 0)["upsample_concat_conv_act"] == 0


@pytest.mark.parametrize(("c1", "c2"), [(8, 16), (16, 24), (24, 8)])
def test_does_not_fire_on_channels_that_split_a_matrix_instruction(c1, c2):
    module = net(lambda m, a, b: m.point(torch.cat([up(a), b], 1)), point=nn.Conv2d(c1 + c2, 8, 1))
    inputs = [image(1, c1, 2, 2), image(1, c2, 4, 4)]
    rewritten(module, inputs, "fuse_conv_act", "fuse_upsample_concat", sites=0)


def test_factor_that_doubles_the_size_and_reads_other_pixels():
    """ceil(4 * 2.1) is 8, but pixel 2 of the result is pixel 0 of the source."""
    module = net(lambda m, a, b: m.point(torch.cat([up(a, scale_factor=2.1), b], 1)), point=nn.Conv2d(32, 8, 1))
    inputs = [image(1, 16, 4, 4), image(1, 16, 8, 8)]
    rewritten(module, inputs, "fuse_conv_act", "fuse_upsample_concat", sites=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_small_and_odd_maps(rows):
    inputs = (image(1, 16, rows, 3), image(1, 32, 2 * rows, 6))
    assert fused(lambda m, a, b: m.point(torch.cat([up(a), b], 1)), 1, inputs)["upsample_nearest2d"] == 0


def test_a_source_written_before_the_convolution_stays():
    def forward(m, a, b):
        y = F.relu(a)
        part = y[:, :4]
        u = up(y)
        part.mul_(3.0)
        return m.point(torch.cat([u, b], 1)), y

    assert fused(forward, 0)["upsample_nearest2d"] == 1


def test_sources_reach_the_kernel_in_a_layout_it_reads():
    found = fused(
        lambda m, a, b: m.point(torch.cat([up(a[::2]), b[::2]], 1)), 1, (image(4, 16, 3, 3), image(4, 32, 6, 6))
    )
    assert found["contiguous"] == 2
