"""Profile: everything one profile found, as it is saved, shown, compared and explained. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.finding import Abstention, Finding

SCHEMA_VERSION = 2  # 2: idle time, waits and waterfall are those of the unprofiled step
UNTRACED = "not in the trace"  # a bar of the waterfall: what an unprofiled step takes beyond the traced one


@dataclass(frozen=True)
class WallTime:
    """Unprofiled time of a step: median and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float
    n: int


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name, or of one name and shape, in one step."""

    name: str
    shapes: str  # "" when grouped by name alone or not recorded
    count: int
    total_s: float
    mean_s: float
    median_s: float
    min_s: float
    max_s: float
    sigma_s: float
    grid: str  # "1024x1x1", or "various"
    category: str
    dtype: str
    layout: str
    tensor_core: str  # "yes", "no", "unknown"
    phase: str
    op: str
    module: str  # "" or the module that has most of the time
    intensity: float | None  # FLOP/B
    bound: str  # "compute", "memory", ""
    of_roof: float | None  # floor over time
    exposed_s: float


@dataclass(frozen=True)
class CopyRow:
    """Copies or fills of one name in one step."""

    name: str  # "Memcpy HtoD (Pageable -> Device)"
    count: int
    total_s: float
    bytes: int
    exposed_s: float


@dataclass(frozen=True)
class SyncRow:
    """Waits of the host at one place in one step."""

    call: str
    source: str
    under: str
    count: int
    waited_s: float
    bubble_s: float


@dataclass(frozen=True)
class Bar:
    """One piece of the step's waterfall; the pieces add up to the step."""

    name: str  # "convolution", "norm", … "sync bubble", "launch gap", "loader"
    seconds: float
    idle: bool


@dataclass(frozen=True)
class Lane:
    """One activity or gap of the timeline, for drawing."""

    start_s: float  # from the beginning of the step
    duration_s: float
    stream: int
    name: str
    category: str


@dataclass(frozen=True)
class Point:
    """One kernel group in the roofline chart."""

    name: str
    flops: float  # a step
    bytes: float
    seconds: float
    pipe: str


@dataclass(frozen=True)
class Calibration:
    """What a finding promised and what its fix brought."""

    rule: str
    low_s: float
    mid_s: float
    high_s: float
    realised_s: float

    @property
    def hit(self) -> bool:
        return self.low_s <= self.realised_s <= self.high_s


@dataclass(frozen=True)
class Profile:
    """One profile of one step. Seconds are of one step; shares are of `step_s`.

    `kernels` adds up to it, with overlap removed, idle time, and what is not in the trace. Idle time and bubbles have
    the profiler's own time taken out (`step_edit.unprofiled`), where somebody timed the step without it; `timeline`
    stays as traced.
    """

    subject: str
    command: str  # how to make it again
    gpu: str  # that the trace is from; where the trace names none, the one whose ceilings were asked for
    environment: Mapping[str, str]  # versions, driver, clocks, temperature, precision switches
    wall: WallTime | None
    traced_step_s: float  # the profiler's own time included
    busy_s: float
    idle: Mapping[str, float]  # by cause
    overlap_s: float  # kernel time that ran beside other kernels: sum of rows - overlap + idle = step
    kernels: tuple[KernelRow, ...]  # by (name, shapes), largest first
    by_name: tuple[KernelRow, ...]
    copies: tuple[CopyRow, ...]
    syncs: tuple[SyncRow, ...]
    waterfall: tuple[Bar, ...]
    timeline: tuple[Lane, ...]
    points: tuple[Point, ...]
    peaks: Mapping[str, float]  # FLOP/s by pipe, and "bandwidth" in B/s
    peaks_measured: bool
    attributed_share: float  # of kernel time that has an operator
    module_share: float  # of kernel time that has a module
    coverage: float | None  # kernel time of the trace over event-timed GPU time; None where nobody timed it
    floor_s: float | None  # sum of the kernels' roofline times, those without formula at their own time
    findings: tuple[Finding, ...]  # ranked
    abstentions: tuple[Abstention, ...]
    remaining_s: tuple[float, ...] = ()  # step time left after the first, the first two … findings, by the edited trace
    calibrations: tuple[Calibration, ...] = ()
    schema_version: int = SCHEMA_VERSION
    extra: Mapping[str, str] = field(default_factory=dict)
    ceilings_gpu: str = ""  # whose ceilings these are, where not those of `gpu`

    @property
    def step_s(self) -> float:
        """Time of a step, of which shares are told: the unprofiled median; the traced one where nobody timed it."""
        return self.wall.median_s if self.wall else self.traced_step_s
