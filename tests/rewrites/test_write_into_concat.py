"""Producers store into the concat's buffer: when it fires, and when an overwrite would be seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import BY_NAME, image, net, rewritten, targets
from ridgeline.models.blocks import C2PSA, SPPF, Bottleneck, C3k, C3k2, PSABlock

BEFORE = (
    "functionalize",
    "fold_batch_norm",
    "fuse_max_pools",
    "fuse_conv_act",
    "merge_siblings",
    "fuse_upsample_concat",
)
X = image(2, 8, 5, 7)


def layers():
    """a, b: 8 -> 8; inner, other: 4 -> 4; h, g: 8 -> 4; wide: 16 -> 8; all 1x1 or 3x3 that keep the map's size."""
    return {
        "a": nn.Conv2d(8, 8, 1), "b": nn.Conv2d(8, 8, 3, padding=1), "inner": nn.Conv2d(4, 4, 3, padding=1),
        "other": nn.Conv2d(4, 4, 1), "h": nn.Conv2d(8, 4, 1), "g": nn.Conv2d(8, 4, 3, padding=1),
        "wide": nn.Conv2d(16, 8, 1), "deep": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    }  # fmt: skip


def placed(forward, sites, inputs=(X,), before=("fuse_conv_act",)):
    return rewritten(net(forward, **layers()), inputs, *before, "write_into_concat", sites=sites)[1]


def new_buffer(m, x):
    return m.wide(torch.cat([m.a(x), m.b(x)], 1))


def three_with_a_residual(m, x):
    return torch.cat([m.h(x), F.silu(m.b(x)) + x, m.g(x)], 1)


def split_and_inner(m, x):
    """C3k2: [y0 | y1 | m(y1)], one kernel makes y0 and y1."""
    y0, y1 = m.a(x).chunk(2, 1)
    return torch.cat([y0, y1, m.inner(y1)], 1)


def split_in_the_middle(m, x):
    y0, y1 = m.a(x).split([4, 4], 1)
    return torch.cat([m.g(x), y0, y1], 1)


def producers_read_by_others(m, x):
    y = m.a(x)
    return torch.cat([y, z := m.b(y)], 1), F.relu(y) + z


def one_half_overwritten(m, x):
    """C3k after its siblings have merged: [m(a) | b] over [a | b]."""
    a, b = m.a(x).chunk(2, 1)
    return m.b(torch.cat([m.inner(m.other(a)), b], 1))


def second_half_overwritten(m, x):
    a, b = m.a(x).chunk(2, 1)
    return torch.cat([a, m.inner(m.other(b))], 1)


