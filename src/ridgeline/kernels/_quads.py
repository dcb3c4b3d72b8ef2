"""Quads: the transposed copy of an FP8 map that a weight gradient is computed from.

    quads [C, N, H / 4 + 2, W, 4] of a map [N, C, H, W]:   quads[c, n, h, w, i] = map[n, c, h - 1 + i H / 4, w]

and zero where that row lies beside the map. FP8 products reduce what is adjacent in memory, here pixels: four rows, a
quarter of the map apart, share a word of four bytes. The neighbours of a pixel to the left and right are then one word
away, those above and below one row of words, and a row is whole words wherever it begins. Rows 0 and H / 4 + 1 hold the
rows next to each quarter, which are those of the quarters beside it.

H is a multiple of 4; W is 4, 8, 16 or a multiple of 32.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WORDS = 32  # of a row of 128 bytes in shared memory, in which pixels are reduced
_WIDTHS = (4, 8, 16)


def why_not(h: int, w: int) -> str | None:
    """Why maps of this size have no quads; None where they have."""
    if h % 4 or h < 4:
        return f"quads need a multiple of 4 rows, got {h}"
    if w not in _WIDTHS and (w % WORDS or w < WORDS):
        return f"quads need 4, 8, 16 or a multiple of {WORDS} columns, got {w}"
    return None


def quads_shape(n: int, c: int, h: int, w: int) -> tuple[int, int, int, int, int]:
    return c, n, h // 4 + 2, w, 4


def to_quads(x: Tensor) -> Tensor:
    """The quads of a map in any dtype of one byte or more, by PyTorch's own operators."""
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    quarter = x.shape[2] // 4
    padded = F.pad(bits, (0, 0, 1, 1)).transpose(0, 1)
    lanes = [padded[:, :, i * quarter : (i + 1) * quarter + 2] for i in range(4)]
    return torch.stack(lanes, -1).contiguous().view(x.dtype)


def from_quads(quads: Tensor) -> Tensor:
    """The map [N, C, H, W] of quads."""
    c, n, rows, w, _ = quads.shape
    inner = quads[:, :, 1:-1].permute(1, 0, 4, 2, 3)
    return inner.reshape(n, c, 4 * (rows - 2), w)


def box_of(w: int) -> tuple[int, int]:
    """(images, words of a row) whose pixels are reduced together: 128."""
    words = min(w, WORDS)
    return WORDS // words, words


def words_map(quads: Tensor, channels: int) -> TensorDescriptor:
    """The tensor map of quads as words, with the axes [N, row, C, W], of boxes of so many channels."""
    c, n, rows, w, _ = quads.shape
    images, words = box_of(w)
    block = [images, 1, channels, words]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    strides = [rows * w, w, n * rows * w, 1]
    return TensorDescriptor(quads.view(torch.int32).squeeze(-1), [n, rows, c, w], strides, block, layout)  # pyright: ignore


@triton.jit
def store_quads(
    words_ptr, words_jc, n, j, c, inside_jc, images, QUARTER: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Store words of image `n`: pixel `j` of each of the four quarters of the map, QUARTER pixels, of channel `c`.

    words_jc   int32 [pixels, channels], byte i of the i-th quarter
    """
    row = c[:, None].to(tl.int64) * images + n
    at_cj = row * (QUARTER + 2 * W) + j[None, :]
    words_cj, inside_cj = tl.trans(words_jc), tl.trans(inside_jc)
    tl.store(words_ptr + at_cj + W, words_cj, mask=inside_cj)
    # the first row of each quarter is the row behind the quarter before it, the last the row before the one after it
    behind = (words_cj >> 8) & 0xFFFFFF
    tl.store(words_ptr + at_cj + (QUARTER + W), behind, mask=inside_cj & (j < W)[None, :])
    before = words_cj << 8
    tl.store(words_ptr + at_cj - (QUARTER - W), before, mask=inside_cj & (j >= QUARTER - W)[None, :])
