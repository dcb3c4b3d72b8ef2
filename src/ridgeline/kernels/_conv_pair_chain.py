"""The kernel of conv_pair_chain, which says what it is for: two 3x3 convolutions and up to three 1x1 on one tile.

A program owns TILE_H x TILE_W output pixels. Of the inner convolution it computes their surroundings too, one pixel on
each side, as HALO rows of a product; what its neighbours need of those they compute again. The outer convolution reads
that value shifted by each of nine taps. Rows of registers cannot be addressed, but a matrix of zeros and ones times
the value selects them, exactly: a sum with one term that is not zero. It stands in shared memory before x is there. One
product selects eight taps, which then are one reduction: tap by tap, every product waited for two barriers.

KI and K0 are the channels behind the two convolutions, BI and B0 the powers of two that hold them; tails as in
`_conv_chain`. Without tails the outer convolution's channels are dealt out, BLOCK_N = B0 at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._conv2d_act import tap_of_step, valid_weights
from ridgeline.kernels._conv_chain import bias_of, early_extras, early_weights, tails
from ridgeline.kernels._nhwc import (
    activate,
    after_loads,
    awaited,
    let_dependent_in,
    prefetch_weights,
    round_operand,
    wait_holding_dependent,
)


@triton.jit
def conv_pair_chain_kernel(
    x_ptr, weight_inner_ptr, bias_inner_ptr, weight_ptr, bias_ptr, residual_ptr,
    weight1_ptr, bias1_ptr, extra1_ptr, weight2_ptr, bias2_ptr, extra2_ptr, weight3_ptr, bias3_ptr, extra3_ptr,
    y_ptr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KI: tl.constexpr, BI: tl.constexpr,
    X_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    E1: tl.constexpr, E2: tl.constexpr, E3: tl.constexpr,
    PITCH1: tl.constexpr, PITCH2: tl.constexpr, PITCH3: tl.constexpr,
    INNER_ACT: tl.constexpr, ACT0: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr, ACT3: tl.constexpr,
    SKIP1: tl.constexpr, SKIP2: tl.constexpr, SKIP3: tl.constexpr,
    TAILS: tl.constexpr, PRECISION: tl.constexpr, ROUNDING: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, HALO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILE_H * TILE_W
    HALO_W: tl.constexpr = TILE_W + 2
    K: tl.constexpr = K0 if TAILS == 0 else K1 if TAILS == 1 else K2 if TAILS == 2 else K3
    column_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    across: tl.constexpr = (W + TILE_W - 1) // TILE_W
    down: tl.constexpr = (H + TILE_H - 1) // TILE_H
    tile = tl.program_id(0) // column_tiles
    n = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    image = tile // (across * down)
    if WIDE:
        # some tensor has 2^31 elements or more, and every offset below is a multiple of a pixel's number
        image = image.to(tl.int64)
    top = tile // across % down * TILE_H
    left = tile % across * TILE_W
    p = tl.arange(0, BLOCK_M)
    row = top + p // TILE_W
    column = left + p % TILE_W
    valid_m = (row < H) & (column < W)
    m = (image * H + row) * W + column
    n0 = n if TAILS == 0 else tl.arange(0, B0)
    n1 = n if TAILS == 1 else tl.arange(0, B1)
    n2 = n if TAILS == 2 else tl.arange(0, B2)
    ni = tl.arange(0, BI)

    # What never changes is asked for before the wait where registers can hold it, and so is ready when x is.
    k = tl.arange(0, BLOCK_K)
    STEPS: tl.constexpr = (9 * C + BLOCK_K - 1) // BLOCK_K
    weight_row = weight_inner_ptr + ni * (9 * C)
    inner_weights = ()
    if UNROLL:
        for step in tl.static_range(STEPS):
            valid_w = valid_weights(step, k, ni < KI, 9 * C, BLOCK_K)
            b_kn = tl.load(weight_row[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
            inner_weights = inner_weights + (b_kn,)  # noqa: RUF005 - Triton cannot unpack
    if EARLY:
        most_weights = _outer_weight(weight_ptr, 0, n0, KI, K0, BI, 8)
        last_weights = _outer_weight(weight_ptr, 8, n0, KI, K0, BI, 1)
    acc = tl.zeros((HALO, BI), tl.float32) + bias_of(bias_inner_ptr, ni, KI)[None, :]
    bias = bias_of(bias_ptr, n0, K0)
    bias1 = bias_of(bias1_ptr, n1, K1)
    bias2 = bias_of(bias2_ptr, n2, K2)
    bias3 = bias_of(bias3_ptr, n, K3)
    weights1 = early_weights(weight1_ptr, n1, K0, K1, E1, B0, BLOCK_K, EARLY and TAILS > 0)
    weights2 = early_weights(weight2_ptr, n2, K1, K2, E2, B1, BLOCK_K, EARLY and TAILS > 1)
    weights3 = early_weights(weight3_ptr, n, K2, K3, E3, B2, BLOCK_K, EARLY and TAILS > 2)
    dtype = y_ptr.dtype.element_ty
    most_picked = _picked(tl.arange(0, 8 * BLOCK_M), 0, 8, TILE_W, HALO).to(dtype)
    last_picked = _picked(tl.arange(0, BLOCK_M), 8, 1, TILE_W, HALO).to(dtype)
    if not UNROLL:
        prefetch_weights(weight_inner_ptr, 9 * C * KI, PDL)
    if not EARLY:
        prefetch_weights(weight_ptr, 9 * KI * K0, PDL)
        if TAILS > 0:
            prefetch_weights(weight1_ptr, (K0 + E1) * K1, PDL)
        if TAILS > 1:
            prefetch_weights(weight2_ptr, (K1 + E2) * K2, PDL)
        if TAILS > 2:
            prefetch_weights(weight3_ptr, (K2 + E3) * K3, PDL)
    wait_holding_dependent(PDL)
    if residual_ptr is not None:
        valid_0 = valid_m[:, None] & (n0 < K0)[None, :]
        residual = tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n0[None, :], mask=valid_0, other=0.0)
    extras1 = early_extras(extra1_ptr, m, valid_m, E1, PITCH1, BLOCK_K, EARLY and TAILS > 0)
    extras2 = early_extras(extra2_ptr, m, valid_m, E2, PITCH2, BLOCK_K, EARLY and TAILS > 1)
    extras3 = early_extras(extra3_ptr, m, valid_m, E3, PITCH3, BLOCK_K, EARLY and TAILS > 2)

    # the inner convolution, at the tile's pixels and those around it
    q = tl.arange(0, HALO)
    inner_row = top - 1 + q // HALO_W
    inner_column = left - 1 + q % HALO_W
    valid_q = (q < (TILE_H + 2) * HALO_W) & (inner_row >= 0) & (inner_row < H) & (inner_column >= 0)
    valid_q = valid_q & (inner_column < W)
    h = inner_row - 1
    w = inner_column - 1
    x_tap = x_ptr + ((image * H + h) * W + w) * X_PITCH
    if UNROLL:
        gathered = ()
        for step in tl.static_range(STEPS):
            offset, valid_x = tap_of_step(step, k, h, w, valid_q, C, H, W, 3, 3, True, X_PITCH, BLOCK_K)
            a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
            gathered = gathered + (a_mk,)  # noqa: RUF005
        gathered = after_loads(gathered, ROUNDING)
        for step in tl.static_range(STEPS):
            acc = tl.dot(gathered[step], inner_weights[step], acc, input_precision=PRECISION)
    else:
        for step in range(0, STEPS):
            offset, valid_x = tap_of_step(step, k, h, w, valid_q, C, H, W, 3, 3, True, X_PITCH, BLOCK_K)
            valid_w = valid_weights(step, k, ni < KI, 9 * C, BLOCK_K)
            a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
            b_kn = tl.load(weight_row[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
            acc = tl.dot(round_operand(a_mk, ROUNDING), b_kn, acc, input_precision=PRECISION)
            acc = awaited(acc, ROUNDING != "")
    if EARLY:
        extras1 = after_loads(extras1, ROUNDING)
        extras2 = after_loads(extras2, ROUNDING)
        extras3 = after_loads(extras3, ROUNDING)
    # rounded as if it had been stored; the outer convolution pads with zeros, not with what lies outside the image
    inner = round_operand(tl.where(valid_q[:, None], activate(acc, INNER_ACT), 0.0).to(dtype), ROUNDING)

    acc = tl.zeros((BLOCK_M, B0), tl.float32) + bias[None, :]
    if not EARLY:
        most_weights = _outer_weight(weight_ptr, 0, n0, KI, K0, BI, 8)
        last_weights = _outer_weight(weight_ptr, 8, n0, KI, K0, BI, 1)
    most = tl.dot(most_picked, inner, input_precision=PRECISION).to(dtype)
    last = tl.dot(last_picked, inner, input_precision=PRECISION).to(dtype)
    acc = tl.dot(tl.reshape(most, (BLOCK_M, 8 * BI)), most_weights, acc, input_precision=PRECISION)
    acc = tl.dot(last, last_weights, acc, input_precision=PRECISION)
    acc = activate(acc, ACT0)
    if residual_ptr is not None:
        acc += residual.to(tl.float32)
    if TAILS > 0:
        acc = tails(
            acc, weights1, weights2, weights3, extras1, extras2, extras3,
            weight1_ptr, weight2_ptr, weight3_ptr, bias1, bias2, bias3, extra1_ptr, extra2_ptr, extra3_ptr,
            m, valid_m, n1, n2, n, dtype, K0, K1, K2, K3, E1, E2, E3, PITCH1, PITCH2, PITCH3, ACT1, ACT2, ACT3,
            SKIP1, SKIP2, SKIP3, TAILS, PRECISION, ROUNDING, EARLY, BLOCK_K,
        )  # fmt: skip
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * Y_PITCH + n[None, :], acc.to(dtype), mask=valid_m[:, None] & (n < K)[None, :])


@triton.jit
def _picked(i, first_tap, TAPS: tl.constexpr, TILE_W: tl.constexpr, HALO: tl.constexpr):
    """[pixels TAPS, HALO]: which row of the inner value each tap of each pixel reads."""
    pixel = i // TAPS
    tap = first_tap + i % TAPS
    row = (pixel // TILE_W + tap // 3) * (TILE_W + 2) + pixel % TILE_W + tap % 3
    return row[:, None] == tl.arange(0, HALO)[None, :]


@triton.jit
def _outer_weight(
    weight_ptr, first_tap, n, KI: tl.constexpr, K0: tl.constexpr, BI: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """[TAPS BI, B0] of the outer weight [K0, 9, KI]."""
    i = tl.arange(0, TAPS * BI)
    k = i % BI
    valid = (k < KI)[:, None] & (n < K0)[None, :]
    offset = (first_tap + i // BI) * KI + k
    return tl.load(weight_ptr + (n * (9 * KI))[None, :] + offset[:, None], mask=valid, other=0.0)
