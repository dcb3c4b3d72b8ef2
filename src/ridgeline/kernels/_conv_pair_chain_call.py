"""One call of conv_pair_chain, checked; the kernel's file says what its arguments are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._conv_chain_call import WIDEST, Problem


@dataclass(frozen=True, kw_only=True)
class PairProblem(Problem):
    """One call, checked."""

    name = "conv_pair_chain"
    convolutions: ClassVar[int] = 2

    inner_weight: Tensor
    inner_bias: Tensor | None = None
    padding: Sequence[int] = (1, 1)

    def check_filters(self) -> None:
        known = {"inner_weight": (self.inner_weight, self.x.shape[1]), "weight": (self.weight, self.inner_channels)}
        for name, (weight, channels) in known.items():
            packed = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
            if not packed or weight.shape[0] == 0 or tuple(weight.shape[1:]) != (channels, 3, 3):
                self.refuse(
                    f"{name} must be channels_last of shape (filters, {channels}, 3, 3), "
                    f"got {tuple(weight.shape)} with strides {weight.stride()}"
                )
        bias = self.inner_bias
        if self.inner_weight.dtype != self.x.dtype or self.inner_weight.device != self.x.device:
            self.refuse(f"inner_weight must be {self.x.dtype} on {self.x.device} like x, got {self.inner_weight.dtype}")
        if bias is not None and (
            bias.shape != (self.inner_channels,) or bias.dtype not in (torch.float32, self.x.dtype)
        ):
            self.refuse(f"inner_bias must have shape ({self.inner_channels},), got {tuple(bias.shape)}, {bias.dtype}")
        if max(self.inner_channels, self.channels[0]) > WIDEST:
            self.refuse(
                f"a convolution must have at most {WIDEST} channels, got {self.inner_channels} and {self.channels[0]}"
            )

    @property
    def conv(self) -> ConvProblem:
        """The outer convolution."""
        n, _, h, w = self.x.shape
        return ConvProblem(n, self.inner_channels, self.channels[0], (h, w), (3, 3), (1, 1), (1, 1))

    @property
    def depthwise(self) -> bool:
        return False

    @property
    def inner_channels(self) -> int:
        return self.inner_weight.shape[0]

    def constants(self, y: Tensor) -> dict[str, Any]:
        known = super().constants(y)
        kept = ("H", "W", "X_PITCH", "RESIDUAL_PITCH", "Y_PITCH", "PDL", "WIDE")
        return {"C": self.x.shape[1], "KI": self.inner_channels, **{name: known[name] for name in kept}}
