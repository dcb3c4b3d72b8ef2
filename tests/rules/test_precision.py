"""Rules of number formats (L6-L9, L12, L13) and the FP8 rule (K19) on steps made by hand: each fires, or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline import roofline, specs
from ridgeline.finding import Abstention, Finding
from ridgeline.rules import fp8, precision
from ridgeline.rules._kernels import problem_of
from rules.steps_made import H200, US, op, step, work

N, C, H = 128, 256, 32
MAP, FILTER = (N, C, H, H), (C, C, 3, 3)
HALF = "c10::BFloat16"
SGEMM = "implicit_convolve_sgemm"
TURING = replace(H200, gpu="Tesla T4", peaks={"cuda_fp32": 8e12, "tensor_fp16": 65e12})


def conv(us: float, name: str = SGEMM, *, dtype: str = "float", shapes=(MAP, FILTER), **more):
    call = op("aten::cudnn_convolution", *shapes, dtypes=(dtype, dtype))
    return work(us, name, category="conv", call=call, op="aten.convolution", **more)


def simt(us: float, **more):
    return conv(us, tensor_core=False, dtype=more.pop("dtype", "float"), **more)


def product(us: float, name: str = "ampere_sgemm_128x64_nn", *, dtype: str = "float", rows: int = 4096, **more):
    call = op("aten::mm", (rows, 512), (512, 512), dtypes=(dtype, dtype))
    return work(us, name, category="gemm", call=call, op="aten.mm", **more)


def cast(us: float, target: str, source: str, shape=FILTER):
    call = op("aten::copy_", shape, shape, dtypes=(target, source))
    return work(us, "direct_copy_kernel_cuda", category="copy", call=call)


def only(rule, made):
    return [found for found in rule(made) if isinstance(found, Finding)]


def test_a_convolution_that_misses_tensor_cores():
    # NCHW fp32 with TF32 allowed: 60 of 395 TFLOP/s, 70 % of that ratio reached
    (finding,) = only(precision.missed_tensor_cores, step(simt(700, layout="nchw"), work(300)))
    assert finding.saving.mid_s == pytest.approx(700 * (1 - 60 / 395 / 0.7) * US)
    assert finding.saving.high_s == pytest.approx(700 * (1 - 60 / 395) * US)
    assert "1 of them on NCHW" in finding.title


def test_a_16_bit_convolution_on_cuda_cores_is_bound_by_its_bytes():
    moved = 2.15e9  # 500 µs at the H200's bandwidth
    (finding,) = only(precision.missed_tensor_cores, step(simt(700, dtype=HALF, bytes=moved), work(300)))
    assert finding.saving.mid_s == finding.saving.high_s == pytest.approx(200 * US)


@pytest.mark.parametrize(
    "piece",
    [
        conv(700, "sm90_xmma_fprop_tf32", tensor_core=True),
        simt(700, shapes=((N, 3, H, H), (C, 3, 3, 3))),  # L11's
        simt(700, shapes=(MAP, (C, 1, 3, 3))),  # depthwise: no tensor core can
        simt(700, dtype="double"),
        simt(700, name="splitKreduce_kernel"),
        conv(700, "conv2d_act_kernel", dtype=HALF, tensor_core=None),
    ],
    ids=["uses them", "3 channels", "depthwise", "double", "helper", "name does not tell"],
)
def test_kernels_that_do_not_miss_tensor_cores(piece):
    assert not only(precision.missed_tensor_cores, step(piece, work(300)))


def test_unknown_is_not_missing():
    (abstention,) = precision.missed_tensor_cores(step(conv(700, "my_conv", tensor_core=None)))
    assert isinstance(abstention, Abstention) and "1 of 1" in abstention.reason


def test_tf32_is_off_by_default_for_products_only():
    (finding,) = only(precision.tf32_off, step(product(700, tensor_core=False), work(300)))
    assert finding.saving.mid_s == pytest.approx(700 * (1 - 60 / 395 / 0.7) * US)
    assert not only(precision.tf32_off, step(simt(700), work(300)))
    off = step(simt(700), work(300), settings={"cudnn.allow_tf32": "False"})
    assert len(only(precision.tf32_off, off)) == 1
    assert not only(precision.missed_tensor_cores, off)  # one of the two speaks


def test_tf32_on_or_absent_is_silent():
    on = {"cuda.matmul.allow_tf32": "True"}
    assert not only(precision.tf32_off, step(product(700, tensor_core=False), settings=on))
    assert not only(precision.tf32_off, step(product(700, tensor_core=False), ceilings=TURING))


def test_fp32_convolutions_and_the_passes_between():
    pieces = (conv(600, "sm80_xmma_fprop_tf32f32", tensor_core=True), work(300), work(8))
    (finding,) = only(precision.autocast_off, step(*pieces, trained=True))
    # TF32 to bf16 halves at the peaks, 70 % of which is kept; the long pointwise pass halves, the short one does not
    arithmetic = 600 * (1 - 395 / 790 / 0.7)
    assert finding.saving.mid_s == pytest.approx((arithmetic + 150) * US)
    assert finding.saving.low_s == pytest.approx(arithmetic / 2 * US)
    assert "bf16" in finding.verb


def test_autocast_is_on_or_impossible():
    halves = step(conv(600, "sm90_xmma_fprop_bf16bf16", dtype=HALF, tensor_core=True), product(100), trained=True)
    assert not only(precision.autocast_off, halves)
    assert not only(precision.autocast_off, step(simt(600), trained=True, ceilings=TURING))  # no bf16 there
    assert len(only(precision.autocast_off, step(simt(600), ceilings=TURING))) == 1  # but fp16


def used(us: float):
    return conv(us, "sm90_xmma_fprop_bf16bf16", dtype=HALF, tensor_core=True)


def test_weights_cast_twice_without_autocasts_copies():
    # trap 36: under inference_mode four convolutions called twice cast eight times
    calls = [piece for _ in range(8) for piece in (cast(10, HALF, "float"), used(100))]
    (finding,) = only(precision.recast_weights, step(*calls))
    assert finding.saving.mid_s == pytest.approx(80 * US)
    assert finding.title.startswith("8 casts") and "cast 8 times" in finding.note
    assert finding.effort == "S" and finding.saving.low_s > 0


def test_in_training_the_gradients_casts_count_and_the_least_is_nothing():
    made = step(cast(10, HALF, "float"), used(300), cast(15, "float", HALF), trained=True)
    (finding,) = only(precision.recast_weights, made)
    assert finding.saving.mid_s == pytest.approx(25 * US)
    assert finding.saving.low_s == 0 and finding.effort == "L"


def test_a_compiled_cast_of_a_weight_counts():
    name = "triton_poi_fused__to_copy_10"
    call = op(name, FILTER, FILTER, (), dtypes=("float", HALF, "Scalar"))
    made = step(work(20, name, category="copy", call=call), used(300))
    assert only(precision.recast_weights, made)[0].evidence == (1,)


def test_casts_of_activations_and_listed_parameters():
    assert not only(precision.recast_weights, step(cast(40, HALF, "float", MAP), used(300)))
    listed = step(cast(40, HALF, "float"), used(300), parameters=(((7, 7), "float"),))
    assert not only(precision.recast_weights, listed)


@pytest.mark.parametrize(
    ("rule", "setting", "fires"),
    [
        (precision.algorithm_search_off, {"cudnn.benchmark": "False"}, True),
        (precision.algorithm_search_off, {"cudnn.benchmark": "True"}, False),
        (precision.deterministic_on, {"cudnn.deterministic": "True"}, True),
        (precision.deterministic_on, {"cudnn.deterministic": "False"}, False),
    ],
)
def test_switches_of_cudnn_have_no_number(rule, setting, fires):
    found = list(rule(step(simt(600), settings=setting)))
    assert [finding.saving for finding in found] == ([None] if fires else [])


@pytest.mark.parametrize("rule", [precision.algorithm_search_off, precision.deterministic_on])
def test_a_switch_nobody_wrote_down(rule):
    (abstention,) = rule(step(simt(600)))
    assert isinstance(abstention, Abstention)
    assert not list(rule(step(simt(6), work(900))))  # hardly any convolution to gain from


def test_without_ceilings_problems_have_no_worth():
    (finding,) = only(precision.missed_tensor_cores, step(simt(700), ceilings=None))
    assert finding.saving is None and finding.confidence == "unknown"
    (abstention,) = precision.autocast_off(step(simt(700), ceilings=None))
    assert "doctor" in abstention.reason


# --- FP8 --------------------------------------------------------------------------------------------------------------

SPEC = specs.find_spec("NVIDIA H200").with_measured(
    {"tensor_bf16": H200.peaks["tensor_bf16"], "tensor_fp8": H200.peaks["tensor_fp8"], "bandwidth": H200.bandwidth}
)


def halves(us: float, n: int, c: int, k: int, side: int, taps: int = 3, pass_: str = "fprop"):
    flops = 2.0 * n * k * side * side * c * taps * taps
    shapes = ((n, c, side, side), (k, c, taps, taps))
    return conv(us, "sm90_xmma_fprop_bf16bf16", dtype=HALF, shapes=shapes, tensor_core=True, flops=flops, pass_=pass_)


@pytest.mark.parametrize(("c", "side", "taps"), [(64, 160, 3), (256, 40, 3), (512, 20, 3), (256, 40, 1), (1024, 20, 1)])
def test_the_choice_is_the_rooflines(c, side, taps):
    kernel = step(halves(100, 32, c, c, side, taps)).kernels[0]
    problem, flops = problem_of(kernel), kernel.flops
    choice = fp8.choose(problem, flops, "fprop", H200)
    for quantise, got in ((fp8.STATIC, choice.static_s), (fp8.DYNAMIC, choice.dynamic_s), (fp8.FUSED, choice.fused_s)):
        y = 32 * c * side * side
        want = roofline.fp8_pays(
            flops, problem.input_elements, problem.weight_elements, y, SPEC, quantise_bytes=quantise
        )
        assert (choice.half_s, got) == pytest.approx((want.bf16_s, want.fp8_s))


def test_large_3x3_convolutions_are_candidates_and_small_1x1_are_not():
    made = step(halves(100, 32, 256, 256, 40), halves(60, 32, 256, 256, 40, taps=1), work(40))
    (finding,) = only(fp8.fp8_candidates, made)
    choice = fp8.choose(problem_of(made.kernels[0]), made.kernels[0].flops, "fprop", H200)
    assert finding.saving.mid_s == pytest.approx(100 * (1 - choice.static_s / choice.half_s) * US)
    assert finding.saving.low_s < finding.saving.mid_s < finding.saving.high_s
    assert finding.title.startswith("1 kernel ") and finding.title.endswith("1 would not")
    assert "1 of 3x3 256→256 at 40x40 fprop" in finding.note
    assert finding.verb == ""  # FP8 is for training here
    (finding,) = only(fp8.fp8_candidates, replace(made, trained=True))
    assert finding.verb == 'ridgeline.compile_step(…, recipe="fp8")'


def test_gradients_quantise_what_they_read():
    kernel = step(halves(100, 32, 128, 512, 40)).kernels[0]
    problem, flops = problem_of(kernel), kernel.flops
    passes = {name: fp8.choose(problem, flops, name, H200) for name in ("fprop", "dgrad", "wgrad")}
    # x has 128 channels, dy 512: the weight gradient quantises both, as fp8 and static scales cost 3 bytes an element
    x, y = 32 * 128 * 1600, 32 * 512 * 1600
    pass_s = {name: (choice.dynamic_s - choice.static_s) / 2 * H200.bandwidth for name, choice in passes.items()}
    assert pass_s == pytest.approx({"fprop": x, "dgrad": y, "wgrad": x + y})


def test_fp8_has_nothing_to_say():
    assert not list(fp8.fp8_candidates(step(halves(100, 32, 256, 256, 40), ceilings=TURING)))  # no FP8 unit
    assert not list(fp8.fp8_candidates(step(halves(100, 32, 256, 256, 40, taps=1))))  # trap 34: a small 1x1
    assert not list(fp8.fp8_candidates(step(simt(100))))  # fp32
    blind = step(work(100, "sm90_xmma_fprop_bf16bf16", category="conv", dtype="bf16"))
    (abstention,) = fp8.fp8_candidates(blind)
    assert isinstance(abstention, Abstention) and "record_shapes" in abstention.reason
