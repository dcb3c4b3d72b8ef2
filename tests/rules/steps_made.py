"""Steps made by hand for tests of rules: pieces in the order in which the GPU meets them, durations in microseconds.

    step(work(20, "sm90_xmma_fprop_…", category="conv"), idle(5), wait("aten::item", bubble=80), work(10), wall=130)

`work` runs on the GPU, `idle` is a gap with its cause, `wait` a synchronisation of the host with the bubble after it.
Ids count up from 1 in the order of the pieces; each kernel's launch and operator have ids of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ridgeline.step_view import Ceilings, Gap, Kernel, KernelClass, Step, Sync
from ridgeline.trace import Activity, Call, Dims, Launch

US = 1e-6
# an H200 as `ridgeline doctor` measures it, rounded: tests reckon with these
H200 = Ceilings(
    gpu="NVIDIA H200",
    sm_count=132,
    bandwidth=4.3e12,
    peaks={
        "tensor_bf16": 790e12,
        "tensor_fp16": 790e12,
        "tensor_tf32": 395e12,
        "cuda_fp32": 60e12,
        "tensor_fp8": 1400e12,
    },
    l2_bytes=60e6,
    measured=True,
)
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


@dataclass(frozen=True)
class Work:
    """One activity of the GPU. `beside`: it starts with the piece before it, on another stream."""

    us: float
    name: str = POINTWISE
    known: KernelClass = field(default_factory=lambda: KernelClass("pointwise", False))
    kind: str = "kernel"
    call: Call | None = None
    beside: bool = False
    lead: float = 100.0  # µs from the end of its launch to its start: large where the host runs ahead
    launch: str = "cudaLaunchKernel"  # "" where the trace has none
    launch_us: float = 4.0
    activity: Mapping[str, object] = field(default_factory=dict)  # further fields of Activity: grid, stream, bytes …
    kernel: Mapping[str, object] = field(default_factory=dict)  # further fields of Kernel: op, module, floor_s …


@dataclass(frozen=True)
class Idle:
    """The GPU stands idle; `call` and `runtime` name what the host is doing all the while."""

    us: float
    cause: str = "launch"
    call: str = ""
    runtime: str = ""


@dataclass(frozen=True)
class Wait:
    """The host waits until the GPU is done, and the GPU then idles for `bubble`."""

    call: str = "aten::item"
    bubble: float = 50.0
    waited: float = 500.0
    called: float = 1.0  # µs from the begin of its operator to that of the wait
    runtime: str = "cudaStreamSynchronize"
    source: str = ""
    under: str = ""


def work(us: float, name: str = POINTWISE, *, category: str = "pointwise", **more: object) -> Work:
    """A kernel. Further keywords are fields of Work, KernelClass, Activity or Kernel, each put where it belongs.

    `bytes` is the traffic of a kernel, or what a copy or fill moves. A kernel `in_graph` has no launch of its own.
    """
    if more.get("in_graph"):
        more.setdefault("launch", "")
    bytes_of = Kernel if more.get("kind", "kernel") == "kernel" else Activity
    known = {"tensor_core": None, **_taken(more, KernelClass)}
    kernel = _taken(more, Kernel, *(["bytes"] if bytes_of is Activity else []))
    activity = _taken(more, Activity, *(["bytes"] if bytes_of is Kernel else []))
    own = {key: value for key, value in more.items() if key in _OWN}
    unknown = set(more) - {*own, *known, *kernel, *activity}
    if unknown:
        raise TypeError(f"work: {sorted(unknown)} are fields of no record")
    return Work(us, name, KernelClass(category, **known), activity=activity, kernel=kernel, **own)


def copy(us: float, name: str = "Memcpy HtoD (Pinned -> Device)", *, nbytes: int = 0, **more: object) -> Work:
    return work(us, name, category="copy", kind="memcpy", launch="cudaMemcpyAsync", bytes=nbytes, **more)


def fill(us: float, *, nbytes: int = 4096, **more: object) -> Work:
    return work(us, "Memset (Device)", category="fill", kind="memset", launch="cudaMemsetAsync", bytes=nbytes, **more)


def idle(us: float, cause: str = "launch", *, call: str = "", runtime: str = "") -> Idle:
    return Idle(us, cause, call, runtime)


def wait(call: str = "aten::item", *, bubble: float = 50.0, **more: object) -> Wait:
    return Wait(call, bubble, **more)


def op(
    name: str,
    *shapes: Dims,
    dtypes: tuple[str, ...] = (),
    strides: tuple[Dims, ...] = (),
    concrete: tuple[str, ...] = (),
    sequence: int = -1,
) -> Call:
    """An operator to give to `work(call=…)`; its place in time is set by `step`. Dtypes are "float" unless given."""
    dtypes = dtypes or ("float",) * len(shapes)
    return Call(0, name, 0.0, 0.0, 1, 0, sequence, 0, shapes, dtypes, strides, concrete)


def step(
    *pieces: Work | Idle | Wait,
    wall: float | None = -1.0,
    ceilings: Ceilings | None = H200,
    options: frozenset[str] = frozenset({"record_shapes", "cuda_sync_events"}),
    **more: object,
) -> Step:
    """The step made of `pieces`. `wall` in µs: by default what the pieces add up to, None where nobody timed it.

    Further keywords are fields of Step: trained, settings, parameters, loader_s …
    """
    made = _Making()
    for piece in pieces:
        made.add(piece)
    duration_s = made.now_s
    wall_s = duration_s if wall == -1.0 else wall if wall is None else wall * US
    loader_s = sum(gap.duration_s for gap in made.gaps if gap.cause == "loader")
    return Step(
        index=0,
        start_s=0.0,
        duration_s=duration_s,
        kernels=exposed(tuple(sorted(made.kernels, key=lambda kernel: kernel.activity.start_s))),
        gaps=tuple(made.gaps),
        syncs=tuple(made.syncs),
        launches=tuple(sorted(made.launches, key=lambda launch: launch.start_s)),
        calls=tuple(sorted(made.calls, key=lambda call: call.start_s)),
        wall_s=wall_s,
        ceilings=ceilings,
        options=options,
        **{"loader_s": loader_s, **more},
    )


def exposed(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels with `exposed_s` set: counted instant by instant, slowly and plainly."""
    edges = sorted({edge for k in kernels for edge in (k.activity.start_s, k.activity.end_s)})
    alone: dict[int, float] = {}
    for begin_s, end_s in pairwise(edges):
        running = [k for k in kernels if k.activity.start_s <= begin_s and k.activity.end_s >= end_s]
        if len(running) == 1:
            alone[running[0].activity.id] = alone.get(running[0].activity.id, 0.0) + end_s - begin_s
    return tuple(replace(k, exposed_s=alone.get(k.activity.id, 0.0)) for k in kernels)


