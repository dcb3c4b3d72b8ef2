"""The kernel of conv_chain, which says what it is for: a convolution and up to three 1x1 convolutions on its tile.

Stage 0 is the convolution; K0 its output channels, B0 the power of two that holds them. Tail i multiplies the value of
stage i - 1 and E<i> channels of another map (at PITCH<i>) by its weight [K<i>, K<i-1> + E<i>], and adds the value of
stage SKIP<i> where that is not negative. The last stage's channels are dealt out BLOCK_N at a time: a program computes
all that comes before for its pixels, its neighbours do the same again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._conv2d_act import tap_of_step, valid_weights
from ridgeline.kernels._nhwc import (
    activate,
    after_loads,
    awaited,
    let_dependent_in,
    prefetch_weights,
    round_operand,
    split_pixel,
    wait_holding_dependent,
)


@triton.jit
def conv_chain_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr,
    weight1_ptr, bias1_ptr, extra1_ptr, weight2_ptr, bias2_ptr, extra2_ptr, weight3_ptr, bias3_ptr, extra3_ptr,
    y_ptr,
    pixels,  # N * HO * WO
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    X_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    E1: tl.constexpr, E2: tl.constexpr, E3: tl.constexpr,
    PITCH1: tl.constexpr, PITCH2: tl.constexpr, PITCH3: tl.constexpr,
    ACT0: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr, ACT3: tl.constexpr,
    SKIP1: tl.constexpr, SKIP2: tl.constexpr, SKIP3: tl.constexpr,
    TAILS: tl.constexpr, DEPTHWISE: tl.constexpr, PRECISION: tl.constexpr, ROUNDING: tl.constexpr,
    UNROLL: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = K1 if TAILS == 1 else K2 if TAILS == 2 else K3
    column_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    m = tile // column_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        # some tensor has 2^31 elements or more, and every offset below is a multiple of m
        m = (tile // column_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_m = m < pixels
    n0 = tl.arange(0, B0)
    n1 = n if TAILS == 1 else tl.arange(0, B1)
    n2 = n if TAILS == 2 else tl.arange(0, B2)

    # What never changes is asked for before the wait where registers can hold it, and so is ready when x is.
    bias1 = bias_of(bias1_ptr, n1, K1)
    bias2 = bias_of(bias2_ptr, n2, K2)
    bias3 = bias_of(bias3_ptr, n, K3)
    weights1 = early_weights(weight1_ptr, n1, K0, K1, E1, B0, BLOCK_K, EARLY)
    weights2 = early_weights(weight2_ptr, n2, K1, K2, E2, B1, BLOCK_K, EARLY and TAILS > 1)
    weights3 = early_weights(weight3_ptr, n, K2, K3, E3, B2, BLOCK_K, EARLY and TAILS > 2)
    image, row, column = split_pixel(m, HO, WO)  # pyright: ignore[reportGeneralTypeIssues]
    h = row * STRIDE_H - PAD_H
    w = column * STRIDE_W - PAD_W
    # the tap (0, 0) of each pixel; before the tensor's start where padded, and then never read
    x_tap = x_ptr + ((image * H + h) * W + w) * X_PITCH
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    STEPS: tl.constexpr = (R * S * C + BLOCK_K - 1) // BLOCK_K
    if not (UNROLL or DEPTHWISE):
        prefetch_weights(weight_ptr, R * S * C * K0, PDL)
    if not EARLY:
        prefetch_weights(weight1_ptr, (K0 + E1) * K1, PDL)
        if TAILS > 1:
            prefetch_weights(weight2_ptr, (K1 + E2) * K2, PDL)
        if TAILS > 2:
            prefetch_weights(weight3_ptr, (K2 + E3) * K3, PDL)
    acc = tl.zeros((BLOCK_M, B0), tl.float32) + bias_of(bias_ptr, n0, K0)[None, :]
    valid_0 = valid_m[:, None] & (n0 < K0)[None, :]
    if DEPTHWISE:
        taps = ()
        for tap in tl.static_range(R * S):
            kept = tl.load(weight_ptr + tap * C + n0, mask=n0 < K0, other=0.0)
            taps = taps + (kept,)  # noqa: RUF005 - Triton cannot unpack
        wait_holding_dependent(PDL)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n0[None, :], mask=valid_0, other=0.0)
        extras1 = early_extras(extra1_ptr, m, valid_m, E1, PITCH1, BLOCK_K, EARLY)
        extras2 = early_extras(extra2_ptr, m, valid_m, E2, PITCH2, BLOCK_K, EARLY and TAILS > 1)
        extras3 = early_extras(extra3_ptr, m, valid_m, E3, PITCH3, BLOCK_K, EARLY and TAILS > 2)
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                inside = valid_m & (h + r >= 0) & (h + r < H) & (w + s >= 0) & (w + s < W)
                x_block = x_tap[:, None] + ((r * W + s) * X_PITCH + n0)[None, :]
                x = tl.load(x_block, mask=inside[:, None] & valid_0, other=0.0)
                acc += x.to(tl.float32) * taps[r * S + s].to(tl.float32)[None, :]
        # Not for the value, which is never stored there: a select on the row keeps Triton from computing the sum once
        # for every warp in the layout that the product wants, with a trip through shared memory for each tap.
        acc = tl.where(valid_m[:, None], acc, 0.0)
    else:
        k = tl.arange(0, BLOCK_K)
        weight_row = weight_ptr + n0 * (R * S * C)
        weights = ()
        if UNROLL:
            for step in tl.static_range(STEPS):
                valid_w = valid_weights(step, k, n0 < K0, R * S * C, BLOCK_K)
                b_kn = tl.load(weight_row[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
                weights = weights + (b_kn,)  # noqa: RUF005
        wait_holding_dependent(PDL)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n0[None, :], mask=valid_0, other=0.0)
        extras1 = early_extras(extra1_ptr, m, valid_m, E1, PITCH1, BLOCK_K, EARLY)
        extras2 = early_extras(extra2_ptr, m, valid_m, E2, PITCH2, BLOCK_K, EARLY and TAILS > 1)
        extras3 = early_extras(extra3_ptr, m, valid_m, E3, PITCH3, BLOCK_K, EARLY and TAILS > 2)
        if UNROLL:
            gathered = ()
            for step in tl.static_range(STEPS):
                offset, valid_x = tap_of_step(step, k, h, w, valid_m, C, H, W, R, S, PADDED, X_PITCH, BLOCK_K)
                a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
                gathered = gathered + (a_mk,)  # noqa: RUF005
            gathered = after_loads(gathered, ROUNDING)
            for step in tl.static_range(STEPS):
                acc = tl.dot(gathered[step], weights[step], acc, input_precision=PRECISION)
        else:
            for step in range(0, STEPS):
                offset, valid_x = tap_of_step(step, k, h, w, valid_m, C, H, W, R, S, PADDED, X_PITCH, BLOCK_K)
                valid_w = valid_weights(step, k, n0 < K0, R * S * C, BLOCK_K)
                a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
                b_kn = tl.load(weight_row[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
                acc = tl.dot(round_operand(a_mk, ROUNDING), b_kn, acc, input_precision=PRECISION)
                acc = awaited(acc, ROUNDING != "")
    if EARLY:
        extras1 = after_loads(extras1, ROUNDING)
        extras2 = after_loads(extras2, ROUNDING)
        extras3 = after_loads(extras3, ROUNDING)
    acc = activate(acc, ACT0)
    if residual_ptr is not None:
        acc += residual.to(tl.float32)

    dtype = y_ptr.dtype.element_ty
    acc = tails(
        acc, weights1, weights2, weights3, extras1, extras2, extras3,
        weight1_ptr, weight2_ptr, weight3_ptr, bias1, bias2, bias3, extra1_ptr, extra2_ptr, extra3_ptr,
        m, valid_m, n1, n2, n, dtype, K0, K1, K2, K3, E1, E2, E3, PITCH1, PITCH2, PITCH3, ACT1, ACT2, ACT3,
        SKIP1, SKIP2, SKIP3, TAILS, PRECISION, ROUNDING, EARLY, BLOCK_K,
    )  # fmt: skip
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * Y_PITCH + n[None, :], acc.to(dtype), mask=valid_m[:, None] & (n < K)[None, :])


@triton.jit
def tails(
    acc, weights1, weights2, weights3, extras1, extras2, extras3,
    weight1_ptr, weight2_ptr, weight3_ptr, bias1, bias2, bias3, extra1_ptr, extra2_ptr, extra3_ptr,
    m, valid_m, n1, n2, n3, dtype: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
    E1: tl.constexpr, E2: tl.constexpr, E3: tl.constexpr,
    PITCH1: tl.constexpr, PITCH2: tl.constexpr, PITCH3: tl.constexpr,
    ACT1: tl.constexpr, ACT2: tl.constexpr, ACT3: tl.constexpr,
    SKIP1: tl.constexpr, SKIP2: tl.constexpr, SKIP3: tl.constexpr,
    TAILS: tl.constexpr, PRECISION: tl.constexpr, ROUNDING: tl.constexpr, EARLY: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The value of the last stage, fp32, from that of stage 0; between stages it is rounded, as if it were stored."""
    value0 = acc.to(dtype)
    acc = _tail(
        value0, weights1, extras1, weight1_ptr, bias1, extra1_ptr, m, valid_m, n1,
        K0, K1, E1, PITCH1, ACT1, PRECISION, ROUNDING, EARLY, BLOCK_E,
    )  # fmt: skip
    if SKIP1 == 0:
        acc += value0.to(tl.float32)
    if TAILS > 1:
        value1 = acc.to(dtype)
        acc = _tail(
            value1, weights2, extras2, weight2_ptr, bias2, extra2_ptr, m, valid_m, n2,
            K1, K2, E2, PITCH2, ACT2, PRECISION, ROUNDING, EARLY, BLOCK_E,
        )  # fmt: skip
        if SKIP2 == 0:
            acc += value0.to(tl.float32)
        if SKIP2 == 1:
            acc += value1.to(tl.float32)
        if TAILS > 2:
            value2 = acc.to(dtype)
            acc = _tail(
                value2, weights3, extras3, weight3_ptr, bias3, extra3_ptr, m, valid_m, n3,
                K2, K3, E3, PITCH3, ACT3, PRECISION, ROUNDING, EARLY, BLOCK_E,
            )  # fmt: skip
            if SKIP3 == 0:
                acc += value0.to(tl.float32)
            if SKIP3 == 1:
                acc += value1.to(tl.float32)
            if SKIP3 == 2:
                acc += value2.to(tl.float32)
    return acc


