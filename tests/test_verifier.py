"""Agreement accepts what rounding does to a selection, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from graphs import image, net
from ridgeline.errors import VerificationFailed
from ridgeline.numerics import TF32_EPS
from ridgeline.recipe import Limits, Recipe
from ridgeline.verifier import (
    Agreement,
    DetectionErrors,
    agree,
    detection_errors,
    is_detections,
    reference_of,
    rounding,
    tensors_of,
)

FP32 = Recipe(dtype="fp32")


def detections(n: int = 2, k: int = 20, seed: int = 0) -> Tensor:
    """Rows [n, k, 6] like a detector's: distinct boxes, falling scores, a few classes."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand((n, k, 2), generator=generator, dtype=torch.float64) * 500
    scores = torch.linspace(0.95, 0.05, k, dtype=torch.float64).expand(n, k)
    classes = torch.randint(0, 4, (n, k), generator=generator).double()
    return torch.cat([corner, corner + 50, scores[..., None], classes[..., None]], dim=2)


def swapped(rows: Tensor, a: int, b: int, image: int = 0) -> Tensor:
    changed = rows.clone()
    changed[image, [a, b]] = rows[image, [b, a]]
    return changed


def test_equal_detections_are_equal():
    found = detection_errors(detections(), detections())
    assert found == DetectionErrors(0.0, 0.0, 2 * 19, seen=2 * 19)  # the last row is the cut


def test_swapped_rows_of_nearly_equal_score_cost_only_their_difference():
    rows = detections()
    rows[0, 4, 4] = rows[0, 5, 4] + 1e-6
    other = swapped(rows, 4, 5)
    other[0, 4:6, 4] = rows[0, 4:6, 4]  # sorted again
    found = detection_errors(other, rows)
    assert found.score == 0 and found.box_px == 0
    other = swapped(rows, 4, 5)
    assert detection_errors(other, rows).score == pytest.approx(1e-6)


def test_a_row_at_the_cut_may_be_another():
    rows, other = detections(), detections()
    other[0, -1, :4] += 300
    assert detection_errors(other, rows).box_px == 0


def shifted_box(rows: Tensor) -> None:
    rows[1, 3, 0] += 5.0


def wrong_class(rows: Tensor) -> None:
    rows[0, 0, 5] = 9.0


def doubled_row(rows: Tensor) -> None:
    rows[0, 7] = rows[0, 6]


def missing_row(rows: Tensor) -> None:
    rows[0, 2:-1] = rows[0, 3:].clone()
    rows[0, 2:, 4] = detections()[0, 2:, 4]  # the scores alone would not tell


def invented_row(rows: Tensor) -> None:
    rows[0, 5, :4] = torch.tensor([9.0, 9.0, 19.0, 19.0])


def other_score(rows: Tensor) -> None:
    rows[0, 0, 4] = 0.99


def box_of_nan(rows: Tensor) -> None:
    rows[1, 4, 2] = math.nan


def every_box_nan(rows: Tensor) -> None:
    rows[..., :4] = math.nan


def score_of_nan(rows: Tensor) -> None:
    rows[1, 4, 4] = math.nan


def infinite_box(rows: Tensor) -> None:
    rows[1, 4, 2] = math.inf


def second_image_of_the_first(rows: Tensor) -> None:
    rows[1] = rows[0]


WRONG = (
    shifted_box, wrong_class, doubled_row, missing_row, invented_row, other_score, box_of_nan, every_box_nan,
    score_of_nan, infinite_box, second_image_of_the_first,
)  # fmt: skip


def allowed(found: DetectionErrors) -> Agreement:
    return Agreement((), found, DetectionErrors(1e-3, 1.0, found.rows))


