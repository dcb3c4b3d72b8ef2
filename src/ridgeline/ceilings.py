"""What one GPU reaches by measurement: copy, matmul and convolution rates, launch costs, with the circumstances."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F

from ridgeline import units
from ridgeline.cache import cache_path, read_json, write_json
from ridgeline.cudagraph import capture
from ridgeline.errors import EnvironmentUnusable
from ridgeline.timing import Timing, gpu_state, time_callable

_log = logging.getLogger(__name__)

_SCHEMA = 1
_DRIFT = 0.03  # a second look at the first ceiling that is further off than this shows unsteady clocks
_MATMUL_MNK = ((4096, 4096, 4096), (8192, 8192, 4096), (8192, 8192, 8192), (16384, 8192, 8192))
_CONV_NCHW = ((32, 256, 64, 64), (32, 512, 32, 32))  # as many output channels as input channels, 3x3
_CHAIN = (32, 288)  # lengths whose difference in time is free of the graph's own launch
_DTYPES = {
    "tensor_bf16": torch.bfloat16,
    "tensor_fp16": torch.float16,
    "tensor_tf32": torch.float32,
    "cuda_fp32": torch.float32,
    "tensor_fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one GPU reached, with the circumstances. `peaks` serves as `DeviceSpec.with_measured`'s argument."""

    gpu: str
    date: str  # ISO 8601, UTC
    torch: str
    driver: str
    clocks_mhz: float | None
    temperature_c: float | None
    power_limit_w: float | None
    utilization_percent: float | None  # before the first measurement: another process at work?
    peaks: dict[
        str, float
    ]  # FLOP/s by pipe, best matmul of the sweep on random data; "bandwidth" in B/s, read + written
    conv: dict[str, float]  # FLOP/s of NHWC 3x3 convolutions, by "tensor_bf16 32x256x64x64"
    kernel_gap_s: float  # one more tiny dependent kernel in a CUDA graph
    graph_launch_s: float  # one CUDA graph of one tiny kernel
    drift: float  # the first matmul ceiling measured again at the end, relative change
    schema: int = _SCHEMA

    @property
    def cautions(self) -> tuple[str, ...]:
        """Reasons to measure again."""
        found = []
        if abs(self.drift) > _DRIFT:
            found.append(f"the first ceiling changed by {units.percent(self.drift)} while the others were measured")
        if self.utilization_percent:
            found.append(f"the GPU was {self.utilization_percent:.0f} % busy before the first measurement")
        return tuple(found)

    def lines(self) -> Iterator[str]:
        clocks = f"SM clock {self.clocks_mhz:.0f} MHz, " if self.clocks_mhz else ""
        power = f"power limit {self.power_limit_w:.0f} W, " if self.power_limit_w else ""
        yield f"ceilings of {self.gpu}, measured {self.date} ({clocks}{power}driver {self.driver}, torch {self.torch})"
        yield f"  {'copy':<32}  {units.bandwidth(self.peaks['bandwidth'])}"
        for pipe in _DTYPES:
            if pipe in self.peaks:
                yield f"  {'matmul ' + pipe:<32}  {units.rate(self.peaks[pipe])}"
        for shape, rate in self.conv.items():
            yield f"  {'conv3x3 ' + shape:<32}  {units.rate(rate)}"
        yield f"  {'dependent kernel in a graph':<32}  {units.seconds(self.kernel_gap_s)}"
        yield f"  {'launch of one graph':<32}  {units.seconds(self.graph_launch_s)}"
        yield from (f"  caution: {caution}" for caution in self.cautions)


def load_ceilings(gpu_name: str) -> Ceilings | None:
    """The stored ceilings of this GPU; None when there are none or they are of another format."""
    stored = read_json(_ceilings_path(gpu_name))
    names = {field.name for field in fields(Ceilings)}
    if not isinstance(stored, dict) or stored.keys() != names or stored["schema"] != _SCHEMA:
        if stored is not None:
            _log.warning("%s: ignored, not in this version's format", _ceilings_path(gpu_name))
        return None
    return Ceilings(**stored)


