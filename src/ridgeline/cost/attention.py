"""Attention: naive and flash in pure numbers, and the formulas of the fused aten operators, forward and backward.

FLOPs of the fused operators are those of their matrix products (two forward, five backward because the scores are
computed again); the softmax between them runs beside the tensor cores. A causal mask does not halve them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Formula, Work, dims, matmul_pipe, table, work
from ridgeline.cost.matmul import matmul_cost
from ridgeline.cost.reduce import softmax_fused


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """softmax(q kᵀ) v: q [batch, heads, q_len, head_dim], k and v [batch, heads, k_len, …]."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    head_dim: int
    value_dim: int

    @property
    def score_numel(self) -> int:
        """Elements of the score matrices, the part that grows with length squared."""
        return self.batch * self.heads * self.q_len * self.k_len

    @property
    def forward_flops(self) -> int:
        return 2 * self.score_numel * (self.head_dim + self.value_dim)

    @property
    def backward_flops(self) -> int:
        """Scores again, dP and dV over value_dim, dQ and dK over head_dim."""
        return 2 * self.score_numel * (3 * self.head_dim + 2 * self.value_dim)

    @property
    def q_numel(self) -> int:
        return self.batch * self.heads * self.q_len * self.head_dim

    @property
    def kv_numel(self) -> int:
        return self.batch * self.heads * self.k_len * (self.head_dim + self.value_dim)

    @property
    def o_numel(self) -> int:
        return self.batch * self.heads * self.q_len * self.value_dim


def attention_naive(problem: AttentionProblem, dtype: torch.dtype) -> Cost:
    """Three kernels, q kᵀ, softmax, p v: the score matrix is written twice and read twice."""
    count = problem.batch * problem.heads
    scores = matmul_cost(problem.q_len, problem.k_len, problem.head_dim, dtype, count=count)
    softmax = softmax_fused(count * problem.q_len, problem.k_len, dtype)
    return scores + softmax + matmul_cost(problem.q_len, problem.value_dim, problem.k_len, dtype, count=count)


def attention_flash(problem: AttentionProblem, dtype: torch.dtype) -> Cost:
    """One kernel: q, k and v read, o written, no score in memory."""
    read = dtype.itemsize * (problem.q_numel + problem.kv_numel)
    return Cost(problem.forward_flops, read, dtype.itemsize * problem.o_numel, matmul_pipe(dtype))


def problem_of(q: Tensor, k: Tensor, v: Tensor) -> AttentionProblem:
    """Layout [batch, heads, length, dim]. With fewer k heads than q heads, each serves several."""
    batch, heads, q_len, head_dim = q.shape
    return AttentionProblem(batch, heads, q_len, k.shape[-2], head_dim, v.shape[-1])


def _forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, result: Any, **kwargs: Any) -> Work:
    problem = problem_of(q, k, v)
    shape = f"q {dims(*q.shape)}, k {dims(*k.shape)}, v {dims(*v.shape)}"
    return work(problem.forward_flops, (q, k, v, args, kwargs), result, matmul_pipe(q.dtype), shape=shape)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, result: Any, **kwargs: Any) -> Work:
    problem = problem_of(q, k, v)
    shape = f"grad q {dims(*q.shape)}, k {dims(*k.shape)}, v {dims(*v.shape)}"
    return work(problem.backward_flops, (grad, q, k, v, args, kwargs), result, matmul_pipe(q.dtype), shape=shape)


_FUSED = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)

FORMULAS = {
    **table((Formula("attention", _forward), " ".join(f"_scaled_dot_product_{name}" for name in _FUSED))),
    **table((Formula("attention", _backward), " ".join(f"_scaled_dot_product_{name}_backward" for name in _FUSED))),
}
