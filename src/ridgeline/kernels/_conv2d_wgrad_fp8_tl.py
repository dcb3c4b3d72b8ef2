"""The kernel of conv2d_wgrad_fp8 on sm_89 and sm_120: products of quads (see _quads) by mma.sync.

A program holds [K, C] of one tap, for its part of the images. It reduces 128 bytes a step, those of one row of quads of
one image or of several: mma.sync wants what is reduced adjacent in FP8, and rows of quads are. A tap shifts x by whole
rows and, along the row, by 16 bytes.

The tensor cores' own sums keep some 14 bits on sm_89 as on sm_90: FP32 accumulators beside FP8 operands were found to
have 13 bits of mantissa, the rest cut off (SageAttention2, arXiv 2411.10958). For sm_120 no more is assumed. If
PROMOTED the sums are added in fp32 after every SPAN rows of quads.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv2d_wgrad_fp8_tl_kernel(
    dy_ptr, x_ptr, parts_ptr,  # quads of K and of C channels; parts [PARTS, K, R, S, C] fp32
    images,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, QUARTER: tl.constexpr, W: tl.constexpr,
    PARTS: tl.constexpr, BOX_N: tl.constexpr, BOX_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr, PROMOTED: tl.constexpr,
):  # fmt: skip
    DY_ROW: tl.constexpr = 4 * K * W  # bytes
    X_ROW: tl.constexpr = 4 * C * (W + 8)
    STEP: tl.constexpr = 4 * BOX_N * BOX_W
    ACROSS: tl.constexpr = W // BOX_W
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    C_TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    unit = tl.program_id(0)
    k = unit % K_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    c = unit // K_TILES % C_TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    s = unit // (K_TILES * C_TILES) % S
    r = unit // (K_TILES * C_TILES * S) % R
    part = unit // (K_TILES * C_TILES * R * S)
    down = r - R // 2
    right = s - S // 2
    groups = tl.cdiv(images, BOX_N) * ACROSS
    each = tl.cdiv(groups, PARTS)

    byte = tl.arange(0, STEP)
    image = byte // (4 * BOX_W)
    across = byte % (4 * BOX_W)
    dy_kp = (k * (4 * W))[:, None] + (image * (QUARTER * DY_ROW) + across)[None, :]
    # row 0 of an activation's quads is the one above the map, and its first 16 bytes the column to the left
    x_cp = (c * (4 * W + 32))[:, None] + (image * ((QUARTER + 2) * X_ROW) + across + 16)[None, :]
    acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for step in range(part * each * QUARTER, tl.minimum(part * each + each, groups) * QUARTER):
        row = step % QUARTER
        group = step // QUARTER
        n = group // ACROSS * BOX_N
        w = group % ACROSS * BOX_W
        dy_at = dy_ptr + (n.to(tl.int64) * QUARTER + row) * DY_ROW + 4 * w
        x_at = x_ptr + (n.to(tl.int64) * (QUARTER + 2) + row + down + 1) * X_ROW + 4 * w + right * 16
        of_dy = (k < K)[:, None]
        of_x = (c < C)[:, None]
        if BOX_N > 1:
            there = (n + image < images)[None, :]
            of_dy = of_dy & there
            of_x = of_x & there
        dy = tl.load(dy_at + dy_kp, mask=of_dy, other=0.0)
        x = tl.load(x_at + x_cp, mask=of_x, other=0.0)
        if PROMOTED and SPAN == 1:
            # without a limit of its own the compiler would add the tile in the tensor cores after all
            total += tl.dot(dy, tl.trans(x), max_num_imprecise_acc=STEP)
        else:
            acc = tl.dot(dy, tl.trans(x), acc)
            if PROMOTED:  # noqa: SIM102 - the outer one is decided at compile time
                if row % SPAN == SPAN - 1:
                    total += acc
                    acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    if not PROMOTED:
        total = acc
    place = parts_ptr + part.to(tl.int64) * (K * R * S * C) + (r * S + s) * C + k[:, None] * (R * S * C) + c[None, :]
    tl.store(place, total, mask=(k < K)[:, None] & (c < C)[None, :])
