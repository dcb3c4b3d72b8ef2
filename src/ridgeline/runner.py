"""Make a lowered graph callable: its kernels compiled and, on a GPU, captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.compile_report import GraphReport, input_spec
from ridgeline.cudagraph import Captured, capture, pool_bytes
from ridgeline.launches import compile_kernels
from ridgeline.lowering import cast
from ridgeline.recipe import Recipe
from ridgeline.streams import StreamedGraph, schedule


@dataclass(frozen=True)
class Runner:
    """A graph ready for inputs of one signature."""

    graph_module: fx.GraphModule
    report: GraphReport
    call: Callable[..., Any]  # as the module; what a captured graph returns are its own buffers
    captured: Captured | None

    def replay(self, *inputs: Tensor) -> Callable[[], Any]:
        """A call without arguments, on what the captured graph last ran on, or else on `inputs`."""
        return self.captured.replay if self.captured is not None else lambda: self.call(*inputs)


def make_runner(graph_module: fx.GraphModule, report: GraphReport, inputs: Sequence[Tensor], recipe: Recipe) -> Runner:
    """Compile what is to run on a GPU, and capture it there. Raises NotEngaged for what cannot be captured."""
    dtype = recipe.torch_dtype
    on_gpu = inputs[0].is_cuda
    report = replace(report, inputs=tuple(map(input_spec, inputs)))
    run: Callable[..., Any] = graph_module
    if on_gpu:
        compile_kernels(graph_module, inputs[0].device)
    if report.foreign and on_gpu:
        run = torch.compile(graph_module, fullgraph=True)
    elif on_gpu and recipe.capture and recipe.side_streams:
        run = StreamedGraph(graph_module, schedule(graph_module.graph, side_streams=recipe.side_streams))

    def call(*tensors: Tensor) -> Any:
        with no_autocast(tensors):
            return run(*(cast(tensor, dtype) for tensor in tensors))

    if not (on_gpu and recipe.capture):
        return Runner(graph_module, report, call, None)
    captured = capture(call, inputs)
    report = replace(report, memory=replace(report.memory, pool_bytes=pool_bytes(captured)))
    return Runner(graph_module, report, captured.replay, captured)


def no_autocast(inputs: Sequence[Tensor]) -> torch.autocast:
    """The recipe alone decides dtypes."""
    return torch.autocast(inputs[0].device.type, enabled=False)
