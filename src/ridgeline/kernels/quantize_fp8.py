"""y = x in FP8, in both orders, and what the next scale must follow, from one read of x.

    y = round(clamp(x · scale, -largest, largest))          largest: e4m3 448, e5m2 57344; ties to even; NaN stays NaN

x           [N, C, H, W] channels_last or a channel slice of it, or [M, C] with adjacent channels; fp32, fp16, bf16
scale       [1] fp32 on the device of x
fp8_format  "e4m3" (activations, weights) or "e5m2" (gradients)

returns y        as x in FP8, dense: channels_last, or [M, C]
        columns  [C, pitch] FP8, the transposed copy that weight gradients need, pixels counted through the batch;
                 pitch is their number rounded up to 16, as tensor maps want it, and the rest is zero; empty without
                 `columns`
        amax     [1] fp32, the largest magnitude of x; infinite or NaN where x is
        counts   [1, 3] int64: elements that saturated (|x · scale| more than half a step beyond the largest, so that
                 the one which decides the scale does not count), that vanished (not zero, but rounded to it), and all

Products are rounded to fp32, then to FP8. Equal calls give equal bits. Raises ValueError or TypeError for anything
else, and for GPUs before sm_89, which have no such conversion.

`quantize_fp8_into` is the same for one of many tensors: it takes its row of a scale [tensors], raises that of `amax`
[tensors] and adds to that of `counts` [tensors, 3], in place. Those of `ridgeline.fp8_scaling`: no launch clears them,
and a graph sees three buffers, whatever it quantises. A producer of ours needs no pass of its own: it calls the device
functions in `_quantize_fp8.py` on what it is about to store.

`quantize_fp8_recorded` is the same for graphs that have gradients: it too raises `amax` and adds to `counts` in place,
but is registered as an operator that changes nothing and counts no version up. Nothing in a graph may read the two,
since a compiler does not know when they change; `DelayedScaling.update_` does, outside, once a step. Its transposed
copy, with `quads`, is that of `_quads.py`, which conv2d_wgrad_fp8 reads.

At 128 channels, 32², batch 128, bf16, 33.6 MB are read, 16.8 written, and 16.8 more with columns: on an H200 12 to
16 µs at the rate of a copy, where 16 instructions an element could be issued in 9.

Not in `kernels.ALL`, whose ops return one tensor; `tuning.tune` takes it nevertheless, and times all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost, register_cost
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_call import UNET_MAPS
from ridgeline.kernels._nhwc import cdiv
from ridgeline.kernels._op import (
    INTERPRETED,
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
    empty_words,
    empty_y,
    nothing_seen,
    pitch,
    refuse,
    sample,
    size,
    x_pitch,
)

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]

_FLOPS = 4  # of an element: the product, the maximum and two comparisons; it is the bytes that take the time


def quantized(x: Tensor, scale: Tensor, *, fp8_format: str, columns: bool = False) -> Quantized:
    """All four in plain PyTorch; of float64 y is what FP8 rounds, for judging what rounding does."""
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
    pixels, c = size(x)
    transposed = y.new_zeros((c, pitch(pixels)) if columns else 0)
    if columns:
        transposed[:, :pixels] = (y.permute(1, 0, 2, 3) if y.dim() == 4 else y.t()).reshape(c, pixels)
    return y, transposed, amax.reshape(1), counts


def reference(x: Tensor, scale: Tensor, *, fp8_format: str, columns: bool = False) -> Tensor:
    """y alone."""
    return quantized(x, scale, fp8_format=fp8_format, columns=columns)[0]


def cost(x: Tensor, scale: Tensor, *, fp8_format: str, columns: bool = False) -> Cost:  # noqa: ARG001
    pixels, c = size(x)
    copies = c * (pixels + columns * pitch(pixels))
    return Cost(_FLOPS * x.numel(), x.nbytes + scale.nbytes, copies + 4 + 3 * 8)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """Those that leave few channels of a tile empty."""
    x = arguments["x"]
    fitting = [config for config in CONFIGS if config.channels < 2 * x.shape[1]]
    return nearest_first(default_config(x, target or target_of(x)), fitting)


def plan(
    *,
    x: Tensor,
    scale: Tensor,
    fp8_format: str,
    columns: bool = False,
    seen: tuple[Tensor, Tensor] | None = None,
    tensor: int = 0,
    config: Config | None = None,
    target: Target | None = None,
) -> Launch:
    """The launch, whose arguments are all that it writes; without `seen` (amax, counts) fresh ones. Runs nothing."""
    amax, counts = seen or nothing_seen(x)
    target = target or target_of(x)
    check(x, fp8_format, target)
    check_rows(x, amax, counts, scale, tensor)
    if config is None:
        # tuned for a scale alone, whose row it is does not matter
        arguments = {"x": x, "scale": scale[:1], "fp8_format": fp8_format, "columns": columns}
        config = tuned_config(OP, Config, lambda c: c.is_valid, **arguments) or default_config(x, target)
    if not config.is_valid:
        refuse(f"{config} must have powers of two, 16 or more pixels and channels, and 32 or 64 elements a thread")
    pixels, c = size(x)
    y = empty_y(x, fp8_format)
    return Launch(
        quantize_fp8_kernel,
        grid=(config.programs(x),),
        arguments={
            "x_ptr": x,
            "scale_ptr": scale,
            "y_ptr": y,
            "words_ptr": empty_words(x) if columns else None,
            "amax_ptr": amax.view(torch.int32),
            "counts_ptr": counts,
            "tensor": tensor,
            "pixels": pixels,
            "x_pitch": x_pitch(x),
            "word_pitch": pitch(pixels) // 4,
        },
        constants={"C": c, "FORMAT": fp8_format, "BLOCK_P": config.pixels, "BLOCK_C": config.width(x)},
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
    )


def amax_launch(x: Tensor, amax: Tensor, *, config: Config = CONFIGS[0]) -> Launch:
    """Raises `amax` to the largest magnitude of x, one read and nothing written: for scales that x itself decides."""
    check(x, "e4m3", None)
    pixels, c = size(x)
    return Launch(
        amax_fp8_kernel,
        grid=(config.programs(x),),
        arguments={"x_ptr": x, "amax_ptr": amax.view(torch.int32), "pixels": pixels, "x_pitch": x_pitch(x)},
        constants={"C": c, "BLOCK_P": config.pixels, "BLOCK_C": config.width(x)},
        num_warps=config.num_warps,
        num_stages=1,
        output=amax,
    )


def quantize_fp8(x: Tensor, scale: Tensor, *, fp8_format: str, columns: bool = False) -> Quantized:
    seen = nothing_seen(x)
    return *_run(plan(x=x, scale=scale, fp8_format=fp8_format, columns=columns, seen=seen)), *seen


def quantize_fp8_into(
    amax: Tensor,
    counts: Tensor,
    x: Tensor,
    scale: Tensor,
    *,
    tensor: int,
    fp8_format: str,
    columns: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y, columns) of x, by row `tensor` of scale; raises that of `amax` and adds to that of `counts`, in place."""
    if x.is_cuda or INTERPRETED:
        seen = (amax, counts)
        return _run(plan(x=x, scale=scale, fp8_format=fp8_format, columns=columns, seen=seen, tensor=tensor))
    check(x, fp8_format, None)
    check_rows(x, amax, counts, scale, tensor)
    y, transposed, *found = quantized(x, scale[tensor], fp8_format=fp8_format, columns=columns)
    # maximum keeps NaN, as the order of bits does
    amax[tensor] = torch.maximum(amax[tensor], found[0][0])
    counts[tensor] += found[1][0]
    return _dense(y), transposed


