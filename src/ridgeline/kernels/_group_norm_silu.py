"""Device code of group_norm_silu: the forward kernels, then pieces that the backward shares.

A program works on one *slab*: K whole groups of one sample, that is WIDTH = K·CG neighbouring channels, and all HW
pixels or a part of them. Suffixes name the axes: _pc [BLOCK_P pixels, BLOCK_C channels], _c [BLOCK_C], _g [KP groups].
Blocks are powers of two; what lies beyond HW, WIDTH and K is masked.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import activate
from ridgeline.kernels._op import INTERPRETED

ROUNDS = 7  # of Philox

_ROUNDS = tl.constexpr(ROUNDS)
_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)


@triton.jit
def forward_kernel(
    x_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, y_ptr,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All of it in one launch: the slab waits in registers for its own statistics."""
    n, slab, _ = place(C, K * CG, 1)
    stream = random_stream(seed_ptr, offset_ptr)
    x = load_slab(x_ptr, n, slab, HW, C, K * CG, BLOCK_P, BLOCK_C, PIECES)
    weight_c, bias_c = affine(gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, slab, K * CG, SCALE_ROW, SHIFT_ROW, BLOCK_C)
    mean_c, rstd_c = statistics(x, x, HW, CG, K, KP, EPS, PIECES)
    done_pc = x[PIECES - 1]
    for piece in tl.static_range(PIECES):
        at_pc, inside_pc = tile_at(n, slab, piece * BLOCK_P, HW, C, K * CG, BLOCK_P, BLOCK_C)
        normal_pc = (after(x[piece], done_pc) - mean_c[None, :]) * (weight_c * rstd_c)[None, :]
        y_pc = activate(normal_pc + bias_c[None, :], ACT)
        done_pc = drop(y_pc * keep_scale(DROPPED), stream, n, slab, piece * BLOCK_P, C, K * CG, DROPPED).to(
            done_pc.dtype
        )
        tl.store(y_ptr + at_pc, done_pc, mask=inside_pc)


