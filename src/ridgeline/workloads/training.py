"""Train a DDPM: the loop around one step, with averaged weights, a log, samples, and checkpoints that survive a kill.

A run resumed from a checkpoint takes the steps that it would have taken: weights, moments, averages, random generators
and the loader's position are restored, and everything else is a function of the number of steps done. On a CPU the
losses are equal bit for bit; on a GPU as far as its kernels repeat themselves (some sum with atomics).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ridgeline.ema import Ema
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.models.ddpm_unet import UNet
from ridgeline.step_marks import mark_step
from ridgeline.step_recipe import DTYPES, NAMED, StepRecipe
from ridgeline.train_step import TrainStep, compile_step
from ridgeline.workloads.checkpoint import (
    load_latest,
    load_optimizer_,
    random_state,
    save_checkpoint,
    seed_,
    set_random_state_,
)
from ridgeline.workloads.diffusion import Loss, Schedule, noise_loss, training_loss
from ridgeline.workloads.image_sets import Images, load_images
from ridgeline.workloads.interrupts import interruptible
from ridgeline.workloads.loader import Batches, Position, to_model_range
from ridgeline.workloads.run_log import Line, RunLog, require_tensorboard
from ridgeline.workloads.sampling import SCHEDULES, channels_last, sample, write_grid
from ridgeline.workloads.settings import FILE, Settings, write_settings

_log = logging.getLogger(__name__)

LOG = "log.jsonl"
GRID_IMAGES = 16
VALIDATION_BATCH = 128  # its own constant: the noise of an image depends on it, and must not on the training batch
VALIDATION_SEED = 20_240
_SCALES = ("fp8", "scaler")  # of a step's state, what no other part of a checkpoint holds
# what loading raises when a field is absent, of another type or of another size
_MISFIT = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError)


class Step(Protocol):
    """One training step: takes a batch, updates weights and averages, returns the loss as a device scalar.

    It may have an attribute `grad_norm`, the norm before clipping as a device scalar, which is then logged.
    """

    def __call__(self, batch: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class StepParts:
    """What a step is made of. `loss(model, batch)` draws its own noise, from torch's default generators."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    ema: Ema
    clip: float
    example_batch: Tensor  # shape, dtype, device and layout of every batch
    must_capture: bool = False  # a step that cannot become one graph is an error


@dataclass(frozen=True)
class Result:
    """Where a run stands. `val_loss` is that of the averaged weights, where the run ended on a validation."""

    step: int
    checkpoint: Path | None
    loss: float | None
    val_loss: float | None


