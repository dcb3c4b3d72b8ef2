"""Matrix products: `matmul_cost` in pure numbers and the formulas of mm, addmm, bmm, baddbmm, fp8 and int8 products.

2 FLOP per multiply-accumulate. An added bias or matrix is what the accumulator starts from: bytes, no FLOPs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Formula, Gemm, Work, dims, matmul_pipe, per_output, table, without_out, work


def matmul_cost(m: int, n: int, k: int, dtype: torch.dtype, *, count: int = 1) -> Cost:
    """`count` products of [m, k] by [k, n]: both read once, [m, n] written once."""
    size = count * dtype.itemsize
    return Cost(2 * count * m * n * k, size * (m * k + k * n), size * m * n, matmul_pipe(dtype))


def gemm_of(left: Tensor, right: Tensor) -> Gemm:
    """The product of the last two axes ([m, k] by [k, n] or [k]), batched over the axes before them."""
    count = left.shape[:-2].numel() if left.dim() > 2 else 1
    m = left.shape[-2] if left.dim() > 1 else 1
    n = right.shape[-1] if right.dim() > 1 else 1
    return Gemm(m, n, left.shape[-1], count)


def _product(left: Tensor, right: Tensor, reads: Any, result: Tensor) -> Work:
    gemm = gemm_of(left, right)
    flops = 2 * gemm.count * gemm.m * gemm.n * gemm.k
    shape = f"{dims(*left.shape)} @ {dims(*right.shape)}"
    return work(flops, reads, result, matmul_pipe(left.dtype), shape=shape, gemm=gemm)


def _mm(left: Tensor, right: Tensor, *args: Any, result: Tensor, **kwargs: Any) -> Work:
    return _product(left, right, (left, right, args, without_out(kwargs)), result)


def _addmm(added: Tensor, left: Tensor, right: Tensor, *_args: Any, result: Tensor, beta: Any = 1, **_kw: Any) -> Work:
    return _product(left, right, (left, right, added if beta != 0 else ()), result)


FORMULAS = table(
    (Formula("matmul", _mm), "mm bmm mv dot vdot _int_mm _scaled_mm"),
    (Formula("matmul", _addmm), "addmm baddbmm addmv _addmm_activation"),
    (per_output("pointwise", 2), "addr"),
)
