"""Recorded calls in single-assignment form: every version of a storage is a value with one definer and its readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ridgeline.cost._mode import Call, TensorUse

OUTSIDE = -1  # definer of weights, inputs and whatever else existed before the first call


@dataclass(eq=False, slots=True)
class Value:
    """One version of a storage. Compared by identity."""

    storage: int
    definer: int  # index of the call that wrote it, or OUTSIDE
    bytes: int  # written by the definer
    capacity: int  # of the storage: the most a reader can take
    itemsize: int
    before: Value | None = None  # the version underneath a partial write
    mutates: bool = False  # overwrites memory that outlives the calls (a weight, a running statistic)
    overwritten: bool = False  # a later call replaces all of it in place
    readers: list[int] = field(default_factory=list)
    after: list[Value] = field(default_factory=list)  # versions that lie over part of this one
    sources: tuple[tuple[Value, int], ...] = ()  # of an index rule: where its bytes really are, and how many
    ruled: list[Value] = field(default_factory=list)  # results of index rules that have this value as a source

    def roots(self, taken: int) -> Iterator[tuple[Value, int]]:
        """The values that really hold this one, and the bytes of each behind `taken`.

        An index rule's are its sources; a partial write's are itself and, for the rest, the version underneath.
        """
        if self.sources:
            share = min(1.0, taken / self.bytes) if self.bytes else 0.0
            for source, size in self.sources:
                yield from source.roots(round(size * share))
            return
        own = taken if self.before is None else min(taken, self.bytes)
        yield self, own
        if self.before is not None and taken > own:
            yield from self.before.roots(taken - own)

    def family(self) -> Iterator[Value]:
        """This value and every value that shows it: versions laid over it, index rules that read it."""
        seen: set[Value] = {self}
        pending: list[Value] = [self]
        while pending:
            value = pending.pop()
            yield value
            fresh = [other for other in (*value.after, *value.ruled) if other not in seen]
            seen.update(fresh)
            pending += fresh


class Program:
    """The operands of each call as values: `reads[i]` with the use each comes from, `writes[i]` in result order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.reads: list[list[tuple[Value, TensorUse]]] = []
        self.writes: list[list[Value]] = []
        self._ruled: set[int] = set()
        current: dict[int, Value] = {}
        for index, call in enumerate(calls):
            reads = []
            for use in call.inputs:
                if use.storage not in current:
                    current[use.storage] = Value(use.storage, OUTSIDE, 0, use.storage_bytes, use.dtype.itemsize)
                current[use.storage].readers.append(index)
                reads.append((current[use.storage], use))
            self.reads.append(reads)
            self.writes.append([_define(current, index, use) for use in call.outputs])

    def set_rule_(self, index: int) -> None:
        """Makes the call an index rule: whoever reads its result reads the call's operands."""
        (written,) = self.writes[index]
        self._ruled.add(index)
        written.sources = tuple((value, use.bytes) for value, use in self.reads[index])
        for value, _ in self.reads[index]:
            value.ruled.append(written)

    def is_rule(self, index: int) -> bool:
        return index in self._ruled

    def operands(self, index: int) -> list[tuple[Value, int]]:
        """What the call really reads, and how many bytes of each."""
        return [root for value, use in self.reads[index] for root in value.roots(use.bytes)]

    def definers(self, index: int) -> set[int]:
        """The calls this one waits for: those that made its operands or what lies under its partial writes."""
        pending = [value for value, _ in self.operands(index)] + [value.before for value in self.writes[index]]
        found: set[Value] = set()
        while pending:
            value = pending.pop()
            if value is not None and value not in found:
                found.add(value)
                pending.append(value.before)
                pending += [root for root, _ in value.roots(0) if root is not value]
        return {value.definer for value in found if value.definer != OUTSIDE and not self.is_rule(value.definer)}

    def readers(self, value: Value) -> set[int]:
        """The calls that need this value, directly or through a later version or an index rule."""
        return {reader for shown in value.family() for reader in shown.readers if not self.is_rule(reader)}


def _define(current: dict[int, Value], index: int, use: TensorUse) -> Value:
    old = current.get(use.storage)
    mutates = old is not None and (old.definer == OUTSIDE or old.mutates)
    before = None if use.whole else old
    value = Value(use.storage, index, use.bytes, use.storage_bytes, use.dtype.itemsize, before, mutates)
    if value.before is not None:
        value.before.after.append(value)
    elif old is not None:
        old.overwritten = True
    current[use.storage] = value
    return value
