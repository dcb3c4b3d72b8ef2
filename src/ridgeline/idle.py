"""Why the GPU stood idle, and where the host waited for it.

A gap between GPU work is cut where its cause changes. In order of precedence a piece is due to
compile   the host compiled or loaded kernels
loader    the host was inside the loader's next()
copy      the host stood in a blocking copy to the GPU
sync      the host had waited until the GPU ran dry, so nothing was queued
launch    the next kernel's launch: it came late, or the GPU took its time over one already queued
unknown   the trace has no launch of what came next
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ridgeline.host_view import HostView
from ridgeline.overlap import between, cut, length, union
from ridgeline.step_span import Span
from ridgeline.step_view import Gap, Sync
from ridgeline.trace import Activity, Call, Launch, Range, Trace

LOADER = re.compile(r"DataLoader|data_?load|load_(batch|data)|^data$|^fetch|/dataloader\.py\(\d+\): __next__", re.I)
_COMPILE = re.compile(
    r"Module Loading|cuModuleLoad|cuLibraryLoad|cuLinkC|cudaLibraryLoad|compile_inner|compile_fx|"
    r"triton/compiler|dynamo_timed|TritonBundler|OutputGraph",
    re.I,
)
_SYNCS = re.compile(r"(cuda|cu)(Device|Stream|Event|Ctx|Thread)Synchronize(_\w+)?")
_COPIES = re.compile(r"(cudaMemcpy|cuMemcpy)\w*")
_SHORTEST_S = 1e-6  # no piece of a gap is made shorter than the time a kernel takes to follow another
_BLOCKING_S = 20e-6  # an asynchronous copy that takes the host longer stages pageable memory
_ONE_WAIT_S = 20e-6  # a copy to the host and the synchronisation right after it are one wait


Event = TypeVar("Event", Range, Call, Launch)


@dataclass(frozen=True)
class Wait:
    """The host stood still from start_s to end_s for the GPU; `launch` is the synchronisation or the copy."""

    launch: Launch
    start_s: float
    end_s: float
    waited_s: float


@dataclass(frozen=True)
class _Claim:
    """A stretch of host time that explains what idle time falls into it."""

    cause: str
    start_s: float
    end_s: float
    evidence: int


def gaps_of(
    span: Span, trace: Trace, activities: Sequence[Activity], launches: Mapping[int, Launch], waits: Sequence[Wait]
) -> tuple[Gap, ...]:
    """The idle pieces of a step with their causes, in order. `activities` are all of its GPU's, by start."""
    covered = union((activity.start_s, activity.end_s) for activity in span.activities)
    claims = _claims(trace, span)
    starts = [activity.start_s for activity in activities]
    ends = _Ends(activities)
    gaps: list[Gap] = []
    for start_s, end_s in between(covered, span.start_s, span.end_s):
        place = bisect_left(starts, end_s)
        follower = launches.get(activities[place].correlation) if place < len(activities) else None
        last_kernel_s = ends.last_kernel_before(start_s)
        own = [claim for claim in claims if claim.start_s < end_s and claim.end_s > start_s]
        own += [
            _Claim("sync", start_s, end_s, wait.launch.id)
            for wait in waits
            # a wait that began when the GPU had run dry already made nobody late
            if start_s <= wait.end_s < end_s and wait.start_s < last_kernel_s
        ]
        rest = Gap(start_s, end_s - start_s, "launch", (follower.id,)) if follower else None
        gaps += _pieces(own, rest or Gap(start_s, end_s - start_s, "unknown"))
    return tuple(gaps)


def waits_of(trace: Trace, activities: Sequence[Activity], span: Span) -> list[Wait]:
    """The waits that ended within a step: synchronisations, and copies to pageable host memory, which block."""
    edges = {edge.correlation: edge for edge in trace.syncs if edge.kind != "Stream Wait Event"}
    to_host = {a.correlation: a for a in activities if a.kind == "memcpy" and "DtoH" in a.name and a.correlation}
    waits: list[Wait] = []
    for launch in trace.launches:
        if not span.start_s < launch.end_s <= span.end_s:
            continue
        copy = to_host.get(launch.correlation)
        blocks = copy is not None and _COPIES.fullmatch(launch.name) and launch.end_s >= copy.end_s
        if not (blocks or _SYNCS.fullmatch(launch.name)):
            continue
        edge = edges.get(launch.correlation)
        start_s, waited_s = launch.start_s, edge.duration_s if edge else launch.duration_s
        before = waits[-1] if waits else None
        after_copy = (
            before is not None and before.launch.thread == launch.thread and before.launch.correlation in to_host
        )
        if before and after_copy and 0 <= start_s - before.end_s < _ONE_WAIT_S:
            start_s, waited_s = before.start_s, before.waited_s + waited_s
            waits.pop()
        waits.append(Wait(launch, start_s, launch.end_s, waited_s))
    return waits


