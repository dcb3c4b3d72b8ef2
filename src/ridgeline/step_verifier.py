"""N steps of a TrainStep beside N steps of a plain loop from the same state: losses, weights, moments, averages.

No fixed tolerance is right for both: a training run amplifies rounding, by how much depends on the network, the rates
and N, and two plain runs on a GPU need not agree either. So the plain loop sets its own limit. It is run again, as a
twin whose weights are rounded once more at every step; what that changes, a correct step may change too:

    allowed = error_factor · |twin - plain| + sqrt(N) · eps · |plain|        root mean square, and maximum, a tensor

by the rule of `numerics.compare`, with the plain loop as the truth; a tensor of at most 16 elements by its root mean
square alone. Counts and other integers must be equal.

A twin differs in three ways. Each weight drifts by up to one rounding of fp32 a step, every time in the same direction:
two spellings of one formula, as p - lr·decay·p and (1 - lr·decay)·p, differ like that. The gradients are taken at
weights that are off by up to one rounding of the arithmetic (bf16, fp16, TF32, FP8), anew at each step: by backward
error analysis that is what other kernels, or sums in another order, do to a gradient. And decays are rounded to fp32
before they are taken from 1, as PyTorch's fused kernels and the average on the device do: 1 - 0.999 is then 1.3e-5 of
itself too small, and so is every second moment, where the host's float64 numbers leave no such error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.numerics import TF32_EPS, Verdict, compare, rms
from ridgeline.step_program import DTYPES, StepProgram
from ridgeline.step_state import flatten, micro_batches, rebuild

_FP32_EPS = torch.finfo(torch.float32).eps
_DECAYS = ("betas", "dampening")  # of optimizers
_FEW_ELEMENTS = 16


@dataclass(frozen=True)
class StepLimits:
    """How far steps may be from a plain loop's."""

    error_factor: float = 4.0  # of the twins' own distance; two draws of one distance differ by about 2
    twins: int = 2  # of each number the farther one counts
    rounding: float | None = None  # relative, of the arithmetic; None: the recipe's, TF32's in fp32 on a GPU

    def __post_init__(self) -> None:
        if self.error_factor < 1 or self.twins < 1:
            raise UsageError(
                f"limits: error_factor and twins must be at least 1, got {self.error_factor} and {self.twins}"
            )


@dataclass(frozen=True)
class StepAgreement:
    """What was compared and how much of the allowed distance was used."""

    steps: int
    tensors: int
    nearest: str  # to its limit
    used: float  # of that limit, at most 1
    loss_allowed: float  # root mean square, relative to the losses: how sharp the comparison was
    replayed: int = 0  # of the steps, from a graph

    def lines(self) -> list[str]:
        return [
            f"{self.steps} steps, {self.replayed} replayed from a graph, equal those of a plain loop in {self.tensors} "
            f"tensors; losses might have differed by {self.loss_allowed:.2g} of their size",
            f"nearest to its limit is {self.nearest}, at {self.used:.2g} of it",
        ]


def verify_steps(
    step: Callable[[Any], Tensor], program: StepProgram, batches: Sequence[Any], limits: StepLimits
) -> StepAgreement:
    """Run `step`, the plain loop and its twins on `batches`, each from the present state, which is restored.

    Raises VerificationFailed for the first tensor beyond its limit, NotEngaged where steps are a plain loop's already.
    """
    if not batches:
        raise UsageError("verify: give at least one batch")
    if program.refusal is not None:
        raise NotEngaged(f"verify: a step already is what a plain loop does, because {program.refusal}")
    snapshot = program.snapshot()
    drew = False

    def state_after(run: Callable[[], list[Tensor]]) -> dict[str, Tensor]:
        nonlocal drew
        try:
            losses = torch.stack([loss.detach().float() for loss in run()])
            drew |= snapshot.drew_on_device()
            return {"losses": losses} | {name: tensor.detach().clone() for name, tensor in program.named_tensors()}
        finally:
            snapshot.restore_()

    with program.gradients_kept():
        mine = state_after(lambda: [step(batch) for batch in batches])
        plain = state_after(partial(_plain_loop, program, batches))
        twins = [
            state_after(partial(_plain_loop, program, batches, _Rounding(program, limits.rounding, seed)))
            for seed in range(limits.twins)
        ]
    # compiled code numbers its draws otherwise than PyTorch's operators, so masks and noise are not the same
    other_draws = drew and program.recipe.compile != "none"
    return _judge(mine, plain, twins, limits, other_draws=other_draws)


