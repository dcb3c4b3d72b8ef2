"""y = conv2d(x upsampled to twice its rows and columns, weight) + bias, 3 x 3, padding 1, NHWC, for training. sm_90.

x       [N, C, H, W]      channels_last, or a channel slice of it; fp16, bf16
weight  [K, C, 3, 3]      channels_last; dtype of x
bias    [K]               fp32 or the dtype of x; None: none
y       [N, K, 2 H, 2 W]  channels_last, dtype of x

Upsampling is to the nearest pixel. C is a multiple of 8, K of 16. Raises ValueError or TypeError for anything else.

The upsampled map is never made. Of the nine taps of a pixel of y some read the same pixel of x, and which do depends on
the phase (a, b) of the pixel alone, whether its row and column are even or odd:

    y[2h + a, 2w + b] = the sum of V[a, b, dr, ds] x[h + a - 1 + dr, w + b - 1 + ds] over dr and ds of 0 and 1

Rows of V are sums of rows of the weight, (W0, W1 + W2) where a = 0 and (W0 + W1, W2) where a = 1, and columns alike: 16
products for 36. V is summed in fp32 and rounded once to the dtype of x; products are summed in fp32 and rounded once.

Gradients come from upsample_conv2d_dgrad and upsample_conv2d_wgrad where `tune` found them no slower than PyTorch's
kernels on the upsampled map, else from those: see `choice`. The GEMM of a phase is [N H W, 4 C] x [4 C, K].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import tuned
from ridgeline.cost import Cost
from ridgeline.cost.conv import conv_forward
from ridgeline.kernels import upsample_conv2d_dgrad, upsample_conv2d_wgrad
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product
from ridgeline.kernels._conv2d_pass import DTYPES, Config, Pass
from ridgeline.kernels._nhwc import empty_nhwc, random_nhwc
from ridgeline.kernels._op import (
    Autograd,
    LastLaunch,
    Launch,
    Launcher,
    Op,
    Sample,
    Target,
    define,
    execute,
    target_of,
    tuned_config,
    tuned_row,
)
from ridgeline.kernels._upsample_conv2d import phase_weights_kernel
from ridgeline.kernels._upsample_conv2d_call import (
    PADDING,
    check,
    cost_of,
    phase_configs,
    phase_weights,
    upsample_pass,
    upsampled,
)
from ridgeline.kernels.conv2d_fprop import rival_seconds


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(upsampled(x), weight, None if bias is None else bias.to(x.dtype), padding=PADDING)


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:  # noqa: ARG001
    one = _pass(x, weight)
    full = conv_forward(one.conv, x.dtype)
    return cost_of(one, full, read=x.numel() + weight.numel(), written=one.conv.y_numel)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    x = arguments["x"]
    return phase_configs(_pass(x, arguments["weight"]), target or target_of(x), dgrad=False)


def plan(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    config: Config | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The two launches for one call. Runs nothing."""
    one = _pass(x, weight)
    check(one, weight=weight, x=x)
    one.check_bias(bias, x.dtype)
    target = target or target_of(x)
    phases = phase_weights(phase_weights_kernel, weight, target)
    product = Product(one, x, phases.output, empty_nhwc(one.y_shape, x), bias=bias, phases=True)
    if config is None:
        arguments = {"x": x, "weight": weight, "bias": bias}
        config = tuned_config(OP, Config, lambda c: product.is_valid(c, target), **arguments)
    return LastLaunch(**vars(product.launch(conv2d_gluon_kernel, config, target)), before=(phases,))


def rival(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Callable[[], Tensor]:
    return lambda: reference(x, weight, bias)


def choice(x: Tensor, weight: Tensor) -> dict[str, tuple[tuned.Row, bool]]:
    """The tables' row of each pass, and whether the kernel here is no slower than PyTorch's on the upsampled map.

    By "fprop", "dgrad", "wgrad"; a pass that was not tuned on the GPU of x is missing. Tensors may be fake.
    """
    dy = x.new_empty(_pass(x, weight).y_shape)
    calls: dict[str, tuple[Op, dict[str, Any]]] = {
        "fprop": (OP, {"x": x, "weight": weight}),
        "dgrad": (upsample_conv2d_dgrad.OP, {"dy": dy, "weight": weight}),
        "wgrad": (upsample_conv2d_wgrad.OP, {"dy": dy, "x": x}),
    }
    rows = {name: tuned_row(op, **arguments) for name, (op, arguments) in calls.items()}
    return {name: (row, row.seconds <= rival_seconds(row)) for name, row in rows.items() if row is not None}


def upsample_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return execute("upsample_conv2d", plan(x, weight, bias), x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    # a gradient may come in any layout: that of a sum is one number expanded
    dy = dy.contiguous(memory_format=torch.channels_last)
    wins = {name for name, (_, ours) in choice(x, weight).items() if ours}
    dx = dw = None
    if needs_x:
        dx = (upsample_conv2d_dgrad.OP if "dgrad" in wins else upsample_conv2d_dgrad.reference)(dy, weight)
    if needs_weight:
        dw = (upsample_conv2d_wgrad.OP if "wgrad" in wins else upsample_conv2d_wgrad.reference)(dy, x)
    at_least_fp32 = torch.promote_types(dy.dtype, torch.float32)
    db = dy.sum((0, 2, 3), dtype=at_least_fp32).to(ctx.bias_dtype) if needs_bias else None
    return dx, dw, db


def _pass(x: Tensor, weight: Tensor) -> Pass:
    one = upsample_pass("upsample_conv2d", x.shape, weight.shape[0], x.dtype)
    if x.shape[1] != weight.shape[1]:
        one.refuse(f"weight {tuple(weight.shape)} must have the {x.shape[1]} channels of x: groups must be 1")
    return one


def upsample_sample(
    why: str, x: tuple[int, int, int, int], k: int, *, bias: bool = True, real_size: bool = False
) -> Sample:
    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        return {
            "x": random_nhwc(x, dtype, device, seed=0),
            "weight": random_nhwc((k, x[1], 3, 3), dtype, device, seed=1) * (x[1] * 9) ** -0.5,
            "bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=2).flatten() if bias else None,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    upsample_sample("UNet 16x16 256->256, batch 128", (128, 256, 16, 16), 256, real_size=True),
    upsample_sample("UNet 8x8 256->256, batch 128", (128, 256, 8, 8), 256, real_size=True),
    upsample_sample("UNet 4x4 256->256, batch 128", (128, 256, 4, 4), 256, real_size=True),
    upsample_sample("odd map, channels beside the tiles", (3, 40, 7, 5), 80),
    upsample_sample("a map smaller than a box, no bias", (2, 8, 3, 2), 16, bias=False),
    upsample_sample("one pixel", (1, 72, 1, 1), 48),
)

OP = define(
    upsample_conv2d,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival),
    samples=SAMPLES,
    dtypes=DTYPES,
    autograd=Autograd(setup=_setup, backward=_backward),
    interpretable=False,
)
