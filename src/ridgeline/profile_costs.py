"""FLOPs and compulsory bytes of the operators a trace recorded, from the shapes in it and without torch.

The conventions are those of `ridgeline.cost` (a test holds both to the same numbers): 2 FLOP a multiply-accumulate,
every operand read once, every result written once, a grouped weight gradient divided by its groups once. Results are
not in a trace: their shapes follow from the arguments. What no formula knows has no work, never zero.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ridgeline.call_arguments import Arguments, Unknown, by
from ridgeline.call_work import Conv, Formula, Work, forward, shapes_of, spread
from ridgeline.own_costs import OWN
from ridgeline.profile_flops import FOREACH_FLOPS, FUSED_OPTIMIZER_FLOPS, NORM_FLOPS, POINTWISE_FLOPS
from ridgeline.trace import Call

_STATISTIC_BYTES = 4  # saved means and deviations are fp32


def works_of(call: Call, element_bytes: int = 0) -> tuple[Work, ...] | None:
    """The work of one call; both gradients of a convolution apart; None where no formula knows, or shapes are missing.

    element_bytes   of the members of tensor lists, whose type a trace does not give; 0 where unknown
    """
    if not call.shapes:
        return None
    formula = _FORMULAS.get(call.name) or _FORMULAS.get(call.name.removesuffix("_"))
    if call.name.startswith("triton_"):
        formula = _generated
    if formula is None:
        return None
    arguments = Arguments(call, element_bytes)
    try:
        works = formula(arguments)
    except (Unknown, IndexError, ValueError, ZeroDivisionError):  # arguments of another overload than the formula's
        return None
    return works if isinstance(works, tuple) else (works,)


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(a: Arguments) -> Work:
    stride, padding, dilation, extra = (a.numbers(place) for place in (3, 4, 5, 7))
    conv = Conv(a.dims(0), a.dims(1), stride, padding, dilation, a.flag(6), extra or (0,), a.numbers(8)[0])
    return forward(a, conv, 0, 1, 2)


def _conv2d(a: Arguments) -> Work:
    conv = Conv(a.dims(0), a.dims(1), a.numbers(3), a.numbers(4), a.numbers(5), groups=a.numbers(6)[0])
    return forward(a, conv, 0, 1, 2)


def _cudnn_convolution(a: Arguments) -> Work:
    conv = Conv(a.dims(0), a.dims(1), a.numbers(3), a.numbers(2), a.numbers(4), groups=a.numbers(5)[0])
    return forward(a, conv, 0, 1)


def _convolution_backward(a: Arguments) -> tuple[Work, ...]:
    stride, padding, dilation, extra = (a.numbers(place) for place in (4, 5, 6, 8))
    conv = Conv(a.dims(1), a.dims(2), stride, padding, dilation, a.flag(7), extra or (0,), a.numbers(9)[0])
    wants_x, wants_weight, wants_bias = a.flags(10)
    grad, item = prod(a.dims(0)), a.item(0)
    bias_bytes = a.dims(0)[1] * item if wants_bias else 0
    works = []
    if wants_x:
        works.append(Work(conv.flops, a.bytes(0, 2) + prod(conv.x) * a.item(1), f"dgrad {conv}", "dgrad"))
    if wants_weight:
        flops = conv.flops + (grad if wants_bias else 0)
        written = prod(conv.weight) * a.item(2) + bias_bytes
        works.append(Work(flops, a.bytes(0, 1) + written, f"wgrad {conv}", "wgrad"))
    elif wants_bias:
        works.append(Work(grad, a.bytes(0) + bias_bytes, f"bgrad {by(a.dims(0))}"))
    return tuple(works)


# -- matrix products and attention -------------------------------------------------------------------------------------


def _product(left: int, right: int, *others: int, transposed: bool = False) -> Formula:
    def formula(a: Arguments) -> Work:
        first, second = a.dims(left), a.dims(right)
        columns = (second[-2:-1] if transposed else second[-1:]) if len(second) > 1 else ()
        result = prod((*first[:-1], *columns))
        text = f"{by(first)} @ {by(second)}{'ᵀ' if transposed else ''}"
        return Work(2 * result * first[-1], a.bytes(left, right, *others) + result * a.item(left), text)

    return formula


def _attention(first: int, *, backward: bool) -> Formula:
    def formula(a: Arguments) -> Work:
        q, k, v = (a.dims(first + place) for place in range(3))
        scores = prod(q[:-1]) * k[-2]
        if backward:
            written, flops = a.bytes(first, first + 1, first + 2), 2 * scores * (3 * q[-1] + 2 * v[-1])
        else:
            # beside the output the logarithm of each row's sum, in fp32, for the backward pass
            written = prod(q[:-1]) * (v[-1] * a.item(first) + _STATISTIC_BYTES)
            flops = 2 * scores * (q[-1] + v[-1])
        text = f"{'grad ' if backward else ''}q {by(q)}, k {by(k)}, v {by(v)}"
        return Work(flops, a.all_bytes() + written, text)

    return formula


# -- what moves memory -------------------------------------------------------------------------------------------------


def _pointwise(flops: float) -> Formula:
    """All tensors read, one of their broadcast shape written, in the widest of their types.

    Numbers appear as tensors without axes; they are neither counted nor do they widen the result.
    """

    def formula(a: Arguments) -> Work:
        places = [place for place in range(len(a.call.shapes)) if a.has(place)]
        shaped = [place for place in places if a.dims(place)] or places
        if not shaped:
            raise Unknown
        axes = max(len(a.dims(place)) for place in shaped)
        padded = [(1,) * (axes - len(a.dims(place))) + a.dims(place) for place in shaped]
        result = prod(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))
        item = 1 if a.call.name.removesuffix("_") in _COMPARISONS else max(map(a.item, shaped))
        return Work(flops * result, a.bytes(*shaped) + result * item, shapes_of(a.call))

    return formula


_COMPARISONS = {f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite")}


def _norm(flops: float, results: Callable[[Arguments], int]) -> Formula:
    def formula(a: Arguments) -> Work:
        return Work(flops * prod(a.dims(0)), a.all_bytes() + results(a), shapes_of(a.call))

    return formula


def _batch_norm(a: Arguments) -> Work:
    # a trace of `training` = False is an affine map; running statistics are read, updated and written back
    trains = a.flag(5)
    statistics = 2 * a.dims(0)[1] * _STATISTIC_BYTES
    written = a.bytes(0) + (statistics + a.bytes(3, 4) if trains else 0)
    flops = NORM_FLOPS["training" if trains else "evaluation"] * prod(a.dims(0))
    return Work(flops, a.all_bytes() + written, shapes_of(a.call))


def _group_statistics(a: Arguments) -> int:
    return a.bytes(0) + 2 * a.numbers(3)[0] * a.numbers(6)[0] * a.item(0)


def _layer_statistics(a: Arguments) -> int:
    return a.bytes(0) + 2 * (prod(a.dims(0)) // max(prod(a.numbers(1)), 1)) * _STATISTIC_BYTES


def _norm_gradients(x: int, weight: int) -> Callable[[Arguments], int]:
    """dx, and where there is a weight its gradient and that of the bias."""
    return lambda a: a.bytes(x) + 2 * a.bytes(weight)


def _per_input(flops: float) -> Formula:
    """A reduction: the first tensor read; what is written is small beside it, and its shape is in no argument."""
    return lambda a: Work(flops * prod(a.dims(0)), a.bytes(0), shapes_of(a.call))


def _same_shape(flops: float, *read: int) -> Formula:
    """The tensors at `read` read, one like the first of them written."""
    return lambda a: Work(flops * prod(a.dims(read[0])), a.bytes(*read) + a.bytes(read[0]), shapes_of(a.call))


def _written(a: Arguments) -> Work:
    return Work(0, a.bytes(0), shapes_of(a.call))


def _copied(a: Arguments) -> Work:
    return Work(0, a.bytes(0, 1), shapes_of(a.call))


def _gathered(index: int) -> Formula:
    """The index read; of the table one element for each of the index read, at most all of it, and written."""

    def formula(a: Arguments) -> Work:
        written = prod(a.dims(index)) * a.item(0)
        return Work(0, a.bytes(index) + min(written, a.bytes(0)) + written, shapes_of(a.call))

    return formula


def _rows_gathered(table: int, index: int, axis: int | None) -> Formula:
    """The index read; of the table a slice for each of the index read, at most all of it, and written."""

    def formula(a: Arguments) -> Work:
        dims, rows = a.dims(table), prod(a.dims(index))
        along = a.numbers(axis)[0] if axis is not None else 0
        written = rows * prod(dims) // dims[along] * a.item(table)
        return Work(0, a.bytes(index) + min(written, a.bytes(table)) + written, shapes_of(a.call))

    return formula


def _index_put(a: Arguments) -> Work:
    """Values read, as many elements of the target read and written; the indices, a list with gaps, are not recorded."""
    touched = min(a.bytes(0), prod(a.dims(2)) * a.item(0))
    return Work(prod(a.dims(2)), a.bytes(2) + 2 * touched, shapes_of(a.call))


def _concatenated(a: Arguments) -> Work:
    return Work(0, 2 * a.list_bytes(0), shapes_of(a.call))


def _max_pool(a: Arguments) -> Work:
    x, axes = a.dims(0), 2
    kernel = spread(a.numbers(1), axes)
    stride = spread(a.numbers(2), axes) if a.numbers(2) else kernel
    padding, dilation = spread(a.numbers(3), axes), spread(a.numbers(4), axes)
    up = [step - 1 if a.flag(5) else 0 for step in stride]
    out = [
        (size + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1 + up[i]) // stride[i] + 1
        for i, size in enumerate(x[-axes:])
    ]
    result = prod(x[:-axes]) * prod(out)
    # an int64 index beside every maximum
    return Work(result * prod(kernel), a.bytes(0) + result * (a.item(0) + 8), shapes_of(a.call))


def _max_pool_backward(a: Arguments) -> Work:
    return Work(prod(a.dims(0)), a.bytes(0, 7) + prod(a.dims(1)) * a.item(0), shapes_of(a.call))


def _upsample(flops: float) -> Formula:
    def formula(a: Arguments) -> Work:
        x = a.dims(0)
        sizes = a.numbers(1)
        if not sizes:  # the overload with factors has them last
            last = len(a.call.concrete) - 1
            sizes = tuple(int(size * factor) for size, factor in zip(x[2:], a.factors(last), strict=True))
        result = prod(x[:2]) * prod(sizes)
        return Work(flops * result, a.bytes(0) + result * a.item(0), shapes_of(a.call))

    return formula


def _upsample_backward(flops: float) -> Formula:
    return lambda a: Work(flops * prod(a.dims(0)), a.bytes(0) + prod(a.numbers(2)) * a.item(0), shapes_of(a.call))


def _foreach(flops: float) -> Formula:
    """All tensors read, the first list written."""
    return lambda a: Work(flops * a.list_numel(0), a.all_bytes() + a.list_bytes(0), shapes_of(a.call))


def _foreach_norm(a: Arguments) -> Work:
    return Work(2 * a.list_numel(0), a.list_bytes(0), shapes_of(a.call))


def _fused_optimizer(flops: float) -> Formula:
    """Parameters, gradients and states read; all but the gradients written. Adam's step counters come last."""
    return lambda a: Work(flops * a.list_numel(0), a.all_bytes() + a.all_bytes() - a.list_bytes(1), shapes_of(a.call))


