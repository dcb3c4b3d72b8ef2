"""What quantize_fp8 is called with: tiles, sizes, what it writes into, what it refuses, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, pixel_pitch, random_nhwc
from ridgeline.kernels._op import Sample, Target, dtype_name
from ridgeline.kernels._quads import why_not
from ridgeline.kernels._quantize_fp8 import FORMATS

_OLDEST = 89  # architecture with conversions to FP8


@dataclass(frozen=True)
class Config:
    """Pixels and channels of a tile, and the warps that quantise it."""

    pixels: int = 128
    channels: int = 64
    num_warps: int = 4

    @property
    def is_valid(self) -> bool:
        """Whether both are powers of two that 16-byte accesses divide, and a thread has 32 or 64 elements in flight."""
        powers = all(n & (n - 1) == 0 for n in (self.pixels, self.channels, self.num_warps))
        elements = self.pixels * self.channels // (32 * self.num_warps)
        return powers and min(self.pixels, self.channels) >= 16 and elements in (32, 64)

    def width(self, x: Tensor) -> int:
        """Channels of a tile of `x`, which may have fewer."""
        return min(self.channels, next_power_of_2(x.shape[1]))

    def programs(self, x: Tensor) -> int:
        pixels, c = size(x)
        return cdiv(pixels, self.pixels) * cdiv(c, self.width(x))

    def of_rows(self, x: Tensor) -> tuple[int, int]:
        """(pixels, channels) of a tile that holds the same rows of each quarter of one map."""
        pixels = max(self.pixels, 4 * x.shape[3])
        return pixels, max(1, self.width(x) * self.pixels // pixels)

    def quads_programs(self, x: Tensor) -> int:
        n, c, h, w = x.shape
        pixels, width = self.of_rows(x)
        return n * cdiv(h * w // 4, pixels // 4) * cdiv(c, width)


CONFIGS = (
    Config(), Config(64, 64, 4), Config(32, 64, 2), Config(64, 128, 4), Config(128, 64, 8), Config(128, 128, 8),
    Config(256, 32, 4), Config(256, 64, 8), Config(64, 64, 2),
)  # fmt: skip


def default_config(x: Tensor, target: Target) -> Config:
    """The largest of the first three tiles of which there are two for each multiprocessor; else the smallest."""
    enough = (config for config in CONFIGS[:3] if config.programs(x) >= 2 * target.sm_count)
    return next(enough, CONFIGS[2])


def size(x: Tensor) -> tuple[int, int]:
    """(pixels, channels)."""
    c = x.shape[1]
    return (x.numel() // c if c else 0), c


def x_pitch(x: Tensor) -> int:
    found = pixel_pitch(x if x.dim() == 4 else x[:, :, None, None])
    assert found is not None
    return found


def nothing_seen(x: Tensor) -> tuple[Tensor, Tensor]:
    """(amax, counts) of one tensor."""
    return x.new_zeros(1, dtype=torch.float32), x.new_zeros((1, 3), dtype=torch.int64)


def state_of_one(x: Tensor, scale: float) -> dict[str, Any]:
    """The arguments of a norm in FP8 that are the state of one tensor, of which nothing is seen yet; where x is."""
    amax, counts = nothing_seen(x)
    return {"fp8_scale": torch.full_like(amax, scale), "amax": amax, "counts": counts, "row": 0}


def as_filed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a norm in FP8 that its tuned configs are filed under: of more tensors it is no matter which.

    The state is views of what is given: for its shapes alone.
    """
    first = {name: arguments[name][:1] for name in ("fp8_scale", "amax", "counts")}
    return {**arguments, **first, "row": 0}


def typical(**arguments: Any) -> dict[str, Any]:
    """The same call of a norm in FP8 with a state of its own, for `tune` to write into: of one tensor, scale 1."""
    return {**arguments, **state_of_one(arguments["x"], 1.0)}


def empty_y(x: Tensor, fp8_format: str) -> Tensor:
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return torch.empty(x.shape, dtype=FORMATS[fp8_format].dtype, device=x.device, memory_format=layout)


def check(x: Tensor, fp8_format: str, target: Target | None) -> None:
    if x.dtype not in FLOATS:
        refuse(f"x must be one of {', '.join(map(dtype_name, FLOATS))}, got {x.dtype}", TypeError)
    if x.dim() not in (2, 4):
        refuse(f"x must have 2 or 4 axes, got shape {tuple(x.shape)}")
    if pixel_pitch(x if x.dim() == 4 else x[:, :, None, None]) is None:
        refuse(
            f"x must be channels_last, or a matrix with adjacent channels, got strides {x.stride()} "
            f"for shape {tuple(x.shape)}"
        )
    if fp8_format not in FORMATS:
        refuse(f"fp8_format must be one of {', '.join(FORMATS)}, got {fp8_format!r}")
    if target is not None and int(target.arch.removeprefix("sm_")) < _OLDEST:
        refuse(f"{target.arch} has no conversion to FP8: it takes sm_{_OLDEST} or later")


def check_quads(x: Tensor) -> None:
    """Refuse what has no quads."""
    if x.dim() != 4:
        refuse(f"only maps [N, C, H, W] have quads, got shape {tuple(x.shape)}")
    if (reason := why_not(*x.shape[2:])) is not None:
        refuse(reason)


def check_rows(x: Tensor, amax: Tensor, counts: Tensor, scale: Tensor, row: int) -> None:
    """Refuse a state whose row the kernel would not find where it looks."""
    rows = (amax.numel(),)
    for name, value, dtype, shape in (
        ("amax", amax, torch.float32, rows),
        ("counts", counts, torch.int64, (*rows, 3)),
        ("scale", scale, torch.float32, rows),
    ):
        if value.dtype != dtype:
            refuse(f"{name} must be {dtype}, got {value.dtype}", TypeError)
        if value.shape != shape or not value.is_contiguous():
            refuse(f"{name} must be dense of shape {tuple(shape)}, got {tuple(value.shape)}, strides {value.stride()}")
        if value.device != x.device:
            refuse(f"{name} must be on {x.device}, where x is, got {value.device}")
    if not 0 <= row < rows[0]:
        refuse(f"row must be one of the {rows[0]} rows of scale, got {row}")


def refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"quantize_fp8: {text}")


def sample(why: str, shape: Sequence[int], *, quads: bool = False, real_size: bool = False, **choices: Any) -> Sample:
    """Normal data whose largest tenth of a percent saturates in e4m3, of a map or, with two sizes, of a matrix."""

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        whole = (*shape, 1, 1)[:4]
        x = random_nhwc(whole, dtype, device, seed=0)  # pyright: ignore[reportArgumentType]
        amax, counts = nothing_seen(x)
        state = {"scale": torch.full_like(amax, 136.0), "amax": amax, "counts": counts}
        given = {"x": x if len(shape) == 4 else x[:, :, 0, 0], **state}
        return {**given, "row": 0, "fp8_format": "e4m3", "quads": quads, **choices}

    return Sample(why, arguments, real_size)
