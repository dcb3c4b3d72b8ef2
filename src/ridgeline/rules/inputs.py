"""H1-H4: what the step waits for before it has its input on the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from ridgeline import units
from ridgeline.finding import Abstention, Finding
from ridgeline.rules._rule import (
    INPUT_BOUND,
    closed,
    evidence,
    exposed_of,
    gap_evidence,
    gap_total,
    gaps_of,
    notable,
    part_of_step,
    plural,
    saving,
    seconds_of,
    shortened,
)
from ridgeline.step_view import Kernel, Step

BATCHES = "ridgeline.workloads.loader.Batches"
# host to device over PCIe: generations 3, 4 and 5 with 16 lanes, as such copies reach them
_PINNED_BANDWIDTHS = (12e9, 25e9, 50e9)
_BIG_COPY_BYTES = 2**20  # smaller ones are bound by latency and say nothing about bandwidth
_IMAGE_CHANNELS = (1, 3, 4)


def loader_wait(step: Step) -> Iterable[Finding | Abstention]:
    """H1: the GPU stands idle while the host is in the loader's `next()`.

    Holds for a steady state: the first batches of an epoch, read from a cold disk, look the same.
    """
    gaps = gaps_of(step, "loader")
    waited_s = gap_total(step, gaps)
    if not notable(step, waited_s):
        return
    share = waited_s / step.duration_s
    # what stays idle for other reasons will hold back part of what the loader gives free
    mid_s = waited_s * (1.0 - (step.idle_s - waited_s) / step.duration_s)
    what = "input-bound" if share >= INPUT_BOUND else "waiting for input"
    of_step = units.percent(part_of_step(step, waited_s))
    yield Finding(
        rule="H1",
        title=f"{what} {of_step}: the GPU idles {units.seconds(waited_s)} a step for the next batch",
        fix="Prepare batches beside the step: more workers kept alive, prefetching, decoding and augmentation on the"
        " GPU, or the whole set in memory.",
        verb=BATCHES,
        saving=saving(mid_s / 2, mid_s, waited_s, cap_s=waited_s),
        effort="M",
        confidence="modelled",
        wrong_if="the profiler slowed Python workers, the disk was cold, or the profiled run had fewer cores",
        evidence=gap_evidence(step, gaps),
        edit=closed(step, gaps, mid_s),
        note="idle time within next(), less the share that other idle time would still hold back",
    )


def pageable_copies(step: Step) -> Iterable[Finding | Abstention]:
    """H2: the input is copied from memory that is not pinned.

    Holds for copies that nothing overlaps; priced against pinned copies of the same trace where there are big ones.
    """
    copies = [kernel for kernel in _uploads(step) if "Pageable" in kernel.activity.name]
    measured = [_bandwidth(k) for k in _uploads(step) if "Pinned" in k.activity.name and _is_big(k)]
    bandwidths = (median(measured),) * 3 if measured else _PINNED_BANDWIDTHS
    low_s, mid_s, high_s = (
        sum(min(max(0.0, k.seconds - k.activity.bytes / bandwidth), k.exposed_s) for k in copies)
        for bandwidth in bandwidths
    )
    if not notable(step, mid_s):
        return
    pinned_s = {k.activity.id: k.activity.bytes / bandwidths[1] for k in copies}
    yield Finding(
        rule="H2",
        title=f"{plural(len(copies), 'input copy')} from pageable memory:"
        f" {units.nbytes(sum(k.activity.bytes for k in copies))} in {units.seconds(seconds_of(copies))}",
        fix="Give the loader pin_memory=True, or keep the batch in a pinned buffer.",
        verb=BATCHES,
        saving=saving(low_s * 0.8, mid_s, high_s, cap_s=exposed_of(copies)),
        effort="S",
        confidence="measured" if measured else "modelled",
        wrong_if="pinning on the main thread costs more than it saves, or the copy is hidden in the real run",
        evidence=evidence(copies),
        edit=shortened(pinned_s),
        note=f"pinned copies at {units.bandwidth(bandwidths[1])}"
        + ("" if measured else f" ({units.bandwidth(bandwidths[0])} to {units.bandwidth(bandwidths[2])})"),
    )


def blocking_copies(step: Step) -> Iterable[Finding | Abstention]:
    """H3: pinned copies of the input run alone, though there is work that could hide them.

    Holds where the next batch is known while this one is computed.
    """
    copies = [k for k in _uploads(step) if "Pinned" in k.activity.name and k.exposed_s > k.seconds / 2]
    exposed_s = exposed_of(copies)
    compute_s = step.busy_s - exposed_s
    hidden_s = min(exposed_s, compute_s)
    if not notable(step, hidden_s):
        return
    left = 1.0 - hidden_s / exposed_s
    yield Finding(
        rule="H3",
        title=f"input copies of {units.seconds(exposed_s)} a step run while nothing else does",
        fix="Copy the next batch with non_blocking=True on a stream of its own while this one is computed.",
        verb=BATCHES,
        saving=saving(hidden_s / 2, hidden_s * 0.8, hidden_s, cap_s=exposed_s),
        effort="M",
        confidence="modelled",
        wrong_if="the copy is already hidden in the unprofiled run; a buffer must not be refilled while it is read",
        evidence=evidence(copies),
        edit=shortened({k.activity.id: k.seconds - k.exposed_s * (1.0 - left) for k in copies}),
        note="the shorter of the exposed copies and of the work there is to hide them",
    )


def float_images(step: Step) -> Iterable[Finding | Abstention]:
    """H4: images travel to the GPU as fp32, four times the bytes of the uint8 they were decoded to.

    Holds for images whose augmentation ends in values that uint8 holds, or can move to the GPU.
    """
    copies = [k for k in _uploads(step) if _is_big(k)]
    if not copies:
        return
    if "record_shapes" not in step.options:
        yield Abstention("H4", "the trace was recorded without record_shapes: it does not say what the copies carry")
        return
    images = [k for k in copies if _carries_float_images(k)]
    exposed_s = exposed_of(images)
    # the cast on the GPU reads one byte a value and writes four
    bandwidth = step.ceilings.bandwidth if step.ceilings else math.inf
    cast_s = sum(k.activity.bytes / 4 * 5 for k in images) / bandwidth
    mid_s = 0.75 * exposed_s - cast_s
    if not notable(step, mid_s):
        return
    yield Finding(
        rule="H4",
        title=f"images reach the GPU as fp32: {units.nbytes(sum(k.activity.bytes for k in images))} a step",
        fix="Send uint8 and normalise on the GPU; compiled detectors do that within the first convolution.",
        verb=BATCHES,
        saving=saving(mid_s / 2, mid_s, 0.75 * exposed_s, cap_s=exposed_s),
        effort="M",
        confidence="modelled",
        wrong_if="augmentation needs fp32 on the host, or the copy is hidden in the real run",
        evidence=evidence(images),
        edit=shortened({k.activity.id: k.seconds - k.exposed_s * mid_s / exposed_s for k in images}),
        note="three quarters of the exposed copies, less a cast on the GPU; the host's own cast is not counted",
    )


def _uploads(step: Step) -> list[Kernel]:
    return [k for k in step.kernels if k.activity.kind == "memcpy" and "HtoD" in k.activity.name]


def _is_big(copy: Kernel) -> bool:
    return copy.activity.bytes >= _BIG_COPY_BYTES and copy.seconds > 0.0


def _bandwidth(copy: Kernel) -> float:
    return copy.activity.bytes / copy.seconds


def _carries_float_images(copy: Kernel) -> bool:
    """Whether its operator has an fp32 image tensor of exactly the bytes that were copied."""
    if copy.call is None:
        return False
    return any(
        dtype == "float"
        and len(shape) == 4
        and shape[1] in _IMAGE_CHANNELS
        and 4 * math.prod(shape) == copy.activity.bytes
        for shape, dtype in zip(copy.call.shapes, copy.call.dtypes, strict=False)
    )
