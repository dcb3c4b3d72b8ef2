"""Golden profiles made in code: a diffusion training step that hurts in known ways, and the same step after fixes.

Everything follows from the list of kernels below, so that rows, timeline, waterfall and totals agree by construction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.finding import Abstention, Finding, Saving
from ridgeline.profile_record import (
    UNTRACED,
    Bar,
    CopyRow,
    KernelRow,
    Lane,
    Point,
    Profile,
    SyncRow,
    WallTime,
)

PEAKS = {"tensor_bf16": 791e12, "tensor_fp8": 1490e12, "cuda_fp32": 58e12, "bandwidth": 4.2e12}
HOSTILE = "void at::native::<unnamed>::fill<script>alert('x')</script>|`*_\x1b[31m&(float*, int)"


@dataclass(frozen=True)
class Kind:
    """Kernels of one name and shape: `count` of them, `us` microseconds each, FLOPs and bytes a launch."""

    name: str
    category: str
    count: int
    us: float
    shapes: str = ""
    phase: str = "forward"
    op: str = ""
    module: str = ""
    dtype: str = "bf16"
    layout: str = ""
    tensor_core: str = "no"
    flops: float | None = None
    bytes: float | None = None
    grid: str = "1024x1x1"
    jitter: float = 0.02


BASELINE = (
    Kind(
        "sm90_xmma_fprop_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1",
        "conv", 40, 212.0, "128x256x32x32 * 256x256x3x3", op="aten.convolution", module="up.0.resnets.0.conv1",
        layout="nhwc", tensor_core="yes", flops=154.6e9, bytes=1.4e8, grid="1024x2x1",
    ),
    Kind(
        "sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
        "conv", 40, 244.0, "128x256x32x32 * 256x256x3x3", phase="backward", op="aten.convolution_backward",
        module="up.0.resnets.0.conv1", layout="nhwc", tensor_core="yes", flops=154.6e9, bytes=1.4e8,
    ),
    Kind(
        "cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized_bf16_128x128_32x5_nhwc_align8>",
        "conv", 40, 301.0, "128x256x32x32 * 256x256x3x3", phase="backward", op="aten.convolution_backward",
        module="up.0.resnets.0.conv1", layout="nhwc", tensor_core="yes", flops=154.6e9, bytes=1.4e8,
    ),
    Kind(
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true, "
        "(cudnnKernelDataType_t)2>",
        "layout", 120, 41.0, "128x256x32x32", op="aten.convolution", module="up.0.resnets.0.conv1", layout="nchw",
        bytes=1.34e8,
    ),
    Kind(
        "triton_red_fused__to_copy_native_group_norm_silu_6", "norm", 60, 62.0, op="aten.native_group_norm",
        module="up.0.resnets.0.norm1", bytes=1.34e8, flops=5.0e8,
    ),
    Kind("triton_poi_fused_add_silu_12", "pointwise", 90, 21.5, op="aten.silu", bytes=6.7e7, flops=1.6e8, jitter=0.6),
    Kind(
        "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention", 9, 55.0,
        "128x4x256x64", op="aten._scaled_dot_product_flash_attention", module="mid.attn", tensor_core="yes",
        flops=8.6e9, bytes=6.7e7,
    ),
    Kind("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "gemm", 24, 18.0, "32768x256x256", op="aten.mm", tensor_core="unknown",
         flops=4.3e9, bytes=3.4e7, grid="132x1x1"),
    Kind(
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
        "at::native::(anonymous namespace)::TensorListMetadata<4>, "
        "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<3>>(T1, T2, T3)",
        "optimizer", 220, 6.4, phase="optimizer", op="aten._foreach_addcmul_", dtype="fp32", bytes=2.4e6,
    ),
    Kind(HOSTILE, "fill", 12, 1.9, phase="other", dtype=""),
)  # fmt: skip
COPY = ("Memcpy HtoD (Pageable -> Device)", 1, 1.6e-4, 1_572_864)

FINDINGS = (
    Finding(
        rule="L1", title="120 layout kernels around convolutions take 4.92 ms of the step",
        fix="Keep weights and activations channels-last from the input to the loss.",
        verb='ridgeline.compile_step(…, recipe=StepRecipe(channels_last=True))',
        saving=Saving(4.1e-3, 4.92e-3, 11e-3), effort="S", confidence="measured",
        wrong_if="a kernel between the convolutions is slower in NHWC than what the conversions cost",
        evidence=(4711, 4715, 4722), source="ddpm/unet.py:88", note="sum of the kernels' exposed time",
    ),
    Finding(
        rule="H9", title="the GPU idles 3.10 ms between kernels because launches come late",
        fix="Capture the step in one CUDA graph.", verb="ridgeline.compile_step(…)",
        saving=Saving(1.55e-3, 2.8e-3, 3.1e-3), effort="M", confidence="measured",
        wrong_if="the profiler itself slowed the host", evidence=(901, 902),
    ),
    Finding(
        rule="H5", title=f".item() stops the host: bubble of 2.20 ms under {HOSTILE}",
        fix="Add the loss up on the GPU and read it every 100 steps.", verb="",
        saving=Saving(1.9e-3, 2.2e-3, 2.2e-3), effort="S", confidence="measured",
        wrong_if="the bubble hides work that would then be waited for", evidence=(77,), source="train.py:31",
    ),
    Finding(
        rule="K20", title="12 fills of 1.9 µs", fix="Allocate with empty.", verb="", saving=None, effort="S",
        confidence="unknown", wrong_if="the fills are wanted", evidence=(),
    ),
)  # fmt: skip
ABSTENTIONS = (
    Abstention("L4", "needs the tensors' strides: profile with shapes recorded"),
    Abstention("K14", f"needs counters of the {HOSTILE} kernel"),
)
WALL = WallTime(0.0441, 0.0437, 0.0449, 50)
BUBBLES = {"sync": "sync bubble", "launch": "launch gap", "loader": "loader"}
IDLE = {"sync": 2.2e-3, "launch": 3.1e-3, "loader": 0.4e-3}


def made(
    kinds: Sequence[Kind] = BASELINE,
    *,
    wall: WallTime | None = WALL,
    findings: tuple[Finding, ...] = FINDINGS,
    idle: dict[str, float] = IDLE,
    subject: str = "ddpm-cifar10",
) -> Profile:
    """The profile of a step that runs `kinds` one after the other on one stream, round robin, with `idle` between."""
    lanes = _timeline(kinds, idle)
    copy_s = COPY[2]
    copy = Kind(COPY[0], "memcpy", COPY[1], copy_s * 1e6, phase="other", dtype="", grid="", jitter=0.0)
    rows = tuple(sorted((_row(kind) for kind in (*kinds, copy)), key=lambda row: -row.total_s))
    busy_s = sum(row.total_s for row in rows)
    categories = dict.fromkeys(row.category for row in rows)
    bars = [Bar(name, sum(row.total_s for row in rows if row.category == name), False) for name in categories]
    step_s = busy_s + sum(idle.values())
    # what the profiler adds lies in the gaps
    shrunk = (wall.median_s - busy_s) / sum(idle.values()) if wall and idle and busy_s < wall.median_s < step_s else 1.0
    idle = {cause: shrunk * idle_s for cause, idle_s in idle.items()}
    bars += [Bar(BUBBLES[cause], idle_s, True) for cause, idle_s in idle.items()]
    beyond_s = wall.median_s - step_s if wall else 0.0
    bars += [Bar(UNTRACED, beyond_s, True)] if beyond_s > 1e-9 else []
    left, remaining = wall.median_s if wall else step_s, []
    for finding in findings:
        left -= finding.saving.mid_s if finding.saving else 0.0
        remaining.append(left)
    return Profile(
        subject=subject,
        command=f"ridgeline profile -- python train.py --name '{subject}'",
        gpu="NVIDIA H200",
        environment={"torch": "2.11.0", "driver": "570.86", "SM clock": "1980 MHz", "temperature": "52 °C"},
        wall=wall,
        traced_step_s=step_s,
        busy_s=busy_s,
        idle=idle,
        overlap_s=0.0,
        kernels=rows,
        by_name=tuple(replace(row, shapes="") for row in rows),
        copies=(CopyRow(COPY[0], COPY[1], copy_s, COPY[3], copy_s),),
        syncs=(SyncRow("aten::item", "train.py:31", "train_step", 1, 0.031, 2.2e-3),),
        waterfall=tuple(bars),
        timeline=lanes,
        points=tuple(
            Point(f"{kind.name} {kind.shapes}".strip(), kind.count * kind.flops, kind.count * kind.bytes,
                  _row(kind).total_s, "tensor_bf16" if kind.tensor_core == "yes" else "cuda_fp32")
            for kind in kinds if kind.flops and kind.bytes
        ),
        peaks=PEAKS,
        peaks_measured=True,
        attributed_share=0.987,
        module_share=0.81,
        coverage=0.992,
        floor_s=0.0239,
        findings=findings,
        abstentions=ABSTENTIONS,
        remaining_s=tuple(remaining),
    )  # fmt: skip


def after_fixes() -> Profile:
    """The same step channels-last and in one graph: no layout kernels, no idle, faster convolutions."""
    kinds = [replace(kind, us=kind.us * 0.97) for kind in BASELINE if kind.category != "layout"]
    fixed = made(kinds, wall=WallTime(0.0362, 0.0360, 0.0365, 50), findings=FINDINGS[3:], idle={"launch": 0.2e-3})
    return replace(fixed, environment={**fixed.environment, "SM clock": "1965 MHz"})


def huge() -> Profile:
    """A page's worst case: every list longer than it can show, every text longer than anybody reads."""
    base = made()
    kinds = [
        replace(kind, name=f"{kind.name}{'<' * 700}{index}", shapes=f"{index}x", count=30, us=kind.us + index)
        for index in range(60)
        for kind in BASELINE
    ]  # fmt: skip
    findings = tuple(
        replace(FINDINGS[0], evidence=tuple(range(100000, 100020)), source=f"net.py:{i}") for i in range(60)
    )
    return replace(made(kinds, findings=findings), environment=base.environment)


