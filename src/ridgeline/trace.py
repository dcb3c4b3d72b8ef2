"""Records of what a profiled process did, as trace files tell it: work on the GPU, launches, operators, ranges.

Times are seconds since the first event of the trace. `id` is an event's position in its file: findings cite it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_EVENT_S = 3600.0  # what is written as longer never ended: readers make it 0 and count it

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel, copy or fill on the GPU."""

    id: int
    kind: str  # "kernel", "memcpy" or "memset"
    name: str
    start_s: float
    duration_s: float
    device: int
    stream: int
    correlation: int  # that of the call which launched it; all kernels of one graph replay share theirs
    grid: Dims = ()  # blocks by axis; () where the trace does not say, and for copies
    block: Dims = ()  # threads by axis
    registers: int = 0  # a thread
    shared_bytes: int = 0  # a block
    blocks_per_sm: float = 0.0  # of the whole grid spread evenly; 0 where unknown
    bytes: int = 0  # of a copy or fill
    graph_node: int | None = None  # which node of a CUDA graph, where the profiler says
    mark: str = ""  # that of the node: what torch.cuda._annotate_cuda_graph_trace wrote beside it

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Call:
    """One operator on the host ("aten::conv2d", "autograd::engine::evaluate_function: ConvolutionBackward0")."""

    id: int
    name: str
    start_s: float
    duration_s: float
    thread: int
    external_id: int  # shared by launches made within it; 0 where the trace has none
    sequence: int = -1  # joins a backward operator to the forward one; -1 where there is none
    forward_thread: int = 0  # the thread of the forward operator, set on backward ones
    shapes: tuple[Dims, ...] = ()  # of the tensor arguments in order, () for other arguments; empty when not recorded
    dtypes: tuple[str, ...] = ()  # "float", "c10::BFloat16", "Scalar", "" …, one an argument
    strides: tuple[Dims, ...] = ()
    concrete: tuple[str, ...] = ()  # arguments that are no tensors, as text
    lists: tuple[tuple[Dims, ...], ...] = ()  # shapes of the tensors in each argument that is a list of them

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of the CUDA runtime or driver: a launch, copy, synchronisation, allocation."""

    id: int
    name: str
    start_s: float
    duration_s: float
    thread: int
    correlation: int
    external_id: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Range:
    """A named stretch of time: record_function, ProfilerStep#N, an NVTX range, or a Python frame."""

    id: int
    name: str  # a Python frame's is "file.py(12): function" or "nn.Module: Conv2d_0"
    start_s: float
    duration_s: float
    thread: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class SyncEdge:
    """A wait that CUPTI recorded as such (`enable_cuda_sync_events`)."""

    id: int
    kind: str  # "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event"
    start_s: float
    duration_s: float
    correlation: int


@dataclass(frozen=True)
class Device:
    """The GPU as the trace names it."""

    name: str
    sm_count: int
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Trace:
    """One process's trace. Every list is sorted by start."""

    path: str
    source: str  # "kineto" or "nsys"
    devices: tuple[Device, ...]
    activities: tuple[Activity, ...]
    calls: tuple[Call, ...] = ()
    launches: tuple[Launch, ...] = ()
    ranges: tuple[Range, ...] = ()  # user annotations and NVTX, those of the host
    frames: tuple[Range, ...] = ()  # Python frames, with `with_stack`
    syncs: tuple[SyncEdge, ...] = ()
    options: frozenset[str] = frozenset()  # "record_shapes", "with_stack", "profile_memory", "cuda_sync_events" …
    rank: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)  # what else the file says of its process
