"""AdamW, clipping by the norm, moving average and bf16 copy of all parameters in one pass: two launches a step.

    s    = inverse_scale · min(1, max_norm / (norm·inverse_scale + 1e-6))          g = s·gradient
    m    = m + (1 - beta1)·(g - m)                                                 v = beta2·v + (1 - beta2)·g²
    p    = p - lr·weight_decay·p - lr/(1 - beta1^step) · m / (sqrt(v)/sqrt(1 - beta2^step) + eps)
    ema  = ema + (1 - decay(n))·(p - ema)       decay(n) = min(decay, (1 + n)/(10 + n)) with warm-up, n updates so far
    copy = p in bf16

what torch.nn.utils.clip_grads_with_norm_, torch.optim.AdamW and ridgeline.ema.Ema do one after another.

parameters, exp_avgs, exp_avg_sqs, averages   fp32, any shape, dense; all of one parameter with its strides
copies                                        bf16, likewise; None for a parameter without one
gradients                                     fp32 or bf16, each as it is, likewise; left as they are
lr, weight_decay, steps, norm, ...            fp32 scalars on the device, read anew at every step

A step that `found_inf` (1) skips leaves m, v, p and the count alone; averages and copies are written nevertheless, as
after a skipped `optimizer.step()`. The first kernel counts steps and updates and computes every number of the step in
float64; the second touches each element once. Per parameter that is, with fp32 gradients, averages and copies,

    5·4 bytes read + 4·4 + 2 bytes written = 38 bytes          (`cost`)

against 54 of a clip in place, fused AdamW, lerp and cast; the norm, computed before, reads 4 more either way. Nothing
is read on the host, so a step can be captured. Offsets of views must leave addresses that 16 divides. Raises ValueError
or TypeError for anything else.

Not in `kernels.ALL`: those ops return one tensor, are functional, and appear in exported graphs; this writes lists of
tensors in place, outside of any graph. Its meaning in plain PyTorch is that of the three named above.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ridgeline.cost import Cost
from ridgeline.kernels._adamw_ema import CHUNKS, SCALARS, SETTINGS, scalars_kernel, update_kernel
from ridgeline.kernels._nhwc import cdiv, starts_early
from ridgeline.kernels._op import Launch, check_launchable, target_of
from ridgeline.kernels.grad_norm import Gradients, send

_BLOCK_TENSORS = 128  # of the first kernel
_FLOPS = 19  # of one parameter with everything, a root and a quotient among them; it is the bytes that take the time


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters under the same numbers, with their state: what torch.optim.AdamW keeps for one of its param_groups."""

    parameters: tuple[Tensor, ...]
    exp_avgs: tuple[Tensor, ...]
    exp_avg_sqs: tuple[Tensor, ...]
    steps: tuple[Tensor, ...]  # one a parameter, counted up here
    lr: Tensor
    weight_decay: Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    averages: tuple[Tensor, ...] = ()
    copies: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Averaging:
    """The rule of the averages, as ridgeline.ema.Ema has it on the device."""

    decay: Tensor
    updates: Tensor  # counted up here
    warmup: bool = True


@dataclass(frozen=True)
class Config:
    """Elements and warps of a program."""

    block: int = 1024
    num_warps: int = 4

    @property
    def is_valid(self) -> bool:
        """Whether every thread has 4, 8 or 16 elements: 16-byte accesses in fp32, and no more than registers hold."""
        return self.num_warps in (1, 2, 4, 8, 16) and self.block / (32 * self.num_warps) in (4, 8, 16)


CONFIGS = (Config(), Config(512, 4), Config(2048, 8), Config(2048, 4))  # worth timing, the default first


@dataclass(frozen=True, eq=False)
class Plan:
    """Tables of one set of parameters. They hold addresses: build anew when a tensor is replaced."""

    groups: tuple[Group, ...]
    averaging: Averaging | None
    clips: bool
    config: Config
    chunks: Tensor  # [programs of the second kernel, len(CHUNKS)] int64
    settings: Tensor  # [tensors, len(SETTINGS)] int64
    scalars: Tensor  # [tensors, len(SCALARS)] fp32, written by the first kernel

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for group in self.groups for p in group.parameters)


def build(
    groups: Sequence[Group],
    *,
    averaging: Averaging | None = None,
    max_norm: float | None = None,
    config: Config = CONFIGS[0],
) -> Plan:
    """Check every tensor and write the tables; copies to the device, so not during a capture.

    `averaging` goes with `averages` in every group; `max_norm` None never clips.
    """
    groups = tuple(groups)
    if not config.is_valid:
        _refuse(f"{config} must have 1, 2, 4, 8 or 16 warps and 4, 8 or 16 elements a thread")
    _check_groups(groups, averaging)
    device = groups[0].lr.device
    settings = torch.tensor([row for group in groups for row in _settings(group, max_norm)], dtype=torch.int64)
    chunks = _chunks(groups, config.block)
    return Plan(
        groups=groups,
        averaging=averaging,
        clips=max_norm is not None,
        config=config,
        chunks=chunks.to(device),
        settings=settings.to(device),
        scalars=torch.zeros(len(settings), len(SCALARS), dtype=torch.float32, device=device),
    )


