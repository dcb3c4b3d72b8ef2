"""The interpreter that the tests run under refuses what Triton's own refuses, and computes the same."""

from __future__ import annotations

import operator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from ridgeline.kernels._op import Launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here, not interpreted")


@triton.jit
def _combine(x, y, OP: tl.constexpr):
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    else:
        z = x * y
    return z


@triton.jit
def _kernel(x_ptr, y_ptr, step, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y = _combine(tl.load(x_ptr + i), step, OP)
    tl.store(y_ptr + i, y)
    tl.store(y_ptr + BLOCK, tl.max(y))  # a helper of Triton's own, which lives in another module


def run(x: torch.Tensor, *, op: str, step: int, block: int) -> torch.Tensor:
    """`block` results, and their largest."""
    y = torch.zeros(block + 1, dtype=torch.int32)
    arguments = {"x_ptr": x, "y_ptr": y, "step": step}
    Launch(_kernel, (1,), arguments, {"OP": op, "BLOCK": block}, num_warps=1, num_stages=1, output=y).run()
    return y


@pytest.mark.parametrize(("op", "step"), [("add", 7), ("sub", -3), ("mul", 5)])
def test_results_are_those_of_torch(op: str, step: int):
    for block in (8, 16, 8):
        x = torch.arange(block, dtype=torch.int32)
        expected = getattr(operator, op)(x, step)
        assert run(x, op=op, step=step, block=block).tolist() == [*expected.tolist(), int(expected.max())]


def test_blocks_whose_size_is_no_power_of_two_are_refused():
    x = torch.zeros(12, dtype=torch.int32)
    for _ in range(2):  # what was refused once is not remembered as right
        with pytest.raises(InterpreterError, match="power of 2"):
            run(x, op="add", step=1, block=12)


def test_the_language_is_as_before_after_a_launch():
    before = tl.load, tl.arange, tl.tensor.__add__
    for step in (1, 2):
        assert run(torch.zeros(8, dtype=torch.int32), op="add", step=step, block=8).tolist() == [step] * 9
    assert (tl.load, tl.arange, tl.tensor.__add__) == before
