"""Share an operator's work out among the kernels it launched, and give each kernel its roofline time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.call_work import Work, shapes_of
from ridgeline.kernel_names import own_operator
from ridgeline.profile_costs import works_of
from ridgeline.step_view import Ceilings, Kernel, KernelClass
from ridgeline.trace import Call

_MATRIX = ("conv", "gemm", "attention")
_DTYPES = {
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
_BYTES = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}
# kernels of a product's call that prepare or finish it
_HELPERS = re.compile(r"reduce|precompute|offset|splitk|helper|convert|compute_dot|memset", re.I)
_OPAQUE = re.compile(r"OpaqueType<(\d+)")


def with_work(kernels: Sequence[Kernel], calls: Sequence[Call | None]) -> list[Kernel]:
    """The kernels with shapes, FLOPs and bytes; `calls` are the operators whose work theirs is, None for unknown.

    A matrix product's work goes to the kernel that multiplies, its helpers (layout, offsets, split-K sums) get none;
    a gradient's to the kernel of that pass. Other operators' work is shared by time: their kernels are equals.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        if call is not None:
            groups[id(call)].append(place)
    done = [_copied(kernel) for kernel in kernels]
    for places in groups.values():
        call = calls[places[0]]
        assert call is not None
        for place in places:
            done[place] = replace(done[place], shapes=shapes_of(call), known=_refined(done[place], call))
        works = works_of(call, max(element_bytes(kernels[place]) for place in places)) or ()
        for place, share in _shares([done[place] for place in places], works):
            done[places[place]] = share
    return done


def floor_s(kernel: Kernel, ceilings: Ceilings | None) -> float | None:
    """The roofline time of the kernel's work on the unit that its name and dtype tell; None where that is unknown."""
    if ceilings is None or kernel.bytes is None or kernel.flops is None:
        return None
    if kernel.activity.kind == "memcpy" and "DtoD" not in kernel.activity.name:
        return None  # the bus to the host is not the GPU's memory
    compute_s = 0.0
    if kernel.flops:
        peak = ceilings.peaks.get(pipe_of(kernel.known))
        if not peak:
            return None
        compute_s = kernel.flops / peak
    return max(compute_s, kernel.bytes / ceilings.bandwidth)


def pipe_of(known: KernelClass) -> str:
    """The unit that does the kernel's arithmetic, as in `Ceilings.peaks`: "tensor_bf16", "cuda_fp32"."""
    if known.category not in _MATRIX or known.tensor_core is False:
        return "cuda_fp32"
    if known.dtype in ("bf16", "fp16", "fp8", "int8", "tf32"):
        return f"tensor_{known.dtype}"
    return "tensor_tf32" if known.tensor_core else "cuda_fp32"


def element_bytes(kernel: Kernel) -> int:
    """Bytes of the elements that a kernel's name tells of, 0 where it does not."""
    opaque = _OPAQUE.search(kernel.activity.name)
    return int(opaque[1]) if opaque else _BYTES.get(kernel.known.dtype, 0)


def _copied(kernel: Kernel) -> Kernel:
    """Copies and fills know their bytes themselves."""
    activity = kernel.activity
    if activity.kind == "kernel" or not activity.bytes:
        return kernel
    moved = activity.bytes * (2 if "DtoD" in activity.name else 1)
    return replace(kernel, flops=0.0, bytes=float(moved))


def _refined(kernel: Kernel, call: Call) -> KernelClass:
    """What the operands add to a name that does not tell: the dtype, and whether a Triton kernel met tensor cores."""
    known = kernel.known
    operand = next((_DTYPES[dtype] for dtype in call.dtypes if dtype in _DTYPES), "")
    if kernel.activity.kind != "kernel":
        return known
    if not known.dtype and operand:
        tf32 = operand == "fp32" and (known.tensor_core or "tf32" in call.concrete)
        known = replace(known, dtype="tf32" if tf32 else operand)
    name = kernel.activity.name
    if known.tensor_core is None and known.category in _MATRIX and (own_operator(name) or name.startswith("triton_")):
        # tl.dot takes tensor cores for all narrow types, and for fp32 unless exact products were asked for
        exact = known.dtype == "fp32"
        known = replace(known, tensor_core=None if exact and "ieee" not in call.concrete else not exact)
    return known


def _shares(kernels: Sequence[Kernel], works: Sequence[Work]) -> list[tuple[int, Kernel]]:
    """Which kernel of one call does which part of its work: (index among `kernels`, kernel with its work)."""
    helps = [bool(_HELPERS.search(kernel.activity.name.partition("<")[0])) for kernel in kernels]
    by_time = sorted(range(len(kernels)), key=lambda place: (helps[place], -kernels[place].seconds))
    matrix = [place for place in by_time if kernels[place].known.category in _MATRIX]
    if len(works) == 1 and not matrix and not works[0].pass_:
        (work,) = works
        total_s = sum(kernel.seconds for kernel in kernels)
        return [(place, _given(kernels[place], work, kernels[place].seconds / total_s)) for place in by_time if total_s]
    free = matrix or by_time
    given: list[tuple[int, Kernel]] = []
    # a pass whose kernel says so comes first: the rest is told apart by what is left
    for sure in (True, False):
        for work in works:
            if any(kernel.shapes == work.shapes for _, kernel in given):
                continue
            fits = [p for p in free if not sure or (kernels[p].known.pass_ == work.pass_ and not helps[p])]
            if fits:
                given.append((fits[0], _given(kernels[fits[0]], work)))
                free = [place for place in free if place != fits[0]]
    return given


def _given(kernel: Kernel, work: Work, part: float = 1.0) -> Kernel:
    known = replace(kernel.known, pass_=work.pass_) if work.pass_ else kernel.known
    return replace(kernel, known=known, shapes=work.shapes, flops=part * work.flops, bytes=part * work.bytes)
