"""group_norm_silu_backward that quantises dx as it stores it: what FP8 gradients of the convolution before need.

dy, x, gamma, ..., residual   as in group_norm_silu_backward; C is a multiple of 16, H W of 4
fp8_scale [tensors]           fp32; its row `row` is what dx is multiplied by before it is rounded
amax      [tensors]           fp32; row `row` is raised to the largest magnitude of dx
counts    [tensors, 3]        int64; to row `row` are added the elements that saturated, that vanished, and all

returns   dx     [N, C, H, W]  channels_last, dtype of x, with `keep`; else empty
          dx8    [N, C, H, W]  FP8 e5m2, channels_last, rounded from the fp32 value that includes the residual
          quads  [N, H / 4, C, W / 4, 4, 4]  the same values for the weight gradient (see _quads); empty without `quads`
          dgamma, dbeta, dscale, dshift   the bits that group_norm_silu_backward gives with the same tiles

`group_norm_silu_backward_fp8_summed` returns (dx, dx8, quads, the sum of dx over images and pixels [C] fp32, then the
others): the gradient of the bias of the convolution before, from values that are not rounded yet.

amax and counts are changed in place, but the operator is registered as one that changes nothing, as quantize_fp8 is:
nothing in a graph may read them. Equal calls give equal bits. Raises ValueError or TypeError as
group_norm_silu_backward and quantize_fp8 do, and where a program's registers do not hold a slab of x and one of dy:
there is no second pass. `fits` says so beforehand.

For 128 channels at 32x32, batch 128, bf16, 67 MB are read and 33.6 written, half of it quads, as much as the backward
in bf16 writes; `keep` writes 33.6 more. It issues 41 instructions an element, 52 with dropout, where that backward has
34 and 45, and a multiprocessor could issue some 44 while it copies. Two programs share a multiprocessor. Summing dx
takes 2.8 instructions an element more, and no register: 1 to add, 1.8 to add up threads and warps at the end.

Not in `kernels.ALL`, whose ops return one tensor; `tuning.tune` takes it nevertheless, and times what makes dx.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import group_norm_silu_backward
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_backward_fp8 import FORMAT, backward_fp8_kernel
from ridgeline.kernels._group_norm_silu_backward_fp8_call import BackwardFp8Call
from ridgeline.kernels._group_norm_silu_call import BoundedLaunch, Config, default_config, proposals
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS, gradient_sample
from ridgeline.kernels._op import Launch, Launcher, Op, Sample, Target, register, target_of, tuned_config
from ridgeline.kernels._quads import quads_shape, to_quads
from ridgeline.kernels._quantize_fp8_call import as_filed, check, empty_y, state_of_one, typical
from ridgeline.kernels.quantize_fp8 import quantized

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
SummedResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_QUANTIZING = frozenset({"fp8_scale", "amax", "counts", "row", "quads", "keep"})  # arguments that the backward has not
_QUANTIZING_FLOPS = 4  # of an element: the product, the largest, the least and their comparison


def gradients(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    fp8_scale: Tensor,
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    row: int,
    quads: bool = False,
    keep: bool = False,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> tuple[Results, tuple[Tensor, Tensor]]:
    """All results in plain PyTorch, and the (amax, counts) of dx, unrecorded; of float64 dx8 is what is rounded."""
    operands: dict[str, Any] = {"scale": scale, "shift": shift, "seed": seed, "offset": offset}
    choices: dict[str, Any] = {"groups": groups, "eps": eps, "act": act, "p": p}
    dx, *others = _in_fp32(dy, x, residual, gamma=gamma, beta=beta, **operands, **choices)
    dx = dx.contiguous(memory_format=torch.channels_last)
    dx8, *seen = quantized(dx, fp8_scale[row], fp8_format=FORMAT)
    # empty ones in the dtype of x, each a tensor of its own: an operator's results must not share memory
    given = (gamma, beta, scale, shift)
    found = (x.new_empty(0) if t is None else gradient for t, gradient in zip(given, others, strict=True))
    kept = dx.to(x.dtype) if keep else x.new_empty(0)
    copy = to_quads(dx8, beside=False) if quads else dx8.new_empty(0)
    return (kept, dx8, copy, *found), tuple(seen)  # pyright: ignore[reportReturnType]


def _in_fp32(dy: Tensor, x: Tensor, residual: Tensor | None, **others: Any) -> group_norm_silu_backward.Gradients:
    """The backward's gradients, its maps widened to fp32 before."""
    wide = torch.promote_types(x.dtype, torch.float32)
    extra = None if residual is None else residual.to(wide)
    return group_norm_silu_backward.gradients(dy.to(wide), x.to(wide), residual=extra, **others)


