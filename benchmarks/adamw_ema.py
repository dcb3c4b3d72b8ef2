"""Time one optimizer step on the parameters of the DDPM network (32 M): clip, AdamW, moving average, bf16 copy.

    python benchmarks/adamw_ema.py --out benchmarks/results/kernels.jsonl

Ours is the two launches of kernels/adamw_ema.py, its rival what PyTorch has for the same: clip_grads_with_norm_,
torch.optim.AdamW(fused=True), torch._foreach_lerp_, torch._foreach_copy_. The norm itself is in neither. Both are
checked against each other after ten steps, then captured in CUDA graphs and timed interleaved; "share of copy" compares
with a device-to-device copy timed in the same run, each counted by the bytes it must move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

import _rows
from _over_parameters import CALLS, main, rows_beside_copy
from ridgeline.errors import VerificationFailed
from ridgeline.kernels.adamw_ema import CONFIGS, Averaging, Config, Group, Plan, build, cost, locate, step_
from ridgeline.models.ddpm_unet import ddpm_cifar10

LR, WEIGHT_DECAY, DECAY, MAX_NORM = 2e-4, 1e-2, 0.9999, 1.0


def bench(where: _rows.Machine, repeats: int) -> list[_rows.Row]:
    """Check and time with and without the bf16 copy."""
    weights = [p.detach().to("cuda") for p in ddpm_cifar10(batch=1)[0].parameters()]
    weights = [w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
    g = torch.Generator("cuda").manual_seed(0)
    gradients = [torch.empty_like(w).normal_(generator=g) for w in weights]
    norm = scalar(MAX_NORM / 2)  # a clip by 1 costs the same, and leaves the rival's gradients what ours are
    rows = []
    for copies in (False, True):
        plans = {config: plan_of(weights, copies=copies, config=config) for config in CONFIGS}
        rival, state = rival_of(weights, gradients, norm, copies=copies)
        steps = {config: step_of(plan, gradients, norm) for config, plan in plans.items()}
        for _ in range(CALLS):
            rival()
            for step in steps.values():
                step()
        for config, plan in plans.items():
            check(config, plan, state)
        work = cost(plans[CONFIGS[0]], locate(plans[CONFIGS[0]], gradients))
        shape = f"DDPM CIFAR-10, {len(weights)} tensors{', bf16 copy' if copies else ''}"
        described = {"subject": "kernel:adamw_ema", "dtype": "fp32", "shape": shape}
        rows += rows_beside_copy(where, {**steps, None: rival}, work, repeats=repeats, rival="fused AdamW", **described)
    return rows


def plan_of(weights: list[Tensor], *, copies: bool, config: Config) -> Plan:
    def zeros() -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, weights))

    group = Group(
        parameters=tuple(w.clone() for w in weights),
        exp_avgs=zeros(),
        exp_avg_sqs=zeros(),
        steps=tuple(scalar(0.0) for _ in weights),
        lr=scalar(LR),
        weight_decay=scalar(WEIGHT_DECAY),
        averages=tuple(w.clone() for w in weights),
        copies=tuple(w.bfloat16() for w in weights) if copies else (),
    )
    rule = Averaging(decay=scalar(DECAY), updates=scalar(0.0), warmup=False)
    return build([group], averaging=rule, max_norm=MAX_NORM, config=config)


def step_of(plan: Plan, gradients: list[Tensor], norm: Tensor) -> Callable[[], None]:
    located = locate(plan, gradients)
    return lambda: step_(plan, located, norm=norm)


def rival_of(
    weights: list[Tensor], gradients: list[Tensor], norm: Tensor, *, copies: bool
) -> tuple[Callable[[], None], tuple[list[Tensor], list[Tensor]]]:
    """A step in PyTorch's own fused and foreach kernels, and the (parameters, averages) that it writes."""
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    averages = [w.clone() for w in weights]
    narrow = [w.bfloat16() for w in weights]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True, capturable=True)

    @torch.no_grad()
    def step() -> None:
        clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=True)
        optimizer.step()
        torch._foreach_lerp_(averages, [p.data for p in parameters], 1 - DECAY)  # pyright: ignore[reportPrivateImportUsage]
        if copies:
            torch._foreach_copy_(narrow, [p.data for p in parameters])  # pyright: ignore[reportPrivateImportUsage]

    return step, ([p.data for p in parameters], averages)


def check(config: Config, plan: Plan, expected: tuple[list[Tensor], ...]) -> None:
    """Parameters and averages against the rival's; raises VerificationFailed."""
    for ours, theirs in zip((plan.groups[0].parameters, plan.groups[0].averages), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if not torch.allclose(a, b, rtol=1e-5, atol=1e-3 * LR):
                raise VerificationFailed(f"adamw_ema with {config} differs from PyTorch by {(a - b).abs().max():.3g}")


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cuda")


if __name__ == "__main__":
    sys.exit(main("adamw_ema.py", __doc__, bench))
