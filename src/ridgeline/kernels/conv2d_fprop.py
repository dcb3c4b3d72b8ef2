"""y = conv2d(x, weight) + bias + residual, NHWC, for training. sm_90; few channels or filters on others too.

x       [N, C, H, W]    channels_last, or a channel slice of it; fp16, bf16
weight  [K, C, R, S]    channels_last; dtype of x
bias    [K]             fp32 or the dtype of x; None: none
residual                [N, K, HO, WO], as x; with stride 1 alone; None: none
y       [N, K, HO, WO]  channels_last, dtype of x
padding                 (rows, columns) of zeros on each side of x, less than R and S
stride                  1 or 2, of rows and columns

C and K are multiples of 8. With stride 1 and a filter of 7 x 7 or less one of them may be any number up to 8, as in the
first and the last layer of a network: see _conv2d_narrow. With stride 2 x is read as four maps, see _conv2d_gluon: it
has twice the rows and columns of y then, is dense, and C is a multiple of 16. Accumulates in fp32 and rounds once.
Raises ValueError or TypeError for anything else.

Gradients come from conv2d_dgrad and conv2d_wgrad where `tune` found them no slower than PyTorch's kernels, else from
those: see `choice`. For 1x1 filters PyTorch has two, cuDNN's convolution and cuBLAS's product of matrices, of which the
faster one counts: `rival_seconds`. The GEMM is [N HO WO, R S C] x [R S C, K]; _conv2d_gluon says how it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import tuned
from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_forward
from ridgeline.kernels import _conv2d_matmul, conv2d_dgrad, conv2d_wgrad
from ridgeline.kernels._conv2d_gluon import conv2d_gluon_kernel
from ridgeline.kernels._conv2d_launch import Product, check_residual, residual_cost
from ridgeline.kernels._conv2d_narrow import narrow_contract_kernel, narrow_expand_kernel
from ridgeline.kernels._conv2d_narrow_call import NarrowConfig, narrow_pass, takes_narrow, with_narrow_configs
from ridgeline.kernels._conv2d_pass import (
    DTYPES,
    GRANULE,
    Config,
    Pass,
    forward_pass,
    takes_stride_2,
    tile_configs,
    torch_gradients,
)
from ridgeline.kernels._nhwc import empty_nhwc, random_nhwc
from ridgeline.kernels._op import (
    MATMUL,
    RIVAL,
    Autograd,
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

_OURS = "ridgeline"


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    padding: Sequence[int],
    stride: int = 1,
) -> Tensor:
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), stride, tuple(padding))
    return y if residual is None else y + residual


def cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,  # noqa: ARG001
    residual: Tensor | None = None,
    *,
    padding: Sequence[int],
    stride: int = 1,
) -> Cost:
    return conv_forward(_pass(x, weight, padding, stride).conv, x.dtype) + residual_cost(residual)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config | NarrowConfig, ...]:
    x, weight, target = arguments["x"], arguments["weight"], target or target_of(arguments["x"])
    others = tile_configs(weight.shape[1], weight.shape[0], x.element_size(), target)
    return with_narrow_configs(others, _pass(x, weight, arguments["padding"], arguments.get("stride", 1)), target)


def plan(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    padding: Sequence[int], stride: int = 1, config: Config | NarrowConfig | None = None, target: Target | None = None,
) -> Launch:  # fmt: skip
    """The launch for one call. Runs nothing."""
    one, target = _pass(x, weight, padding, stride), target or target_of(x)
    # filed without the residual: one config serves calls with and without
    arguments = {"x": x, "weight": weight, "bias": bias, "padding": padding, "stride": stride}
    narrow = narrow_pass(one, OP, config, target, arguments)
    if narrow is not None:
        return narrow.product((narrow_expand_kernel, narrow_contract_kernel), x, weight, bias, residual)
    assert not isinstance(config, NarrowConfig)
    one.check_maps(DTYPES, x=x)
    one.check_weight(weight, x.dtype)
    one.check_bias(bias, x.dtype)
    y = empty_nhwc(one.y_shape, x)
    check_residual(one, residual, y)
    product = Product(one, x, weight, y, bias=bias, residual=residual)
    if config is None:
        config = tuned_config(OP, Config, lambda c: product.is_valid(c, target), **arguments)
    return product.launch(conv2d_gluon_kernel, config, target)


def rival(x: Tensor, weight: Tensor, *others: Tensor | None, **choices: Any) -> Callable[[], Tensor]:
    return lambda: reference(x, weight, *others, **choices)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    padding: Sequence[int],
    stride: int = 1,
) -> Callable[[], Tensor] | None:
    conv = _pass(x, weight, padding, stride).conv
    return _conv2d_matmul.called_if(conv, lambda: _conv2d_matmul.forward(x, weight, bias, residual))


def choice(x: Tensor, weight: Tensor, padding: Sequence[int], stride: int = 1) -> dict[str, tuple[tuned.Row, bool]]:
    """The tables' row of each pass of a convolution, and whether the kernel here is no slower than PyTorch's.

    By "fprop", "dgrad", "wgrad"; a pass that was not tuned on the GPU of x is missing. Tensors may be fake.
    """
    one = _pass(x, weight, padding, stride)
    if stride != 1 and not takes_stride_2(one.conv):
        # a gradient's row may be of another x, of which y is half
        return {}
    found = {}
    for name, (op, arguments) in passes_of(x, weight, x.new_empty(one.y_shape), padding, stride).items():
        row = tuned_row(op, **arguments)
        if row is not None:
            found[name] = row, row.seconds <= rival_seconds(row)
    return found


def takes(conv: ConvProblem) -> bool:
    """Whether a convolution of one group, not dilated, has kernels for all its passes."""
    whole = not (conv.c % GRANULE or conv.k % GRANULE)
    return takes_narrow(conv) or (whole and (conv.stride == (1, 1) or (conv.stride == (2, 2) and takes_stride_2(conv))))


def passes_of(
    x: Tensor, weight: Tensor, dy: Tensor, padding: Sequence[int], stride: int = 1
) -> dict[str, tuple[Op, dict[str, Any]]]:
    """The op and arguments of each pass of a convolution, by "fprop", "dgrad", "wgrad"."""
    choices = {"padding": tuple(padding), "stride": stride}
    return {
        "fprop": (OP, {"x": x, "weight": weight, **choices}),
        "dgrad": (conv2d_dgrad.OP, {"dy": dy, "weight": weight, **choices}),
        "wgrad": (conv2d_wgrad.OP, {"dy": dy, "x": x, "kernel_size": tuple(weight.shape[2:]), **choices}),
    }


def rival_seconds(row: tuned.Row) -> float:
    """What PyTorch's faster kernel took beside a tuned row, as `tune` timed it; the row's time if nothing was timed."""
    theirs = [seconds for tag in (RIVAL, MATMUL) if (seconds := _timed(row, tag)) is not None]
    return min(theirs, default=row.seconds)


def matmul_seconds(row: tuned.Row) -> float | None:
    """What PyTorch's product of matrices took, which is its linear layer; None where that was not timed."""
    return _timed(row, MATMUL)


