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

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import _rows
from _over_parameters import main, rows_beside_copy
from ridgeline.errors import VerificationFailed
from ridgeline.kernels.grad_norm import CONFIGS, Config, build, cost, locate, norm, reference
from ridgeline.models.ddpm_unet import ddpm_cifar10
from ridgeline.numerics import compare
from ridgeline.weight_copies import norm_in_fp32


def bench(where: _rows.Machine, repeats: int) -> list[_rows.Row]:
    """Check and time gradients in fp32 alone and with bf16 among them."""
    g = torch.Generator("cuda").manual_seed(0)
    wide = [torch.randn(p.shape, generator=g, device="cuda") for p in ddpm_cifar10(batch=1)[0].parameters()]
    rows = []
    for dtype in ("fp32", "bf16"):
        gradients = wide if dtype == "fp32" else [t.bfloat16() if t.dim() > 1 else t for t in wide]
        norms: dict[Config | None, Callable[[], Tensor]] = {config: norm_of(gradients, config) for config in CONFIGS}
        norms[None] = lambda gradients=gradients: norm_in_fp32(gradients)
        for config in CONFIGS:
            check(config, norms[config](), gradients, norms[None]())
        described = {"subject": "kernel:grad_norm", "dtype": dtype, "shape": f"DDPM CIFAR-10, {len(gradients)} tensors"}
        rows += rows_beside_copy(where, norms, cost(gradients), repeats=repeats, rival="foreach norm", **described)
    return rows


def norm_of(gradients: list[Tensor], config: Config) -> Callable[[], Tensor]:
    plan = build(gradients, config=config)
    return lambda: norm(plan, locate(plan, gradients))


def check(config: Config, ours: Tensor, gradients: list[Tensor], theirs: Tensor) -> None:
    """Raises VerificationFailed where our norm errs more than PyTorch's may."""
    verdict = compare(ours, reference([gradient.double() for gradient in gradients]), theirs)
    if not verdict.passed:
        raise VerificationFailed(f"grad_norm with {config}: {verdict.reason}")


if __name__ == "__main__":
    sys.exit(main("grad_norm.py", __doc__, bench))
