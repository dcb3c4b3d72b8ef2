"""Roofline arithmetic: what bounds an operator on a GPU, how close a measured time came, and when FP8 pays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.specs import DeviceSpec

# the cost package imports torch for its dispatch mode, and this file must work without it
if TYPE_CHECKING:
    from ridgeline.cost import Cost

# Bytes a separate pass moves per input element to make FP8 out of 16-bit data.
QUANTISE_STATIC = 3.0  # read 2, write 1: the scale is known beforehand
QUANTISE_DYNAMIC = 5.0  # one more read of 2 for the largest magnitude
QUANTISE_FUSED = -1.0  # the producer writes 1 byte in place of 2


@dataclass(frozen=True, slots=True)
class Bound:
    """The three lower bounds of one operator's time, in seconds."""

    compute_s: float
    memory_s: float
    launch_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s, self.launch_s)

    @property
    def limiter(self) -> str:
        """The largest of "compute", "memory" and "launch"; a tie of the first two goes to memory."""
        if self.launch_s > max(self.compute_s, self.memory_s):
            return "launch"
        return "compute" if self.compute_s > self.memory_s else "memory"


def bound(cost: Cost, spec: DeviceSpec, *, launch_s: float = 0.0) -> Bound:
    """Lower bounds of `cost` on `spec`. Raises EnvironmentUnusable when the GPU lacks the cost's pipe."""
    if launch_s < 0:
        raise ValueError(f"bound: launch_s must be at least 0, got {launch_s}")
    # a copy does no FLOPs, so it runs even where its dtype has no arithmetic unit
    compute_s = cost.flops / spec.rate(cost.pipe) if cost.flops else 0.0
    return Bound(compute_s, cost.bytes / spec.bandwidth, launch_s)


def ridge(spec: DeviceSpec, pipe: str) -> float:
    """The intensity in FLOP/B above which `pipe`, and no longer the memory, is the limit."""
    return spec.rate(pipe) / spec.bandwidth


def attainable(intensity: float, spec: DeviceSpec, pipe: str) -> float:
    """The roof in FLOP/s over `intensity` FLOP/B."""
    if intensity < 0:
        raise ValueError(f"attainable: intensity must be at least 0 FLOP/B, got {intensity}")
    return min(spec.rate(pipe), intensity * spec.bandwidth)


@dataclass(frozen=True, slots=True)
class Attained:
    """Roofline time over measured time. Above 1 is a diagnosis, not a prize: kept as it is, its causes named."""

    fraction: float
    limiter: str
    likely_causes: tuple[str, ...]

    @property
    def flagged(self) -> bool:
        return bool(self.likely_causes)


def attained(cost: Cost, seconds: float, spec: DeviceSpec) -> Attained:
    """How much of the roof a run of `cost` in `seconds` reached."""
    if not seconds > 0:
        raise ValueError(f"attained: seconds must be above 0, got {seconds}")
    limits = bound(cost, spec)
    fraction = limits.seconds / seconds
    causes = _CAUSES[limits.limiter] if fraction > 1 else ()
    return Attained(fraction, limits.limiter, causes)


_CAUSES = {
    "compute": (
        "a Winograd or FFT kernel does fewer FLOPs than the direct formula",
        "the kernel ran in another dtype than the cost says (TF32 for fp32, fp16 accumulation)",
        "the FLOP convention differs (2 per multiply-accumulate; groups; padding)",
        "the GPU ran above the clock of its data sheet",
        "the timed region left part of the work out",
    ),
    "memory": (
        "the data was still in L2 from the previous run",
        "the kernel was fused with a neighbour and did not move these bytes",
        "the dtype is narrower than the cost says",
        "the timed region left part of the work out",
    ),
}


@dataclass(frozen=True, slots=True)
class Waves:
    """Output tiles of a matrix product over the SMs; efficiency 1 means that the last wave is full."""

    tiles: int
    waves: float
    efficiency: float


def waves(tiles: int, sm_count: int) -> Waves:
    """Wave quantisation of `tiles` output tiles, one tile an SM at a time."""
    if min(tiles, sm_count) < 1:
        raise ValueError(f"waves: both must be at least 1, got {tiles=}, {sm_count=}")
    count = tiles / sm_count
    return Waves(tiles, count, count / math.ceil(count))


@dataclass(frozen=True, slots=True)
class Fp8Choice:
    """Roofline times of a convolution or matmul in bf16 and in FP8, the latter with its quantisation pass."""

    bf16_s: float
    fp8_s: float

    @property
    def speedup(self) -> float:
        return self.bf16_s / self.fp8_s

    @property
    def pays(self) -> bool:
        return self.speedup > 1


def fp8_pays(
    flops: float,
    input_elements: int,
    weight_elements: int,
    output_elements: int,
    spec: DeviceSpec,
    *,
    quantise_bytes: float = QUANTISE_STATIC,
) -> Fp8Choice:
    """bf16 against FP8 with 1-byte operands and a 2-byte output.

    `quantise_bytes` is per input element; weights count as quantised beforehand. Pass a spec `with_measured` ceilings
    where there are any: data sheets promise more than kernels reach. Raises EnvironmentUnusable on a GPU without FP8.
    """
    if flops <= 0 or min(input_elements, weight_elements, output_elements) < 1:
        raise ValueError(
            f"fp8_pays: needs work and data, got {flops=}, {input_elements=}, {weight_elements=}, {output_elements=}"
        )
    bf16_bytes = 2 * (input_elements + weight_elements + output_elements)
    bf16_s = max(flops / spec.rate("tensor_bf16"), bf16_bytes / spec.bandwidth)
    fp8_s = fp8_seconds(flops, input_elements + weight_elements, 2 * output_elements, spec)
    return Fp8Choice(bf16_s, fp8_s + quantise_bytes * input_elements / spec.bandwidth)


def fp8_seconds(flops: float, operand_elements: float, result_bytes: float, spec: DeviceSpec) -> float:
    """Roofline time of a product whose operands are FP8 already. Raises EnvironmentUnusable on a GPU without FP8."""
    return max(flops / spec.rate("tensor_fp8"), (operand_elements + result_bytes) / spec.bandwidth)


def fp8_break_even_filters(kernel_area: int, spec: DeviceSpec, *, quantise_bytes: float = QUANTISE_STATIC) -> float:
    """Output channels above which FP8 wins for a stride-1, compute-bound convolution of `kernel_area` = R·S taps.

    Per input element: 2·K·R·S FLOP at the bf16 rate = the same at the FP8 rate + quantise_bytes at the bandwidth.
    """
    saved_s_per_filter = 2 * kernel_area * (1 / spec.rate("tensor_bf16") - 1 / spec.rate("tensor_fp8"))
    if saved_s_per_filter <= 0:
        return math.inf
    return max(quantise_bytes, 0.0) / spec.bandwidth / saved_s_per_filter
