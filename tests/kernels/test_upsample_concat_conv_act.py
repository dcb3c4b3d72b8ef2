"""What is special to upsample_concat_conv_act: two sources of one reduction, and an index rule between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels import conv2d_act
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.conv2d_act import Config
from ridgeline.kernels.upsample_concat_conv_act import OP, Problem, candidates, cost, plan, reference
from ridgeline.numerics import TF32_EPS, compare, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
H200 = typical_target("sm_90")
HALF = torch.float16


def make(n=1, c1=16, c2=32, h=3, w=5, k=8, *, dtype=torch.float16, bias=True, **choices) -> dict[str, Any]:
    """h and w are the coarse map's."""
    return {
        "coarse": random_nhwc((n, c1, h, w), dtype, DEVICE, seed=0),
        "fine": random_nhwc((n, c2, 2 * h, 2 * w), dtype, DEVICE, seed=1),
        "weight": random_nhwc((k, c1 + c2, 1, 1), dtype, DEVICE, seed=2) * (c1 + c2) ** -0.5,
        "bias": random_nhwc((1, k, 1, 1), torch.float32, DEVICE, seed=3).flatten() if bias else None,
        **choices,
    }


def check(arguments: dict[str, Any], actual: Tensor | None = None) -> None:
    tf32 = HAS_GPU and arguments["fine"].dtype == torch.float32 and arguments.get("precision") != "ieee"
    actual = OP(**arguments) if actual is None else actual
    verdict = compare(
        actual, reference(**to_float64(arguments)), reference(**arguments), eps=TF32_EPS if tf32 else None
    )
    assert verdict.passed, verdict.reason


def test_every_pixel_of_the_coarse_map_serves_four():
    arguments = make(c1=16, c2=16, h=2, w=3, k=1, dtype=torch.float32, bias=False, act="none")
    arguments["coarse"].zero_()[0, 0] = torch.arange(6.0).view(2, 3)
    arguments["fine"].zero_()
    arguments["weight"].fill_(1)
    rows = [[0, 0, 1, 1, 2, 2]] * 2 + [[3, 3, 4, 4, 5, 5]] * 2
    assert OP(**arguments)[0, 0].tolist() == rows


def test_the_first_channels_of_the_weight_meet_the_coarse_map():
    arguments = make(c1=16, c2=32, k=2, dtype=torch.float32, bias=False, act="none")
    arguments["weight"].zero_()
    arguments["weight"][0, 15] = arguments["weight"][1, 16] = 1
    y = OP(**arguments)
    upsampled = F.interpolate(arguments["coarse"], scale_factor=2.0)
    torch.testing.assert_close(y[:, 0], upsampled[:, 15], rtol=2e-3, atol=0)
    torch.testing.assert_close(y[:, 1], arguments["fine"][:, 0], rtol=2e-3, atol=0)


def test_equals_the_plain_convolution_of_the_joined_map():
    arguments = make(n=2, c1=32, c2=16, k=24)
    joined = torch.cat([F.interpolate(arguments["coarse"], scale_factor=2.0), arguments["fine"]], dim=1)
    plain = conv2d_act.OP(joined, arguments["weight"], arguments["bias"], None, stride=(1, 1), padding=(0, 0))
    torch.testing.assert_close(OP(**arguments), plain, rtol=2e-3, atol=2e-3)


def test_an_empty_batch_gives_an_empty_result():
    assert OP(**make(n=0)).shape == (0, 8, 6, 10)


