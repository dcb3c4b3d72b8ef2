"""Convolutions of training that add a map: numbers and order on sm_90 in plain Python, machine code, refusals."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_interpreter
from gluon_launches import FORMAT, SM_90
from ridgeline import sass
from ridgeline.kernels import Op, conv2d_dgrad, conv2d_fp8, conv2d_fprop
from ridgeline.kernels._conv2d_pass import Config
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, Target, typical_target
from ridgeline.kernels.conv2d_fp8 import GatherConfig
from ridgeline.numerics import compare, to_float64
from ridgeline.sass import SassReport

OPS = (conv2d_fprop.OP, conv2d_dgrad.OP, conv2d_fp8.OP)
SAMPLE = {
    conv2d_fprop.OP: conv2d_fprop.fprop_sample,
    conv2d_dgrad.OP: conv2d_dgrad.dgrad_sample,
    conv2d_fp8.OP: conv2d_fp8.fp8_sample,
}
ALONE = replace(SM_90, sm_count=1)  # one program takes every tile
NAMES = [op.name for op in OPS]


def arguments_of(op: Op, operand: tuple[int, int, int, int], channels: int, **choices: Any) -> dict[str, Any]:
    """Of a 3x3 convolution of `operand` to `channels`, with a residual."""
    dtype = FORMAT.get(op, torch.float16)
    return SAMPLE[op]("", operand, (channels, 3, 3), residual=True, **choices).arguments(dtype, "cpu")


def launch_of(op: Op, arguments: dict[str, Any], config: Config, target: Target = ALONE) -> Launch:
    launch = op.launcher.plan(config=config, target=target, **arguments)
    launch.output.fill_(float("nan"))
    return launch


def is_right(op: Op, launch: Launch, arguments: dict[str, Any]) -> bool:
    exact, eager = (op.reference(**given) for given in (to_float64(arguments), arguments))
    return compare(launch.output, exact, eager, error_factor=op.error_factor, eps=1e-3).passed


# --- tiles, one after another -----------------------------------------------------------------------------------------

TILES = {
    "a tile in one piece": (Config(64, 32, 4, 4), (2, 32, 9, 9), 48),
    "boxes of several images": (Config(64, 32, 2, 4), (9, 16, 3, 3), 40),
    "stored in pieces without": (Config(128, 256, 4, 8), (1, 128, 17, 9), 264),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_every_tile_gets_its_part_of_the_map(op: Op, name: str):
    config, operand, channels = TILES[name]
    arguments = arguments_of(op, operand, channels)
    launch = launch_of(op, arguments, config)
    gluon_interpreter.run(launch)
    assert is_right(op, launch, arguments)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_a_slice_of_channels_is_added(op: Op):
    arguments = arguments_of(op, (1, 16, 9, 9), 24)
    like = arguments["residual"]
    arguments["residual"] = random_nhwc((1, 48, 9, 9), like.dtype, "cpu", seed=5)[:, 16:40]
    launch = launch_of(op, arguments, Config(64, 32, 2, 4))
    gluon_interpreter.run(launch)
    assert is_right(op, launch, arguments)


def without(text: str, of: str) -> gluon_interpreter.Edit:
    """An edit that takes the line that begins with `text` out of the function `of`."""

    def edit(source: str) -> str:
        start = source.index(f"def {of}(")
        end = source.index("@gluon.jit", start)
        assert source.count(text, start, end) == 1
        return source[:start] + source[start:end].replace(text, f"pass  # {text}") + source[end:]

    return edit


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ("mbarrier.wait(added, ", "_multiply"),
        ("mbarrier.wait(made, ", "_exchange"),
        ("tma.store_wait(0)", "_exchange"),
        ("mbarrier.arrive(made, ", "_multiply"),
        ("mbarrier.expect(added, ", "_exchange"),
    ],
)
def test_no_step_of_the_exchange_can_be_left_out(line: str, function: str, monkeypatch: pytest.MonkeyPatch):
    """A wait gives wrong numbers or a barrier misused, a signal a deadlock."""
    monkeypatch.setattr(gluon_interpreter, "DEADLOCK_S", 0.5)
    arguments = arguments_of(conv2d_fprop.OP, (2, 32, 9, 9), 48)
    launch = launch_of(conv2d_fprop.OP, arguments, Config(64, 32, 4, 4))
    try:
        gluon_interpreter.run(launch, edit=without(line, function))
    except AssertionError:
        return
    assert not is_right(conv2d_fprop.OP, launch, arguments)


def test_the_last_stage_makes_room_for_a_whole_tile():
    for op in OPS:
        arguments = {**arguments_of(op, (1, 128, 9, 9), 264)}
        plain = {**arguments, "residual": None}
        for config, stages in (
            (Config(128, 128, 4, 4), 4),
            (Config(128, 256, 4, 8), 3),
            (Config(256, 128, 4, 8), 3),
            (Config(256, 128, 3, 8), 3),
        ):
            launch, before = (launch_of(op, given, config) for given in (arguments, plain))
            assert (launch.constants["STAGES"], launch.constants["PIECES"]) == (stages, 1)
            assert before.constants["STAGES"] == config.stages
            assert launch.grid == before.grid and launch.num_warps == before.num_warps


# --- calls ------------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_sum():
    arguments = conv2d_fprop.fprop_sample("", (2, 16, 5, 4), (24, 3, 3), residual=True).arguments(torch.float64, "cpu")
    names = ("x", "weight", "bias", "residual")
    ours = [arguments[name].double().clone().requires_grad_() for name in names]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    y = conv2d_fprop.OP(*ours, padding=[1, 1])
    x, weight, bias, residual = theirs
    expected = torch.nn.functional.conv2d(x, weight, bias, padding=1) + residual
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_the_map_is_read_once_more(op: Op):
    arguments = arguments_of(op, (2, 32, 9, 9), 48)
    added = op.cost(**arguments).bytes - op.cost(**{**arguments, "residual": None}).bytes
    assert added == arguments["residual"].nbytes


def in_nhwc(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.float(), r"residual must be torch\.\w+, got torch.float32"),
        (lambda r: in_nhwc(r[:, :24]), r"residual must have the shape \(1, 48, 9, 9\) of the result"),
        (lambda r: r.contiguous(), "residual must be channels_last, or a slice of it that starts at a multiple of 8"),
        (lambda r: in_nhwc(torch.cat([r, r], 1))[:, 4:52], "residual must be channels_last, or a slice of it that"),
    ],
)
def test_another_map_is_refused(op: Op, change: Any, message: str):
    arguments = arguments_of(op, (1, 32, 9, 9), 48)
    arguments["residual"] = change(arguments["residual"])
    with pytest.raises((ValueError, TypeError), match=f"{op.name}: {message}"):
        op.launcher.plan(target=SM_90, **arguments)


@pytest.mark.parametrize("op", OPS[:2], ids=NAMES[:2])
def test_stride_2_is_refused(op: Op):
    arguments = arguments_of(op, (1, 32, 8, 8), 48, stride=2)
    arguments["residual"] = op.reference(**{**arguments, "residual": None})
    with pytest.raises(ValueError, match=f"{op.name}: a residual is added with stride 1 alone, got 2"):
        op.launcher.plan(target=SM_90, **arguments)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_the_config_is_that_without(op: Op, monkeypatch: pytest.MonkeyPatch):
    keys = []

    def tuned(asked: Op, _kind: type, _is_valid: Any, **arguments: Any) -> Config:
        keys.append(asked.key(**arguments))
        return Config(64, 64, 8, 4)

    monkeypatch.setattr(inspect.getmodule(op.launcher.plan), "tuned_config", tuned)
    arguments = arguments_of(op, (2, 64, 9, 9), 128)
    launches = [op.launcher.plan(target=SM_90, **{**arguments, **change}) for change in ({}, {"residual": None})]
    assert keys == [op.key(**{**arguments, "residual": None})] * 2
    assert launches[0].constants == launches[1].constants
    assert launches[0].constants["STAGES"] == 8


# --- machine code -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    op: Op
    dtype: torch.dtype
    config: Config | GatherConfig
    arch: str
    channels: int = 128
    residual: bool = True

    def launch(self) -> Launch:
        sample = SAMPLE[self.op]("", (128, 128, 32, 32), (self.channels, 3, 3), residual=self.residual)
        target = typical_target(self.arch)
        return self.op.launcher.plan(config=self.config, target=target, **sample.arguments(self.dtype, "meta"))


BF16, E4M3, E5M2 = torch.bfloat16, *conv2d_fp8.OPERANDS
WGMMA = (
    Case(conv2d_dgrad.OP, BF16, Config(256, 128, 4, 8), "sm_90"),
    Case(conv2d_fp8.OP, E4M3, Config(128, 128, 4, 4), "sm_90"),
    Case(conv2d_fp8.OP, E5M2, Config(128, 256, 4, 8), "sm_90", 256),
)
GATHERING = (
    Case(conv2d_fp8.OP, E4M3, GatherConfig(128, 128, 64, 4, 4), "sm_89"),
    Case(conv2d_fp8.OP, E5M2, GatherConfig(128, 128, 128, 3, 8), "sm_120"),
)


@pytest.fixture(scope="module")
def reports() -> dict[Case, SassReport]:
    cases = [replace(case, residual=residual) for case in (*WGMMA, *GATHERING) for residual in (False, True)]
    binaries = sass.compile_many([case.launch().source(case.arch) for case in cases])
    return dict(zip(cases, map(sass.inspect, binaries), strict=True))


def test_nothing_spills(reports: dict[Case, SassReport]):
    assert {case: report.problems for case, report in reports.items() if report.problems} == {}


@pytest.mark.parametrize("case", WGMMA, ids=lambda case: f"{case.op.name} {case.config}")
def test_the_map_comes_by_the_copy_engine(case: Case, reports: dict[Case, SassReport]):
    report, plain = reports[case], reports[replace(case, residual=False)]
    # the warp that exchanges takes the room that a copying one leaves
    assert (report.num_warps, report.registers) == (plain.num_warps, plain.registers)
    assert report.matrix_instructions == plain.matrix_instructions
    # copies are of 64 channels at most
    copies = case.config.channels // 64
    assert report.count("UTMALDG") - plain.count("UTMALDG") == report.count("UTMASTG") == copies
    assert report.count("LDSM") == report.count("STSM") > 0 == plain.count("LDSM")
    assert report.count("LDG") == plain.count("LDG"), "all else that is loaded into registers is scales and bias"


@pytest.mark.parametrize("case", GATHERING, ids=lambda case: case.arch)
def test_the_map_is_loaded_by_16_bytes(case: Case, reports: dict[Case, SassReport]):
    report, plain = reports[case], reports[replace(case, residual=False)]
    config = case.config
    loads = config.pixels * config.channels // (8 * 32 * config.num_warps)
    assert report.instructions["LDG.E.128"] - plain.instructions.get("LDG.E.128", 0) == loads
    assert report.shared_bytes == plain.shared_bytes
    assert {name for name in report.instructions if name.startswith("STG")} == {"STG.E.128"}


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operand", "channels"), [((128, 128, 32, 32), 128), ((128, 256, 16, 16), 256), ((3, 80, 17, 13), 72)]
)
@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_every_candidate_is_right(op: Op, operand: tuple[int, int, int, int], channels: int):
    sample = SAMPLE[op]("", operand, (channels, 3, 3), residual=True)
    arguments = sample.arguments(FORMAT.get(op, torch.bfloat16), "cuda")
    exact, eps = op.reference(**to_float64(arguments)), op.eps(**arguments) if op.eps else None
    for config in op.launcher.candidates(**arguments):
        launch = op.launcher.plan(config=config, **arguments)
        launch.output.fill_(float("nan"))
        for _ in range(3):
            launch.run()
        with torch.backends.cudnn.flags(allow_tf32=False):
            verdict = compare(launch.output, exact, op.reference(**arguments), error_factor=op.error_factor, eps=eps)
        assert verdict.passed, f"{config}: {verdict.reason}"
