"""y = act(conv2d(letterbox(frame) / 255, weight) + bias), NHWC: a network's first layer reads the camera's bytes.

frame     [N, C, H, W]    uint8, channels_last: the bytes of N frames [H, W, C], or the first channels of wider pixels
weight    [K, C, R, S]    channels_last; fp32, fp16, bf16; channels in the frame's order (flip them for BGR frames)
bias      [K]             fp32 or the dtype of weight; None: no bias
rows      [HC]            int32, which two rows of the frame make each row of the canvas; see `_letterbox.axis_table`
columns   [WC]            int32, likewise; both on the device of weight
y         [N, K, HO, WO]  channels_last, dtype of weight; HO and WO follow from the canvas [HC, WC]
act       "silu" or "none"
precision products of fp32 operands: "tf32" or "ieee"; no effect on fp16 and bf16
blend     False promises that no table holds a weight, and one pixel is read in place of four: frames that only move or
          shrink by an odd factor, as 1080 x 1920 to 640 does
pdl       programmatic dependent launch (sm_90 and later)

A canvas pixel is OpenCV's 8-bit bilinear value or grey 114, divided by 255 and rounded to the dtype of weight. Outside
the canvas the convolution reads 0, not grey. Accumulates in fp32, rounds once. Tables that point outside the frame read
grey. Raises ValueError or TypeError for any other layout, dtype or choice.

The canvas is never written: each program gathers the frame's bytes for its pixels, one row of the filter at a time, and
scales them on the way to the matrix unit. Neighbouring programs gather the same bytes again, from L1 and L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import _letterbox, conv2d_act
from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._letterbox import GREY, PADDING, SHIFT, frame_sample
from ridgeline.kernels._nhwc import (
    activate,
    cdiv,
    check_map,
    empty_nhwc,
    let_dependent_in,
    next_power_of_2,
    pixel_pitch,
    prefetch_weights,
    round_operand,
    split_pixel,
    tf32_rounding,
    wait_holding_dependent,
)
from ridgeline.kernels._op import Launch, Launcher, Target, define, execute, nearest_first, target_of, tuned_config

NAME = "letterbox_conv_act"
# The filter's rows are unrolled, and one of them is a step of the reduction.
MAX_FILTER_ROWS = 16
MAX_ROW_ELEMENTS = 64
_MAX_ACCUMULATORS = 64  # fp32 a thread
_MAX_GATHERED = 16  # elements of a filter row a thread: each takes two pointers, a weight and a mask beside its value


def reference(
    frame: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    precision: str = "tf32",
    blend: bool = True,  # noqa: ARG001 - a promise about the tables
    pdl: bool = False,
) -> Tensor:
    x = _letterbox.letterbox(frame, rows, columns, dtype=weight.dtype)
    choices = {"act": act, "precision": precision, "pdl": pdl}
    return conv2d_act.reference(x, weight, bias, stride=stride, padding=padding, **choices)


def cost(
    frame: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    precision: str = "tf32",
    blend: bool = True,  # noqa: ARG001
    pdl: bool = False,
) -> Cost:
    """That of the convolution, reading the frame and the tables in place of the canvas."""
    canvas = frame.new_empty(
        (frame.shape[0], frame.shape[1], len(rows), len(columns)), dtype=weight.dtype, device="meta"
    )
    choices = {"act": act, "precision": precision, "pdl": pdl}
    conv = conv2d_act.cost(canvas, weight, bias, stride=stride, padding=padding, **choices)
    sources = frame.nbytes + rows.nbytes + columns.nbytes
    return replace(conv, read_bytes=conv.read_bytes - canvas.nbytes + sources)


_SHIFT = tl.constexpr(SHIFT)
_WEIGHT_MASK = tl.constexpr(_letterbox.WEIGHT_MASK)
_ONE = tl.constexpr(_letterbox.ONE)
_PADDING = tl.constexpr(PADDING)
_GREY = tl.constexpr(GREY)
# 1/255 as a sum: a byte times the first is exact, so that one rounding gives the same fp32 as the division: a test
# tries all 256. A multiplication by 1/255 alone is off for every second byte, and an IEEE division costs far more.
_UNIT_HIGH = tl.constexpr(257 / 2**16)
_UNIT_LOW = tl.constexpr(1 / 255 - 257 / 2**16)


@triton.jit
def _blended(left_ptr, right_ptr, row, across, inside):
    """One row of the frame between two columns, in 1/128 of a pixel value; `row` is its offset [BLOCK_M, 1]."""
    left = tl.load(left_ptr + row, mask=inside, other=0).to(tl.int32)
    right = tl.load(right_ptr + row, mask=inside, other=0).to(tl.int32)
    return (left * _ONE + (right - left) * across) >> 4


@triton.jit
def letterbox_conv_act_kernel(  # noqa: ANN201
    frame_ptr, weight_ptr, bias_ptr, rows_ptr, columns_ptr, y_ptr,
    pixels,  # N * HO * WO
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CANVAS_H: tl.constexpr, CANVAS_W: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    FRAME_PITCH: tl.constexpr, BLEND: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    ROUNDING: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    channel_tiles: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    m = tile // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % channel_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)  # tap and channel within a filter row
    valid_m = m < pixels
    valid_n = n < K
    valid_k = k < S * C
    image, row, column = split_pixel(m, HO, WO)  # pyright: ignore[reportGeneralTypeIssues]

    # the tables are constants of the network: no predecessor writes them
    x = (column * STRIDE_W - PAD_W)[:, None] + (k // C)[None, :]
    on_columns = (valid_m[:, None] & valid_k[None, :]) & (x >= 0) & (x < CANVAS_W)
    entry = tl.load(columns_ptr + x, mask=on_columns, other=_PADDING)
    first = entry >> _SHIFT
    in_columns = (first >= -1) & (first < W)
    left_ptr = frame_ptr + tl.maximum(first, 0) * FRAME_PITCH + (k % C)[None, :]
    if BLEND:
        across = entry & _WEIGHT_MASK
        right_ptr = frame_ptr + tl.minimum(first + 1, W - 1) * FRAME_PITCH + (k % C)[None, :]
    if bias_ptr is not None:
        bias_n = tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)
    weight_row = weight_ptr + n * (R * S * C)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    prefetch_weights(weight_ptr, R * S * C * K, PDL)
    wait_holding_dependent(PDL)
    # unrolled, so that all rows' loads are in flight at once
    for r in tl.static_range(R):
        y = row * STRIDE_H - PAD_H + r
        on_rows = valid_m & (y >= 0) & (y < CANVAS_H)
        entry_m = tl.load(rows_ptr + y, mask=on_rows, other=_PADDING)
        first_m = entry_m >> _SHIFT
        in_rows = (first_m >= -1) & (first_m < H)
        inside = in_columns & in_rows[:, None]
        upper = ((image * H + tl.maximum(first_m, 0)) * W * FRAME_PITCH)[:, None]
        if BLEND:
            lower = ((image * H + tl.minimum(first_m + 1, H - 1)) * W * FRAME_PITCH)[:, None]
            down = (entry_m & _WEIGHT_MASK)[:, None]
            above = _blended(left_ptr, right_ptr, upper, across, inside)
            below = _blended(left_ptr, right_ptr, lower, across, inside)
            value = (((_ONE - down) * above >> 16) + (down * below >> 16) + 2) >> 2
        else:
            value = tl.load(left_ptr + upper, mask=inside, other=0).to(tl.int32)
        # the letterbox's frame is grey, the convolution's padding around the canvas is zero
        pixel = tl.where(inside, value, _GREY).to(tl.float32)
        unit = tl.where(on_columns & on_rows[:, None], pixel * _UNIT_HIGH + pixel * _UNIT_LOW, 0.0)
        a_mk = unit.to(weight_ptr.dtype.element_ty)
        valid_w = valid_k[:, None] & valid_n[None, :]
        b_kn = tl.load(weight_row[None, :] + (r * S * C + k)[:, None], mask=valid_w, other=0.0)
        acc = tl.dot(round_operand(a_mk, ROUNDING), b_kn, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += bias_n[None, :]
    acc = activate(acc, ACT)
    valid_y = valid_m[:, None] & valid_n[None, :]
    let_dependent_in(PDL)
    tl.store(y_ptr + m[:, None] * K + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=valid_y)


class _OnCanvas(conv2d_act.Problem):
    """The plain convolution, refusing in this op's name."""

    name = NAME


