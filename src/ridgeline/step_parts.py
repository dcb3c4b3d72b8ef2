"""What a training step is made of, as its caller gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.ema import Ema
from ridgeline.errors import UsageError

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Parts:
    """What a step is made of, as the caller gave it."""

    model: nn.Module
    loss: Loss
    optimizer: Optimizer
    ema: Ema | None = None
    clip: float | None = None  # largest norm of all gradients of the optimizer's parameters together
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"compile_step: clip must be a positive norm, got {self.clip}: None switches it off")
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError("compile_step: LBFGS evaluates the loss several times a step: use SGD, Adam or AdamW")
        if self.accumulate < 1:
            raise UsageError(f"compile_step: accumulate must be at least 1, got {self.accumulate}")
        if len({tensor.device for tensor in self.model.parameters()}) != 1:
            raise UsageError("compile_step: the model's parameters must lie on one device, move them there first")
        if self.ema is not None:
            self.ema.check_is_of(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device
