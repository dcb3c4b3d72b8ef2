"""Rules on number formats: tensor cores, TF32, autocast, weights cast every step, switches of cuDNN.

L6 tensor cores not used, L7 TF32 off, L8 fp32 where 16 bits would do, L9 weights cast again and again, L12 the search
for algorithms off, L13 deterministic algorithms on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ridgeline import units
from ridgeline.finding import Abstention, Edit, Finding, Saving
from ridgeline.rules._kernels import (
    COMPILE,
    COMPILE_BF16_STEP,
    HALVES,
    copied,
    elements,
    faster,
    freed_s,
    matrix,
    problem_of,
    saving_of,
    switched,
    unseen,
    verb,
    without_kernels,
)
from ridgeline.rules._rule import evidence, exposed_of, notable, part_of_step, plural, seconds_of, unset
from ridgeline.step_view import Kernel, Step
from ridgeline.trace import Dims

# a kernel on faster units keeps so much of the ratio of the two peaks; the rest goes to loads, epilogues, small maps
_REACHED = 0.7
_STREAMING_S = 1e-5  # a pointwise kernel this long is bound by memory; a shorter one by its launch
_HALVABLE = ("pointwise", "norm", "pool", "concat", "upsample", "softmax", "copy")
_CONVOLUTIONS_MATTER = 0.05  # of the step
# of convolutions and products, but without their arithmetic; a product with one vector is bound by memory
_HELPERS = re.compile(r"splitkreduce|offsets|im2col|col2im|gemv|dot_kernel|flip_filter|dotkernel", re.IGNORECASE)
_UNKNOWN_GPU = "the GPU's ceilings are unknown: run `ridgeline doctor` there"


def missed_tensor_cores(step: Step) -> Iterator[Finding | Abstention]:
    """L6: convolutions and products in a dtype that tensor cores take run on kernels without them.

    Holds for 16-bit operands, and for fp32 where TF32 is allowed (L7 speaks where it is not), with channels that are
    multiples of 8 (L11), ungrouped. A kernel whose name does not tell is unknown, not missed.
    """
    kernels = [kernel for kernel in _arithmetic(step) if not kernel.op.startswith("ridgeline")]
    unknown = [kernel for kernel in kernels if kernel.known.tensor_core is None]
    if 2 * seconds_of(unknown) > seconds_of(kernels):
        yield Abstention(
            "L6",
            f"the names of {len(unknown)} of {len(kernels)} kernels do not tell whether they use tensor cores: "
            f"look at their instructions with Nsight Compute",
        )
    found = [kernel for kernel in kernels if kernel.known.tensor_core is False and _takes_tensor_cores(step, kernel)]
    if not found or not notable(step, exposed_of(found)):
        return
    edit, saving = _on_faster_units(step, found, tf32=True)
    nchw = [kernel for kernel in found if kernel.known.layout == "nchw"]
    why = f", {len(nchw)} of them on NCHW tensors" if nchw else ""
    yield Finding(
        rule="L6",
        title=f"{plural(len(found), 'kernel')} that tensor cores could run do without{why}",
        fix="Give convolutions channels-last tensors and channels in multiples of 8; for products, contiguous 16-bit "
        "operands.",
        verb=verb(step, training=COMPILE_BF16_STEP, inference=COMPILE),
        saving=saving,
        effort="S",
        confidence="modelled" if saving else "unknown",
        wrong_if="the kernel is bound by memory already, or its name hides that it uses tensor cores",
        evidence=evidence(found),
        edit=edit,
        note=_ratio_note(saving),
    )


def tf32_off(step: Step) -> Iterator[Finding]:
    """L7: fp32 convolutions and products run at full precision because TF32 is off.

    Holds for GPUs with TF32. Where the switch was not written down, products count as switched off, PyTorch's default,
    when their kernels say fp32; convolutions count as switched on.
    """
    if step.ceilings and "tensor_tf32" not in step.ceilings.peaks:
        return
    found = [
        kernel
        for kernel in _arithmetic(step)
        if _operands(kernel) == "fp32" and kernel.known.dtype != "tf32" and not _tf32_allowed(step, kernel)
        if kernel.known.tensor_core is False
    ]
    if not found or not notable(step, exposed_of(found)):
        return
    edit, saving = _on_faster_units(step, found, tf32=True)
    yield Finding(
        rule="L7",
        title=f"{plural(len(found), 'fp32 kernel')} run without tensor cores because TF32 is off",
        fix="torch.set_float32_matmul_precision('high') for products, torch.backends.cudnn.allow_tf32 = True for "
        "convolutions.",
        verb=verb(step, training="", inference="ridgeline.compile(…, ridgeline.Recipe(dtype='fp32'))"),
        saving=saving,
        effort="S",
        confidence="modelled" if saving else "unknown",
        wrong_if="the model needs more than 10 bits of mantissa; TF32 also amplifies noise before batch norms",
        evidence=evidence(found),
        edit=edit,
        note=_ratio_note(saving),
    )


def autocast_off(step: Step) -> Iterator[Finding | Abstention]:
    """L8: most convolutions and products have fp32 operands, where 16 bits would halve bytes and speed up arithmetic.

    Holds for GPUs with 16-bit tensor cores. Kernels bound by memory and longer than 10 µs count as halved.
    """
    kernels = [kernel for kernel in _arithmetic(step) if not kernel.op.startswith("ridgeline")]
    found = [kernel for kernel in kernels if _operands(kernel) == "fp32"]
    if not found or 2 * seconds_of(found) < seconds_of(kernels) or not notable(step, exposed_of(found)):
        return
    dtype = "bf16" if step.trained else "fp16"
    if step.ceilings is None:
        yield Abstention("L8", _UNKNOWN_GPU)
        return
    if f"tensor_{dtype}" not in step.ceilings.peaks:
        return
    streamed = [k for k in step.kernels if k.known.category in _HALVABLE and k.seconds > _STREAMING_S]
    arithmetic = _on_faster_units(step, found, tf32=False)[0]
    edit = Edit(seconds={**{kernel.activity.id: kernel.seconds / 2 for kernel in streamed}, **arithmetic.seconds})
    if not notable(step, freed_s(step, edit)):
        return
    share = part_of_step(step, exposed_of(found))
    yield Finding(
        rule="L8",
        title=f"{len(found)} of {len(kernels)} convolutions and products, {units.percent(share)} of the step, are fp32",
        fix=f"Run forward pass and loss under torch.autocast('cuda', {dtype}); weights and reductions stay fp32.",
        verb=verb(
            step,
            training=COMPILE_BF16_STEP,
            inference="ridgeline.compile(…, ridgeline.Recipe(dtype='fp16'))",
        ),
        saving=saving_of(step, edit, low=0.5 * freed_s(step, arithmetic) / freed_s(step, edit)),
        effort="S",
        confidence="modelled",
        wrong_if="the model loses accuracy in 16 bits, or casts of weights and norms take back what is won",
        evidence=evidence(found),
        edit=edit,
        note="least: half of what arithmetic gains; middle: also half the time of memory-bound kernels",
    )


def recast_weights(step: Step) -> Iterator[Finding | Abstention]:
    """L9: autocast makes 16-bit copies of the fp32 weights in every step, or at every use.

    Holds where casts have the shape of a weight that a convolution or product of this step takes. Needs shapes.
    """
    if any(_operands(kernel) in ("fp16", "bf16") for kernel in _arithmetic(step)):
        yield from unseen("L9", [kernel for kernel in step.kernels if kernel.known.category == "copy"], "copies")
    weights = _weight_shapes(step)
    copies = [(kernel, copy) for kernel in step.kernels if (copy := copied(kernel)) and copy.dims in weights]
    casts = [kernel for kernel, copy in copies if copy.narrows]
    gradients = [kernel for kernel, copy in copies if copy.widens]
    found = [*casts, *(gradients if step.trained else ())]
    edit = without_kernels(step, found)
    if not casts or not notable(step, freed_s(step, edit)):
        return
    moved_bytes = sum(6 * elements(copy.dims) for kernel, copy in copies if kernel.activity.id in edit.seconds)
    most = max(Counter(copy.dims for _, copy in copies if copy.narrows).values())
    yield Finding(
        rule="L9",
        title=f"{plural(len(casts), 'cast')} of weights to 16 bits in a step, {units.nbytes(moved_bytes)} moved",
        fix=verb(
            step,
            training="Keep 16-bit weights beside fp32 masters and let the optimizer write both, as a step's "
            "`weight_copies` do with a torch.optim.AdamW.",
            inference="Cast the weights of convolutions and products once, when the model is loaded; leave norms fp32.",
        ),
        verb=verb(step, training=COMPILE_BF16_STEP, inference=COMPILE),
        saving=saving_of(step, edit, low=0.0 if step.trained else 0.7),
        effort="L" if step.trained else "S",
        confidence="modelled",
        wrong_if="the tensors only share their shape with weights, or norms were cast too (they must stay fp32)",
        evidence=evidence(found),
        edit=edit,
        note=f"the most frequent shape is cast {most} times a step; under inference_mode autocast keeps no copies",
    )


def algorithm_search_off(step: Step) -> Iterator[Finding | Abstention]:
    """L12: cuDNN picks algorithms by rule of thumb, without timing them. Holds for steps with cuDNN convolutions."""
    convolutions = _cudnn(step)
    if exposed_of(convolutions) < _CONVOLUTIONS_MATTER * step.duration_s:
        return
    yield from unset("L12", step, ["cudnn.benchmark"], remedy="`ridgeline profile` writes it down")
    if switched(step, "cudnn.benchmark") is False:
        yield Finding(
            rule="L12",
            title=f"cudnn.benchmark is off for {plural(len(convolutions), 'convolution kernel')}",
            fix="Try torch.backends.cudnn.benchmark = True and time the step: a few seconds tell.",
            verb="",
            saving=None,
            effort="S",
            confidence="unknown",
            wrong_if="shapes vary, so that every new one is searched again, or runs must repeat bit for bit",
            evidence=evidence(convolutions),
        )


def deterministic_on(step: Step) -> Iterator[Finding | Abstention]:
    """L13: only deterministic algorithms are allowed, which rules out the fastest weight gradients."""
    convolutions = _cudnn(step)
    if exposed_of(convolutions) < _CONVOLUTIONS_MATTER * step.duration_s:
        return
    yield from unset("L13", step, ["cudnn.deterministic"], remedy="`ridgeline profile` writes it down")
    if switched(step, "cudnn.deterministic"):
        yield Finding(
            rule="L13",
            title="deterministic algorithms are required while time is what counts",
            fix="Allow the others in runs that need not repeat bit for bit: torch.use_deterministic_algorithms(False), "
            "torch.backends.cudnn.deterministic = False; then time the step.",
            verb="",
            saving=None,
            effort="S",
            confidence="unknown",
            wrong_if="runs must repeat bit for bit",
            evidence=evidence(convolutions),
        )


def _arithmetic(step: Step) -> list[Kernel]:
    return [kernel for kernel in matrix(step) if not _HELPERS.search(kernel.activity.name)]


def _cudnn(step: Step) -> list[Kernel]:
    return [k for k in step.kernels if k.known.category == "conv" and not k.op.startswith("ridgeline")]


def _operands(kernel: Kernel) -> str:
    """ "fp32", "bf16", "fp16", "fp8" or "" by the operator's arguments, else by the kernel's name."""
    problem = problem_of(kernel)
    if problem and problem.dtype:
        return {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}.get(problem.dtype, "")
    return "fp32" if kernel.known.dtype == "tf32" else kernel.known.dtype


def _tf32_allowed(step: Step, kernel: Kernel) -> bool:
    if kernel.known.category == "conv":
        return switched(step, "cudnn.allow_tf32") is not False
    return switched(step, "cuda.matmul.allow_tf32") is True


def _takes_tensor_cores(step: Step, kernel: Kernel) -> bool:
    problem = problem_of(kernel)
    if problem and (problem.groups > 1 or any(count % 8 for count in problem.channels)):
        return False
    operands = _operands(kernel)
    unit = "tensor_tf32" if operands == "fp32" else f"tensor_{operands}"
    if step.ceilings and unit not in step.ceilings.peaks:
        return False
    return _tf32_allowed(step, kernel) if operands == "fp32" else operands in ("fp16", "bf16")


def _on_faster_units(step: Step, kernels: Iterable[Kernel], *, tf32: bool) -> tuple[Edit, Saving | None]:
    """The kernels on tensor cores: fp32 operands as TF32 or, without, in 16 bits. No saving without ceilings.

    Middle: a share of the ratio of the peaks; most: all of it; never below the time to move the kernel's bytes.
    """
    if step.ceilings is None:
        return Edit(), None
    peaks = step.ceilings.peaks
    halves = "tensor_bf16" if "tensor_bf16" in peaks else "tensor_fp16"
    middle: dict[int, float] = {}
    best: dict[int, float] = {}
    for kernel in kernels:
        target = "tensor_tf32" if tf32 and _operands(kernel) == "fp32" else halves
        ratio = _rate_now(kernel, peaks) / peaks[target]
        narrower = 1.0 if tf32 else 0.5
        moved_s = narrower * (kernel.bytes or 0.0) / step.ceilings.bandwidth
        middle[kernel.activity.id] = max(kernel.seconds * ratio / _REACHED, moved_s)
        best[kernel.activity.id] = max(kernel.seconds * ratio, moved_s)
    edit = faster(step, middle)
    return edit, saving_of(step, edit, high_s=freed_s(step, faster(step, best)))


def _rate_now(kernel: Kernel, peaks: Mapping[str, float]) -> float:
    """FLOP/s of the unit that the kernel runs on."""
    on_tensor_cores = kernel.known.tensor_core or kernel.known.dtype == "tf32"
    return peaks.get("tensor_tf32" if on_tensor_cores else "cuda_fp32", peaks["cuda_fp32"])


def _ratio_note(saving: Saving | None) -> str:
    if saving is None:
        return _UNKNOWN_GPU
    return f"most: time in the ratio of the units' peaks; middle: {units.percent(_REACHED, 0)} of that ratio"


def _weight_shapes(step: Step) -> set[Dims]:
    """Shapes of weights and biases: as written down, else those that 16-bit convolutions and products take."""
    if step.parameters:
        return {dims for dims, _ in step.parameters}
    problems = [problem_of(kernel) for kernel in matrix(step)]
    taken = {problem.w for problem in problems if problem and problem.dtype in HALVES}
    # a linear layer's weight is multiplied transposed
    taken |= {dims[::-1] for dims in taken if len(dims) == 2}
    return taken | {dims[:1] for dims in taken}
