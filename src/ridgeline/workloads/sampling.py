"""Draw images from a trained diffusion model: DDPM's ancestral steps or DDIM's short deterministic path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.atomic import write_file
from ridgeline.errors import UsageError
from ridgeline.models.ddpm_unet import UNet, UNetConfig
from ridgeline.models.weights import load_into
from ridgeline.workloads.checkpoint import check_seed, load_checkpoint
from ridgeline.workloads.diffusion import (
    Schedule,
    clean_estimate,
    cosine_schedule,
    ddim_step,
    ddpm_step,
    linear_schedule,
)
from ridgeline.workloads.loader import to_pixels

Sampler = Literal["ddim", "ddpm"]
SCHEDULES: dict[str, Callable[[], Schedule]] = {"linear": linear_schedule, "cosine": cosine_schedule}
DDIM_STEPS = 50
MAX_IMAGES = 1_000_000  # of 32 x 32 pixels these are 3 GB
MAX_AT_ONCE = 256  # images; bounds the memory of a large --n
# modules take time to build even without memory, and sizes must stay below 2^63
MAX_BLOCKS, MAX_CHANNELS = 64, 1 << 16


def sample(
    model: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    shape: tuple[int, int, int, int],
    *,
    sampler: Sampler = "ddim",
    steps: int | None = None,
    generator: torch.Generator,
) -> Tensor:
    """uint8 [N, H, W, C] images for `shape` [N, C, H, W], on the generator's device, where model and schedule must be.

    ddim takes `steps` steps (default 50), evenly spaced; ddpm takes every step of the schedule. Each step's estimate of
    the clean image is clamped to [-1, 1], where images live. The draw is a function of the generator's state alone.
    """
    path = _time_steps(schedule, sampler, steps)
    device = generator.device
    with torch.no_grad():
        x = torch.randn(shape, generator=generator, device=device).contiguous(memory_format=torch.channels_last)
        for now, following in zip(path, [*path[1:], -1], strict=True):
            t = torch.full(shape[:1], now, dtype=torch.int64, device=device)
            eps = _within_range(x, model(x, t).float(), t, schedule)
            if sampler == "ddim":
                x = ddim_step(x, eps, t, torch.full_like(t, following), schedule)
            else:
                z = torch.randn(shape, generator=generator, device=device)
                x = ddpm_step(x, eps, t, z, schedule)
        return to_pixels(x)


def sample_checkpoint(
    path: Path,
    *,
    n: int = 16,
    sampler: Sampler = "ddim",
    steps: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> NDArray[np.uint8]:
    """`n` images [n, H, W, C] from the EMA weights of a checkpoint; equal for equal arguments on one device.

    Raises UsageError for a file that is no checkpoint of `ridgeline train ddpm`.
    """
    if not 1 <= n <= MAX_IMAGES:
        raise UsageError(f"n must be at least 1 and at most {MAX_IMAGES}, got {n}")
    check_seed(seed)
    model, schedule = load_model(path)
    device = torch.device(device)
    model = channels_last(model.to(device))
    schedule = schedule.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    config = model.config
    counts = [min(MAX_AT_ONCE, n - start) for start in range(0, n, MAX_AT_ONCE)]
    parts = [
        sample(
            model,
            schedule,
            (count, config.in_channels, config.image_size, config.image_size),
            sampler=sampler,
            steps=steps,
            generator=generator,
        )
        for count in counts
    ]
    return torch.cat(parts).cpu().numpy()


def load_model(path: Path) -> tuple[UNet, Schedule]:
    """The network with its EMA weights, in eval mode on the CPU, and the schedule it was trained with."""
    state = load_checkpoint(path)
    network, schedule, ema = state.get("network"), state.get("schedule"), state.get("ema")
    weights = ema.get("module") if isinstance(ema, dict) else None
    if not isinstance(network, dict) or schedule not in SCHEDULES or not isinstance(weights, dict):
        raise UsageError(f"checkpoint '{path}' lacks its network, schedule or EMA weights: use another")
    if not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise UsageError(f"checkpoint '{path}' holds something other than tensors as weights: use another")
    config = network_config(network, path)
    with torch.device("meta"):  # the file may ask for a network of any size, and pays for it with weights of that size
        model = UNet(config)
    load_into(model, weights, source=f"checkpoint '{path}'")
    return model.eval().requires_grad_(False), SCHEDULES[schedule]()


def channels_last(model: UNet) -> UNet:
    """The model with its convolutions' weights in NHWC order, in place, as the loader's images are."""
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def network_config(saved: dict[str, Any], path: Path) -> UNetConfig:
    """The network's sizes as a checkpoint holds them."""
    names = {field.name for field in fields(UNetConfig)}
    try:
        config = UNetConfig(**{name: value for name, value in saved.items() if name in names})
        if config.blocks > MAX_BLOCKS or max(config.channels) > MAX_CHANNELS:
            raise ValueError(f"{config.blocks} blocks of up to {max(config.channels)} channels")
        return config
    except (TypeError, ValueError) as error:
        raise UsageError(f"checkpoint '{path}' describes no network ({error}): use another") from error


def check_grid_path(path: Path) -> None:
    """Raise UsageError for a file that says it is no PNG, or whose folder is not there."""
    if path.is_dir():
        raise UsageError(f"'{path}' is a folder: name a .png file")
    if path.suffix.lower() != ".png":
        raise UsageError(f"'{path}' must end in .png, which is what is written")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write '{path}' ('{path.parent}' is no folder): name a file in a writable folder")


def write_grid(path: Path, images: NDArray[np.uint8]) -> None:
    """Tile [N, H, W, C] into a nearly square picture, one dark pixel between them, and write it as a PNG, whole.

    The folder is made if missing. Raises UsageError where it cannot be written.
    """
    count, height, width, channels = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image
    encoded = cv2.imencode(".png", sheet[..., ::-1] if channels == 3 else sheet)[1].tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda file: file.write(encoded))
    except OSError as error:
        raise UsageError(f"cannot write '{path}' ({error.strerror}): name a file in a writable folder") from error


def _time_steps(schedule: Schedule, sampler: str, steps: int | None) -> list[int]:
    """The time steps that are visited, falling from T-1."""
    if sampler not in ("ddim", "ddpm"):
        raise UsageError(f"sampler must be ddim or ddpm, got {sampler!r}")
    if sampler == "ddpm":
        if steps is not None:
            raise UsageError(f"steps={steps} belongs to ddim, ddpm takes all {schedule.steps}: leave it out")
        return list(range(schedule.steps - 1, -1, -1))
    steps = min(DDIM_STEPS, schedule.steps) if steps is None else steps
    if not 1 <= steps <= schedule.steps:
        raise UsageError(f"steps must lie between 1 and the schedule's {schedule.steps}, got {steps}")
    return torch.linspace(schedule.steps - 1, 0, steps, dtype=torch.float64).round().long().tolist()


def _within_range(x_t: Tensor, eps: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """The noise estimate that goes with the clamped clean image: near t = T the raw one is far outside any image's."""
    clean = clean_estimate(x_t, eps, t, schedule).clamp(-1, 1)
    signal, noise = (table[t][:, None, None, None] for table in (schedule.signal, schedule.noise))
    return (x_t - signal * clean) / noise
