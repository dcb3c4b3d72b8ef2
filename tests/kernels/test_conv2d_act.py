"""What is special to conv2d_act: edges, tiles that do not divide, slices of buffers, precision, 64-bit offsets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import find
from ridgeline.kernels._nhwc import partly_shared, pixel_pitch, random_nhwc, round_to_tf32, share_elements
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.conv2d_act import OP, Config, Problem, candidates, default_config, plan, reference
from ridgeline.numerics import TF32_EPS, compare, judge, to_float64
from ridgeline.sass import SHARED_LIMIT_BYTES, compile_many, inspect

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
H200 = typical_target("sm_90")


def make(
    n=1, c=8, h=6, w=5, k=8, r=3, s=3, *, dtype=torch.float16, bias=True, residual=False, **choices
) -> dict[str, Any]:
    stride, padding = choices.pop("stride", (1, 1)), choices.pop("padding", (r // 2, s // 2))
    conv = ConvProblem(n, c, k, (h, w), (r, s), stride, padding)
    return {
        "x": random_nhwc((n, c, h, w), dtype, DEVICE, seed=0),
        "weight": random_nhwc((k, c, r, s), dtype, DEVICE, seed=1) * (c * r * s) ** -0.5,
        "bias": random_nhwc((1, k, 1, 1), torch.float32, DEVICE, seed=2).flatten() if bias else None,
        "residual": random_nhwc((n, k, conv.oh, conv.ow), dtype, DEVICE, seed=3) if residual else None,
        "stride": stride,
        "padding": padding,
        **choices,
    }


def check(arguments: dict[str, Any], actual: Tensor | None = None) -> None:
    tf32 = HAS_GPU and arguments["x"].dtype == torch.float32 and arguments.get("precision") != "ieee"
    actual = OP(**arguments) if actual is None else actual
    verdict = compare(
        actual, reference(**to_float64(arguments)), reference(**arguments), eps=TF32_EPS if tf32 else None
    )
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("channels", [3, 8, 40, 64])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_default_config_with_channels_that_do_and_do_not_divide(channels: int, stride: tuple[int, int]):
    check(make(c=channels, k=24, h=7, w=6, stride=stride))


def test_padding_contributes_zeros_at_every_edge():
    arguments = make(c=1, h=3, w=3, k=1, dtype=torch.float32, bias=False, act="none")
    arguments["x"].fill_(1)
    arguments["weight"].fill_(1)
    assert OP(**arguments)[0, 0].tolist() == [[4, 6, 4], [6, 9, 6], [4, 6, 4]]


def test_padding_wider_than_the_filter_leaves_act_of_bias():
    arguments = make(c=4, h=2, w=2, k=3, r=1, s=1, padding=(2, 2))
    y = OP(**arguments)
    assert y.shape == (1, 3, 6, 6)
    assert torch.equal(y[0, :, 0, 0], torch.nn.functional.silu(arguments["bias"]).half())
    check(arguments)


def test_residual_is_added_after_the_activation_and_may_be_x():
    arguments = make(c=8, k=8)
    arguments["residual"] = arguments["x"]
    check(arguments)
    assert OP.cost(**arguments) == replace(OP.cost(**{**arguments, "residual": None}))


def test_residual_may_be_overwritten_in_place():
    arguments = make(c=8, k=8, residual=True)
    expected = OP(**arguments)
    plan(**arguments, out=arguments["residual"]).run()
    assert torch.equal(arguments["residual"], expected)


@pytest.mark.parametrize("shape", [(0, 8, 6, 5)])
def test_empty_batch_gives_an_empty_map(shape):
    arguments = make(c=8, k=12)
    y = OP(**{**arguments, "x": arguments["x"][:0]})
    assert y.shape == (0, 12, 6, 5)
    assert y.dtype == torch.float16


def test_bias_may_have_the_dtype_of_x():
    arguments = make()
    check({**arguments, "bias": arguments["bias"].half()})


def test_fp16_accumulates_in_fp32():
    """4096 products of 1 x 0.5 exceed what an fp16 accumulator can count."""
    arguments = make(c=4096, h=1, w=1, k=1, r=1, s=1, bias=False, act="none")
    arguments["x"].fill_(1)
    arguments["weight"].fill_(0.5)
    assert OP(**arguments).item() == 2048
    arguments["x"][0, 0] = 3  # 2049 rounds to 2048 in fp16 storage, 2050 with one product more
    arguments["x"][0, 1] = 3
    assert OP(**arguments).item() == 2050


def test_strict_fp32_and_tf32_differ_in_pipe_and_kernel():
    tf32, ieee = (make(dtype=torch.float32, precision=precision) for precision in ("tf32", "ieee"))
    assert OP.cost(**tf32).pipe == "tensor_tf32"
    assert OP.cost(**ieee) == replace(OP.cost(**tf32), pipe="cuda_fp32")
    assert plan(**ieee).constants["PRECISION"] == "ieee"
    check(ieee)
    assert OP.cost(**make(dtype=torch.float16, precision="ieee")).pipe == "tensor_fp16"


@pytest.mark.gpu
def test_strict_fp32_is_strict_and_tf32_is_faster_rounding_on_a_gpu():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        tf32, ieee = (make(c=256, h=16, w=16, k=64, dtype=torch.float32, precision=p) for p in ("tf32", "ieee"))
        assert judge(OP, reference, ieee).passed
        assert not judge(OP, reference, tf32).passed
        assert judge(OP, reference, tf32, eps=TF32_EPS).passed
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_only_tf32_rounds_and_as_the_architecture_can():
    def rounding(arch: str, **choices) -> str:
        return plan(target=typical_target(arch), **make(**choices)).constants["ROUNDING"]

    fp32 = torch.float32
    assert [rounding(arch, dtype=fp32) for arch in ("sm_80", "sm_89", "sm_90", "sm_120")] == ["rna", "rna", "rn", "rn"]
    assert rounding("sm_90", dtype=fp32, precision="ieee") == rounding("sm_90") == ""


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, Config(64, 32, 32, 4, 3), Config(16, 32, 32, 2, 4), Config(16, 32, 32, 4, 1)])
def test_tf32_has_no_bias_on_a_gpu(config: Config | None):
    """Of positive products, cutting loses about 2^-11 an operand, all in one direction; rounding next to nothing."""
    arguments = make(c=64, h=20, w=20, k=32, r=1, s=1, dtype=torch.float32, bias=False, act="none")
    arguments["x"].abs_()
    arguments["weight"] = round_to_tf32(arguments["weight"].abs())
    launch = plan(config=config, **arguments)
    launch.run()
    exact = reference(**to_float64(arguments))
    bias = ((launch.output.double() - exact) / exact).mean().item()
    assert abs(bias) < 2.0**-16


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_tf32_rounding_keeps_nan_and_infinity_on_a_gpu(bits: int):
    arguments = make(c=32, h=4, w=4, k=16, r=1, s=1, dtype=torch.float32, bias=False, act="none")
    arguments["weight"].fill_(1)
    arguments["x"].view(torch.int32)[0, 5, 1, 2] = bits
    arguments["x"][0, 0, 3, 3] = math.inf
    y = OP(**arguments)
    assert bool(y[0, :, 1, 2].isnan().all()) and bool((y[0, :, 3, 3] == math.inf).all())
    assert int(y.isfinite().sum()) == 14 * 16


def test_cost_is_the_convolution_plus_what_the_epilogue_reads():
    # 6x5 pixels, 8 -> 8 channels, 3x3: 2 * 30 * 8 * 72 FLOP
    cost = OP.cost(**make(residual=True))
    assert cost == Cost(2 * 30 * 8 * 72, 2 * (240 + 576 + 240) + 4 * 8, 2 * 240, "tensor_fp16")


HALF = torch.float16
THIN = random_nhwc((1, 8, 1, 5), HALF, "cpu", seed=0)
REFUSALS = {
    "axes": ({"x": torch.zeros(8, 6, 5)}, r"must have 4 axes, got shapes \(8, 6, 5\) and \(8, 8, 3, 3\)"),
    "dtype": ({"x": torch.zeros(1, 8, 6, 5)}, r"one of fp32, fp16, bf16, got torch\.float32 and torch\.float16"),
    "groups": ({"x": torch.zeros(1, 16, 6, 5, dtype=HALF)}, r"groups must be 1: weight \(8, 8, 3, 3\) .* 16 channels"),
    "act": ({"act": "relu"}, r"act must be one of none, silu, got 'relu'"),
    "precision": ({"precision": "bf16x3"}, r"precision must be one of tf32, ieee, got 'bf16x3'"),
    "stride": ({"stride": (0, 1)}, r"stride must be two numbers of at least 1, got \(0, 1\)"),
    "stride of one": ({"stride": (1,)}, r"stride must be two numbers"),
    "padding": ({"padding": (-1, 0)}, r"padding must be two numbers of at least 0, got \(-1, 0\)"),
    "filter": ({"x": THIN, "padding": (0, 0)}, r"filter \(3, 3\) does not fit image \(1, 5\)"),
    "weight layout": ({"weight": torch.zeros(8, 8, 3, 3, dtype=HALF)}, r"weight .* got strides \(72, 9, 3, 1\)"),
    "bias": ({"bias": torch.zeros(7)}, r"bias must be contiguous, of shape \(8,\) .* got \(7,\)"),
    "bias strides": ({"bias": torch.zeros(16)[::2]}, r"strides \(2,\)"),
    "residual": ({"residual": torch.zeros(1, 8, 6, 6, dtype=HALF)}, r"residual must be .* of shape \(1, 8, 6, 5\)"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_value(name: str):
    changes, text = REFUSALS[name]
    moved = {
        key: value.to(DEVICE) if isinstance(value, Tensor) and value.device.type == "cpu" else value
        for key, value in changes.items()
    }
    with pytest.raises(TypeError if name == "dtype" else ValueError, match=text):
        OP(**{**make(), **moved})


def test_every_tensor_must_be_where_x_is():
    with pytest.raises(ValueError, match=r"bias must be on (cpu|cuda:0) like x, got meta"):
        plan(**{**make(), "bias": torch.zeros(8, device="meta")})


def test_out_may_share_a_buffer_but_not_elements():
    arguments = make(c=8, k=8, residual=True)
    buffer = random_nhwc((1, 24, 6, 5), torch.float16, DEVICE, seed=4)
    arguments["x"], arguments["residual"] = buffer[:, :8], buffer[:, 8:16]
    expected = OP(**arguments)
    plan(**arguments, out=buffer[:, 16:]).run()
    assert torch.equal(buffer[:, 16:], expected)
    for out in (buffer[:, 4:12], buffer[:, :8]):
        with pytest.raises(ValueError, match="out must not share memory with x"):
            plan(**arguments, out=out)
    with pytest.raises(ValueError, match="shifted channels of one buffer"):
        plan(**arguments, out=buffer[:, 12:20])


def test_pixel_pitch_and_sharing():
    x = random_nhwc((2, 6, 4, 3), torch.float32, "cpu", seed=0)
    assert pixel_pitch(x) == 6
    assert pixel_pitch(x[:, 2:5]) == 6
    assert pixel_pitch(x[:, ::2]) is None
    assert pixel_pitch(x[:, :, :, ::2]) is None
    assert pixel_pitch(x[:, :, 1:]) is None  # rows of two images no longer follow each other at one distance
    assert pixel_pitch(x[:1, :, 1:]) == 6
    assert pixel_pitch(x.contiguous()) is None
    assert pixel_pitch(torch.zeros(3, 5, 1, 1)) == 5
    assert pixel_pitch(torch.zeros(2, 1, 4, 3)) == 1
    assert pixel_pitch(x[:1].expand(2, -1, -1, -1)) is None
    assert share_elements(x, x[:, 5:])
    assert share_elements(x[:, 1:4], x[:, 3:])
    assert not share_elements(x[:, :3], x[:, 3:])
    assert not share_elements(x, x.clone())
    assert partly_shared(x[:, :3], x[:, 2:5])
    assert not partly_shared(x[:, :3], x[:, :3])


def test_offsets_become_64_bit_when_a_tensor_needs_them():
    def launch(rows: int, channels: int = 8):
        shape = (1, channels, rows, 16384)
        x = torch.empty(shape, dtype=torch.float16, device="meta", memory_format=torch.channels_last)
        w = torch.empty((8, channels, 1, 1), dtype=torch.float16, device="meta", memory_format=torch.channels_last)
        return plan(x=x, weight=w, target=H200)

    assert launch(16384).constants["WIDE"]
    assert not launch(16383).constants["WIDE"]
    # the pixels alone can need it too, as a run-time number
    assert launch(1 << 18, channels=1).source("sm_90").signature["pixels"] == "i64"
    assert launch(16383).source("sm_90").signature["pixels"] == "i32"


def test_64_bit_offsets_give_the_same_numbers():
    arguments = make(residual=True)
    y = torch.full_like(arguments["residual"], math.nan)
    launch = plan(**arguments, out=y)
    replace(launch, constants={**launch.constants, "WIDE": True}).run()
    assert torch.equal(y, OP(**arguments))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_on_a_gpu():
    side = 16392
    x = torch.zeros((1, 8, side, side), dtype=torch.float16, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    assert x.numel() > 2**31
    x[:, :, -3:, -3:] = 1
    weight = torch.ones((8, 8, 3, 3), dtype=torch.float16, device="cuda").contiguous(memory_format=torch.channels_last)
    y = OP(x, weight, act="none", stride=(1, 1), padding=(1, 1))
    assert y[0, 7, -2:, -2:].tolist() == [[72, 48], [48, 32]]
    assert y[0, :, :-4].count_nonzero() == 0


@pytest.mark.parametrize("arch", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_default_config_is_valid_everywhere(arch: str, dtype: torch.dtype):
    for sample in find("conv2d_act").samples:
        for precision in ("tf32", "ieee"):
            arguments, target = {**sample.arguments(dtype, "meta"), "precision": precision}, typical_target(arch)
            problem = Problem(**arguments)
            config = default_config(problem, target)
            assert config.is_valid(problem, target)
            assert config.block_n <= max(16, 2 * problem.conv.k - 1)
            tried = candidates(target=target, **arguments)
            assert tried[0] == config
            assert len(set(tried)) == len(tried) > 5
            assert all(other.is_valid(problem, target) for other in tried)


def test_default_config_fills_the_gpu():
    def tiles(**sizes) -> tuple[int, Config]:
        problem = Problem(**{**make(**sizes), "act": "silu"})
        config = default_config(problem, H200)
        return -(-problem.pixels // config.block_m) * -(-problem.conv.k // config.block_n), config

    count, config = tiles(n=16, c=64, h=48, w=48, k=128, r=3, s=3)
    assert count >= 132
    assert (config.block_m, config.block_n, config.num_stages) == (64, 128, 4)
    count, config = tiles(c=64, h=20, w=20, k=128, r=1, s=1)
    assert (config.block_m, config.block_n, config.num_stages) == (16, 32, 1), "all operands at once"
    assert count == 25 * 4
    # a product that streams: its pipeline hides what loading at once would show
    assert tiles(n=128, c=128, h=32, w=32, k=128, r=1, s=1)[1].num_stages > 1


def test_invalid_configs_are_refused():
    arguments = make()
    problem = Problem(**arguments)
    good = Config(64, 64, 64, 4, 3)
    assert good.is_valid(problem, H200)
    for bad in (
        replace(good, block_m=48),
        replace(good, block_k=8),
        replace(good, num_warps=3),
        replace(good, num_stages=0),
        replace(good, num_stages=15),
        Config(128, 128, 64, 4, 2),
    ):
        assert not bad.is_valid(problem, H200)
        with pytest.raises(
            ValueError, match=r"conv2d_act: Config\(.*\) is not valid for 1x8x6x5 \* 8x8x3x3 s1 p1 on sm_90"
        ):
            plan(config=bad, target=H200, **arguments)
    big = Config(128, 128, 64, 8, 4)
    assert big.is_valid(problem, H200)
    assert not big.is_valid(problem, typical_target("sm_89"))


def test_without_the_interpreter_a_cpu_tensor_is_refused(monkeypatch):
    monkeypatch.setattr("ridgeline.kernels._op.triton.runtime.JITFunction", object)
    with pytest.raises(ValueError, match="conv2d_act: x must be on a CUDA device, got cpu"):
        OP(**{name: v.cpu() if isinstance(v, Tensor) else v for name, v in make().items()})


POINT, THREE = "YOLO26n 40x40 128->128 1x1", "YOLO26n 80x80 64->64 3x3"


def sources(cases):
    for why, arch, dtype, config, pdl in cases:
        sample = next(s for s in OP.samples if s.why == why).arguments(dtype, "meta")
        yield plan(config=config, target=typical_target(arch), **sample, pdl=pdl).source(arch)


def test_machine_code_rounds_fp32_operands_and_keeps_its_pipeline():
    """One conversion an operand from sm_90 on, before it only the three instructions of ties away; nothing spills."""
    wide, narrow = Config(64, 32, 32, 4, 3), Config(16, 32, 32, 2, 4)
    cases = [
        (THREE, arch, dtype, config, arch != "sm_89")
        for arch, config in (("sm_89", wide), ("sm_90", wide), ("sm_90", narrow), ("sm_120", wide))
        for dtype in ((torch.float32, torch.float16) if arch == "sm_90" else (torch.float32,))
    ]
    for (_, arch, dtype, config, _), binary in zip(cases, compile_many(list(sources(cases))), strict=True):
        report = inspect(binary)
        assert report.problems == () and report.async_copies > 0
        (matrix,) = {name.split(".")[0] for name in report.matrix_instructions}
        assert matrix == ("HGMMA" if arch == "sm_90" and config is wide else "HMMA")
        native = [name for name in report.instructions if name.startswith("F2FP.TF32")]
        assert bool(native) == (dtype == torch.float32 and arch != "sm_89")
        assert ("cvt.rna.tf32" in binary.ptx) == (arch == "sm_89")


def test_machine_code_has_all_loads_of_a_short_reduction_in_flight():
    """Weights before the wait, then x, and only then is any of them stored to shared memory."""
    sizes = {torch.float16: ((POINT, Config(16, 64, 64, 4, 1), 8, 2), (THREE, Config(16, 16, 64, 4, 1), 9, 9))}
    sizes[torch.float32] = ((POINT, Config(16, 32, 32, 4, 1), 8, 4),)
    cases = [(why, "sm_90", dtype, config, True) for dtype, found in sizes.items() for why, config, _, _ in found]
    counts = [counts for found in sizes.values() for _, _, *counts in found]
    for (of_weights, of_x), binary in zip(counts, compile_many(list(sources(cases))), strict=True):
        report = inspect(binary)
        assert report.problems == ()
        assert report.registers >= 4 * (of_weights + of_x), "too few to hold them all at once"
        before, _, after = binary.ptx.partition("griddepcontrol.wait")
        # and one or two for the bias
        assert before.count("ld.global") - of_weights in (1, 2) and "st.shared" not in before
        loading, fence, storing = after.partition("bar.warp.sync")
        assert fence and loading.count("ld.global") == of_x and "st.shared" not in loading
        assert "ld.global" not in storing
