"""A Kineto trace (torch.profiler's .json or .json.gz) as a `Trace`.

What the fields mean: libkineto's output_json.cpp and CuptiActivity.cpp. Its times are microseconds, to three decimals.
"""

from __future__ import annotations

import json
import math
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ridgeline import trace_records
from ridgeline.trace import LONGEST_EVENT_S, Device, Dims, Trace
from ridgeline.trace_records import Row
from ridgeline.trace_steps import windows
from ridgeline.trace_stream import Progress, read_events

CALLS_KEPT = 100_000  # operators, and twice as many Python frames: 18 steps of the DDPM baseline
_LONGEST_EVENT_US = LONGEST_EVENT_S * 1e6
LONGEST_TRACE_US = 86400e6  # records that missed the profiler's window come with times of another clock

_OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")
_NOT_METADATA = {*_OPTIONS, "schemaVersion", "deviceProperties", "displayTimeUnit", "traceEvents", "traceName"}
_OF_FIELDS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # a trace may be any JSON

_start_s = attrgetter("start_s")

Json = dict[str, Any]


def read_kineto(path: Path, *, progress: Progress | None = None) -> Trace:
    """Read the trace at `path`. Raises UsageError where the file is no whole trace; it may hold no kernels.

    Of a trace with more than CALLS_KEPT operators all GPU work, launches and ranges are kept, and the operators and
    frames of its first steps only: `metadata` tells until when ("calls_until_s") and how many steps that is.
    """
    rows = _Rows()
    file = read_events(path, rows.take, glance=rows.glance, progress=progress)
    return _trace(path, rows, file)


def _kernel(args: Json) -> Row:
    blocks_per_sm = float(args.get("blocks per SM", 0))  # "inf" where Kineto does not know the GPU
    return (
        "kernel",
        int(args.get("device", 0)),
        int(args.get("stream", 0)),
        _dims(args.get("grid", ())),
        _dims(args.get("block", ())),
        int(args.get("registers per thread", 0)),
        int(args.get("shared memory", 0)),
        blocks_per_sm if math.isfinite(blocks_per_sm) else 0.0,
        0,
        int(args.get("graph node id", 0)) or None,  # 0 outside graphs
        _mark(args),
    )


def _memcpy(args: Json) -> Row:
    node = int(args.get("graph node id", 0)) or None
    place = (int(args.get("device", 0)), int(args.get("stream", 0)))
    return "memcpy", *place, (), (), 0, 0, 0.0, int(args.get("bytes", 0)), node, _mark(args)


def _memset(args: Json) -> Row:
    return "memset", *_memcpy(args)[1:]


def _mark(args: Json) -> str:
    """What `mark_kernels` of torch.cuda._graph_annotations was told, if that was a text."""
    return sys.intern(str(args.get("str") or args.get("annotation") or ""))


def _operator(args: Json) -> Row:
    """Shapes, types, strides, other arguments and shapes within lists, as `Call` has them."""
    if "Input Dims" not in args:
        return ()
    dims, strides = args["Input Dims"], args.get("Input Strides", ())
    return (
        tuple([() if _is_list(d) else _dims(d) for d in dims]),
        tuple([sys.intern(kind) for kind in args.get("Input type", ())]),
        tuple([() if _is_list(d) else _dims(d) for d in strides]),
        tuple([str(value) for value in args.get("Concrete Inputs", ())]),
        tuple([tuple([_dims(one) for one in d]) for d in dims if _is_list(d)]),
    )


def _dims(values: Iterable[Any]) -> Dims:
    return tuple([int(value) for value in values])


def _is_list(dims: Sequence[object]) -> bool:
    """Is this the shapes of a list of tensors, instead of one tensor's?"""
    return len(dims) > 0 and isinstance(dims[0], list)


def _wait(args: Json) -> Row:
    return (sys.intern(args.get("cuda_sync_kind", "unknown")),)


def _nothing(_: Json) -> Row:
    return ()


Cut = tuple[str, tuple[int, ...]]  # of the text of arguments: what recurs in every step, and what counts up


