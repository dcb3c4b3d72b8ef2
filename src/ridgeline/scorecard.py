"""Scorecard: what findings promised and what their fixes brought, kept in the user's cache, a JSON object a line."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ridgeline import units
from ridgeline.cache import cache_dir
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.finding import Finding
from ridgeline.plain import from_plain, to_plain
from ridgeline.profile_record import Calibration, Profile, WallTime

_log = logging.getLogger(__name__)

_FILE = "scorecard.jsonl"


@dataclass(frozen=True)
class Entry:
    """One fix that was applied: the promise, what it brought, and of what."""

    calibration: Calibration
    subject: str
    gpu: str
    source: str  # file:line of the finding, "" where unknown
    before_s: float  # unprofiled median of the step
    after_s: float
    settings: Mapping[str, str]  # environment of the profile after the fix
    date: str  # ISO 8601, UTC


@dataclass(frozen=True)
class Score:
    """How often one rule's interval held."""

    rule: str  # "" for all rules together
    count: int
    hits: int
    ratio: float | None  # median of realised over promised, 1 is perfect; None where nothing was promised

    @property
    def hit_rate(self) -> float:
        return self.hits / self.count


@dataclass(frozen=True)
class Scorecard:
    """The tool's own record. `damaged` names every line of the file that could not be read."""

    path: Path
    rules: tuple[Score, ...]
    overall: Score | None  # None: nothing was recorded yet
    damaged: tuple[str, ...]

    def lines(self) -> list[str]:
        """Readable text, a fact a line."""
        if self.overall is None:
            said = [f"no fix has been scored yet: {self.path}"]
        else:
            said = [_said("all rules", self.overall), *(_said(score.rule, score) for score in self.rules)]
        return [*said, *(f"left out: {line}" for line in self.damaged)]


def calibrate(before: Profile, rule: str, after: Profile, *, source: str = "") -> Calibration:
    """What the finding of `rule` in `before` promised, and by how much the unprofiled step of `after` is shorter.

    `source` picks one of several findings of the rule. Raises UsageError where the profiles do not tell: unlike, not
    timed without the profiler, no such finding, or one without a saving.
    """
    if (before.gpu, before.subject) != (after.gpu, after.subject):
        raise UsageError(
            f"a fix is scored on one subject and GPU, got {before.subject!r} on {before.gpu} and "
            f"{after.subject!r} on {after.gpu}: profile the same thing again"
        )
    saving = _finding(before, rule, source).saving
    if saving is None:
        raise UsageError(f"{rule} names no saving in {before.subject!r}, so there is nothing to score")
    realised_s = _wall(before).median_s - _wall(after).median_s
    return Calibration(rule, saving.low_s, saving.mid_s, saving.high_s, realised_s)


def record(before: Profile, rule: str, after: Profile, *, source: str = "") -> Calibration:
    """`calibrate`, kept in the user's scorecard. Raises EnvironmentUnusable where the cache folder takes no file."""
    calibration = calibrate(before, rule, after, source=source)
    finding = _finding(before, rule, source)
    entry = Entry(
        calibration=calibration,
        subject=before.subject,
        gpu=before.gpu,
        source=finding.source,
        before_s=_wall(before).median_s,
        after_s=_wall(after).median_s,
        settings=after.environment,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    _append(cache_dir() / _FILE, json.dumps(to_plain(entry), allow_nan=False))
    return calibration


def scored(profile: Profile) -> Profile:
    """The profile with what fixes of its subject on its GPU promised and brought: each once, in the order recorded.

    A record that cannot be read is a warning.
    """
    try:
        entries, _ = _entries(cache_dir() / _FILE)
    except EnvironmentUnusable as error:
        _log.warning("%s", error)
        return profile
    alike = [entry for entry in entries if (entry.subject, entry.gpu) == (profile.subject, profile.gpu)]
    # who compares two runs twice has applied one fix
    once = {(entry.calibration, entry.before_s, entry.after_s): entry.calibration for entry in alike}
    return replace(profile, calibrations=tuple(dict.fromkeys((*profile.calibrations, *once.values()))))


def scorecard() -> Scorecard:
    """Hit rates of the user's record, by rule and over all. A damaged line is named and left out."""
    path = cache_dir() / _FILE
    entries, damaged = _entries(path)
    groups: dict[str, list[Calibration]] = {}
    for entry in entries:
        groups.setdefault(entry.calibration.rule, []).append(entry.calibration)
    rules = tuple(_score(rule, groups[rule]) for rule in sorted(groups, key=_natural))
    overall = _score("", [entry.calibration for entry in entries]) if entries else None
    return Scorecard(path, rules, overall, tuple(damaged))


def _finding(profile: Profile, rule: str, source: str) -> Finding:
    found = [finding for finding in profile.findings if finding.rule == rule and source in ("", finding.source)]
    if not found:
        rules = ", ".join(dict.fromkeys(finding.rule for finding in profile.findings)) or "none"
        raise UsageError(f"no finding {rule} {source}".rstrip() + f" in {profile.subject!r}: it has {rules}")
    if len(found) > 1:
        places = ", ".join(finding.source or "no source" for finding in found)
        raise UsageError(
            f"{rule} was found {len(found)} times in {profile.subject!r}: name the source, one of {places}"
        )
    return found[0]


def _wall(profile: Profile) -> WallTime:
    if profile.wall is None:
        raise UsageError(
            f"{profile.subject!r} was not timed without the profiler, which hides what a fix brings: "
            "profile it with `ridgeline profile`"
        )
    return profile.wall


def _append(path: Path, line: str) -> None:
    """Add one line in one write, which the system keeps whole beside those of other processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # a writer that was killed, or a full disk, may have left half a line: it stays alone on its own
            length = os.fstat(handle).st_size
            torn = length > 0 and os.pread(handle, 1, length - 1) != b"\n"
            os.write(handle, f"{chr(10) if torn else ''}{line}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise EnvironmentUnusable(
            f"cannot write {path} ({error.strerror}): make the folder writable or set RIDGELINE_CACHE_DIR to another"
        ) from error


def _entries(path: Path) -> tuple[list[Entry], list[str]]:
    entries: list[Entry] = []
    damaged: list[str] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {path} ({error.strerror}): make it readable or remove it") from error
    # not splitlines: a name may hold a separator that it takes for a line's end
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = from_plain(Entry, json.loads(line))
            if not all(map(math.isfinite, _numbers(entry.calibration))):
                raise ValueError("a number is not finite")
            entries.append(entry)
        except (ValueError, RecursionError) as error:
            damaged.append(f"{path.name} line {number}: {error}")
    return entries, damaged


def _numbers(calibration: Calibration) -> tuple[float, ...]:
    return calibration.low_s, calibration.mid_s, calibration.high_s, calibration.realised_s


def _score(rule: str, calibrations: Sequence[Calibration]) -> Score:
    ratios = [entry.realised_s / entry.mid_s for entry in calibrations if entry.mid_s > 0]
    hits = sum(entry.hit for entry in calibrations)
    return Score(rule, len(calibrations), hits, statistics.median(ratios) if ratios else None)


def _said(name: str, score: Score) -> str:
    ratio = f", brought {score.ratio:.2f} times the likely value (median)" if score.ratio is not None else ""
    return f"{name}: {score.hits} of {score.count} inside the interval ({units.percent(score.hit_rate, 0)}){ratio}"


def _natural(rule: str) -> tuple[str, int, str]:
    """H2 before H10."""
    letters = rule.rstrip("0123456789")
    digits = rule[len(letters) :]
    return letters, int(digits) if digits.isascii() and digits else -1, rule
