"""Export, and the checker that says what stands between fused kernels."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs import KERNELS, image, net, targets
from ridgeline.errors import NotEngaged
from ridgeline.graph import export, interior, is_nhwc, is_view, mutated, origin, refresh, repair_layout
from ridgeline.kernels import conv2d_act
from ridgeline.kernels._nhwc import pixel_pitch

X = image(2, 8, 6, 5)
LAYERS = {"a": nn.Conv2d(8, 8, 3, padding=1), "b": nn.Conv2d(8, 4, 1)}


def exported(forward, *inputs: Tensor):
    module = net(forward, **LAYERS).to(memory_format=torch.channels_last)
    return export(module, inputs or (X,))


def found(forward, *inputs: Tensor) -> list[str]:
    return [finding.what for finding in interior(exported(forward, *inputs))]


# export


def test_a_graph_of_aten_calls_with_shared_weights():
    module = net(lambda m, x: F.relu(m.a(x)), **LAYERS)
    graph_module = export(module, (X,))
    assert targets(graph_module) == {"conv2d": 1, "relu": 1}
    assert graph_module.get_parameter("a.weight").data_ptr() == module.a.weight.data_ptr()
    assert all(node.op != "call_module" for node in graph_module.graph.nodes)
    torch.testing.assert_close(graph_module(X), module(X))


def test_runs_on_other_values_and_refuses_nothing_at_run_time():
    graph_module = exported(lambda m, x: m.a(x.to(torch.float32)).float())
    assert "_assert_tensor_metadata" not in targets(graph_module)
    assert graph_module(X * 2).shape == X.shape


def test_views_become_reshapes():
    graph_module = exported(lambda m, x: x.contiguous().view(2, -1))
    assert targets(graph_module) == {"contiguous": 1, "reshape": 1}


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + 1


def test_nodes_know_where_they_come_from():
    graph_module = export(Outer().eval(), (X,))
    relu, _, add = (node for node in graph_module.graph.nodes if node.op == "call_function")
    inner, outer = (kind.forward.__code__.co_firstlineno + 1 for kind in (Inner, Outer))
    assert origin(relu) == f"block.0 (test_graph.py:{inner})"
    assert origin(add) == f"(test_graph.py:{outer})"
    with graph_module.graph.inserting_before(add):
        assert origin(graph_module.graph.call_function(torch.ops.aten.neg.default, (relu,))) == ""


class OwnError(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"sides must be multiples of 32, got {tuple(x.shape[2:])}")


def test_the_modules_own_refusal_passes_through():
    with pytest.raises(ValueError, match=r"multiples of 32, got \(6, 5\)"):
        export(OwnError().eval(), (X,))


def test_a_wrong_shape_is_named_with_its_line():
    with pytest.raises(NotEngaged, match=r"Net cannot be exported: Given groups=1, .* instead \(.*:\d+\)"):
        export(net(lambda m, x: m.a(x), **LAYERS), (image(1, 3, 6, 6),))


def test_a_view_that_channels_last_maps_do_not_have_is_named_with_its_line():
    with pytest.raises(
        NotEngaged, match=r"Cannot view .* \(test_graph.py:\d+\): .* which reshape takes and view may not"
    ):
        exported(lambda m, x: m.a(x).view(2, -1))
    assert targets(exported(lambda m, x: m.a(x).reshape(2, -1)))["conv2d"] == 1


def branches(m: nn.Module, x: Tensor) -> Tensor:
    print("a line of the module's own", file=sys.stderr)
    y = m.a(x)
    return y if y.sum() > 0 else -y


def test_a_branch_on_values_is_one_sentence_without_the_graph_so_far(capfd, caplog):
    refusal = (
        r"^Net cannot be exported: it branches on the values of a tensor \(test_graph.py:\d+\): choose by torch\.where"
    )
    with pytest.raises(NotEngaged, match=refusal), caplog.at_level(logging.DEBUG, "ridgeline.graph"):
        export(net(branches, **LAYERS), (X,))
    out, err = capfd.readouterr()
    # what the module says itself is kept, once a trace
    assert out == "" and set(err.splitlines()) == {"a line of the module's own"}
    assert any(
        "aten.item.default" in record.getMessage() for record in caplog.records if record.name == "ridgeline.graph"
    )


def test_dropout_in_eval_mode_shares_memory_where_that_matters():
    graph_module = exported(lambda m, x: (y := m.a(x), F.relu_(F.dropout(y, 0.5, training=False))))
    conv, dropout, relu = (node for node in graph_module.graph.nodes if node.op == "call_function")
    storages = {node.meta["val"].untyped_storage()._cdata for node in (conv, dropout, relu)}
    assert len(storages) == 1
    assert mutated(relu) == (dropout,) and mutated(conv) == ()


# refresh and repair


def test_refresh_follows_an_edit():
    graph_module = exported(lambda m, x: m.a(x) + 1)
    (conv,) = (node for node in graph_module.graph.nodes if str(node.target) == "aten.conv2d.default")
    conv.args = (*conv.args[:3], [2, 2], [1, 1])
    assert conv.meta["val"].shape == (2, 8, 6, 5)
    refresh(graph_module)
    assert conv.meta["val"].shape == (2, 8, 3, 3)
    assert next(iter(conv.users)).meta["val"].shape == (2, 8, 3, 3)


def test_repair_converts_each_unreadable_map_once_and_nothing_else():
    graph_module = exported(lambda m, x: x.transpose(2, 3))
    *_, swapped, output = graph_module.graph.nodes
    with graph_module.graph.inserting_before(output):
        weight = torch.zeros(8, 8, 1, 1).contiguous(memory_format=torch.channels_last)
        graph_module.register_buffer("weight", weight)
        get = graph_module.graph.get_attr("weight")
        fused = graph_module.graph.call_function(
            conv2d_act.OP.overload, (swapped, get, None, swapped), {"stride": [1, 1], "padding": [0, 0]}
        )
    output.args = ((fused,),)
    repair_layout(graph_module, KERNELS)
    assert targets(graph_module) == {"transpose": 1, "contiguous": 1, "conv2d_act": 1}
    assert fused.args[0] is fused.args[3] and pixel_pitch(fused.args[0].meta["val"]) == 8
    before = str(graph_module.graph)
    repair_layout(graph_module, KERNELS)
    assert str(graph_module.graph) == before


# interior


def test_a_chain_of_convolutions_is_clean():
    assert found(lambda m, x: m.b(F.silu(m.a(x)) + x)) == []


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda m, x: torch.cat([m.a(x), x], 1), ["concat"]),
        (lambda m, x: torch.cat([m.a(x), x], 0), ["concat"]),
        (lambda m, x: m.a(x).clone(), ["copy"]),
        (lambda m, x: m.a(x).contiguous(), ["copy"]),
        (lambda m, x: m.a(x).reshape(2, 4, 2, 30).flatten(1), ["copy"]),
        (lambda m, x: m.a(x).flatten(1), ["copy"]),
        (lambda m, x: m.a(x) + torch.zeros(8, 1, 1), ["fill"]),
        (lambda m, x: torch.zeros_like(x) + m.a(x), ["fill"]),
        (lambda m, x: m.a(x).flip(1).sigmoid(), []),
        (lambda m, x: m.a(x).flatten(2).transpose(1, 2), []),
        (lambda m, x: m.a(x)[:, 2:4], []),
        (lambda m, x: m.b(m.a(x)[:, :, ::2]), []),
        (lambda m, x: m.a(x).mean((2, 3)), []),
    ],
    ids=[
        "concat of channels", "concat of images", "clone", "contiguous", "reshape that copies", "flatten that copies",
        "zeros", "zeros like", "flip", "flatten of pixels", "slice", "every second row", "mean",
    ],
)  # fmt: skip
def test_finds(forward, what):
    assert found(forward) == what


def test_finds_a_layout_change():
    forward = lambda m, x: torch.empty_like(m.a(x), memory_format=torch.contiguous_format)  # noqa: E731
    assert found(forward) == ["layout change"]


def test_findings_name_node_and_place():
    (finding,) = interior(export(nn.Sequential(Outer(), nn.Flatten()).eval(), (X,)))
    assert finding.what == "copy" and finding.node == "flatten = aten.flatten.using_ints"
    assert finding.where.startswith("1 (flatten.py:")


@pytest.mark.parametrize("shape", [(2, 8, 1, 1), (1, 8, 1, 5), (2, 8, 6, 1), (1, 1, 6, 5), (2, 1, 1, 1)])
def test_axes_of_one_are_no_layout_change(shape):
    x = image(*shape)
    assert is_nhwc(x)
    assert found(lambda m, x: (x * 2).relu() + 1, x) == []


def test_is_nhwc():
    x = image(2, 8, 6, 5)
    assert is_nhwc(x) and is_nhwc(x[:, 2:5]) and is_nhwc(x[:, :1])
    assert not is_nhwc(x.contiguous()) and not is_nhwc(x[:, ::2])
    assert is_nhwc(torch.empty(2, 8, 1, 1)) and is_nhwc(torch.empty(2, 1, 6, 5))


@pytest.mark.parametrize(
    ("forward", "view"),
    [
        (lambda m, x: x[:, :4], True), (lambda m, x: x.chunk(2, 1)[1], True), (lambda m, x: x.flatten(2), True),
        (lambda m, x: x.flatten(1), False), (lambda m, x: x.permute(0, 2, 3, 1), True), (lambda m, x: x + 1, False),
        (lambda m, x: x.transpose(2, 3), True), (lambda m, x: x[:, 0], True), (lambda m, x: x.unsqueeze(0), True),
        (lambda m, x: x.contiguous(), False),
        (lambda m, x: m.a(x).to(torch.float32), True), (lambda m, x: x.relu_(), False),
    ],
    ids=[
        "slice", "chunk", "flatten", "flatten that copies", "permute", "sum", "transpose", "select", "unsqueeze",
        "contiguous", "conversion to itself", "in place",
    ],
)  # fmt: skip
def test_is_view(forward, view):
    graph_module = exported(forward)
    refresh(graph_module)
    *_, last, _ = graph_module.graph.nodes
    assert is_view(last) is view
