"""Time training steps of ResNet-50 and ConvNeXt-T through compile_step, beside PyTorch's own kernels in one graph.

    python benchmarks/train_nets.py --out benchmarks/results/train_nets.jsonl
    python benchmarks/train_nets.py --net resnet50 --recipe bf16 fp8 --batch 256

The rival is the recipe "writeup-5": network and loss through torch.compile, and one CUDA graph over forward, backward
and optimizer, as for the others. Images and labels are random, the loss is cross-entropy, all is channels-last. Each
network and recipe has a process of its own. A rewrite that finds nothing to change in a network says nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import _rows
from _protocol import protocol_of
from ridgeline import bench, units
from ridgeline.errors import RidgelineError, UsageError, VerificationFailed
from ridgeline.models.classifiers import ConvNeXtTiny, ResNet50
from ridgeline.own_process import Wait, in_turn
from ridgeline.step_recipe import NAMED
from ridgeline.timing import Timing, differs, time_callable
from ridgeline.train_step import TrainStep, compile_step

RIVAL = "writeup-5"
CLASSES = 1000
SMALLEST = 32  # pixels a side that both networks can halve five times


@dataclass(frozen=True)
class Net:
    """A network and how it is trained; `batch` images a step by default."""

    build: Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer]
    batch: int


NETS = {
    "resnet50": Net(ResNet50, partial(SGD, lr=0.01, momentum=0.9, weight_decay=1e-4), 128),
    "convnext_t": Net(ConvNeXtTiny, partial(AdamW, lr=1e-3, weight_decay=0.05, fused=True), 64),
}


@dataclass(frozen=True)
class Job:
    """One network in one recipe. Refuses with UsageError what cannot be."""

    net: str
    recipe: str
    batch: int
    size: int = 224
    device: str = "cuda"
    protocol: bench.Protocol = field(default_factory=bench.Protocol)

    def __post_init__(self) -> None:
        if self.recipe not in NAMED:
            raise UsageError(f"recipe must be one of {', '.join(NAMED)}, got {self.recipe!r}")
        if self.batch < 1 or self.size < SMALLEST:
            raise UsageError(f"batch must be at least 1 and size at least {SMALLEST}, got {self.batch} and {self.size}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, 3, self.size, self.size)


@dataclass(frozen=True)
class Memory:
    """Of the GPU, in bytes: what one step needs at its peak, and what the process held up to then."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class Measured:
    """`timing` is of a run of several steps; `traced` and `memory` are None without a GPU."""

    job: Job
    timing: Timing
    traced: bench.Traced | None
    memory: Memory | None
    losses: tuple[float, float]  # of the first step and after the last one
    sites: dict[str, int]
    report: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        return self.timing.median_s / self.job.protocol.steps_a_run


def main(argv: list[str] | None = None) -> int:
    a = _arguments(argv)
    planned = [job for net in a.net for job in jobs(a, net)]
    where = _rows.machine(a.device)
    failed = 0
    rivals: dict[str, Measured] = {}
    works = [partial(measure, job) for job in planned]
    for job, found in zip(planned, in_turn(works, budget_s=a.budget_s, at_once=a.at_once), strict=True):
        if isinstance(found, UsageError):
            raise found
        if isinstance(found, RidgelineError):
            failed += 1
            print(f"{job.net} {job.recipe}: {found}", file=sys.stderr, flush=True)
            continue
        rival = rivals.get(job.net)
        print("\n".join(lines(found, rival)), flush=True)
        if a.out:
            _rows.append(a.out, [results_row(where, found, rival)])
        if job.recipe == RIVAL:
            rivals[job.net] = found
    return 1 if failed else 0


def jobs(a: argparse.Namespace, net: str) -> list[Job]:
    """The rival first, then the recipes that were asked for."""
    if net not in NETS:
        raise UsageError(f"net must be one of {', '.join(NETS)}, got {net!r}")
    protocol = protocol_of(a.steps, a.warmup)
    batch = NETS[net].batch if a.batch is None else a.batch
    return [Job(net, name, batch, a.size, a.device, protocol) for name in dict.fromkeys([RIVAL, *a.recipe])]


