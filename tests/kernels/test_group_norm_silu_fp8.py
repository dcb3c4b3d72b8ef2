"""group_norm_silu_fp8 beside the norm and the quantiser that it joins: codes, quads, what is seen."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.cudagraph import capture
from ridgeline.kernels import group_norm_silu
from ridgeline.kernels._group_norm_silu_dropout import scaled_mask
from ridgeline.kernels._group_norm_silu_samples import UNET_MAPS
from ridgeline.kernels._op import typical_target
from ridgeline.kernels._quads import from_quads, quads_shape, to_quads
from ridgeline.kernels.group_norm_silu_fp8 import OP, Config, Fp8Call, fits, fp8_sample, on_cpu, plan
from ridgeline.kernels.quantize_fp8 import quantized
from ridgeline.numerics import compare, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.float16)
H200 = typical_target("sm_90")


def given(shape: tuple[int, int, int, int], groups: int, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return fp8_sample("", shape, groups, **options).arguments(dtype, DEVICE)


def codes(y: Tensor) -> Tensor:
    return y.view(torch.uint8).where(~y.float().isnan(), 0x7F)


def places(y: Tensor) -> Tensor:
    """Of FP8 values in their order, both zeros at one place, NaN beyond the largest."""
    bits = codes(y).int()
    return torch.where(bits < 128, bits, 128 - bits)


def run(arguments: dict[str, Any], config: Config | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, quads or empty, amax, counts) by the kernel, from what was 0x55 in every byte before."""
    state = {name: arguments[name].clone() for name in ("amax", "counts")}
    launch = plan(**{**arguments, **state}, config=config, target=H200)
    launch.output.view(torch.uint8).fill_(0x55)
    words, quads = launch.arguments["words_ptr"], launch.output.new_empty(0)
    if isinstance(words, Tensor):
        quads = words.fill_(0x55555555).view(launch.output.dtype).view(quads_shape(*launch.output.shape, beside=True))
    launch.run()
    return launch.output, quads, *state.values()


def expected(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in plain PyTorch."""
    state = {name: arguments[name].clone() for name in ("amax", "counts")}
    return *on_cpu(**{**arguments, **state}), *state.values()


def assert_alike(actual: tuple[Tensor, ...], right: tuple[Tensor, ...], why: str = "") -> None:
    """Equal but for the last bits of fp32, by which one code in some thousand becomes its neighbour. Quads are y's."""
    (y, quads, amax, counts), (y_right, _, amax_right, counts_right) = actual, right
    steps = (places(y) - places(y_right)).abs()
    assert steps.numel() == 0 or (steps.max() <= 1 and (steps > 0).sum() <= max(1, 1e-3 * steps.numel())), why
    torch.testing.assert_close(amax, amax_right, rtol=1e-5 if HAS_GPU else 2e-6, atol=0, equal_nan=True, msg=why)
    assert (counts - counts_right).abs().max() <= (2e-4 * y.numel() if HAS_GPU else 0), why
    assert torch.equal(counts[:, 2], counts_right[:, 2]), why
    assert quads.numel() == 0 or torch.equal(codes(quads), codes(to_quads(y, beside=True))), why


# --- values --------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[dict[str, Any], Config, str]:
    """A problem with any of the options, three tensors in its state, and any slab."""
    quads = rng.random() < 0.6
    h, w = (rng.choice([4, 8, 12, 16]), rng.choice([4, 8, 16])) if quads else (rng.randint(1, 9), rng.randint(1, 9))
    groups, group_channels = rng.choice([1, 2, 3, 4]), rng.choice([4, 8, 12, 16, 32])
    n = 2 if rng.random() < 0.3 else 1
    choices: dict[str, Any] = {
        "scale": rng.random() < 0.5, "act": rng.choice(["silu", "none"]), "eps": rng.choice([1e-5, 1e-3]),
        "p": rng.choice([0.0, 0.0, 0.1, 0.5]), "quads": quads,
        "second": rng.choice([0, 0, 0, rng.randrange(groups * group_channels)]),
    }  # fmt: skip
    shape = (n, groups * group_channels, h, w)
    arguments = given(shape, groups, dtype, **choices)
    if choices["scale"] and rng.random() < 0.3:
        del arguments[rng.choice(["scale", "shift"])]
    scales = [1.0, rng.choice([0.02, 136.0, 3000.0]), 5.0]
    state = {
        "fp8_scale": torch.tensor(scales, device=DEVICE),
        "amax": torch.tensor([0.5, rng.choice([0.0, 9.0]), 0.0], device=DEVICE),
        "counts": torch.arange(9, device=DEVICE).view(3, 3),
    }
    arguments |= {**state, "row": 1}
    call = Fp8Call(**arguments)
    slabs = [Config(k, w) for k in range(1, groups + 1) for w in (1, 2, 4, 8, 16)]
    valid = [config for config in slabs if config.is_valid(call, quads)]
    if not valid:
        return draw(rng, dtype)
    config = rng.choice(valid) if rng.random() < 0.3 else valid[-1]
    return arguments, config, f"{dtype} {shape} {groups} {choices} {scales} {config}"


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed: int):
    rng = random.Random(seed)
    for _ in range(40 if HAS_GPU else 6):
        arguments, config, why = draw(rng, DTYPES[seed % len(DTYPES)])
        assert_alike(run(arguments, config), expected(arguments), why)


