"""In-place calls lose their effect on memory only where nobody can tell."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from graphs import BY_NAME, image, net, rewritten, targets
from ridgeline.graph import export, mutated

X = image(2, 4, 6, 5)


def convs(forward):
    return net(forward, a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize(
    ("forward", "before", "after"),
    [
        (lambda m, x: F.relu(m.a(x), inplace=True), "relu_", "relu"),
        (lambda m, x: F.silu(m.a(x), inplace=True), "silu_", "silu"),
        (lambda m, x: m.a(x).add_(m.b(x)), "add_", "add"),
        (lambda m, x: m.a(x).mul_(2.0), "mul_", "mul"),
        (lambda m, x: m.a(x).clamp_(0, 1), "clamp_", "clamp"),
        (lambda m, x: m.b(F.relu_(m.a(x)) + 1), "relu_", "relu"),
    ],
    ids=["relu", "silu", "add", "mul", "clamp", "chain"],
)
def test_turns_an_unobserved_write_into_a_value(forward, before, after):
    _, plain = rewritten(convs(forward), [X])
    assert plain[before] == 1 and plain[after] == 0
    _, pure = rewritten(convs(forward), [X], "functionalize", sites=1)
    assert pure[after] == 1 and pure[before] == 0


def test_chain_of_writes_to_one_map():
    module = convs(lambda m, x: F.relu_(m.a(x).add_(x).mul_(0.5)))
    _, found = rewritten(module, [X], "functionalize", sites=3)
    assert {"add", "mul", "relu"} <= set(found)


def slice_first(m, x):
    y = m.a(x)
    head = y[:, :2]
    y.add_(m.b(x))
    return y, head


def flat_first(m, x):
    y = m.a(x)
    flat = y.permute(0, 2, 3, 1).flatten(1)
    F.relu_(y)
    return flat, x


def dropout_is_its_input(m, x):
    y = m.a(x)
    F.relu_(F.dropout(y, 0.5, training=False))
    return y


def write_into_a_part(m, x):
    y = m.a(x)
    y[:, 1:3].mul_(2.0)
    return y


def assign_a_part(m, x):
    y = m.a(x)
    y[:, 0] = 7.0
    return m.b(y)


@pytest.mark.parametrize(
    "forward",
    [slice_first, flat_first, dropout_is_its_input, write_into_a_part, assign_a_part],
    ids=lambda f: f.__name__,
)
def test_stays_where_an_older_view_is_read_later(forward):
    module = convs(forward)
    rewritten(module, [X], "functionalize", sites=0)
    # and every other rewrite leaves the memory alone
    graph_module, found = rewritten(
        module, [X], "functionalize", "fold_batch_norm", "fuse_conv_act", "merge_siblings", "write_into_concat"
    )
    assert any(mutated(node) for node in graph_module.graph.nodes)
    assert found["conv2d"] >= 1 and not any(name.endswith("_into") for name in found)


@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (lambda m, x: m.b(F.relu_(x)), "relu_"),
        (lambda m, x: m.a(x) + m.b.bias.add_(1)[:, None, None], "add_"),
        (lambda m, x: m.a(x).half().add_(m.b(x)).float(), "add_"),
    ],
    ids=["input", "weight", "sum that would promote"],
)
def test_stays_on(forward, left):
    graph_module = export(convs(forward), [X])
    assert BY_NAME["functionalize"](graph_module) == 0
    assert targets(graph_module)[left] == 1