def locate(plan: Plan, gradients: Sequence[Tensor]) -> Gradients:
    """Check gradients, in the order of `plan.parameters`, and send their addresses to the device."""
    gradients, parameters = tuple(gradients), plan.parameters
    if len(gradients) != len(parameters):
        _refuse(f"{len(parameters)} parameters need as many gradients, got {len(gradients)}")
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient.dtype not in (torch.float32, torch.bfloat16):
            _refuse(f"gradients must be float32 or bfloat16, got {gradient.dtype}", TypeError)
        _check_like("a gradient", gradient, parameter, gradient.dtype)
    return send(gradients, plan.chunks.device)


def step_(
    plan: Plan,
    gradients: Gradients,
    *,
    norm: Tensor | None = None,
    found_inf: Tensor | None = None,
    inverse_scale: Tensor | None = None,
) -> None:
    """One step, in place: parameters, state, counts, averages and copies.

    norm            of all gradients as they are, before `inverse_scale`; with a plan that clips, and only then
    found_inf       1 skips the step
    inverse_scale   what gradients are multiplied by: the reciprocal of a loss scale
    """
    check_launchable("adamw_ema", update_kernel, plan.chunks)
    for launch in launches(plan, gradients, norm=norm, found_inf=found_inf, inverse_scale=inverse_scale):
        launch.run()
    # as PyTorch's own in-place operators do, for autograd and for those who watch weights
    increment_version([t for group in plan.groups for t in (*_kept(group), *_copies(group), *group.steps)])


def launches(
    plan: Plan,
    gradients: Gradients,
    *,
    norm: Tensor | None = None,
    found_inf: Tensor | None = None,
    inverse_scale: Tensor | None = None,
) -> tuple[Launch, ...]:
    """The launches of `step_`, in order: one where no parameter has an element. Runs nothing."""
    if (norm is not None) != plan.clips:
        _refuse("norm goes with a plan that has max_norm: give both or neither")
    for name, scalar in (("norm", norm), ("found_inf", found_inf), ("inverse_scale", inverse_scale)):
        if scalar is not None:
            _check_scalar(name, scalar, plan.chunks.device)
    averaging, pdl = plan.averaging, starts_early(target_of(plan.scalars))
    prepare = Launch(
        kernel=scalars_kernel,
        grid=(1,),
        arguments={
            "settings_ptr": plan.settings,
            "scalars_ptr": plan.scalars,
            "norm_ptr": norm,
            "found_inf_ptr": found_inf,
            "inverse_scale_ptr": inverse_scale,
            "average_decay_ptr": averaging.decay if averaging else None,
            "updates_ptr": averaging.updates if averaging else None,
            "tensors": len(plan.settings),
        },
        constants={
            "CLIP": plan.clips,
            "WARMUP": averaging is not None and averaging.warmup,
            "BLOCKS": cdiv(len(plan.settings), _BLOCK_TENSORS),
            "BLOCK": _BLOCK_TENSORS,
            "PDL": pdl,
        },
        num_warps=4,
        num_stages=1,
        output=plan.scalars,
        pdl=pdl,
    )
    if not len(plan.chunks):
        return (prepare,)
    update = Launch(
        kernel=update_kernel,
        grid=(len(plan.chunks),),
        arguments={
            "chunks_ptr": plan.chunks,
            "gradients_ptr": gradients.addresses,
            "scalars_ptr": plan.scalars,
        },
        constants={
            "GRADIENTS": gradients.dtypes,
            "AVERAGE": averaging is not None,
            "COPY": any(_copies(group) for group in plan.groups),
            "BLOCK": plan.config.block,
            "PDL": pdl,
        },
        num_warps=plan.config.num_warps,
        num_stages=1,
        output=plan.scalars,
        pdl=pdl,
    )
    return prepare, update


def cost(plan: Plan, gradients: Gradients) -> Cost:
    """Each element of each tensor once; the tables add less than 1 %."""
    kept = sum(tensor.nbytes for group in plan.groups for tensor in _kept(group))
    copies = sum(copy.nbytes for group in plan.groups for copy in _copies(group))
    flops = _FLOPS * sum(parameter.numel() for parameter in plan.parameters)
    return Cost(flops, kept + sum(gradient.nbytes for gradient in gradients.tensors), kept + copies)


def _kept(group: Group) -> Iterator[Tensor]:
    """What a step reads and writes."""
    for tensors in (group.parameters, group.exp_avgs, group.exp_avg_sqs, group.averages):
        yield from tensors


def _copies(group: Group) -> list[Tensor]:
    return [copy for copy in group.copies if copy is not None]


