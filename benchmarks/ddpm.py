"""Time one DDPM training step, rung by rung of the write-up's ladder: CIFAR-10 network, batch 128, bf16.

    python benchmarks/ddpm.py --out benchmarks/results/ddpm.jsonl
    python benchmarks/ddpm.py --rung writeup-3 writeup-5 --data cifar-10-python.tar.gz

A step is everything from asking the loader to the averaged weights. Five warm-up steps, then 50 timed ones in five runs
of ten, synchronised between runs only, so that the host may run ahead as in training. The share of time in which the
GPU works is traced afterwards. Each rung runs in a process of its own, and is given up after --budget-s seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import nn

import _rows
from ridgeline import units
from ridgeline.ema import Ema
from ridgeline.errors import EnvironmentUnusable, RidgelineError
from ridgeline.models.ddpm_unet import CIFAR10, UNet
from ridgeline.step_recipe import StepRecipe
from ridgeline.timing import time_callable
from ridgeline.train_step import TrainStep, compile_step
from ridgeline.workloads.diffusion import linear_schedule, sample_timesteps, training_loss
from ridgeline.workloads.image_sets import load_images
from ridgeline.workloads.loader import Batches

WARMUP_STEPS = 5
RUNS, STEPS_A_RUN = 5, 10
TRACED_STEPS = 5
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}

Step = Callable[[], object]


@dataclass(frozen=True)
class Rung:
    """One step of the ladder; each changes one thing of the rung before."""

    name: str
    change: str
    channels_last: bool = True
    reads_loss: bool = False
    fused: bool = True
    compiled: str = "loss"  # "model", or "loss": the noising and the loss with it
    graph: str = "none"  # "inductor": one for each of forward and backward; "step": one over everything
    one_pass: bool = False  # clip, AdamW and average in one kernel
    rewrites: tuple[str, ...] = ()  # of the compiled graph


RUNGS = (
    Rung(
        "writeup-0",
        "compiled model, bf16 autocast",
        channels_last=False,
        reads_loss=True,
        fused=False,
        compiled="model",
    ),
    Rung("writeup-1", "channels-last weights and images", reads_loss=True, fused=False, compiled="model"),
    Rung("writeup-2", "the loss is summed on the device, not read at every step", fused=False, compiled="model"),
    Rung("writeup-3", "fused AdamW", compiled="model"),
    Rung("writeup-4", "noising and loss compiled too, reduce-overhead", graph="inductor"),
    Rung("writeup-5", "one CUDA graph over the whole step (ridgeline.compile_step)", graph="step"),
    Rung("one-pass", "clip, AdamW and average in one kernel", graph="step", one_pass=True),
    Rung("nchw", "weights and images stay NCHW", graph="step", one_pass=True, channels_last=False),
    Rung(
        "fused-norms",
        "GroupNorm, scale, shift, SiLU and dropout in one kernel each way",
        graph="step",
        one_pass=True,
        rewrites=("expand_upsample", "fuse_group_norm_silu"),
    ),
)
BY_NAME = {rung.name: rung for rung in RUNGS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rung", nargs="+", choices=BY_NAME, default=list(BY_NAME), help="default: all, in order")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--data", type=Path, help="CIFAR-10 in any form; default: 50,000 random images of its size")
    parser.add_argument("--budget-s", type=float, default=300.0, help="for one rung, compilation included")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file as they come")
    a = parser.parse_args()
    try:
        where = _rows.machine()
    except RidgelineError as error:
        print(f"benchmarks/ddpm.py: {error}", file=sys.stderr)
        return error.exit_code
    failed = 0
    for name in a.rung:
        row = in_child(BY_NAME[name], a, where)
        if isinstance(row, str):
            failed += 1
            print(f"{name}: {row}", file=sys.stderr, flush=True)
            continue
        print(line(row), flush=True)
        if a.out:
            _rows.append(a.out, [row])
    return 1 if failed else 0


def line(row: _rows.Row) -> str:
    assert row.median_s is not None and row.gpu_busy_s is not None
    return (
        f"{row.recipe}  wall {units.seconds(row.median_s):>9}  GPU busy {units.seconds(row.gpu_busy_s):>9} "
        f"({row.gpu_busy_s / row.median_s:.0%})  {row.extra['kernels']:>6.0f} kernels, {row.extra['waits']:.1f} waits, "
        f"{row.extra['images_per_s']:,.0f} images/s  {row.extra['change']}"
    )


def in_child(rung: Rung, a: argparse.Namespace, where: _rows.Machine) -> _rows.Row | str:
    """The rung's row, or why there is none; what it breaks or hangs is its own process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=report, args=(theirs, rung, a.batch, a.data, where))
    child.start()
    theirs.close()
    try:
        if not ours.poll(a.budget_s):
            return f"given up after {a.budget_s:.0f} s: raise --budget-s"
        return ours.recv()
    except EOFError:
        child.join()
        return f"its process died with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()


