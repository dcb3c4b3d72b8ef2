"""Rules on memory format: conversions around convolutions, operators that break the format, channels that do not fit.

L1 conversions around convolutions, L2 pairs around one operator, L3 operators that lose channels-last, L4 operands that
read as both formats, L11 channel counts that tensor cores cannot take.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ridgeline import units
from ridgeline.finding import Abstention, Finding
from ridgeline.rules._kernels import (
    COMPILE,
    COMPILE_BF16_STEP,
    HALVES,
    by_call,
    called,
    convolves,
    formats,
    freed_s,
    matrix,
    names_of,
    problem_of,
    saving_of,
    streams,
    unseen,
    verb,
    without_kernels,
)
from ridgeline.rules._rule import evidence, exposed_of, notable, part_of_step, plural, removed, saving, shortened
from ridgeline.step_view import Kernel, Step

# instanseg PR 144: 12 % of conversions, 30 % gained; the rest is what NHWC did for convolutions and norms
_UPSIDE = 0.25
# compiled group norms split in two kernels in NHWC, and their gradients come back as NCHW: of the conversions' time a
# UNet got back half on an RTX 4070, and lost a third on an H200 (4.3 ms gone, 5.6 more in norms and copies)
_TAKEN_BACK = (0.5 + 1.3) / 2
_REACH = 4  # kernels between two conversions that undo each other
_TO_NHWC = re.compile(r"nchw_?to_?nhwc", re.IGNORECASE)
_TO_NCHW = re.compile(r"nhwc_?to_?nchw", re.IGNORECASE)
_GENERATED = re.compile(r"^triton_[a-z]+_fused_+|_\d+$")
_NAME_LENGTH = 48
_NARROW = re.compile(r"align[12](?!\d)", re.IGNORECASE)
_PADDING = re.compile(r"nchwAddPadding", re.IGNORECASE)
_CHANNELS = 8  # 16-byte loads of 16-bit elements


def conversions_around_convolutions(step: Step) -> Iterator[Finding]:
    """L1: convolutions stored NCHW are converted to NHWC and back.

    Holds where convolutions run on tensor cores, which want NHWC; names of kernels suffice. A step whose convolutions
    already take channels-last tensors is left to L3 and L4.
    """
    found = _by_convolutions(step)
    if len(found) < 2 or not notable(step, exposed_of(found)) or _channels_last(step):
        return
    share = part_of_step(step, exposed_of(found))
    norms = [kernel for kernel in step.kernels if _is_group_norm(kernel)]
    left = _TAKEN_BACK if norms else 0.0
    edit = shortened({kernel.activity.id: left * kernel.seconds for kernel in found})
    upside_s = sum(_upside_s(kernel) for kernel in step.kernels if kernel.known.category in ("conv", "norm"))
    penalty = f", less the {units.percent(left, 0)} that slower group norms took back elsewhere (L5's kind would not)"
    yield Finding(
        rule="L1",
        title=f"{len(found)} layout conversions around convolutions take {units.percent(share)} of the step",
        fix="Convert the model's weights and its input to channels_last once, so that convolutions find NHWC.",
        verb=verb(step, training=COMPILE_BF16_STEP, inference=COMPILE),
        saving=saving_of(step, edit, low=0.0 if norms else 0.5, high_s=exposed_of(found) + upside_s),
        effort="S",
        confidence="modelled",
        wrong_if="convolutions run without tensor cores or grouped (NHWC can be many times slower there), or an "
        "operator in between returns NCHW and the conversions only move",
        evidence=evidence(found),
        edit=edit,
        note=f"middle: the conversions' {units.seconds(exposed_of(found))}{penalty if norms else ''}; most: also "
        f"{units.percent(_UPSIDE, 0)} of convolutions and norms, as one public report saw",
    )


def transpose_pairs(step: Step) -> Iterator[Finding]:
    """L2: a tensor is taken to NCHW and back around operators that do not convolve. Needs strides."""
    pairs = [pair for lane in streams(step) for pair in _pairs(lane)]
    found = [kernel for pair in pairs for kernel in pair[:2]]
    if not found or not notable(step, exposed_of(found)):
        return
    between = Counter(name for _, _, name in pairs)
    edit = without_kernels(step, found)
    yield Finding(
        rule="L2",
        title=f"{plural(len(pairs), 'pair')} of conversions to NCHW and back stand around {_listed(between)}",
        fix="Let the operator in between work on channels-last tensors, or replace it by one that does.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit),
        effort="M",
        confidence="modelled",
        wrong_if="one side of the pair is needed by another reader of the tensor",
        evidence=evidence(found),
        edit=edit,
    )


def format_breakers(step: Step) -> Iterator[Finding | Abstention]:
    """L3: a step that means to be channels-last still converts, because some operators return NCHW.

    Judged by the conversions that run, not by names or versions: a group norm that keeps the format is silent. The one
    conversion of the input is not counted. Needs strides.
    """
    convolutions = [kernel for kernel in step.kernels if kernel.known.category == "conv"]
    blind = list(unseen("L3", convolutions, "convolutions"))
    if blind or not _channels_last(step):
        yield from blind
        return
    excused = {kernel.activity.id for kernel in (*_ambiguous(step), *_paired(step))}
    broken = [(kernel, source) for lane in streams(step) for kernel, source in _conversions(lane)]
    broken = [(kernel, source) for kernel, source in broken if kernel.activity.id not in excused]
    found = [kernel for kernel, _ in broken]
    edit = without_kernels(step, found)
    if not found or not notable(step, freed_s(step, edit)):
        return
    sources = Counter(_short(source) for _, source in broken)
    yield Finding(
        rule="L3",
        title=f"{plural(len(found), 'conversion')} to or from NCHW remain in a channels-last step",
        fix="Make the operators that return NCHW keep channels-last (for group norms that takes an NHWC kernel, also "
        "backward), or convert once at the cheapest edge.",
        verb=verb(step, training=COMPILE_BF16_STEP, inference=COMPILE),
        saving=saving_of(step, edit),
        effort="M",
        confidence="modelled",
        wrong_if="another reader needs the tensor in NCHW, or the operator is so much faster there that it pays",
        evidence=evidence(found),
        edit=edit,
        note=f"the tensors come from {_listed(sources)}",
    )


def ambiguous_strides(step: Step) -> Iterator[Finding]:
    """L4: a convolution converts because an operand with an axis of one element reads as NCHW and NHWC at once.

    Holds for N = 1, C = 1, H = W = 1 and 1x1 filters in steps that mean to be channels-last. Needs strides.
    """
    found = _ambiguous(step)
    if not found or not notable(step, exposed_of(found)):
        return
    edit = without_kernels(step, found)
    yield Finding(
        rule="L4",
        title=f"{plural(len(found), 'conversion')} in convolutions whose operands read as both formats",
        fix="Give the tensor the strides of its neighbours: clone it with memory_format=torch.channels_last, or let "
        "its producer write it so.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit),
        effort="S",
        confidence="modelled",
        wrong_if="the library converts these operands whatever their strides are",
        evidence=evidence(found),
        edit=edit,
    )


def unaligned_channels(step: Step) -> Iterator[Finding | Abstention]:
    """L11: channel counts that are no multiple of 8 make tensor cores load narrowly, or pad first.

    Holds for 16-bit convolutions and products. The worth of padding is bounded, not predicted: it adds FLOPs.
    """
    kernels = matrix(step)
    padding = [kernel for kernel in step.kernels if _PADDING.search(kernel.activity.name)]
    narrow = [kernel for kernel in kernels if _NARROW.search(kernel.activity.name) or _is_odd(kernel)]
    found = [*padding, *narrow]
    if not found:
        yield from unseen("L11", [kernel for kernel in kernels if kernel.known.dtype in ("fp16", "bf16")], "products")
        return
    if not notable(step, exposed_of(found)):
        return
    high_s = exposed_of(padding) + sum(map(_headroom_s, narrow))
    edit = removed(padding)
    odd = Counter(str(problem.channels) for kernel in narrow if (problem := problem_of(kernel)))
    yield Finding(
        rule="L11",
        title=f"{plural(len(found), 'kernel')} work on channel counts that are no multiple of {_CHANNELS}",
        fix="Pad channels to a multiple of 8 where the tensor is made: the stem's 3 to 4 or 8, the head's classes.",
        verb="",
        saving=saving(0.0, freed_s(step, edit), high_s, cap_s=exposed_of(found)),
        effort="M",
        confidence="bound",
        wrong_if="the layer is bound by memory, as stems are, or the added channels cost what alignment gains",
        evidence=evidence(found),
        edit=edit,
        note=f"(in, out) channels: {_listed(odd)}" if odd else "",
    )


def _by_convolutions(step: Step) -> list[Kernel]:
    """Conversions within a convolution's call or next to a convolution on their stream."""
    found = []
    for lane in streams(step):
        others = [kernel for kernel in lane if not _converts(kernel)]
        position = 0  # of the next kernel that is no conversion
        for kernel in lane:
            if not _converts(kernel):
                position += 1
                continue
            beside = others[max(position - 1, 0) : position + 1]
            if convolves(kernel) or any(convolves(other) for other in beside):
                found.append(kernel)
    return found


