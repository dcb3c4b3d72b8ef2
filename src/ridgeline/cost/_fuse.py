"""From calls to fused kernels: which calls share a launch, what it must move, and who waits for whom.

Rules, in order:
- an *anchor* (convolution, matmul, attention, norm, pool, reduction, softmax, top-k, optimizer, anything unknown)
  keeps a kernel; anchors are never merged, with one exception: matmul, softmax, matmul become one attention kernel
  where nobody else reads the scores (in training the backward pass does);
- an *index rule* (copy, concat, nearest upsample, padding, cast) disappears: its consumers read the sources;
- a batch norm with fixed statistics folds into the convolution before it and costs nothing (inference only);
- a pointwise call joins the kernel that makes its last operand, if that kernel has every element at hand: its other
  operands add to the kernel's reads, its result replaces the kernel's;
- the sum of two independent branches joins the anchor that alone reads it: the bytes are the same, and neither branch
  has to wait for the other;
- where no kernel can take it so (the operands come from outside, or are larger than what that kernel makes), it joins
  its only consumer, or else becomes a kernel of its own.
What one kernel makes and nobody else reads is not written. FLOPs are conserved: those of the fused kernels add up to
those of the calls, less the folded batch norms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Gemm
from ridgeline.cost._mode import Call
from ridgeline.cost._program import OUTSIDE, Program, Value
from ridgeline.cost._table import total
from ridgeline.cost.data import INDEX_RULES

LIGHT_KINDS = frozenset({"pointwise", "copy", "concat", "upsample"})
# Kernels that hold a row or slab of their input on chip, so that a pointwise follower can use it again (x / norm(x)).
SLAB_KINDS = frozenset({"reduction", "norm", "softmax"})
CONCATENATIONS = frozenset({"aten.cat", "aten.stack"})


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """One launch: its calls in order and the anchor that names it. `cost` is None where the anchor has no formula."""

    calls: tuple[Call, ...]
    anchor: Call
    kind: str  # the anchor's, or "attention" where matmul, softmax and matmul were merged
    cost: Cost | None
    depends_on: frozenset[int]  # indices into the tuple this kernel stands in, all smaller than its own

    @property
    def module(self) -> str:
        return self.anchor.module

    @property
    def phase(self) -> str:
        return self.anchor.phase

    @property
    def gemm(self) -> Gemm | None:
        """The anchor's; merged attention is two products with a softmax between, so it has none."""
        return None if self.kind == "attention" else self.anchor.gemm


def fuse(calls: Sequence[Call], *, results: frozenset[int] = frozenset()) -> tuple[FusedKernel, ...]:
    """The kernels left when everything that can share a launch does, in an order that respects dependencies.

    `results` are the storages the caller keeps (`Trace.results`); a value nobody reads counts as kept as well.
    """
    fusion = _Fusion(calls, results)
    for index in range(len(calls)):
        fusion.place_(index)
    for index in reversed(range(len(calls))):
        fusion.join_consumer_(index)
    for index in range(len(calls)):
        fusion.merge_attention_(index)
    return fusion.kernels()


def unfused(calls: Sequence[Call]) -> tuple[FusedKernel, ...]:
    """One kernel a call, with the call's own cost."""
    program = Program(calls)
    return tuple(
        FusedKernel((call,), call, call.kind, call.cost, frozenset(program.definers(index)))
        for index, call in enumerate(calls)
    )


def chain_length(kernels: Sequence[FusedKernel]) -> int:
    """Kernels on the longest path of dependencies: the launches that no amount of parallelism hides."""
    depth: list[int] = []
    for kernel in kernels:
        depth.append(1 + max((depth[index] for index in kernel.depends_on), default=0))
    return max(depth, default=0)


