"""A detector as `compile` makes it: one graph of fused kernels an input shape, each verified before it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ridgeline import compiler
from ridgeline.compiler import Compiled
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class CompiledDetector:
    """A callable like `module`, for `detect`: [N, 3, H, W] -> [N, k, 6] in fp32.

    The first image of a shape is compiled for and is what the result is verified on: a square letterbox has one shape,
    "rect" up to 2 · size / 32 - 1. Raises VerificationFailed for wrong numbers, and never falls back to PyTorch.
    """

    module: nn.Module
    recipe: Recipe
    built: dict[torch.Size, Compiled] = field(default_factory=dict)  # grows as shapes come

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.torch_dtype

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape not in self.built:
            self.built[x.shape] = compiler.compile(self.module, x, self.recipe)
        # the graph's buffer is written again by the next image of this shape
        return self.built[x.shape](x).clone()