def _converts(kernel: Kernel) -> bool:
    return kernel.known.category == "layout" or bool(_direction(kernel))


def _direction(kernel: Kernel) -> str:
    """The format that the kernel makes: "nhwc", "nchw", or "" where it converts nothing or its name does not tell."""
    if _TO_NHWC.search(kernel.activity.name):
        return "nhwc"
    if _TO_NCHW.search(kernel.activity.name):
        return "nchw"
    if called(kernel) == "copy_" and len(seen := formats(kernel)) >= 2:
        target, source = seen[:2]
        return target if {target, source} == {"nhwc", "nchw"} else ""
    return ""


def _channels_last(step: Step) -> bool:
    """Whether at least half of the convolutions take an operand that can only be channels-last."""
    seen = [formats(kernel) for kernel in step.kernels if kernel.known.category == "conv" and formats(kernel)]
    return 2 * sum("nhwc" in operands for operands in seen) >= max(len(seen), 1)


def _is_group_norm(kernel: Kernel) -> bool:
    return "group_norm" in kernel.activity.name or any("group_norm" in name for name in names_of(kernel))


def _upside_s(kernel: Kernel) -> float:
    return min(_UPSIDE * kernel.exposed_s, _headroom_s(kernel))


def _headroom_s(kernel: Kernel) -> float:
    """Exposed time above the roofline's."""
    return max(kernel.exposed_s - (kernel.floor_s or 0.0), 0.0)


