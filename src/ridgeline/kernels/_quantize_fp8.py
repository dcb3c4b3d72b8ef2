"""FP8 on the device: quantise tiles, pack words of four pixels, observe what the scale must follow.

A producer of fp32 tiles (a norm, an optimizer, the pass below) quantises what it holds before it stores it:

    z = x * scale
    codes = to_fp8(z, FORMAT)                      uint8, in the tile's own order: store it as the map is stored
    words = to_words(z0, z1, z2, z3, FORMAT)       int32, byte i from tile i of four: `store_quads` stores them
    peak, events = observe(x, z, peak, events, FORMAT)         per element, over as many tiles as there are
    record(amax_ptr, counts_ptr, peak, events, elements)       once a program

For quads (see _quads) tile i of four holds pixel j of the i-th quarter of one map: all that a word needs lies in one
thread then, and what crosses threads on the way to the other order are words of four bytes.

Shape suffixes: _jc [BLOCK_P / 4 pixels of one part of four, BLOCK_C channels].
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor
from ridgeline.kernels._op import INTERPRETED
from ridgeline.kernels._quads import store_quads


@dataclass(frozen=True)
class Format:
    """One FP8 format. Both round to nearest, ties to even, and have subnormal numbers."""

    dtype: torch.dtype
    largest: float
    mantissa_bits: int
    least_exponent: int  # of normal numbers

    @property
    def saturating(self) -> float:
        """Magnitudes above it lose more than rounding takes: half of a step beyond the largest."""
        step = 2.0 ** (math.frexp(self.largest)[1] - 1 - self.mantissa_bits)
        return self.largest + step / 2

    @property
    def vanishing(self) -> float:
        """The largest magnitude that rounds to zero: half of the smallest step."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits - 1)


FORMATS = {
    "e4m3": Format(torch.float8_e4m3fn, largest=448.0, mantissa_bits=3, least_exponent=-6),
    "e5m2": Format(torch.float8_e5m2, largest=57344.0, mantissa_bits=2, least_exponent=-14),
}

_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_OVERFLOW = tl.constexpr(1 << 16)  # both counts share a word: a program takes fewer tiles than that