def by_matmul(row: tuned.Row) -> bool:
    """Whether that is PyTorch's faster kernel."""
    return matmul_seconds(row) == rival_seconds(row)


def _timed(row: tuned.Row, tag: str) -> float | None:
    seconds = row.tried.get(tag)
    return seconds if isinstance(seconds, float) else None


def _faster(found: tuple[tuned.Row, bool] | None) -> str:
    """Which kernel computes a pass: _OURS, RIVAL or MATMUL; PyTorch's convolution where it was not tuned."""
    if found is None:
        return RIVAL
    row, ours = found
    theirs = MATMUL if by_matmul(row) else RIVAL
    return _OURS if ours else theirs


def conv2d_fprop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    padding: Sequence[int],
    stride: int = 1,
) -> Tensor:
    return execute("conv2d_fprop", plan(x, weight, bias, residual, padding=padding, stride=stride), x)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.padding, ctx.stride = list(keyword_only_inputs["padding"]), keyword_only_inputs["stride"]
    ctx.bias_dtype = None if bias is None else bias.dtype


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """y by the faster kernel, without gradients: for whoever computes them otherwise."""
    kernel = _faster(choice(x, weight, padding).get("fprop"))
    if kernel == MATMUL:
        return _conv2d_matmul.forward(x, weight, bias)
    return (reference if kernel == RIVAL else OP)(x, weight, bias, padding=list(padding))


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], *, of_x: bool, of_weight: bool, stride: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dw), None where not asked for, each by the faster kernel. `dy` is channels_last."""
    rows = choice(x, weight, padding, stride)
    for_x, for_weight = (_faster(rows.get(name)) for name in ("dgrad", "wgrad"))
    dx = dw = None
    # one call where both come from it
    theirs = {"of_x": of_x and for_x == RIVAL, "of_weight": of_weight and for_weight == RIVAL}
    if any(theirs.values()):
        dx, dw = torch_gradients(dy, x, weight, padding, stride=stride, **theirs)
    if of_x and for_x == MATMUL:
        dx = _conv2d_matmul.input_gradient(dy, weight)
    elif of_x and for_x == _OURS:
        dx = conv2d_dgrad.OP(dy, weight, padding=list(padding), stride=stride)
    if of_weight and for_weight == MATMUL:
        dw = _conv2d_matmul.weight_gradient(dy, x)
    elif of_weight and for_weight == _OURS:
        dw = conv2d_wgrad.OP(dy, x, kernel_size=list(weight.shape[2:]), padding=list(padding), stride=stride)
    return dx, dw


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """db [K], summed in fp32 at least and rounded once."""
    axes, wide = (0, 2, 3), torch.promote_types(dy.dtype, torch.float32)
    # a sum of 16 bits is accumulated in 32 too
    return dy.sum(axes) if dtype == dy.dtype else dy.sum(axes, dtype=wide).to(dtype)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    # the dispatcher leaves out what was left at its default behind the last that was not
    needs_x, needs_weight, needs_bias, needs_residual = (*ctx.needs_input_grad, False, False)[:4]
    bias_dtype = ctx.bias_dtype if needs_bias else None
    # a gradient may come in any layout: that of a sum is one number expanded
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx, dw = gradients(dy, x, weight, ctx.padding, of_x=needs_x, of_weight=needs_weight, stride=ctx.stride)
    db = None if bias_dtype is None else bias_gradient(dy, bias_dtype)
    return dx, dw, db, dy if needs_residual else None


def _pass(x: Tensor, weight: Tensor, padding: Sequence[int], stride: int = 1) -> Pass:
    return forward_pass("conv2d_fprop", x, weight, padding, stride)


def fprop_sample(
    why: str,
    x: tuple[int, int, int, int],
    weight: tuple[int, int, int],
    *,
    stride: int = 1,
    bias: bool = True,
    residual: bool = False,
    real_size: bool = False,
) -> Sample:
    """`weight` is (K, R, S); padded to keep the size, or with stride 2 to halve it."""
    k, r, s = weight

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        scale = (x[1] * r * s) ** -0.5
        return {
            "x": random_nhwc(x, dtype, device, seed=0),
            "weight": random_nhwc((k, x[1], r, s), dtype, device, seed=1) * scale,
            "bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=2).flatten() if bias else None,
            "residual": random_nhwc((x[0], k, *x[2:]), dtype, device, seed=3) if residual else None,
            "padding": (r // 2, s // 2),
            "stride": stride,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    fprop_sample("UNet 32x32 128->128, batch 128", (128, 128, 32, 32), (128, 3, 3), real_size=True),
    fprop_sample("UNet 16x16 512->256, batch 128", (128, 512, 16, 16), (256, 3, 3), real_size=True),
    fprop_sample("UNet 8x8 512->256, batch 128", (128, 512, 8, 8), (256, 3, 3), real_size=True),
    fprop_sample("UNet 32x32 384->128 1x1, batch 128", (128, 384, 32, 32), (128, 1, 1), real_size=True),
    fprop_sample(
        "ResNet-50 56x56 256->512 1x1 by 2, batch 128", (128, 256, 56, 56), (512, 1, 1), stride=2, real_size=True
    ),
    fprop_sample("ResNet-50 56x56 128->128 by 2, batch 128", (128, 128, 56, 56), (128, 3, 3), stride=2, real_size=True),
    fprop_sample("UNet 32x32 128->128 by 2, batch 128", (128, 128, 32, 32), (128, 3, 3), stride=2, real_size=True),
    fprop_sample("UNet 32x32 3->128, batch 128", (128, 3, 32, 32), (128, 3, 3), real_size=True),
    fprop_sample("UNet 32x32 128->3, batch 128", (128, 128, 32, 32), (3, 3, 3), real_size=True),
    fprop_sample("stride 2, channels beside the tiles", (3, 80, 14, 10), (40, 3, 3), stride=2),
    fprop_sample("stride 2, one phase of four is read", (2, 48, 6, 18), (24, 1, 1), stride=2, bias=False),
    fprop_sample("a residual, odd map, channels beside the tiles", (3, 40, 7, 13), (72, 3, 3), residual=True),
    fprop_sample("three channels, odd map, filters beside the tiles", (3, 3, 7, 13), (72, 3, 3)),
    fprop_sample("three filters and a residual, a wide map", (1, 40, 9, 70), (3, 5, 3), residual=True),
    fprop_sample("odd map, channels beside the tiles", (3, 40, 7, 13), (72, 3, 3)),
    fprop_sample("filters that are not square, one image, no bias", (1, 64, 9, 5), (96, 1, 5), bias=False),
    fprop_sample("a map smaller than a box", (2, 8, 3, 2), (16, 3, 3)),
)

OP = define(
    conv2d_fprop,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, rival=rival, matmul=matmul),
    samples=SAMPLES,
    dtypes=DTYPES,
    autograd=Autograd(setup=_setup, backward=_backward),
    interpretable=False,
)