@triton.jit
def bias_of(bias_ptr, n, K: tl.constexpr):
    bias = tl.zeros((n.shape[0],), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + n, mask=n < K, other=0.0).to(tl.float32)
    return bias


@triton.jit
def early_weights(
    weight_ptr, n, K_IN: tl.constexpr, K_OUT: tl.constexpr, E: tl.constexpr, B_IN: tl.constexpr,
    BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tail's weight in registers, transposed: the block for the value, then those for the other map; or nothing."""
    blocks = ()
    if EARLY:
        blocks = blocks + (_weight_block(weight_ptr, n, 0, K_IN, K_IN + E, K_OUT, B_IN),)  # noqa: RUF005
        for e in tl.static_range(0, E, BLOCK_E):
            block = _weight_block(weight_ptr, n, K_IN + e, K_IN + E, K_IN + E, K_OUT, BLOCK_E)
            blocks = blocks + (block,)  # noqa: RUF005
    return blocks


@triton.jit
def early_extras(
    extra_ptr, m, valid_m, E: tl.constexpr, PITCH: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    blocks = ()
    if EARLY:
        for e in tl.static_range(0, E, BLOCK_E):
            blocks = blocks + (_extra_block(extra_ptr, m, valid_m, e, E, PITCH, BLOCK_E),)  # noqa: RUF005
    return blocks


@triton.jit
def _weight_block(
    weight_ptr, n, first, stop, PITCH: tl.constexpr, K_OUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[BLOCK, columns] of a weight [K_OUT, PITCH]: inputs `first` ... below `stop`, zero beyond."""
    k = first + tl.arange(0, BLOCK)
    valid = (k < stop)[:, None] & (n < K_OUT)[None, :]
    return tl.load(weight_ptr + n[None, :] * PITCH + k[:, None], mask=valid, other=0.0)


@triton.jit
def _extra_block(extra_ptr, m, valid_m, first, E: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr):
    e = first + tl.arange(0, BLOCK)
    return tl.load(extra_ptr + m[:, None] * PITCH + e[None, :], mask=valid_m[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def _tail(
    value, weights, extras, weight_ptr, bias, extra_ptr, m, valid_m, n,
    K_IN: tl.constexpr, K_OUT: tl.constexpr, E: tl.constexpr, PITCH: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, ROUNDING: tl.constexpr, EARLY: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """act(weight · [value | other map] + bias), fp32 [BLOCK_M, columns]."""
    acc = tl.zeros((value.shape[0], n.shape[0]), tl.float32) + bias[None, :]
    value = round_operand(value, ROUNDING)
    if EARLY:
        for i in tl.static_range(len(extras)):
            acc = tl.dot(extras[i], weights[i + 1], acc, input_precision=PRECISION)
        acc = tl.dot(value, weights[0], acc, input_precision=PRECISION)
    else:
        weight = _weight_block(weight_ptr, n, 0, K_IN, K_IN + E, K_OUT, value.shape[1])
        if E > 0:
            for e in range(0, E, BLOCK_E):
                extra = _extra_block(extra_ptr, m, valid_m, e, E, PITCH, BLOCK_E)
                block = _weight_block(weight_ptr, n, K_IN + e, K_IN + E, K_IN + E, K_OUT, BLOCK_E)
                acc = tl.dot(round_operand(extra, ROUNDING), block, acc, input_precision=PRECISION)
                acc = awaited(acc, ROUNDING != "")
        acc = tl.dot(value, weight, acc, input_precision=PRECISION)
    return activate(acc, ACT)