def _judge(
    mine: dict[str, Tensor],
    plain: dict[str, Tensor],
    twins: Sequence[dict[str, Tensor]],
    limits: StepLimits,
    *,
    other_draws: bool,
) -> StepAgreement:
    steps = len(plain["losses"])
    nearest, used, loss_allowed = "losses", 0.0, 0.0
    for name, expected in plain.items():
        verdict = _compare(mine[name], expected, [twin[name] for twin in twins], steps, limits.error_factor)
        if not verdict.passed:
            why = (
                "it draws random numbers, and compiled code draws others than a plain loop: "
                "set torch._inductor.config.fallback_random = True, or verify a step with compile='none'"
                if other_draws
                else "fewer batches show where it begins"
            )
            size = rms(expected)
            relative, allowed = _share(verdict.rms_error, size), _share(verdict.allowed_rms, size)
            raise VerificationFailed(
                f"verify: {name} after {steps} steps is not a plain loop's: {verdict.reason}, of RMS {size:.3g}, so "
                f"{relative:.2g} of it where {allowed:.2g} is allowed; {why}"
            )
        share = max(_share(verdict.rms_error, verdict.allowed_rms), _share(verdict.max_error, verdict.allowed_max))
        if share > used:
            nearest, used = name, share
        if name == "losses":
            loss_allowed = _share(verdict.allowed_rms, rms(expected))
    return StepAgreement(steps, len(plain), nearest, used, loss_allowed)


def _compare(actual: Tensor, expected: Tensor, twins: Sequence[Tensor], steps: int, error_factor: float) -> Verdict:
    if not expected.is_floating_point():
        actual, expected, twins = actual.double(), expected.double(), [twin.double() for twin in twins]
        return compare(actual, expected, expected, eps=0.0)
    truth = expected.double()
    farthest = twins[0]
    for twin in twins[1:]:
        farthest = torch.where((twin - truth).abs() > (farthest - truth).abs(), twin, farthest)
    # rates and decays are fp32 on the device, whatever the weights are
    eps = math.sqrt(steps) * max(torch.finfo(expected.dtype).eps, _FP32_EPS)
    verdict = compare(actual, truth, farthest, error_factor=error_factor, eps=eps)
    if verdict.numel > _FEW_ELEMENTS:
        return verdict
    # the largest of a few random draws is mostly luck, and adds little: an error in one of n elements shows in the root
    # mean square as at least 1/sqrt(n) of it
    return replace(verdict, allowed_max=math.inf)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _plain_loop(program: StepProgram, batches: Sequence[Any], rounding: _Rounding | None = None) -> list[Tensor]:
    """The loop everyone writes, on the program's own tensors; returns the losses."""
    parts, recipe, kind = program.parts, program.recipe, program.device.type
    weights = program.parameters()
    scaler = torch.amp.GradScaler(kind, enabled=program.scaler is not None)
    if program.scaler is not None:
        scaler.load_state_dict(program.scaler.state_dict())
    losses = []
    for batch in batches:
        leaves, structure = flatten(batch)
        leaves = [program.place(leaf) for leaf in leaves]
        program.drop_gradients_()
        total = torch.zeros((), device=program.device)
        with nullcontext() if rounding is None else rounding.applied():
            for share, part in micro_batches(leaves, parts.accumulate):
                enabled = recipe.dtype != "fp32"
                with torch.enable_grad(), torch.autocast(kind, dtype=DTYPES[recipe.dtype], enabled=enabled):
                    loss = parts.loss(parts.model, rebuild(structure, iter(part))) * share
                scaler.scale(loss).backward()
                total += loss.detach()
        scaler.unscale_(parts.optimizer)
        if parts.clip is not None:
            nn.utils.clip_grad_norm_(weights, parts.clip)
        with nullcontext() if rounding is None else rounding.decays(parts.optimizer):
            scaler.step(parts.optimizer)
        scaler.update()
        if parts.ema is not None:
            decay = _decay(parts.ema)
            _average_(parts.ema, parts.model, decay if rounding is None else _in_fp32(decay))
        losses.append(total)
    program.drop_gradients_()
    if program.scaler is not None:
        program.scaler.load_state_dict(scaler.state_dict())
    return losses


