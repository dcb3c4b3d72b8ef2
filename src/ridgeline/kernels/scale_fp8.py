"""Scales of FP8 tensors from their largest magnitudes: of all tensors at once, from a window of steps; or of one, now.

    scale = (largest · 2^-margin) / amax, held within 2^-126 and 2^126         largest: 448 in e4m3, 57344 in e5m2

where amax is the largest of the window, the present step included. The scale stays what it was where that is zero, and
where the present one is infinite or NaN; such a one enters the window as zero. A tensor that nobody quantised since the
last update is left as it is. Held so, scale and 1 / scale are normal numbers: no tensor, all zero or all tiny, ever
gets a factor that is infinite, NaN, or flushed to zero.

That is the rule of Transformer Engine's delayed scaling (`common/recipe/delayed_scaling.cu`) but for three things:
there one infinite gradient stops the scale for a whole window, the largest scale is that of fp32, whose reciprocal is
not normal, and the window moves in memory, where here each update overwrites the oldest entry.

Nothing is read on the host, so an update can be captured. `update_`, `refresh_` and `ridgeline.fp8_scaling` are what
kernels that quantise stand on, not an operator of a graph: not in `kernels.ALL`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels._nhwc import cdiv, next_power_of_2, starts_early
from ridgeline.kernels._op import INTERPRETED, Launch, target_of
from ridgeline.kernels._scale_fp8 import LARGEST, SMALLEST, refresh_scale_kernel, update_scales_kernel

_TILE = 512  # entries of windows that a program holds


@dataclass(frozen=True, eq=False)
class State:
    """The device's side of the scales of some tensors. All dense, of one row or element a tensor."""

    amax: Tensor  # [tensors] fp32, since the last update; what producers raise
    counts: Tensor  # [tensors, 3] int64, likewise: the columns SEEN of `_scale_fp8.py`
    largest: Tensor  # [tensors] fp32, of the format
    scale: Tensor  # [tensors] fp32
    inverse: Tensor  # [tensors] fp32, 1 / scale
    history: Tensor  # [tensors, window] fp32; update n has written entry n % window
    peak: Tensor  # [tensors] fp32, the largest finite amax of all updates
    totals: Tensor  # [tensors, 5] int64: TOTALS


def update_reference_(state: State, margin: int) -> None:
    """`update_` in plain PyTorch, in place."""
    seen = state.counts[:, 2] > 0
    finite = state.amax.isfinite()
    now = state.amax.where(finite, 0.0)
    window = state.history.shape[1]
    newest = torch.arange(window, device=now.device) == (state.totals[:, 4:] % window)
    state.history.copy_(now[:, None].where(newest & seen[:, None], state.history))
    _rescale(state, state.history.amax(1), seen & finite, margin)
    state.peak.copy_(torch.maximum(state.peak, now).where(seen, state.peak))
    state.totals.add_(torch.cat([state.counts, ~finite[:, None], seen[:, None]], 1) * seen[:, None])
    state.amax.zero_()
    state.counts.zero_()


def refresh_reference_(state: State, tensor: int, amax: Tensor, margin: int) -> None:
    """`refresh_` in plain PyTorch, in place."""
    rows = slice(tensor, tensor + 1)
    one = State(**{name: value[rows] for name, value in vars(state).items()})
    _rescale(one, amax, amax.isfinite(), margin)
    amax.zero_()


def _rescale(state: State, amax: Tensor, allowed: Tensor, margin: int) -> None:
    scale = (state.largest * 2.0**-margin / amax).clamp(SMALLEST, LARGEST)
    state.scale.copy_(scale.where(allowed & (amax > 0), state.scale))
    state.inverse.copy_(1 / state.scale)


def update_(state: State, *, margin: int = 0) -> None:
    """New scales for every tensor that was quantised since the last update, which ends here; in place, one launch."""
    if state.amax.is_cuda or INTERPRETED:
        update_launch(state, margin=margin).run()
    else:
        update_reference_(state, margin)


def update_launch(state: State, *, margin: int) -> Launch:
    """The launch of `update_`. Runs nothing."""
    tensors, window = state.history.shape
    block_w = next_power_of_2(window)
    block_t = max(1, _TILE // block_w)
    pdl = starts_early(target_of(state.scale))
    return Launch(
        update_scales_kernel,
        grid=(cdiv(tensors, block_t),),
        arguments={
            "amax_ptr": state.amax.view(torch.int32), "counts_ptr": state.counts, "largest_ptr": state.largest,
            "scale_ptr": state.scale, "inverse_ptr": state.inverse, "history_ptr": state.history,
            "peak_ptr": state.peak, "totals_ptr": state.totals, "tensors": tensors,
        },
        constants={"MARGIN": margin, "WINDOW": window, "BLOCK_T": block_t, "BLOCK_W": block_w, "PDL": pdl},
        num_warps=4,
        num_stages=1,
        output=state.scale,
        pdl=pdl,
    )  # fmt: skip


def refresh_(state: State, tensor: int, amax: Tensor, *, margin: int = 0) -> None:
    """The scale of one tensor from `amax`, one fp32 that is cleared for its next use; both in place, one launch."""
    if state.amax.is_cuda or INTERPRETED:
        refresh_launch(state, tensor, amax, margin=margin).run()
    else:
        refresh_reference_(state, tensor, amax, margin)


def refresh_launch(state: State, tensor: int, amax: Tensor, *, margin: int) -> Launch:
    """The launch of `refresh_`. Runs nothing."""
    pdl = starts_early(target_of(state.scale))
    return Launch(
        refresh_scale_kernel,
        grid=(1,),
        arguments={
            "amax_ptr": amax.view(torch.int32), "largest_ptr": state.largest, "scale_ptr": state.scale,
            "inverse_ptr": state.inverse, "tensor": tensor,
        },
        constants={"MARGIN": margin, "PDL": pdl},
        num_warps=1,
        num_stages=1,
        output=state.scale,
        pdl=pdl,
    )  # fmt: skip
