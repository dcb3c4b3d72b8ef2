"""The kernel of conv2d_act, which says what it computes: the implicit GEMM [pixels, R S C] x [R S C, K]."""

from __future__ import annotations

import triton
import triton.language as tl

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
def valid_weights(step, k, valid_n, LENGTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which elements of a step's weights exist, broadcastable to [BLOCK_K, BLOCK_N]."""
    valid = valid_n[None, :]
    if LENGTH % BLOCK_K != 0:
        valid = valid & (step * BLOCK_K + k < LENGTH)[:, None]
    return valid


@triton.jit
def tap_of_step(
    step, k, h, w, valid_m,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr,
    X_PITCH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Offsets [BLOCK_K] of a step's elements from each pixel's tap (0, 0), and which [BLOCK_M, BLOCK_K] exist."""
    if C % BLOCK_K == 0:
        # one tap a step: r and s are scalars, and only a pixel can fall outside
        tap = step // (C // BLOCK_K)
        r = tap // S
        s = tap % S
        offset = (r * W + s) * X_PITCH + (step % (C // BLOCK_K)) * BLOCK_K + k
        valid_x = valid_m[:, None]
        if PADDED:
            valid_x = valid_x & ((h + r >= 0) & (h + r < H) & (w + s >= 0) & (w + s < W))[:, None]
    else:
        # several taps a step: fewer idle lanes than padding every tap to BLOCK_K
        reduction = step * BLOCK_K + k
        tap = reduction // C
        r = tap // S
        s = tap % S
        offset = (r * W + s) * X_PITCH + reduction % C
        valid_x = valid_m[:, None] & (reduction < R * S * C)[None, :]
        if PADDED:
            h_tap = h[:, None] + r[None, :]
            w_tap = w[:, None] + s[None, :]
            valid_x = valid_x & (h_tap >= 0) & (h_tap < H) & (w_tap >= 0) & (w_tap < W)
    return offset, valid_x


@triton.jit
def conv2d_act_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    pixels,  # N * HO * WO
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    X_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, ROUNDING: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr, UNROLL: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share their pixels: x comes from DRAM once, and from L2 for each further block of channels.
    channel_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    m = tile // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        # some tensor has 2^31 elements or more, and every offset below is a multiple of m
        m = (tile // channel_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % channel_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m = m < pixels
    valid_n = n < K

    # rows beyond the last pixel repeat it: what they read exists, and what they compute is not stored
    pixel = tl.minimum(m, pixels - 1)
    exists_m = tl.full((BLOCK_M,), True, tl.int1)
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    image, row, column = split_pixel(pixel, HO, WO)  # pyright: ignore[reportGeneralTypeIssues]
    h = row * STRIDE_H - PAD_H
    w = column * STRIDE_W - PAD_W
    # the tap (0, 0) of each pixel; before the tensor's start where padded, and then never read
    source = (image * H + h) * W + w
    if R * S * STRIDE_H * STRIDE_W == 1 and not PADDED:
        # the compiler does not see that the divisions cancel out
        source = pixel
    x_tap = x_ptr + source * X_PITCH
    weight_row = weight_ptr + n * (R * S * C)

    if PDL and bias_ptr is not None:
        # before the wait it costs no time; without a wait it would only hold registers through the loop
        bias_n = tl.load(bias_ptr + n, mask=valid_n, other=0.0)
    STEPS: tl.constexpr = (R * S * C + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if not UNROLL:
        prefetch_weights(weight_ptr, R * S * C * K, PDL)
    if SPLIT > 1:
        acc = _split_product(
            x_tap, weight_row, h, w, valid_n, C, H, W, R, S, PADDED, X_PITCH, PRECISION, ROUNDING, PDL, UNROLL,
            STEPS, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif UNROLL:
        # a short reduction has all its loads in flight at once, and the weights, which never change, before the wait
        weights = ()
        for step in tl.static_range(STEPS):
            valid_w = valid_weights(step, k, valid_n, R * S * C, BLOCK_K)
            b_kn = tl.load(weight_row[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
            weights = weights + (b_kn,)  # noqa: RUF005 - Triton cannot unpack
        wait_holding_dependent(PDL)
        gathered = ()
        for step in tl.static_range(STEPS):
            offset, valid_x = tap_of_step(step, k, h, w, exists_m, C, H, W, R, S, PADDED, X_PITCH, BLOCK_K)
            a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
            gathered = gathered + (a_mk,)  # noqa: RUF005
        weights = after_loads(weights, "")
        gathered = after_loads(gathered, ROUNDING)
        for step in tl.static_range(STEPS):
            acc = tl.dot(gathered[step], weights[step], acc, input_precision=PRECISION)
    else:
        wait_holding_dependent(PDL)
        for step in range(0, STEPS):
            offset, valid_x = tap_of_step(step, k, h, w, exists_m, C, H, W, R, S, PADDED, X_PITCH, BLOCK_K)
            valid_w = valid_weights(step, k, valid_n, R * S * C, BLOCK_K)
            a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
            b_kn = tl.load(weight_row[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
            acc = tl.dot(round_operand(a_mk, ROUNDING), b_kn, acc, input_precision=PRECISION)
            acc = awaited(acc, ROUNDING != "")

    if bias_ptr is not None:
        # last, with and without PDL: another order of the sum would be another result
        if not PDL:
            bias_n = tl.load(bias_ptr + n, mask=valid_n, other=0.0)
        acc += bias_n.to(tl.float32)[None, :]
    acc = activate(acc, ACT)
    valid_y = valid_m[:, None] & valid_n[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n[None, :], mask=valid_y, other=0.0).to(tl.float32)
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * Y_PITCH + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)


@triton.jit
def _split_product(
    x_tap, weight_row, h, w, valid_n,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr,
    X_PITCH: tl.constexpr, PRECISION: tl.constexpr, ROUNDING: tl.constexpr, PDL: tl.constexpr, UNROLL: tl.constexpr,
    STEPS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product [BLOCK_M, BLOCK_N], after waiting for the predecessor; each warp sums a part of the reduction.

    For small tiles with long reductions: a batched product gives every warp a batch of its own, so that SPLIT blocks of
    the reduction are loaded and multiplied side by side where one chain of products would wait for itself.
    """
    acc = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
    if UNROLL:
        weights = ()
        for step in tl.static_range(STEPS):
            block = _split_weights(step, weight_row, valid_n, R * S * C, SPLIT, BLOCK_K)
            weights = weights + (block,)  # noqa: RUF005
        wait_holding_dependent(PDL)
        gathered = ()
        for step in tl.static_range(STEPS):
            block = _split_gather(step, x_tap, h, w, C, H, W, R, S, PADDED, X_PITCH, SPLIT, BLOCK_M, BLOCK_K)
            gathered = gathered + (block,)  # noqa: RUF005
        weights = after_loads(weights, "")
        gathered = after_loads(gathered, ROUNDING)
        for step in tl.static_range(STEPS):
            acc = tl.dot(gathered[step], weights[step], acc, input_precision=PRECISION)
    else:
        wait_holding_dependent(PDL)
        for step in range(0, STEPS):
            a_smk = _split_gather(step, x_tap, h, w, C, H, W, R, S, PADDED, X_PITCH, SPLIT, BLOCK_M, BLOCK_K)
            b_skn = _split_weights(step, weight_row, valid_n, R * S * C, SPLIT, BLOCK_K)
            acc = tl.dot(round_operand(a_smk, ROUNDING), b_skn, acc, input_precision=PRECISION)
            acc = awaited(acc, ROUNDING != "")
    return tl.sum(acc, 0)


@triton.jit
def _split_weights(step, weight_row, valid_n, LENGTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr):
    """A step's weights, [SPLIT, BLOCK_K, BLOCK_N]."""
    part = tl.arange(0, SPLIT)[:, None]
    reduction = (step * SPLIT + part) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    valid = valid_n[None, None, :]
    if LENGTH % (SPLIT * BLOCK_K) != 0:
        valid = valid & (reduction < LENGTH)[:, :, None]
    return tl.load(weight_row[None, None, :] + reduction[:, :, None], mask=valid, other=0.0)


@triton.jit
def _split_gather(
    step, x_tap, h, w,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr,
    X_PITCH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A step's elements of x, [SPLIT, BLOCK_M, BLOCK_K]."""
    first = (step * SPLIT + tl.arange(0, SPLIT)[:, None]) * BLOCK_K
    reduction = first + tl.arange(0, BLOCK_K)[None, :]
    # one tap a block where C allows, else one an element
    tapped = first if C % BLOCK_K == 0 else reduction
    tap = tapped // C
    r = tap // S
    s = tap % S
    offset = (r * W + s) * X_PITCH + (reduction - tap * C)
    valid = (tapped < R * S * C)[:, None, :] & tl.full((1, BLOCK_M, 1), True, tl.int1)
    if PADDED:
        h_tap = h[None, :, None] + r[:, None, :]
        w_tap = w[None, :, None] + s[:, None, :]
        valid = valid & (h_tap >= 0) & (h_tap < H) & (w_tap >= 0) & (w_tap < W)
    return tl.load(x_tap[None, :, None] + offset[:, None, :], mask=valid, other=0.0)