def measure_ceilings() -> Ceilings:
    """Measure every ceiling on the current GPU (about a minute) and store them.

    Raises EnvironmentUnusable without a GPU.
    """
    if not torch.cuda.is_available():
        raise EnvironmentUnusable(
            "ceilings are measured on a GPU, and torch sees none: use the data sheet with --gpu NAME"
        )
    before = gpu_state()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    pipes = pipes_of((properties.major, properties.minor))
    peaks = {"bandwidth": _copy_bandwidth("cuda", max(4 * properties.L2_cache_size, 2**30))}
    peaks |= {pipe: max(_matmul_rate(pipe, mnk, "cuda") for mnk in _MATMUL_MNK) for pipe in pipes}
    conv = {f"{pipes[0]} {_by(nchw)}": _conv_rate(pipes[0], nchw, "cuda") for nchw in _CONV_NCHW}
    kernel_gap_s, graph_launch_s = _graph_costs()
    again = max(_matmul_rate(pipes[0], mnk, "cuda") for mnk in _MATMUL_MNK)
    after = gpu_state()
    ceilings = Ceilings(
        gpu=properties.name,
        date=now(),
        torch=torch.__version__,
        driver=after.driver if after else "unknown",
        clocks_mhz=after.sm_clock_mhz if after else None,
        temperature_c=after.temperature_c if after else None,
        power_limit_w=after.power_limit_w if after else None,
        utilization_percent=before.utilization_percent if before else None,
        peaks=peaks,
        conv=conv,
        kernel_gap_s=kernel_gap_s,
        graph_launch_s=graph_launch_s,
        drift=again / peaks[pipes[0]] - 1,
    )
    write_json(_ceilings_path(ceilings.gpu), asdict(ceilings))
    return ceilings


def pipes_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """The pipes worth measuring on a compute capability, the main 16-bit one first."""
    ampere = ("tensor_bf16", "tensor_fp16", "tensor_tf32") if capability >= (8, 0) else ("tensor_fp16",)
    fp8 = ("tensor_fp8",) if capability >= (8, 9) else ()
    return (*ampere, *fp8, "cuda_fp32")


def _copy_bandwidth(device: str, buffer_bytes: int) -> float:
    source = torch.empty(buffer_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time(lambda: target.copy_(source), device).median_s


def _matmul_rate(pipe: str, mnk: tuple[int, int, int], device: str) -> float:
    m, n, k = mnk
    # random data: zeros toggle no wires and run 13 % faster on an H200 than anything real
    a = torch.randn(m, k, device=device).to(_DTYPES[pipe])
    b = torch.randn(n, k, device=device).to(_DTYPES[pipe]).t()
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        if pipe == "tensor_fp8":
            return torch.ops.aten._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return a @ b

    with _set(torch.backends.cuda.matmul, "fp32_precision", "tf32" if pipe == "tensor_tf32" else "ieee"):
        return 2 * m * n * k / _time(product, device).median_s


def _conv_rate(pipe: str, nchw: tuple[int, int, int, int], device: str) -> float:
    channels = nchw[1]
    x = torch.randn(nchw, device=device).to(_DTYPES[pipe], memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(x.dtype, memory_format=torch.channels_last)
    with _set(torch.backends.cudnn, "benchmark", True):
        median_s = _time(lambda: F.conv2d(x, weight, padding=1), device).median_s
    return 2 * x.numel() * channels * 9 / median_s


def _graph_costs() -> tuple[float, float]:
    """Seconds of one more dependent kernel inside a CUDA graph, and of a graph with a single kernel."""
    x = torch.randn(1, device="cuda")

    def graph_s(length: int) -> float:
        def chain(y: torch.Tensor) -> None:
            for _ in range(length):
                y.neg_()  # reads what the kernel before it wrote

        return _time(capture(chain, (x,)).replay, "cuda", l2="warm").median_s

    short, long = _CHAIN
    return (graph_s(long) - graph_s(short)) / (long - short), graph_s(1)


def _time(fn: Callable[[], object], device: str, *, l2: str = "cold") -> Timing:
    # the CPU path exists so that every shape and formula above is tested without a GPU
    if device == "cpu":
        return time_callable(fn, warmup=1, repeats=5, method="host", log_clocks=False)
    return time_callable(fn, warmup=5, repeats=30, l2="warm" if l2 == "warm" else "cold", log_clocks=False)


@contextmanager
def _set(target: object, name: str, value: object) -> Iterator[None]:
    """Change one of torch's global switches for the duration of a measurement."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _ceilings_path(gpu_name: str) -> Path:
    return cache_path("ceilings", gpu_name)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
