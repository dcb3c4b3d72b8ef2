"""H5-H8: the host waits for the GPU within the step, and the GPU then waits for the host.

The wait itself is mostly real work of the GPU. What removing it saves is replayed (`_pace`): the host goes on
launching, and the idle time behind the wait closes as far as its launches are queued by then. Where no replay fits, it
is the bubble, and at most the gaps that follow until launches are queued again. A host that is late anyway is late
without the wait too: such a wait saves little now, and is told because it forbids a graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline import units
from ridgeline.finding import Abstention, Edit, Finding, Saving
from ridgeline.rules._pace import Pace, pace_of
from ridgeline.rules._rule import (
    LATE_S,
    LAUNCH_CAUSES,
    MOST_EVIDENCE,
    bubble_of,
    kernel_after,
    lead_s,
    plural,
    saving,
)
from ridgeline.step_view import Gap, Step, Sync

# operators that read a value on the host because the program asked for it
_READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"}
# of a step: less than of other findings, for a wait also forbids a graph and grows with a slower host
_NOTABLE_WAIT = 0.001
_SURE = 0.6  # part of a bubble that goes with the wait for certain
_CHECKS_GRADIENTS = "non_finite_check_and_unscale"  # of the gradient scaler
_FIRST_CLIP_WITHOUT_SYNC = (1, 10)  # of PyTorch


def item_syncs(step: Step) -> Iterable[Finding | Abstention]:
    """H5: a value is read on the host in the middle of a step (`loss.item()`, `if tensor:`, print).

    Holds where the value is not needed for the rest of the step.
    """
    yield from _by_place(
        step,
        _Advice(
            rule="H5",
            what="reads a value on the host",
            fix="Accumulate on the GPU and read the value every so many steps, after the step's last launch.",
            verb="ridgeline.compile_step" if step.trained else "ridgeline.preflight",
            effort="S",
            wrong_if="the value steers the rest of the step, or the host is late with its launches anyway",
        ),
    )


def hidden_syncs(step: Step) -> Iterable[Finding | Abstention]:
    """H6: an operator waits for the GPU unasked: mask indexing, nonzero, unique, NMS, copies of host values.

    Holds where a fixed-size form of the operator exists.
    """
    yield from _by_place(
        step,
        _Advice(
            rule="H6",
            what="makes the host wait",
            fix="Use torch.where, a multiplied mask or a fixed number of results; make constants once, on the GPU.",
            verb="ridgeline.preflight",
            effort="M",
            wrong_if="the shape of the result depends on the data: without restructuring nothing is saved",
        ),
    )


def clip_syncs(step: Step) -> Iterable[Finding | Abstention]:
    """H7: clipping the gradients reads their norm on the host, between backward and optimizer.

    Holds for `error_if_nonfinite=True`, a norm that the program prints, and PyTorch before 1.10, which always read it.
    """
    version = _version(step.settings.get("torch", ""))
    old = version is not None and version < _FIRST_CLIP_WITHOUT_SYNC
    update = "Update PyTorch: since 1.10 clip_grad_norm_ does not read the norm."
    keep = "Call clip_grad_norm_ with error_if_nonfinite=False and foreach=True, and keep the norm on the GPU."
    yield from _by_place(
        step,
        _Advice(
            rule="H7",
            what="reads the gradients' norm on the host",
            fix=update if old else keep,
            verb="ridgeline.compile_step(…, clip=…)",
            effort="S",
            wrong_if="training must stop at the first gradient that is not finite",
        ),
    )


def scaler_syncs(step: Step) -> Iterable[Finding | Abstention]:
    """H8: the gradient scaler asks on the host whether a gradient overflowed.

    Holds where bf16 has the range that training needs, or the optimizer takes the scaler's answer on the GPU.
    """
    yield from _by_place(
        step,
        _Advice(
            rule="H8",
            what="asks on the host whether a gradient overflowed",
            fix="Train in bf16, which needs no scaler, or let a fused optimizer take found_inf on the GPU.",
            verb="ridgeline.compile_step",
            effort="S",
            wrong_if="the model needs the precision of fp16",
        ),
    )


def kind_of(step: Step, sync: Sync) -> str:
    """The rule that speaks about this wait: "H5" to "H8"."""
    where = f"{sync.under} {sync.call.name if sync.call else ''} {sync.source}"
    if "clip_grad" in where:
        return "H7"
    if "GradScaler" in where or _in_scaler(step, sync):
        return "H8"
    return "H5" if sync.call is not None and sync.call.name in _READS else "H6"


@dataclass(frozen=True)
class _Advice:
    rule: str
    what: str
    fix: str
    verb: str
    effort: str
    wrong_if: str


def _by_place(step: Step, advice: _Advice) -> Iterable[Finding]:
    """One finding for each place in the program whose waits cost something, or would if the host were not late."""
    places: dict[str, list[Sync]] = {}
    for sync in step.syncs:
        if kind_of(step, sync) == advice.rule and not _ends_step(step, sync):
            places.setdefault(_place(sync), []).append(sync)
    pace = pace_of(step) if places else None
    for syncs in places.values():
        cost = _replayed(step, pace, syncs) if pace else _bubbles(step, syncs)
        if cost.saving.high_s + cost.hidden_s >= _NOTABLE_WAIT * step.duration_s:
            yield _finding(step, advice, syncs, cost)


@dataclass(frozen=True)
class _Cost:
    saving: Saving
    edit: Edit
    hidden_s: float  # what the GPU would idle behind the waits if they found it at work: the host is late now
    note: str


def _replayed(step: Step, pace: Pace, syncs: list[Sync]) -> _Cost:
    edit, saved_s = pace.without(syncs)
    bubble_s, waited_s = sum(sync.bubble_s for sync in syncs), sum(sync.waited_s for sync in syncs)
    hidden_s = sum(pace.catch_up_s(sync) for sync in syncs if not sync.bubble_s)
    # the least: work of the host that does not fit beside the GPU's; the bubble itself is certain
    least_s = max(_SURE * bubble_s, saved_s / 2)
    note = "the launches replayed without the wait"
    note += f", whose {units.seconds(waited_s)} are mostly real work of the GPU" if bubble_s else ""
    return _Cost(saving(least_s, saved_s, saved_s + bubble_s, cap_s=step.idle_s), edit, hidden_s, note)


def _bubbles(step: Step, syncs: list[Sync]) -> _Cost:
    lost: dict[int, float] = {}  # by index of the gap: several waits may stand before one
    for sync in syncs:
        index = bubble_of(step, sync)
        if index is not None:
            # a GPU that was idle before the wait has a late host: what the host loses is then the wait itself
            lost_s = sync.bubble_s or sync.waited_s
            lost[index] = min(lost.get(index, 0.0) + lost_s, step.gaps[index].duration_s)
    lost_s = sum(lost.values())
    # recorded waits tell exactly when the host went on; the runtime call's end is later than that
    low, mid = (_SURE, 0.9) if "cuda_sync_events" in step.options else (0.3, 0.8)
    waited_s = sum(sync.waited_s for sync in syncs)
    return _Cost(
        saving=saving(low * lost_s, mid * lost_s, lost_s + _refill_s(step, lost), cap_s=step.idle_s),
        edit=Edit(gaps={index: step.gaps[index].duration_s - mid * lost[index] for index in lost}),
        hidden_s=0.0,
        note=f"the bubble after the wait, not the {units.seconds(waited_s)} of waiting; at most also the gaps until "
        "launches are queued again",
    )


def _finding(step: Step, advice: _Advice, syncs: list[Sync], cost: _Cost) -> Finding:
    largest = sorted(syncs, key=lambda sync: (-sync.bubble_s, -sync.waited_s, sync.launch.id))
    first = largest[0]
    name = first.call.name.replace("_local_scalar_dense", "item") if first.call else first.launch.name
    place = f" in {first.source or first.under}" if first.source or first.under else ""
    bubble_s = sum(sync.bubble_s for sync in syncs)
    then, note = f"the GPU then idles {units.seconds(bubble_s)}", cost.note
    if not bubble_s and cost.saving.mid_s < _NOTABLE_WAIT * step.duration_s:
        then = "hidden today, for the GPU is idle already"
        note += f"; were the GPU at work by then, it would idle {units.seconds(cost.hidden_s)}" if cost.hidden_s else ""
    elif not bubble_s:
        then = "the GPU is idle already under the profiler, and at work without it"
    return Finding(
        rule=advice.rule,
        title=f"{name}{place} {advice.what}, {plural(len(syncs), 'time')} a step: {then}",
        fix=advice.fix if first.source else f"{advice.fix} A profile with stacks names the line.",
        verb=advice.verb,
        saving=cost.saving,
        effort=advice.effort,
        confidence="modelled",
        wrong_if=advice.wrong_if,
        evidence=tuple(sync.launch.id for sync in largest[:MOST_EVIDENCE]),
        source=first.source,
        edit=cost.edit,
        note=note,
    )


def _refill_s(step: Step, bubbles: Iterable[int]) -> float:
    """Idle time behind these gaps until the host has launches queued again, or waits again."""
    leads = lead_s(step)
    gaps_before: dict[int, list[Gap]] = {}  # one stretch of idle time may be several gaps, each with its cause
    position = {kernel.activity.id: index for index, kernel in enumerate(step.kernels)}
    for gap in step.gaps:
        after = kernel_after(step, gap)
        if after is not None:
            gaps_before.setdefault(after.activity.id, []).append(gap)
    idle_s = 0.0
    for bubble in bubbles:
        first = kernel_after(step, step.gaps[bubble])
        for kernel in step.kernels[position[first.activity.id] + 1 :] if first else ():
            gaps = gaps_before.get(kernel.activity.id, [])
            if leads.get(kernel.activity.id, LATE_S) >= LATE_S or any(gap.cause not in LAUNCH_CAUSES for gap in gaps):
                break
            idle_s += sum(gap.duration_s for gap in gaps)
    return idle_s


def _place(sync: Sync) -> str:
    return sync.source or sync.under or (sync.call.name if sync.call else sync.launch.name)


def _ends_step(step: Step, sync: Sync) -> bool:
    """Whether it is a bare synchronisation after the last kernel, by which a loop takes its time."""
    index = bubble_of(step, sync)
    return sync.call is None and (index is None or kernel_after(step, step.gaps[index]) is None)


def _in_scaler(step: Step, sync: Sync) -> bool:
    """Whether the wait is a read between the scaler's check of the gradients and its update."""
    if sync.call is None or sync.call.name not in _READS:
        return False
    checks = [call.start_s for call in step.calls if _CHECKS_GRADIENTS in call.name]
    updates = [call.start_s for call in step.calls if call.name == "aten::_amp_update_scale_"]
    after_check = any(start_s <= sync.call.start_s for start_s in checks)
    return after_check and any(sync.call.start_s <= start_s for start_s in updates)


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
