"""torch.compile for a training step: dynamo's graph, rewritten, then AOTAutograd and Inductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ridgeline.train_rewrites import BY_NAME

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def inductor(mode: str) -> Compiler:
    """Inductor, as torch.compile's `mode` sets it up."""

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # seconds to import, which steps that are not compiled need not wait for
        from torch._inductor.compile_fx import compile_fx

        patches = {} if mode == "default" else torch._inductor.list_mode_options(mode)
        return compile_fx(graph_module, inputs, config_patches=patches)  # pyright: ignore[reportReturnType]

    return compiler


@dataclass
class TrainBackend:
    """A backend for torch.compile: applies `rewrites`, in the order of the pipeline, then hands on to `compiler`."""

    rewrites: Sequence[str]
    compiler: Compiler
    sites: Counter[str] = field(default_factory=Counter)  # changed so far, in all graphs, by rewrite

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for name, rewrite in BY_NAME.items():
            if name in self.rewrites:
                self.sites[name] += rewrite.apply(graph_module)
        return self.compiler(graph_module, example_inputs)
