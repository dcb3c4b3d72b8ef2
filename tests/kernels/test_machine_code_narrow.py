"""What the kernels of convolutions with few channels or filters become on three architectures."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels import Op, conv2d_fprop, conv2d_wgrad
from ridgeline.kernels._conv2d_narrow_call import NarrowConfig
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.sass import SassReport, compile_many, inspect

ARCHITECTURES = ("sm_89", "sm_90", "sm_120")
COLUMNS = 27  # nine taps of three channels
# the first and the last layer of the DDPM network
KERNELS = {
    "expand": (conv2d_fprop.OP, "3->128", NarrowConfig(128, 64, 4, 1, 1)),
    "contract": (conv2d_fprop.OP, "128->3", NarrowConfig(256, 32, 8, 2, 1)),
    "reduce": (conv2d_wgrad.OP, "3->128", NarrowConfig(128, 128, 4, 2, 2)),
}


def launch_of(op: Op, why: str, config: NarrowConfig, arch: str) -> Launch:
    sample = next(sample for sample in op.samples if f"{why}, batch 128" in sample.why)
    arguments = sample.arguments(torch.bfloat16, "meta")
    return op.launcher.plan(config=config, target=typical_target(arch), **arguments).parts[0]


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], SassReport]:
    cases = [(name, arch) for name in KERNELS for arch in ARCHITECTURES]
    binaries = compile_many([launch_of(*KERNELS[name], arch).source(arch) for name, arch in cases])
    return dict(zip(cases, map(inspect, binaries), strict=True))


def test_nothing_spills(reports):
    assert {case: report.problems for case, report in reports.items() if report.problems} == {}


def test_matrix_units_multiply(reports):
    for (name, arch), report in reports.items():
        (instruction,) = report.matrix_instructions
        assert instruction.split(".")[0] == ("HGMMA" if arch == "sm_90" else "HMMA"), (name, arch)


def test_the_wide_map_moves_by_16_bytes(reports):
    for (name, arch), report in reports.items():
        stores = {m: n for m, n in report.instructions.items() if m.startswith("STG")}
        if name == "expand":
            assert set(stores) == {"STG.E.128"}, (name, arch)
        else:
            copies = {m: n for m, n in report.instructions.items() if m.startswith("LDGSTS")}
            assert set(copies) == {"LDGSTS.E.BYPASS.128"}, (name, arch)


def test_a_thread_gathers_the_columns_of_its_pixels(reports):
    """None that fills up a power of two, and no sum of an address for each."""
    for (name, arch), report in reports.items():
        if name != "contract":
            gathered = report.instructions["LDG.E.U16"]
            # and of the weight, of which no two elements of a filter share a thread
            weights = 32 * 64 // 128 if name == "expand" else 0
            assert COLUMNS <= gathered <= COLUMNS + weights, (name, arch)