def test_the_random_problems_reach_every_path():
    rng = random.Random(0)
    drawn = [(Fp8Call(**arguments), config) for arguments, config, _ in (draw(rng, torch.float32) for _ in range(150))]
    partial = [not call.quads and call.pixels % config.rows(call) != 0 for call, config in drawn]
    padded = [config.slab(call).block_c(call) > config.groups * call.group_channels for call, config in drawn]
    several = [config.pieces(call, call.quads) > (4 if call.quads else 1) for call, config in drawn]
    for shares in (partial, padded, several, [call.quads for call, _ in drawn], [call.p > 0 for call, _ in drawn]):
        assert 10 < sum(shares) < 140


def test_samples_that_are_interpreted():
    for sample in (s for s in OP.samples if not s.real_size):
        arguments = sample.arguments(torch.float32, DEVICE)
        assert_alike(run(arguments), expected(arguments), sample.why)
        assert expected(arguments)[3][0, 0] > 0, "nothing saturates"


@pytest.mark.parametrize("wrong", [{"groups": 2}, {"act": "none"}, {"eps": 0.1}, {"row": 1}])
def test_a_planted_error_is_caught(wrong: dict[str, Any]):
    arguments = given((2, 64, 4, 4), 4, torch.float32)
    arguments["fp8_scale"] = torch.tensor([136.0, 100.0], device=DEVICE)
    arguments |= {"amax": torch.zeros(2, device=DEVICE), "counts": torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)}
    with pytest.raises(AssertionError):
        assert_alike(run({**arguments, **wrong}), expected(arguments))


def exact(groups: int, dtype: torch.dtype) -> dict[str, Any]:
    """A map of +-1 in equal numbers: mean 0, variance 1 and eps 0, so that y = gamma x + beta without rounding."""
    signs = torch.tensor([1.0, -1.0] * 32, device=DEVICE).view(1, 1, 8, 8).expand(2, 48, 8, 8)
    arguments = given((2, 48, 8, 8), groups, dtype, act="none")
    beta = torch.zeros(48, device=DEVICE)
    beta[5] = 7.0
    return {
        **arguments,
        "x": signs.to(dtype).contiguous(memory_format=torch.channels_last),
        "gamma": torch.exp2(torch.arange(-24.0, 24.0, device=DEVICE)),
        "beta": beta,
        "fp8_scale": torch.ones_like(arguments["fp8_scale"]),
        "eps": 0.0,
    }


