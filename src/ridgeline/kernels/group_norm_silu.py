"""y = dropout(act(group_norm(x)·(1 + scale) + shift)), NHWC, one read and one write of x, and its gradients.

x      [N, C, H, W]   channels_last; fp32, fp16, bf16
gamma  [C], beta [C]  fp32 or the dtype of x
scale  [N, C]         fp32 or the dtype of x, rows of any pitch (half of a [N, 2C] will do); None: 0
shift  [N, C]         likewise
seed   one int64      on the device, read by the kernel, so that a captured graph draws anew; needed where p > 0
offset one int64      likewise; calls with different (seed, offset) drop different elements
groups any divisor of C
act    "silu" or "none"
p      share of elements dropped, to the nearest 1/65536; the rest is divided by the share kept
x2     [N, C2, H, W]  as x; not None: C counts its channels too, which follow those of x as in cat((x, x2), 1)
y      [N, C, H, W]   channels_last, dtype of x

Accumulates in fp32 and rounds once. An empty batch gives an empty y. Raises ValueError or TypeError for any other
layout, dtype or choice.

One program holds whole groups of one sample in registers, takes the mean, then the variance of what is centred, and
writes: each element is read once and written once. Where a sample's share does not fit, a first kernel takes mean and
squares of parts, and a second combines them and reads x again, or one kernel does both, slab by slab. Dropout's mask is
stored nowhere: it is a function of (seed, offset, position), see `drop`. For the backward pass x alone is kept: see
group_norm_silu_backward.py.

Groups of 4 channels are 8 bytes of a pixel in bf16, but memory moves 32 at a time: a slab has several groups. Predicted
for 128 channels at 32², batch 128, bf16, on an H200: 67 MB, 15.7 µs at the rate of a copy, 85 % of it reached.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.norm import TRAIN_FLOPS
from ridgeline.kernels import group_norm_silu_backward, group_norm_silu_backward_concat
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu import apply_kernel, forward_again_kernel, forward_kernel
from ridgeline.kernels._group_norm_silu_call import (
    BoundedLaunch,
    Call,
    Config,
    default_config,
    proposals,
    statistics_launch,
)
from ridgeline.kernels._group_norm_silu_dropout import scaled_mask
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS, norm_sample
from ridgeline.kernels._op import (
    Autograd,
    LastLaunch,
    Launch,
    Launcher,
    Target,
    define,
    execute,
    target_of,
    tuned_config,
)

_ACTIVATION_FLOPS = {"none": 0, "silu": 4}
_DROPOUT_FLOPS = 2


def reference(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    x2: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Tensor:
    x = x if x2 is None else torch.cat((x, x2), 1)
    y = torch.group_norm(x, groups, gamma.to(x.dtype), beta.to(x.dtype), eps)
    if scale is not None:
        y = y * (1 + scale.to(x.dtype)[:, :, None, None])
    if shift is not None:
        y = y + shift.to(x.dtype)[:, :, None, None]
    if act == "silu":
        y = F.silu(y)
    return y * scaled_mask(x, seed, offset, p) if p else y


def cost(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    x2: Tensor | None = None,
    *,
    groups: int,  # noqa: ARG001
    eps: float = 1e-5,  # noqa: ARG001
    act: str = "silu",
    p: float = 0.0,
) -> Cost:
    """scale and shift cost nothing an element: they are folded into gamma and beta."""
    flops = TRAIN_FLOPS + _ACTIVATION_FLOPS[act] + (_DROPOUT_FLOPS if p else 0)
    maps = tuple(t for t in (x, x2) if t is not None)
    given = (*maps, gamma, beta, scale, shift, seed, offset)
    read_bytes = sum(t.nbytes for t in given if t is not None)
    return Cost(flops * sum(t.numel() for t in maps), read_bytes, sum(t.nbytes for t in maps))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    call = Call(**arguments)
    return proposals(call, target or target_of(call.x))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch or launches for one call; `arguments` are Call's. Runs nothing."""
    call = Call(**arguments)
    target = target or target_of(call.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(call, target), **arguments)
        config = tuned or default_config(call, target)
    if not config.is_valid(call, target):
        call.refuse(f"{config} is not valid for {call.groups} groups of {call.shape} on {target.arch}")
    y = call.empty_map()
    maps: dict[str, Tensor | None] = {**call.maps(), **call.parameters(), "y_ptr": y}
    constants = {"C1": call.x.shape[1], **config.constants(call), **call.constants()}
    options: dict[str, Any] = {"grid": (config.programs(call),), "num_warps": config.num_warps, "num_stages": 1}
    if config.again:
        return Launch(forward_again_kernel, arguments=maps, constants=constants, output=y, **options)
    if config.whole(call):
        options["max_registers"] = config.max_registers(call)
        return BoundedLaunch(forward_kernel, arguments=maps, constants=constants, output=y, **options)
    first = statistics_launch(call, config)
    return LastLaunch(
        apply_kernel,
        arguments={**maps, "partial_ptr": first.output},
        constants=constants,
        output=y,
        before=(first,),
        **options,
    )


def group_norm_silu(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    x2: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Tensor:
    call = Call(x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, x2=x2)
    return execute("group_norm_silu", plan(**vars(call)), x)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)
    ctx.choices = keyword_only_inputs


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    # a gradient may come in any layout: that of a sum is one number expanded
    dy = dy.contiguous(memory_format=torch.channels_last)
    *operands, x2 = inputs
    if x2 is None:
        gradients = group_norm_silu_backward.OP(dy, *operands, **ctx.choices)
        dx2 = None
    else:
        dx, dx2, *others = group_norm_silu_backward_concat.OP(dy, operands[0], x2, *operands[1:], **ctx.choices)
        gradients = (dx, *others)
    given = (gradient if t is not None else None for gradient, t in zip(gradients, inputs[:5], strict=True))
    return (*given, None, None, dx2)


SAMPLES = (
    norm_sample("groups of 4 channels, two images", (2, 32, 6, 5), 8),
    norm_sample("groups of 12 channels, fewer than two of a slab", (1, 24, 4, 4), 2),
    norm_sample("scale, shift and dropout", (2, 16, 4, 4), 4, scale=True, p=0.25),
    norm_sample("odd channels, odd map, no activation", (1, 15, 3, 7), 3, act="none"),
    norm_sample("one group a channel on a map of one row: InstanceNorm", (2, 8, 1, 6), 8),
    norm_sample("two maps, a group of both", (2, 24, 4, 5), 3, second=12, scale=True),
    norm_sample("two maps of equal channels", (1, 32, 4, 4), 8, second=16),
    *(
        norm_sample(f"UNet {side}x{side} {c}, batch 128", (128, c, side, side), 32, real_size=True)
        for c, side in UNET_MAPS
    ),
    norm_sample("UNet 32x32 128, scale, shift and dropout", (128, 128, 32, 32), 32, scale=True, p=0.1, real_size=True),
    norm_sample("UNet 16x16 256, scale, shift and dropout", (128, 256, 16, 16), 32, scale=True, p=0.1, real_size=True),
    norm_sample("UNet 32x32 256 + 128, two maps", (128, 384, 32, 32), 32, second=128, real_size=True),
    norm_sample("UNet 16x16 256 + 256, two maps", (128, 512, 16, 16), 32, second=256, real_size=True),
    norm_sample("latent UNet 128x128 320, two passes", (2, 320, 128, 128), 32, real_size=True),
)

OP = define(
    group_norm_silu,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    autograd=Autograd(setup=_setup, backward=_backward),
)
