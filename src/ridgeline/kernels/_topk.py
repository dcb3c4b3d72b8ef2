"""The three kernels of detect_topk, which says what they are for.

Three levels of a pyramid are read in place, so each kernel takes three pointers and finds out which one its anchors
live in. CELLS are the anchors of a level, PITCH the elements between neighbouring pixels of its map, C the classes,
K the detections of an image. Grids are (programs, images).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor

# Keys are int32 in the order of the fp32 they stand for: below all, that of every NaN (above +inf's), above all.
_LOWEST = tl.constexpr(-(2**31))
_NAN = tl.constexpr(0x7F800001)
_LAST = tl.constexpr(2**31 - 1)
# Halvings of the interval of values before the interval of keys is halved, which always ends.
_VALUE_STEPS = tl.constexpr(12)


@triton.jit
def group_maxima_kernel(
    logits0_ptr, logits1_ptr, logits2_ptr, group_key_ptr, group_anchor_ptr, count_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr,
    C: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    # every level has as many groups, of GROUP cells on the coarsest one; a program takes BLOCK_A cells
    G: tl.constexpr = (CELLS2 + GROUP - 1) // GROUP
    CHUNKS: tl.constexpr = (C + CHUNK - 1) // CHUNK
    PROGRAMS0: tl.constexpr = (G * 16 * GROUP + BLOCK_A - 1) // BLOCK_A
    PROGRAMS1: tl.constexpr = (G * 4 * GROUP + BLOCK_A - 1) // BLOCK_A
    program = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    if program == 0:
        # the list that `collect` fills is empty
        tl.store(count_ptr + image, 0)

    key_ptr = group_key_ptr + image * (3 * G * CHUNKS)
    anchor_ptr = group_anchor_ptr + image * (3 * G * CHUNKS)
    if program < PROGRAMS0:
        _level_maxima(
            logits0_ptr + image * (CELLS0 * PITCH0), program, key_ptr, anchor_ptr, 0,
            CELLS0, PITCH0, C, 16 * GROUP, G, CHUNK, BLOCK_A, BLOCK_C,
        )  # fmt: skip
    elif program < PROGRAMS0 + PROGRAMS1:
        _level_maxima(
            logits1_ptr + image * (CELLS1 * PITCH1), program - PROGRAMS0,
            key_ptr + G * CHUNKS, anchor_ptr + G * CHUNKS, CELLS0,
            CELLS1, PITCH1, C, 4 * GROUP, G, CHUNK, BLOCK_A, BLOCK_C,
        )  # fmt: skip
    else:
        _level_maxima(
            logits2_ptr + image * (CELLS2 * PITCH2), program - PROGRAMS0 - PROGRAMS1,
            key_ptr + 2 * G * CHUNKS, anchor_ptr + 2 * G * CHUNKS, CELLS0 + CELLS1,
            CELLS2, PITCH2, C, GROUP, G, CHUNK, BLOCK_A, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _level_maxima(
    logits_ptr, tile, key_ptr, anchor_ptr, first_anchor,
    CELLS: tl.constexpr, PITCH: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Largest key of each group, and the first anchor that has it. A group is CHUNK classes of every G-th cell."""
    PER_PROGRAM: tl.constexpr = BLOCK_A // GROUP
    BLOCK_CHUNKS: tl.constexpr = BLOCK_C // CHUNK
    CHUNKS: tl.constexpr = (C + CHUNK - 1) // CHUNK
    row = tl.arange(0, BLOCK_A)
    group = tile * PER_PROGRAM + row % PER_PROGRAM
    cell = group + row // PER_PROGRAM * G
    c = tl.arange(0, BLOCK_C)
    inside = ((group < G) & (cell < CELLS))[:, None] & (c < C)[None, :]
    x = tl.load(logits_ptr + cell[:, None] * PITCH + c[None, :], mask=inside, other=float("-inf"))
    key = tl.where(inside, _key(x.to(tl.float32)), _LOWEST)

    by_cell = tl.max(tl.reshape(key, (GROUP, PER_PROGRAM, BLOCK_CHUNKS, CHUNK)), 3)
    group_key = tl.max(by_cell, 0)
    anchor = tl.reshape(first_anchor + cell, (GROUP, PER_PROGRAM, 1))
    group_anchor = tl.min(tl.where(by_cell == group_key[None, :, :], anchor, _LAST), 0)
    group = (tile * PER_PROGRAM + tl.arange(0, PER_PROGRAM))[:, None]
    chunk = tl.arange(0, BLOCK_CHUNKS)[None, :]
    valid = (group < G) & (chunk < CHUNKS)
    tl.store(key_ptr + group * CHUNKS + chunk, group_key, mask=valid)
    tl.store(anchor_ptr + group * CHUNKS + chunk, group_anchor, mask=valid)


