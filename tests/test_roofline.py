"""Roofline arithmetic against hand-computed numbers and the published FP8 thresholds."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cost import Cost
from ridgeline.errors import EnvironmentUnusable
from ridgeline.roofline import (
    QUANTISE_DYNAMIC,
    QUANTISE_FUSED,
    QUANTISE_STATIC,
    Bound,
    attainable,
    attained,
    bound,
    fp8_break_even_filters,
    fp8_pays,
    ridge,
    waves,
)
from ridgeline.specs import find_spec

H200 = find_spec("H200")
# ceilings of one H200 by measurement; FP8 at twice bf16
MEASURED = H200.with_measured({"tensor_bf16": 790e12, "tensor_fp8": 1580e12, "bandwidth": 4.3e12})


def test_bound_is_the_larger_of_compute_and_memory():
    conv = Cost(flops=9894 * 10**8, read_bytes=3 * 10**8, write_bytes=1 * 10**8, pipe="tensor_bf16")
    limits = bound(conv, H200)
    assert limits.compute_s == pytest.approx(1e-3)
    assert limits.memory_s == pytest.approx(4e8 / 4.8e12)
    assert (limits.seconds, limits.limiter) == (limits.compute_s, "compute")
    copy = bound(Cost(read_bytes=48 * 10**8, write_bytes=0), H200)
    assert (copy.seconds, copy.limiter) == (pytest.approx(1e-3), "memory")


def test_launch_bounds_a_tiny_kernel():
    limits = bound(Cost(flops=1, read_bytes=4, write_bytes=4), H200, launch_s=1e-6)
    assert (limits.seconds, limits.limiter) == (1e-6, "launch")
    with pytest.raises(ValueError, match="launch_s must be at least 0, got -1"):
        bound(Cost(), H200, launch_s=-1)


def test_ties_and_nothing():
    assert Bound(1.0, 1.0, 1.0).limiter == "memory"
    assert bound(Cost(), H200) == Bound(0.0, 0.0, 0.0)
    assert Bound(0.0, 0.0, 0.0).limiter == "memory"


def test_missing_pipe_is_refused_only_for_arithmetic():
    t4 = find_spec("T4")
    with pytest.raises(EnvironmentUnusable, match="--dtype fp16"):
        bound(Cost(flops=2, pipe="tensor_bf16"), t4)
    assert bound(Cost(read_bytes=320, pipe="tensor_bf16"), t4).memory_s == pytest.approx(1e-9)


def test_fp16_means_fp32_accumulation():
    assert bound(Cost(flops=1652 * 10**9, pipe="tensor_fp16"), find_spec("4090")).compute_s == pytest.approx(1e-2)


@settings(deadline=None)
@given(st.floats(0, 1e6))
def test_attainable_is_the_roof(intensity):
    roof = attainable(intensity, H200, "tensor_bf16")
    if intensity < ridge(H200, "tensor_bf16"):
        assert roof == pytest.approx(intensity * 4.8e12)
    else:
        assert roof == 989.4e12


def test_attainable_refuses_a_negative_intensity():
    with pytest.raises(ValueError, match="got -1"):
        attainable(-1, H200, "tensor_bf16")


@settings(deadline=None)
@given(st.integers(1, 10**15), st.integers(1, 10**12))
def test_bound_agrees_with_attainable(flops, read_bytes):
    cost = Cost(flops=flops, read_bytes=read_bytes, pipe="tensor_bf16")
    by_rate = flops / attainable(cost.intensity, H200, cost.pipe)
    assert bound(cost, H200).seconds == pytest.approx(by_rate)


def test_attained_above_one_is_flagged_not_clipped():
    cost = Cost(flops=9894 * 10**8, pipe="tensor_bf16")
    honest = attained(cost, 1.25e-3, H200)
    assert honest.fraction == pytest.approx(0.8)
    assert not honest.flagged
    suspect = attained(cost, 1e-3 / 1.3, H200)
    assert suspect.fraction == pytest.approx(1.3)
    assert suspect.flagged
    assert any("Winograd" in cause for cause in suspect.likely_causes)
    cached = attained(Cost(read_bytes=48 * 10**8), 0.5e-3, H200)
    assert cached.fraction == pytest.approx(2)
    assert any("L2" in cause for cause in cached.likely_causes)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_attained_refuses_impossible_times(seconds):
    with pytest.raises(ValueError, match="seconds must be above 0"):
        attained(Cost(flops=1), seconds, H200)


def test_waves_charge_the_idle_part_of_the_last_wave():
    full = waves(132, 132)
    assert (full.tiles, full.waves, full.efficiency) == (132, 1.0, 1.0)
    assert waves(133, 132).efficiency == pytest.approx(133 / 264)
    assert waves(100, 132).efficiency == pytest.approx(100 / 132)
    for tiles, sm_count in ((0, 132), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            waves(tiles, sm_count)


@pytest.mark.parametrize(
    ("kernel_area", "quantise_bytes", "filters"),
    [
        (9, QUANTISE_STATIC, 61),
        (9, QUANTISE_DYNAMIC, 102),
        (1, QUANTISE_STATIC, 551),
        (1, QUANTISE_DYNAMIC, 919),
    ],
)
def test_fp8_break_even(kernel_area, quantise_bytes, filters):
    threshold = fp8_break_even_filters(kernel_area, MEASURED, quantise_bytes=quantise_bytes)
    assert threshold == pytest.approx(filters, abs=0.5)


def test_fp8_break_even_at_the_ends():
    assert fp8_break_even_filters(9, MEASURED, quantise_bytes=QUANTISE_FUSED) == 0
    no_faster = MEASURED.with_measured({"tensor_fp8": 790e12})
    assert fp8_break_even_filters(9, no_faster) == float("inf")


@pytest.mark.parametrize(
    ("kernel", "channels", "size", "static", "dynamic"),
    [
        (3, 64, 160, 1.0, 0.77),
        (3, 128, 80, 1.4, 1.1),
        (3, 256, 40, 1.6, 1.4),
        (3, 512, 20, 1.8, 1.7),
        (1, 256, 40, 0.7, 0.5),
        (1, 1024, 20, 1.3, 1.05),
    ],
)
def test_fp8_speedups_at_batch_32(kernel, channels, size, static, dynamic):
    pixels = 32 * size * size
    elements, weights = pixels * channels, channels * channels * kernel**2
    flops = 2 * pixels * weights
    by_scale = {QUANTISE_STATIC: static, QUANTISE_DYNAMIC: dynamic}
    for quantise_bytes, expected in by_scale.items():
        choice = fp8_pays(flops, elements, weights, elements, MEASURED, quantise_bytes=quantise_bytes)
        assert choice.speedup == pytest.approx(expected, abs=0.06)
        assert choice.pays == (choice.fp8_s < choice.bf16_s)


def test_fp8_gain_when_the_producer_quantises():
    # memory-bound 1x1: FP8 input and the byte saved by its producer
    choice = fp8_pays(2 * 10**6 * 64 * 64, 64 * 10**6, 64 * 64, 64 * 10**6, MEASURED, quantise_bytes=QUANTISE_FUSED)
    assert choice.speedup == pytest.approx(2.0, rel=1e-3)


def test_fp8_needs_the_pipe_and_work():
    with pytest.raises(EnvironmentUnusable, match="tensor_fp8"):
        fp8_pays(1, 1, 1, 1, find_spec("NVIDIA A10"))
    with pytest.raises(ValueError, match="flops=0"):
        fp8_pays(0, 1, 1, 1, MEASURED)


def test_specs_and_roofline_do_without_torch():
    code = "import sys, ridgeline.specs, ridgeline.roofline, ridgeline.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
