"""A convolution and the 1x1 convolutions behind it, one kernel: what lies between them never leaves the multiprocessor.

value_0 = act_0(conv2d(x, weight) + bias) + residual
value_i = act_i(weights_i · [value_(i-1), extras_i] + biases_i) + value_(skips_i)      i = 1 … up to 3;  y = value_last

x         [N, C, H, W]        channels_last, or a channel slice of a channels_last tensor; fp32, fp16, bf16
weight    [K0, C, R, S]       channels_last (groups = 1), or [C, 1, R, S] stored as [R, S, C] (depthwise, K0 = C)
bias      [K0]                fp32 or the dtype of x; None: no bias
residual  [N, K0, HO, WO]     as x; added after the first activation; may be x itself
weights   [Ki, K(i-1) + Ei, 1, 1] each, contiguous; the columns for value_(i-1) come first
biases    [Ki] each, or None
extras    [N, Ei, HO, WO] each, as x: maps concatenated behind value_(i-1); None where Ei = 0
skips     the earlier stage whose value is added, or -1
acts      the activation of every stage, "silu" or "none", separated by spaces
y         [N, K, HO, WO]      channels_last, dtype of x
precision, pdl                as in conv2d_act; "tf32" needs weights that were rounded, see `_nhwc.round_to_tf32`

Accumulates in fp32; a value is rounded to the dtype of x between two stages, as if it had been stored. Dilation is 1.
Raises ValueError or TypeError for any other layout, dtype or choice.

A 1x1 convolution needs, of all that came before, its own pixel alone, so a program can go through the whole chain with
a few pixels and all channels. It trades bandwidth of the L2 (every program reads every weight) for launches: right for
maps of few channels, where a launch waits longer for its predecessor than it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem, conv_forward, problem_of
from ridgeline.kernels import depthwise_conv2d_act
from ridgeline.kernels._conv import FLOATS, padded, reduction_step
from ridgeline.kernels._conv_chain import conv_chain_kernel
from ridgeline.kernels._conv_chain_call import Problem, choose
from ridgeline.kernels._nhwc import cdiv, random_nhwc, tf32_rounding
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
_MAX_OPERANDS = 128  # registers a thread for what is loaded ahead


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    acts: str,
    skips: Sequence[int],
    precision: str = "tf32",  # noqa: ARG001 - a choice of arithmetic, not of meaning
    pdl: bool = False,  # noqa: ARG001 - a choice of scheduling
) -> Tensor:
    first, *others = acts.split()
    # one filter a channel; with one channel of x the plain convolution does the same
    convolve = depthwise_conv2d_act.convolve if weight.shape[:2] == (x.shape[1], 1) else F.conv2d
    value = convolve(x, weight, _cast(bias, x), stride, padding)
    value = F.silu(value) if first == "silu" else value
    values = [value if residual is None else value + residual]
    for tail, tail_bias, extra, act, skip in zip(weights, biases, extras, others, skips, strict=True):
        source = values[-1] if extra is None else torch.cat((values[-1], extra), dim=1)
        value = F.conv2d(source, tail, _cast(tail_bias, x))
        value = F.silu(value) if act == "silu" else value
        values.append(value if skip < 0 else value + values[skip])
    return values[-1]


def cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    acts: str,  # noqa: ARG001
    skips: Sequence[int],  # noqa: ARG001
    precision: str = "tf32",
    pdl: bool = False,  # noqa: ARG001
) -> Cost:
    """The FLOPs of all products; every input is read once and nothing in between is written."""
    conv = problem_of(x, weight, stride, padding, (1, 1), x.shape[1] // weight.shape[1])
    first = conv_forward(conv, x.dtype)
    pixels = conv.n * conv.oh * conv.ow
    others = [t for t in (bias, residual, *weights, *biases, *extras) if t is not None and t is not x]
    flops = first.flops + sum(2 * pixels * tail.numel() for tail in weights)
    read_bytes = x.nbytes + weight.nbytes + sum(t.nbytes for t in others)
    pipe = "cuda_fp32" if x.dtype == torch.float32 and precision == "ieee" else first.pipe
    return Cost(flops, read_bytes, pixels * weights[-1].shape[0] * x.element_size(), pipe)


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m pixels x block_n channels of the last stage; block_k of a reduction a step.

    num_stages steps are loaded ahead; 1: all of stage 0, held in registers. early: so are the tails' operands.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    early: bool

    def is_valid(self, problem: Problem, target: Target) -> bool:
        """Whether it compiles, fits the target's shared memory and keeps its values and operands in registers."""
        threads, size = 32 * self.num_warps, problem.x.element_size()
        columns = problem.columns(self.block_n)
        blocks = (self.block_m, self.block_n, self.block_k)
        held = self._held_elements(problem) * size
        step = self.num_stages * (self.block_m + max(columns)) * self.block_k
        return (
            all(block >= 16 and block & (block - 1) == 0 for block in blocks)
            and self.num_warps in (1, 2, 4, 8)
            and self.num_stages >= 1
            # a value that the last stage adds has all its columns
            and (problem.skips[-1] < 0 or self.block_n == padded(problem.channels[-1]))
            and self.block_m * max(columns) <= _MAX_ACCUMULATORS * threads
            and held <= 4 * _MAX_OPERANDS * threads
            and max(step, self._tail_shared_elements(problem)) * size <= target.shared_bytes
        )

    def _tail_shared_elements(self, problem: Problem) -> int:
        """What the tail that needs most holds in shared memory at once; never less than the compiler was seen to take.

        Its weight for the value waits there while the loop over other maps has its own operands in flight, of which
        matrix instructions that read shared memory themselves (wgmma, from 64 rows on) keep one more.
        """
        columns = problem.columns(self.block_n)
        ahead = max(1, self.num_stages if self.block_m >= 64 else self.num_stages - 1)
        most = 0
        for (b_in, b_out), extra in zip(pairwise(columns), problem.extra_channels, strict=True):
            looped = ahead * (self.block_m + b_out) * self.block_k + self.block_m * b_in
            beside = looped if extra and not self.early else self.block_m * max(columns)
            most = max(most, b_in * b_out + beside)
        return most

    def _held_elements(self, problem: Problem) -> int:
        """Of operands that are loaded before they are needed."""
        columns, conv, count = problem.columns(self.block_n), problem.conv, 0
        if problem.depthwise:
            count += conv.taps * columns[0]
        elif self.num_stages == 1:
            count += cdiv(conv.c * conv.taps, self.block_k) * self.block_k * (self.block_m + columns[0])
        if self.early:
            count += problem.tail_elements(self.block_m, self.block_n, self.block_k)
        return count