def measure(job: Job, wait: Wait = lambda: None) -> Measured:
    """Build the step, `wait` for its turn, time it, trace it, and look at its memory, in this process.

    Raises NotEngaged without a graph.
    """
    on_gpu = torch.device(job.device).type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    net = NETS[job.net]
    model = net.build().to(job.device).train()
    images = torch.randn(job.shape, device=job.device).contiguous(memory_format=torch.channels_last)
    batch = (images, torch.randint(CLASSES, (job.batch,), device=job.device))
    recipe = replace(NAMED[job.recipe], require=on_gpu)
    step = compile_step(model, _loss, net.optimizer(model.parameters()), batch, recipe=recipe)
    first = step(batch)
    for _ in range(job.protocol.warmup - 1):
        step(batch)
    if on_gpu:
        torch.cuda.synchronize()
    wait()

    def run() -> None:
        for _ in range(job.protocol.steps_a_run):
            step(batch)

    timing = time_callable(run, warmup=1, repeats=job.protocol.runs, method="host")
    losses = (first.item(), step(batch).item())
    if not all(map(math.isfinite, losses)):
        raise VerificationFailed(f"the loss went from {losses[0]:.4g} to {losses[1]:.4g}: these steps train nothing")
    memory = _memory(step, batch) if on_gpu else None
    traced = bench.trace(lambda: step(batch), job.protocol.traced) if on_gpu else None
    report = step.report
    return Measured(job, timing, traced, memory, losses, report.rewrites, tuple(report.lines()))


def lines(measured: Measured, rival: Measured | None) -> list[str]:
    """What is printed of a recipe: its numbers, how it stands beside the rival, and the step's own report."""
    job, traced, memory = measured.job, measured.traced, measured.memory
    per_run = job.protocol.steps_a_run
    numbers = [
        f"{units.seconds(measured.wall_s)} a step (spread {units.seconds(measured.timing.spread_s / per_run)})",
        f"{job.batch / measured.wall_s:,.0f} images/s",
    ]
    if traced:
        numbers.append(f"GPU busy {units.seconds(traced.busy_s)} in {traced.kernels:,.0f} kernels")
    if memory:
        numbers.append(f"peak {units.nbytes(memory.allocated)}, {units.nbytes(memory.reserved)} reserved")
    numbers.append(f"loss {measured.losses[0]:.3f} to {measured.losses[1]:.3f}")
    found = [f"{job.net} {job.recipe}, batch {job.batch}: {', '.join(numbers)}"]
    if rival is not None and traced is not None:  # without a GPU both are the same eager steps
        found.append(f"  {beside(measured, rival)}")
    return found + [f"  {line}" for line in measured.report]


def beside(measured: Measured, rival: Measured) -> str:
    """How a recipe stands beside the rival, in words."""
    share = measured.wall_s / rival.wall_s
    if not differs(measured.timing, rival.timing):
        return f"no difference to {RIVAL} beyond the spread of the runs ({share:.3f} of its time)"
    return f"{'SLOWER' if share > 1 else 'faster'} than {RIVAL}: {share:.3f} of its time"


def results_row(where: _rows.Machine, measured: Measured, rival: Measured | None) -> _rows.Row:
    """The recipe in the schema of the results files."""
    job, traced, memory = measured.job, measured.traced, measured.memory
    ours = job.recipe != RIVAL
    extra: dict[str, Any] = {
        "images_per_s": job.batch / measured.wall_s,
        "of_rival": measured.wall_s / rival.wall_s if rival and traced else None,  # in time
        "kernels": traced.kernels if traced else None,
        "waits": traced.waits if traced else None,
        "peak_bytes": memory.allocated if memory else None,
        "reserved_bytes": memory.reserved if memory else None,
        "losses": list(measured.losses),
        "sites": measured.sites,
        "report": list(measured.report),
        "steps": job.protocol.timed,
    }
    return _rows.row(
        where,
        measured.timing,
        calls=job.protocol.steps_a_run,
        subject=job.net,
        stack="ridgeline" if ours else "torch.compile",
        stack_version=where.commit if ours else torch.__version__,
        recipe=job.recipe,
        dtype=NAMED[job.recipe].dtype,
        batch=job.batch,
        shape="x".join(map(str, job.shape)),
        region="step",
        gpu_busy_s=traced.busy_s if traced else None,
        extra=extra,
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _memory(step: TrainStep, batch: tuple[Tensor, Tensor]) -> Memory:
    """Takes one step. A replay allocates nothing, so the step's kernels are launched one by one to see its peak."""
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    step.launch_operators(batch)
    torch.cuda.synchronize()
    return Memory(torch.cuda.max_memory_allocated(), reserved)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--net", nargs="+", default=list(NETS), help="default: %(default)s")
    parser.add_argument("--recipe", nargs="+", default=["bf16"], help=f"beside {RIVAL}; default: %(default)s")
    parser.add_argument("--batch", type=int, help="images a step; default: each network's own, 128 and 64")
    parser.add_argument("--size", type=int, default=224, help="pixels a side (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script, eagerly")
    parser.add_argument("--steps", type=int, default=50, help="timed, in five runs (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default %(default)s)")
    parser.add_argument("--budget-s", type=float, default=bench.BUDGET_S, help="for one recipe, compilation included")
    parser.add_argument("--at-once", type=int, default=1, help="steps compiled side by side; timed one at a time")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file as they come")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/train_nets.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
