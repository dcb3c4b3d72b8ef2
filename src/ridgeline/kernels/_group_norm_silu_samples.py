"""Calls of group_norm_silu and its backward to test and to time: the maps of networks, and small ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Sample

# (channels, side) of the maps that the DDPM network normalises, the bytes of which decide its step
UNET_MAPS = (
    *((128, 32), (256, 32), (384, 32), (128, 16), (256, 16), (384, 16), (512, 16)),
    *((256, 8), (512, 8), (256, 4), (512, 4)),
)


def norm_sample(
    why: str,
    x: tuple[int, int, int, int],
    groups: int,
    *,
    scale: bool = False,
    second: int = 0,
    real_size: bool = False,
    **choices: Any,
) -> Sample:
    """`scale=True` gives scale and shift, halves of one [N, 2C] as a linear layer makes it; p > 0 a seed and offset.

    `second` channels of x, the last, come as x2.
    """

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        n, c = x[:2]

        def vectors(rows: int, columns: int, seed: int) -> Tensor:
            return random_nhwc((rows, columns, 1, 1), torch.float32, device, seed=seed).flatten(1)

        both = vectors(n, 2 * c, 3).to(dtype) * 0.2
        random = {name: torch.full((1,), 7, dtype=torch.int64, device=device) for name in ("seed", "offset")}
        whole = random_nhwc(x, dtype, device, seed=0) + 0.5
        maps = (one.contiguous(memory_format=torch.channels_last) for one in whole.split([c - second, second], 1))
        return {
            **(dict(zip(("x", "x2"), maps, strict=True)) if second else {"x": whole}),
            "gamma": 1 + 0.2 * vectors(1, c, 1)[0],
            "beta": 0.2 * vectors(1, c, 2)[0],
            **({"scale": both[:, :c], "shift": both[:, c:]} if scale else {}),
            **(random if choices.get("p") else {}),
            "groups": groups,
            **choices,
        }

    return Sample(why, arguments, real_size)


def gradient_sample(
    why: str,
    x: tuple[int, int, int, int],
    groups: int,
    *,
    residual: bool = False,
    real_size: bool = False,
    **choices: Any,
) -> Sample:
    """The backward of a `norm_sample`."""
    forward = norm_sample(why, x, groups, real_size=real_size, **choices)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        maps = {"dy": random_nhwc(x, dtype, device, seed=4)}
        maps |= {"residual": random_nhwc(x, dtype, device, seed=5)} if residual else {}
        return {**forward.arguments(dtype, device), **maps}

    return Sample(why, arguments, real_size)
