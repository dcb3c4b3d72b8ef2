"""Device code of group_norm_silu_fp8: the one-launch forward kernel, whose last step quantises; names as there.

With quads (see _quads) pieces go through the four quarters of the map in turn: four of them then hold the four bytes of
the same words. Q counts the pixels of a quarter.

What an FP8 element costs beside a 16-bit one are instructions, of which some 25 an element can be issued while memory
copies: three for the scale, the largest magnitude and the conversion, one and a half for finding what must be counted,
one for the words.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ridgeline.kernels._group_norm_silu_dropout import drop, keep_scale, random_stream
from ridgeline.kernels._group_norm_silu_pieces import (
    affine,
    centre,
    place,
    pointers_at,
    statistics,
    tile_at,
    widening,
)
from ridgeline.kernels._nhwc import activate
from ridgeline.kernels._op import INTERPRETED
from ridgeline.kernels._quads import store_quads
from ridgeline.kernels._quantize_fp8 import FORMATS, observe, record, to_fp8

PACK = 8  # elements that a thread observes at a time: each piece gives a thread a multiple of them

_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)
_PACK = tl.constexpr(PACK)
_FORMAT = tl.constexpr("e4m3")


def _quantizing() -> str:
    """PTX of `quantize`: $0-1 codes, $2-3 seen, of $4-11 y, $12-19 z, $20-27 z before dropout, $28-29 seen.

    An element may have to be counted only if its code is zero or the largest, which few are: codes are looked at four
    at a time, and elements where one of eight is suspect. Outputs are written after the last input was read.
    """
    kind = FORMATS["e4m3"]
    saturating, vanishing = (
        f"0f{struct.pack('>f', bound).hex().upper()}" for bound in (kind.saturating, kind.vanishing)
    )
    lines = [
        ".reg .pred suspect, over, lost;",
        ".reg .b16 low, high;",
        ".reg .b32 codes0, codes1, early0, early1, magnitudes, some, most, odd0, odd1, events, overflows, either;",
        ".reg .f32 peak, magnitude;",
        "mov.b32 peak, $28;",
        "mov.b32 events, $29;",
    ]
    for i in range(PACK):
        lines += [f"abs.f32 magnitude, ${4 + i};", "max.NaN.f32 peak, peak, magnitude;"]
    for codes, first in (("codes0", 12), ("codes1", 16), ("early0", 20), ("early1", 24)):
        lines += [
            f"cvt.rn.satfinite.e4m3x2.f32 low, ${first + 1}, ${first};",
            f"cvt.rn.satfinite.e4m3x2.f32 high, ${first + 3}, ${first + 2};",
            f"mov.b32 {codes}, {{low, high}};",
        ]
    for half in range(2):
        lines += [
            f"and.b32 magnitudes, early{half}, 0x7f7f7f7f;",
            "add.u32 some, magnitudes, 0x7f7f7f7f;",  # the highest bit of each byte: not zero
            "add.u32 most, magnitudes, 0x02020202;",  # the largest, 0x7e, or NaN
            f"lop3.b32 odd{half}, some, most, 0, 0xcf;",  # ~some | most
        ]
    lines += [
        "lop3.b32 odd0, odd0, odd1, 0x80808080, 0xa8;",  # (odd0 | odd1) & ...
        "setp.ne.u32 suspect, odd0, 0;",
        "vote.sync.any.pred suspect, suspect, 0xffffffff;",
        "@!suspect bra.uni COUNTED;",
    ]
    for i in range(12, 12 + PACK):
        lines += [
            f"abs.f32 magnitude, ${i};",
            f"setp.gt.f32 over, magnitude, {saturating};",
            "selp.u32 overflows, 0x10000, 0, over;",
            f"setp.le.f32 lost, magnitude, {vanishing};",
            f"setp.neu.and.f32 lost, ${i}, 0f00000000, lost;",
            "selp.u32 either, 1, overflows, lost;",
            "add.u32 events, events, either;",
        ]
    lines += [
        "COUNTED:",
        "mov.b32 $0, codes0;",
        "mov.b32 $1, codes1;",
        "mov.b32 $2, peak;",
        "mov.b32 $3, events;",
    ]
    return "{" + "\n".join(lines) + "}"


_QUANTIZING = tl.constexpr(_quantizing())
_QUANTIZING_REGISTERS = tl.constexpr(",".join(["=r"] * 4 + ["f"] * 24 + ["r"] * 2))
_AFTER_BYTES = tl.constexpr(widening(words=2, done_words=1))
_AFTER_BYTES_REGISTERS = tl.constexpr("=f,=f,=f,=f,r,r,r")
# PTX of `weave`: words $0-3 of the bytes $4-7
_WEAVING = tl.constexpr(
    """{
    .reg .b32 ab, cd, more_ab, more_cd;
    prmt.b32 ab, $4, $5, 0x5140;
    prmt.b32 cd, $6, $7, 0x5140;
    prmt.b32 more_ab, $4, $5, 0x7362;
    prmt.b32 more_cd, $6, $7, 0x7362;
    prmt.b32 $0, ab, cd, 0x5410;
    prmt.b32 $1, ab, cd, 0x7632;
    prmt.b32 $2, more_ab, more_cd, 0x5410;
    prmt.b32 $3, more_ab, more_cd, 0x7632;
    }"""
)


@triton.jit(do_not_specialize=["row"])
def forward_fp8_kernel(
    x_ptr, x2_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, fp8_scale_ptr, y_ptr, words_ptr,
    amax_ptr, counts_ptr, row,
    HW: tl.constexpr, C1: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr, W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """y in FP8, and its quads where there are `words`, from a slab in registers; records in `row` of what is seen."""
    WIDTH: tl.constexpr = K * CG
    QUARTERS: tl.constexpr = 1 if words_ptr is None else 4
    Q: tl.constexpr = HW // QUARTERS
    n, slab, _ = place(C, WIDTH, 1)
    stream = random_stream(seed_ptr, offset_ptr)
    x = ()
    for piece in tl.static_range(PIECES):
        first = piece % QUARTERS * Q + piece // QUARTERS * BLOCK_P
        at_pc, inside_pc = tile_at(n, slab, first, HW, C, WIDTH, BLOCK_P, BLOCK_C)
        pointers_pc = pointers_at((x_ptr, x2_ptr, C1), n, slab, first, HW, C, WIDTH, BLOCK_P, BLOCK_C)
        x = x + (tl.load(pointers_pc, mask=inside_pc, other=0.0),)  # noqa: RUF005 - Triton cannot unpack
    fp8_scale = tl.load(fp8_scale_ptr + row)
    weight_c, bias_c = affine(gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, slab, WIDTH, SCALE_ROW, SHIFT_ROW, BLOCK_C)
    # it counts pixels piece by piece, which is right in any order: quarters have whole pieces
    mean_c, rstd_c = statistics(x, x, HW, CG, K, KP, EPS, PIECES, DROPPED > 0)
    c = tl.arange(0, BLOCK_C)
    # what lies beyond the slab has no variance either, and must be seen as zero
    slope_c = tl.where(c < WIDTH, weight_c * rstd_c, 0.0)
    centre_c = centre(mean_c, x[0].dtype.primitive_bitwidth)
    bias_c += (centre_c - mean_c) * slope_c
    seen = nothing_seen(BLOCK_P, BLOCK_C)
    done_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.uint8)
    for block in tl.static_range(PIECES // QUARTERS):
        four = ()
        for i in tl.static_range(QUARTERS):
            first = i * Q + block * BLOCK_P
            at_pc, inside_pc = tile_at(n, slab, first, HW, C, WIDTH, BLOCK_P, BLOCK_C)
            centred_pc = after_bytes(x[block * QUARTERS + i], done_pc, DROPPED > 0) - centre_c[None, :]
            y_pc = activate(centred_pc * slope_c[None, :] + bias_c[None, :], ACT) * keep_scale(DROPPED)
            if first + BLOCK_P > HW:
                y_pc = tl.where(inside_pc, y_pc, 0.0)
            kept_pc = drop(y_pc, stream, n, slab, first, C, WIDTH, DROPPED)
            early_pc = y_pc * fp8_scale
            if BLOCK_C > WIDTH:
                early_pc += tl.where(c < WIDTH, 0.0, 1.0)[None, :]
            done_pc, seen = quantize(kept_pc, kept_pc * fp8_scale, early_pc, seen)
            tl.store(y_ptr + at_pc, done_pc.to(y_ptr.dtype.element_ty, bitcast=True), mask=inside_pc)
            four = four + (done_pc,)  # noqa: RUF005 - Triton cannot unpack
        if words_ptr is not None:
            words_pc = weave(four[0], four[1], four[2], four[3])
            store_quads(words_ptr, words_pc, n, block * BLOCK_P, slab * WIDTH + c, c < WIDTH, C, Q, W, True)
    peak_pc, events_pc = what_was_seen(seen)
    elements = tl.where(tl.program_id(0) == 0, tl.num_programs(0).to(tl.int64) * (HW * WIDTH), 0)
    record(amax_ptr + row, counts_ptr + row * 3, peak_pc, events_pc, elements)


# --- FP8 -----------------------------------------------------------------------------------------------------------


@triton.jit
def nothing_seen(BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """What `quantize` starts from. In assembly eight bytes for eight elements: the bits of their peak, their events."""
    if _IN_ASSEMBLY:
        seen = (tl.full((BLOCK_P, BLOCK_C), 0, tl.uint8),)
    else:
        seen = (tl.full((BLOCK_P, BLOCK_C), 0, tl.float32), tl.full((BLOCK_P, BLOCK_C), 0, tl.int32))
    return seen


@triton.jit
def quantize(y_pc, z_pc, early_pc, seen):
    """(codes of z in uint8, seen): `to_fp8` and `observe`, in a third of the latter's instructions and few registers.

    `early` is z before dropout, and not zero beyond the slab: else some of every eight elements would be suspect.
    """
    if _IN_ASSEMBLY:
        codes_pc, bytes_pc = tl.inline_asm_elementwise(
            _QUANTIZING, _QUANTIZING_REGISTERS, [y_pc, z_pc, early_pc, seen[0]], dtype=(tl.uint8, tl.uint8),
            is_pure=False, pack=_PACK,
        )  # fmt: skip
        seen = (bytes_pc,)
    else:
        codes_pc = to_fp8(z_pc, _FORMAT)
        seen = observe(y_pc, z_pc, seen[0], seen[1], _FORMAT)
    return codes_pc, seen


@triton.jit
def what_was_seen(seen):
    """(peak, events) as `record` takes them."""
    if _IN_ASSEMBLY:
        peak_pc, events_pc = tl.inline_asm_elementwise(
            """{
            mov.b32 $0, $16; mov.b32 $8, $17;
            mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;
            mov.b32 $9, 0; mov.b32 $10, 0; mov.b32 $11, 0; mov.b32 $12, 0; mov.b32 $13, 0; mov.b32 $14, 0;
            mov.b32 $15, 0;
            }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,=r,=r,=r,=r,=r,=r,=r,=r,r,r", [seen[0]], dtype=(tl.float32, tl.int32),
            is_pure=True, pack=_PACK,
        )  # fmt: skip
    else:
        peak_pc, events_pc = seen[0], seen[1]
    return peak_pc, events_pc


