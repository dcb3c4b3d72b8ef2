"""Clip, AdamW and the average of the weights by the one pass of kernels/adamw_ema.py, on the state that others own.

torch.optim.AdamW keeps its moments and counts, Ema its averages, the schedulers their floats; only who computes the
step differs. It reads each gradient once and each weight, moment and average once, where PyTorch's clip, AdamW and lerp
read weights three times and gradients twice. The norm that the clip goes by is computed before, by the one launch of
kernels/grad_norm.py, which finds the gradients through the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ridgeline.device_optimizer import DeviceOptimizer
from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged
from ridgeline.kernels import adamw_ema, grad_norm
from ridgeline.kernels._op import INTERPRETED
from ridgeline.kernels.adamw_ema import Averaging, Group, Plan
from ridgeline.weight_copies import WeightCopies


@dataclass(frozen=True, eq=False)
class OnePass:
    """A step for the tensors that were there when it was built; a graph that has it reads its tables, so keep it."""

    plans: tuple[Plan, ...]  # of the weights with an average, and of those without
    norm: grad_norm.Plan | None  # of the gradients of all of them, in that order; None without a clip
    settings: tuple  # of the optimizer, DeviceOptimizer's: betas and eps stand in the tables
    averaged: frozenset[int]  # ids of the weights whose averages it moves
    ema: Ema | None
    model: nn.Module
    copies: WeightCopies  # which it writes, and whose gradients it reads

    @torch.no_grad()
    def step_(self, *, found_inf: Tensor | None) -> Tensor | None:
        """Clip, step and average, in place; returns the norm of all gradients before the clip, None without one.

        `found_inf` 1 skips the step, as a GradScaler does.
        """
        if self.ema is not None and self.averaged:
            # before the kernel, which counts the update; nothing that it leaves out is changed by the optimizer
            self.ema.update_rest_(self.model, self.averaged)
        device = self.plans[0].chunks.device
        # Triton launches on the current device, which need not be the model's
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            parts = [
                adamw_ema.locate(plan, [_placed(self.copies.gradient(p), p) for p in plan.parameters])
                for plan in self.plans
            ]
            norm = None if self.norm is None else grad_norm.norm(self.norm, grad_norm.join(parts))
            for plan, gradients in zip(self.plans, parts, strict=True):
                adamw_ema.step_(plan, gradients, norm=norm, found_inf=found_inf)
        self.copies.written()
        if self.ema is not None and not self.averaged:
            self.ema.update_(self.model)
        return norm


def one_pass(
    update: DeviceOptimizer, *, model: nn.Module, ema: Ema | None, clip: float | None, copies: WeightCopies
) -> OnePass:
    """Build the tables for a settled optimizer; copies to the device, so not during a capture.

    Raises NotEngaged with the reason where the kernel does not fit the optimizer or its tensors.
    """
    optimizer = update.optimizer
    if type(optimizer) is not AdamW:
        raise NotEngaged(f"the one-pass kernel computes AdamW, not {type(optimizer).__name__}")
    for name in ("amsgrad", "maximize"):
        if any(group[name] for group in optimizer.param_groups):
            raise NotEngaged(f"the one-pass kernel has no {name}, which the optimizer asks for")
    averages = {} if ema is None else {id(weight): average for average, weight in ema.pairs(model)}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained:
        raise NotEngaged("the one-pass kernel needs a parameter to train, and the optimizer has none")
    device = trained[0].device
    if device.type != "cuda" and not INTERPRETED:
        raise NotEngaged(f"the one-pass kernel runs on a GPU, and the parameters are on {device}")
    rule = None if ema is None else Averaging(ema.device_decay, ema.updates, ema.warmup)
    plans = []
    try:
        # a loss with weights of its own has no averages of them
        for rule_here, known in ((rule, averages), (None, None)):
            groups = list(_groups(update, averages, copies, with_average=known is not None))
            if groups:
                plans.append(adamw_ema.build(groups, averaging=rule_here, max_norm=clip))
    except (TypeError, ValueError) as error:
        raise NotEngaged(f"the one-pass kernel does not fit ({error})") from error
    averaged = frozenset(id(p) for p in trained if id(p) in averages)
    norm = None if clip is None else grad_norm.build([p for plan in plans for p in plan.parameters])
    return OnePass(tuple(plans), norm, update.settings(), averaged, ema, model, copies)


def _groups(
    update: DeviceOptimizer, averages: dict[int, Tensor], copies: WeightCopies, *, with_average: bool
) -> Iterator[Group]:
    """The optimizer's groups with those of their trained parameters that have an average, or that have none."""
    optimizer = update.optimizer
    for options, (lr, weight_decay) in zip(optimizer.param_groups, update.scalars(), strict=True):
        parameters = [p for p in options["params"] if p.requires_grad and (id(p) in averages) == with_average]
        if not parameters:
            continue
        states: list[dict[str, Any]] = [optimizer.state[p] for p in parameters]
        yield Group(
            parameters=tuple(parameters),
            exp_avgs=tuple(state["exp_avg"] for state in states),
            exp_avg_sqs=tuple(state["exp_avg_sq"] for state in states),
            steps=tuple(state["step"] for state in states),
            lr=lr,
            weight_decay=weight_decay,
            betas=options["betas"],
            eps=options["eps"],
            averages=tuple(averages[id(p)] for p in parameters) if with_average else (),
            copies=tuple(map(copies.of, parameters)) if len(copies) else (),
        )


def _placed(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient with the layout of its parameter, at an address for 16-byte accesses.

    Autograd gives it the layout; the address of one that is a slice of another tensor may be any.
    """
    assert gradient is not None, "a step refuses trained parameters without a gradient"
    if gradient.stride() == parameter.stride() and gradient.data_ptr() % 16 == 0:
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
