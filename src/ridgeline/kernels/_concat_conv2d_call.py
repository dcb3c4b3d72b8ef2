"""What concat_conv2d and its two gradients check and choose alike: convolutions of two maps, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._conv2d_pass import Pass, pass_of
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Sample

NARROWEST = 16  # channels that one instruction reduces, and of the narrowest tile


def concat_pass(
    name: str, maps: tuple[Tensor, Tensor], k: int, filter_size: Sequence[int], padding: Sequence[int]
) -> Pass:
    """Of the convolution of `maps`, each x or its gradient, side by side. Raises ValueError where they do not fit."""
    first, second = maps
    n, c1, h, w = first.shape
    conv = ConvProblem(n, c1 + second.shape[1], k, (h, w), tuple(filter_size), 1, tuple(padding))
    one = pass_of(name, conv, first.dtype)
    if (second.shape[0], *second.shape[2:]) != (n, h, w):
        one.refuse(f"both maps must have the same images and pixels, got {tuple(first.shape)}, {tuple(second.shape)}")
    if c1 % NARROWEST or second.shape[1] == 0:
        channels = f"{c1} and {conv.c - c1}"
        one.refuse(f"the first map must have a multiple of {NARROWEST} channels, the second some, got {channels}")
    return one


def whole(maps: tuple[Tensor, Tensor]) -> Tensor:
    """A tensor of the shape of both side by side, without their memory: configs of convolutions are filed by it."""
    n, c1, h, w = maps[0].shape
    return maps[0].new_empty(()).expand(n, c1 + maps[1].shape[1], h, w)


def concat_sample(
    why: str,
    channels: tuple[int, int],
    image: tuple[int, int, int],
    weight: tuple[int, int, int],
    *,
    names: tuple[str, str, str, str],
    real_size: bool = False,
    **choices: Any,
) -> Sample:
    """`image` is (N, H, W), `weight` (K, R, S), padded to keep the size; `choices` are passed on, a `bias` is made.

    `names` are of both maps, dy and the weight, "" for one that is not given.
    """
    k, r, s = weight
    (n, h, w), c, with_bias = image, sum(channels), choices.pop("bias", False)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        first, second = (random_nhwc((n, one, h, w), dtype, device, seed=i) for i, one in enumerate(channels))
        made = {
            names[0]: first,
            names[1]: second,
            names[2]: random_nhwc((n, k, h, w), dtype, device, seed=2),
            names[3]: random_nhwc((k, c, r, s), dtype, device, seed=3) * (c * r * s) ** -0.5,
        }
        bias = {"bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=4).flatten()} if with_bias else {}
        given = {name: tensor for name, tensor in made.items() if name}
        return {**given, **bias, **choices, "padding": (r // 2, s // 2)}

    return Sample(why, arguments, real_size)