@wraps(gradients)  # tuned configs are filed under the names of its parameters
def reference(*args: Any, **kwargs: Any) -> Tensor:
    """dx8 alone."""
    return gradients(*args, **kwargs)[0][1]


def cost(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    fp8_scale: Tensor,  # noqa: ARG001
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    *operands: Tensor | None,
    row: int,  # noqa: ARG001
    quads: bool = False,
    keep: bool = False,
    **others: Any,
) -> Cost:
    """The backward's, with a byte an element and the quads in place of dx; of the state one row."""
    base = group_norm_silu_backward.cost(dy, x, gamma, beta, *operands, **others)
    maps = (x.nbytes if keep else 0) + x.numel() + (prod(quads_shape(*x.shape, beside=False)) if quads else 0)
    written = base.write_bytes - x.nbytes + maps + 4 + 3 * 8
    return Cost(base.flops + _QUANTIZING_FLOPS * x.numel(), base.read_bytes + 4, written)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    call = BackwardFp8Call(**arguments)
    target = target or target_of(call.x)
    return tuple(config for config in proposals(call, target) if call.takes(config, target))


def plan(
    *, sum_dx: bool = False, config: Config | None = None, target: Target | None = None, **arguments: Any
) -> Launch:
    """The launch that makes dx8 and, as its arguments, dx, words of quads and the sums [N, 1, rows, C]. Runs nothing.

    Rows are 2, and with `sum_dx` 3.
    """
    call = BackwardFp8Call(**arguments)
    target = target or target_of(call.x)
    check(call.x, FORMAT, target)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: call.takes(c, target), **as_filed(arguments))
        config = tuned or default_config(call, target)
    if not call.takes(config, target):
        shape = tuple(call.x.shape)
        call.refuse(f"no program holds {config.groups} of {call.groups} groups of x and dy, {shape}: {config}")
    (n, c, h, w), rows = call.x.shape, 3 if sum_dx else 2
    dx8 = empty_y(call.x, FORMAT)
    words = call.x.new_empty(quads_shape(n, c, h, w, beside=False)[:5], dtype=torch.int32) if call.quads else None
    return BoundedLaunch(
        backward_fp8_kernel,
        grid=(config.programs(call),),
        arguments={
            "dy_ptr": call.dy,
            "x_ptr": call.x,
            **call.parameters(),
            "residual_ptr": call.residual,
            "sums_ptr": call.x.new_empty((n, 1, rows, c), dtype=torch.float32),
            "dx_ptr": torch.empty_like(call.x, memory_format=torch.channels_last) if call.keep else None,
            "codes_ptr": dx8,
            "words_ptr": words,
            "fp8_scale_ptr": call.fp8_scale,
            "amax_ptr": call.amax.data.view(torch.int32),
            "counts_ptr": call.counts.data,
            "row": call.row,
        },
        constants={**call.pieces(config), **call.constants(), "ROWS": rows, "W": w},
        num_warps=config.num_warps,
        num_stages=1,
        output=dx8,
        max_registers=call.most_registers(config),
    )


def plan_summed(**arguments: Any) -> Launch:
    """What `plan` returns with `sum_dx`."""
    return plan(sum_dx=True, **arguments)


def fits(x: Tensor, groups: int, *, quads: bool) -> bool:
    """Whether `plan` takes such a map, fake or not, where all else is as it should be."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    vector = like.new_empty(x.shape[1], dtype=torch.float32)
    given: dict[str, Any] = {"dy": like, "x": like, "gamma": vector, "beta": vector, **state_of_one(like, 1.0)}
    try:
        plan(**given, groups=groups, quads=quads, target=target_of(x))
    except (ValueError, TypeError):
        return False
    return True


def group_norm_silu_backward_fp8(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    fp8_scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    row: int,
    quads: bool = False,
    keep: bool = False,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Results:
    call = BackwardFp8Call(
        x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, dy, residual,
        fp8_scale=fp8_scale, amax=amax, counts=counts, row=row, quads=quads, keep=keep,
    )  # fmt: skip
    launch = plan(**vars(call))
    return *_maps(call, launch), *group_norm_silu_backward.run(call, launch)


def group_norm_silu_backward_fp8_summed(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    fp8_scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    row: int,
    quads: bool = False,
    keep: bool = False,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> SummedResults:
    call = BackwardFp8Call(
        x, gamma, beta, scale, shift, seed, offset, groups, eps, act, p, dy, residual,
        fp8_scale=fp8_scale, amax=amax, counts=counts, row=row, quads=quads, keep=keep,
    )  # fmt: skip
    launch, dx_sum = plan_summed(**vars(call)), group_norm_silu_backward.empty_sum(x)
    found = group_norm_silu_backward.run(call, launch, dx_sum)
    return *_maps(call, launch), dx_sum, *found


def _maps(call: BackwardFp8Call, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dx8 and quads of a launch that was planned for this call."""
    dx8, dx, words = launch.output, launch.arguments["dx_ptr"], launch.arguments["words_ptr"]
    quads = dx8.new_empty(0)
    if isinstance(words, Tensor):
        quads = words.view(dx8.dtype).view(quads_shape(*call.x.shape, beside=False))
    return dx if isinstance(dx, Tensor) else call.x.new_empty(0), dx8, quads


