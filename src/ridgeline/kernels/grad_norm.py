"""The norm of many tensors together, fp32, bf16 and fp16 mixed, in one launch: what a clip of gradients goes by.

    norm = sqrt(sum of element² over all elements of all tensors)

what torch.nn.utils.get_total_norm computes in several launches, but in fp32 throughout: that rounds the norm of each
bf16 or fp16 tensor to its dtype.

tensors   fp32, bf16 or fp16, any shape, dense in any order of dimensions, at any address; left as they are
norm      fp32 scalar, infinite or NaN where an element is, or where the squares add up to more than fp32 holds

`build` writes the table of a list of sizes once; `locate` sends the addresses of tensors that have them; `norm` is one
launch and reads nothing on the host, so it can be captured. Each program sums a fixed part of the elements, and the
last to finish, whichever it is, sums the programs' sums in their order: equal tensors give equal bits. It also sets the
count of finished programs back, so one plan runs on one stream at a time. Triton launches on the current device, which
must be that of the tensors. Raises ValueError or TypeError for anything else.

    bytes read = bytes of the tensors          (`cost`)

32 M gradients in bf16, 64 MB, took 26 µs on an H200, PyTorch's launches 51 (docs/log.md); at the rate of a copy 16.

Not in `kernels.ALL`, for the reasons of `adamw_ema`: it reads lists of tensors, outside of any graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels._grad_norm import CHUNKS, HALF, NARROW, grad_norm_kernel
from ridgeline.kernels._nhwc import starts_early
from ridgeline.kernels._op import Launch, check_launchable, dtype_name, target_of

_TAGS = {torch.float32: 0, torch.bfloat16: NARROW, torch.float16: NARROW | HALF}
_FLOPS = 2  # of an element
_MOST = 2**31  # chunks, whose numbers are int32


@dataclass(frozen=True)
class Config:
    """Elements of a chunk, warps of a program, and how many programs a multiprocessor is to hold at once."""

    block: int = 4096
    num_warps: int = 4
    programs: int = 8

    @property
    def is_valid(self) -> bool:
        """Whether every thread has 8 to 32 elements of a chunk, and a multiprocessor has room for all threads."""
        threads = 32 * self.num_warps
        return (
            self.num_warps in (1, 2, 4, 8, 16)
            and self.block / threads in (8, 16, 32)
            and self.programs >= 1
            and self.programs * threads <= 1536
        )


CONFIGS = (Config(), Config(2048, 4, 8), Config(4096, 4, 6), Config(8192, 8, 4))  # worth timing, the default first


@dataclass(frozen=True, eq=False)
class Plan:
    """The table of one list of sizes, and what a launch keeps to itself."""

    sizes: tuple[int, ...]  # elements of each tensor
    config: Config
    chunks: Tensor  # [chunks of all tensors, len(CHUNKS)] int32
    partials: Tensor  # [programs] fp32, a sum each
    finished: Tensor  # [1] int32, programs that have written theirs; 0 between launches


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where tensors lie; valid while they lie there, in a graph for all its replays."""

    tensors: tuple[Tensor, ...]
    addresses: Tensor  # [tensors] int64, bit 0 set where the tensor is bf16, bits 0 and 62 where it is fp16

    @property
    def dtypes(self) -> str:
        """The one that all have, "fp32", "bf16" or "fp16", or "mixed"."""
        kinds = {tensor.dtype for tensor in self.tensors}
        return dtype_name(kinds.pop()) if len(kinds) == 1 else "mixed"


