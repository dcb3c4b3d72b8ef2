"""Exponential moving average of a module's weights, with the decay and its warm-up computed on the device.

    decay(n) = min(decay, (1 + n)/(10 + n))          n = updates so far; without warm-up decay(n) = decay
    average  = average + (1 - decay(n))·(weights - average)

Buffers are copied, not averaged: running statistics are averages already, and counters are integers. Nothing is read on
the host, so an update can be captured in a CUDA graph. Averages keep the dtype and layout of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.device_optimizer import lerp_
from ridgeline.errors import UsageError


class Ema:
    """The average of `model`'s weights; `.module` is a copy of the model, in eval mode, that carries it."""

    def __init__(self, model: nn.Module, decay: float = 0.9999, *, warmup: bool = True) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.warmup = warmup
        tensors = [*self.module.parameters(), *self.module.buffers()]
        device = tensors[0].device if tensors else torch.device("cpu")
        self._updates = torch.zeros((), dtype=torch.float32, device=device)
        self._decay = torch.zeros((), dtype=torch.float32, device=device)
        self.decay = decay

    @property
    def decay(self) -> float:
        """May be set at any time; a captured step follows."""
        return self._decay_value

    @decay.setter
    def decay(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise UsageError(f"Ema: decay must lie between 0 and 1, got {value}")
        self._decay_value = value
        self._decay.fill_(value)

    @torch.no_grad()
    def update_(self, model: nn.Module) -> None:
        """Move the average towards the weights of `model`, which has the structure of the one it was made of."""
        self.update_rest_(model, frozenset())
        self._updates += 1

    @torch.no_grad()
    def update_rest_(self, model: nn.Module, others: Container[int]) -> None:
        """`update_` but for the weights whose `id` is in `others`, and without counting.

        For a kernel that moves the averages of those weights and counts the update, afterwards.
        """
        rest = [pair for pair in self.pairs(model) if id(pair[1]) not in others]
        if rest:
            decay = self._decay
            if self.warmup:
                decay = torch.minimum(decay, (1 + self._updates) / (10 + self._updates))
            lerp_([average for average, _ in rest], [weight for _, weight in rest], 1 - decay)
        for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(buffer)

    def check_is_of(self, model: nn.Module) -> None:
        """Raise UsageError unless `model` has as many weights and buffers as the averages, each of the same shape."""
        averages, weights = (
            [(name, list(tensor.shape)) for name, tensor in (*module.named_parameters(), *module.named_buffers())]
            for module in (self.module, model)
        )
        # by order and not by name: a wrapped module's names begin with the wrapper's
        for average, weight in zip_longest(averages, weights, fillvalue=("none", [])):
            if average[1] != weight[1] or "none" in (average[0], weight[0]):
                raise UsageError(
                    f"Ema: it averages another model, whose {average[0]} {average[1]} stands where this one has "
                    f"{weight[0]} {weight[1]}: make it with Ema(model)"
                )

    def pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Each average with its weight; tied weights once."""
        return list(zip(self.module.parameters(), model.parameters(), strict=True))

    @property
    def updates(self) -> Tensor:
        """How many there were, a float32 scalar on the device."""
        return self._updates

    @property
    def device_decay(self) -> Tensor:
        """The decay before warm-up, a float32 scalar on the device that follows `decay`."""
        return self._decay

    def tensors(self) -> list[Tensor]:
        """Everything an update writes."""
        return [*self.module.parameters(), *self.module.buffers(), self._updates]

    def state_dict(self) -> dict[str, Any]:
        """`module` (the averaged weights, as the model names them) and `updates`; waits for the device."""
        return {"module": self.module.state_dict(), "updates": int(self._updates.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Written in place, so that captured steps stay valid."""
        self.module.load_state_dict(state["module"])
        self._updates.fill_(state["updates"])
