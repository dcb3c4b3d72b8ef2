"""Time attention_packed, forward and backward, beside the kernels of PyTorch's attention: right first, then fast.

    python benchmarks/attention_packed.py --configs 6 --out benchmarks/results/kernels.jsonl

All read the same packed q, k and v and return, or make by autograd, the gradient of all three in that layout. Rivals
are F.scaled_dot_product_attention by each of its kernels that takes the problem and, with --compile, torch.compile of
PyTorch's own choice. Their backward alone is the difference of two rows. Values and gradients are checked against
float64 before anything is timed. Each call is captured 20 times in one CUDA graph; "share of copy" is the rate of the
bytes that must move over that of a device-to-device copy timed in the same run. What fits the L2 stays there between
calls, so the share of few tokens can pass 100 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import _rows
from _both_ways import Call, Job, main, own_calls, rows_beside_copy
from ridgeline.errors import VerificationFailed
from ridgeline.kernels import attention_packed, attention_packed_backward
from ridgeline.numerics import compare, to_float64

FORWARD, BACKWARD = attention_packed.OP, attention_packed_backward.OP


def bench(job: Job, where: _rows.Machine, *, configs: int, compiled: bool, repeats: int) -> list[_rows.Row]:
    """Check and time one problem; prints a line a row."""
    check(job)
    forward = forward_of(job)
    calls = list(rivals(job, compiled=compiled))
    calls += own_calls("forward", FORWARD, forward, configs)
    calls += own_calls("backward", BACKWARD, job.arguments, configs)
    calls.append(Call("forward+backward", "ridgeline", "default", gradient_of(ours, job)))
    costs = {"forward": FORWARD.cost(**forward), "backward": BACKWARD.cost(**job.arguments)}
    costs["forward+backward"] = costs["forward"] + costs["backward"]
    batch = job.arguments["qkv"].shape[0]
    return rows_beside_copy(job, calls, costs, where, subject="kernel:attention_packed", batch=batch, repeats=repeats)


def forward_of(job: Job) -> dict[str, Any]:
    return job.without("dout", "out", "lse")


def rivals(job: Job, *, compiled: bool) -> Iterator[Call]:
    """PyTorch's attention, forward and with its gradient; a kernel that refuses either is named on stderr."""
    forward = attention_packed_backward.by_backend(FORWARD.reference, **forward_of(job))
    both = attention_packed_backward.by_backend(BACKWARD.reference, **job.arguments)
    for name in attention_packed_backward.BACKENDS:
        if name not in forward or name not in both:
            print(f"{name} does not take {job.sample.why}", file=sys.stderr)
            continue
        yield Call("forward", "eager", name, forward[name])
        yield Call("forward+backward", "eager", name, both[name])
    if compiled:
        torch.compiler.reset()
        call = torch.compile(FORWARD.reference, mode="max-autotune-no-cudagraphs", dynamic=False)
        yield Call("forward", "torch.compile", "max-autotune", lambda: call(**forward_of(job)))
        yield Call("forward+backward", "torch.compile", "max-autotune", gradient_of(call, job))


def ours(**arguments: Any) -> Tensor:
    return FORWARD(**arguments)[0]


def gradient_of(call: Callable[..., Tensor], job: Job) -> Callable[[], Tensor]:
    """Forward and backward by autograd, as a training step runs them."""
    leaf = job.arguments["qkv"].detach().requires_grad_()
    arguments = {**forward_of(job), "qkv": leaf}

    def run() -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(call(**arguments), leaf, job.arguments["dout"])[0]

    return run


def check(job: Job) -> None:
    """The operator's gradient against float64 autograd; raises VerificationFailed."""
    exact, eager = (BACKWARD.reference(**arguments) for arguments in (to_float64(job.arguments), job.arguments))
    verdict = compare(gradient_of(ours, job)(), exact, eager)
    if not verdict.passed:
        raise VerificationFailed(f"the gradient of qkv is wrong for {job.sample.why}: {verdict.reason}")


if __name__ == "__main__":
    sys.exit(main("attention_packed.py", __doc__, BACKWARD, bench, dtypes=("fp16", "bf16"), sample=""))
