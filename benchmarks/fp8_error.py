"""Measure what the FP8 convolutions get wrong, beside bf16 of the same data, against float64.

    python benchmarks/fp8_error.py --out benchmarks/results/fp8_error.jsonl
    python benchmarks/fp8_error.py --rows benchmarks/results/fp8_error.jsonl --markdown      measures nothing

3x3 filters: conv2d_fp8 reduces 9 C products, conv2d_wgrad_fp8 all pixels of a batch.

data      normal; or positive, their magnitudes: products of one sign, whose cut-off bits all add up to one side
operands  given: FP8 numbers, which bf16 holds exactly, so that errors are those of sums and of rounding the result;
          quantised: bf16 numbers, scaled by their largest magnitude and rounded to FP8, which is an error too
computed  bf16; fp8; "promote P": weight gradients whose sums in the tensor cores end every P pixels, 0 at the end of a
          program's share of the images; "promote 0, unsplit": one share is all images, as on a GPU too small to split

Each row has in `extra`, relative to the root mean square of the exact result e:

rms, largest   errors of the result y
bias           sum of (y - e) e over the sum of e²: negative where results are too small in magnitude
rounding_rms   what rounding e to bf16 alone does
allowed_rms    and allowed_largest: the rule of `ridgeline.numerics` with the op's `eps`, of positive data with that of
               products of one sign; null for quantised operands, whose error is not that of the op
summed         products, at most, that the tensor cores add before their sum is promoted to fp32; null on a CPU
parts          shares of the images; null on a CPU, and for conv2d_fp8

The op runs at full width, float64 on as many filters and channels as PART. On a CPU the references run in the place of
the kernels, which shows nothing but rounding to bf16. Exits with 4 where an error is more than allowed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import _rows
from _error_tables import SUBJECT, Result, in_markdown, in_terminal, newest_rows, results_of
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError, VerificationFailed
from ridgeline.kernels import Op, conv2d_fp8, conv2d_fprop, conv2d_wgrad, conv2d_wgrad_fp8
from ridgeline.kernels._nhwc import cdiv, random_nhwc
from ridgeline.kernels._op import Launch, target_of
from ridgeline.kernels._quads import to_quads, why_not
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.numerics import Verdict, compare, fp8_sum_eps, largest, rms, to_float64
from ridgeline.train_rewrites.fp8_prices import quantised

POSITIVE = "positive"
DATA = ("normal", POSITIVE)
OPERANDS = ("given", "quantised")
PART = 32  # filters, and channels of a weight gradient, that are judged
GIVEN_SCALE = 16.0  # of normal data as FP8: far from the largest and from the smallest of both formats
BF16 = "bf16"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to compute; the fields other than `name` are those of weight gradients."""

    name: str
    promote: int | None = None
    unsplit: bool = False


@dataclass(frozen=True)
class Computed:
    """What an FP8 op returned, and how it added up, where that is known."""

    result: Tensor
    summed: int | None = None
    parts: int | None = None