def quads_plan(
    *,
    x: Tensor,
    scale: Tensor,
    fp8_format: str,
    seen: tuple[Tensor, Tensor],
    tensor: int = 0,
    config: Config | None = None,
    target: Target | None = None,
) -> Launch:
    """The launch that makes y and, as its argument `words_ptr`, the words of its quads. Runs nothing."""
    target = target or target_of(x)
    check(x, fp8_format, target)
    check_rows(x, *seen, scale, tensor)
    check_quads(x)
    n, c, h, w = x.shape
    amax, counts = seen
    config = config or default_config(x, target)
    y, width = empty_y(x, fp8_format), config.width(x)
    return Launch(
        quantize_quads_kernel,
        grid=(n * cdiv(h * w // 4, config.pixels // 4) * cdiv(c, width),),
        arguments={
            "x_ptr": x,
            "scale_ptr": scale,
            "y_ptr": y,
            "words_ptr": x.new_empty(quads_shape(n, c, h, w)[:4], dtype=torch.int32),
            "amax_ptr": amax.view(torch.int32),
            "counts_ptr": counts,
            "tensor": tensor,
            "images": n,
            "x_pitch": x_pitch(x),
        },
        constants={
            "C": c,
            "QUARTER": h * w // 4,
            "W": w,
            "FORMAT": fp8_format,
            "BLOCK_P": config.pixels,
            "BLOCK_C": width,
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
    )


def quantize_fp8_recorded(
    x: Tensor, scale: Tensor, amax: Tensor, counts: Tensor, *, row: int, fp8_format: str, quads: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, its quads or empty) of x, by one row of scale; records in that of `amax` and `counts`, unseen by autograd."""
    # `data` has a version of its own
    amax, counts = amax.data, counts.data
    if quads and (x.is_cuda or INTERPRETED):
        y, words = _run(quads_plan(x=x, scale=scale, fp8_format=fp8_format, seen=(amax, counts), tensor=row))
        return y, words.view(*words.shape[:3], x.shape[3], 4)
    y, nothing = quantize_fp8_into(amax, counts, x, scale, tensor=row, fp8_format=fp8_format)
    if not quads:
        return y, nothing
    check_quads(x)
    return y, to_quads(y)


def _run(launch: Launch) -> tuple[Tensor, Tensor]:
    y = launch.output
    if y.numel():
        check_launchable("quantize_fp8", launch.kernel, y)
        launch.run()
    words = launch.arguments["words_ptr"]
    return y, words.view(y.dtype) if isinstance(words, Tensor) else y.new_empty(0)


def _dense(y: Tensor) -> Tensor:
    return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y.contiguous()


def _fake(x: Tensor, scale: Tensor, *, fp8_format: str, columns: bool = False) -> Quantized:
    seen = nothing_seen(x)
    return *_fake_into(*seen, x, scale, tensor=0, fp8_format=fp8_format, columns=columns), *seen


def _fake_into(
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    x: Tensor,
    scale: Tensor,  # noqa: ARG001
    *,
    tensor: int,  # noqa: ARG001
    fp8_format: str,
    columns: bool = False,
) -> tuple[Tensor, Tensor]:
    y = empty_y(x, fp8_format)
    return y, empty_words(x).view(y.dtype) if columns else y.new_empty(0)


def _on_cpu(*args: Any, **kwargs: Any) -> Quantized:
    y, *others = quantized(*args, **kwargs)
    return (_dense(y), *others)  # pyright: ignore[reportReturnType]


def _cost_into(
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    x: Tensor,
    scale: Tensor,
    *,
    tensor: int,  # noqa: ARG001
    fp8_format: str,
    columns: bool = False,
) -> Cost:
    return cost(x, scale[:1], fp8_format=fp8_format, columns=columns)


def _fake_recorded(
    x: Tensor,
    scale: Tensor,  # noqa: ARG001
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    *,
    row: int,  # noqa: ARG001
    fp8_format: str,
    quads: bool = False,
) -> tuple[Tensor, Tensor]:
    y = empty_y(x, fp8_format)
    return y, y.new_empty(quads_shape(*x.shape) if quads else 0)


def _cost_recorded(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    *,
    row: int,  # noqa: ARG001
    fp8_format: str,
    quads: bool = False,
) -> Cost:
    one = cost(x, scale[:1], fp8_format=fp8_format)
    return replace(one, write_bytes=one.write_bytes + prod(quads_shape(*x.shape))) if quads else one


def _define(
    call: Callable[..., tuple[Tensor, Tensor]],
    *,
    mutates: tuple[str, ...],
    fake: Callable[..., tuple[Tensor, Tensor]],
    cost: Callable[..., Cost],
) -> torch._ops.OpOverload:
    """Register one of the forms for a row of many; the kernels of all devices are in `call`."""
    name = call.__name__
    tags = (torch.Tag.needs_exact_strides,)
    torch.library.custom_op(f"ridgeline::{name}", call, mutates_args=mutates, tags=tags).register_fake(fake)
    packet = getattr(torch.ops.ridgeline, name)
    register_cost(packet, cost, kind="quantize_fp8")
    return packet.default


SAMPLES = (
    sample("odd pixels, both orders", (2, 16, 5, 3), columns=True),
    sample("three channels, gradients", (1, 3, 4, 4), fp8_format="e5m2"),
    sample("a matrix", (37, 80), columns=True),
    *(
        sample(f"UNet {side}x{side} {c}, batch 128", (128, c, side, side), columns=True, real_size=True)
        for c, side in UNET_MAPS
    ),
    sample("UNet 32x32 128, one order", (128, 128, 32, 32), real_size=True),
)

OP = Op(
    name="quantize_fp8",
    call=register(quantize_fp8, fake=_fake, on_cpu=_on_cpu, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)
INTO = _define(quantize_fp8_into, mutates=("amax", "counts"), fake=_fake_into, cost=_cost_into)
RECORDED = _define(quantize_fp8_recorded, mutates=(), fake=_fake_recorded, cost=_cost_recorded)
