"""Rules on kernels that only move data: K5 concats, K6 what feeds a concat, K7 fills, K18 indices of max pooling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ridgeline import units
from ridgeline.finding import Abstention, Finding
from ridgeline.rules._kernels import (
    COMPILE,
    COMPILE_BF16_STEP,
    COMPILE_STEP,
    called,
    elements,
    freed_s,
    has_shapes,
    item_bytes,
    names_of,
    saving_of,
    streams,
    unseen,
    verb,
    without_kernels,
)
from ridgeline.rules._rule import evidence, exposed_of, notable, plural, shortened
from ridgeline.rules.optimizer import clearing_fills
from ridgeline.step_view import Kernel, Step

_SEVERAL = 2
_STORM = 10  # fills from which they are worth a word
_SMALL_BYTES = 4096
_REACH = 3  # kernels between an upsampling and the concat of its result
_INDEX_BYTES = 8
_NUMBER = re.compile(r"-?\d+")
# what adds into memory that must be zero beforehand
_ADDS_UP = re.compile(r"wgrad|split_?k|scatter|atomic|index_put|index_add|bprop|embedding", re.IGNORECASE)


def concat_copies(step: Step) -> Iterator[Finding]:
    """K5: concats copy what the producers could have written in place.

    Holds where the inputs of a concat have no other layout than its slices: along channels, in NHWC.
    """
    found = [kernel for kernel in step.kernels if _concatenates(kernel)]
    edit = without_kernels(step, found)
    if len(found) < _SEVERAL or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K5",
        title=f"{plural(len(found), 'concat copy kernel')} take {units.seconds(exposed_of(found))}",
        fix="Let the producers write into slices of one buffer, or let the next convolution read its inputs apart.",
        verb=verb(step, training=COMPILE_BF16_STEP, inference=COMPILE),
        saving=saving_of(step, edit),
        effort="L",
        confidence="modelled",
        wrong_if="strided slices cost the producers their wide stores",
        evidence=evidence(found),
        edit=edit,
        note=(
            "most: every copy and its launch; least: half, where producers get slower. In training concats go that one"
            " GroupNorm and one convolution alone read"
        ),
    )


def upsampled_concats(step: Step) -> Iterator[Finding]:
    """K6: a map is made larger, or cut in pieces, only to be concatenated next.

    Holds for nearest-neighbour upsampling: the reader can take each pixel of the small map several times.
    """
    found = []
    for lane in streams(step):
        for index, kernel in enumerate(lane):
            feeds = any(_concatenates(other) for other in lane[index + 1 : index + 1 + _REACH])
            if feeds and (kernel.known.category == "upsample" or _splits(kernel)):
                found.append(kernel)
    edit = without_kernels(step, found)
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K6",
        title=f"{plural(len(found), 'upsampling or split')} write maps that a concat copies at once",
        fix="Let the kernel that reads the concat read the small map, or the pieces, directly.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit),
        effort="L",
        confidence="modelled",
        wrong_if="another layer reads the larger map, or the interpolation is not nearest",
        evidence=evidence(found),
        edit=edit,
    )


def fill_storm(step: Step) -> Iterator[Finding]:
    """K7: many small fills, each with a launch of its own. Those of zero_grad are K11's.

    One that a library makes within its own call, or that stands before a kernel that adds up (split-K, scatter), is
    probably needed: only the most hopeful saving counts it.
    """
    clearing = {kernel.activity.id for kernel in clearing_fills(step)}
    found: list[Kernel] = []
    needed: set[int] = set()
    for lane in streams(step):
        for index, kernel in enumerate(lane):
            if kernel.known.category not in ("memset", "fill") or kernel.activity.id in clearing:
                continue
            found.append(kernel)
            if any(_needs(other, kernel) for other in lane[index + 1 : index + 2]):
                needed.add(kernel.activity.id)
    edit = without_kernels(step, [kernel for kernel in found if kernel.activity.id not in needed])
    mid_s, high_s = freed_s(step, edit), freed_s(step, without_kernels(step, found))
    if len(found) < _STORM or not notable(step, mid_s):
        return
    small = sum(0 < kernel.activity.bytes < _SMALL_BYTES for kernel in found)
    yield Finding(
        rule="K7",
        title=f"{len(found)} fills a step, {small} of them below {units.nbytes(_SMALL_BYTES)}, {units.seconds(high_s)}",
        fix="Keep scratch memory that is cleared once, clear it inside the kernel that needs it, or pick an algorithm "
        "that needs none.",
        verb=verb(step, training=COMPILE_STEP, inference=COMPILE),
        saving=saving_of(step, edit, high_s=high_s),
        effort="M",
        confidence="modelled",
        wrong_if="the next kernel adds into that memory, as split-K and scatter do; and PyTorch versions differ in "
        "whether zero_() is a fill or a kernel",
        evidence=evidence(found),
        edit=edit,
        note=f"{len(needed)} of them may be needed by the kernel that follows" if needed else "",
    )


def pooling_indices(step: Step) -> Iterator[Finding | Abstention]:
    """K18: max pooling writes an int64 index an element, four times the bytes of a 16-bit result.

    Holds outside training always, in training where a byte an element would do. Needs shapes.
    """
    pools = [kernel for kernel in step.kernels if "max_pool2d_with_indices" in names_of(kernel)]
    yield from unseen("K18", pools, "pooling kernels")
    # in training a byte an element still says which of the window's elements it was
    spared_bytes = _INDEX_BYTES - 1 if step.trained else _INDEX_BYTES
    seconds = {}
    for kernel in filter(has_shapes, pools):
        item, x, y = _pooling(kernel)
        if x:
            seconds[kernel.activity.id] = kernel.seconds * (1 - spared_bytes * y / (item * (x + y) + _INDEX_BYTES * y))
    edit = shortened(seconds)
    found = [kernel for kernel in pools if kernel.activity.id in seconds]
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K18",
        title=f"{plural(len(found), 'max pooling')} write int64 indices",
        fix="Pool without indices in inference; in training keep a byte an element, or recompute the maximum.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit),
        effort="L",
        confidence="modelled",
        wrong_if="an unpooling reads the indices",
        evidence=evidence(found),
        edit=edit,
        note="middle: time in proportion to the bytes",
    )


def _needs(kernel: Kernel, fill: Kernel) -> bool:
    """Whether the kernel after a fill shows that it wants zeros: by what it does, or by sharing the fill's call."""
    within = kernel.call is not None and fill.call is not None and kernel.call.id == fill.call.id
    return within or bool(_ADDS_UP.search(kernel.activity.name))


def _concatenates(kernel: Kernel) -> bool:
    return kernel.known.category == "concat" or "cat" in names_of(kernel)


def _splits(kernel: Kernel) -> bool:
    """A copy that makes a piece of a tensor contiguous."""
    return kernel.known.category == "copy" and any(name.startswith(("split", "chunk")) for name in names_of(kernel))


def _pooling(kernel: Kernel) -> tuple[int, int, int]:
    """Bytes an element, elements of the input and of the output; zeros where the window is not recorded."""
    call = kernel.call
    if call is None or called(kernel) != "max_pool2d_with_indices" or len(call.concrete) < 4:
        return 0, 0, 0
    if not call.shapes or len(call.shapes[0]) < 3 or not call.dtypes:
        return 0, 0, 0
    window, stride, padding = ([int(n) for n in _NUMBER.findall(text)] for text in call.concrete[1:4])
    stride, padding = stride or window, padding or [0]
    if not window or not stride or not stride[-1]:
        return 0, 0, 0
    x = call.shapes[0]
    sides = [(side + 2 * padding[-1] - window[-1]) // stride[-1] + 1 for side in x[-2:]]
    return item_bytes(call.dtypes[0]), elements(x), elements(x[:-2]) * math.prod(sides)
