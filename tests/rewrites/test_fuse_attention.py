"""YOLO26's attention, written in the one way the kernel computes it; every deviation stays with PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import BY_NAME, check, image, net, rewritten
from ridgeline.graph import export
from ridgeline.models.blocks import C2PSA, KEY_CHANNELS, Attention, PSABlock

HEADS, KEY, VALUE = 2, 16, 32
CHANNELS = HEADS * VALUE


def layers(key=KEY, value=VALUE):
    c = HEADS * value
    return {
        "qkv": nn.Conv2d(8, HEADS * (2 * key + value), 1), "pe": nn.Conv2d(c, c, 3, padding=1, groups=c),
        "wide": nn.Conv2d(c, c, 3, padding=2, dilation=2, groups=c), "dense": nn.Conv2d(c, c, 3, padding=1),
        "bare": nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False), "point": nn.Conv2d(c, c, 1, groups=c),
    }  # fmt: skip


def attention(
    m, x, *, split=(0, 1, 2), key=KEY, value=VALUE, scale=None, mask=None, swap=False, position=None, last=torch.add
):
    """The computation of models.blocks.Attention, with one thing changed at a time."""
    n, _, h, w = x.shape
    parts = m.qkv(x).view(n, HEADS, 2 * key + value, h * w).split([key, key, value], dim=2)
    q, k, v = (parts[index] for index in split)
    scores = q.transpose(-2, -1) @ k * (key**-0.5 if scale is None else scale)
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    shape = (n, HEADS * value, w, h) if swap else (n, HEADS * value, h, w)
    return last((v @ weights.transpose(-2, -1)).reshape(shape), (position or m.pe)(v.reshape(shape)))


@pytest.mark.parametrize("shape", [(1, 8, 4, 6), (2, 8, 3, 5), (1, 8, 1, 1), (2, 8, 1, 7)])
def test_fires(shape):
    graph_module, found = rewritten(net(attention, **layers()), [image(*shape)], "fuse_attention", sites=1)
    assert found == {"conv2d": 1, "attention_position": 1}
    (node,) = [n for n in graph_module.graph.nodes if "attention" in str(n.target)]
    assert node.kwargs == {"heads": HEADS, "key_channels": KEY}


@pytest.mark.parametrize("block", [Attention(128), PSABlock(64), C2PSA(256, repeats=2)], ids=lambda b: type(b).__name__)
def test_fires_on_the_models_own_blocks(block):
    channels = {"Attention": 128, "PSABlock": 64, "C2PSA": 256}[type(block).__name__]
    sites = 2 if isinstance(block, C2PSA) else 1
    assert KEY_CHANNELS == 32
    module = net(lambda m, x: m.block(x), block=block)
    _, found = rewritten(module, [image(1, channels, 3, 4)], "fold_batch_norm", "fuse_attention", sites=sites)
    assert found["softmax"] == found["matmul"] == 0 and found["attention_position"] == sites


def test_whole_pipeline_leaves_kernels_only():
    module = net(lambda m, x: m.block(x), block=C2PSA(256, repeats=1))
    _, found = rewritten(module, [image(2, 256, 3, 4)], *BY_NAME)
    kernels = {"conv2d_act", "conv_chain", "conv2d_act_into", "conv_chain_into", "attention_position"}
    assert set(found) <= kernels | {"slice", "empty"}


def scores_read_by_others(m, x):
    n, _, h, w = x.shape
    q, k, v = m.qkv(x).view(n, HEADS, 2 * KEY + VALUE, h * w).split([KEY, KEY, VALUE], dim=2)
    weights = (q.transpose(-2, -1) @ k * KEY**-0.5).softmax(dim=-1)
    y = (v @ weights.transpose(-2, -1)).reshape(n, CHANNELS, h, w)
    return y + m.pe(v.reshape(n, CHANNELS, h, w)), weights


def heads_inside(m, x):
    """The heads lie next to each other in a head's channels, not one after the other."""
    n, _, h, w = x.shape
    q, k, v = m.qkv(x).view(n, 2 * KEY + VALUE, HEADS, h * w).transpose(1, 2).split([KEY, KEY, VALUE], dim=2)
    weights = (q.transpose(-2, -1) @ k * KEY**-0.5).softmax(dim=-1)
    y = (v @ weights.transpose(-2, -1)).reshape(n, CHANNELS, h, w)
    return y + m.pe(v.reshape(n, CHANNELS, h, w))


