"""(dw, db) = the gradients of conv2d's weight and bias from FP8 operands, stride 1, the map keeps its size.

On sm_90 wgmma multiplies what one warp copies (`Config`), on sm_89 and sm_120 mma.sync (`TileConfig`).

dy        [N, H / 4, K, W / 4, 4, 4]          quads (see _quads) of the gradient of y, FP8 e5m2
x         [N, H / 4 + 2, C, W / 4 + 2, 4, 4]  quads of x, FP8 e4m3
inverse   [tensors]                fp32 on the device: what FP8 values of each tensor are multiplied by
dw        [K, C, R, S]             bf16, channels_last
db        [K]                      fp32
dy_row, x_row   of `inverse`
kernel_size     (R, S), each 1 or 3; the padding is (R // 2, S // 2)
promote         pixels after which the tensor cores' own sums, of some 14 bits, are added in fp32: a multiple of 128
                that divides 32 H; 0: not before the end of a program's share

C and K are multiples of 16. The parts into which the images are split are added in a fixed order and rounded once, so
that equal calls give equal bits. Raises ValueError or TypeError for anything else.

The GEMM is [K, N H W] x [N H W, C] for each tap. For 128 channels at 32x32, batch 128, 38.7 GFLOP: 26 us at the 1.49
PFLOP/s that an H200 multiplies FP8 with, and 27 for what tiles read from its L2; predicted 37 to 45 with the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_weight_grad
from ridgeline.kernels._conv2d_pass import summed_at_once, torch_gradients
from ridgeline.kernels._conv2d_wgrad_fp8_gluon import conv2d_wgrad_fp8_kernel, wgrad_fp8_sums_kernel
from ridgeline.kernels._conv2d_wgrad_fp8_tl import conv2d_wgrad_fp8_tl_kernel
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, random_nhwc
from ridgeline.kernels._op import (
    LastLaunch,
    Launch,
    Launcher,
    Op,
    Sample,
    Target,
    check_launchable,
    register,
    target_of,
    tuned_config,
)
from ridgeline.kernels._quads import box_of, from_quads, quads_shape, size_of, to_quads, why_not, words_map
from ridgeline.numerics import fp8_sum_eps

FILTER_SIZES = (1, 3)
_ROW_BYTES = 128
_SLACK_BYTES = 1024  # barriers, and what aligns the buffers
_ACCUMULATORS = 192  # fp32 a thread, of products and of what they were promoted to
_TILED = ("sm_89", "sm_120")  # FP8 products by mma.sync
_TILE_ACCUMULATORS = 128  # likewise: operands go through registers too
_SUM_WORDS = 8192  # likewise, of dy


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

    def tiles(self, one: _Problem) -> int:
        return cdiv(one.k, self.k) * cdiv(one.c, self.c) * one.filter[1]

    def parts(self, one: _Problem, target: Target) -> int:
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
            target.arch in _TILED
            and not self.held
            and self.num_warps in (4, 8)
            and self.stages >= 3
            and self.rounds >= 1
            and self.k in (64, 128)
            and self.c in (16, 32, 64, 128)
            and sums <= _TILE_ACCUMULATORS
            and (self.stages - 1) * (self.k + self.c) * _ROW_BYTES <= target.shared_bytes
        )

    def tiles(self, one: _Problem) -> int:
        return one.filter[0] * super().tiles(one)


@dataclass(frozen=True)
class _Problem:
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


def gradients(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both by PyTorch's own operators."""
    _problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    gradient, activation = from_quads(dy, beside=False).to(wide), from_quads(x, beside=True).to(wide)
    (r, s), inverse = kernel_size, inverse.to(wide)
    weight = activation.new_empty((gradient.shape[1], activation.shape[1], r, s))
    _, dw = torch_gradients(gradient, activation, weight, (r // 2, s // 2), of_x=False, of_weight=True)
    assert dw is not None
    dw, db = dw * (inverse[dy_row] * inverse[x_row]), gradient.sum((0, 2, 3)) * inverse[dy_row]
    return (dw if wide == torch.float64 else dw.to(torch.bfloat16)), db


def reference(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> Tensor:  # fmt: skip
    """dw alone."""
    return gradients(dy, x, inverse, kernel_size=kernel_size, dy_row=dy_row, x_row=x_row, promote=promote)[0]


def cost(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> Cost:  # fmt: skip
    one = _problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    return conv_weight_grad(one.conv, x.dtype, out_dtype=torch.bfloat16)


def eps(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> float:  # fmt: skip
    """Rounding to bf16, and what an instruction, 32 products, cuts off the sum, at worst always to one side."""
    one = _problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    return fp8_sum_eps(promote or one.n * one.h * one.w)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    one = _problem(**arguments)
    return _configs(one, target or target_of(arguments["x"]))


def plan(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128,
    config: Config | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The two launches for one call; db is the last one's argument `db_ptr`. Runs nothing."""
    one = _problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    target, (r, s) = target or target_of(x), one.filter
    kind = TileConfig if target.arch in _TILED else Config

    def valid(config: Config) -> bool:
        return config.is_valid(r, promote, target)

    if config is None:
        given = {"dy": dy, "x": x, "inverse": inverse, "kernel_size": kernel_size, "dy_row": dy_row, "x_row": x_row}
        config = tuned_config(OP, kind, valid, **given, promote=promote)
        config = config or next(iter(_configs(one, target)), None)
    if config is None or not valid(config):
        _refuse(f"{config} is not valid for {one.conv} on {target.arch}")
    parts = config.parts(one, target)
    dw = torch.empty((one.k, one.c, r, s), dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last)
    db = torch.empty(one.k, dtype=torch.float32, device=x.device)
    sums = torch.empty((parts, dw.numel()), dtype=torch.float32, device=x.device)
    programs = config.tiles(one) * parts
    if isinstance(config, TileConfig):
        multiply = _multiply_tiles(dy, x, sums, one, config, programs)
    else:
        multiply = _multiply_columns(dy, x, sums, one, config, min(programs, target.sm_count))
    at_once, block = summed_at_once(parts)
    return LastLaunch(
        kernel=wgrad_fp8_sums_kernel,
        grid=(cdiv(dw.numel(), block) + one.k,),
        arguments={
            "parts_ptr": sums, "dy_ptr": dy.view(torch.int32), "inverse_ptr": inverse, "dw_ptr": dw, "db_ptr": db,
            "dy_row": dy_row, "x_row": x_row, "images": one.n,
        },
        constants={
            "NUMEL": dw.numel(), "K": one.k, "PARTS": parts, "AT_ONCE": at_once, "BLOCK": block,
            "QUARTER": one.h // 4 * one.w, "W": one.w, "WORDS": _SUM_WORDS,
        },
        num_warps=8, num_stages=1, output=dw, before=(multiply,),
    )  # fmt: skip


def _multiply_columns(dy: Tensor, x: Tensor, sums: Tensor, one: _Problem, config: Config, programs: int) -> Launch:
    return Launch(
        kernel=conv2d_wgrad_fp8_kernel,
        grid=(programs,),
        arguments={
            "x_desc": words_map(x, config.c, beside=True), "parts_ptr": sums, "images": one.n,
            "dy_desc": words_map(dy, config.k // config.groups, beside=False), "across": one.w // box_of(one.w)[1],
        },
        constants=_constants(one, config, len(sums))
        | {"X_STAGES": config.x_stages(one.filter[0]), "DY_STAGES": config.stages, "HELD": config.held},
        num_warps=4,  # of a group
        num_stages=1, output=sums,
    )  # fmt: skip


def _multiply_tiles(dy: Tensor, x: Tensor, sums: Tensor, one: _Problem, config: TileConfig, programs: int) -> Launch:
    return Launch(
        kernel=conv2d_wgrad_fp8_tl_kernel,
        grid=(programs,),
        arguments={"dy_ptr": dy, "x_ptr": x, "parts_ptr": sums, "images": one.n},
        constants=_constants(one, config, len(sums)) | {"W": one.w},
        num_warps=config.num_warps, num_stages=config.stages, output=sums,
    )  # fmt: skip


def _constants(one: _Problem, config: Config, parts: int) -> dict[str, int | float | bool | str]:
    """Of both kernels."""
    (r, s), (images, words) = one.filter, box_of(one.w)
    return {
        "C": one.c, "K": one.k, "R": r, "S": s, "QUARTER": one.h // 4, "PARTS": parts, "BOX_N": images, "BOX_W": words,
        "BLOCK_K": config.k, "BLOCK_C": config.c, "SPAN": one.span, "PROMOTED": one.promote > 0,
    }  # fmt: skip


def conv2d_wgrad_fp8(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = plan(dy, x, inverse, kernel_size=kernel_size, dy_row=dy_row, x_row=x_row, promote=promote)
    db = launch.arguments["db_ptr"]
    assert isinstance(db, Tensor)
    if x.numel():
        check_launchable("conv2d_wgrad_fp8", launch.kernel, x)
        launch.run()
        return launch.output, db
    return launch.output.zero_(), db.zero_()


def _configs(one: _Problem, target: Target) -> tuple[Config, ...]:
    """What is worth timing, the likeliest first."""
    tallest, widest = max(64, next_power_of_2(one.k)), max(16, next_power_of_2(one.c))
    if target.arch in _TILED:
        sizes = ((128, 64, 4, 8), (64, 64, 4, 4), (128, 128, 4, 8), (64, 128, 4, 8), (64, 32, 5, 4), (64, 16, 5, 4))
        tiles = (TileConfig(*numbers, rounds) for rounds, numbers in product((2, 4), sizes))
        configs = tuple(c for c in tiles if c.c == widest or 64 <= c.c < widest)
    else:
        sizes = ((128, 64, 6, 8), (128, 128, 4, 8), (64, 64, 8, 4), (256, 64, 4, 8), (128, 32, 8, 8), (64, 128, 6, 4))
        sizes += ((64, 32, 8, 4), (128, 256, 3, 8), (64, 16, 8, 4))
        columns = (Config(*numbers, rounds, held) for rounds, numbers, held in product((1, 2), sizes, (True, False)))
        configs = tuple(c for c in columns if c.c <= widest)
    return tuple(c for c in configs if c.k <= tallest and c.is_valid(one.filter[0], one.promote, target))


def _problem(
    dy: Tensor, x: Tensor, inverse: Tensor, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128
) -> _Problem:
    for name, quads, dtype in (("dy", dy, torch.float8_e5m2), ("x", x, torch.float8_e4m3fn)):
        if quads.dtype not in (dtype, torch.float64):  # float64 stands for the exact values, where results are judged
            _refuse(f"{name} must be {dtype}, got {quads.dtype}", TypeError)
        if quads.dim() != 6 or quads.shape[4:] != (4, 4) or not quads.is_contiguous():
            _refuse(f"{name} must be dense quads of six axes, got shape {tuple(quads.shape)}")
    (n, c, h, w), k, (r, s) = size_of(x, beside=True), dy.shape[2], kernel_size
    if size_of(dy, beside=False) != (n, k, h, w):
        _refuse(f"dy and x must be of the same images and sizes, got {tuple(dy.shape)} and {tuple(x.shape)}")
    if (reason := why_not(h, w)) is not None:
        _refuse(reason)
    if c % 16 or k % 16:
        _refuse(f"channels must be multiples of 16, got {c} and {k}")
    if r not in FILTER_SIZES or s not in FILTER_SIZES:
        _refuse(f"kernel_size must have 1 or 3 rows and columns, got {(r, s)}")
    if promote < 0 or promote % 128 or (promote and h // 4 % (promote // 128)):
        _refuse(f"promote must be 0, or a multiple of 128 that divides {32 * h}, got {promote}")
    tensors = inverse.numel()
    if inverse.dtype not in (torch.float32, torch.float64) or inverse.dim() != 1 or not inverse.is_contiguous():
        _refuse(f"inverse must be dense fp32 of one axis, got {inverse.dtype} {tuple(inverse.shape)}", TypeError)
    if not (0 <= dy_row < tensors and 0 <= x_row < tensors):
        _refuse(f"dy_row and x_row must be among the {tensors} rows of inverse, got {dy_row} and {x_row}")
    return _Problem(n, c, k, h, w, (r, s), promote)


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"conv2d_wgrad_fp8: {text}")


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    dw, db = gradients(*args, **kwargs)
    return torch.empty_like(dw, memory_format=torch.channels_last), torch.empty_like(db)


def _on_cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    dw, db = gradients(*args, **kwargs)
    return dw.contiguous(memory_format=torch.channels_last), db


def wgrad_fp8_sample(
    why: str, x: tuple[int, int, int, int], weight: tuple[int, int, int], *, promote: int = 128, real_size: bool = False
) -> Sample:  # fmt: skip
    """`weight` is (K, R, S). The dtype asked for is ignored: it is e5m2 and e4m3 always."""
    k, r, s = weight

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:  # noqa: ARG001
        n, c, h, w = x
        made: dict[str, Any] = {}
        for name, channels, kind in (("dy", k, torch.float8_e5m2), ("x", c, torch.float8_e4m3fn)):
            shape, beside = (n, channels, h, w), name == "x"
            if device == "meta":
                made[name] = torch.empty(quads_shape(*shape, beside=beside), dtype=kind, device=device)
            else:
                # a wide spread, as scales would leave it: 16 is far from the largest of both formats
                wide = random_nhwc(shape, torch.float32, device, seed=c) * 16
                made[name] = to_quads(wide.to(kind), beside=beside)
        made["inverse"] = torch.tensor([1.0, 2.0**-8, (n * h * w) ** -0.5], device=device)
        return {**made, "kernel_size": (r, s), "dy_row": 2, "x_row": 1, "promote": promote}

    return Sample(why, arguments, real_size)


SAMPLES = (
    wgrad_fp8_sample("UNet 32x32 128->128, batch 128", (128, 128, 32, 32), (128, 3, 3), real_size=True),
    wgrad_fp8_sample("UNet 32x32 256->256, batch 128", (128, 256, 32, 32), (256, 3, 3), real_size=True),
    wgrad_fp8_sample("UNet 16x16 512->256, batch 128", (128, 512, 16, 16), (256, 3, 3), real_size=True),
    wgrad_fp8_sample("UNet 8x8 512->256, batch 128", (128, 512, 8, 8), (256, 3, 3), real_size=True),
    wgrad_fp8_sample("UNet 4x4 256->256, batch 128", (128, 256, 4, 4), (256, 3, 3), real_size=True),
    wgrad_fp8_sample("UNet 32x32 384->128 1x1, batch 128", (128, 384, 32, 32), (128, 1, 1), real_size=True),
    wgrad_fp8_sample("channels beside the tiles, a row of two boxes", (3, 80, 8, 64), (48, 3, 3)),
    wgrad_fp8_sample("fewer images than are reduced together", (3, 32, 4, 8), (80, 3, 3)),
    wgrad_fp8_sample("one row of three taps, never promoted", (2, 32, 8, 16), (80, 1, 3), promote=0),
    wgrad_fp8_sample("promoted every other row", (2, 16, 16, 32), (32, 3, 3), promote=256),
)

OP = Op(
    name="conv2d_wgrad_fp8",
    call=register(conv2d_wgrad_fp8, fake=_fake, on_cpu=_on_cpu, cost=cost, interpretable=False),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=(torch.float8_e4m3fn,),
    error_factor=2.0,
    into=None,
    eps=eps,
)
