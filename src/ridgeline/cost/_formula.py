"""What every formula file shares: `Formula` and the `Work` it returns, tensors of a call, bytes they occupy, pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.cost._cost import Cost

VIEW = "view"  # the kind of calls that move nothing; they are never recorded


@dataclass(frozen=True, slots=True)
class Gemm:
    """The matrix product inside a convolution or matmul: `count` products of [m, k] by [k, n]."""

    m: int
    n: int
    k: int
    count: int = 1

    def tiles(self, tile_m: int, tile_n: int) -> int:
        """Output tiles, the unit of work a thread block takes."""
        return self.count * -(-self.m // tile_m) * -(-self.n // tile_n)


class Touch(NamedTuple):
    """A tensor and how many of its bytes one kernel reads or writes."""

    tensor: Tensor
    bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel does. `kind` and `shape` are "" where the operator's kind and its operands' shapes say it all."""

    cost: Cost
    reads: tuple[Touch, ...]
    writes: tuple[Touch, ...]
    kind: str = ""
    shape: str = ""
    gemm: Gemm | None = None


@dataclass(frozen=True, slots=True)
class Formula:
    """One operator: `work(*args, result=what it returned, **kwargs)` gives its kernels, filed under `kind`.

    A formula names the fastest pipe its operands allow (fp32 matrix products: `tensor_tf32`); `cost_of` turns that
    into `cuda_fp32` unless TF32 is switched on.
    """

    kind: str
    work: Callable[..., Work | tuple[Work, ...]]


def work(
    flops: float,
    reads: Any,
    writes: Any,
    pipe: str = "cuda_fp32",
    *,
    kind: str = "",
    shape: str = "",
    gemm: Gemm | None = None,
) -> Work:
    """Work whose bytes are those of `reads` and `writes`: nested tensors (each once, whole) and `Touch` (in part)."""
    read, written = touches(reads), touches(writes)
    cost = Cost(int(flops), sum(touch.bytes for touch in read), sum(touch.bytes for touch in written), pipe)
    return Work(cost, read, written, kind, shape, gemm)


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Every tensor inside nested lists, tuples and dicts, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def touches(*values: Any) -> tuple[Touch, ...]:
    """Each region of memory inside `values` once: `x * x` reads x once."""
    seen: dict[tuple, Touch] = {}
    for touch in _touches(values):
        seen.setdefault(_region(touch.tensor), touch)
    return tuple(seen.values())


def bytes_of(*values: Any) -> int:
    """Bytes to touch every tensor inside `values` once."""
    return sum(touch.bytes for touch in touches(*values))


def extent_bytes(tensor: Tensor) -> int:
    """Bytes of memory the elements occupy: a broadcast (stride 0) axis counts once, overlapping windows their span."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    elements = span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        if stride:
            elements *= size
            span += (size - 1) * stride
    return min(elements, span) * tensor.element_size()


def matmul_pipe(dtype: torch.dtype) -> str:
    """The fastest pipe that multiplies matrices of `dtype`; float64 has no pipe of its own and counts as fp32."""
    if dtype.itemsize == 1:
        return "tensor_fp8" if dtype.is_floating_point else "tensor_int8"
    return {
        torch.float16: "tensor_fp16",
        torch.bfloat16: "tensor_bf16",
        torch.float32: "tensor_tf32",
    }.get(dtype, "cuda_fp32")


def first_numel(value: Any) -> int:
    """Elements of the first tensor inside `value`, 0 where there is none."""
    return next((tensor.numel() for tensor in tensors_in(value)), 0)


def dims(*sizes: int) -> str:
    """`dims(1, 64, 80, 80) == "1x64x80x80"`."""
    return "x".join(str(size) for size in sizes) or "scalar"


def per_output(kind: str, flops: float) -> Formula:
    """`flops` for each element of the first result; all arguments read, all results written."""

    def formula(*args: Any, result: Any, **kwargs: Any) -> Work:
        return work(flops * first_numel(result), (args, without_out(kwargs)), result)

    return Formula(kind, formula)


def per_input(kind: str, flops: float) -> Formula:
    """`flops` for each element of the first argument that is a tensor."""

    def formula(*args: Any, result: Any, **kwargs: Any) -> Work:
        return work(flops * first_numel(args), (args, without_out(kwargs)), result)

    return Formula(kind, formula)


def write_only(kind: str) -> Formula:
    """Fills and random numbers: nothing is read, whatever tensor the call names as its model or target."""
    return Formula(kind, lambda *_args, result, **_kwargs: work(0, (), result))


def without_out(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that are read; `out=` is only written."""
    return {name: value for name, value in kwargs.items() if name != "out"}


def words(text: str) -> frozenset[str]:
    """The words of `text` as a set: long lists of operator names stay readable that way."""
    return frozenset(text.split())


def table(*groups: tuple[Formula, str]) -> dict[str, Formula]:
    """`table((formula, "add sub"))` spelled out as `{"aten.add": formula, "aten.sub": formula}`."""
    return {f"aten.{name}": formula for formula, names in groups for name in names.split()}


def _touches(value: Any) -> Iterator[Touch]:
    if isinstance(value, Touch):
        yield value
    elif isinstance(value, Tensor):
        yield Touch(value, extent_bytes(value))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _touches(item)
    elif isinstance(value, dict):
        yield from _touches(tuple(value.values()))


def _region(tensor: Tensor) -> tuple:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
