"""The letterbox in integers, bit for bit OpenCV's 8-bit bilinear resize framed with grey: tables, and an operator.

A table holds one int32 a row (or column) of the canvas: `source << SHIFT | weight`. It blends the frame's row `source`
with the one below, whose share is weight / 2048. PADDING stands for a row of the frame around the picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost, register_cost
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Sample

SHIFT = 12
WEIGHT_MASK = (1 << SHIFT) - 1
ONE = 2048  # OpenCV's INTER_RESIZE_COEF_SCALE
PADDING = -2 << SHIFT  # row -1 is taken: OpenCV blends it, clamped to row 0, above a picture that is scaled up
GREY = 114
MAX_SOURCE = 2**18  # pixels a side that fit beside the weight
# OpenCV rounds both weights, f and 1 - f, on their own. Up to here what is no tie keeps 1/8192 away from one, more than
# fp32 rounds, so that the two sum to 2048 and a table needs only the second.
MAX_SCALED = 4096


def axis_table(source: int, scaled: int, before: int, after: int, *, vertical: bool) -> Tensor:
    """int32 [before + scaled + after]: `source` pixels of one axis scaled to `scaled`, between pads.

    What OpenCV does, in its own precisions: the scale is the reciprocal of a reciprocal in double, the position is
    rounded to float, the weight to 1/2048, ties to even. Across, positions outside the frame take the border pixel
    alone; down, they blend the border row with itself. Its special case, halving both sides, is the same arithmetic.
    Raises ValueError for sides it cannot hold.
    """
    if not 1 <= source <= MAX_SOURCE or not 1 <= scaled <= MAX_SCALED or min(before, after) < 0:
        raise ValueError(
            f"letterbox: sides must lie in 1..{MAX_SOURCE}, scaled ones in 1..{MAX_SCALED} and pads be at least 0, "
            f"got {source} pixels scaled to {scaled} between {before} and {after}"
        )
    scale = 1.0 / (scaled / source)
    position = ((torch.arange(scaled, dtype=torch.float64) + 0.5) * scale - 0.5).float()
    first = position.floor()
    weight = ((position - first) * ONE).round().int()
    first = first.int()
    if not vertical:
        weight[(first < 0) | (first >= source - 1)] = 0
        first.clamp_(0, source - 1)
    table = torch.full((before + scaled + after,), PADDING, dtype=torch.int32)
    table[before : before + scaled] = first * (1 << SHIFT) + weight
    return table


def canvas(frame: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The frame, uint8 [N, C, H, W], on its canvas: int32 [N, C, rows, columns] in 0..255."""
    (top, bottom, down, on_y), (left, right, across, on_x) = _taps(rows, frame.shape[2]), _taps(columns, frame.shape[3])

    def blended(source: Tensor) -> Tensor:
        pixels = frame.index_select(2, source)
        return (pixels.index_select(3, left).int() * (ONE - across) + pixels.index_select(3, right).int() * across) >> 4

    upper, lower = blended(top) * (ONE - down)[:, None], blended(bottom) * down[:, None]
    value = ((upper >> 16) + (lower >> 16) + 2) >> 2
    return torch.where(on_y[:, None] & on_x[None, :], value, GREY)


def unit(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels in 0..255 as 0..1: the float32 nearest to pixel / 255, rounded to `dtype`.

    CUDA multiplies by the reciprocal when it divides by a number, which in float32 is another value for every second
    pixel; in float64 all 256 round to the same float32 either way.
    """
    return (pixels.double() / 255).float().to(dtype)


def letterbox(frame: Tensor, rows: Tensor, columns: Tensor, *, dtype: torch.dtype, reverse: bool = False) -> Tensor:
    """x [N, C, rows, columns] in 0..1, channels_last; `reverse` turns BGR into RGB."""
    x = unit(canvas(frame, rows, columns), dtype)
    return (x.flip(1) if reverse else x).contiguous(memory_format=torch.channels_last)


def has_weights(table: Tensor) -> bool:
    """Whether any entry blends two pixels."""
    return bool((table & WEIGHT_MASK).any())


def is_table(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int32 and tensor.is_contiguous()


def frame_sample(
    why: str,
    frame: tuple[int, int, int],
    size: tuple[int, int],
    pads: tuple[int, int, int, int],
    krs: tuple[int, int, int],
    **choices: Any,
) -> Sample:
    """`frame` is N, H, W, scaled to `size` between pads (top, bottom, left, right); `stride` (2) is one number."""
    real_size, stride, with_bias = choices.pop("real_size", False), choices.pop("stride", 2), choices.pop("bias", True)
    (n, h, w), (k, r, s), c = frame, krs, choices.pop("channels", 3)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        frames = torch.empty((n, c, h, w), dtype=torch.uint8, device=device, memory_format=torch.channels_last)
        if device != "meta":
            frames.random_(0, 256, generator=torch.Generator(device).manual_seed(0))
        rows = axis_table(h, size[0], *pads[:2], vertical=True)
        columns = axis_table(w, size[1], *pads[2:], vertical=False)
        return {
            "frame": frames,
            # a canvas of mean square 1/3 gives outputs of variance 1
            "weight": random_nhwc((k, c, r, s), dtype, device, seed=1) * (c * r * s / 3) ** -0.5,
            "bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=2).flatten() if with_bias else None,
            "rows": rows.to(device),
            "columns": columns.to(device),
            "stride": (stride, stride),
            "padding": (r // 2, s // 2),
            "blend": has_weights(rows) or has_weights(columns),
            **choices,
        }

    return Sample(why, arguments, real_size)


def _taps(table: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(first pixel, second pixel, weight of the second, whether it is the picture and not its frame)."""
    first = table >> SHIFT
    return (
        first.clamp(0, side - 1),
        (first + 1).clamp(0, side - 1),
        table & WEIGHT_MASK,
        (first >= -1) & (first < side),
    )


def _cost(frame: Tensor, rows: Tensor, columns: Tensor, *, dtype: torch.dtype, reverse: bool = False) -> Cost:  # noqa: ARG001
    """Ten integer operations an element: three blends and two roundings."""
    elements = frame.shape[0] * frame.shape[1] * len(rows) * len(columns)
    read_bytes = frame.nbytes + rows.nbytes + columns.nbytes
    return Cost(10 * elements, read_bytes, elements * dtype.itemsize, pipe="cuda_fp32")


# One node in an exported graph, which `rewrites.fuse_letterbox` folds into the convolution behind it.
OPERATOR = torch.library.custom_op("ridgeline::letterbox", letterbox, mutates_args=())
OPERATOR.register_fake(letterbox)
register_cost("ridgeline::letterbox", _cost)
