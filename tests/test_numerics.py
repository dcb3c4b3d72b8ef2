"""The tolerance rule must let rounding pass and nothing else."""

import math

import pytest
import torch

from ridgeline.numerics import TF32_EPS, Verdict, compare, fp8_sum_eps, judge, largest, rms, to_float64


def rounded(n: int = 4096, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(actual, reference64, eager): two roundings of one exact map."""
    exact = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return exact.to(dtype), exact, exact.float().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_passes(dtype):
    verdict = compare(*rounded(dtype=dtype))
    assert verdict.passed, verdict.reason
    assert verdict.numel == 4096


@pytest.mark.parametrize("n", [64, 1 << 20])
def test_one_percent_is_caught_by_the_rms_where_the_maximum_may_miss_it(n):
    actual, exact, eager = rounded(n)
    verdict = compare((actual.double() * 1.01).half(), exact, eager)
    assert not verdict.passed
    assert verdict.rms_error > 5 * verdict.allowed_rms


def test_one_wrong_element_is_caught_by_the_maximum_where_the_rms_misses_it():
    actual, exact, eager = rounded(1 << 20)
    actual[7] += 0.25
    verdict = compare(actual, exact, eager)
    assert verdict.rms_error <= verdict.allowed_rms
    assert verdict.max_error > verdict.allowed_max
    assert not verdict.passed


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_infinity_never_pass(poison, which):
    triple = rounded()
    triple[which][3] = poison
    verdict = compare(*triple)
    assert not verdict.passed
    assert verdict.nonfinite == 1
    assert "1 NaN or infinite" in verdict.reason


def test_all_three_infinite_alike_does_not_pass():
    same = torch.full((4,), math.inf, dtype=torch.float64)
    assert not compare(same.half(), same, same.half()).passed


def test_allowance_is_the_formula():
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64)
    eager = torch.tensor([3.0, -4.5])
    verdict = compare(torch.tensor([3.0, -4.0]), exact, eager, error_factor=2.0, eps=TF32_EPS)
    assert verdict.rms_error == verdict.max_error == 0
    assert verdict.allowed_rms == pytest.approx(2 * math.sqrt(0.125) + TF32_EPS * math.sqrt(12.5))
    assert verdict.allowed_max == pytest.approx(2 * 0.5 + TF32_EPS * 4)


def test_a_verdict_is_not_a_truth_value():
    verdict = compare(*rounded())
    with pytest.raises(TypeError, match=r"ask verdict\.passed"):
        assert verdict
    with pytest.raises(AttributeError):
        verdict.rms_error = 0.0  # frozen
    assert Verdict(0.5, 0.5, 1.0, 0.4, 0, 1).passed is False
    assert Verdict(0.5, 0.4, 0.4, 1.0, 0, 1).passed is False


def test_empty_tensors_agree():
    empty = torch.empty(0, 3)
    assert compare(empty, empty.double(), empty).passed
    assert rms(empty) == largest(empty) == 0


def test_refusals_name_the_value():
    actual, exact, eager = rounded(8)
    with pytest.raises(ValueError, match=r"shapes must be equal, got actual \(7,\), reference \(8,\)"):
        compare(actual[:7], exact, eager)
    with pytest.raises(TypeError, match=r"reference must be float64, got torch\.float32"):
        compare(actual, exact.float(), eager)
    with pytest.raises(TypeError, match=r"got torch\.float64 beside torch\.float16"):
        compare(actual, exact, exact)


def test_judge_runs_the_call_beside_both_references():
    arguments = {"x": torch.linspace(-2, 2, 65), "scale": 3.0}

    def reference(x, scale):
        return torch.sigmoid(x) * scale

    assert judge(lambda x, scale: scale / (1 + torch.exp(-x)), reference, arguments).passed
    assert not judge(lambda x, scale: reference(x, scale) * 1.01, reference, arguments).passed
    assert to_float64(arguments)["x"].dtype == torch.float64
    assert to_float64({"i": torch.arange(3)})["i"].dtype == torch.int64


@pytest.mark.parametrize(("products", "lost"), [(1152, 0.0169), (2304, 0.0373), (4608, 0.0769), (9216, 0.1448)])
def test_sums_of_one_sign_may_lose_what_an_h200_loses(products: int, lost: float):
    """The root mean square of benchmarks/results/fp8_error.jsonl; of products of both signs so much is a fault."""
    assert lost < fp8_sum_eps(products, one_sign=True) < 2 * lost
    assert fp8_sum_eps(products) < lost
