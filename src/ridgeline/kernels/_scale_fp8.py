"""The two kernels of scale_fp8: all tensors' scales from their windows, and one tensor's from its own magnitude."""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor

# Columns of what producers count between updates, and of what updates keep; the first three are the same.
SEEN = ("overflows", "underflows", "elements")
TOTALS = (*SEEN, "nonfinite", "updates")
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # scales: both they and their reciprocals are normal numbers of fp32

_SEEN = tl.constexpr(len(SEEN))
_TOTALS = tl.constexpr(len(TOTALS))
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST), tl.constexpr(LARGEST)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def update_scales_kernel(
    amax_ptr, counts_ptr, largest_ptr, scale_ptr, inverse_ptr, history_ptr, peak_ptr, totals_ptr, tensors,
    MARGIN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some tensors' scales from their windows; then what was seen is counted and cleared."""
    wait_for_predecessor(PDL)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_W)[None, :]
    there = t < tensors
    bits = tl.load(amax_ptr + t, mask=there, other=0)
    overflows = tl.load(counts_ptr + t * _SEEN, mask=there, other=0)
    underflows = tl.load(counts_ptr + t * _SEEN + 1, mask=there, other=0)
    elements = tl.load(counts_ptr + t * _SEEN + 2, mask=there, other=0)
    total = totals_ptr + t * _TOTALS
    updates = tl.load(total + 4, mask=there, other=0)
    inside = there[:, None] & (w < WINDOW)
    window = tl.load(history_ptr + t[:, None] * WINDOW + w, mask=inside, other=0.0)
    old = tl.load(scale_ptr + t, mask=there, other=1.0)
    largest = tl.load(largest_ptr + t, mask=there, other=1.0)
    # several threads hold the same element: none may clear it before all have read it
    tl.debug_barrier()

    seen = there & (elements > 0)
    finite = bits < _INFINITY_BITS
    now = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    newest = w == (updates % WINDOW)[:, None]
    amax = tl.max(tl.where(newest, now[:, None], window), 1)
    scale = next_scale(amax, finite, old, largest, MARGIN)
    tl.store(history_ptr + t[:, None] * WINDOW + w, tl.broadcast_to(now[:, None], (BLOCK_T, BLOCK_W)),
             mask=inside & newest & seen[:, None])  # fmt: skip
    tl.store(scale_ptr + t, scale, mask=seen)
    tl.store(inverse_ptr + t, tl.div_rn(1.0, scale), mask=seen)
    tl.store(peak_ptr + t, tl.maximum(tl.load(peak_ptr + t, mask=seen, other=0.0), now), mask=seen)
    tl.store(total, tl.load(total, mask=seen, other=0) + overflows, mask=seen)
    tl.store(total + 1, tl.load(total + 1, mask=seen, other=0) + underflows, mask=seen)
    tl.store(total + 2, tl.load(total + 2, mask=seen, other=0) + elements, mask=seen)
    tl.store(total + 3, tl.load(total + 3, mask=seen, other=0) + tl.where(finite, 0, 1), mask=seen)
    tl.store(total + 4, updates + 1, mask=seen)
    tl.store(amax_ptr + t, 0, mask=there)
    for column in tl.static_range(_SEEN):
        tl.store(counts_ptr + t * _SEEN + column, 0, mask=there)


@triton.jit(do_not_specialize=["tensor"])
def refresh_scale_kernel(
    amax_ptr, largest_ptr, scale_ptr, inverse_ptr, tensor, MARGIN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One tensor's scale from the amax that was taken of it just now."""
    wait_for_predecessor(PDL)
    bits = tl.load(amax_ptr)
    tl.debug_barrier()  # as above
    amax = bits.to(tl.float32, bitcast=True)
    old, largest = tl.load(scale_ptr + tensor), tl.load(largest_ptr + tensor)
    scale = next_scale(amax, bits < _INFINITY_BITS, old, largest, MARGIN)
    tl.store(scale_ptr + tensor, scale)
    tl.store(inverse_ptr + tensor, tl.div_rn(1.0, scale))
    tl.store(amax_ptr, 0)


@triton.jit
def next_scale(amax, allowed, old, largest, MARGIN: tl.constexpr):
    """The rule above; quotients as IEEE rounds them, where Triton's own operator would be two steps off."""
    positive = allowed & (amax > 0.0)
    scale = tl.div_rn(largest * (2.0**-MARGIN), tl.where(positive, amax, 1.0))
    return tl.where(positive, tl.minimum(tl.maximum(scale, _SMALLEST), _LARGEST), old)
