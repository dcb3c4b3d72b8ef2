"""The kernel of conv2d_act for sm_90 in which one warp copies boxes and four or eight others multiply.

As in _conv2d_gluon wgmma reads both operands from shared memory, as the tensor memory accelerator (TMA) left them. Here
a network of batch 1 sets the terms. A program takes half of a multiprocessor's registers where it can, so that two
share one: the second multiplies, or begins the next kernel, while the first stores. With programmatic dependent launch
the first weights, which no kernel writes, are copied before the wait for the predecessor, and the tensor maps fetched.
The copying warp alone lets the dependent in, behind its last copy: of a program the first warp to do so counts.
With SPLIT several programs share the reduction of a tile, and `sum_parts_kernel` adds what they found.

A tensor map of x, residual and y has the axes [N, H, W, C], of the weight [K, R S, C], of parts [SPLIT, N, H, W, K].
Where the convolution is a product of matrices (1x1), all pixels are one row of one image.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import builtin

from ridgeline.kernels._nhwc import activate, let_dependent_in, wait_holding_dependent


@builtin
def limit_registers(count: Any, _semantic: Any = None, _generator: Any = None) -> None:
    """The registers a thread that the kernel starts with; Triton divides all of a multiprocessor's otherwise.

    Triton 3.6 heeds its option `maxnreg` in Triton's kernels alone, so this sets the attribute that it becomes there.
    """
    _generator.module.set_attr("ttg.maxnreg", _semantic.builder.get_int32_attr(count.value))


@gluon.jit
def conv2d_act_gluon_kernel(
    x_desc, weight_desc, residual_desc, y_desc, bias_ptr,
    images,
    C: gl.constexpr, K: gl.constexpr, R: gl.constexpr, S: gl.constexpr, HO: gl.constexpr, WO: gl.constexpr,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr,
    SPLIT: gl.constexpr,  # programs a tile; above 1 y_desc is the map of their sums in fp32
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    if gl.num_warps() == 4 and BLOCK_N < 256:
        # half of a multiprocessor's: what the copying warps give back makes 232 of them for those that multiply, but an
        # instruction of 256 columns must find its registers in the 128
        limit_registers(128)
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BOX_N, BOX_H, BOX_W, BLOCK_K], x_desc.layout)
    b = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, 1, BLOCK_K], weight_desc.layout)
    c = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)  # the residual, in c
    fetched = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)  # the tensor maps
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(fetched, count=1)
    fence_async_shared()
    tiles = gl.cdiv(images, BOX_N) * _boxes(HO, WO, BOX_H, BOX_W) * ((K + BLOCK_N - 1) // BLOCK_N)
    STEPS: gl.constexpr = R * S * ((C + BLOCK_K - 1) // BLOCK_K)
    gl.warp_specialize(
        [
            (_multiply, (residual_desc, y_desc, bias_ptr, a, b, c, full, empty, ready, fetched, tiles, K, HO, WO, ACT,
                         PDL, SPLIT, BOX_N, BOX_H, BOX_W, BLOCK_N, BLOCK_K, STEPS, STAGES)),
            (_copy, (x_desc, weight_desc, residual_desc, y_desc, a, b, c, full, empty, fetched, tiles, images, C, K, S,
                     HO, WO, PAD_H, PAD_W, PDL, SPLIT, BOX_N, BOX_H, BOX_W, BLOCK_N, BLOCK_K, STEPS, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _boxes(HO: gl.constexpr, WO: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr):
    """Of an image."""
    count: gl.constexpr = ((HO + BOX_H - 1) // BOX_H) * ((WO + BOX_W - 1) // BOX_W)
    return count


@gluon.jit
def _share(
    unit, tiles,
    K: gl.constexpr, HO: gl.constexpr, WO: gl.constexpr, SPLIT: gl.constexpr, STEPS: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """First image, row, column and channel of a unit of work, its part of the reduction, first step and step behind it.

    Tiles of the same pixels are neighbours, for the L2; the parts of a tile are far apart.
    """
    CHANNEL_TILES: gl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    ACROSS: gl.constexpr = (WO + BOX_W - 1) // BOX_W
    BOXES: gl.constexpr = _boxes(HO, WO, BOX_H, BOX_W)
    PART: gl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    part = unit // tiles
    tile = unit % tiles
    box = tile // CHANNEL_TILES
    n = box // BOXES * BOX_N
    h = box % BOXES // ACROSS * BOX_H
    w = box % ACROSS * BOX_W
    return n, h, w, tile % CHANNEL_TILES * BLOCK_N, part, part * PART, gl.minimum(part * PART + PART, STEPS)


@gluon.jit
def _copy(
    x_desc, weight_desc, residual_desc, y_desc, a, b, c, full, empty, fetched, tiles, images,
    C: gl.constexpr, K: gl.constexpr, S: gl.constexpr, HO: gl.constexpr, WO: gl.constexpr,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, PDL: gl.constexpr, SPLIT: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (C + BLOCK_K - 1) // BLOCK_K  # of a tap
    BYTES: gl.constexpr = x_desc.block_type.nbytes + weight_desc.block_type.nbytes
    ahead = 0
    if PDL:
        _, _, _, channel, _, first, last = _share(
            gl.program_id(0), tiles, K, HO, WO, SPLIT, STEPS, BOX_N, BOX_H, BOX_W, BLOCK_N
        )
        ahead = gl.minimum(last - first, STAGES)
        for step in range(0, ahead):
            k = first + step
            mbarrier.expect(full.index(step), BYTES)
            place = [channel, k // BLOCKS, k % BLOCKS * BLOCK_K]
            tma.async_copy_global_to_shared(weight_desc, place, full.index(step), b.index(step))
        _fetch_maps(x_desc, residual_desc, y_desc, a.index(0), c, fetched, images, SPLIT)
    wait_holding_dependent(PDL)
    step = 0
    for unit in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        n, h, w, channel, _, first, last = _share(unit, tiles, K, HO, WO, SPLIT, STEPS, BOX_N, BOX_H, BOX_W, BLOCK_N)
        for k in range(first, last):
            tap = k // BLOCKS
            reduced = k % BLOCKS * BLOCK_K
            stage = step % STAGES
            if step >= ahead:
                # passes at once in the first round: the barrier's phase before its first is done by definition
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), BYTES)
                place = [channel, tap, reduced]
                tma.async_copy_global_to_shared(weight_desc, place, full.index(stage), b.index(stage))
            place = [n, h + tap // S - PAD_H, w + tap % S - PAD_W, reduced]
            tma.async_copy_global_to_shared(x_desc, place, full.index(stage), a.index(stage))
            step += 1
    let_dependent_in(PDL)


@gluon.jit
def _fetch_maps(x_desc, residual_desc, y_desc, x, y, fetched, images, SPLIT: gl.constexpr):
    """Use each tensor map once, for a box beyond the last image, which reads no memory and is zeros."""
    MAPS: gl.constexpr = 1 if residual_desc is None else 2
    mbarrier.expect(fetched, x_desc.block_type.nbytes + MAPS * y_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [images, 0, 0, 0], fetched, x)
    if residual_desc is not None:
        tma.async_copy_global_to_shared(residual_desc, [images, 0, 0, 0], fetched, y)
    if SPLIT == 1:  # noqa: SIM108 - a branch of the compiler's, not of the program's
        place = [images, 0, 0, 0]
    else:
        place = [SPLIT, 0, 0, 0, 0]
    tma.async_copy_global_to_shared(y_desc, place, fetched, y)
    mbarrier.wait(fetched, 0)


@gluon.jit
def _multiply(
    residual_desc, y_desc, bias_ptr, a, b, c, full, empty, ready, fetched, tiles,
    K: gl.constexpr, HO: gl.constexpr, WO: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr, SPLIT: gl.constexpr,
    BOX_N: gl.constexpr, BOX_H: gl.constexpr, BOX_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = BOX_N * BOX_H * BOX_W
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    # a product of less than 256 clocks is over before the next one is issued, so that two of them have to be waiting
    IN_FLIGHT: gl.constexpr = 1 if BLOCK_M * BLOCK_N * BLOCK_K >= 64 * 128 * 64 else 2
    if PDL:
        mbarrier.wait(fetched, 0)
    wait_holding_dependent(PDL)
    step = 0
    phase = 0
    for unit in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        n, h, w, channel, part, first, last = _share(unit, tiles, K, HO, WO, SPLIT, STEPS, BOX_N, BOX_H, BOX_W, BLOCK_N)
        if residual_desc is not None:
            # into the buffer of y, which the copy of the tile before may still read
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.expect(ready, residual_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(residual_desc, [n, h, w, channel], ready, c)
        if bias_ptr is not None:
            column = channel + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + column, mask=column < K, other=0.0).to(gl.float32)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for k in range(first, last):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            pixels = a.index(stage).reshape([BLOCK_M, BLOCK_K])
            weights = b.index(stage).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(pixels, weights, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=IN_FLIGHT, deps=(acc,))
            # what the product before those in flight read may be overwritten
            mbarrier.arrive(empty.index((step + STAGES - IN_FLIGHT) % STAGES), count=1, pred=k >= first + IN_FLIGHT)
            step += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        for i in gl.static_range(IN_FLIGHT):
            left = IN_FLIGHT - i
            mbarrier.arrive(empty.index((step + STAGES - left) % STAGES), count=1, pred=last - first >= left)
        if bias_ptr is not None:
            acc += bias[None, :]
        acc = activate(acc, ACT)
        tile = c.reshape([BLOCK_M, BLOCK_N])
        if residual_desc is not None:
            mbarrier.wait(ready, phase)
            phase ^= 1
            acc += tile.load(layout).to(gl.float32)
        else:
            tma.store_wait(0)
        gl.thread_barrier()
        tile.store(acc.to(c.dtype))
        fence_async_shared()
        gl.thread_barrier()
        if SPLIT == 1:  # noqa: SIM108 - a branch of the compiler's, not of the program's
            place = [n, h, w, channel]
        else:
            place = [part, n, h, w, channel]
        tma.async_copy_shared_to_global(y_desc, place, c)
    tma.store_wait(0)
