"""Pieces of the kernels of group_norm_silu and its backward; names and axes are those of _group_norm_silu.py."""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._op import INTERPRETED

_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)


def widening(words: int, done_words: int) -> str:
    """PTX of `after` for words of two bf16: fp32 from $0 on, then words of x, then of what is done."""
    x = [f"${2 * words + i}" for i in range(words)]
    done = [f"${3 * words + i}" for i in range(done_words)]
    lines = [".reg .b32 z, zero;", "mov.u32 z, %ctaid.z;", f"mov.b32 zero, {done[0]};"]
    lines += [f"or.b32 zero, zero, {word};" for word in done[1:]]
    lines += ["and.b32 zero, zero, z;"]
    for i, word in enumerate(x):
        lines += [
            f".reg .b32 low{i}, high{i};",
            f"mad.lo.u32 low{i}, {word}, 65536, zero;",
            f"lop3.b32 high{i}, {word}, 0xffff0000, zero, 0xea;",  # (word & ...) | zero
        ]
    # outputs are written after the last input was read
    lines += [f"mov.b32 ${2 * i}, low{i}; mov.b32 ${2 * i + 1}, high{i};" for i in range(words)]
    return "{" + "\n".join(lines) + "}"


_AFTER = tl.constexpr(widening(words=4, done_words=4))
_AFTER_REGISTERS = tl.constexpr(",".join(["=f"] * 8 + ["r"] * 8))


# --- where a program works -----------------------------------------------------------------------------------------


