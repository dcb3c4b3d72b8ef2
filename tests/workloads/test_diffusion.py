"""Noise schedules and single diffusion steps, against closed forms in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.workloads.diffusion import (
    add_noise,
    clean_estimate,
    cosine_schedule,
    ddim_step,
    ddpm_step,
    linear_schedule,
    sample_timesteps,
    training_loss,
)

SCHEDULES = {"linear": linear_schedule(), "cosine": cosine_schedule()}


@pytest.fixture(params=sorted(SCHEDULES))
def schedule(request):
    return SCHEDULES[request.param]


def images(seed, n=4, dtype=torch.float32):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every(t, n=4):
    return torch.full((n,), t)


def test_linear_end_values_are_the_published_ones():
    schedule = linear_schedule(1000)
    assert float(schedule.beta[0]) == pytest.approx(1e-4, rel=1e-6)
    assert float(schedule.beta[-1]) == pytest.approx(0.02, rel=1e-6)
    assert float(schedule.alpha_bar[0]) == pytest.approx(1 - 1e-4, rel=1e-6)
    assert float(schedule.alpha_bar[-1]) == pytest.approx(4.036e-5, rel=1e-4)
    assert float(schedule.alpha_bar.double().log()[-1]) == pytest.approx(-10.1177, abs=1e-3)


@pytest.mark.parametrize("steps", [10, 1000, 4000])
def test_cosine_is_its_closed_form(steps):
    schedule = cosine_schedule(steps)

    def f(u):
        return math.cos((u / steps + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = torch.tensor([f(t + 1) / f(0) for t in range(steps - 1)], dtype=torch.float64)
    torch.testing.assert_close(schedule.alpha_bar[:-1].double(), expected, rtol=1e-6, atol=1e-9)
    # f(T) = 0 would destroy the image entirely: the last beta is clipped
    assert float(schedule.beta[-1]) == pytest.approx(0.999)
    assert float(schedule.alpha_bar[-1]) == pytest.approx(float(expected[-1]) * 0.001, rel=1e-4)
    assert float(schedule.beta.max()) <= 0.999 + 1e-7


def test_alpha_bar_falls_strictly_inside_0_1(schedule):
    assert (schedule.alpha_bar.diff() < 0).all()
    assert 0 < float(schedule.alpha_bar[-1]) < float(schedule.alpha_bar[0]) < 1
    assert ((schedule.beta > 0) & (schedule.beta < 1)).all()


def test_tables_agree_and_are_fp32(schedule):
    for table in (schedule.beta, schedule.alpha_bar, schedule.signal, schedule.noise, schedule.posterior_variance):
        assert table.shape == (1000,) and table.dtype == torch.float32
    assert schedule.steps == 1000
    # signal² + noise² = 1: the variance of unit-variance data is preserved at every t
    total = schedule.signal.double().square() + schedule.noise.double().square()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=2e-7)
    # the small end keeps its relative precision, which 1 - alpha_bar in fp32 would not
    assert float(schedule.noise[0]) ** 2 == pytest.approx(float(schedule.beta[0]), rel=1e-6)


def test_posterior_variance_starts_at_zero_and_stays_below_beta(schedule):
    assert float(schedule.posterior_variance[0]) == 0.0
    before = torch.cat((torch.ones(1, dtype=torch.float64), schedule.alpha_bar[:-1].double()))
    expected = schedule.beta.double() * (1 - before) / schedule.noise.double().square()
    torch.testing.assert_close(schedule.posterior_variance.double(), expected, rtol=1e-3, atol=1e-9)
    assert (schedule.posterior_variance[1:] > 0).all()
    assert (schedule.posterior_variance < schedule.beta).all()


def test_single_steps_compose_to_the_jump(schedule):
    """x ← sqrt(1-beta)·x + sqrt(beta)·z, iterated, has the mean and variance of `add_noise` at every t."""
    mean, variance = 1.0, 0.0
    for t, beta in enumerate(schedule.beta.double().tolist()):
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        # fp32 rounding of 1000 betas adds up to a relative 1e-4 in the mean
        assert mean == pytest.approx(float(schedule.signal[t]), rel=2e-4)
        assert variance == pytest.approx(float(schedule.noise[t]) ** 2, rel=1e-5)


def test_single_steps_compose_statistically():
    schedule = linear_schedule(20, first_beta=0.01, last_beta=0.2)
    generator = torch.Generator().manual_seed(0)
    n = 200_000
    x = torch.full((n,), 2.0)
    for beta in schedule.beta:
        x = (1 - beta).sqrt() * x + beta.sqrt() * torch.randn(n, generator=generator)
    jump = add_noise(torch.full((n,), 2.0), torch.randn(n, generator=generator), torch.full((n,), 19), schedule)
    standard_error = jump.std() / math.sqrt(n)
    assert abs(x.mean() - jump.mean()) < 4 * math.sqrt(2) * standard_error
    assert float(x.var()) == pytest.approx(float(jump.var()), rel=4 * math.sqrt(2) * math.sqrt(2 / n))


def test_unit_variance_is_preserved_in_the_images(schedule):
    n = 64
    t = torch.linspace(0, 999, n).long()
    x_t = add_noise(images(0, n), images(1, n), t, schedule)
    assert float(x_t.var()) == pytest.approx(1.0, rel=0.05)


def test_add_noise_is_its_formula_at_each_images_own_step(schedule):
    x0, eps, t = images(0), images(1), torch.tensor([0, 10, 500, 999])
    x_t = add_noise(x0, eps, t, schedule)
    for i, step in enumerate(t.tolist()):
        bar = float(schedule.alpha_bar[step])
        expected = math.sqrt(bar) * x0[i].double() + math.sqrt(1 - bar) * eps[i].double()
        torch.testing.assert_close(x_t[i].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept_and_rounded_once(schedule, dtype):
    x0, eps, t = images(0, dtype=dtype), images(1, dtype=dtype), torch.tensor([0, 10, 500, 900])
    x_t = add_noise(x0, eps, t, schedule)
    z = images(2, dtype=dtype)
    for result in (x_t, ddpm_step(x_t, eps, t, z, schedule), ddim_step(x_t, eps, t, t - 1, schedule)):
        assert result.dtype == dtype
    if dtype != torch.float64:
        assert torch.equal(x_t, add_noise(x0.float(), eps.float(), t, schedule).to(dtype))


def test_channels_last_is_kept(schedule):
    x0, eps = (images(seed).to(memory_format=torch.channels_last) for seed in (0, 1))
    x_t = add_noise(x0, eps, every(5), schedule)
    for result in (
        x_t,
        ddpm_step(x_t, eps, every(5), eps, schedule),
        ddim_step(x_t, eps, every(5), every(4), schedule),
    ):
        assert result.is_contiguous(memory_format=torch.channels_last)


@given(t=st.integers(0, 900), s=st.integers(-1, 899), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_ddim_with_the_true_noise_moves_along_one_trajectory(t, s, seed):
    s = min(s, t - 1)
    for schedule in SCHEDULES.values():
        x0, eps = images(seed), images(seed + 1)
        x_s = ddim_step(add_noise(x0, eps, every(t), schedule), eps, every(t), every(s), schedule)
        expected = x0 if s < 0 else add_noise(x0, eps, every(s), schedule)
        torch.testing.assert_close(x_s, expected, rtol=1e-4, atol=1e-4)


def test_ddim_takes_a_target_step_per_image(schedule):
    x0, eps, t = images(0), images(1), torch.tensor([900, 900, 500, 1])
    t_next = torch.tensor([-1, 400, -1, 0])
    x_s = ddim_step(add_noise(x0, eps, t, schedule), eps, t, t_next, schedule)
    torch.testing.assert_close(x_s[[0, 2]], x0[[0, 2]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        x_s[[1, 3]], add_noise(x0[[1, 3]], eps[[1, 3]], t_next[[1, 3]], schedule), rtol=1e-4, atol=1e-4
    )


def test_clean_estimate_inverts_add_noise(schedule):
    x0, eps, t = images(0), images(1), torch.tensor([0, 10, 500, 900])
    torch.testing.assert_close(
        clean_estimate(add_noise(x0, eps, t, schedule), eps, t, schedule), x0, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("t", [1, 10, 500, 998, 999])
def test_ddpm_step_draws_the_posterior(schedule, t):
    """With the true noise: the mean of q(x_{t-1} | x_t, x_0) in x_0 and x_t, and its variance (Ho et al., eq. 7)."""
    x0, eps, z = images(0), images(1), images(2)
    x_t = add_noise(x0, eps, every(t), schedule)
    beta, signal_before = float(schedule.beta[t]), float(schedule.signal[t - 1])
    left, left_before = float(schedule.noise[t]) ** 2, float(schedule.noise[t - 1]) ** 2  # 1 - alpha_bar
    mean = signal_before * beta / left * x0 + math.sqrt(1 - beta) * left_before / left * x_t
    std = math.sqrt(beta * left_before / left)
    # at the clipped last cosine step the step divides by sqrt(alpha) = 0.03, and fp32 holds 1 - beta to 6e-5
    tolerance = 1e-3 if beta > 0.9 else 1e-4
    torch.testing.assert_close(
        ddpm_step(x_t, eps, every(t), z, schedule), mean + std * z, rtol=tolerance, atol=tolerance
    )


def test_ddpm_step_keeps_the_marginal_variance(schedule):
    """Posterior mean's gain on x_t, squared, times var(x_t | x_0), plus posterior variance = var(x_{t-1} | x_0)."""
    beta, noise = schedule.beta.double(), schedule.noise.double()
    gain = (1 - beta[1:]).sqrt() * noise[:-1].square() / noise[1:].square()
    variance = gain.square() * noise[1:].square() + schedule.posterior_variance[1:].double()
    torch.testing.assert_close(variance, noise[:-1].square(), rtol=1e-4, atol=1e-9)


