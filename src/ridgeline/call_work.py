"""What a recorded call has to do and move, as `profile_costs` and `own_costs` say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ridgeline.call_arguments import Arguments, by
from ridgeline.trace import Call, Dims


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel, or one pass of a convolution, has to do and move."""

    flops: float
    bytes: float
    shapes: str  # the problem in words
    pass_: str = ""  # "fprop", "dgrad", "wgrad" of a convolution, "" elsewhere


Formula = Callable[[Arguments], Work | tuple[Work, ...]]


def shapes_of(call: Call | None) -> str:
    """The tensor arguments in words: "2x64x8x8, 64x64x3x3", at most three of them."""
    if call is None:
        return ""
    shown = [dims for dims in (*call.shapes, *(member for members in call.lists for member in members)) if dims]
    return ", ".join(map(by, shown[:3])) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


@dataclass(frozen=True)
class Conv:
    """One convolution: `small` is y, or the input of a transposed one; its elements each sum one filter."""

    x: Dims
    weight: Dims
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    extra: tuple[int, ...] = (0,)
    groups: int = 1

    @property
    def y(self) -> Dims:
        axes = len(self.weight) - 2
        stride, padding, dilation, extra = (
            spread(v, axes) for v in (self.stride, self.padding, self.dilation, self.extra)
        )
        sizes = []
        for axis, (size, taps) in enumerate(zip(self.x[-axes:], self.weight[2:], strict=True)):
            reach = dilation[axis] * (taps - 1)
            if self.transposed:
                sizes.append((size - 1) * stride[axis] - 2 * padding[axis] + reach + extra[axis] + 1)
            else:
                sizes.append((size + 2 * padding[axis] - reach - 1) // stride[axis] + 1)
        filters = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (*self.x[: len(self.x) - axes - 1], filters, *sizes)

    @property
    def flops(self) -> int:
        small = self.x if self.transposed else self.y
        return 2 * prod(small) * prod(self.weight[1:])

    def __str__(self) -> str:
        text = f"{by(self.x)} {'^' if self.transposed else '*'} {by(self.weight)}"
        text += f" s{_short(self.stride)} p{_short(self.padding)}"
        text += f" d{_short(self.dilation)}" if set(self.dilation) != {1} else ""
        return text + (f" g{self.groups}" if self.groups > 1 else "")


def forward(a: Arguments, conv: Conv, *operands: int) -> Work:
    """The forward pass of `conv`, which reads the tensors at the places `operands`; y has the type of the first."""
    return Work(conv.flops, a.bytes(*operands) + prod(conv.y) * a.item(operands[0]), str(conv), "fprop")


def spread(values: tuple[int, ...], axes: int) -> tuple[int, ...]:
    return values * axes if len(values) == 1 else values


def _short(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else by(values)
