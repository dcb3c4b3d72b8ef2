"""What slows a step, ranked by what each fix still saves once those before it are made.

Savings are not added up: each finding's edit is replayed on the step that the findings before it have left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ridgeline.finding import Abstention, Edit, Finding, Saving
from ridgeline.rules import RULES, Rule
from ridgeline.rules._rule import input_bound
from ridgeline.step_edit import both, remaining_s, unprofiled
from ridgeline.step_view import Step

# what ranking makes of the words: a saving that nobody measured is worth less than its number
_TRUST = {"measured": 1.0, "modelled": 0.7, "bound": 0.4, "unknown": 0.1}
_COST = {"S": 1.0, "M": 2.0, "L": 4.0}
_LOADER, _LAUNCHES, _GRAPH, _INCOMPLETE = "H1", "H9", "W1", "W6"
_WAITS = ("H5", "H6", "H7", "H8")
_HELD = 0.5  # part of a finding's saving that earlier ones may take before its note says so

Explanation = tuple[tuple[Finding, ...], tuple[Abstention, ...], tuple[float, ...]]


def explain(step: Step, *, rules: Iterable[Rule] = RULES) -> Explanation:
    """Findings of `rules` on the step, ranked; what could not be looked at; step seconds left after each finding.

    The savings are what is left of each when those before it are made, by their middle estimates; they never add up to
    more than the step. Findings without a saving stand last. Where the trace is incomplete, that is the one finding.
    """
    # the rules judge the step as it runs, without the time that the profiler adds to its gaps
    truth = unprofiled(step)
    said = [word for rule in rules for word in rule(truth)]
    findings = [word for word in said if isinstance(word, Finding)]
    abstentions = [word for word in said if isinstance(word, Abstention)]
    incomplete = tuple(finding for finding in findings if finding.rule == _INCOMPLETE)
    if incomplete:
        return incomplete, (), (_now_s(step, truth),) * len(incomplete)
    if step.wall_s is None:
        reason = "nobody timed the step without the profiler: part of its idle time may be the profiler's own"
        abstentions.append(Abstention("wall", reason))
        findings = [_untimed(finding) for finding in findings]
    late = any(finding.rule == _LAUNCHES for finding in findings)
    findings = list(_after_loader(truth, _once(findings)))
    ranked, left_s = _replayed(step, truth, [finding for finding in findings if finding.saving is not None])
    unpriced = sorted((finding for finding in findings if finding.saving is None), key=_place)
    left_s += [left_s[-1] if left_s else _now_s(step, truth)] * len(unpriced)
    ranked = list(_behind_launches(ranked)) if late else ranked
    return (*ranked, *unpriced), tuple(dict.fromkeys(abstentions)), tuple(left_s)


def _now_s(step: Step, truth: Step) -> float:
    return truth.duration_s if step.wall_s is None else step.wall_s


def _untimed(finding: Finding) -> Finding:
    """The finding where idle time is known from under the profiler alone: an upper bound."""
    if finding.saving is None or not finding.edit.gaps:
        return finding
    confidence = "unknown" if finding.confidence == "unknown" else "bound"
    note = _joined(finding.note, "idle time as traced, profiler included")
    return replace(finding, saving=replace(finding.saving, low_s=0.0), confidence=confidence, note=note)


def _once(findings: list[Finding]) -> list[Finding]:
    """The findings, of which that of late launches leaves its saving to the graph that closes the same gaps."""
    if not any(finding.rule == _GRAPH and finding.saving is not None for finding in findings):
        return findings
    return [
        replace(finding, saving=None, edit=Edit(), within=_GRAPH) if finding.rule == _LAUNCHES else finding
        for finding in findings
    ]


def _after_loader(step: Step, findings: list[Finding]) -> Iterator[Finding]:
    """The findings of a step that its loader sets the pace of: the others bring nothing before it is faster."""
    loader = next((f.saving for f in findings if f.rule == _LOADER and f.saving is not None), None)
    for finding in findings:
        saving = finding.saving
        if saving is None or loader is None or finding.rule == _LOADER or not input_bound(step):
            yield finding
            continue
        mid_s = min(saving.mid_s, loader.mid_s)
        capped = Saving(0.0, mid_s, max(mid_s, min(saving.high_s, loader.high_s)))
        note = _joined(finding.note, "counts only once the loader keeps up (H1)")
        yield replace(finding, saving=capped, confidence=min("bound", finding.confidence, key=_trust), note=note)


def _behind_launches(ranked: list[Finding]) -> Iterator[Finding]:
    """The ranked findings of a step that launches set the pace of: a shorter kernel is not launched any sooner.

    A removed kernel takes its launch along, and behind the fix of the launches (H9, W1) all count in full.
    """
    waiting = True
    for finding in ranked:
        waiting = waiting and finding.rule not in (_LAUNCHES, _GRAPH)
        if finding.saving is None or not finding.edit.seconds or not all(finding.edit.seconds.values()):
            yield finding
        elif waiting:
            note = _joined(finding.note, "counts in full only once launches no longer set the pace (H9)")
            yield replace(finding, saving=replace(finding.saving, low_s=0.0), note=note)
        else:
            yield replace(finding, note=_joined(finding.note, "hidden behind the host's launches today"))


def _replayed(step: Step, truth: Step, findings: list[Finding]) -> tuple[list[Finding], list[float]]:
    """The findings in order, each with what it saves after those before it, and the seconds left after each.

    The order is greedy: next comes the finding that is worth most on the step as edited so far. Scores fall as edits
    add up, so an old score is a bound, and only findings that come to the front are reckoned anew. Waits come before
    what launches cost: a graph holds none, and a host that waits is not ahead.
    """
    # the kernels of a trace may take longer than the step does on the clock: promise nothing beyond the clock
    scale = min(1.0, _now_s(step, truth) / truth.duration_s) if truth.duration_s > 0.0 else 1.0
    loader_first = input_bound(truth)
    whole_s = remaining_s(truth, Edit())
    worth_s = [whole_s - remaining_s(truth, finding.edit) for finding in findings]
    edit, edited_s, left_s = Edit(), whole_s, _now_s(step, truth)
    current = list(findings)
    least = max((_score(finding) for finding in findings if finding.rule in (_LAUNCHES, _GRAPH)), default=0.0)

    def order(finding: Finding) -> tuple[bool, float, bool, tuple[str, int, tuple[int, ...]]]:
        """What ranking sorts by: the loader where it sets the pace, then worth, then the catalogue."""
        wait = finding.rule in _WAITS
        score = max(_score(finding), least) if wait else _score(finding)
        return not (loader_first and finding.rule == _LOADER), -score, not wait, _place(finding)

    waiting = [(order(finding), index, -1) for index, finding in enumerate(findings)]
    heapq.heapify(waiting)
    ranked: list[Finding] = []
    remaining: list[float] = []
    while waiting:
        _, index, made = heapq.heappop(waiting)  # `made`: how many findings were made when it was reckoned
        joint = both(edit, findings[index].edit)
        joint_s = remaining_s(truth, joint)
        if made < len(ranked):
            current[index] = _reckoned(findings[index], edited_s - joint_s, worth_s[index], scale=scale, left_s=left_s)
            heapq.heappush(waiting, (order(current[index]), index, len(ranked)))
            continue
        edit, edited_s = joint, joint_s
        left_s = max(0.0, left_s - _mid_s(current[index]))
        ranked.append(current[index])
        remaining.append(left_s)
    return ranked, remaining


def _reckoned(finding: Finding, freed_s: float, worth_s: float, *, scale: float, left_s: float) -> Finding:
    """The finding with the part of its saving that is left, where its edit frees `freed_s` instead of `worth_s`."""
    saving = finding.saving
    assert saving is not None
    share = min(1.0, max(0.0, freed_s) / worth_s) if worth_s > 0.0 else 0.0
    mid_s = scale * min(saving.mid_s * share, max(0.0, freed_s))
    low_s = min(scale * saving.low_s * share, mid_s)
    high_s = max(mid_s, min(scale * saving.high_s * share, left_s))
    gone = "most of this is freed by the findings before it already" if 0.0 < share < _HELD else ""
    return replace(finding, saving=Saving(low_s, mid_s, high_s), note=_joined(finding.note, gone))


def _score(finding: Finding) -> float:
    """mid x confidence / effort"""
    return _mid_s(finding) * _trust(finding.confidence) / _COST[finding.effort]


def _place(finding: Finding) -> tuple[str, int, tuple[int, ...]]:
    """The rule's place in the catalogue: H2 before H10, H before L."""
    return finding.rule[:1], int(finding.rule[1:]), finding.evidence


def _mid_s(finding: Finding) -> float:
    return finding.saving.mid_s if finding.saving is not None else 0.0


def _trust(confidence: str) -> float:
    return _TRUST[confidence]


def _joined(note: str, more: str) -> str:
    return "; ".join(part for part in (note, more) if part)