def reference(tensors: Sequence[Tensor]) -> Tensor:
    """The same in plain PyTorch: the norm of the tensors' norms, in fp32, or in float64 of tensors in that."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t, dtype=dtype) for t in tensors]))


def build(tensors: Sequence[Tensor], *, config: Config = CONFIGS[0]) -> Plan:
    """The table of tensors as large as these, on their device; copies to it, so not during a capture."""
    sizes = tuple(tensor.numel() for tensor in tensors)
    if not sizes:
        _refuse("there are no tensors: give at least one")
    if not config.is_valid:
        _refuse(f"{config} must have 1 to 16 warps, 8, 16 or 32 elements a thread and at most 1536 threads together")
    device = tensors[0].device
    chunks = _chunks(sizes, config.block)
    if len(chunks) >= _MOST:
        _refuse(f"all tensors must have less than {_MOST} chunks of {config.block} elements, got {len(chunks)}")
    programs = min(len(chunks), config.programs * target_of(tensors[0]).sm_count)
    return Plan(
        sizes=sizes,
        config=config,
        chunks=chunks.to(device),
        partials=torch.zeros(programs, dtype=torch.float32, device=device),
        finished=torch.zeros(1, dtype=torch.int32, device=device),
    )


def locate(plan: Plan, tensors: Sequence[Tensor]) -> Gradients:
    """Check tensors against the sizes of a plan, and send their addresses to the device."""
    if len(tensors) != len(plan.sizes):
        _refuse(f"a plan of {len(plan.sizes)} tensors needs as many, got {len(tensors)}")
    for tensor, size in zip(tensors, plan.sizes, strict=True):
        _check_tensor(tensor, size, plan.chunks.device)
    return send(tensors, plan.chunks.device)


def send(tensors: Sequence[Tensor], device: torch.device) -> Gradients:
    """The addresses of tensors that are known to fit; checks nothing.

    They travel in the arguments of a few launches (96 tensors each), as those of PyTorch's own fused kernels do: there
    is no host memory that a captured copy would read again at every replay.
    """
    addresses = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
        list(addresses.unbind()), [tensor.data_ptr() | _TAGS[tensor.dtype] for tensor in tensors]
    )
    return Gradients(tuple(tensors), addresses)


def join(parts: Sequence[Gradients]) -> Gradients:
    """All of them, in order; a launch where there are several."""
    if len(parts) == 1:
        return parts[0]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return Gradients(tensors, torch.cat([part.addresses for part in parts]))


def norm(plan: Plan, gradients: Gradients) -> Tensor:
    """The norm of all of them together, which have the plan's sizes."""
    if not len(plan.chunks):
        return torch.zeros((), dtype=torch.float32, device=plan.chunks.device)
    check_launchable("grad_norm", grad_norm_kernel, plan.chunks)
    made = launch(plan, gradients)
    made.run()
    return made.output


def launch(plan: Plan, gradients: Gradients) -> Launch:
    """The launch of `norm`, of a plan whose tensors have an element at least. Runs nothing."""
    if tuple(tensor.numel() for tensor in gradients.tensors) != plan.sizes:
        _refuse(f"the gradients must have the sizes of the plan's {len(plan.sizes)} tensors, got others")
    pdl = starts_early(target_of(plan.chunks))
    result = torch.empty((), dtype=torch.float32, device=plan.chunks.device)
    return Launch(
        kernel=grad_norm_kernel,
        grid=(len(plan.partials),),
        arguments={
            "chunks_ptr": plan.chunks,
            "addresses_ptr": gradients.addresses,
            "partials_ptr": plan.partials,
            "finished_ptr": plan.finished,
            "norm_ptr": result,
            "chunks": len(plan.chunks),
        },
        constants={
            "PARTIALS": 1 << (len(plan.partials) - 1).bit_length(),  # as many or more, a power of two
            "BLOCK": plan.config.block,
            "PDL": pdl,
        },
        num_warps=plan.config.num_warps,
        num_stages=1,
        output=result,
        pdl=pdl,
    )


def cost(tensors: Sequence[Tensor]) -> Cost:
    """Each element once; the table adds less than 1 %."""
    return Cost(_FLOPS * sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors), 4)


def _chunks(sizes: tuple[int, ...], block: int) -> Tensor:
    numel = torch.tensor(sizes, dtype=torch.int64)
    chunks = (numel + block - 1) // block
    tensor = torch.arange(len(sizes)).repeat_interleave(chunks)
    chunk = torch.arange(len(tensor)) - (chunks.cumsum(0) - chunks)[tensor]
    count = (numel[tensor] - chunk * block).clamp(max=block)
    columns = (tensor, chunk, count, torch.zeros_like(count))
    assert len(columns) == len(CHUNKS)
    return torch.stack(columns, dim=1).to(torch.int32)


def _check_tensor(tensor: Tensor, size: int, device: torch.device) -> None:
    if tensor.dtype not in _TAGS:
        _refuse(f"tensors must be float32, bfloat16 or float16, got {tensor.dtype}", TypeError)
    if tensor.device != device:
        _refuse(f"all tensors must be on {device}, where the plan is, got one on {tensor.device}")
    if tensor.numel() != size:
        _refuse(f"tensors must have the plan's sizes, got {tensor.numel()} elements for {size}")
    if not _is_dense(tensor):
        _refuse(f"tensors must be dense, got strides {tensor.stride()} for shape {list(tensor.shape)}")
    if tensor.data_ptr() % tensor.element_size():
        _refuse(f"tensors must begin at a multiple of their element's size, got address {tensor.data_ptr():#x}")


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, each place once, in whatever order of dimensions."""
    elements = 1
    for stride, size in sorted((t, n) for n, t in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != elements:
            return tensor.numel() == 0
        elements *= size
    return True


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"grad_norm: {text}")
