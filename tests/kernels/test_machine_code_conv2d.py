"""What the convolutions of training become on sm_90.

As in test_machine_code.py one child process compiles all: starting it takes longer than most of the compilations.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from ridgeline.kernels import conv2d_dgrad, conv2d_fp8, conv2d_fprop, conv2d_wgrad, conv2d_wgrad_fp8
from ridgeline.kernels._conv2d_pass import Config, WgradConfig
from ridgeline.kernels._op import Launch, Op, typical_target
from ridgeline.sass import SassReport, compile_many, inspect


@dataclass(frozen=True)
class Case:
    """The first kernel of one of an op's samples, with a config."""

    op: Op
    config: Config | WgradConfig | conv2d_wgrad_fp8.Config
    dtype: torch.dtype = torch.bfloat16
    sample: int = 0

    def launch(self) -> Launch:
        arguments = self.op.samples[self.sample].arguments(self.dtype, "meta")
        return self.op.launcher.plan(config=self.config, target=typical_target("sm_90"), **arguments).parts[0]


# whole and in two pieces a tile
FPROP = (Case(conv2d_fprop.OP, Config(128, 128, 4, 4)), Case(conv2d_fprop.OP, Config(128, 256, 4, 8)))
DGRAD = (Case(conv2d_dgrad.OP, Config(64, 64, 8, 4)), Case(conv2d_dgrad.OP, Config(256, 128, 4, 8)))
# one tap and two
WGRAD = (
    Case(conv2d_wgrad.OP, WgradConfig(64, 32, 1, 8, 4, 1)),
    Case(conv2d_wgrad.OP, WgradConfig(128, 128, 2, 4, 8, 1)),
)
# a filter of one tap and one of nine
BY_2 = (
    Case(conv2d_fprop.OP, Config(128, 128, 4, 4), sample=4),
    Case(conv2d_fprop.OP, Config(256, 128, 4, 8), sample=5),
    Case(conv2d_dgrad.OP, Config(128, 256, 4, 8), sample=4),
    Case(conv2d_dgrad.OP, Config(128, 128, 4, 4), sample=5),
    Case(conv2d_wgrad.OP, WgradConfig(256, 128, 1, 4, 8, 1), sample=4),
    Case(conv2d_wgrad.OP, WgradConfig(128, 128, 2, 4, 8, 1), sample=5),
)
FP8 = (
    Case(conv2d_fp8.OP, Config(128, 128, 4, 4), torch.float8_e4m3fn),
    Case(conv2d_fp8.OP, Config(256, 64, 4, 8), torch.float8_e5m2),
)
# rows of quads of 128, 64, 32 and 16 bytes; one row of taps
WGRAD_FP8 = tuple(
    Case(conv2d_wgrad_fp8.OP, conv2d_wgrad_fp8.Config(128, 64, 6, 8, 1, held), torch.float8_e5m2, sample)
    for sample in (0, 2, 3, 4, 5)
    for held in (False, True)
)
# one group of warps that multiplies
WGRAD_FP8 += (Case(conv2d_wgrad_fp8.OP, conv2d_wgrad_fp8.Config(64, 64, 8, 4, 1, True), torch.float8_e5m2),)
INSTRUCTIONS = {torch.bfloat16: ("HGMMA", "F32.BF16"), torch.float8_e4m3fn: ("QGMMA", "F32.E4M3.E4M3")}
INSTRUCTIONS[torch.float8_e5m2] = ("QGMMA", "F32.E5M2.E4M3")


@pytest.fixture(scope="module")
def reports() -> dict[Case, SassReport]:
    cases = (*FPROP, *DGRAD, *WGRAD, *BY_2, *FP8, *WGRAD_FP8)
    binaries = compile_many([case.launch().source("sm_90") for case in cases])
    return dict(zip(cases, map(inspect, binaries), strict=True))


def test_tiles_are_of_every_kind():
    tiles = {(case.launch().constants["DGRAD"], case.launch().constants["PIECES"]) for case in (*FPROP, *DGRAD)}
    assert tiles == set(itertools.product((False, True), (1, 2)))
    assert [case.launch().constants["TAPS"] for case in WGRAD] == [1, 2]
    assert [case.launch().constants["STRIDE"] for case in BY_2] == [2] * 6
    assert [case.launch().constants["R"] for case in BY_2] == [1, 3] * 3
    assert [case.launch().constants["BOX_W"] for case in WGRAD_FP8[::2]] == [32, 16, 8, 4, 32, 32]
    configs = [case.config for case in WGRAD_FP8 if isinstance(case.config, conv2d_wgrad_fp8.Config)]
    assert {config.groups for config in configs} == {1, 2}
    assert {case.launch().num_warps for case in WGRAD_FP8} == {4}, "of the first group"


def test_nothing_spills(reports: dict[Case, SassReport]):
    assert {case: report.problems for case, report in reports.items() if report.problems} == {}


def test_operands_go_from_the_copy_engine_to_wgmma(reports: dict[Case, SassReport]):
    for case, report in reports.items():
        launch, (name, types) = case.launch(), INSTRUCTIONS[case.dtype]
        (instruction,) = report.matrix_instructions
        assert instruction.startswith(f"{name}.") and instruction.endswith(f".{types}"), case
        # of those that multiply a launch has the first four, and one warp copies, which takes the room of four
        groups = case.config.groups if isinstance(case.config, conv2d_wgrad_fp8.Config) else 1
        assert report.num_warps == launch.num_warps * groups + 4, case
        assert report.count("UTMALDG") >= 2, case
        # one byte permuted would mean that an operand is transposed in registers
        assert report.permutes == 0 and report.count("LDGSTS") == 0, case
        # of dy that is held 64 rows of 128 bytes for each group of warps
        assert report.count("LDSM") == 4 * groups * launch.constants.get("HELD", False), case
        # what is loaded otherwise is bias and scale
        assert report.count("LDG") == 0 or launch.arguments.get("bias_ptr") is not None, case
        # each piece of a tile is stored by one copy
        assert report.count("UTMASTG") == launch.constants.get("PIECES", 0), case
