"""Device code of group_norm_silu's backward; names and axes are those of _group_norm_silu.py.

With u the argument of the activation and xh = (x - mean) rstd, g = dropout(dy) act'(u) is the gradient of u, and

    dx = rstd (w g - (S1 + xh S2) / m),   w = gamma (1 + scale),   S1, S2 = sums over a group of w g and w g xh

where m counts a group's elements. All gradients of parameters follow from the sums over pixels of g and g xh.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

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
    to_channels,
    to_groups,
)
from ridgeline.kernels._nhwc import wait_for_predecessor
from ridgeline.kernels._op import INTERPRETED

_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr, sums_ptr,
    dx_ptr, dx2_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of one slab and its sums [N, 1, ROWS, C] fp32, of dx too if ROWS is 3; slabs of x and dy wait in registers."""
    n, slab, x, g, done_pc, centre_c, a_c, b_c, d_c = slab_gradient(
        dy_ptr, (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, sums_ptr,
        HW, C, CG, K, SCALE_ROW, SHIFT_ROW, EPS, ACT, DROPPED, BLOCK_P, BLOCK_C, KP, PIECES, ROWS,
    )  # fmt: skip
    whole: tl.constexpr = PIECES * BLOCK_P == HW and K * CG == BLOCK_C
    third_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    added = load_ahead((), residual_ptr, n, slab, 0, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES, False)
    for piece in tl.static_range(PIECES):
        _, inside_pc = tile_at(n, slab, piece * BLOCK_P, HW, C, K * CG, BLOCK_P, BLOCK_C)
        centred_pc = after(x[piece], done_pc) - centre_c[None, :]
        dx_pc = a_c[None, :] * after(g[piece], done_pc) - centred_pc * b_c[None, :] - d_c[None, :]
        if residual_ptr is not None:
            dx_pc += added[piece].to(tl.float32)
            added = load_ahead(added, residual_ptr, n, slab, piece + 1, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES, False)
        if ROWS == 3:
            third_pc += dx_pc if whole else tl.where(inside_pc, dx_pc, 0.0)
        done_pc = dx_pc.to(x[piece].dtype)
        dx_pointers_pc = pointers_at((dx_ptr, dx2_ptr, C1), n, slab, piece * BLOCK_P, HW, C, K * CG, BLOCK_P, BLOCK_C)
        tl.store(dx_pointers_pc, done_pc, mask=inside_pc)
    if ROWS == 3:
        c = tl.arange(0, BLOCK_C)
        row = sums_ptr + n.to(tl.int64) * (ROWS * C) + 2 * C + slab * (K * CG)
        tl.store(row + c, tl.sum(third_pc, 0), mask=c < K * CG)


@triton.jit
def backward_again_kernel(
    dy_ptr, x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr, sums_ptr,
    dx_ptr, dx2_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """backward_kernel, which reads its slabs again, x twice and dy once, from a cache if few run side by side."""
    n, slab, part = place(C, K * CG, 1)
    mean_g, squares_g = moments((x_ptr, x2_ptr, C1), n, slab, part, HW, C, CG, K, TILES, BLOCK_P, BLOCK_C, COLUMNS, KP)
    rstd_g = tl.rsqrt(squares_g / (HW * CG) + EPS)
    row = sums_ptr + n.to(tl.int64) * (ROWS * C)
    s1_g, s2_g = _sum_tiles(
        dy_ptr, (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, row,
        mean_g, rstd_g, n, slab, part,
        HW, C, CG, K, SCALE_ROW, SHIFT_ROW, ACT, DROPPED, TILES, BLOCK_P, BLOCK_C, COLUMNS, KP,
    )  # fmt: skip
    _apply_tiles(
        dy_ptr, (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr,
        row, (dx_ptr, dx2_ptr, C1), mean_g, rstd_g, s1_g, s2_g, n, slab, part,
        HW, C, CG, K, SCALE_ROW, SHIFT_ROW, ACT, DROPPED, TILES, BLOCK_P, BLOCK_C, COLUMNS, ROWS,
    )  # fmt: skip


@triton.jit
def backward_sums_kernel(
    dy_ptr, x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, partial_ptr, sums_ptr,
    products_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    PARTS: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr,
    KP: tl.constexpr, PARTS_P: tl.constexpr,
):  # fmt: skip
    """Sums over a part of a slab, fp32: of channels [N, PARTS, 2, C], and products S1 and S2 [N, PARTS, 2, C / CG]."""
    n, slab, part = place_backwards(C, K * CG, PARTS)
    mean_g, rstd_g = combine(partial_ptr, n, slab, HW, C, CG, K, PARTS, TILES * BLOCK_P, KP, PARTS_P, EPS)
    row = sums_ptr + (n * PARTS + part).to(tl.int64) * (2 * C)
    s1_g, s2_g = _sum_tiles(
        dy_ptr, (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, row,
        mean_g, rstd_g, n, slab, part,
        HW, C, CG, K, SCALE_ROW, SHIFT_ROW, ACT, DROPPED, TILES, BLOCK_P, BLOCK_C, COLUMNS, KP,
    )  # fmt: skip
    g = tl.arange(0, KP)
    row = products_ptr + (n * PARTS + part).to(tl.int64) * (2 * (C // CG)) + slab * K + g
    tl.store(row, s1_g, mask=g < K)
    tl.store(row + C // CG, s2_g, mask=g < K)


@triton.jit
def backward_apply_kernel(
    dy_ptr, x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr, partial_ptr,
    sums_ptr, products_ptr, dx_ptr, dx2_ptr,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    PARTS: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr,
    KP: tl.constexpr, PARTS_P: tl.constexpr,
):  # fmt: skip
    """dx of one part of a slab, from the products of all parts."""
    n, slab, part = place(C, K * CG, PARTS)
    mean_g, rstd_g = combine(partial_ptr, n, slab, HW, C, CG, K, PARTS, TILES * BLOCK_P, KP, PARTS_P, EPS)
    i = tl.arange(0, PARTS_P)[:, None]
    g = tl.arange(0, KP)[None, :]
    inside = (i < PARTS) & (g < K)
    row = products_ptr + n.to(tl.int64) * (PARTS * 2 * (C // CG)) + i * (2 * (C // CG)) + slab * K + g
    s1_g = tl.sum(tl.load(row, mask=inside, other=0.0), 0)
    s2_g = tl.sum(tl.load(row + C // CG, mask=inside, other=0.0), 0)
    _apply_tiles(
        dy_ptr, (x_ptr, x2_ptr, C1), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr,
        sums_ptr, (dx_ptr, dx2_ptr, C1), mean_g, rstd_g, s1_g, s2_g, n, slab, part,
        HW, C, CG, K, SCALE_ROW, SHIFT_ROW, ACT, DROPPED, TILES, BLOCK_P, BLOCK_C, COLUMNS, 2,
    )  # fmt: skip


@triton.jit
def _sum_tiles(
    dy_ptr, maps, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, row, mean_g, rstd_g, n, slab, part,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr, TILES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Store at `row` the sums of each channel over a part of a slab; returns (S1, S2) of them."""
    COLUMN: tl.constexpr = K * CG // COLUMNS
    stream = random_stream(seed_ptr, offset_ptr)
    s1_g = tl.full((KP,), 0, tl.float32)
    s2_g = tl.full((KP,), 0, tl.float32)
    for i in range(COLUMNS):
        column, weight_c, mean_c, rstd_c, centre_c, slope_c, bias_c = column_of(
            gamma_ptr, beta_ptr, scale_ptr, shift_ptr, mean_g, rstd_g, n, slab, i,
            COLUMN, COLUMNS, CG, SCALE_ROW, SHIFT_ROW, maps[0].dtype.element_ty.primitive_bitwidth, BLOCK_C,
        )  # fmt: skip
        first_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
        second_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
        for tile in range(TILES):
            first = (part * TILES + tile) * BLOCK_P
            at_pc, inside_pc = tile_at(n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            pointers_pc = pointers_at(maps, n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            centred_pc = tl.load(pointers_pc, mask=inside_pc, other=0.0).to(tl.float32) - centre_c[None, :]
            g_pc = tl.load(dy_ptr + at_pc, mask=inside_pc, other=0.0).to(tl.float32)
            g_pc = drop(g_pc, stream, n, column, first, C, COLUMN, DROPPED)
            g_pc *= _slope(centred_pc * slope_c[None, :] + bias_c[None, :], ACT)
            first_pc += g_pc
            second_pc += g_pc * centred_pc
        first_c = tl.sum(first_pc, 0) * keep_scale(DROPPED)
        second_c = (tl.sum(second_pc, 0) * keep_scale(DROPPED) + (centre_c - mean_c) * first_c) * rstd_c
        _store_sums(row, first_c, second_c, column, C, COLUMN, BLOCK_C)
        s1_g += to_groups(first_c * weight_c, i * COLUMN, CG, KP)
        s2_g += to_groups(second_c * weight_c, i * COLUMN, CG, KP)
    return s1_g, s2_g


@triton.jit
def _apply_tiles(
    dy_ptr, maps, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr, row, dx_maps,
    mean_g, rstd_g, s1_g, s2_g, n, slab, part,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr, TILES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of a part of a slab; its sums at `row` if ROWS is 3."""
    COLUMN: tl.constexpr = K * CG // COLUMNS
    stream = random_stream(seed_ptr, offset_ptr)
    for i in range(COLUMNS):
        column, _, mean_c, rstd_c, centre_c, slope_c, bias_c = column_of(
            gamma_ptr, beta_ptr, scale_ptr, shift_ptr, mean_g, rstd_g, n, slab, i,
            COLUMN, COLUMNS, CG, SCALE_ROW, SHIFT_ROW, maps[0].dtype.element_ty.primitive_bitwidth, BLOCK_C,
        )  # fmt: skip
        a_c = slope_c * keep_scale(DROPPED)
        b_c = rstd_c * rstd_c * to_channels(s2_g, i * COLUMN, CG, BLOCK_C) / (HW * CG)
        d_c = rstd_c * to_channels(s1_g, i * COLUMN, CG, BLOCK_C) / (HW * CG) + (centre_c - mean_c) * b_c
        third_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
        for tile in range(TILES):
            first = (part * TILES + tile) * BLOCK_P
            at_pc, inside_pc = tile_at(n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            pointers_pc = pointers_at(maps, n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            x_pc = tl.load(pointers_pc, mask=inside_pc, other=0.0)
            centred_pc = x_pc.to(tl.float32) - centre_c[None, :]
            g_pc = tl.load(dy_ptr + at_pc, mask=inside_pc, other=0.0).to(tl.float32)
            g_pc = drop(g_pc, stream, n, column, first, C, COLUMN, DROPPED)
            g_pc *= _slope(centred_pc * slope_c[None, :] + bias_c[None, :], ACT)
            dx_pc = (a_c[None, :] * g_pc - d_c[None, :]) - centred_pc * b_c[None, :]
            if residual_ptr is not None:
                dx_pc += tl.load(residual_ptr + at_pc, mask=inside_pc, other=0.0).to(tl.float32)
            if ROWS == 3:
                third_pc += tl.where(inside_pc, dx_pc, 0.0)
            dx_pointers_pc = pointers_at(dx_maps, n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            tl.store(dx_pointers_pc, dx_pc.to(x_pc.dtype), mask=inside_pc)
        if ROWS == 3:
            c = tl.arange(0, BLOCK_C)
            tl.store(row + 2 * C + column * COLUMN + c, tl.sum(third_pc, 0), mask=c < COLUMN)


@triton.jit
def parameters_kernel(
    sums_ptr, gamma_ptr, beta_ptr, scale_ptr, dgamma_ptr, dbeta_ptr, dscale_ptr, dshift_ptr, dx_sum_ptr, n_count,
    C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, SCALE_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of gamma, beta, scale and shift from the sums, in one fixed order; a program takes BLOCK_C channels.

    With `dx_sum` also the sum of dx, of the third of ROWS rows.
    """
    wait_for_predecessor(PDL)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    gamma_c = tl.load(gamma_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    beta_c = tl.load(beta_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    dgamma_nc = tl.full((BLOCK_N, BLOCK_C), 0, tl.float32)
    dbeta_nc = tl.full((BLOCK_N, BLOCK_C), 0, tl.float32)
    dx_nc = tl.full((BLOCK_N, BLOCK_C), 0, tl.float32)
    for block in range(tl.cdiv(n_count, BLOCK_N)):
        n = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None].to(tl.int64)
        inside = (n < n_count) & (c < C)[None, :]
        first_nc = tl.full((BLOCK_N, BLOCK_C), 0, tl.float32)
        second_nc = tl.full((BLOCK_N, BLOCK_C), 0, tl.float32)
        for part in range(PARTS):
            row = sums_ptr + (n * PARTS + part) * (ROWS * C) + c[None, :]
            first_nc += tl.load(row, mask=inside, other=0.0)
            second_nc += tl.load(row + C, mask=inside, other=0.0)
            if dx_sum_ptr is not None:
                dx_nc += tl.load(row + 2 * C, mask=inside, other=0.0)
        if dshift_ptr is not None:
            tl.store(dshift_ptr + n * C + c[None, :], first_nc.to(dshift_ptr.dtype.element_ty), mask=inside)
        if scale_ptr is not None:
            dscale_nc = gamma_c[None, :] * second_nc + beta_c[None, :] * first_nc
            tl.store(dscale_ptr + n * C + c[None, :], dscale_nc.to(dscale_ptr.dtype.element_ty), mask=inside)
            scale_nc = 1.0 + tl.load(scale_ptr + n * SCALE_ROW + c[None, :], mask=inside, other=0.0).to(tl.float32)
            first_nc *= scale_nc
            second_nc *= scale_nc
        dgamma_nc += second_nc
        dbeta_nc += first_nc
    tl.store(dgamma_ptr + c, tl.sum(dgamma_nc, 0).to(dgamma_ptr.dtype.element_ty), mask=c < C)
    tl.store(dbeta_ptr + c, tl.sum(dbeta_nc, 0).to(dbeta_ptr.dtype.element_ty), mask=c < C)
    if dx_sum_ptr is not None:
        tl.store(dx_sum_ptr + c, tl.sum(dx_nc, 0), mask=c < C)


@triton.jit
def slab_gradient(
    dy_ptr, maps, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, sums_ptr,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(n, slab, x, g, done, centre, a, b, d) of this program: dx = a g - b (x - centre) - d; stores its sums."""
    n, slab, _ = place(C, K * CG, 1)
    stream = random_stream(seed_ptr, offset_ptr)
    x = load_slab(maps, n, slab, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES)
    dy = load_slab((dy_ptr, None, C), n, slab, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES)
    # here, where registers are still free; the scale is left to the coefficients, for in 16 bits it would round
    kept = ()
    for piece in tl.static_range(PIECES):
        kept_pc = drop(dy[piece], stream, n, slab, piece * BLOCK_P, C, K * CG, DROPPED)
        kept = kept + (kept_pc,)  # noqa: RUF005 - Triton cannot unpack
    weight_c, bias_c = affine(gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, slab, K * CG, SCALE_ROW, SHIFT_ROW, BLOCK_C)
    # from x once more instead of from memory: it is here anyway
    mean_c, rstd_c = statistics(x, kept, HW, CG, K, KP, EPS, PIECES)
    centre_c = centre(mean_c, x[0].dtype.primitive_bitwidth)
    slope_c = weight_c * rstd_c
    bias_c += (centre_c - mean_c) * slope_c
    first_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    second_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    g = ()
    done_pc = kept[PIECES - 1]
    for piece in tl.static_range(PIECES):
        centred_pc = after(x[piece], done_pc) - centre_c[None, :]
        g_pc = after(kept[piece], done_pc) * _slope(centred_pc * slope_c[None, :] + bias_c[None, :], ACT)
        # padding has dy = 0, so g = 0
        first_pc += g_pc
        second_pc += g_pc * centred_pc
        # kept in the dtype of dy until dx is made, as PyTorch's kernels hand it on; the sums had all of its digits
        done_pc = g_pc.to(kept[piece].dtype)
        g = g + (done_pc,)  # noqa: RUF005 - Triton cannot unpack
    first_c = tl.sum(first_pc, 0) * keep_scale(DROPPED)
    second_c = (tl.sum(second_pc, 0) * keep_scale(DROPPED) + (centre_c - mean_c) * first_c) * rstd_c
    _store_sums(sums_ptr + n.to(tl.int64) * (ROWS * C), first_c, second_c, slab, C, K * CG, BLOCK_C)
    a_c, b_c, d_c = _coefficients(first_c, second_c, weight_c, rstd_c, HW * CG, CG, KP)
    a_c *= keep_scale(DROPPED)
    d_c += (centre_c - mean_c) * b_c
    return n, slab, x, g, done_pc, centre_c, a_c, b_c, d_c


@triton.jit
def load_ahead(
    added, residual_ptr, n, slab, DONE: tl.constexpr,
    HW: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr, QUARTERS: tl.constexpr,
):  # fmt: skip
    """The pieces of the residual that are under way when so many are DONE, in the order in which they are taken.

    Two more than are done before the first, and two for each that is done, whose x and g leave their registers.
    """
    if residual_ptr is not None:
        for step in tl.static_range(2 * DONE, min(2 * DONE + 2, PIECES)):
            first = place_of(step, PIECES, QUARTERS) * BLOCK_P
            at_pc, inside_pc = tile_at(n, slab, first, HW, C, WIDTH, BLOCK_P, BLOCK_C)
            added = added + (tl.load(residual_ptr + at_pc, mask=inside_pc, other=0.0),)  # noqa: RUF005
    return added


@triton.constexpr_function
def place_of(step, pieces, quarters):
    """The piece that is taken at this step: the next, or one of each quarter of the map in turn."""
    return step % 4 * (pieces // 4) + step // 4 if quarters else step


@triton.jit
def _coefficients(first_c, second_c, weight_c, rstd_c, COUNT: tl.constexpr, CG: tl.constexpr, KP: tl.constexpr):
    """(a, b, d) of dx = a g - b (x - mean) - d."""
    s1_c = to_channels(to_groups(first_c * weight_c, 0, CG, KP), 0, CG, first_c.shape[0])
    s2_c = to_channels(to_groups(second_c * weight_c, 0, CG, KP), 0, CG, first_c.shape[0])
    return weight_c * rstd_c, rstd_c * rstd_c * s2_c / COUNT, rstd_c * s1_c / COUNT


@triton.jit
def _store_sums(row, first_c, second_c, slab, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    tl.store(row + slab * WIDTH + c, first_c, mask=c < WIDTH)
    tl.store(row + C + slab * WIDTH + c, second_c, mask=c < WIDTH)


@triton.jit
def _slope(u, ACT: tl.constexpr):
    """Derivative of the activation at u: s (1 + u (1 - s)) with s = sigmoid(u) for SiLU."""
    slope = tl.full(u.shape, 1.0, tl.float32)
    if ACT == "silu":
        if _IN_ASSEMBLY:
            # 1 / (1 + 2^(-u log2 e)), as in `activate`
            s = tl.inline_asm_elementwise(
                """{
                .reg .f32 t;
                mul.f32 t, $1, 0fBFB8AA3B;
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 $0, t;
                }""",
                "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            s = tl.sigmoid(u)
        slope = s * (1.0 + u * (1.0 - s))
    return slope
