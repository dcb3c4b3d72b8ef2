"""Train the DDPM in several recipes and seeds, and say whether each recipe learns what eager bf16 learns.

    python benchmarks/ddpm_quality.py --data cifar-10-python.tar.gz --val cifar-10-python.tar.gz
    python benchmarks/ddpm_quality.py --plot curves.svg        # trains nothing: table and curves of the rows there are

A run, one recipe from one seed, is `ridgeline train ddpm` in a process and a folder of its own. It is validated on the
same noise and time steps, and saved, every --every steps, and each validation becomes a row. On a GPU the eager step is
replayed as one CUDA graph of the same kernels, so that their launches take no time. Started again after a kill, the
script leaves out runs whose rows are complete and goes on from the checkpoints of the others.

A recipe is as good as eager bf16 where their mean final losses differ by no more than eager's own seeds do, from the
lowest to the highest. That takes three seeds of both.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _curves
import _rows
from _learned import PAIR, PLAIN, Point, table
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError
from ridgeline.own_process import call_apart
from ridgeline.step_recipe import NAMED, StepRecipe
from ridgeline.train_step import TrainStep, compile_step
from ridgeline.workloads.checkpoint import checkpoints
from ridgeline.workloads.image_sets import load_images
from ridgeline.workloads.run_log import Line, read_log
from ridgeline.workloads.settings import FILE, Settings, settings_for
from ridgeline.workloads.training import LOG, Step, StepParts, choose_device, named_step, step_maker, train

SUBJECT = "ddpm-quality"
BUDGET_S = 3600.0
# the kernels that PyTorch launches eagerly, replayed as one graph; the loss sets its own autocast
_EAGER = StepRecipe(dtype="fp32", compile="none", channels_last=True, optimizer_kernel="never", require=True)


@dataclass(frozen=True)
class Conditions:
    """What losses must share to be compared."""

    data: str  # names of the files
    val: str
    steps: int
    batch: int
    preset: str
    size: int | None
    gpu: str


@dataclass(frozen=True)
class Job:
    """One run, and where its rows go."""

    settings: Settings
    folder: Path
    device: str
    out: Path
    where: _rows.Machine
    conditions: Conditions


def main(argv: list[str] | None = None) -> int:
    a = _arguments(argv)
    failed = 0
    wanted = None
    if a.data is not None:
        wanted, failed = _train_all(a)
    conditions = wanted or newest_conditions(a.out)
    points = read_points(a.out, conditions)
    print(table(points, conditions.steps, headline(conditions)))
    if a.plot and points:
        runs: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for point in points:
            runs.setdefault(point.recipe, {}).setdefault(point.seed, []).append((point.step, point.val_loss))
        _write(a.plot, _curves.picture(runs, plain=PLAIN, title=headline(conditions)))
    return 1 if failed else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written ({error.strerror}): pass another --plot") from error
    print(path)


def headline(conditions: Conditions) -> str:
    c = conditions
    return f"Validation loss of the DDPM ({c.preset}), {c.steps:,} steps of {c.batch} images of {c.data}, {c.gpu}"


# --- training --------------------------------------------------------------------------------------------------------


def _train_all(a: argparse.Namespace) -> tuple[Conditions, int]:
    """Every run that is not complete; returns how many came to nothing, too."""
    if a.val is None:
        raise UsageError("--val is needed to train: images that --data does not hold")
    # seed by seed, so that a run cut short leaves recipes that can be compared
    wanted = dict.fromkeys((recipe, seed) for seed in a.seeds for recipe in a.recipe)
    chosen = [(recipe, seed, _settings(a, recipe, seed)) for recipe, seed in wanted]
    device = choose_device(a.device)
    where = _rows.machine(device.type)
    # what cannot be read is refused before anything is begun, and the sets are decoded for all runs
    load_images(a.data, split="train", size=a.size)
    load_images(a.val, split="test", size=a.size)
    conditions = Conditions(Path(a.data).name, Path(a.val).name, a.steps, a.batch, a.preset, a.size, where.gpu)
    failed = 0
    for recipe, seed, settings in chosen:
        folder = a.runs / f"{recipe}-seed{seed}"
        if a.force and folder.exists():
            shutil.rmtree(folder)
        if not a.force and is_complete(read_points(a.out, conditions), recipe, seed, a.steps):
            print(f"{recipe}, seed {seed}: complete", flush=True)
            continue
        _check_folder(folder, settings)
        print(f"{recipe}, seed {seed}: from step {_saved_step(folder)} of {a.steps}", flush=True)
        job = Job(settings, folder, device.type, a.out, where, conditions)
        try:
            call_apart(partial(run, job), budget_s=a.budget_s)
        except UsageError:
            raise
        except RidgelineError as error:
            failed += 1
            print(f"{recipe}, seed {seed}: {error}", file=sys.stderr, flush=True)
    return conditions, failed


def run(job: Job) -> None:
    """Train to the end from wherever the folder stands, appending a row for each validation that is saved."""
    steps: list[Step] = []
    written = -1

    def make_step(parts: StepParts) -> Step:
        steps.append(_step(job.settings.recipe, parts))
        return steps[-1]

    def report(_line: Line | None) -> None:
        nonlocal written
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise EnvironmentUnusable("the process that started this run has ended, and another may go on with it")
        saved = _saved_step(job.folder)
        if saved > written:
            written = saved
            for row in _append_rows(job, saved, steps[-1]):
                print(f"  step {row.extra['step']}: validation loss {row.extra['val_loss']:.6f}", flush=True)

    with _alone(job.folder):
        train(job.settings, job.folder, resume=True, device=job.device, report=report, make_step=make_step)
        report(None)


def _step(recipe: str, parts: StepParts) -> Step:
    device = parts.example_batch.device
    if recipe == PLAIN and device.type == "cuda":
        return compile_step(
            parts.model, parts.loss, parts.optimizer, parts.example_batch, ema=parts.ema, clip=parts.clip, recipe=_EAGER
        )
    # a CPU is there to try the script out, with the eager steps of a recipe
    return named_step(recipe, parts) if device.type == "cpu" and recipe in NAMED else step_maker(recipe, device)(parts)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process trains in a folder: one that lost its script ends at its next report."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        opened = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise UsageError(f"'{folder.parent}' cannot be written ({error.strerror}): pass another --runs") from error
    with opened as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the process ends, however it ends
        yield


def _append_rows(job: Job, saved: int, step: Step) -> list[_rows.Row]:
    """A row for each validation up to the step `saved` that the results file has not, or has otherwise."""
    s = job.settings
    known = {(p.recipe, p.seed, p.step): p for p in read_points(job.out, job.conditions)}
    fresh = []
    for point in _logged(job):
        if point.step > saved or known.get((point.recipe, point.seed, point.step)) == point:
            continue
        fresh.append(
            _rows.plain_row(
                job.where,
                subject=SUBJECT,
                stack="eager" if s.recipe == PLAIN else "ridgeline",
                stack_version=job.where.commit,
                recipe=s.recipe,
                dtype=s.autocast_dtype or "auto",
                batch=s.batch,
                region="validation",
                extra={
                    **{name: value for name, value in asdict(point).items() if name != "recipe"},
                    "conditions": asdict(job.conditions),
                    "report": step.report.lines() if isinstance(step, TrainStep) else [],
                },
            )
        )
    if fresh:
        _rows.append(job.out, fresh)
    return fresh


def _logged(job: Job) -> Iterable[Point]:
    """The validations in a run's log. Seconds are those of the log: steps, without compilation and validations."""
    train_s = 0.0
    for line in read_log(job.folder / LOG):
        if line.get("images_per_s"):
            train_s += job.settings.batch / line["images_per_s"]
        if "val_loss" in line:
            s = job.settings
            yield Point(s.recipe, s.seed, line["step"], line["val_loss"], line["val_loss_without_ema"], train_s)


