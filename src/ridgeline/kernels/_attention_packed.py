"""Device code of attention_packed: the forward kernel, the backward kernel, and their pieces.

A program works on one head of GROUP whole images, whose rows follow each other in memory, or on a block of the rows of
one image. A row is a token: 3 HEADS D channels of qkv, the D of this program's q, k and v HEADS D apart. Suffixes name
the axes: _qd [BLOCK_Q queries, BLOCK_D channels], _kd [BLOCK_K keys, BLOCK_D channels], _qk and _kq, _q. Blocks are
powers of two; TAIL says whether some row of a block may lie beyond the rows, which are then masked.

Scores are kept in units of log2(e), because the hardware's exponential is 2^x.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor
from ridgeline.kernels._op import INTERPRETED

_LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def attention_packed_kernel(
    qkv_ptr, out_ptr, lse_ptr, images,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of queries walks over the keys with the online softmax."""
    wait_for_predecessor(PDL)
    blocks: tl.constexpr = (GROUP * T + BLOCK_Q - 1) // BLOCK_Q
    program, head, image = place(blocks, HEADS, GROUP)
    rows = tl.minimum(images - image, GROUP) * T
    q_ptr = head_of(qkv_ptr, image, head, T, 3 * HEADS * D, D)
    query = program * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_qd = load_rows(q_ptr, query, rows, 3 * HEADS * D, D, BLOCK_D, TAIL)

    largest_q = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total_q = tl.zeros((BLOCK_Q,), tl.float32)
    mixed_qd = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, GROUP * T, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k_kd = load_rows(q_ptr + HEADS * D, key, rows, 3 * HEADS * D, D, BLOCK_D, TAIL)
        v_kd = load_rows(q_ptr + 2 * HEADS * D, key, rows, 3 * HEADS * D, D, BLOCK_D, TAIL)
        score_qk = product(q_qd, tl.trans(k_kd))
        if TAIL or GROUP > 1:
            score_qk = tl.where(sees(query[:, None], key[None, :], rows, T, GROUP), score_qk, float("-inf"))
        # SCALE is positive, so the largest before scaling is the largest after, and scaling is part of one FMA. Every
        # query sees a key of the first block (several images are all in it), so `most_q` is finite and the first
        # `fade_q` is 2^-inf = 0.
        most_q = tl.maximum(largest_q, tl.max(score_qk, 1) * (SCALE * _LOG2E))
        fade_q = tl.exp2(largest_q - most_q)
        p_qk = tl.exp2(score_qk * (SCALE * _LOG2E) - most_q[:, None])
        total_q = total_q * fade_q + tl.sum(p_qk, 1)
        mixed_qd = product(p_qk.to(v_kd.dtype), v_kd, mixed_qd * fade_q[:, None])
        largest_q = most_q

    out_qd = (mixed_qd * (1.0 / total_q)[:, None]).to(out_ptr.dtype.element_ty)
    store_rows(head_of(out_ptr, image, head, T, HEADS * D, D), query, rows, out_qd, HEADS * D, D, TAIL)
    lse_q = (largest_q + tl.log2(total_q)) / _LOG2E
    tl.store(lse_ptr + lse_at(image, head, query, T, HEADS, GROUP), lse_q, mask=query < rows)


