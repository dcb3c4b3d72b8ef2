"""The report of a compile: counted by hand on small graphs, and the same after JSON."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import by_reference, image, net
from ridgeline import compiler
from ridgeline.compile_report import SCHEMA_VERSION, CompileReport
from ridgeline.launches import planned
from ridgeline.models.postprocess import anchor_grid, decode_xyxy, top_detections
from ridgeline.plain import from_plain
from ridgeline.recipe import Recipe

FP32 = Recipe(dtype="fp32")
PLAIN = Recipe(dtype="fp32", rewrites=("fuse_conv_act",))
X = image(1, 4, 8, 8)
MAP_BYTES = 64 * 4  # of one channel


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


def convs(*channels: int) -> dict[str, nn.Module]:
    return {f"c{i}": nn.Conv2d(4, count, 3, padding=1) for i, count in enumerate(channels)}


def test_a_chain():
    """c0 -> c1 -> c2: no two maps beside the output live at once but neighbours."""
    layers = {"c0": nn.Conv2d(4, 8, 1), "c1": nn.Conv2d(8, 16, 1), "c2": nn.Conv2d(16, 2, 1)}
    graph = compiler.compile(net(lambda m, x: m.c2(m.c1(m.c0(x))), **layers), X, PLAIN).graph(X)
    assert (graph.launches, graph.chain_length) == (3, 3)
    plan = graph.memory
    assert plan.weight_bytes == 4 * sum(p.numel() for layer in layers.values() for p in layer.parameters())
    assert plan.activation_bytes == (8 + 16) * MAP_BYTES
    assert (plan.input_bytes, plan.output_bytes, plan.pool_bytes) == (4 * MAP_BYTES, 2 * MAP_BYTES, None)


def test_branches_and_a_join():
    """Two branches of one and two convolutions, added: the longer one counts, and three maps live at the fork."""
    module = net(lambda m, x: (m.c1(m.c0(x)) + m.c2(x)) * 2, **convs(4, 4, 4))
    graph = compiler.compile(module, X, Recipe(dtype="fp32", rewrites=())).graph(X)
    assert dict(graph.foreign) == {"aten.conv2d.default": 3, "aten.add.Tensor": 1, "aten.mul.Tensor": 1}
    assert (graph.launches, graph.chain_length) == (0, 4)
    # c0's result is gone when c2's is made; the sum meets both of its operands
    assert graph.memory.activation_bytes == 3 * 4 * MAP_BYTES


def test_views_buffers_and_weights_in_the_output_cost_nothing():
    module = net(lambda m, x: (x[:, :2], m.w, m.c0(x)), w=torch.ones(3), **convs(4))
    graph = compiler.compile(module, X, PLAIN).graph(X)
    assert (graph.launches, graph.chain_length) == (1, 1)
    assert (graph.memory.activation_bytes, graph.memory.output_bytes) == (0, 4 * MAP_BYTES)


def test_an_operator_of_several_launches():
    def forward(m, x):
        levels = [m.p3(x), m.p4(F.max_pool2d(x, 2)), m.p5(F.max_pool2d(x, 4))]
        boxes, logits = (
            torch.cat([level[:, part].flatten(2) for level in levels], dim=2) for part in (slice(0, 4), slice(4, 9))
        )
        return top_detections(decode_xyxy(boxes, *anchor_grid(64, 64)), logits)

    module = net(forward, **{f"p{level}": nn.Conv2d(4, 9, 1) for level in (3, 4, 5)})
    compiled = compiler.compile(module, X, FP32, verify=False)
    graph = compiled.graph(X)
    nodes = next(iter(compiled._runners.values())).graph_module.graph.nodes
    (detect,) = (node for node in nodes if "detect_topk" in str(node.target))
    last = len(planned(detect, "meta"))
    assert last > 1 and graph.launches == 3 + last
    assert graph.chain_length == 1 + 1 + last  # a pool, the convolution that reads it, the detections


def test_json_and_back():
    compiled = compiler.compile(net(lambda m, x: torch.cat([m.c0(x), x.sin()], 1), **convs(4)), X, FP32)
    report = compiled.report
    data = json.loads(report.to_json())
    assert data.pop("schema_version") == SCHEMA_VERSION
    assert from_plain(CompileReport, data) == report
    assert data["graphs"][0]["kernels"] == [["conv2d_act", 1]] and data["gpu"] is None
    assert set(data["versions"]) == {"ridgeline", "torch", "triton"}
    lines = report.lines()
    assert lines[0] == f"fp32 on the CPU, agrees: {compiled.verdict.reason}"
    assert lines[1] == "graph for float32 1x4x8x8 channels-last on cpu"
    assert [line for line in lines if "concat inside: cat = aten.cat.default, (" in line], lines
    assert lines[-1].startswith("  memory: weights 592 B, activations ")


def test_what_was_not_verified_says_so():
    compiled = compiler.compile(net(lambda m, x: m.c0(x), **convs(4)), X, FP32, verify=False)
    assert compiled.report.lines()[0] == "fp32 on the CPU, not verified"
    assert json.loads(compiled.report.to_json())["verdict"] is None
