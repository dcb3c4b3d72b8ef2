"""Time an op of ridgeline beside plain PyTorch on its samples of real size: right first, then fast.

    python benchmarks/kernels.py --op conv2d_act --dtype fp16 bf16 --out benchmarks/results/kernels.jsonl

Every config is checked against float64 with its output poisoned by NaN before it is timed; a wrong one is named and
dropped. Each call is captured 20 times in one CUDA graph, so that no launch cost of the host is in the numbers; all
graphs of a shape are timed interleaved, then the default, the fastest and the rivals once more for the rows.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._pytree import tree_map_only
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import _rows
from ridgeline import units
from ridgeline.cudagraph import Captured, capture
from ridgeline.errors import RidgelineError, UsageError, VerificationFailed
from ridgeline.kernels import Op, Sample, find
from ridgeline.kernels._op import Launch
from ridgeline.numerics import TF32_EPS, compare, to_float64
from ridgeline.roofline import bound
from ridgeline.specs import DeviceSpec, find_spec
from ridgeline.timing import Timing, time_many

CALLS = 20
# fp32 is strict here; tf32 is fp32 storage multiplied on tensor cores, for both stacks
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="conv2d_act")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp16"])
    parser.add_argument("--sample", default="", help="only samples whose reason contains this")
    parser.add_argument("--configs", type=int, default=8, help="configs tried per shape (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the reference (slow)")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()
    try:
        where, op = _rows.machine(), find(a.op)
        samples = [s for s in op.samples if s.real_size and a.sample in s.why]
        if not samples:
            raise UsageError(f"{op.name} has no sample of real size with {a.sample!r} in its reason")
        rows = []
        for dtype in a.dtype:
            for sample in samples:
                rows += bench(op, sample, dtype, where, configs=a.configs, compiled=a.compile)
    except RidgelineError as error:
        print(f"benchmarks/kernels.py: {error}", file=sys.stderr)
        return error.exit_code
    if a.out:
        _rows.append(a.out, rows)
        print(f"{len(rows)} rows appended to {a.out}", file=sys.stderr)
    return 0


def bench(op: Op, sample: Sample, dtype: str, where: _rows.Machine, *, configs: int, compiled: bool) -> list[_rows.Row]:
    """Check and time one sample; prints one line, returns its rows."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    arguments = sample.arguments(DTYPES[dtype], "cuda")
    if dtype == "fp32" and "precision" in inspect.signature(op.cost).parameters:
        arguments["precision"] = "ieee"
    launches = dict(right_launches(op, arguments, configs, eps=TF32_EPS if dtype == "tf32" else None))
    if not launches:
        raise VerificationFailed(f"{op.name}: none of the {configs} configs tried is right for {sample.why} in {dtype}")
    # the rivals get every tensor in the dtype they compute in, so that no cast is in their time
    theirs = tree_map_only(torch.Tensor, lambda t: t.to(DTYPES[dtype]) if t.is_floating_point() else t, arguments)
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: op.reference(**theirs)}
    if compiled:
        torch.compiler.reset()
        inductor = torch.compile(op.reference, mode="max-autotune-no-cudagraphs")
        calls["torch.compile"] = lambda: inductor(**theirs)
    graphs = {name: repeat(fn) for name, fn in calls.items()}
    ours = {config: repeat(launch.run) for config, launch in launches.items()}
    names = {str(config): config for config in ours}
    scouting = time_many({str(config): graph.replay for config, graph in ours.items()}, repeats=30, log_clocks=False)
    default, best = next(iter(names)), min(scouting, key=lambda name: scouting[name].median_s)

    final = {**{name: graph.replay for name, graph in graphs.items()}, default: ours[names[default]].replay}
    final[best] = ours[names[best]].replay
    timings = time_many(final, repeats=100)
    cost = op.cost(**arguments)
    floor_s = bound(cost, spec).seconds if (spec := spec_or_none()) else None
    line = f"{dtype} {sample.why:<36} floor {units.seconds(floor_s) if floor_s else 'unknown':>8}"

    def row(name: str, stack: str, recipe: str, **extra: Any) -> _rows.Row:
        nonlocal line
        timing: Timing = timings[name]
        line += f" | {recipe} {units.seconds(timing.median_s / CALLS)}"
        return _rows.row(
            where,
            timing,
            calls=CALLS,
            subject=f"kernel:{op.name}",
            stack=stack,
            recipe=recipe,
            dtype=dtype,
            batch=next(v for v in arguments.values() if isinstance(v, torch.Tensor)).shape[0],
            shape=sample.why,
            region="kernel",
            stack_version=version(stack),
            extra={"flops": cost.flops, "bytes": cost.bytes, "floor_s": floor_s, "calls_per_graph": CALLS, **extra},
        )

    rows = [row(name, name, "channels_last" if name == "eager" else "max-autotune") for name in graphs]
    rows.append(row(default, "ridgeline", "default", config=asdict(names[default])))
    if best != default:
        # the README's table takes a stack's last row, so the fastest comes last
        rows.append(row(best, "ridgeline", f"best of {len(ours)}", config=asdict(names[best])))
    print(f"{line} | {names[best]}", flush=True)
    return rows


def right_launches(
    op: Op, arguments: dict[str, Any], configs: int, *, eps: float | None
) -> Iterator[tuple[Any, Launch]]:
    """The launches whose output is right; what is wrong or does not compile is said on stderr."""
    eager, exact = op.reference(**arguments), op.reference(**to_float64(arguments))
    for config in islice(op.launcher.candidates(**arguments), configs):
        launch = op.launcher.plan(config=config, **arguments)
        launch.output.fill_(float("nan"))
        try:
            launch.run()
        except (OutOfResources, CompilationError, PTXASError) as error:
            print(f"{config} does not build: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        verdict = compare(launch.output, exact, eager, error_factor=op.error_factor, eps=eps)
        if verdict.passed:
            yield config, launch
        else:
            print(f"{config} is wrong: {verdict.reason}", file=sys.stderr)


def repeat(fn: Callable[[], Any]) -> Captured:
    def several() -> None:
        for _ in range(CALLS):
            fn()

    return capture(several, ())


def spec_or_none() -> DeviceSpec | None:
    try:
        return find_spec(torch.cuda.get_device_name())
    except UsageError:
        return None


def version(stack: str) -> str:
    if stack == "eager":
        return f"torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}"
    return f"torch {torch.__version__}" if stack == "torch.compile" else f"triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(main())
