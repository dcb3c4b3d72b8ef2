"""y = dropout(act(group_norm(x)·(1 + scale) + shift)) in FP8, NHWC, and its quads: group_norm_silu that quantises.

    y8 = round(clamp(y · fp8_scale[row], -448, 448))        e4m3, ties to even; NaN stays NaN

fp8_scale     [tensors] fp32, read anew by every call
amax          [tensors] fp32: row `row` is raised to the largest magnitude of y
counts        [tensors, 3] int64: to row `row` is added what `quantize_fp8` counts
row           of these three
quads         whether to make them, see `_quads`; the map must have some
all else      as group_norm_silu takes it: the same calls, the same elements dropped for equal seed and offset

returns y8    [N, C, H, W] float8_e4m3fn, channels_last
        quads [N, H / 4 + 2, C, W / 4 + 2, 4, 4] float8_e4m3fn; empty without `quads`

It is the fp32 value that is quantised: what rounding to bf16 in between would do to it is left out. An empty batch
gives empty results and records nothing. Raises ValueError or TypeError for what group_norm_silu or quantize_fp8 refuse,
for quads of a map that has none or whose quarters are not whole pieces, and for slabs that no program holds; `fits`
tells beforehand.

Registered as an operator that changes nothing, for it runs inside of compiled graphs, where amax and counts are nobody
else's: only `DelayedScaling.update_` reads them, once a step, outside. There are no gradients: who places it in a graph
has the backward as a node of its own.

For 128 channels at 32², batch 128, bf16, 33.6 MB are read, 16.8 and 26.2 written: 77 MB where group_norm_silu alone
moves 67, and quantize_fp8 behind it as many again. At the rate of a copy that is 17.9 µs on an H200, in which 30
instructions an element could be issued; it has 20 of them, 17 without quads, and with dropout 33. Measured there: 33.7
µs with a slab of 32 channels, 51.3 with one of 16, for memory writes 32 bytes of a pixel at a time.

Not in `kernels.ALL`, whose ops return one tensor; `tuning.tune` takes it nevertheless, and times all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import group_norm_silu
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._group_norm_silu_call import BoundedLaunch, Call
from ridgeline.kernels._group_norm_silu_fp8 import forward_fp8_kernel
from ridgeline.kernels._group_norm_silu_fp8_call import WARPS, Config, Fp8Call, default_config
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS, norm_sample
from ridgeline.kernels._op import (
    Launch,
    Launcher,
    Op,
    Sample,
    Target,
    check_launchable,
    nearest_first,
    register,
    target_of,
    tuned_config,
)
from ridgeline.kernels._quads import quads_shape, to_quads, why_not
from ridgeline.kernels._quantize_fp8_call import (
    as_filed,
    check,
    empty_y,
    state_of_one,
    typical,
)
from ridgeline.kernels.quantize_fp8 import cost as quantize_cost
from ridgeline.kernels.quantize_fp8 import quantized

_FORMAT = "e4m3"
_X2 = 9  # its place among the arguments behind x


def fits(x: Tensor, groups: int, *, quads: bool, x2: Tensor | None = None) -> bool:
    """Whether `plan` takes a call with an x and groups that group_norm_silu takes."""
    if quads and why_not(*x.shape[2:]) is not None:
        return False
    gamma = x.new_empty(whole(x, x2).shape[1])
    return default_config(Call(x, gamma, gamma, groups=groups, x2=x2), quads, target_of(x)) is not None


def whole(x: Tensor, x2: Tensor | None) -> Tensor:
    """A tensor of the shape of the map that is normalised, without memory of that size where there are two."""
    n, c, h, w = x.shape
    return x if x2 is None else x.new_empty(()).expand(n, c + x2.shape[1], h, w)


def reference(
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
    x2: Tensor | None = None,
    *,
    groups: int,
    row: int,
    quads: bool = False,  # noqa: ARG001
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Tensor:
    """y8 alone; of float64 what FP8 rounds, for judging what rounding does."""
    y = _wide(x, gamma, beta, scale, shift, seed, offset, x2, groups=groups, eps=eps, act=act, p=p)
    return quantized(y, fp8_scale[row], fp8_format=_FORMAT)[0]


def _wide(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    x2: Tensor | None,
    **choices: Any,
) -> Tensor:
    """The value that is quantised: of the norm in fp32, in float64 of such an x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    second = None if x2 is None else x2.to(wide)
    return group_norm_silu.reference(x.to(wide), gamma, beta, scale, shift, seed, offset, second, **choices)