def _cut_gpu(args: str, _: str, __: str, ___: str) -> Cut:
    head, _, rest = args.partition('"correlation":')
    correlation, _, tail = rest.partition(",")
    return head + tail, (int(correlation or 0),)


def _cut_launch(args: str, external_id: str, _: str, __: str) -> Cut:
    correlation, _, _ = args.partition('"correlation":')[2].partition(",")
    usual = external_id or "External id" not in args
    return "" if usual else args, (int(correlation or 0), int(external_id or 0))


def _cut_operator(args: str, external_id: str, sequence: str, forward_thread: str) -> Cut:
    head, counted, rest = args.rpartition('"Ev Idx":')
    tail = rest.partition(",")[2] if counted else rest
    return head + tail, (int(external_id or 0), int(sequence or -1), int(forward_thread or 0))


def _cut_nothing(_: str, __: str, ___: str, ____: str) -> Cut:
    return "", ()


@dataclass(frozen=True)
class _Category:
    """How to read the events of one category."""

    cut: Callable[[str, str, str, str], Cut]  # of the text after the counters at its head, and of those counters
    fixed: Callable[[Json], Row]  # what recurs, parsed
    counters: tuple[tuple[str, int], ...] = ()  # by name, and what stands for a missing one


_JOIN = (("correlation", 0),)
_LAUNCH = _Category(_cut_launch, _nothing, (*_JOIN, ("External id", 0)))
_BARE = _Category(_cut_nothing, _nothing)
_CATEGORIES = {
    "kernel": _Category(_cut_gpu, _kernel, _JOIN),
    "gpu_memcpy": _Category(_cut_gpu, _memcpy, _JOIN),
    "gpu_memset": _Category(_cut_gpu, _memset, _JOIN),
    "cuda_runtime": _LAUNCH,
    "cuda_driver": _LAUNCH,
    "cpu_op": _Category(_cut_operator, _operator, (("External id", 0), ("Sequence number", -1), ("Fwd thread id", 0))),
    "user_annotation": _BARE,
    "python_function": _BARE,
    "cuda_sync": _Category(_cut_gpu, _wait, _JOIN),
}
_BOUNDS = {"cpu_op": CALLS_KEPT, "python_function": 2 * CALLS_KEPT}
_FIXED_KEPT = 50_000  # different arguments to remember: more are there only where something counts up in them

# An event with a duration as Kineto writes it, of a category above; or the head of any other. It excludes one character
# at a time and gives none back ("++"), which the engine runs fastest. A name goes on after a quote that a backslash
# precedes. Arguments go on after a brace unless `}},{"ph"` follows, which cannot stand inside a JSON string; both pass
# nine at most, or each event that lacks its end would be searched to the end of the block.
_NUMBER = r":\s*+(\d++)(?:,\s*+|\s*+(?=\}))"
_FUNCTION = r'(?:"Record function id":\s*+\d++(?:,\s*+|\s*+(?=\})))?'
_END = r'\}\s*+\}(?=\s*+(?:,\s*+\{\s*+"(?:ph|name)"|\Z))'
_EVENT = re.compile(
    r'"ph":\s*+"(?:X",\s*+"cat":\s*+"(?:(\w++)",\s*+"name":\s*+"([^"]*+(?:(?<=\\)"[^"]*+){0,9}+)",'
    r'\s*+"pid":[^,]++,\s*+"tid":([^,]++),\s*+"ts":([^,]++),\s*+"dur":([^,]++),\s*+"args":\s*+\{\s*+'
    rf'(?:"External id"{_NUMBER})?{_FUNCTION}(?:"Sequence number"{_NUMBER}"Fwd thread id"{_NUMBER}{_FUNCTION})?'
    rf"([^}}]*+(?:(?!{_END})\}}[^}}]*+){{0,9}}+){_END}"
    rf'|(?!(?:{"|".join(_CATEGORIES)})")\w++")|[^X]")'
)


class _Numbers(dict[str, int]):
    """Integers by their text, one of each: a trace has few threads, and many events of each."""

    def __missing__(self, text: str) -> int:
        self[text] = number = int(text)
        return number