class _Making:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.begun_s = 0.0  # where the last piece of work began
        self.kernels: list[Kernel] = []
        self.gaps: list[Gap] = []
        self.syncs: list[Sync] = []
        self.launches: list[Launch] = []
        self.calls: list[Call] = []
        self._id = 0

    def add(self, piece: Work | Idle | Wait) -> None:
        {Work: self._work, Idle: self._idle, Wait: self._wait}[type(piece)](piece)

    def _next(self) -> int:
        self._id += 1
        return self._id

    def _work(self, piece: Work) -> None:
        start_s = self.begun_s if piece.beside else self.now_s
        id_ = self._next()
        fields = {"device": 0, "stream": 20 if piece.beside else 7, "correlation": id_, **piece.activity}
        launched_s = start_s - piece.lead * US
        call = piece.call
        if call is not None:
            start = launched_s - (piece.launch_us + 2) * US
            call = replace(call, id=self._next(), start_s=start, duration_s=(piece.launch_us + 3) * US)
            self.calls.append(call)
        if piece.launch:
            duration_s = piece.launch_us * US
            launch = Launch(self._next(), piece.launch, launched_s - duration_s, duration_s, 1, fields["correlation"])
            self.launches.append(launch)
        activity = Activity(
            id=id_, kind=piece.kind, name=piece.name, start_s=start_s, duration_s=piece.us * US, **fields
        )
        self.kernels.append(Kernel(activity, piece.known, call, **piece.kernel))
        self.begun_s = start_s
        self.now_s = max(self.now_s, activity.end_s)

    def _idle(self, piece: Idle) -> None:
        evidence = []
        if piece.call:
            evidence.append(self._next())
            self.calls.append(Call(evidence[-1], piece.call, self.now_s, piece.us * US, 1, 0))
        if piece.runtime:
            evidence.append(self._next())
            self.launches.append(Launch(evidence[-1], piece.runtime, self.now_s, piece.us * US, 1, evidence[-1]))
        self._gap(piece.us, piece.cause, tuple(evidence))

    def _wait(self, piece: Wait) -> None:
        id_ = self._next()
        launch = Launch(id_, piece.runtime, self.now_s - piece.waited * US, piece.waited * US, 1, id_)
        call = None
        if piece.call:
            called_s = launch.start_s - piece.called * US
            call = Call(self._next(), piece.call, called_s, launch.end_s - called_s, 1, 0)
            self.calls.append(call)
        self.launches.append(launch)
        sync = Sync(launch, call, piece.source, piece.waited * US, piece.bubble * US, piece.under)
        self.syncs.append(sync)
        self._gap(piece.bubble, "sync", (id_,))

    def _gap(self, us: float, cause: str, evidence: tuple[int, ...]) -> None:
        self.gaps.append(Gap(self.now_s, us * US, cause, evidence))
        self.now_s += us * US
        self.begun_s = self.now_s  # what runs beside a gap begins after it


# fields of Work that win over their namesakes in the records
_OWN = {"kind", "call", "beside", "lead", "launch", "launch_us"}


def _taken(more: Mapping[str, object], record: type, *without: str) -> dict[str, object]:
    names = set(record.__dataclass_fields__) - _OWN - set(without)
    return {key: value for key, value in more.items() if key in names}