def _settings(a: argparse.Namespace, recipe: str, seed: int) -> Settings:
    return Settings(
        data=a.data,
        val=a.val,
        steps=a.steps,
        preset=a.preset,
        batch=a.batch,
        size=a.size,
        seed=seed,
        recipe=recipe,
        dtype=None if recipe in NAMED else "bf16",
        log_every=min(50, a.every),
        save_every=a.every,
        val_every=a.every,
        sample_every=0,
    )


def _check_folder(folder: Path, settings: Settings) -> None:
    """Refuse a folder whose run is another one: a rate that ends elsewhere would make another curve."""
    if not (folder / FILE).exists():
        return
    begun, now = asdict(settings_for(folder, {}, resume=True)), asdict(settings)
    if other := [name for name in now if now[name] != begun[name]]:
        raise UsageError(f"the run in '{folder}' has another {', '.join(other)}: pass --force, or another --runs")


def _saved_step(folder: Path) -> int:
    return max((step for step, _ in checkpoints(folder)), default=0)


# --- rows ------------------------------------------------------------------------------------------------------------


def read_points(path: Path, conditions: Conditions) -> list[Point]:
    """What the rows of these conditions say, the last of each recipe, seed and step; none where there is no file."""
    found: dict[tuple[str, int, int], Point] = {}
    for row in _read(path):
        if row["extra"]["conditions"] == asdict(conditions):
            values = {**row["extra"], "recipe": row["recipe"]}
            point = Point(**{name: values[name] for name in Point.__dataclass_fields__})
            found[point.recipe, point.seed, point.step] = point
    return sorted(found.values(), key=lambda point: point.step)


def newest_conditions(path: Path) -> Conditions:
    """Those of the last row."""
    rows = _read(path)
    if not rows:
        raise UsageError(f"'{path}' has no rows of {SUBJECT}: pass --data and --val to train")
    return Conditions(**rows[-1]["extra"]["conditions"])


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}): pass another --out") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UsageError(f"'{path}', line {number}, is no row ({error}): mend it, or pass another --out") from error
    return [row for row in rows if row.get("subject") == SUBJECT]


def is_complete(points: Iterable[Point], recipe: str, seed: int, steps: int) -> bool:
    return any((point.recipe, point.seed, point.step) == (recipe, seed, steps) for point in points)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="images to train on; without it nothing is trained")
    parser.add_argument("--val", help="held-out images")
    parser.add_argument("--recipe", nargs="+", default=[PLAIN, *reversed(PAIR)], help="default: %(default)s")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5000, help="default %(default)s")
    parser.add_argument("--every", type=int, default=500, help="steps between validations (default %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images a step (default %(default)s)")
    parser.add_argument("--preset", default="cifar10", help="network (default %(default)s)")
    parser.add_argument("--size", type=int, help="crop to squares and resize to so many pixels; default: as they are")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is slow, and to try things out")
    parser.add_argument("--runs", type=Path, default=_rows.ROOT / "out" / SUBJECT, help="folders of the runs")
    parser.add_argument("--force", action="store_true", help="begin all runs anew, whatever there is of them")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for one run (default %(default)s)")
    parser.add_argument("--out", type=Path, default=_rows.ROOT / "benchmarks" / "results" / "ddpm_quality.jsonl")
    parser.add_argument("--plot", type=Path, help="draw the curves as this SVG file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/ddpm_quality.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
