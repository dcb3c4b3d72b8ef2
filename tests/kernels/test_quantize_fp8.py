"""quantize_fp8 beside PyTorch's own casts, bit for bit: every fp16 number, ties, both orders, what is seen."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.cudagraph import capture
from ridgeline.kernels import quantize_fp8
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels._quantize_fp8 import FORMATS, observe, record, to_fp8
from ridgeline.kernels._quantize_fp8_call import COLUMN_ALIGNMENT, CONFIGS, Config, default_config
from ridgeline.kernels.quantize_fp8 import INTO, OP, amax_launch, plan, quantized
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


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], why: str = "") -> None:
    """All four results: codes in both orders, the largest magnitude, the counts."""
    for name, a, b in zip(("y", "columns", "amax", "counts"), actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (name, why)
        if a.element_size() == 1:
            a, b = codes(a), codes(b)
        assert torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)), (name, why)


def run(arguments: dict[str, Any], config: Config | None = None) -> tuple[Tensor, ...]:
    """All four by the kernel, from what was 0x55 in every byte before."""
    amax, counts = nothing_seen()
    launch = plan(**arguments, seen=(amax, counts), config=config, target=H200)
    words = launch.arguments["words_ptr"]
    launch.output.view(torch.uint8).fill_(0x55)
    columns = launch.output.new_empty(0)
    if isinstance(words, Tensor):
        columns = words.fill_(0x55555555).view(launch.output.dtype)
    launch.run()
    return launch.output, columns, amax, counts


# --- rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's word for a signalling NaN
@pytest.mark.parametrize("fp8_format", FORMATS)
def test_every_number_of_fp16(fp8_format: str):
    """Ties, subnormal numbers, both zeros, infinities and 2046 NaN among them."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(512, 128).to(DEVICE)
    given = {"x": x, "scale": one(1.0), "fp8_format": fp8_format, "columns": True}
    y, columns, amax, counts = run(given, Config(128, 128, 8))
    kind = FORMATS[fp8_format]
    expected = x.float().clamp(-kind.largest, kind.largest).to(kind.dtype)
    assert torch.equal(codes(y), codes(expected))
    assert torch.equal(codes(columns), codes(expected).t())
    assert amax.isnan()
    wide, magnitude = x.float(), y.float().abs()
    overflows, underflows, elements = counts[0]
    assert overflows == (wide.abs() > {"e4m3": 464, "e5m2": 61440}[fp8_format]).sum() > 0
    assert underflows == ((magnitude == 0) & (wide != 0)).sum() > 0
    assert elements == x.numel()


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
        given = {"x": x / scale, "scale": one(scale), "fp8_format": fp8_format}
        assert torch.equal(codes(run(given, Config(256, 32, 4))[0]), codes(x.to(kind.dtype)))


def test_saturation_and_not_a_number():
    x = torch.tensor([[448.0, 464.0, -1e30, math.inf, -math.inf, math.nan, -0.0, 1e-30]], device=DEVICE)
    y, _, amax, counts = OP(x, one(1.0), fp8_format="e4m3")
    assert y.float()[0, :5].tolist() == [448.0, 448.0, -448.0, 448.0, -448.0]
    assert y.float()[0, 5].isnan()
    assert codes(y)[0, 6:].tolist() == [0x80, 0]
    assert amax.isnan() and counts.tolist() == [[3, 1, 8]]
    assert OP(x[:, :5], one(1.0), fp8_format="e4m3")[2].isinf()


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
    results = OP(**arguments)
    assert_equal(results, quantized(**arguments))
    y = results[0]
    assert y.is_contiguous(memory_format=torch.channels_last if y.dim() == 4 else torch.contiguous_format)
    assert_equal(OP(**arguments), results, "not the same bits")
    verdict = compare(y, OP.reference(**to_float64(arguments)), OP.reference(**arguments))
    assert verdict.passed, verdict.reason


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[dict[str, Any], Config]:
    """A map or a matrix, whole or a slice of something wider that is NaN elsewhere, with numbers of any size."""
    most = 24 if HAS_GPU else 6
    shape = (rng.randint(1, 3), rng.choice([1, 2, 3, 8, 16, 24, 33]), rng.randint(1, most), rng.randint(1, most))
    before, after = rng.choice([(0, 0), (0, 0), (8, 0), (1, 2)])
    n, c, h, w = shape
    wide = torch.full((n, h, w, before + c + after), math.nan, dtype=dtype, device=DEVICE)
    x = wide.permute(0, 3, 1, 2)[:, before : before + c]
    x.copy_(random_nhwc(shape, dtype, DEVICE, seed=rng.randint(0, 999)))
    x *= torch.exp2(4 * random_nhwc(shape, torch.float32, DEVICE, seed=1)).to(dtype)
    if rng.random() < 0.2:
        x[0, 0, 0, 0] = rng.choice([math.nan, math.inf, -math.inf, 0.0])
    if rng.random() < 0.3:
        x = wide.view(-1, before + c + after)[:, before : before + c]
    scale = one(2.0 ** rng.randint(-12, 12) * rng.choice([1.0, 1.37]))
    tiles = [config for config in (*CONFIGS, Config(16, 64, 1), Config(32, 32, 1)) if HAS_GPU or config.pixels >= 32]
    given = {"x": x, "scale": scale, "fp8_format": rng.choice([*FORMATS]), "columns": rng.random() < 0.4}
    return given, rng.choice(tiles)


