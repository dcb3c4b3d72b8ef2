"""Calls of group_norm_silu and its backward: what may be given, and how it is tiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._group_norm_silu import statistics_kernel
from ridgeline.kernels._group_norm_silu_dropout import values_dropped
from ridgeline.kernels._nhwc import ACTIVATIONS, cdiv, empty_nhwc, next_power_of_2
from ridgeline.kernels._op import Launch, Target, nearest_first

_MOST_CANDIDATES = 32
# Of a sample as few parts as make so many programs: each program of the second pass reads the statistics of all parts.
_MOST_PARTS, _PROGRAMS = 128, 1024
_REGISTERS = 65_536  # of a multiprocessor
_WORKING = 32  # registers a thread beside the elements that it holds
# In one pass, bytes of all tensors: several slabs then share a multiprocessor, so that one loads while another stores.
# Registers a thread of one tensor's slab: many, because the coefficients of its channels take registers too. And the
# most of all tensors, where that spares half of sixteen warps or more: 384 channels at 32², batch 128, bf16, then take
# 97 µs on an H200 instead of 131.
_SLAB_BYTES, _SLAB_REGISTERS, _MOST_SLAB_REGISTERS = 64 * 1024, 32, 64
_TILE_BYTES, _TILE_REGISTERS = 8 * 1024, 8  # of each tensor in several passes, where nothing waits in registers
_ROW_BYTES = 32  # the unit in which memory is read and written: a slab's share of a pixel should fill it
_LINE_BYTES = 128  # likewise of caches: what a tile's share should have, where nothing else decides
_AGAIN_BYTES = 256 * 1024  # of all tensors in a slab that is read again: what caches have for a multiprocessor


@dataclass(frozen=True)
class Call:
    """One forward call, checked. Fields are the op's arguments.

    With x2 the map is the concatenation of x and x2, whose channels follow; `shape` is that of the whole.
    """

    name: ClassVar[str] = "group_norm_silu"
    held: ClassVar[int] = 1  # tensors in registers at a time

    x: Tensor
    gamma: Tensor
    beta: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None
    groups: int = 32
    eps: float = 1e-5
    act: str = "silu"
    p: float = 0.0
    x2: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        x = self.x
        if x.dim() != 4 or 0 in x.shape[1:]:
            self.refuse(f"x must have 4 axes and a pixel and a channel, got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            self.refuse(f"x must be one of fp32, fp16, bf16, got {x.dtype}", TypeError)
        self._check_second()
        n, c = self.shape[:2]
        if self.groups < 1 or c % self.groups:
            self.refuse(f"groups must divide the {c} channels of x, got {self.groups}")
        if self.act not in ACTIVATIONS:
            self.refuse(f"act must be one of {', '.join(ACTIVATIONS)}, got {self.act!r}")
        if not 0.0 <= self.p < 1.0:
            self.refuse(f"p must be in [0, 1), got {self.p}")
        if self.eps < 0.0:
            self.refuse(f"eps must not be negative, got {self.eps}")
        if c * self.pixels >= INT32_ELEMENTS:
            self.refuse(f"a sample of x must have less than 2^31 elements, got shape {self.shape}")
        self.check_layout("x", x)
        for name, shape in (("gamma", (c,)), ("beta", (c,)), ("scale", (n, c)), ("shift", (n, c))):
            self._check_parameter(name, getattr(self, name), shape)
        for name in ("seed", "offset"):
            self._check_random(name, getattr(self, name))
        for name in ("gamma", "beta", "scale", "shift", "seed", "offset"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != x.device:
                self.refuse(f"{name} must be on {x.device} like x, got {tensor.device}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the map that is normalised."""
        n, c, h, w = self.x.shape
        return n, c if self.x2 is None else c + self.x2.shape[1], h, w

    @property
    def pixels(self) -> int:
        return self.x.shape[2] * self.x.shape[3]

    @property
    def group_channels(self) -> int:
        return self.shape[1] // self.groups

    def empty_map(self) -> Tensor:
        """Uninitialised, of the shape of the map that is normalised."""
        return empty_nhwc(self.shape, self.x)

    def check_map(self, name: str, tensor: Tensor) -> None:
        """Refuse a map that is not like the one that is normalised, and channels_last."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.x.dtype:
            self.refuse(
                f"{name} must be {self.x.dtype} of shape {self.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        self.check_layout(name, tensor)

    def check_layout(self, name: str, tensor: Tensor) -> None:
        """Refuse a map that is not channels_last."""
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            self.refuse(
                f"{name} must be channels_last, got strides {tensor.stride()} for shape {tuple(tensor.shape)}: "
                f"use .contiguous(memory_format=torch.channels_last)"
            )

    def maps(self) -> dict[str, Tensor | None]:
        """The kernels' arguments for what is normalised."""
        return {"x_ptr": self.x, "x2_ptr": self.x2}

    def parameters(self) -> dict[str, Tensor | None]:
        """The kernels' arguments for all but the maps."""
        return {
            "gamma_ptr": self.gamma, "beta_ptr": self.beta, "scale_ptr": self.scale, "shift_ptr": self.shift,
            "seed_ptr": self.seed if self.p else None, "offset_ptr": self.offset if self.p else None,
        }  # fmt: skip

    def constants(self) -> dict[str, int | float | str]:
        """The kernels' constants but those of `Config`."""
        return {
            "SCALE_ROW": 0 if self.scale is None else self.scale.stride(0),
            "SHIFT_ROW": 0 if self.shift is None else self.shift.stride(0),
            "EPS": self.eps, "ACT": self.act, "DROPPED": values_dropped(self.p),
        }  # fmt: skip

    def refuse(self, text: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{self.name}: {text}")

    def _check_second(self) -> None:
        """Refuse an x2 that could not be concatenated to x."""
        x, x2 = self.x, self.x2
        if x2 is None:
            return
        like = x2.dim() == 4 and x2.shape[1] > 0 and (x2.shape[0], *x2.shape[2:]) == (x.shape[0], *x.shape[2:])
        if not like or x2.dtype != x.dtype or x2.device != x.device:
            self.refuse(
                f"x2 must be {x.dtype} on {x.device} of the samples and pixels of x, {tuple(x.shape)}, got {x2.dtype} "
                f"on {x2.device} of shape {tuple(x2.shape)}"
            )
        self.check_layout("x2", x2)

    def _check_parameter(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
        if tensor is None:
            return
        if tuple(tensor.shape) != shape or tensor.dtype not in (torch.float32, self.x.dtype):
            self.refuse(
                f"{name} must be fp32 or {self.x.dtype} of shape {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if shape[-1] > 1 and tensor.stride(-1) != 1:
            self.refuse(f"{name} must have adjacent channels, got strides {tensor.stride()}: use .contiguous()")

    def _check_random(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            if self.p:
                self.refuse(f"p of {self.p} needs seed and offset, one int64 each on the device of x")
        elif tensor.dtype != torch.int64 or tensor.numel() != 1:
            self.refuse(f"{name} must be one int64, got {tensor.dtype} of shape {tuple(tensor.shape)}", TypeError)


@dataclass(frozen=True)
class BoundedLaunch(Launch):
    """A launch whose kernel is compiled to at most `max_registers` a thread, so that more programs run side by side."""

    max_registers: int = 255

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class BackwardCall(Call):
    """One backward call, checked: the forward's arguments, the gradient of y, and one to add to that of x."""

    name: ClassVar[str] = "group_norm_silu_backward"
    held: ClassVar[int] = 2

    dy: Tensor | None = None
    residual: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dy is None:
            self.refuse("dy, the gradient of y, must be given")
        self.check_map("dy", self.dy)
        if self.residual is not None:
            self.check_map("residual", self.residual)


@dataclass(frozen=True)
class Config:
    """A program takes whole `groups` and tiles of `pixels`. Where a tile holds a sample's pixels, one launch is all.

    Else each pass over them is a launch; or with `again` one launch is all, whose programs read their slabs again.
    """

    groups: int
    pixels: int
    num_warps: int
    again: bool = False

    def is_valid(self, call: Call, target: Target) -> bool:  # noqa: ARG002 - the contract's signature
        """Whether it divides the groups, and what a thread holds leaves it registers to work with."""
        held = self.registers(call)
        return (
            self.num_warps in (1, 2, 4, 8, 16, 32)
            and 1 <= self.groups <= call.groups
            and call.groups % self.groups == 0
            and 1 <= self.pixels <= next_power_of_2(call.pixels)
            and self.pixels & (self.pixels - 1) == 0
            and held <= 128
            and (held + _WORKING) * 32 * self.num_warps <= _REGISTERS
            and not (self.again and self.whole(call))
        )

    def columns(self, call: Call) -> int:
        """How many tiles are side by side, so that their channels are a power of two without padding."""
        width = self.groups * call.group_channels
        block_c = width & -width
        return width // block_c if not self.whole(call) and block_c * call.x.element_size() >= _ROW_BYTES else 1

    def block_c(self, call: Call) -> int:
        """Channels of a tile."""
        return next_power_of_2(self.groups * call.group_channels // self.columns(call))

    def whole(self, call: Call) -> bool:
        """Whether one tile is enough for the statistics."""
        return self.pixels >= call.pixels

    def launches(self, call: Call) -> bool:
        """Whether each pass is a launch."""
        return not (self.again or self.whole(call))

    def tiles(self, call: Call) -> int:
        """Tiles of one part of a sample, below each other."""
        tiles = cdiv(call.pixels, self.pixels)
        wanted = cdiv(_PROGRAMS * self.groups, max(1, call.x.shape[0]) * call.groups)
        return cdiv(tiles, min(wanted, _MOST_PARTS, tiles)) if self.launches(call) else tiles

    def parts(self, call: Call) -> int:
        return cdiv(call.pixels, self.pixels * self.tiles(call))

    def programs(self, call: Call) -> int:
        return call.x.shape[0] * (call.groups // self.groups) * self.parts(call)

    def registers(self, call: Call) -> int:
        """What a thread's share of the tiles takes."""
        return call.held * self.pixels * self.block_c(call) * call.x.element_size() // (4 * 32 * self.num_warps)

    def max_registers(self, call: Call) -> int:
        """All that a thread may take in one pass, with next to nothing spilled: sixteen warps share a multiprocessor.

        Of a forward without dropout 24, or 32. Left alone, the compiler takes up to 170, and with dropout up to 255.
        """
        if call.held == 1 and not call.p and self.registers(call) <= _SLAB_REGISTERS:
            return self.registers(call) + (40 if self.num_warps > 4 else 32)
        return min(max(self.registers(call) + 64, 128), _REGISTERS // (32 * self.num_warps), 255)

    def constants(self, call: Call) -> dict[str, int]:
        """The tiling as kernels take it."""
        block_c, cg, columns = self.block_c(call), call.group_channels, self.columns(call)
        kp = block_c // cg if cg & (cg - 1) == 0 and columns == 1 else next_power_of_2(self.groups)
        shape = {"HW": call.pixels, "C": call.shape[1], "CG": cg, "K": self.groups, "BLOCK_C": block_c, "KP": kp}
        if not self.whole(call):
            shape |= {"BLOCK_P": self.pixels, "TILES": self.tiles(call), "COLUMNS": columns}
            parts = self.parts(call)
            return shape if self.again else {**shape, "PARTS": parts, "PARTS_P": next_power_of_2(parts)}
        # a piece is one access of 16 bytes a thread
        rows = max(1, 32 * self.num_warps * 16 // (block_c * call.x.element_size()))
        return {**shape, "BLOCK_P": min(rows, self.pixels), "PIECES": cdiv(self.pixels, rows)}


def default_config(call: Call, target: Target) -> Config:
    """The widest slab with tiles of at most _SLAB_BYTES that gives every multiprocessor four, or the narrowest.

    Never narrower than 32 bytes of a pixel, if there are that many. Several passes only where one tile does not fit.
    """
    size, everything = call.x.element_size(), next_power_of_2(call.pixels)
    widths = [k for k in range(1, call.groups + 1) if call.groups % k == 0]
    full = [k for k in widths if _full_rows(call, k)] or widths[-1:]
    tried = (_slab(call, target, k) for k in full)
    whole = [config for config in tried if config is not None]
    small = [c for c in whole if call.held * c.pixels * c.block_c(call) * size <= _SLAB_BYTES]
    busy = [c for c in small if c.programs(call) >= 4 * target.sm_count]
    if whole:
        return (busy[-1:] or whole[:1])[0]
    row_bytes = {k: k * call.group_channels * size for k in full}
    unpadded = max(full, key=lambda k: min(row_bytes[k] & -row_bytes[k], _LINE_BYTES))
    # a group may be wider than a tile: then single pixels
    for k in (unpadded, 1):
        pixels = min(everything, max(1, _TILE_BYTES // (Config(k, 1, 1).block_c(call) * size)))
        config = _with_warps(call, target, k, pixels, _TILE_REGISTERS)
        if config is not None:
            return config
    call.refuse(f"a group may have some thousand channels, got {call.group_channels}: use more groups")


def proposals(call: Call, target: Target) -> tuple[Config, ...]:
    """The default, then other valid tiles worth timing, those nearest to it first.

    Where channels of a group are no power of two, a slab in registers is padded: then several passes too.
    """
    default = default_config(call, target)
    whole = default.whole(call)
    near = nearest_first(default, _valid_tiles(call, target, whole=whole))[:_MOST_CANDIDATES]
    padded = call.group_channels.bit_count() > 1
    return tuple(dict.fromkeys((*near, *_passes(call, target)))) if padded and whole else near


def _valid_tiles(call: Call, target: Target, *, whole: bool) -> Iterator[Config]:
    everything = next_power_of_2(call.pixels)
    heights = (everything,) if whole else tuple(everything >> i for i in range(1, everything.bit_length()))
    for k in (k for k in range(1, call.groups + 1) if call.groups % k == 0):
        for pixels in heights:
            for num_warps in (1, 2, 4, 8, 16, 32):
                config = Config(k, pixels, num_warps)
                elements = pixels * config.block_c(call) // (32 * num_warps)
                if 8 <= elements <= 128 and config.is_valid(call, target):
                    yield config


def _passes(call: Call, target: Target) -> Iterator[Config]:
    """Tiles of whole _ROW_BYTES without padding, 16 elements a thread."""
    for k in (k for k in range(1, call.groups + 1) if call.groups % k == 0):
        row_bytes = k * call.group_channels * call.x.element_size()
        if row_bytes % _ROW_BYTES:
            continue
        for num_warps in (4, 8, 16):
            pixels = 16 * 32 * num_warps // Config(k, 1, 1).block_c(call)
            for again in (False, True)[: 1 + (call.held * call.pixels * row_bytes <= _AGAIN_BYTES)]:
                config = Config(k, pixels, num_warps, again)
                if not config.whole(call) and config.is_valid(call, target):
                    yield config


def statistics_launch(call: Call, config: Config) -> Launch:
    """Mean and squares of every part of every group, [N, parts, 2, groups] fp32: the first of several passes."""
    shape = (call.x.shape[0], config.parts(call), 2, call.groups)
    partial = torch.empty(shape, dtype=torch.float32, device=call.x.device)
    return Launch(
        statistics_kernel,
        grid=(config.programs(call),),
        arguments={**call.maps(), "partial_ptr": partial},
        constants={
            "C1": call.x.shape[1],
            **{name: value for name, value in config.constants(call).items() if name != "PARTS_P"},
        },
        num_warps=config.num_warps,
        num_stages=1,
        output=partial,
    )


def _full_rows(call: Call, groups: int) -> bool:
    row_bytes = groups * call.group_channels * call.x.element_size()
    return row_bytes >= _ROW_BYTES and row_bytes % 16 == 0


def _slab(call: Call, target: Target, groups: int) -> Config | None:
    """One tile of all pixels, with the warps that _SLAB_REGISTERS say."""
    config = _with_warps(call, target, groups, next_power_of_2(call.pixels), _SLAB_REGISTERS)
    if config is not None and config.num_warps >= 16:
        half = replace(config, num_warps=config.num_warps // 2)
        return half if half.registers(call) <= _MOST_SLAB_REGISTERS else config
    return config


def _with_warps(call: Call, target: Target, groups: int, pixels: int, registers: int) -> Config | None:
    """As few warps as hold a tensor's tile in so many registers a thread; more where the sum of all is too large."""
    tile_bytes = pixels * Config(groups, pixels, 1).block_c(call) * call.x.element_size()
    fewest = min(32, next_power_of_2(cdiv(tile_bytes, registers * 4 * 32)))
    tried = (Config(groups, pixels, fewest * factor) for factor in (1, 2, 4, 8, 16))
    return next((config for config in tried if config.is_valid(call, target)), None)