def default_config(problem: Problem, target: Target) -> Config:
    """The most pixels that still give every second multiprocessor a program, with all columns of the last stage.

    Where pixels are too few for that, its columns are dealt out. Operands are loaded early if registers hold them.
    """
    config = choose(problem, _likely(problem), partial(_programs, problem), target)
    if config is None:
        problem.refuse(f"channels {problem.channels} are too many for {target.arch}: run them one by one")
    return config


def fits(*, target: Target | None = None, **arguments: Any) -> bool:
    """Whether a config is valid for this call: registers or shared memory may not hold its values."""
    problem = Problem(**arguments)
    return any(config.is_valid(problem, target or target_of(problem.x)) for config in _likely(problem))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing: the nearest first, of those what fills the GPU best."""
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    default, widest = default_config(problem, target), padded(problem.channels[-1])
    block_k = default.block_k
    columns = sorted({min(n, widest) for n in (32, 64, 128, 256)})
    variants = [(w, s, early) for early in (True, False) for w, s in ((4, 1), (8, 1), (4, 3), (8, 3), (2, 3))]
    tried = [Config(m, n, block_k, *variant) for m in (16, 32, 64) for n in columns for variant in variants]
    valid = [config for config in tried if config.is_valid(problem, target)]
    valid.sort(key=lambda config: abs(_programs(problem, config) / target.sm_count - 1))
    return nearest_first(default, valid)[: 1 + _MOST_CANDIDATES]


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> Launch:
    """The launch for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.x)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"conv_chain: {config} is not valid for channels {problem.channels} on {target.arch}")
    y = problem.output()
    return Launch(
        kernel=conv_chain_kernel,
        grid=(_programs(problem, config),),
        arguments={**problem.arguments(y), **problem.tail_operands},
        constants={
            **problem.constants(y),
            **problem.stage_constants(problem.columns(config.block_n)[:-1]),
            "TAILS": len(problem.weights),
            "DEPTHWISE": problem.depthwise,
            "PRECISION": problem.precision,
            "ROUNDING": tf32_rounding(problem.x, problem.precision, target),
            "UNROLL": config.num_stages == 1,
            "EARLY": config.early,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        output=y,
        pdl=problem.pdl,
    )


def conv_chain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    acts: str,
    skips: Sequence[int],
    precision: str = "tf32",
    pdl: bool = False,
) -> Tensor:
    tails = {"weights": weights, "biases": biases, "extras": extras, "skips": skips, "acts": acts}
    choices = {"stride": stride, "padding": padding, "precision": precision, "pdl": pdl}
    return execute("conv_chain", plan(x=x, weight=weight, bias=bias, residual=residual, **tails, **choices), x)


_MOST_CANDIDATES = 40  # beside the default
_SHORT_BYTES = 640  # of a reduction that is loaded at once