@pytest.mark.parametrize(
    ("forward", "buffers"),
    [
        (new_buffer, 1), (three_with_a_residual, 1), (split_and_inner, 1), (split_in_the_middle, 1),
        (producers_read_by_others, 1), (one_half_overwritten, 0), (second_half_overwritten, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_fires(forward, buffers):
    found = placed(forward, 1, before=("fuse_max_pools", "fuse_conv_act"))
    assert found["cat"] == 0 and found["empty"] == buffers
    assert sum(count for name, count in found.items() if name.endswith("_into")) >= 1


@pytest.mark.parametrize(
    ("block", "sites"),
    [
        (C3k(8), 1),
        (C3k2(8, 8, [Bottleneck(4, expansion=0.5), Bottleneck(4, expansion=0.5)], hidden=4), 1),
        (C3k2(8, 8, [C3k(4)], hidden=4), 2),
        (SPPF(8), 0),
    ],
    ids=["C3k", "C3k2", "C3k in C3k2", "SPPF has none left"],
)
def test_no_concat_is_left_in_a_block(block, sites):
    graph_module, found = rewritten(net(lambda m, x: m.block(x), block=block), [X], *BEFORE, "write_into_concat")
    assert found["cat"] == 0
    assert BY_NAME["write_into_concat"](graph_module) == 0
    assert found["slice"] >= sites


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_stage(batch):
    module = net(
        lambda m, x: m.c3k2(m.c2psa(x)), c2psa=C2PSA(128, repeats=1),
        c3k2=C3k2(128, 16, [nn.Sequential(Bottleneck(64, expansion=0.5), PSABlock(64))], hidden=64),
    )  # fmt: skip
    _, found = rewritten(module, [image(batch, 128, 3, 5)], *BEFORE, "write_into_concat", sites=2)
    assert found["cat"] == 0


# What must stay, and what must not be overwritten


def residual_of_the_half(m, x):
    """The writer's residual is the slice it would overwrite: allowed to the kernel, refused here."""
    a, b = m.a(x).chunk(2, 1)
    return torch.cat([F.silu(m.inner(m.other(a))) + a, b], 1)


def half_read_after(m, x):
    a, b = m.a(x).chunk(2, 1)
    c = torch.cat([m.inner(m.other(a)), b], 1)
    return c, a * 2


def whole_read_after(m, x):
    y = m.a(x)
    a, b = y.chunk(2, 1)
    c = torch.cat([m.inner(m.other(a)), b], 1)
    return m.b(c) + y


def view_of_the_half_read_after(m, x):
    """The view is taken before the writer runs, and read after it."""
    a, b = m.a(x).chunk(2, 1)
    tokens = a.flatten(2)
    c = torch.cat([m.inner(m.other(a)), b], 1)
    return c, tokens.sum(2)


def permuted_view_read_after(m, x):
    y = m.a(x)
    pixels = y.permute(0, 2, 3, 1)[:, :2]
    a, b = y.chunk(2, 1)
    return torch.cat([m.inner(m.other(a)), b], 1), pixels + 1


def dropout_of_the_half_read_after(m, x):
    a, b = m.a(x).chunk(2, 1)
    same = F.dropout(a, 0.5, training=False)
    return torch.cat([m.inner(m.other(a)), b], 1), same * 2


def all_but_the_last_read_after(m, x):
    """A slice with a negative end."""
    y = m.a(x)
    a, b = y.chunk(2, 1)
    most = y[:, :-4]
    return torch.cat([m.inner(m.other(a)), b], 1), most + 1


def half_is_a_result(m, x):
    a, b = m.a(x).chunk(2, 1)
    return torch.cat([m.inner(m.other(a)), b], 1), a


def writer_reads_the_whole(m, x):
    y = m.a(x)
    return torch.cat([m.h(y), y[:, 4:]], 1)


def writer_runs_before_the_host(m, x):
    early = m.h(x)
    return torch.cat([early, m.b(x)[:, 4:]], 1)


def host_is_an_input(m, x):
    return torch.cat([m.h(x), x[:, 4:]], 1)


def host_is_a_view(m, x):
    y = m.a(x)
    z = y.reshape(1, 16, 5, 7).reshape(2, 8, 5, 7)
    return torch.cat([m.h(F.relu(z)), z[:, 4:]], 1), y.sum(1)


def host_is_a_foreign_result(m, x):
    y = F.relu(x)
    return torch.cat([m.h(x), y[:, 4:]], 1)


def shifted(m, x):
    a, b = m.a(x).chunk(2, 1)
    return torch.cat([b, m.inner(a)], 1)


def swapped(m, x):
    a, b = m.a(x).chunk(2, 1)
    return torch.cat([b, a, m.inner(a)], 1)


def every_second_channel(m, x):
    y = m.a(x)
    return torch.cat([y[:, ::2], m.inner(y[:, 4:])], 1)


def counted_from_the_end(m, x):
    y = m.a(x)
    return torch.cat([m.inner(m.other(y[:, -4:])), y[:, -4:]], 1)


def nested_slices_from_the_end(m, x):
    y = m.a(x)
    return torch.cat([y[:, 2:][:, -6:][:, :4], m.inner(y[:, 4:])], 1)


def part_of_a_producer(m, x):
    return torch.cat([m.a(x)[:, :4], m.b(x)], 1)


def one_map_twice(m, x):
    return torch.cat([y := m.a(x), y], 1)


def one_slice_twice(m, x):
    y = m.a(x)
    return torch.cat([y[:, :4], y[:, :4]], 1)


def with_an_input(m, x):
    return torch.cat([m.a(x), x], 1)


def with_a_relu(m, x):
    return torch.cat([m.a(x), F.relu(m.b(x))], 1)


def along_the_rows(m, x):
    return torch.cat([m.a(x), m.b(x)], 2)


def along_the_batch(m, x):
    return torch.cat([m.a(x), m.b(x)], 0)


def of_tokens(m, x):
    return torch.cat([m.a(x).flatten(2), m.b(x).flatten(2)], 1)


def promotes(m, x):
    return torch.cat([m.a(x), m.b(x).double()], 1).float()


def producer_written_in_place_later(m, x):
    y = m.a(x)
    part = y[:, :2]
    c = torch.cat([y, m.b(x)], 1)
    part.mul_(2.0)
    return c * 1, y


REFUSED = (
    residual_of_the_half, half_read_after, whole_read_after, view_of_the_half_read_after, permuted_view_read_after,
    dropout_of_the_half_read_after, all_but_the_last_read_after, half_is_a_result, writer_reads_the_whole,
    writer_runs_before_the_host, host_is_an_input, host_is_a_view, host_is_a_foreign_result, shifted, swapped,
    every_second_channel, nested_slices_from_the_end, part_of_a_producer, one_map_twice, one_slice_twice, with_an_input,
    with_a_relu, along_the_rows, along_the_batch, of_tokens, promotes, producer_written_in_place_later,
)  # fmt: skip


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_does_not_fire(forward):
    assert placed(forward, 0)["cat"] == 1


def test_negative_bounds_are_understood():
    assert placed(counted_from_the_end, 1)["cat"] == 0


def two_of_the_same(m, x):
    """The second concat finds its producers in the first one's buffer."""
    y, z = m.a(x), m.b(x)
    return m.wide(torch.cat([y, z], 1)), torch.cat([z, y], 1)


def nested(m, x):
    inner = torch.cat([m.h(x), m.g(x)], 1)
    return m.wide(torch.cat([inner, m.b(inner)], 1)) + inner


def chained_overwrites(m, x):
    """Each concat overwrites half of the map before: three writers, one buffer."""
    y = m.a(x)
    for inner in (m.inner, m.other, m.inner):
        a, b = y.chunk(2, 1)
        y = torch.cat([F.silu(inner(m.other(a))), b], 1)
    return m.b(y)


def both_halves_in_turn(m, x):
    a, b = m.a(x).chunk(2, 1)
    c = torch.cat([m.inner(m.other(a)), b], 1)
    d, e = c.chunk(2, 1)
    return m.b(torch.cat([d, m.inner(m.other(e))], 1)), d.sum()


def read_by_two_concats(m, x):
    a, b = m.a(x).chunk(2, 1)
    inner = m.inner(m.other(a))
    return m.b(torch.cat([inner, b], 1)), m.deep(torch.cat([a, inner], 1))


@pytest.mark.parametrize(
    ("forward", "sites"),
    [(two_of_the_same, 1), (nested, 1), (chained_overwrites, 3), (both_halves_in_turn, 2), (read_by_two_concats, 0)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_several_concats(forward, sites):
    rewritten(net(forward, **layers()), [X], "fuse_conv_act", "write_into_concat", sites=sites)


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (3, 8, 1, 4), (2, 8, 7, 1)])
@pytest.mark.parametrize("forward", [new_buffer, split_and_inner, one_half_overwritten], ids=lambda f: f.__name__)
def test_maps_with_axes_of_one(forward, shape):
    placed(forward, 1, [image(*shape)])


def test_stores_survive_the_removal_of_dead_code():
    """Nothing reads what a storing call returns; the calls must outlive every later clean-up all the same."""
    graph_module, _ = rewritten(net(new_buffer, **layers()), [X], "fuse_conv_act", "write_into_concat", sites=1)
    before = targets(graph_module)
    graph_module.graph.eliminate_dead_code()
    assert targets(graph_module) == before and before["conv2d_act_into"] == 2


def test_overlap_is_refused_by_the_kernel_too():
    """The last line of defence: a storing call whose output overlaps its input raises."""
    buffer = image(1, 16, 4, 4)
    weight = image(8, 8, 1, 1)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        torch.ops.ridgeline.conv2d_act_into(buffer[:, 4:12], buffer[:, :8], weight, stride=[1, 1], padding=[0, 0])
