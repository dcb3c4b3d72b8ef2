"""quantize_fp8 beside PyTorch's own casts, bit for bit: every fp16 number, ties, quads, what is seen."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fp8_steps import fp8_by_reference
from ridgeline.cost import cost_of
from ridgeline.cudagraph import capture
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels._quads import to_quads
from ridgeline.kernels._quantize_fp8 import FORMATS, observe, record, to_fp8
from ridgeline.kernels._quantize_fp8_call import CONFIGS, Config, default_config
from ridgeline.kernels.quantize_fp8 import OP, amax_launch, plan, quantized
from ridgeline.numerics import compare, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.float16)
H200 = typical_target("sm_90")


def one(value: float) -> Tensor:
    return torch.full((1,), value, device=DEVICE)


def nothing_seen(rows: int = 1) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, device=DEVICE), torch.zeros(rows, 3, dtype=torch.int64, device=DEVICE)


def codes(y: Tensor) -> Tensor:
    """The bytes of FP8 values, all NaN alike: only some conversions keep its sign."""
    return y.view(torch.uint8).where(~y.float().isnan(), 0x7F)


def state(scale: float = 1.0) -> dict[str, Any]:
    """Of one tensor, with its row."""
    amax, counts = nothing_seen()
    return {"scale": one(scale), "amax": amax, "counts": counts, "row": 0}


def expected(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """(y, quads or empty, amax, counts) of a call whose state has seen nothing."""
    scale = arguments["scale"][arguments["row"]]
    y, *seen = quantized(arguments["x"], scale, fp8_format=arguments["fp8_format"])
    return y, to_quads(y, beside=arguments["fp8_format"] == "e4m3") if arguments.get("quads") else y.new_empty(0), *seen


def assert_equal(actual: tuple[Tensor, ...], right: tuple[Tensor, ...], why: str = "") -> None:
    """All four results: codes in both orders, the largest magnitude, the counts."""
    for name, a, b in zip(("y", "quads", "amax", "counts"), actual, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (name, why)
        if a.element_size() == 1:
            a, b = codes(a), codes(b)
        assert torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)), (name, why)


def run(arguments: dict[str, Any], config: Config | None = None) -> tuple[Tensor, ...]:
    """All four by the kernel, from what was 0x55 in every byte before and a state that has seen nothing."""
    amax, counts = nothing_seen()
    launch = plan(**{**arguments, "amax": amax, "counts": counts}, config=config, target=H200)
    launch.output.view(torch.uint8).fill_(0x55)
    words, quads = launch.arguments.get("words_ptr"), launch.output.new_empty(0)
    if isinstance(words, Tensor):
        quads = words.fill_(0x55555555).view(quads.dtype).view(*words.shape, 4)
    launch.run()
    return launch.output, quads, amax, counts


def call(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """All four by the operator."""
    amax, counts = nothing_seen()
    return *OP(**{**arguments, "amax": amax, "counts": counts}), amax, counts


# --- rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's word for a signalling NaN
@pytest.mark.parametrize("fp8_format", FORMATS)
def test_every_number_of_fp16(fp8_format: str):
    """Ties, subnormal numbers, both zeros, infinities and 2046 NaN among them."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(1, 32, 16, 128)
    x = x.to(DEVICE).permute(0, 3, 1, 2)
    y, quads, amax, counts = run({"x": x, **state(), "fp8_format": fp8_format, "quads": True})
    kind = FORMATS[fp8_format]
    rounded = x.float().clamp(-kind.largest, kind.largest).to(kind.dtype)
    assert torch.equal(codes(quads), codes(to_quads(rounded, beside=fp8_format == "e4m3")))
    wide, magnitude = x.float(), y.float().abs()
    overflows, underflows, elements = counts[0]
    assert overflows == (wide.abs() > {"e4m3": 464, "e5m2": 61440}[fp8_format]).sum() > 0
    assert underflows == ((magnitude == 0) & (wide != 0)).sum() > 0
    assert torch.equal(codes(y), codes(rounded)) and elements == x.numel() and amax.isnan()


