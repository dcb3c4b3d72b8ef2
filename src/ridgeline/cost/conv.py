"""Convolution: `ConvProblem`, its three passes in pure numbers, and the formulas of the aten operators.

n, c, k      batch, input channels, output channels
image        spatial size of the input, (h, w); one or three axes work as well
filter       spatial size of the filter, (r, s)
Conventions: 2 FLOP per multiply-accumulate; products with padding zeros are counted, since an implicit GEMM does them;
a bias costs no FLOP, it is what the accumulator starts from. Bytes: each operand once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Formula, Gemm, Work, dims, matmul_pipe, work

# Tensor cores contract at least 8 channels at a time; thinner groups (depthwise above all) run on the CUDA cores.
NARROWEST_TENSOR_CORE_GROUP = 8


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """One convolution, c to k channels. `stride`, `padding`, `dilation` may be one int for all axes.

    Raises ValueError where groups do not divide the channels or the output would be empty.
    """

    n: int
    c: int
    k: int
    image: tuple[int, ...]
    filter: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1

    def __post_init__(self) -> None:
        axes = len(self.image)
        for name in ("filter", "stride", "padding", "dilation"):
            value = getattr(self, name)
            value = (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)
            if len(value) != axes:
                raise ValueError(f"ConvProblem: {name} must have {axes} numbers like image, got {value}")
            object.__setattr__(self, name, value)
        if self.c % self.groups or self.k % self.groups:
            raise ValueError(f"ConvProblem: groups must divide c and k, got {self.groups} for c={self.c}, k={self.k}")
        if min(self.out, default=1) < 1:
            raise ValueError(f"ConvProblem: filter {self.filter} does not fit image {self.image}, got {self.out}")

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial size of the output."""
        axes = zip(self.image, self.filter, self.stride, self.padding, self.dilation, strict=True)  # type: ignore[arg-type]
        return tuple((size + 2 * pad - dil * (taps - 1) - 1) // step + 1 for size, taps, step, pad, dil in axes)

    @property
    def oh(self) -> int:
        return self.out[-2]

    @property
    def ow(self) -> int:
        return self.out[-1]

    @property
    def taps(self) -> int:
        """R·S, the products an output element sums per input channel."""
        return prod(self.filter)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward pass; either gradient has exactly as many."""
        return self.n * self.k * (self.c // self.groups) * prod(self.out) * self.taps

    @property
    def x_numel(self) -> int:
        return self.n * self.c * prod(self.image)

    @property
    def w_numel(self) -> int:
        return self.k * (self.c // self.groups) * self.taps

    @property
    def y_numel(self) -> int:
        return self.n * self.k * prod(self.out)

    @property
    def column_numel(self) -> int:
        """Elements of the im2col matrix: R·S times the input at stride 1 and "same" padding."""
        return self.n * prod(self.out) * self.c * self.taps

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.c

    @property
    def uses_matrix_units(self) -> bool:
        return self.groups == 1 or min(self.c, self.k) // self.groups >= NARROWEST_TENSOR_CORE_GROUP

    def __str__(self) -> str:
        text = f"{dims(self.n, self.c, *self.image)} * {dims(self.k, self.c // self.groups, *self.filter)}"
        text += f" s{_short(self.stride)} p{_short(self.padding)}"
        text += f" d{_short(self.dilation)}" if set(self.dilation) != {1} else ""  # type: ignore[arg-type]
        return text + (f" g{self.groups}" if self.groups > 1 else "")


def conv_forward(problem: ConvProblem, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None) -> Cost:
    """Implicit GEMM: x and w read once, y written once."""
    size, out_size = dtype.itemsize, (out_dtype or dtype).itemsize
    read = size * (problem.x_numel + problem.w_numel)
    return Cost(2 * problem.macs, read, out_size * problem.y_numel, conv_pipe(problem, dtype))


def conv_input_grad(problem: ConvProblem, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None) -> Cost:
    """dx from dy and w. Also the forward pass of a transposed convolution from k to c channels."""
    size, out_size = dtype.itemsize, (out_dtype or dtype).itemsize
    read = size * (problem.y_numel + problem.w_numel)
    return Cost(2 * problem.macs, read, out_size * problem.x_numel, conv_pipe(problem, dtype))


def conv_weight_grad(problem: ConvProblem, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None) -> Cost:
    """dw from x and dy; no split-K partials are charged."""
    size, out_size = dtype.itemsize, (out_dtype or dtype).itemsize
    read = size * (problem.x_numel + problem.y_numel)
    return Cost(2 * problem.macs, read, out_size * problem.w_numel, conv_pipe(problem, dtype))


def conv_im2col(problem: ConvProblem, dtype: torch.dtype) -> Cost:
    """Explicit GEMM: the column matrix is written to memory, then read back by the matrix product."""
    column = dtype.itemsize * problem.column_numel
    gemm = conv_forward(problem, dtype)
    return replace(gemm, read_bytes=gemm.read_bytes + column, write_bytes=gemm.write_bytes + column)


def conv_pipe(problem: ConvProblem, dtype: torch.dtype) -> str:
    return matmul_pipe(dtype) if problem.uses_matrix_units else "cuda_fp32"


def forward_gemm(problem: ConvProblem) -> Gemm | None:
    """None where the CUDA cores do the work: no output tile of a matrix unit exists there."""
    if not problem.uses_matrix_units:
        return None
    groups = problem.groups
    return Gemm(problem.n * prod(problem.out), problem.k // groups, problem.c // groups * problem.taps, count=groups)


def input_grad_gemm(problem: ConvProblem) -> Gemm | None:
    """The dense form; with stride it spans stride² more products (by zeros) than `problem.macs` counts."""
    if not problem.uses_matrix_units:
        return None
    groups = problem.groups
    return Gemm(problem.n * prod(problem.image), problem.c // groups, problem.k // groups * problem.taps, count=groups)


def weight_grad_gemm(problem: ConvProblem) -> Gemm | None:
    """Few output tiles and a long k: the pass that needs split-K."""
    if not problem.uses_matrix_units:
        return None
    groups = problem.groups
    return Gemm(problem.k // groups, problem.c // groups * problem.taps, problem.n * prod(problem.out), count=groups)


def problem_of(
    big: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, output_padding: Any = (0,)
) -> ConvProblem:
    """The problem whose input is `big`: x of a convolution, the *result* of a transposed one.

    Rows and columns that `output_padding` adds meet no products and are left out of the image.
    """
    per_group, *filter_size = weight.shape[1:]
    axes = len(filter_size)
    extra = tuple(output_padding) * (axes if len(output_padding) == 1 else 1)
    return ConvProblem(
        n=big.shape[0] if big.dim() == weight.dim() else 1,
        c=per_group * groups,
        k=weight.shape[0],
        image=tuple(size - added for size, added in zip(big.shape[-axes:], extra, strict=True)),
        filter=tuple(filter_size),
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=groups,
    )


def kind_of(problem: ConvProblem) -> str:
    return "depthwise" if problem.is_depthwise else f"conv{dims(*problem.filter)}"


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *_flags: Any,
    result: Tensor,
) -> Work:
    big, extra = (result, output_padding) if transposed else (x, (0,))
    problem = problem_of(big, weight, stride, padding, dilation, groups, extra)
    gemm = (input_grad_gemm if transposed else forward_gemm)(problem)
    shape = f"{dims(*x.shape)} ^ {str(problem).partition(' * ')[2]}" if transposed else str(problem)
    kind = "conv_transpose" if transposed else kind_of(problem)
    pipe = conv_pipe(problem, x.dtype)
    return work(2 * problem.macs, (x, weight, bias), result, pipe, kind=kind, shape=shape, gemm=gemm)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
    *,
    result: tuple[Tensor | None, ...],
) -> tuple[Work, ...]:
    """The input gradient and the weight gradient are two kernels that read dy each; those not asked for are absent.

    The bias gradient rides on the weight gradient, which has all of dy in hand. The FLOPs of a grouped weight
    gradient are divided by `groups` once; PyTorch's own counter up to 2.13 forgets to.
    """
    dx, dw, db = (tensor if wanted else None for tensor, wanted in zip(result, output_mask, strict=True))
    big, extra = (grad, output_padding) if transposed else (x, (0,))
    problem = problem_of(big, weight, stride, padding, dilation, groups, extra)
    flops, pipe, kind = 2 * problem.macs, conv_pipe(problem, grad.dtype), kind_of(problem)
    kind = "conv_transpose" if transposed else kind
    works = []
    if dx is not None:
        gemm = (forward_gemm if transposed else input_grad_gemm)(problem)
        works.append(work(flops, (grad, weight), dx, pipe, kind=kind, shape=f"dgrad {problem}", gemm=gemm))
    if dw is not None:
        flops += grad.numel() if db is not None else 0
        gemm = weight_grad_gemm(problem)
        works.append(work(flops, (x, grad), (dw, db), pipe, kind=kind, shape=f"wgrad {problem}", gemm=gemm))
    elif db is not None:
        works.append(work(grad.numel(), grad, db, kind="reduction", shape=f"bgrad {dims(*grad.shape)}"))
    return tuple(works)


def _cudnn_convolution(
    x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_flags: Any, result: Tensor
) -> Work:
    return _convolution(x, weight, None, stride, padding, dilation, False, (), groups, result=result)


def _mkldnn_convolution(
    x: Tensor, weight: Tensor, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int, *, result: Tensor
) -> Work:
    return _convolution(x, weight, bias, stride, padding, dilation, False, (), groups, result=result)


def _short(values: Any) -> str:
    return str(values[0]) if len(set(values)) == 1 else dims(*values)


FORMULAS = {
    "aten.convolution": Formula("conv", _convolution),
    "aten._convolution": Formula("conv", _convolution),
    "aten.convolution_overrideable": Formula("conv", _convolution),
    "aten.convolution_backward": Formula("conv", _convolution_backward),
    "aten.cudnn_convolution": Formula("conv", _cudnn_convolution),
    "aten.mkldnn_convolution": Formula("conv", _mkldnn_convolution),
}