def _generated(a: Arguments) -> Work:
    """A kernel that Inductor wrote: its pointers are its arguments, each read or written once.

    Its sizes come last and are the only numbers among them: no argument is touched at more places than they span, as
    when it reads a slice.
    """
    places = range(len(a.call.shapes))
    sizes = [number for place in places if not a.has(place) for number in a.numbers(place)]
    span = prod(max(size, 1) for size in sizes)
    touched = sum(min(a.bytes(place), span * a.item(place)) for place in places if a.has(place))
    return Work(0, touched if sizes else a.all_bytes(), shapes_of(a.call))


def _table(*groups: tuple[Formula, str]) -> dict[str, Formula]:
    return {f"aten::{name}": formula for formula, names in groups for name in names.split()}


_SDPA = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]

_FORMULAS: dict[str, Formula] = {
    **{f"aten::{name}": _pointwise(flops) for name, flops in POINTWISE_FLOPS.items()},
    **{f"aten::_foreach_{name}": _foreach(flops) for name, flops in FOREACH_FLOPS.items()},
    **_table(
        (_convolution, "convolution _convolution convolution_overrideable"),
        (_conv2d, "conv1d conv2d conv3d"),
        (_cudnn_convolution, "cudnn_convolution"),
        (_convolution_backward, "convolution_backward"),
        (_product(0, 1), "mm bmm mv dot _scaled_mm _int_mm"),
        (_product(1, 2, 0), "addmm baddbmm addmv _addmm_activation"),
        (_product(0, 1, 2, transposed=True), "linear"),
        (_attention(0, backward=False), " ".join(_SDPA)),
        (_attention(1, backward=True), " ".join(f"{name}_backward" for name in _SDPA)),
        (_batch_norm, "native_batch_norm cudnn_batch_norm miopen_batch_norm"),
        (_norm(NORM_FLOPS["training"], _group_statistics), "native_group_norm"),
        (_norm(NORM_FLOPS["training"], _layer_statistics), "native_layer_norm"),
        (_norm(NORM_FLOPS["backward"], _norm_gradients(0, 2)), "native_batch_norm_backward cudnn_batch_norm_backward"),
        (_norm(NORM_FLOPS["backward"], _norm_gradients(0, 4)), "native_group_norm_backward"),
        (_norm(NORM_FLOPS["backward"], _norm_gradients(0, 5)), "native_layer_norm_backward"),
        (_same_shape(5, 0), "_softmax _log_softmax _safe_softmax"),
        (_same_shape(4, 0, 1), "_softmax_backward_data _log_softmax_backward_data"),
        (_per_input(1), "sum mean prod amax amin max min any all argmax argmin cumsum nonzero"),
        (_per_input(2), "linalg_vector_norm norm"),
        (_per_input(4), "var std var_mean logsumexp"),
        (_copied, "copy_"),
        (_same_shape(0, 0), "clone roll flip"),
        (_written, "fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_"),
        (_concatenated, "cat stack"),
        (_gathered(2), "gather"),
        (_index_put, "_index_put_impl_"),
        (_rows_gathered(0, 1, None), "embedding"),
        (_rows_gathered(0, 2, 1), "index_select"),
        (_max_pool, "max_pool2d_with_indices"),
        (_max_pool_backward, "max_pool2d_with_indices_backward"),
        (_upsample(0), "upsample_nearest2d _upsample_nearest_exact2d"),
        (_upsample(8), "upsample_bilinear2d"),
        (_upsample_backward(1), "upsample_nearest2d_backward _upsample_nearest_exact2d_backward"),
        (_upsample_backward(8), "upsample_bilinear2d_backward"),
        (_foreach_norm, "_foreach_norm"),
        (_fused_optimizer(FUSED_OPTIMIZER_FLOPS["adam"]), "_fused_adam_ _fused_adamw_"),
        (_fused_optimizer(FUSED_OPTIMIZER_FLOPS["sgd"]), "_fused_sgd_"),
    ),
    **{f"ridgeline::{name}": formula for name, formula in OWN.items()},
}
