"""Rules on what follows backward: K8 and K9 the optimizer, K10 the average of the weights, K11 clearing gradients.

Their floors count fp32 weights: AdamW reads weight, gradient and both moments and writes three of them, 28 bytes a
parameter; an average reads two tensors and writes one, 12 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ridgeline import units
from ridgeline.finding import Edit, Finding
from ridgeline.rules._kernels import COMPILE_STEP, called, elements, freed_s, names_of, saving_of, without_kernels
from ridgeline.rules._rule import evidence, exposed_of, notable, seconds_of
from ridgeline.step_view import Kernel, Step

_ADAM_BYTES = 28.0
_EMA_BYTES = 12.0
_MANY = 50  # launches from which one a tensor is the likely reason
_FEW_FILLS = 20  # fewer are somebody's own buffers
_STREAMED = 0.8  # part of the bandwidth that a fused update reaches
# without the number of parameters: a foreach Adam moves 76 to 80 bytes a parameter, a fused one 28
_FUSED_SHARE = 28 / 76
_LEAST_SHARE = 28 / 80
# in one pass with the optimizer gradients are scaled as they are read, and the average need not read the weights
_KEPT_OF_AVERAGE = 8 / 12
_LISTED = re.compile(r"multi_tensor_apply|multitensorapply", re.IGNORECASE)
_FUSED = re.compile(r"fused_?(adam|sgd|optimi)", re.IGNORECASE)
_CLIPPING = re.compile(r"lp_?norm|amp_|nonfinite|clip", re.IGNORECASE)
_AVERAGING = frozenset(("mul_", "add_", "lerp_", "mul", "add", "sub", "sub_", "copy_", "lerp"))
_AVERAGING_LISTS = frozenset(("_fused_sgd_", "_foreach_lerp_", "_foreach_add_"))
_ONE_PASS = " A torch.optim.AdamW of fp32 weights is one pass in a compiled step by itself."
_CLEARING = frozenset(("zero_", "fill_", "zeros_like"))


def single_tensor_optimizer(step: Step) -> Iterator[Finding]:
    """K8: the optimizer works through the parameters one by one, several tiny kernels each.

    Holds where at least 50 kernels of the optimizer's phase take a single tensor.
    """
    found = [kernel for kernel in _updates(step) if not _LISTED.search(kernel.activity.name) and not _is_fused(kernel)]
    if len(found) < _MANY:
        return
    edit, note = _one_pass(step, found, _ADAM_BYTES)
    if not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K8",
        title=f"the optimizer takes {len(found)} kernels, {units.seconds(exposed_of(found))}, one tensor at a time",
        fix="Pass fused=True (else foreach=True) to the optimizer, and capturable=True in a CUDA graph." + _ONE_PASS,
        verb=COMPILE_STEP,
        saving=saving_of(step, edit, high_s=exposed_of(found)),
        effort="S",
        confidence="modelled",
        wrong_if="a parameter's dtype has no fused kernel, or gradients are sparse",
        evidence=evidence(found),
        edit=edit,
        note=note,
    )


def unfused_foreach(step: Step) -> Iterator[Finding]:
    """K9: the optimizer takes one kernel an operation for all tensors, so weights and moments pass by several times.

    Holds where kernels over tensor lists stand in the optimizer's phase and none is a fused one. The norm of the
    gradients and the loss scaler's checks do not count.
    """
    updates = _updates(step)
    if any(_is_fused(kernel) for kernel in updates):
        return
    found = [kernel for kernel in updates if _LISTED.search(kernel.activity.name)]
    found = [kernel for kernel in found if not _CLIPPING.search(kernel.activity.name)]
    if len(found) < 3:
        return
    edit, note = _one_pass(step, found, _ADAM_BYTES)
    if not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K9",
        title=f"the optimizer passes over its tensors in {len(found)} kernels, {units.seconds(exposed_of(found))}",
        fix="Pass fused=True to the optimizer: one pass. In a CUDA graph its learning rate must be a tensor."
        + _ONE_PASS,
        verb=COMPILE_STEP,
        saving=saving_of(step, edit, high_s=exposed_of(found) * (1 - _LEAST_SHARE) + _gaps_s(step, found)),
        effort="S",
        confidence="modelled",
        wrong_if="the dtype has no fused kernel (complex), or another hook reads gradients between the passes",
        evidence=evidence(found),
        edit=edit,
        note=note,
    )


def looped_average(step: Step) -> Iterator[Finding]:
    """K10: the moving average of the weights is a loop over parameters, or a pass beside the optimizer's.

    A loop where at least 50 tiny kernels run outside forward, backward and optimizer in a training step. Passes over
    lists of tensors there, without the gradients' norm, are those of the clip and of the average.
    """
    found = _averaging(step)
    if not found:
        yield from _passes_beside(step)
        return
    edit, note = _one_pass(step, found, _EMA_BYTES)
    if not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K10",
        title=f"the average of the weights takes {len(found)} launches, {units.seconds(exposed_of(found))} on the GPU",
        fix="Use torch._foreach_lerp_ over all floating tensors, copy integer buffers, or update every few steps.",
        verb="ridgeline.compile_step(…, ema=ridgeline.Ema(model))",
        saving=saving_of(step, edit, high_s=exposed_of(found) + _gaps_s(step, found)),
        effort="S",
        confidence="modelled",
        wrong_if="the kernels belong to something else that walks over the parameters, such as logging their norms",
        evidence=evidence(found),
        edit=edit,
        note=note,
    )


def _passes_beside(step: Step) -> Iterator[Finding]:
    beside = [kernel for kernel in step.kernels if kernel.phase == "other" and _LISTED.search(kernel.activity.name)]
    beside = [kernel for kernel in beside if step.trained and "norm" not in called(kernel)]
    scaling = [kernel for kernel in beside if called(kernel) == "_foreach_mul_"]
    averaging = [kernel for kernel in beside if called(kernel) in _AVERAGING_LISTS]
    if not averaging:
        return
    found = [*scaling, *averaging]
    edit = without_kernels(step, scaling)
    edit = Edit({**edit.seconds, **{k.activity.id: _KEPT_OF_AVERAGE * k.seconds for k in averaging}}, edit.gaps)
    if not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K10",
        title=f"clip and average pass over the parameters beside the optimizer: {len(found)} kernels,"
        f" {units.seconds(exposed_of(found))}",
        fix="Scale the gradients and update the average where the optimizer has them in registers: in one kernel.",
        verb="ridgeline.compile_step(…, ema=ridgeline.Ema(model), clip=…)",
        saving=saving_of(step, edit, high_s=exposed_of(found)),
        effort="S",
        confidence="modelled",
        wrong_if="the lists are not those of a clip and an average",
        evidence=evidence(found),
        edit=edit,
        note="the clip's pass goes, the average keeps 8 of its 12 bytes a parameter",
    )


def cleared_gradients(step: Step) -> Iterator[Finding]:
    """K11: gradients are filled with zeros, one fill a parameter, instead of being dropped.

    Holds for fills outside forward and backward, at least 20 of them.
    """
    found = clearing_fills(step)
    edit = without_kernels(step, found)
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K11",
        title=f"zero_grad fills {len(found)} tensors with zeros, {units.seconds(exposed_of(found))}",
        fix="optimizer.zero_grad(set_to_none=True), PyTorch's default: backward then writes instead of adding.",
        verb=COMPILE_STEP,
        saving=saving_of(step, edit, low=0.7),
        effort="S",
        confidence="modelled",
        wrong_if="a CUDA graph or a reducer needs gradients to stay where they are",
        evidence=evidence(found),
        edit=edit,
    )


def weight_updates(step: Step) -> set[int]:
    """Ids of what belongs to the optimizer or to an average of the weights: K8 to K11 speak of those."""
    own = [k for k in step.kernels if k.known.category == "optimizer" or k.phase == "optimizer"]
    return {kernel.activity.id for kernel in (*own, *_averaging(step))}


def clearing_fills(step: Step) -> list[Kernel]:
    """The fills of zero_grad: many, and outside forward and backward."""
    found = [kernel for kernel in step.kernels if _clears(kernel)]
    return found if step.trained and len(found) >= _FEW_FILLS else []


def _updates(step: Step) -> list[Kernel]:
    """Kernels of the optimizer's phase, without fills."""
    own = [kernel for kernel in step.kernels if kernel.phase == "optimizer" and kernel.activity.kind == "kernel"]
    return [kernel for kernel in own if not _clears(kernel)]


