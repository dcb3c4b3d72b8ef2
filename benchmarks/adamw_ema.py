"""Time one optimizer step on the parameters of the DDPM network (32 M): clip, AdamW, moving average, bf16 copy.

    python benchmarks/adamw_ema.py --out benchmarks/results/kernels.jsonl

Ours is the two launches of kernels/adamw_ema.py, its rival what PyTorch has for the same: clip_grads_with_norm_,
torch.optim.AdamW(fused=True), torch._foreach_lerp_, torch._foreach_copy_. The norm itself is in neither. Both are
checked against each other after ten steps, then captured in CUDA graphs and timed interleaved; "share of copy" compares
with a device-to-device copy timed in the same run, each counted by the bytes it must move.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

import _rows
from ridgeline import units
from ridgeline.cudagraph import Captured, capture
from ridgeline.errors import RidgelineError, VerificationFailed
from ridgeline.kernels.adamw_ema import CONFIGS, Averaging, Config, Group, Plan, build, cost, locate, step_
from ridgeline.models.ddpm_unet import ddpm_cifar10
from ridgeline.timing import time_many

STEPS = 10  # in one graph, so that its launch is not in the numbers
LR, WEIGHT_DECAY, DECAY, MAX_NORM = 2e-4, 1e-2, 0.9999, 1.0
COPY_BYTES = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()
    try:
        rows = bench(_rows.machine(), a.repeats)
    except RidgelineError as error:
        print(f"benchmarks/adamw_ema.py: {error}", file=sys.stderr)
        return error.exit_code
    if a.out:
        _rows.append(a.out, rows)
        print(f"{len(rows)} rows appended to {a.out}", file=sys.stderr)
    return 0


def bench(where: _rows.Machine, repeats: int) -> list[_rows.Row]:
    """Check and time with and without the bf16 copy; prints one line each."""
    weights = [p.detach().to("cuda") for p in ddpm_cifar10(batch=1)[0].parameters()]
    weights = [w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
    g = torch.Generator("cuda").manual_seed(0)
    gradients = [torch.empty_like(w).normal_(generator=g) for w in weights]
    norm = scalar(MAX_NORM / 2)  # a clip by 1 costs the same, and leaves the rival's gradients what ours are
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(generator=g)
    target = torch.empty_like(source)
    rows = []
    for copies in (False, True):
        plans = {config: plan_of(weights, copies=copies, config=config) for config in CONFIGS}
        rival, state = rival_of(weights, gradients, norm, copies=copies)
        steps = {config: step_of(plan, gradients, norm) for config, plan in plans.items()}
        for _ in range(STEPS):
            rival()
            for step in steps.values():
                step()
        for config, plan in plans.items():
            check(config, plan, state)
        graphs = {config: repeat(step) for config, step in steps.items()}
        calls = {str(config): graph.replay for config, graph in graphs.items()}
        calls |= {"eager": repeat(rival).replay, "copy": lambda: target.copy_(source)}
        timings = time_many(calls, repeats=repeats)
        copy_rate = 2 * COPY_BYTES / timings["copy"].median_s
        work = cost(plans[CONFIGS[0]], locate(plans[CONFIGS[0]], gradients))
        best = min(CONFIGS, key=lambda config: timings[str(config)].median_s)
        # a stack's last row is its best
        for config in (None, *(c for c in CONFIGS if c != best), best):
            timing = timings["eager" if config is None else str(config)]
            share = work.bytes * STEPS / timing.median_s / copy_rate
            rows.append(
                _rows.row(
                    where,
                    timing,
                    calls=STEPS,
                    subject="kernel:adamw_ema",
                    stack="eager" if config is None else "ridgeline",
                    recipe="fused AdamW" if config is None else "default" if config == CONFIGS[0] else "config",
                    dtype="fp32",
                    shape=f"DDPM CIFAR-10, {len(weights)} tensors{', bf16 copy' if copies else ''}",
                    region="kernel",
                    stack_version=f"torch {torch.__version__}",
                    extra={
                        "bytes": work.bytes,
                        "copy_rate": copy_rate,
                        "share_of_copy": share,
                        "config": None if config is None else asdict(config),
                    },
                )
            )
            name = "PyTorch" if config is None else str(config)
            print(f"{name:<32} {units.seconds(timing.median_s / STEPS):>9}  {units.percent(share)} of copy", flush=True)
        print(f"copy {units.bandwidth(copy_rate)}, {units.nbytes(work.bytes)} a step, with bf16 copy: {copies}")
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


def repeat(step: Callable[[], object]) -> Captured:
    def several() -> None:
        for _ in range(STEPS):
            step()

    return capture(several, ())


if __name__ == "__main__":
    sys.exit(main())
