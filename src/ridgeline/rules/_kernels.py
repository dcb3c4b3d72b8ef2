"""What rules about kernels share: neighbours on a stream, memory formats, problems of convolutions and products.

Formats are those of 4-D tensors [N, C, H, W] by their strides: "nchw" is contiguous, "nhwc" channels-last.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ridgeline.finding import Abstention, Edit, Saving
from ridgeline.rules._rule import saving
from ridgeline.step_view import Kernel, Step
from ridgeline.trace import Dims

# what a trace calls the types of tensors, and their bytes an element
ITEM_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "int": 4, "long": 8, "long int": 8, "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip
HALVES = ("c10::Half", "c10::BFloat16")
NO_SHAPES = "profile with record_shapes=True and, where kernels ran in a CUDA graph, trace one eager step beside it"
# bare names of the operators that convolve and multiply; of each, where the weight (or second factor) stands
_CONVOLUTIONS = {
    "conv2d": 1, "convolution": 1, "_convolution": 1, "convolution_overrideable": 1, "cudnn_convolution": 1,
    "cudnn_convolution_relu": 1, "cudnn_convolution_add_relu": 1, "_conv_depthwise2d": 1, "thnn_conv2d": 1,
    "_slow_conv2d_forward": 1, "conv2d_act": 1, "depthwise_conv2d_act": 1, "convolution_backward": 2,
}  # fmt: skip
# those whose arguments tell a transposed convolution, whose weight is [in, out / groups, R, S]
_TRANSPOSABLE = ("convolution", "_convolution", "convolution_overrideable", "convolution_backward")
_PRODUCTS = {"mm": 1, "matmul": 1, "bmm": 1, "linear": 1, "addmm": 2, "baddbmm": 2, "_addmm_activation": 2}
# pauses that go with the kernel before them; waits and the loader's stay
_PAUSES = ("launch", "unknown")
_COMPILED_CAST = re.compile(r"triton_\w+?_fused__to_copy(_t|_view)*(_\d+)?$")
_TOUCHING_S = 1e-8  # a gap begins where a kernel ends, up to the trace's rounding


def bare(name: str) -> str:
    """`bare("aten::copy_") == bare("aten.copy_") == "copy_"`."""
    return name.replace("::", ".").rpartition(".")[2]


def called(kernel: Kernel) -> str:
    """The bare name of the innermost operator, "" where none is known."""
    return bare(kernel.call.name) if kernel.call else bare(kernel.op)


def names_of(kernel: Kernel) -> tuple[str, str]:
    """Bare names of the innermost operator and of the one a person would name: a copy within a norm has both."""
    return called(kernel), bare(kernel.op)


def streams(step: Step) -> list[list[Kernel]]:
    """The step's work stream by stream, each in order: what follows on a stream waits for what stands before."""
    lanes: defaultdict[tuple[int, int], list[Kernel]] = defaultdict(list)
    for kernel in step.kernels:
        lanes[kernel.activity.device, kernel.activity.stream].append(kernel)
    return list(lanes.values())


def runs(step: Step, belongs: Callable[[Kernel], bool]) -> Iterator[list[Kernel]]:
    """Longest stretches of a stream whose kernels all belong."""
    for lane in streams(step):
        run: list[Kernel] = []
        for kernel in lane:
            if belongs(kernel):
                run.append(kernel)
                continue
            if run:
                yield run
            run = []
        if run:
            yield run