@pytest.mark.parametrize("fp8_format", FORMATS)
def test_numbers_of_fp32_around_every_tie(fp8_format: str):
    kind = FORMATS[fp8_format]
    values = torch.arange(256, dtype=torch.uint8).view(kind.dtype).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    around = [ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1), values]
    x = torch.cat(around)[:, None].to(DEVICE)
    # a power of two as the scale changes no digit
    for scale in (1.0, 1024.0):
        given = {"x": x / scale, **state(scale), "fp8_format": fp8_format}
        assert torch.equal(codes(run(given, Config(256, 32, 4))[0]), codes(x.to(kind.dtype)))


def test_saturation_and_not_a_number():
    x = torch.tensor([[448.0, 464.0, -1e30, math.inf, -math.inf, math.nan, -0.0, 1e-30]], device=DEVICE)
    given = {"x": x, **state(), "fp8_format": "e4m3"}
    y, _, amax, counts = call(given)
    assert y.float()[0, :5].tolist() == [448.0, 448.0, -448.0, 448.0, -448.0]
    assert y.float()[0, 5].isnan() and codes(y)[0, 6:].tolist() == [0x80, 0]
    assert amax.isnan() and counts.tolist() == [[3, 1, 8]]
    assert call({**given, "x": x[:, :5]})[2].isinf()


# --- shapes and orders ---------------------------------------------------------------------------------------------


def samples() -> list[Any]:
    return [
        pytest.param(s, dtype, id=f"{s.why}-{dtype}", marks=[pytest.mark.gpu] * s.real_size)
        for s in OP.samples
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("sample", "dtype"), samples())
def test_samples(sample: Any, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    results = call(arguments)
    assert_equal(results, expected(arguments))
    y = results[0]
    assert y.is_contiguous(memory_format=torch.channels_last if y.dim() == 4 else torch.contiguous_format)
    assert_equal(call(arguments), results, "not the same bits")
    verdict = compare(y, OP.reference(**to_float64(arguments)), OP.reference(**arguments))
    assert verdict.passed, verdict.reason


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[dict[str, Any], Config]:
    """A map or a matrix, whole or a slice of something wider that is NaN elsewhere, with numbers of any size."""
    most = 24 if HAS_GPU else 6
    quads, matrix = rng.choice([(False, False), (False, True), (True, False)])
    n, c, h, w = rng.randint(1, 3), rng.choice([1, 2, 3, 8, 16, 24, 33]), rng.randint(1, most), rng.randint(1, most)
    if quads:
        h, w = 4 * (1 + h // 4), rng.choice([4, 8, 16, 32])
    before, after = rng.choice([(0, 0), (0, 0), (8, 0), (1, 2)])
    wide = torch.full((n, h, w, before + c + after), math.nan, dtype=dtype, device=DEVICE)
    x = wide.permute(0, 3, 1, 2)[:, before : before + c]
    x.copy_(random_nhwc((n, c, h, w), dtype, DEVICE, seed=rng.randint(0, 999)))
    x *= torch.exp2(4 * random_nhwc((n, c, h, w), torch.float32, DEVICE, seed=1)).to(dtype)
    if rng.random() < 0.2:
        x[0, 0, 0, 0] = rng.choice([math.nan, math.inf, -math.inf, 0.0])
    if matrix:
        x = wide.view(-1, before + c + after)[:, before : before + c]
    scale = 2.0 ** rng.randint(-12, 12) * rng.choice([1.0, 1.37])
    tiles = [config for config in (*CONFIGS, Config(16, 64, 1), Config(32, 32, 1)) if HAS_GPU or config.pixels >= 32]
    given = {"x": x, **state(scale), "fp8_format": rng.choice([*FORMATS]), "quads": quads}
    return given, rng.choice(tiles)


@pytest.mark.parametrize("seed", range(10))
def test_random_shapes(seed: int):
    rng = random.Random(seed)
    for _ in range(60 if HAS_GPU else 20):
        arguments, config = draw(rng, DTYPES[seed % len(DTYPES)])
        assert_equal(run(arguments, config), expected(arguments), f"{tuple(arguments['x'].shape)} {config}")


def test_a_planted_error_is_caught():
    arguments = OP.samples[0].arguments(torch.float16, DEVICE)
    right = expected(arguments)
    for other in ({"scale": arguments["scale"] * 1.01}, {"fp8_format": "e5m2"}, {"x": arguments["x"].flip(0)}):
        with pytest.raises(AssertionError, match=r"'y'"):
            assert_equal(run({**arguments, **other}), right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 80, 8, 8), pytest.param((128, 128, 32, 32), marks=pytest.mark.gpu)])
