"""The kernel of quantize_weights_fp8: a tile of filters and channels of one tap, in both orders.

Weights are reached through a table of addresses (int64 made pointers), so that one launch serves any number of them.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor
from ridgeline.kernels._quantize_fp8 import observe, record, to_fp8, to_words

FORMAT = "e4m3"
# Columns of the table, one row a program: addresses of the tile's first element in all three; what is left of filters
# and channels from there on, and elements between filters of a weight and between channels of its turned copy, all four
# in units of 16; the row of the scale; elements of the whole weight in its first tile, 0 in the others.
TILES = ("weight", "copy", "turned", "filters", "channels", "pitch", "turned_pitch", "row", "elements")

_FORMAT = tl.constexpr(FORMAT)
_TILES = tl.constexpr(len(TILES))


@triton.jit
def quantize_weights_fp8_kernel(
    tiles_ptr, scale_ptr, amax_ptr, counts_ptr,
    BF16: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile, read once. Shape suffixes: _jc [BLOCK_K / 4 filters of one remainder, BLOCK_C], _cj the other way."""
    wait_for_predecessor(PDL)
    tile = tiles_ptr + tl.program_id(0) * _TILES
    address = tl.load(tile)
    weight_ptr = address.to(tl.pointer_type(tl.bfloat16)) if BF16 else address.to(tl.pointer_type(tl.float32))
    # the host refuses addresses that 16 does not divide, and tiles start at multiples of 16 elements
    weight_ptr = tl.multiple_of(weight_ptr, 16)
    copy_ptr = tl.multiple_of(tl.load(tile + 1).to(tl.pointer_type(tl.uint8)), 16)
    turned_ptr = tl.multiple_of(tl.load(tile + 2).to(tl.pointer_type(tl.int32)), 16)
    # the host refuses weights whose elements int32 cannot count
    words = 4 * tl.load(tile + 3).to(tl.int32)
    channels = 16 * tl.load(tile + 4).to(tl.int32)
    pitch = 16 * tl.load(tile + 5).to(tl.int32)
    turned_pitch = 4 * tl.load(tile + 6).to(tl.int32)
    row = tl.load(tile + 7)
    elements = tl.load(tile + 8)
    scale = tl.load(scale_ptr + row)

    j = tl.arange(0, BLOCK_K // 4)
    c = tl.arange(0, BLOCK_C)
    inside_jc = (j < words)[:, None] & (c < channels)[None, :]
    # all loads above all stores, which the compiler cannot exchange: it does not know that they never meet
    loaded = ()
    for i in tl.static_range(4):
        at_jc = (4 * j + i)[:, None] * pitch + c[None, :]
        loaded = loaded + (tl.load(weight_ptr + at_jc, mask=inside_jc, other=0.0),)  # noqa: RUF005 - Triton cannot unpack
    peak_jc = tl.zeros((BLOCK_K // 4, BLOCK_C), tl.float32)
    events_jc = tl.zeros((BLOCK_K // 4, BLOCK_C), tl.int32)
    scaled = ()
    for i in tl.static_range(4):
        w_jc = loaded[i].to(tl.float32)
        z_jc = w_jc * scale
        peak_jc, events_jc = observe(w_jc, z_jc, peak_jc, events_jc, _FORMAT)
        at_jc = (4 * j + i)[:, None] * pitch + c[None, :]
        tl.store(copy_ptr + at_jc, to_fp8(z_jc, _FORMAT), mask=inside_jc)
        scaled = scaled + (z_jc,)  # noqa: RUF005 - Triton cannot unpack
    words_cj = tl.trans(to_words(scaled[0], scaled[1], scaled[2], scaled[3], _FORMAT))
    inside_cj = (c < channels)[:, None] & (j < words)[None, :]
    tl.store(turned_ptr + c[:, None] * turned_pitch + j[None, :], words_cj, mask=inside_cj)
    record(amax_ptr + row, counts_ptr + row * 3, peak_jc, events_jc, elements)
