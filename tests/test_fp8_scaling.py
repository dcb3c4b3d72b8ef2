"""DelayedScaling beside its rule in Python: windows, floors, what is not finite; quantising by it over many steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fp8_steps import fp8_by_reference
from ridgeline.cudagraph import capture
from ridgeline.errors import UsageError
from ridgeline.fp8_scaling import DelayedScaling, ScalingRule
from ridgeline.kernels import scale_fp8
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.numerics import rms

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BOTH = {"x": "e4m3", "dy": "e5m2"}

# NumPy's word, under the interpreter, for a quotient that the rule then bounds
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def scaling_of(formats: dict[str, str] = BOTH, *, window: int = 16, margin: int = 0) -> DelayedScaling:
    return DelayedScaling(formats, rule=ScalingRule(window, margin), device=DEVICE)


def see_(scaling: DelayedScaling, magnitudes: Iterable[float | None]) -> None:
    """As if each tensor had been quantised once, with this largest magnitude; None was not."""
    for name, magnitude in zip(scaling.formats, magnitudes, strict=True):
        if magnitude is not None:
            slot = scaling.slot(name)
            slot.amax.fill_(magnitude)
            slot.counts[0, 2] += 1


def scale_of(scaling: DelayedScaling, name: str = "x") -> float:
    return scaling.slot(name).scale.item()


# --- the rule ------------------------------------------------------------------------------------------------------


def expected_scales(magnitudes: list[float], largest: float, window: int, margin: int) -> list[float]:
    """Step by step, in Python: fp32 quotients of fp32 numbers."""
    scale, past, scales = 1.0, deque[float](maxlen=window), []
    for magnitude in magnitudes:
        finite = math.isfinite(magnitude)
        past.append(magnitude if finite else 0.0)
        if finite and max(past) > 0:
            quotient = torch.tensor(largest * 2.0**-margin) / torch.tensor(max(past))
            scale = min(max(quotient.item(), 2.0**-126), 2.0**126)
        scales.append(scale)
    return scales


@pytest.mark.parametrize(("window", "margin"), [(1, 0), (4, 2), (16, 0)])
def test_scales_follow_the_largest_of_the_window(window: int, margin: int):
    magnitudes = [0.0, 3.0, 0.1, 0.1, math.inf, 0.2, 0.0, 0.0, 0.0, 0.0, math.nan, 1e-42, 1e-42, 1e-42, 1e38, 7.0, 5.0]
    scaling = scaling_of(window=window, margin=margin)
    found: dict[str, list[float]] = {name: [] for name in BOTH}
    for magnitude in magnitudes:
        see_(scaling, (magnitude, 3 * magnitude))
        scaling.update_()
        for name in BOTH:
            found[name].append(scale_of(scaling, name))
            assert scaling.slot(name).inverse.item() == (1 / torch.tensor(found[name][-1])).item()
    for (name, kind), factor in zip(BOTH.items(), (1, 3), strict=True):
        given = [torch.tensor(factor * magnitude, dtype=torch.float32).item() for magnitude in magnitudes]
        assert found[name] == expected_scales(given, FORMATS[kind].largest, window, margin)
    counts = scaling.report()[0]
    assert (counts.nonfinite, counts.updates, counts.elements) == (2, len(magnitudes), len(magnitudes))
    assert counts.peak == torch.tensor(1e38).item()
    assert counts.amax == max(torch.tensor(m).item() for m in magnitudes[-window:] if math.isfinite(m))


def test_a_scale_is_never_infinite_nor_zero_nor_not_a_number():
    """Whatever is seen: both the scale and its reciprocal are normal numbers of fp32."""
    tensors = 150  # more than a program takes
    scaling = scaling_of({f"t{i}": ("e4m3", "e5m2")[i % 2] for i in range(tensors)}, window=5)
    g = torch.Generator().manual_seed(0)
    twin = scale_fp8.State(**{name: tensor.clone() for name, tensor in vars(scaling._state).items()})
    special = torch.tensor([0.0, math.inf, math.nan, 1e-45, 1e-38, 3.4e38])
    for _ in range(7):
        magnitudes = torch.exp2(torch.rand(tensors, generator=g) * 270 - 140)
        which = torch.rand(tensors, generator=g) < 0.4
        magnitudes[which] = special[torch.randint(6, (int(which.sum()),), generator=g)]
        counts = torch.randint(5, (tensors, 3), generator=g)
        for state in (scaling._state, twin):
            state.amax.copy_(magnitudes)
            state.counts.copy_(counts)
        scaling.update_()
        scale_fp8.update_reference_(twin, margin=0)
        for name, tensor in vars(scaling._state).items():
            assert torch.equal(tensor, getattr(twin, name)), name
        for factor in (twin.scale, twin.inverse):
            assert factor.isfinite().all() and (factor >= torch.finfo(torch.float32).tiny).all()
    assert (twin.totals[:, 3] > 0).any() and (twin.totals[:, 4] < 7).any()
    assert not twin.amax.any() and not twin.counts.any()


def test_a_tensor_that_nobody_quantised_stays_as_it_is():
    scaling = scaling_of(window=2)
    see_(scaling, (2.0, 4.0))
    scaling.update_()
    before = {name: tensor.clone() for name, tensor in scaling.named_tensors()}
    for _ in range(3):
        see_(scaling, (1.0, None))
        scaling.update_()
    for name, tensor in scaling.named_tensors():
        assert torch.equal(tensor[1], before[name][1]), name
        assert not torch.equal(tensor[0], before[name][0]) or name == "peak"


def test_without_a_kernel_the_same_happens():
    results = []
    for way in (nullcontext, fp8_by_reference):
        for current in (False, True):
            scaling = DelayedScaling(BOTH, rule=ScalingRule(3, 1, current), device=DEVICE)
            with way():
                for seed in range(2):
                    for name in BOTH:
                        scaling.quantize(randn(7, 5, seed=seed) * 10.0**seed, name)
                    scaling.update_()
            results.append([tensor.clone() for _, tensor in scaling.named_tensors()])
    for ours, other in zip(results[:2], results[2:], strict=True):
        assert ours[0].ne(1).all()
        assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


# --- scaling and quantising together -------------------------------------------------------------------------------


def step(scaling: DelayedScaling, x: Tensor, name: str = "x") -> Tensor:
    """One step: `x` through FP8 and back."""
    y, _ = scaling.quantize(x, name)
    back = y.float() * scaling.slot(name).inverse
    scaling.update_()
    return back


def test_a_constant_tensor_is_exact_to_its_format_from_the_second_step():
    for name, bits in (("x", 4), ("dy", 3)):
        scaling = scaling_of()
        x = 1e-4 * randn(32, 16)
        first, second = step(scaling, x, name), step(scaling, x, name)
        assert rms(first - x) > 0.05 * rms(x)  # by a scale of 1, most of it is below the least number
        assert rms(second - x) < 2.0**-bits * rms(x)
        assert scale_of(scaling, name) == (scaling._state.largest[0 if name == "x" else 1] / x.abs().max()).item()
        assert second.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)


def test_all_zero_tensors():
    scaling = scaling_of(window=2)
    zeros = torch.zeros(8, 8, device=DEVICE)
    assert torch.equal(step(scaling, zeros), zeros)
    assert scale_of(scaling) == 1.0
    step(scaling, zeros + 2)
    for _ in range(3):
        assert torch.equal(step(scaling, zeros), zeros)
    assert scale_of(scaling) == 224.0  # kept when the window holds zeros alone
    counts = scaling.report()[0]
    assert (counts.overflows, counts.underflows, counts.amax, counts.peak) == (0, 0, 0.0, 2.0)


def test_a_single_outlier_leaves_with_its_window():
    scaling = scaling_of(window=3)
    x = randn(64, 8).clamp(-2, 2)
    with_outlier = x.clone()
    with_outlier[0, 0] = 1e6
    step(scaling, x)
    usual = scale_of(scaling)
    back = step(scaling, with_outlier)
    # the outlier saturates by the scale of the steps before, and nothing else suffers
    assert back[0, 0] == pytest.approx(x.abs().max().item(), rel=1e-6)
    assert rms((back - x)[1:]) < 2.0**-4 * rms(x[1:])
    for _ in range(3):
        assert scale_of(scaling) == pytest.approx(448 / 1e6, rel=1e-6)
        back = step(scaling, x)
    assert scale_of(scaling) == usual
    assert rms(back - x) > 0.2 * rms(x)  # what an outlier costs by this scale: steps of 2^-9 · 1e6 / 448
    counts = scaling.report()[0]
    assert counts.overflows == 1 and counts.underflows > 500
    assert counts.underflow_share == counts.underflows / (5 * 64 * 8)


def test_gradients_that_grow_a_thousandfold_saturate_for_one_step():
    scaling = scaling_of(window=4)
    dy = 1e-3 * randn(64, 16, seed=2)
    for _ in range(2):
        step(scaling, dy, "dy")
    assert scaling.report()[1].overflows == 0
    grown = 1000 * dy
    back = step(scaling, grown, "dy")
    assert back.abs().max() == pytest.approx(dy.abs().max().item(), rel=1e-6)
    overflows = scaling.report()[1].overflows
    assert overflows == (grown.abs() > 61440 / 57344 * dy.abs().max()).sum() > 900
    assert rms(step(scaling, grown, "dy") - grown) < 2.0**-3 * rms(grown)
    assert scaling.report()[1].overflows == overflows
    assert scaling.report()[1].overflow_share == overflows / (4 * 64 * 16)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_element_that_is_not_finite_moves_no_scale(bad: float):
    scaling = scaling_of(window=3)
    x = randn(16, 16, seed=3)
    step(scaling, x)
    scale = scale_of(scaling)
    broken = 100 * x
    broken[3, 3] = bad
    back = step(scaling, broken)
    assert scale_of(scaling) == scale
    assert back[3, 3].isnan() if math.isnan(bad) else back[3, 3] == pytest.approx(x.abs().max().item(), rel=1e-6)
    assert back.isfinite().sum() == 256 - math.isnan(bad)
    # nor those of the steps that still have it in their window
    for _ in range(3):
        step(scaling, x / 2)
    assert scale_of(scaling) == pytest.approx(2 * scale, rel=1e-6)
    assert scaling.report()[0].nonfinite == 1


def test_several_calls_in_a_step_count_as_one_tensor():
    scaling = scaling_of()
    for factor in (1.0, 8.0, 2.0):
        scaling.quantize(factor * torch.ones(4, 4, device=DEVICE), "x")
    scaling.update_()
    assert scale_of(scaling) == 448 / 8
    assert scaling.report()[0].elements == 48 and scaling.report()[0].updates == 1


def test_current_scaling_follows_each_tensor_at_once():
    scaling = DelayedScaling(BOTH, rule=ScalingRule(current=True), device=DEVICE)
    x = randn(32, 16, dtype=torch.float16)
    for factor in (1.0, 1000.0, 0.01):
        given = factor * x
        back = step(scaling, given)
        assert rms(back - given) < 2.0**-4 * rms(given.float())
        assert back.abs().max() == pytest.approx(given.abs().max().item(), rel=1e-6)
    before = scale_of(scaling)
    for bad in (torch.zeros_like(x), torch.full_like(x, math.nan)):
        scaling.quantize(bad, "x")
        assert scale_of(scaling) == before
    assert scaling.report()[0].overflows == 0


def test_it_quantises_inside_a_compiled_graph():
    eager, compiled = scaling_of(window=2), scaling_of(window=2)

    def loss(x: Tensor, scaling: DelayedScaling) -> Tensor:
        y, quads = scaling.quantize(x, "x", quads=True)
        dy, _ = scaling.quantize(3 * x, "dy")
        return y.float().sum() + quads.float().square().sum() + dy.float().sum()

    fast = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = 100 * random_nhwc((2, 16, 4, 4), torch.float32, DEVICE, seed=seed)
        assert torch.equal(fast(x, compiled), loss(x, eager))
        for scaling in (eager, compiled):
            scaling.update_()
        assert eager.report() == compiled.report()


# --- state ---------------------------------------------------------------------------------------------------------


def test_state_goes_on_where_it_was_left_in_the_same_memory():
    one, other = scaling_of(window=3), scaling_of(window=3)
    for seed in range(3):
        step(one, (seed + 1) * randn(8, 8, seed=seed))
    see_(other, (1e4, 1e4))
    slot = other.slot("x")
    other.load_state_dict(one.state_dict())
    assert slot.scale.item() == scale_of(one) and slot.amax.item() == 0
    for seed in range(2):
        x = randn(8, 8, seed=9 + seed)
        assert torch.equal(step(one, x), step(other, x))
    assert one.report() == other.report()
    # copies: a later step leaves them alone
    kept = one.state_dict()
    step(one, 1e3 * randn(8, 8))
    assert kept["peak"][0] < 100 < one.report()[0].peak


def test_states_of_others_are_refused():
    scaling = scaling_of(window=3)
    state = scaling_of({"x": "e4m3", "dw": "e5m2"}, window=3).state_dict()
    with pytest.raises(UsageError, match="of other tensors, formats or another order: dw, dy"):
        scaling.load_state_dict(state)
    with pytest.raises(UsageError, match="another order: the same names"):
        scaling.load_state_dict(scaling_of(dict(reversed(BOTH.items())), window=3).state_dict())
    with pytest.raises(UsageError, match="a window of 4 steps, this rule one of 3"):
        scaling.load_state_dict(scaling_of(window=4).state_dict())


def test_refusals():
    with pytest.raises(UsageError, match="the format of x must be one of e4m3, e5m2, got 'fp8'"):
        DelayedScaling({"x": "fp8"})
    with pytest.raises(UsageError, match="there are no tensors"):
        DelayedScaling({})
    with pytest.raises(UsageError, match="window must lie between 1 and 4096 steps, got 0"):
        ScalingRule(window=0)
    with pytest.raises(UsageError, match="margin must lie between 0 and 32 powers of two, got -1"):
        ScalingRule(margin=-1)
    with pytest.raises(UsageError, match="tensor must be one of x, dy, got 'w'"):
        scaling_of().slot("w")


@pytest.mark.gpu
@pytest.mark.parametrize("current", [False, True])
def test_a_captured_step_keeps_its_scales_on_the_device(current: bool):
    x = random_nhwc((4, 128, 8, 8), torch.bfloat16, "cuda", seed=0)
    both = [DelayedScaling(BOTH, rule=ScalingRule(4, current=current), device="cuda") for _ in range(2)]

    def run(scaling: DelayedScaling) -> tuple[Tensor, Tensor]:
        found = scaling.quantize(x, "dy", quads=True)
        scaling.update_()
        return found

    captured = capture(lambda: run(both[0]), (), warmup=1)
    run(both[1])  # as the warm-up did
    for n in range(6):
        x.copy_(random_nhwc((4, 128, 8, 8), torch.bfloat16, "cuda", seed=n) * 4.0**n)
        for a, b in zip(captured.replay(), run(both[1]), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert both[0].report() == both[1].report()
    assert both[0].report()[1].updates == 7
