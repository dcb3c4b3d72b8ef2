"""Layers in FP8 whose counters say that it does not suit them return to bf16, and others stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8_steps import Training, batches, fp8_by_reference, training
from ridgeline.errors import UsageError
from ridgeline.fp8_review import Fp8Limits
from ridgeline.fp8_scaling import ScalingRule
from ridgeline.kernels._scale_fp8 import TOTALS
from ridgeline.step_recipe import NAMED


@pytest.fixture(scope="module", autouse=True)
def references() -> Iterator[None]:
    """Dynamo gives up on a function that it compiled eight times, if it is not told otherwise."""
    torch._dynamo.reset()
    with fp8_by_reference(), torch._dynamo.config.patch(recompile_limit=1000):
        yield


def plant(each: Training, tensor: str, column: str, count: int) -> None:
    """As if so much had been counted of a tensor."""
    scaling = each.program.fp8._scaling
    totals = dict(scaling.named_tensors())["totals"]
    totals[list(scaling.formats).index(tensor), TOTALS.index(column)] += count


LIMITS = Fp8Limits(review_every=3)
RULE = ScalingRule(window=2)


@pytest.mark.parametrize(
    ("tensor", "column", "count", "words"),
    [
        (
            "conv2.weight.dy",
            "overflows",
            9_000,
            r"of its dy, 0.05\d* of its elements saturated in 3 steps, and 0.01 may",
        ),
        (
            "conv2.weight.x",
            "underflows",
            60_000,
            r"of its x, 0.30\d* of its elements vanished in 3 steps, and 0.25 may",
        ),
        ("conv2.weight.w", "nonfinite", 1, r"of its w, 0.333 of its steps were not finite in 3 steps, and 0.01 may"),
    ],
)
def test_a_layer_beyond_a_limit_returns_to_bf16(tensor: str, column: str, count: int, words: str):
    """Read after three steps, looked at before the next; graphs are then made without the layer."""
    each = training(fp8_limits=LIMITS, fp8_scaling=RULE)
    each.run(batches(3))  # the window of two has passed before the third, where counting begins
    plant(each, tensor, column, count)
    each.run(batches(3))
    captures = each.step.report.captures
    with pytest.warns(RuntimeWarning, match=f"^compile_step: conv2.weight returns to bf16: {words}"):
        each.run(batches(1))
    losses = each.run(batches(3))
    report = each.step.report
    assert report.captures == captures + 1 and report.graphs == 1 and report.eager_steps == 1
    assert report.fp8[0].startswith("FP8 runs fprop of 2, dgrad of 2, wgrad of 2 of 6 convolutions")
    assert any("conv2.weight: bf16: of its" in line for line in report.fp8)
    assert all(0 < loss < 5 for loss in losses)
    by_name = {layer.layer: layer for layer in each.step.fp8_layers()}
    assert by_name["conv2.weight"].passes == () and by_name["conv1.weight"].passes
    updates = by_name["conv2.weight"].tensors["x"].updates
    each.run(batches(1))
    assert {layer.layer: layer for layer in each.step.fp8_layers()}["conv2.weight"].tensors["x"].updates == updates


def test_returned_layers_stay_so_over_a_state():
    each = training(fp8_limits=LIMITS, fp8_scaling=RULE)
    each.run(batches(3))
    plant(each, "conv1.weight.x", "overflows", 10_000)
    with pytest.warns(RuntimeWarning, match="conv1.weight returns to bf16"):
        each.run(batches(6))
    other = training(fp8_limits=LIMITS, fp8_scaling=RULE)
    other.step.load_state_dict(each.step.state_dict())
    other.run(batches(3))
    assert other.step.report.fp8[0].startswith("FP8 runs fprop of 2,")
    other.step.load_state_dict(training(NAMED["bf16"], captured=False).step.state_dict())
    other.run(batches(3))
    assert other.step.report.fp8[0].startswith("FP8 runs fprop of 3,")


def test_counts_within_limits_change_nothing():
    each = training(fp8_limits=LIMITS, fp8_scaling=RULE)
    each.run(batches(3))
    plant(each, "conv2.weight.x", "overflows", 600)
    plant(each, "conv2.weight.x", "underflows", 10_000)
    each.run(batches(8))
    report = each.step.report
    assert (report.captures, report.eager_steps) == (1, 0) and report.fp8[0].startswith("FP8 runs fprop of 3,")


def test_what_is_counted_while_scales_find_their_size_is_not_judged():
    each = training(fp8_limits=LIMITS, fp8_scaling=RULE)
    plant(each, "conv2.weight.x", "overflows", 1_000_000)
    each.run(batches(12))
    assert each.step.report.captures == 1


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="review_every must be at least 1 step, got 0"):
        Fp8Limits(review_every=0)
    with pytest.raises(UsageError, match=r"overflow_share must lie between 0 and 1, got 1\.5"):
        Fp8Limits(overflow_share=1.5)
