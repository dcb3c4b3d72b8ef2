"""Two 3x3 convolutions, one behind the other, and the 1x1 convolutions behind them, one kernel.

inner     = act_inner(conv2d(x, inner_weight) + inner_bias)
value_0   = act_0(conv2d(inner, weight) + bias) + residual
value_i   = act_i(weights_i · [value_(i-1), extras_i] + biases_i) + value_(skips_i)    i = 1 … up to 3;  y = value_last

x             [N, C, H, W]       channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16
inner_weight  [KI, C, 3, 3]      channels_last
inner_bias    [KI]               fp32 or the dtype of x; None: no bias
weight        [K0, KI, 3, 3]     channels_last
bias          [K0]               as inner_bias
residual      [N, K0, H, W]      as x; added after the second activation; may be x itself
weights, biases, extras, skips   the tails, none to three, as in conv_chain; skips count from value_0
acts          the activation of every stage, the inner's first, "silu" or "none", separated by spaces
y             [N, K, H, W]       channels_last, dtype of x
precision, pdl                   as in conv2d_act; "tf32" needs weights that were rounded, see `_nhwc.round_to_tf32`

Both convolutions have stride 1 and padding 1. Accumulates in fp32; a value is rounded to the dtype of x between two
stages, as if it had been stored. An infinity or NaN in `inner` makes NaN of all pixels whose program computes it.
Raises ValueError or TypeError for any other layout, dtype or choice.

A program computes the inner value around its tile anew: 36 pixels for 16, 100 for 64. That is paid in arithmetic, of
which small maps leave plenty idle, for one launch less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_forward
from ridgeline.kernels import conv_chain
from ridgeline.kernels._conv import FLOATS, padded, reduction_step
from ridgeline.kernels._conv_chain_call import choose
from ridgeline.kernels._conv_pair_chain import conv_pair_chain_kernel
from ridgeline.kernels._conv_pair_chain_call import PairProblem
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, random_nhwc, tf32_rounding
from ridgeline.kernels._op import (
    Launch,
    Launcher,
    Sample,
    Target,
    define,
    execute,
    nearest_first,
    target_of,
    tuned_config,
)

_MAX_ACCUMULATORS = 64  # fp32 a thread
_MAX_OPERANDS = 160  # registers a thread for what is loaded ahead
_TILES = {16: (4, 4), 32: (8, 4), 64: (8, 8)}  # height and width by block_m


def reference(
    x: Tensor,
    inner_weight: Tensor,
    inner_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    *,
    acts: str,
    skips: Sequence[int],
    precision: str = "tf32",  # noqa: ARG001 - a choice of arithmetic, not of meaning
    pdl: bool = False,  # noqa: ARG001 - a choice of scheduling
) -> Tensor:
    act, _, others = acts.partition(" ")
    inner = F.conv2d(x, inner_weight, None if inner_bias is None else inner_bias.to(x.dtype), padding=1)
    inner = F.silu(inner) if act == "silu" else inner
    tails = (weights, biases, extras)
    return conv_chain.reference(
        inner, weight, bias, residual, *tails, stride=(1, 1), padding=(1, 1), acts=others, skips=skips
    )


def cost(
    x: Tensor,
    inner_weight: Tensor,
    inner_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    *,
    acts: str,  # noqa: ARG001
    skips: Sequence[int],  # noqa: ARG001
    precision: str = "tf32",
    pdl: bool = False,  # noqa: ARG001
) -> Cost:
    """The FLOPs of all products, none counted twice; every input is read once and nothing in between is written."""
    n, c, h, w = x.shape
    first = conv_forward(ConvProblem(n, c, inner_weight.shape[0], (h, w), (3, 3), (1, 1), (1, 1)), x.dtype)
    others = (inner_bias, weight, bias, residual, *weights, *biases, *extras)
    flops = first.flops + sum(2 * n * h * w * t.numel() for t in (weight, *weights))
    read_bytes = x.nbytes + inner_weight.nbytes + sum(t.nbytes for t in others if t is not None and t is not x)
    channels = (weight, *weights)[-1].shape[0]
    pipe = "cuda_fp32" if x.dtype == torch.float32 and precision == "ieee" else first.pipe
    return Cost(flops, read_bytes, n * h * w * channels * x.element_size(), pipe)


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_n channels of the last stage; block_k of a reduction a step.

    num_stages steps of the inner convolution are loaded ahead; 1: all of it, held in registers. early: so are the
    operands of all that follows.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    early: bool

    def is_valid(self, problem: PairProblem, target: Target) -> bool:
        """Whether it compiles, fits the target's shared memory and keeps its values and operands in registers."""
        if self.block_m not in _TILES:
            return False
        threads, size, halo = 32 * self.num_warps, problem.x.element_size(), _halo(self.block_m)
        inner, columns = padded(problem.inner_channels), problem.columns(self.block_n)
        ends_in_skip = bool(problem.skips) and problem.skips[-1] >= 0
        steps = cdiv(9 * problem.x.shape[1], self.block_k) if self.num_stages == 1 else self.num_stages
        shared = steps * (halo + inner) * self.block_k + 9 * (self.block_m * halo + inner * columns[0])
        shared += problem.tail_elements(self.block_m, self.block_n, self.block_k) if self.early else 0
        return (
            all(block >= 16 and block & (block - 1) == 0 for block in (self.block_n, self.block_k))
            and self.num_warps in (1, 2, 4, 8)
            and self.num_stages >= 1
            # a value that the last stage adds has all its columns
            and (not ends_in_skip or self.block_n == padded(problem.channels[-1]))
            and max(halo * inner, 8 * self.block_m * inner, self.block_m * max(columns)) <= _MAX_ACCUMULATORS * threads
            # what selects rows is made in registers, long before the rest is loaded
            and max(9 * self.block_m * halo, self._held_elements(problem)) * size <= 4 * _MAX_OPERANDS * threads
            and shared * size <= target.shared_bytes
        )

    def _held_elements(self, problem: PairProblem) -> int:
        """Of operands that are loaded before they are needed."""
        inner, count = padded(problem.inner_channels), 0
        if self.num_stages == 1:
            count += cdiv(9 * problem.x.shape[1], self.block_k) * self.block_k * (_halo(self.block_m) + inner)
        if self.early:
            count += 9 * inner * problem.columns(self.block_n)[0]
            count += problem.tail_elements(self.block_m, self.block_n, self.block_k)
        return count