def by_call(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Kernels that one call of an operator launched, together; without a call each stands alone."""
    groups: defaultdict[tuple[str, int], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[("call", kernel.call.id) if kernel.call else ("kernel", kernel.activity.id)].append(kernel)
    return list(groups.values())


def has_shapes(kernel: Kernel) -> bool:
    return kernel.call is not None and bool(kernel.call.shapes)


def unseen(rule: str, kernels: Sequence[Kernel], what: str) -> Iterator[Abstention]:
    """The abstention where most of the time of the kernels that a rule judges has no shapes."""
    blind = [kernel for kernel in kernels if not has_shapes(kernel)]
    if 2 * sum(kernel.seconds for kernel in blind) > sum(kernel.seconds for kernel in kernels):
        yield Abstention(rule, f"{len(blind)} of {len(kernels)} {what} carry no shapes: {NO_SHAPES}")


def item_bytes(dtype: str) -> int:
    """Bytes an element of a type as a trace spells it; 4 for one that is not known."""
    return ITEM_BYTES.get(dtype, 4)


def elements(dims: Dims) -> int:
    return math.prod(dims)


def format_of(dims: Dims, strides: Dims) -> str:
    """ "nchw", "nhwc", "both" where axes of one element leave it open, "" for other tensors."""
    if len(dims) != 4 or len(strides) != 4 or 0 in dims:
        return ""
    is_nchw, is_nhwc = (_dense(dims, strides, axes) for axes in ((3, 2, 1, 0), (1, 3, 2, 0)))
    if is_nchw and is_nhwc:
        return "both"
    return "nchw" if is_nchw else "nhwc" if is_nhwc else ""


def _dense(dims: Dims, strides: Dims, axes: tuple[int, ...]) -> bool:
    """Whether the axes, the fastest first, lie without holes; the stride of an axis of one element says nothing."""
    expected = 1
    for axis in axes:
        if dims[axis] == 1:
            continue
        if strides[axis] != expected:
            return False
        expected *= dims[axis]
    return True


def formats(kernel: Kernel) -> tuple[str, ...]:
    """Formats of the operator's tensor arguments, in order."""
    if kernel.call is None:
        return ()
    return tuple(map(format_of, kernel.call.shapes, kernel.call.strides))


def largest_bytes(kernel: Kernel) -> float:
    """Bytes of the largest tensor that the kernel's operator got."""
    if kernel.call is None:
        return 0.0
    pairs = zip(kernel.call.shapes, kernel.call.dtypes, strict=False)
    return max((elements(dims) * ITEM_BYTES.get(dtype, 0) for dims, dtype in pairs if dims), default=0.0)


@dataclass(frozen=True)
class Problem:
    """A convolution or matrix product as its operator was called."""

    input_elements: int  # of the activation; of the first factor
    weight_elements: int  # of the filter; of the second factor
    channels: tuple[int, int]  # in and out: both must be even multiples for tensor cores
    area: int  # taps of the filter; 1 for a product
    groups: int
    x: Dims
    w: Dims
    dtype: str  # of the activation, as the trace spells it
    transposed: bool = False  # a transposed convolution

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.w[1] == 1

    def output_elements(self, flops: float) -> float:
        """Elements of the output, from the FLOPs of one pass over the problem, which is no transposed convolution."""
        depth = self.area * self.channels[0] // self.groups
        return flops / (2 * depth)


def problem_of(kernel: Kernel) -> Problem | None:
    """The problem behind a kernel; None for other operators and where no shapes are known."""
    if kernel.call is None:
        return None
    name, shapes = called(kernel), kernel.call.shapes
    at = _CONVOLUTIONS.get(name, _PRODUCTS.get(name, 0))
    if not at or len(shapes) <= at:
        return None
    x, w = shapes[at - 1], shapes[at]
    if min((*x, *w), default=0) < 1:
        return None
    dtype = kernel.call.dtypes[at - 1] if len(kernel.call.dtypes) > at - 1 else ""
    if name in _CONVOLUTIONS:
        if len(x) != 4 or len(w) != 4:
            return None
        arguments = kernel.call.concrete[5 + at :] if name in _TRANSPOSABLE else ()
        if arguments[:1] == ("True",):
            groups = int(arguments[2]) if len(arguments) > 2 and arguments[2].isdigit() else 1
            return Problem(elements(x), elements(w), (x[1], w[1] * groups), w[2] * w[3], groups, x, w, dtype, True)
        if x[1] % w[1]:
            return None
        return Problem(elements(x), elements(w), (x[1], w[0]), w[2] * w[3], x[1] // w[1], x, w, dtype)
    if len(x) < 2 or len(w) < 2:
        return None
    out = w[-2] if name == "linear" else w[-1]
    return Problem(elements(x), elements(w), (x[-1], out), 1, 1, x, w, dtype)


def pass_of(kernel: Kernel) -> str:
    """ "fprop", "dgrad" or "wgrad" of a convolution, by its name or by the problem in words; else ""."""
    word = kernel.shapes.partition(" ")[0]
    if word in ("dgrad", "wgrad"):
        return word
    # the gradient of a stride-1 convolution's input is a convolution, and some libraries run it as one
    return "dgrad" if called(kernel) == "convolution_backward" and kernel.known.pass_ == "fprop" else kernel.known.pass_


def convolves(kernel: Kernel) -> bool:
    """Whether the kernel does a convolution's arithmetic, or helps within its call."""
    return kernel.known.category == "conv" or any(name in _CONVOLUTIONS for name in names_of(kernel))


def matrix(step: Step) -> list[Kernel]:
    """The kernels that convolve or multiply matrices."""
    return [kernel for kernel in step.kernels if kernel.known.category in ("conv", "gemm")]


@dataclass(frozen=True)
class Copied:
    """What a copy kernel makes of what: shape of the target, types as the trace spells them."""

    dims: Dims
    target: str
    source: str

    @property
    def narrows(self) -> bool:
        return self.target in HALVES and self.source == "float"

    @property
    def widens(self) -> bool:
        return self.target == "float" and self.source in HALVES


def copied(kernel: Kernel) -> Copied | None:
    """The copy that a kernel is: copy_(target, source), or a compiled cast (source, target); None for other kernels."""
    call = kernel.call
    if call is None or min(len(call.shapes), len(call.dtypes)) < 2:
        return None
    if called(kernel) == "copy_":
        return Copied(call.shapes[0], call.dtypes[0], call.dtypes[1])
    if _COMPILED_CAST.match(called(kernel)):
        return Copied(call.shapes[1], call.dtypes[1], call.dtypes[0])
    return None


def typical_gap_s(step: Step) -> float:
    """Median of the pauses between kernels that wait for nothing but their launch."""
    pauses = [gap.duration_s for gap in step.gaps if gap.cause in _PAUSES]
    return median(pauses) if pauses else 0.0


def without_kernels(step: Step, kernels: Iterable[Kernel]) -> Edit:
    """The step without the kernels and without the pause that their launches bring with them."""
    kernels = list(kernels)
    typical_s = typical_gap_s(step)
    starts = [gap.start_s for gap in step.gaps]
    gaps = {}
    for kernel in kernels:
        index = bisect_left(starts, kernel.activity.end_s - _TOUCHING_S)
        if index < len(starts) and abs(starts[index] - kernel.activity.end_s) <= _TOUCHING_S:
            gap = step.gaps[index]
            if gap.cause in _PAUSES:
                gaps[index] = gap.duration_s - min(gap.duration_s, typical_s)
    return Edit(seconds={kernel.activity.id: 0.0 for kernel in kernels}, gaps=gaps)


def freed_s(step: Step, edit: Edit) -> float:
    """What the edit takes off the step by itself: exposed time in proportion, gaps as they shrink."""
    work_s = sum(
        kernel.exposed_s * (1 - edit.seconds[kernel.activity.id] / kernel.seconds)
        for kernel in step.kernels
        if kernel.activity.id in edit.seconds and kernel.seconds
    )
    return work_s + sum(step.gaps[index].duration_s - left_s for index, left_s in edit.gaps.items())


def saving_of(step: Step, edit: Edit, *, low: float = 0.5, high_s: float = 0.0) -> Saving:
    """The edit's saving as the middle, `low` of it as the least, and `high_s` (at least the middle) as the most."""
    mid_s = freed_s(step, edit)
    return saving(low * mid_s, mid_s, max(mid_s, high_s), cap_s=step.duration_s)


def faster(step: Step, seconds: Mapping[int, float]) -> Edit:
    """The step with these activities in so many seconds; one that would not get faster is left as it is."""
    now_s = {kernel.activity.id: kernel.seconds for kernel in step.kernels}
    return Edit(seconds={id_: after_s for id_, after_s in seconds.items() if after_s < now_s[id_]})


def switched(step: Step, name: str) -> bool | None:
    """A switch of torch as it was written down; None where it was not."""
    text = step.settings.get(name)
    return None if text is None else text.lower() == "true"


def verb(step: Step, *, training: str, inference: str) -> str:
    return training if step.trained else inference


COMPILE = "ridgeline.compile(module, inputs)"
COMPILE_STEP = "ridgeline.compile_step(model, loss, optimizer, batch)"
# weights and maps channels-last, NHWC group norms and their activations, sums within convolutions, 16-bit weights
COMPILE_BF16_STEP = 'ridgeline.compile_step(…, recipe="bf16")'