def _decay(ema: Ema) -> float:
    """Of the next update."""
    updates = ema.updates.item()
    return min(ema.decay, (1 + updates) / (10 + updates)) if ema.warmup else ema.decay


@torch.no_grad()
def _average_(ema: Ema, model: nn.Module, decay: float) -> None:
    """`Ema.update_` as it is written with numbers on the host."""
    for average, weight in ema.pairs(model):
        average.lerp_(weight, 1 - decay)
    for average, buffer in zip(ema.module.buffers(), model.buffers(), strict=True):
        average.copy_(buffer)
    ema.updates.add_(1)


class _Rounding:
    """The roundings that make a twin of a plain loop."""

    def __init__(self, program: StepProgram, eps: float | None, seed: int) -> None:
        # of its own, so that the twin draws the same dropout and noise
        self._generator = torch.Generator(program.device).manual_seed(seed)
        self._weights = [p for p in program.parameters() if p.requires_grad and p.is_floating_point()]
        self._drift = [self._noise(weight, _FP32_EPS) for weight in self._weights]
        if eps is None:
            dtype = program.recipe.dtype
            tf32 = dtype == "fp32" and program.device.type == "cuda"
            # of the two formats of FP8 the coarser, which gradients are in
            rounded_to = torch.float8_e5m2 if program.fp8.engaged else DTYPES[dtype]
            eps = TF32_EPS if tf32 else torch.finfo(rounded_to).eps
        self._eps = eps

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the weights drift; inside, they are also off by a rounding of the arithmetic."""
        with torch.no_grad():
            for weight, drift in zip(self._weights, self._drift, strict=True):
                weight.addcmul_(weight, drift)
            exact = [weight.clone() for weight in self._weights]
            for weight in self._weights:
                weight.addcmul_(weight, self._noise(weight, self._eps))
        yield
        with torch.no_grad():
            for weight, value in zip(self._weights, exact, strict=True):
                weight.copy_(value)

    @contextmanager
    def decays(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, what the optimizer takes from 1 is rounded."""
        before = [{name: group[name] for name in _DECAYS if name in group} for group in optimizer.param_groups]
        for group, exact in zip(optimizer.param_groups, before, strict=True):
            group.update({name: _in_fp32(value) for name, value in exact.items()})
        try:
            yield
        finally:
            for group, exact in zip(optimizer.param_groups, before, strict=True):
                group.update(exact)

    def _noise(self, weight: Tensor, eps: float) -> Tensor:
        # uniform in [-eps, eps]
        noise = torch.empty_like(weight, requires_grad=False)
        return noise.uniform_(-eps, eps, generator=self._generator)


def _in_fp32(value: Any) -> Any:
    """A number, or a tuple of numbers, rounded to fp32."""
    if isinstance(value, tuple):
        return tuple(_in_fp32(part) for part in value)
    return torch.tensor(value, dtype=torch.float32).item()