def report(pipe: Connection, rung: Rung, batch: int, data: Path | None, where: _rows.Machine) -> None:
    try:
        pipe.send(bench(rung, batch, data, where))
    except (RidgelineError, RuntimeError, ValueError, TypeError):
        pipe.send(traceback.format_exc())


def bench(rung: Rung, batch: int, data: Path | None, where: _rows.Machine) -> _rows.Row:
    step, extra = build(rung, batch, data)
    for _ in range(WARMUP_STEPS):
        step()

    def run() -> None:
        for _ in range(STEPS_A_RUN):
            step()

    timing = time_callable(run, warmup=1, repeats=RUNS, method="host")
    traced = trace(step)
    wall_s = timing.median_s / STEPS_A_RUN
    return _rows.row(
        where,
        timing,
        calls=STEPS_A_RUN,
        subject="ddpm-cifar10",
        stack="ridgeline" if rung.graph == "step" else "torch.compile",
        stack_version=where.commit if rung.graph == "step" else torch.__version__,
        recipe=rung.name,
        dtype="bf16",
        batch=batch,
        shape=f"{batch}x3x32x32",
        region="step",
        gpu_busy_s=traced.pop("busy_s"),
        extra={**asdict(rung), **traced, **extra, "images_per_s": batch / wall_s, "steps": RUNS * STEPS_A_RUN},
    )


def build(rung: Rung, batch: int, data: Path | None, *, operators: bool = False) -> tuple[Step, dict[str, object]]:
    """A call that takes one training step, and what else a row should say.

    `operators`: launch what a captured step holds one by one, which is how a trace learns which kernel is whose.
    """
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if data is None:
        images = np.random.default_rng(0).integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    else:
        images = load_images(data)
    loader = Batches(images, batch, device="cuda")
    layout = torch.channels_last if rung.channels_last else torch.contiguous_format
    model = UNet(CIFAR10).cuda().to(memory_format=layout)
    schedule = linear_schedule().to("cuda")
    ema = Ema(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True if rung.fused else None)

    def loss(model: nn.Module, x0: torch.Tensor) -> torch.Tensor:
        return training_loss(model, x0, sample_timesteps(x0.shape[0], schedule), torch.randn_like(x0), schedule)

    if rung.graph == "step":
        captured = whole_step(rung, model, loss, optimizer, next(loader), ema)
        one = captured.launch_operators if operators else captured
        running = torch.zeros((), device="cuda")
        return lambda: running.add_(one(next(loader))), {"findings": list(map(str, captured.report.findings))}

    called = torch.compile(model) if rung.compiled == "model" else model
    forward = loss
    if rung.compiled == "loss":
        forward = torch.compile(loss, mode="reduce-overhead" if rung.graph == "inductor" else None)
    return plain_step(rung, loader, layout, called, forward, optimizer, ema, model), {}


def whole_step(rung, model, loss, optimizer, batch, ema) -> TrainStep:
    recipe = StepRecipe(
        compile=rung.compiled,
        channels_last=rung.channels_last,
        rewrites=rung.rewrites,
        optimizer_kernel="auto" if rung.one_pass else "never",
        require=True,
    )
    return compile_step(model, loss, optimizer, batch, ema=ema, clip=1.0, recipe=recipe)


def plain_step(rung, loader, layout, called, forward, optimizer, ema, model) -> Step:
    """The write-up's loop."""
    parameters = list(model.parameters())
    running = torch.zeros((), device="cuda")
    read = 0.0

    def step() -> None:
        nonlocal read
        x0 = next(loader).contiguous(memory_format=layout)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(called, x0)
        loss.backward()
        if rung.reads_loss:
            read += loss.item()
        else:
            running.add_(loss.detach())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update_(model)

    return step


def trace(step: Step) -> dict[str, float]:
    """Of one step: seconds in which at least one kernel or copy ran, kernels, and waits of the host for the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(TRACED_STEPS):
            step()
        torch.cuda.synchronize()
    events = profile.events()
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_gpu)
    if not spans:
        raise EnvironmentUnusable("the trace has no GPU events: another profiler may hold the device, close it")
    # the profiler counts microseconds
    return {
        "busy_s": union(spans) / 1e6 / TRACED_STEPS,
        "kernels": sum(not e.name.startswith("Mem") for e in on_gpu) / TRACED_STEPS,
        "waits": sum(e.name in WAITS for e in events) / TRACED_STEPS,
    }


def union(spans: list[tuple[float, float]]) -> float:
    """Length covered by at least one span; sorted by start."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


if __name__ == "__main__":
    sys.exit(main())
