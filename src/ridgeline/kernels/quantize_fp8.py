"""y = x in FP8, on request its quads, and what the next scale must follow, from one read of x.

    y           = round(clamp(x · scale[row], -largest, largest))
    amax[row]   = max(amax[row], |x|)                               infinite or NaN where x is
    counts[row] = counts[row] + (saturated, vanished, all)

x            [N, C, H, W] channels_last or a channel slice of it, or [M, C] with adjacent channels; fp32, fp16, bf16
scale, amax  [tensors] fp32 on the device of x
counts       [tensors, 3] int64: elements that saturated (|x · scale| more than half a step beyond the largest, so that
             the one which decides the scale does not count), that vanished (not zero, but rounded to it), and all
fp8_format   "e4m3" (activations, weights), whose largest is 448, or "e5m2" (gradients), 57344

returns y      as x in FP8, dense: channels_last, or [M, C]
        quads  its transposed copy, which conv2d_wgrad_fp8 reads, see `_quads.py`; empty without `quads`

Products are rounded to fp32, then to FP8, ties to even; NaN stays NaN. Equal calls give equal bits. Raises ValueError
or TypeError for anything else, for `quads` of what has none, and for GPUs before sm_89, which have no such conversion.

`amax` and `counts`, those of `ridgeline.fp8_scaling`, are raised and added to in place, but the operator is registered
as one that changes nothing and counts no version up: autograd does not see it. Nothing in a graph may read the two,
since a compiler does not know when they change, and may make one of equal calls; `DelayedScaling.update_` does,
outside, once a step. A producer of ours needs no pass of its own: it calls the device functions in `_quantize_fp8.py`
on what it is about to store.

At 128 channels, 32², batch 128, bf16, 33.6 MB are read and 16.8 written, with quads 26.2 more of e4m3 or 16.8 of e5m2:
by these bytes at an H200's rate of a copy, 4.28 TB/s, 12 µs, and 18 or 16 with quads, where 17 instructions an element
could be issued in 10.

Not in `kernels.ALL`, whose ops return one tensor; `tuning.tune` takes it nevertheless, and times all of it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS
from ridgeline.kernels._nhwc import starts_early
from ridgeline.kernels._op import (
    Launch,
    Launcher,
    Op,
    Target,
    check_launchable,
    nearest_first,
    register,
    target_of,
    tuned_config,
)
from ridgeline.kernels._quads import quads_shape, to_quads
from ridgeline.kernels._quantize_fp8 import FORMATS, amax_fp8_kernel, quantize_fp8_kernel, quantize_quads_kernel
from ridgeline.kernels._quantize_fp8_call import (
    CONFIGS,
    Config,
    check,
    check_quads,
    check_rows,
    default_config,
    empty_y,
    refuse,
    sample,
    size,
    x_pitch,
)

_FLOPS = 4  # of an element: the product, the maximum and two comparisons; it is the bytes that take the time


def quantized(x: Tensor, scale: Tensor, *, fp8_format: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, amax [1], counts [1, 3]) in plain PyTorch; of float64 y is what FP8 rounds, to judge what rounding does."""
    kind = FORMATS[fp8_format]
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * scale.to(wide.dtype)
    clamped = scaled.clamp(-kind.largest, kind.largest)
    y = clamped if x.dtype == torch.float64 else clamped.to(kind.dtype)
    magnitude = scaled.abs()
    vanished = (magnitude <= kind.vanishing) & (scaled != 0)
    everything = torch.ones_like(vanished)
    counts = torch.stack([(magnitude > kind.saturating).sum(), vanished.sum(), everything.sum()])[None]
    amax = wide.abs().amax().float() if x.numel() else wide.new_zeros((), dtype=torch.float32)
    return y, amax.reshape(1), counts


def reference(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    *,
    row: int,
    fp8_format: str,
    quads: bool = False,  # noqa: ARG001
) -> Tensor:
    """y alone."""
    return quantized(x, scale[row], fp8_format=fp8_format)[0]


def cost(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    *,
    row: int,  # noqa: ARG001
    fp8_format: str,
    quads: bool = False,
) -> Cost:
    copies = x.numel() + (prod(quads_shape(*x.shape, beside=_beside(fp8_format))) if quads else 0)
    recorded = amax.itemsize + 3 * counts.itemsize
    return Cost(_FLOPS * x.numel(), x.nbytes + scale.itemsize, copies + recorded)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """Those that leave few channels and few pixels of a tile empty, which with quads are of one map."""
    x = arguments["x"]
    pixels = x.shape[2] * x.shape[3] if arguments.get("quads") else size(x)[0]
    fitting = [config for config in CONFIGS if config.channels < 2 * x.shape[1] and config.pixels < 2 * pixels]
    return nearest_first(default_config(x, target or target_of(x)), fitting)


