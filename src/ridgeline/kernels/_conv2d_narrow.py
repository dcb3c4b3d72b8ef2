"""Kernels of convolutions with few channels or few filters, stride 1, by mma.sync or wgmma: what is wide is moved once.

Of the two maps of such a convolution one has eight channels at most, the *narrow* one, and the other is *wide*. A
pass reads or writes the wide map once, and the narrow one, which stays in a cache, once for each tap:

    expand    wide = columns x weight, where the columns of a pixel are the narrow channels that its taps meet
    reduce    the weight's gradient = wide^T x columns, summed over all pixels
    contract  narrow = sum over taps of shifted (wide x weight of the tap)

Columns are counted through taps, then narrow channels. If FORWARD, row h of the map that is computed or reduced over
meets row h + r - TOP of the other at tap r, else row h - r + TOP: the narrow map is x in one case and dy in the other.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import split_pixel, wait_for_predecessor


@triton.jit
def narrow_expand_kernel(
    operand_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,  # out is dense; bias, residual: None, or what is added
    pixels,  # of out
    NARROW: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    FORWARD: tl.constexpr, HN: tl.constexpr, WN: tl.constexpr, HW: tl.constexpr, WW: tl.constexpr,
    PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, TAP_STRIDE: tl.constexpr, NARROW_STRIDE: tl.constexpr,
    WIDE_STRIDE: tl.constexpr, LARGE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    TILES: tl.constexpr = (WIDE + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    if LARGE:
        # some map has 2^31 elements or more, and every large offset below is a multiple of a pixel
        tile = tile.to(tl.int64)
    pixel = tile // TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tile % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    exists_p = pixel < pixels
    exists_n = n < WIDE
    acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in tl.static_range(0, R * S * NARROW, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        columns_pk = _columns(operand_ptr, pixel, exists_p, k, NARROW, R, S, TOP, LEFT, FORWARD, HN, WN, HW, WW, PITCH)
        of_k = k // NARROW * TAP_STRIDE + k % NARROW * NARROW_STRIDE
        inside_kn = (k < R * S * NARROW)[:, None] & exists_n[None, :]
        weight_kn = tl.load(weight_ptr + of_k[:, None] + (n * WIDE_STRIDE)[None, :], mask=inside_kn, other=0.0)
        acc = tl.dot(columns_pk, weight_kn, acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=exists_n, other=0.0).to(tl.float32)[None, :]
    inside_pn = exists_p[:, None] & exists_n[None, :]
    if residual_ptr is not None:
        of_pn = pixel[:, None] * RESIDUAL_PITCH + n[None, :]
        acc += tl.load(residual_ptr + of_pn, mask=inside_pn, other=0.0).to(tl.float32)
    tl.store(out_ptr + pixel[:, None] * WIDE + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside_pn)


@triton.jit
def narrow_reduce_kernel(
    wide_ptr, narrow_ptr, parts_ptr,  # parts [PARTS, weight's elements in its order] fp32
    pixels,  # of the wide map
    NARROW: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    FORWARD: tl.constexpr, HN: tl.constexpr, WN: tl.constexpr, HW: tl.constexpr, WW: tl.constexpr,
    PITCH: tl.constexpr, WIDE_PITCH: tl.constexpr, TAP_STRIDE: tl.constexpr, NARROW_STRIDE: tl.constexpr,
    WIDE_STRIDE: tl.constexpr, LARGE: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program sums a tile of wide channels by one of GROUPS of columns, for its part of the pixels."""
    wait_for_predecessor(PDL)
    TILES: tl.constexpr = (WIDE + BLOCK_N - 1) // BLOCK_N
    unit = tl.program_id(0)
    n = unit % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    part = unit // (TILES * GROUPS)
    blocks = tl.cdiv(pixels, BLOCK_P)
    each = tl.cdiv(blocks, PARTS)
    end = tl.minimum(part * each + each, blocks)
    to_part = parts_ptr + part.to(tl.int64) * (R * S * NARROW * WIDE) + (n * WIDE_STRIDE)[None, :]
    # each group has code of its own, in which its columns are constants
    for group in tl.static_range(GROUPS):
        if unit // TILES % GROUPS == group:
            _reduce(
                wide_ptr, narrow_ptr, to_part, n, pixels, part * each, end, group * STEPS * BLOCK_K, NARROW, WIDE, R,
                S, TOP, LEFT, FORWARD, HN, WN, HW, WW, PITCH, WIDE_PITCH, TAP_STRIDE, NARROW_STRIDE, LARGE, STEPS,
                BLOCK_P, BLOCK_N, BLOCK_K, WIDE_ROWS,
            )  # fmt: skip


