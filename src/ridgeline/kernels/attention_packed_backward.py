"""Gradient of attention_packed: dqkv in one kernel, in the layout that the linear layer's backward takes.

dout       [N, T, heads D]    contiguous, dtype of qkv
qkv        [N, T, 3 heads D]  as the forward's; heads and scale too
out, lse   what the forward returned
returns    dqkv [N, T, 3 heads D], contiguous, dtype of qkv

Softmax and sums are fp32; softmax and its gradient are rounded to the dtype of qkv for the products that follow; dqkv
is rounded once. No atomics, so equal calls give equal bits. Raises ValueError or TypeError as the forward does.

`attention_packed_backward_summed` returns (dqkv, sums [N, 3 heads D] fp32): summed over images, these are the sums of
dqkv over images and tokens, the gradient of the bias of the layer that made qkv. Where one program takes several images
the first has the sum of all, the others have 0: the shape of sums depends on no tiles, which a compiled graph may
outlive. The sum of dq is of values that are not rounded yet. The others follow from softmax, and the loop over keys,
which has dk and dv, stays as it is: the weights of a query sum to one, so dv sums to what dout does; the gradients of
its scores sum to zero, so dk does, of which sums of rounded values are noise.

Where one block has all queries of an image, up to 256 of 64 channels on sm_90, one program has their dq in registers
and walks over the keys: each block of keys yields its dk and dv at once. Five products, and every byte moves once.
Elsewhere a block of queries has a program that makes dq and a block of keys one that makes dk and dv, in one launch:
seven products, since both compute the scores, but no sum that two programs share. Predicted for T of 256, 4 heads of 64
channels, batch 128, bf16, on an H200: 134 MB, 31 µs at the rate of a copy, and 21 GFLOP.

Not in `kernels.ALL`; `tuning.tune` takes it nevertheless.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.cost import Cost
from ridgeline.cost.matmul import matmul_pipe
from ridgeline.cudagraph import capture
from ridgeline.errors import EnvironmentUnusable, NotEngaged
from ridgeline.kernels._attention_packed import attention_packed_backward_kernel
from ridgeline.kernels._attention_packed_call import (
    REAL_SIZES,
    BackwardCall,
    Call,
    Config,
    attention_sample,
    default_config,
    parts_of,
    proposals,
    scores_of,
)
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._nhwc import starts_early
from ridgeline.kernels._op import Launch, Launcher, Op, Target, execute, register, target_of, tuned_config
from ridgeline.timing import time_many

_log = logging.getLogger(__name__)

# the kernels of F.scaled_dot_product_attention
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_REPEATS = 15  # to tell which of them is the fastest: `tune` times that one anew

Run = Callable[[], Tensor]


def reference(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor | None = None,  # noqa: ARG001 - computed again, in the dtype asked for; `tune` hands on no `out`
    lse: Tensor | None = None,  # noqa: ARG001
    *,
    heads: int,
    scale: float | None = None,
) -> Tensor:
    """What autograd makes of PyTorch's attention: three gradients, then one copy that packs them."""
    with torch.enable_grad():
        q, k, v = (part.detach().requires_grad_() for part in parts_of(qkv, heads))
        again = F.scaled_dot_product_attention(q, k, v, scale=scale)
        found = torch.autograd.grad(again, (q, k, v), dout.unflatten(2, (heads, -1)).transpose(1, 2))
    return torch.stack([one.transpose(1, 2) for one in found], dim=2).flatten(2)


def cost(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor | None = None,  # noqa: ARG001 - as large as dout
    lse: Tensor | None = None,  # noqa: ARG001
    *,
    heads: int,
    scale: float | None = None,
) -> Cost:
    """Five matrix products: what one program with all queries does, and the least."""
    call = Call(qkv, heads, scale)
    read = 2 * dout.nbytes + qkv.nbytes + 4 * prod(call.lse_shape)
    return Cost(call.problem.backward_flops, read, qkv.nbytes, matmul_pipe(qkv.dtype))


@wraps(cost)
def cost_summed(dout: Tensor, qkv: Tensor, *others: Tensor | None, **choices: Any) -> Cost:
    plain = cost(dout, qkv, *others, **choices)
    return replace(plain, write_bytes=plain.write_bytes + 4 * qkv.shape[0] * qkv.shape[2])


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    call = BackwardCall(**arguments)
    return proposals(call, target or target_of(call.qkv))


