"""What is special to detect_topk: it equals top_detections row by row, whatever is tied, infinite or NaN."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
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
from ridgeline.sass import compile_many, inspect

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
        name: part.reshape(m.shape[0], *m.shape[2:], m.shape[1]).permute(0, 3, 1, 2)
        for name, m, part in zip(LOGITS, maps, parts, strict=True)
    }


def same(actual: Tensor, expected: Tensor) -> None:
    """Boxes, classes and the order exactly; scores as two exponentials agree."""
    assert actual.shape == expected.shape
    exact = [0, 1, 2, 3, 5]
    torch.testing.assert_close(actual[..., exact], expected[..., exact], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[..., 4], expected[..., 4], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("seed", range(40))
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
    # mostly tiles that leave the interpreter few programs
    configs = (Config(64, 32, 8), Config(32, 32, 8), Config(16, 32, 8))
    same(plan_and_run(arguments, configs[seed % 3]), reference(**arguments))


@pytest.mark.parametrize("value", [0.0, -0.0, -math.inf, math.inf, math.nan, 2.5])
def test_all_logits_equal(value: float):
    arguments = change_logits(make(limit=7), lambda rows: rows.fill_(value))
    y = OP(**arguments)
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
    y = OP(**arguments)
    same(y, reference(**arguments))
    assert y[0, :3, 5].tolist() == [2, 1, 0]


def test_equal_maxima_at_the_limit_go_to_the_first_anchors():
    """Far more groups share the bound than may pass it, and they lie on every level."""

    def change(rows: Tensor) -> None:
        rows.fill_(-3.0)
        rows[:, 5::2, 1] = 1.0
        rows[:, 17, 0] = 2.0

    arguments = change_logits(make(size=(64, 96), limit=8), change)
    y = OP(**arguments)
    same(y, reference(**arguments))
    assert y[0, 0, 5] == 0 and y[0, 1:, 5].eq(1).all()


def test_strong_pairs_in_few_groups():
    """All cells of some groups are above the bound, under many classes: the list is longer than the groups."""
    arguments = make(size=(64, 96), classes=20, limit=4)
    problem = Problem(**arguments)
    assert 1 < problem.level_groups(problem.group) < problem.cells[0]

    def change(rows: Tensor) -> None:
        rows[0, 1 : problem.cells[0] : problem.level_groups(problem.group), :9] += 20.0

    arguments = change_logits(arguments, change)
    same(OP(**arguments), reference(**arguments))


def test_all_of_the_best_on_the_coarsest_level():
    arguments = make(size=(96, 96), classes=20, limit=7)
    arguments["logits_p5"] += 20.0
    same(OP(**arguments), reference(**arguments))


def test_a_list_longer_than_one_round_of_programs():
    """More pairs than the rank kernel's programs have rows, and more than it compares at once."""
    arguments = change_logits(make(size=(64, 64), classes=20, limit=70), lambda rows: rows.copy_(rows.sign()))
    same(plan_and_run(arguments, Config(16, 16, 4)), reference(**arguments))


def plan_and_run(arguments: dict[str, Any], config: Config) -> Tensor:
    launch = plan(config=config, **arguments)
    launch.run()
    return launch.output


def test_boxes_and_logits_may_differ_in_dtype():
    arguments = make(limit=6)
    arguments |= {name: arguments[name].half() for name in LOGITS}
    same(OP(**arguments), reference(**arguments))


@pytest.mark.parametrize("classes", [80, 365])
def test_many_classes(classes: int):
    arguments = make(size=(32, 32), classes=classes, limit=5)
    same(OP(**arguments), reference(**arguments))


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
        plan(config=Config(24, 8, 4), **arguments)


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
    # on each level 400 groups of 16, 4 or 1 cells, by halves of 64 and 16 classes
    assert (problem.group, problem.chunk, problem.groups(problem.chunk)) == (1, 64, 3 * 400 * 2)
    launch = plan(target=H200, **arguments)
    # one program a multiprocessor reads the logits; the list holds every pair that there is
    assert [part.grid for part in (*launch.before, launch)] == [(132, 1), (525, 1), (256, 1)]
    assert launch.arguments["pair_ptr"].numel() == 8400 * 80
    found = candidates(target=H200, **arguments)
    assert found[0] == default_config(problem, H200) and len(set(found)) == len(found) > 8
    assert all(config.is_valid(problem, H200) for config in found)


def test_machine_code():
    """Nothing spilled, no division of work through shared memory in `collect`; with PDL every kernel waits first."""
    cases = [("sm_89", False), ("sm_90", True), ("sm_120", True)]
    sample = next(s for s in SAMPLES if "YOLO26n" in s.why).arguments(torch.float16, "meta")
    plans = [plan(target=typical_target(arch), **sample, pdl=pdl) for arch, pdl in cases]
    launches = [
        (pdl, part, arch) for (arch, pdl), last in zip(cases, plans, strict=True) for part in (*last.before, last)
    ]
    binaries = compile_many([part.source(arch) for _, part, arch in launches])
    for (pdl, part, _), binary in zip(launches, binaries, strict=True):
        report = inspect(binary)
        assert part.pdl == pdl
        assert report.problems == ()
        if report.kernel == "group_maxima_kernel":
            assert {name for name in report.instructions if name.startswith("LDG")} == {"LDG.E.128"}
        if report.kernel == "collect_kernel":
            assert report.shared_bytes <= 512
        before, waits, after = binary.ptx.partition("griddepcontrol.wait")
        assert bool(waits) == ("griddepcontrol.launch_dependents" in binary.ptx) == pdl
        if pdl:
            assert not any(word in before for word in ("ld.global", "st.global", "atom.global"))
            assert "ld.global" in after and "st.global" in after
