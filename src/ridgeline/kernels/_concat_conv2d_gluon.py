"""The kernels of convolutions of two maps whose channels stand side by side: forward and both gradients, for sm_90.

They are those of _conv2d_gluon and _conv2d_wgrad_gluon but for whoever copies: it takes a box of channels from the map,
or stores a tile in the one, that they are of. No box or tile has channels of both. What multiplies is the same, in the
same order, and so are its sums.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ridgeline.kernels._conv2d_gluon import _multiply, _place
from ridgeline.kernels._conv2d_wgrad_gluon import _multiply as _reduce_pixels
from ridgeline.kernels._conv2d_wgrad_gluon import _share, _units
from ridgeline.kernels._nhwc import wait_for_predecessor


@gluon.jit
def concat_conv2d_kernel(
    x1_desc, x2_desc, weight_desc, y_desc, bias_ptr, images, H, W,
    C1: gl.constexpr, REDUCED: gl.constexpr, OUT: gl.constexpr,  # channels of x1, of both, of y
    R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y of both maps."""
    a = gl.allocate_shared_memory(x1_desc.dtype, [STAGES] + x1_desc.block_type.shape, x1_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_type.shape, weight_desc.layout)  # noqa: RUF005
    c = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    down = gl.cdiv(H, BOX_H)
    across = gl.cdiv(W, BOX_W)
    # the other partition begins when this one lets it
    wait_for_predecessor(PDL)
    tiles = gl.cdiv(images, BOX_N) * down * across * ((OUT + BLOCK_N - 1) // BLOCK_N)
    gl.warp_specialize(
        [
            (_multiply, (y_desc, None, bias_ptr, None, None, a, b, c, full, empty, None, None, tiles, down, across,
                         REDUCED, OUT, R, S, TOP, LEFT, False, 1, 1, BLOCK_N, BLOCK_K, STAGES, PIECES)),
            (_copy_from_both, (x1_desc, x2_desc, weight_desc, a, b, full, empty, tiles, down, across, C1, REDUCED, OUT,
                               R, S, TOP, LEFT, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _copy_from_both(
    x1_desc, x2_desc, weight_desc, a, b, full, empty, tiles, down, across,
    C1: gl.constexpr, REDUCED: gl.constexpr, OUT: gl.constexpr,
    R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (REDUCED + BLOCK_K - 1) // BLOCK_K
    OF_FIRST: gl.constexpr = C1 // BLOCK_K
    box: gl.constexpr = x1_desc.block_type.shape
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, h, w, _, first = _place(tile, down, across, OUT, 1, 1, box[0], box[1], box[2], BLOCK_N)
        for tap in range(R * S):
            for block in range(BLOCKS):
                stage = step % STAGES
                # passes at once in the first round: the barrier's phase before its first is done by definition
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), x1_desc.block_type.nbytes + weight_desc.block_type.nbytes)
                row, column = h + tap // S - TOP, w + tap % S - LEFT
                if block < OF_FIRST:
                    x_place = [n, row, column, block * BLOCK_K]
                    tma.async_copy_global_to_shared(x1_desc, x_place, full.index(stage), a.index(stage))
                else:
                    x_place = [n, row, column, (block - OF_FIRST) * BLOCK_K]
                    tma.async_copy_global_to_shared(x2_desc, x_place, full.index(stage), a.index(stage))
                place = [first, tap, block * BLOCK_K]
                tma.async_copy_global_to_shared(weight_desc, place, full.index(stage), b.index(stage))
                step += 1


@gluon.jit
def concat_conv2d_wgrad_kernel(
    x1_desc, x2_desc, dy_desc, parts_ptr,  # parts [PARTS, K, R S, C] fp32
    images, H, W,
    C1: gl.constexpr, C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    TOP: gl.constexpr, LEFT: gl.constexpr, PARTS: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr,
    TAPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """dw of both maps' channels, for parts of the pixels."""
    a = gl.allocate_shared_memory(dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(x1_desc.dtype, [STAGES * TAPS] + x1_desc.block_type.shape, x1_desc.layout)  # noqa: RUF005
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
            (_reduce_pixels, (parts_ptr, a, b, full, empty, boxes, C, K, R * S, PARTS, BLOCK_K, BLOCK_C, TAPS, STAGES)),
            (_copy_pixels, (x1_desc, x2_desc, dy_desc, a, b, full, empty, boxes, down, across, C1, C, K, R, S, TOP,
                            LEFT, PARTS, BLOCK_K, BLOCK_C, TAPS, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _copy_pixels(
    x1_desc, x2_desc, dy_desc, a, b, full, empty, boxes, down, across,
    C1: gl.constexpr, C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
    TOP: gl.constexpr, LEFT: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_C: gl.constexpr, TAPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    size: gl.constexpr = x1_desc.block_type.shape
    step = 0
    for unit in range(gl.program_id(0), _units(C, K, R * S, PARTS, BLOCK_K, BLOCK_C, TAPS), gl.num_programs(0)):
        k, c, tap, _, first, last = _share(unit, boxes, C, K, R * S, PARTS, BLOCK_K, BLOCK_C, TAPS)
        for box in range(first, last):
            n = box // (down * across) * size[0]
            h = box // across % down * size[1]
            w = box % across * size[2]
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), dy_desc.block_type.nbytes + TAPS * x1_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(dy_desc, [n, h, w, k], full.index(stage), a.index(stage))
            for i in gl.static_range(TAPS):
                # a tap behind the last is copied like the others, and what comes of it is not stored
                row, column = h + (tap + i) // S - TOP, w + (tap + i) % S - LEFT
                if c < C1:
                    place = [n, row, column, c]
                    tma.async_copy_global_to_shared(x1_desc, place, full.index(stage), b.index(stage * TAPS + i))
                else:
                    place = [n, row, column, c - C1]
                    tma.async_copy_global_to_shared(x2_desc, place, full.index(stage), b.index(stage * TAPS + i))
            step += 1
