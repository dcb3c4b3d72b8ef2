"""The weight of a convolution's phases after upsampling, and its gradient turned back: see upsample_conv2d.

    V[a, b, dr, ds] = the sum of W[r, s] over all r, s with (r + 1 - a) // 2 = dr and (s + 1 - b) // 2 = ds
    dW[r, s]        = the sum of dV[a, b, (r + 1 - a) // 2, (s + 1 - b) // 2] over the four phases (a, b)

W is [K, 9, C] in memory and V [K, 16, C], its 16 rows in the order (a, b, dr, ds).
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor


@triton.jit
def phase_weights_kernel(
    weight_ptr, phases_ptr, pairs, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """V of W, summed in fp32 and rounded once; `pairs` of filter and channel, BLOCK a program."""
    wait_for_predecessor(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    k, c = at // C, at % C
    taps = ()
    for tap in tl.static_range(9):
        loaded = tl.load(weight_ptr + (k * 9 + tap) * C + c, mask=inside, other=0.0)
        taps = taps + (loaded.to(tl.float32),)  # noqa: RUF005 - Triton cannot unpack
    left = _of_phases(taps[0], taps[3], taps[6])
    middle = _of_phases(taps[1], taps[4], taps[7])
    right = _of_phases(taps[2], taps[5], taps[8])
    for i in tl.static_range(4):
        columns = _of_phases(left[i], middle[i], right[i])
        for j in tl.static_range(4):
            place = phases_ptr + (k * 16 + (i // 2 * 8 + j // 2 * 4 + i % 2 * 2 + j % 2)) * C + c
            tl.store(place, columns[j].to(phases_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_phases(first, second, third):
    """Of three taps along an axis the two of each phase: of the even pixels, then of the odd ones."""
    return first, second + third, first + second, third


@triton.jit
def phase_gradients_kernel(
    parts_ptr, dw_ptr, numel,
    C: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dW of the sum of parts [PARTS, K 16 C] of dV, in fp32, rounded once; always in the same order, AT_ONCE parts
    loaded together.
    """
    wait_for_predecessor(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < numel)[None, :]
    c, tap, k = at % C, at // C % 9, at // (9 * C)
    part = tl.arange(0, AT_ONCE)[:, None]
    total = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        for phase in tl.static_range(4):
            down, across = (tap // 3 + 1 - phase // 2) // 2, (tap % 3 + 1 - phase % 2) // 2
            place = (first + part) * (numel // 9 * 16).to(tl.int64) + ((k * 16 + phase * 4 + down * 2 + across) * C + c)
            total += tl.load(parts_ptr + place, mask=inside & (first + part < PARTS), other=0.0)
    tl.store(dw_ptr + at, tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty), mask=at < numel)