@dataclass(frozen=True)
class Problem:
    """One call, checked: the convolution over the canvas does most of it."""

    frame: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    columns: Tensor
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    act: str = "silu"
    precision: str = "tf32"
    blend: bool = True
    pdl: bool = False

    def __post_init__(self) -> None:
        frame, weight = self.frame, self.weight
        if frame.dtype != torch.uint8:
            _refuse(f"frame must be uint8, got {frame.dtype}", TypeError)
        if frame.dim() != 4 or weight.dim() != 4 or frame.numel() == 0 < frame.shape[0]:
            _refuse(
                f"frame and weight must have 4 axes and frames pixels, "
                f"got shapes {tuple(frame.shape)} and {tuple(weight.shape)}"
            )
        check_map(NAME, "frame", frame, like=frame, shape=tuple(frame.shape))
        for name, table in (("rows", self.rows), ("columns", self.columns)):
            if not _letterbox.is_table(table):
                _refuse(f"{name} must be int32 with one contiguous axis, got {table.dtype} {tuple(table.shape)}")
        tensors = (("weight", weight), ("bias", self.bias), ("rows", self.rows), ("columns", self.columns))
        for name, tensor in tensors:
            if tensor is not None and tensor.device != frame.device:
                _refuse(f"{name} must be on {frame.device} like frame, got {tensor.device}")
        on_canvas = self.on_canvas  # refuses dtypes, weight layout, bias and choices that the plain convolution refuses
        r, s = on_canvas.conv.filter
        if r > MAX_FILTER_ROWS or s * frame.shape[1] > MAX_ROW_ELEMENTS:
            _refuse(
                f"a filter must have at most {MAX_FILTER_ROWS} rows of {MAX_ROW_ELEMENTS} elements, "
                f"got {r} rows of {s} x {frame.shape[1]}"
            )
        n, _, h, w = frame.shape
        if max(n * h * w * (pixel_pitch(frame) or 0), on_canvas.pixels * on_canvas.conv.k) >= INT32_ELEMENTS:
            _refuse(f"maps must span less than 2^31 elements, got {tuple(frame.shape)} to {on_canvas.out_shape}")

    @property
    def on_canvas(self) -> conv2d_act.Problem:
        """The plain convolution of the canvas, on the meta device: same checks, same geometry, no memory."""
        n, c, _, _ = self.frame.shape
        canvas = torch.empty((n, c, len(self.rows), len(self.columns)), dtype=self.weight.dtype, device="meta")
        weight, bias = (
            None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for t in (self.weight, self.bias)
        )
        assert weight is not None
        return _OnCanvas(
            canvas.contiguous(memory_format=torch.channels_last), weight, bias, stride=self.stride,
            padding=self.padding, act=self.act, precision=self.precision, pdl=self.pdl,
        )  # fmt: skip

    @property
    def row_elements(self) -> int:
        """Taps times channels of one filter row: what a step of the reduction holds, the rest of its block idles."""
        return self.weight.shape[1] * self.weight.shape[3]


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_n output channels; a second block of channels gathers again."""

    block_m: int
    block_n: int
    num_warps: int

    def is_valid(self, problem: Problem, target: Target) -> bool:  # noqa: ARG002 - the contract's signature
        """Whether it compiles and keeps its accumulators and what it gathers in registers."""
        blocks, threads = (self.block_m, self.block_n), 32 * self.num_warps
        return (
            all(block >= 16 and block & (block - 1) == 0 for block in blocks)
            and self.num_warps in (1, 2, 4, 8)
            and self.block_m * self.block_n <= _MAX_ACCUMULATORS * threads
            and self.block_m * _block_k(problem) <= _MAX_GATHERED * threads
        )


def default_config(problem: Problem, target: Target) -> Config:
    """All channels, and the most pixels that leave every multiprocessor four programs, or the fewest if none do."""
    valid = [
        Config(block_m, block_n, num_warps)
        for block_n in (_widest(problem), 64, 32, 16)
        for block_m, num_warps in ((128, 8), (64, 4), (32, 4), (16, 4))
        if block_n <= _widest(problem)
    ]
    valid = [config for config in valid if config.is_valid(problem, target)]
    widest = [config for config in valid if config.block_n == valid[0].block_n]
    return next((config for config in widest if _programs(problem, config) >= 4 * target.sm_count), widest[-1])


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config, those nearest to it first."""
    problem = Problem(**arguments)
    target = target or target_of(problem.frame)
    default = default_config(problem, target)
    widths = dict.fromkeys((default.block_n, max(16, default.block_n // 2)))
    tried = (Config(m, n, warps) for n in widths for m in (64, 32, 128, 16, 256) for warps in (4, 2, 8, 1))
    return nearest_first(default, (config for config in tried if config.is_valid(problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.frame)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    on_canvas = problem.on_canvas
    if not config.is_valid(problem, target):
        raise ValueError(f"{NAME}: {config} is not valid for {on_canvas.conv} on {target.arch}")
    frame, conv = problem.frame, on_canvas.conv
    y = empty_nhwc(on_canvas.out_shape, like=problem.weight)
    return Launch(
        kernel=letterbox_conv_act_kernel,
        grid=(_programs(problem, config),),
        arguments={
            "frame_ptr": frame,
            "weight_ptr": problem.weight,
            "bias_ptr": problem.bias,
            "rows_ptr": problem.rows,
            "columns_ptr": problem.columns,
            "y_ptr": y,
            "pixels": on_canvas.pixels,
        },
        constants={
            "C": conv.c, "H": frame.shape[2], "W": frame.shape[3], "CANVAS_H": conv.image[0],
            "CANVAS_W": conv.image[1], "K": conv.k, "R": conv.filter[0], "S": conv.filter[1], "HO": conv.oh,
            "WO": conv.ow, "STRIDE_H": problem.stride[0], "STRIDE_W": problem.stride[1],
            "PAD_H": problem.padding[0], "PAD_W": problem.padding[1], "FRAME_PITCH": pixel_pitch(frame) or 0,
            "BLEND": problem.blend, "ACT": problem.act, "PRECISION": problem.precision, "PDL": problem.pdl,
            "ROUNDING": tf32_rounding(problem.weight, problem.precision, target),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": _block_k(problem),
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
        pdl=problem.pdl,
    )  # fmt: skip


def letterbox_conv_act(
    frame: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    act: str = "silu",
    precision: str = "tf32",
    blend: bool = True,
    pdl: bool = False,
) -> Tensor:
    choices = {"stride": stride, "padding": padding, "act": act, "precision": precision, "blend": blend, "pdl": pdl}
    launch = plan(frame=frame, weight=weight, bias=bias, rows=rows, columns=columns, **choices)
    return execute(NAME, launch, frame)


def _programs(problem: Problem, config: Config) -> int:
    on_canvas = problem.on_canvas
    return cdiv(on_canvas.pixels, config.block_m) * cdiv(on_canvas.conv.k, config.block_n)


def _widest(problem: Problem) -> int:
    return min(128, max(16, next_power_of_2(problem.weight.shape[0])))


def _block_k(problem: Problem) -> int:
    return max(16, next_power_of_2(problem.row_elements))


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"{NAME}: {text}")


SAMPLES = (
    frame_sample("scaled down, grey above and below", (1, 23, 37), (7, 12), (2, 3, 0, 0), (16, 3, 3)),
    frame_sample("scaled up, two frames, grey beside", (2, 5, 3), (10, 6), (0, 0, 3, 3), (24, 3, 3), act="none"),
    frame_sample("moved, not scaled, one channel, strict fp32 products", (1, 9, 8), (9, 8), (1, 2, 4, 0), (5, 3, 3),
                 channels=1, bias=False, precision="ieee"),
    frame_sample("one row of a wide filter, stride 1, one pixel", (1, 1, 1), (3, 5), (0, 0, 0, 0), (8, 1, 7), stride=1),
    frame_sample("YOLO26n from 1080x1920", (1, 1080, 1920), (360, 640), (140, 140, 0, 0), (16, 3, 3), real_size=True),
    frame_sample("YOLO26x from 1080x1920", (1, 1080, 1920), (360, 640), (140, 140, 0, 0), (96, 3, 3), real_size=True),
    frame_sample("YOLO26n from 720x1280", (1, 720, 1280), (360, 640), (140, 140, 0, 0), (16, 3, 3), real_size=True),
)  # fmt: skip

OP = define(
    letterbox_conv_act,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
)
