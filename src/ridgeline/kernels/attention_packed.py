"""out = softmax(q kᵀ · scale) v for short sequences, from the packed result of one linear layer, and its gradient.

qkv    [N, T, 3 heads D]  contiguous: of each token all of q, then k, then v, head by head; fp32, fp16, bf16;
                          T from 1 to 1024, D from 1 to 128
heads  how many
scale  of the scores, positive; None: D^-0.5
out    [N, T, heads D]    contiguous, dtype of qkv: what the next linear layer takes
lse    [N, heads, T]      fp32: logarithm of the sum of a query's exponentials, which the backward needs; no gradient

No mask, no dropout. Scores, softmax and sums are fp32; the softmax's numerators are rounded to the dtype of qkv for
their product with v; out is rounded once. Products of fp32 operands are exact, on no tensor core: this kernel is for
fp16 and bf16. An empty batch gives empty results. Raises ValueError or TypeError for any other layout, dtype or choice.

One program takes a block of queries of one head and walks over the keys with the online softmax (Milakov and
Gimelshein 2018; FlashAttention, Dao et al. 2022); where whole images fit the block it takes several, and masks their
scores apart. Nothing is rearranged before or after: q, k and v are read where the linear layer wrote them. Predicted
for T of 256, 4 heads of 64 channels, batch 128, bf16, on an H200: 67 MB, 16 µs at the rate of a copy.

Not in `kernels.ALL`, whose ops return one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.matmul import matmul_pipe
from ridgeline.kernels import attention_packed_backward
from ridgeline.kernels._attention_packed import attention_packed_kernel
from ridgeline.kernels._attention_packed_call import (
    REAL_SIZES,
    Call,
    Config,
    attended,
    attention,
    attention_sample,
    default_config,
    proposals,
)
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._nhwc import starts_early
from ridgeline.kernels._op import (
    RIVAL,
    Launch,
    Launcher,
    Op,
    Target,
    execute,
    register,
    target_of,
    tuned_config,
    tuned_row,
)


def cost(qkv: Tensor, *, heads: int, scale: float | None = None) -> Cost:
    """The two matrix products: the softmax rides on them."""
    call = Call(qkv, heads, scale)
    written = call.problem.o_numel * qkv.element_size() + 4 * qkv.shape[0] * heads * call.tokens
    return Cost(call.problem.forward_flops, qkv.nbytes, written, matmul_pipe(qkv.dtype))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    call = Call(**arguments)
    return proposals(call, target or target_of(call.qkv))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch that makes out and, as its argument `lse_ptr`, lse; `arguments` are Call's. Runs nothing."""
    call = Call(**arguments)
    target = target or target_of(call.qkv)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(call, target), **arguments)
        config = tuned or default_config(call, target)
    if not config.is_valid(call, target):
        call.refuse(f"{config} is not valid for {call.heads} heads of qkv {tuple(call.qkv.shape)} on {target.arch}")
    out = call.qkv.new_empty(call.out_shape)
    lse = call.qkv.new_empty(call.lse_shape, dtype=torch.float32)
    return Launch(
        attention_packed_kernel,
        grid=(config.programs(call),),
        arguments={"qkv_ptr": call.qkv, "out_ptr": out, "lse_ptr": lse, "images": call.qkv.shape[0]},
        constants={**config.constants(call), "PDL": starts_early(target)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=out,
        pdl=starts_early(target),
    )


def rival(**arguments: Any) -> Callable[[], Tensor]:
    """out alone, by the fastest of PyTorch's kernels."""
    return attention_packed_backward.fastest(
        attention_packed_backward.by_backend(attended, **arguments), arguments["qkv"]
    )


@dataclass(frozen=True)
class Price:
    """What an attention takes by the tables, forward and backward together."""

    ours_s: float
    theirs_s: float  # the fastest of PyTorch's kernels

    @property
    def pays(self) -> bool:
        return self.ours_s < self.theirs_s


def price(qkv: Tensor, *, heads: int, scale: float | None = None) -> Price | None:
    """None where a pass was not tuned on the GPU of qkv, or not beside PyTorch's kernels. qkv may be fake."""
    out, lse = _fake(qkv, heads=heads, scale=scale)
    given = {"qkv": qkv, "heads": heads, "scale": scale}
    forward = tuned_row(OP, **given)
    backward = tuned_row(attention_packed_backward.OP, dout=out, **given, out=out, lse=lse)
    # that of the backward has PyTorch's forward in it
    theirs = None if backward is None else backward.tried.get(RIVAL)
    if forward is None or backward is None or not isinstance(theirs, float):
        return None
    return Price(forward.seconds + backward.seconds, theirs)


def attention_packed(qkv: Tensor, *, heads: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    launch = plan(qkv=qkv, heads=heads, scale=scale)
    lse = launch.arguments["lse_ptr"]
    assert isinstance(lse, Tensor)
    return execute("attention_packed", launch, qkv), lse


def _fake(qkv: Tensor, *, heads: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    call = Call(qkv, heads, scale)
    return qkv.new_empty(call.out_shape), qkv.new_empty(call.lse_shape, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.choices = keyword_only_inputs


def _backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> Tensor:  # noqa: ARG001 - lse has no gradient
    # a gradient may come in any layout: that of a sum is one number expanded
    return attention_packed_backward.OP(dout.contiguous(), *ctx.saved_tensors, **ctx.choices)


SAMPLES = (
    attention_sample("several images a program, the last one short", 5, 6, 2, 16),
    attention_sample("more tokens than a block", 1, 70, 1, 16),
    attention_sample("channels no power of two, a scale of its own", 2, 9, 3, 12, scale=0.5),
    attention_sample("one token", 3, 1, 1, 16),
    *(
        attention_sample(f"{t} tokens, {heads} heads of {d}, batch 128", 128, t, heads, d, real_size=True)
        for t, heads, d in REAL_SIZES
    ),
)

_CALL = register(attention_packed, fake=_fake, on_cpu=attention, cost=cost)
_CALL.register_autograd(_backward, setup_context=_setup)
OP = Op(
    name="attention_packed",
    call=_CALL,
    reference=attended,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)