@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")  # NumPy's, of what is nobody's
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saturation_and_underflow_are_counted_exactly(groups: int, dtype: torch.dtype):
    """On a slab of 48 channels in blocks of 64: the other 16 are nobody's, and have no variance where groups are 16."""
    y, _, amax, counts = run(exact(groups, dtype), Config(groups, 2))
    pixels = 2 * 64
    # 2^9 to 2^23 saturate, 2^-24 to 2^-10 vanish, of which one has become 7
    assert counts.tolist() == [[15 * pixels, 14 * pixels, 48 * pixels]]
    assert amax.item() == 2.0**23
    assert y[:, 33:].abs().float().unique().tolist() == [448.0]
    assert y[:, 5].float().unique().tolist() == [7.0]
    assert not codes(y[:, :5]).bitwise_and(0x7F).any() and not codes(y[:, 6:15]).bitwise_and(0x7F).any()


def test_what_is_not_a_number_is_seen_and_stays_in_its_group():
    arguments = given((1, 128, 4, 4), 2, torch.float32)
    arguments["x"][0, 3, 1, 1] = math.nan
    y, quads, amax, _ = run(arguments)
    assert y[:, :64].isnan().all() and not y[:, 64:].isnan().any()
    assert amax.isnan() and torch.equal(codes(from_quads(quads, beside=True)), codes(y))


def test_quantised_is_the_value_before_it_is_rounded_to_the_type_of_x():
    arguments = given((1, 64, 8, 8), 4, torch.float16)
    y = run(arguments)[0]
    names = ("x", "gamma", "beta", "groups")
    rounded = group_norm_silu.reference(**{name: arguments[name] for name in names})
    twice = quantized(rounded, arguments["fp8_scale"], fp8_format="e4m3")[0]
    assert torch.equal(codes(y), codes(expected(arguments)[0]))
    assert 0 < (codes(y) != codes(twice)).sum() < 0.05 * y.numel()


def test_dropout_drops_the_elements_that_group_norm_silu_drops():
    for shape, groups in (((2, 32, 8, 8), 4), ((1, 48, 8, 8), 4), ((1, 36, 8, 16), 3)):
        arguments = given(shape, groups, torch.float32, act="none", p=0.5)
        arguments |= {"beta": arguments["beta"] + 100, "fp8_scale": torch.ones_like(arguments["fp8_scale"])}
        dropped = scaled_mask(arguments["x"], arguments["seed"], arguments["offset"], 0.5) == 0
        assert 0.2 < dropped.float().mean() < 0.8
        y, _, _, counts = run(arguments)
        assert torch.equal(y.float() == 0, dropped)
        assert counts.tolist() == [[0, 0, y.numel()]]


# --- state and operator --------------------------------------------------------------------------------------------


def test_one_row_is_raised_and_added_to_and_no_version_counts_up():
    arguments = given((2, 64, 4, 4), 4, torch.float32)
    scale, amax = torch.tensor([7.0, 136.0, 7.0], device=DEVICE), torch.zeros(3, device=DEVICE)
    counts = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE)
    arguments |= {"fp8_scale": scale, "amax": amax, "counts": counts, "row": 1}
    y, quads = OP(**arguments)
    once, peak = counts[1].clone(), amax[1].item()
    assert once[2] == y.numel() and peak == pytest.approx(quantized_peak(arguments), rel=1e-5)
    OP(**arguments)
    assert counts[1].tolist() == (2 * once).tolist() and amax[1] == peak
    amax[1] = 1000.0
    OP(**arguments)
    assert amax.tolist() == [0.0, 1000.0, 0.0] and not counts[::2].any()
    assert amax._version == 1 and counts._version == 0
    assert torch.equal(codes(from_quads(quads, beside=True)), codes(y))
    assert y.is_contiguous(memory_format=torch.channels_last)


def quantized_peak(arguments: dict[str, Any]) -> float:
    norm = {name: arguments[name] for name in ("x", "gamma", "beta", "groups")}
    return group_norm_silu.reference(**norm).abs().max().item()


def test_empty_batch():
    arguments = given((0, 64, 4, 4), 4, torch.float32, scale=True)
    for y, quads, amax, counts in ((*OP(**arguments), arguments["amax"], arguments["counts"]), expected(arguments)):
        assert y.shape == (0, 64, 4, 4) and quads.shape == (0, 3, 64, 3, 4, 4)
        assert amax.tolist() == [0.0] and counts.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("quads", [False, True])