def _cast(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(like.dtype)


def _likely(problem: Problem) -> list[Config]:
    """Tiles of most pixels first, then narrower last stages; of each, what loads most ahead first."""
    block_k, widest = _block_k(problem), padded(problem.channels[-1])
    # a thread holds nine taps of a depthwise filter beside its sums
    rows = (32, 16) if problem.depthwise else (64, 32, 16)
    tiles = [(m, widest) for m in rows] + [(16, n) for n in (128, 64, 32, 16) if n < widest]
    short = problem.conv.c * problem.conv.taps * problem.x.element_size() <= _SHORT_BYTES
    stages = (1, 3, 2) if short or problem.depthwise else (3, 2, 1)
    variants = [(w, s, early) for early in (True, False) for s in stages for w in (4, 8)]
    return [Config(m, n, block_k, *variant) for m, n in tiles for variant in variants]


def _block_k(problem: Problem) -> int:
    """What suits the convolution; behind a depthwise one, which reduces no channels, a full row for the tails."""
    conv, element_size = problem.conv, problem.x.element_size()
    return 128 // element_size if problem.depthwise else reduction_step(conv.c, conv.taps, element_size)


def _programs(problem: Problem, config: Config) -> int:
    return cdiv(problem.pixels, config.block_m) * cdiv(problem.channels[-1], config.block_n)


def tail_arguments(
    tails: str, value: tuple[int, int, int, int], dtype: torch.dtype, device: str, *, with_bias: bool
) -> dict[str, Any]:
    """Sample tails behind a value of that shape: "channels" or "channels+extra" a stage, with "^stage" for a skip."""
    parts = [part.partition("^") for part in tails.split()]
    counts = [tuple(int(number) for number in f"{sizes}+0".split("+")[:2]) for sizes, _, _ in parts]
    weights, biases, extras = [], [], []
    n, channels, height, width = value
    for i, (out, extra) in enumerate(counts):
        tail = random_nhwc((out, channels + extra, 1, 1), dtype, device, seed=10 + i) * (channels + extra) ** -0.5
        weights.append(tail.contiguous())
        biases.append(random_nhwc((1, out, 1, 1), torch.float32, device, seed=20 + i).flatten() if with_bias else None)
        extras.append(random_nhwc((n, extra, height, width), dtype, device, seed=30 + i) if extra else None)
        channels = out
    skips = [int(skip or -1) for _, _, skip in parts]
    return {"weights": weights, "biases": biases, "extras": extras, "skips": skips}


def _sample(
    why: str,
    x: tuple[int, int, int, int],
    krs: tuple[int, int, int],
    tails: str,
    *,
    real_size: bool = False,
    **choices: Any,
) -> Sample:
    """`tails` as in `tail_arguments`; `acts` all SiLU unless given."""
    (k, r, s), stride = krs, choices.pop("stride", 1)
    depthwise, with_residual = choices.pop("depthwise", False), choices.pop("residual", False)
    with_bias = choices.pop("bias", True)
    acts = choices.pop("acts", " ".join(["silu"] * (1 + len(tails.split()))))

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        groups = x[1] if depthwise else 1
        conv = ConvProblem(x[0], x[1], k, x[2:], (r, s), (stride, stride), (r // 2, s // 2), groups=groups)
        # variance 1 in the output, as in a trained network
        weight = random_nhwc((k, x[1] // groups, r, s), dtype, device, seed=1) * (x[1] // groups * r * s) ** -0.5
        value = (x[0], k, conv.oh, conv.ow)
        return {
            "x": random_nhwc(x, dtype, device, seed=0),
            "weight": depthwise_conv2d_act.pack(weight) if depthwise else weight,
            "bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=2).flatten() if with_bias else None,
            "residual": random_nhwc(value, dtype, device, seed=3) if with_residual else None,
            **tail_arguments(tails, value, dtype, device, with_bias=with_bias),
            "stride": (stride, stride),
            "padding": (r // 2, s // 2),
            "acts": acts,
            **choices,
        }

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("3x3, residual, two tails with other maps", (1, 16, 6, 5), (16, 3, 3), "32+16 24+32", residual=True),
    _sample("1x1 chain of four with a skip", (1, 16, 5, 5), (16, 1, 1), "32 16^0 32+16", acts="none silu none silu"),
    _sample("depthwise, then 1x1 twice", (1, 24, 6, 7), (24, 3, 3), "40 40", depthwise=True, acts="silu silu none"),
    _sample("stride 2, two images", (2, 8, 9, 8), (16, 3, 3), "16", stride=2),
    _sample("odd channels, no bias", (1, 7, 5, 6), (5, 3, 3), "9+3 6", bias=False),
    _sample("a skip at the end", (1, 16, 4, 4), (32, 1, 1), "16 32^0"),
    _sample("strict fp32 products", (1, 16, 5, 5), (16, 3, 3), "16+16", precision="ieee"),
    _sample("YOLO26n C3k tail, 40x40", (1, 32, 40, 40), (32, 3, 3), "64+32 128+128", residual=True, real_size=True),
    _sample(
        "YOLO26n PSA tail, 20x20", (1, 128, 20, 20), (128, 1, 1), "256 128^0 256+128",
        residual=True, acts="none silu none silu", real_size=True,
    ),
    _sample("YOLO26n class branch, 80x80", (1, 64, 80, 80), (64, 3, 3), "80", depthwise=True, real_size=True),
    _sample("YOLO26n 160x160 stride 2, then 1x1", (1, 16, 320, 320), (32, 3, 3), "32", stride=2, real_size=True),
)  # fmt: skip

OP = define(
    conv_chain,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
    stores_into=True,
)
