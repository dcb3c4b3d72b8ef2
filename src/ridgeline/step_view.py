"""Records of one training or inference step with every kernel attributed: what rules, tables and reports read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.trace import Activity, Call, Launch

CAUSES = ("loader", "sync", "launch", "copy", "compile", "unknown")  # why the GPU stood idle


@dataclass(frozen=True)
class KernelClass:
    """What a kernel's name says about it."""

    category: str  # one of kernel_names.CATEGORIES: "conv", "gemm", "attention", "norm", "pointwise", "layout" …
    tensor_core: bool | None  # None: the name does not tell
    dtype: str = ""  # "bf16", "fp16", "tf32", "fp32", "fp8", "" where the name does not tell
    layout: str = ""  # "nhwc", "nchw", ""
    pass_: str = ""  # "fprop", "dgrad", "wgrad", ""


@dataclass(frozen=True)
class Kernel:
    """One activity of the step and everything that is known about it."""

    activity: Activity
    known: KernelClass
    call: Call | None = None  # the innermost operator that launched it, or its like in an eager step
    op: str = ""  # the operator a person would name: "aten.convolution", "triton_poi_fused_…", "" where unattributed
    module: str = ""  # dotted path, or "Conv2d_3" where that is all the trace has
    source: str = ""  # "net.py:42", "" without stacks
    phase: str = "other"  # or "forward", "backward", "optimizer"
    shapes: str = ""  # the problem in words, "" without shapes: "128x256x32x32 * 256x256x3x3"
    flops: float | None = None
    bytes: float | None = None  # compulsory traffic; None where no formula knows
    floor_s: float | None = None  # roofline time on the measured ceilings, else data sheet
    exposed_s: float = 0.0  # part of its time in which nothing else runs on the GPU: what removing it can save
    in_graph: bool = False  # ran inside a CUDA graph

    @property
    def seconds(self) -> float:
        return self.activity.duration_s


@dataclass(frozen=True)
class Gap:
    """A stretch in which the GPU stood idle."""

    start_s: float
    duration_s: float
    cause: str  # one of CAUSES
    evidence: tuple[int, ...] = ()  # ids of the events that tell: the wait, the loader's range, the late launch


@dataclass(frozen=True)
class Sync:
    """The host waited for the GPU: where, and the bubble after it."""

    launch: Launch
    call: Call | None  # "aten::item", "aten::nonzero", …
    source: str
    waited_s: float  # how long the host stood still; mostly real work of the GPU
    bubble_s: float  # GPU idle from the end of the wait until the next kernel begins: what removing the wait can save
    under: str = ""  # the outermost named operator or range around it: "clip_grad_norm_", "Optimizer.step#AdamW.step"


@dataclass(frozen=True)
class Ceilings:
    """What the GPU can do: measured where `ridgeline doctor` ran there, else the data sheet."""

    gpu: str
    sm_count: int
    bandwidth: float  # B/s, read + written
    peaks: Mapping[str, float]  # FLOP/s by pipe: "tensor_bf16", "cuda_fp32" …
    l2_bytes: float
    measured: bool


@dataclass(frozen=True)
class Step:
    """One representative step (the median of those traced), all times in seconds within the trace.

    Invariant: the union of the kernels' times plus the gaps' is `duration_s`.
    """

    index: int
    start_s: float
    duration_s: float
    kernels: tuple[Kernel, ...]  # kernels, copies and fills, by start
    gaps: tuple[Gap, ...]
    syncs: tuple[Sync, ...]
    launches: tuple[Launch, ...]
    calls: tuple[Call, ...]
    wall_s: float | None  # median of unprofiled steps; None when nobody timed them
    ceilings: Ceilings | None  # None: the GPU is unknown, so nothing may be said in seconds of its roofline
    loader_s: float = 0.0  # host time within the loader's next()
    trained: bool = False  # an optimizer ran
    options: frozenset[str] = frozenset()  # of the trace, as Trace.options
    settings: Mapping[str, str] = field(default_factory=dict)  # torch switches and versions the profiler wrote down
    parameters: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape and dtype of each, where known

    @property
    def busy_s(self) -> float:
        """Length of the union of GPU work."""
        return self.duration_s - sum(gap.duration_s for gap in self.gaps)

    @property
    def idle_s(self) -> float:
        return sum(gap.duration_s for gap in self.gaps)
