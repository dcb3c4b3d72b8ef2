"""Which passes of a convolution of a training step run in FP8: what kernels can compute, and what is chosen of that."""

from __future__ import annotations

from typing import Protocol

import torch

from ridgeline.kernels._quads import why_not
from ridgeline.train_rewrites.use_convolutions import Convolution

PASSES = ("fprop", "dgrad", "wgrad")
MULTIPLE = 16  # of filters and channels
_FILTER_ROWS = (1, 3)  # of conv2d_wgrad_fp8


class Chooser(Protocol):
    """Which of the passes that are possible run in FP8; `by_norm`: the norm before makes x, and can write it in FP8."""

    def __call__(self, conv: Convolution, *, by_norm: bool) -> frozenset[str]: ...


def takes(conv: Convolution) -> bool:
    """Whether FP8 kernels compute such a convolution, of stride 1 and one group, at all."""
    same = conv.stride == 1 and all(2 * p == size - 1 for p, size in zip(conv.padding, conv.weight[2:], strict=True))
    return same and conv.dtype == torch.bfloat16 and conv.weight[0] % MULTIPLE == conv.weight[1] % MULTIPLE == 0


def impossible_passes(conv: Convolution) -> dict[str, str]:
    """The passes that have no kernel, and why; `conv` has stride 1, keeps the size, and channels that 16 divides."""
    rows = conv.weight[2]
    reason = why_not(*conv.x[2:]) or ("" if rows in _FILTER_ROWS else f"filters have {rows} rows, not 1 or 3")
    return {"wgrad": reason} if reason else {}


def chosen_passes(conv: Convolution, *, by_norm: bool) -> frozenset[str]:  # noqa: ARG001
    """Every pass that has a kernel: fprop and dgrad always, wgrad where it can."""
    return frozenset(PASSES) - impossible_passes(conv).keys()
