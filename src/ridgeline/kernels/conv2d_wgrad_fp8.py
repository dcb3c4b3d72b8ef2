"""(dw, db) = the gradients of conv2d's weight and bias from FP8 operands, stride 1, the map keeps its size.

On sm_90 wgmma multiplies what one warp copies (`Config`), on sm_89 and sm_120 mma.sync (`TileConfig`).

dy        [N, H / 4, K, W / 4, 4, 4]          quads (see _quads) of the gradient of y, FP8 e5m2
x         [N, H / 4 + 2, C, W / 4 + 2, 4, 4]  quads of x, FP8 e4m3
inverse   [tensors]                fp32 on the device: what FP8 values of each tensor are multiplied by
dw        [K, C, R, S]             bf16, channels_last
db        [K]                      fp32; empty without `bias`, for a caller who knows it otherwise
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
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_weight_grad
from ridgeline.kernels._conv2d_pass import torch_gradients
from ridgeline.kernels._conv2d_wgrad_fp8_call import FILTER_SIZES as FILTER_SIZES
from ridgeline.kernels._conv2d_wgrad_fp8_call import (
    TILED,
    Config,
    Problem,
    TileConfig,
    configs,
    problem,
    refuse,
    sums_tile,
)
from ridgeline.kernels._conv2d_wgrad_fp8_gluon import conv2d_wgrad_fp8_kernel
from ridgeline.kernels._conv2d_wgrad_fp8_sums import wgrad_fp8_sums_kernel
from ridgeline.kernels._conv2d_wgrad_fp8_tl import conv2d_wgrad_fp8_tl_kernel
from ridgeline.kernels._nhwc import cdiv, random_nhwc, starts_early
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
from ridgeline.kernels._quads import box_of, from_quads, quads_shape, to_quads, words_map
from ridgeline.numerics import fp8_sum_eps


def gradients(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128,
    bias: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both by PyTorch's own operators."""
    problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    gradient, activation = from_quads(dy, beside=False).to(wide), from_quads(x, beside=True).to(wide)
    (r, s), inverse = kernel_size, inverse.to(wide)
    weight = activation.new_empty((gradient.shape[1], activation.shape[1], r, s))
    _, dw = torch_gradients(gradient, activation, weight, (r // 2, s // 2), of_x=False, of_weight=True)
    assert dw is not None
    dw = dw * (inverse[dy_row] * inverse[x_row])
    db = gradient.sum((0, 2, 3)) * inverse[dy_row] if bias else gradient.new_empty(0)
    return (dw if wide == torch.float64 else dw.to(torch.bfloat16)), db


@wraps(gradients)  # tuned configs are filed under the names of its parameters
def reference(*args: Any, **kwargs: Any) -> Tensor:
    """dw alone."""
    return gradients(*args, **kwargs)[0]


def cost(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128,
    bias: bool = True,  # noqa: ARG001 - what is read twice is not counted
) -> Cost:  # fmt: skip
    one = problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    return conv_weight_grad(one.conv, x.dtype, out_dtype=torch.bfloat16)


def eps(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128,
    bias: bool = True,  # noqa: ARG001
) -> float:  # fmt: skip
    """Rounding to bf16, and what an instruction, 32 products, cuts off the sum, at worst always to one side."""
    one = problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    return fp8_sum_eps(promote or one.n * one.h * one.w)


def candidates(*, target: Target | None = None, bias: bool = True, **arguments: Any) -> tuple[Config, ...]:  # noqa: ARG001
    one = problem(**arguments)
    return configs(one, target or target_of(arguments["x"]))


def plan(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128,
    bias: bool = True, config: Config | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The two launches for one call; db is the last one's argument `db_ptr`, None without `bias`. Runs nothing."""
    one = problem(dy, x, inverse, kernel_size, dy_row, x_row, promote)
    target, (r, s) = target or target_of(x), one.filter
    kind = TileConfig if target.arch in TILED else Config

    def valid(config: Config) -> bool:
        return config.is_valid(r, promote, target)

    if config is None:
        given = {"dy": dy, "x": x, "inverse": inverse, "kernel_size": kernel_size, "dy_row": dy_row, "x_row": x_row}
        config = tuned_config(OP, kind, valid, **given, promote=promote)
        config = config or next(iter(configs(one, target)), None)
    if config is None or not valid(config):
        refuse(f"{config} is not valid for {one.conv} on {target.arch}")
    parts = config.parts(one, target)
    dw = torch.empty((one.k, one.c, r, s), dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last)
    sums = torch.empty((parts, dw.numel()), dtype=torch.float32, device=x.device)
    programs = config.tiles(one) * parts
    if isinstance(config, TileConfig):
        multiply = _multiply_tiles(dy, x, sums, one, config, programs)
    else:
        programs = min(programs, target.sm_count)
        multiply = _multiply_columns(dy, x, sums, one, config, programs, pdl=starts_early(target))
    tile = sums_tile(parts, dw.numel(), target)
    return LastLaunch(
        kernel=wgrad_fp8_sums_kernel,
        grid=(cdiv(dw.numel(), tile["BLOCKS"] * tile["BLOCK"]) + (one.k if bias else 0),),
        arguments={
            "parts_ptr": sums, "dy_ptr": dy.view(torch.int32) if bias else None, "inverse_ptr": inverse, "dw_ptr": dw,
            "db_ptr": torch.empty(one.k, dtype=torch.float32, device=x.device) if bias else None,
            "dy_row": dy_row, "x_row": x_row, "images": one.n,
        },
        constants={
            "NUMEL": dw.numel(), "K": one.k, "PARTS": parts, **tile, "QUARTER": one.h // 4 * one.w, "W": one.w,
            "PDL": starts_early(target),
        },
        num_warps=8, num_stages=1, output=dw, pdl=starts_early(target), before=(multiply,),
    )  # fmt: skip


def _multiply_columns(
    dy: Tensor, x: Tensor, sums: Tensor, one: Problem, config: Config, programs: int, *, pdl: bool
) -> Launch:
    return Launch(
        kernel=conv2d_wgrad_fp8_kernel,
        grid=(programs,),
        arguments={
            "x_desc": words_map(x, config.c, beside=True), "parts_ptr": sums, "images": one.n,
            "dy_desc": words_map(dy, config.k // config.groups, beside=False), "across": one.w // box_of(one.w)[1],
        },
        constants=_constants(one, config, len(sums))
        | {"X_STAGES": config.x_stages(one.filter[0]), "DY_STAGES": config.stages, "HELD": config.held, "PDL": pdl},
        num_warps=4,  # of a group
        num_stages=1, output=sums, pdl=pdl,
    )  # fmt: skip


def _multiply_tiles(dy: Tensor, x: Tensor, sums: Tensor, one: Problem, config: TileConfig, programs: int) -> Launch:
    return Launch(
        kernel=conv2d_wgrad_fp8_tl_kernel,
        grid=(programs,),
        arguments={"dy_ptr": dy, "x_ptr": x, "parts_ptr": sums, "images": one.n},
        constants=_constants(one, config, len(sums)) | {"W": one.w},
        num_warps=config.num_warps, num_stages=config.stages, output=sums,
    )  # fmt: skip


def _constants(one: Problem, config: Config, parts: int) -> dict[str, int | float | bool | str]:
    """Of both kernels."""
    (r, s), (images, words) = one.filter, box_of(one.w)
    return {
        "C": one.c, "K": one.k, "R": r, "S": s, "QUARTER": one.h // 4, "PARTS": parts, "BOX_N": images, "BOX_W": words,
        "BLOCK_K": config.k, "BLOCK_C": config.c, "SPAN": one.span, "PROMOTED": one.promote > 0,
    }  # fmt: skip


def conv2d_wgrad_fp8(
    dy: Tensor, x: Tensor, inverse: Tensor, *, kernel_size: Sequence[int], dy_row: int, x_row: int, promote: int = 128,
    bias: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = plan(dy, x, inverse, kernel_size=kernel_size, dy_row=dy_row, x_row=x_row, promote=promote, bias=bias)
    db = launch.arguments["db_ptr"]
    db = db if isinstance(db, Tensor) else inverse.new_empty(0)
    if x.numel():
        check_launchable("conv2d_wgrad_fp8", launch.kernel, x)
        launch.run()
        return launch.output, db
    return launch.output.zero_(), db.zero_()


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
