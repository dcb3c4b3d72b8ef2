"""Time attention_packed, forward and backward, beside the kernels of PyTorch's attention: right first, then fast.

    python benchmarks/attention_packed.py --configs 6 --out benchmarks/results/kernels.jsonl

All read the same packed q, k and v and return, or make by autograd, the gradient of all three in that layout. Rivals
are F.scaled_dot_product_attention by each of its backends that takes the problem and, with --compile, torch.compile of
PyTorch's own choice. Their backward alone is the difference of two rows. Values and gradients are checked against
float64 before anything is timed. Each call is captured 20 times in one CUDA graph; "share of copy" is the rate of the
bytes that must move over that of a device-to-device copy timed in the same run. What fits the L2 stays there between
calls, so the share of few tokens can pass 100 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import _rows
from kernels import CALLS, repeat, right_launches, version
from ridgeline import units
from ridgeline.cost import Cost
from ridgeline.errors import RidgelineError, UsageError, VerificationFailed
from ridgeline.kernels import Sample, attention_packed, attention_packed_backward
from ridgeline.kernels._op import DTYPES, Op
from ridgeline.numerics import compare, to_float64
from ridgeline.timing import Timing, time_many

COPY_BYTES = 2**30
FORWARD, BACKWARD = attention_packed.OP, attention_packed_backward.OP
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Job:
    """One problem with what all of its rows share."""

    sample: Sample  # of the backward
    dtype: str
    arguments: dict[str, Any]

    @property
    def forward(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in ("dout", "out", "lse")}

    @property
    def costs(self) -> dict[str, Cost]:
        """By what is timed."""
        forward, backward = FORWARD.cost(**self.forward), BACKWARD.cost(**self.arguments)
        return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=("fp16", "bf16"), default=["bf16"])
    parser.add_argument("--sample", default="", help="only samples whose reason contains this")
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
        print(f"benchmarks/attention_packed.py: {error}", file=sys.stderr)
        return error.exit_code
    if a.out:
        _rows.append(a.out, rows)
        print(f"{len(rows)} rows appended to {a.out}", file=sys.stderr)
    return 0


def bench(job: Job, where: _rows.Machine, *, configs: int, compiled: bool, repeats: int) -> list[_rows.Row]:
    """Check and time one problem; prints a line a row."""
    check(job)
    # (what is timed, stack, recipe, config) by the name under which it is timed
    rows_of: dict[str, tuple[str, str, str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}

    def add(what: str, stack: str, recipe: str, call: Callable[[], Any], config: Any = None) -> None:
        name = f"{what} {stack} {recipe} {config}"
        rows_of[name], calls[name] = (what, stack, recipe, config), repeat(call).replay

    for (stack, recipe), call in rivals(job, compiled=compiled).items():
        add("forward", stack, recipe, lambda call=call: call(**job.forward))
        add("forward+backward", stack, recipe, gradient_of(call, job))
    for what, op, arguments in (("forward", FORWARD, job.forward), ("backward", BACKWARD, job.arguments)):
        for index, (config, launch) in enumerate(own_launches(op, arguments, configs)):
            add(what, "ridgeline", "config" if index else "default", launch.run, config)
    add("forward+backward", "ridgeline", "default", gradient_of(ours, job))
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
        subject="kernel:attention_packed",
        stack=stack,
        recipe=recipe,
        dtype=job.dtype,
        batch=job.arguments["qkv"].shape[0],
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


def rivals(job: Job, *, compiled: bool) -> dict[tuple[str, str], Callable[..., Tensor]]:
    """PyTorch's attention by (stack, recipe); a backend that refuses the problem is named on stderr and left out."""
    found: dict[tuple[str, str], Callable[..., Tensor]] = {}
    for name, backend in BACKENDS.items():

        def call(backend: SDPBackend = backend, **arguments: Any) -> Tensor:
            with sdpa_kernel(backend):
                return FORWARD.reference(**arguments)

        try:
            gradient_of(call, job)()
        except RuntimeError as error:
            print(f"{name} does not take {job.sample.why}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        found["eager", name] = call
    if compiled:
        torch.compiler.reset()
        found["torch.compile", "max-autotune"] = torch.compile(
            FORWARD.reference, mode="max-autotune-no-cudagraphs", dynamic=False
        )
    return found


def ours(**arguments: Any) -> Tensor:
    return FORWARD(**arguments)[0]


def own_launches(op: Op, arguments: dict[str, Any], configs: int) -> list[tuple[Any, Any]]:
    """Those of the first `configs` configs whose result is right; the default must be."""
    found = list(right_launches(op, arguments, configs, eps=None))
    default = op.launcher.candidates(**arguments)[0]
    if not found or found[0][0] != default:
        raise VerificationFailed(f"{op.name}: the default {default} is wrong or does not build")
    return found


def gradient_of(call: Callable[..., Tensor], job: Job) -> Callable[[], Tensor]:
    """Forward and backward by autograd, as a training step runs them."""
    leaf = job.arguments["qkv"].detach().requires_grad_()
    arguments = {**job.forward, "qkv": leaf}

    def run() -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(call(**arguments), leaf, job.arguments["dout"])[0]

    return run


def check(job: Job) -> None:
    """The operator's gradient against float64 autograd; raises VerificationFailed."""
    exact = gradient_of(FORWARD.reference, Job(job.sample, job.dtype, to_float64(job.arguments)))()
    verdict = compare(gradient_of(ours, job)(), exact, gradient_of(FORWARD.reference, job)())
    if not verdict.passed:
        raise VerificationFailed(f"the gradient of qkv is wrong for {job.sample.why}: {verdict.reason}")


if __name__ == "__main__":
    sys.exit(main())