def plan(
    *, summed: bool = False, config: Config | None = None, target: Target | None = None, **arguments: Any
) -> Launch:
    """The launch that makes dqkv; `arguments` are BackwardCall's. Runs nothing.

    With `summed` it also makes its argument `sums_ptr`, [N, blocks of queries, 3 heads D].
    """
    call = BackwardCall(**arguments)
    target = target or target_of(call.qkv)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(call, target), **arguments)
        config = tuned or default_config(call, target)
    if not config.is_valid(call, target):
        call.refuse(f"{config} is not valid for {call.heads} heads of qkv {tuple(call.qkv.shape)} on {target.arch}")
    dqkv = torch.empty_like(call.qkv)
    sums_shape = call.qkv.shape[0], config.q_blocks(call), call.qkv.shape[2]
    return Launch(
        attention_packed_backward_kernel,
        grid=(config.programs(call),),
        arguments={
            "dout_ptr": call.dout, "qkv_ptr": call.qkv, "out_ptr": call.out, "lse_ptr": call.lse,
            "dqkv_ptr": dqkv,
            "sums_ptr": call.qkv.new_empty(sums_shape, dtype=torch.float32) if summed else None,
            "images": call.qkv.shape[0],
        },
        constants={**config.constants(call), "PDL": starts_early(target)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=dqkv,
        pdl=starts_early(target),
    )  # fmt: skip


def plan_summed(**arguments: Any) -> Launch:
    """What `plan` returns with `summed`."""
    return plan(summed=True, **arguments)


def rival(**arguments: Any) -> Run:
    """PyTorch's gradient of qkv, forward included: autograd has no backward alone.

    What it takes stands beside the forward and the backward here together.
    """
    return fastest(by_backend(reference, **arguments), arguments["qkv"])


def by_backend(function: Callable[..., Tensor], **arguments: Any) -> dict[str, Run]:
    """Calls of `function`, with its attention by each of `BACKENDS` that takes these arguments, by name."""
    found: dict[str, Run] = {}
    for name, backend in BACKENDS.items():
        call = partial(_by, backend, function, arguments)
        try:
            # PyTorch also warns of why
            with warnings.catch_warnings(action="ignore"):
                call()
        except RuntimeError as error:
            _log.info("%s attention does not take %s: %s", name, tuple(arguments["qkv"].shape), error)
            continue
        found[name] = call
    return found


def fastest(calls: Mapping[str, Run], x: Tensor) -> Run:
    """The one that takes the least time on the device of x, on a GPU as a CUDA graph, since that is how steps run.

    Raises EnvironmentUnusable where there is none.
    """
    timed: dict[str, Run] = {}
    for name, call in calls.items():
        try:
            timed[name] = capture(call, (), warmup=1).replay if x.is_cuda else call
        except NotEngaged as error:
            _log.info("%s attention: %s", name, error)
    if not timed:
        raise EnvironmentUnusable(f"attention: no kernel of PyTorch's takes {tuple(x.shape)} {x.dtype} on {x.device}")
    method = "cuda-event" if x.is_cuda else "host"
    timings = time_many(timed, warmup=1, repeats=_REPEATS, method=method, log_clocks=False)
    return calls[min(timings, key=lambda name: timings[name].median_s)]


def _by(backend: SDPBackend, function: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Tensor:
    with sdpa_kernel(backend):
        return function(**arguments)


def attention_packed_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *, heads: int, scale: float | None = None
) -> Tensor:
    launch = plan(dout=dout, qkv=qkv, out=out, lse=lse, heads=heads, scale=scale)
    return execute("attention_packed_backward", launch, qkv)


def attention_packed_backward_summed(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *, heads: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    launch = plan_summed(dout=dout, qkv=qkv, out=out, lse=lse, heads=heads, scale=scale)
    dqkv = execute("attention_packed_backward_summed", launch, qkv)
    sums = launch.arguments["sums_ptr"]
    assert isinstance(sums, Tensor)
    return dqkv, sums.squeeze(1) if sums.shape[1] == 1 else sums.sum(1)


def on_cpu(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,  # noqa: ARG001 - as in `reference`
    lse: Tensor,  # noqa: ARG001
    *,
    heads: int,
    scale: float | None = None,
) -> Tensor:
    """What `reference` finds, without autograd, which an operator is below."""
    return _not_rounded(dout, qkv, heads, scale).to(qkv.dtype)


def summed_on_cpu(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,  # noqa: ARG001 - as in `reference`
    lse: Tensor,  # noqa: ARG001
    *,
    heads: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """With the sum of each image by itself."""
    dqkv = _not_rounded(dout, qkv, heads, scale)
    return dqkv.to(qkv.dtype), dqkv.sum(1)


def _not_rounded(dout: Tensor, qkv: Tensor, heads: int, scale: float | None) -> Tensor:
    """dqkv in fp32 or wider."""
    weights = torch.softmax(scores_of(qkv, heads, scale), dim=-1)
    q, k, v = parts_of(qkv.to(weights.dtype), heads)
    gradient = dout.to(weights.dtype).unflatten(2, (heads, -1)).transpose(1, 2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    of_weights = gradient @ v.mT
    scores = factor * weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    found = scores @ k, scores.mT @ q, weights.mT @ gradient
    return torch.stack([one.transpose(1, 2) for one in found], dim=2).flatten(2)


def _fake(dout: Tensor, qkv: Tensor, *others: Tensor, **choices: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(qkv)


def _fake_summed(dout: Tensor, qkv: Tensor, *others: Tensor, **choices: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    sums = qkv.new_empty((qkv.shape[0], qkv.shape[2]), dtype=torch.promote_types(qkv.dtype, torch.float32))
    return torch.empty_like(qkv), sums


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
    call=register(attention_packed_backward, fake=_fake, on_cpu=on_cpu, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)

SUMMED_OP = replace(
    OP,
    name="attention_packed_backward_summed",
    call=register(attention_packed_backward_summed, fake=_fake_summed, on_cpu=summed_on_cpu, cost=cost_summed),
    cost=cost_summed,
    launcher=Launcher(plan_summed, candidates),
)
SUMMED = SUMMED_OP.overload