@triton.jit
def collect_kernel(
    logits0_ptr, logits1_ptr, logits2_ptr, group_key_ptr, group_anchor_ptr, count_ptr, order_ptr, pair_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    TILES0: tl.constexpr = (CELLS0 + BLOCK_A - 1) // BLOCK_A
    TILES1: tl.constexpr = (CELLS1 + BLOCK_A - 1) // BLOCK_A
    ANCHORS: tl.constexpr = CELLS0 + CELLS1 + CELLS2
    program = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    in1 = program >= TILES0
    in2 = program >= TILES0 + TILES1
    logits_ptr = logits0_ptr + image * (CELLS0 * PITCH0)
    if in1:
        logits_ptr = logits1_ptr + image * (CELLS1 * PITCH1)
    if in2:
        logits_ptr = logits2_ptr + image * (CELLS2 * PITCH2)
    pitch = _of_level(in1, in2, PITCH0, PITCH1, PITCH2)
    cells = _of_level(in1, in2, CELLS0, CELLS1, CELLS2)
    tile = program - _of_level(in1, in2, 0, TILES0, TILES0 + TILES1)
    cell = tile * BLOCK_A + tl.arange(0, BLOCK_A)
    anchor = cell + _of_level(in1, in2, 0, CELLS0, CELLS0 + CELLS1)
    # one logit a load: the layout of the scattered writes below, without a trip through shared memory between them
    c = tl.max_contiguous(tl.arange(0, BLOCK_C), 1)
    inside = (cell < cells)[:, None] & (c < C)[None, :]
    # asked for before the bound is known: nearly all of it is thrown away, but nothing waits for it
    x = tl.load(logits_ptr + cell[:, None] * pitch + c[None, :], mask=inside, other=float("-inf"))

    low, last = _bound(group_key_ptr + image * GROUPS, group_anchor_ptr + image * GROUPS, GROUPS, K, ANCHORS, BLOCK_G)
    key = tl.where(inside, _key(x.to(tl.float32)), _LOWEST)
    anchor_key = tl.max(key, 1)
    tied = (anchor_key > low) | (anchor <= last)
    listed = inside & ((key > low) | ((key == low) & tied[:, None]))
    slot = tl.atomic_add(count_ptr + image + tl.zeros_like(key), 1, mask=listed, sem="relaxed")
    # larger first, then smaller `pair` first; the offset makes the signed lower half count from 0
    order = (key.to(tl.int64) << 32) + (anchor_key.to(tl.int64) + 2147483648)[:, None]
    pair = (anchor * C)[:, None] + c[None, :]
    tl.store(order_ptr + image * (ANCHORS * C) + slot, order, mask=listed)
    tl.store(pair_ptr + image * (ANCHORS * C) + slot, pair, mask=listed)


@triton.jit
def rank_kernel(
    box0_ptr, box1_ptr, box2_ptr, count_ptr, order_ptr, pair_ptr, y_ptr,
    CELLS0: tl.constexpr, CELLS1: tl.constexpr, CELLS2: tl.constexpr, WIDTH0: tl.constexpr,
    PITCH0: tl.constexpr, PITCH1: tl.constexpr, PITCH2: tl.constexpr, STRIDE0: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_LIST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    image = tl.program_id(1).to(tl.int64)
    order_ptr += image * ((CELLS0 + CELLS1 + CELLS2) * C)
    pair_ptr += image * ((CELLS0 + CELLS1 + CELLS2) * C)
    count = tl.load(count_ptr + image)
    for first in range(tl.program_id(0) * BLOCK_ROWS, count, tl.num_programs(0) * BLOCK_ROWS):
        mine = first + tl.arange(0, BLOCK_ROWS)
        valid = mine < count
        order = tl.load(order_ptr + mine, mask=valid, other=0)
        pair = tl.load(pair_ptr + mine, mask=valid, other=0)
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

        row = tl.zeros((BLOCK_ROWS,), tl.int32)
        for start in range(0, count, BLOCK_LIST):
            other = start + tl.arange(0, BLOCK_LIST)
            # what lies beyond the list comes after everything in it
            other_order = tl.load(order_ptr + other, mask=other < count, other=-(2**63))[None, :]
            other_pair = tl.load(pair_ptr + other, mask=other < count, other=0)[None, :]
            before = (other_order > order[:, None]) | ((other_order == order[:, None]) & (other_pair < pair[:, None]))
            row += tl.sum(before.to(tl.int32), 1)

        kept = valid & (row < K)
        centre = tl.where(edge % 2 == 0, cell % width, cell // width).to(tl.float32) + 0.5
        stride = _of_level(in1, in2, STRIDE0, STRIDE0 * 2, STRIDE0 * 4).to(tl.float32)
        corner = tl.where(edge < 2, centre - distance, centre + distance) * stride
        y_row = y_ptr + (image * K + row) * 6
        tl.store(y_row[:, None] + edge, corner, mask=kept[:, None])
        tl.store(y_row + 4, tl.sigmoid(_value((order >> 32).to(tl.int32))), mask=kept)
        tl.store(y_row + 5, (pair % C).to(tl.float32), mask=kept)


@triton.jit
def _of_level(in1, in2, value0, value1, value2):
    """The value of the level of a program or an anchor; in2 implies in1."""
    return tl.where(in2, value2, tl.where(in1, value1, value0))


@triton.jit
def _bound(key_ptr, anchor_ptr, GROUPS: tl.constexpr, K: tl.constexpr, ANCHORS: tl.constexpr, BLOCK_G: tl.constexpr):
    """(key, anchor): at least K groups have a larger key, or this key at an anchor up to this one.

    A bound that lets an eighth more through is good enough, and found in a few steps unless keys are equal.
    """
    low = _LOWEST
    last = _LAST
    if GROUPS > K:
        ENOUGH: tl.constexpr = K + K // 8
        g = tl.arange(0, BLOCK_G)
        key = tl.load(key_ptr + g, mask=g < GROUPS, other=_LOWEST)
        # reached by all groups, and by none
        low = tl.min(tl.where(g < GROUPS, key, _LAST))
        high = tl.max(key) + 1
        reached = tl.sum((g < GROUPS).to(tl.int32))
        step = reached * 0
        while (reached > ENOUGH) & (low + 1 < high):
            # halve the interval of values at first: halving the keys would search every exponent down to zero
            middle = _key(0.5 * _value(low) + 0.5 * _value(high))
            by_value = (middle > low) & (middle < high) & (step < _VALUE_STEPS)
            middle = tl.where(by_value, middle, (low >> 1) + (high >> 1) + (low & high & 1))
            n = tl.sum((key >= middle).to(tl.int32))
            high = tl.where(n < K, middle, high)
            low = tl.where(n < K, low, middle)
            reached = tl.where(n < K, reached, n)
            step += 1
        if reached > ENOUGH:
            # many groups share one key: the first of them are enough
            anchor = tl.load(anchor_ptr + g, mask=g < GROUPS, other=_LAST)
            needed = K - tl.sum((key > low).to(tl.int32))
            tied = key == low
            too_few = reached * 0 - 1
            last = reached * 0 + (ANCHORS - 1)
            while too_few + 1 < last:
                middle = (too_few + last) // 2
                n = tl.sum((tied & (anchor <= middle)).to(tl.int32))
                too_few = tl.where(n < needed, middle, too_few)
                last = tl.where(n < needed, last, middle)
    return low, last


@triton.jit
def _key(x):
    """An int32 for an fp32, in the order of torch.sort: equal zeros, NaN above +inf."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, tl.where(x == 0, 0, key), _NAN)


@triton.jit
def _value(key):
    """The fp32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
