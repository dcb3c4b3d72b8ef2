"""The scale of fp16 losses, kept and updated on the device, so that a step that overflows can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScaleRule:
    """How fp16 losses are scaled: torch.amp.GradScaler's rule, run on the device."""

    initial: float = 65536.0
    growth: float = 2.0  # after `interval` steps without an overflow
    backoff: float = 0.5  # after an overflow, whose step is skipped
    interval: int = 2000


class LossScaler:
    """The loss scale, its growth counter and the overflow flag, on the device."""

    def __init__(self, rule: ScaleRule, device: torch.device) -> None:
        self._rule = rule
        self.scale = torch.full((), rule.initial, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)

    def unscale_(self, parameters: Sequence[Tensor]) -> Tensor:
        """Divide gradients by the scale, in place; returns a flag, 1 where one of them is not finite."""
        self._found_inf.zero_()
        inverse = self.scale.double().reciprocal().float()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for grads in by_dtype.values():
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(grads, self._found_inf, inverse)
        return self._found_inf

    def update_(self) -> None:
        r = self._rule
        torch.ops.aten._amp_update_scale_(
            self.scale, self._good_steps, self._found_inf, r.growth, r.backoff, r.interval
        )

    def named_tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """What it keeps from step to step; the flag is written anew in each."""
        return ("scale", self.scale), ("good_steps", self._good_steps)

    def state_dict(self) -> dict[str, Any]:
        """As torch.amp.GradScaler's; waits for the device."""
        return {
            "scale": self.scale.item(),
            "growth_factor": self._rule.growth,
            "backoff_factor": self._rule.backoff,
            "growth_interval": self._rule.interval,
            "_growth_tracker": int(self._good_steps.item()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._good_steps.fill_(state["_growth_tracker"])