class _Rows:
    """What was read so far, as tuples: a record's time counts from the first event, which is known last."""

    def __init__(self) -> None:
        self.of: dict[str, list[Row]] = {category: [] for category in _CATEGORIES}
        self.until_us = dict.fromkeys(_CATEGORIES, math.inf)  # from here on none is kept
        self.malformed = self.clamped = self.dropped = 0
        self.fixed: dict[str, dict[str, Row]] = {  # by its text
            category: {"": kind.fixed({})} for category, kind in _CATEGORIES.items()
        }
        self.known: dict[Row, Row] = {}  # one copy of each
        self.threads = _Numbers()

    def glance(self, first: int, text: str) -> int | None:
        """Take events from their text; None, and none taken, if some are not as Kineto writes them."""
        events = _EVENT.findall(text)
        if len(events) != text.count('"ph"'):
            return None
        # what the loop needs of each category at hand: it runs once an event
        at_hand = {
            category: (kind.cut, self.fixed[category], self.until_us[category], self.of[category].append)
            for category, kind in _CATEGORIES.items()
        }
        intern, infinity, longest_us, threads = sys.intern, math.inf, _LONGEST_EVENT_US, self.threads
        for number, found in enumerate(events, first):
            category, name, thread, start, duration, external_id, sequence, forward_thread, args = found
            if category not in at_hand:
                continue
            cut, texts, until_us, append = at_hand[category]
            try:
                start_us = float(start)
                if not -infinity < start_us < until_us:  # spares most of the work on most of a large trace
                    self.leave_out(start_us, category)
                    continue
                recurring, counters = cut(args, external_id, sequence, forward_thread)
                fixed = texts.get(recurring)
                if fixed is None:
                    fixed, counters = self.learn(category, recurring, counters)
                duration_us = float(duration)
                if not 0.0 <= duration_us <= longest_us:
                    duration_us = self.sane_us(duration_us)
                if "\\" in name:
                    name = json.loads(f'"{name}"')
                append((start_us, duration_us, number, intern(name), threads[thread], fixed, *counters))
            except _OF_FIELDS:
                self.malformed += 1
        self.keep_bounds()
        return len(events)

    def learn(self, category: str, recurring: str, counters: Sequence[int]) -> tuple[Row, Sequence[int]]:
        """Parse arguments that were not seen before; counters that stand elsewhere than usual are among them."""
        kind = _CATEGORIES[category]
        values = json.loads("{" + recurring.rstrip(", \t\r\n") + "}")
        counters = [int(values.get(key, usual)) for (key, _), usual in zip(kind.counters, counters, strict=True)]
        fixed = kind.fixed(values)
        if len(self.fixed[category]) >= _FIXED_KEPT:
            self.fixed[category].clear()
        fixed = self.known.setdefault(fixed, fixed)
        if not any(key in values for key, _ in kind.counters):
            self.fixed[category][recurring] = fixed
        return fixed, counters

    def take(self, first: int, events: Sequence[Any]) -> None:
        """Take events that were parsed."""
        for number, event in enumerate(events, first):
            try:
                category = event.get("cat")
                kind = _CATEGORIES.get(category)
                if kind is None or event["ph"] != "X":
                    continue
                args = event.get("args", {})
                fixed = kind.fixed(args)
                counters = [int(args.get(key, missing)) for key, missing in kind.counters]
                fixed = self.known.setdefault(fixed, fixed)
                start_us, duration_us = float(event["ts"]), self.sane_us(float(event.get("dur", 0)))
                if not -math.inf < start_us < self.until_us[category]:
                    self.leave_out(start_us, category)
                    continue
                row = (start_us, duration_us, number, sys.intern(event["name"]), int(event["tid"]), fixed, *counters)
                self.of[category].append(row)
            except _OF_FIELDS:
                self.malformed += 1
        self.keep_bounds()

    def sane_us(self, duration_us: float) -> float:
        if 0 <= duration_us <= _LONGEST_EVENT_US:
            return duration_us
        self.clamped += 1
        return 0.0

    def leave_out(self, start_us: float, category: str) -> None:
        """Count an event whose start is beyond the bound, or no time."""
        if self.until_us[category] <= start_us < math.inf:
            self.dropped += 1
        else:
            self.malformed += 1

    def keep_bounds(self) -> None:
        """Of what is bounded keep what starts first."""
        if len(self.known) > _FIXED_KEPT:
            self.known.clear()
        for category, bound in _BOUNDS.items():
            rows = self.of[category]
            if len(rows) > 2 * bound:
                rows.sort()
                self.until_us[category] = rows[bound][0]
                self.dropped += len(rows) - bound
                del rows[bound:]


