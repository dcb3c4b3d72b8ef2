"""y = concat(x, p(x), p(p(x)), …) along channels, with p a max pool of stride 1 and "same" padding; NHWC, one kernel.

x      [N, C, H, W]              channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16
size   odd side of the pool's window
count  pools in the chain
y      [N, (count + 1) C, H, W]  channels_last, dtype of x
pdl    programmatic dependent launch; sm_90 and later

Exact: a maximum rounds nothing, and NaN wins as in PyTorch. An empty batch gives an empty y. Raises ValueError or
TypeError for any other layout, dtype or choice.

A chain of i pools is one pool of side i (size - 1) + 1, so every map of the chain can be taken from x itself (YOLO26's
SPPF: windows of 5, 9 and 13). The windows are nested: row by row the widest one grows out of the narrower ones, so
13·13 loads serve all three. Padding is never read: clamping a coordinate into the map repeats an element that the
clipped window holds anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._nhwc import (
    cdiv,
    check_map,
    empty_nhwc,
    let_dependent_in,
    next_power_of_2,
    pixel_pitch,
    random_nhwc,
    share_elements,
    wait_holding_dependent,
)
from ridgeline.kernels._op import (
    Launch,
    Launcher,
    Sample,
    Target,
    define,
    execute,
    nearest_first,
    target_of,
    tuned_config,
)

WIDEST_WINDOW = 63  # the loads of one row are unrolled
_VECTOR_BYTES = 4
_MAX_ROWS = 8  # beyond it compiling takes seconds


def reference(x: Tensor, *, size: int, count: int, pdl: bool = False) -> Tensor:  # noqa: ARG001
    maps = [x]
    for _ in range(count):
        maps.append(F.max_pool2d(maps[-1], size, stride=1, padding=size // 2))
    return torch.cat(maps, dim=1)


def cost(x: Tensor, *, size: int, count: int, pdl: bool = False) -> Cost:  # noqa: ARG001
    """One comparison for each element of each window of the chain as written."""
    return Cost(count * size**2 * x.numel(), x.nbytes, (count + 1) * x.nbytes, "cuda_fp32")


@triton.jit
def max_pool_chain_kernel(  # noqa: ANN201
    x_ptr, y_ptr,
    pixels,  # N * H * W
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr,
    X_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    channel_tiles: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0)
    m = tile // channel_tiles * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    if WIDE:
        # some tensor has 2^31 elements or more, and every offset below is a multiple of m
        m = (tile // channel_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    c = tile % channel_tiles * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    valid_c = c < C
    valid_y = (m < pixels) & valid_c
    # lanes beyond the last pixel repeat it: every clamped address below is then one of x
    m = tl.minimum(m, pixels - 1)
    h = m // W % H
    w = m % W
    x_image = x_ptr + m // (H * W) * (H * W * X_PITCH) + c
    y_pixel = y_ptr + m * Y_PITCH + c
    wait_holding_dependent(PDL)

    x = tl.load(x_ptr + m * X_PITCH + c, mask=valid_c, other=0.0)
    tl.store(y_pixel, x, mask=valid_y)
    STEP: tl.constexpr = SIZE // 2
    REACH: tl.constexpr = STEP * COUNT
    columns = ()
    for dw in tl.static_range(-REACH, REACH + 1):
        columns = columns + (tl.minimum(tl.maximum(w + dw, 0), W - 1) * X_PITCH,)  # noqa: RUF005 - Triton cannot unpack
    windows = (x,) * COUNT
    # rolled: unrolled in full, SPPF's 169 loads take Triton ten seconds to compile; ROWS of them hide the latency
    for dh in tl.range(-REACH, REACH + 1, loop_unroll_factor=ROWS):
        x_row = x_image + tl.minimum(tl.maximum(h + dh, 0), H - 1) * (W * X_PITCH)
        row = tl.load(x_row + columns[REACH], mask=valid_c, other=0.0)
        grown = ()
        for i in tl.static_range(COUNT):
            for dw in tl.static_range(STEP * i + 1, STEP * (i + 1) + 1):
                left = tl.load(x_row + columns[REACH - dw], mask=valid_c, other=0.0)
                right = tl.load(x_row + columns[REACH + dw], mask=valid_c, other=0.0)
                row = tl.maximum(row, left, propagate_nan=tl.PropagateNan.ALL)
                row = tl.maximum(row, right, propagate_nan=tl.PropagateNan.ALL)
            inside = (dh >= -STEP * (i + 1)) & (dh <= STEP * (i + 1))
            # Triton takes the maximum of bf16 in fp32; the way back is exact
            larger = tl.maximum(windows[i], row, propagate_nan=tl.PropagateNan.ALL).to(x.dtype)
            grown = grown + (tl.where(inside, larger, windows[i]),)  # noqa: RUF005
        windows = grown
    let_dependent_in(PDL)
    for i in tl.static_range(COUNT):
        tl.store(y_pixel + (i + 1) * C, windows[i], mask=valid_y)


@dataclass(frozen=True)
class Problem:
    """One call, checked. `out` is where y goes, channels_last or a channel slice of it; None: not allocated yet."""

    x: Tensor
    size: int
    count: int
    pdl: bool = False
    out: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x.dim() != 4 or 0 in self.x.shape[1:]:
            _refuse(f"x must have 4 axes and a pixel and a channel, got shape {tuple(self.x.shape)}")
        if self.x.dtype not in FLOATS:
            _refuse(f"x must be one of fp32, fp16, bf16, got {self.x.dtype}", TypeError)
        if self.size < 1 or self.size % 2 == 0:
            _refuse(f"size must be odd, got {self.size}")
        if self.count < 1 or self.count * (self.size - 1) >= WIDEST_WINDOW:
            _refuse(
                f"count must be at least 1 and the last window at most {WIDEST_WINDOW} wide, "
                f"got {self.count} pools of size {self.size}"
            )
        check_map("max_pool_chain", "x", self.x, like=self.x, shape=tuple(self.x.shape))
        if self.out is not None:
            check_map("max_pool_chain", "out", self.out, like=self.x, shape=self.out_shape)
            if self.out.device != self.x.device:
                _refuse(f"out must be on {self.x.device} like x, got {self.out.device}")
            if share_elements(self.out, self.x):
                _refuse("out must not share memory with x: other programs still read what would be written")

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        n, c, h, w = self.x.shape
        return n, (self.count + 1) * c, h, w

    @property
    def pixels(self) -> int:
        return self.x.shape[0] * self.x.shape[2] * self.x.shape[3]


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_c channels; `rows` of a window are in flight at once."""

    block_m: int
    block_c: int
    rows: int
    num_warps: int

    def is_valid(self, problem: Problem, target: Target) -> bool:  # noqa: ARG002 - the contract's signature
        """Whether blocks are powers of two and a thread has at most 16 elements, of no more channels than there are."""
        return (
            all(block >= 1 and block & (block - 1) == 0 for block in (self.block_m, self.block_c))
            and self.num_warps in (1, 2, 4, 8)
            and self.block_m * self.block_c <= 16 * 32 * self.num_warps
            and self.block_c <= next_power_of_2(problem.x.shape[1])
            and 1 <= self.rows <= _MAX_ROWS
        )


