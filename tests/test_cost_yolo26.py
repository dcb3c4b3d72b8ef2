"""YOLO26 at 640²: census, FLOPs, floor and dependent kernels of the fused one-to-one graph, against the known table."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ridgeline.cost import FusedKernel, chain_length, fuse, trace_forward
from ridgeline.models.yolo26 import YOLO26

# Selecting the detections adds six dependent kernels: best class, sort, gather, sort, gather, gather boxes.
SELECTION_CHAIN = 6


def fused_kernels(scale: str) -> tuple[FusedKernel, ...]:
    net = YOLO26(scale).eval()
    trace = trace_forward(net, torch.empty(1, 3, 640, 640, device="meta"), dtype=torch.float16)
    assert trace.unknown == ()
    return fuse(trace.calls, results=trace.results)


@pytest.mark.parametrize(
    ("scale", "dense3x3", "dense1x1", "depthwise", "conv_gflop", "chain"),
    [("n", 39, 55, 8, 5.36, 81), ("m", 43, 61, 8, 68.2, 89), ("x", 71, 86, 9, 193.9, 136)],
)
def test_census(scale, dense3x3, dense1x1, depthwise, conv_gflop, chain):
    kernels = fused_kernels(scale)
    kinds = Counter(kernel.kind for kernel in kernels)
    assert (kinds["conv3x3"], kinds["conv1x1"], kinds["depthwise"]) == (dense3x3, dense1x1, depthwise)
    flops = sum(k.anchor.cost.flops for k in kernels if "conv" in k.kind or k.kind == "depthwise")
    assert flops == pytest.approx(conv_gflop * 10**9, rel=2e-3)
    assert chain_length(kernels) == chain + SELECTION_CHAIN
    # nothing but convolutions, attention, pools and the selection is left
    assert set(kinds) == {"conv3x3", "conv1x1", "depthwise", "attention", "pool", "reduction", "topk", "other"}
    assert kinds["pool"] == 3


def test_bytes_of_the_smallest():
    kernels = fused_kernels("n")
    convs = [k for k in kernels if "conv" in k.kind or k.kind == "depthwise"]
    # the table's 82 MB of inputs and outputs, the weights, and the residuals that are read besides
    assert 82 * 10**6 < sum(k.cost.bytes for k in convs) < 90 * 10**6
    floor_us = sum(max(k.cost.flops / 790e12, k.cost.bytes / 4.3e12) for k in convs) * 10**6
    assert floor_us == pytest.approx(20, abs=1)