def softmax_over_queries(m, x):
    n, _, h, w = x.shape
    q, k, v = m.qkv(x).view(n, HEADS, 2 * KEY + VALUE, h * w).split([KEY, KEY, VALUE], dim=2)
    weights = (q.transpose(-2, -1) @ k * KEY**-0.5).softmax(dim=-2)
    y = (v @ weights.transpose(-2, -1)).reshape(n, CHANNELS, h, w)
    return y + m.pe(v.reshape(n, CHANNELS, h, w))


def values_of_another_map(m, x):
    n, _, h, w = x.shape
    q, k, v = m.qkv(x).view(n, HEADS, 2 * KEY + VALUE, h * w).split([KEY, KEY, VALUE], dim=2)
    other = m.qkv(x * 2).view(n, HEADS, 2 * KEY + VALUE, h * w).split([KEY, KEY, VALUE], dim=2)[2]
    weights = (q.transpose(-2, -1) @ k * KEY**-0.5).softmax(dim=-1)
    y = (v @ weights.transpose(-2, -1)).reshape(n, CHANNELS, h, w)
    return y + m.pe(other.reshape(n, CHANNELS, h, w))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: attention(m, x, split=(1, 0, 2)),
        lambda m, x: attention(m, x, scale=0.3),
        lambda m, x: attention(m, x, mask=x.new_ones(24, 24).tril()),
        lambda m, x: attention(m, x, swap=True),
        lambda m, x: attention(m, x, position=m.dense),
        lambda m, x: attention(m, x, position=m.wide),
        lambda m, x: attention(m, x, position=m.bare),
        lambda m, x: attention(m, x, position=m.point),
        lambda m, x: attention(m, x, position=lambda v: F.conv2d(v, m.pe.weight * 2, m.pe.bias, 1, 1, 1, CHANNELS)),
        lambda m, x: attention(m, x, last=lambda a, b: torch.add(a, b, alpha=2)),
        lambda m, x: attention(m, x, last=torch.mul),
        scores_read_by_others,
        heads_inside,
        softmax_over_queries,
        values_of_another_map,
    ],
    ids=[
        "k first", "scale", "mask", "rows and columns swapped", "dense position term", "dilated position term",
        "position term without bias", "1x1 position term", "computed filter", "alpha", "product", "scores read",
        "heads inside", "softmax over queries", "values of another map",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    _, found = rewritten(net(forward, **layers()), [image(2, 8, 4, 6)], "fuse_attention", sites=0)
    assert found["softmax"] == 1 and found["attention_position"] == 0


@pytest.mark.parametrize(("key", "value"), [(8, 32), (16, 24)])
def test_does_not_fire_on_channels_the_kernel_refuses(key, value):
    module = net(lambda m, x: attention(m, x, key=key, value=value), **layers(key, value))
    rewritten(module, [image(1, 8, 3, 4)], "fuse_attention", sites=0)


def test_qkv_written_after_its_values_were_taken_stays():
    def forward(m, x):
        n, _, h, w = x.shape
        y = m.qkv(x)
        older = y[:, :4]
        q, k, v = y.view(n, HEADS, 2 * KEY + VALUE, h * w).split([KEY, KEY, VALUE], dim=2)
        weights = (q.transpose(-2, -1) @ k * KEY**-0.5).softmax(dim=-1)
        rows = (v @ weights.transpose(-2, -1)).reshape(n, CHANNELS, h, w)
        position = m.pe(v.reshape(n, CHANNELS, h, w))
        older.mul_(3.0)
        return rows + position, y

    module, x = net(forward, **layers()), image(1, 8, 3, 4)
    graph_module = export(module, [x])
    assert BY_NAME["fuse_attention"](graph_module) == 0
    check(graph_module, module, [x])