def _pairs(lane: list[Kernel]) -> Iterator[tuple[Kernel, Kernel, str]]:
    """Copies to NCHW, the next ones back, and the operator between; not those that a library makes for itself."""
    for index, kernel in enumerate(lane):
        if called(kernel) != "copy_" or _direction(kernel) != "nchw" or _is_group_norm(kernel):
            continue
        between: list[Kernel] = []
        for other in lane[index + 1 : index + 2 + _REACH]:
            if _direction(other) == "nhwc":
                if between and called(other) == "copy_":
                    yield kernel, other, _short(between[0])
                break
            if convolves(other):
                break
            between.append(other)


def _paired(step: Step) -> list[Kernel]:
    return [kernel for lane in streams(step) for pair in _pairs(lane) for kernel in pair[:2]]


def _ambiguous(step: Step) -> list[Kernel]:
    """Conversions within convolutions none of whose operands is clearly NCHW, and one is both."""
    found = []
    for group in by_call(kernel for kernel in step.kernels if convolves(kernel)):
        operands = {name for kernel in group if called(kernel) != "copy_" for name in formats(kernel)}
        if "both" in operands and "nchw" not in operands:
            found += [kernel for kernel in group if _converts(kernel)]
    return found


def _conversions(lane: list[Kernel]) -> Iterator[tuple[Kernel, Kernel]]:
    """Conversions with the kernel that wrote what they read: the last one before that converts nothing itself."""
    source: Kernel | None = None
    for kernel in lane:
        if not _converts(kernel):
            source = kernel
        elif source is not None and source.activity.kind == "kernel":
            yield kernel, source


def _short(kernel: Kernel) -> str:
    """What made a tensor: the operator, or what a compiler fused, without its number."""
    name = names_of(kernel)[1] or called(kernel) or kernel.activity.name
    name = _GENERATED.sub("", name)
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"


def _is_odd(kernel: Kernel) -> bool:
    problem = problem_of(kernel)
    if problem is None or problem.dtype not in HALVES or problem.groups > 1:
        return False
    return any(count % _CHANNELS for count in problem.channels)


def _listed(counts: Counter[str]) -> str:
    """`_listed(Counter(cat=2, silu=1)) == "2 cat, 1 silu"`."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common(6))