def default_config(problem: Problem, target: Target) -> Config:
    """Two halves (one float) a thread: wider loads would leave fewer threads, and every thread is one long chain.

    The most warps that still give every multiprocessor four programs, or one warp if none does: on the pool of YOLO26n
    an H200 takes 2.3 µs with that, and 5.2 µs with four halves and two warps.
    """
    channels, vector = problem.x.shape[1], _VECTOR_BYTES // problem.x.element_size()
    divisor = channels & -channels
    block_c = min(divisor, 64) if divisor >= vector else min(next_power_of_2(channels), 64)
    tiles = [Config(max(1, 32 * warps * vector // block_c), block_c, 4, warps) for warps in (8, 4, 2, 1)]
    return next((tile for tile in tiles if _programs(problem, tile) >= 4 * target.sm_count), tiles[-1])


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config with 2 to 8 elements a thread, those nearest to it first."""
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    default = default_config(problem, target)
    widths = sorted({default.block_c, max(1, default.block_c // 2), next_power_of_2(problem.x.shape[1])})
    blocks = [(m, c) for c in widths for m in (1, 2, 4, 8, 16, 32)]
    tried = (Config(m, c, rows, warps) for rows in (4, 2, 7) for m, c in blocks for warps in (1, 2, 4, 8))
    worth = (t for t in tried if 2 <= t.block_m * t.block_c // (32 * t.num_warps) <= 8)
    return nearest_first(default, (t for t in worth if t.is_valid(problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"max_pool_chain: {config} is not valid for {tuple(problem.x.shape)} on {target.arch}")
    y = empty_nhwc(problem.out_shape, like=problem.x) if problem.out is None else problem.out
    _, c, h, w = problem.x.shape
    x_pitch, y_pitch = pixel_pitch(problem.x) or 0, pixel_pitch(y) or 0
    return Launch(
        kernel=max_pool_chain_kernel,
        grid=(_programs(problem, config),),
        arguments={"x_ptr": problem.x, "y_ptr": y, "pixels": problem.pixels},
        constants={
            "C": c, "H": h, "W": w, "SIZE": problem.size, "COUNT": problem.count,
            "X_PITCH": x_pitch, "Y_PITCH": y_pitch,
            "WIDE": problem.pixels * max(x_pitch, y_pitch) >= INT32_ELEMENTS, "PDL": problem.pdl,
            "BLOCK_M": config.block_m, "BLOCK_C": config.block_c, "ROWS": config.rows,
        },
        num_warps=config.num_warps,
        num_stages=1,
        pdl=problem.pdl,
        output=y,
    )  # fmt: skip


def max_pool_chain(x: Tensor, *, size: int, count: int, pdl: bool = False) -> Tensor:
    return execute("max_pool_chain", plan(x=x, size=size, count=count, pdl=pdl), x)


def _programs(problem: Problem, config: Config) -> int:
    return cdiv(problem.pixels, config.block_m) * cdiv(problem.x.shape[1], config.block_c)


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"max_pool_chain: {text}")


def _sample(why: str, x: tuple[int, int, int, int], *, size: int, count: int, real_size: bool = False) -> Sample:
    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        return {"x": random_nhwc(x, dtype, device, seed=0), "size": size, "count": count}

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("three pools on a map narrower than the last window", (1, 16, 3, 4), size=3, count=3),
    _sample("two images, odd channels, one pool", (2, 5, 5, 9), size=3, count=1),
    _sample("1x1 map: every window is its centre", (3, 8, 1, 1), size=3, count=2),
    _sample("YOLO26n SPPF at 640", (1, 128, 20, 20), size=5, count=3, real_size=True),
    _sample("YOLO26x SPPF at 640", (1, 384, 20, 20), size=5, count=3, real_size=True),
)

OP = define(
    max_pool_chain,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
)
