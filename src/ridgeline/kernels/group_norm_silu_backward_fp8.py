"""group_norm_silu_backward that quantises dx as it stores it: what FP8 gradients of the convolution before need.

dy, x, gamma, ..., residual   as in group_norm_silu_backward; C is a multiple of 16, H W of 4
fp8_scale [tensors]           fp32; its row `row` is what dx is multiplied by before it is rounded
amax      [tensors]           fp32; row `row` is raised to the largest magnitude of dx
counts    [tensors, 3]        int64; to row `row` are added the elements that saturated, that vanished, and all

returns   dx     [N, C, H, W]  channels_last, dtype of x, with `keep`; else empty
          dx8    [N, C, H, W]  FP8 e5m2, channels_last, rounded from the fp32 value that includes the residual
          quads  [N, H / 4, C, W / 4, 4, 4]  the same values for the weight gradient (see _quads); empty without `quads`
          dgamma, dbeta, dscale, dshift   the bits that group_norm_silu_backward gives with the same tiles

amax and counts are changed in place, but the operator is registered as one that changes nothing, as quantize_fp8 is:
nothing in a graph may read them. Equal calls give equal bits. Raises ValueError or TypeError as
group_norm_silu_backward and quantize_fp8 do, and where a program's registers do not hold a slab of x and one of dy:
there is no second pass. `fits` says so beforehand.

For 128 channels at 32x32, batch 128, bf16, 67 MB are read and 33.6 written, half of it quads, as much as the backward
in bf16 writes; `keep` writes 33.6 more. It issues 41 instructions an element, 52 with dropout, where that backward has
34 and 45, and a multiprocessor could issue some 44 while it copies. Two programs share a multiprocessor.

Not in `kernels.ALL`, whose ops return one tensor; `tuning.tune` takes it nevertheless, and times what makes dx.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import group_norm_silu_backward
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_backward_fp8 import FORMAT, backward_fp8_kernel
from ridgeline.kernels._group_norm_silu_call import (
    UNET_MAPS,
    BackwardCall,
    BoundedLaunch,
    Config,
    default_config,
    gradient_sample,
    proposals,
)
from ridgeline.kernels._op import Launch, Launcher, Op, Sample, Target, register, target_of, tuned_config
from ridgeline.kernels._quads import quads_shape, to_quads, why_not
from ridgeline.kernels._quantize_fp8_call import check, check_rows, empty_y, nothing_seen
from ridgeline.kernels.quantize_fp8 import quantized

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_CHANNELS = 16  # a multiple of them is what FP8 convolutions take
_QUANTIZING_FLOPS = 4  # of an element: the product, the largest, the least and their comparison
_MOST_PIECES = 32  # of a slab: the kernel's code has each of them
_WORKING = 64  # registers a thread beside the elements that it holds; two programs of 64 KB then fit a multiprocessor
_FEWEST = 128  # that a thread is bound to: small slabs have so few programs that more of them need not fit
_OBSERVED = 8  # elements at most that a thread observes together


@dataclass(frozen=True, kw_only=True)
class BackwardFp8Call(BackwardCall):
    """One call, checked but for its tiles."""

    name: ClassVar[str] = "group_norm_silu_backward_fp8"

    fp8_scale: Tensor
    amax: Tensor
    counts: Tensor
    row: int
    quads: bool = False
    keep: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self.x, self.amax, self.counts, self.fp8_scale, self.row)
        c, h, w = self.x.shape[1:]
        if c % _CHANNELS:
            self.refuse(f"x must have a multiple of {_CHANNELS} channels, got {c}")
        if h * w % 4:
            self.refuse(f"a map of x must have a multiple of 4 pixels, got {h} x {w}")
        if self.quads and (reason := why_not(h, w)) is not None:
            self.refuse(reason)

    def takes(self, config: Config, target: Target) -> bool:
        """Whether a program of `config` holds its slab in few enough pieces, for quads of whole rows."""
        if not (config.is_valid(self, target) and config.whole(self)):
            return False
        pieces = self.pieces(config)
        whole = not self.quads or pieces["BLOCK_P"] % self.x.shape[3] == 0
        return whole and pieces["PIECES"] <= _MOST_PIECES

    def pieces(self, config: Config) -> dict[str, int]:
        """The tiling of `config`, in pieces that end where a quarter of the map does."""
        constants = config.constants(self)
        quarter = self.pixels // 4
        block_p = min(constants["BLOCK_P"], quarter & -quarter)
        elements = block_p * constants["BLOCK_C"] // (32 * config.num_warps)
        access = min(_OBSERVED, max(1, elements))
        return {**constants, "BLOCK_P": block_p, "PIECES": self.pixels // block_p, "ACCESS": access}


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
    wide = torch.promote_types(x.dtype, torch.float32)
    choices: dict[str, Any] = {"groups": groups, "eps": eps, "act": act, "p": p}
    extra = None if residual is None else residual.to(wide)
    dx, *others = group_norm_silu_backward.gradients(
        dy.to(wide), x.to(wide), gamma, beta, scale, shift, seed, offset, extra, **choices
    )
    dx = dx.contiguous(memory_format=torch.channels_last)
    dx8, *seen = quantized(dx, fp8_scale[row], fp8_format=FORMAT)
    # empty ones in the dtype of x, each a tensor of its own: an operator's results must not share memory
    given = (gamma, beta, scale, shift)
    found = (x.new_empty(0) if t is None else gradient for t, gradient in zip(given, others, strict=True))
    kept = dx.to(x.dtype) if keep else x.new_empty(0)
    copy = to_quads(dx8, beside=False) if quads else dx8.new_empty(0)
    return (kept, dx8, copy, *found), tuple(seen)  # pyright: ignore[reportReturnType]


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


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch that makes dx8 and, as its arguments, dx, words of quads and the sums [N, 1, 2, C]. Runs nothing."""
    call = BackwardFp8Call(**arguments)
    target = target or target_of(call.x)
    check(call.x, FORMAT, target)
    if config is None:
        # tuned for a state of one row, which of more it is does not matter
        alone = {"row": 0, **{name: getattr(call, name)[:1] for name in ("fp8_scale", "amax", "counts")}}
        tuned = tuned_config(OP, Config, lambda c: call.takes(c, target), **{**arguments, **alone})
        config = tuned or default_config(call, target)
    if not call.takes(config, target):
        shape = tuple(call.x.shape)
        call.refuse(f"no program holds {config.groups} of {call.groups} groups of x and dy, {shape}: {config}")
    n, c, h, w = call.x.shape
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
            "sums_ptr": call.x.new_empty((n, 1, 2, c), dtype=torch.float32),
            "dx_ptr": torch.empty_like(call.x, memory_format=torch.channels_last) if call.keep else None,
            "codes_ptr": dx8,
            "words_ptr": words,
            "fp8_scale_ptr": call.fp8_scale,
            "amax_ptr": call.amax.data.view(torch.int32),
            "counts_ptr": call.counts.data,
            "row": call.row,
        },
        constants={**call.pieces(config), **call.constants(), "W": w},
        num_warps=config.num_warps,
        num_stages=1,
        output=dx8,
        # left alone, the compiler takes 168 and more, and one program fits a multiprocessor
        max_registers=min(max(config.registers(call) + _WORKING, _FEWEST), 65_536 // (32 * config.num_warps), 255),
    )