def test_the_fake_kernel_returns_what_the_kernel_does(quads: bool):
    arguments = given((2, 64, 4, 4), 4, torch.float32, scale=True, p=0.25, quads=quads)
    outcome = torch.library.opcheck(OP.overload, (), arguments, test_utils=("test_faketensor",))
    assert set(outcome.values()) == {"SUCCESS"}
    assert torch.Tag.needs_exact_strides in OP.overload.tags and not OP.overload._schema.is_mutable


def test_cost_reads_x_once_and_writes_a_byte_each_and_the_quads():
    arguments = OP.samples[2].arguments(torch.float16, DEVICE)
    x = arguments["x"]
    norm = {
        name: value for name, value in arguments.items() if name not in ("fp8_scale", "amax", "counts", "row", "quads")
    }
    alone, work = group_norm_silu.cost(**norm), OP.cost(**arguments)
    assert work.read_bytes == alone.read_bytes + 4
    assert work.write_bytes == x.numel() + x.numel() * 4 + 4 + 24  # of 8 rows and columns: 16 x 16 bytes of quads
    assert OP.cost(**{**arguments, "quads": False}).write_bytes == x.numel() + 28
    with FlopCounterMode(display=False) as counter:
        OP(**arguments)
    assert counter.get_total_flops() == work.flops == alone.flops + 4 * x.numel()


