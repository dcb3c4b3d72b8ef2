"""Gradient of attention_packed: dqkv in one kernel, in the layout that the linear layer's backward takes.

dout       [N, T, heads D]    contiguous, dtype of qkv
qkv        [N, T, 3 heads D]  as the forward's; heads and scale too
out, lse   what the forward returned
returns    dqkv [N, T, 3 heads D], contiguous, dtype of qkv

Softmax and sums are fp32; softmax and its gradient are rounded to the dtype of qkv for the products that follow; dqkv
is rounded once. No atomics, so equal calls give equal bits. Raises ValueError or TypeError as the forward does.

Where one block has all queries of an image, up to 256 of 64 channels on sm_90, one program has their dq in registers
and walks over the keys: each block of keys yields its dk and dv at once. Five products, and every byte moves once.
Elsewhere a block of queries has a program that makes dq and a block of keys one that makes dk and dv, in one launch:
seven products, since both compute the scores, but no sum that two programs share. Predicted for T of 256, 4 heads of 64
channels, batch 128, bf16, on an H200: 134 MB, 31 µs at the rate of a copy, and 21 GFLOP.

Not in `kernels.ALL`; `tuning.tune` takes it nevertheless.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.matmul import matmul_pipe
from ridgeline.kernels._attention_packed import attention_packed_backward_kernel
from ridgeline.kernels._attention_packed_call import (
    REAL_SIZES,
    BackwardCall,
    Config,
    attention,
    attention_sample,
    default_config,
    proposals,
)
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._op import Launch, Launcher, Op, Target, execute, register, target_of, tuned_config


def reference(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,  # noqa: ARG001 - computed again, in the dtype asked for
    lse: Tensor,  # noqa: ARG001
    *,
    heads: int,
    scale: float | None = None,
) -> Tensor:
    """What autograd makes of the forward's meaning."""
    with torch.enable_grad():
        leaf = qkv.detach().requires_grad_()
        again = attention(leaf, heads=heads, scale=scale)[0]
        return torch.autograd.grad(again, leaf, dout)[0]


def cost(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *, heads: int, scale: float | None = None) -> Cost:
    """Five matrix products: what one program with all queries does, and the least."""
    problem = BackwardCall(qkv, heads, scale, dout, out, lse).problem
    read = sum(t.nbytes for t in (dout, qkv, out, lse))
    return Cost(problem.backward_flops, read, qkv.nbytes, matmul_pipe(qkv.dtype))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    call = BackwardCall(**arguments)
    return proposals(call, target or target_of(call.qkv))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch that makes dqkv; `arguments` are BackwardCall's. Runs nothing."""
    call = BackwardCall(**arguments)
    target = target or target_of(call.qkv)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(call, target), **arguments)
        config = tuned or default_config(call, target)
    if not config.is_valid(call, target):
        call.refuse(f"{config} is not valid for {call.heads} heads of qkv {tuple(call.qkv.shape)} on {target.arch}")
    dqkv = torch.empty_like(call.qkv)
    return Launch(
        attention_packed_backward_kernel,
        grid=(config.programs(call),),
        arguments={
            "dout_ptr": call.dout, "qkv_ptr": call.qkv, "out_ptr": call.out, "lse_ptr": call.lse,
            "dqkv_ptr": dqkv, "images": call.qkv.shape[0],
        },
        constants=config.constants(call),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=dqkv,
    )  # fmt: skip


def attention_packed_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *, heads: int, scale: float | None = None
) -> Tensor:
    launch = plan(dout=dout, qkv=qkv, out=out, lse=lse, heads=heads, scale=scale)
    return execute("attention_packed_backward", launch, qkv)


def _fake(dout: Tensor, qkv: Tensor, *others: Tensor, **choices: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(qkv)


SAMPLES = (
    attention_sample("several images a program, the last one short", 5, 6, 2, 16, backward=True),
    attention_sample("more tokens than a block", 1, 70, 1, 16, backward=True),
    attention_sample("channels no power of two, a scale of its own", 2, 9, 3, 12, backward=True, scale=0.5),
    *(
        attention_sample(
            f"{t} tokens, {heads} heads of {d}, batch 128", 128, t, heads, d, backward=True, real_size=True
        )
        for t, heads, d in REAL_SIZES
    ),
)

OP = Op(
    name="attention_packed_backward",
    call=register(attention_packed_backward, fake=_fake, on_cpu=reference, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)
