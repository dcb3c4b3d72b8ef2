"""Gradients of group_norm_silu of two maps, whose channels stand side by side: one of each map, neither a slice.

dy    [N, C, H, W]   C = C1 + C2; channels_last
x     [N, C1, H, W]  likewise, dtype of dy
x2    [N, C2, H, W]  likewise
all else             as in group_norm_silu_backward, for C channels

returns dx, dx2 as x and x2, then dgamma, dbeta, dscale and dshift as group_norm_silu_backward does; a residual is a map
of all C channels. The summed form returns behind the maps dx_sum [C] fp32, of all channels.

The kernels are those of group_norm_silu_backward, bit for bit on the concatenation: a column of channels is read from
the map that it is of, and its gradient written there. Bytes are those of the whole map, and the copies that make one of
two, and two of one, are none. Raises ValueError or TypeError as the forward does.

It is a form of group_norm_silu_backward, and tuned as that with an x2, which its operator does not take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import group_norm_silu_backward
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_call import BackwardCall
from ridgeline.kernels._group_norm_silu_samples import gradient_sample
from ridgeline.kernels._op import Launch, Op, Sample, register

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
SummedGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def gradients(
    dy: Tensor,
    x: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Gradients:
    """All six, by group_norm_silu_backward's of the concatenation."""
    operands = (gamma, beta, scale, shift, seed, offset, residual)
    choices: dict[str, Any] = {"groups": groups, "eps": eps, "act": act, "p": p}
    dx, *others = group_norm_silu_backward.gradients(dy, torch.cat((x, x2), 1), *operands, **choices)
    parts = dx.split([x.shape[1], x2.shape[1]], 1)
    return (*(one.clone(memory_format=torch.channels_last) for one in parts), *others)  # pyright: ignore


def reference(dy: Tensor, x: Tensor, x2: Tensor, *operands: Tensor | None, **choices: Any) -> Tensor:
    """dx alone."""
    return gradients(dy, x, x2, *operands, **choices)[0]  # pyright: ignore[reportArgumentType]


def cost(dy: Tensor, x: Tensor, x2: Tensor, *operands: Tensor | None, **choices: Any) -> Cost:
    """That of the concatenation."""
    return group_norm_silu_backward.cost(dy, x, *operands, x2=x2, **choices)  # pyright: ignore[reportArgumentType]


def group_norm_silu_backward_concat(
    dy: Tensor,
    x: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Gradients:
    call = BackwardCall(x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, dy, residual, x2=x2)
    launch = group_norm_silu_backward.plan(**vars(call))
    others = group_norm_silu_backward.run(call, launch)
    return launch.output, _second(launch), *others


def group_norm_silu_backward_concat_summed(
    dy: Tensor,
    x: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> SummedGradients:
    call = BackwardCall(x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, dy, residual, x2=x2)
    launch = group_norm_silu_backward.plan_summed(**vars(call))
    dx_sum, others = group_norm_silu_backward.run_summed(call, launch, (launch.output, _second(launch)))
    return launch.output, _second(launch), dx_sum, *others


def _second(launch: Launch) -> Tensor:
    dx2 = launch.arguments["dx2_ptr"]
    assert isinstance(dx2, Tensor)
    return dx2


def _fake(
    dy: Tensor,  # noqa: ARG001
    x: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *random_and_residual: Tensor | None,  # noqa: ARG001
    **choices: Any,  # noqa: ARG001
) -> Gradients:
    dx, dx2 = (torch.empty_like(one, memory_format=torch.channels_last) for one in (x, x2))
    return dx, dx2, *group_norm_silu_backward.empty_gradients(x, gamma, beta, scale, shift)


def _fake_summed(dy: Tensor, x: Tensor, x2: Tensor, *parameters: Any, **choices: Any) -> SummedGradients:
    dx, dx2, *others = _fake(dy, x, x2, *parameters, **choices)
    return dx, dx2, group_norm_silu_backward.empty_sum(dy), *others  # pyright: ignore[reportReturnType]


def summed_on_cpu(*args: Any, **kwargs: Any) -> SummedGradients:
    dx, dx2, *others = gradients(*args, **kwargs)
    return dx, dx2, group_norm_silu_backward.sum_of((dx, dx2)), *others  # pyright: ignore[reportReturnType]


def concat_gradient_sample(
    why: str, x: tuple[int, int, int, int], groups: int, *, second: int, **options: Any
) -> Sample:
    """The backward of a `norm_sample` of two maps."""
    return gradient_sample(why, x, groups, second=second, **options)


SAMPLES = (
    concat_gradient_sample("a group of both maps, scale", (2, 24, 4, 5), 3, second=12, scale=True),
    concat_gradient_sample("equal channels", (1, 32, 4, 4), 8, second=16),
    concat_gradient_sample("UNet 32x32 256 + 128, batch 128", (128, 384, 32, 32), 32, second=128, real_size=True),
    concat_gradient_sample("UNet 32x32 128 + 128, batch 128", (128, 256, 32, 32), 32, second=128, real_size=True),
    concat_gradient_sample("UNet 16x16 256 + 256, batch 128", (128, 512, 16, 16), 32, second=256, real_size=True),
)

OP = Op(
    name="group_norm_silu_backward_concat",
    call=register(group_norm_silu_backward_concat, fake=_fake, on_cpu=gradients, cost=cost),
    reference=reference,
    cost=cost,
    launcher=group_norm_silu_backward.OP.launcher,
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)

SUMMED_OP = replace(
    OP,
    name="group_norm_silu_backward_concat_summed",
    call=register(group_norm_silu_backward_concat_summed, fake=_fake_summed, on_cpu=summed_on_cpu, cost=cost),
    launcher=group_norm_silu_backward.SUMMED_OP.launcher,
)
SUMMED = SUMMED_OP.overload