class EagerStep:
    """Forward, loss, backward, clip, optimizer, average: one kernel after another, no wait for the device."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.grad_norm: Tensor | None = None

    def __call__(self, batch: Tensor, /) -> Tensor:
        parts = self._parts
        loss = parts.loss(parts.model, batch)
        loss.backward()
        self.grad_norm = nn.utils.clip_grad_norm_(parts.model.parameters(), parts.clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        parts.ema.update_(parts.model)
        return loss.detach()


def captured_step(parts: StepParts) -> Step:
    """The whole step as one CUDA graph (`compile_step`); eagerly, with a warning, where it cannot be captured."""
    # the loss sets its own autocast, so the step must not set another
    return _compiled(StepRecipe(dtype="fp32", channels_last=False, require=parts.must_capture), parts)


def named_step(recipe: str, parts: StepParts, *, require: bool = False) -> Step:
    """The step of a recipe of `compile_step` by its name; without `require` eagerly where there is no GPU."""
    return _compiled(replace(NAMED[recipe], require=require), parts)


def step_maker(recipe: str, device: torch.device) -> Callable[[StepParts], Step]:
    """How `Settings.recipe` takes a step on a device. Without a GPU, EnvironmentUnusable but for "eager" and "auto"."""
    on_gpu = device.type == "cuda"
    if not on_gpu and recipe not in ("eager", "auto"):
        raise EnvironmentUnusable(f"--recipe {recipe}: a CUDA graph needs a GPU; use --recipe eager, or auto")
    if recipe in NAMED:
        return partial(named_step, recipe, require=True)
    return captured_step if recipe == "graph" or (recipe == "auto" and on_gpu) else EagerStep


def _compiled(recipe: StepRecipe, parts: StepParts) -> TrainStep:
    return compile_step(
        parts.model, parts.loss, parts.optimizer, parts.example_batch, ema=parts.ema, clip=parts.clip, recipe=recipe
    )


def train(
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
    device: torch.device | str = "auto",
    report: Callable[[Line], None] = lambda _: None,
    make_step: Callable[[StepParts], Step] | None = None,
) -> Result:
    """Train in `folder`: settings.json, log.jsonl, checkpoints and samples/. Seeds the global random generators.

    `resume` goes on from the newest checkpoint that can be read, or begins where there is none. `report` is called
    with the last step's line whenever the log is read. At SIGINT the run is saved and KeyboardInterrupt raised; at a
    second one, at once. `make_step` replaces what `settings.recipe` names. Raises UsageError, EnvironmentUnusable,
    NotEngaged for a required graph, and VerificationFailed when the loss is not finite.
    """
    place = choose_device(device)
    make_step = make_step or step_maker(settings.recipe, place)
    if settings.tensorboard:
        require_tensorboard()
    _prepare(folder, resume)
    images = load_images(settings.data, split="train", size=settings.size, skip_bad=settings.skip_bad)
    held_out = None
    if settings.val is not None:
        held_out = load_images(settings.val, split="test", size=settings.size, skip_bad=settings.skip_bad)
        if held_out.shape[1:] != images.shape[1:]:
            raise UsageError(
                f"images of --val have shape {list(held_out.shape[1:])}, those of --data "
                f"{list(images.shape[1:])}: pass --size, or another set"
            )
    run = _Run(settings, folder, images, held_out, place)
    if resume:
        run.restore()
    write_settings(folder, settings)
    return run.go(make_step, report)


def choose_device(name: torch.device | str) -> torch.device:
    """The device of "auto" (the GPU when there is one), "cpu" or "cuda"; EnvironmentUnusable for a GPU that is not."""
    if str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(name).startswith("cuda") and not torch.cuda.is_available():
        raise EnvironmentUnusable(
            f"--device {name}: torch sees no CUDA GPU; use --device cpu, or run `ridgeline doctor`"
        )
    return torch.device(name)


def ddpm_loss(schedule: Schedule, dtype: str | None) -> Loss:
    """`noise_loss` in an autocast of its own; `dtype` as in `Settings`."""
    plain = noise_loss(schedule)

    def loss(model: nn.Module, x0: Tensor) -> Tensor:
        with autocast(x0.device, dtype):
            return plain(model, x0)

    return loss


def autocast(device: torch.device, dtype: str | None) -> torch.autocast:
    """To the dtype of a name; None: bf16 on a GPU, fp32 on a CPU."""
    name = dtype or ("bf16" if device.type == "cuda" else "fp32")
    return torch.autocast(device.type, dtype=DTYPES[name], enabled=name != "fp32")


@torch.no_grad()
def validation_loss(model: nn.Module, images: Images, schedule: Schedule, dtype: str | None) -> float:
    """The training loss over held-out images, each at the same noise and time step on every call and every device.

    The model is put into eval mode for it. Waits for the device once.
    """
    device = schedule.beta.device
    generator = torch.Generator().manual_seed(VALIDATION_SEED)
    total = torch.zeros((), device=device)
    was_training = model.training
    model.eval()
    for start in range(0, len(images), VALIDATION_BATCH):
        pixels = torch.from_numpy(images[start : start + VALIDATION_BATCH].copy()).to(device)
        x0 = to_model_range(pixels, torch.zeros(len(pixels), dtype=torch.bool, device=device))
        t = torch.randint(schedule.steps, (len(x0),), generator=generator).to(device)
        eps = torch.randn(x0.shape, generator=generator).to(device, memory_format=torch.channels_last)
        with autocast(device, dtype):
            total += training_loss(model, x0, t, eps, schedule) * len(x0)
    model.train(was_training)
    return total.item() / len(images)


class _Run:
    """Everything that changes from step to step."""

    def __init__(
        self, settings: Settings, folder: Path, images: Images, held_out: Images | None, device: torch.device
    ) -> None:
        self.settings, self.folder, self.images, self.held_out, self.device = settings, folder, images, held_out, device
        seed_(settings.seed)
        self.network = settings.network(images.shape)
        self.model = channels_last(UNet(self.network).to(device))
        self.schedule = SCHEDULES[settings.schedule]().to(device)
        self.ema = Ema(self.model, settings.ema_decay)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        self.batches = Batches(images, settings.batch, seed=settings.seed, device=device, flip=settings.flip)
        self.done = 0
        self.checkpoint: Path | None = None
        self._random: dict[str, Any] | None = None  # to be put back when nothing but steps draws numbers any more
        self._scales: dict[str, Any] = {}  # to be put back when there is a step
        self._val_loss: float | None = None

    def restore(self) -> None:
        found = load_latest(self.folder)
        if found is None:
            _log.info("'%s' has no checkpoint yet: the run begins at step 0", self.folder)
            return
        path, state = found
        if tuple(state.get("images", ())) != self.images.shape:
            raise UsageError(
                f"checkpoint '{path}' was trained on images of shape {state.get('images')}, and --data has "
                f"{list(self.images.shape)}: give the same set"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.ema.load_state_dict(state["ema"])
            load_optimizer_(self.optimizer, state["optimizer"])
            self.batches.position = Position(*state["position"])
            set_random_state_(state["random"], self.device)
            self._random, self.done, self.checkpoint = state["random"], state["step"], path
            self._scales = dict(state.get("scales") or {})
            if self.done > (steps := self.settings.steps):
                raise UsageError(
                    f"the run in '{self.folder}' is at step {self.done}, beyond --steps {steps}: give more"
                )
        except _MISFIT as error:
            raise _misfit(path, error) from error

    def go(self, make_step: Callable[[StepParts], Step], report: Callable[[Line], None]) -> Result:
        settings = self.settings
        step = make_step(self._parts())
        self._put_back_scales(step)
        scheduler = self._scheduler()
        log = self._open_log()
        line: Line | None = None
        self.model.train()
        with contextlib.closing(log), interruptible() as interrupted:
            # last of all, because building a step may draw numbers
            if self._random is not None:
                set_random_state_(self._random, self.device)
            while self.done < settings.steps:
                lr = settings.lr * settings.lr_factor(self.done)
                loss = step(next(self.batches))
                scheduler.step()
                mark_step()
                self.done += 1
                log.record(self.done, loss, lr, images=settings.batch, grad_norm=getattr(step, "grad_norm", None))
                if self._is_due(settings.log_every):
                    line = log.flush()
                    assert line is not None  # a step was just recorded
                    report(line)
                if self._is_due(settings.val_every) and self.held_out is not None:
                    self._validate(log, self.held_out)
                if self._is_due(settings.sample_every):
                    self._draw(log)
                stopping = interrupted() and not self._is_last
                if self._is_due(settings.save_every) or stopping:
                    line = log.flush() or line
                    self._save(log, step)
                if stopping:
                    _log.warning(
                        "interrupted at step %d, saved as '%s': go on with --resume", self.done, self.checkpoint
                    )
                    raise KeyboardInterrupt
        return Result(self.done, self.checkpoint, None if line is None else line.loss, self._val_loss)

    @property
    def _is_last(self) -> bool:
        return self.done == self.settings.steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.done % every == 0 or self._is_last)

    def _put_back_scales(self, step: Step) -> None:
        if not self._scales or not isinstance(step, TrainStep):
            return
        try:
            step.load_state_dict({**step.state_dict(), **{name: self._scales[name] for name in _SCALES}})
        except _MISFIT as error:
            assert self.checkpoint is not None  # scales come from one
            raise _misfit(self.checkpoint, error) from error

    def _parts(self) -> StepParts:
        channels, side = self.network.in_channels, self.network.image_size
        example = torch.zeros(self.settings.batch, channels, side, side, device=self.device)
        named = self.settings.recipe in NAMED  # a recipe with a name sets the autocast itself
        return StepParts(
            self.model,
            noise_loss(self.schedule) if named else ddpm_loss(self.schedule, self.settings.dtype),
            self.optimizer,
            self.ema,
            self.settings.clip,
            example.contiguous(memory_format=torch.channels_last),
            must_capture=self.settings.recipe == "graph",
        )

    def _scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        for group in self.optimizer.param_groups:
            group["initial_lr"] = self.settings.lr
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.settings.lr_factor, last_epoch=self.done - 1)

    def _open_log(self) -> RunLog:
        board = self.folder / "tensorboard" if self.settings.tensorboard else None
        return RunLog(
            self.folder / LOG, device=self.device, every=self.settings.log_every, keep=self.done, tensorboard=board
        )

    def _validate(self, log: RunLog, images: Images) -> None:
        log.flush()
        choices = images, self.schedule, self.settings.autocast_dtype
        self._val_loss = validation_loss(self.ema.module, *choices)
        log.write(self.done, val_loss=self._val_loss, val_loss_without_ema=validation_loss(self.model, *choices))
        log.restart_clock()

    def _draw(self, log: RunLog) -> None:
        log.flush()
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        side, channels = self.network.image_size, self.network.in_channels
        with autocast(self.device, self.settings.autocast_dtype):
            images = sample(self.ema.module, self.schedule, (GRID_IMAGES, channels, side, side), generator=generator)
        write_grid(self.folder / "samples" / f"step-{self.done:08d}.png", images.cpu().numpy())
        log.restart_clock()

    def _save(self, log: RunLog, step: Step) -> None:
        log.sync()
        position = self.batches.position
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "position": (position.epoch, position.index),
            "random": random_state(self.device),
            "network": asdict(self.network),
            "schedule": self.settings.schedule,
            "settings": asdict(self.settings),
            "images": self.images.shape,
            "scales": _scales(step),
        }
        self.checkpoint = save_checkpoint(self.folder, self.done, state)
        log.restart_clock()


def _scales(step: Step) -> dict[str, Any] | None:
    if not isinstance(step, TrainStep):
        return None
    state = step.state_dict()
    return {name: state[name] for name in _SCALES}


def _misfit(path: Path, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())[:200]
    return UsageError(f"checkpoint '{path}' does not fit this run ({reason}): use another --out")


def _prepare(folder: Path, resume: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder '{folder}' cannot be made ({error.strerror}): choose another with --out") from error
    if not resume and any((folder / name).exists() for name in (FILE, LOG)):
        raise UsageError(f"folder '{folder}' holds a run already: go on with --resume, or choose another with --out")
