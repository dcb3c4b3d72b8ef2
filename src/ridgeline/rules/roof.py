"""Rules that hold kernels against the roofline: K15 depthwise convolutions, K16 gradients, K20 whatever else is far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ridgeline import units
from ridgeline.finding import Abstention, Edit, Finding
from ridgeline.rules._kernels import COMPILE, by_call, faster, freed_s, pass_of, problem_of, saving_of, unseen, verb
from ridgeline.rules._rule import evidence, exposed_of, notable, plural, saving, seconds_of
from ridgeline.step_view import Kernel, Step
from ridgeline.trace import Dims

_REACHABLE = 1.25  # times the roofline: what good kernels take
_FAR = 0.3  # of the roofline
_BACKWARD = 2.5  # times forward's seconds a FLOP
_GRADIENTS = ("dgrad", "wgrad")
_TOP = 10  # groups that a closer look is worth
_LISTED = 3
_TITLE = 80  # characters of an operator and its shapes
_NEARER = "middle: 1.25 times the roofline; most: the roofline itself"


def slow_depthwise(step: Step) -> Iterator[Finding | Abstention]:
    """K15: depthwise convolutions far above the time that moving their data takes. Needs shapes and bandwidth."""
    named = [kernel for kernel in step.kernels if "depthwise" in kernel.activity.name.lower()]
    shaped = [kernel for kernel in step.kernels if (problem := problem_of(kernel)) and problem.depthwise]
    depthwise = list({kernel.activity.id: kernel for kernel in (*named, *shaped)}.values())
    yield from unseen("K15", depthwise, "depthwise convolutions")
    found = [kernel for kernel in depthwise if _is_far(kernel)]
    edit, high_s = _nearer(step, found)
    if not found or not notable(step, freed_s(step, edit)):
        return
    times = seconds_of(found) / _floor_s(found)
    yield Finding(
        rule="K15",
        title=f"{plural(len(found), 'depthwise kernel')} take {times:.0f} times as long as moving their data",
        fix="Use an NHWC depthwise kernel that reads each row once, and fuse it with the activation.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit, high_s=high_s),
        effort="L",
        confidence="modelled",
        wrong_if="maps are so small that the launch is what counts; which kernel is best differs by shape",
        evidence=evidence(found),
        edit=edit,
        note=_NEARER,
    )


def slow_backward(step: Step) -> Iterator[Finding | Abstention]:
    """K16: a convolution's gradients take more than 2.5 times as long as its forward at equal FLOPs.

    Holds where forward and backward of one problem are in the step. Needs shapes.
    """
    convolutions = [kernel for kernel in step.kernels if kernel.known.category == "conv"]
    if not any(pass_of(kernel) in _GRADIENTS for kernel in convolutions):
        return
    yield from unseen("K16", convolutions, "convolutions")
    forward: dict[tuple[Dims, Dims], float] = {}
    slow: dict[int, float] = {}
    for kernels, backward in _passes(convolutions):
        problem, flops = problem_of(kernels[0]), sum(kernel.flops or 0.0 for kernel in kernels)
        if problem is None or not flops:
            continue
        pace = seconds_of(kernels) / flops
        if not backward:
            forward[problem.x, problem.w] = min(pace, forward.get((problem.x, problem.w), math.inf))
        elif pace > _BACKWARD * forward.get((problem.x, problem.w), math.inf):
            # the pace of forward, a quarter more for what a gradient adds; never below the roofline
            left = _REACHABLE * forward[problem.x, problem.w] / pace
            slow |= {k.activity.id: max(left * k.seconds, k.floor_s or 0.0) for k in kernels}
    found = [kernel for kernel in convolutions if kernel.activity.id in slow]
    edit = faster(step, slow)
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K16",
        title=f"{plural(len(found), 'gradient kernel')} take over {_BACKWARD} times forward's time a FLOP",
        fix="Try channels-last, another algorithm (cudnn.benchmark) or more workspace for these shapes.",
        verb="",
        saving=saving_of(step, edit, high_s=_nearer(step, found)[1]),
        effort="M",
        confidence="modelled",
        wrong_if="the convolution is strided, whose input gradient is slower by nature",
        evidence=evidence(found),
        edit=edit,
        note=_shapes_of(found),
    )


def far_from_roof(step: Step) -> Iterator[Finding | Abstention]:
    """K20: of the ten kernels that take most of the step, those below 30 % of their roofline.

    Headroom, not a promise. Holds where a formula knows the work; one above its roof is a sign of another algorithm.
    """
    if step.ceilings is None:
        yield Abstention("K20", "the GPU's ceilings are unknown: run `ridgeline doctor` there")
        return
    groups: defaultdict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in step.kernels:
        if kernel.activity.kind == "kernel":
            groups[kernel.activity.name, kernel.shapes].append(kernel)
    top = sorted(groups.values(), key=seconds_of, reverse=True)[:_TOP]
    yield from unseen("K20", [kernel for kernels in top for kernel in kernels], "kernels that take most time")
    far = [kernels for kernels in top if all(kernel.floor_s for kernel in kernels) and _is_far(*kernels)]
    for kernels in far[:_LISTED]:
        edit, high_s = _nearer(step, kernels)
        half_s = freed_s(step, edit) / 2
        if not notable(step, half_s):
            continue
        share = _floor_s(kernels) / seconds_of(kernels)
        yield Finding(
            rule="K20",
            title=f"{plural(len(kernels), 'kernel')} at {units.percent(share, 0)} of the roof: {_titled(kernels[0])}",
            fix="Time this operator alone against its alternatives: another layout, dtype, algorithm or library.",
            verb="ridgeline tune" if kernels[0].op.startswith("ridgeline") else "",
            saving=saving(0.0, half_s, high_s, cap_s=exposed_of(kernels)),
            effort="M",
            confidence="bound",
            wrong_if="the kernel moves more than its tensors (im2col, workspace, several passes), or is too small to "
            "fill the GPU",
            evidence=evidence(kernels),
            source=kernels[0].source,
            edit=Edit({k.activity.id: (k.seconds + edit.seconds.get(k.activity.id, k.seconds)) / 2 for k in kernels}),
            note="headroom, not a promise: middle is half of what a kernel at 80 % of its roof would save",
        )


def _is_far(*kernels: Kernel) -> bool:
    return all(kernel.floor_s for kernel in kernels) and _floor_s(kernels) < _FAR * seconds_of(kernels)


def _floor_s(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.floor_s or 0.0 for kernel in kernels)


def _nearer(step: Step, kernels: Iterable[Kernel]) -> tuple[Edit, float]:
    """The edit that brings kernels near their roofline, and what reaching it would free."""
    floors = {kernel.activity.id: kernel.floor_s for kernel in kernels if kernel.floor_s}
    edit = faster(step, {id_: _REACHABLE * floor_s for id_, floor_s in floors.items()})
    return edit, freed_s(step, faster(step, floors))


def _passes(convolutions: list[Kernel]) -> Iterator[tuple[list[Kernel], bool]]:
    """Kernels of each call of a convolution, gradients apart by kind, and whether they are gradients; forward first."""
    forward = [kernel for kernel in convolutions if pass_of(kernel) not in _GRADIENTS]
    yield from ((group, False) for group in by_call(forward))
    for kind in _GRADIENTS:
        yield from ((group, True) for group in by_call(k for k in convolutions if pass_of(k) == kind))


def _shapes_of(kernels: list[Kernel]) -> str:
    shapes = list(dict.fromkeys(kernel.shapes for kernel in kernels if kernel.shapes))
    return "; ".join(shapes[:_LISTED])


def _titled(kernel: Kernel) -> str:
    name = kernel.op or kernel.activity.name
    return f"{name} {kernel.shapes}".strip()[:_TITLE]
