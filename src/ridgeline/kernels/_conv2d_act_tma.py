"""The kernels of conv2d_act whose operands the tensor memory accelerator (TMA) copies, for sm_90 and later.

A program's pixels are a box of the output, and each tap's pixels of x are the same box, shifted: one copy, whose
elements outside the image the hardware writes as zeros. No thread computes an address or a mask in the loop.

A tensor map of x has the axes             that of weight
[pixels, C]          1x1, stride 1         [K, R S C]
[N, H, W, C]         stride 1
[N, H/2, 2, W/2, 2C] stride 2: a tap sees one parity of rows and one of columns
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import (
    activate,
    awaited,
    let_dependent_in,
    prefetch_weights,
    round_operand,
    wait_holding_dependent,
)


@triton.jit
def conv2d_act_tma_kernel(
    x_desc, weight_desc, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    pixels,  # N * HO * WO
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    X_PITCH: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, ROUNDING: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    SPLIT: tl.constexpr,  # programs a tile; above 1 y_ptr holds their sums, [SPLIT, pixels, K] in fp32
    BOX_N: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = BOX_N * BOX_H * BOX_W
    # Neighbouring programs share their pixels, as in conv2d_act_kernel; those that share a tile are far apart.
    channel_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = program // channel_tiles
    n_first = program % channel_tiles * BLOCK_N
    IS_PRODUCT: tl.constexpr = R * S * STRIDE == 1 and PAD_H == 0 and PAD_W == 0
    if IS_PRODUCT:
        boxes = tl.cdiv(pixels, BLOCK_M)
        part = tile // boxes
        pixel_first = tile % boxes * BLOCK_M
    else:
        down: tl.constexpr = (HO + BOX_H - 1) // BOX_H
        across: tl.constexpr = (WO + BOX_W - 1) // BOX_W
        images = pixels // (HO * WO)
        boxes = tl.cdiv(images, BOX_N) * (down * across)
        part = tile // boxes
        box = tile % boxes
        image_first = box // (down * across) * BOX_N
        h_first = box // across % down * BOX_H
        w_first = box % across * BOX_W
    n = n_first + tl.arange(0, BLOCK_N)
    valid_n = n < K
    if bias_ptr is not None:
        # before the wait it costs no time
        bias_n = tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)
    prefetch_weights(weight_ptr, R * S * C * K, PDL)
    wait_holding_dependent(PDL)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    BLOCKS: tl.constexpr = C // BLOCK_K  # of a tap
    STEPS: tl.constexpr = R * S * BLOCKS
    PART: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    for step in range(part * PART, tl.minimum(part * PART + PART, STEPS)):
        tap = step // BLOCKS
        c = step % BLOCKS * BLOCK_K
        if IS_PRODUCT:
            a_mk = x_desc.load([pixel_first, c])
        else:
            h = tap // S - PAD_H
            w = tap % S - PAD_W
            if STRIDE == 1:
                a_nhwk = x_desc.load([image_first, h_first + h, w_first + w, c])
            else:
                # rows h, h + 2, ... are those of parity h & 1 from h >> 1 on
                a_nhwk = x_desc.load(
                    [image_first, h_first + (h >> 1), h & 1, w_first + (w >> 1), (w & 1) * X_PITCH + c]
                )
            a_mk = a_nhwk.reshape(BLOCK_M, BLOCK_K)
        b_nk = weight_desc.load([n_first, tap * C + c])
        acc = tl.dot(round_operand(a_mk, ROUNDING), b_nk.T, acc, input_precision=PRECISION)
        # a box that is no row of pixels is reshaped in registers
        acc = awaited(acc, not IS_PRODUCT or ROUNDING != "")

    # where the tile goes is computed only now: its registers would stand beside the accumulators through the loop
    m = tl.arange(0, BLOCK_M)
    if IS_PRODUCT:
        pixel = pixel_first + m
        valid_m = pixel < pixels
    else:
        image = image_first + m // (BOX_H * BOX_W)
        row = h_first + m // BOX_W % BOX_H
        column = w_first + m % BOX_W
        # boxes reach beyond the last row, column and image: what they compute there is not stored
        valid_m = (image < images) & (row < HO) & (column < WO)
        pixel = (image * HO + row) * WO + column
    valid_y = valid_m[:, None] & valid_n[None, :]
    if WIDE:
        pixel = pixel.to(tl.int64)
    if SPLIT > 1:
        row_m = (part * pixels + pixel).to(tl.int64)
        let_dependent_in(PDL)
        tl.store(y_ptr + row_m[:, None] * K + n[None, :], acc, mask=valid_y)
    else:
        if bias_ptr is not None:
            acc += bias_n[None, :]
        acc = activate(acc, ACT)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + pixel[:, None] * RESIDUAL_PITCH + n[None, :], mask=valid_y, other=0.0)
            acc += residual.to(tl.float32)
        let_dependent_in(PDL)
        tl.store(y_ptr + pixel[:, None] * Y_PITCH + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)


@triton.jit
def sum_parts_kernel(
    parts_ptr, bias_ptr, residual_ptr, y_ptr,
    pixels,
    K: tl.constexpr, RESIDUAL_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = act(the sum of parts [SPLIT, pixels, K] + bias) + residual: parts in their order, so equal on every run."""
    channel_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    m = program // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % channel_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_n = n < K
    valid_y = (m < pixels)[:, None] & valid_n[None, :]
    if WIDE:
        m = m.to(tl.int64)
    if bias_ptr is not None:
        bias_n = tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)
    wait_holding_dependent(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(SPLIT):
        row_m = (part * pixels + m).to(tl.int64)
        acc += tl.load(parts_ptr + row_m[:, None] * K + n[None, :], mask=valid_y, other=0.0)
    if bias_ptr is not None:
        acc += bias_n[None, :]
    acc = activate(acc, ACT)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + m[:, None] * RESIDUAL_PITCH + n[None, :], mask=valid_y, other=0.0)
        acc += residual.to(tl.float32)
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * Y_PITCH + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)
