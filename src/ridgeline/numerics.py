"""The one tolerance rule: an operator may err about as much as plain PyTorch errs in the same dtype, and no more.

    allowed = error_factor * error(eager in dtype, float64 reference) + eps * size(reference)

once with the root mean square as `error` and `size`, once with the maximum; both must hold. The maximum alone
misses a 1 % scale error on a large fp16 map, the root mean square alone misses one wrong element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16_EPS = 2.0**-7
_FP8_CUT = 2.0**-13  # the last bit that Hopper's FP8 sums keep: DeepSeek-V3's technical report, section 3.3.2
TF32_EPS = 2.0**-10  # ten explicit mantissa bits, as fp16; the storage dtype is fp32, so `finfo` cannot know


@dataclass(frozen=True)
class Verdict:
    """What was compared and whether it holds; ask `.passed`, a bare Verdict refuses to be a truth value."""

    rms_error: float
    max_error: float
    allowed_rms: float
    allowed_max: float
    nonfinite: int  # NaN or infinite elements in any of the three tensors
    numel: int

    @property
    def passed(self) -> bool:
        # a NaN or infinite element makes its own error or its own allowance infinite, so it is counted, not compared
        return self.nonfinite == 0 and self.rms_error <= self.allowed_rms and self.max_error <= self.allowed_max

    @property
    def reason(self) -> str:
        """One sentence for a log or an assertion."""
        if self.nonfinite:
            return f"{self.nonfinite} NaN or infinite elements among {self.numel} outputs and their references"
        return (
            f"RMS error {self.rms_error:.3g} (allowed {self.allowed_rms:.3g}), "
            f"maximum error {self.max_error:.3g} (allowed {self.allowed_max:.3g}), {self.numel} elements"
        )

    def __bool__(self) -> bool:
        raise TypeError("Verdict has no truth value: ask verdict.passed")


def compare(
    actual: Tensor, reference64: Tensor, eager: Tensor, *, error_factor: float = 2.0, eps: float | None = None
) -> Verdict:
    """Judge `actual` by the rule above.

    actual, eager   same dtype and shape
    reference64     float64, same shape
    eps             relative rounding of the arithmetic; None means that of `actual`'s dtype, see also TF32_EPS
    """
    if not actual.shape == reference64.shape == eager.shape:
        raise ValueError(
            f"compare: shapes must be equal, got actual {tuple(actual.shape)}, "
            f"reference {tuple(reference64.shape)}, eager {tuple(eager.shape)}"
        )
    if reference64.dtype != torch.float64:
        raise TypeError(f"compare: the reference must be float64, got {reference64.dtype}")
    if eager.dtype != actual.dtype:
        raise TypeError(f"compare: eager must have the dtype of actual, got {eager.dtype} beside {actual.dtype}")
    eps = torch.finfo(actual.dtype).eps if eps is None else eps
    eager_error = eager.double() - reference64
    actual_error = actual.double() - reference64
    nonfinite = sum(int((~t.double().isfinite()).sum()) for t in (actual, reference64, eager))
    return Verdict(
        rms_error=rms(actual_error),
        max_error=largest(actual_error),
        allowed_rms=error_factor * rms(eager_error) + eps * rms(reference64),
        allowed_max=error_factor * largest(eager_error) + eps * largest(reference64),
        nonfinite=nonfinite,
        numel=actual.numel(),
    )


def fp8_sum_eps(products: int, *, one_sign: bool = False) -> float:
    """Of a sum of so many FP8 products, rounded to bf16: each instruction, 32 of them, cuts off, always toward zero.

    What is cut off is in proportion to the sum on its way, which may be larger than it ends up: a quarter is allowed.
    Of products of both signs the cuts of most cancel, and what counts is that of the sum, once an instruction: of 8
    million sums of 4,608 products on an H200 the worst had lost 0.8 % more than in proportion to the largest. Of
    products of one sign each loses half of the last bit, while the sum grows: 2^-16 of it a product. There 1.7, 3.7,
    7.6 and 14 % were lost of 1,152, 2,304, 4,608 and 9,216 (rows of fp8_error.jsonl).
    """
    cut = products * _FP8_CUT / 8 if one_sign else products * _FP8_CUT / 32
    return BF16_EPS + 1.25 * cut


def judge(
    call: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    arguments: Mapping[str, Any],
    *,
    error_factor: float = 2.0,
    eps: float | None = None,
) -> Verdict:
    """Run `call` beside `reference` in the arguments' dtype and in float64, and compare."""
    return compare(
        call(**arguments),
        reference(**to_float64(arguments)),
        reference(**arguments),
        error_factor=error_factor,
        eps=eps,
    )


def to_float64(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with every floating-point tensor, in lists too, in float64; all else as it is."""

    def exact(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [exact(part) for part in value]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: exact(value) for name, value in arguments.items()}


def rms(x: Tensor) -> float:
    """Root mean square; 0 for an empty tensor."""
    return math.sqrt(x.double().square().mean().item()) if x.numel() else 0.0


def largest(x: Tensor) -> float:
    """Largest magnitude; 0 for an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0
