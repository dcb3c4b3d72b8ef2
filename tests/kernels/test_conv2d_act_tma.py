"""conv2d_act by boxes: what the tensor memory accelerator copies, which calls it can copy for, and what it compiles to.

Under the interpreter a step takes some ten milliseconds, so most problems have few of them; on a GPU the same problems
are drawn larger.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.cost.conv import ConvProblem
from ridgeline.cudagraph import capture
from ridgeline.kernels._conv2d_act_boxes import box_configs, programs, worth_boxes
from ridgeline.kernels._nhwc import conv_sample, random_nhwc, round_to_tf32
from ridgeline.kernels._op import target_of, typical_target
from ridgeline.kernels.conv2d_act import OP, Config, Problem, candidates, plan, reference
from ridgeline.numerics import TF32_EPS, compare, to_float64
from ridgeline.precompile import precompile, request
from ridgeline.sass import Binary, SassReport, compile_many, inspect

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
TARGET = target_of(torch.empty(0, device=DEVICE))
H200 = typical_target("sm_90")
DTYPES = (torch.float16, torch.float32, torch.bfloat16) if HAS_GPU else (torch.float16, torch.float32)
SIZES = (7, 13, 20, 40)  # of YOLO's maps at 224, 416, 640 and 1280 pixels: no box divides them all

needs_tma = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() < (9, 0), reason="tensor maps need compute capability 9.0"
)


def make(
    x: tuple[int, int, int, int], krs: tuple[int, int, int], *, stride=1, padding=None, dtype=torch.float16, **choices
) -> dict[str, Any]:
    """Of real data on this machine's device; `residual=True` adds one, `bias=False` leaves it out."""
    k, r, s = krs
    padding = (r // 2, s // 2) if padding is None else padding
    conv = ConvProblem(x[0], x[1], k, x[2:], (r, s), (stride, stride), padding)
    weight = random_nhwc((k, x[1], r, s), dtype, DEVICE, seed=1) * (x[1] * r * s) ** -0.5
    residual, bias = choices.pop("residual", False), choices.pop("bias", True)
    return {
        "x": random_nhwc(x, dtype, DEVICE, seed=0),
        "weight": round_to_tf32(weight) if dtype == torch.float32 else weight,
        "bias": random_nhwc((1, k, 1, 1), torch.float32, DEVICE, seed=2).flatten() if bias else None,
        "residual": random_nhwc((x[0], k, conv.oh, conv.ow), dtype, DEVICE, seed=3) if residual else None,
        "stride": (stride, stride),
        "padding": padding,
        **choices,
    }


def check(arguments: dict[str, Any], y: Tensor, what: object = "") -> None:
    # few outputs: of fp32 sums in two orders, which differ by the CPU, the largest errors are chance
    of_fp32 = TF32_EPS if HAS_GPU else 4 * torch.finfo(torch.float32).eps
    eps = of_fp32 if y.dtype == torch.float32 else None
    verdict = compare(y, reference(**to_float64(arguments)), reference(**arguments), eps=eps)
    assert verdict.passed, f"{what}: {verdict.reason}"


def in_nan_buffer(x: Tensor, rng: random.Random, *, step: int) -> Tensor:
    """`x` as a channel slice, from a multiple of `step` on, of a wider NHWC buffer that is NaN everywhere else."""
    n, c, h, w = x.shape
    before, after = rng.choice([(0, 0), (0, step), (step, 0), (2 * step, step)])
    wide = torch.full((n, h, w, before + c + after), math.nan, dtype=x.dtype, device=x.device).permute(0, 3, 1, 2)
    slice_ = wide[:, before : before + c]
    slice_.copy_(x)
    return slice_


def run_in_nan(arguments: dict[str, Any], config: Config, rng: random.Random) -> None:
    """Launch with all maps in NaN buffers, compare with float64, and see that nothing else was written."""
    x, residual = arguments["x"], arguments["residual"]
    sixteen = 16 // x.element_size()
    arguments = {**arguments, "x": in_nan_buffer(x, rng, step=sixteen)}
    if residual is not None:
        arguments["residual"] = in_nan_buffer(residual, rng, step=1)
    shape = Problem(**arguments).out_shape
    # y and the residual go through pointers, so their slices may begin anywhere
    out = in_nan_buffer(torch.full(shape, math.nan, dtype=x.dtype, device=DEVICE), rng, step=rng.choice([1, sixteen]))
    plan(config=config, target=TARGET, out=out, **arguments).run()
    what = f"{OP.key(**arguments)}, {config}"
    check(arguments, out, what)
    assert out._base is not None
    assert int((~out._base.isnan()).sum()) == out.numel(), f"{what}: more than the slice was written"


def draw(rng: random.Random) -> tuple[dict[str, Any], Config]:
    """A problem with a box config that it can take in few programs."""
    r, s = (3, 3) if rng.random() < (0.4 if HAS_GPU else 0.04) else rng.choice([(1, 1), (1, 1), (1, 2), (2, 1)])
    stride, padding = rng.choice([1, 1, 2]), (rng.randint(0, r // 2 + 1), rng.randint(0, s // 2 + 1))
    largest = 48 if HAS_GPU else rng.choice([5, 5, 7, 7, 7, 13])
    h, w = (rng.choice([rng.randint(3, largest), *(size for size in SIZES if size <= largest)]) for _ in range(2))
    h, w = (h + h % 2, w + w % 2) if stride == 2 else (h, w)
    c = rng.choice([16, 32, 32, 48 if rng.random() < 0.3 else 64]) * (rng.choice([1, 2, 4]) if HAS_GPU else 1)
    choices = {"residual": rng.random() < 0.4, "bias": rng.random() < 0.75, "act": rng.choice(["silu", "none"])}
    arguments = make(
        (rng.choice([1, 1, 1, 2, 3]), c, h, w), (rng.choice([3, 8, 16, 20, 33]), r, s), stride=stride, padding=padding,
        dtype=rng.choice(DTYPES), **choices,
    )  # fmt: skip
    problem, found = Problem(**arguments), []
    for _ in range(60):
        block_m, small = 2 ** rng.randint(4, 8), rng.choice([1, 1, 1, 1, 1, 2])
        box_w = block_m if problem.is_product else 2 ** rng.randint(0, 5)
        box_h = 1 if problem.is_product else 2 ** rng.randint(0, 5)
        block_k, warps, split = (
            c & -c if rng.random() < 0.9 else 16,
            rng.choice([4, 8]),
            rng.choice([1, 1, 1, 1, 2, 3] if r * s > 1 else [1]),
        )
        config = Config(block_m, rng.choice([16, 32, 64]), block_k, warps, rng.choice([2, 3]), split, box_h, box_w)
        if config.is_valid(problem, TARGET):
            count = programs(problem, config)
            if HAS_GPU or count <= small * split:
                return arguments, config
            found.append((count, config))
    return arguments, min(found, key=itemgetter(0))[1]


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_random_problems_against_float64(first: int):
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        run_in_nan(*draw(rng), rng)


def test_draws_cover_what_they_should():
    drawn = [draw(random.Random(seed)) for seed in range(80)]
    problems, configs = [Problem(**arguments) for arguments, _ in drawn], [config for _, config in drawn]
    assert {problem.is_product for problem in problems} == {True, False}
    assert {problem.stride[0] for problem in problems} == {1, 2}
    assert {problem.residual is None for problem in problems} == {True, False}
    assert {min(config.split_k, 2) for config in configs} == {1, 2}
    assert {min(config.box_n, 2) for config in configs} == {1, 2}, "boxes of one and of several images"
    assert any(side % 2 for problem in problems for side in problem.conv.image)
    assert {problem.conv.taps for problem in problems} == {1, 2, 9}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("box_h", "box_w"), [(16, 16), (8, 8), (1, 32), (16, 4)])
def test_every_box_on_sizes_that_none_divides(size: int, box_h: int, box_w: int):
    """Boxes end behind the last row and column; beyond every edge the copies bring zeros."""
    width = size if HAS_GPU or size < 20 else 7
    arguments = make((1, 16, size, width), (5, 1, 1), padding=(1, 1), residual=True)
    config = Config(box_h * box_w, 16, 16, 8, 2, 1, box_h, box_w)
    run_in_nan(arguments, config, random.Random(size))


@pytest.mark.parametrize("stride", [1, 2])
def test_padding_contributes_zeros_at_every_edge(stride: int):
    side = 3 * stride
    arguments = make((1, 16, side, side), (1, 3, 3), stride=stride, bias=False, act="none")
    arguments["x"].fill_(1)
    arguments["weight"].fill_(1 / 16)
    launch = plan(config=Config(16, 16, 16, 4, 2, 1, 4, 4), target=TARGET, **arguments)
    launch.run()
    expected = [[4, 6, 4], [6, 9, 6], [4, 6, 4]] if stride == 1 else [[4, 6, 6], [6, 9, 9], [6, 9, 9]]
    assert launch.output[0, 0].tolist() == expected


@pytest.mark.parametrize("split", [2, 4, 5, 8, 9])
def test_programs_that_share_a_reduction_add_up_to_it(split: int):
    """Nine steps: 5 parts of two leave one step for the last, 8 parts of two leave three programs without any."""
    arguments = make((1, 16, 5, 6), (8, 3, 3), residual=True)
    config = Config(32, 16, 16, 4, 2, split, 8, 4)
    launch = plan(config=config, target=TARGET, **arguments)
    first, last = launch.parts
    assert first.output.shape == (split, 30, 8) and first.output.dtype == torch.float32
    assert first.grid == (2 * split,) and last.output is launch.output
    launch.run()
    check(arguments, launch.output)
    exact = first.output.double().sum(0)
    whole = plan(config=replace(config, split_k=1), target=TARGET, **{**arguments, "act": "none", "bias": None})
    whole.run()
    without = (whole.output.double() - arguments["residual"].double()).permute(0, 2, 3, 1).reshape(30, 8)
    assert (exact - without).abs().max() < 4e-3  # the rounding of y to fp16


def test_residual_may_be_overwritten_in_place_and_parts_are_equal_on_every_run():
    arguments = make((1, 32, 6, 6), (8, 3, 3), residual=True)
    config = Config(64, 16, 32, 4, 2, 3, 8, 8)
    expected = plan(config=config, target=TARGET, **arguments)
    expected.run()
    kept = {**arguments, "residual": arguments["residual"].clone(memory_format=torch.preserve_format)}
    plan(config=config, target=TARGET, **arguments, out=arguments["residual"]).run()
    assert torch.equal(arguments["residual"], expected.output)
    check(kept, expected.output)


def test_64_bit_offsets_give_the_same_numbers():
    arguments = make((2, 16, 6, 5), (8, 2, 1), residual=True)
    launch = plan(config=Config(64, 16, 16, 4, 2, 1, 4, 8), target=TARGET, **arguments)
    launch.run()
    narrow = launch.output.clone()
    launch.output.fill_(math.nan)
    replace(launch, constants={**launch.constants, "WIDE": True}).run()
    assert torch.equal(launch.output, narrow)


GOOD = Config(64, 32, 16, 4, 3, 1, 8, 8)


def test_invalid_boxes_are_refused():
    problem = Problem(**make((1, 32, 8, 8), (64, 3, 3)))
    assert GOOD.is_valid(problem, H200)
    for bad in (
        replace(GOOD, box_h=0),
        replace(GOOD, box_w=3),
        replace(GOOD, box_h=16),
        replace(GOOD, block_k=64),
        replace(GOOD, block_n=256, num_warps=8),
        replace(GOOD, block_m=512),
        replace(GOOD, num_stages=1),
        replace(GOOD, num_stages=80),
        replace(GOOD, split_k=0),
        replace(GOOD, split_k=19),
        replace(GOOD, block_m=256, block_n=128),
    ):
        assert not bad.is_valid(problem, H200), bad
        with pytest.raises(ValueError, match=r"conv2d_act: Config\(.*box_h=.*\) is not valid for 1x32x8x8"):
            plan(config=bad, target=H200, **make((1, 32, 8, 8), (64, 3, 3)))
    assert not GOOD.is_valid(problem, typical_target("sm_89"))
    assert replace(GOOD, num_stages=2).is_valid(problem, typical_target("sm_120"))


def test_calls_that_no_tensor_map_describes_take_pointers():
    whole = make((1, 32, 8, 8), (64, 3, 3))
    wide = random_nhwc((1, 48, 8, 8), torch.float16, DEVICE, seed=0)
    refused = {
        "a slice that starts at 8 bytes": {**whole, "x": wide[:, 4:36]},
        "a pitch of 36 channels": {**whole, "x": random_nhwc((1, 36, 8, 8), torch.float16, DEVICE, seed=0)[:, :32]},
        "two strides": {**whole, "stride": (1, 2)},
        "stride 3": {**whole, "stride": (3, 3)},
        "stride 2 of an odd size": make((1, 32, 8, 7), (64, 3, 3), stride=2),
        "strict fp32": make((1, 32, 8, 8), (64, 3, 3), dtype=torch.float32, precision="ieee"),
        "an empty batch": {**whole, "x": whole["x"][:0]},
    }
    assert Problem(**whole).takes_boxes and Problem(**{**whole, "x": wide[:, 8:40]}).takes_boxes
    for why, arguments in refused.items():
        assert not Problem(**arguments).takes_boxes, why
        assert not any(config.boxed for config in candidates(target=H200, **arguments)), why
    # no channels left over for a tensor map's rows of 16 bytes
    assert box_configs(Problem(**make((1, 12, 8, 8), (8, 3, 3))), H200) == ()
    product = Problem(**make((1, 32, 8, 8), (64, 1, 1)))
    assert not GOOD.is_valid(product, H200) and replace(GOOD, box_h=1, box_w=64).is_valid(product, H200)


def meta(x: tuple[int, int, int, int], krs: tuple[int, int, int], **choices: Any) -> dict[str, Any]:
    return conv_sample("", x, krs, **choices).arguments(torch.float16, "meta")


WIDE = {
    "40x40 768->768 3x3 s2": meta((1, 768, 40, 40), (768, 3, 3), stride=2),
    "80x80 768->768 3x3 s2": meta((1, 768, 80, 80), (768, 3, 3), stride=2),
    "80x80 256->256 3x3": meta((1, 256, 80, 80), (256, 3, 3)),
    "80x80 512->512 1x1": meta((1, 512, 80, 80), (512, 1, 1)),
    "20x20 384->192 3x3": meta((1, 384, 20, 20), (192, 3, 3)),
}
SMALL = {
    "80x80 64->64 3x3 of 16 channels": meta((1, 16, 80, 80), (64, 3, 3)),
    "20x20 128->128 1x1": meta((1, 128, 20, 20), (128, 1, 1)),
    "stem": meta((1, 3, 640, 640), (16, 3, 3), stride=2),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_layers_try_boxes_first(name: str):
    problem, tried = Problem(**WIDE[name]), candidates(target=H200, **WIDE[name])
    assert worth_boxes(problem, H200)
    first = [config for config in tried[1:13] if config.boxed and not config.specialised]
    # of stride 1 specialised warps take three places
    assert len(first) == (6 if problem.stride[0] == 2 else 5) and not tried[0].boxed
    assert all(config.is_valid(problem, H200) for config in tried) and len(set(tried)) == len(tried)
    # as many tiles and parts as the order of a model that may err: not one tile in all its pipelines
    assert len({(config.block_m, config.block_n, config.split_k) for config in first}) >= 4
    assert not any(config.boxed for config in candidates(target=typical_target("sm_89"), **WIDE[name]))


@pytest.mark.parametrize("name", SMALL)
def test_small_layers_try_boxes_last(name: str):
    tried = candidates(target=H200, **SMALL[name])
    assert not worth_boxes(Problem(**SMALL[name]), H200)
    assert not any(config.boxed for config in tried[:13])


def test_few_tiles_are_shared_and_many_are_not():
    """At 20x20 pixels 128x128 tiles would leave most multiprocessors idle; at 160x160 there are enough of them."""

    def best(name: str) -> Config:
        return box_configs(Problem(**WIDE[name]), H200)[0]

    assert best("40x40 768->768 3x3 s2").split_k > 1
    assert best("80x80 512->512 1x1").split_k == 1
    (large,) = {box_configs(Problem(**meta((1, 64, 160, 160), (128, 3, 3))), H200)[0]}
    assert (large.block_m, large.block_n, large.split_k, large.box_h, large.box_w) == (256, 128, 1, 16, 16)


def test_boxes_cover_the_output_with_the_least_waste():
    def sides(x: tuple[int, int, int, int], block_m: int) -> set[tuple[int, int]]:
        configs = box_configs(Problem(**meta(x, (64, 3, 3))), H200)
        return {(config.box_h, config.box_w) for config in configs if config.block_m == block_m}

    assert sides((1, 64, 80, 80), 128) <= {(8, 16), (16, 8)}
    assert sides((1, 64, 20, 20), 128) == {(4, 32)}, "five boxes, not six"
    assert sides((128, 64, 8, 8), 128) == {(8, 8)}, "of two images"


def binaries(*launches: tuple[dict[str, Any], Config]) -> tuple[Binary, ...]:
    """Of the first kernel of each launch on sm_90, compiled in one process."""
    firsts = [plan(config=config, target=H200, pdl=True, **arguments).parts[0] for arguments, config in launches]
    return compile_many([launch.source("sm_90") for launch in firsts])


def arithmetic(found: SassReport) -> int:
    return found.count("IMAD", "IADD3", "LEA", "LOP3")


def test_machine_code_copies_boxes_and_computes_no_addresses():
    compiled = binaries(
        (WIDE["80x80 256->256 3x3"], Config(64, 128, 64, 4, 4)),
        (WIDE["80x80 256->256 3x3"], Config(64, 128, 64, 4, 4, 1, 8, 8)),
        (WIDE["80x80 768->768 3x3 s2"], Config(128, 128, 64, 8, 4, 4, 8, 16)),
        (WIDE["80x80 512->512 1x1"], Config(128, 128, 64, 8, 4, 1, 1, 128)),
    )
    gathered, four, five, two = map(inspect, compiled)
    assert gathered.count("LDGSTS") > 0 == gathered.count("UTMALDG")
    # weights are copied as a matrix in each
    for found, copies in ((four, {"2D", "4D"}), (five, {"2D", "5D"}), (two, {"2D"})):
        assert found.problems == () and found.count("HGMMA") > 0 == found.count("LDGSTS")
        assert {name.split(".")[1] for name in found.instructions if name.startswith("UTMALDG")} == copies
    assert four.count("HGMMA") == gathered.count("HGMMA")
    assert arithmetic(four) + 100 < arithmetic(gathered)  # both begin by asking for their weights
    for binary in compiled[1:]:
        before, _, after = binary.ptx.partition("griddepcontrol.wait")
        assert "cp.async.bulk.tensor" in after and "cp.async.bulk.tensor" not in before


def test_compilers_in_child_processes_take_tensor_maps(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = plan(config=Config(64, 64, 64, 4, 3, 2, 8, 8), target=H200, pdl=True, **WIDE["20x20 384->192 3x3"])
    requests = [
        request(p.kernel, p.arguments, p.constants, p.options, arch="sm_90", shared_limit_bytes=H200.shared_bytes)
        for p in launch.parts
    ]
    assert list(precompile(requests, 1)) == [None, None]


@pytest.mark.gpu
@pytest.mark.slow
@needs_tma
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("x", "krs", "stride"),
    [
        ((1, 128, 40, 40), (128, 3, 3), 1),
        ((1, 192, 40, 40), (256, 3, 3), 2),
        ((1, 512, 20, 20), (256, 1, 1), 1),
        ((2, 96, 80, 80), (96, 3, 3), 1),
        ((8, 128, 8, 8), (64, 3, 3), 1),
    ],
)
def test_every_box_candidate_is_right_on_a_gpu(x: Any, krs: Any, stride: int, dtype: torch.dtype):
    arguments = make(x, krs, stride=stride, dtype=dtype, residual=True)
    configs = box_configs(Problem(**arguments), TARGET)[:12]
    assert len(configs) == 12
    for config in configs:
        run_in_nan(arguments, config, random.Random(0))


@pytest.mark.gpu
@needs_tma
@pytest.mark.parametrize("split", [1, 3])
def test_a_captured_chain_with_early_starts_is_the_same_bit_by_bit_on_a_gpu(split: int):
    """Tensor maps are made on the host, so a graph holds them; each kernel waits for the one whose map it copies."""
    weights = [random_nhwc((64, 64, 3, 3), torch.float16, "cuda", seed=seed) / 24 for seed in range(10)]
    config = Config(64, 64, 64, 4, 3, split, 8, 8)

    def chain(pdl: bool):
        def run(x: Tensor) -> Tensor:
            for weight in weights:
                choices = {"stride": (1, 1), "padding": (1, 1), "act": "none", "pdl": pdl}
                launch = plan(x=x, weight=weight, config=config, **choices)
                launch.run()
                x = launch.output
            return x

        return run

    maps = [random_nhwc((1, 64, 20, 20), torch.float16, "cuda", seed=seed) for seed in range(50)]
    early, late = (capture(chain(pdl), (maps[0],)) for pdl in (True, False))
    for x in maps:
        assert torch.equal(early.replay(x).clone(), late.replay(x).clone())
