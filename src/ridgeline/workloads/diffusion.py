"""Gaussian diffusion: noise schedules, the training loss, and one reverse step of DDPM and of DDIM.

Notation, one name a symbol (t = 0 … T-1, so `alpha_bar[0]` is after the first noising step):

    beta[t]                              variance added by step t
    alpha[t]     = 1 - beta[t]
    alpha_bar[t] = alpha[0]·…·alpha[t]   what is left of the clean image's variance
    x_t = sqrt(alpha_bar[t])·x0 + sqrt(1 - alpha_bar[t])·eps

Tensors: images [N, C, H, W] in any floating dtype and layout, both kept; t [N] int64. Coefficients are fp32 and so is
the arithmetic; a result is rounded once, to the dtype of the image. Nothing here reads a tensor on the host, so every
function can be captured in a CUDA graph.
Sources: Ho et al. 2020 (arXiv 2006.11239), Song et al. 2021 (2010.02502), Nichol & Dhariwal 2021 (2102.09672).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tables over t, each [T] fp32, computed in fp64. Build one with `linear_schedule` or `cosine_schedule`."""

    beta: Tensor
    alpha_bar: Tensor
    signal: Tensor  # sqrt(alpha_bar)
    noise: Tensor  # sqrt(1 - alpha_bar)
    posterior_variance: Tensor  # of q(x_{t-1} | x_t, x_0); 0 at t = 0

    @property
    def steps(self) -> int:
        """T."""
        return self.beta.shape[0]

    def to(self, device: torch.device | str) -> Schedule:
        """The same schedule with its tables on `device`."""
        return Schedule(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def linear_schedule(steps: int = 1000, *, first_beta: float = 1e-4, last_beta: float = 0.02) -> Schedule:
    """beta rises linearly from `first_beta` to `last_beta` (Ho et al.); the end values suit steps = 1000."""
    _check_steps("linear_schedule", steps)
    if not 0 < first_beta <= last_beta < 1:
        raise ValueError(
            "linear_schedule: needs 0 < first_beta <= last_beta < 1, "
            f"got first_beta={first_beta}, last_beta={last_beta}"
        )
    return _from_beta(torch.linspace(first_beta, last_beta, steps, dtype=torch.float64))


def cosine_schedule(steps: int = 1000, *, offset: float = 0.008, largest_beta: float = 0.999) -> Schedule:
    """alpha_bar follows cos² (Nichol & Dhariwal).

    With f(u) = cos²((u/T + s)/(1 + s)·pi/2) and s = `offset`: alpha_bar[t] = f(t + 1)/f(0), so
    beta[t] = 1 - f(t + 1)/f(t), clipped at `largest_beta` because f(T) = 0.
    """
    _check_steps("cosine_schedule", steps)
    if offset < 0:
        raise ValueError(f"cosine_schedule: offset must be at least 0, got {offset}")
    if not 0 < largest_beta < 1:
        raise ValueError(f"cosine_schedule: largest_beta must be in (0, 1), got {largest_beta}")
    u = torch.arange(steps + 1, dtype=torch.float64) / steps
    f = torch.cos((u + offset) / (1 + offset) * (math.pi / 2)).square()
    return _from_beta((1 - f[1:] / f[:-1]).clamp(max=largest_beta))


def sample_timesteps(batch: int, schedule: Schedule, *, generator: torch.Generator | None = None) -> Tensor:
    """[batch] int64, uniform over 0 … T-1, on the schedule's device (and the generator's, which must be the same)."""
    return torch.randint(schedule.steps, (batch,), generator=generator, device=schedule.beta.device)


def add_noise(x0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """x_t = sqrt(alpha_bar[t])·x0 + sqrt(1 - alpha_bar[t])·eps: a draw of q(x_t | x_0) in one step."""
    _check("add_noise", x0, eps, t)
    x_t = _at(schedule.signal, t, x0) * x0 + _at(schedule.noise, t, x0) * eps
    return x_t.to(x0.dtype)


def training_loss(
    model: Callable[[Tensor, Tensor], Tensor], x0: Tensor, t: Tensor, eps: Tensor, schedule: Schedule
) -> Tensor:
    """Mean of (model(x_t, t) - eps)² over the batch ("L_simple"), an fp32 scalar; `eps` is unit normal."""
    estimate = model(add_noise(x0, eps, t, schedule), t)
    if estimate.shape != eps.shape:
        raise ValueError(
            f"training_loss: the model must return the shape of eps, {list(eps.shape)}, got {list(estimate.shape)}"
        )
    return F.mse_loss(estimate.float(), eps.float())


def noise_loss(schedule: Schedule) -> Loss:
    """The training loss of a model on clean images, at random time steps and noise, in the autocast around it."""

    def loss(model: nn.Module, x0: Tensor) -> Tensor:
        return training_loss(model, x0, sample_timesteps(x0.shape[0], schedule), torch.randn_like(x0), schedule)

    return loss


def clean_estimate(x_t: Tensor, eps: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """x0 = (x_t - sqrt(1 - alpha_bar[t])·eps)/sqrt(alpha_bar[t]): `add_noise` solved for x0."""
    _check("clean_estimate", x_t, eps, t)
    return _clean(x_t, eps, t, schedule).to(x_t.dtype)


def ddpm_step(x_t: Tensor, eps: Tensor, t: Tensor, z: Tensor, schedule: Schedule) -> Tensor:
    """One ancestral step, x_t → x_{t-1}, from the estimate `eps` and fresh unit-normal `z`.

    x_{t-1} = (x_t - beta[t]/sqrt(1 - alpha_bar[t])·eps)/sqrt(alpha[t]) + sqrt(v[t])·z
    v[t]    = beta[t]·(1 - alpha_bar[t-1])/(1 - alpha_bar[t])

    v is the posterior variance; it is 0 at t = 0, so the last step adds no noise.
    """
    _check("ddpm_step", x_t, eps, t)
    _check("ddpm_step", x_t, z, t)
    beta = _at(schedule.beta, t, x_t)
    mean = (x_t - beta / _at(schedule.noise, t, x_t) * eps) / (1 - beta).sqrt()
    return (mean + _at(schedule.posterior_variance, t, x_t).sqrt() * z).to(x_t.dtype)


def ddim_step(x_t: Tensor, eps: Tensor, t: Tensor, t_next: Tensor, schedule: Schedule) -> Tensor:
    """One deterministic step (eta = 0), x_t → x_s for any s = `t_next` < t; s = -1 is the clean image.

    x_s = sqrt(alpha_bar[s])·x0 + sqrt(1 - alpha_bar[s])·eps, x0 = clean_estimate(x_t, eps, t), alpha_bar[-1] = 1
    """
    _check("ddim_step", x_t, eps, t)
    _check("ddim_step", x_t, eps, t_next)
    clean = t_next < 0
    inside = t_next.clamp(min=0)
    signal = _images(schedule.signal[inside].masked_fill(clean, 1.0), x_t)
    noise = _images(schedule.noise[inside].masked_fill(clean, 0.0), x_t)
    return (signal * _clean(x_t, eps, t, schedule) + noise * eps).to(x_t.dtype)


def _from_beta(beta: Tensor) -> Schedule:
    alpha_bar = (1 - beta).cumprod(0)
    before = torch.cat((torch.ones(1, dtype=beta.dtype), alpha_bar[:-1]))
    posterior_variance = beta * (1 - before) / (1 - alpha_bar)
    # every table is rounded from fp64 on its own: 1 - alpha_bar in fp32 would lose half its digits near t = 0
    tables = (beta, alpha_bar, alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), posterior_variance)
    return Schedule(*(table.float() for table in tables))


def _clean(x_t: Tensor, eps: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    return (x_t - _at(schedule.noise, t, x_t) * eps) / _at(schedule.signal, t, x_t)


def _at(table: Tensor, t: Tensor, images: Tensor) -> Tensor:
    return _images(table[t], images)


def _images(values: Tensor, images: Tensor) -> Tensor:
    """[N] → [N, 1, 1, …], to scale whole images; not a scalar, so fp32 wins over bf16 in the product."""
    return values.reshape(-1, *(1,) * (images.dim() - 1))


def _check_steps(name: str, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"{name}: steps must be at least 1, got {steps}")


def _check(name: str, images: Tensor, noise: Tensor, t: Tensor) -> None:
    if not images.is_floating_point():
        raise TypeError(f"{name}: images must be floating point, scaled to [-1, 1], got {images.dtype}")
    if noise.shape != images.shape:
        raise ValueError(f"{name}: noise must have the images' shape {list(images.shape)}, got {list(noise.shape)}")
    if t.dtype != torch.int64:
        raise TypeError(f"{name}: time steps must be int64, got {t.dtype}")
    if t.shape != images.shape[:1]:
        raise ValueError(
            f"{name}: needs one time step an image, {list(images.shape[:1])}, got time steps of shape {list(t.shape)}"
        )
