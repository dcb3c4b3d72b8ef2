"""K19: convolutions and products that FP8 would speed up, by the roofline: compute saved against the quantising pass.

    T16 = max(F / P16, B16 / BW)        T8 = max(F / P8, B8 / BW) + q · elements / BW

B8 has 1-byte operands and a 2-byte output; q, in bytes an element of what must be quantised, is 3 with a scale known
beforehand (read 2, write 1), 5 with one computed now, -1 where the producer writes FP8 itself. `ridgeline.roofline`
states the same rule for a GPU's data sheet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline import units
from ridgeline.finding import Abstention, Edit, Finding
from ridgeline.rules._kernels import (
    HALVES,
    Problem,
    faster,
    freed_s,
    matrix,
    pass_of,
    problem_of,
    saving_of,
    unseen,
    verb,
)
from ridgeline.rules._rule import evidence, notable, plural
from ridgeline.step_view import Ceilings, Kernel, Step

STATIC, DYNAMIC, FUSED = 3.0, 5.0, -1.0  # bytes an element
_RECIPE = 'ridgeline.compile_step(…, recipe="fp8")'
_NAMED = 8  # kinds of problems listed in a finding


@dataclass(frozen=True)
class Choice:
    """One problem's roofline times in 16 bits and in FP8, the latter by what quantising costs."""

    half_s: float
    static_s: float
    dynamic_s: float
    fused_s: float

    @property
    def pays(self) -> bool:
        return self.static_s < self.half_s


def choose(problem: Problem, flops: float, pass_: str, ceilings: Ceilings) -> Choice:
    """The two times of one pass: "fprop" quantises x, "dgrad" dy, "wgrad" both. The weights' FP8 copy counts as made.

    `flops` are those of one pass.
    """
    y_elements = problem.output_elements(flops)
    x, w = problem.input_elements, problem.weight_elements
    read_elements, written_elements = {"dgrad": (y_elements + w, x), "wgrad": (x + y_elements, w)}.get(
        pass_, (x + w, y_elements)
    )
    quantised_elements = {"dgrad": y_elements, "wgrad": x + y_elements}.get(pass_, x)
    half, eighth = ceilings.peaks["tensor_bf16"], ceilings.peaks["tensor_fp8"]
    half_s = max(flops / half, 2 * (read_elements + written_elements) / ceilings.bandwidth)
    eighth_s = max(flops / eighth, (read_elements + 2 * written_elements) / ceilings.bandwidth)
    pass_s = quantised_elements / ceilings.bandwidth
    return Choice(half_s, eighth_s + STATIC * pass_s, eighth_s + DYNAMIC * pass_s, eighth_s + FUSED * pass_s)


def fp8_candidates(step: Step) -> Iterator[Finding | Abstention]:
    """K19: bf16 and fp16 convolutions and products whose time in FP8, quantising included, would be shorter.

    Holds on GPUs with FP8 tensor cores, for layers whose numbers stand 3 bits of mantissa; transposed and grouped
    convolutions are left out. Needs shapes and FLOPs; a kernel keeps the share of the roofline that it has now.
    """
    if step.ceilings is None or "tensor_fp8" not in step.ceilings.peaks:
        return
    halves = [kernel for kernel in matrix(step) if kernel.known.dtype in ("bf16", "fp16") or _problem(kernel)]
    yield from unseen("K19", halves, "16-bit convolutions and products")
    names: defaultdict[str, list[Kernel]] = defaultdict(list)
    times: dict[int, Choice] = {}
    declined = 0
    for kernel in halves:
        problem = _problem(kernel)
        if problem is None or not kernel.flops or problem.groups > 1 or problem.transposed:
            continue
        choice = choose(problem, kernel.flops, pass_of(kernel), step.ceilings)
        if choice.pays:
            names[_named(problem, kernel)].append(kernel)
            times[kernel.activity.id] = choice
        else:
            declined += 1
    found = [kernel for kernels in names.values() for kernel in kernels]
    low, mid, high = (_in_fp8(step, found, times, way) for way in ("dynamic_s", "static_s", "fused_s"))
    mid_s = freed_s(step, mid)
    if not found or not notable(step, mid_s):
        return
    ranked = sorted(names.items(), key=lambda item: -sum(kernel.seconds for kernel in item[1]))
    listed = "; ".join(f"{len(kernels)} of {name}" for name, kernels in ranked[:_NAMED])
    more = f"; and {plural(len(ranked) - _NAMED, 'kind')} more" if len(ranked) > _NAMED else ""
    yield Finding(
        rule="K19",
        title=f"{plural(len(found), 'kernel')} would be faster in FP8, quantising included; {declined} would not",
        fix="Run these passes in FP8 with delayed scaling, and let the kernel before each write FP8 itself; leave the "
        "others in 16 bits.",
        verb=verb(step, training=_RECIPE, inference=""),
        saving=saving_of(step, mid, low=freed_s(step, low) / mid_s, high_s=freed_s(step, high)),
        effort="L",
        confidence="modelled",
        wrong_if="losses move by more than half a percent, a scale has no floor (a row of zeros gives NaN), or the FP8 "
        "kernel reaches less of its roofline than the one it replaces",
        evidence=evidence(found),
        edit=mid,
        note=f"{listed}{more}. Least: scales computed now; middle: scales known beforehand, a pass of its own "
        f"({units.nbytes(STATIC)} an element); most: the producer writes FP8",
    )


def _in_fp8(step: Step, kernels: list[Kernel], times: dict[int, Choice], way: str) -> Edit:
    """Every kernel in the time that its roofline's changes, quantised in this way."""
    seconds = {}
    for kernel in kernels:
        choice = times[kernel.activity.id]
        seconds[kernel.activity.id] = kernel.seconds * getattr(choice, way) / choice.half_s
    return faster(step, seconds)


def _problem(kernel: Kernel) -> Problem | None:
    problem = problem_of(kernel)
    return problem if problem and problem.dtype in HALVES else None


def _named(problem: Problem, kernel: Kernel) -> str:
    """ "3x3 256→128 at 32x32 wgrad"; a product by its factors."""
    pass_ = pass_of(kernel) or kernel.phase
    (into, out), x = problem.channels, problem.x
    if len(x) == 4 and len(problem.w) == 4:
        return f"{problem.w[2]}x{problem.w[3]} {into}→{out} at {x[2]}x{x[3]} {pass_}"
    return f"{'x'.join(map(str, x))} * {'x'.join(map(str, problem.w))} {pass_}"
