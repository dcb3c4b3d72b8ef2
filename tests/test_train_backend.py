"""What Inductor is told before it gets a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline import train_backend
from ridgeline.kernels import conv2d_fprop, group_norm_silu

OPERATORS = (conv2d_fprop.OP.overload, group_norm_silu.OP.overload)


def test_inductor_meets_no_operator_of_this_project_for_the_first_time(monkeypatch: pytest.MonkeyPatch):
    """Else PyTorch 2.11 describes its operands, which takes twice as long for every layer that they went through."""
    from torch._inductor import graph, lowering

    for operator in OPERATORS:
        lowering.lowerings.pop(operator, None)
    met = []
    monkeypatch.setattr(graph, "make_fallback", lambda op, *_, **__: met.append(op))
    weight = nn.Parameter(torch.randn(16, 16, 3, 3).contiguous(memory_format=torch.channels_last))

    def block(x):
        y = group_norm_silu.OP(x, torch.ones(16), torch.zeros(16), groups=4)
        return conv2d_fprop.OP(y, weight, None, padding=[1, 1])

    x = torch.randn(1, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    found = torch.compile(block, backend=train_backend.inductor("default"), dynamic=False)(x)
    assert met == []
    assert all(operator in lowering.lowerings for operator in OPERATORS)
    # what a tag asks of the layout of operands, as where Inductor finds the operator itself
    assert lowering.maybe_layout_constraints(OPERATORS[0]) is lowering.constrain_to_fake_tensors
    torch.testing.assert_close(found, block(x))
