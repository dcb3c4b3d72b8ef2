"""Convolution of FP8 operands by mma.sync: its numbers in the interpreter, its machine code for sm_89 and sm_120."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ridgeline import tuned
from ridgeline.kernels import conv2d_fp8
from ridgeline.kernels._conv2d_pass import Config
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, Target, typical_target
from ridgeline.kernels.conv2d_fp8 import GatherConfig
from ridgeline.numerics import compare, to_float64
from ridgeline.sass import SassReport, compile_many, inspect

E4M3, E5M2 = conv2d_fp8.OPERANDS
# a GPU of another architecture that has FP8 runs the launch too
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADA, BLACKWELL = typical_target("sm_89"), typical_target("sm_120")
OP = conv2d_fp8.OP


def launch_of(arguments: dict[str, Any], config: GatherConfig | None = None, target: Target = ADA) -> Launch:
    return conv2d_fp8.plan(config=config, target=target, **arguments)


def right(launch: Launch, arguments: dict[str, Any]) -> None:
    launch.output.fill_(float("nan"))
    launch.run()
    assert launch.output.is_contiguous(memory_format=torch.channels_last)
    # conv2d's own sums of FP8 values in fp32: TF32 would round them
    with torch.backends.cudnn.flags(allow_tf32=False):
        eager = OP.reference(**arguments)
    verdict = compare(launch.output, OP.reference(**to_float64(arguments)), eager, eps=conv2d_fp8.eps(**arguments))
    assert verdict.passed, verdict.reason


def sample(
    x: tuple[int, int, int, int], weight: tuple[int, int, int], *, bias: bool = True, residual: bool = False
) -> conv2d_fp8.Sample:
    return conv2d_fp8.fp8_sample("", x, weight, bias=bias, residual=residual)


@pytest.mark.parametrize("seed", range(24))
def test_random_sizes(seed: int):
    rng = random.Random(seed)
    x = (rng.choice([1, 2, 3]), 16 * rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9))
    weight = (8 * rng.randint(1, 25), *rng.choice([(1, 1), (3, 3), (1, 5), (3, 1)]))
    made = sample(x, weight, bias=seed % 3 > 0, residual=seed % 4 in (1, 2))
    arguments = made.arguments((E4M3, E5M2)[seed % 2], DEVICE)
    if seed % 4 == 0:
        # the least and the most that the filter takes
        arguments["padding"] = rng.choice([(0, 0), (weight[1] - 1, weight[2] - 1)])
        if any(size + 2 * p < r for size, p, r in zip(x[2:], arguments["padding"], weight[1:], strict=True)):
            arguments["padding"] = (weight[1] - 1, weight[2] - 1)
    config = rng.choice(conv2d_fp8.candidates(target=ADA, **arguments))
    assert isinstance(config, GatherConfig)
    right(launch_of(arguments, config), arguments)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("one", [s for s in OP.samples if not s.real_size], ids=lambda s: s.why)
def test_samples(one: conv2d_fp8.Sample, dtype: torch.dtype):
    arguments = one.arguments(dtype, DEVICE)
    right(launch_of(arguments), arguments)


def test_a_slice_of_channels_is_read_at_its_pitch():
    arguments = sample((2, 96, 4, 5), (24, 3, 3)).arguments(E5M2, DEVICE)
    arguments["x"] = arguments["x"][:, 32:80]
    arguments["weight"] = arguments["weight"][:, :48].clone(memory_format=torch.channels_last)
    launch = launch_of(arguments)
    assert launch.constants["X_PITCH"] == 96
    right(launch, arguments)


def test_a_slice_of_channels_is_added_at_its_pitch():
    arguments = sample((2, 48, 4, 5), (24, 3, 3)).arguments(E5M2, DEVICE)
    arguments["residual"] = random_nhwc((2, 64, 4, 5), torch.bfloat16, DEVICE, seed=4)[:, 8:32]
    launch = launch_of(arguments)
    assert launch.constants["RESIDUAL_PITCH"] == 64
    right(launch, arguments)


def test_offsets_beyond_32_bits_are_wide_and_give_the_same():
    for images, wide in ((8191, False), (8192, True)):
        arguments = sample((images, 256, 32, 32), (16, 1, 1)).arguments(E4M3, "meta")
        assert launch_of(arguments).constants["WIDE"] is wide
    # y may be the larger one
    arguments = sample((8192, 16, 32, 32), (256, 1, 1)).arguments(E4M3, "meta")
    assert launch_of(arguments).constants["WIDE"] is True
    # or what a slice that is added lies in
    arguments = sample((8192, 16, 32, 32), (16, 1, 1)).arguments(E4M3, "meta")
    arguments["residual"] = random_nhwc((8192, 256, 32, 32), torch.bfloat16, "meta", seed=0)[:, :16]
    assert launch_of(arguments).constants["WIDE"] is True
    arguments = sample((1, 32, 4, 3), (40, 3, 3)).arguments(E4M3, DEVICE)
    narrow = launch_of(arguments)
    right(replace(narrow, constants={**narrow.constants, "WIDE": True}), arguments)


@pytest.mark.parametrize("target", [ADA, BLACKWELL], ids=lambda target: target.arch)
@pytest.mark.parametrize("x", [(128, 256, 32, 32), (128, 256, 8, 8), (1, 16, 4, 4)], ids=str)
def test_the_default_keeps_the_gpu_busy(x: tuple[int, int, int, int], target: Target):
    for filters in (16, 128, 256):
        arguments = sample(x, (filters, 3, 3)).arguments(E4M3, "meta")
        configs = conv2d_fp8.candidates(target=target, **arguments)
        launches = [launch_of(arguments, c, target) for c in configs if isinstance(c, GatherConfig)]
        assert len(launches) == len(configs) >= 2 and len(set(configs)) == len(configs)
        assert launch_of(arguments, target=target).constants == launches[0].constants
        busy = [min(launch.grid[0], 2 * target.sm_count) for launch in launches]
        assert busy[0] == max(busy)
        assert all(isinstance(c, GatherConfig) and c.channels <= max(32, filters) for c in configs)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_other_gpus_are_refused(arch: str):
    arguments = OP.samples[0].arguments(E4M3, "meta")
    assert conv2d_fp8.candidates(target=typical_target(arch), **arguments) == ()
    with pytest.raises(ValueError, match=rf"conv2d_fp8: None is not valid for .* on {arch}"):
        launch_of(arguments, target=typical_target(arch))


@pytest.mark.parametrize(
    ("config", "arch"),
    [
        (GatherConfig(128, 128, 64, 4, 4), "sm_90"),
        (Config(128, 128, 4, 4), "sm_89"),
        (GatherConfig(128, 256, 64, 2, 4), "sm_89"),  # 256 sums a thread
        (GatherConfig(128, 128, 128, 4, 8), "sm_120"),  # 128 KiB
        (GatherConfig(128, 128, 32, 4, 4), "sm_89"),
        (GatherConfig(128, 48, 64, 4, 4), "sm_89"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(config: Any, arch: str):
    arguments = OP.samples[0].arguments(E4M3, "meta")
    with pytest.raises(ValueError, match=rf"conv2d_fp8: {type(config).__name__}\(.* is not valid for .* on {arch}"):
        launch_of(arguments, config, typical_target(arch))


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
def test_a_tuned_config_is_used_unless_it_is_of_another_kind(arch: str, monkeypatch: pytest.MonkeyPatch):
    target, places = typical_target(arch), {"x_row": 0, "weight_row": 1, "padding": (1, 1)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    with FakeTensorMode(), torch.device("cuda:0"):
        maps = [torch.empty(shape).to(memory_format=torch.channels_last) for shape in ((2, 64, 8, 8), (128, 64, 3, 3))]
        arguments = {"x": maps[0].to(E4M3), "weight": maps[1].to(E4M3), "inverse": torch.empty(2), **places}
        default, *_, last = conv2d_fp8.candidates(target=target, **arguments)
        for tuned_to, used in ((last, last), (Config(64, 64, 8, 4), default)):
            row = SimpleNamespace(config=asdict(tuned_to))
            monkeypatch.setattr(tuned, "load", lambda *_, row=row: SimpleNamespace(row=lambda *_: row))
            launch, expected = (conv2d_fp8.plan(target=target, config=c, **arguments) for c in (None, used))
            assert (launch.constants, launch.num_warps) == (expected.constants, expected.num_warps)


# --- machine code ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    target: Target
    dtype: torch.dtype  # of x
    config: GatherConfig
    x: tuple[int, int, int, int]
    weight: tuple[int, int, int]
    bias: bool

    def launch(self) -> Launch:
        arguments = sample(self.x, self.weight, bias=self.bias).arguments(self.dtype, "meta")
        return launch_of(arguments, self.config, self.target)


# whole blocks of a tap's channels, several taps a step, and one tap
CASES = (
    *(Case(t, E4M3, GatherConfig(128, 128, 64, 4, 4), (128, 128, 32, 32), (128, 3, 3), True) for t in (ADA, BLACKWELL)),
    *(Case(t, E5M2, GatherConfig(128, 128, 128, 3, 8), (8, 256, 16, 16), (256, 3, 3), False) for t in (ADA, BLACKWELL)),
    Case(ADA, E4M3, GatherConfig(256, 64, 64, 4, 8), (128, 144, 16, 16), (72, 3, 3), True),
    Case(BLACKWELL, E5M2, GatherConfig(64, 64, 128, 3, 4), (128, 384, 32, 32), (128, 1, 1), False),
)
TYPES = {E4M3: "E4M3", E5M2: "E5M2"}


@pytest.fixture(scope="module")
def reports() -> dict[Case, SassReport]:
    binaries = compile_many([case.launch().source(case.target.arch) for case in CASES])
    return dict(zip(CASES, map(inspect, binaries), strict=True))


def test_both_operands_go_from_asynchronous_copies_to_fp8_instructions(reports: dict[Case, SassReport]):
    for case, report in reports.items():
        # none of fp16, and sums in fp32; one step, not unrolled
        config = case.config
        multiplied = config.pixels * config.channels * config.step // (16 * 8 * 32 * config.num_warps)
        assert report.matrix_instructions == {f"QMMA.16832.F32.{TYPES[case.dtype]}.E4M3": multiplied}, case
        copies = {name for name in report.instructions if name.startswith("LDGSTS")}
        assert copies == {"LDGSTS.E.BYPASS.128"} and report.count("LDSM") > 0, case
        # one byte permuted would mean that an operand is transposed in registers
        assert report.permutes == 0, case
        assert {name for name in report.instructions if name.startswith("STG")} == {"STG.E.128"}, case
        # two scales; all else that is loaded into registers is bias
        assert (report.count("LDG") > 2) is case.bias, case


def test_nothing_spills_and_shared_memory_suffices(reports: dict[Case, SassReport]):
    assert {case: report.problems for case, report in reports.items() if report.problems} == {}
    for case, report in reports.items():
        # what `is_valid` allows for
        bound = case.config.stages * (case.config.pixels + case.config.channels) * case.config.step
        assert report.shared_bytes <= bound <= case.target.shared_bytes, case
