"""One pass of a convolution (forward, gradient of x, gradient of the weight), checked, and how programs tile it.

For the kernels in _conv2d_gluon and _conv2d_wgrad_gluon: what their tensor maps can describe, how large a tile their
registers and the shared memory hold, and which tiles are worth timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, pixel_pitch
from ridgeline.kernels._op import Target

DTYPES = (torch.float16, torch.bfloat16)
FEW = 8  # channels or filters at most that kernels in _conv2d_narrow are for
GRANULE = 8  # channels of 16 bits in 16 bytes: the most that one load takes, what tensor maps have multiples of
PHASE_GRANULE = 16  # channels of a phase that one instruction reduces, and the narrowest tile
SUM_ELEMENTS = 2048  # of parts of a weight gradient that a program adds up at once
WGRAD_PIXELS = 64  # of a box, which are reduced together: four instructions

_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
_INSTRUCTION_BYTES = 32  # of each operand that wgmma reduces
_MAP_BYTES = 16  # strides of a tensor map are multiples of it
_OUT_BYTES = 2  # of an element of the result, also where operands are FP8
_ROW_BYTES = 128  # of shared memory that one swizzle covers
_SLACK_BYTES = 1024  # barriers, and what aligns the buffers
_ACCUMULATORS = 128  # fp32 a thread


@dataclass(frozen=True)
class Pass:
    """Sizes of one pass and the dtype of its maps. `name` is the op's, for messages.

    x, dx         [N, C, H, W]      channels_last, or where it is read a channel slice of it
    weight, dw    [K, C, R, S]      channels_last
    y, dy         [N, K, HO, WO]    as x, dx
    """

    name: str
    conv: ConvProblem
    padding: tuple[int, int]
    dtype: torch.dtype

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        h, w = self.conv.image  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
        return self.conv.n, self.conv.c, h, w

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return self.conv.n, self.conv.k, self.conv.oh, self.conv.ow

    @property
    def stride(self) -> int:
        return self.conv.stride[0]  # pyright: ignore[reportIndexIssue, reportReturnType]

    def refuse(self, text: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{self.name}: {text}")

    def check_maps(self, dtypes: tuple[torch.dtype, ...], **maps: Tensor) -> None:
        """Refuse sizes and maps that a tensor map, whose strides are multiples of 16 bytes, cannot describe."""
        conv, granule, out_granule = self.conv, _MAP_BYTES // self.dtype.itemsize, _MAP_BYTES // _OUT_BYTES
        self._check_dtype(dtypes, *maps)
        if conv.c % granule or conv.k % out_granule:
            self.refuse(
                f"channels must be multiples of {granule} and filters of {out_granule}, got {conv.c} and {conv.k}"
            )
        self._check_padding()
        if self.stride != 1:
            self._check_phases(maps.get("x"))
        self._check_image()
        for name, tensor in maps.items():
            self._check_map(name, tensor, granule)

    def check_narrow_maps(self, dtypes: tuple[torch.dtype, ...], **maps: Tensor | None) -> None:
        """The same for kernels that read maps of few channels by elements, and others by 16 bytes; stride 1."""
        self._check_dtype(dtypes, *(name for name, tensor in maps.items() if tensor is not None))
        self._check_padding()
        self._check_image()
        for name, tensor in maps.items():
            if tensor is not None:
                self._check_map(name, tensor, 1 if tensor.shape[1] <= FEW else _MAP_BYTES // self.dtype.itemsize)

    def _check_dtype(self, dtypes: tuple[torch.dtype, ...], *names: str) -> None:
        if self.dtype not in dtypes:
            known, got = " or ".join(map(str, dtypes)), self.dtype
            self.refuse(f"{' and '.join(names)} must be {known}, got {got}", TypeError)

    def _check_padding(self) -> None:
        conv = self.conv
        if min(self.padding) < 0 or any(p >= size for p, size in zip(self.padding, conv.filter, strict=True)):
            self.refuse(f"padding must be less than the filter {conv.filter} and not negative, got {self.padding}")

    def _check_image(self) -> None:
        if min(self.conv.image) < 1:
            self.refuse(f"no x has a y of shape {self.y_shape}: it would have {self.conv.image} rows and columns")

    def _check_map(self, name: str, tensor: Tensor, granule: int) -> None:
        """Refuse another dtype or layout, or pixels that do not begin at multiples of `granule` elements."""
        pitch = pixel_pitch(tensor)
        if tensor.dtype != self.dtype:
            self.refuse(f"{name} must be {self.dtype}, got {tensor.dtype}", TypeError)
        if pitch is None or pitch % granule or (granule > 1 and not _starts_at_16_bytes(tensor)):
            begins = f" that starts at a multiple of {granule} channels" if granule > 1 else ""
            self.refuse(
                f"{name} must be channels_last, or a slice of it{begins}, got strides {tensor.stride()} for shape "
                f"{tuple(tensor.shape)}"
            )

    def _check_phases(self, x: Tensor | None) -> None:
        """Refuse other strides than 2, and what the four phases of x or dx, see `large_map_of`, cannot describe."""
        conv = self.conv
        if self.stride != 2:
            self.refuse(f"stride must be 1 or 2, got {self.stride}")
        if not _is_halved(conv):
            self.refuse(
                f"with stride 2 x must have twice the rows and columns of y, got {conv.image} and {conv.out} under a "
                f"filter {conv.filter} with padding {self.padding}"
            )
        if conv.c % PHASE_GRANULE:
            self.refuse(f"with stride 2 channels must be a multiple of {PHASE_GRANULE}, got {conv.c}")
        if x is not None and not x.is_contiguous(memory_format=torch.channels_last):
            # its phases are interleaved
            self.refuse(f"with stride 2 x must be channels_last, got strides {x.stride()} for shape {tuple(x.shape)}")

    def check_weight(self, weight: Tensor, dtype: torch.dtype) -> None:
        if weight.dtype != dtype:
            self.refuse(f"weight must be {dtype}, got {weight.dtype}", TypeError)
        if not weight.is_contiguous(memory_format=torch.channels_last) or not _starts_at_16_bytes(weight):
            self.refuse(
                f"weight must be channels_last and start at a multiple of 16 bytes, got strides {weight.stride()} for "
                f"shape {tuple(weight.shape)}: use .clone(memory_format=torch.channels_last)"
            )

    def check_bias(self, bias: Tensor | None, dtype: torch.dtype) -> None:
        shape = (self.conv.k,)
        if bias is not None and (tuple(bias.shape) != shape or bias.dtype not in (torch.float32, dtype)):
            self.refuse(f"bias must be fp32 or {dtype} of shape {shape}, got {bias.dtype} {tuple(bias.shape)}")


def pass_of(name: str, conv: ConvProblem, dtype: torch.dtype) -> Pass:
    """Of one stride both ways and one group; the problem's padding is the pass's."""
    top, left = conv.padding  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    return Pass(name, conv, (top, left), dtype)


def takes_stride_2(conv: ConvProblem) -> bool:
    """Whether kernels can read x, or write its gradient, by its phases: each is as large as y, of whole granules."""
    return conv.c % PHASE_GRANULE == 0 and _is_halved(conv)


def _is_halved(conv: ConvProblem) -> bool:
    return all(size == 2 * out for size, out in zip(conv.image, conv.out, strict=True))


def forward_pass(name: str, x: Tensor, weight: Tensor, padding: Sequence[int], stride: int = 1) -> Pass:
    """Of y = conv2d(x, weight). Raises ValueError where they have not the same channels."""
    k, c, *filter_size = weight.shape
    n, channels, *image = x.shape
    conv = ConvProblem(n, c, k, tuple(image), tuple(filter_size), stride, tuple(padding))
    one = pass_of(name, conv, x.dtype)
    if channels != c:
        one.refuse(f"weight {tuple(weight.shape)} must have the {channels} channels of x: groups must be 1")
    return one


def torch_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], *, of_x: bool, of_weight: bool, stride: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dw) by PyTorch's own kernels, None where not asked for."""
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, [stride] * 2, list(padding), [1, 1], False, [0, 0], 1, [of_x, of_weight, False]
    )
    return dx, dw


