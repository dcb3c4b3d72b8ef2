"""Work of this project's operators from their recorded arguments: what `cost` in their kernels' files says of tensors.

A trace has no texts and no lists with gaps among the arguments: activations are taken as silu, and what the 1x1
convolutions of a chain read beside the map before them follows from their weights.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ridgeline.call_arguments import Arguments, by
from ridgeline.call_work import Conv, Formula, Work, forward, shapes_of, spread
from ridgeline.profile_flops import NORM_FLOPS
from ridgeline.trace import Dims

_SILU_FLOPS, _SILU_BACKWARD_FLOPS, _DROPOUT_FLOPS = 4, 8, 2
_AGAIN_FLOPS = 8  # mean 1, centred square 3, argument of the activation 4: what a gradient computes from x again
_BIAS_BYTES = 4  # folded from a norm's statistics, which are fp32
_BF16_BYTES = 2
_QUANTISING_FLOPS = 4  # of an element, as in kernels/quantize_fp8
_FP8_ROW_BYTES = 4 + 4 + 3 * 8  # scale, largest magnitude, three counts
_DETECTION_BYTES = 6 * 4  # box, score and class


def _conv_act(a: Arguments) -> Work:
    """Bias, residual and activation ride on the product."""
    x, weight = a.dims(0), a.dims(1)
    conv = Conv(x, weight, a.numbers(4), a.numbers(5), (1,), groups=x[1] // weight[1])
    return forward(a, conv, 0, 1, 2, 3)


def _conv2d_fprop(a: Arguments) -> Work:
    return forward(a, Conv(a.dims(0), a.dims(1), a.numbers(5), a.numbers(4), (1,)), 0, 1, 3)


def _conv2d_dgrad(a: Arguments) -> Work:
    """What a filter adds to the rows of y and padding takes away, or with stride 2 twice the rows, is what dx has."""
    (n, _, *out), weight, padding, (stride,) = a.dims(0), a.dims(1), spread(a.numbers(3), 2), a.numbers(4)
    added = [taps - 1 - 2 * p if stride == 1 else 0 for taps, p in zip(weight[2:], padding, strict=True)]
    image = [stride * size + more for size, more in zip(out, added, strict=True)]
    conv = Conv((n, weight[1], *image), weight, (stride,), padding, (1,))
    return Work(conv.flops, a.bytes(0, 1, 2) + prod(conv.x) * a.item(0), f"dgrad {conv}", "dgrad")


def _conv2d_wgrad(a: Arguments) -> Work:
    dy, x, filter_size = a.dims(0), a.dims(1), spread(a.numbers(2), 2)
    conv = Conv(x, (dy[1], x[1], *filter_size), a.numbers(4), a.numbers(3), (1,))
    return Work(conv.flops, a.bytes(0, 1) + prod(conv.weight) * a.item(0), f"wgrad {conv}", "wgrad")


def _concat_conv2d(a: Arguments) -> Work:
    return forward(a, Conv(_joined(a, 0, 1), a.dims(2), (1,), a.numbers(4), (1,)), 0, 1, 2)


def _concat_conv2d_wgrad(a: Arguments) -> Work:
    dy, x = a.dims(0), _joined(a, 1, 2)
    conv = Conv(x, (dy[1], x[1], *spread(a.numbers(3), 2)), (1,), a.numbers(4), (1,))
    return Work(conv.flops, a.bytes(0, 1, 2) + prod(conv.weight) * a.item(0), f"wgrad {conv}", "wgrad")


def _upsample_conv2d(a: Arguments) -> Work:
    (n, c, h, w), weight = a.dims(0), a.dims(1)
    conv = _upsampled((n, c, 2 * h, 2 * w), weight)
    return Work(_of_phases(conv), a.bytes(0, 1) + prod(conv.y) * a.item(0), f"upsampled {conv}", "fprop")


def _upsample_conv2d_dgrad(a: Arguments) -> Work:
    (n, _, *large), weight = a.dims(0), a.dims(1)
    conv = _upsampled((n, weight[1], *large), weight)
    moved_bytes = a.bytes(0, 1) + prod(conv.x) // 4 * a.item(0)
    return Work(_of_phases(conv), moved_bytes, f"dgrad upsampled {conv}", "dgrad")


def _upsample_conv2d_wgrad(a: Arguments) -> Work:
    (n, k, *large), c = a.dims(0), a.dims(1)[1]
    conv = _upsampled((n, c, *large), (k, c, 3, 3))
    moved_bytes = a.bytes(0, 1) + prod(conv.weight) * a.item(0)
    return Work(_of_phases(conv), moved_bytes, f"wgrad upsampled {conv}", "wgrad")


def _upsampled(x: Dims, weight: Dims) -> Conv:
    return Conv(x, weight, (1,), (1,), (1,))


def _of_phases(conv: Conv) -> int:
    """Each of four phases has 4 taps instead of 9."""
    return conv.flops * 4 // 9


def _conv2d_fp8(a: Arguments) -> Work:
    """Of the inverse scales two are read; the result is bf16."""
    conv = Conv(a.dims(0), a.dims(1), (1,), a.numbers(7), (1,))
    return Work(conv.flops, a.bytes(0, 1, 4) + prod(conv.y) * _BF16_BYTES, str(conv), "fprop")


def _conv2d_wgrad_fp8(a: Arguments) -> Work:
    """Of quads, see `kernels._quads`; what they hold twice is not counted."""
    (n, rows, k, columns, *lanes), (_, _, c, *_) = a.dims(0), a.dims(1)
    r, s = spread(a.numbers(3), 2)
    conv = Conv((n, c, lanes[1] * rows, lanes[0] * columns), (k, c, r, s), (1,), (r // 2, s // 2), (1,))
    moved_bytes = prod(conv.x) + prod(conv.y) + prod(conv.weight) * _BF16_BYTES
    return Work(conv.flops, moved_bytes, f"wgrad {conv}", "wgrad")


def _conv_chain(a: Arguments) -> Work:
    x, weight = a.dims(0), a.dims(1)
    conv = Conv(x, weight, a.numbers(7), a.numbers(8), (1,), groups=x[1] // weight[1])
    return _chained(a, conv, (0, 1, 2, 3), a.call.lists[0])


def _conv_pair_chain(a: Arguments) -> Work:
    """Two 3x3 convolutions, of which the second reads what the first never writes, then 1x1 ones."""
    first = Conv(a.dims(0), a.dims(1), (1,), (1,), (1,))
    second = Conv(first.y, a.dims(3), (1,), (1,), (1,))
    work = _chained(a, second, (0, 1, 2, 3, 4, 5), a.call.lists[0] if a.call.lists else ())
    return Work(
        work.flops + first.flops,
        work.bytes,
        f"{first} * {by(a.dims(3))}{work.shapes.removeprefix(str(second))}",
        work.pass_,
    )


def _chained(a: Arguments, conv: Conv, operands: tuple[int, ...], tails: tuple[Dims, ...]) -> Work:
    """`conv` and the 1x1 convolutions after it, with a bias each; only the last result is written."""
    n, channels, *size = conv.y
    pixels, item = n * prod(size), a.item(0)
    elements, biases = 0, sum(tail[0] for tail in tails)
    for filters, taken, *_ in tails:
        beside = taken - channels  # channels of another map, which stands after those of the one before
        elements += filters * taken + pixels * beside
        channels = filters
    flops = conv.flops + sum(2 * pixels * prod(tail) for tail in tails)
    words = "".join(f" * {by(tail)}" for tail in tails)
    moved_bytes = a.bytes(*operands) + (elements + pixels * channels) * item + biases * _BIAS_BYTES
    return Work(flops, moved_bytes, f"{conv}{words}", "fprop")


def _upsample_concat_conv_act(a: Arguments) -> Work:
    fine, weight = a.dims(1), a.dims(2)
    joined = (fine[0], weight[1], *fine[2:])
    return forward(a, Conv(joined, weight, (1,), (0,), (1,)), 0, 1, 2, 3)


def _letterbox_conv_act(a: Arguments) -> Work:
    """A convolution of a canvas that is never written: frame and tables are read in its place."""
    frame, rows, columns = a.dims(0), a.dims(3), a.dims(4)
    conv = Conv((*frame[:2], *rows, *columns), a.dims(1), a.numbers(5), a.numbers(6), (1,))
    # the frame is bytes; the result has the type of the weights
    return Work(conv.flops, a.bytes(0, 1, 2, 3, 4) + prod(conv.y) * a.item(1), str(conv), "fprop")


def _max_pool_chain(a: Arguments) -> Work:
    (size,), (count,) = a.numbers(1), a.numbers(2)
    return Work(
        count * size**2 * prod(a.dims(0)), (count + 2) * a.bytes(0), f"{by(a.dims(0))} {size}x{size} {count} times"
    )


def _attention_position(a: Arguments) -> Work:
    """softmax(qᵀk) v of every head, and a 3x3 convolution of v a channel."""
    n, _, *size = a.dims(0)
    channels, tokens = a.dims(1)[0], prod(size)
    (heads,), (key_channels,) = a.numbers(3), a.numbers(4)
    products = 2 * n * heads * tokens**2 * (key_channels + channels // heads)
    flops = products + 2 * n * channels * tokens * prod(a.dims(1)[2:])
    return Work(flops, a.bytes(0, 1, 2) + n * channels * tokens * a.item(0), f"qkv {by(a.dims(0))}, {heads} heads")


def _detect_topk(a: Arguments) -> Work:
    """One comparison a logit; every map read once."""
    logits = [a.dims(place) for place in (3, 4, 5)]
    rows = logits[0][0] * min(a.numbers(6)[0], sum(prod(dims[2:]) for dims in logits))
    return Work(sum(map(prod, logits)), a.all_bytes() + rows * _DETECTION_BYTES, shapes_of(a.call))


def _attention_packed(a: Arguments) -> Work:
    """Two matrix products; the softmax rides on them."""
    n, tokens, width = a.dims(0)
    (heads,) = a.numbers(1)
    out = n * tokens * width // 3
    moved_bytes = a.bytes(0) + out * a.item(0) + 4 * n * heads * tokens
    return Work(4 * tokens * out, moved_bytes, f"qkv {by(a.dims(0))}, {heads} heads")


def _attention_packed_backward(a: Arguments) -> Work:
    """Five matrix products."""
    n, tokens, width = a.dims(1)
    (heads,) = a.numbers(4)
    flops = 10 * tokens * (n * tokens * width // 3)
    return Work(flops, a.bytes(0, 1, 2, 3) + a.bytes(1), f"qkv {by(a.dims(1))}, {heads} heads")


def _attention_packed_backward_summed(a: Arguments) -> Work:
    work = _attention_packed_backward(a)
    n, _, width = a.dims(1)
    return replace(work, bytes=work.bytes + 4 * n * width)


def _group_norm_silu(a: Arguments) -> Work:
    # scale and shift are folded into gamma and beta
    flops = NORM_FLOPS["training"] + _SILU_FLOPS + _dropout(a, -1)
    return Work(flops * prod(_joined(a, 0, 7)), a.all_bytes() + a.bytes(0, 7), shapes_of(a.call))


def _group_norm_silu_backward(a: Arguments) -> Work:
    flops = NORM_FLOPS["backward"] + _AGAIN_FLOPS + _SILU_BACKWARD_FLOPS + _dropout(a, 12) + a.has(8)
    return Work(flops * prod(a.dims(1)), a.all_bytes() + a.bytes(1, 2, 3, 4, 5), shapes_of(a.call))


def _group_norm_silu_backward_concat(a: Arguments) -> Work:
    flops = NORM_FLOPS["backward"] + _AGAIN_FLOPS + _SILU_BACKWARD_FLOPS + _dropout(a, -1) + a.has(9)
    return Work(flops * prod(a.dims(0)), a.all_bytes() + a.bytes(1, 2, 3, 4, 5, 6), shapes_of(a.call))


def _group_norm_silu_fp8(a: Arguments) -> Work:
    flops = NORM_FLOPS["training"] + _SILU_FLOPS + _dropout(a, -1) + _QUANTISING_FLOPS
    whole, read = _joined(a, 0, 10), a.bytes(0, 1, 2, 6, 7, 8, 9, 10)
    return Work(flops * prod(whole), read + _in_fp8(a, whole, -4, True), shapes_of(a.call))


def _group_norm_silu_backward_fp8(a: Arguments) -> Work:
    flops = NORM_FLOPS["backward"] + _AGAIN_FLOPS + _SILU_BACKWARD_FLOPS + _dropout(a, 18) + a.has(11)
    read = a.bytes(0, 1, 2, 3, 7, 8, 9, 10, 11)
    written = a.bytes(2, 3, 7, 8) + (a.bytes(1) if a.flag(15) else 0)
    total = (flops + _QUANTISING_FLOPS) * prod(a.dims(1))
    return Work(total, read + written + _in_fp8(a, a.dims(1), 14, False), shapes_of(a.call))


def _quantize_fp8(a: Arguments) -> Work:
    # a trace has no words of a call: its quads may be a gradient's, but are counted as the larger ones of an activation
    return Work(_QUANTISING_FLOPS * prod(a.dims(0)), a.bytes(0) + _in_fp8(a, a.dims(0), 6, True), by(a.dims(0)))


def _joined(a: Arguments, first: int, second: int) -> Dims:
    """Of a map, and of another whose channels follow, if one stands there."""
    n, c, *image = a.dims(first)
    return n, c + (a.dims(second)[1] if a.has(second) else 0), *image


def _in_fp8(a: Arguments, map_: Dims, quads: int, beside: bool) -> int:
    """Bytes of a map in FP8, of its quads where that flag is set, and of one row of the state."""
    n, c, h, w = (*map_, 1, 1)[:4]  # of a matrix too
    copy = n * c * (h + 8 * beside) * (w + 8 * beside) if a.flag(quads) else 0
    return n * c * h * w + copy + _FP8_ROW_BYTES


def _into(formula: Formula) -> Formula:
    """Of the operator that writes into its first argument and otherwise does the same."""

    def without_out(a: Arguments) -> Work | tuple[Work, ...]:
        rest = {name: getattr(a.call, name)[1:] for name in ("shapes", "dtypes", "strides", "concrete")}
        return formula(Arguments(replace(a.call, **rest), a.element_bytes))

    return without_out


def _dropout(a: Arguments, place: int) -> int:
    return _DROPOUT_FLOPS if any(a.factors(place)) else 0


_FORMULAS: dict[str, Formula] = {
    "conv2d_act": _conv_act,
    "conv2d_fprop": _conv2d_fprop,
    "conv2d_dgrad": _conv2d_dgrad,
    "conv2d_wgrad": _conv2d_wgrad,
    "concat_conv2d": _concat_conv2d,
    "concat_conv2d_wgrad": _concat_conv2d_wgrad,
    "upsample_conv2d": _upsample_conv2d,
    "upsample_conv2d_dgrad": _upsample_conv2d_dgrad,
    "upsample_conv2d_wgrad": _upsample_conv2d_wgrad,
    "conv2d_fp8": _conv2d_fp8,
    "conv2d_wgrad_fp8": _conv2d_wgrad_fp8,
    "depthwise_conv2d_act": _conv_act,
    "conv_chain": _conv_chain,
    "conv_pair_chain": _conv_pair_chain,
    "upsample_concat_conv_act": _upsample_concat_conv_act,
    "letterbox_conv_act": _letterbox_conv_act,
    "max_pool_chain": _max_pool_chain,
    "attention_position": _attention_position,
    "detect_topk": _detect_topk,
    "attention_packed": _attention_packed,
    "attention_packed_backward": _attention_packed_backward,
    "attention_packed_backward_summed": _attention_packed_backward_summed,
    "group_norm_silu": _group_norm_silu,
    "group_norm_silu_backward": _group_norm_silu_backward,
    "group_norm_silu_backward_summed": _group_norm_silu_backward,
    "group_norm_silu_backward_concat": _group_norm_silu_backward_concat,
    "group_norm_silu_backward_concat_summed": _group_norm_silu_backward_concat,
    "group_norm_silu_fp8": _group_norm_silu_fp8,
    "group_norm_silu_backward_fp8": _group_norm_silu_backward_fp8,
    "group_norm_silu_backward_fp8_summed": _group_norm_silu_backward_fp8,
    "quantize_fp8": _quantize_fp8,
}
OWN = _FORMULAS | {f"{name}_into": _into(formula) for name, formula in _FORMULAS.items()}
