"""A convolution and the 1x1 convolutions behind it become one kernel, where that pays and nothing else looks inside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import check, image, net, rewritten, targets
from ridgeline import tuned
from ridgeline.graph import export, repair_layout
from ridgeline.kernels import conv2d_act, conv_chain, conv_pair_chain
from ridgeline.models.blocks import C3k, C3k2
from ridgeline.rewrites import fuse_conv_act, fuse_conv_chain

X = image(2, 8, 5, 7)
LAYERS = {
    "first": nn.Conv2d(8, 16, 3, padding=1),
    "second": nn.Conv2d(16, 24, 1),
    "third": nn.Conv2d(24, 8, 1, bias=False),
    "wide": nn.Conv2d(32, 8, 1),
    "deep": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "point": nn.Conv2d(8, 16, 1),
    "back": nn.Conv2d(16, 16, 1),
}


def chained(forward, sites, x=X):
    return rewritten(net(forward, **LAYERS), [x], "fuse_conv_act", "fuse_conv_chain", sites=sites)


def chain_of(graph_module):
    (node,) = [n for n in graph_module.graph.nodes if n.target is conv_chain.OP.overload]
    return node


def test_fires():
    graph_module, found = chained(lambda m, x: m.third(F.silu(m.second(F.silu(m.first(x))))), 1)
    assert found == {"conv_chain": 1}
    assert chain_of(graph_module).kwargs == {
        "stride": [1, 1],
        "padding": [1, 1],
        "acts": "silu silu none",
        "skips": [-1, -1],
    }


def test_fires_behind_a_depthwise_convolution_and_on_the_second_of_two_chains():
    def forward(m, x):
        return m.back(F.silu(m.point(m.deep(F.silu(m.deep(x))))))

    _, found = chained(forward, 1)
    assert found == {"depthwise_conv2d_act": 1, "conv_chain": 1}


def test_at_most_three_tails():
    def forward(m, x):
        h = m.first(x)
        for _ in range(4):
            h = F.silu(m.back(h))
        return h

    _, found = chained(forward, 1)
    assert found == {"conv_chain": 1, "conv2d_act": 1}


@pytest.mark.parametrize("at", [0, 1])
def test_fires_through_a_concat_whatever_the_order(at):
    def forward(m, x):
        own, other = F.silu(m.first(x)), F.silu(m.point(x))
        return m.wide(torch.cat((own, other) if at == 0 else (other, own), 1))

    graph_module, found = chained(forward, 1)
    assert found["cat"] == 0 and found["conv_chain"] == 1
    assert [extra is not None for extra in chain_of(graph_module).args[6]] == [True]


def test_neighbouring_slices_of_one_map_are_read_as_that_map():
    def forward(m, x):
        parts = F.silu(m.point(x)).chunk(2, 1)
        return m.wide(torch.cat((*parts, F.silu(m.first(x))), 1))

    graph_module, found = chained(forward, 1)
    assert found["cat"] == 0
    (extra,) = chain_of(graph_module).args[6]
    assert extra.target is conv2d_act.OP.overload


def test_slices_in_another_order_stay_a_concat():
    def forward(m, x):
        a, b = F.silu(m.point(x)).chunk(2, 1)
        return m.wide(torch.cat((b, F.silu(m.first(x)), a), 1))

    _, found = chained(forward, 1)
    assert found["cat"] == 1 and found["conv_chain"] == 1


def test_residuals_from_inside_become_skips_and_one_from_outside_stays_on_the_first():
    def forward(m, x):
        first = F.silu(m.first(x)) + m.point(x)
        return m.third(m.second(F.silu(m.back(first)) + first))

    graph_module, found = chained(forward, 1)
    node = chain_of(graph_module)
    assert node.kwargs["skips"] == [0, -1, -1] and node.args[3] is not None
    assert found["add"] == 0


@pytest.mark.parametrize(
    ("source", "kernels"), [("slice", {"conv2d_act": 3}), ("map", {"conv2d_act": 1, "conv_chain": 1})]
)
def test_stays_apart_where_its_result_belongs_into_the_map_it_reads(source, kernels):
    """PSA: what becomes of b joins a again, and the last convolution, alone, can write it over b."""

    def forward(m, x):
        a, b = F.silu(m.point(x)).chunk(2, 1)
        return F.relu(torch.cat((a, m.third(F.silu(F.conv2d(b if source == "slice" else x, m.filters)))), 1))

    layers = {**LAYERS, "filters": torch.randn(24, 8, 1, 1)}
    _, found = rewritten(net(forward, **layers), [X], "fuse_conv_act", "fuse_conv_chain")
    assert {name: found[name] for name in ("conv2d_act", "conv_chain") if found[name]} == kernels


def test_fires_on_the_models_own_blocks():
    module = net(lambda m, x: m.block(x), block=C3k2(32, 48, [C3k(16)], hidden=16))
    names = ("fold_batch_norm", "fuse_conv_act", "merge_siblings", "fuse_conv_chain", "write_into_concat")
    graph_module, found = rewritten(module, [image(1, 32, 6, 5)], *names)
    assert found["conv_chain"] == 1 and found["cat"] == found["empty"] == 0  # nothing is left to write into a buffer
    assert len(chain_of(graph_module).args[4]) == 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: ((h := F.silu(m.first(x))), m.second(h)),
        lambda m, x: m.second(F.relu(m.first(x))),
        lambda m, x: m.first(F.silu(m.deep(x))),
        lambda m, x: F.conv2d(m.first(x), m.second.weight, stride=2),
        lambda m, x: F.conv2d(m.first(x), m.second.weight, padding=1),
        lambda m, x: m.back(m.first(x)) + m.point(x),
        lambda m, x: m.wide(torch.cat(((h := m.first(x)), h), 1)),
        lambda m, x: (m.wide(joined := torch.cat((m.first(x), m.first(x * 2)), 1)), joined),
        lambda m, x: (m.second(h := m.first(x)), m.back(h)),
    ],
    ids=["value read outside", "other activation", "3x3 behind", "stride", "padding", "residual from outside",
         "value twice in a concat", "concat read outside", "two readers"],
)  # fmt: skip
def test_does_not_fire_when(forward):
    _, found = chained(forward, 0)
    assert found["conv_chain"] == 0


def test_a_chain_that_reads_more_weights_than_a_launch_is_worth_stays_apart():
    heavy = {"a": nn.Conv2d(128, 256, 3, padding=1), "b": nn.Conv2d(256, 256, 1)}
    module = net(lambda m, x: m.b(F.silu(m.a(x))), **heavy)
    _, found = rewritten(module, [image(1, 128, 3, 3)], "fuse_conv_act", "fuse_conv_chain")
    assert found == {"conv2d_act": 2}


@pytest.mark.parametrize(("whole", "sites"), [(3e-6, 1), (5e-6, 0), (None, 0)])
def test_measured_times_decide(monkeypatch, whole, sites):
    row = tuned.Row("", "", "", "", "", {}, 2e-6, None, "", "", "", {})

    def seen(op, **arguments):
        if op is conv_chain.OP:
            assert arguments["acts"] == "silu none" and arguments["precision"] == "tf32"
            return whole and replace(row, seconds=whole)
        return row

    monkeypatch.setattr(fuse_conv_chain, "tuned_row", seen)
    chained(lambda m, x: m.second(F.silu(m.first(x))), sites)


def test_chains_are_made_without_any_measurement(monkeypatch):
    monkeypatch.setattr(fuse_conv_chain, "tuned_row", lambda op, **_: None)
    chained(lambda m, x: m.second(F.silu(m.first(x))), 1)


def test_shapes_that_were_measured_are_asked_for_by_the_key_of_a_call():
    """What the rewrite looks up must be what the op files its rows under."""
    asked = []

    def seen(op, **arguments):
        asked.append((op, op.key(**arguments)))

    def forward(m, x):
        return m.wide(torch.cat((F.silu(m.first(x)), m.point(x)), 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_conv_chain, "tuned_row", seen)
        graph_module, _ = chained(forward, 1)
    node = chain_of(graph_module)
    names = [argument.name for argument in node.target._schema.arguments]
    values = torch.utils._pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
    assert asked[0] == (conv_chain.OP, conv_chain.OP.key(**dict(zip(names, values[0], strict=False)), **values[1]))


PAIR = {
    "a": nn.Conv2d(8, 16, 3, padding=1),
    "b": nn.Conv2d(16, 8, 3, padding=1),
    "c": nn.Conv2d(8, 24, 1),
    "d": nn.Conv2d(24, 8, 1),
    "strided": nn.Conv2d(8, 16, 3, padding=1, stride=2),
    "point": nn.Conv2d(8, 16, 1),
    "wide": nn.Conv2d(8, 144, 3, padding=1),
    "narrow": nn.Conv2d(144, 8, 3, padding=1),
}


def paired(forward, explore="pairs"):
    """The targets of the rewritten graph, which computes what the module does."""
    module = net(forward, **PAIR)
    graph_module = export(module, [X])
    graph_module.meta["explore"] = explore
    fuse_conv_act.apply(graph_module)
    fuse_conv_chain.apply(graph_module)
    repair_layout(graph_module, {conv2d_act.OP.overload: conv2d_act.OP})
    check(graph_module, module, [X])
    return graph_module, targets(graph_module)


def bottleneck(m, x):
    return x + F.silu(m.b(F.silu(m.a(x))))


def with_tails(m, x):
    return m.d(F.silu(m.c(bottleneck(m, x))))


@pytest.mark.parametrize(("forward", "tails"), [(bottleneck, 0), (with_tails, 2)])
def test_a_pair_fires_when_explored(forward, tails):
    graph_module, found = paired(forward)
    assert found == {"conv_pair_chain": 1}
    (node,) = [n for n in graph_module.graph.nodes if n.target is conv_pair_chain.OP.overload]
    assert node.kwargs["acts"].split()[:2] == ["silu", "silu"] and len(node.args[6]) == tails


@pytest.mark.parametrize("explore", ["", "chains"])
def test_a_pair_stays_apart_unmeasured(explore):
    _, found = paired(with_tails, explore)
    assert found == {"conv2d_act": 1, "conv_chain": 1}


@pytest.mark.parametrize(
    ("pair", "whole", "found"),
    [
        (3.5e-6, 7e-6, {"conv_pair_chain": 1, "conv_chain": 1}),  # the pair alone; the tails are a chain of their own
        (5e-6, 4.5e-6, {"conv_pair_chain": 1}),
        (5e-6, 6e-6, {"conv2d_act": 1, "conv_chain": 1}),  # 2 µs and a chain of 3
        (None, None, {"conv2d_act": 1, "conv_chain": 1}),
    ],
)
def test_measured_times_decide_where_a_pair_begins(monkeypatch, pair, whole, found):
    row = tuned.Row("", "", "", "", "", {}, 2e-6, None, "", "", "", {})

    def seen(op, **arguments):
        seconds = {(conv2d_act.OP, 0): 2e-6, (conv_chain.OP, 2): 3e-6, (conv_chain.OP, 1): 1.2e-6}
        seconds |= {(conv_pair_chain.OP, 0): pair, (conv_pair_chain.OP, 2): whole}
        known = seconds.get((op, len(arguments.get("weights", ()))))
        return None if known is None else replace(row, seconds=known)

    monkeypatch.setattr(fuse_conv_chain, "tuned_row", seen)
    assert paired(with_tails, "")[1] == found


def test_a_pair_without_times_for_its_parts_stays_apart(monkeypatch):
    row = tuned.Row("", "", "", "", "", {}, 1e-9, None, "", "", "", {})
    monkeypatch.setattr(fuse_conv_chain, "tuned_row", lambda op, **_: row if op is conv_pair_chain.OP else None)
    assert paired(bottleneck, "")[1] == {"conv2d_act": 2}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(F.silu(m.a(x)) + m.point(x)),
        lambda m, x: (m.b(h := F.silu(m.a(x))), h),
        lambda m, x: m.b(F.silu(m.strided(x))),
        lambda m, x: m.b(F.silu(m.point(x))),
        lambda m, x: F.conv2d(m.a(x), m.b.weight, padding=1, stride=2),
        lambda m, x: m.narrow(m.wide(x)),
    ],
    ids=["residual", "another reader", "stride 2", "1x1", "stride 2 behind", "more than a program holds"],
)
def test_a_pair_does_not_fire_when(forward):
    assert paired(forward)[1]["conv_pair_chain"] == 0


def test_a_pair_is_asked_for_by_the_key_of_a_call(monkeypatch):
    asked = []
    row = tuned.Row("", "", "", "", "", {}, 1e-6, None, "", "", "", {})

    def seen(op, **arguments):
        asked.append((op, op.key(**arguments)))
        return replace(row, seconds=1e-7 if op is conv_pair_chain.OP else 1e-6)

    monkeypatch.setattr(fuse_conv_chain, "tuned_row", seen)
    graph_module, found = paired(with_tails, "")
    node = next(n for n in graph_module.graph.nodes if n.target is conv_pair_chain.OP.overload)
    names = [argument.name for argument in node.target._schema.arguments]
    values = torch.utils._pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
    key = conv_pair_chain.OP.key(**dict(zip(names, values[0], strict=False)), **values[1])
    assert found == {"conv_pair_chain": 1} and (conv_pair_chain.OP, key) in asked


def test_stays_apart_where_no_config_holds_its_values():
    """A product of 256 by 256 in fp32 fits no multiprocessor's shared memory."""
    layers = {"a": nn.Conv2d(8, 136, 1), "b": nn.Conv2d(136, 136, 1), "c": nn.Conv2d(136, 8, 1)}
    module = net(lambda m, x: m.c(F.silu(m.b(F.silu(m.a(x))))), **layers)
    graph_module, found = rewritten(module, [image(1, 8, 3, 3)], "fuse_conv_act", "fuse_conv_chain")
    assert found == {"conv_chain": 1, "conv2d_act": 1}
    assert len(chain_of(graph_module).args[4]) == 1
