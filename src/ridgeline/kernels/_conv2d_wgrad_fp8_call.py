"""Calls of conv2d_wgrad_fp8: what may be given, and how it is tiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

import torch
from torch import Tensor

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._nhwc import cdiv, next_power_of_2
from ridgeline.kernels._op import Target
from ridgeline.kernels._quads import box_of, size_of, why_not

FILTER_SIZES = (1, 3)
TILED = ("sm_89", "sm_120")  # FP8 products by mma.sync
_ROW_BYTES = 128
_SLACK_BYTES = 1024  # barriers, and what aligns the buffers
_ACCUMULATORS = 192  # fp32 a thread, of products and of what they were promoted to
_TILE_ACCUMULATORS = 128  # likewise: operands go through registers too
_SUM_BLOCK = 1024  # elements of parts, 16 bytes of them for each thread
_SUM_LOADS = 8  # blocks on their way at once
_SUM_BESIDE = 16  # parts at most in a block, which then has 64 elements of each


@dataclass(frozen=True)
class Config:
    """A tile of so many k by c, of all taps of a filter's column; rows of x and dy have room for `stages` steps.

    num_warps multiply, and one more copies. The images are split as long as a multiprocessor gets no more than `rounds`
    tiles, each for its part of them. If `held`, rows of dy go through registers, which takes promotion at each.
    """

    k: int
    c: int
    stages: int
    num_warps: int
    rounds: int
    held: bool = False

    def is_valid(self, r: int, promote: int, target: Target) -> bool:
        rows = self.stages * self.k + self.x_stages(r) * self.c
        sums = r * self.k * self.c // (32 * self.num_warps) * (2 if promote else 1)
        return (
            target.arch == "sm_90"
            and (promote == _ROW_BYTES or not self.held)
            and self.num_warps in (4, 8)
            and self.stages >= 2
            and self.rounds >= 1
            and self.k in (64, 128, 256)
            and self.c in (16, 32, 64, 128, 256)
            and self.k >= 16 * self.num_warps
            and sums <= _ACCUMULATORS
            and rows * _ROW_BYTES + _SLACK_BYTES <= target.shared_bytes
        )

    def x_stages(self, r: int) -> int:
        """r rows of x are in use at a time, and one more until the step after has begun."""
        return self.stages + r

    @property
    def groups(self) -> int:
        """Of four warps, each of which multiplies its share of k."""
        return self.num_warps // 4

    def tiles(self, one: Problem) -> int:
        return cdiv(one.k, self.k) * cdiv(one.c, self.c) * one.filter[1]

    def parts(self, one: Problem, target: Target) -> int:
        """Into how many parts the images are split; none is empty."""
        wanted = max(1, min(one.groups, target.sm_count * self.rounds // self.tiles(one)))
        return cdiv(one.groups, cdiv(one.groups, wanted))


@dataclass(frozen=True)
class TileConfig(Config):
    """The same of one tap, on sm_89 and sm_120, where every warp copies and multiplies.

    Of the `stages` steps that are under way the oldest is in registers.
    """

    def is_valid(self, r: int, promote: int, target: Target) -> bool:  # noqa: ARG002 - a tile has one tap
        sums = self.k * self.c // (32 * self.num_warps) * (2 if promote else 1)
        return (
            target.arch in TILED
            and not self.held
            and self.num_warps in (4, 8)
            and self.stages >= 3
            and self.rounds >= 1
            and self.k in (64, 128)
            and self.c in (16, 32, 64, 128)
            and sums <= _TILE_ACCUMULATORS
            and (self.stages - 1) * (self.k + self.c) * _ROW_BYTES <= target.shared_bytes
        )

    def tiles(self, one: Problem) -> int:
        return one.filter[0] * super().tiles(one)


@dataclass(frozen=True)
class Problem:
    """Sizes of a call, checked."""

    n: int
    c: int
    k: int
    h: int
    w: int
    filter: tuple[int, int]
    promote: int

    @property
    def groups(self) -> int:
        """Images that are reduced together, times boxes in a row."""
        images, words = box_of(self.w)
        return cdiv(self.n, images) * (self.w // words)

    @property
    def span(self) -> int:
        """Rows of quads between promotions."""
        return self.promote // _ROW_BYTES or self.h // 4

    @property
    def conv(self) -> ConvProblem:
        r, s = self.filter
        return ConvProblem(self.n, self.c, self.k, (self.h, self.w), self.filter, padding=(r // 2, s // 2))


def sums_tile(parts: int, numel: int, target: Target) -> dict[str, int]:
    """How the kernel that adds so many parts of a weight's elements is tiled: at most 8 blocks of 16 bytes a thread.

    A program adds all parts of as many blocks as leave each multiprocessor two programs, or in turn those of one block;
    where there would not be a program for each multiprocessor, parts lie beside each other in a block.
    """
    beside, blocks = 1, 1
    while cdiv(numel, _SUM_BLOCK // beside) < target.sm_count and beside < min(parts, _SUM_BESIDE):
        beside *= 2
    block, loads = _SUM_BLOCK // beside, min(_SUM_LOADS, cdiv(parts, beside))
    while cdiv(numel, 2 * blocks * block) >= 2 * target.sm_count and 2 * blocks * loads <= _SUM_LOADS:
        blocks *= 2
    return {"BESIDE": beside, "LOADS": loads, "BLOCK": block, "BLOCKS": blocks}


def configs(one: Problem, target: Target) -> tuple[Config, ...]:
    """What is worth timing, the likeliest first."""
    tallest, widest = max(64, next_power_of_2(one.k)), max(16, next_power_of_2(one.c))
    if target.arch in TILED:
        sizes = ((128, 64, 4, 8), (64, 64, 4, 4), (128, 128, 4, 8), (64, 128, 4, 8), (64, 32, 5, 4), (64, 16, 5, 4))
        tiles = (TileConfig(*numbers, rounds) for rounds, numbers in product((2, 4), sizes))
        configs = tuple(c for c in tiles if c.c == widest or 64 <= c.c < widest)
    else:
        sizes = ((128, 64, 6, 8), (128, 128, 4, 8), (64, 64, 8, 4), (256, 64, 4, 8), (128, 32, 8, 8), (64, 128, 6, 4))
        sizes += ((64, 32, 8, 4), (128, 256, 3, 8), (64, 16, 8, 4))
        columns = (Config(*numbers, rounds, held) for rounds, numbers, held in product((1, 2), sizes, (True, False)))
        configs = tuple(c for c in columns if c.c <= widest)
    return tuple(c for c in configs if c.k <= tallest and c.is_valid(one.filter[0], one.promote, target))


def problem(
    dy: Tensor, x: Tensor, inverse: Tensor, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> Problem:
    """The sizes of a call. Raises ValueError or TypeError for what has no kernel."""
    for name, quads, dtype in (("dy", dy, torch.float8_e5m2), ("x", x, torch.float8_e4m3fn)):
        if quads.dtype not in (dtype, torch.float64):  # float64 stands for the exact values, where results are judged
            refuse(f"{name} must be {dtype}, got {quads.dtype}", TypeError)
        if quads.dim() != 6 or quads.shape[4:] != (4, 4) or not quads.is_contiguous():
            refuse(f"{name} must be dense quads of six axes, got shape {tuple(quads.shape)}")
    (n, c, h, w), k, (r, s) = size_of(x, beside=True), dy.shape[2], kernel_size
    if size_of(dy, beside=False) != (n, k, h, w):
        refuse(f"dy and x must be of the same images and sizes, got {tuple(dy.shape)} and {tuple(x.shape)}")
    if (reason := why_not(h, w)) is not None:
        refuse(reason)
    if c % 16 or k % 16:
        refuse(f"channels must be multiples of 16, got {c} and {k}")
    if r not in FILTER_SIZES or s not in FILTER_SIZES:
        refuse(f"kernel_size must have 1 or 3 rows and columns, got {(r, s)}")
    if promote < 0 or promote % 128 or (promote and h // 4 % (promote // 128)):
        refuse(f"promote must be 0, or a multiple of 128 that divides {32 * h}, got {promote}")
    tensors = inverse.numel()
    if inverse.dtype not in (torch.float32, torch.float64) or inverse.dim() != 1 or not inverse.is_contiguous():
        refuse(f"inverse must be dense fp32 of one axis, got {inverse.dtype} {tuple(inverse.shape)}", TypeError)
    if not (0 <= dy_row < tensors and 0 <= x_row < tensors):
        refuse(f"dy_row and x_row must be among the {tensors} rows of inverse, got {dy_row} and {x_row}")
    return Problem(n, c, k, h, w, (r, s), promote)


def refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"conv2d_wgrad_fp8: {text}")
