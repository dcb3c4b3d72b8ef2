"""FP8 (e4m3) copies of all convolution weights, each in two orders, and what their next scales must follow: one launch.

    copy[k, c, r, s]                   = round(clamp(weight[k, c, r, s] · scale[row], -448, 448))
    turned[c, k, R - 1 - r, S - 1 - s] = copy[k, c, r, s]                        `conv2d_fp8.for_dgrad` of the copy
    amax[row]                          = max(amax[row], largest |weight|)        infinite or NaN where the weight is
    counts[row]                        = counts[row] + (saturated, vanished, all)        as `quantize_fp8` counts them

weights   [K, C, R, S] channels_last, all fp32 or all bf16, K and C multiples of 16
copies    [K, C, R, S] channels_last e4m3
turned    [C, K, R, S] channels_last e4m3
rows      one a weight: where its state stands in `scale` and `amax` [tensors] fp32 and `counts` [tensors, 3] int64

`build` writes the table once; `quantize_` launches, and reads nothing on the host, so it can be captured. As the other
FP8 operators of a step do it changes `amax` and `counts` without counting up their versions: autograd never sees it.
Triton launches on the current device, which must be that of the weights.
Raises ValueError or TypeError for anything else, and for GPUs before sm_89, which have no conversion to FP8.

A program reads a tile of filters and channels of one tap along its channels, and writes it along channels and, as words
of four filters, along filters. Per element that is, from bf16,

    2 bytes read + 2 bytes written          (`cost`)

Predicted, not measured: 18 M weights are 36 MB read and 36 MB written, 17 µs at an H200's rate of a copy.

Not in `kernels.ALL`, for the reasons of `adamw_ema`: it writes lists of tensors in place, outside of any graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ridgeline.cost import Cost
from ridgeline.kernels._nhwc import starts_early
from ridgeline.kernels._op import INTERPRETED, Launch, dtype_name, target_of
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.kernels._quantize_fp8_call import CONFIGS, Config, check, check_rows
from ridgeline.kernels._quantize_weights_fp8 import FORMAT, TILES, quantize_weights_fp8_kernel
from ridgeline.kernels.conv2d_fp8 import for_dgrad
from ridgeline.kernels.quantize_fp8 import quantized

_SOURCES = (torch.float32, torch.bfloat16)
_UNIT = 16  # that K and C are multiples of: 16 bytes of FP8
_MOST = 2**31  # elements of a weight, whose offsets are int32
_FLOPS = 4  # of an element, as in quantize_fp8


@dataclass(frozen=True, eq=False)
class Plan:
    """The table of one set of weights. It holds addresses: build anew when a tensor is replaced, and keep it while a
    graph that launches it lives.
    """

    weights: tuple[Tensor, ...]
    rows: tuple[int, ...]
    copies: tuple[Tensor, ...]
    turned: tuple[Tensor, ...]
    config: Config  # a tap of a weight is a matrix [K, C]: its filters stand where quantize_fp8 has pixels
    tiles: Tensor  # [programs, len(TILES)] int64


def build(
    weights: Sequence[Tensor],
    rows: Sequence[int],
    *,
    copies: Sequence[Tensor] | None = None,
    turned: Sequence[Tensor] | None = None,
    config: Config = CONFIGS[0],
) -> Plan:
    """Check every tensor and write the table; copies to the device, so not during a capture.

    Without `copies` or `turned` they are allocated, and hold nothing before the first `quantize_`.
    """
    weights, rows = tuple(weights), tuple(rows)
    if not weights:
        _refuse("there are no weights: give at least one")
    if not config.is_valid:
        _refuse(f"{config} must have powers of two, 16 or more filters and channels, and 32 or 64 elements a thread")
    if len(rows) != len(weights) or len(set(rows)) != len(rows) or min(rows) < 0:
        _refuse(f"rows must be {len(weights)} different ones from 0 on, one a weight, got {list(rows)}")
    for weight in weights:
        _check_weight(weight, weights[0])
    check(weights[0], FORMAT, target_of(weights[0]))
    straight = _written("copies", copies, weights, swapped=False)
    backward = _written("turned", turned, weights, swapped=True)
    addresses = [tensor.data_ptr() for tensor in (*straight, *backward)]
    if len(set(addresses)) != len(addresses):
        _refuse("two of the tensors written are one: give each weight its own copy and turned copy")
    tiles = [_tiles(*each, config) for each in zip(weights, straight, backward, rows, strict=True)]
    return Plan(weights, rows, straight, backward, config, torch.cat(tiles).to(weights[0].device))


@torch.no_grad()
def quantize_(plan: Plan, scale: Tensor, amax: Tensor, counts: Tensor) -> None:
    """Write all copies by their rows of `scale`; raise those of `amax` and add to those of `counts`. In place."""
    if plan.tiles.is_cuda or INTERPRETED:
        launch(plan, scale, amax, counts).run()
    else:
        _check_state(plan, scale, amax, counts)
        _quantize_on_cpu_(plan, scale, amax, counts)
    # as PyTorch's own in-place operators do
    increment_version([*plan.copies, *plan.turned])


def launch(plan: Plan, scale: Tensor, amax: Tensor, counts: Tensor) -> Launch:
    """The launch of `quantize_`. Runs nothing."""
    _check_state(plan, scale, amax, counts)
    pdl = starts_early(target_of(scale))
    return Launch(
        quantize_weights_fp8_kernel,
        grid=(len(plan.tiles),),
        arguments={
            "tiles_ptr": plan.tiles,
            "scale_ptr": scale,
            "amax_ptr": amax.view(torch.int32),
            "counts_ptr": counts,
        },
        constants={
            "BF16": plan.weights[0].dtype == torch.bfloat16,
            "BLOCK_K": plan.config.pixels,
            "BLOCK_C": plan.config.channels,
            "PDL": pdl,
        },
        num_warps=plan.config.num_warps,
        num_stages=1,
        output=counts,
        pdl=pdl,
    )


def cost(plan: Plan) -> Cost:
    """Each weight read once and written twice; the table adds less than 1 %."""
    elements = sum(weight.numel() for weight in plan.weights)
    return Cost(_FLOPS * elements, sum(weight.nbytes for weight in plan.weights), 2 * elements)


def _quantize_on_cpu_(plan: Plan, scale: Tensor, amax: Tensor, counts: Tensor) -> None:
    """`quantize_` in plain PyTorch."""
    for weight, row, copy, turned in zip(plan.weights, plan.rows, plan.copies, plan.turned, strict=True):
        y, found_amax, found_counts = quantized(weight, scale[row], fp8_format=FORMAT)
        copy.copy_(y)
        turned.copy_(for_dgrad(y))
        # `data` has a version of its own; maximum keeps NaN, as the order of bits does
        amax.data[row] = torch.maximum(amax[row], found_amax[0])
        counts.data[row] += found_counts[0]


def _tiles(weight: Tensor, copy: Tensor, turned: Tensor, row: int, config: Config) -> Tensor:
    """The rows of the table for one weight; neighbours are neighbours in memory."""
    k, c, r, s = weight.shape
    taps = r * s
    firsts = torch.arange(0, k, config.pixels), torch.arange(taps), torch.arange(0, c, config.channels)
    first_k, tap, first_c = torch.cartesian_prod(*firsts).unbind(1)
    at = (first_k * taps + tap) * c + first_c
    turned_at = (first_c * taps + (taps - 1 - tap)) * k + first_k
    columns = (
        weight.data_ptr() + weight.element_size() * at,
        copy.data_ptr() + at,
        turned.data_ptr() + turned_at,
        (k - first_k) // _UNIT,
        (c - first_c) // _UNIT,
        torch.full_like(at, taps * c // _UNIT),
        torch.full_like(at, taps * k // _UNIT),
        torch.full_like(at, row),
        torch.where(at == 0, weight.numel(), 0),
    )
    assert len(columns) == len(TILES)
    return torch.stack(columns, dim=1)


def _written(
    name: str, given: Sequence[Tensor] | None, weights: tuple[Tensor, ...], *, swapped: bool
) -> tuple[Tensor, ...]:
    """The tensors given, checked, or as many made; with `swapped` of turned copies."""
    dtype = FORMATS[FORMAT].dtype
    shapes = [(c, k, r, s) if swapped else (k, c, r, s) for k, c, r, s in (weight.shape for weight in weights)]
    device = weights[0].device
    if given is None:
        made = (torch.empty(n, dtype=dtype, device=device, memory_format=torch.channels_last) for n in shapes)
        return tuple(made)
    if len(given) != len(weights):
        _refuse(f"{name} must hold {len(weights)} tensors, one a weight, got {len(given)}")
    for tensor, shape in zip(given, shapes, strict=True):
        if tensor.dtype != dtype:
            _refuse(f"{name} must be {dtype}, got {tensor.dtype}", TypeError)
        if tensor.shape != shape:
            _refuse(f"one of {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        _check_place(name, tensor, device)
    return tuple(given)


def _check_weight(weight: Tensor, first: Tensor) -> None:
    if weight.dtype not in _SOURCES:
        _refuse(f"weights must be one of {', '.join(map(dtype_name, _SOURCES))}, got {weight.dtype}", TypeError)
    if weight.dtype != first.dtype:
        _refuse(f"all weights must be {first.dtype}, as the first is, got one of {weight.dtype}", TypeError)
    if weight.dim() != 4 or not weight.numel() or any(size % _UNIT for size in weight.shape[:2]):
        _refuse(f"weights must be [K, C, R, S] with K and C multiples of {_UNIT}, got shape {list(weight.shape)}")
    if weight.numel() >= _MOST:
        _refuse(f"weights must have less than {_MOST} elements, got {weight.numel()}")
    _check_place("weights", weight, first.device)


def _check_place(name: str, tensor: Tensor, device: torch.device) -> None:
    """Dense along channels, on an address for 16-byte accesses."""
    if not tensor.is_contiguous(memory_format=torch.channels_last):
        _refuse(f"{name} must be channels_last, got strides {tensor.stride()} for shape {list(tensor.shape)}")
    if tensor.device != device:
        _refuse(f"{name} must be on {device}, where the first weight is, got one on {tensor.device}")
    if tensor.data_ptr() % 16:
        _refuse(
            f"{name} must begin at a multiple of 16 bytes, got a view at offset {tensor.storage_offset()}: clone it"
        )


def _check_state(plan: Plan, scale: Tensor, amax: Tensor, counts: Tensor) -> None:
    check_rows(plan.weights[0], amax, counts, scale, max(plan.rows))


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"quantize_weights_fp8: {text}")
