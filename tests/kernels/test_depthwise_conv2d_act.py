"""What is special to depthwise_conv2d_act: packed weights, channel tiles, slices, what comes before the wait of PDL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.depthwise_conv2d_act import (
    OP,
    SAMPLES,
    Config,
    Problem,
    candidates,
    convolve,
    default_config,
    is_packed,
    pack,
    plan,
    reference,
)
from ridgeline.numerics import compare, to_float64

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = typical_target("sm_90")


def make(n=1, c=8, h=6, w=5, r=3, s=3, *, dtype=torch.float16, bias=True, residual=False, **choices) -> dict[str, Any]:
    stride, padding = choices.pop("stride", (1, 1)), choices.pop("padding", (r // 2, s // 2))
    conv = ConvProblem(n, c, c, (h, w), (r, s), stride, padding, groups=c)
    return {
        "x": random_nhwc((n, c, h, w), dtype, DEVICE, seed=0),
        "weight": pack(random_nhwc((c, 1, r, s), dtype, DEVICE, seed=1) * (r * s) ** -0.5),
        "bias": random_nhwc((1, c, 1, 1), torch.float32, DEVICE, seed=2).flatten() if bias else None,
        "residual": random_nhwc((n, c, conv.oh, conv.ow), dtype, DEVICE, seed=3) if residual else None,
        "stride": stride,
        "padding": padding,
        **choices,
    }


def check(arguments: dict[str, Any], actual: Tensor) -> None:
    verdict = compare(actual, reference(**to_float64(arguments)), reference(**arguments))
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("size", "filters", "stride", "padding"),
    [
        ((6, 5), (3, 3), (1, 1), (1, 1)),
        ((9, 8), (3, 3), (2, 2), (1, 1)),
        ((9, 7), (5, 3), (2, 1), (0, 2)),
        ((3, 4), (1, 4), (3, 2), (2, 0)),
    ],
)
def test_in_float64_shifted_sums_are_the_convolution(size, filters, stride, padding, bias):
    (h, w), (r, s) = size, filters
    x, weight, b, *_ = to_float64(make(2, 6, h, w, r, s, stride=stride, padding=padding)).values()
    b = b if bias else None
    expected = F.conv2d(x, weight, b, stride, padding, groups=6)
    torch.testing.assert_close(convolve(x, weight, b, stride, padding), expected, rtol=1e-13, atol=1e-13)


def test_out_may_be_the_residual():
    arguments = make(c=16, residual=True)
    expected = OP(**arguments)
    held = arguments["residual"].clone(memory_format=torch.preserve_format)
    plan(out=held, **{**arguments, "residual": held}).run()
    assert torch.equal(held, expected)


def test_an_empty_batch_is_empty():
    assert OP(**make(n=0, c=16, h=5, stride=(2, 2))).shape == (0, 16, 3, 3)


def test_pack_keeps_the_values_and_changes_the_order():
    weight = torch.arange(5 * 3 * 2, dtype=torch.float32).view(5, 1, 3, 2)
    packed = pack(weight)
    assert torch.equal(packed, weight)
    assert is_packed(packed) and not is_packed(weight)
    assert packed.permute(2, 3, 1, 0).flatten()[:5].tolist() == [0, 6, 12, 18, 24]
    assert pack(packed).data_ptr() != weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: {"weight": a["weight"].contiguous()}, r"weight must be stored as .* use .*pack"),
        (lambda a: {"weight": pack(torch.ones(8, 2, 3, 3, dtype=torch.float16))}, r"\[8, 1, R, S\].*\(8, 2, 3, 3\)"),
        (lambda a: {"x": a["x"].contiguous()}, r"x must be channels_last .* got strides \(240, 30, 5, 1\)"),
        (lambda a: {"bias": torch.ones(16)[::2]}, "bias must be contiguous"),
        (lambda a: {"act": "relu"}, "act must be one of none, silu, got 'relu'"),
        (lambda a: {"stride": (0, 1)}, r"stride must be two numbers of at least 1, got \(0, 1\)"),
        (lambda a: {"padding": (1, -1)}, r"padding must be two numbers of at least 0, got \(1, -1\)"),
        (lambda a: {"residual": a["x"][:, :, :5]}, r"residual must be torch.float16 of shape \(1, 8, 6, 5\)"),
    ],
)
def test_refusals(change, text: str):
    arguments = make()
    with pytest.raises(ValueError, match=f"depthwise_conv2d_act: .*{text}"):
        Problem(**{**arguments, **change(arguments)})
    with pytest.raises(TypeError, match="share one of fp32, fp16, bf16"):
        Problem(**{**arguments, "x": arguments["x"].double()})
    with pytest.raises(ValueError, match="must not share memory with x"):
        Problem(**arguments, out=arguments["x"])
    with pytest.raises(ValueError, match="is not valid for"):
        plan(config=Config(3, 8, 1), **arguments)


def test_offsets_beyond_32_bits_are_wide():
    meta = {"dtype": torch.float16, "device": "meta"}
    weight = pack(torch.empty(64, 1, 3, 3, **meta))
    for n, wide in ((127, False), (129, True)):
        x = torch.empty(n, 64, 512, 512, **meta).contiguous(memory_format=torch.channels_last)
        assert plan(target=H200, x=x, weight=weight, padding=(1, 1)).constants["WIDE"] is wide


def test_defaults_fill_the_gpu_and_candidates_are_valid():
    for sample in SAMPLES:
        arguments = sample.arguments(torch.float16, "meta")
        problem, found = Problem(**arguments), candidates(target=H200, **arguments)
        assert found[0] == default_config(problem, H200)
        assert len(set(found)) == len(found)
        assert all(config.is_valid(problem, H200) for config in found)
    large = next(s for s in SAMPLES if "80x80x80" in s.why).arguments(torch.float16, "meta")
    assert plan(target=H200, **large).grid[0] >= H200.sm_count
    assert len(candidates(target=H200, **large)) > 8