# --- problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """Maps of `channels` convolved with `filters` filters."""

    channels: int
    filters: int
    images: int = 4
    side: int = 16

    op: ClassVar[Op] = conv2d_fp8.OP
    bf16_op: ClassVar[Op] = conv2d_fprop.OP
    formats: ClassVar[tuple[str, str]] = ("e4m3", "e4m3")

    @property
    def reduction(self) -> int:
        return 9 * self.channels

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Of x and weight."""
        return (self.images, self.channels, self.side, self.side), (self.filters, self.channels, 3, 3)

    def variants(self, _promotes: Iterable[int]) -> tuple[list[Variant], list[str]]:
        return [Variant("fp8")], []

    def fp8(self, pair: Pair, inverse: Tensor, _variant: Variant) -> dict[str, Any]:
        operands = {"x": pair[0], "weight": pair[1], "inverse": inverse}
        return {**operands, "x_row": 0, "weight_row": 1, "padding": (1, 1)}

    def bf16(self, pair: Pair) -> dict[str, Any]:
        return {"x": pair[0], "weight": pair[1], "padding": (1, 1)}

    def part(self, pair: Pair) -> Pair:
        return pair[0], pair[1][:PART]

    def part_of_result(self, y: Tensor) -> Tensor:
        return y[:, :PART]

    def compute(self, arguments: dict[str, Any], _variant: Variant) -> Computed:
        return Computed(self.op(**arguments), self.reduction if arguments["x"].is_cuda else None)


@dataclass(frozen=True)
class WeightGradient:
    """Gradients of as many filters as x has channels, from `images` square maps."""

    images: int
    channels: int
    side: int

    op: ClassVar[Op] = conv2d_wgrad_fp8.OP
    bf16_op: ClassVar[Op] = conv2d_wgrad.OP
    formats: ClassVar[tuple[str, str]] = ("e5m2", "e4m3")

    @property
    def reduction(self) -> int:
        return self.images * self.side**2

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Of dy and x."""
        shape = self.images, self.channels, self.side, self.side
        return shape, shape

    def variants(self, promotes: Iterable[int]) -> tuple[list[Variant], list[str]]:
        """Those that the op takes, and why it does not take the others."""
        if reason := self._why_not(0):
            raise UsageError(reason)
        chosen, left_out = [], []
        for promote in promotes:
            if reason := self._why_not(promote):
                left_out.append(f"{self.reduction:,} products, promote {promote} left out: {reason}")
                continue
            chosen.append(Variant(f"promote {promote}", promote))
            if promote == 0:
                chosen.append(Variant("promote 0, unsplit", 0, unsplit=True))
        return chosen, left_out

    def _why_not(self, promote: int) -> str | None:
        """The op's own words; of quads it sees sides in multiples of 4 alone, so that this asks for the side first."""
        if reason := why_not(self.side, self.side):
            return f"{self.op.name}: {reason}"
        shape = self.images, self.channels, self.side, self.side
        sample = conv2d_wgrad_fp8.wgrad_fp8_sample("", shape, (self.channels, 3, 3), promote=promote)
        try:
            conv2d_wgrad_fp8.eps(**sample.arguments(torch.float8_e4m3fn, "meta"))
        except ValueError as error:
            return str(error)
        return None

    def fp8(self, pair: Pair, inverse: Tensor, variant: Variant) -> dict[str, Any]:
        operands = {"dy": to_quads(pair[0], beside=False), "x": to_quads(pair[1], beside=True), "inverse": inverse}
        return {**operands, "kernel_size": (3, 3), "dy_row": 0, "x_row": 1, "promote": variant.promote}

    def bf16(self, pair: Pair) -> dict[str, Any]:
        return {"dy": pair[0], "x": pair[1], "kernel_size": (3, 3), "padding": (1, 1)}

    def part(self, pair: Pair) -> Pair:
        return pair[0][:, :PART], pair[1][:, :PART]

    def part_of_result(self, dw: Tensor) -> Tensor:
        return dw[:PART, :PART]

    def compute(self, arguments: dict[str, Any], variant: Variant) -> Computed:
        if not arguments["x"].is_cuda:
            return Computed(self.op(**arguments)[0])
        launch, summed, parts = self.launch(arguments, variant)
        launch.run()
        return Computed(launch.output, summed, parts)

    def launch(self, arguments: dict[str, Any], variant: Variant) -> tuple[Launch, int, int]:
        """What computes it, and its `summed` and `parts`."""
        target = target_of(arguments["x"])
        # images are split among multiprocessors, so a GPU of one does not split them
        target = replace(target, sm_count=1) if variant.unsplit else target
        launch = conv2d_wgrad_fp8.plan(**arguments, target=target)
        constants = launch.parts[0].constants
        box_images, box_columns, parts = (int(constants[name]) for name in ("BOX_N", "BOX_W", "PARTS"))
        groups = cdiv(self.images, box_images) * (self.side // box_columns)
        share = cdiv(groups, parts) * box_images * self.side * box_columns
        return launch, variant.promote or min(share, self.reduction), parts


Problem = Forward | WeightGradient


# --- measuring -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    left_out: list[str] = []
    if a.rows:
        rows = newest_rows(a.rows)
    else:
        problems = [*(Forward(c, a.width) for c in a.channels), *(WeightGradient(n, a.width, a.side) for n in a.images)]
        chosen = [(problem, *problem.variants(a.promote)) for problem in problems]
        left_out = [reason for *_, reasons in chosen for reason in reasons]
        where = machine(a.device)
        rows = []
        for problem, variants, _ in chosen:
            fresh = [results_row(where, problem, one) for one in measure(problem, variants, a.device)]
            if a.out:
                _rows.append(a.out, fresh)
            rows += map(asdict, fresh)
    print(in_markdown(rows) if a.markdown else in_terminal(rows))
    for reason in left_out:
        print(reason)
    if beyond := [one for one in results_of(rows) if one.beyond]:
        raise VerificationFailed(f"{len(beyond)} of {len(rows)} results err more than allowed, first {beyond[0].name}")
    return 0


def machine(device: str) -> _rows.Machine:
    """Raises EnvironmentUnusable for a GPU that these kernels do not run on."""
    where = _rows.machine(device)
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        raise EnvironmentUnusable(f"the FP8 convolutions run on an H100 or H200, this is {where.gpu}: use one")
    return where


def measure(problem: Problem, variants: Sequence[Variant], device: str) -> Iterator[Result]:
    """On all data and operands: bf16 first, then the variants in FP8."""
    for data, operands in product(DATA, OPERANDS):
        wide, narrow, inverse = make_operands(problem, data, operands, device)
        judged, op = problem.bf16(problem.part(wide)), problem.bf16_op
        exact = op.reference(**to_float64(judged))
        plain = Computed(op(**problem.bf16(wide)))
        verdict = compare(
            problem.part_of_result(plain.result), exact, op.reference(**judged), error_factor=op.error_factor
        )
        found: list[tuple[Variant, Computed, Verdict | None]] = [(Variant(BF16), plain, verdict)]
        for variant in variants:
            computed = problem.compute(problem.fp8(narrow, inverse, variant), variant)
            of_part = problem.fp8(problem.part(narrow), inverse, variant)
            judged_here = operands == "given"
            verdict = judge_fp8(problem, of_part, computed, exact, data == POSITIVE) if judged_here else None
            found.append((variant, computed, verdict))
        for variant, computed, verdict in found:
            result = Result(
                *(problem.op.name, variant.name, problem.reduction, data, operands),
                *(variant.promote, computed.summed, computed.parts, exact.numel()),
                *errors(problem.part_of_result(computed.result), exact),
                *allowances(verdict, exact),
            )
            if not math.isfinite(result.rms):
                raise VerificationFailed(f"not finite: {result.name}")
            yield result


def judge_fp8(problem: Problem, of_part: dict[str, Any], computed: Computed, exact: Tensor, one_sign: bool) -> Verdict:
    """By the op's own rule, or that of products of one sign; `of_part` are the arguments for what is judged."""
    op = problem.op
    assert op.eps is not None
    eps = op.eps(**of_part)
    if one_sign and computed.summed is not None:
        eps = fp8_sum_eps(computed.summed, one_sign=True)
    eager = op.reference(**of_part)
    return compare(problem.part_of_result(computed.result), exact, eager, error_factor=op.error_factor, eps=eps)


def make_operands(problem: Problem, data: str, operands: str, device: str) -> tuple[Pair, Pair, Tensor]:
    """The two operands in bf16 and in FP8, and the inverse scales of the latter."""
    one, other = (random_nhwc(shape, torch.float32, device, seed=seed) for seed, shape in enumerate(problem.shapes))
    pair = (one.abs(), other.abs()) if data == "positive" else (one, other)
    if operands == "given":
        first, second = (
            (tensor * GIVEN_SCALE).to(FORMATS[name].dtype) for tensor, name in zip(pair, problem.formats, strict=True)
        )
        return (first.bfloat16(), second.bfloat16()), (first, second), torch.ones(2, device=device)
    first, second = (tensor.bfloat16() for tensor in pair)
    formats = problem.formats
    (first8, _), (second8, _), inverse = quantised((first, formats[0]), (second, formats[1]), quads=False)
    return (first, second), (first8, second8), inverse


def errors(actual: Tensor, exact: Tensor) -> tuple[float, float, float, float]:
    """(rms, largest, bias, rounding_rms), see the module's docstring."""
    size, error = rms(exact), actual.double() - exact
    bias = ((error * exact).sum() / exact.square().sum()).item()
    return rms(error) / size, largest(error) / size, bias, rms(exact.bfloat16().double() - exact) / size


def allowances(verdict: Verdict | None, exact: Tensor) -> tuple[float | None, float | None]:
    """What a verdict allows, relative to the root mean square of the exact result."""
    return (None, None) if verdict is None else (verdict.allowed_rms / rms(exact), verdict.allowed_max / rms(exact))


# --- rows ------------------------------------------------------------------------------------------------------------


def results_row(where: _rows.Machine, problem: Problem, result: Result) -> _rows.Row:
    (images, *_), _ = problem.shapes
    return _rows.plain_row(
        where,
        subject=f"{SUBJECT}{result.op}",
        stack="ridgeline",
        stack_version=where.commit,
        recipe=result.computed,
        dtype=BF16 if result.computed == BF16 else f"fp8 {' '.join(problem.formats)}",
        batch=images,
        shape=" ".join("x".join(map(str, shape)) for shape in problem.shapes),
        region="kernel",
        extra={name: value for name, value in asdict(result).items() if name != "op"},
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--channels", nargs="+", type=int, default=[128, 256, 512, 1024], help="that conv2d_fp8 reduces"
    )
    parser.add_argument(
        "--images", nargs="+", type=int, default=[1, 8, 32, 128], help="whose pixels a gradient reduces"
    )
    parser.add_argument("--side", type=int, default=32, help="of their maps, in pixels (default %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="filters, channels of gradients (default %(default)s)")
    parser.add_argument("--promote", nargs="+", type=int, default=[0, 128, 256, 1024], help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="cuda or cpu, where references run (default %(default)s)")
    parser.add_argument("--out", type=Path, help="append rows to this JSONL file as they come")
    parser.add_argument("--rows", type=Path, help="measure nothing: the newest run in this JSONL file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as the documentation has them")
    a = parser.parse_args(argv)
    if a.device not in ("cuda", "cpu"):
        raise UsageError(f"device must be cuda or cpu, got {a.device!r}")
    for name in ("channels", "images", "width", "side", "promote"):
        least = 0 if name == "promote" else 1
        for value in getattr(a, name) if isinstance(getattr(a, name), list) else [getattr(a, name)]:
            if value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
    if wrong := [value for value in (*a.channels, a.width) if value % 16]:
        raise UsageError(f"channels and width must be multiples of 16, got {wrong[0]}")
    if a.rows and a.out:
        raise UsageError("--rows measures nothing, so that --out would stay empty: pass one of the two")
    return a


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        print(f"benchmarks/fp8_error.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
