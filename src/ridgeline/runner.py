"""Make a lowered graph callable: its kernels compiled and, on a GPU, captured in one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.compile_report import GraphReport, input_spec
from ridgeline.cudagraph import Captured, capture, pool_bytes
from ridgeline.launches import compile_kernels
from ridgeline.lowering import cast, choose_, launches_early
from ridgeline.recipe import Recipe
from ridgeline.replay_check import unsteady
from ridgeline.streams import StreamedGraph, schedule

_log = logging.getLogger(__name__)


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
    """Compile what is to run on a GPU, and capture it there. Raises NotEngaged for what cannot be captured.

    A captured graph whose kernels start early is replayed some times on `inputs`. Where results differ, its calls are
    told to wait for the end of the kernel before, in place, and the report says so.
    """
    # a report from a file tells of the GPU that wrote it
    report = replace(report, early_launch_dropped=None)
    runner = _made(graph_module, report, inputs, recipe)
    if runner.captured is None or not launches_early(graph_module):
        return runner
    different, replays = unsteady(runner.captured)
    if not different:
        return runner
    why = f"{different} of {replays} replays of one input gave other bits than the first"
    _log.warning("early launch is dropped, for %s: this is a bug of ridgeline, please report the network", why)
    late = replace(recipe, pdl=False)
    choose_(graph_module, late, inputs[0].device)
    return _made(graph_module, replace(report, early_launch_dropped=why), inputs, late)


def _made(graph_module: fx.GraphModule, report: GraphReport, inputs: Sequence[Tensor], recipe: Recipe) -> Runner:
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
