"""Rules of what follows backward (K8-K11) on steps made by hand: each fires, or not."""

from __future__ import annotations

import pytest

from ridgeline.finding import Finding
from ridgeline.rules import fusion, movement, optimizer
from rules.steps_made import US, fill, idle, op, step, work

FOREACH = "multi_tensor_apply_kernel<TensorListMetadata<3>, PointwiseOpListFunctor<float>>"
FUSED = "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
PARAMETERS = (((1000, 4300), "float"),)  # 4.3 M: AdamW's 28 bytes each take 28 µs at the H200's 4.3 TB/s


def update(us: float, name: str, call: str, phase: str = "optimizer", **more):
    category = "optimizer" if "multi_tensor" in name else "pointwise"
    return work(us, name, category=category, call=op(call, (64, 64)), phase=phase, **more)


def tiny(count: int, call: str, phase: str, us: float = 2, gap: float = 4):
    return [piece for _ in range(count) for piece in (update(us, "vectorized_elementwise", call, phase), idle(gap))]


def only(rule, made):
    return [found for found in rule(made) if isinstance(found, Finding)]


def test_one_tensor_at_a_time():
    made = step(work(900), *tiny(100, "aten::addcdiv_", "optimizer"), trained=True, parameters=PARAMETERS)
    (finding,) = only(optimizer.single_tensor_optimizer, made)
    # 200 µs of kernels become one pass of 28 µs at 80 % of the bandwidth; all pauses but one go
    assert finding.saving.mid_s == pytest.approx((200 - 28 / 0.8 + 99 * 4) * US)
    assert finding.title.startswith("the optimizer takes 100 kernels")


def test_without_a_count_of_parameters_a_share_stays():
    made = step(work(900), *tiny(100, "aten::addcdiv_", "optimizer"), trained=True)
    (finding,) = only(optimizer.single_tensor_optimizer, made)
    assert finding.saving.mid_s == pytest.approx((200 * (1 - 28 / 76) + 99 * 4) * US)


def test_a_fused_optimizer_and_a_few_kernels_are_silent():
    fused = step(work(900), *[update(30, FUSED, "aten::_fused_adamw_") for _ in range(9)], trained=True)
    assert not only(optimizer.single_tensor_optimizer, fused)
    assert not only(optimizer.unfused_foreach, fused)
    few = step(work(900), *tiny(20, "aten::addcdiv_", "optimizer"), trained=True)
    assert not only(optimizer.single_tensor_optimizer, few)


def test_foreach_passes_several_times():
    norm = update(20, "multi_tensor_apply_kernel<LpNormFunctor>", "aten::_foreach_norm")
    made = step(work(900), norm, *[update(25, FOREACH, "aten::_foreach_addcdiv_") for _ in range(12)], trained=True)
    (finding,) = only(optimizer.unfused_foreach, made)
    assert finding.saving.mid_s == pytest.approx(300 * (1 - 28 / 76) * US)
    assert 3 not in finding.evidence  # the norm of the gradients is no update
    clipped = step(work(900), *[norm] * 12, trained=True)
    assert not only(optimizer.unfused_foreach, clipped)


def test_an_average_by_a_loop():
    # trap 42 in small: two launches a tensor
    loop = [piece for name in ("aten::mul_", "aten::add_") for piece in tiny(90, name, "other")]
    (finding,) = only(optimizer.looped_average, step(work(900), *loop, trained=True))
    assert finding.title.startswith("the average of the weights takes 180 launches")
    assert finding.saving.mid_s == pytest.approx((180 * 2 * (1 - 28 / 76) + 179 * 4) * US)
    assert not only(fusion.pointwise_chains, step(work(900), *loop, trained=True))  # said once


def test_an_average_over_lists_could_share_the_optimizers_pass():
    scale, lerp = (update(90, FOREACH, f"aten::_foreach_{name}_", phase="other") for name in ("mul", "lerp"))
    norm = update(90, FOREACH, "aten::_foreach_norm", phase="other")
    (finding,) = only(optimizer.looped_average, step(work(900), norm, scale, lerp, trained=True))
    # the clip's pass over the gradients goes, of the average's 12 bytes a parameter 8 stay; the norm is needed
    assert finding.saving.mid_s == pytest.approx((90 + 90 / 3) * US)
    assert finding.saving.high_s == pytest.approx(180 * US)
    assert not only(optimizer.looped_average, step(work(900), scale, norm, trained=True))  # there is no average
    assert not only(optimizer.looped_average, step(work(30_000), scale, lerp, trained=True))  # too little to matter


def test_few_kernels_and_other_phases_are_no_average():
    forward = tiny(100, "aten::add", "forward")
    assert not only(optimizer.looped_average, step(work(900), *forward, trained=True))
    assert not only(optimizer.looped_average, step(work(900), *tiny(100, "aten::mul_", "other")))  # no training


def test_gradients_filled_with_zeros():
    zeros = [piece for _ in range(30) for piece in (fill(2, call=op("aten::zero_", (64, 64)), phase="other"), idle(4))]
    made = step(work(900), *zeros, work(20), trained=True)
    (finding,) = only(optimizer.cleared_gradients, made)
    assert finding.saving.mid_s == pytest.approx(30 * 6 * US)
    assert finding.title.startswith("zero_grad fills 30 tensors")
    assert not only(movement.fill_storm, made)  # said once


@pytest.mark.parametrize(
    ("count", "phase", "trained"), [(19, "other", True), (30, "forward", True), (30, "other", False)]
)
def test_fills_that_are_no_gradients(count, phase, trained):
    zeros = [fill(2, call=op("aten::zero_", (64, 64)), phase=phase) for _ in range(count)]
    assert not only(optimizer.cleared_gradients, step(work(900), *zeros, trained=trained))
