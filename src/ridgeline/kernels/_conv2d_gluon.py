"""The kernel of conv2d_fprop, conv2d_dgrad, conv2d_fp8, and of the same after upsampling, for sm_90.

One warp copies, four or eight multiply.

Written in Gluon, because there wgmma reads both operands from shared memory, as the tensor memory accelerator (TMA)
left them: boxes of pixels, a filter tap being a shift of the box, elements outside the map being zeros. No thread
computes an operand's address or mask. A program takes one output tile after another; the next tile's first boxes arrive
while the present one is stored.

A tensor map of x, y has the axes [N, H, W, C] and of the weight [K, R S, C], C adjacent. With DGRAD "x" is the gradient
of y: the reduction runs over K, and the taps run backward.

With PHASES = 4 the larger map, y or with DGRAD its gradient, has twice the rows and columns of the other, and the axes
[N, H, a: 2, W, b and K: 2 K] for the row 2 h + a and the column 2 w + b. Each phase (a, b) has 2 x 2 taps of its own,
which the weight [K, 16, C] holds one phase after another: see upsample_conv2d.

With STRIDE = 2 the larger map, of the same axes, is x or with DGRAD its gradient, and the weight is as it comes: tap r
of a pixel h of y is row 2 h + r - TOP of x, which lies in the phase that r - TOP is even or odd for.

A residual, a map that is added to y, arrives where the tile of y is put together, while its products are summed. One
more warp brings it and stores the tile, so that none that multiplies waits for the copies.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

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

from ridgeline.kernels._nhwc import wait_for_predecessor


@gluon.jit(do_not_specialize=["x_row", "weight_row"])
def conv2d_gluon_kernel(
    x_desc, weight_desc, y_desc, residual_desc,  # of boxes as y's; None: none
    inverse_ptr, bias_ptr,  # inverse: of the scales of FP8 operands, by row
    x_row, weight_row, images, H, W,  # H, W of y, or of the smaller map
    REDUCED: gl.constexpr, OUT: gl.constexpr,  # channels of x and of y
    R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,  # rows and columns of zeros around x
    DGRAD: gl.constexpr, PHASES: gl.constexpr, STRIDE: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr,  # in which a tile is stored, a power of two
    PDL: gl.constexpr,
):  # fmt: skip
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_type.shape, weight_desc.layout)  # noqa: RUF005
    c = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    if residual_desc is not None:
        # of c: a tile of the residual is there, one of y is there
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(turns.index(0), count=1)
        mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    down = gl.cdiv(H, BOX_H)
    across = gl.cdiv(W, BOX_W)
    OUT_PHASES: gl.constexpr = PHASES if (STRIDE == 2) == DGRAD else 1
    # the other partitions begin when this one lets them
    wait_for_predecessor(PDL)
    tiles = gl.cdiv(images, BOX_N) * down * across * OUT_PHASES * ((OUT + BLOCK_N - 1) // BLOCK_N)
    if residual_desc is None:
        gl.warp_specialize(
            [
                (_multiply, (y_desc, inverse_ptr, bias_ptr, x_row, weight_row, a, b, c, full, empty, None, None, tiles,
                             down, across, REDUCED, OUT, R, S, TOP, LEFT, DGRAD, STRIDE, OUT_PHASES, BLOCK_N, BLOCK_K,
                             STAGES, PIECES)),
                (_copy, (x_desc, weight_desc, a, b, full, empty, tiles, down, across, REDUCED, OUT, R, S, TOP, LEFT,
                         DGRAD, PHASES, STRIDE, OUT_PHASES, BLOCK_N, BLOCK_K, STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (y_desc, inverse_ptr, bias_ptr, x_row, weight_row, a, b, c, full, empty, turns.index(0),
                             turns.index(1), tiles, down, across, REDUCED, OUT, R, S, TOP, LEFT, DGRAD, STRIDE,
                             OUT_PHASES, BLOCK_N, BLOCK_K, STAGES, PIECES)),
                (_copy, (x_desc, weight_desc, a, b, full, empty, tiles, down, across, REDUCED, OUT, R, S, TOP, LEFT,
                         DGRAD, PHASES, STRIDE, OUT_PHASES, BLOCK_N, BLOCK_K, STAGES)),
                (_exchange, (residual_desc, y_desc, c, turns.index(0), turns.index(1), tiles, down, across, OUT,
                             BLOCK_N)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip


@gluon.jit
def _place(
    tile, down, across, OUT: gl.constexpr, STRIDE: gl.constexpr, OUT_PHASES: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """First image, row and column of a tile, its phase and first channel.

    Tiles of the same pixels are neighbours, for the L2.
    """
    CHANNEL_TILES: gl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    box = tile // (CHANNEL_TILES * OUT_PHASES)
    n = box // (down * across) * BOX_N
    phase = tile // CHANNEL_TILES % OUT_PHASES
    first = tile % CHANNEL_TILES * BLOCK_N
    if OUT_PHASES > 1:
        # behind the channels of a phase lie those of its neighbour: the last tile computes some of the one before again
        first = gl.minimum(first, OUT - BLOCK_N)
        if STRIDE == 2:
            # phases have unequal numbers of taps: a program, whose tiles lie equally far apart, gets some of each
            phase = (phase + box) & (OUT_PHASES - 1)
    return n, box // across % down * BOX_H, box % across * BOX_W, phase, first


@gluon.jit
def _phase_taps(odd, SIZE: gl.constexpr, ZEROS: gl.constexpr):
    """With stride 2, how many rows (columns) of a filter meet an even or an odd one of x: every second."""
    return (SIZE + 1 - ((odd + ZEROS) & 1)) >> 1


@gluon.jit
def _copy(
    x_desc, weight_desc, a, b, full, empty, tiles, down, across,
    REDUCED: gl.constexpr, OUT: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    DGRAD: gl.constexpr, PHASES: gl.constexpr, STRIDE: gl.constexpr, OUT_PHASES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (REDUCED + BLOCK_K - 1) // BLOCK_K
    box: gl.constexpr = x_desc.block_type.shape
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, h, w, phase, first = _place(tile, down, across, OUT, STRIDE, OUT_PHASES, box[0], box[1], box[-2], BLOCK_N)
        taps = R * S
        if STRIDE == 2 and DGRAD:
            odd_row, odd_column = phase >> 1, phase & 1
            taps_across = _phase_taps(odd_column, S, LEFT)
            taps = _phase_taps(odd_row, R, TOP) * taps_across
        for tap in range(taps):
            for block in range(BLOCKS):
                stage = step % STAGES
                # passes at once in the first round: the barrier's phase before its first is done by definition
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
                if STRIDE == 2 and DGRAD:
                    r = ((odd_row + TOP) & 1) + tap // taps_across * 2
                    s = ((odd_column + LEFT) & 1) + tap % taps_across * 2
                    # both differences are even
                    row, column = h + ((odd_row + TOP - r) >> 1), w + ((odd_column + LEFT - s) >> 1)
                    x_place = [n, row, column, block * BLOCK_K]
                elif STRIDE == 2:
                    odd_row, odd_column = (tap // S + TOP) % 2, (tap % S + LEFT) % 2
                    # both differences are even
                    row, column = h + (tap // S - TOP - odd_row) // 2, w + (tap % S - LEFT - odd_column) // 2
                    x_place = [n, row, odd_row, column, odd_column * REDUCED + block * BLOCK_K]
                elif PHASES == 1:
                    x_place = [n, h + tap // S - TOP, w + tap % S - LEFT, block * BLOCK_K]
                elif DGRAD:
                    # the taps of the last phase come first, and backward
                    row, column = h + tap // 8 + tap // 2 % 2 - 1, w + tap // 4 % 2 + tap % 2 - 1
                    x_place = [n, row, 1 - tap // 8, column, (1 - tap // 4 % 2) * REDUCED + block * BLOCK_K]
                else:
                    x_place = [n, h + phase // 2 + tap // 2 - 1, w + phase % 2 + tap % 2 - 1, block * BLOCK_K]
                tma.async_copy_global_to_shared(x_desc, x_place, full.index(stage), a.index(stage))
                if STRIDE == 2 and DGRAD:
                    place = [block * BLOCK_K, r * S + s, first]
                elif DGRAD:
                    place = [block * BLOCK_K, R * S - 1 - tap, first]
                else:
                    place = [first, phase * (R * S) + tap, block * BLOCK_K]
                tma.async_copy_global_to_shared(weight_desc, place, full.index(stage), b.index(stage))
                step += 1


@gluon.jit
def _exchange(
    residual_desc, y_desc, c, added, made, tiles, down, across, OUT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Bring every tile of the residual into c, and take that of y from there."""
    box: gl.constexpr = y_desc.block_type.shape
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, h, w, _, first = _place(tile, down, across, OUT, 1, 1, box[0], box[1], box[2], BLOCK_N)
        mbarrier.expect(added, residual_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(residual_desc, [n, h, w, first], added, c)
        mbarrier.wait(made, turn)
        tma.async_copy_shared_to_global(y_desc, [n, h, w, first], c)
        # the next tile of the residual overwrites what this copy reads
        tma.store_wait(0)
        turn ^= 1


@gluon.jit
def _multiply(
    y_desc, inverse_ptr, bias_ptr, x_row, weight_row, a, b, c, full, empty, added, made, tiles, down, across,
    REDUCED: gl.constexpr, OUT: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    DGRAD: gl.constexpr, STRIDE: gl.constexpr, OUT_PHASES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (REDUCED + BLOCK_K - 1) // BLOCK_K
    box: gl.constexpr = y_desc.block_type.shape
    BLOCK_M: gl.constexpr = box[0] * box[1] * box[-2]
    # an instruction reduces over 32 bytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 256 // a.dtype.primitive_bitwidth]
    )
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, h, w, phase, first = _place(tile, down, across, OUT, STRIDE, OUT_PHASES, box[0], box[1], box[-2], BLOCK_N)
        steps = R * S * BLOCKS
        if STRIDE == 2 and DGRAD:
            # none in a phase that no tap meets: it is stored as zeros
            steps = _phase_taps(phase >> 1, R, TOP) * _phase_taps(phase & 1, S, LEFT) * BLOCKS
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            pixels = a.index(stage).reshape([BLOCK_M, BLOCK_K])
            if DGRAD:
                weights = b.index(stage).reshape([BLOCK_K, BLOCK_N])
            else:
                weights = b.index(stage).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(pixels, weights, acc, is_async=True)
            # one product stays in flight; what the one before it read may be overwritten
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        if inverse_ptr is not None:
            acc *= gl.load(inverse_ptr + x_row) * gl.load(inverse_ptr + weight_row)
        if bias_ptr is not None:
            channel = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + channel, mask=channel < OUT, other=0.0).to(gl.float32)
            acc += bias[None, :]
        if OUT_PHASES > 1:
            first += phase % 2 * OUT
        if added is not None:
            tile_of_y = c.reshape([BLOCK_M, BLOCK_N])
            mbarrier.wait(added, turn)
            acc += tile_of_y.load(layout).to(gl.float32)
            tile_of_y.store(acc.to(c.dtype))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(made, count=1)
            turn ^= 1
        else:
            _store(y_desc, c, acc.to(c.dtype), n, h, phase // 2, w, first, OUT_PHASES, BLOCK_M, BLOCK_N, PIECES)
    tma.store_wait(0)


@gluon.jit
def _store(
    y_desc, c, y, n, h, half, w, first, OUT_PHASES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Through shared memory, in pieces of the channels; what lies beyond the map is not stored."""
    if PIECES == 1:
        # the copy before this one may still read
        tma.store_wait(0)
        gl.thread_barrier()
        c.reshape([BLOCK_M, BLOCK_N]).store(y)
        fence_async_shared()
        gl.thread_barrier()
        place = [n, h, w, first] if OUT_PHASES == 1 else [n, h, half, w, first]
        tma.async_copy_shared_to_global(y_desc, place, c)
    else:
        low, high = gl.split(y.reshape([BLOCK_M, 2, BLOCK_N // 2]).permute((0, 2, 1)))
        _store(y_desc, c, low, n, h, half, w, first, OUT_PHASES, BLOCK_M, BLOCK_N // 2, PIECES // 2)
        first += BLOCK_N // 2
        _store(y_desc, c, high, n, h, half, w, first, OUT_PHASES, BLOCK_M, BLOCK_N // 2, PIECES // 2)
