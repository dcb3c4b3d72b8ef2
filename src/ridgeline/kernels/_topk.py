"""The three kernels of detect_topk, which says what they are for.

Three levels of a pyramid are read in place. Their anchors are dealt out in tiles of BLOCK_A, no tile on two levels, and
the classes of an anchor in words of 2^WORD_BITS. CELLS are the anchors of a level, PITCH the elements between its
neighbouring pixels, C the classes, K the detections of an image. Grids are (programs, images).

Integers stand for logits and pairs, so that larger is earlier and equal is tied:
key       the bits of the fp32 of a logit in the order of torch.sort: zeros are equal, NaN is one above +inf. Without
          the lowest SHIFT bits, which are 0 in every fp32 that comes from the dtype of the logits.
splitter  a key, then TILE_BITS: the earlier tile is larger.
order     key, key of the anchor's best logit, then PAIR_BITS: the earlier pair is larger. PAIR_BITS is 0 where an int64
          has no room for them, and pair_ptr then holds the pairs beside their orders; otherwise it is None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import let_dependent_in, wait_holding_dependent

_INF = tl.constexpr(0x7F800000)
_INT32_MIN = tl.constexpr(-(2**31))
_INT64_MIN = tl.constexpr(-(2**63))
_MANY = tl.constexpr(2**30)  # more than any bound lets through
# A list up to LONG is ranked whole; of a longer one DRAWN entries bound what is worth ranking.
_LONG = tl.constexpr(4096)
_DRAWN = tl.constexpr(2048)


@triton.jit
def anchor_maxima_kernel(
    logits0_ptr, logits1_ptr, logits2_ptr, anchor_key_ptr, splitter_ptr, count_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr,
    C: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr, TILE_BITS: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, WORD_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_holding_dependent(PDL)
    tile = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    if tile == 0:
        # the list that `collect` fills is empty
        tl.store(count_ptr + image, 0)
    logits_ptr, pitch, cell, cells, anchor = _place(
        tile, image, logits0_ptr, logits1_ptr, logits2_ptr, CELLS0, CELLS1, CELLS2, PITCH0, PITCH1, PITCH2, BLOCK_A
    )
    x = _logits(logits_ptr, pitch, cell, cells, C, BLOCK_A, BLOCK_C)
    # in a word, which one thread has loaded, a maximum that keeps NaN; keys only for what is left
    for half in tl.static_range(WORD_BITS):
        even, odd = tl.split(tl.reshape(x, (BLOCK_A, BLOCK_C >> (half + 1), 2)))
        x = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    a = tl.arange(0, BLOCK_A)
    key = tl.max(_key(x.to(tl.float32), SHIFT), 1)
    key = tl.where(cell + a < cells, key, -(_INF >> SHIFT) - 2)  # below all numbers
    tl.store(anchor_key_ptr + image * (CELLS0 + CELLS1 + CELLS2) + anchor + a, key, mask=cell + a < cells)

    # the place of each anchor in its tile, from 1; equal ones in their order
    earlier = (a[None, :] < a[:, None]).to(tl.int32)
    place = 1 + tl.sum((key[None, :] + earlier > key[:, None]).to(tl.int32), 1)
    slot = _exponent(place)
    kept = ((place & (place - 1)) == 0) & (slot < SLOTS)
    splitter = _splitter(key, tile, TILE_BITS, splitter_ptr.dtype.element_ty)
    let_dependent_in(PDL)
    tl.store(splitter_ptr + image * (TILES * SLOTS) + slot * TILES + tile, splitter, mask=kept)


@triton.jit
def collect_kernel(
    logits0_ptr, logits1_ptr, logits2_ptr, anchor_key_ptr, splitter_ptr, count_ptr, order_ptr, pair_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr,
    TILE_BITS: tl.constexpr, PAIR_BITS: tl.constexpr, ROOM: tl.constexpr, PROGRAM_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, WORD_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_holding_dependent(PDL)
    WORD: tl.constexpr = 1 << WORD_BITS
    WORDS: tl.constexpr = BLOCK_C // WORD
    first = tl.program_id(0) * PROGRAM_TILES
    image = tl.program_id(1).to(tl.int64)
    anchor_key_ptr += image * (CELLS0 + CELLS1 + CELLS2)
    order_ptr += image * ROOM
    s = tl.max_contiguous(tl.arange(0, BLOCK_S), 1)
    splitter_type: tl.constexpr = splitter_ptr.dtype.element_ty
    below_all: tl.constexpr = _INT32_MIN if splitter_type == tl.int32 else _INT64_MIN
    splitter = tl.load(splitter_ptr + image * (TILES * SLOTS) + s, mask=s < TILES * SLOTS, other=below_all)
    # the places from a splitter to the one above it in its tile: 1, 1, 2, 4 ...
    weight = 1 << tl.maximum(s // TILES - 1, 0)

    # a tile is asked for before it is known what to look for: nearly all is thrown away, but nothing waits for it
    logits_ptr, pitch, cell, cells, anchor = _place(
        first, image, logits0_ptr, logits1_ptr, logits2_ptr, CELLS0, CELLS1, CELLS2, PITCH0, PITCH1, PITCH2, BLOCK_A
    )
    # from here on 1-D blocks are over the words of a tile
    row = tl.arange(0, BLOCK_A * WORDS) // WORDS
    word = tl.arange(0, BLOCK_A * WORDS) % WORDS
    x = _logits(logits_ptr, pitch, cell, cells, C, BLOCK_A, BLOCK_C)
    anchor_key = tl.load(anchor_key_ptr + anchor + row, mask=cell + row < cells, other=_INT32_MIN)

    bound = _bound(splitter, weight, K, SHIFT, TILE_BITS)
    # "not up to the number below the bound" holds for NaN, and for every number where the one below it is a NaN; in
    # fp32, because the number below the bound need not be one of the logits' dtype
    below = _value(((bound >> TILE_BITS).to(tl.int32) - 1) << SHIFT)
    for tile in range(first, first + PROGRAM_TILES):
        c = tl.arange(0, BLOCK_C)[None, :]
        reached = ~(x.to(tl.float32) <= below) & (c < C)
        bits = tl.sum(tl.reshape(tl.where(reached, 1 << (c % WORD), 0), (BLOCK_A, WORDS, WORD)), 2)
        # of the anchors that are as good as the bound, those of later tiles are left out
        chosen = (cell + row < cells) & (_splitter(anchor_key, tile, TILE_BITS, splitter_type) >= bound)
        bits = tl.where(chosen, tl.reshape(bits, (BLOCK_A * WORDS,)), 0)
        number = _ones(bits)
        total = tl.sum(number)
        if total > 0:
            slot = tl.atomic_add(count_ptr + image, total, sem="relaxed") + tl.cumsum(number) - number
            for _ in range(tl.max(number)):
                # the first listed class of each word
                listed = bits > 0
                class_id = word * WORD + _exponent(bits & -bits)
                logit = tl.load(logits_ptr + (cell + row) * pitch + class_id, mask=listed, other=0.0).to(tl.float32)
                pair = (anchor + row) * C + class_id
                order = (_key(logit, SHIFT).to(tl.int64) << (32 - SHIFT)) + anchor_key + (1 << (31 - SHIFT))
                order = ((order + 1) << PAIR_BITS) - 1 - (pair if PAIR_BITS else 0)
                tl.store(order_ptr + slot, order, mask=listed)
                if pair_ptr is not None:
                    tl.store(pair_ptr + image * ROOM + slot, pair, mask=listed)
                bits &= bits - 1
                slot += 1
        if PROGRAM_TILES > 1:
            logits_ptr, pitch, cell, cells, anchor = _place(
                tile + 1, image, logits0_ptr, logits1_ptr, logits2_ptr,
                CELLS0, CELLS1, CELLS2, PITCH0, PITCH1, PITCH2, BLOCK_A,
            )  # fmt: skip
            x = _logits(logits_ptr, pitch, cell, cells, C, BLOCK_A, BLOCK_C)
            anchor_key = tl.load(anchor_key_ptr + anchor + row, mask=cell + row < cells, other=_INT32_MIN)
    let_dependent_in(PDL)


@triton.jit
def rank_kernel(
    box0_ptr, box1_ptr, box2_ptr, count_ptr, order_ptr, pair_ptr, y_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr, WIDTH0: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr, STRIDE0: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, PAIR_BITS: tl.constexpr, ROOM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_LIST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_holding_dependent(PDL)
    KEY_AT: tl.constexpr = 32 - SHIFT + PAIR_BITS
    image = tl.program_id(1).to(tl.int64)
    order_ptr += image * ROOM
    if pair_ptr is not None:
        pair_ptr += image * ROOM
    i = tl.max_contiguous(tl.arange(0, BLOCK_LIST), 1)
    mine = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # asked for before the length of the list is known: there is ROOM for all of it
    order, pair = _entries(order_ptr, pair_ptr, mine, None, PAIR_BITS)
    order0, pair0 = _entries(order_ptr, pair_ptr, i, None, PAIR_BITS)
    order1, pair1 = _entries(order_ptr, pair_ptr, BLOCK_LIST + i, None, PAIR_BITS)
    count = tl.load(count_ptr + image)
    bound = tl.full((), _INT64_MIN, tl.int64)
    if count > _LONG:
        # a K-th of some entries is not after that of all; evenly drawn ones leave out all but K / DRAWN of the list
        drawn = tl.load(order_ptr + tl.arange(0, _DRAWN) * (count // _DRAWN))
        bound = _bound(drawn, tl.full((_DRAWN,), 1, tl.int32), K, SHIFT, KEY_AT)

    for first in range(tl.program_id(0) * BLOCK_ROWS, count, tl.num_programs(0) * BLOCK_ROWS):
        valid = first + tl.arange(0, BLOCK_ROWS) < count
        if tl.max(tl.where(valid, order, _INT64_MIN)) >= bound:
            anchor = pair // C
            edge = tl.arange(0, 4)[None, :]
            in1 = (anchor >= CELLS0)[:, None]
            in2 = (anchor >= CELLS0 + CELLS1)[:, None]
            cell = anchor[:, None] - _of_level(in1, in2, 0, CELLS0, CELLS0 + CELLS1)
            width = _of_level(in1, in2, WIDTH0, WIDTH0 // 2, WIDTH0 // 4)
            box0 = box0_ptr + image * (CELLS0 * PITCH0) + cell * PITCH0 + edge
            box1 = box1_ptr + image * (CELLS1 * PITCH1) + cell * PITCH1 + edge
            box2 = box2_ptr + image * (CELLS2 * PITCH2) + cell * PITCH2 + edge
            distance = tl.load(box0, mask=valid[:, None] & ~in1, other=0.0)
            distance = tl.where(in1, tl.load(box1, mask=valid[:, None] & in1 & ~in2, other=0.0), distance)
            distance = tl.where(in2, tl.load(box2, mask=valid[:, None] & in2, other=0.0), distance).to(tl.float32)

            before = tl.zeros((BLOCK_ROWS, BLOCK_LIST), tl.int32)
            other, other_pair, next_order, next_pair = order0, pair0, order1, pair1
            for start in range(0, count, BLOCK_LIST):
                larger = other[None, :] > order[:, None]
                if pair_ptr is not None:
                    larger |= (other[None, :] == order[:, None]) & (other_pair[None, :] < pair[:, None])
                before += (larger & (start + i < count)[None, :]).to(tl.int32)
                other, other_pair = next_order, next_pair
                ahead = start + 2 * BLOCK_LIST + i
                next_order, next_pair = _entries(order_ptr, pair_ptr, ahead, ahead < count, PAIR_BITS)

            row = tl.sum(before, 1)
            kept = valid & (row < K)
            centre = tl.where(edge % 2 == 0, cell % width, cell // width).to(tl.float32) + 0.5
            stride = _of_level(in1, in2, STRIDE0, STRIDE0 * 2, STRIDE0 * 4).to(tl.float32)
            corner = tl.where(edge < 2, centre - distance, centre + distance) * stride
            y_row = y_ptr + (image * K + row) * 6
            tl.store(y_row[:, None] + edge, corner, mask=kept[:, None])
            tl.store(y_row + 4, tl.sigmoid(_value((order >> KEY_AT).to(tl.int32) << SHIFT)), mask=kept)
            tl.store(y_row + 5, (pair % C).to(tl.float32), mask=kept)
        mine += tl.num_programs(0) * BLOCK_ROWS
        order, pair = _entries(order_ptr, pair_ptr, mine, mine < count, PAIR_BITS)
    let_dependent_in(PDL)


@triton.jit
def _place(
    tile, image, logits0_ptr, logits1_ptr, logits2_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Where a tile lies: its level's logits of the image, pitch, its first cell, the level's cells, its first anchor.

    A tile after the last one begins beyond the cells of the last level.
    """
    TILES0: tl.constexpr = (CELLS0 + BLOCK_A - 1) // BLOCK_A
    TILES1: tl.constexpr = (CELLS1 + BLOCK_A - 1) // BLOCK_A
    in1 = tile >= TILES0
    in2 = tile >= TILES0 + TILES1
    logits_ptr = logits0_ptr + image * (CELLS0 * PITCH0)
    if in1:
        logits_ptr = logits1_ptr + image * (CELLS1 * PITCH1)
    if in2:
        logits_ptr = logits2_ptr + image * (CELLS2 * PITCH2)
    pitch = _of_level(in1, in2, PITCH0, PITCH1, PITCH2)
    cell = (tile - _of_level(in1, in2, 0, TILES0, TILES0 + TILES1)) * BLOCK_A
    cells = _of_level(in1, in2, CELLS0, CELLS1, CELLS2)
    return logits_ptr, pitch, cell, cells, cell + _of_level(in1, in2, 0, CELLS0, CELLS0 + CELLS1)


