"""Kernels with their meaning and cost. Tests, benchmarks and `ridgeline sass` follow `ALL`: what a graph may export.

`PASSES`, `UPSAMPLED` and `CONCAT`, for sm_90 alone, and `FP8` are convolutions of training, `ATTENTION` its attention:
in no exported graph. `NORMS` are its norms, of which such a graph has the first alone.
"""

from ridgeline.errors import UsageError
from ridgeline.kernels import (
    attention_packed,
    attention_packed_backward,
    attention_position,
    concat_conv2d,
    concat_conv2d_wgrad,
    conv2d_act,
    conv2d_dgrad,
    conv2d_fp8,
    conv2d_fprop,
    conv2d_wgrad,
    conv2d_wgrad_fp8,
    conv_chain,
    conv_pair_chain,
    depthwise_conv2d_act,
    detect_topk,
    group_norm_silu,
    group_norm_silu_backward,
    group_norm_silu_backward_concat,
    group_norm_silu_backward_fp8,
    group_norm_silu_fp8,
    letterbox_conv_act,
    max_pool_chain,
    quantize_fp8,
    upsample_concat_conv_act,
    upsample_conv2d,
    upsample_conv2d_dgrad,
    upsample_conv2d_wgrad,
)
from ridgeline.kernels._op import Op as Op
from ridgeline.kernels._op import Sample as Sample

ALL = (
    conv2d_act.OP,
    conv_chain.OP,
    conv_pair_chain.OP,
    depthwise_conv2d_act.OP,
    upsample_concat_conv_act.OP,
    letterbox_conv_act.OP,
    max_pool_chain.OP,
    attention_position.OP,
    detect_topk.OP,
    group_norm_silu.OP,
)

PASSES = (conv2d_fprop.OP, conv2d_dgrad.OP, conv2d_wgrad.OP)
ATTENTION = (attention_packed.OP, attention_packed_backward.OP)
UPSAMPLED = (upsample_conv2d.OP, upsample_conv2d_dgrad.OP, upsample_conv2d_wgrad.OP)
CONCAT = (concat_conv2d.OP, concat_conv2d_wgrad.OP)
FP8 = (conv2d_fp8.OP, conv2d_wgrad_fp8.OP)
NORMS = (
    group_norm_silu.OP,
    group_norm_silu_backward.OP,
    group_norm_silu_fp8.OP,
    group_norm_silu_backward_fp8.OP,
)
# forms of an op that read its table
TUNED_AS = {
    attention_packed_backward.SUMMED_OP: attention_packed_backward.OP,
    group_norm_silu_backward.SUMMED_OP: group_norm_silu_backward.OP,
    group_norm_silu_backward_concat.OP: group_norm_silu_backward.OP,
    group_norm_silu_backward_concat.SUMMED_OP: group_norm_silu_backward.OP,
    group_norm_silu_backward_fp8.SUMMED_OP: group_norm_silu_backward_fp8.OP,
}

# the op behind a graph node's target, whether it returns its result or writes it
BY_OVERLOAD = {overload: op for op in ALL for overload in (op.overload, op.into) if overload is not None}
# likewise in the graphs of a training step
BY_TRAINING_OVERLOAD = BY_OVERLOAD | {
    op.overload: op for op in (*PASSES, *ATTENTION, *UPSAMPLED, *CONCAT, *FP8, *NORMS, *TUNED_AS, quantize_fp8.OP)
}


def find(name: str) -> Op:
    """The op called `name`. Raises UsageError for an unknown one."""
    for op in ALL:
        if op.name == name:
            return op
    raise UsageError(f"kernel must be one of {', '.join(op.name for op in ALL)}, got {name!r}")
