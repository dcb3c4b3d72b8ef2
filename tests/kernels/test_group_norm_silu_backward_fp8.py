"""group_norm_silu_backward_fp8 beside the backward and quantize_fp8: values, both orders, what is seen, code."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_group_norm_silu_fp8_assembly import bounded
from torch import Tensor

from ridgeline.kernels import group_norm_silu_backward, group_norm_silu_backward_fp8
from ridgeline.kernels._group_norm_silu_backward_fp8 import FORMAT, _assembly, _constraints
from ridgeline.kernels._group_norm_silu_backward_fp8_call import BackwardFp8Call
from ridgeline.kernels._group_norm_silu_call import BackwardCall, Config
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS
from ridgeline.kernels._nhwc import next_power_of_2
from ridgeline.kernels._op import typical_target
from ridgeline.kernels._quads import from_quads, quads_shape, to_quads, why_not
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.kernels.group_norm_silu_backward_fp8 import OP, fits, fp8_gradient_sample, plan
from ridgeline.kernels.quantize_fp8 import quantized
from ridgeline.numerics import compare, to_float64
from ridgeline.sass import compile_many

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
H200 = typical_target("sm_90")
gradients, on_cpu = group_norm_silu_backward_fp8.gradients, group_norm_silu_backward_fp8.on_cpu
NAMES = ("dx", "dx8", "quads", "dgamma", "dbeta", "dscale", "dshift")
ROWS, ROW = 3, 1
OWN = ("fp8_scale", "amax", "counts", "row", "quads", "keep")


def with_state(arguments: dict[str, Any], scale: float) -> dict[str, Any]:
    """In the middle row of three, whose others must stay as they are."""
    fp8_scale = torch.full((ROWS,), math.nan, device=DEVICE)
    fp8_scale[ROW] = scale
    counts = torch.zeros((ROWS, 3), dtype=torch.int64, device=DEVICE)
    state = {"fp8_scale": fp8_scale, "amax": torch.zeros(ROWS, device=DEVICE), "counts": counts, "row": ROW}
    return {**arguments, **state}


def backward_only(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in OWN}


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def run(arguments: dict[str, Any], config: Config | None = None) -> dict[str, Tensor]:
    """All results by the kernels, from NaN and 0x55 before."""
    call = BackwardFp8Call(**arguments)
    launch = plan(config=config, target=H200, **arguments)
    dx8, dx, words = launch.output, launch.arguments["dx_ptr"], launch.arguments["words_ptr"]
    bits(dx8).fill_(0x55)
    quads = dx8.new_empty(0)
    if isinstance(words, Tensor):
        quads = words.fill_(0x55555555).view(dx8.dtype).view(quads_shape(*call.x.shape, beside=False))
    dx = dx.fill_(math.nan) if isinstance(dx, Tensor) else call.x.new_empty(0)
    return dict(zip(NAMES, (dx, dx8, quads, *group_norm_silu_backward.run(call, launch)), strict=True))


def one_program(call: BackwardCall, num_warps: int = 4) -> Config:
    """A program takes a sample: the interpreter takes long for each."""
    return Config(call.groups, next_power_of_2(call.pixels), num_warps)


def draw(rng: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    """A problem with any of the options, at a scale where some elements saturate, or some vanish, or none."""
    channels = rng.choice([16, 32, 48])
    groups = rng.choice([g for g in (1, 2, 4, 8, 16) if channels % g == 0])
    h, w = rng.choice([(4, 4), (8, 4), (4, 8), (2, 6), (2, 2), (12, 4)])
    options: dict[str, Any] = {
        "scale": rng.random() < 0.5, "residual": rng.random() < 0.5, "act": rng.choice(["silu", "silu", "none"]),
        "p": rng.choice([0.0, 0.0, 0.25]), "keep": True, "quads": why_not(h, w) is None and rng.random() < 0.8,
    }  # fmt: skip
    sample = fp8_gradient_sample("", (rng.choice([1, 1, 2]), channels, h, w), groups, **options)
    arguments = with_state(sample.arguments(dtype, DEVICE), rng.choice([2.0**-16, 1.37, 20_000.0, 50_000.0]))
    if options["scale"] and rng.random() < 0.3:
        del arguments[rng.choice(["scale", "shift"])]
    return arguments


def assert_seen(arguments: dict[str, Any], amax: Tensor, counts: Tensor) -> None:
    """Exactly this in the row, nothing in the others."""
    assert arguments["amax"][ROW] == amax[0]
    assert arguments["counts"][ROW].tolist() == counts[0].tolist()
    assert arguments["amax"][::2].tolist() == [0, 0] and not arguments["counts"][::2].any()


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_hold_what_quantize_fp8_makes_of_the_fp32_gradient(seed: int):
    """In fp32 dx is what is quantised, so that codes, the largest magnitude and the counts are exact."""
    rng = random.Random(seed)
    for _ in range(40 if HAS_GPU else 3):
        arguments = draw(rng, torch.float32)
        call = BackwardFp8Call(**arguments)
        text = f"{tuple(call.x.shape)} {call.groups} p={call.p} {call.act}"
        found = run(arguments, one_program(call, rng.choice([4, 16])))
        dx8, *seen = quantized(found["dx"], arguments["fp8_scale"][ROW], fp8_format=FORMAT)
        assert torch.equal(bits(found["dx8"]), bits(dx8)), text
        quads = to_quads(dx8, beside=False) if call.quads else dx8.new_empty(0)
        assert torch.equal(bits(found["quads"]), bits(quads)), text
        assert_seen(arguments, *seen)
        exact, eager = (gradients(**a)[0] for a in (to_float64(arguments), arguments))
        for name, right, theirs in zip(NAMES, exact, eager, strict=True):
            if name not in ("dx8", "quads") and right.numel():
                verdict = compare(found[name], right, theirs, error_factor=4.0)
                assert verdict.passed, f"{name}: {verdict.reason}, {text}"


def test_the_random_problems_saturate_vanish_and_have_every_option():
    calls = [(a := draw(random.Random(seed), torch.float32), gradients(**a)[1][1][0]) for seed in range(40)]
    overflows, underflows = (sum(bool(counts[kind]) for _, counts in calls) for kind in (0, 1))
    assert 5 < overflows < 35 and 3 < underflows < 35
    for name in ("residual", "scale", "seed"):
        assert 5 < sum(arguments.get(name) is not None for arguments, _ in calls) < 35
    assert 10 < sum(arguments["quads"] for arguments, _ in calls) < 38


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16])
def test_of_16_bits_codes_are_rounded_once(dtype: torch.dtype):
    """dx is rounded twice on its way through 16 bits, which moves a few codes by one."""
    arguments = with_state(OP.samples[1].arguments(dtype, DEVICE), 5_000.0)
    found = run(arguments, one_program(BackwardFp8Call(**arguments)))
    twice = quantized(found["dx"], arguments["fp8_scale"][ROW], fp8_format=FORMAT)[0]
    assert torch.equal(bits(from_quads(found["quads"], beside=False)), bits(found["dx8"]))
    apart = (bits(found["dx8"]).int() - bits(twice).int()).abs()
    assert apart.max() <= 1 and apart.float().mean() < 0.05
    assert arguments["amax"][ROW].to(dtype) == found["dx"].abs().max() != arguments["amax"][ROW]
    assert arguments["counts"][ROW, 2] == found["dx"].numel()


def test_gradients_of_parameters_are_the_bits_of_the_backward_with_equal_tiles():
    for keep, options in ((False, {"scale": True, "p": 0.25}), (True, {"residual": True})):
        sample = fp8_gradient_sample("", (2, 16, 8, 8), 4, keep=keep, **options)
        arguments = sample.arguments(torch.float32, DEVICE)
        call = BackwardFp8Call(**arguments)
        config = one_program(call, 2)
        assert call.pieces(config)["BLOCK_P"] == config.constants(call)["BLOCK_P"] == 16
        found = run(arguments, config)
        launch = group_norm_silu_backward.plan(config=config, target=H200, **backward_only(arguments))
        expected = group_norm_silu_backward.run(BackwardCall(**backward_only(arguments)), launch)
        assert all(torch.equal(found[name], right) for name, right in zip(NAMES[3:], expected, strict=True))
        assert found["dx"].numel() == (call.x.numel() if keep else 0)
        if keep:
            torch.testing.assert_close(found["dx"], launch.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_operator_and_plain_pytorch_agree_without_keeping_dx(dtype: torch.dtype):
    sample = fp8_gradient_sample("", (1, 16, 4, 4), 1, scale=True, residual=True, p=0.25)
    ours, theirs = (with_state(sample.arguments(dtype, DEVICE), 20_000.0) for _ in range(2))
    results, expected = OP(**ours), on_cpu(**theirs)
    for name, one, other in zip(NAMES, results, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), name
        if one.element_size() > 1 and one.numel():
            torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)
    assert results[0].numel() == 0
    assert results[1].is_contiguous(memory_format=torch.channels_last)
    apart = (bits(results[1]).int() - bits(expected[1]).int()).abs()
    assert apart.max() <= 1 and apart.float().mean() < 0.05
    torch.testing.assert_close(ours["amax"], theirs["amax"], rtol=2e-3, atol=0)
    assert ours["counts"].tolist() == theirs["counts"].tolist() and ours["counts"][ROW, 0] > 0
    # the second call adds to the counts and finds no larger magnitude
    before, counts = ours["amax"].clone(), ours["counts"].clone()
    OP(**ours)
    assert torch.equal(ours["amax"], before) and torch.equal(ours["counts"], 2 * counts)


def test_a_planted_error_is_caught():
    arguments = with_state(OP.samples[0].arguments(torch.float32, DEVICE), 5_000.0)
    config = one_program(BackwardFp8Call(**arguments))
    right = run(arguments, config)["dx8"]
    for changed in ({"residual": arguments["dy"]}, {"eps": 0.5}, {"groups": 4}):
        other = gradients(**{**arguments, **changed})[0][1]
        assert (bits(other) != bits(right)).float().mean() > 0.05


def test_not_a_number_stays_and_does_not_count():
    arguments = with_state(OP.samples[1].arguments(torch.float32, DEVICE), 1.0)
    arguments["residual"][1, 3, 2, 1] = math.nan
    arguments["residual"][0, 0, 0, 0] = -math.inf
    found = run(arguments, one_program(BackwardFp8Call(**arguments)))
    dx8 = found["dx8"].float()
    assert dx8[1, 3, 2, 1].isnan() and dx8.isnan().sum() == 1
    assert dx8[0, 0, 0, 0] == -FORMATS[FORMAT].largest
    assert arguments["amax"][ROW].isnan() and arguments["counts"][ROW, 0] == 1


def test_empty_batch():
    sample = fp8_gradient_sample("", (0, 16, 4, 4), 4, scale=True, keep=True)
    arguments = with_state(sample.arguments(torch.float32, DEVICE), 1.0)
    results = dict(zip(NAMES, OP(**arguments), strict=True))
    assert results["dx"].shape == results["dx8"].shape == (0, 16, 4, 4)
    assert results["quads"].shape == (0, 1, 16, 1, 4, 4) and results["dscale"].shape == (0, 16)
    assert results["dgamma"].shape == (16,) and not results["dgamma"].any() and not results["dbeta"].any()
    assert not arguments["amax"].any() and not arguments["counts"].any()


# --- what is taken ---------------------------------------------------------------------------------------------------

GOOD = with_state(OP.samples[1].arguments(torch.float32, DEVICE), 1.0)


def good_maps(shape: tuple[int, int, int, int], **changed: Any) -> dict[str, Any]:
    arguments = fp8_gradient_sample("", shape, 4).arguments(torch.float32, DEVICE)
    return {**GOOD, **dict.fromkeys(("scale", "shift", "residual")), **arguments, **changed}


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({**GOOD, "groups": 3}, ValueError, "backward_fp8: groups must divide"),
        ({**GOOD, "dy": GOOD["dy"].contiguous()}, ValueError, "backward_fp8: dy must be channels_last"),
        (good_maps((2, 24, 4, 4)), ValueError, "backward_fp8: x must have a multiple of 16 channels, got 24"),
        (good_maps((2, 16, 3, 6), quads=False), ValueError, "a map of x must have a multiple of 4 pixels, got 3 x 6"),
        (good_maps((2, 16, 4, 12)), ValueError, "quads need a power of two of columns, from 4 to 128, got 12"),
        (good_maps((2, 16, 36, 36), quads=False), ValueError, "no program holds 2 of 4 groups"),
        ({**GOOD, "row": ROWS}, ValueError, "quantize_fp8: row must be one of the 3 rows"),
        ({**GOOD, "counts": GOOD["counts"].int()}, TypeError, "quantize_fp8: counts must be torch.int64"),
        ({**GOOD, "fp8_scale": GOOD["fp8_scale"][:2]}, ValueError, "quantize_fp8: scale must be dense"),
        ({**GOOD, "target": typical_target("sm_80")}, ValueError, "sm_80 has no conversion to FP8"),
        ({**GOOD, "config": Config(4, 8, 1)}, ValueError, r"no program holds 4 of 4 groups .*: Config\(groups=4"),
    ],
)  # fmt: skip
def test_refusals(arguments: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=words):
        plan(**arguments)


def test_fits_tells_what_is_taken():
    def fitting(shape: tuple[int, ...], groups: int = 32, *, quads: bool = True, dtype: torch.dtype = torch.bfloat16):
        x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)
        return fits(x, groups, quads=quads)

    assert all(fitting((128, c, side, side)) for c, side in UNET_MAPS)
    assert fitting((2, 64, 2, 6), quads=False) and not fitting((2, 64, 2, 6))
    assert not fitting((2, 40, 4, 4), 8) and not fitting((2, 64, 4, 4), 48)
    assert not fitting((2, 320, 128, 128)), "two passes"
    assert not fitting((2, 64, 4, 4), dtype=torch.float64)
    assert not fits(torch.empty(2, 64, 4, 4, device="meta"), 32, quads=True), "NCHW"


def test_candidates_are_taken_and_begin_with_the_default():
    for sample in OP.samples:
        arguments = sample.arguments(torch.bfloat16, "meta")
        call, configs = BackwardFp8Call(**arguments), OP.launcher.candidates(target=H200, **arguments)
        assert plan(target=H200, **arguments).grid == (configs[0].programs(call),)
        assert all(call.takes(config, H200) for config in configs) and len(set(configs)) == len(configs)
        for config in configs[:2]:
            tiles = call.pieces(config)
            assert tiles["PIECES"] % 4 == 0 and tiles["PIECES"] * tiles["BLOCK_P"] == call.pixels
    arguments = OP.samples[1].arguments(torch.float32, DEVICE)
    assert len({OP.key(**{**arguments, **change}) for change in ({}, {"keep": False}, {"quads": False})}) == 3


def test_registration():
    sample = fp8_gradient_sample("", (1, 16, 4, 4), 1, scale=True, residual=True, p=0.25, keep=True)
    arguments = sample.arguments(torch.float32, DEVICE)
    for changed in ({}, {"keep": False, "quads": False, "scale": None, "shift": None}):
        given = {**arguments, **changed}
        assert torch.library.opcheck(OP.overload, (), given, test_utils="test_faketensor") == {
            "test_faketensor": "SUCCESS"
        }
        assert len({result.untyped_storage()._cdata for result in on_cpu(**given)}) == len(NAMES), "shared memory"
    assert torch.Tag.needs_exact_strides in OP.overload.tags
    assert not OP.overload._schema.is_mutable


def test_cost_is_that_of_the_backward_with_bytes_in_place_of_dx():
    arguments = OP.samples[0].arguments(torch.float16, DEVICE)
    x, base = arguments["x"], group_norm_silu_backward.cost(**backward_only(arguments))
    work = OP.cost(**arguments)
    assert work.read_bytes - base.read_bytes == 4
    # codes and quads of a byte each
    assert work.write_bytes - base.write_bytes == -2 * x.numel() + 2 * x.numel() + 28
    assert OP.cost(**{**arguments, "keep": True}).write_bytes - work.write_bytes == x.nbytes
    assert OP.cost(**{**arguments, "quads": False}).write_bytes - work.write_bytes == -x.numel()
    assert work.flops == base.flops + 4 * x.numel()


# --- machine code ----------------------------------------------------------------------------------------------------


def evaluated(text: str, given: list[float], access: int) -> tuple[list[float], list[int]]:
    """(found, lost) of the PTX that observes four pieces, in fp32 as the device has it."""
    held: dict[str, Any] = {f"${2 * access + i}": torch.tensor(value) for i, value in enumerate(given)}
    held["0.0"] = torch.tensor(0.0)

    def value(name: str) -> Any:
        return held[name] if name in held else torch.tensor(float(name))

    actions = {
        "abs.f32": torch.abs, "max.NaN.f32": torch.maximum, "min.f32": torch.fmin, "mul.f32": torch.mul,
        "mov.f32": torch.clone, "mov.s32": int, "add.s32": lambda a, b: int(a) + int(b),
        "setp.gtu.f32": lambda a, b: bool(a > b or a.isnan()), "setp.gt.f32": lambda a, b: bool(a > b),
        "setp.le.f32": lambda a, b: bool(a <= b), "setp.le.or.f32": lambda a, b, p: bool(a <= b) or p,
        "setp.gt.and.f32": lambda a, b, p: bool(a > b) and p,
    }  # fmt: skip
    skipping = False
    for line in text.strip("{}").split(";"):
        label, _, rest = line.rpartition(": ")
        skipping = skipping and label.strip() != "COUNTED"
        guard, word, operands = re.fullmatch(r"\s*(?:@(!?\w) )?([\w.]*)\s*(.*?)\s*", rest).groups()  # pyright: ignore
        if word in ("", ".reg") or skipping or (guard and bool(held[guard.strip("!")]) == guard.startswith("!")):
            continue
        if word == "bra":
            skipping = True
            continue
        target, *sources = operands.split(", ")
        held[target] = actions[word](*map(value, sources))
    assert not skipping
    return [float(held[f"${i}"]) for i in range(access)], [held[f"${access + i}"] for i in range(access)]


@pytest.mark.parametrize("access", [8, 2, 1])
def test_the_assembly_counts_what_quantize_fp8_counts(access: int):
    kind, rng = FORMATS[FORMAT], random.Random(access)
    edges = [kind.saturating, kind.vanishing, math.nextafter(kind.vanishing, 1), kind.largest, 0.0, -0.0, 1e-30]
    counted = 0
    for trial, scale in enumerate([1.0, 2.0**-16, 3e4, 1.37] * 15):
        x = torch.tensor([rng.gauss(0, 1) for _ in range(4 * access)])
        for _ in range(trial % 4):
            special = rng.choice([*(edge / scale for edge in edges), 1.1 * kind.saturating / scale, math.inf, math.nan])
            x[rng.randrange(len(x))] = rng.choice([1, -1]) * special
        factor = torch.tensor([scale])
        given = [*x.tolist(), *(x * factor).tolist(), *[scale] * access]
        assert len(given) == _constraints.fn(access).split(",").count("f")
        found, lost = evaluated(_assembly.fn(FORMAT, access), given, access)
        _, amax, counts = quantized(x[:, None], factor, fp8_format=FORMAT)
        overflows, underflows, _ = counts[0].tolist()
        assert lost == [65536 * overflows + underflows] + [0] * (access - 1)
        assert torch.equal(torch.tensor(found[:1]).nan_to_num(-1.0), amax.nan_to_num(-1.0)) and not any(found[1:])
        counted += bool(overflows) + bool(underflows)
    assert counted > 20


def test_machine_code(tmp_path: Path):
    """Two programs a multiprocessor, nothing spilled, 16 bytes of bf16 and 8 of FP8 an access."""
    samples = OP.samples[-2:]
    assert "dropout" in samples[0].why and "residual" in samples[1].why
    launches = [plan(target=H200, **sample.arguments(torch.bfloat16, "meta")) for sample in samples]
    binaries = compile_many([launch.source("sm_90") for launch in launches])
    for sample, launch, binary in zip(samples, launches, binaries, strict=True):
        report, why = bounded(binary, launch, tmp_path), sample.why
        assert not report.problems, (why, report.problems)
        assert report.registers == launch.options["maxnreg"] == 128 and launch.num_warps == 8, why
        constants: dict[str, Any] = dict(launch.constants)
        elements = constants["PIECES"] * constants["BLOCK_P"] * constants["BLOCK_C"] // (32 * launch.num_warps)
        given = {name for name, value in launch.arguments.items() if value is not None}
        loaded = (2 + ("residual_ptr" in given)) * elements // 8
        assert report.instructions["LDG.E.128"] >= loaded, why
        assert report.instructions["STG.E.64"] == elements // 8, why
        # words: each once
        words = report.instructions["STG.E.128"] - ("dx_ptr" in given) * elements // 8
        assert words == elements // 16, why
        # to both orders, in pairs
        rounded = sum(n for name, n in report.instructions.items() if name.startswith("F2FP.SATFINITE.E5M2"))
        assert rounded == elements, why
        # five an element lie behind a branch that is rarely taken
        assert sum(report.instructions.values()) <= (57.25 if "seed_ptr" in given else 49.5) * elements, why


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.why) for s in OP.samples])
def test_samples(sample: Any):
    arguments = {**sample.arguments(torch.bfloat16, "cuda"), "keep": True}
    exact, eager = (gradients(**a)[0] for a in (to_float64(arguments), arguments))
    results = dict(zip(NAMES, OP(**arguments), strict=True))
    for name, right, theirs in zip(NAMES, exact, eager, strict=True):
        if name != "quads" and right.numel():
            verdict = compare(results[name], right, theirs, error_factor=2.0 if sample.real_size else 4.0)
            assert verdict.passed, f"{name}: {verdict.reason}"
    if arguments["quads"]:
        assert torch.equal(bits(results["quads"]), bits(to_quads(results["dx8"], beside=False)))
    amax, counts = arguments["amax"].clone(), arguments["counts"].clone()
    assert amax[0].to(torch.bfloat16) == results["dx"].abs().max()
    assert counts[0, 2] == results["dx"].numel()
    for again in (OP(**arguments), OP(**{**arguments, "keep": False})):
        pairs = list(zip(NAMES, again, strict=True))[1:]
        assert all(torch.equal(bits(one), bits(results[name])) for name, one in pairs), "not the same bits"
    assert torch.equal(arguments["amax"], amax) and torch.equal(arguments["counts"], 3 * counts)
