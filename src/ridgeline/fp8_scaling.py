"""Scales of FP8 tensors, kept and updated on the device, so that a step in FP8 can be captured.

    scaling = DelayedScaling({"conv1.x": "e4m3", "conv1.w": "e4m3", "conv1.dy": "e5m2"}, device="cuda")
    y, quads = scaling.quantize(x, "conv1.x", quads=True)      by the scale of earlier steps; records what it saw
    scaling.update_()                                          once a step: all tensors, one launch

A scale follows the largest magnitudes of a window of steps (`kernels.scale_fp8` has the rule), so quantising needs no
pass of its own over a tensor to look for the largest. A step that outgrows its window saturates; the report counts how
often. Producers that quantise by themselves take a `slot`. With several GPUs, `all_reduce` `amax` with MAX before the
update: all ranks then have equal scales.

With `ScalingRule(current=True)` the scale is that of the tensor itself: `quantize` reads it once more, beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.kernels import quantize_fp8, scale_fp8
from ridgeline.kernels._op import INTERPRETED
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.kernels._scale_fp8 import SEEN, TOTALS

_KEPT = ("scale", "inverse", "history", "peak", "totals")  # from step to step; `amax` and `counts` are zero between


@dataclass(frozen=True)
class ScalingRule:
    """How scales follow magnitudes."""

    window: int = 16  # steps whose largest magnitude counts
    margin: int = 0  # powers of two left free above it
    current: bool = False  # from each tensor itself, at one more read of it

    def __post_init__(self) -> None:
        if not 1 <= self.window <= 4096:
            raise UsageError(f"ScalingRule: window must lie between 1 and 4096 steps, got {self.window}")
        if not 0 <= self.margin <= 32:
            raise UsageError(f"ScalingRule: margin must lie between 0 and 32 powers of two, got {self.margin}")


@dataclass(frozen=True, eq=False)
class Slot:
    """One tensor's part of the state, as views: what a kernel that quantises it reads, raises and adds to."""

    format: str
    scale: Tensor  # [1] fp32
    inverse: Tensor  # [1] fp32, what the product of its FP8 values is multiplied by
    amax: Tensor  # [1] fp32
    counts: Tensor  # [1, 3] int64


@dataclass(frozen=True)
class TensorCounts:
    """What has happened to one tensor since the start, or since the state was loaded."""

    name: str
    format: str
    scale: float
    amax: float  # the largest of the window
    peak: float  # the largest ever, infinite and NaN ones aside
    overflows: int  # elements that saturated
    underflows: int  # elements, not zero, that became zero
    elements: int
    nonfinite: int  # updates that found an infinite or NaN magnitude, and kept the scale
    updates: int

    @property
    def overflow_share(self) -> float:
        return self.overflows / self.elements if self.elements else 0.0

    @property
    def underflow_share(self) -> float:
        return self.underflows / self.elements if self.elements else 0.0


