"""Optimizers, weight averages and gradient clipping: fused and foreach operators over lists of tensors.

Bytes an fp32 parameter: AdamW 28, SGD with momentum 20, EMA (`_foreach_lerp_`) 12, clipping 4 (norm) + 8 (scale).
"""

from __future__ import annotations

from typing import Any

from ridgeline.cost._formula import Formula, Work, per_output, tensors_in, work

# Decay 2, first moment 3, second moment 4, bias-corrected denominator 3, update 2.
ADAM_FLOPS = 14
SGD_FLOPS = 6
ADAGRAD_FLOPS = 7


def _numel(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(tensors))


def _fused(flops: int) -> Formula:
    def formula(params: Any, grads: Any, *states: Any, result: Any, **kwargs: Any) -> Work:
        del result
        steps = states[-1] if len(states) > 1 else ()  # Adam counts steps, plain SGD has one state only
        # The loss scaler makes the kernel write the unscaled gradients back.
        unscaled = grads if kwargs.get("grad_scale") is not None else ()
        written = (params, [state for state in states if state is not steps], unscaled)
        return work(flops * _numel(params), (params, grads, states, kwargs), written)

    return Formula("optimizer", formula)


def _foreach(flops: float) -> Formula:
    def formula(first: Any, *args: Any, result: Any, **kwargs: Any) -> Work:
        return work(flops * _numel(first), (first, args, kwargs), first if result is None else result)

    return Formula("optimizer", formula)


def _foreach_copy(target: Any, source: Any, *_args: Any, result: Any) -> Work:
    del result
    return work(0, source, target)


def _foreach_zero(target: Any, *, result: Any) -> Work:
    del result
    return work(0, (), target)


def _foreach_norm(tensors: Any, *_args: Any, result: Any, **_kwargs: Any) -> Work:
    return work(2 * _numel(tensors), tensors, result)


# FLOPs an element, as in `pointwise`
_FOREACH = {
    "abs": 1, "add": 1, "sub": 1, "mul": 1, "div": 1, "neg": 1, "sqrt": 1, "rsqrt": 1, "reciprocal": 1, "pow": 1,
    "exp": 1, "log": 1, "sign": 1, "maximum": 1, "minimum": 1, "clamp_min": 1, "clamp_max": 1,
    "addcmul": 2, "addcdiv": 2, "sigmoid": 3, "lerp": 3,
}  # fmt: skip

FORMULAS = {
    "aten._fused_adam": _fused(ADAM_FLOPS),
    "aten._fused_adamw": _fused(ADAM_FLOPS),
    "aten._fused_sgd": _fused(SGD_FLOPS),
    "aten._fused_adagrad": _fused(ADAGRAD_FLOPS),
    **{f"aten._foreach_{name}": _foreach(flops) for name, flops in _FOREACH.items()},
    "aten._foreach_copy": Formula("optimizer", _foreach_copy),
    "aten._foreach_zero": Formula("optimizer", _foreach_zero),
    "aten._foreach_norm": Formula("optimizer", _foreach_norm),
    "aten._foreach_max": Formula("optimizer", _foreach_norm),
    "aten._amp_foreach_non_finite_check_and_unscale": _foreach(2),
    "aten._amp_update_scale": per_output("optimizer", 1),
}
