"""Pointwise operators, forward and backward, and the lecture's elementwise chain, unfused and fused.

FLOPs an element: one for each addition, multiplication, division, comparison and each call of exp, log, tanh, erf, sin
and the like; none for a select, a copy or a cast. So sigmoid is 3 (exp, add, divide) and SiLU 4. Backward formulas
count what the derivative does with the operands it is given. An in-place form (`add_`) reads and writes its first
operand and so costs the same bytes.
"""

from __future__ import annotations

import torch

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Formula, per_input, per_output, table, write_only


def chain_unfused(operations: int, numel: int, dtype: torch.dtype) -> Cost:
    """A chain of binary operations in one loop each: every loop loads two arrays and stores one."""
    size = dtype.itemsize * numel
    return Cost(operations * numel, 2 * operations * size, operations * size)


def chain_fused(operations: int, numel: int, dtype: torch.dtype) -> Cost:
    """The same chain in one loop: operations + 1 arrays in, one out, nothing in between."""
    size = dtype.itemsize * numel
    return Cost(operations * numel, (operations + 1) * size, size)


def ops_per_access(cost: Cost, dtype: torch.dtype) -> float:
    """Intensity in the lecture's unit: operations per element loaded or stored (1/3 unfused, 3/5 fused for three)."""
    return cost.flops * dtype.itemsize / cost.bytes if cost.bytes else 0.0


def _each(flops: float) -> Formula:
    return per_output("pointwise", flops)


FORMULAS = {
    **table(
        (
            _each(0),
            "where masked_fill positive real imag bernoulli multinomial normal",
        ),
        (
            _each(1),
            """add sub rsub subtract mul multiply div divide true_divide floor_divide remainder fmod neg negative abs
            square sqrt rsqrt reciprocal pow float_power exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan
            sinh cosh tanh asinh acosh atanh atan2 erf erfc erfinv lgamma digamma sign sgn signbit floor ceil round
            trunc frac relu clamp_min clamp_max maximum minimum fmax fmin threshold threshold_backward eq ne lt le gt
            ge isnan isinf isfinite isneginf isposinf logical_and logical_or logical_xor logical_not bitwise_and
            bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__
            __lshift__ __rshift__ heaviside copysign sinc ldexp""",
        ),
        (_each(2), "clamp hardtanh hardtanh_backward leaky_relu leaky_relu_backward addcmul addcdiv xlogy hypot"),
        (_each(2), "native_dropout native_dropout_backward _masked_scale nan_to_num prelu _prelu_kernel relu6"),
        (
            _each(3),
            "lerp sigmoid sigmoid_backward tanh_backward hardsigmoid softplus log_sigmoid_forward elu celu selu",
        ),
        (_each(3), "mse_loss_backward _prelu_kernel_backward logit hardsigmoid_backward softshrink hardshrink selu"),
        (_each(4), "silu elu_backward softplus_backward log_sigmoid_backward hardswish_backward logit_backward"),
        (_each(4), "smooth_l1_loss_backward huber_loss_backward"),
        (_each(5), "gelu hardswish mish glu binary_cross_entropy_backward glu_backward"),
        (_each(8), "silu_backward"),
        (_each(10), "gelu_backward mish_backward"),
        # Fills, and random numbers: a counter-based generator works on integers, off the FP32 pipe.
        (
            write_only("pointwise"),
            """fill fill_ zero zero_ zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full eye
            arange linspace logspace scalar_tensor rand randn randint randperm rand_like randn_like randint_like normal_
            uniform uniform_ random random_ bernoulli_ exponential exponential_ geometric_ cauchy_ log_normal_""",
        ),
    ),
    # Losses: pointwise, then one sum; the result is a scalar unless reduction is "none".
    **table(
        (per_input("reduction", 3), "mse_loss"),
        (per_input("reduction", 5), "smooth_l1_loss huber_loss soft_margin_loss"),
        (per_input("reduction", 6), "binary_cross_entropy binary_cross_entropy_with_logits"),
    ),
}