@triton.jit
def _reduce(
    wide_ptr, narrow_ptr, to_part, n, pixels, begin, end,
    FIRST: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, FORWARD: tl.constexpr, HN: tl.constexpr, WN: tl.constexpr, HW: tl.constexpr, WW: tl.constexpr,
    PITCH: tl.constexpr, WIDE_PITCH: tl.constexpr, TAP_STRIDE: tl.constexpr, NARROW_STRIDE: tl.constexpr,
    LARGE: tl.constexpr, STEPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the columns from FIRST on, BLOCK_K a step, over the blocks of pixels from `begin` to `end`.

    WIDE_ROWS makes the wide channels the rows of the product: wgmma has 64 at least, and takes both operands from
    shared memory as they are. For mma.sync the compiler copies the wide map ahead of its use only as the right operand.
    """
    exists_n = n < WIDE
    sums = ()
    for _ in tl.static_range(STEPS):
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K) if WIDE_ROWS else (BLOCK_K, BLOCK_N), tl.float32),)  # noqa: RUF005
    for block in range(begin, end):
        first = block
        if LARGE:
            # some map has 2^31 elements or more, and every large offset below is a multiple of a pixel
            first = first.to(tl.int64)
        pixel = first * BLOCK_P + tl.arange(0, BLOCK_P)
        exists_p = pixel < pixels
        place = wide_ptr + pixel[:, None] * WIDE_PITCH + n[None, :]
        wide_pn = tl.load(place, mask=exists_p[:, None] & exists_n[None, :], other=0.0)
        more = ()
        for step in tl.static_range(STEPS):
            k = FIRST + step * BLOCK_K + tl.arange(0, BLOCK_K)
            columns_pk = _columns(
                narrow_ptr, pixel, exists_p, k, NARROW, R, S, TOP, LEFT, FORWARD, HN, WN, HW, WW, PITCH
            )
            if WIDE_ROWS:
                more = more + (tl.dot(tl.trans(wide_pn), columns_pk, sums[step]),)  # noqa: RUF005
            else:
                more = more + (tl.dot(tl.trans(columns_pk), wide_pn, sums[step]),)  # noqa: RUF005
        sums = more
    for step in tl.static_range(STEPS):
        k = FIRST + step * BLOCK_K + tl.arange(0, BLOCK_K)
        of_k = k // NARROW * TAP_STRIDE + k % NARROW * NARROW_STRIDE
        inside = (k < R * S * NARROW)[:, None] & exists_n[None, :]
        tl.store(to_part + of_k[:, None], tl.trans(sums[step]) if WIDE_ROWS else sums[step], mask=inside)


@triton.jit
def narrow_contract_kernel(
    operand_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,  # as above
    NARROW: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    FORWARD: tl.constexpr, HN: tl.constexpr, WN: tl.constexpr, HW: tl.constexpr, WW: tl.constexpr,
    WIDE_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, TAP_STRIDE: tl.constexpr, NARROW_STRIDE: tl.constexpr,
    WIDE_STRIDE: tl.constexpr, LARGE: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ABOVE: tl.constexpr, BEFORE: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has ROWS x COLUMNS of the narrow map from a box of the wide one that begins ABOVE and BEFORE them.

    It multiplies the box by TAPS_H rows of taps at once, whose columns and channels are filled up to powers of two:
    TAPS_W, CHANNELS. Sums move to the row that they belong to, are added over rows of taps, and move to the column.
    """
    wait_for_predecessor(PDL)
    DOWN: tl.constexpr = (HN + ROWS - 1) // ROWS
    ACROSS: tl.constexpr = (WN + COLUMNS - 1) // COLUMNS
    BLOCK_P: tl.constexpr = BOX_H * BOX_W
    OF_ROW: tl.constexpr = TAPS_W * CHANNELS
    tile = tl.program_id(0)
    image = tile // (DOWN * ACROSS)
    if LARGE:
        image = image.to(tl.int64)
    top = tile // ACROSS % DOWN * ROWS
    left = tile % ACROSS * COLUMNS
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, TAPS_H * OF_ROW)
    s = n // CHANNELS % TAPS_W
    row = top - ABOVE + p // BOX_W
    column = left - BEFORE + p % BOX_W
    exists_p = (row >= 0) & (row < HW) & (column >= 0) & (column < WW)
    wide_p = operand_ptr + ((image * HW + row) * WW + column) * WIDE_PITCH

    total = tl.zeros((BOX_H, BOX_W, OF_ROW), tl.float32)
    for first in range(0, R, TAPS_H):
        r = first + n // OF_ROW
        exists_n = (r < R) & (s < S) & (n % CHANNELS < NARROW)
        of_n = (r * S + s) * TAP_STRIDE + n % CHANNELS * NARROW_STRIDE
        acc = tl.zeros((BLOCK_P, TAPS_H * OF_ROW), tl.float32)
        for first_k in range(0, WIDE, BLOCK_K):
            k = first_k + tl.arange(0, BLOCK_K)
            exists_k = k < WIDE
            wide_pk = tl.load(wide_p[:, None] + k[None, :], mask=exists_p[:, None] & exists_k[None, :], other=0.0)
            inside_kn = exists_k[:, None] & exists_n[None, :]
            weight_kn = tl.load(weight_ptr + (k * WIDE_STRIDE)[:, None] + of_n[None, :], mask=inside_kn, other=0.0)
            acc = tl.dot(wide_pk, weight_kn, acc)
        # taps behind the last have sums of zero
        place = _place(BOX_H, ABOVE, TOP, first + tl.arange(0, TAPS_H * OF_ROW) // OF_ROW, FORWARD)
        at = tl.broadcast_to(place[:, None, :], (BOX_H, BOX_W, TAPS_H * OF_ROW))
        there = (at >= 0) & (at < BOX_H)
        moved = tl.gather(tl.reshape(acc, (BOX_H, BOX_W, TAPS_H * OF_ROW)), tl.where(there, at, 0), axis=0)
        moved = tl.where(there, moved, 0.0)
        total += tl.sum(tl.reshape(moved, (BOX_H, BOX_W, TAPS_H, OF_ROW)), axis=2)
    place = _place(BOX_W, BEFORE, LEFT, tl.arange(0, OF_ROW) // CHANNELS, FORWARD)
    at = tl.broadcast_to(place[None, :, :], (BOX_H, BOX_W, OF_ROW))
    there = (at >= 0) & (at < BOX_W)
    moved = tl.where(there, tl.gather(total, tl.where(there, at, 0), axis=1), 0.0)
    narrow = tl.sum(tl.reshape(moved, (BOX_H, BOX_W, TAPS_W, CHANNELS)), axis=2)
    narrow = tl.reshape(narrow, (BLOCK_P, CHANNELS))

    channel = tl.arange(0, CHANNELS)
    h = top + p // BOX_W
    w = left + p % BOX_W
    asked_p = (p // BOX_W < ROWS) & (p % BOX_W < COLUMNS) & (h < HN) & (w < WN)
    if bias_ptr is not None:
        narrow += tl.load(bias_ptr + channel, mask=channel < NARROW, other=0.0).to(tl.float32)[None, :]
    inside = asked_p[:, None] & (channel < NARROW)[None, :]
    pixel = (image * HN + h) * WN + w
    if residual_ptr is not None:
        of_p = pixel * RESIDUAL_PITCH
        narrow += tl.load(residual_ptr + of_p[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    place = out_ptr + (pixel * NARROW)[:, None] + channel[None, :]
    tl.store(place, narrow.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(SIDE: tl.constexpr, BEFORE: tl.constexpr, PADDING: tl.constexpr, tap, FORWARD: tl.constexpr):
    """[SIDE, taps]: where in a box's side, which begins BEFORE what is computed of it, lies what is met there."""
    shift = tap - PADDING
    if not FORWARD:
        shift = -shift
    return tl.arange(0, SIDE)[:, None] + BEFORE + shift[None, :]


@triton.jit
def _columns(
    narrow_ptr, pixel, exists_p, k, NARROW: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, FORWARD: tl.constexpr, HN: tl.constexpr, WN: tl.constexpr, HW: tl.constexpr, WW: tl.constexpr,
    PITCH: tl.constexpr,
):  # fmt: skip
    """The columns k of pixels of the wide map, [pixels, columns]; zero beside the narrow map and behind the last.

    The compiler sees nothing here that is adjacent, and so gives a thread pixels of its own and all columns of each:
    what a column adds to an address is a constant.
    """
    image, h, w = split_pixel(pixel, HW, WW)
    down, right = _shift(k // NARROW, S, TOP, LEFT, FORWARD)
    row = h[:, None] + down[None, :]
    column = w[:, None] + right[None, :]
    met = exists_p[:, None] & (k < R * S * NARROW)[None, :]
    met = met & (row >= 0) & (row < HN) & (column >= 0) & (column < WN)
    of_p = ((image * HN + h) * WN + w) * PITCH
    of_k = (down * WN + right) * PITCH + k % NARROW
    return tl.load(narrow_ptr + of_p[:, None] + of_k[None, :], mask=met, other=0.0)


@triton.jit
def _shift(tap, S: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, FORWARD: tl.constexpr):
    """By how many rows and columns what a tap meets is away."""
    down = tap // S - TOP
    right = tap % S - LEFT
    if not FORWARD:
        down = -down
        right = -right
    return down, right