@dataclass(frozen=True)
class Config:
    """A tile of so many pixels by channels, whose operands have room for `stages` steps.

    num_warps multiply, and one more copies.
    """

    pixels: int
    channels: int
    stages: int
    num_warps: int

    def is_valid(self, size: int, step: int, target: Target) -> bool:
        """Whether it fills wgmma, and its sums fit registers, its operands shared memory.

        An operand's element has `size` bytes, and `step` of them are reduced at a time, see `step_of`.
        """
        return (
            target.arch == "sm_90"
            and self.num_warps in (4, 8)
            and self.stages >= 2
            # wgmma takes 64 rows at least, a copy 256 of an axis at most
            and self.pixels in (64, 128, 256)
            and self.channels in (16, 32, 64, 128, 256)
            and self.pixels >= 16 * self.num_warps
            and self.pixels * self.channels <= _ACCUMULATORS * 32 * self.num_warps
            and self.pieces(size, step, target) > 0
        )

    def pieces(self, size: int, step: int, target: Target) -> int:
        """In how many pieces a tile is stored, so that shared memory holds one beside the stages; 0: in none."""
        stages = self.stages * (self.pixels + self.channels) * step * size + _SLACK_BYTES
        fits = (p for p in (1, 2, 4) if self.channels // p >= 16)
        tile = self.pixels * self.channels * _OUT_BYTES
        return next((p for p in fits if stages + tile // p <= target.shared_bytes), 0)


@dataclass(frozen=True)
class WgradConfig:
    """A tile of so many k by c of each of `taps` taps (1, or 2 beside each other), otherwise as `Config`.

    The pixels are split as long as a multiprocessor gets no more than `rounds` tiles, each for its part of them.
    """

    k: int
    c: int
    taps: int
    stages: int
    num_warps: int
    rounds: int

    def is_valid(self, size: int, target: Target) -> bool:
        operands = self.stages * (self.k + self.taps * self.c) * WGRAD_PIXELS * size
        return (
            target.arch == "sm_90"
            and self.num_warps in (4, 8)
            and self.stages >= 2
            and self.rounds >= 1
            and self.taps in (1, 2)
            and self.k in (64, 128, 256)
            and self.c in (16, 32, 64, 128, 256)
            and self.k >= 16 * self.num_warps
            and self.k * self.c * self.taps <= _ACCUMULATORS * 32 * self.num_warps
            and operands + _SLACK_BYTES <= target.shared_bytes
        )

    def tiles(self, conv: ConvProblem) -> int:
        return cdiv(conv.k, self.k) * cdiv(conv.c, self.c) * cdiv(conv.taps, self.taps)

    def parts(self, conv: ConvProblem, target: Target) -> int:
        """Into how many parts the pixels are split; none is empty."""
        boxes = box_count(conv.n, conv.oh, conv.ow, box_of(conv.n, conv.oh, conv.ow, WGRAD_PIXELS))
        wanted = max(1, min(boxes, target.sm_count * self.rounds // self.tiles(conv)))
        return cdiv(boxes, cdiv(boxes, wanted))


NARROW = Config(128, 16, 6, 4)  # for channels that fill no other tile


def tile_configs(reduced: int, out: int, size: int, target: Target) -> tuple[Config, ...]:
    """What is worth timing, the likeliest first: 128 x 128 won most layers of the DDPM network in the H200's tables."""
    sizes = ((128, 128, 4, 4), (128, 256, 4, 8), (256, 128, 4, 8), (128, 128, 5, 8), (64, 128, 6, 4), (64, 256, 4, 4))
    sizes += ((256, 128, 3, 8), (128, 64, 6, 4), (256, 64, 4, 8), (64, 64, 8, 4), (128, 32, 6, 4), (64, 32, 8, 4))
    widest, step = max(32, next_power_of_2(out)), step_of(reduced, size)
    configs = (Config(*numbers) for numbers in sizes)
    return tuple(c for c in configs if c.channels <= widest and c.is_valid(size, step, target))


def configs_of_phases(reduced: int, out: int, size: int, target: Target) -> tuple[Config, ...]:
    """The same where the result is written by its phases, into whose neighbours no tile may reach."""
    fit = tuple(c for c in tile_configs(reduced, out, size, target) if c.channels <= out)
    return fit or tuple(c for c in (NARROW,) if c.is_valid(size, step_of(reduced, size), target))


def wgrad_configs(conv: ConvProblem, size: int, target: Target) -> tuple[WgradConfig, ...]:
    """What is worth timing, the likeliest first."""
    sizes = ((128, 128, 1, 6, 4), (256, 128, 1, 4, 8), (128, 256, 1, 4, 8), (128, 128, 2, 4, 8), (64, 128, 1, 6, 4))
    sizes += ((128, 64, 1, 6, 4), (128, 64, 2, 6, 4), (64, 64, 1, 8, 4), (64, 64, 2, 6, 4), (64, 32, 2, 6, 4))
    sizes += ((64, 32, 1, 8, 4),)
    tallest, widest = max(64, next_power_of_2(conv.k)), max(32, next_power_of_2(conv.c))
    configs = (WgradConfig(*numbers, rounds) for rounds, numbers in product((1, 2), sizes))
    fit = (c for c in configs if c.k <= tallest and c.c <= widest and c.taps <= conv.taps)
    return tuple(c for c in fit if c.is_valid(size, target))


def summed_at_once(parts: int) -> tuple[int, int]:
    """(parts, elements of each) that a program which adds parts of a weight gradient loads together."""
    at_once = min(16, next_power_of_2(parts))
    return at_once, SUM_ELEMENTS // at_once


def step_of(reduced: int, size: int) -> int:
    """Channels reduced at a time: a row of shared memory or, of fewer channels, whole instructions."""
    return min(_ROW_BYTES // size, max(_INSTRUCTION_BYTES // size, next_power_of_2(reduced)))


def box_of(n: int, h: int, w: int, pixels: int) -> tuple[int, int, int]:
    """(images, rows, columns) of the box of so many pixels that covers a map in the fewest boxes.

    Of several the one with the fewest pixels beside its edges: what it reads there, a neighbour reads too.
    """
    return min(_boxes(n, pixels), key=lambda box: (box_count(n, h, w, box), box[0] * (box[1] + 2) * (box[2] + 2)))


def box_count(n: int, h: int, w: int, box: tuple[int, int, int]) -> int:
    return cdiv(n, box[0]) * cdiv(h, box[1]) * cdiv(w, box[2])


def _boxes(n: int, pixels: int) -> Iterator[tuple[int, int, int]]:
    sides = [2**i for i in range(pixels.bit_length())]
    for h, w in product(sides, sides):
        # not of more images than there are: a box of a small map reaches beyond its rows and columns instead
        if h * w <= pixels and pixels // (h * w) <= next_power_of_2(n):
            yield pixels // (h * w), h, w


def map_of(tensor: Tensor, box: tuple[int, int, int], channels: int) -> TensorDescriptor:
    """The tensor map of a feature map [N, C, H, W], with the axes [N, H, W, C]."""
    n, c, h, w = tensor.shape
    pitch = pixel_pitch(tensor) or c
    return _descriptor(tensor, [n, h, w, c], [h * w * pitch, w * pitch, pitch, 1], [*box, channels])


def large_map_of(tensor: Tensor, box: tuple[int, int, int], channels: int) -> TensorDescriptor:
    """The tensor map of a dense map [N, C, 2 H, 2 W] by its phases: [N, H, row: 2, W, column: 2 and C].

    A box of `box` pixels of one phase is of every second row and column.
    """
    n, c, rows, columns = tensor.shape
    h, w = rows // 2, columns // 2
    n_box, h_box, w_box = box
    strides = [4 * h * w * c, 4 * w * c, 2 * w * c, 2 * c, 1]
    return _descriptor(tensor, [n, h, 2, w, 2 * c], strides, [n_box, h_box, 1, w_box, channels])


def weight_map(weight: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """The tensor map of a weight [K, C, R, S], with the axes [K, R S, C]."""
    k, c, r, s = weight.shape
    return _descriptor(weight, [k, r * s, c], [r * s * c, c, 1], list(block))


def _descriptor(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON[tensor.dtype])
    return TensorDescriptor(tensor, shape, strides, block, layout)  # pyright: ignore[reportArgumentType]


def _starts_at_16_bytes(tensor: Tensor) -> bool:
    return tensor.storage_offset() * tensor.element_size() % 16 == 0
