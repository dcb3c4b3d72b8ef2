"""benchmarks/conv2d.py: which passes are timed."""

from collections import Counter

import pytest

from benchmark_scripts import load
from ridgeline.workloads.ddpm_ladder import Conditions

script = load("conv2d")
TINY = Conditions(batch=2, preset="tiny", device="cpu")


@pytest.mark.parametrize("fp8", [False, True])
def test_every_pass_that_has_a_kernel_is_timed_beside_cudnn(fp8):
    """In FP8 convolutions of upsampled maps, whose kernels are of bf16, are left out."""
    calls = script.calls_of(TINY, "bf16", fp8=fp8)
    passes = Counter(call.op.name for call in calls)
    if fp8:
        assert passes["conv2d_fp8"] == 2 * passes["conv2d_wgrad_fp8"] > 0 and len(passes) == 2
        assert {call.dtype for call in calls} == {"fp8 e4m3", "fp8 e5m2"}
    else:
        assert passes["conv2d_fprop"] == passes["conv2d_dgrad"] == passes["conv2d_wgrad"] > 0
        assert passes["upsample_conv2d"] == 1
    for call in calls[-3:]:
        rival = call.theirs()
        found = call.op(**call.arguments)
        first = found[0] if isinstance(found, tuple) else found
        assert rival.shape == first.shape
        assert (call.quantize is None) == (not fp8)
