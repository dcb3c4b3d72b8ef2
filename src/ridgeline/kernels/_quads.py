"""Quads: the transposed copy of an FP8 map that a weight gradient is computed from.

    of a gradient     quads [N, H / 4, C, W / 4, 4, 4] of a map [N, C, H, W]:
                      quads[n, h, c, w, j, i] = map[n, c, h + i H / 4, w + j W / 4]
    of an activation  quads [N, H / 4 + 2, C, W / 4 + 2, 4, 4]: likewise the pixels from -1 to H / 4 and to W / 4, and
                      zero where one lies beside the map

FP8 products reduce what is adjacent in memory, here pixels: sixteen of them, a quarter of the map apart each way, share
16 bytes. The neighbours of all sixteen are then sixteen that also share 16 bytes, so that a tap of a filter shifts a
copy of the activation by whole 16 bytes, the least that the bulk tensor copy engine does. A box of channels of a row is
one stretch of memory.

H is a multiple of 4; W is a power of two from 4 to 128.
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

from ridgeline.kernels._nhwc import next_power_of_2

_next_power_of_2 = triton.constexpr_function(next_power_of_2)

WORDS = 32  # of a row of 128 bytes in shared memory, in which pixels are reduced
_WIDTHS = (4, 8, 16, 32, 64, 128)


def why_not(h: int, w: int) -> str | None:
    """Why maps of this size have no quads; None where they have."""
    if h % 4 or h < 4:
        return f"quads need a multiple of 4 rows, got {h}"
    if w not in _WIDTHS:
        return f"quads need a power of two of columns, from 4 to {_WIDTHS[-1]}, got {w}"
    return None


def quads_shape(n: int, c: int, h: int, w: int, *, beside: bool) -> tuple[int, int, int, int, int, int]:
    """`beside`: with what lies beside each quarter, as an activation's."""
    return n, h // 4 + 2 * beside, c, w // 4 + 2 * beside, 4, 4


def size_of(quads: Tensor, *, beside: bool) -> tuple[int, int, int, int]:
    """(N, C, H, W) of the map."""
    n, rows, c, columns, _, _ = quads.shape
    return n, c, 4 * (rows - 2 * beside), 4 * (columns - 2 * beside)


def to_quads(x: Tensor, *, beside: bool) -> Tensor:
    """The quads of a map in any dtype of one byte or more, by PyTorch's own operators."""
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    rows, columns, more = x.shape[2] // 4, x.shape[3] // 4, 2 * beside
    padded = F.pad(bits, (int(beside),) * 4).transpose(1, 2)
    down = torch.stack([padded[:, i * rows : (i + 1) * rows + more] for i in range(4)], -1)
    both = torch.stack([down[:, :, :, j * columns : (j + 1) * columns + more] for j in range(4)], -2)
    return both.contiguous().view(x.dtype)


def from_quads(quads: Tensor, *, beside: bool) -> Tensor:
    """The map [N, C, H, W] of quads."""
    inner = quads[:, 1:-1, :, 1:-1] if beside else quads
    return inner.permute(0, 2, 5, 1, 4, 3).reshape(size_of(quads, beside=beside))


def box_of(w: int) -> tuple[int, int]:
    """(images, words of a row) whose pixels are reduced together: 128."""
    words = min(w, WORDS)
    return WORDS // words, words


def words_map(quads: Tensor, channels: int, *, beside: bool) -> TensorDescriptor:
    """The tensor map of quads as words of four rows, with the axes [N, row, C, word], of boxes of so many channels."""
    n, rows, c, columns, _, _ = quads.shape
    images, words = box_of(4 * (columns - 2 * beside))
    block = [images, 1, channels, words]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    strides = [4 * columns * c * rows, 4 * columns * c, 4 * columns, 1]
    return TensorDescriptor(quads.view(torch.int32), [n, rows, c, 4 * columns], strides, block, layout)  # pyright: ignore