def default_config(problem: PairProblem, target: Target) -> Config:
    """The most pixels that still give every second multiprocessor a program, with all columns of the last stage.

    Where pixels are too few for that, its columns are dealt out. Operands are loaded early if registers hold them.
    """
    config = choose(problem, _likely(problem), partial(_programs, problem), target)
    if config is None:
        channels = (problem.inner_channels, *problem.channels)
        problem.refuse(f"channels {channels} are too many for {target.arch}: run them one by one")
    return config


def fits(*, target: Target | None = None, **arguments: Any) -> bool:
    """Whether a config is valid for this call: registers or shared memory may not hold its values."""
    problem = PairProblem(**arguments)
    target = target or target_of(problem.x)
    return any(config.is_valid(problem, target) for config in _likely(problem))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing: the nearest first, of those what fills the GPU best."""
    problem = PairProblem(**arguments)
    target = target or target_of(problem.x)
    valid = [config for config in _likely(problem) if config.is_valid(problem, target)]
    valid.sort(key=lambda config: abs(_programs(problem, config) / target.sm_count - 1))
    return nearest_first(default_config(problem, target), valid)[: 1 + _MOST_CANDIDATES]


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are PairProblem's. Runs nothing."""
    problem = PairProblem(**arguments)
    target = target or target_of(problem.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        channels = (problem.inner_channels, *problem.channels)
        raise ValueError(f"conv_pair_chain: {config} is not valid for channels {channels} on {target.arch}")
    y = problem.output()
    operands = {
        **problem.arguments(y),
        "weight_inner_ptr": problem.inner_weight,
        "bias_inner_ptr": problem.inner_bias,
        **problem.tail_operands,
    }
    del operands["pixels"]  # the grid says it
    tile_h, tile_w = _TILES[config.block_m]
    return Launch(
        kernel=conv_pair_chain_kernel,
        grid=(_programs(problem, config),),
        arguments=operands,
        constants={
            **problem.constants(y),
            **problem.stage_constants(problem.columns(config.block_n)),
            "BI": padded(problem.inner_channels),
            "INNER_ACT": problem.acts.split()[0],
            "TAILS": len(problem.weights),
            "PRECISION": problem.precision,
            "ROUNDING": tf32_rounding(problem.x, problem.precision, target),
            "UNROLL": config.num_stages == 1,
            "EARLY": config.early,
            "TILE_H": tile_h,
            "TILE_W": tile_w,
            "HALO": _halo(config.block_m),
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=y,
        pdl=problem.pdl,
    )


def conv_pair_chain(
    x: Tensor,
    inner_weight: Tensor,
    inner_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    *,
    acts: str,
    skips: Sequence[int],
    precision: str = "tf32",
    pdl: bool = False,
) -> Tensor:
    both = {"inner_weight": inner_weight, "inner_bias": inner_bias, "weight": weight, "bias": bias}
    tails = {"weights": weights, "biases": biases, "extras": extras, "skips": skips, "acts": acts}
    launch = plan(x=x, residual=residual, **both, **tails, precision=precision, pdl=pdl)
    return execute("conv_pair_chain", launch, x)


_MOST_CANDIDATES = 40  # beside the default


def _likely(problem: PairProblem) -> list[Config]:
    """Tiles of most pixels first, then narrower last stages; of each, what loads most ahead first."""
    widest = padded(problem.channels[-1])
    block_k = reduction_step(problem.x.shape[1], 9, problem.x.element_size())
    columns = [widest, *(n for n in (128, 64, 32, 16) if n < widest)]
    variants = [(w, s, early) for early in (True, False) for s in (1, 3) for w in (4, 8)]
    return [Config(m, n, block_k, *variant) for m in (64, 32, 16) for n in columns for variant in variants]


def _halo(block_m: int) -> int:
    """Rows of a product that hold a tile and one pixel on each side."""
    tile_h, tile_w = _TILES[block_m]
    return next_power_of_2((tile_h + 2) * (tile_w + 2))


def _programs(problem: PairProblem, config: Config) -> int:
    n, _, h, w = problem.out_shape
    tile_h, tile_w = _TILES[config.block_m]
    return n * cdiv(h, tile_h) * cdiv(w, tile_w) * cdiv(problem.channels[-1], config.block_n)


def _sample(
    why: str, x: tuple[int, int, int, int], inner: int, outer: int, tails: str = "", *, real_size: bool = False,
    **choices: Any,
) -> Sample:  # fmt: skip
    """`inner` and `outer` filters; tails as in `conv_chain.tail_arguments`; all SiLU unless `acts` is given."""
    with_residual, with_bias = choices.pop("residual", False), choices.pop("bias", True)
    acts = choices.pop("acts", " ".join(["silu"] * (2 + len(tails.split()))))

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        n, c, h, w = x

        def bias(channels: int, seed: int) -> Tensor | None:
            made = random_nhwc((1, channels, 1, 1), torch.float32, device, seed=seed).flatten()
            return made if with_bias else None

        # variance 1 in the output, as in a trained network
        return {
            "x": random_nhwc(x, dtype, device, seed=0),
            "inner_weight": random_nhwc((inner, c, 3, 3), dtype, device, seed=1) * (9 * c) ** -0.5,
            "inner_bias": bias(inner, 2),
            "weight": random_nhwc((outer, inner, 3, 3), dtype, device, seed=4) * (9 * inner) ** -0.5,
            "bias": bias(outer, 5),
            "residual": random_nhwc((n, outer, h, w), dtype, device, seed=3) if with_residual else None,
            **conv_chain.tail_arguments(tails, (n, outer, h, w), dtype, device, with_bias=with_bias),
            "acts": acts,
            **choices,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("no tail, residual", (1, 16, 6, 5), 16, 16, residual=True),
    _sample("two tails with other maps", (1, 16, 5, 5), 8, 16, "32+16 24+32", residual=True),
    _sample("three tails with a skip", (1, 8, 4, 4), 16, 16, "32 16^0 32+16", acts="none silu none silu none"),
    _sample("two images, no activation", (2, 8, 5, 4), 8, 24, acts="none none"),
    _sample("odd channels, no bias", (1, 7, 5, 6), 5, 3, "9+3 6", bias=False),
    _sample("strict fp32 products", (1, 16, 5, 5), 16, 16, "16+16", precision="ieee"),
    _sample("YOLO26n C3k bottleneck, 40x40", (1, 32, 40, 40), 32, 32, residual=True, real_size=True),
    _sample(
        "YOLO26n C3k with its tail, 40x40", (1, 32, 40, 40), 32, 32, "64+32 128+128", residual=True, real_size=True
    ),
    _sample("YOLO26n C3k bottleneck, 20x20", (1, 64, 20, 20), 64, 64, residual=True, real_size=True),
    _sample("YOLO26n bottleneck, 20x20", (1, 64, 20, 20), 128, 64, residual=True, real_size=True),
    _sample("YOLO26n box branch, 80x80", (1, 16, 80, 80), 16, 16, real_size=True),
    _sample("YOLO26n bottleneck, 160x160", (1, 16, 160, 160), 8, 16, residual=True, real_size=True),
)

OP = define(
    conv_pair_chain,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    stores_into=True,
)
