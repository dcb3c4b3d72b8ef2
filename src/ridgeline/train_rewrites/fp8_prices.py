"""Which passes of a convolution are worth FP8: their times in bf16 and in FP8, and what quantising costs.

A pass takes what the tuned tables say; one that was not tuned takes its roofline's time, as in the seed of `fp8_pays`:
T_fp8 = B / G + F / roof_fp8 against T_bf16 = F / roof_bf16. Of the ways to choose passes the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline import tuned
from ridgeline.cost.conv import conv_forward, conv_input_grad, conv_weight_grad
from ridgeline.kernels import Op, conv2d_fp8, conv2d_fprop, conv2d_wgrad_fp8, quantize_fp8
from ridgeline.kernels._op import dtype_name
from ridgeline.kernels._quads import quads_shape
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.roofline import bound, fp8_seconds
from ridgeline.specs import DeviceSpec
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import impossible_passes

_LAUNCH_S = 2e-6  # of a pass of its own over a map, in a graph


@dataclass(frozen=True)
class Price:
    """Seconds of one pass by the fastest kernel of each kind; `measured` if both are from the tables."""

    bf16_s: float
    fp8_s: float
    measured: bool


def prices(conv: Convolution, spec: DeviceSpec) -> dict[str, Price]:
    """Of "fprop", "dgrad" and "wgrad", without quantising."""
    problem = conv.problem
    costs = {
        "fprop": conv_forward(problem, torch.bfloat16),
        "dgrad": conv_input_grad(problem, torch.bfloat16),
        "wgrad": conv_weight_grad(problem, torch.bfloat16),
    }
    elements = {
        "fprop": (problem.x_numel + problem.w_numel, problem.y_numel),
        "dgrad": (problem.y_numel + problem.w_numel, problem.x_numel),
        "wgrad": (problem.x_numel + problem.y_numel, problem.w_numel),
    }
    bf16_s, fp8_s = _bf16_seconds(conv), _fp8_seconds(conv)
    found = {}
    for name, cost in costs.items():
        operands, results = elements[name]
        roofline = bound(cost, spec).seconds, fp8_seconds(cost.flops, operands, 2 * results, spec)
        measured = name in bf16_s and name in fp8_s
        # two rooflines are compared, or two measurements
        bf16, fp8 = (bf16_s[name], fp8_s[name]) if measured else roofline
        found[name] = Price(bf16, fp8, measured)
    return found


def quantise_seconds(conv: Convolution, passes: frozenset[str], spec: DeviceSpec, *, by_norm: bool) -> float:
    """What quantising the maps of a convolution adds, with these passes in FP8.

    A map is read, and written in FP8, by a pass of its own; `by_norm` is x written by the norm that makes it, in place
    of bf16, unless a pass needs that too. The gradient is charged the pass of its own, whoever makes it.
    """
    total, problem = 0.0, conv.problem
    n, c, h, w = conv.x
    wider = prod(quads_shape(n, c, h, w, beside=True)) / prod(conv.x)
    for numel, readers, fused, quads in (
        (problem.x_numel, ("fprop", "wgrad"), by_norm, wider),
        (problem.y_numel, ("dgrad", "wgrad"), False, 1.0),
    ):
        narrow = [reader for reader in readers if reader in passes]
        if narrow:
            written = 1 + (quads if "wgrad" in narrow else 0)
            alone = not fused or len(narrow) < len(readers)
            total += numel * (2 + written if alone else written - 2) / spec.bandwidth + (_LAUNCH_S if alone else 0.0)
    return total


def cheapest_passes(conv: Convolution, possible: frozenset[str], spec: DeviceSpec, *, by_norm: bool) -> frozenset[str]:
    """Those of the possible passes that FP8 makes faster together, quantising included."""
    found = prices(conv, spec)

    def seconds(passes: frozenset[str]) -> float:
        products = sum(one.fp8_s if name in passes else one.bf16_s for name, one in found.items())
        return products + quantise_seconds(conv, passes, spec, by_norm=by_norm)

    subsets = (frozenset(one) for size in range(len(possible) + 1) for one in combinations(sorted(possible), size))
    return min(subsets, key=seconds)


def problems(conv: Convolution) -> Iterator[tuple[Op, dict[str, Any]]]:
    """Each pass that has an FP8 kernel on normal data, scaled as its largest magnitude asks for; for `tune`."""
    given = {op.name: arguments for op, arguments in conv.problems()}
    x, weight, dy = given["conv2d_fprop"]["x"], given["conv2d_fprop"]["weight"], given["conv2d_dgrad"]["dy"]
    (_, _, r, s), (top, left) = conv.weight, conv.padding
    of_product = {"x_row": 0, "weight_row": 1}
    for wide, of_weight, padding, fp8_format in (
        (x, weight, conv.padding, "e4m3"),
        (dy, conv2d_fp8.for_dgrad(weight), (r - 1 - top, s - 1 - left), "e5m2"),
    ):
        (x8, _), (weight8, _), inverse = quantised((wide, fp8_format), (of_weight, "e4m3"), quads=False)
        yield conv2d_fp8.OP, {"x": x8, "weight": weight8, "inverse": inverse, "padding": padding, **of_product}
    if "wgrad" not in impossible_passes(conv):
        (_, dy_quads), (_, x_quads), inverse = quantised((dy, "e5m2"), (x, "e4m3"), quads=True)
        operands = {"dy": dy_quads, "x": x_quads, "inverse": inverse}
        yield conv2d_wgrad_fp8.OP, {**operands, "kernel_size": (r, s), "dy_row": 0, "x_row": 1}


def quantised(*given: tuple[Tensor, str], quads: bool) -> tuple[Any, ...]:
    """Each (tensor, format) as (FP8, its quads), then the inverse scales [tensors] of all."""
    largest = [tensor.abs().amax().float() for tensor, _ in given]
    scale = torch.stack([FORMATS[name].largest / one for one, (_, name) in zip(largest, given, strict=True)])
    seen = torch.zeros_like(scale), scale.new_zeros((len(given), 3), dtype=torch.int64)
    made = (
        quantize_fp8.OP(tensor, scale, *seen, row=row, fp8_format=name, quads=quads)
        for row, (tensor, name) in enumerate(given)
    )
    return *made, 1 / scale


def _bf16_seconds(conv: Convolution) -> dict[str, float]:
    """By pass, where it was tuned: the faster of the project's kernel and PyTorch's."""
    x, weight, dy = (torch.empty(shape, device="meta") for shape in (conv.x, conv.weight, _y_shape(conv)))
    calls = conv2d_fprop.passes_of(x, weight, dy, conv.padding)
    rows = {name: _row(conv, op, "bf16", arguments) for name, (op, arguments) in calls.items()}
    return {
        name: min(row.seconds, conv2d_fprop.rival_seconds(row)) for name, row in rows.items() if row is not None
    }  # fmt: skip


def _fp8_seconds(conv: Convolution) -> dict[str, float]:
    """By pass, where it was tuned."""
    (n, c, h, w), (k, _, r, s), (top, left) = conv.x, conv.weight, conv.padding
    empty, inverse = (lambda *shape: torch.empty(shape, device="meta")), torch.empty(2, device="meta")
    of_product = {"inverse": inverse, "x_row": 0, "weight_row": 1}
    forward = {"x": empty(*conv.x), "weight": empty(*conv.weight), "padding": conv.padding, **of_product}
    back = {"padding": (r - 1 - top, s - 1 - left), **of_product}
    calls: dict[str, tuple[Op, torch.dtype, Mapping[str, Any]]] = {
        "fprop": (conv2d_fp8.OP, torch.float8_e4m3fn, forward),
        "dgrad": (conv2d_fp8.OP, torch.float8_e5m2, {"x": empty(*_y_shape(conv)), "weight": empty(c, k, r, s), **back}),
    }
    if "wgrad" not in impossible_passes(conv):
        dy, x = empty(*quads_shape(n, k, h, w, beside=False)), empty(*quads_shape(n, c, h, w, beside=True))
        given = {"dy": dy, "x": x, "inverse": inverse, "kernel_size": (r, s), "dy_row": 0, "x_row": 1}
        calls["wgrad"] = conv2d_wgrad_fp8.OP, torch.float8_e5m2, given
    rows = {name: _row(conv, op, dtype_name(dtype), given) for name, (op, dtype, given) in calls.items()}
    return {name: row.seconds for name, row in rows.items() if row is not None}


def _row(conv: Convolution, op: Op, dtype: str, arguments: Mapping[str, Any]) -> tuned.Row | None:
    """What the tables of the convolution's GPU hold."""
    if conv.device.type != "cuda":
        return None
    table = tuned.load(op.name, torch.cuda.get_device_name(conv.device), op.source_hash)
    return table.row(dtype, op.key(**arguments))


def _y_shape(conv: Convolution) -> tuple[int, int, int, int]:
    problem = conv.problem
    return problem.n, problem.k, problem.oh, problem.ow
