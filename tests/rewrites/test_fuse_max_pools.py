"""SPPF's chain of pools becomes one kernel; every other concat of pools stays as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import BY_NAME, check, image, net, rewritten, targets
from ridgeline.graph import export
from ridgeline.kernels._nhwc import pixel_pitch
from ridgeline.models.blocks import SPPF

X = image(2, 8, 7, 6)


def pool(x, size=5, **choices):
    return F.max_pool2d(x, size, **{"stride": 1, "padding": size // 2, **choices})


def chain(x, count, size=5, **choices):
    maps = [x]
    for _ in range(count):
        maps.append(pool(maps[-1], size, **choices))
    return torch.cat(maps, dim=1)


def call_of(graph_module):
    (node,) = [n for n in graph_module.graph.nodes if "max_pool_chain" in str(n.target)]
    return dict(node.kwargs)


@pytest.mark.parametrize(("count", "size"), [(1, 3), (2, 5), (3, 5), (3, 1), (4, 3)])
def test_fires(count, size):
    graph_module, found = rewritten(net(lambda m, x: chain(x, count, size)), [X], "fuse_max_pools", sites=1)
    assert found == {"max_pool_chain": 1}
    assert call_of(graph_module) == {"size": size, "count": count}


def test_fires_on_sppf():
    _, found = rewritten(net(lambda m, x: m.sppf(x), sppf=SPPF(8)), [X], "fuse_max_pools", sites=1)
    assert found["max_pool_chain"] == 1 and found["max_pool2d"] == found["cat"] == 0


def test_pools_that_others_read_stay_beside_the_chain():
    module = net(lambda m, x: (p := pool(x), torch.cat([x, p, pool(p)], 1)))
    _, found = rewritten(module, [X], "fuse_max_pools", sites=1)
    assert found == {"max_pool_chain": 1, "max_pool2d": 1}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.cat([x, p := pool(x, 5), pool(p, 3)], 1),
        lambda m, x: torch.cat([x, pool(x, 5), pool(x, 5)], 1),
        lambda m, x: torch.cat([p := pool(x), pool(p), x], 1),
        lambda m, x: torch.cat([x, pool(pool(x))], 1),
        lambda m, x: torch.cat([x * 2, pool(x)], 1),
        lambda m, x: torch.cat([x, p := pool(x), m.conv(pool(p))], 1),
        lambda m, x: torch.cat([x, pool(x)], 0),
        lambda m, x: torch.cat([x, pool(x)], 2),
        lambda m, x: torch.cat([x, x], 1),
        lambda m, x: torch.cat([x], 1),
        lambda m, x: torch.cat([x[..., :6:2], F.max_pool2d(x, 3, (1, 2), 1)], 1),
        lambda m, x: torch.cat([x[..., 1:, 1:], F.max_pool2d(x, 2, 1)], 1),
        lambda m, x: torch.cat([x, F.max_pool2d(x, (3, 5), 1, (1, 2))], 1),
        lambda m, x: torch.cat([x[..., 1:-1, 1:-1], F.max_pool2d(x, 3, 1, 1, dilation=2)], 1),
        lambda m, x: torch.cat([x, F.max_pool2d(x, 5, 1, 2, ceil_mode=True)], 1),
        lambda m, x: torch.cat([x, F.avg_pool2d(x, 5, 1, 2)], 1),
        lambda m, x: torch.cat([x[0], pool(x[0])], 1),
        lambda m, x: chain(x.double(), 2).float(),
        lambda m, x: chain(x, 2, 33),
    ],
    ids=[
        "sizes differ", "parallel pools", "x last", "a link is missing", "another first map", "a convolution between",
        "along the batch", "along the rows", "no pool", "one map", "stride", "even window", "window not square",
        "dilation", "ceil mode", "average", "no batch axis", "float64", "window wider than the kernel's",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    module = net(forward, conv=nn.Conv2d(8, 8, 1))
    before = targets(export(module, [X]))
    _, after = rewritten(module, [X], "fuse_max_pools", sites=0)
    assert after == before


def test_input_in_another_layout_is_converted():
    graph_module, found = rewritten(net(lambda m, x: chain(x.transpose(2, 3), 3)), [X], "fuse_max_pools", sites=1)
    assert found == {"transpose": 1, "contiguous": 1, "max_pool_chain": 1}
    (node,) = [n for n in graph_module.graph.nodes if "max_pool_chain" in str(n.target)]
    assert pixel_pitch(node.args[0].meta["val"]) is not None


def test_x_is_read_when_the_first_pool_did():
    """x is written through an older view of it, after the pool and before the concat."""

    def forward(m, x):
        y = m.conv(x)
        half = y[:, :4]
        p = pool(y)
        half.mul_(2.0)
        return torch.cat([y, p], 1)

    module = net(forward, conv=nn.Conv2d(8, 8, 1))
    graph_module = export(module, [X])
    assert BY_NAME["fuse_max_pools"](graph_module) == 0
    check(graph_module, module, [X])


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (3, 1, 4, 4), (1, 5, 1, 9)])
def test_maps_with_axes_of_one(shape):
    rewritten(net(lambda m, x: chain(x, 3)), [image(*shape)], "fuse_max_pools", sites=1)