def fits(x: Tensor, groups: int, *, quads: bool) -> bool:
    """Whether `plan` takes such a map, fake or not, where all else is as it should be."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    vector = like.new_empty(x.shape[1], dtype=torch.float32)
    amax, counts = nothing_seen(like)
    given: dict[str, Any] = {
        "dy": like,
        "x": like,
        "gamma": vector,
        "beta": vector,
        "fp8_scale": amax,
        "amax": amax,
        "counts": counts,
    }
    try:
        plan(**given, groups=groups, row=0, quads=quads, target=target_of(x))
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
    found = group_norm_silu_backward.run(call, launch)
    dx8, dx, words = launch.output, launch.arguments["dx_ptr"], launch.arguments["words_ptr"]
    return (
        dx if isinstance(dx, Tensor) else x.new_empty(0),
        dx8,
        words.view(dx8.dtype).view(quads_shape(*x.shape, beside=False))
        if isinstance(words, Tensor)
        else dx8.new_empty(0),
        *found,
    )


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


def on_cpu(
    dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, fp8_scale: Tensor, amax: Tensor, counts: Tensor,
    *others: Tensor | None, row: int, **choices: Any,
) -> Results:  # fmt: skip
    """The same in plain PyTorch."""
    operands = dict(zip(("scale", "shift", "seed", "offset", "residual"), others, strict=False))
    state = {"fp8_scale": fp8_scale, "amax": amax, "counts": counts, "row": row}
    call = BackwardFp8Call(x=x, gamma=gamma, beta=beta, dy=dy, **operands, **state, **choices)  # refuses what it must
    results, seen = gradients(**vars(call))
    # `data` has a version of its own, so that autograd sees no change; maximum keeps NaN, as the order of bits does
    amax.data[row] = torch.maximum(amax.data[row], seen[0][0])
    counts.data[row] += seen[1][0]
    return results


def fp8_gradient_sample(
    why: str, x: tuple[int, int, int, int], groups: int, *, quads: bool = True, keep: bool = False, **options: Any
) -> Sample:
    """A `gradient_sample` with the state of one tensor, whose scale lets some values saturate."""
    norm = gradient_sample(why, x, groups, **options)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        state = {
            "fp8_scale": torch.full((1,), 20_000.0, device=device),
            "amax": torch.zeros(1, device=device),
            "counts": torch.zeros((1, 3), dtype=torch.int64, device=device),
        }
        return {**norm.arguments(dtype, device), **state, "row": 0, "quads": quads, "keep": keep}

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
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)