def syncs_of(waits: Iterable[Wait], gaps: Sequence[Gap], host: HostView) -> tuple[Sync, ...]:
    """Where the host waited, each with the bubble that it left behind on the GPU."""
    syncs = []
    for wait in waits:
        caused = [gap for gap in gaps if gap.cause == "sync" and wait.launch.id in gap.evidence]
        bubble_s = sum(min(gap.duration_s, max(gap.start_s + gap.duration_s - wait.end_s, 0.0)) for gap in caused)
        chain = host.chain(wait.launch)
        thread, moment_s = wait.launch.thread, wait.launch.start_s
        syncs.append(
            Sync(
                launch=wait.launch,
                call=_asked_for(chain),
                source=host.source(thread, moment_s),
                waited_s=wait.waited_s,
                bubble_s=bubble_s,
                under=host.under(thread, moment_s),
            )
        )
    return tuple(syncs)


def _asked_for(chain: Sequence[Call]) -> Call | None:
    """The outermost operator, which stands in the program: "aten::item", not what it calls, nor autograd's node."""
    operators = [call for call in chain if "::" in call.name and not call.name.startswith("autograd::")]
    return (operators or list(chain) or [None])[-1]


def loader_s(trace: Trace, window: tuple[float, float]) -> float:
    """Host time inside the loader's next() within a window."""
    return length(cut(window, union((r.start_s, r.end_s) for r in _loads((*trace.ranges, *trace.frames)))))


def _loads(events: Iterable[Range]) -> list[Range]:
    return [event for event in events if LOADER.search(event.name) and not _COMPILE.search(event.name)]


def _claims(trace: Trace, span: Span) -> list[_Claim]:
    """What the host did near the step that keeps a GPU waiting, by precedence."""

    def near(events: Iterable[Event]) -> list[Event]:
        return [event for event in events if event.start_s < span.end_s and event.end_s > span.start_s]

    ranges, launches = near((*trace.ranges, *trace.frames)), near(trace.launches)
    named = (*ranges, *launches, *near(trace.calls))
    compiles = [_Claim("compile", e.start_s, e.end_s, e.id) for e in named if _COMPILE.search(e.name)]
    loads = [_Claim("loader", r.start_s, r.end_s, r.id) for r in _loads(ranges)]
    copies = [
        _Claim("copy", launch.start_s, launch.end_s, launch.id)
        for launch in launches
        if launch.duration_s >= _BLOCKING_S and _COPIES.fullmatch(launch.name)
    ]
    return [*compiles, *loads, *copies]


def _pieces(claims: Sequence[_Claim], gap: Gap) -> list[Gap]:
    """The gap cut up among the claims; what nobody claims keeps the gap's own cause."""
    left = [(gap.start_s, gap.start_s + gap.duration_s)]
    pieces: list[Gap] = []
    for claim in claims:
        still: list[tuple[float, float]] = []
        for start_s, end_s in left:
            first_s, last_s = max(start_s, claim.start_s), min(end_s, claim.end_s)
            # a rest too short to be a piece of its own goes with the claim
            first_s = start_s if first_s - start_s < _SHORTEST_S else first_s
            last_s = end_s if end_s - last_s < _SHORTEST_S else last_s
            if last_s - first_s < min(_SHORTEST_S, end_s - start_s):
                still.append((start_s, end_s))
                continue
            pieces.append(Gap(first_s, last_s - first_s, claim.cause, (claim.evidence,)))
            still += [part for part in ((start_s, first_s), (last_s, end_s)) if part[1] > part[0]]
        left = still
    pieces += [Gap(start_s, end_s - start_s, gap.cause, gap.evidence) for start_s, end_s in left]
    return _joined(sorted(pieces, key=lambda piece: piece.start_s))


def _joined(pieces: Sequence[Gap]) -> list[Gap]:
    """Neighbours of one cause as one gap."""
    joined: list[Gap] = []
    for piece in pieces:
        if joined and joined[-1].cause == piece.cause:
            last = joined.pop()
            evidence = tuple(dict.fromkeys((*last.evidence, *piece.evidence)))
            piece = Gap(last.start_s, last.duration_s + piece.duration_s, piece.cause, evidence)
        joined.append(piece)
    return joined


class _Ends:
    """When kernels ended."""

    def __init__(self, activities: Sequence[Activity]) -> None:
        self._ends = sorted(activity.end_s for activity in activities if activity.kind == "kernel")

    def last_kernel_before(self, moment_s: float) -> float:
        """When the last kernel ended that had ended at a moment; -inf where none had."""
        place = bisect_right(self._ends, moment_s + 1e-12)
        return self._ends[place - 1] if place else float("-inf")