@triton.jit
def place(C: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """(sample, slab, part) of this program. Slabs go fastest: neighbours in memory are read at the same time."""
    program = tl.program_id(0)
    slabs: tl.constexpr = C // WIDTH
    return program // (slabs * PARTS), program % slabs, program // slabs % PARTS


@triton.jit
def place_backwards(C: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """`place`, the last first: what the launch before read last may still be in L2."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    slabs: tl.constexpr = C // WIDTH
    return program // (slabs * PARTS), program % slabs, program // slabs % PARTS


@triton.jit
def tile_at(
    n, slab, first, HW: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Offsets of BLOCK_P pixels from the `first` one on, and which exist. A sample has less than 2^31 elements."""
    p = first + tl.arange(0, BLOCK_P)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    return n.to(tl.int64) * (HW * C) + slab * WIDTH + (p * C + c), (p < HW) & (c < WIDTH)


@triton.jit
def pointers_at(
    maps, n, slab, first, HW: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`tile_at` as pointers into `maps`: (map, None, C), or (first map, second map, channels of the first).

    Of two maps the channels stand side by side, as in their concatenation; a slab may have channels of both.
    """
    if maps[1] is None:
        at_pc, _ = tile_at(n, slab, first, HW, C, WIDTH, BLOCK_P, BLOCK_C)
        pointers_pc = maps[0] + at_pc
    else:
        C1: tl.constexpr = maps[2]
        C2: tl.constexpr = C - C1
        WIDE: tl.constexpr = 1 if C1 % WIDTH == 0 else BLOCK_C
        # a slab of one map is told once
        channel = slab * WIDTH + tl.arange(0, WIDE)[None, :]
        lower = channel < C1
        of_first = maps[0] + (n.to(tl.int64) * (HW * C1) + channel)
        of_second = maps[1] + (n.to(tl.int64) * (HW * C2) + (channel - C1))
        row = tl.where(lower, C1, C2) if C1 != C2 else C1
        p = first + tl.arange(0, BLOCK_P)[:, None]
        pointers_pc = tl.where(lower, of_first, of_second) + p * row
        if WIDE == 1:
            pointers_pc += tl.arange(0, BLOCK_C)[None, :]
    return pointers_pc


@triton.jit
def load_slab(
    maps, n, slab, HW: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All pixels of a slab as a tuple of pieces, each one access a thread.

    Of one large block every intermediate value would be as large: the compiler works through it operation by operation.
    """
    slab_pc = ()
    for piece in tl.static_range(PIECES):
        _, inside_pc = tile_at(n, slab, piece * BLOCK_P, HW, C, WIDTH, BLOCK_P, BLOCK_C)
        pointers_pc = pointers_at(maps, n, slab, piece * BLOCK_P, HW, C, WIDTH, BLOCK_P, BLOCK_C)
        slab_pc = slab_pc + (tl.load(pointers_pc, mask=inside_pc, other=0.0),)  # noqa: RUF005 - Triton cannot unpack
    return slab_pc


@triton.jit
def affine(
    gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, slab,
    WIDTH: tl.constexpr, SCALE_ROW: tl.constexpr, SHIFT_ROW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The (weight, bias) that the normalised slab is taken through: gamma (1 + scale), beta (1 + scale) + shift."""
    local_c = tl.arange(0, BLOCK_C)
    inside = local_c < WIDTH
    c = slab * WIDTH + local_c
    weight_c = tl.load(gamma_ptr + c, mask=inside, other=0.0).to(tl.float32)
    bias_c = tl.load(beta_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        scale_c = 1.0 + tl.load(scale_ptr + n.to(tl.int64) * SCALE_ROW + c, mask=inside, other=0.0).to(tl.float32)
        weight_c *= scale_c
        bias_c *= scale_c
    if shift_ptr is not None:
        bias_c += tl.load(shift_ptr + n.to(tl.int64) * SHIFT_ROW + c, mask=inside, other=0.0).to(tl.float32)
    return weight_c, bias_c


@triton.jit
def column_of(
    gamma_ptr, beta_ptr, scale_ptr, shift_ptr, mean_g, rstd_g, n, slab, i,
    COLUMN: tl.constexpr, COLUMNS: tl.constexpr, CG: tl.constexpr, SCALE_ROW: tl.constexpr, SHIFT_ROW: tl.constexpr,
    BITS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(column, weight, mean, rstd, centre, slope, bias) of a slab's i-th column, x having elements of so many BITS.

    The activation is of slope (x - centre) + bias.
    """
    column = slab * COLUMNS + i
    weight_c, bias_c = affine(
        gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, column, COLUMN, SCALE_ROW, SHIFT_ROW, BLOCK_C
    )
    rstd_c = to_channels(rstd_g, i * COLUMN, CG, BLOCK_C)
    mean_c = to_channels(mean_g, i * COLUMN, CG, BLOCK_C)
    centre_c = centre(mean_c, BITS)
    slope_c = weight_c * rstd_c
    return column, weight_c, mean_c, rstd_c, centre_c, slope_c, bias_c + (centre_c - mean_c) * slope_c


# --- sums over groups ----------------------------------------------------------------------------------------------


@triton.jit
def statistics(
    x, done, HW: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EPS: tl.constexpr,
    PIECES: tl.constexpr, PAIRWISE: tl.constexpr = False,
):  # fmt: skip
    """(mean, 1 / standard deviation) of each channel's group, taken after `done`, see `after`.

    The mean first: squares are then of what is centred.
    """
    BLOCK_P: tl.constexpr = x[0].shape[0]
    BLOCK_C: tl.constexpr = x[0].shape[1]
    total_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    for piece in tl.static_range(PIECES):
        total_pc += after(x[piece], done[piece], PAIRWISE)
    mean_c = to_channels(sum_groups(total_pc, CG, KP) / (HW * CG), 0, CG, BLOCK_C)
    squares_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    c = tl.arange(0, BLOCK_C)[None, :]
    for piece in tl.static_range(PIECES):
        p = piece * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        deviation_pc = tl.where(
            (p < HW) & (c < K * CG), after(x[piece], x[(piece + 1) % PIECES], PAIRWISE) - mean_c[None, :], 0.0
        )
        squares_pc += deviation_pc * deviation_pc
    variance_g = sum_groups(squares_pc, CG, KP) / (HW * CG)
    return mean_c, to_channels(tl.rsqrt(variance_g + EPS), 0, CG, BLOCK_C)


@triton.jit
def moments(
    maps, n, slab, part,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """(mean, sum of squared deviations) of every group of a slab, in one part of it.

    Every place in a tile keeps those of its own elements (Welford 1962), and threads meet once a column: a sum of
    squares would cancel. Then sets are merged by their means (Chan, Golub & LeVeque 1983).
    """
    COLUMN: tl.constexpr = K * CG // COLUMNS
    begin = part * (TILES * BLOCK_P)
    left_p = tl.minimum(HW - begin, TILES * BLOCK_P) - tl.arange(0, BLOCK_P)
    tiles_p = (tl.maximum(left_p + BLOCK_P - 1, 0) // BLOCK_P).to(tl.float32)  # that have such a pixel
    count_g = tl.full((KP,), 0, tl.float32)
    mean_g = tl.full((KP,), 0, tl.float32)
    squares_g = tl.full((KP,), 0, tl.float32)
    for i in range(COLUMNS):
        mean_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
        squares_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
        for tile in range(TILES):
            column, first = slab * COLUMNS + i, begin + tile * BLOCK_P
            _, inside_pc = tile_at(n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            pointers_pc = pointers_at(maps, n, column, first, HW, C, COLUMN, BLOCK_P, BLOCK_C)
            x_pc = tl.load(pointers_pc, mask=inside_pc, other=0.0).to(tl.float32)
            if HW % (TILES * BLOCK_P) != 0:
                x_pc = tl.where(inside_pc, x_pc, mean_pc)
            apart_pc = x_pc - mean_pc
            mean_pc += apart_pc * (1.0 / (tile + 1))
            squares_pc += apart_pc * (x_pc - mean_pc)
        channels_g = to_groups(tl.where(tl.arange(0, BLOCK_C) < COLUMN, 1.0, 0.0), i * COLUMN, CG, KP)
        fresh_g = channels_g * tl.sum(tiles_p, 0)
        fresh_mean_g = to_groups(tl.sum(tiles_p[:, None] * mean_pc, 0), i * COLUMN, CG, KP) / tl.maximum(fresh_g, 1.0)
        apart_pc = mean_pc - to_channels(fresh_mean_g, i * COLUMN, CG, BLOCK_C)[None, :]
        squares_c = tl.sum(squares_pc + tiles_p[:, None] * (apart_pc * apart_pc), 0)
        share_g = fresh_g / tl.maximum(count_g + fresh_g, 1.0)
        apart_g = fresh_mean_g - mean_g
        squares_g += to_groups(squares_c, i * COLUMN, CG, KP) + apart_g * apart_g * (count_g * share_g)
        mean_g += apart_g * share_g
        count_g += fresh_g
    return mean_g, squares_g


@triton.jit
def combine(
    partial_ptr, n, slab,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    KP: tl.constexpr, PARTS_P: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """(mean, 1 / standard deviation) of each group of a slab, from `moments` of parts of PART pixels but the last."""
    i = tl.arange(0, PARTS_P)[:, None]
    g = tl.arange(0, KP)[None, :]
    inside = (i < PARTS) & (g < K)
    row = partial_ptr + n.to(tl.int64) * (PARTS * 2 * (C // CG)) + i * (2 * (C // CG)) + slab * K + g
    means = tl.load(row, mask=inside, other=0.0)
    squares = tl.load(row + C // CG, mask=inside, other=0.0)
    counts = tl.where(i < PARTS, tl.minimum(PART, HW - i * PART) * CG, 0).to(tl.float32)
    mean_g = tl.sum(counts * means, 0) / (HW * CG)
    apart = means - mean_g[None, :]
    variance_g = tl.sum(squares + counts * apart * apart, 0) / (HW * CG)
    return mean_g, tl.rsqrt(variance_g + EPS)


@triton.jit
def centre(mean_c, BITS: tl.constexpr):
    """What elements of so many bits are centred by before they are scaled: their mean, or 0 where the bias has it.

    Of 16-bit elements it has: two additions fewer an element, and what fp32 then loses by a mean far from zero is a
    thousandth of what the elements themselves have lost.
    """
    if BITS == 16:
        mean_c = tl.full(mean_c.shape, 0, tl.float32)
    return mean_c


@triton.jit
def sum_groups(z_pc, CG: tl.constexpr, KP: tl.constexpr):
    """Sum over all pixels and the channels of each group: [KP]."""
    if CG & (CG - 1) == 0:
        # the channels of a group first: most of them are in one thread, and fewer sums cross threads
        z_g = tl.sum(tl.sum(tl.reshape(z_pc, (z_pc.shape[0], KP, CG)), 2), 0)
    else:
        z_g = to_groups(tl.sum(z_pc, 0), 0, CG, KP)
    return z_g


@triton.jit
def to_groups(z_c, first, CG: tl.constexpr, KP: tl.constexpr):
    """Sum over channels, those of the slab from the `first` one on, of each group: [BLOCK_C] to [KP]."""
    if CG & (CG - 1) == 0 and z_c.shape[0] == KP * CG:
        z_g = tl.sum(tl.reshape(z_c, (KP, CG)), 1)
    else:
        z_g = tl.sum(tl.where(_member(first, CG, z_c.shape[0], KP), z_c[None, :], 0.0), 1)
    return z_g


@triton.jit
def to_channels(z_g, first, CG: tl.constexpr, BLOCK_C: tl.constexpr):
    """Each group's value for each of its channels, those of the slab from the `first` one on: [KP] to [BLOCK_C]."""
    KP: tl.constexpr = z_g.shape[0]
    if CG & (CG - 1) == 0 and BLOCK_C == KP * CG:
        z_c = tl.reshape(tl.broadcast_to(z_g[:, None], (KP, CG)), (BLOCK_C,))
    else:
        z_c = tl.gather(z_g, tl.minimum((first + tl.arange(0, BLOCK_C)) // CG, KP - 1), 0)
    return z_c


@triton.jit
def _member(first, CG: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr):
    return ((first + tl.arange(0, BLOCK_C)) // CG)[None, :] == tl.arange(0, KP)[:, None]


@triton.jit
def after(x_pc, done_pc, PAIRWISE: tl.constexpr = False):
    """`x` in fp32, which the compiler believes to depend on `done`, a block of the same type.

    So it converts 16-bit elements anew in each pass, where it would keep the fp32 of the pass before in twice the
    registers, and takes piece after piece, where it would work on all at once: the backward of 64 elements a thread
    compiles to 128 registers instead of 246. It cannot know that %ctaid.z is zero in x ^ (done & %ctaid.z).

    Of bf16 that zero is taken once for eight elements or, PAIRWISE, for two: a tenth more instructions, and up to eight
    registers fewer, which is one program more a multiprocessor in the forward, and no spills beside dropout.
    """
    if _IN_ASSEMBLY and x_pc.dtype == tl.bfloat16 and PAIRWISE:
        wide_pc = tl.inline_asm_elementwise(
            """{
            .reg .b32 z, t;
            mov.u32 z, %ctaid.z;
            lop3.b32 t, $2, $3, z, 0x78;
            shl.b32 $0, t, 16;
            and.b32 $1, t, 0xffff0000;
            }""",
            "=f,=f,r,r", [x_pc, done_pc], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    elif _IN_ASSEMBLY and x_pc.dtype == tl.bfloat16:
        wide_pc = tl.inline_asm_elementwise(
            _AFTER, _AFTER_REGISTERS, [x_pc, done_pc], dtype=tl.float32, is_pure=False, pack=8
        )
    elif _IN_ASSEMBLY and x_pc.dtype == tl.float16:
        wide_pc = tl.inline_asm_elementwise(
            """{
            .reg .b32 z, t;
            .reg .b16 low, high;
            mov.u32 z, %ctaid.z;
            lop3.b32 t, $2, $3, z, 0x78;
            mov.b32 {low, high}, t;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""",
            "=f,=f,r,r", [x_pc, done_pc], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        wide_pc = x_pc.to(tl.float32)
    return wide_pc