def test_last_ddpm_step_adds_no_noise_and_returns_the_image(schedule):
    x0, eps = images(0), images(1)
    x_t = add_noise(x0, eps, every(0), schedule)
    quiet = ddpm_step(x_t, eps, every(0), torch.zeros_like(x0), schedule)
    assert torch.equal(ddpm_step(x_t, eps, every(0), images(2), schedule), quiet)
    torch.testing.assert_close(quiet, x0, rtol=1e-4, atol=1e-4)


def test_sampled_timesteps_are_uniform_and_reproducible(schedule):
    t = sample_timesteps(200_000, schedule, generator=torch.Generator().manual_seed(0))
    assert t.dtype == torch.int64
    assert (int(t.min()), int(t.max())) == (0, 999)
    counts = torch.bincount(t, minlength=1000).double()
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert abs(chi_square - 999) < 5 * math.sqrt(2 * 999)
    assert torch.equal(t, sample_timesteps(200_000, schedule, generator=torch.Generator().manual_seed(0)))


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, t):
        return self.gain * x


def test_loss_and_gradient_are_the_closed_form(schedule):
    model, x0, eps, t = _Scale(), images(0), images(1), torch.tensor([0, 10, 500, 999])
    loss = training_loss(model, x0, t, eps, schedule)
    loss.backward()
    x_t = add_noise(x0, eps, t, schedule).double()
    residual = 0.5 * x_t - eps.double()
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(float(residual.square().mean()), rel=1e-5)
    assert float(model.gain.grad) == pytest.approx(float((2 * residual * x_t).mean()), rel=1e-4)