def test_every_tile_makes_the_same(shape: tuple[int, int, int, int], dtype: torch.dtype):
    given = {"x": random_nhwc(shape, dtype, DEVICE, seed=0), **state(100.0), "fp8_format": "e4m3", "quads": True}
    for arguments in ({**given, "quads": False}, given, {**given, "fp8_format": "e5m2"}):
        right = expected(arguments)
        for config in CONFIGS:
            assert_equal(run(arguments, config), right, str(config))


def test_nothing_to_quantise():
    x = torch.zeros(0, 8, 4, 4, device=DEVICE, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    arguments = {"x": x, **state(), "fp8_format": "e5m2", "quads": True}
    assert_equal(call(arguments), expected(arguments))


# --- what is seen --------------------------------------------------------------------------------------------------

WAYS = pytest.mark.parametrize("way", [nullcontext, fp8_by_reference], ids=["kernel", "without"])


@WAYS
@pytest.mark.parametrize("fp8_format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 48, 4, 16), (5, 16, 4, 4), (1, 80, 16, 32), (1, 16, 4, 128)])
def test_one_row_is_recorded_without_a_version(shape: tuple[int, int, int, int], fp8_format: str, way: Any):
    x = random_nhwc(shape, torch.float32, DEVICE, seed=0)
    scale, (amax, counts) = torch.tensor([1.0, 300.0], device=DEVICE), nothing_seen(2)
    given = {"x": x, "scale": scale, "amax": amax, "counts": counts, "fp8_format": fp8_format}
    versions = amax._version, counts._version
    with way():
        y, quads = OP(**given, row=1, quads=True)
        again, nothing = OP(**given, row=0)
    assert (amax._version, counts._version) == versions
    assert_equal((y, quads, amax[1:], counts[1:]), expected({**given, "row": 1, "quads": True}))
    assert_equal((again, nothing, amax[:1], counts[:1]), expected({**given, "row": 0}))
    assert y.is_contiguous(memory_format=torch.channels_last)


@WAYS
def test_maxima_stay_and_counts_add_up(way: Any):
    scale, (amax, counts) = torch.tensor([7.0, 1.0, 7.0], device=DEVICE), nothing_seen(3)
    amax[1], counts[1] = 3.0, torch.tensor([1, 2, 3])
    x = torch.tensor([[1.0, -2.0, 1000.0, 1e-9]], device=DEVICE)

    def quantize(x: Tensor) -> list[list[float]]:
        with way():
            return OP(x, scale, amax, counts, row=1, fp8_format="e4m3")[0].float().tolist()

    assert quantize(x[:, :2]) == [[1.0, -2.0]]
    assert amax[1] == 3.0 and counts[1].tolist() == [1, 2, 5]
    assert quantize(x) == [[1.0, -2.0, 448.0, 0.0]]
    assert amax[1] == 1000.0 and counts[1].tolist() == [2, 3, 9]
    quantize(x * math.nan)
    quantize(x)
    assert amax[1].isnan()  # whatever follows
    assert amax[::2].tolist() == [0, 0] and not counts[::2].any()


def test_the_largest_magnitude_alone():
    for shape in ((2, 3, 5, 5), (1, 200, 3, 3)):
        x = random_nhwc(shape, torch.float16, DEVICE, seed=3)
        amax = one(0.0)
        amax_launch(x, amax).run()
        assert amax.item() == x.abs().max().item()
    x[0, 0, 0, 0] = math.inf
    amax_launch(x, amax).run()
    assert amax.isinf()


@triton.jit
def _halve_and_quantize(
    x_ptr, y_ptr, scale_ptr, amax_ptr, counts_ptr, numel, FORMAT: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    peak = tl.zeros((BLOCK,), tl.float32)
    events = tl.zeros((BLOCK,), tl.int32)
    first = tl.program_id(0) * TILES * BLOCK
    for tile in range(TILES):
        i = first + tile * BLOCK + tl.arange(0, BLOCK)
        x = 0.5 * tl.load(x_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
        z = x * tl.load(scale_ptr)
        peak, events = observe(x, z, peak, events, FORMAT)
        tl.store(y_ptr + i, to_fp8(z, FORMAT).to(y_ptr.dtype.element_ty, bitcast=True), mask=i < numel)
    elements = tl.maximum(tl.minimum(numel - first, TILES * BLOCK), 0)
    record(amax_ptr, counts_ptr, peak, events, elements)


@pytest.mark.parametrize("fp8_format", FORMATS)
def test_a_producer_quantises_what_it_is_about_to_store(fp8_format: str):
    """Flat, as an optimizer's pass is, over several tiles a program."""
    g = torch.Generator().manual_seed(4)
    x = (torch.randn(500, generator=g) * torch.exp2(6 * torch.randn(500, generator=g))).to(DEVICE)
    y = torch.empty(500, dtype=FORMATS[fp8_format].dtype, device=DEVICE)
    (amax, counts), scale = nothing_seen(), one(20.0)
    pointers = {"x_ptr": x, "y_ptr": y, "scale_ptr": scale, "amax_ptr": amax.view(torch.int32), "counts_ptr": counts}
    constants = {"FORMAT": fp8_format, "TILES": 2, "BLOCK": 128}
    Launch(_halve_and_quantize, (3,), {**pointers, "numel": 500}, constants, num_warps=4, num_stages=1, output=y).run()
    right = expected({"x": 0.5 * x[:, None], "scale": scale, "row": 0, "fp8_format": fp8_format})
    assert_equal((y[:, None], y.new_empty(0), amax, counts), right)
    assert (right[3] > 0).all() or fp8_format == "e5m2"


# --- operators -----------------------------------------------------------------------------------------------------


def test_registration():
    for sample in OP.samples[:4]:
        arguments = sample.arguments(torch.float16, DEVICE)
        checked = torch.library.opcheck(OP.overload, (), arguments, test_utils="test_faketensor")
        assert set(checked.values()) == {"SUCCESS"}
    assert torch.Tag.needs_exact_strides in OP.overload.tags and not OP.overload._schema.is_mutable


def test_cost_reads_once_and_writes_a_byte_each():
    arguments = OP.samples[3].arguments(torch.float16, DEVICE)
    numel = arguments["x"].numel()
    work = cost_of(OP.overload, (), arguments)
    copy = 2 * (2 + 2) * 48 * (4 + 2) * 16  # rows and columns beside a quarter are there twice, but of gradients
    assert work and (work.read_bytes, work.write_bytes) == (2 * numel + 4, numel + copy + 28)
    assert OP.cost(**{**arguments, "quads": False}).write_bytes == numel + 28
    assert OP.cost(**{**arguments, "fp8_format": "e5m2"}).write_bytes == 2 * numel + 28
    with FlopCounterMode(display=False) as counter:
        OP(**arguments)
    assert counter.get_total_flops() == work.flops == 4 * numel


def test_candidates_are_valid_and_tuned_like_any_other():
    for s in OP.samples:
        arguments = s.arguments(torch.float16, "meta")
        configs = OP.launcher.candidates(target=H200, **arguments)
        assert configs[0] == default_config(arguments["x"], H200) and len(set(configs)) == len(configs)
        for config in configs:
            launch = plan(**arguments, config=config, target=H200)
            assert any(value is launch.output for value in launch.arguments.values())
    assert all(config.is_valid for config in CONFIGS)
    for side, tile in ((32, CONFIGS[0]), (8, CONFIGS[1]), (4, CONFIGS[2])):
        x = next(s for s in OP.samples if f"{side}x{side} 256" in s.why).arguments(torch.float16, "meta")["x"]
        assert default_config(x, H200) == tile
    usual = OP.samples[-1].arguments(torch.bfloat16, "meta")
    grids = {plan(**{**usual, "quads": quads}, target=H200).grid for quads in (False, True)}
    assert grids == {(usual["x"].numel() // (CONFIGS[0].pixels * CONFIGS[0].channels),)}
    arguments = OP.samples[1].arguments(torch.float16, DEVICE)
    keys = {OP.key(**{**arguments, **change}) for change in ({}, {"fp8_format": "e4m3"}, {"quads": True})}
    assert len(keys) == 3


X = random_nhwc((2, 8, 4, 4), torch.float32, DEVICE, seed=0)
MATRIX = torch.zeros(8, 16, device=DEVICE)
GOOD = {"x": X, **state(), "fp8_format": "e4m3"}


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"x": X.double()}, TypeError, "x must be one of fp32, fp16, bf16, got torch.float64"),
        ({"x": X.contiguous()}, ValueError, r"x must be channels_last, .* got strides \(128, 16, 4, 1\)"),
        ({"x": X[0]}, ValueError, r"x must have 2 or 4 axes, got shape \(8, 4, 4\)"),
        ({"x": MATRIX.t()}, ValueError, r"x must be .* a matrix with adjacent channels, got strides \(1, 16\)"),
        ({"fp8_format": "e3m4"}, ValueError, "fp8_format must be one of e4m3, e5m2, got 'e3m4'"),
        ({"scale": torch.ones(2, device=DEVICE)}, ValueError, r"scale must be dense of shape \(1,\), got \(2,\)"),
        ({"scale": torch.ones(1, device=DEVICE).half()}, TypeError, "scale must be torch.float32, got torch.float16"),
        ({"row": 1}, ValueError, "row must be one of the 1 rows of scale, got 1"),
        ({"counts": one(0.0)}, TypeError, "counts must be torch.int64, got torch.float32"),
        ({"scale": torch.ones(1, device="meta")}, ValueError, "scale must be on .*, got meta"),
        ({"target": typical_target("sm_80")}, ValueError, "sm_80 has no conversion to FP8: it takes sm_89 or later"),
        ({"x": X[:1, :, :3], "quads": True}, ValueError, "quads need a multiple of 4 rows, got 3"),
        ({"x": MATRIX, "quads": True}, ValueError, r"only maps \[N, C, H, W\] have quads, got shape \(8, 16\)"),
        ({"config": Config(8, 64, 1)}, ValueError, r"Config\(pixels=8, .* must have powers of two"),
        ({"config": Config(128, 128, 4)}, ValueError, ".* must have powers of two, .* and 32 or 64 elements a thread"),
    ],
)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"quantize_fp8: {words}"):
        plan(**{**GOOD, "target": H200, **changed})


def test_without_a_kernel_the_same_is_refused():
    for changed in ({"x": X.double()}, {"row": 1}, {"x": MATRIX, "quads": True}):
        with fp8_by_reference(), pytest.raises((TypeError, ValueError), match=r"quantize_fp8: (x must|row must|only)"):
            OP(**{**GOOD, **changed})


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_call_reads_the_scale_anew():
    x = random_nhwc((4, 64, 8, 8), torch.bfloat16, "cuda", seed=0)
    scale, (amax, counts) = one(1.0), nothing_seen()
    given = {"x": x, "scale": scale, "amax": amax, "counts": counts, "row": 0, "fp8_format": "e4m3", "quads": True}
    captured = capture(lambda: OP(**given), (), warmup=1)
    for value in (1.0, 300.0):
        scale.fill_(value)
        amax.zero_()
        counts.zero_()
        assert_equal((*captured.replay(), amax, counts), expected(given))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    matrix = torch.zeros((2**26 + 3, 33), dtype=torch.float16, device="cuda")
    maps = torch.zeros((2**16 + 1, 32, 32, 33), dtype=torch.float16, device="cuda").permute(0, 3, 1, 2)
    for x, quads, fp8_format in ((matrix, False, "e4m3"), (maps, True, "e4m3"), (maps, True, "e5m2")):
        x[-1] = 7.0
        y, copy, amax, counts = call({"x": x, **state(), "fp8_format": fp8_format, "quads": quads})
        assert (y[-1].float() == 7.0).all() and not y[:-1].view(torch.uint8).any()
        assert amax.item() == 7.0 and counts.tolist() == [[0, 0, x.numel()]]
        if quads:
            assert torch.equal(codes(copy[-1:]), codes(to_quads(y[-1:], beside=fp8_format == "e4m3")))
            assert not copy[:-1].view(torch.uint8).any()