def _is_fused(kernel: Kernel) -> bool:
    return (
        kernel.op == "ridgeline.adamw_ema"
        or bool(_FUSED.search(kernel.activity.name))
        or "fused" in " ".join(names_of(kernel))
    )


def _averaging(step: Step) -> list[Kernel]:
    """Many small operators outside forward, backward and optimizer of a training step."""
    outside = [k for k in step.kernels if k.phase == "other" and k.known.category in ("pointwise", "copy")]
    found = [kernel for kernel in outside if called(kernel) in _AVERAGING]
    return found if step.trained and len(found) >= _MANY else []


def _clears(kernel: Kernel) -> bool:
    fills = kernel.known.category in ("fill", "memset") and (called(kernel) in _CLEARING or kernel.call is None)
    return fills and kernel.phase in ("optimizer", "other")


def _one_pass(step: Step, kernels: list[Kernel], parameter_bytes: float) -> tuple[Edit, str]:
    """The kernels as one pass over the parameters, each keeping its part of the pass; and how that was reckoned."""
    now_s = seconds_of(kernels)
    count = sum(elements(dims) for dims, _ in step.parameters)
    if count and step.ceilings:
        left_s = count * parameter_bytes / step.ceilings.bandwidth / _STREAMED
        note = f"{count} parameters at {units.nbytes(parameter_bytes)} each in one pass: {units.seconds(left_s)}"
    else:
        left_s = _FUSED_SHARE * now_s
        note = f"parameters are not counted: one pass is taken as {units.percent(_FUSED_SHARE, 0)} of the kernels"
    left = min(left_s / now_s, 1.0) if now_s else 1.0
    gaps = without_kernels(step, kernels[:-1]).gaps
    return Edit({kernel.activity.id: left * kernel.seconds for kernel in kernels}, gaps), note


def _gaps_s(step: Step, kernels: Iterable[Kernel]) -> float:
    edit = without_kernels(step, kernels)
    return sum(step.gaps[index].duration_s - left_s for index, left_s in edit.gaps.items())