@triton.jit
def statistics_kernel(
    x_ptr, partial_ptr,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of every group in one part of a sample: partial [N, PARTS, 2, C / CG] fp32."""
    n, slab, part = place(C, K * CG, PARTS)
    count = 0.0
    mean_g = tl.full((KP,), 0, tl.float32)
    squares_g = tl.full((KP,), 0, tl.float32)
    for tile in range(TILES):
        first = (part * TILES + tile) * BLOCK_P
        at_pc, inside_pc = tile_at(n, slab, first, HW, C, K * CG, BLOCK_P, BLOCK_C)
        x_pc = tl.load(x_ptr + at_pc, mask=inside_pc, other=0.0).to(tl.float32)
        fresh = (tl.minimum(BLOCK_P, tl.maximum(HW - first, 0)) * CG).to(tl.float32)
        total = tl.maximum(count + fresh, 1.0)  # the last tiles of the last part may be empty
        tile_mean_g = sum_groups(x_pc, CG, KP) / tl.maximum(fresh, 1.0)
        deviation_pc = tl.where(inside_pc, x_pc - to_channels(tile_mean_g, CG, BLOCK_C)[None, :], 0.0)
        # sets are merged by their means (Chan, Golub & LeVeque 1983): a sum of squares would cancel
        apart_g = tile_mean_g - mean_g
        squares_g += sum_groups(deviation_pc * deviation_pc, CG, KP) + apart_g * apart_g * (count * fresh / total)
        mean_g += apart_g * (fresh / total)
        count += fresh
    g = tl.arange(0, KP)
    row = partial_ptr + (n * PARTS + part).to(tl.int64) * (2 * (C // CG)) + slab * K + g
    tl.store(row, mean_g, mask=g < K)
    tl.store(row + C // CG, squares_g, mask=g < K)


@triton.jit
def apply_kernel(
    x_ptr, gamma_ptr, beta_ptr, scale_ptr, shift_ptr, seed_ptr, offset_ptr, partial_ptr, y_ptr,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
    SHIFT_ROW: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, DROPPED: tl.constexpr,
    PARTS: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr,
    PARTS_P: tl.constexpr,
):  # fmt: skip
    """y of one part of a slab, from the statistics of all parts."""
    n, slab, part = place(C, K * CG, PARTS)
    stream = random_stream(seed_ptr, offset_ptr)
    weight_c, bias_c = affine(gamma_ptr, beta_ptr, scale_ptr, shift_ptr, n, slab, K * CG, SCALE_ROW, SHIFT_ROW, BLOCK_C)
    mean_c, rstd_c = combine(partial_ptr, n, slab, HW, C, CG, K, PARTS, TILES * BLOCK_P, BLOCK_C, KP, PARTS_P, EPS)
    for tile in range(TILES):
        first = (part * TILES + tile) * BLOCK_P
        at_pc, inside_pc = tile_at(n, slab, first, HW, C, K * CG, BLOCK_P, BLOCK_C)
        x_pc = tl.load(x_ptr + at_pc, mask=inside_pc, other=0.0)
        normal_pc = (x_pc.to(tl.float32) - mean_c[None, :]) * (weight_c * rstd_c)[None, :]
        y_pc = activate(normal_pc + bias_c[None, :], ACT)
        y_pc = drop(y_pc * keep_scale(DROPPED), stream, n, slab, first, C, K * CG, DROPPED)
        tl.store(y_ptr + at_pc, y_pc.to(x_pc.dtype), mask=inside_pc)


# --- where a program works -----------------------------------------------------------------------------------------


@triton.jit
def place(C: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """(sample, slab, part) of this program. Slabs go fastest: neighbours in memory are read at the same time."""
    program = tl.program_id(0)
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
def load_slab(
    ptr, n, slab, HW: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All pixels of a slab as a tuple of pieces, each one access a thread.

    Of one large block every intermediate value would be as large: the compiler works through it operation by operation.
    """
    slab_pc = ()
    for piece in tl.static_range(PIECES):
        at_pc, inside_pc = tile_at(n, slab, piece * BLOCK_P, HW, C, WIDTH, BLOCK_P, BLOCK_C)
        slab_pc = slab_pc + (tl.load(ptr + at_pc, mask=inside_pc, other=0.0),)  # noqa: RUF005 - Triton cannot unpack
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


# --- sums over groups ----------------------------------------------------------------------------------------------


@triton.jit
def statistics(
    x, done, HW: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EPS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """(mean, 1 / standard deviation) of each channel's group, taken after `done`, see `after`.

    The mean first: squares are then of what is centred.
    """
    BLOCK_P: tl.constexpr = x[0].shape[0]
    BLOCK_C: tl.constexpr = x[0].shape[1]
    total_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    for piece in tl.static_range(PIECES):
        total_pc += after(x[piece], done[piece])
    mean_c = to_channels(sum_groups(total_pc, CG, KP) / (HW * CG), CG, BLOCK_C)
    squares_pc = tl.full((BLOCK_P, BLOCK_C), 0, tl.float32)
    c = tl.arange(0, BLOCK_C)[None, :]
    for piece in tl.static_range(PIECES):
        p = piece * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        deviation_pc = tl.where(
            (p < HW) & (c < K * CG), after(x[piece], x[(piece + 1) % PIECES]) - mean_c[None, :], 0.0
        )
        squares_pc += deviation_pc * deviation_pc
    variance_g = sum_groups(squares_pc, CG, KP) / (HW * CG)
    return mean_c, to_channels(tl.rsqrt(variance_g + EPS), CG, BLOCK_C)


@triton.jit
def combine(
    partial_ptr, n, slab,
    HW: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    BLOCK_C: tl.constexpr, KP: tl.constexpr, PARTS_P: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """`statistics` of a whole slab from those of its parts, of PART pixels each but the last."""
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
    return to_channels(mean_g, CG, BLOCK_C), to_channels(tl.rsqrt(variance_g + EPS), CG, BLOCK_C)


@triton.jit
def sum_groups(z_pc, CG: tl.constexpr, KP: tl.constexpr):
    """Sum over all pixels and the channels of each group: [KP]."""
    if CG & (CG - 1) == 0:
        # the channels of a group first: most of them are in one thread, and fewer sums cross threads
        z_g = tl.sum(tl.sum(tl.reshape(z_pc, (z_pc.shape[0], KP, CG)), 2), 0)
    else:
        z_g = to_groups(tl.sum(z_pc, 0), CG, KP)
    return z_g


@triton.jit
def to_groups(z_c, CG: tl.constexpr, KP: tl.constexpr):
    """Sum over the channels of each group: [BLOCK_C] to [KP]."""
    if CG & (CG - 1) == 0:
        z_g = tl.sum(tl.reshape(z_c, (KP, CG)), 1)
    else:
        z_g = tl.sum(tl.where(_member(CG, z_c.shape[0], KP), z_c[None, :], 0.0), 1)
    return z_g


@triton.jit
def to_channels(z_g, CG: tl.constexpr, BLOCK_C: tl.constexpr):
    """Each group's value for each of its channels: [KP] to [BLOCK_C]."""
    KP: tl.constexpr = z_g.shape[0]
    if CG & (CG - 1) == 0:
        z_c = tl.reshape(tl.broadcast_to(z_g[:, None], (KP, CG)), (BLOCK_C,))
    else:
        z_c = tl.sum(tl.where(_member(CG, BLOCK_C, KP), z_g[:, None], 0.0), 0)
    return z_c


@triton.jit
def _member(CG: tl.constexpr, BLOCK_C: tl.constexpr, KP: tl.constexpr):
    return (tl.arange(0, BLOCK_C) // CG)[None, :] == tl.arange(0, KP)[:, None]


@triton.jit
def after(x_pc, done_pc):
    """`x` in fp32, which the compiler believes to depend on `done`, a block of the same type.

    So it converts 16-bit elements anew in each pass, where it would keep the fp32 of the pass before in twice the
    registers, and takes piece after piece, where it would work on all at once: the backward of 64 elements a thread
    compiles to 128 registers instead of 246. It cannot know that %ctaid.z is zero in x ^ (done & %ctaid.z).
    """
    if _IN_ASSEMBLY and x_pc.dtype == tl.bfloat16:
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


# --- dropout -------------------------------------------------------------------------------------------------------


@triton.jit
def random_stream(seed_ptr, offset_ptr):
    """(seed, offset) as `drop` takes them; zeros without pointers."""
    seed = tl.full((), 0, tl.int64)
    offset = tl.full((), 0, tl.int64)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        offset = tl.load(offset_ptr)
    return seed, offset


@triton.jit
def drop(z_pc, stream, n, slab, first, C: tl.constexpr, WIDTH: tl.constexpr, DROPPED: tl.constexpr):
    """`z` where its 16 random bits are at least DROPPED, else 0; to be multiplied by `keep_scale`.

    Random bits are a function of seed, offset, sample, pixel and channel, whatever the tiling: one Philox4x32-7 call
    (Salmon et al. 2011; seven rounds are the fewest that pass their tests) gives eight neighbouring channels 16 each.
    """
    if DROPPED > 0:
        BLOCK_P: tl.constexpr = z_pc.shape[0]
        BLOCK_C: tl.constexpr = z_pc.shape[1]
        EIGHTHS: tl.constexpr = (C + 7) // 8
        seed, offset = stream
        low, high = (offset & 0xFFFFFFFF).to(tl.uint32), (offset >> 32).to(tl.uint32)
        p = first + tl.arange(0, BLOCK_P)[:, None]
        if WIDTH % 8 == 0:
            eighth = p * EIGHTHS + slab * (WIDTH // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
            a, b, c, d = tl.philox(seed, eighth.to(tl.uint32), n.to(tl.uint32), low, high, _ROUNDS)
            words = tl.join(tl.join(a, c), tl.join(b, d))  # [..., 2, 2] in the order a, b, c, d
            bits_pc = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_P, BLOCK_C))
        else:
            # a slab that begins inside of an eighth: eight times the work
            channel = slab * WIDTH + tl.arange(0, BLOCK_C)[None, :]
            a, b, c, d = tl.philox(
                seed, (p * EIGHTHS + channel // 8).to(tl.uint32), n.to(tl.uint32), low, high, _ROUNDS
            )
            word = channel // 2 % 4
            words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
            bits_pc = tl.where(channel % 2 == 0, words & 0xFFFF, words >> 16)
        z_pc = tl.where(bits_pc >= DROPPED, z_pc, 0.0)
    return z_pc


@triton.constexpr_function
def keep_scale(dropped):
    """What the kept elements are multiplied by, so that dropout keeps the mean."""
    return 65536 / (65536 - dropped)
