"""The kernels of conv2d_wgrad and upsample_conv2d_wgrad for sm_90: products of pixel boxes, added in a fixed order.

As in _conv2d_gluon one warp copies boxes while others multiply. Here the pixels are what is reduced: a program holds
[K, C] of one tap, or of two taps that share the gradient's boxes, for its part of the pixels. `wgrad_parts_kernel` adds
the parts, so that the same step gives the same bits.

With PHASES = 4, dy has twice the rows and columns of x, and R S = 16 are 4 taps of each of 4 phases: see _conv2d_gluon.
With STRIDE = 2, x has twice the rows and columns of dy, and a tap meets one of its phases.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels._nhwc import wait_for_predecessor


@gluon.jit
def conv2d_wgrad_gluon_kernel(
    x_desc, dy_desc, parts_ptr,  # parts [PARTS, K, R S, C] fp32
    images, H, W,  # of dy, or of the smaller map
    C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    PARTS: gl.constexpr, PHASES: gl.constexpr, STRIDE: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr,
    TAPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    a = gl.allocate_shared_memory(dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES * TAPS] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    down = gl.cdiv(H, BOX_H)
    across = gl.cdiv(W, BOX_W)
    boxes = gl.cdiv(images, BOX_N) * down * across
    # the other partition begins when this one lets it
    wait_for_predecessor(PDL)
    gl.warp_specialize(
        [
            (_multiply, (parts_ptr, a, b, full, empty, boxes, C, K, R * S, PARTS, BLOCK_K, BLOCK_C, TAPS, STAGES)),
            (_copy, (x_desc, dy_desc, a, b, full, empty, boxes, down, across, C, K, R, S, TOP, LEFT, PARTS, PHASES,
                     STRIDE, BLOCK_K, BLOCK_C, TAPS, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _share(
    unit, boxes, C: gl.constexpr, K: gl.constexpr, RS: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """(first k, first c, first tap, part, its first box, the box behind its last) of a unit of work."""
    K_TILES: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    C_TILES: gl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    GROUPS: gl.constexpr = (RS + TAPS - 1) // TAPS
    part = unit // (K_TILES * C_TILES * GROUPS)
    each = gl.cdiv(boxes, PARTS)
    k = unit % K_TILES * BLOCK_K
    c = unit // K_TILES % C_TILES * BLOCK_C
    tap = unit // (K_TILES * C_TILES) % GROUPS * TAPS
    return k, c, tap, part, gl.minimum(part * each, boxes), gl.minimum(part * each + each, boxes)


@gluon.jit
def _units(
    C: gl.constexpr, K: gl.constexpr, RS: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    tiles: gl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K) * ((C + BLOCK_C - 1) // BLOCK_C)
    return tiles * ((RS + TAPS - 1) // TAPS) * PARTS


@gluon.jit
def _copy(
    x_desc, dy_desc, a, b, full, empty, boxes, down, across,
    C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    PARTS: gl.constexpr, PHASES: gl.constexpr, STRIDE: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, TAPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    size: gl.constexpr = x_desc.block_type.shape
    step = 0
    for unit in range(gl.program_id(0), _units(C, K, R * S, PARTS, BLOCK_K, BLOCK_C, TAPS), gl.num_programs(0)):
        k, c, tap, _, first, last = _share(unit, boxes, C, K, R * S, PARTS, BLOCK_K, BLOCK_C, TAPS)
        for box in range(first, last):
            n = box // (down * across) * size[0]
            h = box // across % down * size[1]
            w = box % across * size[-2]
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), dy_desc.block_type.nbytes + TAPS * x_desc.block_type.nbytes)
            # behind the filters of a phase lie those of its neighbour, and what comes of them is not stored
            dy_place = [n, h, w, k] if PHASES == 1 else [n, h, tap // 8, w, tap // 4 % 2 * K + k]
            tma.async_copy_global_to_shared(dy_desc, dy_place, full.index(stage), a.index(stage))
            for i in gl.static_range(TAPS):
                # a tap behind the last is copied like the others, and what comes of it is not stored
                if STRIDE == 2:
                    r, s = (tap + i) // S, (tap + i) % S
                    odd_row, odd_column = (r + TOP) % 2, (s + LEFT) % 2
                    # both differences are even
                    row, column = h + (r - TOP - odd_row) // 2, w + (s - LEFT - odd_column) // 2
                    place = [n, row, odd_row, column, odd_column * C + c]
                elif PHASES == 1:
                    place = [n, h + (tap + i) // S - TOP, w + (tap + i) % S - LEFT, c]
                else:
                    place = [n, h + tap // 8 + (tap + i) // 2 % 2 - 1, w + tap // 4 % 2 + (tap + i) % 2 - 1, c]
                tma.async_copy_global_to_shared(x_desc, place, full.index(stage), b.index(stage * TAPS + i))
            step += 1


@gluon.jit
def _multiply(
    parts_ptr, a, b, full, empty, boxes,
    C: gl.constexpr, K: gl.constexpr, RS: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, TAPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PIXELS: gl.constexpr = a.shape[1] * a.shape[2] * a.shape[-2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_C, 16]
    )
    step = 0
    for unit in range(gl.program_id(0), _units(C, K, RS, PARTS, BLOCK_K, BLOCK_C, TAPS), gl.num_programs(0)):
        k_first, c_first, tap, part, first, last = _share(unit, boxes, C, K, RS, PARTS, BLOCK_K, BLOCK_C, TAPS)
        acc = gl.zeros((BLOCK_K, BLOCK_C), gl.float32, layout)
        second = gl.zeros((BLOCK_K, BLOCK_C), gl.float32, layout)
        for box in range(first, last):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            gradients = a.index(stage).reshape([PIXELS, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(gradients, b.index(stage * TAPS).reshape([PIXELS, BLOCK_C]), acc, is_async=True)
            if TAPS == 2:
                pixels = b.index(stage * TAPS + 1).reshape([PIXELS, BLOCK_C])
                second = warpgroup_mma(gradients, pixels, second, is_async=True)
                acc, second = warpgroup_mma_wait(num_outstanding=2, deps=(acc, second))
            else:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=box > first)
            step += 1
        acc, second = warpgroup_mma_wait(num_outstanding=0, deps=(acc, second))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=last > first)
        k = k_first + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))
        c = c_first + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, layout))
        place = parts_ptr + (part.to(gl.int64) * K * RS + tap) * C + k[:, None] * (RS * C) + c[None, :]
        inside = (k < K)[:, None] & (c < C)[None, :]
        gl.store(place, acc, mask=inside)
        if TAPS == 2:
            gl.store(place + C, second, mask=inside & (tap + 1 < RS))


@triton.jit
def wgrad_parts_kernel(
    parts_ptr, dw_ptr, numel, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """dw = the sum of parts [PARTS, numel] fp32, rounded once; always in the same order, AT_ONCE loaded together."""
    wait_for_predecessor(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < numel)[None, :]
    part = tl.arange(0, AT_ONCE)[:, None]
    total = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        place = parts_ptr + (first + part) * numel.to(tl.int64) + at[None, :]
        total += tl.load(place, mask=inside & (first + part < PARTS), other=0.0)
    tl.store(dw_ptr + at, tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty), mask=at < numel)