@triton.jit
def attention_packed_backward_kernel(
    dout_ptr, qkv_ptr, out_ptr, lse_ptr, dqkv_ptr, sums_ptr, images,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where one block has all queries, a program makes dq, dk and dv; elsewhere dq, or dk and dv, by its number."""
    wait_for_predecessor(PDL)
    q_blocks: tl.constexpr = (GROUP * T + BLOCK_Q - 1) // BLOCK_Q
    k_blocks: tl.constexpr = (GROUP * T + BLOCK_K - 1) // BLOCK_K
    if q_blocks == 1:
        _, head, image = place(1, HEADS, GROUP)
        dq_of_queries(
            dout_ptr, qkv_ptr, out_ptr, lse_ptr, dqkv_ptr, sums_ptr, images, image, head, 0,
            T, HEADS, D, GROUP, SCALE, TAIL, True, BLOCK_Q, BLOCK_K, BLOCK_D,
        )  # fmt: skip
    else:
        program, head, image = place(q_blocks + k_blocks, HEADS, GROUP)
        if program < q_blocks:
            dq_of_queries(
                dout_ptr, qkv_ptr, out_ptr, lse_ptr, dqkv_ptr, sums_ptr, images, image, head, program,
                T, HEADS, D, GROUP, SCALE, TAIL, False, BLOCK_Q, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        else:
            dkv_of_keys(
                dout_ptr, qkv_ptr, out_ptr, lse_ptr, dqkv_ptr, image, head, program - q_blocks,
                T, HEADS, D, SCALE, TAIL, BLOCK_Q, BLOCK_K, BLOCK_D,
            )  # fmt: skip


@triton.jit
def dq_of_queries(
    dout_ptr, qkv_ptr, out_ptr, lse_ptr, dqkv_ptr, sums_ptr, images, image, head, block,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    TAIL: tl.constexpr, ALL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries over all keys; where they are ALL queries, also dk and dv of each block of keys.

    And, unless `sums_ptr` is None, what the block adds to the sums of all three over tokens: dout to that of dv, since
    the weights of a query sum to one, and for the same reason nothing to that of dk.
    """
    PITCH: tl.constexpr = 3 * HEADS * D
    rows = tl.minimum(images - image, GROUP) * T
    q_ptr = head_of(qkv_ptr, image, head, T, PITCH, D)
    dq_ptr = head_of(dqkv_ptr, image, head, T, PITCH, D)
    query = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_qd = load_rows(q_ptr, query, rows, PITCH, D, BLOCK_D, TAIL)
    dout_qd, delta_q, lse_q = of_result(
        dout_ptr, out_ptr, lse_ptr, image, head, query, rows, T, HEADS, D, BLOCK_D, GROUP, TAIL
    )
    if sums_ptr is not None:
        blocks: tl.constexpr = (GROUP * T + BLOCK_Q - 1) // BLOCK_Q
        sums_ptr += head * D
        dv_d = tl.sum(dout_qd.to(tl.float32), 0)
        store_sum(sums_ptr + HEADS * D, tl.zeros_like(dv_d), image, images, block, blocks, PITCH, D, GROUP)
        store_sum(sums_ptr + 2 * HEADS * D, dv_d, image, images, block, blocks, PITCH, D, GROUP)
    dq_qd = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, GROUP * T, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k_kd = load_rows(q_ptr + HEADS * D, key, rows, PITCH, D, BLOCK_D, TAIL)
        v_kd = load_rows(q_ptr + 2 * HEADS * D, key, rows, PITCH, D, BLOCK_D, TAIL)
        p_qk = tl.exp2(product(q_qd, tl.trans(k_kd)) * (SCALE * _LOG2E) - lse_q[:, None])
        if TAIL or GROUP > 1:
            p_qk = tl.where(sees(query[:, None], key[None, :], rows, T, GROUP), p_qk, 0.0)
        if ALL:
            dv_kd = product(tl.trans(p_qk.to(k_kd.dtype)), dout_qd)
            store_rows(dq_ptr + 2 * HEADS * D, key, rows, dv_kd.to(k_kd.dtype), PITCH, D, TAIL)
        ds_qk = (p_qk * (product(dout_qd, tl.trans(v_kd)) - delta_q[:, None])).to(k_kd.dtype)
        if ALL:
            dk_kd = product(tl.trans(ds_qk), q_qd) * SCALE
            store_rows(dq_ptr + HEADS * D, key, rows, dk_kd.to(k_kd.dtype), PITCH, D, TAIL)
        dq_qd = product(ds_qk, k_kd, dq_qd)
    store_rows(dq_ptr, query, rows, (dq_qd * SCALE).to(q_qd.dtype), PITCH, D, TAIL)
    if sums_ptr is not None:
        store_sum(sums_ptr, tl.sum(dq_qd, 0) * SCALE, image, images, block, blocks, PITCH, D, GROUP)


@triton.jit
def dkv_of_keys(
    dout_ptr, qkv_ptr, out_ptr, lse_ptr, dqkv_ptr, image, head, block,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one image over all queries.

    Scores stand here with the keys in front: as they come, they are the left operands of both sums.
    """
    PITCH: tl.constexpr = 3 * HEADS * D
    q_ptr = head_of(qkv_ptr, image, head, T, PITCH, D)
    dq_ptr = head_of(dqkv_ptr, image, head, T, PITCH, D)
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k_kd = load_rows(q_ptr + HEADS * D, key, T, PITCH, D, BLOCK_D, TAIL)
    v_kd = load_rows(q_ptr + 2 * HEADS * D, key, T, PITCH, D, BLOCK_D, TAIL)
    dk_kd = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv_kd = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_Q):
        query = start + tl.arange(0, BLOCK_Q)
        q_qd = load_rows(q_ptr, query, T, PITCH, D, BLOCK_D, TAIL)
        dout_qd, delta_q, lse_q = of_result(
            dout_ptr, out_ptr, lse_ptr, image, head, query, T, T, HEADS, D, BLOCK_D, 1, TAIL
        )
        p_kq = tl.exp2(product(k_kd, tl.trans(q_qd)) * (SCALE * _LOG2E) - lse_q[None, :])
        if TAIL:
            p_kq = tl.where(sees(query[None, :], key[:, None], T, T, 1), p_kq, 0.0)
        dv_kd = product(p_kq.to(k_kd.dtype), dout_qd, dv_kd)
        ds_kq = p_kq * (product(v_kd, tl.trans(dout_qd)) - delta_q[None, :])
        dk_kd = product(ds_kq.to(k_kd.dtype), q_qd, dk_kd)
    store_rows(dq_ptr + HEADS * D, key, T, (dk_kd * SCALE).to(k_kd.dtype), PITCH, D, TAIL)
    store_rows(dq_ptr + 2 * HEADS * D, key, T, dv_kd.to(k_kd.dtype), PITCH, D, TAIL)


# --- pieces ----------------------------------------------------------------------------------------------------------


@triton.jit
def place(BLOCKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """(block, head, first image) of this program. Blocks of one head go fastest: they read the same keys."""
    program = tl.program_id(0)
    return program % BLOCKS, program // BLOCKS % HEADS, program // (BLOCKS * HEADS) * GROUP


@triton.jit
def head_of(ptr, image, head, T: tl.constexpr, PITCH: tl.constexpr, D: tl.constexpr):
    """Where the channels of a head begin in the first row of an image; within a group, offsets fit 32 bits."""
    return ptr + image.to(tl.int64) * (T * PITCH) + head * D


@triton.jit
def load_rows(ptr, row, rows, PITCH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """D channels of each `row`, as [rows, BLOCK_D]; 0 beyond them."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = row[:, None] * PITCH + d
    if TAIL or BLOCK_D > D:
        return tl.load(ptr + at, mask=(row[:, None] < rows) & (d < D), other=0.0)
    else:
        return tl.load(ptr + at)  # every row and channel of the block exists


@triton.jit
def store_rows(ptr, row, rows, x_rd, PITCH: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr):
    d = tl.arange(0, x_rd.shape[1])[None, :]
    at = row[:, None] * PITCH + d
    if TAIL or x_rd.shape[1] > D:
        tl.store(ptr + at, x_rd, mask=(row[:, None] < rows) & (d < D))
    else:
        tl.store(ptr + at, x_rd)


@triton.jit
def store_sum(
    ptr, x_d, image, images, block,
    BLOCKS: tl.constexpr, PITCH: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A sum over a program's rows, in sums [N, BLOCKS, PITCH]: the first image of a group has it, the others have 0."""
    n = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
    d = tl.arange(0, x_d.shape[0])[None, :]
    at = ((image + n).to(tl.int64) * BLOCKS + block) * PITCH + d
    tl.store(ptr + at, tl.where(n == 0, x_d[None, :], 0.0), mask=(n < GROUP) & (image + n < images) & (d < D))


@triton.jit
def of_result(
    dout_ptr, out_ptr, lse_ptr, image, head, query, rows,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """(dout, its product with out a row, lse in units of log2(e)) of a block of queries."""
    dout_qd = load_rows(head_of(dout_ptr, image, head, T, HEADS * D, D), query, rows, HEADS * D, D, BLOCK_D, TAIL)
    out_qd = load_rows(head_of(out_ptr, image, head, T, HEADS * D, D), query, rows, HEADS * D, D, BLOCK_D, TAIL)
    delta_q = tl.sum(dout_qd.to(tl.float32) * out_qd.to(tl.float32), 1)
    lse_q = tl.load(lse_ptr + lse_at(image, head, query, T, HEADS, GROUP), mask=query < rows, other=0.0)
    return dout_qd, delta_q, lse_q * _LOG2E


@triton.jit
def lse_at(image, head, query, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Offsets of queries in lse [N, HEADS, T]."""
    if GROUP > 1:
        query = query // T * (HEADS * T) + query % T
    return (image.to(tl.int64) * HEADS + head) * T + query


@triton.jit
def sees(query, key, rows, T: tl.constexpr, GROUP: tl.constexpr):
    """Whether a query and a key belong to one image. Queries beyond the rows go with the last: theirs stay finite."""
    if GROUP > 1:
        return (tl.minimum(query, rows - 1) // T == key // T) & (key < rows)
    else:
        return key < rows


@triton.jit
def product(a, b, start=None):
    """start + a b in fp32; fp32 operands are multiplied exactly."""
    if _INTERPRETED:
        # which holds bf16 as integers, and would multiply those
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, start, input_precision="ieee")
