"""One call of conv2d_act, checked, and how a program tiles it; the kernel's file says what its arguments are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels._conv import INT32_ELEMENTS, ConvCall
from ridgeline.kernels._nhwc import cdiv, pixel_pitch
from ridgeline.kernels._op import Target

PRECISIONS = ("tf32", "ieee")

_MAX_OPERANDS = 96  # registers a thread for a reduction that is loaded whole
# fp32 a thread; with pointers 128 no longer fit beside those of the gather: spills on sm_90
_MAX_ACCUMULATORS, _MAX_BOX_ACCUMULATORS = 64, 128
_WIDEST_BOX_TILE = 128  # output channels; 256 of them compiled on Triton 3.6 and gave wrong sums on an H200
_BARRIER_BYTES = 1024  # of shared memory, beside the operands
_RESERVED_BYTES = 1024  # of shared memory that each program takes beside its own; a multiprocessor has as much more


@dataclass(frozen=True)
class Problem(ConvCall):
    """One call of this op, checked."""

    name = "conv2d_act"

    precision: str = "tf32"

    def check_weight(self) -> None:
        weight, channels = self.weight, self.x.shape[1]
        if self.precision not in PRECISIONS:
            self.refuse(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if weight.shape[1] != channels or 0 in weight.shape:
            self.refuse(f"groups must be 1: weight {tuple(weight.shape)} must have the {channels} channels of x")
        if not weight.is_contiguous(memory_format=torch.channels_last) or weight.numel() >= INT32_ELEMENTS:
            self.refuse(
                f"weight must be channels_last with less than 2^31 elements, got strides {weight.stride()} "
                f"for shape {tuple(weight.shape)}: use .contiguous(memory_format=torch.channels_last)"
            )

    @property
    def on_cuda_cores(self) -> bool:
        """No tensor core multiplies fp32 without rounding it first."""
        return self.x.dtype == torch.float32 and self.precision == "ieee"

    @property
    def is_product(self) -> bool:
        """Whether the rows of the left matrix are the pixels of x themselves, one after the other."""
        return self.conv.taps * self.stride[0] * self.stride[1] == 1 and max(self.padding) == 0

    @property
    def takes_boxes(self) -> bool:
        """Whether a tensor map can describe x and weight: starts and strides of whole 16 bytes, one parity a row.

        With stride 2 a tap sees every second row and column; even sizes let one map tell them apart.
        """
        size, pitch = self.x.element_size(), pixel_pitch(self.x) or 0
        even = self.stride[0] == 1 or (self.stride[0] == 2 and not any(side % 2 for side in self.conv.image))
        return (
            self.stride[0] == self.stride[1]
            and even
            and not self.on_cuda_cores
            and pitch * size % 16 == self.conv.c * size % 16 == 0
            and _starts_at_16_bytes(self.x)
            and _starts_at_16_bytes(self.weight)
            and self.pixels > 0
        )

    @property
    def takes_specialised(self) -> bool:
        """Whether wgmma multiplies x as it is, of stride 1, and tensor maps describe all that is read and written."""
        size, stored = self.x.element_size(), [t for t in (self.residual, self.out) if t is not None]
        return (
            self.x.dtype in (torch.float16, torch.bfloat16)
            and tuple(self.stride) == (1, 1)
            and self.takes_boxes
            and (self.out is not None or self.conv.k * size % 16 == 0)
            and all((pixel_pitch(t) or 0) * size % 16 == 0 and _starts_at_16_bytes(t) for t in stored)
        )


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_n output channels, block_k of the reduction a step.

    num_stages steps are loaded ahead; 1 means all of them, held in registers: for reductions short enough.
    split_k blocks of the reduction are multiplied at a time, in different warps: for few tiles and a long reduction.

    With box_h and box_w the pixels are a box of an image, or of several images where block_m has room for them, that
    the tensor memory accelerator copies; split_k is then the number of programs that share the reduction of a tile,
    whose sums a second kernel adds. 0: rows of pixels, gathered through pointers.

    With `specialised` one more warp copies the boxes for num_warps others, and programs take several tiles each.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    box_h: int = 0
    box_w: int = 0
    specialised: bool = False

    @property
    def box_n(self) -> int:
        """Images that a box spans; 0 without boxes."""
        return self.block_m // (self.box_h * self.box_w) if self.boxed else 0

    @property
    def boxed(self) -> bool:
        return self.box_h > 0 and self.box_w > 0

    def is_valid(self, problem: Problem, target: Target) -> bool:
        """Whether it compiles, fits the target's shared memory and keeps its accumulators in registers."""
        blocks = (self.block_m, self.block_n, self.block_k)
        if not (
            all(block >= 16 and _is_power_of_2(block) for block in blocks)
            and self.num_warps in (1, 2, 4, 8)
            and self.num_stages >= 1
            and self.split_k >= 1
        ):
            return False
        if self.specialised:
            return self._specialised_is_valid(problem, target)
        if self.box_h or self.box_w:
            return self._boxes_are_valid(problem, target)
        return self._pointers_are_valid(problem, target)

    def _pointers_are_valid(self, problem: Problem, target: Target) -> bool:
        both, element_size = self.block_m + self.block_n, problem.x.element_size()
        step = self.block_k * self.split_k
        steps = cdiv(problem.conv.c * problem.conv.taps, step)
        operands = self.num_stages * both * step * element_size
        registers_a_thread = both * steps * step * element_size // (4 * 32 * self.num_warps)
        return (
            self.block_m * self.block_n * self.split_k <= _MAX_ACCUMULATORS * 32 * self.num_warps
            # a warp takes whole blocks of the reduction; wgmma knows no batches, and CUDA cores no reason for them
            and (self.split_k == 1 or (self.split_k == self.num_warps and self.block_m < 64))
            and (self.split_k == 1 or not problem.on_cuda_cores)
            and operands <= target.shared_bytes
            and (self.num_stages > 1 or registers_a_thread <= _MAX_OPERANDS)
        )

    def _boxes_are_valid(self, problem: Problem, target: Target) -> bool:
        conv = problem.conv
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * problem.x.element_size()
        return (
            int(target.arch.removeprefix("sm_")) >= 90
            and self._covers_pixels(problem)
            and self.block_n <= _WIDEST_BOX_TILE
            and self.block_m * self.block_n <= _MAX_BOX_ACCUMULATORS * 32 * self.num_warps
            # a step lies in one tap, so that what it copies beyond the image is zero, and nothing else is beyond
            and conv.c % self.block_k == 0
            and self.num_stages > 1
            and operands + _BARRIER_BYTES <= target.shared_bytes
            and self.split_k <= conv.c // self.block_k * conv.taps
            and self.split_k * problem.pixels < INT32_ELEMENTS
            and problem.takes_boxes
        )

    def _covers_pixels(self, problem: Problem) -> bool:
        sides = (self.box_h, self.box_w)
        return (
            # a copy takes at most 256 of an axis
            all(0 < side <= 256 and _is_power_of_2(side) for side in sides)
            and self.box_h * self.box_w <= self.block_m <= 256
            and (not problem.is_product or sides == (1, self.block_m))
        )

    def _specialised_is_valid(self, problem: Problem, target: Target) -> bool:
        return (
            target.arch == "sm_90"
            and problem.takes_specialised
            and self._covers_pixels(problem)
            and self.num_warps in (4, 8)
            # an instruction takes 64 rows from four warps and up to 256 columns, and reduces rows of one swizzle
            and self.block_m >= 16 * self.num_warps
            and self.block_n <= 256
            and self.block_k <= 64
            and self.block_m * self.block_n <= _MAX_BOX_ACCUMULATORS * 32 * self.num_warps
            # two of them are read while a third is filled
            and self.num_stages > 2
            and self.shared_bytes(problem) <= target.shared_bytes
            # a part without a step would leave its sums unwritten
            and (self.split_k - 1) * cdiv(self.steps(problem), self.split_k) < self.steps(problem)
            and (self.split_k == 1 or problem.conv.k % 4 == 0)
            and self.split_k * problem.pixels < INT32_ELEMENTS
        )

    def steps(self, problem: Problem) -> int:
        """Of a tile's reduction, each in one tap."""
        return problem.conv.taps * cdiv(problem.conv.c, self.block_k)

    def shared_bytes(self, problem: Problem) -> int:
        """Of a specialised program: its stages and a tile of y, or of fp32 sums."""
        size = problem.x.element_size()
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k * size
        return stages + self.block_m * self.block_n * (size if self.split_k == 1 else 4) + _BARRIER_BYTES

    def resident(self, problem: Problem, target: Target) -> int:
        """Specialized programs that share a multiprocessor: two if half of its registers and memory hold one."""
        halves = 2 * (self.shared_bytes(problem) + _RESERVED_BYTES) <= target.shared_bytes + _RESERVED_BYTES
        return 2 if halves and self.num_warps == 4 and self.block_n < 256 else 1


def _starts_at_16_bytes(x: Tensor) -> bool:
    # allocations are aligned to more, so only a view's offset can break it
    return x.storage_offset() * x.element_size() % 16 == 0


def _is_power_of_2(n: int) -> bool:
    return n & (n - 1) == 0
