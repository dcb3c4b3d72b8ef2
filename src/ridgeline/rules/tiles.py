"""Rules on how convolutions and products fill the GPU: K12 one tile for many shapes, K13 waves, K14 small grids."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean, median, pstdev

from ridgeline import units
from ridgeline.finding import Abstention, Finding
from ridgeline.rules._kernels import (
    COMPILE,
    faster,
    freed_s,
    matrix,
    saving_of,
    unseen,
    verb,
)
from ridgeline.rules._rule import evidence, exposed_of, notable, plural, seconds_of
from ridgeline.step_view import Kernel, Step
from ridgeline.trace import Dims

_SPREAD = 1.0  # sigma over mean of one name from which its kernels do unlike work or do like work unlike well
_UNLIKE = 2.0  # time per FLOP or byte, slowest over fastest
_REGISTERS = 65536  # of an SM, on every GPU since 2012
_REGISTER_STEP = 8  # registers a thread are given out in steps of so many
_SHARED_ANYWHERE = 96 * 1024  # shared memory that an SM has on every GPU since 2018
_SHARED_LARGEST = 228 * 1024
_FEW_WAVES = 8
_WASTE = 0.1  # of a kernel's time, from which a last wave is worth a word
_FULL = 0.9  # of the SMs
# a fixed grid takes tile after tile: its number of blocks says nothing about waves
_PERSISTENT = re.compile(r"nvjet|persistent|stream_?k(?!ernel)", re.IGNORECASE)


def tile_mismatch(step: Step) -> Iterator[Finding | Abstention]:
    """K12: kernels of one name take times that their work does not explain: one tile serves unlike shapes.

    A name whose sigma/mean exceeds 1 is split by grid and shapes first; what counts is time per FLOP (else per
    byte), which must differ more than twofold between them. Holds for convolutions and products; the saving is a bound.
    """
    names: defaultdict[str, list[Kernel]] = defaultdict(list)
    for kernel in matrix(step):
        names[kernel.activity.name].append(kernel)
    wide = [kernels for kernels in names.values() if len(kernels) > 2 and _spread(kernels) > _SPREAD]
    yield from unseen("K12", [kernel for kernels in wide for kernel in kernels], "kernels of one name and many times")
    seconds: dict[int, float] = {}
    for kernels in wide:
        paces = _paces(kernels)
        if not paces or max(paces.values()) < _UNLIKE * min(paces.values()):
            continue
        best = min(paces.values())
        for kernel in kernels:
            if pace := paces.get(_problem(kernel)):
                seconds[kernel.activity.id] = max(kernel.seconds * best / pace, kernel.floor_s or 0.0)
    best_s = freed_s(step, faster(step, seconds))
    # a small shape never gets as good a pace as a large one: half way there is the guess
    now_s = {kernel.activity.id: kernel.seconds for kernel in step.kernels}
    edit = faster(step, {id_: (after_s + now_s[id_]) / 2 for id_, after_s in seconds.items()})
    if not seconds or not notable(step, freed_s(step, edit)):
        return
    found = [kernel for kernel in step.kernels if kernel.activity.id in seconds]
    shapes = set(map(_problem, found))
    yield Finding(
        rule="K12",
        title=f"one tile serves {len(shapes)} shapes: sigma/mean of one kernel's times is {_spread(found):.1f}",
        fix="Choose the tile for each shape by timing candidates, once, and remember the winners.",
        verb=verb(step, training="", inference="ridgeline tune, then ridgeline.compile"),
        saving=saving_of(step, edit, low=0.0, high_s=best_s),
        effort="M",
        confidence="bound",
        wrong_if="the small shapes cannot fill the GPU with any tile",
        evidence=evidence(found),
        edit=edit,
        note="most: every shape at the pace of the best one, never below its roofline; middle: half way there",
    )


def wave_quantisation(step: Step) -> Iterator[Finding]:
    """K13: the last wave of blocks leaves most of the SMs idle.

    Holds for convolutions and products of a few waves whose blocks an SM holds as many of as its registers allow, which
    is exact where shared memory cannot be the tighter limit. Persistent kernels have a fixed grid and are left out.
    """
    waves = {kernel.activity.id: count for kernel in matrix(step) if (count := _waves(step, kernel))}
    wasted = {id_: 1 - count / math.ceil(count) for id_, count in waves.items() if 1 < count < _FEW_WAVES}
    found = [kernel for kernel in step.kernels if wasted.get(kernel.activity.id, 0.0) > _WASTE]
    full = {kernel.activity.id: kernel.seconds * (1 - wasted[kernel.activity.id]) for kernel in found}
    half = {kernel.activity.id: kernel.seconds * (1 - wasted[kernel.activity.id] / 2) for kernel in found}
    edit = faster(step, half)
    if not found or not notable(step, freed_s(step, edit)):
        return
    worst = max(found, key=lambda kernel: kernel.seconds * wasted[kernel.activity.id])
    yield Finding(
        rule="K13",
        title=f"{plural(len(found), 'kernel')} end in an unfilled wave, the worst after {waves[worst.activity.id]:.2f}",
        fix="Change the tile or the batch so that blocks fill whole waves, or split along the summed axis (split-K, "
        "stream-K).",
        verb="",
        saving=saving_of(step, edit, low=0.0, high_s=freed_s(step, faster(step, full))),
        effort="M",
        confidence="bound",
        wrong_if="blocks take unlike times, or the kernel walks a fixed grid",
        evidence=evidence(found),
        edit=edit,
    )


def small_grids(step: Step) -> Iterator[Finding]:
    """K14: convolutions and products with fewer blocks than the GPU has SMs.

    Holds for small batches. Bounded by what waits for what: a chain of small layers stays a chain.
    """
    if step.ceilings is None:
        return
    sms = step.ceilings.sm_count
    filled = {k.activity.id: math.prod(k.activity.grid) / sms for k in matrix(step) if k.activity.grid}
    found = [kernel for kernel in step.kernels if filled.get(kernel.activity.id, 1.0) < _FULL]
    full = {kernel.activity.id: kernel.seconds * filled[kernel.activity.id] for kernel in found}
    half = {kernel.activity.id: (kernel.seconds + full[kernel.activity.id]) / 2 for kernel in found}
    edit = faster(step, half)
    if not found or not notable(step, freed_s(step, edit)):
        return
    blocks = median(math.prod(kernel.activity.grid) for kernel in found)
    yield Finding(
        rule="K14",
        title=f"{plural(len(found), 'kernel')} of fewer blocks ({blocks:.0f} in the median) than the GPU's {sms} SMs",
        fix="Raise the batch, split along the summed axis, run independent branches on streams of their own, or merge "
        "small layers into one kernel.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit, low=0.0, high_s=freed_s(step, faster(step, full))),
        effort="M",
        confidence="bound",
        wrong_if="each kernel waits for the one before and is bound by latency, so that more blocks do not help",
        evidence=evidence(found),
        edit=edit,
        note=f"{units.seconds(exposed_of(found))} in such kernels",
    )


def _spread(kernels: Iterable[Kernel]) -> float:
    """sigma over mean of the kernels' times."""
    seconds = [kernel.seconds for kernel in kernels]
    mean_s = fmean(seconds)
    return pstdev(seconds) / mean_s if mean_s else 0.0


