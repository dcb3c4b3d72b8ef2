"""Gradients of group_norm_silu: dx and the sums in one pass over x and dy, then those of the parameters; NHWC.

dy        [N, C, H, W]  channels_last, dtype of x
residual  as x, added to dx before it is rounded: the gradient that another user of x has; None: nothing
all else  the forward's own arguments

returns   dx [N, C, H, W] channels_last, dtype of x; dgamma [C], dbeta [C], dscale [N, C], dshift [N, C], each in the
          dtype of what it is the gradient of; dscale and dshift are empty where there is no scale or shift

`group_norm_silu_backward_summed` returns (dx, its sum over images and pixels [C] fp32, then the others): the gradient
of the bias of a convolution before the norm, from values that are not rounded yet, at no byte more.

Accumulates in fp32; no atomics, so equal calls give equal bits. Raises ValueError or TypeError as the forward does.

Mean, 1/deviation, the activation's argument and dropout's mask come again from x, gamma, beta, scale, shift, seed and
offset: where a slab of x and one of dy fit a program's registers that costs no byte, and the forward saves nothing but
its inputs. Bytes are then x and dy read once, dx written once (and the residual, if any). Where they do not fit, x is
read three times, dy twice: by three launches, or by one whose programs find their slabs in a cache again. Predicted for
128 channels at 32², batch 128, bf16, on an H200: 101 MB, 23.5 µs at the rate of a copy, 80 % of it reached: two
programs of 64 KB share a multiprocessor.

Not in `kernels.ALL`, whose ops return one tensor; `tuning.tune` takes it nevertheless, and times what makes dx.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.norm import BACKWARD_FLOPS
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_backward import (
    backward_again_kernel,
    backward_apply_kernel,
    backward_kernel,
    backward_sums_kernel,
    parameters_kernel,
)
from ridgeline.kernels._group_norm_silu_call import (
    BackwardCall,
    BoundedLaunch,
    Config,
    default_config,
    proposals,
    statistics_launch,
)
from ridgeline.kernels._group_norm_silu_dropout import scaled_mask
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS, gradient_sample
from ridgeline.kernels._nhwc import cdiv, starts_early
from ridgeline.kernels._op import (
    LastLaunch,
    Launch,
    Launcher,
    Op,
    Target,
    check_launchable,
    register,
    target_of,
    tuned_config,
)

ParameterGradients = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
SummedGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_AGAIN_FLOPS = 8  # mean 1, centred square 3, argument of the activation 4
_ACTIVATION_FLOPS = {"none": 0, "silu": 8}
_DROPOUT_FLOPS = 2
_BLOCK_N, _BLOCK_C = 128, 16  # of the kernel for the parameters: 64 bytes of a row, all samples of a usual batch


def gradients(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Gradients:
    """All five from PyTorch's own backward operators: what autograd runs on the forward's reference.

    With x2, whose channels follow those of x, dx is that of x alone.
    """
    of_x = x.shape[1]
    x = x if x2 is None else torch.cat((x, x2), 1)
    n, c, h, w = x.shape
    aten = torch.ops.aten
    sizes = (n, c, h * w, groups)
    weight, bias = gamma.to(x.dtype), beta.to(x.dtype)
    # PyTorch's CPU kernel takes both maps in one layout only, its CUDA kernel in none but NCHW
    planes = x.contiguous()
    y, mean, rstd = aten.native_group_norm(planes, weight, bias, *sizes, eps)
    du = dy * scaled_mask(x, seed, offset, p) if p else dy
    factor = 1 if scale is None else 1 + scale.to(x.dtype)[:, :, None, None]
    if act == "silu":
        u = y * factor
        du = aten.silu_backward(du, u if shift is None else u + shift.to(x.dtype)[:, :, None, None])
    dn = (du * factor).contiguous()
    dx, dgamma, dbeta = aten.native_group_norm_backward(dn, planes, mean, rstd, weight, *sizes, [True] * 3)
    return (
        (dx if residual is None else dx + residual)[:, :of_x],
        dgamma.to(gamma.dtype),
        dbeta.to(beta.dtype),
        x.new_empty(0) if scale is None else (du * y).sum((2, 3)).to(scale.dtype),
        x.new_empty(0) if shift is None else du.sum((2, 3)).to(shift.dtype),
    )


def cost(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    *,
    groups: int,  # noqa: ARG001
    eps: float = 1e-5,  # noqa: ARG001
    act: str = "silu",
    p: float = 0.0,
) -> Cost:
    """With what is computed again from x; its sums cost less than 1 % more bytes."""
    flops = BACKWARD_FLOPS + _AGAIN_FLOPS + _ACTIVATION_FLOPS[act] + (_DROPOUT_FLOPS if p else 0)
    flops += 0 if residual is None else 1
    given = (dy, x, x2, gamma, beta, scale, shift, seed, offset, residual)
    written = (x, x2, gamma, beta, scale, shift)
    return Cost(
        flops * dy.numel(),
        sum(t.nbytes for t in given if t is not None),
        sum(t.nbytes for t in written if t is not None),
    )


@wraps(gradients)  # tuned configs are filed under the names of its parameters
def reference(*args: Any, **kwargs: Any) -> Tensor:
    """dx alone."""
    return gradients(*args, **kwargs)[0]


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    call = BackwardCall(**arguments)
    return proposals(call, target or target_of(call.x))


def plan(
    *, sum_dx: bool = False, config: Config | None = None, target: Target | None = None, **arguments: Any
) -> Launch:
    """The launch or launches that make dx and, as its argument `sums_ptr`, the sums [N, parts, rows, C]. Runs nothing.

    Rows are 2, and with `sum_dx` 3 where one launch does it all. With x2, which `group_norm_silu_backward_concat`
    gives, the gradient of x2 is its argument `dx2_ptr`.
    """
    call = BackwardCall(**arguments)
    target = target or target_of(call.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(call, target), **arguments)
        config = tuned or default_config(call, target)
    if not config.is_valid(call, target):
        call.refuse(f"{config} is not valid for {call.groups} groups of {call.shape} on {target.arch}")
    n, c = call.shape[:2]
    dx, dx2 = (
        None if one is None else torch.empty_like(one, memory_format=torch.channels_last) for one in (call.x, call.x2)
    )
    assert dx is not None
    rows = 2 if config.launches(call) or not sum_dx else 3
    sums = torch.empty((n, config.parts(call), rows, c), dtype=torch.float32, device=call.x.device)
    common: dict[str, Tensor | None] = {"dy_ptr": call.dy, **call.maps(), **call.parameters(), "sums_ptr": sums}
    last = {"residual_ptr": call.residual, "dx_ptr": dx, "dx2_ptr": dx2}
    constants = {"C1": call.x.shape[1], **config.constants(call), **call.constants()}
    options: dict[str, Any] = {"grid": (config.programs(call),), "num_warps": config.num_warps, "num_stages": 1}
    if not config.launches(call):
        constants["ROWS"] = rows
        one: dict[str, Any] = {"arguments": {**common, **last}, "constants": constants, "output": dx, **options}
        if config.again:
            return Launch(backward_again_kernel, **one)
        return BoundedLaunch(backward_kernel, **one, max_registers=config.max_registers(call))
    first = statistics_launch(call, config)
    common |= {"partial_ptr": first.output, "products_ptr": torch.empty_like(first.output)}
    second = Launch(backward_sums_kernel, arguments=common, constants=constants, output=sums, **options)
    return LastLaunch(
        backward_apply_kernel,
        arguments={**common, **last},
        constants=constants,
        output=dx,
        before=(first, second),
        **options,
    )


def plan_summed(**arguments: Any) -> Launch:
    """What `plan` returns with `sum_dx`."""
    return plan(sum_dx=True, **arguments)


def group_norm_silu_backward(
    dy: Tensor,
    x: Tensor,
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
    call = BackwardCall(x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, dy=dy, residual=residual)
    launch = plan(**vars(call))
    return launch.output, *run(call, launch)


def group_norm_silu_backward_summed(
    dy: Tensor,
    x: Tensor,
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
    call = BackwardCall(x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, dy=dy, residual=residual)
    launch = plan_summed(**vars(call))
    dx_sum, found = run_summed(call, launch, (launch.output,))
    return launch.output, dx_sum, *found


def run(call: BackwardCall, launch: Launch, dx_sum: Tensor | None = None) -> ParameterGradients:
    """Run `launch` and the one after it, which makes dgamma, dbeta, dscale and dshift: those are returned.

    `dx_sum` is written if the launch sums dx, and zeroed where x is empty.
    """
    found = empty_gradients(call.x, call.gamma, call.beta, call.scale, call.shift)
    if call.x.numel():
        check_launchable(call.name, launch.kernel, call.x)
        launch.run()
        parameters_launch(call, launch, found, dx_sum).run()
    else:
        for gradient in found if dx_sum is None else (*found, dx_sum):
            gradient.zero_()
    return found


def run_summed(call: BackwardCall, launch: Launch, maps: tuple[Tensor, ...]) -> tuple[Tensor, ParameterGradients]:
    """`run`, and the sum of dx before what it returns: of `maps`, which the launch writes, side by side."""
    assert call.dy is not None
    dx_sum = empty_sum(call.dy)
    found = run(call, launch, dx_sum)
    return dx_sum if sums_dx(launch) else sum_of(maps), found


def parameters_launch(
    call: BackwardCall, launch: Launch, found: tuple[Tensor, ...], dx_sum: Tensor | None = None
) -> Launch:
    """The launch after `launch` that makes `found` (dgamma, dbeta, dscale, dshift), and `dx_sum`, of its sums."""
    sums = launch.arguments["sums_ptr"]
    assert isinstance(sums, Tensor)
    n, parts, rows, c = sums.shape
    pdl = starts_early(target_of(call.x))
    dgamma, dbeta, dscale, dshift = found
    return Launch(
        parameters_kernel,
        grid=(cdiv(c, _BLOCK_C),),
        arguments={
            "sums_ptr": sums, "gamma_ptr": call.gamma, "beta_ptr": call.beta, "scale_ptr": call.scale,
            "dgamma_ptr": dgamma, "dbeta_ptr": dbeta,
            "dscale_ptr": None if call.scale is None else dscale,
            "dshift_ptr": None if call.shift is None else dshift,
            "dx_sum_ptr": dx_sum if sums_dx(launch) else None,
            "n_count": n,
        },
        constants={
            "C": c, "PARTS": parts, "ROWS": rows, "SCALE_ROW": call.constants()["SCALE_ROW"],
            "BLOCK_N": _BLOCK_N, "BLOCK_C": _BLOCK_C, "PDL": pdl,
        },
        num_warps=4,
        num_stages=1,
        output=dgamma,
        pdl=pdl,
    )  # fmt: skip


def empty_gradients(
    x: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
) -> ParameterGradients:
    """Uninitialised dgamma, dbeta, dscale, dshift."""
    return _like(gamma, x), _like(beta, x), _like(scale, x), _like(shift, x)


def sums_dx(launch: Launch) -> bool:
    """Whether a launch of `plan_summed` sums dx itself, as one that holds a whole slab does."""
    return launch.constants.get("ROWS") == 3


def sum_of(maps: tuple[Tensor, ...]) -> Tensor:
    """Over images and pixels, of maps whose channels stand side by side, by PyTorch."""
    wide = torch.promote_types(maps[0].dtype, torch.float32)
    sums = [one.sum((0, 2, 3), dtype=wide) for one in maps]
    return torch.cat(sums) if len(sums) > 1 else sums[0]


def empty_sum(dy: Tensor) -> Tensor:
    """Where the sum of dx goes, uninitialised."""
    return dy.new_empty(dy.shape[1], dtype=torch.promote_types(dy.dtype, torch.float32))


def _like(tensor: Tensor | None, x: Tensor) -> Tensor:
    """Where the gradient of a parameter goes; nothing for one that is absent."""
    return x.new_empty(0) if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _fake(
    dy: Tensor,  # noqa: ARG001
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *random_and_residual: Tensor | None,  # noqa: ARG001
    **choices: Any,  # noqa: ARG001
) -> Gradients:
    return torch.empty_like(x, memory_format=torch.channels_last), *empty_gradients(x, gamma, beta, scale, shift)


def _on_cpu(*args: Any, **kwargs: Any) -> Gradients:
    dx, *others = gradients(*args, **kwargs)
    return (dx.contiguous(memory_format=torch.channels_last), *others)  # pyright: ignore[reportReturnType]


def _fake_summed(dy: Tensor, x: Tensor, *parameters: Any, **choices: Any) -> SummedGradients:
    dx, *others = _fake(dy, x, *parameters, **choices)
    return dx, empty_sum(x), *others  # pyright: ignore[reportReturnType]


def _summed_on_cpu(*args: Any, **kwargs: Any) -> SummedGradients:
    dx, *others = _on_cpu(*args, **kwargs)
    return dx, sum_of((dx,)), *others  # pyright: ignore[reportReturnType]


SAMPLES = (
    gradient_sample("groups of 4 channels, two images", (2, 32, 6, 5), 8),
    gradient_sample("scale, shift, dropout and residual", (2, 16, 4, 4), 4, scale=True, residual=True, p=0.25),
    *(
        gradient_sample(f"UNet {side}x{side} {c}, batch 128", (128, c, side, side), 32, real_size=True)
        for c, side in UNET_MAPS
    ),
    gradient_sample(
        "UNet 32x32 128, all of it", (128, 128, 32, 32), 32, scale=True, residual=True, p=0.1, real_size=True
    ),
    gradient_sample("latent UNet 128x128 320, two passes", (2, 320, 128, 128), 32, real_size=True),
)

OP = Op(
    name="group_norm_silu_backward",
    call=register(group_norm_silu_backward, fake=_fake, on_cpu=_on_cpu, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)

SUMMED_OP = replace(
    OP,
    name="group_norm_silu_backward_summed",
    call=register(group_norm_silu_backward_summed, fake=_fake_summed, on_cpu=_summed_on_cpu, cost=cost),
    launcher=Launcher(plan_summed, candidates),
)
SUMMED = SUMMED_OP.overload
