"""One call of conv_chain, checked; the kernel's file says what its arguments are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ridgeline.kernels._conv import INT32_ELEMENTS, ConvCall, padded
from ridgeline.kernels._nhwc import ACTIVATIONS, cdiv, check_map, pixel_pitch, share_elements
from ridgeline.kernels._op import Target
from ridgeline.kernels.conv2d_act import PRECISIONS
from ridgeline.kernels.depthwise_conv2d_act import is_packed

MOST_TAILS = 3
WIDEST = 256  # channels of a value: what a program holds in registers


@dataclass(frozen=True)
class Problem(ConvCall):
    """One call, checked."""

    name = "conv_chain"
    convolutions: ClassVar[int] = 1  # in front of the tails

    weights: Sequence[Tensor] = ()
    biases: Sequence[Tensor | None] = ()
    extras: Sequence[Tensor | None] = ()
    acts: str = ""
    skips: Sequence[int] = ()
    precision: str = "tf32"

    def check_weight(self) -> None:
        x, count, acts = self.x, len(self.weights), self.acts.split()
        if self.precision not in PRECISIONS:
            self.refuse(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        fewest = 2 - self.convolutions
        if not fewest <= count <= MOST_TAILS or {len(self.biases), len(self.extras), len(self.skips)} != {count}:
            self.refuse(
                f"needs {fewest} to {MOST_TAILS} tails, and as many biases, extras and skips, got {count} weights"
            )
        if len(acts) != count + self.convolutions or not set(acts) <= set(ACTIVATIONS):
            self.refuse(f"acts must name {count + self.convolutions} of {', '.join(ACTIVATIONS)}, got {self.acts!r}")
        if not all(-1 <= skip <= i and (skip < 0 or self._agrees(i, skip)) for i, skip in enumerate(self.skips)):
            self.refuse(f"skips must each be -1 or an earlier stage with as many channels, got {tuple(self.skips)}")
        self.check_filters()
        if max(self.channels[:-1], default=0) > WIDEST:
            self.refuse(f"a value between two stages must have at most {WIDEST} channels, got {self.channels}")
        for i, (tail, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            wanted = (self.channels[i + 1], self.channels[i] + self.extra_channels[i], 1, 1)
            if tuple(tail.shape) != wanted or not tail.is_contiguous() or tail.dtype != x.dtype:
                self.refuse(f"weights[{i}] must be contiguous {x.dtype} of shape {wanted}, got {tuple(tail.shape)}")
            if bias is not None and (bias.shape != wanted[:1] or bias.dtype not in (torch.float32, x.dtype)):
                self.refuse(f"biases[{i}] must have shape {wanted[:1]}, got {tuple(bias.shape)}, {bias.dtype}")

    def check_filters(self) -> None:
        """Refuse a filter in front of the tails that this kernel cannot read."""
        x, weight = self.x, self.weight
        packed = is_packed(weight) if self.depthwise else weight.is_contiguous(memory_format=torch.channels_last)
        if 0 in weight.shape or not packed or (not self.depthwise and weight.shape[1] != x.shape[1]):
            self.refuse(
                f"weight must be channels_last of {x.shape[1]} channels, or a packed depthwise filter, "
                f"got {tuple(weight.shape)} with strides {weight.stride()}"
            )

    @property
    def tail_operands(self) -> dict[str, Tensor | None]:
        """Run-time parameters of the tails; absent tails have none."""
        numbered = [*zip(self.weights, self.biases, self.extras, strict=True), *((None, None, None),) * MOST_TAILS]
        return {
            f"{name}{i}_ptr": tensor
            for i, tail in enumerate(numbered[:MOST_TAILS], start=1)
            for name, tensor in zip(("weight", "bias", "extra"), tail, strict=True)
        }

    def stage_constants(self, blocks: Sequence[int]) -> dict[str, int | str]:
        """Compile-time parameters of the stages, the tails' padded to three; `blocks` hold stages 0, 1 and 2."""
        pitches = [0 if extra is None else pixel_pitch(extra) or 0 for extra in self.extras]
        per_stage: dict[str, tuple[int, Sequence[int | str], int | str]] = {
            "K": (0, self.channels, 0),
            "B": (0, blocks[:MOST_TAILS], 16),
            "ACT": (0, self.acts.split()[self.convolutions - 1 :], "none"),
            "E": (1, self.extra_channels, 0),
            "PITCH": (1, pitches, 0),
            "SKIP": (1, self.skips, -1),
        }
        constants = {}
        for name, (first, known, fill) in per_stage.items():
            last = MOST_TAILS - 1 if name == "B" else MOST_TAILS
            padded = [*known, *[fill] * (MOST_TAILS + 1)]
            constants |= {f"{name}{i}": padded[i - first] for i in range(first, last + 1)}
        return constants

    def constants(self, y: Tensor) -> dict[str, Any]:
        constants = super().constants(y)
        del constants["ACT"]  # every stage has its own
        pitches = [pixel_pitch(extra) or 0 for extra in self.extras if extra is not None]
        constants["WIDE"] |= self.pixels * max(pitches, default=0) >= INT32_ELEMENTS
        return constants

    @property
    def depthwise(self) -> bool:
        """A filter a channel; with one input channel and one filter both kinds are the same."""
        return self.weight.shape[1] == 1 and self.weight.shape[0] == self.x.shape[1]

    @property
    def channels(self) -> tuple[int, ...]:
        """Of the value of each stage."""
        return (self.weight.shape[0], *(tail.shape[0] for tail in self.weights))

    @property
    def extra_channels(self) -> tuple[int, ...]:
        return tuple(0 if extra is None else extra.shape[1] for extra in self.extras)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        conv = self.conv
        return conv.n, self.channels[-1], conv.oh, conv.ow

    def columns(self, block_n: int) -> tuple[int, ...]:
        """That hold the value of each stage; of the last, block_n are dealt to a program."""
        return (*map(padded, self.channels[:-1]), block_n)

    def tail_elements(self, block_m: int, block_n: int, block_k: int) -> int:
        """Of the tails' weights and extras, as far as a program loads them."""
        count = 0
        for (b_in, b_out), extra in zip(pairwise(self.columns(block_n)), self.extra_channels, strict=True):
            steps = cdiv(extra, block_k) * block_k
            count += (b_in + steps) * b_out + steps * block_m
        return count

    def _agrees(self, tail: int, skip: int) -> bool:
        return self.channels[skip] == self.channels[tail + 1]

    def _check_maps(self) -> None:
        x, (n, _, height, width) = self.x, self.out_shape
        check_map(self.name, "x", x, like=x, shape=tuple(x.shape))
        maps = {"residual": (self.residual, self.channels[0]), "out": (self.out, self.channels[-1])}
        maps |= {
            f"extras[{i}]": (extra, c)
            for i, (extra, c) in enumerate(zip(self.extras, self.extra_channels, strict=True))
        }
        for name, (tensor, channels) in maps.items():
            if tensor is not None:
                check_map(self.name, name, tensor, like=x, shape=(n, channels, height, width))
        for tensor in (x, self.residual, *self.extras):
            if self.out is not None and tensor is not None and share_elements(self.out, tensor):
                self.refuse("out must share no memory with x, residual or extras: other programs still read those")


class Tile(Protocol):
    """What the configs of both ops have in common."""

    def is_valid(self, problem: Any, target: Target) -> bool: ...


Config = TypeVar("Config", bound=Tile)


def choose(
    problem: Problem, configs: Sequence[Config], programs: Callable[[Config], int], target: Target
) -> Config | None:
    """The first valid config that gives every second multiprocessor a program, or the one that gives most programs.

    None where registers or shared memory hold the values of no config.
    """
    valid = [config for config in configs if config.is_valid(problem, target)]
    filling = (config for config in valid if 2 * programs(config) >= target.sm_count)
    return next(filling, max(valid, key=programs, default=None))
