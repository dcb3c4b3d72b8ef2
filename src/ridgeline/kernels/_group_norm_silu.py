"""Device code of group_norm_silu: the forward kernels. _group_norm_silu_pieces.py has what the backward shares.

A program works on one *slab*: K whole groups of one sample, that is WIDTH = K·CG neighbouring channels, and all HW
pixels or a part of them. Where it goes over them tile by tile, its channels may be several *columns*, each as wide as a
tile; functions take those as slabs of COLUMN channels. Suffixes name the axes: _pc [BLOCK_P pixels, BLOCK_C channels],
_c [BLOCK_C], _g [KP groups]. Blocks are powers of two; what lies beyond HW, WIDTH and K is masked.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._group_norm_silu_dropout import drop, keep_scale, random_stream
from ridgeline.kernels._group_norm_silu_pieces import (
    affine,
    after,
    centre,
    column_of,
    combine,
    load_slab,
    moments,
    place,
    place_backwards,
    pointers_at,
    statistics,
    tile_at,
)
from ridgeline.kernels._nhwc import activate


@triton.jit
def forward_kernel(
    x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, y_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All of it in one launch: the slab waits in registers for its own statistics."""
    n, slab, _ = place(C, K * CG, 1)
    stream = random_stream(seed_ptr, offset_ptr)
    x = load_slab((x_ptr, x2_ptr, C1), n, slab, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES)
    weight_c, bias_c = affine(gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, slab, K * CG, SCALE_ROW, SHIFT_ROW, BLOCK_C)
    mean_c, rstd_c = statistics(x, x, HW, CG, K, KP, EPS, PIECES, True)
    slope_c = weight_c * rstd_c
    centre_c = centre(mean_c, x[0].dtype.primitive_bitwidth)
    bias_c += (centre_c - mean_c) * slope_c
    done_pc = x[PIECES - 1]
    for piece in tl.static_range(PIECES):
        at_pc, inside_pc = tile_at(n, slab, piece * BLOCK_P, HW, C, K * CG, BLOCK_P, BLOCK_C)
        centred_pc = after(x[piece], done_pc, True) - centre_c[None, :]
        y_pc = activate(centred_pc * slope_c[None, :] + bias_c[None, :], ACT)
        done_pc = drop(y_pc * keep_scale(DROPPED), stream, n, slab, piece * BLOCK_P, C, K * CG, DROPPED).to(
            done_pc.dtype
        )
        tl.store(y_ptr + at_pc, done_pc, mask=inside_pc)


@triton.jit
def forward_again_kernel(
    x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, y_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr, TILES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """All of it in one launch: each program reads its slab a second time, from a cache if few run side by side."""
    n, slab, part = place(C, K * CG, 1)
    mean_g, squares_g = moments((x_ptr, x2_ptr, C1), n, slab, part, HW, C, CG, K, TILES, BLOCK_P, BLOCK_C, COLUMNS, KP)
    rstd_g = tl.rsqrt(squares_g / (HW * CG) + EPS)
    _apply_tiles(
        (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, y_ptr, mean_g, rstd_g,
        n, slab, part, HW, C, CG, K, SCALE_ROW, SHIFT_ROW, ACT, DROPPED, TILES, BLOCK_P, BLOCK_C, COLUMNS,
    )  # fmt: skip


@triton.jit
def statistics_kernel(
    x_ptr, x2_ptr, partial_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of every group in one part of a sample: partial [N, PARTS, 2, C / CG] fp32."""
    n, slab, part = place(C, K * CG, PARTS)
    mean_g, squares_g = moments((x_ptr, x2_ptr, C1), n, slab, part, HW, C, CG, K, TILES, BLOCK_P, BLOCK_C, COLUMNS, KP)
    g = tl.arange(0, KP)
    row = partial_ptr + (n * PARTS + part).to(tl.int64) * (2 * (C // CG)) + slab * K + g
    tl.store(row, mean_g, mask=g < K)
    tl.store(row + C // CG, squares_g, mask=g < K)


@triton.jit
def apply_kernel(
    x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, partial_ptr, y_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    PARTS: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr,
    KP: tl.constexpr, PARTS_P: tl.constexpr,
):  # fmt: skip
    """y of one part of a slab, from the statistics of all parts."""
    n, slab, part = place_backwards(C, K * CG, PARTS)
    mean_g, rstd_g = combine(partial_ptr, n, slab, HW, C, CG, K, PARTS, TILES * BLOCK_P, KP, PARTS_P, EPS)
    _apply_tiles(
        (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, y_ptr, mean_g, rstd_g,
        n, slab, part, HW, C, CG, K, SCALE_ROW, SHIFT_ROW, ACT, DROPPED, TILES, BLOCK_P, BLOCK_C, COLUMNS,
    )  # fmt: skip


@triton.jit
def _apply_tiles(
    maps, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, y_ptr, mean_g, rstd_g, n, slab, part,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    COLUMN: tl.constexpr = K * CG // COLUMNS
    stream = random_stream(seed_ptr, offset_ptr)
    for i in range(COLUMNS):
        column, _, _, _, centre_c, slope_c, bias_c = column_of(
            gamma_ptr, beta_ptr, scale_ptr, shift_ptr, mean_g, rstd_g, n, slab, i,
            COLUMN, COLUMNS, CG, SCALE_ROW, SHIFT_ROW, maps[0].dtype.element_ty.primitive_bitwidth, BLOCK_C,
        )  # fmt: skip
        for tile in range(TILES):
            first = (part * TILES + tile) * BLOCK_P
            at_pc, inside_pc = tile_at(n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            pointers_pc = pointers_at(maps, n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            x_pc = tl.load(pointers_pc, mask=inside_pc, other=0.0)
            centred_pc = x_pc.to(tl.float32) - centre_c[None, :]
            y_pc = activate(centred_pc * slope_c[None, :] + bias_c[None, :], ACT)
            y_pc = drop(y_pc * keep_scale(DROPPED), stream, n, column, first, C, COLUMN, DROPPED)
            tl.store(y_ptr + at_pc, y_pc.to(x_pc.dtype), mask=inside_pc)