def _problem(kernel: Kernel) -> tuple[Dims, str]:
    return kernel.activity.grid, kernel.shapes


def _paces(kernels: Iterable[Kernel]) -> dict[tuple[Dims, str], float]:
    """Mean seconds a FLOP (else a byte) by grid and shapes, where the work is known."""
    groups: defaultdict[tuple[Dims, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[_problem(kernel)].append(kernel)
    paces = {}
    for problem, alike in groups.items():
        if work := sum(kernel.flops or kernel.bytes or 0.0 for kernel in alike):
            paces[problem] = seconds_of(alike) / work
    return paces


def _waves(step: Step, kernel: Kernel) -> float:
    """Blocks over what the GPU holds at once; 0 where that cannot be told from the trace."""
    activity = kernel.activity
    blocks, threads = math.prod(activity.grid), math.prod(activity.block)
    told = activity.grid and activity.block and min(blocks, threads, activity.registers) > 0
    if not told or _PERSISTENT.search(activity.name):
        return 0.0
    held = -(-activity.registers // _REGISTER_STEP) * _REGISTER_STEP * threads
    resident = max(_REGISTERS // held, 1)
    if 2 * activity.shared_bytes > _SHARED_LARGEST:
        resident = 1
    elif resident > 1 and resident * activity.shared_bytes > _SHARED_ANYWHERE:
        return 0.0  # how much shared memory an SM has decides, and a trace does not say
    # the trace counts blocks an SM as if the whole grid were spread over the GPU at once
    sms = step.ceilings.sm_count if step.ceilings else blocks / (activity.blocks_per_sm or math.inf)
    return blocks / (resident * sms) if sms else 0.0
