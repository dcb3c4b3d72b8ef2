"""Which passes of convolutions the kernels in _conv2d_narrow compute, with which configs, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import zip_longest
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from ridgeline import tuned
from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._conv import INT32_ELEMENTS
from ridgeline.kernels._conv2d_pass import DTYPES, FEW, GRANULE, SUM_ELEMENTS, Pass
from ridgeline.kernels._nhwc import cdiv, empty_nhwc, next_power_of_2, pixel_pitch, starts_early
from ridgeline.kernels._op import LastLaunch, Launch, Op, Target, tuned_row

_LARGEST_FILTER = 7
_SIZE = 2  # bytes of an element
_NARROWEST = 16  # side of a product's operand
_COLUMNS = 32  # that a thread gathers at once
_STEPS = 2  # of such columns in a program of `reduce`: more would not fit its registers
_CONTRACTED = 64  # sums of a pixel that `contract` has at once, of taps and narrow channels
_PARTS_AT_ONCE = 64
_ACCUMULATORS = 128  # fp32 a thread

# (pixels, wide, num_warps, stages), the likeliest first
_SIZES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "expand": (
        *((128, 64, 4, 1), (256, 64, 8, 1), (128, 128, 4, 1), (256, 128, 8, 1), (128, 32, 4, 1), (256, 32, 4, 1)),
        *((128, 16, 4, 1), (512, 64, 8, 1)),
    ),
    "reduce": (
        *((128, 128, 4, 3), (128, 64, 4, 3), (256, 64, 8, 2), (128, 128, 4, 2), (256, 128, 8, 2), (128, 64, 4, 2)),
        *((128, 32, 4, 3), (128, 16, 4, 3)),
    ),
    "contract": (
        *((256, 32, 8, 4), (256, 128, 8, 1), (256, 64, 8, 2), (256, 64, 8, 3), (512, 32, 8, 3), (128, 64, 4, 3)),
        *((256, 32, 8, 2), (128, 32, 4, 3), (128, 16, 4, 4), (64, 16, 4, 3)),
    ),
}
_ROUNDS = {"expand": (1,), "reduce": (2, 4, 1), "contract": (1,)}

Config = TypeVar("Config")


@dataclass(frozen=True)
class NarrowConfig:
    """A tile of the wide map, `pixels` by `wide` channels: what a program makes, sums over, or multiplies at a time.

    Loads of `stages` steps are under way; `expand` has one step. `reduce` splits the pixels as long as a multiprocessor
    gets no more than `rounds` tiles, each for its part of them; for the others it is 1.
    """

    pixels: int
    wide: int
    num_warps: int
    stages: int
    rounds: int


def takes_narrow(conv: ConvProblem) -> bool:
    """Whether the passes of a convolution of one group have kernels in _conv2d_narrow."""
    fits = _has_few_channels(conv) or (conv.k <= FEW and conv.c % GRANULE == 0)
    return fits and conv.stride == (1, 1) and max(conv.filter) <= _LARGEST_FILTER


def with_narrow_configs(others: tuple[Config, ...], one: Pass, target: Target) -> tuple[Config | NarrowConfig, ...]:
    """What is worth timing: configs of the kernels here, and `others`, of those for sm_90 alone, if they take the pass.

    In turns, since `tune` may stop early.
    """
    possible = others if _others_compute(one.conv) else ()
    narrow = _NarrowPass(one, target).configs() if takes_narrow(one.conv) else ()
    return tuple(c for pair in zip_longest(possible, narrow) for c in pair if c is not None)


def narrow_pass(one: Pass, op: Op, config: Any, target: Target, arguments: dict[str, Any]) -> NarrowCall | None:
    """A call with the config given, tuned for `arguments`, or by default; None where other kernels compute it.

    Raises ValueError for a config that is not valid.
    """
    narrow, given = _NarrowPass(one, target), isinstance(config, NarrowConfig)
    if not given and (config is not None or not takes_narrow(one.conv)):
        return None
    if config is None:
        row = tuned_row(op, **arguments)
        if row is not None and row.config.keys() == {field.name for field in fields(NarrowConfig)}:
            config = tuned.build(NarrowConfig, row.config)
            config = config if config is not None and narrow.is_valid(config) else None
        elif _others_compute(one.conv) and target.arch == "sm_90":
            return None
        config = config or next(iter(narrow.configs()), None)
    if config is None or not takes_narrow(one.conv) or not narrow.is_valid(config):
        one.refuse(f"{config} is not valid for {one.conv} on {target.arch}")
    return NarrowCall(narrow, config)


@dataclass(frozen=True)
class NarrowCall:
    """A pass and its config, both checked."""

    narrow: _NarrowPass
    config: NarrowConfig

    def product(
        self, kernels: tuple[Any, Any], operand: Tensor, weight: Tensor, bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Launch:  # fmt: skip
        """The launch that makes y or, of dy, dx.

        `kernels` are narrow_expand_kernel and narrow_contract_kernel, by imports in the op's own file: `source_hash`
        follows those alone.
        """
        one, of_dy = self.narrow.one, self.narrow.one.name == "conv2d_dgrad"
        one.check_narrow_maps(DTYPES, **{"dy" if of_dy else "x": operand}, residual=residual)
        one.check_weight(weight, operand.dtype)
        one.check_bias(bias, operand.dtype)
        out = empty_nhwc(one.x_shape if of_dy else one.y_shape, operand)
        if residual is not None and residual.shape != out.shape:
            one.refuse(f"residual must have the shape {tuple(out.shape)} of the result, got {tuple(residual.shape)}")
        expands, pdl = self.narrow.kernel == "expand", starts_early(self.narrow.target)
        grid, constants = self._expansion(operand) if expands else self._contraction(operand)
        return Launch(
            kernel=kernels[0 if expands else 1],
            grid=grid,
            arguments={
                "operand_ptr": operand, "weight_ptr": weight, "bias_ptr": bias, "residual_ptr": residual,
                "out_ptr": out, **({"pixels": self.narrow.pixels} if expands else {}),
            },
            constants={
                **self.narrow.constants(operand, out, residual), **constants, "RESIDUAL_PITCH": _pitch(residual),
                "PDL": pdl,
            },
            num_warps=self.config.num_warps, num_stages=self.config.stages, output=out, pdl=pdl,
        )  # fmt: skip

    def gradient(self, kernel: Any, parts_kernel: Any, dy: Tensor, x: Tensor) -> Launch:
        """The two launches that make dw, with narrow_reduce_kernel and wgrad_parts_kernel."""
        one, config = self.narrow.one, self.config
        one.check_narrow_maps(DTYPES, dy=dy, x=x)
        conv, target, pixels, (groups, steps) = one.conv, self.narrow.target, self.narrow.pixels, self.narrow.groups
        tiles, pdl = cdiv(self.narrow.wide, config.wide) * groups, starts_early(target)
        narrow, wide = (x, dy) if self.narrow.few_channels else (dy, x)
        blocks = cdiv(pixels, config.pixels)
        wanted = max(1, min(blocks, target.sm_count * config.rounds // tiles))
        # none is empty, unless there is no pixel
        parts = cdiv(blocks, cdiv(blocks, wanted)) if blocks else 1
        dw = torch.empty(
            (conv.k, conv.c, *conv.filter), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        sums = torch.empty((parts, dw.numel()), dtype=torch.float32, device=x.device)
        multiply = Launch(
            kernel=kernel,
            grid=(tiles * parts,),
            arguments={"wide_ptr": wide, "narrow_ptr": narrow, "parts_ptr": sums, "pixels": pixels},
            constants=self.narrow.constants(dy, x)
            | {
                "PITCH": _pitch(narrow), "WIDE_PITCH": _pitch(wide), "PARTS": parts, "BLOCK_P": config.pixels,
                "GROUPS": groups, "STEPS": steps, "BLOCK_N": config.wide, "BLOCK_K": self.narrow.block_k,
                "WIDE_ROWS": target.arch == "sm_90" and config.wide >= 64, "PDL": pdl,
            },
            num_warps=config.num_warps, num_stages=config.stages, output=sums, pdl=pdl,
        )  # fmt: skip
        # a weight so small makes many programs only if each has few elements, and adds many parts of them at once
        at_once = min(_PARTS_AT_ONCE, next_power_of_2(parts))
        block = SUM_ELEMENTS // at_once
        return LastLaunch(
            kernel=parts_kernel,
            grid=(cdiv(dw.numel(), block),),
            arguments={"parts_ptr": sums, "dw_ptr": dw, "numel": dw.numel()},
            constants={"PARTS": parts, "AT_ONCE": at_once, "BLOCK": block, "PDL": pdl},
            num_warps=4, num_stages=1, output=dw, pdl=pdl, before=(multiply,),
        )  # fmt: skip

    def _expansion(self, operand: Tensor) -> tuple[tuple[int], dict[str, int]]:
        """Grid and constants of narrow_expand_kernel."""
        pixels, wide = self.config.pixels, self.config.wide
        tiles = cdiv(self.narrow.pixels, pixels) * cdiv(self.narrow.wide, wide)
        blocks = {"BLOCK_P": pixels, "BLOCK_N": wide, "BLOCK_K": self.narrow.block_k}
        return (tiles,), {"PITCH": _pitch(operand), **blocks}

    def _contraction(self, operand: Tensor) -> tuple[tuple[int], dict[str, int]]:
        """Likewise of narrow_contract_kernel."""
        n, _, h, w = self.narrow.narrow_shape
        box, (taps_h, taps_w, channels) = self.narrow.box(self.config.pixels), self.narrow.taps
        assert box is not None
        taps = {"TAPS_H": taps_h, "TAPS_W": taps_w, "CHANNELS": channels}
        tiles = n * cdiv(h, box["ROWS"]) * cdiv(w, box["COLUMNS"])
        return (tiles,), {"WIDE_PITCH": _pitch(operand), **box, **taps, "BLOCK_K": self.config.wide}


@dataclass(frozen=True)
class _NarrowPass:
    """The sizes of one pass and what they leave to choose."""

    one: Pass
    target: Target

    @property
    def few_channels(self) -> bool:
        """Otherwise filters are few."""
        return _has_few_channels(self.one.conv)

    @property
    def kernel(self) -> str:
        if self.one.name == "conv2d_wgrad":
            return "reduce"
        return "expand" if self.few_channels == (self.one.name == "conv2d_fprop") else "contract"

    @property
    def forward(self) -> bool:
        """Whether rows of what is computed or reduced over meet later rows of the other map at later taps."""
        return self.few_channels if self.kernel == "reduce" else self.one.name == "conv2d_fprop"

    @property
    def narrow(self) -> int:
        return self.one.conv.c if self.few_channels else self.one.conv.k

    @property
    def wide(self) -> int:
        return self.one.conv.k if self.few_channels else self.one.conv.c

    @property
    def narrow_shape(self) -> tuple[int, int, int, int]:
        return self.one.x_shape if self.few_channels else self.one.y_shape

    @property
    def wide_shape(self) -> tuple[int, int, int, int]:
        return self.one.y_shape if self.few_channels else self.one.x_shape

    @property
    def pixels(self) -> int:
        """Of the wide map."""
        n, _, h, w = self.wide_shape
        return n * h * w

    @property
    def columns(self) -> int:
        """Products that a sum of `expand` has, or a row of the weight's gradient of `reduce`."""
        return self.one.conv.taps * self.narrow

    @property
    def block_k(self) -> int:
        """Of those, how many are multiplied at once."""
        return min(_COLUMNS, max(_NARROWEST, next_power_of_2(self.columns)))

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of columns that programs of `reduce` share out, and steps in each."""
        steps = cdiv(self.columns, self.block_k)
        groups = cdiv(steps, _STEPS)
        return groups, cdiv(steps, groups)

    @property
    def taps(self) -> tuple[int, int, int]:
        """Rows of taps that `contract` multiplies at once, their columns and narrow channels: powers of two."""
        r, s = self.one.conv.filter
        taps_w, channels = next_power_of_2(s), next_power_of_2(self.narrow)
        taps_h = min(next_power_of_2(r), max(1, _CONTRACTED // (taps_w * channels)))
        return taps_h, taps_w, max(channels, _NARROWEST // (taps_h * taps_w))

    def configs(self) -> tuple[NarrowConfig, ...]:
        """What is worth timing, the likeliest first."""
        widest = max(_NARROWEST, next_power_of_2(self.wide))
        sizes = _SIZES[self.kernel]
        found = (NarrowConfig(*numbers, rounds) for rounds in _ROUNDS[self.kernel] for numbers in sizes)
        return tuple(c for c in found if c.wide <= widest and self.is_valid(c))

    def is_valid(self, config: NarrowConfig) -> bool:
        """Whether its sums fit registers, and what it holds shared memory."""
        pixels, wide = config.pixels, config.wide
        if self.kernel == "expand":
            # operands, then half the tile on its way to memory
            sums, held = pixels * wide, (pixels + wide) * max(self.block_k, wide // 2)
        elif self.kernel == "reduce":
            _, steps = self.groups
            sums, held = steps * self.block_k * wide, (config.stages * wide + steps * self.block_k) * pixels
        else:
            sums = pixels * prod(self.taps)
            # operands, then sums on their way to other threads, in fp32
            held = max(config.stages * (pixels + prod(self.taps)) * wide, 2 * sums)
        return (
            config.num_warps in (4, 8)
            and pixels in (64, 128, 256, 512)
            and wide in (16, 32, 64, 128)
            and sums <= _ACCUMULATORS * 32 * config.num_warps
            and held * _SIZE <= self.target.shared_bytes
            # columns of a pixel are constants only in a thread that has them all
            and (self.kernel == "contract" or pixels >= 32 * config.num_warps)
            and (config.stages == 1 if self.kernel == "expand" else config.stages >= 1)
            and (config.rounds >= 1 if self.kernel == "reduce" else config.rounds == 1)
            and (self.kernel != "contract" or self.box(pixels) is not None)
        )

    def constants(self, *maps: Tensor | None) -> dict[str, int | bool]:
        """Of all kernels, for a call with these maps."""
        (r, s), (top, left), c = self.one.conv.filter, self.one.padding, self.one.conv.c
        of_narrow, of_wide = (1, r * s * c) if self.few_channels else (r * s * c, 1)
        spans = (t.numel() // t.shape[1] * _pitch(t) for t in maps if t is not None)
        return {
            "NARROW": self.narrow, "WIDE": self.wide, "R": r, "S": s, "TOP": top, "LEFT": left, "FORWARD": self.forward,
            "HN": self.narrow_shape[2], "WN": self.narrow_shape[3], "HW": self.wide_shape[2], "WW": self.wide_shape[3],
            "TAP_STRIDE": c, "NARROW_STRIDE": of_narrow, "WIDE_STRIDE": of_wide, "LARGE": max(spans) >= INT32_ELEMENTS,
        }  # fmt: skip

    def box(self, pixels: int) -> dict[str, int] | None:
        """The box of the wide map that takes the fewest programs, as constants; None: none has room for a filter.

        One that covers a side of both maps begins where they do, since zeros lie beyond. Of equals the widest.
        """
        (r, s), (top, left) = self.one.conv.filter, self.one.padding
        (*_, hn, wn), (*_, hw, ww) = self.narrow_shape, self.wide_shape
        if not self.forward:
            # row h meets row h + top - tap
            top, left = r - 1 - top, s - 1 - left
        found = []
        for width in (2**bits for bits in range(pixels.bit_length())):
            height = pixels // width
            rows, above = (hn, 0) if height >= max(hn, hw) else (height - r + 1, top)
            columns, before = (wn, 0) if width >= max(wn, ww) else (width - s + 1, left)
            if rows > 0 and columns > 0:
                box = {"BOX_H": height, "BOX_W": width, "ROWS": rows, "COLUMNS": columns}
                found.append((cdiv(hn, rows) * cdiv(wn, columns), -width, {**box, "ABOVE": above, "BEFORE": before}))
        return min(found, key=lambda one: one[:2])[2] if found else None


def _has_few_channels(conv: ConvProblem) -> bool:
    return conv.c <= FEW and conv.k % GRANULE == 0


def _others_compute(conv: ConvProblem) -> bool:
    """Whether pixels of both maps are whole 16 bytes, as the kernels for sm_90 alone want them."""
    return conv.c % GRANULE == conv.k % GRANULE == 0


def _pitch(tensor: Tensor | None) -> int:
    return 0 if tensor is None else pixel_pitch(tensor) or 0
