"""Kernels of a lowered graph are compiled before the first launch: here for sm_90, by a child that has no GPU."""

from __future__ import annotations

import pytest
import torch
import triton

from graphs import by_reference, image, net
from ridgeline import compiler
from ridgeline.launches import compile_kernels, planned
from ridgeline.recipe import Recipe
from without_interpreter import output_of

PROGRAM = """
import torch, triton
from torch import nn
from ridgeline.kernels.conv2d_act import conv2d_act_kernel
from ridgeline.launches import compile_kernels
from ridgeline.lowering import lower
from ridgeline.precompile import _Driver
from ridgeline.recipe import Recipe

triton.runtime.driver.set_active(_Driver(90))
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 1), nn.SiLU(), nn.Conv2d(16, 16, 1)).eval()
graph_module, report = lower(module, (torch.zeros(1, 3, 9, 8),), Recipe(dtype="fp16", rewrites=("fuse_conv_act",)))
assert report.launches == 3
compile_kernels(graph_module, torch.device("cpu"))
print(hits)
compile_kernels(graph_module, torch.device("cpu"))
print(hits)
conv2d_act_kernel.device_caches.clear()
compile_kernels(graph_module, torch.device("cpu"))
print(hits)
"""


TRAINING = """
import torch, triton
from collections import Counter
from torch._subclasses.fake_tensor import FakeTensorMode
from fp8_steps import training
from ridgeline.launches import compile_kernels, kernel_calls, planned
from ridgeline.precompile import _Driver

graphs = training().compiler.graphs
triton.runtime.driver.set_active(_Driver(90))
compiled = Counter()
triton.knobs.compilation.listener = lambda *, src, **_: compiled.update([src.name])
for graph_module in graphs:
    operators = [node for node in graph_module.graph.nodes if str(node.target).startswith("ridgeline.")]
    assert list(kernel_calls(graph_module)) == operators
    with FakeTensorMode():  # as AOTAutograd may have it on
        compile_kernels(graph_module, torch.device("cpu"))
launched = {launch.kernel.__name__ for gm in graphs for node in kernel_calls(gm) for launch in planned(node, "cpu")}
once = compiled.total()
for graph_module in graphs:
    compile_kernels(graph_module, torch.device("cpu"))
print(len(graphs), sorted(compiled) == sorted(launched), len(launched) >= 7, compiled.total() == once)
"""


def test_each_kernel_is_compiled_once(tmp_path):
    # three launches of three kernels; the second call finds them in memory, the third on disk
    assert output_of(PROGRAM, TRITON_CACHE_DIR=str(tmp_path)) == ["[False, False, False]"] * 2 + [
        "[False, False, False, True, True, True]"
    ]


def test_every_kernel_of_a_training_step_is_compiled_before_it_runs(tmp_path):
    """Forward and backward, in FP8: convolutions, norms and what quantises."""
    assert output_of(TRAINING, TRITON_CACHE_DIR=str(tmp_path)) == ["2 True True True"]


def test_stand_ins_have_the_alignment_of_the_real_tensors():
    """Three channels into a map of fp16: 6 bytes, which a kernel for aligned pointers must not meet."""
    module = net(
        lambda m, x: m.join(torch.cat([m.a(x), m.b(x)], dim=1)),
        a=torch.nn.Conv2d(4, 3, 1), b=torch.nn.Conv2d(4, 5, 1), join=torch.nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    names = ("fuse_conv_act", "write_into_concat")
    graph_module, _ = compiler.lower(module, (image(1, 4, 8, 8),), Recipe(dtype="fp16", rewrites=names))
    calls = [node for node in graph_module.graph.nodes if "conv2d_act_into" in str(node.target)]
    offsets = [planned(node, "cpu")[0].arguments["y_ptr"].storage_offset() for node in calls]
    assert sorted(offsets) == [0, 3]


@pytest.mark.gpu
def test_nothing_is_left_to_compile_at_the_first_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    module = net(lambda m, x: m.a(x), a=torch.nn.Conv2d(3, 24, 5)).cuda()
    x = image(1, 3, 19, 21).cuda()
    graph_module, _ = compiler.lower(module, (x,), Recipe(dtype="fp16"))
    compile_kernels(graph_module, x.device)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    with by_reference(), torch.no_grad():
        graph_module(x.half().contiguous(memory_format=torch.channels_last))
    assert compiled == []