@pytest.mark.parametrize("name", ["coarse", "fine"])
def test_out_may_not_touch_an_input(name):
    arguments = make(c1=16, c2=16, h=2, w=2, k=16)
    if name == "fine":
        wide = random_nhwc((1, 40, 4, 4), torch.float16, DEVICE, seed=0)
        arguments["fine"], out = wide[:, :16], wide[:, 8:24]
        beside = wide[:, 16:32]
        plan(out=beside, **arguments).run()
        check(arguments, beside)
    else:
        storage = torch.zeros(16 * 16, dtype=torch.float16, device=DEVICE)
        arguments["coarse"] = storage[: 16 * 4].view(1, 2, 2, 16).permute(0, 3, 1, 2)
        out = storage.view(1, 4, 4, 16).permute(0, 3, 1, 2)
    with pytest.raises(ValueError, match="out must not share memory with an input"):
        plan(out=out, **arguments)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"fine": (1, 32, 6, 9)}, r"coarse must be torch\.float16 of shape \(1, 16, 3, 4\)"),
        (
            {"fine": (1, 32, 7, 10)},
            r"fine must be twice as large as coarse, got \(1, 32, 7, 10\) beside",
        ),
        ({"fine": (2, 32, 6, 10)}, r"coarse must be .* of shape \(2, 16, 3, 5\), got torch\.float16 \(1, 16, 3, 5\)"),
        ({"fine": (1, 24, 6, 10)}, r"channels must be multiples of 16, got 16 and 24"),
        ({"coarse": (1, 8, 3, 5)}, r"channels must be multiples of 16, got 8 and 32"),
        ({"weight": (8, 40, 1, 1)}, r"weight must be \[K, 48, 1, 1\] like the joined channels, got \(8, 40, 1, 1\)"),
        ({"weight": (8, 48, 3, 3)}, r"weight must be \[K, 48, 1, 1\]"),
    ],
)
def test_refuses_shapes(changes, complaint):
    arguments = make() | {name: random_nhwc(shape, torch.float16, DEVICE, seed=5) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=f"upsample_concat_conv_act: {complaint}"):
        OP(**arguments)


@pytest.mark.parametrize(
    ("changes", "kind", "complaint"),
    [
        ({"act": "relu"}, ValueError, r"act must be one of none, silu, got 'relu'"),
        ({"precision": "fp32"}, ValueError, r"precision must be one of tf32, ieee, got 'fp32'"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias must be contiguous, of shape \(8,\)"),
        ({"coarse": torch.zeros(1, 16, 3, 5, dtype=torch.half)}, ValueError, r"coarse must be channels_last"),
        ({"weight": torch.zeros(8, 48, 1, 1)}, TypeError, r"must share one of fp32, fp16, bf16"),
    ],
)
def test_refuses_choices_layouts_and_dtypes(changes, kind, complaint):
    arguments = make() | {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in changes.items()}
    with pytest.raises(kind, match=f"upsample_concat_conv_act: .*{complaint}"):
        OP(**arguments)


@pytest.mark.parametrize(("h", "k", "pitch"), [(4096, 8, 32), (512, 2048, 32), (1024, 8, 2048)])
def test_refuses_offsets_beyond_32_bits(h, k, pitch):
    """The fine map, the result, a slice of a wide buffer: each alone passes 2^31 elements."""

    def meta(n, c, h, w):
        return torch.empty((n, c, h, w), dtype=torch.float16, device="meta", memory_format=torch.channels_last)

    fine = meta(1, pitch, 2 * h, 2 * h)[:, :32]
    small = Problem(meta(1, 16, 8, 8), meta(1, 32, 16, 16), meta(k, 48, 1, 1))
    assert small.joined.pixels == 256
    with pytest.raises(ValueError, match=r"maps must span less than 2\^31 elements, got \(1, 32, "):
        Problem(meta(1, 16, h, h), fine, meta(k, 48, 1, 1))


@pytest.mark.parametrize(("c1", "c2", "step"), [(16, 16, 16), (32, 16, 16), (64, 32, 32), (128, 64, 64), (48, 96, 16)])
def test_no_block_spans_both_sources(c1, c2, step):
    arguments = make(c1=c1, c2=c2, k=32)
    found = candidates(target=H200, **arguments)
    assert Problem(**arguments).step == step
    assert len(found) == len(set(found)) > 1
    assert all(c1 % config.block_k == 0 == c2 % config.block_k for config in found)


def test_a_config_that_spans_both_sources_is_refused():
    with pytest.raises(ValueError, match=r"upsample_concat_conv_act: Config\(.*block_k=32.* is not valid for"):
        plan(config=Config(16, 16, 32, num_warps=4, num_stages=2), **make(c1=16, c2=32))


def test_cost_reads_the_coarse_map_once():
    arguments = make(n=2, c1=16, c2=32, h=3, w=5, k=8)
    pixels = 2 * 6 * 10
    assert cost(**arguments) == Cost(
        flops=2 * pixels * 48 * 8,
        read_bytes=2 * (pixels // 4 * 16 + pixels * 32 + 48 * 8) + 4 * 8,
        write_bytes=2 * pixels * 8,
        pipe="tensor_fp16",
    )
    assert cost(**make(dtype=torch.float32, precision="ieee")).pipe == "cuda_fp32"
