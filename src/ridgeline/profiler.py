"""What a module or training step costs on a GPU: `estimate` from fake tensors and data sheets, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ridgeline.ceilings import load_ceilings
from ridgeline.cost import Cost, FusedKernel, Gemm, Trace, chain_length, fuse, trace_forward, trace_train_step, unfused
from ridgeline.errors import UsageError
from ridgeline.fp8_plan import Fp8Plan, fp8_plan
from ridgeline.report import Report, Row, UnknownOp
from ridgeline.roofline import Waves, bound, waves
from ridgeline.specs import DeviceSpec, find_spec
from ridgeline.targets import Target

# "tf32" is fp32 storage with tensor-core products
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# output tiles that convolution and matmul kernels come in, largest first, and the shortest reduction worth splitting
TILES = ((128, 256), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32))
SPLIT_K = 1024


def estimate(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    spec: DeviceSpec | str,
    *,
    train: bool = False,
    loss: Callable[..., Tensor] | None = None,
    dtype: str | None = None,
    subject: str | None = None,
) -> Report:
    """The static report of a forward pass or, with `train`, of a step: forward, loss, backward, clip, AdamW, EMA.

    inputs   positional arguments, batch first; only shapes and dtypes are read, and no GPU or memory is used
    spec     of the GPU, or its name, as `find_spec` knows it
    loss     `loss(module, *inputs)` -> scalar; default: the mean square of every floating output
    dtype    "fp32", "tf32", "fp16", "bf16"; default fp16, with `train` bf16; fp16 and bf16 training is autocast
    Raises UsageError where the forward pass depends on values, for a loss that is no scalar and an unknown GPU;
    EnvironmentUnusable where the GPU lacks the dtype.
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, (tuple, list)):
        raise UsageError(f"estimate: inputs must be a tensor or a tuple of arguments, got {type(inputs).__name__}")
    spec = _spec(spec)
    dtype = dtype or ("bf16" if train else "fp16")
    trace = _traced(module, inputs, train=train, loss=loss, dtype=dtype)
    kernels = fuse(trace.calls, results=trace.results)
    ceilings = load_ceilings(spec.name)
    return Report(
        subject=subject or type(module).__name__,
        gpu=spec.name,
        dtype=dtype,
        batch=next((x.shape[0] for x in inputs[:1] if isinstance(x, Tensor) and x.dim()), 1),
        train=train,
        parameters=trace.parameters,
        rows=_rows(unfused(trace.calls), spec),
        fused_rows=_rows(kernels, spec),
        unknown=tuple(UnknownOp(op, calls) for op, calls in trace.unknown),
        chain_length=chain_length(kernels),
        unfused_chain_length=chain_length(unfused(trace.calls)),
        weight_bytes=trace.weight_bytes,
        peaks={pipe: peak.rate for pipe, peak in spec.peaks.items()} | {"bandwidth": spec.bandwidth},
        gpu_source=spec.source,
        sm_count=spec.sm_count,
        measured=dict(ceilings.peaks) if ceilings else None,
    )


def _spec(spec: DeviceSpec | str) -> DeviceSpec:
    if isinstance(spec, str):
        return find_spec(spec)
    if not isinstance(spec, DeviceSpec):
        raise UsageError(f"estimate: spec must be a DeviceSpec, or a GPU's name as 'L4', got {type(spec).__name__}")
    return spec


def estimate_target(target: Target, spec: DeviceSpec, *, train: bool = False, dtype: str | None = None) -> Report:
    """`estimate` of what `targets.resolve` found. Raises UsageError where its forward pass fails on its inputs."""
    with _naming(target):
        return estimate(
            target.module, target.inputs, spec, train=train, loss=target.loss, dtype=dtype, subject=target.name
        )


def plan_fp8_target(
    target: Target, spec: DeviceSpec, *, train: bool = False, dtype: str | None = None, quantise: str = "static"
) -> Fp8Plan:
    """`fp8_plan` of what `targets.resolve` found, on measured ceilings where `doctor` left some for this GPU.

    Raises UsageError where the forward pass fails on its inputs.
    """
    dtype = dtype or ("bf16" if train else "fp16")
    with _naming(target):
        trace = _traced(target.module, target.inputs, train=train, loss=target.loss, dtype=dtype)
    ceilings = load_ceilings(spec.name)
    return fp8_plan(trace.calls, spec.with_measured(ceilings.peaks) if ceilings else spec, quantise=quantise)


@contextmanager
def _naming(target: Target) -> Iterator[None]:
    """What PyTorch raises for shapes that do not fit, as a sentence about the target."""
    try:
        yield
    except RuntimeError as error:
        shapes = ", ".join(f"{list(tensor.shape)}" for tensor in target.inputs)
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"{target.name}: the forward pass fails on inputs of shape {shapes}: {reason}") from error


def _traced(
    module: nn.Module, inputs: Sequence[Tensor], *, train: bool, loss: Callable[..., Tensor] | None, dtype: str
) -> Trace:
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if train:
        autocast = DTYPES[dtype] if dtype in ("fp16", "bf16") else None
        was_training = module.training
        try:
            return trace_train_step(module.train(), tuple(inputs), loss, dtype=autocast, tf32=dtype == "tf32")
        finally:
            module.train(was_training)
    return trace_forward(module, tuple(inputs), dtype=DTYPES[dtype], tf32=dtype == "tf32")


def _rows(kernels: Sequence[FusedKernel], spec: DeviceSpec) -> tuple[Row, ...]:
    """One row a kernel; those without a formula are listed as unknown instead."""
    return tuple(_row(kernel, kernel.cost, spec) for kernel in kernels if kernel.cost is not None)


def _row(kernel: FusedKernel, cost: Cost, spec: DeviceSpec) -> Row:
    anchor, swallowed = kernel.anchor, len(kernel.calls) - 1
    limit = bound(cost, spec)
    wave = _best_waves(kernel.gemm, spec.sm_count) if kernel.gemm else None
    return Row(
        layer=kernel.module,
        phase=kernel.phase,
        kind=kernel.kind,
        op=f"{anchor.op} +{swallowed}" if swallowed else anchor.op,
        shape=anchor.shape,
        calls=1,
        flops=cost.flops,
        read_bytes=cost.read_bytes,
        write_bytes=cost.write_bytes,
        pipe=cost.pipe,
        compute_s=limit.compute_s,
        memory_s=limit.memory_s,
        seconds=limit.seconds,
        limiter=limit.limiter,
        tiles=wave.tiles if wave else 0,
        waves=wave.waves if wave else 0.0,
        wave_efficiency=wave.efficiency if wave else 0.0,
    )


def _best_waves(gemm: Gemm, sm_count: int) -> Waves:
    """The wave count of the tile and split of the reduction that leave the fewest multiprocessors idle.

    A real kernel may choose worse; what is lost here, no tile of TILES avoids. Among equals the largest tile counts.
    """
    splits = range(1, max(1, min(gemm.k // SPLIT_K, sm_count)) + 1)
    options = [waves(gemm.tiles(*tile) * split, sm_count) for tile in TILES for split in splits]
    return max(options, key=lambda option: round(option.efficiency, 3))
