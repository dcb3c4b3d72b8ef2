"""quantize_weights_fp8 against quantize_fp8 and for_dgrad, bit for bit; what it records, refuses, becomes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.cudagraph import capture
from ridgeline.kernels import quantize_weights_fp8
from ridgeline.kernels._op import typical_target
from ridgeline.kernels._quantize_fp8_call import CONFIGS, Config
from ridgeline.kernels.conv2d_fp8 import for_dgrad
from ridgeline.kernels.quantize_fp8 import quantized
from ridgeline.kernels.quantize_weights_fp8 import Plan, build, cost, launch, quantize_
from ridgeline.sass import compile_many, inspect

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
FILTERS = ((1, 1), (3, 3), (1, 5))
State = tuple[Tensor, Tensor, Tensor]  # scale, amax, counts


@pytest.fixture(params=["kernel", "without"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are; "without" turns to plain PyTorch on the CPU."""
    if request.param == "kernel":
        return DEVICE
    monkeypatch.setattr(quantize_weights_fp8, "INTERPRETED", False)
    return "cpu"


def weight(shape: Sequence[int], dtype: torch.dtype, device: str = DEVICE, *, seed: int = 0) -> Tensor:
    """Normal numbers of some forty powers of two, so that some saturate and some vanish."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * torch.exp2(5 * torch.randn(*shape, generator=g))
    return w.to(device, dtype).to(memory_format=torch.channels_last)


def fresh(scales: Sequence[float], device: str = DEVICE) -> State:
    scale = torch.tensor(scales, device=device)
    return scale, torch.zeros_like(scale), torch.zeros(len(scales), 3, dtype=torch.int64, device=device)


def codes(y: Tensor) -> Tensor:
    """The bytes of FP8 values, all NaN alike: only some conversions keep its sign."""
    return y.view(torch.uint8).where(~y.float().isnan(), 0x7F)


def assert_quantized(plan: Plan, state: State) -> None:
    """All that a plan writes, from a state with nothing recorded."""
    scale, amax, counts = state
    expected_amax, expected_counts = torch.zeros_like(amax), torch.zeros_like(counts)
    for i, (w, row) in enumerate(zip(plan.weights, plan.rows, strict=True)):
        y, expected_amax[row], expected_counts[row] = quantized(w, scale[row], fp8_format="e4m3")
        for name, written, right in (("copy", plan.copies[i], y), ("turned", plan.turned[i], for_dgrad(y))):
            assert written.dtype == torch.float8_e4m3fn and written.shape == right.shape, (name, i)
            assert written.is_contiguous(memory_format=torch.channels_last), (name, i)
            assert torch.equal(codes(written), codes(right)), (name, i)
    assert torch.equal(amax.nan_to_num(nan=-1.0), expected_amax.nan_to_num(nan=-1.0))
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_random_weights(seed: int, dtype: torch.dtype):
    """Of 16 to 272 filters and channels, in rows of a state that others share, by tiles of any size."""
    rng = random.Random(seed)
    sizes = [rng.choice([16, 32, 48, 80, 128, 144, 272]) for _ in range(4)]
    shapes = [(sizes[i], sizes[-1 - i], *rng.choice(FILTERS)) for i in range(2)] + [(16, 16, *rng.choice(FILTERS))]
    weights = [weight(shape, dtype, seed=seed + i) for i, shape in enumerate(shapes)]
    state = fresh([2.0 ** rng.randint(-4, 8) * rng.choice([1.0, 1.37]) for _ in range(7)])
    plan = build(weights, rng.sample(range(7), 3), config=rng.choice(CONFIGS))
    quantize_(plan, *state)
    assert_quantized(plan, state)


def test_weights_of_each_filter(device: str):
    weights = [weight((32, 48, *size), torch.bfloat16, device, seed=i) for i, size in enumerate(FILTERS)]
    state = fresh([1.0, 30.0, 900.0, 7.0], device)
    plan = build(weights, [2, 0, 1])
    quantize_(plan, *state)
    assert_quantized(plan, state)
    assert (state[2][:3, :2].sum(0) > 0).all(), "nothing saturated or nothing vanished"


def test_the_turned_copy_has_its_taps_backward():
    w = torch.arange(9.0, device=DEVICE).view(1, 1, 3, 3).repeat(16, 16, 1, 1).to(memory_format=torch.channels_last)
    w[3] += 10.0
    plan = build([w], [0])
    quantize_(plan, *fresh([1.0]))
    assert plan.turned[0][5, 0].float().tolist() == [[8, 7, 6], [5, 4, 3], [2, 1, 0]]
    # 17 lies between 16 and 18, whose last digit is even
    assert plan.turned[0][5, 3].float().tolist() == [[18, 16, 16], [15, 14, 13], [12, 11, 10]]


@pytest.mark.parametrize("values", [(0.0,), (math.nan, 1.0), (math.inf, 1.0), (-math.inf, math.nan), (-1e-9, 1e9)])
def test_weights_that_are_zero_or_not_finite(values: tuple[float, ...], device: str):
    """In the last tile of one weight; what lies beside it knows nothing of it."""
    weights = [torch.zeros(144, 80, 1, 1, device=device), weight((16, 16, 1, 1), torch.float32, device)]
    for i, value in enumerate(values):
        weights[0][-1 - i, -1] = value
    state = fresh([1.0, 1.0], device)
    plan = build(weights, [0, 1])
    quantize_(plan, *state)
    assert_quantized(plan, state)
    largest = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
    amax = state[1][0].item()
    assert math.isnan(amax) if any(map(math.isnan, values)) else amax == torch.tensor(largest).item()
    assert plan.turned[0][-1, -1].isnan().item() == math.isnan(values[0])


def test_a_plan_follows_weights_and_scales_and_the_state_adds_up(device: str):
    w = torch.full((16, 32, 1, 1), -3.0, device=device)
    plan = build([w], [1])
    scale, amax, counts = fresh([5.0, 1.0, 5.0], device)
    versions = [t._version for t in (*plan.copies, *plan.turned)]
    for factor, number, largest in ((1.0, 1.0, 3.0), (64.0, 2.0, 3.0), (64.0, -100.0, 100.0)):
        scale[1] = factor
        w.fill_(number)
        w[0, 0] = -3.0
        before = amax._version, counts._version
        quantize_(plan, scale, amax, counts)
        assert (amax._version, counts._version) == before, "autograd would see the state change"
        copy, turned = plan.copies[0].float(), plan.turned[0].float()
        assert copy[1, 0].item() == turned[0, 1].item() == max(number * factor, -448.0)
        assert copy[0, 0].item() == turned[0, 0].item() == -3.0 * factor
        assert amax.tolist() == [0.0, largest, 0.0]
    assert counts.tolist() == [[0, 0, 0], [511, 0, 3 * 512], [0, 0, 0]]
    assert all(t._version > before for t, before in zip((*plan.copies, *plan.turned), versions, strict=True))


def test_tensors_given_are_written_and_nothing_beside_them():
    shape = (48, 80, 1, 5)
    numel = math.prod(shape)
    buffers = [torch.full((numel + 64,), 0x55, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    insides = [b[32 : 32 + numel].view(torch.float8_e4m3fn) for b in buffers]
    (k, c, r, s), (straight, turned) = shape, insides
    copies = [straight.view(k, r, s, c).permute(0, 3, 1, 2)]
    backward = [turned.view(c, r, s, k).permute(0, 3, 1, 2)]
    plan = build([weight(shape, torch.float32)], [0], copies=copies, turned=backward)
    assert plan.copies[0] is copies[0] and plan.turned[0] is backward[0]
    state = fresh([11.0])
    quantize_(plan, *state)
    assert_quantized(plan, state)
    for buffer in buffers:
        assert (buffer[:32] == 0x55).all() and (buffer[32 + numel :] == 0x55).all()


def test_the_parameters_of_a_model_are_left_as_they_are(device: str):
    parameter = torch.nn.Parameter(weight((16, 16, 3, 3), torch.float32, device))
    before = parameter.detach().clone()
    plan = build([parameter], [0])
    quantize_(plan, *fresh([100.0], device))
    assert torch.equal(parameter, before)
    assert not plan.copies[0].requires_grad and not plan.turned[0].requires_grad


@pytest.mark.parametrize(("dtype", "per_element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_cost_reads_once_and_writes_two_bytes(dtype: torch.dtype, per_element: int):
    plan = build([weight((16, 32, 3, 3), dtype), weight((48, 16, 1, 1), dtype)], [0, 1])
    work = cost(plan)
    assert (work.read_bytes, work.write_bytes) == (per_element * 5376, 2 * 5376)


W = torch.zeros(16, 32, 3, 3, device=DEVICE).to(memory_format=torch.channels_last)
COPY = W.to(torch.float8_e4m3fn)
TURNED = for_dgrad(COPY)
GOOD = {"weights": [W], "rows": [0]}
HUGE = torch.empty(2**15, 2**16, 1, 1, device="meta")


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"weights": [], "rows": []}, ValueError, "there are no weights: give at least one"),
        ({"weights": [W.half()]}, TypeError, "weights must be one of fp32, bf16, got torch.float16"),
        (
            {"weights": [W, W.bfloat16()], "rows": [0, 1]},
            TypeError,
            "all weights must be torch.float32, .* torch.bfloat16",
        ),
        ({"weights": [W.contiguous()]}, ValueError, r"weights must be channels_last, got strides \(288, 9, 3, 1\)"),
        ({"weights": [W[:8]]}, ValueError, r"K and C multiples of 16, got shape \[8, 32, 3, 3\]"),
        ({"weights": [W[:, :24]]}, ValueError, r"K and C multiples of 16, got shape \[16, 24, 3, 3\]"),
        ({"weights": [W[:0]]}, ValueError, r"K and C multiples of 16, got shape \[0, 32, 3, 3\]"),
        ({"weights": [W[..., 0]]}, ValueError, r"weights must be \[K, C, R, S\]"),
        ({"weights": [W, W.to("meta")], "rows": [0, 1]}, ValueError, "weights must be on .*, got one on meta"),
        ({"weights": [HUGE]}, ValueError, "less than 2147483648 elements, got 2147483648"),
        ({"weights": [W.new_zeros(257)[1:].view(16, 16, 1, 1)]}, ValueError, "16 bytes, got a view at offset 1"),
        ({"rows": [0, 1]}, ValueError, r"rows must be 1 different ones from 0 on, one a weight, got \[0, 1\]"),
        ({"rows": [-1]}, ValueError, r"rows must be .* got \[-1\]"),
        ({"weights": [W, W], "rows": [2, 2]}, ValueError, r"rows must be 2 different ones .* got \[2, 2\]"),
        ({"copies": []}, ValueError, "copies must hold 1 tensors, one a weight, got 0"),
        ({"copies": [W]}, TypeError, "copies must be torch.float8_e4m3fn, got torch.float32"),
        ({"turned": [COPY]}, ValueError, r"turned must have shape \[32, 16, 3, 3\], got \[16, 32, 3, 3\]"),
        ({"turned": [TURNED.contiguous()]}, ValueError, "turned must be channels_last, got strides"),
        ({"turned": [TURNED.to("meta")]}, ValueError, "turned must be on .*, got one on meta"),
        ({"weights": [W, W], "rows": [0, 1], "copies": [COPY] * 2}, ValueError, "two of the tensors written are one"),
        ({"config": Config(128, 128, 4)}, ValueError, ".* must have powers of two, .* and 32 or 64 elements a thread"),
    ],
)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"quantize_weights_fp8: .*{words}"):
        build(**{**GOOD, **changed})


def test_refusals_of_states(device: str):
    plan = build([W.to(device)], [2])
    scale, amax, counts = fresh([1.0] * 3, device)
    for state, kind, words in (
        ((scale[:2], amax[:2], counts[:2]), ValueError, "one of the 2 rows of scale, got 2"),
        ((scale.double(), amax, counts), TypeError, "scale must be torch.float32, got torch.float64"),
        ((scale, amax, counts[:, :2]), ValueError, r"counts must be dense of shape \(3, 3\)"),
        ((scale, amax.to("meta"), counts), ValueError, "amax must be on .*, got meta"),
    ):
        with pytest.raises(kind, match=words):
            quantize_(plan, *state)


def test_a_gpu_without_a_conversion_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantize_weights_fp8, "target_of", lambda _: typical_target("sm_80"))
    with pytest.raises(ValueError, match="sm_80 has no conversion to FP8: it takes sm_89 or later"):
        build(**GOOD)


def test_machine_code():
    """16 bytes an access both ways, conversions of pairs that saturate, loads before stores, nothing spilled."""
    cases = [("sm_90", torch.bfloat16), ("sm_89", torch.bfloat16), ("sm_120", torch.float32)]
    launches = [launch(build([weight((16, 16, 3, 3), dtype)], [0]), *fresh([1.0])) for _, dtype in cases]
    sources = [one.source(arch) for one, (arch, _) in zip(launches, cases, strict=True)]
    for case, binary in zip(cases, compile_many(sources), strict=True):
        report = inspect(binary)
        assert not report.problems, (case, report.problems)
        elements = CONFIGS[0].pixels * CONFIGS[0].channels // (32 * CONFIGS[0].num_warps)
        converted = sum(n for name, n in report.instructions.items() if name.startswith("F2FP.SATFINITE.E4M3"))
        assert converted == 2 * elements // 2, case
        assert report.instructions["LDG.E.128"] == elements * case[1].itemsize // 16, case
        assert report.instructions["STG.E.128"] == 2 * elements // 16, case
        # the table, the scale
        assert report.count("LDG") - report.instructions["LDG.E.128"] == 10, case
        assert report.count("STG") == report.instructions["STG.E.128"], case
        assert sum(report.instructions.values()) <= 17 * elements, case
        if case[0] == "sm_90":
            # four programs an SM, 64 kB of bf16 on their way
            assert report.registers <= 128, case


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_weights_of_a_model_by_every_config(dtype: torch.dtype):
    shapes = [(k, c, 3, 3) for k in (128, 256) for c in (128, 256, 384, 512)] + [(256, 512, 1, 1), (128, 384, 1, 1)]
    weights = [weight(shape, dtype, seed=i) for i, shape in enumerate(shapes)]
    for config in CONFIGS:
        state = fresh([30.0] * len(shapes))
        plan = build(weights, list(range(len(shapes))), config=config)
        quantize_(plan, *state)
        assert_quantized(plan, state)


@pytest.mark.gpu
def test_a_captured_launch_reads_weights_and_scales_anew():
    plan = build([weight((128, 272, 3, 3), torch.bfloat16)], [0])
    state = fresh([1.0])
    captured = capture(lambda: quantize_(plan, *state), (), warmup=1)
    for value in (1.0, 300.0):
        state[0].fill_(value)
        plan.weights[0].mul_(-0.5)
        state[1].zero_()
        state[2].zero_()
        captured.replay()
        assert_quantized(plan, state)