def empty() -> Profile:
    """What is left when nothing but a step's length is known."""
    return replace(
        made((), wall=None, findings=(), idle={}), kernels=(), by_name=(),
        copies=(), syncs=(), waterfall=(), timeline=(), points=(), peaks={},
        abstentions=(), environment={}, coverage=None, floor_s=None, traced_step_s=0.0, busy_s=0.0,
        attributed_share=0.0, module_share=0.0,
    )  # fmt: skip


def _row(kind: Kind) -> KernelRow:
    samples = _samples(kind)
    sigma_s = statistics.pstdev(samples)
    floor_s = max((kind.flops or 0.0) / PEAKS["tensor_bf16"], (kind.bytes or 0.0) / PEAKS["bandwidth"])
    intensity = kind.flops / kind.bytes if kind.flops and kind.bytes else None
    ridge = PEAKS["tensor_bf16"] / PEAKS["bandwidth"]
    return KernelRow(
        name=kind.name,
        shapes=kind.shapes,
        count=kind.count,
        total_s=math.fsum(samples),
        mean_s=statistics.fmean(samples),
        median_s=statistics.median(samples),
        min_s=min(samples),
        max_s=max(samples),
        sigma_s=sigma_s,
        grid=kind.grid,
        category=kind.category,
        dtype=kind.dtype,
        layout=kind.layout,
        tensor_core=kind.tensor_core,
        phase=kind.phase,
        op=kind.op,
        module=kind.module,
        intensity=intensity,
        bound="" if intensity is None else "compute" if intensity > ridge else "memory",
        of_roof=floor_s * kind.count / math.fsum(samples) if floor_s else None,
        exposed_s=math.fsum(samples),
    )


def _samples(kind: Kind) -> list[float]:
    """Durations in seconds around `us`, a sine instead of chance."""
    return [kind.us * 1e-6 * (1 + kind.jitter * math.sin(7 * index + kind.us)) for index in range(kind.count)]


def _timeline(kinds: Sequence[Kind], idle: dict[str, float]) -> tuple[Lane, ...]:
    queues = [(kind, _samples(kind)) for kind in kinds]
    order = [(kind, left[turn]) for turn in range(max((kind.count for kind in kinds), default=0))
             for kind, left in queues if turn < len(left)]  # fmt: skip
    lanes, at_s = [Lane(0.0, COPY[2], 13, COPY[0], "memcpy")], COPY[2]
    gap_after = {int(len(order) * (i + 1) / (len(idle) + 1)): cause for i, cause in enumerate(idle)}
    for index, (kind, duration_s) in enumerate(order):
        lanes.append(Lane(at_s, duration_s, 7, kind.name, kind.category))
        at_s += duration_s
        if index in gap_after:
            cause = gap_after[index]
            lanes.append(Lane(at_s, idle[cause], -1, BUBBLES[cause], cause))
            at_s += idle[cause]
    return tuple(lanes)