@triton.jit
def _logits(logits_ptr, pitch, cell, cells, C: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr):
    """[BLOCK_A, BLOCK_C] from a cell on; -inf where there is no cell or class."""
    cell += tl.arange(0, BLOCK_A)
    c = tl.arange(0, BLOCK_C)
    inside = (cell < cells)[:, None] & (c < C)[None, :]
    return tl.load(logits_ptr + (cell * pitch)[:, None] + c[None, :], mask=inside, other=float("-inf"))


@triton.jit
def _entries(order_ptr, pair_ptr, i, mask, PAIR_BITS: tl.constexpr):
    """The orders and pairs of some entries of the list; what is masked is not in order."""
    order = tl.load(order_ptr + i, mask=mask)
    pair = ~order - (~order >> PAIR_BITS << PAIR_BITS)
    if pair_ptr is not None:
        pair = tl.load(pair_ptr + i, mask=mask)
    return order, pair.to(tl.int32)


@triton.jit
def _of_level(in1, in2, value0, value1, value2):
    """The value of the level of a tile or an anchor; in2 implies in1."""
    return tl.where(in2, value2, tl.where(in1, value1, value0))


@triton.jit
def _bound(x, weight, K: tl.constexpr, SHIFT: tl.constexpr, KEY_AT: tl.constexpr):
    """An integer that integers of weight K, and of hardly more unless they are equal, are not below; if there are
    none, one that no integer is below. The integers begin with a key at bit KEY_AT.
    """
    ENOUGH: tl.constexpr = K + K // 4
    END: tl.constexpr = ((_INF >> SHIFT) + 2) << KEY_AT  # above everything, and its negative below
    # -16, -12, -8, -4, -1, 1, 2, 4: between them keys are nearly even, beyond and around zero they are exponents
    i = tl.arange(0, 8)
    level = tl.where(i < 4, 4 * i - 16, tl.where(i < 5, -1, (1 << i) >> 5))
    level = _key(level.to(tl.float32), SHIFT).to(x.dtype) << KEY_AT
    reached = _reached(x, weight, level)
    low = tl.max(tl.where(reached >= K, level, -END))
    high = tl.min(tl.where(reached >= K, END, level))
    least = tl.min(tl.where(reached >= K, reached, _MANY))
    while (least > ENOUGH) & (low + 1 < high):
        # comparisons cost less than the reduction after them, so there are four
        step = (high - low + 4) // 5
        guess = low + step * (1 + tl.arange(0, 4))
        weights = _reached(x, weight, guess)
        low = tl.max(tl.where(weights >= K, guess, low))
        high = tl.minimum(high, low + step)
        least = tl.min(tl.where(weights >= K, weights, least))
    return low


@triton.jit
def _reached(x, weight, levels):
    """The weight of all that is not below each of the levels."""
    return tl.sum(tl.where(x[None, :] >= levels[:, None], weight[None, :], 0), 1)


@triton.jit
def _splitter(key, tile, TILE_BITS: tl.constexpr, dtype: tl.constexpr):
    """A key of a tile; the integer is as wide as the tiles need."""
    return ((key.to(dtype) + 1) << TILE_BITS) - 1 - tile


@triton.jit
def _exponent(n):
    """The binary logarithm of a power of two."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _ones(bits):
    """How many of eight bits are set."""
    bits -= (bits >> 1) & 0x55
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 0xF


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """The key of an fp32."""
    bits = x.to(tl.int32, bitcast=True)
    # a negative number's is the negative of its magnitude's, so zeros are equal
    key = tl.where(bits < 0, _INT32_MIN - bits, bits) >> SHIFT
    return tl.where(x == x, key, (_INF >> SHIFT) + 1)


@triton.jit
def _value(key):
    """The fp32 of a key whose lowest bits are back."""
    return tl.where(key < 0, _INT32_MIN - key, key).to(tl.float32, bitcast=True)