@triton.jit(do_not_specialize=["row"])
def quantize_fp8_kernel(
    x_ptr, scale_ptr, y_ptr, amax_ptr, counts_ptr, row, pixels, x_pitch,
    C: tl.constexpr, FORMAT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile, read once in four parts: y, and what was observed, into one row of the state."""
    wait_for_predecessor(PDL)
    first, c = _tile(C, BLOCK_P, BLOCK_C)
    j = tl.arange(0, BLOCK_P // 4)
    scale = tl.load(scale_ptr + row)
    peak_jc = tl.zeros((BLOCK_P // 4, BLOCK_C), tl.float32)
    events_jc = tl.zeros((BLOCK_P // 4, BLOCK_C), tl.int32)
    x_ptr += first * x_pitch
    y_ptr += first * C
    for i in tl.static_range(4):
        p = 4 * j + i
        inside_jc = (p < pixels - first)[:, None] & (c < C)[None, :]
        _, peak_jc, events_jc = _quantize(
            x_ptr, y_ptr, p, c, inside_jc, x_pitch, scale, peak_jc, events_jc, C, FORMAT
        )  # fmt: skip
    elements = tl.where(tl.program_id(0) == 0, pixels.to(tl.int64) * C, 0)
    record(amax_ptr + row, counts_ptr + row * 3, peak_jc, events_jc, elements)


@triton.jit(do_not_specialize=["row"])
def quantize_quads_kernel(
    x_ptr, scale_ptr, y_ptr, amax_ptr, counts_ptr, row, words_ptr, images, x_pitch,
    C: tl.constexpr, QUARTER: tl.constexpr, W: tl.constexpr, FORMAT: tl.constexpr,
    BESIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same pixels of each quarter of a map, QUARTER pixels, read once: y, its quads, and what was observed."""
    wait_for_predecessor(PDL)
    program = tl.program_id(0)
    tiles_c: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tiles_j: tl.constexpr = (QUARTER + BLOCK_P // 4 - 1) // (BLOCK_P // 4)
    c = program % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    first = program // tiles_c % tiles_j * (BLOCK_P // 4)
    j = first + tl.arange(0, BLOCK_P // 4)
    n = (program // (tiles_c * tiles_j)).to(tl.int64)
    inside_jc = (j < QUARTER)[:, None] & (c < C)[None, :]
    scale = tl.load(scale_ptr + row)
    peak_jc = tl.zeros((BLOCK_P // 4, BLOCK_C), tl.float32)
    events_jc = tl.zeros((BLOCK_P // 4, BLOCK_C), tl.int32)
    scaled = ()
    for i in tl.static_range(4):
        p = (4 * n + i) * QUARTER + j
        z_jc, peak_jc, events_jc = _quantize(
            x_ptr, y_ptr, p, c, inside_jc, x_pitch, scale, peak_jc, events_jc, C, FORMAT
        )  # fmt: skip
        scaled = scaled + (z_jc,)  # noqa: RUF005 - Triton cannot unpack
    words_jc = to_words(scaled[0], scaled[1], scaled[2], scaled[3], FORMAT)
    store_quads(words_ptr, words_jc, n, first, c, c < C, C, QUARTER, W, BESIDE)
    elements = tl.where(program == 0, 4 * images.to(tl.int64) * QUARTER * C, 0)
    record(amax_ptr + row, counts_ptr + row * 3, peak_jc, events_jc, elements)


@triton.jit
def _quantize(
    x_ptr, y_ptr, p, c, inside_jc, x_pitch, scale, peak_jc, events_jc, C: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """(x · scale, peak, events) of the pixels `p`; stores their y."""
    x_jc = tl.load(x_ptr + p[:, None] * x_pitch + c[None, :], mask=inside_jc, other=0.0).to(tl.float32)
    z_jc = x_jc * scale
    peak_jc, events_jc = observe(x_jc, z_jc, peak_jc, events_jc, FORMAT)
    codes_jc = to_fp8(z_jc, FORMAT).to(y_ptr.dtype.element_ty, bitcast=True)
    tl.store(y_ptr + p[:, None] * C + c[None, :], codes_jc, mask=inside_jc)
    return z_jc, peak_jc, events_jc


@triton.jit
def amax_fp8_kernel(
    x_ptr, amax_ptr, pixels, x_pitch,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest magnitude alone, for a scale that is computed before anything is quantised."""
    wait_for_predecessor(PDL)
    first, c = _tile(C, BLOCK_P, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    inside = (p < pixels - first)[:, None] & (c < C)[None, :]
    x_pc = tl.load(x_ptr + first * x_pitch + p[:, None] * x_pitch + c[None, :], mask=inside, other=0.0)
    tl.atomic_max(amax_ptr, _largest_bits(x_pc.to(tl.float32)), sem="relaxed")


@triton.jit
def _tile(C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """(first pixel in int64, channels) of this program; tiles of the same pixels are neighbours."""
    program = tl.program_id(0)
    tiles: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    return (program // tiles).to(tl.int64) * BLOCK_P, program % tiles * BLOCK_C + tl.arange(0, BLOCK_C)


# --- rounding ------------------------------------------------------------------------------------------------------


@triton.jit
def to_fp8(z, FORMAT: tl.constexpr):
    """The codes of `z`, fp32, as uint8: rounded to nearest even, saturated at the largest; NaN stays NaN."""
    if _IN_ASSEMBLY:
        # said outright, for a cast of Triton's promises no saturation; the first operand becomes the upper byte
        PAIR: tl.constexpr = "cvt.rn.satfinite." + FORMAT + "x2.f32 "
        codes = tl.inline_asm_elementwise(
            "{.reg .b16 low, high; " + PAIR + "low, $2, $1; " + PAIR + "high, $4, $3; mov.b32 $0, {low, high};}",
            "=r,f,f,f,f", [z], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        codes = _codes(z, FORMAT).to(tl.uint8)
    return codes


@triton.jit
def to_words(z0, z1, z2, z3, FORMAT: tl.constexpr):
    """The codes of four tiles as one of int32: those of `z0` in the lowest byte."""
    if _IN_ASSEMBLY:
        PAIR: tl.constexpr = "cvt.rn.satfinite." + FORMAT + "x2.f32 "
        words = tl.inline_asm_elementwise(
            "{.reg .b16 low, high; " + PAIR + "low, $2, $1; " + PAIR + "high, $4, $3; mov.b32 $0, {low, high};}",
            "=r,f,f,f,f", [z0, z1, z2, z3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = _codes(z0, FORMAT) | _codes(z1, FORMAT) << 8 | _codes(z2, FORMAT) << 16 | _codes(z3, FORMAT) << 24
    return words


@triton.jit
def _codes(z, FORMAT: tl.constexpr):
    """The same in integers, for the interpreter: its casts to FP8 cut bits off and make 384 of NaN."""
    BITS: tl.constexpr = mantissa_bits(FORMAT)
    LEAST: tl.constexpr = 127 + least_exponent(FORMAT) << 23
    magnitude = tl.where(z == z, tl.minimum(tl.abs(z), largest(FORMAT)), 0.0)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
    steps = magnitude / (exponent - (BITS << 23)).to(tl.float32, bitcast=True)
    # below 2^23 fp32 has fractions, above it has none: the sum rounds to nearest even
    steps = (steps + 8388608.0) - 8388608.0
    codes = (exponent - LEAST >> 23 << BITS) + steps.to(tl.int32)
    return tl.where(z == z, codes, 0x7F) | z.to(tl.int32, bitcast=True) >> 24 & 0x80


# --- what the scale must follow ------------------------------------------------------------------------------------


@triton.jit
def observe(x, z, peak, events, FORMAT: tl.constexpr):
    """(peak, events) with one more tile: fp32 magnitudes of `x`, NaN where one was; counts of both kinds of loss."""
    magnitude = tl.abs(z)
    vanished = (magnitude <= vanishing(FORMAT)) & (z != 0.0)
    events += tl.where(magnitude > saturating(FORMAT), _OVERFLOW, tl.where(vanished, 1, 0))
    return tl.maximum(peak, tl.abs(x), propagate_nan=tl.PropagateNan.ALL), events


@triton.jit
def record(amax_ptr, counts_ptr, peak, events, elements):
    """Add what a program observed: amax as the bits of fp32 (int32), counts as int64; `elements` may be zero.

    Maxima and sums of integers are the same in any order. The bits of magnitudes are ordered as the magnitudes are,
    infinity above all of them and NaN above it.
    """
    overflows = tl.sum(events >> 16)
    underflows = tl.sum(events & _OVERFLOW - 1)
    tl.atomic_max(amax_ptr, _largest_bits(peak), sem="relaxed")
    # all programs add to one address: those with nothing to add stay away
    tl.atomic_add(counts_ptr, overflows.to(tl.int64), mask=overflows > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, underflows.to(tl.int64), mask=underflows > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 2, elements.to(tl.int64), mask=elements > 0, sem="relaxed")


@triton.jit
def _largest_bits(x):
    return tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE)


@triton.constexpr_function
def largest(name):
    return FORMATS[name].largest


@triton.constexpr_function
def saturating(name):
    return FORMATS[name].saturating


@triton.constexpr_function
def vanishing(name):
    return FORMATS[name].vanishing


@triton.constexpr_function
def mantissa_bits(name):
    return FORMATS[name].mantissa_bits


@triton.constexpr_function
def least_exponent(name):
    return FORMATS[name].least_exponent