def plan(
    *,
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    row: int,
    fp8_format: str,
    quads: bool = False,
    config: Config | None = None,
    target: Target | None = None,
) -> Launch:
    """The launch, whose arguments are all that it writes: quads as `words_ptr`, words of four bytes. Runs nothing."""
    target = target or target_of(x)
    check(x, fp8_format, target)
    check_rows(x, amax, counts, scale, row)
    if quads:
        check_quads(x)
    if config is None:
        # tuned for a state alone, whose row it is does not matter
        alone = {"scale": scale[:1], "amax": amax[:1], "counts": counts[:1], "row": 0}
        arguments = {"x": x, **alone, "fp8_format": fp8_format, "quads": quads}
        config = tuned_config(OP, Config, lambda c: c.is_valid, **arguments) or default_config(x, target)
    if not config.is_valid:
        refuse(f"{config} must have powers of two, 16 or more pixels and channels, and 32 or 64 elements a thread")
    pixels, c = size(x)
    y, pdl = empty_y(x, fp8_format), starts_early(target_of(x))
    if quads:
        n, _, h, w = x.shape
        beside = _beside(fp8_format)
        kernel, programs = quantize_quads_kernel, config.quads_programs(x)
        words = x.new_empty(quads_shape(n, c, h, w, beside=beside)[:5], dtype=torch.int32)
        of_kernel = {"words_ptr": words, "images": n}
        of_map, tile = {"QUARTER": h * w // 4, "W": w, "BESIDE": beside}, config.of_rows(x)
    else:
        kernel, programs = quantize_fp8_kernel, config.programs(x)
        of_kernel, of_map, tile = {"pixels": pixels}, {}, (config.pixels, config.width(x))
    return Launch(
        kernel,
        grid=(programs,),
        arguments={
            "x_ptr": x,
            "scale_ptr": scale,
            "y_ptr": y,
            "amax_ptr": amax.view(torch.int32),
            "counts_ptr": counts,
            "row": row,
            **of_kernel,
            "x_pitch": x_pitch(x),
        },
        constants={"C": c, **of_map, "FORMAT": fp8_format, "BLOCK_P": tile[0], "BLOCK_C": tile[1], "PDL": pdl},
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
        pdl=pdl,
    )


def amax_launch(x: Tensor, amax: Tensor, *, config: Config = CONFIGS[0]) -> Launch:
    """Raises `amax` to the largest magnitude of x, one read and nothing written: for scales that x itself decides."""
    check(x, "e4m3", None)
    pixels, c = size(x)
    pdl = starts_early(target_of(x))
    return Launch(
        amax_fp8_kernel,
        grid=(config.programs(x),),
        arguments={"x_ptr": x, "amax_ptr": amax.view(torch.int32), "pixels": pixels, "x_pitch": x_pitch(x)},
        constants={"C": c, "BLOCK_P": config.pixels, "BLOCK_C": config.width(x), "PDL": pdl},
        num_warps=config.num_warps,
        num_stages=1,
        output=amax,
        pdl=pdl,
    )


def quantize_fp8(
    x: Tensor, scale: Tensor, amax: Tensor, counts: Tensor, *, row: int, fp8_format: str, quads: bool = False
) -> tuple[Tensor, Tensor]:
    # `data` has a version of its own, so that autograd sees no change
    launch = plan(x=x, scale=scale, amax=amax.data, counts=counts.data, row=row, fp8_format=fp8_format, quads=quads)
    y = launch.output
    if y.numel():
        check_launchable("quantize_fp8", launch.kernel, y)
        launch.run()
    words = launch.arguments.get("words_ptr")
    return y, words.view(y.dtype).view(quads_shape(*x.shape, beside=_beside(fp8_format))) if isinstance(
        words, Tensor
    ) else y.new_empty(0)


def on_cpu(
    x: Tensor, scale: Tensor, amax: Tensor, counts: Tensor, *, row: int, fp8_format: str, quads: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    check(x, fp8_format, None)
    check_rows(x, amax, counts, scale, row)
    if quads:
        check_quads(x)
    y, peak, seen = quantized(x, scale[row], fp8_format=fp8_format)
    # maximum keeps NaN, as the order of bits does
    amax.data[row] = torch.maximum(amax[row], peak[0])
    counts.data[row] += seen[0]
    y = y.contiguous(memory_format=torch.channels_last if y.dim() == 4 else torch.contiguous_format)
    return y, to_quads(y, beside=_beside(fp8_format)) if quads else y.new_empty(0)


def _beside(fp8_format: str) -> bool:
    """Taps of a filter shift the activation, which is e4m3, and not the gradient, which is e5m2."""
    return fp8_format == "e4m3"


def _fake(x: Tensor, *_args: Any, fp8_format: str, quads: bool = False, **_kwargs: Any) -> tuple[Tensor, Tensor]:
    y = empty_y(x, fp8_format)
    return y, y.new_empty(quads_shape(*x.shape, beside=_beside(fp8_format)) if quads else 0)


SAMPLES = (
    sample("odd map", (2, 16, 5, 3)),
    sample("three channels, gradients", (1, 3, 4, 4), fp8_format="e5m2"),
    sample("a matrix", (37, 80)),
    sample("quads of two maps", (2, 48, 8, 16), quads=True),
    *(
        sample(f"UNet {side}x{side} {c}, batch 128", (128, c, side, side), quads=True, real_size=True)
        for c, side in UNET_MAPS
    ),
    sample("UNet 32x32 128, no quads", (128, 128, 32, 32), real_size=True),
)

OP = Op(
    name="quantize_fp8",
    call=register(quantize_fp8, fake=_fake, on_cpu=on_cpu, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)
