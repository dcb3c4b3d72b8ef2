"""The kernel of grad_norm: squares of all elements of many tensors, one sum a program, all sums by the last program.

Tensors are reached through a table of addresses (int64 made pointers), so that one launch serves any number of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor

# Columns of the table, one row a chunk: which tensor, which of its chunks, how many elements.
CHUNKS = ("tensor", "chunk", "count", "")
# What an address says beside itself: no tensor begins at an odd byte, and none so high.
NARROW = 1  # 16 bits an element: bf16, or with
HALF = 1 << 62  # fp16

_CHUNKS = tl.constexpr(len(CHUNKS))
_HALF = tl.constexpr(HALF)
_ADDRESS = tl.constexpr(HALF - 1 - NARROW)
_EDGE = tl.constexpr(8)  # elements outside of whole 16 bytes: fewer than that at either end


@triton.jit
def grad_norm_kernel(
    chunks_ptr, addresses_ptr, partials_ptr, finished_ptr, norm_ptr, chunks,
    PARTIALS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every so many chunks by one program. Each program has one at least, and adds in an order of its own alone."""
    wait_for_predecessor(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK // 2)
    sums = tl.zeros((BLOCK // 2,), tl.float32)
    edges = tl.zeros((2 * _EDGE,), tl.float32)
    tagged, first, count = _place(chunks_ptr, addresses_ptr, program, BLOCK)
    for chunk in range(program, chunks, programs):
        narrow = (tagged & 1).to(tl.int32)
        item = 4 - 2 * narrow
        begin = (tagged & _ADDRESS) + first * item
        end = begin + count * item
        # whole 16 bytes, as words of 32 bits: accesses are as wide whatever the elements are
        body = (begin + 15) & -16
        units = (((end & -16) - body) >> 4).to(tl.int32)  # -1 where begin and end lie within the same 16 bytes
        words_ptr = tl.multiple_of(body.to(tl.pointer_type(tl.int32)), 16) + i
        words = tl.load(words_ptr, mask=i // 4 < units, other=0)
        # of fp32 alone
        more = tl.load(words_ptr + BLOCK // 2, mask=i // 4 < units - BLOCK // 8, other=0)
        # where the next chunk lies is read while these words are on their way
        following = tl.minimum(chunk + programs, chunks - 1)
        next_tagged, next_first, next_count = _place(chunks_ptr, addresses_ptr, following, BLOCK)
        if narrow == 0:
            sums = _add_square(sums, words.to(tl.float32, bitcast=True))
            sums = _add_square(sums, more.to(tl.float32, bitcast=True))
        elif tagged < _HALF:
            sums = _add_square(sums, (words << 16).to(tl.float32, bitcast=True))
            sums = _add_square(sums, (words & -65536).to(tl.float32, bitcast=True))
        else:
            sums = _add_square(sums, words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
            sums = _add_square(sums, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
        if ((begin | end) & 15) != 0:
            edges = _add_square(edges, _load_edges(begin, body, end, item, tagged >= _HALF))
        tagged, first, count = next_tagged, next_first, next_count

    tl.store(partials_ptr + program, tl.sum(sums) + tl.sum(edges))
    # releases the sum above, and acquires those of the programs counted before
    tl.debug_barrier()
    finished = tl.atomic_add(finished_ptr, 1, sem="acq_rel", scope="gpu")
    if finished == programs - 1:
        p = tl.arange(0, PARTIALS)
        # past the L1 cache, which knows nothing of other multiprocessors' stores
        partials = tl.load(partials_ptr + p, mask=p < programs, other=0.0, cache_modifier=".cg")
        tl.store(norm_ptr, tl.sqrt_rn(tl.sum(partials.to(tl.float64)).to(tl.float32)))
        tl.store(finished_ptr, 0)  # for the next launch


@triton.jit
def _place(chunks_ptr, addresses_ptr, chunk, BLOCK: tl.constexpr):
    """Of a chunk: the address of its tensor with what that says, its first element there (int64), its elements."""
    row = chunks_ptr + chunk.to(tl.int64) * _CHUNKS
    tagged = tl.load(addresses_ptr + tl.load(row))
    return tagged, tl.load(row + 1).to(tl.int64) * BLOCK, tl.load(row + 2)


@triton.jit
def _load_edges(begin, body, end, item, half):
    """The elements from `begin` to `body` and from the last whole 16 bytes to `end`, in fp32."""
    e = tl.arange(0, 2 * _EDGE)
    tail = end & -16
    at = tl.where(e < _EDGE, begin + e * item, tail + (e - _EDGE) * item)
    # without a whole 16 bytes between, what is left is one piece, and the first half of `e` has it
    inside = (at < end) & tl.where(e < _EDGE, at < body, tail >= body)
    wide = tl.load(at.to(tl.pointer_type(tl.float32)), mask=inside & (item == 4), other=0.0)
    bits = tl.load(at.to(tl.pointer_type(tl.int16)), mask=inside & (item == 2), other=0)
    bf16 = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    narrow = tl.where(half, bits.to(tl.float16, bitcast=True).to(tl.float32), bf16)
    return tl.where(item == 4, wide, narrow)


@triton.jit
def _add_square(total, x):
    return total + x * x
