"""Take the traces that `profile` and `explain` are tested on: real steps of a GPU, small enough to commit.

    python benchmarks/traces.py --out tests/fixtures/traces
    python benchmarks/traces.py --subject yolo26n-eager loader-bound --out traces

Each subject writes NAME.json.gz, the profiler's trace of a step or two, and NAME.facts.json, what its process cannot
say once it is profiled: the time of unprofiled steps, the GPU time by events, clocks and switches. Times and traces
come from two processes, because a process that was profiled may stay slow.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import _rows
from ridgeline.cudagraph import capture
from ridgeline.errors import RidgelineError
from ridgeline.models.yolo26 import YOLO26, fuse, randomise_
from ridgeline.timing import gpu_state, time_callable
from ridgeline.workloads import ddpm_ladder

WARMUP_STEPS, TIMED_STEPS = 5, 30

Step = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """One loop to trace. Module stacks make a trace three times as large, so only small loops have them."""

    name: str
    make: Callable[[], Step]
    active: int = 1  # steps in the trace
    stacks: bool = False


def ddpm_step(rung: str, *, operators: bool = False) -> Callable[[], Step]:
    def make() -> Step:
        return ddpm_ladder.build(ddpm_ladder.BY_NAME[rung], ddpm_ladder.Conditions(), operators=operators).step

    return make


def yolo_step(*, graph: bool) -> Callable[[], Step]:
    def make() -> Step:
        torch.manual_seed(0)
        model = fuse(randomise_(YOLO26("n"))).cuda().half().eval()
        x = torch.rand(1, 3, 640, 640, device="cuda").half()

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(x)

        return capture(forward, (x,)).replay if graph else lambda: forward(x)

    return make


class SlowImages(torch.utils.data.Dataset[torch.Tensor]):
    """Random images that take 6 ms each, as decoding and augmenting a photograph does."""

    def __len__(self) -> int:
        return 8 * 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.006)
        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))


def small_net() -> nn.Module:
    torch.manual_seed(0)
    widths = (3, 64, 64, 128)
    blocks: list[nn.Module] = []
    for c, k in pairwise(widths):
        blocks += [nn.Conv2d(c, k, 3, padding=1), nn.BatchNorm2d(k), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)).cuda()


def loader_bound_step() -> Step:
    """A loader without workers that takes 50 ms a batch, and a net that takes a few."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = iter(torch.utils.data.DataLoader(SlowImages(), batch_size=8))

    def step() -> None:
        images = next(batches).cuda()
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def syncing_step() -> Step:
    """A loop that waits for the GPU four times a step: a mask, a checked norm, a loss and an accuracy that are read."""
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    images = torch.rand(256, 3, 32, 32, device="cuda")
    labels = torch.randint(0, 10, (256,), device="cuda")
    seen = 0.0

    def step() -> None:
        nonlocal seen
        logits = model(images)
        kept = logits[labels < 9]
        loss = nn.functional.cross_entropy(kept, labels[labels < 9])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += loss.item()
        seen += float((logits.argmax(1) == labels).float().mean())

    return step


SUBJECTS = (
    Subject("ddpm-baseline", ddpm_step("writeup-0")),
    Subject("ddpm-graph", ddpm_step("writeup-5")),
    Subject("ddpm-graph-operators", ddpm_step("writeup-5", operators=True)),
    Subject("ddpm-fused-norms", ddpm_step("fused-norms")),
    Subject("ddpm-fused-norms-operators", ddpm_step("fused-norms", operators=True)),
    Subject("yolo26n-eager", yolo_step(graph=False), stacks=True),
    Subject("yolo26n-graph", yolo_step(graph=True), active=2),
    Subject("loader-bound", loader_bound_step, active=2, stacks=True),
    Subject("syncing", syncing_step, active=2, stacks=True),
)
BY_NAME = {subject.name: subject for subject in SUBJECTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subject", nargs="+", choices=BY_NAME, default=list(BY_NAME), help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for the traces")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    failed = 0
    for name in a.subject:
        for work in (write_facts, write_trace):
            child = context.Process(target=work, args=(name, a.out))
            child.start()
            child.join()
            if child.exitcode:
                failed += 1
                print(f"{name}: {work.__name__} ended with exit code {child.exitcode}", file=sys.stderr)
    return 1 if failed else 0


def write_facts(name: str, out: Path) -> None:
    """Times of steps that nobody watches."""
    step = BY_NAME[name].make()
    for _ in range(WARMUP_STEPS):
        step()
    torch.cuda.synchronize()
    # one step at a time, as the trace shows it, and many in a row, as training runs
    alone = time_callable(step, warmup=1, repeats=TIMED_STEPS, method="host")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    in_a_row = []
    for _ in range(5):
        begin.record()
        for _ in range(10):
            step()
        end.record()
        end.synchronize()
        in_a_row.append(begin.elapsed_time(end) / 1e3 / 10)
    state = gpu_state()
    facts = {
        "name": name,
        "alone": asdict(alone),
        "in_a_row_s": statistics.median(in_a_row),
        "gpu": torch.cuda.get_device_name(),
        "state": asdict(state) if state else None,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "settings": {
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        },
    }
    (out / f"{name}.facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{name}: {alone.median_s * 1e3:.3f} ms alone, {facts['in_a_row_s'] * 1e3:.3f} ms in a row", flush=True)


def write_trace(name: str, out: Path) -> None:
    """The profiler's trace of `active` steps, with shapes."""
    subject = BY_NAME[name]
    step = subject.make()
    for _ in range(WARMUP_STEPS):
        step()
    torch.cuda.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=2, active=subject.active),
        record_shapes=True,
        with_stack=subject.stacks,
        with_modules=subject.stacks,
        experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True),
        on_trace_ready=lambda p: p.export_chrome_trace(str(out / f"{name}.json.gz")),
    ) as p:
        for _ in range(3 + subject.active):
            with record_function("ridgeline.step"):
                step()
            torch.cuda.synchronize()
            p.step()
    slim(out / f"{name}.json.gz")
    size = (out / f"{name}.json.gz").stat().st_size
    print(f"{name}: trace of {size / 1024:.0f} KiB", flush=True)


def slim(path: Path) -> None:
    """Leave out arrows, which repeat what correlation ids say, and the folders this was run in."""
    text = gzip.decompress(path.read_bytes()).decode()
    for folder in (_rows.ROOT, cache_dir()):
        text = text.replace(f"{folder}/", "")
    trace = json.loads(text)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") not in ("ac2g", "fwdbwd")]
    trace.pop("traceName", None)
    path.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/traces.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
