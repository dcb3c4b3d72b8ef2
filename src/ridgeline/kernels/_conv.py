"""What the convolution kernels share: a checked call, its geometry, and the launch arguments that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ridgeline.cost.conv import ConvProblem, problem_of
from ridgeline.kernels._nhwc import (
    ACTIVATIONS,
    check_map,
    empty_nhwc,
    next_power_of_2,
    partly_shared,
    pixel_pitch,
    share_elements,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32_ELEMENTS = 2**31


def padded(elements: int) -> int:
    """Rows or columns of a matrix product that hold so many."""
    return max(16, next_power_of_2(elements))


def reduction_step(channels: int, taps: int, element_size: int) -> int:
    """128 bytes of channels, the width of a shared-memory row; half of it, or several taps, where C does not divide."""
    full = 128 // element_size
    if channels % full == 0:
        return full
    return full // 2 if channels % (full // 2) == 0 else min(full, padded(channels * taps))


@dataclass(frozen=True)
class ConvCall:
    """One call, checked. `out` is where y goes, channels_last or a channel slice of it; None: not allocated yet.

    Raises ValueError or TypeError, in the name of the op, for any layout, dtype or choice that its kernel cannot take.
    """

    name: ClassVar[str]

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    act: str = "silu"
    pdl: bool = False
    out: Tensor | None = None

    def __post_init__(self) -> None:
        x, weight, bias = self.x, self.weight, self.bias
        if x.dim() != 4 or weight.dim() != 4:
            self.refuse(f"x and weight must have 4 axes, got shapes {tuple(x.shape)} and {tuple(weight.shape)}")
        if x.dtype not in FLOATS or weight.dtype != x.dtype:
            self.refuse(f"x and weight must share one of fp32, fp16, bf16, got {x.dtype} and {weight.dtype}", TypeError)
        self.check_weight()
        if self.act not in ACTIVATIONS:
            self.refuse(f"act must be one of {', '.join(ACTIVATIONS)}, got {self.act!r}")
        for name, pair, least in (("stride", self.stride, 1), ("padding", self.padding, 0)):
            if len(pair) != 2 or min(pair) < least:
                self.refuse(f"{name} must be two numbers of at least {least}, got {tuple(pair)}")
        if bias is not None and not (
            bias.shape == weight.shape[:1] and bias.is_contiguous() and bias.dtype in (torch.float32, x.dtype)
        ):
            self.refuse(
                f"bias must be contiguous, of shape ({weight.shape[0]},) and float32 or {x.dtype}, "
                f"got {tuple(bias.shape)}, strides {bias.stride()}, {bias.dtype}"
            )
        self._check_maps()
        tensors = {"weight": weight, "bias": bias, "residual": self.residual, "out": self.out}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.device != x.device:
                self.refuse(f"{name} must be on {x.device} like x, got {tensor.device}")

    def check_weight(self) -> None:
        """Refuse a weight that this kernel cannot read; each kernel has its own packing."""
        raise AssertionError("every convolution kernel states how its weight is packed")

    @property
    def conv(self) -> ConvProblem:
        return problem_of(
            self.x, self.weight, self.stride, self.padding, (1, 1), self.x.shape[1] // self.weight.shape[1]
        )

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        conv = self.conv
        return conv.n, conv.k, conv.oh, conv.ow

    @property
    def pixels(self) -> int:
        """Rows of the GEMM: pixels of the output, over the batch."""
        conv = self.conv
        return conv.n * conv.oh * conv.ow

    def output(self) -> Tensor:
        return empty_nhwc(self.out_shape, like=self.x) if self.out is None else self.out

    def arguments(self, y: Tensor) -> dict[str, Tensor | int | None]:
        """The run-time parameters, under the names that every convolution kernel uses."""
        return {
            "x_ptr": self.x,
            "weight_ptr": self.weight,
            "bias_ptr": self.bias,
            "residual_ptr": self.residual,
            "y_ptr": y,
            "pixels": self.pixels,
        }

    def constants(self, y: Tensor) -> dict[str, Any]:
        """The compile-time parameters, likewise; WIDE: some offset does not fit 32 bits."""
        conv = self.conv
        maps = {"X_PITCH": self.x, "RESIDUAL_PITCH": self.residual, "Y_PITCH": y}
        pitches = {name: 0 if t is None else pixel_pitch(t) or 0 for name, t in maps.items()}
        extents = [t.shape[0] * t.shape[2] * t.shape[3] * pitches[name] for name, t in maps.items() if t is not None]
        return {
            "C": conv.c, "H": conv.image[0], "W": conv.image[1], "R": conv.filter[0], "S": conv.filter[1],
            "HO": conv.oh, "WO": conv.ow, "STRIDE_H": self.stride[0], "STRIDE_W": self.stride[1],
            "PAD_H": self.padding[0], "PAD_W": self.padding[1], **pitches,
            "ACT": self.act, "PDL": self.pdl, "WIDE": max(extents) >= INT32_ELEMENTS,
        }  # fmt: skip

    def refuse(self, text: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{self.name}: {text}")

    def _check_maps(self) -> None:
        x, out, residual = self.x, self.out, self.residual
        check_map(self.name, "x", x, like=x, shape=tuple(x.shape))
        for name, tensor in (("residual", residual), ("out", out)):
            if tensor is not None:
                check_map(self.name, name, tensor, like=x, shape=self.out_shape)
        if out is not None and share_elements(out, x):
            self.refuse("out must not share memory with x: other programs still read what would be written")
        if out is not None and residual is not None and partly_shared(out, residual):
            self.refuse(
                "out must be the residual itself or share no memory with it, got shifted channels of one buffer"
            )
