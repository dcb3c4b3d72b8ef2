"""Normalisations: batch, group, layer and RMS, forward and backward.

FLOPs an element: training forward 8 (mean 1, centred square 3, normalise 2, scale and shift 2), evaluation 2 (scale
and shift with folded constants), RMS 4, backward 11 (x-hat 2, its two sums 3, the gradient 6). Bytes are compulsory
ones: x once, y once. A kernel that cannot keep a slab on chip reads x twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ridgeline.cost._formula import Formula, Work, per_input, table, work

TRAIN_FLOPS = 8
EVAL_FLOPS = 2
RMS_FLOPS = 4
BACKWARD_FLOPS = 11


def batch_norm_trains(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a batch norm call computes batch statistics, from its operator name and arguments."""
    if name in ("aten._native_batch_norm_legit_no_training", "aten._batch_norm_no_update"):
        return False
    if name == "aten._native_batch_norm_legit" and len(args) == 6:  # the overload without running statistics
        return True
    return name == "aten._batch_norm_with_update" or bool(args[5])


def _training(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *_args: Any, result: Any) -> Work:
    # Running statistics are read, updated and written back.
    return work(TRAIN_FLOPS * x.numel(), (x, weight, bias, mean, var), (result, mean, var))


def _evaluation(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *_args: Any, result: Any) -> Work:
    return work(EVAL_FLOPS * x.numel(), (x, weight, bias, mean, var), result)


def _batch_norm(x: Tensor, weight: Any, bias: Any, *args: Any, result: Any) -> Work:
    if len(args) == 3:  # the overload without running statistics: (…, training, momentum, eps)
        return work(TRAIN_FLOPS * x.numel(), (x, weight, bias), result)
    mean, var, training = args[:3]
    return (_training if training else _evaluation)(x, weight, bias, mean, var, result=result)


FORMULAS = {
    **table(
        (Formula("norm", _batch_norm), "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm"),
        (Formula("norm", _training), "_batch_norm_with_update"),
        (Formula("norm", _evaluation), "_native_batch_norm_legit_no_training _batch_norm_no_update"),
        (per_input("norm", TRAIN_FLOPS), "native_group_norm native_layer_norm"),
        (per_input("norm", RMS_FLOPS), "_fused_rms_norm"),
        (per_input("norm", BACKWARD_FLOPS), "native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward"),
        (per_input("norm", BACKWARD_FLOPS), "native_group_norm_backward native_layer_norm_backward"),
        (per_input("norm", BACKWARD_FLOPS), "_fused_rms_norm_backward"),
    ),
}
