"""Random operands for the kernels that go through several convolutions at once, and how their results are judged."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import Op
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.numerics import compare, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CHANNELS = (1, 3, 8, 16, 24)
REORDERED_SUMS = 2.0**-21  # relative: what the orders of up to five sums after one another differ by in fp32


def tensor(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype) -> Tensor:
    return random_nhwc(shape, dtype, DEVICE, seed=seed)


def bias(channels: int, seed: int) -> Tensor:
    return tensor((1, channels, 1, 1), seed, torch.float32).flatten()


def sliced(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype, draw: random.Random) -> Tensor:
    """A map that may be a channel slice of a wider one."""
    n, c, h, w = shape
    before, behind = draw.choice(((0, 0), (0, 0), (3, 0), (8, 16)))
    return tensor((n, before + c + behind, h, w), seed, dtype)[:, before : before + c]


def tails(
    count: int, value: tuple[int, int, int, int], seed: int, dtype: torch.dtype, draw: random.Random
) -> dict[str, Any]:
    """The operands of so many random tails behind a value of that shape."""
    n, k, h, w = value
    channels, weights, biases, extras, skips = [k], [], [], [], []
    for i in range(count):
        out, extra = draw.choice(CHANNELS), draw.choice((0, 0, 5, 24))
        weight = tensor((out, channels[-1] + extra, 1, 1), seed + i, dtype) * (channels[-1] + extra) ** -0.5
        weights.append(weight.contiguous())
        biases.append(draw.choice((None, bias(out, seed + 10 + i))))
        extras.append(sliced((n, extra, h, w), seed + 20 + i, dtype, draw) if extra else None)
        skips.append(draw.choice([-1, -1, *(j for j, have in enumerate(channels) if have == out)]))
        channels.append(out)
    return {"weights": weights, "biases": biases, "extras": extras, "skips": skips}


def check(op: Op, arguments: dict[str, Any], y: Tensor, *, eps: float | None = None) -> None:
    exact, eager = op.reference(**to_float64(arguments)), op.reference(**arguments)
    eps = REORDERED_SUMS if eps is None and y.dtype == torch.float32 else eps
    verdict = compare(y, exact, eager, error_factor=op.error_factor, eps=eps)
    assert verdict.passed, f"{verdict.reason}: {op.key(**arguments)}"


def check_into(op: Op, arguments: dict[str, Any]) -> None:
    """Writes into a slice of a wider map, and leaves the rest alone."""
    right = op(**arguments)
    n, k, h, w = right.shape
    buffer = torch.full((n, k + 9, h, w), 7.0, dtype=right.dtype, device=DEVICE)
    buffer = buffer.contiguous(memory_format=torch.channels_last)
    assert op.into is not None
    op.into(buffer[:, 4 : 4 + k], **arguments)
    assert torch.equal(buffer[:, 4 : 4 + k], right)
    assert (buffer[:, :4] == 7).all() and (buffer[:, 4 + k :] == 7).all()