def _trace(path: Path, rows: _Rows, file: Json) -> Trace:
    of = rows.of
    activities = of["kernel"] + of["gpu_memcpy"] + of["gpu_memset"]
    launches = of["cuda_runtime"] + of["cuda_driver"]
    calls, frames, ranges, syncs = of["cpu_op"], of["python_function"], of["user_annotation"], of["cuda_sync"]
    lists = (activities, launches, calls, ranges, frames, syncs)
    of.clear()
    for group in lists:
        group.sort()
    rows.malformed += _drop_strays(lists)
    first_us = min((group[0][0] for group in lists if group), default=0.0)
    counts = {"malformed_events": rows.malformed, "clamped_durations": rows.clamped, "dropped_calls": rows.dropped}
    flags = {"cuda_sync_events": syncs, "with_stack": frames}
    trace = Trace(
        path=str(path),
        source="kineto",
        devices=_devices(file),
        activities=trace_records.activities(activities, first_us),
        calls=trace_records.calls(calls, first_us),
        launches=trace_records.launches(launches, first_us),
        ranges=trace_records.ranges(ranges, first_us),
        frames=trace_records.ranges(frames, first_us),
        syncs=trace_records.syncs(syncs, first_us),
        options=frozenset([*filter(file.get, _OPTIONS), *filter(flags.get, flags)]),
        rank=_rank(file),
        metadata=_metadata(file) | {name: str(count) for name, count in counts.items() if count},
    )
    return _bound_calls(rows, trace, first_us)


def _drop_strays(lists: Iterable[list[Row]]) -> int:
    """Remove events more than a day away from the GPU's; returns how many."""
    middle_us = next((group[len(group) // 2][0] for group in lists if group), 0.0)
    before = sum(map(len, lists))
    for group in lists:
        begin = bisect_left(group, (middle_us - LONGEST_TRACE_US,))
        end = bisect_right(group, (middle_us + LONGEST_TRACE_US,))
        del group[end:], group[:begin]
    return before - sum(map(len, lists))


def _bound_calls(rows: _Rows, trace: Trace, first_us: float) -> Trace:
    """Where operators had to be dropped: keep those of whole steps, and say which steps they are."""
    until_us = min(rows.until_us.values())
    if until_us == math.inf:
        return trace
    until_s = (until_us - first_us) / 1e6
    steps = windows(trace.ranges, trace.calls)
    whole = [end_s for _, end_s in steps if end_s <= until_s]
    until_s = max(whole, default=until_s)
    calls, frames = (group[: bisect_left(group, until_s, key=_start_s)] for group in (trace.calls, trace.frames))
    dropped = rows.dropped + len(trace.calls) - len(calls) + len(trace.frames) - len(frames)
    told = {"calls_until_s": repr(until_s), "steps_with_calls": f"{len(whole)} of {len(steps)}"}
    return replace(
        trace, calls=calls, frames=frames, metadata={**trace.metadata, **told, "dropped_calls": str(dropped)}
    )


def _devices(file: Json) -> tuple[Device, ...]:
    devices = []
    properties = file.get("deviceProperties")
    for gpu in properties if isinstance(properties, list) else []:
        try:
            capability = (int(gpu["computeMajor"]), int(gpu["computeMinor"]))
            devices.append(Device(str(gpu["name"]), int(gpu["numSms"]), int(gpu["totalGlobalMem"]), capability))
        except _OF_FIELDS:
            continue  # another vendor's fields: the GPU stays unknown
    return tuple(devices)


def _rank(file: Json) -> int | None:
    info = file.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) else None


def _metadata(file: Json) -> dict[str, str]:
    found = {key: value for key, value in file.items() if key not in _NOT_METADATA}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}