class _Fusion:
    """Grows kernels over a program. A kernel is named by the index of its anchor call.

    Every operand of a kernel comes from a kernel with a smaller name, whatever is merged: a call joins the *latest*
    of its operands' kernels, or a consumer that alone reads it. So the names stay a valid order of execution.
    """

    def __init__(self, calls: Sequence[Call], results: frozenset[int]) -> None:
        self.program = Program(calls)
        self.calls = calls
        self.results = results
        self.members: dict[int, list[int]] = {}
        self.kernel_of: dict[int, int] = {}
        self.kind_of: dict[int, str] = {}
        self.folded: set[int] = set()
        self.waits: dict[int, int] = {}  # kernel -> bit set of the kernels it waits for, directly or not
        self.trains = any(call.phase == "backward" for call in calls)

    def place_(self, index: int) -> None:
        """Makes the call an index rule, a member of an earlier kernel, or a kernel."""
        if self._is_index_rule(index):
            self.program.set_rule_(index)
            return
        host = self._host(index) if self._is_light(index) else None
        if host is not None and self._folds(index, host):
            self.folded.add(index)
        self._put(index, index if host is None else host)

    def join_consumer_(self, kernel: int) -> None:
        """Lets a pointwise kernel be computed by its only consumer as that loads its operands."""
        consumer = self._only_consumer(kernel)
        if kernel in self.members and self._is_light(kernel) and consumer is not None:
            self._merge(kernel, consumer)

    def merge_attention_(self, softmax: int) -> None:
        """Merges the matmul before and the matmul behind a softmax into one kernel."""
        if softmax not in self.members or self.calls[softmax].kind != "softmax":
            return
        definers = {call for member in self.members[softmax] for call in self.program.definers(member)}
        scores = max((self.kernel_of[call] for call in definers - {softmax}), default=softmax)
        values = self._only_consumer(softmax)
        if values is None or self.calls[scores].kind != "matmul" or self.calls[values].kind != "matmul":
            return
        if self._only_consumer(scores) == softmax:
            self._merge(scores, values)
            self._merge(softmax, values)
            self.kind_of[values] = "attention"

    def kernels(self) -> tuple[FusedKernel, ...]:
        order = sorted(self.members)
        position = {kernel: place for place, kernel in enumerate(order)}
        fused = []
        for kernel in order:
            members = sorted(self.members[kernel])
            waits = {self.kernel_of[call] for member in members for call in self.program.definers(member)} - {kernel}
            fused.append(
                FusedKernel(
                    calls=tuple(self.calls[member] for member in members),
                    anchor=self.calls[kernel],
                    kind=self.kind_of.get(kernel, self.calls[kernel].kind),
                    cost=self._cost(kernel, members) if self.calls[kernel].cost is not None else None,
                    depends_on=frozenset(position[wait] for wait in waits),
                )
            )
        return tuple(fused)

    def _put(self, index: int, kernel: int) -> None:
        self.kernel_of[index] = kernel
        self.members.setdefault(kernel, []).append(index)
        for wait in {self.kernel_of[call] for call in self.program.definers(index)} - {kernel}:
            self.waits[kernel] = self.waits.get(kernel, 0) | self.waits.get(wait, 0) | 1 << wait

    def _merge(self, kernel: int, consumer: int) -> None:
        for member in self.members.pop(kernel):
            self._put(member, consumer)

    def _only_consumer(self, kernel: int) -> int | None:
        """The one kernel that reads what `kernel` makes, if nothing of it is needed elsewhere."""
        members = self.members.get(kernel, [])
        made = [value for member in members for value in self.program.writes[member]]
        consumers = {self.kernel_of[reader] for value in made for reader in self.program.readers(value)} - {kernel}
        if len(consumers) != 1:
            return None
        (consumer,) = consumers
        leaves = any(self._written(member, {kernel, consumer}) for member in members)
        return None if leaves or self.calls[consumer].cost is None else consumer

    def _is_light(self, index: int) -> bool:
        """Whether the call works element by element, so that it needs no kernel of its own."""
        call = self.calls[index]
        return call.cost is not None and (call.kind in LIGHT_KINDS or (call.foldable and not self.trains))

    def _is_index_rule(self, index: int) -> bool:
        call = self.calls[index]
        if call.op not in INDEX_RULES or len(call.outputs) != 1 or not call.inputs:
            return False
        roots = [value for value, _ in self.program.operands(index)]
        made_here = any(value.definer != OUTSIDE for value in roots)
        if self._kept(self.program.writes[index][0]):
            # The parts of a kept concat are written where they belong; any other kept copy is a copy.
            return call.op in CONCATENATIONS and made_here
        # A narrowing cast is an epilogue of the kernel that makes the wide values; of a weight, a wider read.
        narrows = call.outputs[0].dtype.itemsize < max(value.itemsize for value in roots)
        return not (narrows and made_here)

    def _host(self, index: int) -> int | None:
        """The kernel that makes the last operand, if it has every element of this call at hand."""
        kernels = {self.kernel_of[call] for call in self.program.definers(index)}
        host = max(kernels, default=None)
        if host is None:
            return None
        anchors = [kernel for kernel in kernels if not self._is_light(kernel)]
        if anchors and host != max(anchors) and self._holds(index, max(anchors)):
            # Noise for a dropout mask, a broadcast constant: made later than the tensor it meets, but from nothing.
            host = max(anchors)
            absorbed = [kernel for kernel in kernels if kernel > host]
            if not all(self._can_absorb(kernel, host, index) for kernel in absorbed):
                return None
            for kernel in absorbed:
                self._merge(kernel, host)
            return host
        return host if self._holds(index, host) and not self._sums_branches(index, host) else None

    def _holds(self, index: int, host: int) -> bool:
        """Whether a kernel has every element of a call's operands at hand when it makes its own results."""
        if self.calls[host].cost is None:
            return False
        call = self.calls[index]
        made = max((use.numel for use in self.calls[host].outputs), default=0)
        if max(use.numel for use in (*call.inputs, *call.outputs)) <= made:
            return True
        if self.calls[host].kind not in SLAB_KINDS:
            return False
        on_chip = {value for member in self.members[host] for value, _ in self.program.operands(member)}
        large = {root for value, use in self.program.reads[index] if use.numel > made for root, _ in value.roots(0)}
        return all(value in on_chip or self.kernel_of.get(value.definer) == host for value in large)

    def _can_absorb(self, kernel: int, host: int, reader: int) -> bool:
        """Whether a pointwise kernel made after `host` can move into it: nothing it waits for is later than `host`."""
        inside = {reader, *self.members[kernel]}
        made = [value for member in self.members[kernel] for value in self.program.writes[member]]
        return self.waits.get(kernel, 0) >> (host + 1) == 0 and all(
            not value.mutates and self.program.readers(value) <= inside for value in made
        )

    def _sums_branches(self, index: int, host: int) -> bool:
        """Whether joining `host` makes it wait for a branch it is independent of, while an anchor could do the sum."""
        made = {value.definer for value, _ in self.program.operands(index)} & self.kernel_of.keys()
        others = {self.kernel_of[definer] for definer in made} - {host}
        independent = any(not self.waits.get(host, 0) >> other & 1 for other in others)
        readers = self.program.readers(self.program.writes[index][0])
        return independent and len(readers) == 1 and not self._is_light(min(readers))

    def _folds(self, index: int, host: int) -> bool:
        """Whether a fixed batch norm stands right behind a convolution whose raw output nobody else reads."""
        if not self.calls[index].foldable:
            return False
        value = self.program.reads[index][0][0]
        kind = self.calls[host].kind
        linear = kind.startswith("conv") or kind in ("depthwise", "matmul")
        return linear and value.definer == host and self.program.readers(value) == {index}

    def _cost(self, kernel: int, members: list[int]) -> Cost:
        read: defaultdict[Value, int] = defaultdict(int)
        read_bytes = write_bytes = 0
        for member in members:
            write_bytes += self._written(member, {kernel})
            if member in self.folded:
                continue
            for value, size in self.program.operands(member):
                if self.kernel_of.get(value.definer) != kernel:
                    read[value] += size
            # A registered formula may count other bytes than "every operand once".
            call = self.calls[member]
            read_bytes += call.cost.read_bytes - sum(use.bytes for use in call.inputs) if call.cost else 0
            write_bytes += call.cost.write_bytes - sum(use.bytes for use in call.outputs) if call.cost else 0
        read_bytes += sum(min(size, value.capacity) for value, size in read.items())
        work = total(self.calls[member].cost for member in members if member not in self.folded)
        return Cost(work.flops, max(read_bytes, 0), max(write_bytes, 0), work.pipe)

    def _written(self, member: int, inside: set[int]) -> int:
        """Bytes the call must write when the kernels `inside` see its results for nothing."""
        return sum(
            value.bytes
            for place, value in enumerate(self.program.writes[member])
            # Statistics and indices of a forward call may go unread; every gradient counts.
            if self._leaves(value, inside, primary=place == 0 or self.calls[member].phase != "forward")
        )

    def _leaves(self, value: Value, inside: set[int], *, primary: bool) -> bool:
        readers = self.program.readers(value)
        if any(self.kernel_of[reader] not in inside for reader in readers):
            return True
        kept = value.mutates or any(shown.storage in self.results for shown in value.family())
        return (kept and not value.overwritten) or (not readers and primary and not value.overwritten)

    def _kept(self, value: Value) -> bool:
        return value.storage in self.results or not (value.readers or value.after)
