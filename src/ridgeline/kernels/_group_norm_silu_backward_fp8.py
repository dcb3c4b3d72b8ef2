"""Device code of group_norm_silu_backward_fp8: backward_kernel with dx in FP8, in both orders, and what is seen of it.

Names, axes and formulas are those of _group_norm_silu.py and _group_norm_silu_backward.py. The pieces fill the four
quarters of a map, and dx is made of one piece of each in turn: their pixels share the words of `store_quads`.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._group_norm_silu_backward import load_ahead, place_of, slab_gradient
from ridgeline.kernels._group_norm_silu_pieces import after, tile_at
from ridgeline.kernels._op import INTERPRETED
from ridgeline.kernels._quads import store_quads
from ridgeline.kernels._quantize_fp8 import FORMATS, observe, record, to_fp8, to_words

FORMAT = "e5m2"

_FORMAT = tl.constexpr(FORMAT)
_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)


@triton.jit(do_not_specialize=["row"])
def backward_fp8_kernel(
    dy_ptr, x_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, residual_ptr, sums_ptr, dx_ptr,
    codes_ptr, words_ptr, fp8_scale_ptr, amax_ptr, counts_ptr, row,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """backward_kernel, its dx written as FP8 codes, with `words_ptr` also as quads, and with `dx_ptr` as it is.

    Every quarter of the pieces is a quarter of the map, without padding; a thread has ACCESS elements of a piece. With
    3 ROWS of sums the third is that of dx, before it is rounded.
    """
    fp8_scale = tl.load(fp8_scale_ptr + row)
    n, slab, x, g, done_pc, centre_c, a_c, b_c, d_c = slab_gradient(
        dy_ptr, (x_ptr, None, C), gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, sums_ptr,
        HW, C, CG, K, SCALE_ROW, SHIFT_ROW, EPS, ACT, DROPPED, BLOCK_P, BLOCK_C, KP, PIECES, ROWS,
    )  # fmt: skip
    peak_pc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    events_pc = tl.zeros((BLOCK_P, BLOCK_C), tl.int32)
    third_pc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    dx = ()
    z = ()
    added = load_ahead((), residual_ptr, n, slab, 0, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES, True)
    for step in tl.static_range(PIECES):
        at_pc, inside_pc = tile_at(n, slab, place_of(step, PIECES, True) * BLOCK_P, HW, C, K * CG, BLOCK_P, BLOCK_C)
        centred_pc = after(x[place_of(step, PIECES, True)], done_pc) - centre_c[None, :]
        # in this order two fused multiply-adds
        dx_pc = a_c[None, :] * after(g[place_of(step, PIECES, True)], done_pc) - d_c[None, :]
        dx_pc -= centred_pc * b_c[None, :]
        if residual_ptr is not None:
            dx_pc += added[step].to(tl.float32)
            added = load_ahead(added, residual_ptr, n, slab, step + 1, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES, True)
        if K * CG < BLOCK_C:
            # padding would be observed
            dx_pc = tl.where(inside_pc, dx_pc, 0.0)
        if ROWS == 3:
            third_pc += dx_pc
        done_pc = dx_pc.to(x[0].dtype)
        if dx_ptr is not None:
            tl.store(dx_ptr + at_pc, done_pc, mask=inside_pc)
        z_pc = dx_pc * fp8_scale
        codes_pc = to_fp8(z_pc, _FORMAT).to(codes_ptr.dtype.element_ty, bitcast=True)
        tl.store(codes_ptr + at_pc, codes_pc, mask=inside_pc)
        dx = dx + (dx_pc,)  # noqa: RUF005 - Triton cannot unpack
        z = z + (z_pc,)  # noqa: RUF005
        if step % 4 == 3:
            peak_pc, events_pc = _observe_four(
                (dx[step - 3], dx[step - 2], dx[step - 1], dx[step]),
                (z[step - 3], z[step - 2], z[step - 1], z[step]),
                fp8_scale, peak_pc, events_pc, ACCESS,
            )  # fmt: skip
            if words_ptr is not None:
                words_pc = to_words(z[step - 3], z[step - 2], z[step - 1], z[step], _FORMAT)
                c = tl.arange(0, BLOCK_C)
                store_quads(
                    words_ptr, words_pc, n, step // 4 * BLOCK_P, slab * (K * CG) + c, c < K * CG, C, HW // 4, W, False
                )
    if ROWS == 3:
        c = tl.arange(0, BLOCK_C)
        to = sums_ptr + n.to(tl.int64) * (ROWS * C) + 2 * C + slab * (K * CG)
        tl.store(to + c, tl.sum(third_pc, 0), mask=c < K * CG)
    elements = tl.where(tl.program_id(0) == 0, tl.num_programs(0).to(tl.int64) * (HW * K * CG), 0)
    record(amax_ptr + row, counts_ptr + row * 3, peak_pc, events_pc, elements)


# --- what the scale must follow ------------------------------------------------------------------------------------


@triton.jit
def _observe_four(x, z, scale, peak_pc, events_pc, ACCESS: tl.constexpr):
    """`observe` for four pieces and their products z = x * scale, at a third of its instructions.

    Gradients rarely saturate or vanish: a thread compares the largest and the least of its 4 ACCESS elements, and
    counts only where one of them asks for it. What it found stands in the first of its elements, the others have 0.
    """
    if _IN_ASSEMBLY:
        found_pc, lost_pc = tl.inline_asm_elementwise(
            _assembly(_FORMAT, ACCESS), _constraints(ACCESS),
            [x[0], x[1], x[2], x[3], z[0], z[1], z[2], z[3], scale],
            dtype=(tl.float32, tl.int32), is_pure=True, pack=ACCESS,
        )  # fmt: skip
        peak_pc = tl.maximum(peak_pc, found_pc, propagate_nan=tl.PropagateNan.ALL)
        events_pc += lost_pc
    else:
        for i in tl.static_range(4):
            peak_pc, events_pc = observe(x[i], z[i], peak_pc, events_pc, _FORMAT)
    return peak_pc, events_pc


@triton.constexpr_function
def _assembly(name, access):
    """PTX of `_observe_four`: outputs found, lost; inputs x, z and the scale, `access` registers each piece."""
    kind = FORMATS[name]
    x = [f"${i}" for i in range(2 * access, 6 * access)]
    z = [f"${i}" for i in range(6 * access, 10 * access)]
    lines = [
        ".reg .f32 peak, least, t; .reg .s32 n; .reg .pred p, q;",
        f"abs.f32 peak, {x[0]}; abs.f32 least, {z[0]};",
        *(f"abs.f32 t, {value}; max.NaN.f32 peak, peak, t;" for value in x[1:]),
        *(f"abs.f32 t, {value}; min.f32 least, least, t;" for value in z[1:]),
        # the product of the largest is the largest product; NaN may hide others that saturate, so it counts
        f"mul.f32 t, peak, ${10 * access}; setp.gtu.f32 p, t, {kind.saturating!r};",
        f"setp.le.or.f32 p, least, {kind.vanishing!r}, p;",
        "mov.s32 n, 0; @!p bra COUNTED;",
        *(
            f"abs.f32 t, {value};"
            f"setp.gt.f32 q, t, {kind.saturating!r}; @q add.s32 n, n, 65536;"
            f"setp.le.f32 q, t, {kind.vanishing!r}; setp.gt.and.f32 q, t, 0.0, q; @q add.s32 n, n, 1;"
            for value in z
        ),
        f"COUNTED: mov.f32 $0, peak; mov.s32 ${access}, n;",
        *(f"mov.f32 ${i}, 0.0; mov.s32 ${access + i}, 0;" for i in range(1, access)),
    ]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def _constraints(access):
    return ",".join(["=f"] * access + ["=r"] * access + ["f"] * (9 * access))