def test_loss_of_a_bf16_model_is_summed_in_fp32(schedule):
    x0, eps, t = images(0, dtype=torch.bfloat16), images(1, dtype=torch.bfloat16), every(500)
    loss = training_loss(lambda x, _: torch.zeros_like(x), x0, t, eps, schedule)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(eps.double().square().mean()), rel=1e-6)


def test_a_perfect_model_has_no_loss(schedule):
    x0, eps, t = images(0), images(1), every(500)
    assert float(training_loss(lambda x, _: eps, x0, t, eps, schedule)) == 0.0


def test_the_unet_learns_a_fixed_batch(schedule):
    torch.manual_seed(0)
    model = UNet(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x0, eps, t = images(0), images(1), torch.tensor([0, 10, 500, 999])
    losses = []
    for _ in range(40):
        loss = training_loss(model, x0, t, eps, schedule)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.1, abs=0.3)  # unit-normal noise against an untrained estimate
    assert losses[-1] < 0.6 * losses[0]


def test_schedule_moves_between_devices(schedule):
    moved = schedule.to("meta")
    assert {table.device.type for table in vars(moved).values()} == {"meta"}
    assert sample_timesteps(4, moved).device.type == "meta"


def test_whole_loss_is_free_of_host_reads(schedule):
    """On meta tensors any `.item()`, bool() or data-dependent shape raises."""
    x0, eps = images(0).to("meta"), images(1).to("meta")
    moved = schedule.to("meta")
    t = sample_timesteps(4, moved)
    assert training_loss(lambda x, _: x, x0, t, eps, moved).shape == ()
    assert ddim_step(x0, eps, t, t - 1, moved).shape == ddpm_step(x0, eps, t, eps, moved).shape == x0.shape


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda s: linear_schedule(0), ValueError, "steps must be at least 1, got 0"),
        (lambda s: cosine_schedule(-1), ValueError, "steps must be at least 1, got -1"),
        (lambda s: linear_schedule(first_beta=0.0), ValueError, "got first_beta=0.0"),
        (lambda s: linear_schedule(last_beta=1.0), ValueError, "last_beta=1.0"),
        (lambda s: cosine_schedule(offset=-0.1), ValueError, "offset must be at least 0, got -0.1"),
        (lambda s: cosine_schedule(largest_beta=1.0), ValueError, r"largest_beta must be in \(0, 1\), got 1.0"),
        (
            lambda s: add_noise(images(0), images(1), every(1, 3), s),
            ValueError,
            r"\[4\], got time steps of shape \[3\]",
        ),
        (lambda s: add_noise(images(0), images(1)[:1], every(1), s), ValueError, r"got \[1, 3, 8, 8\]"),
        (lambda s: add_noise(images(0), images(1), every(1.0), s), TypeError, "int64, got torch.float32"),
        (lambda s: add_noise(images(0).byte(), images(1), every(1), s), TypeError, "got torch.uint8"),
        (lambda s: ddpm_step(images(0), images(1), every(1), images(2)[:1], s), ValueError, "ddpm_step: noise must"),
        (lambda s: ddim_step(images(0), images(1), every(1), every(0.0), s), TypeError, "ddim_step: time steps"),
        (lambda s: clean_estimate(images(0), images(1), every(1)[:1], s), ValueError, "clean_estimate: needs one"),
        (
            lambda s: training_loss(lambda x, _: x[:, :1], images(0), every(1), images(1), s),
            ValueError,
            r"shape of eps, \[4, 3, 8, 8\], got \[4, 1, 8, 8\]",
        ),
    ],
)
def test_refusals_name_the_value(schedule, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(schedule)