@pytest.mark.parametrize("damage", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_row_is_rejected(damage):
    rows = detections()
    damage(rows)
    found = detection_errors(rows, detections())
    assert not allowed(found).passed, found
    assert allowed(detection_errors(detections(), detections())).passed


def test_a_duplicate_of_a_reference_row_does_not_hide_an_invented_one():
    """Two reference rows nearly alike: one found row serves both, so the other direction must be asked too."""
    rows = detections()
    rows[0, 6, :4], rows[0, 6, 5] = rows[0, 7, :4] + 0.1, rows[0, 7, 5]
    other = rows.clone()
    other[0, 6, :4] = torch.tensor([1300.0, 300.0, 1330.0, 330.0])
    assert detection_errors(other, rows).box_px > 100


@pytest.mark.parametrize("shape", [(2, 19, 6), (1, 20, 6)])
def test_fewer_rows_or_images_are_infinitely_wrong(shape):
    rows = detections()[: shape[0], : shape[1]]
    assert not allowed(detection_errors(rows, detections())).passed


def test_what_counts_as_detections():
    assert is_detections(detections())
    assert not is_detections(detections().flip(1))  # worst first
    assert not is_detections(torch.randn(2, 20, 6))
    assert not is_detections(detections()[..., :5])
    assert not is_detections(detections()[0])
    assert not is_detections(detections()[:, :0])


class Detector(nn.Module):
    """Returns `rows` whatever the input; in half precision they carry its rounding."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows + 0 * x.sum()


def test_agreement_on_detections_names_its_numbers():
    module, x = Detector(detections().float()), (torch.zeros(1),)
    right = agree(module, x, detections().float(), FP32)
    assert right.passed and right.detections is not None and right.detections.rows == 38
    damaged = detections().float()
    shifted_box(damaged)
    wrong = agree(module, x, damaged, FP32)
    assert not wrong.passed
    assert "boxes by 5 px" in wrong.reason and "over 38 rows" in wrong.reason


def test_scores_that_are_all_the_same_prove_nothing():
    """Saturated scores leave no row clear of the cut: equal scores would let any boxes pass."""
    rows = detections().float()
    rows[..., 4] = 1.0
    module, x = Detector(rows), (torch.zeros(1),)
    other = rows.clone()
    other[..., :4] += 300
    for result in (rows, other):
        found = agree(module, x, result, FP32)
        assert found.detections is not None and found.detections.rows == 0 and found.compared_nothing
        assert not found.passed
        assert "no box was compared, because all 40 scores above 0.05 lie within 0 of the last" in found.reason
        assert found.reason.count(". ") == 0
    # rows of another shape are what is wrong first
    assert "boxes by inf px" in agree(module, x, rows[:, :5], FP32).reason


def test_an_image_that_shows_nothing_passes_without_boxes():
    rows = detections().float()
    rows[..., 4] = 1e-4
    found = agree(Detector(rows), (torch.zeros(1),), rows, FP32)
    assert found.detections is not None and (found.detections.rows, found.detections.seen) == (0, 0)
    assert found.passed and not found.compared_nothing


def test_half_precision_is_allowed_what_the_module_itself_errs():
    module, x = Detector(detections().float()), (torch.zeros(1),)
    fp16 = agree(module, x, detections().half(), Recipe(dtype="fp16"))
    assert fp16.passed and fp16.allowed is not None and 0.05 < fp16.allowed.box_px < 1
    assert not agree(module, x, detections().half(), FP32).passed


def test_dense_results_follow_the_one_rule():
    module, x = net(lambda m, x: (m.a(x), {"b": [m.a(x) * 2]}), a=nn.Conv2d(3, 4, 3)), (image(1, 3, 6, 6),)
    results = module(*x)
    verdict = agree(module, x, results, FP32)
    assert verdict.passed and len(verdict.dense) == 2
    results[1]["b"][0][0, 0, 0, 0] += 0.1
    wrong = agree(module, x, results, FP32)
    assert [v.passed for v in wrong.dense] == [True, False]
    assert "maximum error 0.1" in wrong.reason


def test_nan_in_a_dense_result_fails():
    module, x = net(lambda m, x: m.a(x), a=nn.Conv2d(3, 4, 3)), (image(1, 3, 6, 6),)
    result = module(*x).clone()
    result[0, 0, 0, 0] = math.nan
    assert not agree(module, x, result, FP32).passed


def test_error_factor_widens_the_limit():
    module, x = net(lambda m, x: m.a(x), a=nn.Conv2d(64, 4, 3)), (image(1, 64, 9, 9),)
    exact = module.double()(x[0].double())
    eager = module.float()(*x)
    result = (exact + 5 * (eager.double() - exact)).float()
    assert not agree(module, x, result, FP32).passed
    assert agree(module, x, result, Recipe(dtype="fp32", limits=Limits(error_factor=8.0))).passed


def test_integers_are_compared_exactly():
    module = net(lambda m, x: m.a(x).argmax(1), a=nn.Conv2d(3, 4, 3))
    x = (image(1, 3, 6, 6),)
    right = module(*x)
    assert agree(module, x, right, FP32).passed
    assert not agree(module, x, (right + 1) % 4, FP32).passed


def test_another_number_of_results_is_refused():
    module, x = net(lambda m, x: (x, x * 2)), (image(1, 3, 2, 2),)
    with pytest.raises(VerificationFailed, match="1 results, but the module returns 2 tensors"):
        agree(module, x, x[0], FP32)


def test_the_module_and_its_mode_stay_as_they_were():
    module = net(lambda m, x: m.n(m.a(x)), a=nn.Conv2d(3, 4, 3), n=nn.BatchNorm2d(4)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    agree(module, (image(2, 3, 6, 6),), module.eval()(image(2, 3, 6, 6)), FP32)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert next(module.parameters()).dtype == torch.float32


class LayoutDependent(nn.Module):
    """Errs by 0.002 in one score, in half precision and NHWC alone: the other layout's luck is no limit."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows.float() if self.rows.dtype == torch.float16 else self.rows
        if self.rows.dtype == torch.float16 and not x.is_contiguous():
            rows = rows.clone()
            rows[0, 3, 4] += 0.002
        return rows + 0 * x.sum()


def test_the_limit_is_the_worse_of_two_layouts():
    found = agree(LayoutDependent(detections().float()), (torch.zeros(1, 2, 3, 4),), detections(), Recipe(dtype="fp16"))
    assert found.allowed is not None and found.allowed.score > 0.004


class LayoutDependentMap(nn.Module):
    """Errs by `error` in one element of float32 channels-last maps alone."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if x.dtype == torch.float32 and not x.is_contiguous():
            y[0, 0, 0, 0] += self.error
        return y


def test_a_dense_limit_is_the_worse_of_two_layouts_too():
    module, x = LayoutDependentMap(1e-4), torch.rand(1, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    for error, passed in ((0.0, True), (1.9e-4, True), (2.1e-4, False)):
        result = x.clone()
        result[0, 0, 0, 0] += error
        assert agree(module, (x,), result, FP32).passed == passed, error
    # a layout in which the module is not finite allows nothing
    assert not agree(LayoutDependentMap(math.inf), (x,), x + 1e-4, FP32).passed
    assert agree(LayoutDependentMap(math.inf), (x,), x, FP32).passed


def test_a_module_that_refuses_channels_last_is_judged_as_it_is():
    module, x = net(lambda m, x: m.a(x).view(1, -1), a=nn.Conv2d(3, 4, 3)), (torch.rand(1, 3, 6, 6),)
    assert agree(module, x, module(*x), FP32).passed
    assert not agree(module, x, module(*x) + 1e-4, FP32).passed


@pytest.mark.parametrize(("c", "side"), [(64, 28), (128, 14), (256, 14)])
def test_channels_last_convolutions_in_fp32_are_allowed_their_own_rounding(c, side):
    """On a CPU they err up to three times what those of the other layout do."""
    module, x = net(lambda m, x: m.a(x), a=nn.Conv2d(c, c, 3, padding=1)), image(1, c, side, side).contiguous()
    nhwc = module.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    assert agree(module.to(memory_format=torch.contiguous_format), (x,), nhwc, FP32).passed
    assert not agree(module, (x,), nhwc * 1.00001, FP32).passed


def test_the_remedy_follows_from_what_is_wrong():
    module, x = net(lambda m, x: m.a(x), a=nn.Conv2d(3, 4, 3)), (image(1, 3, 6, 6),)
    result = module(*x).clone()
    assert "error_factor" in agree(module, x, result + 1, FP32).remedy
    result[0, 0, 0, 0] = math.nan
    assert agree(module, x, result, FP32).remedy == "take a dtype, or inputs, in which the module stays finite"
    rows = detections().float()
    rows[..., 4] = 1.0
    assert agree(Detector(rows), (torch.zeros(1),), rows, FP32).remedy == ""


class Losing(nn.Module):
    """In half precision it loses its best row."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows.float() if self.rows.dtype == torch.float16 else self.rows
        if self.rows.dtype == torch.float16:
            rows = rows.clone()
            rows[0, 0, 5] = 77.0
        return rows + 0 * x.sum()


def test_a_module_that_loses_a_row_in_half_precision_does_not_allow_everything():
    rows = detections()
    shifted_box(rows)
    assert not agree(Losing(detections().float()), (torch.zeros(1),), rows, Recipe(dtype="fp16")).passed


def test_the_reference_is_float64s_where_the_module_lets_it():
    module, x = net(lambda m, x: m.a(x), a=nn.Conv2d(3, 4, 1)), (image(1, 3, 4, 4),)
    (result,), exact = reference_of(module, x)
    assert exact and result.dtype == torch.float64
    insists = net(lambda m, x: m.a(x) @ torch.ones(4, 4), a=nn.Conv2d(3, 4, 1))
    (result,), exact = reference_of(insists, x)
    assert not exact and result.dtype == torch.float32


def test_rounding_is_that_of_the_arithmetic():
    tf32, ieee = (Recipe(dtype="fp32", precision=precision) for precision in ("tf32", "ieee"))
    assert rounding(tf32, exact=True, on_gpu=True) == rounding(tf32, exact=False, on_gpu=True) == TF32_EPS
    for recipe in (tf32, ieee):
        assert rounding(recipe, exact=True, on_gpu=False) is None
        assert rounding(recipe, exact=False, on_gpu=False) == 2.0**-18
    assert rounding(ieee, exact=True, on_gpu=True) is rounding(Recipe(dtype="fp16"), exact=False, on_gpu=True) is None


def test_tensors_are_found_in_nested_results():
    a, b, c = (torch.zeros(1) for _ in range(3))
    assert [*map(id, tensors_of({"x": a, "y": (b, [c], "text", None)}))] == [id(a), id(b), id(c)]
