"""What is special to detect_topk: it equals top_detections row by row, whatever is tied, infinite or NaN."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels.detect_topk import (
    OP,
    SAMPLES,
    Config,
    Problem,
    candidates,
    cost,
    default_config,
    plan,
    reference,
)
from ridgeline.models.postprocess import STRIDES, anchor_grid, decode_xyxy, top_detections

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = typical_target("sm_90")
BOXES = ("box_p3", "box_p4", "box_p5")
LOGITS = ("logits_p3", "logits_p4", "logits_p5")


def make(size=(64, 32), classes=3, n=1, *, dtype=torch.float32, seed=0, **choices) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for level, stride in enumerate(STRIDES):
        cells = (size[0] // stride, size[1] // stride)
        arguments[BOXES[level]] = random_nhwc((n, 4, *cells), dtype, DEVICE, seed=3 * level + seed)
        arguments[LOGITS[level]] = random_nhwc((n, classes, *cells), dtype, DEVICE, seed=100 + 3 * level + seed)
    # the signature's order: all boxes, then all logits
    return {name: arguments[name] for name in BOXES + LOGITS} | choices


def change_logits(arguments: dict[str, Any], change) -> dict[str, Any]:
    """`change` sees all logits of the batch at once, [N, anchors, classes], and edits them in place."""
    maps = [arguments[name] for name in LOGITS]
    rows = torch.cat([m.permute(0, 2, 3, 1).flatten(1, 2) for m in maps], dim=1)
    change(rows)
    parts = rows.split([m.shape[2] * m.shape[3] for m in maps], dim=1)
    return arguments | {
        name: part.reshape(m.shape[0], *m.shape[2:], m.shape[1]).contiguous().permute(0, 3, 1, 2)
        for name, m, part in zip(LOGITS, maps, parts, strict=True)
    }


def same(actual: Tensor, expected: Tensor) -> None:
    """Boxes, classes and the order exactly; scores as two exponentials agree."""
    assert actual.shape == expected.shape
    exact = [0, 1, 2, 3, 5]
    torch.testing.assert_close(actual[..., exact], expected[..., exact], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[..., 4], expected[..., 4], rtol=1e-6, atol=1e-7, equal_nan=True)


# few programs, which is what the interpreter's time goes by
WIDE = Config(maxima_warps=8, collect_warps=8, collect_tiles=3, rank_warps=8, rank_rows=64)


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_equal_top_detections(seed: int):
    rng = random.Random(seed)
    arguments = make(
        size=(32 * rng.randint(1, 2), 32), classes=rng.choice([1, 2, 3, 7, 20]), n=1 + (seed % 8 == 0),
        dtype=rng.choice([torch.float32, torch.float16]), seed=seed, limit=rng.choice([1, 4, 9, 20, 300]),
    )  # fmt: skip

    def change(rows: Tensor) -> None:
        if rng.random() < 0.6:
            # few distinct values, zeros of both signs among them: ties everywhere
            rows.copy_((rows * rng.choice([0.5, 1, 3])).round())
        for value in (math.nan, math.inf, -math.inf):
            if rng.random() < 0.4:
                rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = value

    arguments = change_logits(arguments, change)
    # every map inside a buffer of larger values that must not be read
    for name in BOXES + LOGITS:
        n, c, h, w = arguments[name].shape
        wide = torch.full((n, h, w, c + 3), 60000.0, dtype=arguments[name].dtype, device=DEVICE).permute(0, 3, 1, 2)
        wide[:, 1 : c + 1] = arguments[name]
        arguments[name] = wide[:, 1 : c + 1]
    same(plan_and_run(arguments, replace(WIDE, collect_tiles=1 + 2 * (seed % 2))), reference(**arguments))


@pytest.mark.parametrize("value", [-0.0, -math.inf, math.inf, math.nan])
def test_all_logits_equal(value: float):
    arguments = change_logits(make(limit=7), lambda rows: rows.fill_(value))
    y = plan_and_run(arguments, WIDE)
    same(y, reference(**arguments))
    # anchor, then class: the first anchors under every class
    assert y[0, :, 5].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert y[0, 0, :4].equal(y[0, 2, :4])


def test_equal_logits_go_to_the_anchor_with_the_better_best_class():
    """Not to the lower index: the first step has ranked the anchors by then."""

    def change(rows: Tensor) -> None:
        rows.fill_(-9.0)
        rows[0, 3, 0] = rows[0, 30, 1] = 1.0
        rows[0, 30, 2] = 5.0

    arguments = change_logits(make(limit=4), change)
    y = plan_and_run(arguments, WIDE)
    same(y, reference(**arguments))
    assert y[0, :3, 5].tolist() == [2, 1, 0]


def test_equal_maxima_at_the_limit_go_to_the_first_anchors():
    """Far more anchors share the bound than may pass it, and they lie on every level."""

    def change(rows: Tensor) -> None:
        rows.fill_(-3.0)
        rows[:, 5::2, 1] = 1.0
        rows[:, 17, 0] = 2.0

    arguments = change_logits(make(size=(64, 96), limit=8), change)
    y = plan_and_run(arguments, WIDE)
    same(y, reference(**arguments))
    assert y[0, 0, 5] == 0 and y[0, 1:, 5].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_anchors_tied_with_the_bound_are_listed_from_the_first_tiles_only(dtype: torch.dtype):
    """Four tiles of 64 on the finest level; the limit is reached in the second."""

    def change(rows: Tensor) -> None:
        rows.fill_(-20.0)
        rows[:, :, 2] = -11.0
        rows[:, 250, 0] = -5.0
        rows[:, 251, :2] = -11.0

    arguments = change_logits(make(size=(128, 128), dtype=dtype, limit=70), change)
    launch, listed = run_and_list(arguments, WIDE)
    same(launch.output, reference(**arguments))
    # all of tiles 0 and 1, and the two pairs of the one better anchor that reach the bound
    assert listed == 64 + 64 + 2


def test_the_list_of_exactly_the_limit():
    """No pair but the first k reaches the bound."""

    def change(rows: Tensor) -> None:
        rows.clamp_(max=3.0)
        rows[0, 3:19, 1] = 30.0 + torch.arange(16, device=DEVICE)

    arguments = change_logits(make(size=(64, 64), limit=16), change)
    launch, listed = run_and_list(arguments, WIDE)
    same(launch.output, reference(**arguments))
    assert listed == 16


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_whole_anchors_of_one_value(value: float):
    """More of them than the limit, NaN above infinity; the rest as it is."""

    def change(rows: Tensor) -> None:
        rows[0, 11::3] = value
        rows[0, 12, 1] = math.nan
        rows[0, 13, 0] = math.inf

    for limit in (5, 300):
        arguments = change_logits(make(size=(64, 64), dtype=torch.float16, limit=limit), change)
        same(plan_and_run(arguments, WIDE), reference(**arguments))


@pytest.mark.parametrize("magnitude", [65504.0, 2.0**-24])
def test_the_ends_of_half_precision(magnitude: float):
    """The largest number is not infinity, and the smallest is not zero, on either side of the bound."""

    def change(rows: Tensor) -> None:
        rows.fill_(-math.inf)
        rows[0, ::4] = -magnitude
        rows[0, 1::4] = magnitude
        rows[0, 2::8] = math.inf
        rows[0, 3, :2] = torch.tensor([0.0, -0.0])

    for limit in (3, 24):
        arguments = change_logits(make(size=(64, 64), dtype=torch.float16, limit=limit), change)
        same(plan_and_run(arguments, WIDE), reference(**arguments))


@pytest.mark.parametrize("classes", [1, 20])
def test_logits_alike_over_cells_and_classes_make_short_lists(classes: int):
    """Low, in smooth blobs: the best pairs lie together, on few anchors."""
    arguments = make(size=(128, 96), classes=classes, limit=40)

    def change(rows: Tensor) -> None:
        place = torch.arange(rows.shape[1], device=DEVICE)[:, None] / 9
        rows.mul_(0.3).add_(4 * torch.sin(place) + torch.linspace(-1, 1, classes, device=DEVICE) - 12)

    arguments = change_logits(arguments, change)
    launch, listed = run_and_list(arguments, WIDE)
    same(launch.output, reference(**arguments))
    best = torch.cat([arguments[name].flatten(2) for name in LOGITS], dim=2).flatten().sort(descending=True).values
    anchors_needed = torch.cat([arguments[name].flatten(2) for name in LOGITS], dim=2).amax(1).flatten().sort().values
    exact = int((best >= anchors_needed[-40]).sum())
    assert exact <= listed <= 3 * exact


def test_the_bound_lets_hardly_more_anchors_through_than_the_limit():
    """At most two for each that the splitters stand for, on normal data and on all equal but for one tile."""
    for change in (lambda rows: rows.sub_(9), lambda rows: rows[:, 64:].fill_(0.0)):
        arguments = change_logits(make(size=(128, 128), classes=1, limit=50), change)
        launch, listed = run_and_list(arguments, WIDE)
        same(launch.output, reference(**arguments))
        assert 50 <= listed <= 2 * max(50 + 50 // 4, 50 + 64)


def test_all_of_the_best_on_the_coarsest_level():
    arguments = make(size=(96, 96), classes=20, limit=7)
    arguments["logits_p5"] += 20.0
    same(plan_and_run(arguments, WIDE), reference(**arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_list_that_is_sampled_before_it_is_ranked(dtype: torch.dtype):
    """Classes alike on every anchor: 75 anchors have most of the 45 times as many pairs above the bound.

    More than one round of the rank kernel's programs, and more than they compare with at once.
    """

    def change(rows: Tensor) -> None:
        rows.mul_(0.01).add_(torch.arange(rows.shape[1], device=DEVICE)[None, :, None] % 50 / 4)

    arguments = change_logits(make(size=(64, 96), classes=45, dtype=dtype, limit=75), change)
    launch, listed = run_and_list(arguments, replace(WIDE, collect_tiles=1))
    same(launch.output, reference(**arguments))
    assert listed > 4096


def plan_and_run(arguments: dict[str, Any], config: Config) -> Tensor:
    return run_and_list(arguments, config)[0].output


def run_and_list(arguments: dict[str, Any], config: Config) -> tuple[Launch, int]:
    """The launch after its run, and the length of its list."""
    tiles = min(config.collect_tiles, Problem(**arguments).tiles)
    launch = plan(config=replace(config, collect_tiles=tiles), **arguments)
    launch.run()
    count = launch.arguments["count_ptr"]
    assert isinstance(count, Tensor)
    return launch, int(count.sum())


def test_boxes_and_logits_may_differ_in_dtype():
    arguments = make(limit=6)
    arguments |= {name: arguments[name].half() for name in LOGITS}
    same(plan_and_run(arguments, WIDE), reference(**arguments))


@pytest.mark.parametrize("classes", [80, 365])
def test_many_classes(classes: int):
    arguments = make(size=(32, 32), classes=classes, limit=5)
    same(plan_and_run(arguments, WIDE), reference(**arguments))


def test_reference_is_top_detections_on_decoded_boxes():
    arguments = make(size=(64, 96), classes=4, n=2, dtype=torch.float16)
    points, strides = anchor_grid(64, 96)
    assert sum(arguments[name].shape[2] * arguments[name].shape[3] for name in BOXES) == points.shape[1]
    distances, logits = (torch.cat([arguments[n].flatten(2) for n in names], dim=2) for names in (BOXES, LOGITS))
    expected = top_detections(decode_xyxy(distances, points, strides), logits)
    assert torch.equal(reference(**arguments), expected)
    assert expected.shape == (2, 96 + 24 + 6, 6)


def test_an_empty_batch_is_empty():
    assert OP(**make(n=0, limit=5)).shape == (0, 5, 6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: {"limit": 0}, "limit must be at least 1, got 0"),
        (
            lambda a: {"box_p4": a["box_p5"]},
            r"box_p4 must be torch.float32 of shape \(1, 4, 4, 2\), got .*\(1, 4, 2, 1\)",
        ),
        (
            lambda a: {"logits_p5": a["logits_p5"].half()},
            "logits_p5 must be torch.float32 of shape .* got torch.float16",
        ),
        (lambda a: {"logits_p3": a["logits_p3"].contiguous()}, r"logits_p3 must be channels_last .*\(96, 32, 4, 1\)"),
        (lambda a: {"box_p3": a["box_p3"][:, :, :6]}, "sides that are multiples of 4, got 6x4"),
        (lambda a: {"box_p3": a["box_p3"][0]}, "must have 4 axes"),
    ],
)
def test_refusals(change, text: str):
    arguments = make()
    with pytest.raises(ValueError, match=f"detect_topk: .*{text}"):
        Problem(**{**arguments, **change(arguments)})
    with pytest.raises(TypeError, match=r"must be fp32, fp16 or bf16, got torch\.float64 boxes"):
        Problem(**{**arguments, "box_p3": arguments["box_p3"].double()})
    with pytest.raises(ValueError, match="is not valid for 3 classes"):
        plan(config=replace(WIDE, rank_rows=24), **arguments)


def test_cost_reads_every_map_once():
    arguments = make(size=(64, 32), classes=3, dtype=torch.float16, limit=5)
    anchors = 32 + 8 + 2
    assert cost(**arguments).flops == 3 * anchors
    assert (cost(**arguments).read_bytes, cost(**arguments).write_bytes) == (2 * 7 * anchors, 4 * 6 * 5)


def test_launches_suit_the_problem():
    sample = next(s for s in SAMPLES if "YOLO26n" in s.why)
    arguments = sample.arguments(torch.float16, "meta")
    problem = Problem(**arguments)
    assert (problem.anchors, problem.detections) == (8400, 300)
    # 100 tiles of 64 on the finest level, then 25 and 7, with splitters 1, 2, 4 ... 64
    assert (problem.tile, problem.tiles, problem.slots) == (64, 132, 7)
    # all of it in one int32 and one int64
    assert (problem.tile_bits, problem.pair_bits) == (13, 26) and 8400 * 80 <= 2**26
    launch = plan(target=H200, **arguments)
    # one program a multiprocessor reads the logits; the list holds every pair that there is
    assert [part.grid for part in (*launch.before, launch)] == [(132, 1), (132, 1), (1024, 1)]
    order, pair = launch.arguments["order_ptr"], launch.arguments["pair_ptr"]
    assert isinstance(order, Tensor) and order.shape == (1, 8400 * 80) and pair is None
    found = candidates(target=H200, **arguments)
    assert found[0] == default_config(problem, H200) and len(set(found)) == len(found) > 8
    assert all(config.is_valid(problem, H200) for config in found)


def test_samples_of_real_size_are_like_a_detectors_logits():
    """The bound is low, and hundreds of pairs reach it on the anchors that the limit needs."""
    sample = next(s for s in SAMPLES if "YOLO26n" in s.why).arguments(torch.float16, "cpu")
    logits = torch.cat([sample[name][0].float().flatten(1) for name in LOGITS], dim=1)
    bound = logits.amax(0).sort(descending=True).values[299]
    assert -14 < bound < -4 and 400 < (logits >= bound).sum() < 1500