def _settings(group: Group, max_norm: float | None) -> Iterator[list[int]]:
    numbers = [_bits(number) for number in (*group.betas, group.eps, max_norm or 0.0)]
    for step in group.steps:
        row = [step.data_ptr(), group.lr.data_ptr(), group.weight_decay.data_ptr(), *numbers, 0]
        assert len(row) == len(SETTINGS)
        yield row


def _bits(number: float) -> int:
    """A float64 as the int64 of the same bits, so that one table holds addresses and numbers."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _chunks(groups: tuple[Group, ...], block: int) -> Tensor:
    tables = [torch.zeros(0, len(CHUNKS), dtype=torch.int64)]
    tensor = 0
    for group in groups:
        nothing = (None,) * len(group.parameters)
        lists = (group.exp_avgs, group.exp_avg_sqs, group.averages or nothing, group.copies or nothing)
        for parameter, *others in zip(group.parameters, *lists, strict=True):
            numel = parameter.numel()
            first = torch.arange(0, numel, block, dtype=torch.int64)
            columns = [
                torch.zeros_like(first) if t is None else t.data_ptr() + t.element_size() * first
                for t in (parameter, *others)
            ]
            columns += [torch.full_like(first, tensor), first, (numel - first).clamp(max=block)]
            tables.append(torch.stack(columns, dim=1))
            tensor += 1
    return torch.cat(tables)


def _check_groups(groups: tuple[Group, ...], averaging: Averaging | None) -> None:
    if not any(group.parameters for group in groups):
        _refuse("there are no parameters: give at least one group with one")
    device = groups[0].lr.device
    if averaging is not None:
        _check_scalar("decay", averaging.decay, device)
        _check_scalar("updates", averaging.updates, device)
    for group in groups:
        _check_scalar("lr", group.lr, device)
        _check_scalar("weight_decay", group.weight_decay, device)
        if not (0 <= group.betas[0] < 1 and 0 <= group.betas[1] < 1):
            _refuse(f"betas must lie in [0, 1), got {group.betas}")
        for name in ("exp_avgs", "exp_avg_sqs", "steps", "averages", "copies"):
            optional = name in ("averages", "copies") and not getattr(groups[0], name)
            expected = 0 if optional else len(group.parameters)
            if len(getattr(group, name)) != expected:
                _refuse(
                    f"{name} must hold {expected} tensors, as the first group has it, got {len(getattr(group, name))}"
                )
        if bool(group.averages) != (averaging is not None and bool(group.parameters)):
            _refuse("averages and averaging go together: give both or neither")
        for step in group.steps:
            _check_scalar("a step", step, device)
        for name in ("parameters", "exp_avgs", "exp_avg_sqs", "averages", "copies"):
            dtype = torch.bfloat16 if name == "copies" else torch.float32
            for tensor, parameter in zip(getattr(group, name), group.parameters, strict=False):
                if tensor is None:  # no copy
                    continue
                if tensor.device != device:
                    _refuse(
                        f"all tensors must be on {device}, where the first lr is, got one of {name} on {tensor.device}"
                    )
                _check_like(f"one of {name}", tensor, parameter, dtype)
    written = [t.data_ptr() for group in groups for t in (*_kept(group), *_copies(group), *group.steps) if t.numel()]
    if len(set(written)) != len(written):
        _refuse("two of the tensors written are one: list a tied parameter once, and give each its own state and step")


def _check_like(name: str, tensor: Tensor, parameter: Tensor, dtype: torch.dtype) -> None:
    """Same elements in the same order of memory, without holes, on an address for 16-byte accesses."""
    if tensor.dtype != dtype:
        _refuse(f"{name} must be {dtype}, got {tensor.dtype}", TypeError)
    if tensor.device != parameter.device:
        _refuse(f"{name} must be on its parameter's device {parameter.device}, got {tensor.device}")
    if tensor.shape != parameter.shape:
        _refuse(f"{name} must have its parameter's shape {list(parameter.shape)}, got {list(tensor.shape)}")
    # a dimension of one element may have any stride
    strides = zip(tensor.shape, tensor.stride(), parameter.stride(), strict=True)
    if any(n > 1 and ours != theirs for n, ours, theirs in strides):
        _refuse(f"{name} must have its parameter's strides {parameter.stride()}, got {tensor.stride()}")
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and reach != tensor.numel():
        _refuse(f"{name} must be dense, got strides {tensor.stride()} for shape {list(tensor.shape)}")
    if tensor.data_ptr() % 16:
        _refuse(
            f"{name} must begin at a multiple of 16 bytes, got a view at offset {tensor.storage_offset()}: clone it"
        )


def _check_scalar(name: str, scalar: Tensor, device: torch.device) -> None:
    if scalar.dtype != torch.float32 or scalar.numel() != 1:
        _refuse(f"{name} must be one float32, got {scalar.dtype} of shape {list(scalar.shape)}", TypeError)
    if scalar.device != device:
        _refuse(f"{name} must be on {device}, where the first lr is, got {scalar.device}")


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"adamw_ema: {text}")