def _fake(
    dy: Tensor,  # noqa: ARG001
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    fp8_scale: Tensor,  # noqa: ARG001
    amax: Tensor,  # noqa: ARG001
    counts: Tensor,  # noqa: ARG001
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *random_and_residual: Tensor | None,  # noqa: ARG001
    quads: bool = False,
    keep: bool = False,
    **others: Any,  # noqa: ARG001
) -> Results:
    dx8 = empty_y(x, FORMAT)
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if keep else x.new_empty(0),
        dx8,
        dx8.new_empty(quads_shape(*x.shape, beside=False) if quads else 0),
        *group_norm_silu_backward.empty_gradients(x, gamma, beta, scale, shift),
    )


def _fake_summed(dy: Tensor, x: Tensor, *operands: Any, **choices: Any) -> SummedResults:
    dx, dx8, quads, *others = _fake(dy, x, *operands, **choices)
    return dx, dx8, quads, group_norm_silu_backward.empty_sum(x), *others  # pyright: ignore[reportReturnType]


def on_cpu(
    dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, fp8_scale: Tensor, amax: Tensor, counts: Tensor,
    *others: Tensor | None, row: int, **choices: Any,
) -> Results:  # fmt: skip
    """The same in plain PyTorch."""
    operands = dict(zip(("scale", "shift", "seed", "offset", "residual"), others, strict=False))
    state = {"fp8_scale": fp8_scale, "amax": amax, "counts": counts, "row": row}
    call = BackwardFp8Call(x=x, gamma=gamma, beta=beta, dy=dy, **operands, **state, **choices)  # refuses what it must
    results, seen = gradients(**{name: value for name, value in vars(call).items() if name != "x2"})
    # `data` has a version of its own, so that autograd sees no change; maximum keeps NaN, as the order of bits does
    amax.data[row] = torch.maximum(amax.data[row], seen[0][0])
    counts.data[row] += seen[1][0]
    return results


def summed_on_cpu(*args: Any, **kwargs: Any) -> SummedResults:
    dx, dx8, quads, *found = on_cpu(*args, **kwargs)
    given = signature(gradients).bind(*args, **kwargs)
    given.apply_defaults()
    unrounded, *_ = _in_fp32(**{name: value for name, value in given.arguments.items() if name not in _QUANTIZING})
    return dx, dx8, quads, unrounded.sum((0, 2, 3)), *found  # pyright: ignore[reportReturnType]


def fp8_gradient_sample(
    why: str, x: tuple[int, int, int, int], groups: int, *, quads: bool = True, keep: bool = False, **options: Any
) -> Sample:
    """A `gradient_sample` with the state of one tensor, whose scale lets some values saturate."""
    norm = gradient_sample(why, x, groups, **options)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        given = norm.arguments(dtype, device)
        return {**given, **state_of_one(given["x"], 20_000.0), "quads": quads, "keep": keep}

    return Sample(why, arguments, norm.real_size)


SAMPLES = (
    fp8_gradient_sample("groups of 4 channels, two images", (2, 32, 8, 4), 8),
    fp8_gradient_sample(
        "scale, shift, dropout and residual", (2, 16, 4, 4), 4, scale=True, residual=True, p=0.25, keep=True
    ),
    fp8_gradient_sample("a map that has no quads", (1, 48, 2, 6), 4, quads=False),
    *(
        fp8_gradient_sample(f"UNet {side}x{side} {c}, batch 128", (128, c, side, side), 32, real_size=True)
        for c, side in UNET_MAPS
    ),
    fp8_gradient_sample(
        "UNet 32x32 128, scale, shift and dropout", (128, 128, 32, 32), 32, scale=True, p=0.1, real_size=True
    ),
    fp8_gradient_sample("UNet 32x32 128, residual", (128, 128, 32, 32), 32, residual=True, keep=True, real_size=True),
)

OP = Op(
    name="group_norm_silu_backward_fp8",
    call=register(group_norm_silu_backward_fp8, fake=_fake, on_cpu=on_cpu, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, typical=typical),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)

SUMMED_OP = replace(
    OP,
    name="group_norm_silu_backward_fp8_summed",
    call=register(group_norm_silu_backward_fp8_summed, fake=_fake_summed, on_cpu=summed_on_cpu, cost=cost),
    launcher=Launcher(plan_summed, candidates, typical=typical),
)
SUMMED = SUMMED_OP.overload
