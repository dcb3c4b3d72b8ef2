"""Make a `Step` of a trace: every kernel with its operator, module, source line, phase and work, every gap its cause.

kernel -> launch      by correlation id; all kernels of one CUDA graph share their launch's
launch -> operators   by external id, else those open on the launching thread
backward -> forward   by autograd's sequence number: a gradient belongs to the module and line of its forward operator
inside a graph        by aligning an eager step with the replay (`graph_alignment`); the mark of a node is its module
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ridgeline import graph_alignment
from ridgeline.errors import UsageError
from ridgeline.host_view import BACKWARD, HostView
from ridgeline.idle import gaps_of, loader_s, syncs_of, waits_of
from ridgeline.kernel_costs import floor_s, with_work
from ridgeline.kernel_names import classify, own_operator, some_are_ours
from ridgeline.overlap import alone_and_shared
from ridgeline.profile_costs import works_of
from ridgeline.step_span import busiest_device, launches_of, representative
from ridgeline.step_view import Ceilings, Kernel, Step
from ridgeline.trace import Activity, Call, Dims, Launch, Trace

# a copy is named by the operator that asked for it, a convolution by the one that holds for all libraries
_COPY = "aten::copy_"
_COPIERS = {"aten::_to_copy", "aten::clone", "aten::contiguous", "aten::cat", "aten::to"}
_CONVOLUTION = "aten::convolution"
_CONVOLUTIONS = {
    "aten::_convolution", "aten::cudnn_convolution", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu",
    "aten::cudnn_convolution_transpose", "aten::_conv_depthwise2d", "aten::conv_depthwise3d", "aten::thnn_conv2d",
    "aten::_slow_conv2d_forward", "aten::slow_conv3d_forward", "aten::slow_conv_transpose2d",
    "aten::mkldnn_convolution", "aten::miopen_convolution",
}  # fmt: skip
_UPDATES = ("aten::_foreach_addcdiv_", "aten::_foreach_add_")  # what an Adam and an SGD do to the parameters in the end
# as traces spell them, as in Call.dtypes
_WORDS = {"fp32": "float", "fp16": "c10::Half", "bf16": "c10::BFloat16", "fp64": "double"}
_LEVELS_UP = 4  # how far above a kernel's innermost operator the one with a formula may stand


def step_of(
    trace: Trace,
    *,
    wall_s: float | None = None,
    ceilings: Ceilings | None = None,
    eager: Trace | None = None,
    settings: Mapping[str, str] = {},
) -> Step:
    """The representative step of a trace, attributed.

    wall_s     median unprofiled time of a step
    ceilings   of the GPU; without them nothing has a roofline time
    eager      a trace of the same step outside its CUDA graph, for the names of what ran inside
    Raises UsageError where the GPU did nothing in the trace.
    """
    activities, launches = busiest_device(trace), launches_of(trace)
    span = representative(trace, activities, launches)
    if span is None:
        raise UsageError(
            f"{trace.path}: no kernel, copy or fill ran in any step; record with ProfilerActivity.CUDA around the step"
        )
    own = [launches[a.correlation] for a in span.activities if a.correlation in launches]
    host = HostView(trace, span, own)
    begin_s, end_s = span.host
    inside = tuple(launch for launch in trace.launches if begin_s <= launch.start_s < end_s)
    calls = tuple(call for call in trace.calls if begin_s <= call.start_s < end_s)
    optimizers = (r for r in trace.ranges if r.name.startswith("Optimizer.step#") and begin_s <= r.start_s < end_s)
    trained = any(optimizers) or any("_fused_adam" in call.name for call in calls)
    ours = some_are_ours(activity.name for activity in activities) or any(map(_is_own, trace.calls))
    kernels = _attributed(span.activities, host, launches, trained=trained, ours=ours)
    parameters = _parameters(calls, kernels)
    if eager is not None:
        like = step_of(eager, ceilings=ceilings)
        kernels = graph_alignment.aligned(kernels, like.kernels)
        trained, parameters = trained or like.trained, parameters or like.parameters
    trained = trained or any(kernel.op == "ridgeline.adamw_ema" for kernel in kernels)
    waits = waits_of(trace, activities, span)
    gaps = gaps_of(span, trace, activities, launches, waits)
    return Step(
        index=span.index,
        start_s=span.start_s,
        duration_s=span.duration_s,
        kernels=_timed(kernels, ceilings),
        gaps=gaps,
        syncs=syncs_of(waits, gaps, host),
        launches=inside,
        calls=calls,
        wall_s=wall_s,
        ceilings=ceilings,
        loader_s=loader_s(trace, span.host),
        trained=trained,
        options=trace.options,
        settings=dict(settings),
        parameters=parameters,
    )


def operator_of(chain: Sequence[Call], name: str, *, ours: bool = False) -> str:
    """The operator a person would name, from the calls around a kernel (innermost first) and the kernel's own name.

    ours   as in `kernel_names.classify`
    """
    own = next((call.name.replace("::", ".") for call in chain if _is_own(call)), "") or own_operator(name, ours=ours)
    if own:
        return own.removesuffix("_into")  # the same, written into a part of another map
    if name.startswith("triton_"):
        return name
    if not chain:
        return ""
    innermost, *outer = chain
    if innermost.name == _COPY:
        innermost = next((call for call in outer[:2] if call.name in _COPIERS), innermost)
    if innermost.name in _CONVOLUTIONS:
        innermost = next((call for call in outer if call.name == _CONVOLUTION), innermost)
    return innermost.name.removeprefix(BACKWARD).replace("::", ".")


def _attributed(
    activities: Sequence[Activity], host: HostView, launches: Mapping[int, Launch], *, trained: bool, ours: bool
) -> tuple[Kernel, ...]:
    """`ours`: the trace has work of this project, so a kernel without operators may be its own by name alone."""
    kernels: list[Kernel] = []
    working: list[Call | None] = []
    for activity in activities:
        launch = launches.get(activity.correlation)
        in_graph = activity.graph_node is not None or (launch is not None and "GraphLaunch" in launch.name)
        chain = host.chain(launch) if launch and not in_graph else ()
        own = any(map(_is_own, chain)) if chain else ours
        kernel = Kernel(
            activity,
            classify(activity.name, activity.kind, ours=own),
            op=operator_of(chain, activity.name, ours=own),
            in_graph=in_graph,
            module=activity.mark,
        )
        if launch is not None and not in_graph:
            kernel = _placed(kernel, launch, chain, host, trained=trained)
        kernels.append(kernel)
        working.append(_working(chain))
    return tuple(with_work(kernels, working))


def _placed(kernel: Kernel, launch: Launch, chain: Sequence[Call], host: HostView, *, trained: bool) -> Kernel:
    forward = host.forward_of(chain)
    thread, moment_s = (forward.thread, forward.start_s) if forward else (launch.thread, launch.start_s)
    return replace(
        kernel,
        call=chain[0] if chain else None,
        module=host.module(thread, moment_s),
        source=host.source(thread, moment_s),
        phase=host.phase(launch, chain, trained=trained),
    )


def _is_own(call: Call) -> bool:
    return call.name.startswith("ridgeline::")


def _working(chain: Sequence[Call]) -> Call | None:
    """The operator whose work a kernel does: the innermost with a formula, of a convolution the general one."""
    near = [call for call in chain[:_LEVELS_UP] if not call.name.startswith(BACKWARD)]
    if near and near[0].name in _CONVOLUTIONS:
        near = [call for call in near if call.name == _CONVOLUTION] or near
    return next((call for call in near if works_of(call, 4) is not None), near[0] if near else None)


def _timed(kernels: Sequence[Kernel], ceilings: Ceilings | None) -> tuple[Kernel, ...]:
    """The kernels with the time in which each runs alone, and their roofline times."""
    alone, _ = alone_and_shared([(kernel.activity.start_s, kernel.activity.end_s) for kernel in kernels])
    pairs = zip(kernels, alone, strict=True)
    return tuple(replace(kernel, exposed_s=alone_s, floor_s=floor_s(kernel, ceilings)) for kernel, alone_s in pairs)


def _parameters(calls: Sequence[Call], kernels: Sequence[Kernel]) -> tuple[tuple[Dims, str], ...]:
    """Shapes and dtype of the parameters: the first list of the optimizer's largest call, and what its kernel works in.

    A trace has no lists of more than 30 tensors, nor the type of their members.
    """
    updates = [call for call in calls if call.lists and ("_fused_adam" in call.name or "_fused_sgd" in call.name)]
    updates = updates or _last_of_optimizer(calls, kernels)
    largest = max(updates, key=lambda call: len(call.lists[0]), default=None)
    if largest is None:
        return ()
    dtype = next((kernel.known.dtype for kernel in kernels if kernel.call is largest), "")
    return tuple((dims, _WORDS.get(dtype, "")) for dims in largest.lists[0])


def _last_of_optimizer(calls: Sequence[Call], kernels: Sequence[Kernel]) -> list[Call]:
    """The calls that update parameters in the end: of those over lists in an optimizer's step the last of each size."""
    within = {id(kernel.call) for kernel in kernels if kernel.phase == "optimizer"}
    ends = [call for call in calls if call.lists and id(call) in within and call.name in _UPDATES]
    return list({len(call.lists[0]): call for call in ends}.values())
