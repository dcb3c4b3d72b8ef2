"""The kernel of conv2d_wgrad_fp8 on sm_90: products of words of four rows, whose sums another kernel adds.

Both operands are quads (see _quads): wgmma wants what is reduced adjacent in FP8, and a row of quads is 128 bytes of
pixels, whose neighbours to the left and right are 16 bytes away. As in _conv2d_gluon one warp copies while others
multiply. A program holds [K, C] of the taps of one filter column, for its part of the images. It walks down the rows of
a group of images: each row of x is copied once, and meets the gradient's rows above, beside and below it from shared
memory.

The tensor cores' own sums keep some 14 bits. If PROMOTED they are added in fp32 after every SPAN rows of quads.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels._conv2d_wgrad_gluon import _share, _units
from ridgeline.kernels._nhwc import wait_for_predecessor


@gluon.jit
def conv2d_wgrad_fp8_kernel(
    x_desc, dy_desc, parts_ptr,  # parts [PARTS, K, R, S, C] fp32
    images, across,  # across: boxes in a row
    C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr, QUARTER: gl.constexpr, PARTS: gl.constexpr,
    BOX_N: gl.constexpr, BOX_W: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr,
    X_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, SPAN: gl.constexpr, PROMOTED: gl.constexpr, HELD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    # a box of dy is what one group of warps multiplies
    GROUPS: gl.constexpr = BLOCK_K // dy_desc.block_type.shape[2]
    a_shape: gl.constexpr = [DY_STAGES * GROUPS] + dy_desc.block_type.shape  # noqa: RUF005
    a = gl.allocate_shared_memory(dy_desc.dtype, a_shape, dy_desc.layout)
    b = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    dy_full = gl.allocate_shared_memory(gl.int64, [DY_STAGES, 1], mbarrier.MBarrierLayout())
    dy_empty = gl.allocate_shared_memory(gl.int64, [DY_STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(DY_STAGES):
        mbarrier.init(dy_full.index(stage), count=1)
        mbarrier.init(dy_empty.index(stage), count=GROUPS)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(x_empty.index(stage), count=GROUPS)
    fence_async_shared()
    boxes = gl.cdiv(images, BOX_N) * across
    rings = (a, b, dy_full, dy_empty, x_full, x_empty)
    # the other partitions begin when this one lets them
    wait_for_predecessor(PDL)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (parts_ptr, rings, boxes, C, K, R, S, QUARTER, PARTS, BLOCK_K, BLOCK_C, X_STAGES, SPAN,
                             PROMOTED, HELD, 0)),
                (_copy, (x_desc, dy_desc, rings, boxes, across, C, K, R, S, QUARTER, PARTS, BOX_N, BOX_W, BLOCK_K,
                         BLOCK_C, X_STAGES, DY_STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        # while one group adds what it has multiplied, the tensor cores are the other's
        gl.warp_specialize(
            [
                (_multiply, (parts_ptr, rings, boxes, C, K, R, S, QUARTER, PARTS, BLOCK_K, BLOCK_C, X_STAGES, SPAN,
                             PROMOTED, HELD, 0)),
                (_multiply, (parts_ptr, rings, boxes, C, K, R, S, QUARTER, PARTS, BLOCK_K, BLOCK_C, X_STAGES, SPAN,
                             PROMOTED, HELD, 1)),
                (_copy, (x_desc, dy_desc, rings, boxes, across, C, K, R, S, QUARTER, PARTS, BOX_N, BOX_W, BLOCK_K,
                         BLOCK_C, X_STAGES, DY_STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, dy_desc, rings, boxes, across,
    C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr, QUARTER: gl.constexpr, PARTS: gl.constexpr,
    BOX_N: gl.constexpr, BOX_W: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr,
    X_STAGES: gl.constexpr, DY_STAGES: gl.constexpr,
):  # fmt: skip
    a, b, dy_full, dy_empty, x_full, x_empty = rings
    GROUPS: gl.constexpr = a.shape[0] // DY_STAGES
    x_step = 0
    dy_step = 0
    for unit in range(gl.program_id(0), _units(C, K, S, PARTS, BLOCK_K, BLOCK_C, 1), gl.num_programs(0)):
        k, c, column, _, first, last = _share(unit, boxes, C, K, S, PARTS, BLOCK_K, BLOCK_C, 1)
        for box in range(first, last):
            n = box // across * BOX_N
            w = box % across * BOX_W
            for row in range(QUARTER + R - 1):
                stage = x_step % X_STAGES
                # passes at once in the first round: the barrier's phase before its first is done by definition
                mbarrier.wait(x_empty.index(stage), ((x_step // X_STAGES) & 1) ^ 1)
                mbarrier.expect(x_full.index(stage), x_desc.block_type.nbytes)
                # row 0 of quads is the one above the map, and the first that three rows of taps meet
                place = [n, row + 1 - R // 2, c, w + 4 * (1 + column - S // 2)]
                tma.async_copy_global_to_shared(x_desc, place, x_full.index(stage), b.index(stage))
                x_step += 1
                if row >= R - 1:
                    stage = dy_step % DY_STAGES
                    mbarrier.wait(dy_empty.index(stage), ((dy_step // DY_STAGES) & 1) ^ 1)
                    mbarrier.expect(dy_full.index(stage), GROUPS * dy_desc.block_type.nbytes)
                    for group in gl.static_range(GROUPS):
                        place = [n, row + 1 - R, k + group * (BLOCK_K // GROUPS), w]
                        box_of_dy = a.index(stage * GROUPS + group)
                        tma.async_copy_global_to_shared(dy_desc, place, dy_full.index(stage), box_of_dy)
                    dy_step += 1


@gluon.jit
def _multiply(
    parts_ptr, rings, boxes,
    C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr, QUARTER: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, X_STAGES: gl.constexpr, SPAN: gl.constexpr,
    PROMOTED: gl.constexpr, HELD: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What the boxes of dy of one group of warps give."""
    x_full, x_empty = rings[4], rings[5]
    ROWS: gl.constexpr = rings[0].shape[3]  # of the tile
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_C, 32]
    )
    x_step = 0
    dy_step = 0
    for unit in range(gl.program_id(0), _units(C, K, S, PARTS, BLOCK_K, BLOCK_C, 1), gl.num_programs(0)):
        k_first, c_first, column, part, first, last = _share(unit, boxes, C, K, S, PARTS, BLOCK_K, BLOCK_C, 1)
        total = _zeros(R, ROWS, BLOCK_C, layout)
        acc = _zeros(R, ROWS, BLOCK_C, layout)
        for _ in range(first, last):
            for row in gl.static_range(R - 1):
                mbarrier.wait(x_full.index((x_step + row) % X_STAGES), ((x_step + row) // X_STAGES) & 1)
            # a loop that the compiler does not unroll: it would keep the sums of all spans, to add them at the end
            for _ in range(QUARTER // SPAN):
                for row in gl.static_range(SPAN):
                    acc = _row(
                        acc, rings, layout, x_step, dy_step, row, R, SPAN, BLOCK_K, BLOCK_C, PROMOTED, HELD, GROUP
                    )
                    x_step += 1
                    dy_step += 1
                if PROMOTED:
                    total = _add(total, acc)
            for row in gl.static_range(R - 1):
                mbarrier.arrive(x_empty.index((x_step + row) % X_STAGES), count=1)
            x_step += R - 1
        if not PROMOTED:
            total = acc
        k = k_first + GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        c = c_first + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, layout))
        place = parts_ptr + part.to(gl.int64) * (K * R * S * C) + column * C + k[:, None] * (R * S * C) + c[None, :]
        inside = (k < K)[:, None] & (c < C)[None, :]
        for r in gl.static_range(R):
            gl.store(place + r * (S * C), total[r], mask=inside)


@gluon.jit
def _row(
    acc, rings, layout: gl.constexpr, x_step, dy_step, row: gl.constexpr,
    R: gl.constexpr, SPAN: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, PROMOTED: gl.constexpr,
    HELD: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """`acc` with the products of one row of the gradient and the R rows of x that it meets; anew from row 0 if
    PROMOTED.
    """
    a, b, dy_full, dy_empty, x_full, x_empty = rings
    ROWS: gl.constexpr = a.shape[3]
    GROUPS: gl.constexpr = BLOCK_K // ROWS
    X_STAGES: gl.constexpr = b.shape[0]
    DY_STAGES: gl.constexpr = a.shape[0] // GROUPS
    FIRST: gl.constexpr = row == 0  # no product is in flight
    LAST: gl.constexpr = row == SPAN - 1  # none may be afterwards
    newest = x_step + R - 1
    mbarrier.wait(x_full.index(newest % X_STAGES), (newest // X_STAGES) & 1)
    mbarrier.wait(dy_full.index(dy_step % DY_STAGES), (dy_step // DY_STAGES) & 1)
    gradients = _as_fp8(a.index(dy_step % DY_STAGES * GROUPS + GROUP), gl.float8e5, ROWS)
    if HELD:
        # read once for all taps, not once for each: half of what products of 64 channels read is dy
        gradients = gradients.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=4))
    sums = ()
    for r in gl.static_range(R):
        pixels = _as_fp8(b.index((x_step + r) % X_STAGES), gl.float8e4nv, BLOCK_C).permute((1, 0))
        one = warpgroup_mma(gradients, pixels, acc[r], use_acc=not (PROMOTED and FIRST), is_async=True)
        sums = sums + (one,)  # noqa: RUF005 - Triton cannot unpack
    sums = _wait(sums, 0 if LAST else R)
    if not FIRST:
        # what the row before has read may be overwritten
        mbarrier.arrive(x_empty.index((x_step + X_STAGES - 1) % X_STAGES), count=1)
        mbarrier.arrive(dy_empty.index((dy_step + DY_STAGES - 1) % DY_STAGES), count=1)
    if LAST:
        mbarrier.arrive(x_empty.index(x_step % X_STAGES), count=1)
        mbarrier.arrive(dy_empty.index(dy_step % DY_STAGES), count=1)
    return sums


@gluon.jit
def _zeros(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(COUNT):
        zeros = zeros + (gl.zeros((ROWS, COLUMNS), gl.float32, layout),)  # noqa: RUF005 - Triton cannot unpack
    return zeros


@gluon.jit
def _add(a, b):
    sums = ()
    for i in gl.static_range(len(a)):
        sums = sums + (a[i] + b[i],)  # noqa: RUF005 - Triton cannot unpack
    return sums


@gluon.jit
def _wait(sums, OUTSTANDING: gl.constexpr):
    if len(sums) == 1:
        done = (warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(sums[0],)),)
    else:
        done = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=sums)
    return done


@gluon.jit
def _as_fp8(box, dtype: gl.constexpr, BLOCK: gl.constexpr):
    """A copied box of words, [images, 1, BLOCK, words], as an operand [BLOCK, bytes]."""
    IMAGES: gl.constexpr = box.shape[0]
    BYTES: gl.constexpr = 4 * box.shape[3]
    return box._reinterpret(dtype, [BLOCK, IMAGES * BYTES], _operand_layout(BLOCK, BYTES))


@gluon.constexpr_function
def _operand_layout(rows, inner):
    """Of [rows, 128 bytes] that are planes [rows, inner bytes], one after the other."""
    if inner > 16:
        return gl.NVMMASharedLayout(swizzle_byte_width=inner, element_bitwidth=8, rank=2)
    # 16 bytes are not swizzled
    columns = [[0, 1 << bit] for bit in range(7)]
    return gl.SharedLinearLayout(columns[:4] + [[1 << bit, 0] for bit in range(rows.bit_length() - 1)] + columns[4:])
