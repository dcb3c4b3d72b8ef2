"""The kernel after those that multiply in conv2d_wgrad_fp8: sums of parts and of pixels, in an order that is fixed.

What takes its time is memory, so that a thread has 128 bytes on their way at once, in few enough registers that four
programs of eight warps share a multiprocessor.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor
from ridgeline.kernels._op import INTERPRETED

_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)
_WORDS = tl.constexpr(1024)  # of dy, loaded together: 16 bytes a thread
_LOADS = tl.constexpr(8)  # of them at once


@triton.jit(do_not_specialize=["dy_row", "x_row"])
def wgrad_fp8_sums_kernel(
    parts_ptr, dy_ptr, inverse_ptr, dw_ptr, db_ptr, dy_row, x_row, images,
    NUMEL: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BESIDE: tl.constexpr, LOADS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, QUARTER: tl.constexpr, W: tl.constexpr,  # QUARTER: pixels
    PDL: tl.constexpr,
):  # fmt: skip
    """dw = the sum of parts [PARTS, NUMEL] fp32 and db, unless None, that of dy's pixels, both scaled.

    The first K programs, which take longest, have a channel of dy each. The others have BLOCKS blocks of dw each, and
    add LOADS times BESIDE parts at once.
    """
    wait_for_predecessor(PDL)
    program = tl.program_id(0)
    dy_inverse = tl.load(inverse_ptr + dy_row)
    scale = dy_inverse * tl.load(inverse_ptr + x_row)
    if db_ptr is None:
        _add_parts(parts_ptr, dw_ptr, program, scale, NUMEL, PARTS, BESIDE, LOADS, BLOCK, BLOCKS)
    elif program < K:
        tl.store(db_ptr + program, _sum_of_pixels(dy_ptr, program, images * QUARTER, K, W) * dy_inverse)
    else:
        _add_parts(parts_ptr, dw_ptr, program - K, scale, NUMEL, PARTS, BESIDE, LOADS, BLOCK, BLOCKS)


@triton.jit
def _add_parts(
    parts_ptr, dw_ptr, program, scale,
    NUMEL: tl.constexpr, PARTS: tl.constexpr, BESIDE: tl.constexpr, LOADS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    at = program * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    beside = tl.arange(0, BESIDE)[:, None]
    place = parts_ptr + beside.to(tl.int64) * NUMEL + at[None, :]
    totals = ()
    for _ in tl.static_range(BLOCKS):
        totals = totals + (tl.zeros((BESIDE, BLOCK), tl.float32),)  # noqa: RUF005 - Triton cannot unpack
    for first in range(0, PARTS, LOADS * BESIDE):
        loaded = ()
        for i in tl.static_range(BLOCKS * LOADS):
            part = i % LOADS * BESIDE
            inside = (at < NUMEL - i // LOADS * BLOCK)[None, :] & (first + part + beside < PARTS)
            block = tl.load(place + (part * NUMEL + i // LOADS * BLOCK), mask=inside, other=0.0)
            loaded = loaded + (block,)  # noqa: RUF005
        loaded = _together(loaded)
        sums = ()
        for i in tl.static_range(BLOCKS):
            total = totals[i]
            for part in tl.static_range(LOADS):
                total += loaded[i * LOADS + part]
            sums = sums + (total,)  # noqa: RUF005
        totals = sums
        place += LOADS * BESIDE * NUMEL
    for i in tl.static_range(BLOCKS):
        dw = tl.sum(totals[i], axis=0) * scale
        tl.store(dw_ptr + i * BLOCK + at, dw.to(dw_ptr.dtype.element_ty), mask=at < NUMEL - i * BLOCK)


@triton.jit
def _sum_of_pixels(dy_ptr, k, words, K: tl.constexpr, W: tl.constexpr):
    """Of channel k of dy, `words` of four e5m2 numbers."""
    word = tl.arange(0, _WORDS)
    # a row of quads has W words of each channel
    place = dy_ptr + k * W + (word // W) * (K * W) + word % W
    pixels = tl.zeros((_WORDS,), tl.float32)
    for first in range(0, words, _LOADS * _WORDS):
        loaded = ()
        for i in tl.static_range(_LOADS):
            inside = first + i * _WORDS + word < words
            loaded = loaded + (tl.load(place + i * _WORDS * K, mask=inside, other=0),)  # noqa: RUF005
        loaded = _together(loaded)
        for i in tl.static_range(_LOADS):
            pixels += _sum_of_four(loaded[i])
        place += _LOADS * _WORDS * K
    return tl.sum(pixels, axis=0)


@triton.jit
def _sum_of_four(bits):
    """e5m2 is the upper byte of fp16: two of a word's bytes are where they must be, and two a byte below."""
    upper = bits & -0xFF0100
    lower = (bits << 8) & -0xFF0100
    return (_low(upper) + _low(upper >> 16)) + (_low(lower) + _low(lower >> 16))


@triton.jit
def _low(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _together(loaded):
    """The same blocks of four bytes an element, each of which the compiler believes to depend on all.

    Left alone it waits for each before it loads the next, to stay within 32 registers. It cannot know that the grid has
    one axis, so that x ^ (y & program_id(2)) is x.
    """
    if _IN_ASSEMBLY and len(loaded) > 1:
        loaded = tl.inline_asm_elementwise(
            _assembly(len(loaded)), _constraints(len(loaded)), loaded + (tl.program_id(2),),  # noqa: RUF005
            dtype=(loaded[0].dtype,) * len(loaded), is_pure=True, pack=1,
        )  # fmt: skip
    return loaded


@triton.constexpr_function
def _assembly(count):
    blocks = [f"${count + i}" for i in range(count)]
    lines = [
        ".reg .b32 all;",
        f"or.b32 all, {blocks[0]}, {blocks[1]};",
        *(f"or.b32 all, all, {block};" for block in blocks[2:]),
        f"and.b32 all, all, ${2 * count};",
        *(f"xor.b32 ${i}, {block}, all;" for i, block in enumerate(blocks)),
    ]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def _constraints(count):
    # &: the first outputs are written while blocks are still read
    return ",".join(["=&r"] * count + ["r"] * (count + 1))
