"""Layout copies are found in graphs of aten operators: what convolutions copy by themselves, and changes of order."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.layout_copies import LayoutCopy, LayoutWatch, layout_copies

CHANNELS_LAST = torch.channels_last


def nhwc(*shape):
    return torch.randn(shape).contiguous(memory_format=CHANNELS_LAST)


def traced(fn, *inputs):
    return make_fx(fn, tracing_mode="fake")(*inputs)


def backward(dy, x, weight):
    padding = [0, 0]
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, [1, 1], padding, [1, 1], False, padding, 1, [True, True, False]
    )


def convolve(x, weight):
    return torch.ops.aten.convolution(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


X, WEIGHT, DY = (2, 8, 5, 5), (8, 8, 3, 3), (2, 8, 3, 3)
NCHW_STRIDES = (200, 25, 5, 1)
CASES = {
    "channels_last": (convolve, (nhwc(*X), nhwc(*WEIGHT)), []),
    "NCHW": (convolve, (torch.randn(X), torch.randn(WEIGHT)), []),
    "NCHW map, channels_last weight": (
        convolve, (torch.randn(X), nhwc(*WEIGHT)), [LayoutCopy("convolution", "input", X, NCHW_STRIDES)],
    ),
    "channels_last map, NCHW weight": (
        convolve, (nhwc(*X), torch.randn(WEIGHT)), [LayoutCopy("convolution", "weight", WEIGHT, (72, 9, 3, 1))],
    ),
    "1x1 weight, which is both": (convolve, (nhwc(*X), torch.randn(8, 8, 1, 1)), []),
    "slice of channels": (
        lambda x, w: convolve(x[:, :8], w), (nhwc(2, 16, 5, 5), nhwc(*WEIGHT)),
        [LayoutCopy("convolution", "input", X, (400, 1, 80, 16))],
    ),
    "NCHW gradient": (
        backward, (torch.randn(DY), nhwc(*X), nhwc(*WEIGHT)),
        [LayoutCopy("convolution_backward", "grad_output", DY, (72, 9, 3, 1))],
    ),
    "slice of a gradient": (
        lambda dy, x, w: backward(dy[:, 8:], x, w), (nhwc(2, 16, 3, 3), nhwc(*X), nhwc(*WEIGHT)),
        [LayoutCopy("convolution_backward", "grad_output", DY, (144, 1, 48, 16))],
    ),
    "slice of a gradient, made dense": (
        lambda dy, x, w: backward(dy[:, 8:].contiguous(memory_format=CHANNELS_LAST), x, w),
        (nhwc(2, 16, 3, 3), nhwc(*X), nhwc(*WEIGHT)), [],
    ),
    "to channels_last and back": (
        lambda x: x.contiguous(memory_format=CHANNELS_LAST).sin().contiguous(), (torch.randn(X),),
        [LayoutCopy("clone", "input", X, NCHW_STRIDES), LayoutCopy("clone", "input", X, (200, 1, 40, 8))],
    ),
    "cast to channels_last": (
        lambda x: x.to(torch.float64, memory_format=CHANNELS_LAST), (torch.randn(X),),
        [LayoutCopy("_to_copy", "input", X, NCHW_STRIDES)],
    ),
    "cast": (lambda x: x.double(), (nhwc(*X),), []),
    "one channel, which is both": (lambda x: x.clone(memory_format=CHANNELS_LAST), (torch.randn(2, 1, 5, 5),), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_finds(name):
    fn, inputs, expected = CASES[name]
    assert layout_copies(traced(fn, *inputs).graph) == expected


def test_words_for_a_report():
    watch = LayoutWatch()
    assert watch.in_words() == ""
    watch.see(traced(convolve, nhwc(*X), nhwc(*WEIGHT)))
    assert watch.in_words() == "0 layout copies in 1 compiled graphs"
    for _ in range(4):
        watch.see(traced(convolve, torch.randn(X), nhwc(*WEIGHT)))
    one = "input of convolution, [2, 8, 5, 5] with strides [200, 25, 5, 1]"
    assert watch.in_words() == f"4 layout copies in 5 compiled graphs: {one}; {one}; {one}; and 1 more"
