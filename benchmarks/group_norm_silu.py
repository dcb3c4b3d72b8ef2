"""Time group_norm_silu, forward and backward, on the maps of the DDPM network beside PyTorch: right first, then fast.

    python benchmarks/group_norm_silu.py --configs 8 --compile --out benchmarks/results/kernels.jsonl

Rivals are plain PyTorch in channels_last, eager and, with --compile, torch.compile of the same function (with dropout
PyTorch's own); their backward is that of autograd, and so is ours. Values and gradients are checked against float64
before anything is timed. Each call is captured 20 times in one CUDA graph; "share of copy" is the rate of the bytes
that must move over that of a device-to-device copy timed in the same run. Maps below 32x32 stay in the L2 between
calls, so their share can pass 100 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _rows
from _both_ways import Call, Job, main, own_calls, rows_beside_copy
from ridgeline.errors import VerificationFailed
from ridgeline.kernels import group_norm_silu, group_norm_silu_backward
from ridgeline.kernels._op import DTYPES
from ridgeline.numerics import compare, to_float64

DIFFERENTIABLE = ("x", "gamma", "beta", "scale", "shift")
BACKWARD = group_norm_silu_backward.OP


def bench(job: Job, where: _rows.Machine, *, configs: int, compiled: bool, repeats: int) -> list[_rows.Row]:
    """Check and time one problem; prints a line a row."""
    rivals: dict[str, Callable[..., Tensor]] = {"eager": plain}
    if compiled:
        torch.compiler.reset()
        rivals["torch.compile"] = torch.compile(plain, mode="max-autotune-no-cudagraphs")
    check(job)
    forward = forward_of(job)
    calls = [Call("forward", stack, recipe_of(stack), lambda f=f: f(**forward)) for stack, f in rivals.items()]
    calls += own_calls("forward", group_norm_silu.OP, forward, configs)
    calls += own_calls("backward", BACKWARD, job.arguments, configs)
    for stack, call in {**rivals, "ridgeline": group_norm_silu.OP}.items():
        calls.append(Call("forward+backward", stack, recipe_of(stack), gradients_of(call, job)))
    costs = {"forward": group_norm_silu.cost(**forward), "backward": BACKWARD.cost(**job.arguments)}
    # autograd has no use for a residual gradient
    costs["forward+backward"] = costs["forward"] + BACKWARD.cost(job.arguments["dy"], **forward)
    batch = job.arguments["x"].shape[0]
    return rows_beside_copy(job, calls, costs, where, subject="kernel:group_norm_silu", batch=batch, repeats=repeats)


def forward_of(job: Job) -> dict[str, Any]:
    return job.without("dy", "residual")


def plain(*, p: float = 0.0, **arguments: Any) -> Tensor:
    """The reference with PyTorch's dropout: its own is made for exactness, of integers."""
    y = group_norm_silu.reference(**arguments)
    return F.dropout(y, p) if p else y


def recipe_of(stack: str) -> str:
    return {"eager": "channels_last", "torch.compile": "max-autotune"}.get(stack, "default")


def gradients_of(call: Callable[..., Tensor], job: Job) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward by autograd, as a training step runs them."""
    forward = forward_of(job)
    named = {name: forward[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in forward}
    arguments = {**forward, **named}

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(call(**arguments), list(named.values()), job.arguments["dy"])

    return run


def check(job: Job) -> None:
    """All gradients of the operator against float64 autograd; raises VerificationFailed."""
    exact_job = Job(job.sample, job.dtype, to_float64(job.arguments))
    exact = gradients_of(group_norm_silu.reference, exact_job)()
    eager = gradients_of(group_norm_silu.reference, job)()
    ours = gradients_of(group_norm_silu.OP, job)()
    for name, a, r, e in zip(DIFFERENTIABLE, ours, exact, eager, strict=False):
        verdict = compare(a, r, e, error_factor=BACKWARD.error_factor)
        if not verdict.passed:
            raise VerificationFailed(f"gradient of {name} is wrong for {job.sample.why}: {verdict.reason}")


if __name__ == "__main__":
    sys.exit(main("group_norm_silu.py", __doc__, BACKWARD, bench, dtypes=tuple(DTYPES), sample="UNet"))
