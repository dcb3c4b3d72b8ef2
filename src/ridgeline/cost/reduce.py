"""Reductions, softmax and pooling; `softmax_naive` and `softmax_fused` in pure numbers.

Bytes: input once, output once. FLOPs: one an element for a sum or maximum, more where an element is prepared first.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Formula, Work, first_numel, per_input, per_output, table, work

# max, subtract, exp, sum, divide
SOFTMAX_FLOPS = 5


def softmax_naive(m: int, n: int, dtype: torch.dtype) -> Cost:
    """Row softmax of [m, n] with one kernel a step: reads 5mn + 2m, writes 3mn + 2m elements.

    max reads mn, writes m; subtract reads mn + m, writes mn; exp reads and writes mn; sum reads mn, writes m;
    divide reads mn + m, writes mn.
    """
    size = dtype.itemsize
    return Cost(SOFTMAX_FLOPS * m * n, size * (5 * m * n + 2 * m), size * (3 * m * n + 2 * m))


def softmax_fused(m: int, n: int, dtype: torch.dtype) -> Cost:
    """Row softmax with the row kept on chip: reads mn, writes mn elements."""
    size = dtype.itemsize
    return Cost(SOFTMAX_FLOPS * m * n, size * m * n, size * m * n)


def _axes_product(kernel: Any, axes: int) -> int:
    sizes = [kernel] if isinstance(kernel, int) else list(kernel)
    return prod(sizes) if len(sizes) > 1 else sizes[0] ** axes


def _pool_2d(x: Tensor, kernel: Any, *_args: Any, result: Any, **_kwargs: Any) -> Work:
    """One comparison or addition a window element; the int64 indices of max pooling are eight bytes an output."""
    return work(first_numel(result) * _axes_product(kernel, 2), x, result)


def _avg_pool_2d_backward(grad: Tensor, _x: Tensor, kernel: Any, *_args: Any, result: Tensor, **_kwargs: Any) -> Work:
    # The input is an argument only for its shape: its values are not read.
    return work(grad.numel() * _axes_product(kernel, 2), grad, result)


def _max_pool_backward(grad: Tensor, _x: Tensor, *args: Any, result: Tensor, **kwargs: Any) -> Work:
    indices = kwargs.get("indices", args[-1] if args else None)
    return work(grad.numel(), (grad, indices), result)


def _adaptive_pool_backward(grad: Tensor, _x: Tensor, *_args: Any, result: Tensor) -> Work:
    return work(result.numel(), grad, result)


FORMULAS = {
    **table(
        (per_input("reduction", 1), "sum nansum mean prod amax amin max min aminmax argmax argmin any all"),
        (per_input("reduction", 1), "cumsum cumprod logcumsumexp cummax cummin count_nonzero median kthvalue trace"),
        (per_input("reduction", 2), "norm linalg_vector_norm dist"),
        (per_input("reduction", 4), "var std var_mean std_mean logsumexp"),
        (per_output("reduction", 3), "cumprod_backward _cdist_forward renorm"),
        (per_input("reduction", 1), "nll_loss_forward nll_loss2d_forward"),
        (per_output("pointwise", 1), "nll_loss_backward nll_loss2d_backward"),
        (per_output("softmax", SOFTMAX_FLOPS), "_softmax _log_softmax _safe_softmax"),
        # dy·y, sum, subtract, multiply
        (per_output("softmax", 4), "_softmax_backward_data _log_softmax_backward_data"),
        (Formula("pool", _pool_2d), "max_pool2d_with_indices avg_pool2d"),
        (Formula("pool", _max_pool_backward), "max_pool2d_with_indices_backward adaptive_max_pool2d_backward"),
        (Formula("pool", _avg_pool_2d_backward), "avg_pool2d_backward"),
        (per_input("pool", 1), "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d"),
        (Formula("pool", _adaptive_pool_backward), "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    ),
}