class DelayedScaling:
    """The scales of the tensors named in `formats`, each "e4m3" or "e5m2"; all start at 1."""

    def __init__(
        self, formats: Mapping[str, str], *, rule: ScalingRule | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if not formats:
            raise UsageError("DelayedScaling: there are no tensors: name at least one with its format")
        for name, kind in formats.items():
            if kind not in FORMATS:
                raise UsageError(
                    f"DelayedScaling: the format of {name} must be one of {', '.join(FORMATS)}, got {kind!r}"
                )
        self.formats = dict(formats)
        self.rule = rule or ScalingRule()
        self._index = {name: index for index, name in enumerate(formats)}
        tensors, device = len(formats), torch.device(device)
        zeros = torch.zeros(tensors, dtype=torch.float32, device=device)
        self._state = scale_fp8.State(
            amax=zeros,
            counts=torch.zeros(tensors, len(SEEN), dtype=torch.int64, device=device),
            largest=torch.tensor([FORMATS[kind].largest for kind in formats.values()], device=device),
            scale=torch.ones_like(zeros),
            inverse=torch.ones_like(zeros),
            history=torch.zeros(tensors, self.rule.window, dtype=torch.float32, device=device),
            peak=torch.zeros_like(zeros),
            totals=torch.zeros(tensors, len(TOTALS), dtype=torch.int64, device=device),
        )
        self._measured = torch.zeros(1, dtype=torch.float32, device=device)  # cleared by whoever has used it

    @property
    def amax(self) -> Tensor:
        """[tensors] fp32: the largest magnitudes since the last update, in the order of `formats`."""
        return self._state.amax

    @property
    def counts(self) -> Tensor:
        """[tensors, 3] int64: elements that saturated, that vanished, and all, since the last update."""
        return self._state.counts

    @property
    def scale(self) -> Tensor:
        """[tensors] fp32, what is multiplied by to quantise."""
        return self._state.scale

    @property
    def inverse(self) -> Tensor:
        """[tensors] fp32, 1 / scale."""
        return self._state.inverse

    def slot(self, name: str) -> Slot:
        """Views of one tensor's state; they stay valid. Raises UsageError for an unknown name."""
        index, state = self._find(name), self._state
        one = slice(index, index + 1)
        return Slot(self.formats[name], state.scale[one], state.inverse[one], state.amax[one], state.counts[one])

    def quantize(self, x: Tensor, name: str, *, quads: bool = False) -> tuple[Tensor, Tensor]:
        """`x` in FP8, and its quads or an empty tensor; see `kernels.quantize_fp8`. Records what it saw."""
        index, state = self._find(name), self._state
        if self.rule.current:
            self.refresh_(x, name)
        choices = {"row": index, "fp8_format": self.formats[name], "quads": quads}
        return quantize_fp8.OP(x, state.scale, state.amax, state.counts, **choices)

    def refresh_(self, x: Tensor, name: str) -> None:
        """Set the scale of one tensor from `x`: current scaling. Two launches, one read of `x`."""
        index = self._find(name)
        if x.is_cuda or INTERPRETED:
            launch = quantize_fp8.amax_launch(x, self._measured)
            if x.numel():
                launch.run()
        elif x.numel():
            self._measured.copy_(x.detach().abs().amax())
        scale_fp8.refresh_(self._state, index, self._measured, margin=self.rule.margin)

    def update_(self) -> None:
        """New scales for all tensors that were quantised since the last update; once a step, nothing is read."""
        scale_fp8.update_(self._state, margin=self.rule.margin)

    def report(self) -> tuple[TensorCounts, ...]:
        """One record a tensor, in the order of `formats`; waits for the device, once."""
        state = self._state
        # counts are exact in float64 up to 2^53
        columns = (state.scale[:, None], state.history.amax(1, keepdim=True), state.peak[:, None], state.totals)
        rows = torch.cat([column.double() for column in columns], 1).tolist()
        return tuple(
            TensorCounts(name, kind, *row[:3], *map(int, row[3:]))
            for (name, kind), row in zip(self.formats.items(), rows, strict=True)
        )

    def named_tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """What it keeps from step to step."""
        return tuple((name, getattr(self._state, name)) for name in _KEPT)

    def state_dict(self) -> dict[str, Any]:
        """Copies of what it keeps, with the names and formats that they belong to."""
        return {"formats": dict(self.formats), **{name: tensor.clone() for name, tensor in self.named_tensors()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In place, so that captured steps stay valid. Raises UsageError for other tensors or another window."""
        if state["formats"] != self.formats or list(state["formats"]) != list(self.formats):
            different = set(state["formats"].items()) ^ set(self.formats.items())
            raise UsageError(
                f"DelayedScaling: the state is of other tensors, formats or another order: "
                f"{', '.join(sorted(name for name, _ in different)) or 'the same names'}; start with fresh scales"
            )
        if state["history"].shape != self._state.history.shape:
            raise UsageError(
                f"DelayedScaling: the state has a window of {state['history'].shape[1]} steps, "
                f"this rule one of {self.rule.window}: give ScalingRule the state's"
            )
        for name, tensor in self.named_tensors():
            tensor.copy_(state[name])
        self._state.amax.zero_()
        self._state.counts.zero_()

    def _find(self, name: str) -> int:
        if name not in self._index:
            raise UsageError(f"DelayedScaling: tensor must be one of {', '.join(self._index)}, got {name!r}")
        return self._index[name]
