"""FLOPs an element of operators that are no matrix products: the numbers of `ridgeline.cost`, kept free of torch."""

from __future__ import annotations

# one for each addition, multiplication, comparison and call of exp, log, tanh and the like; none for a select or cast
POINTWISE_FLOPS: dict[str, float] = {
    name: flops
    for flops, names in (
        (0, "where masked_fill"),
        (
            1,
            """add sub rsub mul div neg abs square sqrt rsqrt reciprocal pow exp exp2 log log2 log1p sin cos tanh erf
            sign floor ceil round relu clamp_min clamp_max maximum minimum threshold_backward eq ne lt le gt ge isnan
            isinf isfinite logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not""",
        ),
        (2, "clamp hardtanh hardtanh_backward leaky_relu leaky_relu_backward addcmul addcdiv native_dropout_backward"),
        (3, "lerp sigmoid sigmoid_backward tanh_backward hardsigmoid softplus mse_loss_backward"),
        (4, "silu hardswish_backward"),
        (5, "gelu hardswish mish"),
        (8, "silu_backward"),
        (10, "gelu_backward mish_backward"),
    )
    for name in names.split()
}

FOREACH_FLOPS: dict[str, float] = {
    "add": 1, "sub": 1, "mul": 1, "div": 1, "neg": 1, "sqrt": 1, "reciprocal": 1, "maximum": 1, "clamp_min": 1,
    "clamp_max": 1, "addcmul": 2, "addcdiv": 2, "lerp": 3,
}  # fmt: skip

# training 8 (mean 1, centred square 3, normalise 2, scale and shift 2), evaluation 2, backward 11
NORM_FLOPS: dict[str, float] = {"training": 8, "evaluation": 2, "backward": 11}

# decay, moments, bias correction and update of one parameter
FUSED_OPTIMIZER_FLOPS: dict[str, float] = {"adam": 14, "sgd": 6}