@triton.jit
def weave(a, b, c, d):
    """Words of int32 whose bytes are those of four blocks of uint8, `a` lowest: eight permutes for sixteen elements."""
    if _IN_ASSEMBLY:
        words = tl.inline_asm_elementwise(
            _WEAVING, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=4
        )
    else:
        words = a.to(tl.int32) | b.to(tl.int32) << 8 | c.to(tl.int32) << 16 | d.to(tl.int32) << 24
    return words


@triton.jit
def after_bytes(x_pc, done_pc, DRAWING: tl.constexpr):
    """`after`, where what is done is a block of uint8."""
    if _IN_ASSEMBLY and x_pc.dtype == tl.bfloat16 and DRAWING:
        wide_pc = tl.inline_asm_elementwise(
            """{
            .reg .b32 z, low, high;
            mov.u32 z, %ctaid.z;
            lop3.b32 low, $4, $6, z, 0x78;
            lop3.b32 high, $5, $6, z, 0x78;
            shl.b32 $0, low, 16;
            and.b32 $1, low, 0xffff0000;
            shl.b32 $2, high, 16;
            and.b32 $3, high, 0xffff0000;
            }""",
            "=f,=f,=f,=f,r,r,r", [x_pc, done_pc], dtype=tl.float32, is_pure=False, pack=4,
        )  # fmt: skip
    elif _IN_ASSEMBLY and x_pc.dtype == tl.bfloat16:
        wide_pc = tl.inline_asm_elementwise(
            _AFTER_BYTES, _AFTER_BYTES_REGISTERS, [x_pc, done_pc], dtype=tl.float32, is_pure=False, pack=4
        )
    elif _IN_ASSEMBLY and x_pc.dtype == tl.float16:
        wide_pc = tl.inline_asm_elementwise(
            """{
            .reg .b32 z, first, second;
            .reg .b16 low, high;
            mov.u32 z, %ctaid.z;
            lop3.b32 first, $4, $6, z, 0x78;
            lop3.b32 second, $5, $6, z, 0x78;
            mov.b32 {low, high}, first;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            mov.b32 {low, high}, second;
            cvt.f32.f16 $2, low;
            cvt.f32.f16 $3, high;
            }""",
            "=f,=f,=f,=f,r,r,r", [x_pc, done_pc], dtype=tl.float32, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        wide_pc = x_pc.to(tl.float32)
    return wide_pc
