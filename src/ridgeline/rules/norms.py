"""Rules on normalisations and what stands around them.

L5 group norms in several kernels, L10 casts around norms under autocast, K2 batch norms that could be folded into the
convolution before them, K3 activations after norms in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ridgeline import units
from ridgeline.finding import Abstention, Edit, Finding
from ridgeline.rules._kernels import (
    COMPILE,
    COMPILE_BF16_STEP,
    COMPILE_STEP,
    by_call,
    called,
    convolves,
    copied,
    elements,
    freed_s,
    largest_bytes,
    names_of,
    runs,
    saving_of,
    streams,
    unseen,
    verb,
    without_kernels,
)
from ridgeline.rules._rule import evidence, exposed_of, notable, plural, removed, seconds_of
from ridgeline.step_view import Kernel, Step
from ridgeline.trace import Dims

ACTIVATIONS = frozenset(
    ("relu", "relu_", "silu", "silu_", "hardswish", "hardswish_", "leaky_relu", "leaky_relu_", "gelu", "sigmoid")
)
_BACKWARD = frozenset(
    ("threshold_backward", "silu_backward", "hardswish_backward", "leaky_relu_backward", "gelu_backward")
)
_STREAMED = 0.8  # part of the copy bandwidth that a good norm kernel reaches
_SHARED_BYTES = 96 * 1024  # shared memory that a block may have on every GPU since 2020, within a few KB
_KEPT_OF_BACKWARD = 1 / 3  # of an activation's backward in a norm's: its second input is still read


def split_group_norms(step: Step) -> Iterator[Finding | Abstention]:
    """L5: one group norm takes several kernels (moments, apply, copies), each a pass over the tensor.

    Holds for group norms on NHWC tensors; the estimate wants shapes and the GPU's bandwidth. A norm in one kernel is
    silent, so a version of PyTorch that has such a kernel is too.
    """
    norms = [kernel for kernel in step.kernels if _is_group_norm(kernel)]
    split = [group for run in runs(step, _is_group_norm) for group in _calls(run) if len(group) > 1]
    if not norms:
        return
    if step.ceilings is None:
        yield Abstention("L5", "the GPU's bandwidth is unknown: run `ridgeline doctor` there")
        return
    yield from unseen("L5", norms, "group norm kernels")
    seconds: dict[int, float] = {}
    best_s = 0.0
    for group in split:
        bytes_ = max(map(largest_bytes, group))
        pass_s = bytes_ / step.ceilings.bandwidth / _STREAMED
        # forward reads x and writes y; backward reads x and dy and writes dx: twice what it reads where nothing fits
        read = 2 if any("backward" in kernel.activity.name + kernel.op for kernel in group) else 1
        passes = 1 + read if _fits(group[0]) else 1 + 2 * read
        after_s = passes * pass_s
        now_s = seconds_of(group)
        if bytes_ and after_s < now_s:
            seconds |= {kernel.activity.id: kernel.seconds * after_s / now_s for kernel in group}
            best_s += max(exposed_of(group) - (1 + read) * pass_s, 0.0)
    edit = Edit(seconds=seconds)
    found = [kernel for kernel in step.kernels if kernel.activity.id in seconds]
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="L5",
        title=f"{plural(len(split), 'group norm')} take {len(found)} kernels and {units.seconds(exposed_of(found))}",
        fix="Use one NHWC kernel for the norm and the activation after it; a group that fits on the chip is read once.",
        verb=verb(step, training=COMPILE_BF16_STEP, inference=""),
        saving=saving_of(step, edit, high_s=best_s),
        effort="L",
        confidence="modelled",
        wrong_if="a group is too large for shared memory, or maps are so small that launches are what counts",
        evidence=evidence(found),
        edit=edit,
        note=f"every tensor moves once where a group fits {units.nbytes(_SHARED_BYTES)}, else is read twice, at "
        f"{units.percent(_STREAMED, 0)} of the bandwidth",
    )


def casts_around_norms(step: Step) -> Iterator[Finding | Abstention]:
    """L10: autocast runs norms in fp32, so their inputs and outputs are cast by kernels of their own. Needs dtypes."""
    if not any(kernel.known.category == "norm" for kernel in step.kernels):
        return
    yield from unseen("L10", [kernel for kernel in step.kernels if kernel.known.category == "copy"], "copies")
    found = []
    for lane in streams(step):
        for index, kernel in enumerate(lane):
            copy = copied(kernel)
            if copy is None:
                continue
            feeds = copy.widens and any(_norms(other, copy.dims) for other in lane[index + 1 : index + 2])
            follows = copy.narrows and index > 0 and _norms(lane[index - 1], copy.dims)
            if feeds or follows:
                found.append(kernel)
    edit = without_kernels(step, found)
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="L10",
        title=f"{plural(len(found), 'cast')} between 16 and 32 bits stand around norms",
        fix="Run the norm under autocast(enabled=False) in the dtype of its input, or as a fused norm, which sums in "
        "fp32 inside anyway.",
        verb=COMPILE_STEP if step.trained else COMPILE,
        saving=saving_of(step, edit),
        effort="M",
        confidence="modelled",
        wrong_if="the norm's own arithmetic in 16 bits is not stable enough for this model",
        evidence=evidence(found),
        edit=edit,
    )


def foldable_batch_norms(step: Step) -> Iterator[Finding]:
    """K2: in inference a batch norm, and the activation after it, run as kernels of their own behind a convolution.

    Holds outside training: there the statistics are constants, and fold into the convolution's weights.
    """
    if step.trained:
        return
    norms, activations = [], []
    for lane in streams(step):
        for index, kernel in enumerate(lane):
            if index and _is_batch_norm(kernel) and convolves(lane[index - 1]):
                norms.append(kernel)
                activations += [other for other in lane[index + 1 : index + 2] if _activates(other)]
    found = [*norms, *activations]
    edit = without_kernels(step, found)
    if not norms or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K2",
        title=f"{plural(len(norms), 'batch norm')} and {plural(len(activations), 'activation')} follow convolutions as "
        f"kernels of their own",
        fix="Fold the norms into the convolutions' weights and let the convolution apply the activation as it stores.",
        verb=COMPILE,
        saving=saving_of(step, edit, low=0.7),
        effort="S",
        confidence="modelled",
        wrong_if="the model runs in training mode after all; folding moves numbers by rounding, so compare in float64",
        evidence=evidence(found),
        edit=edit,
    )


def activations_after_norms(step: Step) -> Iterator[Finding]:
    """K3: in training an activation reads what a norm just wrote, and its backward writes what the norm's reads."""
    if not step.trained:
        return
    forward, backward = [], []
    for lane in streams(step):
        for before, kernel in pairwise(lane):
            if _is_norm(before) and _activates(kernel):
                forward.append(kernel)
            elif called(before) in _BACKWARD and _is_norm(kernel):
                backward.append(before)
    kept = {kernel.activity.id: _KEPT_OF_BACKWARD * kernel.seconds for kernel in backward}
    edit = Edit(seconds={**removed(forward).seconds, **kept})
    found = [*forward, *backward]
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K3",
        title=f"{plural(len(found), 'activation')} pass over tensors that a norm has just written or is about to read",
        fix="Let the norm apply the activation as it stores, and recompute it in the norm's backward.",
        verb=COMPILE_BF16_STEP,
        saving=saving_of(step, edit, high_s=exposed_of(found)),
        effort="L",
        confidence="modelled",
        wrong_if="the norm's output is needed without the activation; the pass for the statistics stays",
        evidence=evidence(found),
        edit=edit,
    )