def test_candidates_are_valid_and_tuned_whatever_the_row():
    for s in OP.samples:
        arguments = s.arguments(torch.bfloat16, "meta")
        call = Fp8Call(**arguments)
        configs = OP.launcher.candidates(target=H200, **arguments)
        assert all(config.is_valid(call, call.quads) for config in configs) and len(set(configs)) == len(configs)
        assert plan(target=H200, **arguments).grid == (call.x.shape[0] * call.groups // configs[0].groups,)
        # at 4x4 a quarter is a row, which must be a whole piece: the groups of a program decide its warps
        least = 3 if call.x.shape[2] == 4 else 6
        assert len(configs) >= (least if s.real_size else 1)
    arguments = OP.samples[1].arguments(torch.float32, "meta")
    keys = {OP.key(**{**arguments, **change}) for change in ({}, {"quads": False}, {"p": 0.5})}
    assert len(keys) == 3


def test_sixteen_warps_share_a_multiprocessor_on_every_map_of_the_unet():
    """So many registers: test_machine_code holds the compiler to them."""
    for c, side in UNET_MAPS:
        for quads, p in ((False, 0.0), (True, 0.0), (True, 0.1)):
            arguments = fp8_sample("", (128, c, side, side), 32, quads=quads, p=p).arguments(torch.bfloat16, "meta")
            call, config = Fp8Call(**arguments), OP.launcher.candidates(target=H200, **arguments)[0]
            registers = config.max_registers(call, quads)
            assert registers % 8 == 0 and registers >= config.registers(call, quads) + 48
            assert 65_536 // (32 * config.num_warps * registers) * config.num_warps >= 16
            assert config.rows(call) * config.slab(call).block_c(call) == 8 * 32 * config.num_warps
            # whole sectors are written, but where no slab of them can be held
            assert config.groups * call.group_channels % 32 == 0 or (c, side) == (384, 32)


def test_the_default_is_what_was_fastest_on_an_h200():
    """Of bf16 maps of 32 groups and their quads, batch 128; at 16x16 512 what 256 channels take at twice the images."""
    fastest = {
        (128, 32): Config(8, 8), (256, 32): Config(4, 8), (384, 32): Config(2, 8),
        (128, 16): Config(8, 4), (256, 16): Config(8, 4), (512, 16): Config(4, 4),
    }  # fmt: skip
    for (c, side), config in fastest.items():
        for p in (0.0, 0.1):
            arguments = fp8_sample("", (128, c, side, side), 32, p=p).arguments(torch.bfloat16, "meta")
            assert OP.launcher.candidates(target=H200, **arguments)[0] == config
    few = fp8_sample("", (8, 128, 32, 32), 32).arguments(torch.bfloat16, "meta")
    assert OP.launcher.candidates(target=H200, **few)[0] == Config(8, 8)


def test_fits_says_what_plan_takes():
    def x(c: int, h: int, w: int) -> Tensor:
        return torch.empty((2, c, h, w), device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)

    assert all(fits(x(c, side, side), 32, quads=quads) for c, side in UNET_MAPS for quads in (False, True))
    assert fits(x(128, 24, 32), 32, quads=True)
    # a quarter of ten rows of 32 is five pieces, 160 elements a thread; seven columns have no quads
    for map_, quads, alone in (
        (x(128, 40, 32), False, True),
        (x(128, 8, 7), False, True),
        (x(128, 128, 128), False, False),
    ):
        assert (fits(map_, 32, quads=True), fits(map_, 32, quads=False)) == (quads, alone)
    assert not fits(x(2**17, 1, 1), 1, quads=False)
    assert not fits(x(16, 4, 4), 4, quads=True)  # fewer than eight elements a thread


GOOD = given((2, 64, 4, 4), 4, torch.float32, p=0.5)
WIDE = given((1, 16, 4, 4), 4, torch.float32)


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"groups": 3}, ValueError, "group_norm_silu_fp8: groups must divide the 64 channels of x, got 3"),
        ({"x": GOOD["x"].contiguous()}, ValueError, "group_norm_silu_fp8: x must be channels_last"),
        ({"x": GOOD["x"].double()}, TypeError, "group_norm_silu_fp8: x must be one of fp32, fp16, bf16"),
        ({"seed": None}, ValueError, "group_norm_silu_fp8: p of 0.5 needs seed and offset"),
        ({"fp8_scale": None}, ValueError, "group_norm_silu_fp8: fp8_scale, amax and counts must be given"),
        ({"row": 1}, ValueError, "must be one of the 1 rows of scale, got 1"),
        ({"amax": GOOD["counts"]}, TypeError, "amax must be torch.float32, got torch.int64"),
        ({"counts": GOOD["counts"][0]}, ValueError, r"counts must be dense of shape \(1, 3\), got \(3,\)"),
        ({"config": Config(3, 1)}, ValueError, r"Config\(groups=3, num_warps=1\) is not valid for 4 groups of \(2, 64"),
        ({"config": Config(2, 1)}, ValueError, "is not valid"),
        ({"target": typical_target("sm_80")}, ValueError, "sm_80 has no conversion to FP8"),
        (WIDE, ValueError, "holds a group of 4 channels of 16 pixels and quarters of it in pieces of whole rows"),
        (given((1, 64, 6, 8), 4, torch.float32), ValueError, "quads need a multiple of 4 rows, got 6"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=words):
        plan(**{**GOOD, "target": H200, **changed})


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sample", OP.samples, ids=lambda s: s.why)
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples(sample: Any, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    y, *others = run(arguments)
    assert_alike((y, *others), expected(arguments), sample.why)
    exact_y, eager = (OP.reference(**a) for a in (to_float64(arguments), arguments))
    # a code is worth no more than the rounding of e4m3
    verdict = compare(y.float(), exact_y, eager.float(), error_factor=OP.error_factor, eps=2.0**-8)
    assert verdict.passed, verdict.reason


@pytest.mark.gpu
def test_every_candidate_is_right():
    arguments = next(s for s in OP.samples if "scale, shift and dropout" in s.why and s.real_size).arguments(
        torch.bfloat16, DEVICE
    )
    right = expected(arguments)
    for config in OP.launcher.candidates(**arguments):
        assert_alike(run(arguments, config), right, str(config))


@pytest.mark.gpu
def test_a_captured_call_reads_the_scale_anew():
    arguments = given((4, 64, 8, 8), 8, torch.bfloat16)
    captured = capture(lambda: OP(**arguments), (), warmup=1)
    for value in (1.0, 300.0):
        arguments["fp8_scale"].fill_(value)
        arguments["amax"].zero_()
        arguments["counts"].zero_()
        y, quads = captured.replay()
        state = arguments["amax"].clone(), arguments["counts"].clone()
        assert_alike((y, quads, *state), expected({**arguments, "amax": 0 * state[0], "counts": 0 * state[1]}))
