"""Time group_norm_silu, forward and backward, on the maps of the DDPM network beside PyTorch: right first, then fast.

    python benchmarks/group_norm_silu.py --configs 8 --compile --out benchmarks/results/kernels.jsonl

Rivals are plain PyTorch in channels_last, eager and, with --compile, torch.compile of the same function (with dropout
PyTorch's own); their backward is that of autograd, and so is ours. Values and gradients are checked against float64
before anything is timed. Each call is captured 20 times in one CUDA graph; "share of copy" is the rate of the bytes
that must move over that of a device-to-device copy timed in the same run. Maps below 32x32 stay in the L2 between
calls, so their share can pass 100 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _rows
from kernels import CALLS, repeat, right_launches, version
from ridgeline import units
from ridgeline.cost import Cost
from ridgeline.errors import RidgelineError, UsageError, VerificationFailed
from ridgeline.kernels import Sample, group_norm_silu, group_norm_silu_backward
from ridgeline.kernels._op import DTYPES, Op
from ridgeline.numerics import compare, to_float64
from ridgeline.timing import Timing, time_many

COPY_BYTES = 2**30
DIFFERENTIABLE = ("x", "gamma", "beta", "scale", "shift")
BACKWARD = group_norm_silu_backward.OP


@dataclass(frozen=True)
class Job:
    """One problem with what all of its rows share."""

    sample: Sample  # of the backward; without dy its arguments are the forward's
    dtype: str
    arguments: dict[str, Any]

    @property
    def forward(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in ("dy", "residual")}

    @property
    def costs(self) -> dict[str, Cost]:
        """By what is timed."""
        forward, backward = group_norm_silu.cost(**self.forward), group_norm_silu_backward.cost(**self.arguments)
        # autograd has no use for a residual gradient
        alone = group_norm_silu_backward.cost(self.arguments["dy"], **self.forward)
        return {"forward": forward, "backward": backward, "forward+backward": forward + alone}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--sample", default="UNet", help="only samples whose reason contains this")
    parser.add_argument("--configs", type=int, default=1, help="tiles tried for each pass (default %(default)s: ours)")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the reference (slow)")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()
    try:
        where = _rows.machine()
        samples = [s for s in BACKWARD.samples if s.real_size and a.sample in s.why]
        if not samples:
            raise UsageError(f"no sample of real size has {a.sample!r} in its reason")
        rows = []
        for dtype in a.dtype:
            for sample in samples:
                job = Job(sample, dtype, sample.arguments(DTYPES[dtype], "cuda"))
                rows += bench(job, where, configs=a.configs, compiled=a.compile, repeats=a.repeats)
    except RidgelineError as error:
        print(f"benchmarks/group_norm_silu.py: {error}", file=sys.stderr)
        return error.exit_code
    if a.out:
        _rows.append(a.out, rows)
        print(f"{len(rows)} rows appended to {a.out}", file=sys.stderr)
    return 0


def bench(job: Job, where: _rows.Machine, *, configs: int, compiled: bool, repeats: int) -> list[_rows.Row]:
    """Check and time one problem; prints a line a row."""
    rivals: dict[str, Callable[..., Tensor]] = {"eager": plain}
    if compiled:
        torch.compiler.reset()
        rivals["torch.compile"] = torch.compile(plain, mode="max-autotune-no-cudagraphs")
    check(job)
    both = {**rivals, "ridgeline": group_norm_silu.OP}
    # (what is timed, stack, recipe, config) by the name under which it is timed
    rows_of: dict[str, tuple[str, str, str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}

    def add(what: str, stack: str, recipe: str, call: Callable[[], Any], config: Any = None) -> None:
        name = f"{what} {stack} {recipe} {config}"
        rows_of[name], calls[name] = (what, stack, recipe, config), repeat(call).replay

    for stack, call in rivals.items():
        add("forward", stack, recipe_of(stack), lambda call=call: call(**job.forward))
    for what, op, arguments in (("forward", group_norm_silu.OP, job.forward), ("backward", BACKWARD, job.arguments)):
        for index, (config, launch) in enumerate(own_launches(op, arguments, configs)):
            add(what, "ridgeline", "config" if index else "default", launch.run, config)
    for stack, call in both.items():
        add("forward+backward", stack, recipe_of(stack), gradients_of(call, job))
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls["copy"] = repeat(lambda: target.copy_(source)).replay
    timings = time_many(calls, repeats=repeats)
    copy_rate = 2 * COPY_BYTES * CALLS / timings["copy"].median_s
    # the README's table takes a stack's last row, so the fastest comes last
    ordered = sorted(rows_of, key=lambda name: (rows_of[name][:2], -timings[name].median_s))
    print(f"{job.dtype} {job.sample.why}, copy {units.bandwidth(copy_rate)}")
    return [row(job, where, *rows_of[name], timing=timings[name], copy_rate=copy_rate) for name in ordered]


def row(
    job: Job,
    where: _rows.Machine,
    what: str,
    stack: str,
    recipe: str,
    config: Any,
    *,
    timing: Timing,
    copy_rate: float,
) -> _rows.Row:
    cost = job.costs[what]
    rate = cost.bytes * CALLS / timing.median_s
    print(
        f"  {what:<16} {stack:<13} {recipe:<13} {units.seconds(timing.median_s / CALLS):>9} "
        f"{units.bandwidth(rate):>10} {units.percent(rate / copy_rate):>6} of copy  {config or ''}",
        flush=True,
    )
    return _rows.row(
        where,
        timing,
        calls=CALLS,
        subject="kernel:group_norm_silu",
        stack=stack,
        recipe=recipe,
        dtype=job.dtype,
        batch=job.arguments["x"].shape[0],
        shape=job.sample.why,
        region=what,
        stack_version=version(stack),
        extra={
            "flops": cost.flops,
            "bytes": cost.bytes,
            "bytes_per_s": rate,
            "copy_rate": copy_rate,
            "share_of_copy": rate / copy_rate,
            "calls_per_graph": CALLS,
            "config": None if config is None else asdict(config),
        },
    )


def plain(*, p: float = 0.0, **arguments: Any) -> Tensor:
    """The reference with PyTorch's dropout: its own is made for exactness, of integers."""
    y = group_norm_silu.reference(**arguments)
    return F.dropout(y, p) if p else y


def recipe_of(stack: str) -> str:
    return {"eager": "channels_last", "torch.compile": "max-autotune"}.get(stack, "default")


def own_launches(op: Op, arguments: dict[str, Any], configs: int) -> list[tuple[Any, Any]]:
    """Those of the first `configs` configs whose result is right; the default must be."""
    found = list(right_launches(op, arguments, configs, eps=None))
    default = op.launcher.candidates(**arguments)[0]
    if not found or found[0][0] != default:
        raise VerificationFailed(f"{op.name}: the default {default} is wrong or does not build")
    return found


def gradients_of(call: Callable[..., Tensor], job: Job) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward by autograd, as a training step runs them."""
    named = {name: job.forward[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in job.forward}
    arguments = {**job.forward, **named}

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
    sys.exit(main())
