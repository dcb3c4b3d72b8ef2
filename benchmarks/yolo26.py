"""Time YOLO26 at batch 1, image tensor to 300 detections, as ridgeline compiles it and as PyTorch runs it.

    python benchmarks/yolo26.py --scale n --dtype fp16 --out benchmarks/results/yolo26.jsonl

Every stack is checked against float64 before it is timed; all are timed interleaved in one process, as one CUDA graph
each, with a warm and with a cold L2. Weights are seeded random ones unless --weights names a file.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import torch

import _rows
from ridgeline import compiler, units
from ridgeline.cudagraph import capture
from ridgeline.errors import RidgelineError
from ridgeline.models.weights import yolo26_from
from ridgeline.models.yolo26 import SCALES, YOLO26, fuse, randomise_
from ridgeline.recipe import Recipe
from ridgeline.step_clock import StepClock
from ridgeline.timing import time_many
from ridgeline.verifier import detection_errors
from ridgeline.workloads import images, letterbox

STREET = Path(str(files("ridgeline") / "assets" / "street.jpg"))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", nargs="+", choices=SCALES, default=["n"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--weights", type=Path, help="an official checkpoint of the one --scale")
    parser.add_argument(
        "--image", type=Path, default=STREET, help="letterboxed to 640x640; default: the bundled picture"
    )
    parser.add_argument("--inductor", metavar="MODE", help='also time torch.compile in this mode, such as "default"')
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file")
    a = parser.parse_args()
    code = 0
    for scale in a.scale:
        for dtype in a.dtype:
            # one that fails costs the others nothing
            try:
                where = _rows.machine()
                model = fuse(randomise_(YOLO26(scale))) if a.weights is None else yolo26_from(a.weights)
                for row in bench(model.cuda(), dtype, a, where):
                    print(_line(row), flush=True)
                    if a.out:
                        _rows.append(a.out, [row])
            except RidgelineError as error:
                print(f"benchmarks/yolo26.py: {scale} {dtype}: {error}", file=sys.stderr, flush=True)
                code = code or error.exit_code
    return code


def bench(model: YOLO26, dtype: str, a: argparse.Namespace, where: _rows.Machine) -> Iterator[_rows.Row]:
    """Check and time one scale in one dtype: its rows, each as soon as it is known. Says on stderr what takes long."""
    subject, clock, tf32 = f"yolo26{model.scale}", StepClock(on_gpu=False), dtype == "tf32"

    def done(what: str) -> None:
        clock.mark()
        print(f"{subject} {dtype}  {what}: {units.seconds(clock.host_seconds()[-1])}", file=sys.stderr, flush=True)

    clock.mark()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    picture = images.read_image(a.image)
    placed = letterbox.apply(picture, letterbox.plan(*picture.shape[:2], 640, mode="square"))
    image = letterbox.to_tensor([placed] * a.batch, device="cuda")
    x = image.to(DTYPES[dtype]).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(image.double())
    done("reference in float64")
    recipes = recipe_variants(dtype)
    stacks: dict[str, Callable[[], torch.Tensor]] = {}
    launches = {}
    for name, recipe in recipes.items():
        compiled = compiler.compile(model, x, recipe)
        graph = compiled.graph(x)
        launches[name] = {
            "launches": graph.launches,
            "chain": graph.chain_length,
            "interior": len(graph.interior),
            "foreign": dict(graph.foreign),
        }
        stacks[name] = compiled.replayer(x)
        done(name)
    eager = copy.deepcopy(model).to(DTYPES[dtype])
    for name, layout in (("eager NCHW", torch.contiguous_format), ("eager NHWC", torch.channels_last)):
        twin = copy.deepcopy(eager).to(memory_format=layout)
        stacks[name] = _graph(twin, x.contiguous(memory_format=layout))
        done(name)
    if a.inductor:
        torch.compiler.reset()
        inductor = torch.compile(copy.deepcopy(eager).to(memory_format=torch.channels_last), mode=a.inductor)
        stacks[f"torch.compile {a.inductor}"] = _graph(inductor, x)
        done(f"torch.compile {a.inductor}")
    errors = {name: detection_errors(run().clone(), reference) for name, run in stacks.items()}
    done("errors")
    for l2 in ("warm", "cold"):
        timings = time_many(stacks, l2=l2, repeats=100)
        done(f"100 rounds with a {l2} L2")
        for name, timing in timings.items():
            ours, error = name in recipes, errors[name]
            extra = {**launches.get(name, {}), "score_error": error.score, "box_error_px": error.box_px}
            described = {
                "subject": subject,
                "stack": "ridgeline" if ours else name.split()[0],
                "stack_version": where.commit if ours else torch.__version__,
                "shape": f"{a.batch}x3x640x640",
            }
            yield _rows.row(
                where, timing, recipe=name, dtype=dtype, batch=a.batch, region="model", extra=extra, **described
            )


def _line(row: _rows.Row) -> str:
    assert row.median_s is not None and row.p90_s is not None
    return (
        f"{row.subject} {row.dtype} batch {row.batch}  {row.recipe:<28} L2 {row.l2:<5} "
        f"{units.seconds(row.median_s):>9}  p90 {units.seconds(row.p90_s):>9}  {row.extra}"
    )


def recipe_variants(dtype: str) -> dict[str, Recipe]:
    """The default recipe and the same without programmatic dependent launch."""
    base = {"fp16": ("fp16", "tf32"), "bf16": ("bf16", "tf32"), "tf32": ("fp32", "tf32"), "fp32": ("fp32", "ieee")}[
        dtype
    ]
    return {
        "compile": Recipe(dtype=base[0], precision=base[1]),
        "compile, no PDL": Recipe(dtype=base[0], precision=base[1], pdl=False),
    }


def _graph(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    with torch.no_grad():
        return capture(model, (x,)).replay


if __name__ == "__main__":
    sys.exit(main())