def cost(
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
    x2: Tensor | None = None,
    *,
    groups: int,
    row: int,
    quads: bool = False,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> Cost:
    """The norm's reads and FLOPs, then what quantising adds to them and writes."""
    norm = group_norm_silu.cost(x, gamma, beta, scale, shift, seed, offset, x2, groups=groups, eps=eps, act=act, p=p)
    x = whole(x, x2)
    one = quantize_cost(x, fp8_scale, amax, counts, row=row, fp8_format=_FORMAT, quads=quads)
    return Cost(norm.flops + one.flops, norm.read_bytes + one.read_bytes - x.nbytes, one.write_bytes)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then other valid slabs, those nearest to it first."""
    call = Fp8Call(**arguments)
    default = _default(call, target or target_of(call.x))
    slabs = (Config(k, w) for k in range(1, call.groups + 1) if call.groups % k == 0 for w in WARPS)
    return nearest_first(default, [config for config in slabs if config.is_valid(call, call.quads)])


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch, whose arguments are all that it writes; its `words_ptr` are those of the quads. Runs nothing."""
    call = Fp8Call(**arguments)
    target = target or target_of(call.x)
    check(call.x, _FORMAT, target)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(call, call.quads), **as_filed(arguments))
        config = tuned or _default(call, target)
    if not config.is_valid(call, call.quads):
        call.refuse(f"{config} is not valid for {call.groups} groups of {call.shape}")
    n, c, h, w = call.shape
    y = empty_y(whole(call.x, call.x2), _FORMAT)
    assert call.amax is not None  # as Fp8Call has checked
    tiling = config.slab(call).constants(call)
    constants = {
        "C1": call.x.shape[1],
        **tiling,
        "BLOCK_P": config.rows(call),
        "PIECES": config.pieces(call, call.quads),
        "W": w,
    }
    words = call.x.new_empty(quads_shape(n, c, h, w, beside=True)[:5], dtype=torch.int32) if call.quads else None
    return BoundedLaunch(
        forward_fp8_kernel,
        grid=(config.programs(call),),
        arguments={
            **call.maps(),
            **call.parameters(),
            "fp8_scale_ptr": call.fp8_scale,
            "y_ptr": y,
            "words_ptr": words,
            "amax_ptr": call.amax.view(torch.int32),
            "counts_ptr": call.counts,
            "row": call.row,
        },
        constants={**constants, **call.constants()},
        num_warps=config.num_warps,
        num_stages=1,
        output=y,
        # left alone, the compiler draws random bits early, in up to 255 registers
        max_registers=config.max_registers(call, call.quads),
    )


def _default(call: Fp8Call, target: Target) -> Config:
    config = default_config(call, call.quads, target)
    if config is None:
        pieces = " and quarters of it in pieces of whole rows" if call.quads else ""
        call.refuse(f"no program holds a group of {call.group_channels} channels of {call.pixels} pixels{pieces}")
    return config


def group_norm_silu_fp8(
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
    x2: Tensor | None = None,
    *,
    groups: int,
    row: int,
    quads: bool = False,
    eps: float = 1e-5,
    act: str = "silu",
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    norm: dict[str, Any] = {"x": x, "gamma": gamma, "beta": beta, "scale": scale, "shift": shift}
    norm |= {"seed": seed, "offset": offset, "x2": x2, "groups": groups, "eps": eps, "act": act, "p": p}
    # `data` has a version of its own, so that autograd sees no change
    launch = plan(**norm, fp8_scale=fp8_scale, amax=amax.data, counts=counts.data, row=row, quads=quads)
    y = launch.output
    if y.numel():
        check_launchable("group_norm_silu_fp8", launch.kernel, y)
        launch.run()
    words = launch.arguments["words_ptr"]
    if not isinstance(words, Tensor):
        return y, y.new_empty(0)
    return y, words.view(y.dtype).view(quads_shape(*y.shape, beside=True))


def on_cpu(
    x: Tensor, gamma: Tensor, beta: Tensor, fp8_scale: Tensor, amax: Tensor, counts: Tensor, *others: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    names = ("scale", "shift", "seed", "offset", "x2")
    given: dict[str, Any] = {**dict(zip(names, others, strict=False)), **kwargs}
    call = Fp8Call(x=x, gamma=gamma, beta=beta, fp8_scale=fp8_scale, amax=amax, counts=counts, **given)
    _default(call, target_of(x))
    y8, peak, seen = quantized(_wide(**call.norm), fp8_scale[call.row], fp8_format=_FORMAT)
    # maximum keeps NaN, as the order of bits does
    amax.data[call.row] = torch.maximum(amax[call.row], peak[0])
    counts.data[call.row] += seen[0]
    y8 = y8.contiguous(memory_format=torch.channels_last)
    return y8, to_quads(y8, beside=True) if call.quads else y8.new_empty(0)


def _fake(
    x: Tensor, *others: Any, x2: Tensor | None = None, quads: bool = False, **_kwargs: Any
) -> tuple[Tensor, Tensor]:
    y = empty_y(whole(x, others[_X2] if len(others) > _X2 else x2), _FORMAT)
    return y, y.new_empty(quads_shape(*y.shape, beside=True) if quads else 0)


def fp8_sample(why: str, x: tuple[int, int, int, int], groups: int, *, quads: bool = True, **options: Any) -> Sample:
    """A `norm_sample` with the state of one tensor, of whose values some saturate and some vanish."""
    norm = norm_sample(why, x, groups, **options)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        given = norm.arguments(dtype, device)
        return {**given, **state_of_one(given["x"], 136.0), "quads": quads}

    return replace(norm, arguments=arguments)


SAMPLES = (
    fp8_sample("odd map, odd channels, no activation", (2, 15, 3, 7), 3, quads=False, act="none"),
    fp8_sample("a quarter of four pixels, two images", (2, 64, 4, 4), 8),
    fp8_sample("scale, shift and dropout", (2, 32, 8, 8), 4, scale=True, p=0.25),
    fp8_sample("two maps, a group of both", (1, 96, 8, 8), 8, second=32),
    *(
        fp8_sample(f"UNet {side}x{side} {c}, batch 128", (128, c, side, side), 32, real_size=True)
        for c, side in UNET_MAPS
    ),
    fp8_sample("UNet 32x32 256 + 128, two maps", (128, 384, 32, 32), 32, second=128, real_size=True),
    fp8_sample("UNet 32x32 128, y alone", (128, 128, 32, 32), 32, quads=False, real_size=True),
    fp8_sample("UNet 16x16 256, scale, shift and dropout", (128, 256, 16, 16), 32, scale=True, p=0.1, real_size=True),
)

OP = Op(
    name="group_norm_silu_fp8",
    call=register(group_norm_silu_fp8, fake=_fake, on_cpu=on_cpu, cost=cost),
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates, typical=typical),
    samples=SAMPLES,
    dtypes=FLOATS,
    error_factor=2.0,
    into=None,
)