@triton.jit
def store_quads(
    words_ptr, words_jc, n, first, c, inside_c,
    C: tl.constexpr, QUARTER: tl.constexpr, W: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Store words of image `n` and channels `c` of C: pixels `first` and so on of each of the four quarters of the map.

    words_jc   int32 [pixels, channels], byte i of the i-th quarter, which has QUARTER pixels: whole rows
    BESIDE     and what lies beside quarters
    """
    PIXELS: tl.constexpr = words_jc.shape[0]
    ROWS: tl.constexpr = QUARTER // W
    PITCH: tl.constexpr = W + 8 if BESIDE else W
    # the four words of each 16 bytes are brought next to each other
    apart: tl.constexpr = [PIXELS // W, 4, W // 4, words_jc.shape[1]]
    together: tl.constexpr = [words_jc.shape[1], PIXELS]
    words_cj = tl.reshape(tl.permute(tl.reshape(words_jc, apart), (3, 0, 2, 1)), together)
    j = tl.arange(0, PIXELS)
    row = first // W + j // W
    inside_cj = inside_c[:, None] & (row < ROWS)[None, :]
    if not BESIDE:
        to_c = words_ptr + n.to(tl.int64) * (ROWS * C * PITCH) + c * PITCH
        tl.store(to_c[:, None] + (row * (C * PITCH) + j % W)[None, :], words_cj, mask=inside_cj)
    else:
        to_c = words_ptr + n.to(tl.int64) * ((ROWS + 2) * C * PITCH) + c * PITCH
        to_cj = to_c[:, None] + (j % W + 4)[None, :]
        tl.store(to_cj + ((row + 1) * (C * PITCH))[None, :], words_cj, mask=inside_cj)
        # the first row of each quarter is behind the quarter before it, the last before the quarter after it
        behind, before = (words_cj >> 8) & 0xFFFFFF, words_cj << 8
        top, bottom = (row == 0)[None, :], (row == ROWS - 1)[None, :]
        if ROWS == 1:
            tl.store(to_cj + (ROWS + 1) * (C * PITCH), behind, mask=inside_cj)
            tl.store(to_cj, before, mask=inside_cj)
        else:
            at_edge = tl.where(top, (ROWS + 1) * (C * PITCH), 0)
            tl.store(to_cj + at_edge, tl.where(top, behind, before), mask=inside_cj & (top | bottom))
        tl.debug_barrier()
        _store_columns(to_c, first // W, inside_c, PIXELS // W, C, ROWS, W)


@triton.jit
def _store_columns(
    to_c, first, inside_c, STORED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Copy the columns next to each quarter of a row beside it: of STORED rows, and of those above and below them."""
    # where a thread stored eight words, it has all four of each 16 bytes here
    place = tl.arange(0, _next_power_of_2(max(4 * (STORED + 2), STORED * W // 2)))
    stored, lane = place // 4, place % 4
    # one above the map is there once rows at its bottom are, one below once those at its top are
    row = tl.where(stored == 0, 0, tl.where(stored == STORED + 1, ROWS + 1, first + stored))
    is_there = (stored > 0) & (stored <= STORED) & (row <= ROWS)
    is_there = is_there | ((stored == 0) & (first + STORED >= ROWS)) | ((stored == STORED + 1) & (first == 0))
    to_cp = to_c[:, None] + (row * (C * (W + 8)) + lane)[None, :]
    inside_cp = inside_c[:, None] & is_there[None, :]
    w0, w1, w2, w3 = _lanes(tl.load(to_cp + W, mask=inside_cp, other=0))
    none = tl.zeros_like(w0)
    before = tl.join(tl.join(none, w1), tl.join(w0, w2))
    tl.store(to_cp, tl.reshape(before, to_cp.shape), mask=inside_cp)
    w0, w1, w2, w3 = _lanes(tl.load(to_cp + 4, mask=inside_cp, other=0))
    behind = tl.join(tl.join(w1, w3), tl.join(w2, none))
    tl.store(to_cp + (W + 4), tl.reshape(behind, to_cp.shape), mask=inside_cp)


@triton.jit
def _lanes(words_cp):
    """The four words of each 16 bytes, each [channels, 16 bytes]."""
    even, odd = tl.split(tl.reshape(words_cp, [words_cp.shape[0], words_cp.shape[1] // 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3
