"""Time the norm of all gradients of the DDPM network (32 M), which a step clips by.

    python benchmarks/grad_norm.py --out benchmarks/results/kernels.jsonl

Ours is the one launch of kernels/grad_norm.py, its rival what PyTorch has for the same: torch._foreach_norm of the
tensors of each dtype and the norm of their norms, in fp32. Gradients are all fp32, or bf16 where a step keeps bf16
copies of the weights, those of convolutions and linear layers. Both are checked against float64, then captured in CUDA
graphs, ours with the launches that send the addresses, and timed interleaved; "share of copy" compares with a
device-to-device copy timed in the same run, each counted by the bytes it must move. A norm finds in the L2 cache what
the one before it has left there, as that of a step finds the last gradients written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import _rows
from ridgeline import units
from ridgeline.cudagraph import Captured, capture
from ridgeline.errors import RidgelineError, VerificationFailed
from ridgeline.kernels.grad_norm import CONFIGS, Config, build, cost, locate, norm, reference
from ridgeline.models.ddpm_unet import ddpm_cifar10
from ridgeline.numerics import compare
from ridgeline.timing import time_many
from ridgeline.weight_copies import norm_in_fp32

NORMS = 10  # in one graph, so that its launch is not in the numbers
COPY_BYTES = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()
    try:
        rows = bench(_rows.machine(), a.repeats)
    except RidgelineError as error:
        print(f"benchmarks/grad_norm.py: {error}", file=sys.stderr)
        return error.exit_code
    if a.out:
        _rows.append(a.out, rows)
        print(f"{len(rows)} rows appended to {a.out}", file=sys.stderr)
    return 0


def bench(where: _rows.Machine, repeats: int) -> list[_rows.Row]:
    """Check and time gradients in fp32 alone and with bf16 among them; prints one line each."""
    g = torch.Generator("cuda").manual_seed(0)
    wide = [torch.randn(p.shape, generator=g, device="cuda") for p in ddpm_cifar10(batch=1)[0].parameters()]
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(generator=g)
    target = torch.empty_like(source)
    rows = []
    for dtype in ("fp32", "bf16"):
        gradients = wide if dtype == "fp32" else [t.bfloat16() if t.dim() > 1 else t for t in wide]
        norms: dict[Config | None, Callable[[], Tensor]] = {config: norm_of(gradients, config) for config in CONFIGS}
        norms[None] = lambda gradients=gradients: norm_in_fp32(gradients)
        for config in CONFIGS:
            check(config, norms[config](), gradients, norms[None]())
        calls = {str(config): repeat(call).replay for config, call in norms.items()}
        timings = time_many(calls | {"copy": lambda: target.copy_(source)}, repeats=repeats)
        copy_rate = 2 * COPY_BYTES / timings["copy"].median_s
        work = cost(gradients)
        best = min(CONFIGS, key=lambda config: timings[str(config)].median_s)
        # a stack's last row is its best
        for config in (None, *(c for c in CONFIGS if c != best), best):
            timing = timings[str(config)]
            share = work.bytes * NORMS / timing.median_s / copy_rate
            rows.append(
                _rows.row(
                    where,
                    timing,
                    calls=NORMS,
                    subject="kernel:grad_norm",
                    stack="eager" if config is None else "ridgeline",
                    recipe="foreach norm" if config is None else "default" if config == CONFIGS[0] else "config",
                    dtype=dtype,
                    shape=f"DDPM CIFAR-10, {len(gradients)} tensors",
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
            print(f"{name:<45} {units.seconds(timing.median_s / NORMS):>9}  {units.percent(share)} of copy", flush=True)
        print(f"copy {units.bandwidth(copy_rate)}, {units.nbytes(work.bytes)} a norm, {dtype}")
    return rows


def norm_of(gradients: list[Tensor], config: Config) -> Callable[[], Tensor]:
    plan = build(gradients, config=config)
    return lambda: norm(plan, locate(plan, gradients))


def check(config: Config, ours: Tensor, gradients: list[Tensor], theirs: Tensor) -> None:
    """Raises VerificationFailed where our norm errs more than PyTorch's may."""
    verdict = compare(ours, reference([gradient.double() for gradient in gradients]), theirs)
    if not verdict.passed:
        raise VerificationFailed(f"grad_norm with {config}: {verdict.reason}")


def repeat(call: Callable[[], object]) -> Captured:
    def several() -> None:
        for _ in range(NORMS):
            call()

    return capture(several, ())


if __name__ == "__main__":
    sys.exit(main())