def _is_norm(kernel: Kernel) -> bool:
    return kernel.known.category == "norm"


def _norms(kernel: Kernel, dims: Dims) -> bool:
    """Whether the kernel is a norm of a tensor of that size; a cast of a small weight next to one is L9's."""
    shapes = kernel.call.shapes if kernel.call else ()
    return _is_norm(kernel) and elements(dims) in [elements(shape) for shape in shapes if len(shape) > 1]


def _is_group_norm(kernel: Kernel) -> bool:
    if kernel.op.startswith("ridgeline"):
        return False  # a second kernel there is a choice for groups that do not fit
    name = kernel.activity.name
    return "group_norm" in name or "RowwiseMoments" in name or any("group_norm" in n for n in names_of(kernel))


def _calls(run: list[Kernel]) -> list[list[Kernel]]:
    """The norms in a stretch: by call; kernels that a compiler wrote, whose call is one kernel, belong together."""
    written = [kernel for kernel in run if "triton" in kernel.activity.name]
    others = [kernel for kernel in run if "triton" not in kernel.activity.name]
    return [*by_call(others), *([written] if written else [])]


def _fits(kernel: Kernel) -> bool:
    """Whether a group of this norm stays in shared memory; where the number of groups is unknown, it does not."""
    call = kernel.call
    if call is None or called(kernel) != "native_group_norm":
        return False
    if len(call.concrete) < 7 or not call.concrete[6].isdigit():
        return False
    groups = call.shapes[0][0] * int(call.concrete[6])
    return largest_bytes(kernel) <= _SHARED_BYTES * groups


def _is_batch_norm(kernel: Kernel) -> bool:
    name = kernel.activity.name
    return "batch_norm" in name or "bn_fw_" in name or any("batch_norm" in n for n in names_of(kernel))


def _activates(kernel: Kernel) -> bool:
    return kernel.known.category == "pointwise" and called(kernel) in ACTIVATIONS
