"""The kernel of conv2d_fp8 for sm_89 and sm_120: the implicit GEMM [pixels, R S C] x [R S C, K] by mma.sync.

Both operands have the reduced dimension adjacent, in memory and in shared memory, as FP8 instructions want them: no
byte is permuted in registers. Pixels are gathered through pointers, 16 channels of one tap a copy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._conv2d_act import tap_of_step, valid_weights
from ridgeline.kernels._nhwc import split_pixel


@triton.jit(do_not_specialize=["x_row", "weight_row"])
def conv2d_fp8_tl_kernel(
    x_ptr, weight_ptr, inverse_ptr, bias_ptr, residual_ptr, y_ptr,  # inverse: of the scales of the operands, by row
    x_row, weight_row,
    pixels,  # N * HO * WO
    steps,  # of the reduction: a constant would be unrolled, 18 of them to 50 KB of instructions
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, X_PITCH: tl.constexpr,
    RESIDUAL_PITCH: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share their pixels: x comes from DRAM once, and from L2 for each further block of filters.
    CHANNEL_TILES: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    if WIDE:
        # some tensor has 2^31 elements or more, and every large offset below is a multiple of m or n
        tile = tile.to(tl.int64)
    m = tile // CHANNEL_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % CHANNEL_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_n = n < K

    # rows beyond the last pixel repeat it: what they read exists, and what they compute is not stored
    pixel = tl.minimum(m, pixels - 1)
    exists_m = tl.full((BLOCK_M,), True, tl.int1)
    PADDED: tl.constexpr = TOP > 0 or LEFT > 0
    image, row, column = split_pixel(pixel, HO, WO)  # pyright: ignore[reportGeneralTypeIssues]
    h = row - TOP
    w = column - LEFT
    # the tap (0, 0) of each pixel; before the tensor's start where padded, and then never read
    source = (image * H + h) * W + w
    if R * S == 1:
        # the compiler does not see that the divisions cancel out
        source = pixel
    x_tap = x_ptr + source * X_PITCH
    weight_row_n = weight_ptr + n * (R * S * C)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, steps):
        offset, valid_x = tap_of_step(step, k, h, w, exists_m, C, H, W, R, S, PADDED, X_PITCH, BLOCK_K)
        valid_w = valid_weights(step, k, valid_n, R * S * C, BLOCK_K)
        a_mk = tl.load(x_tap[:, None] + offset[None, :], mask=valid_x, other=0.0)
        b_kn = tl.load(weight_row_n[None, :] + (step * BLOCK_K + k)[:, None], mask=valid_w, other=0.0)
        acc = tl.dot(a_mk, b_kn, acc)

    # both rows exist, which the host checks
    acc *= tl.load(inverse_ptr + x_row) * tl.load(inverse_ptr + weight_row)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)[None, :]
    valid_y = (m < pixels)[:, None] & valid_n[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n[None, :], mask=valid_y, other=0.0)
        acc += residual.to(tl.float32)
    tl.store(y_ptr + m[:, None] * K + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)
