"""What is special to attention_position: tokens that fill no block, large scores, slices, what precedes the wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.attention_position import (
    OP,
    SAMPLES,
    Config,
    Problem,
    candidates,
    cost,
    default_config,
    plan,
    reference,
)
from ridgeline.kernels.depthwise_conv2d_act import pack
from ridgeline.models.blocks import Attention
from ridgeline.numerics import TF32_EPS, compare, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
H200 = typical_target("sm_90")


def make(n=1, heads=1, d=16, e=16, h=4, w=5, *, dtype=torch.float16, bias=True, scale=1.0, **choices) -> dict[str, Any]:
    return {
        "qkv": random_nhwc((n, heads * (2 * d + e), h, w), dtype, DEVICE, seed=0) * scale,
        "weight": pack(random_nhwc((heads * e, 1, 3, 3), dtype, DEVICE, seed=1) / 3),
        "bias": random_nhwc((1, heads * e, 1, 1), torch.float32, DEVICE, seed=2).flatten() if bias else None,
        "heads": heads,
        "key_channels": d,
        **choices,
    }


def check(arguments: dict[str, Any], actual: Tensor) -> None:
    tf32 = HAS_GPU and arguments["qkv"].dtype == torch.float32 and arguments.get("precision") != "ieee"
    verdict = compare(
        actual, reference(**to_float64(arguments)), reference(**arguments), eps=TF32_EPS if tf32 else None
    )
    assert verdict.passed, verdict.reason


def test_it_is_the_attention_block_up_to_its_projection():
    torch.manual_seed(0)
    block = Attention(128).eval().to(DEVICE)
    for conv in (block.qkv, block.proj, block.pe):
        conv.fold_()
    block.proj.conv.weight.data.copy_(torch.eye(128)[:, :, None, None])
    block.proj.conv.bias.data.zero_()
    x = random_nhwc((1, 128, 4, 5), torch.float32, DEVICE, seed=3)
    with torch.no_grad():
        expected = block(x)
        qkv = block.qkv(x).contiguous(memory_format=torch.channels_last)
        position = block.pe.conv
        actual = OP(qkv, pack(position.weight), position.bias, heads=block.heads, key_channels=32, precision="ieee")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_one_key_that_dominates_is_copied():
    """Scores of 2^14 and more: the softmax must not overflow, and everything else vanishes."""
    arguments = make(d=16, e=16, h=3, w=7, dtype=torch.float32, bias=False, precision="ieee")
    qkv = torch.zeros_like(arguments["qkv"])
    qkv[:, :16] = 128.0
    qkv[0, 16:32, 2, 6] = 128.0
    qkv[:, 32:] = torch.arange(21.0).view(1, 1, 3, 7)
    arguments |= {"qkv": qkv, "weight": torch.zeros_like(arguments["weight"])}
    plan_ = plan(config=Config(16, 16, 4, 1), **arguments)
    plan_.run()
    assert bool((plan_.output == 20.0).all())


def test_an_empty_batch_is_empty():
    assert OP(**make(n=0, heads=2, e=32)).shape == (0, 64, 4, 5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: {"heads": 5}, "heads must divide the 96 channels of qkv, got 5"),
        (lambda a: {"key_channels": 8}, "must be multiples of 16, got 8 and 32 of 48"),
        (lambda a: {"key_channels": 32}, "must be multiples of 16, got 32 and -16 of 48"),
        (lambda a: {"weight": a["weight"].contiguous()}, r"weight must be stored as \[3, 3, C\].* use .*pack"),
        (lambda a: {"weight": a["weight"][:16]}, r"weight must be \[32, 1, 3, 3\].* got \(16, 1, 3, 3\)"),
        (lambda a: {"bias": torch.ones(16)}, r"bias must be contiguous, of shape \(32,\)"),
        (lambda a: {"qkv": a["qkv"].contiguous()}, r"qkv must be channels_last .* got strides \(1920, 20, 5, 1\)"),
        (lambda a: {"precision": "tf16"}, "precision must be one of tf32, ieee, got 'tf16'"),
        (lambda a: {"out": a["qkv"][:, :32]}, "out must not share memory with qkv"),
    ],
)
def test_refusals(change, text: str):
    arguments = make(heads=2)
    with pytest.raises(ValueError, match=f"attention_position: .*{text}"):
        Problem(**{**arguments, **change(arguments)})
    with pytest.raises(TypeError, match="share one of fp32, fp16, bf16"):
        Problem(**{**arguments, "qkv": arguments["qkv"].double()})
    with pytest.raises(ValueError, match="is not valid for"):
        plan(config=Config(16, 24, 4, 1), **arguments)


def test_cost_names_the_unit_that_multiplies():
    arguments = SAMPLES[0].arguments(torch.float16, "meta")
    tokens, channels = 3 * 6, 128
    assert cost(**arguments).flops == 2 * 2 * tokens**2 * (32 + 64) + 2 * 9 * tokens * channels
    assert cost(**arguments).pipe == "tensor_fp16"
    fp32 = SAMPLES[0].arguments(torch.float32, "meta")
    assert (cost(**fp32).pipe, cost(**fp32, precision="ieee").pipe) == ("tensor_tf32", "cuda_fp32")


def test_offsets_beyond_32_bits_are_wide():
    for n, wide in ((20_000, False), (22_000, True)):
        arguments = {**SAMPLES[0].arguments(torch.float16, "meta")}
        arguments["qkv"] = random_nhwc((n, 256, 20, 20), torch.float16, "meta", seed=0)
        assert plan(target=H200, **arguments).constants["WIDE"] is wide


def test_candidates_are_valid_and_start_with_the_default():
    for sample in SAMPLES:
        arguments = sample.arguments(torch.float16, "meta")
        problem, found = Problem(**arguments), candidates(target=H200, **arguments)
        assert found[0] == default_config(problem, H200)
        assert len(set(found)) == len(found)
        assert all(config.is_valid(problem, H200) for config in found)
