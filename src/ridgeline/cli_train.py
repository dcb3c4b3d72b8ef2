"""The verbs `train` and `sample` of the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ridgeline.late_import import late_import

DEVICES = ("auto", "cpu", "cuda")
RECIPES = ("auto", "eager", "graph", "bf16", "fp8", "fp16", "fp32", "writeup-5")  # as in settings, which loads torch
# argparse puts these beside the settings
NOT_SETTINGS = frozenset({"verb", "workload", "run", "argv", "out", "resume", "device"})


def add_commands(verbs: argparse._SubParsersAction) -> None:
    """Register `train` and `sample`."""
    text = "train a workload, with checkpoints that survive a kill"
    train = verbs.add_parser("train", help=text, description=_sentence(text))
    workloads = train.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    _add_train_ddpm(workloads)
    _add_sample(verbs)


def train_ddpm(a: argparse.Namespace) -> int:
    training, settings = _workload("training"), _workload("settings")
    given = {name: value for name, value in vars(a).items() if name not in NOT_SETTINGS and value is not None}
    chosen = settings.settings_for(a.out, given, resume=a.resume)
    with _progress(chosen.steps, chosen.batch) as report:
        result = training.train(chosen, a.out, resume=a.resume, device=a.device, report=report)
    print(json.dumps({**vars(result), "checkpoint": str(result.checkpoint)}))
    return 0


def sample(a: argparse.Namespace) -> int:
    training, sampling = _workload("training"), _workload("sampling")
    sampling.check_grid_path(a.out)
    images = sampling.sample_checkpoint(
        a.checkpoint,
        n=a.n,
        sampler=a.sampler,
        steps=a.steps,
        seed=a.seed,
        device=training.choose_device(a.device),
    )
    sampling.write_grid(a.out, images)
    print(a.out)
    return 0


def _workload(name: str) -> Any:
    """A module of `ridgeline.workloads`, at the call: they load torch, and `ridgeline --help` must not."""
    return late_import(f"ridgeline.workloads.{name}")


@contextmanager
def _progress(steps: int, batch: int) -> Iterator[Callable[[Any], None]]:
    """What shows a `run_log.Line` on stderr: a bar on a terminal, else a text line at each, and how long is left."""
    if not sys.stderr.isatty():

        def show(line: Any) -> None:
            left = "" if not line.images_per_s else f" {_clock((steps - line.step) * batch / line.images_per_s)} left"
            print(f"step {line.step}/{steps} {_numbers(line)}{left}", file=sys.stderr, flush=True)

        yield show
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=steps)
        yield lambda line: bar.update(task, completed=line.step, description=_numbers(line))


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


def _numbers(line: Any) -> str:
    rate = "" if line.images_per_s is None else f" {line.images_per_s:.0f} images/s"
    return f"loss {line.loss:.4f} lr {line.lr:.2e}{rate}"


def _add_train_ddpm(workloads: argparse._SubParsersAction) -> None:
    text = "train a diffusion model on images: checkpoints, log and samples go to one folder"
    p = workloads.add_parser("ddpm", help=text, description=_sentence(text))
    p.set_defaults(run=train_ddpm)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    p.add_argument("--data", metavar="PATH", help="images: folder, .zip, CIFAR-10 batches (.tar.gz), .npz, .parquet")
    p.add_argument("--val", metavar="PATH", help="held-out images, of the same kinds")
    p.add_argument("--steps", type=int, help="optimizer steps of the whole run")
    p.add_argument("--preset", choices=("cifar10", "tiny"), help="network; tiny is for a CPU (default cifar10)")
    p.add_argument("--batch", type=int, help="images a step (default 128)")
    p.add_argument("--size", type=int, metavar="PIXELS", help="crop to squares and resize; default: as they are")
    p.add_argument("--skip-bad", action="store_true", default=None, help="leave damaged images out, with a warning")
    p.add_argument("--no-flip", dest="flip", action="store_false", default=None, help="never mirror an image")
    p.add_argument("--device", choices=DEVICES, default="auto", help="default: the GPU when there is one")
    _add_choices(p.add_argument_group("optimisation"))
    _add_cadence(p.add_argument_group("what is written, in steps"))


def _add_choices(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--lr", type=float, help="peak learning rate (default 2e-4)")
    p.add_argument("--warmup", type=int, metavar="STEPS", help="default: 1000, or a tenth of the run if that is less")
    p.add_argument("--weight-decay", type=float, help="default 0")
    p.add_argument("--clip", type=float, metavar="NORM", help="largest gradient norm (default 1)")
    p.add_argument("--dropout", type=float, help="default 0.1")
    p.add_argument("--ema-decay", type=float, help="of the averaged weights (default 0.9999)")
    p.add_argument("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast; default: bf16 on a GPU, fp32 on a CPU")
    p.add_argument(
        "--recipe",
        choices=RECIPES,
        help="graph: a step is one CUDA graph; bf16 and on: of compile_step; without a GPU, eager or auto (default)",
    )
    p.add_argument("--schedule", choices=("linear", "cosine"), help="of the noise (default linear)")
    p.add_argument("--seed", type=int, help="default 0")


def _add_cadence(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--log-every", type=int, help="how often the device is read for the log (default 50)")
    p.add_argument("--save-every", type=int, help="checkpoints; the last two are kept (default 1000)")
    p.add_argument("--sample-every", type=int, help="grids of 16 images; 0: never (default 5000)")
    p.add_argument("--val-every", type=int, help="validations on --val; 0: never (default 1000)")
    p.add_argument("--tensorboard", action=argparse.BooleanOptionalAction, help="also log for TensorBoard")


def _add_sample(verbs: argparse._SubParsersAction) -> None:
    text = "draw images from a checkpoint of `train ddpm`, with its averaged weights"
    p = verbs.add_parser("sample", help=text, description=_sentence(text))
    p.set_defaults(run=sample)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help="a .pt file of a run's folder")
    p.add_argument("--out", type=Path, default=Path("samples.png"), metavar="FILE", help="PNG (default %(default)s)")
    p.add_argument("--sampler", choices=("ddim", "ddpm"), default="ddim", help="default %(default)s")
    p.add_argument("--steps", type=int, help="of ddim (default 50); ddpm takes every step of the schedule")
    p.add_argument("--n", type=int, default=16, metavar="IMAGES", help="default %(default)s")
    p.add_argument("--seed", type=int, default=0, help="default %(default)s")
    p.add_argument("--device", choices=DEVICES, default="auto", help="default: the GPU when there is one")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
