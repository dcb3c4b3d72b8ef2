"""Which stream each kernel gets and whom it waits for; running the streams needs a GPU."""

import torch
from torch import fx, nn

from ridgeline.graph import export
from ridgeline.streams import schedule


class Fork(nn.Module):
    """A long branch and a short one, joined at the end."""

    def forward(self, x):
        a = x.sin()
        return a.cos().tanh().exp() + a.abs()


def named(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes}


def test_the_longest_branch_keeps_the_stream_and_the_other_leaves_it():
    graph = export(Fork(), [torch.rand(4)]).graph
    node, plan = named(graph), schedule(graph, side_streams=2)
    assert {plan.stream[node[name]] for name in ("sin", "cos", "tanh", "exp", "add")} == {0}
    assert plan.stream[node["abs_1"]] > 0
    assert plan.waits[node["abs_1"]] == (node["sin"],)
    assert plan.waits[node["add"]] == (node["abs_1"],)
    # read on another stream than the one they were made on
    assert plan.keep == {node["sin"], node["abs_1"]}


def test_without_side_streams_nothing_waits():
    plan = schedule(export(Fork(), [torch.rand(4)]).graph, side_streams=0)
    assert (plan.streams, plan.keep, set(plan.waits.values())) == (1, frozenset(), {()})


def stored_after_read() -> fx.Graph:
    """abs reads a buffer that copy_ overwrites, while a longer branch runs beside it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    buffer = graph.call_function(torch.ops.aten.sin.default, (x,))
    other = graph.call_function(torch.ops.aten.cos.default, (x,))
    read = graph.call_function(torch.ops.aten.abs.default, (buffer,))
    graph.call_function(torch.ops.aten.copy_.default, (buffer, other))
    again = graph.call_function(torch.ops.aten.exp.default, (buffer,))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (read, again)))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(4)
    named(graph)["copy__default"].meta["val"] = buffer.meta["val"]
    return graph


def test_a_store_waits_for_who_wrote_and_who_read_the_memory():
    graph = stored_after_read()
    node, plan = named(graph), schedule(graph, side_streams=3)
    finished = {earlier.name for earlier in plan.waits[node["copy__default"]]}
    same = {name for name, other in node.items() if plan.stream.get(other) == plan.stream[node["copy__default"]]}
    assert {"sin_default", "cos_default", "abs_default"} <= finished | same
    reader = node["exp_default"]
    assert node["copy__default"] in plan.waits[reader] or plan.stream[reader] == plan.stream[node["copy__default"]]