@pytest.mark.parametrize("seed", range(10))
def test_random_shapes(seed: int):
    rng = random.Random(seed)
    for _ in range(60 if HAS_GPU else 20):
        arguments, config = draw(rng, DTYPES[seed % len(DTYPES)])
        assert_equal(run(arguments, config), quantized(**arguments), f"{tuple(arguments['x'].shape)} {config}")


def test_a_planted_error_is_caught():
    arguments = OP.samples[0].arguments(torch.float16, DEVICE)
    right = quantized(**arguments)
    for other in ({"scale": arguments["scale"] * 1.01}, {"fp8_format": "e5m2"}, {"x": arguments["x"].flip(0)}):
        with pytest.raises(AssertionError, match=r"'y'"):
            assert_equal(run({**arguments, **other}), right)


def test_columns_hold_pixels_of_the_whole_batch_and_zeros():
    x = torch.arange(1, 2 * 2 * 3 * 3 + 1, device=DEVICE).float().view(2, 2, 3, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    columns = OP(x, one(1.0), fp8_format="e4m3", columns=True)[1]
    assert columns.shape == (2, 2 * COLUMN_ALIGNMENT)
    expected = x.permute(1, 0, 2, 3).reshape(2, 18).to(torch.float8_e4m3fn).float()
    assert torch.equal(columns.float()[:, :18], expected)
    assert not columns.view(torch.uint8)[:, 18:].any()


def test_nothing_to_quantise():
    x = torch.zeros(0, 8, 4, 4, device=DEVICE, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    y, columns, amax, counts = OP(x, one(1.0), fp8_format="e5m2", columns=True)
    assert y.shape == x.shape and columns.shape == (8, 0)
    assert amax.tolist() == [0.0] and counts.tolist() == [[0, 0, 0]]


# --- what is seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpreted", [quantize_fp8.INTERPRETED, HAS_GPU], ids=["kernel", "without"])
def test_into_raises_the_maximum_and_adds_the_counts_of_one_row(interpreted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantize_fp8, "INTERPRETED", interpreted)
    amax, counts = nothing_seen(3)
    amax[1], counts[1] = 3.0, torch.tensor([1, 2, 3])
    scale = torch.tensor([7.0, 1.0, 7.0], device=DEVICE)
    x = torch.tensor([[1.0, -2.0, 1000.0, 1e-9]], device=DEVICE)

    def into(x: Tensor, *, columns: bool = False) -> tuple[Tensor, Tensor]:
        return quantize_fp8.quantize_fp8_into(amax, counts, x, scale, tensor=1, fp8_format="e4m3", columns=columns)

    y, columns = into(x[:, :2])
    assert y.float().tolist() == [[1.0, -2.0]] and columns.numel() == 0
    assert amax[1] == 3.0 and counts[1].tolist() == [1, 2, 5]
    y, columns = into(x, columns=True)
    assert y.float().tolist() == [[1.0, -2.0, 448.0, 0.0]]
    assert columns.float()[:, :2].tolist() == [[1, 0], [-2, 0], [448, 0], [0, 0]]
    assert amax[1] == 1000.0 and counts[1].tolist() == [2, 3, 9]
    into(x * math.nan)
    into(x)
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
    arguments = {
        "x_ptr": x, "y_ptr": y, "scale_ptr": scale, "amax_ptr": amax.view(torch.int32), "counts_ptr": counts,
        "numel": 500,
    }  # fmt: skip
    constants = {"FORMAT": fp8_format, "TILES": 2, "BLOCK": 128}
    Launch(_halve_and_quantize, (3,), arguments, constants, num_warps=4, num_stages=1, output=y).run()
    given = {"x": 0.5 * x[:, None], "scale": scale, "fp8_format": fp8_format}
    expected = quantized(**given)
    assert_equal((y[:, None], y.new_empty(0), amax, counts), expected)
    assert (expected[3] > 0).all() or fp8_format == "e5m2"


# --- operators -----------------------------------------------------------------------------------------------------


def test_registration():
    for x_dtype, s in ((torch.float32, OP.samples[0]), (torch.float16, OP.samples[1])):
        arguments = s.arguments(x_dtype, DEVICE)
        tests = ("test_schema", "test_faketensor")
        assert set(torch.library.opcheck(OP.overload, (), arguments, test_utils=tests).values()) == {"SUCCESS"}
        arguments["tensor"] = 0
        assert set(torch.library.opcheck(INTO, nothing_seen(), arguments, test_utils=tests).values()) == {"SUCCESS"}
    assert all(torch.Tag.needs_exact_strides in overload.tags for overload in (OP.overload, INTO))


def test_cost_reads_once_and_writes_a_byte_each():
    arguments = OP.samples[0].arguments(torch.float16, DEVICE)
    numel = arguments["x"].numel()
    work = OP.cost(**arguments)
    # 30 pixels fill rows of 32
    assert (work.read_bytes, work.write_bytes) == (2 * numel + 4, numel + 16 * 32 + 28)
    assert OP.cost(**{**arguments, "columns": False}).write_bytes == numel + 28
    with FlopCounterMode(display=False) as counter:
        OP(**arguments)
    assert counter.get_total_flops() == work.flops == 4 * numel


def test_candidates_are_valid_and_tuned_like_any_other():
    for s in OP.samples:
        arguments = s.arguments(torch.float16, "meta")
        configs = OP.launcher.candidates(target=H200, **arguments)
        assert configs[0] == default_config(arguments["x"], H200) and len(set(configs)) == len(configs)
        assert plan(**arguments, target=H200).grid == (configs[0].programs(arguments["x"]),)
        for config in configs:
            launch = plan(**arguments, config=config, target=H200)
            assert any(value is launch.output for value in launch.arguments.values())
    assert all(config.is_valid for config in CONFIGS)
    for side, tile in ((32, CONFIGS[0]), (8, CONFIGS[1]), (4, CONFIGS[2])):
        x = next(s for s in OP.samples if f"{side}x{side} 256" in s.why).arguments(torch.float16, "meta")["x"]
        assert default_config(x, H200) == tile
    arguments = OP.samples[1].arguments(torch.float16, DEVICE)
    keys = {OP.key(**{**arguments, **change}) for change in ({}, {"fp8_format": "e4m3"}, {"columns": True})}
    assert len(keys) == 3


X = random_nhwc((2, 8, 4, 4), torch.float32, DEVICE, seed=0)
MATRIX = torch.zeros(8, 16, device=DEVICE)
GOOD = {"x": X, "scale": one(1.0), "fp8_format": "e4m3"}


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
        ({"tensor": 1}, ValueError, "tensor must be one of the 1 rows of scale, got 1"),
        ({"seen": (one(0.0), one(0.0))}, TypeError, "counts must be torch.int64, got torch.float32"),
        ({"scale": torch.ones(1, device="meta")}, ValueError, "scale must be on .*, got meta"),
        ({"target": typical_target("sm_80")}, ValueError, "sm_80 has no conversion to FP8: it takes sm_89 or later"),
        ({"config": Config(8, 64, 1)}, ValueError, r"Config\(pixels=8, .* must have powers of two"),
        ({"config": Config(128, 128, 4)}, ValueError, ".* must have powers of two, .* and 32 or 64 elements a thread"),
    ],
)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"quantize_fp8: {words}"):
        plan(**{**GOOD, "target": H200, **changed})


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate_is_right(dtype: torch.dtype):
    sample = next(s for s in OP.samples if s.real_size)
    arguments = sample.arguments(dtype, DEVICE)
    expected = quantized(**arguments)
    for config in CONFIGS:
        assert_equal(run(arguments, config), expected, str(config))


@pytest.mark.gpu
def test_a_captured_call_reads_the_scale_anew():
    x = random_nhwc((4, 64, 8, 8), torch.bfloat16, "cuda", seed=0)
    scale, (amax, counts) = one(1.0), nothing_seen()
    captured = capture(lambda: INTO(amax, counts, x, scale, tensor=0, fp8_format="e4m3", columns=True), (), warmup=1)
    for value in (1.0, 300.0):
        scale.fill_(value)
        amax.zero_()
        counts.zero_()
        y, columns = captured.replay()
        given = {"x": x, "scale": scale, "fp8_format": "e4m3", "columns": True}
        assert_equal((y, columns, amax, counts), quantized(**given))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.zeros((2**26 + 3, 33), dtype=torch.float16, device="cuda")
    x[-1] = 7.0
    y, columns, amax, counts = OP(x, one(1.0), fp8_format="e4m3", columns=True)
    assert y[-1].float().tolist() == [7.0] * 33 and columns[:, 2**26 + 2].float().tolist() == [7.0] * 33
    assert not y[:-1].view(torch.uint8).any() and columns.view(torch.uint8).count_nonzero() == 33
    assert amax.item() == 7.0 and counts.tolist() == [[0, 0, x.numel()]]
