"""Which passes of a convolution of a training step run in FP8: what kernels can compute, and what is chosen of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ridgeline.kernels import conv2d_wgrad_fp8
from ridgeline.kernels._quads import why_not
from ridgeline.train_rewrites.convolution_calls import Convolution

PASSES = ("fprop", "dgrad", "wgrad")
ARCHITECTURES = ("sm_89", "sm_90", "sm_120")  # that conv2d_fp8 and conv2d_wgrad_fp8 have kernels for
MULTIPLE = 16  # of filters and channels


class Chooser(Protocol):
    """Which of the passes that are possible run in FP8; `by_norm`: the norm before makes x, and can write it in FP8."""

    def __call__(self, conv: Convolution, *, by_norm: bool) -> frozenset[str]: ...


def takes(conv: Convolution) -> bool:
    """Whether FP8 kernels compute such a convolution, of stride 1 and one group, at all."""
    same = conv.stride == 1 and all(2 * p == size - 1 for p, size in zip(conv.padding, conv.weight[2:], strict=True))
    return same and conv.dtype == torch.bfloat16 and conv.weight[0] % MULTIPLE == conv.weight[1] % MULTIPLE == 0


def architecture_of(device: torch.device) -> str:
    """The GPU's: "sm_90"; "" without one, where operators run by their references."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""


def impossible_passes(conv: Convolution) -> dict[str, str]:
    """The passes that have no kernel, and why; `conv` has stride 1, keeps the size, and channels that 16 divides."""
    arch, (rows, columns) = architecture_of(conv.device), conv.weight[2:]
    if arch and arch not in ARCHITECTURES:
        return dict.fromkeys(PASSES, f"its FP8 kernel is for {listed(ARCHITECTURES)}, and the GPU is {arch}")
    fits = {rows, columns} <= {*conv2d_wgrad_fp8.FILTER_SIZES}
    reason = why_not(*conv.x[2:]) or ("" if fits else f"filters have {rows} rows and {columns} columns, not 1 or 3")
    return {"wgrad": reason} if reason else {}


def listed(architectures: Sequence[str]) -> str:
    """In words: "sm_89, sm_90 and sm_120"."""
    *others, last = architectures
    return f"{', '.join(others)} and {last}" if others else last


def chosen_passes(conv: Convolution, *, by_norm: bool) -> frozenset[str]:  # noqa: ARG001
    """Every pass that has a kernel."""
    return frozenset(PASSES) - impossible_passes(conv).keys()
