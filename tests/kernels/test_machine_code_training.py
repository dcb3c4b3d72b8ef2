"""What kernels of training become on GPUs that are not here.

As in test_machine_code.py one child process compiles all: starting it takes longer than most of the compilations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ridgeline.kernels import attention_packed, attention_packed_backward, quantize_fp8
from ridgeline.kernels._op import Launch, Op, typical_target
from ridgeline.sass import SassReport, compile_many, inspect


@dataclass(frozen=True)
class Case:
    """An op's kernel for the sample of real size whose reason contains `why`, with some arguments changed."""

    op: Op
    why: str
    arch: str
    dtype: torch.dtype = torch.bfloat16
    changed: tuple[tuple[str, Any], ...] = ()

    def launch(self) -> Launch:
        sample = next(s for s in self.op.samples if s.real_size and self.why in s.why)
        arguments = {**sample.arguments(self.dtype, "meta"), **dict(self.changed)}
        return self.op.launcher.plan(target=typical_target(self.arch), **arguments)


# forward and backward by wgmma, and the backward that takes the most registers where there is none, also with sums
ATTENTION = (
    Case(attention_packed.OP, "256 tokens", "sm_90"),
    Case(attention_packed_backward.OP, "256 tokens", "sm_90"),
    Case(attention_packed_backward.OP, "256 tokens", "sm_89"),
    Case(attention_packed.OP, "256 tokens", "sm_120"),
    *(Case(attention_packed_backward.SUMMED_OP, "256 tokens", arch) for arch in ("sm_90", "sm_89", "sm_120")),
)
QUANTIZE = (
    Case(quantize_fp8.OP, "32x32 128, no quads", "sm_90"),
    Case(quantize_fp8.OP, "32x32 128, no quads", "sm_120", torch.float32, (("fp8_format", "e5m2"),)),
    Case(quantize_fp8.OP, "32x32 128, batch 128", "sm_90"),
    Case(quantize_fp8.OP, "32x32 128, batch 128", "sm_89"),
    Case(quantize_fp8.OP, "32x32 128, batch 128", "sm_90", changed=(("fp8_format", "e5m2"),)),
    Case(quantize_fp8.OP, "32x32 128, batch 128", "sm_89", changed=(("fp8_format", "e5m2"),)),
)


@pytest.fixture(scope="module")
def reports() -> dict[Case, SassReport]:
    cases = (*ATTENTION, *QUANTIZE)
    binaries = compile_many([case.launch().source(case.arch) for case in cases])
    return dict(zip(cases, map(inspect, binaries), strict=True))


def test_nothing_spills(reports: dict[Case, SassReport]):
    assert {case: report.problems for case, report in reports.items() if report.problems} == {}


def test_attention(reports: dict[Case, SassReport]):
    """All products on tensor cores, rows stored 16 bytes an access, keys loaded while others work."""
    for case in ATTENTION:
        report, launch = reports[case], case.launch()
        matrix = "HGMMA" if case.arch == "sm_90" else "HMMA"
        assert {name.split(".")[0] for name in report.matrix_instructions} == {matrix}, case
        constants: dict[str, Any] = dict(launch.constants)
        stored = constants["BLOCK_Q"] * 64 // (32 * launch.num_warps * 8)
        assert report.instructions["STG.E.128"] >= stored, case
        narrow = [name for name in report.instructions if name in ("LDG.E.U16", "STG.E.U16", "STG.E.64")]
        assert not narrow, (case, narrow)
        assert launch.num_stages > 1 and report.async_copies > 0, case


def test_quantize_fp8(reports: dict[Case, SassReport]):
    """Conversions of pairs that saturate, 16 bytes an access both ways, few permutes."""
    for case in QUANTIZE:
        report, launch = reports[case], case.launch()
        constants: dict[str, Any] = dict(launch.constants)
        conversion = f"F2FP.SATFINITE.{constants['FORMAT'].upper()}"
        converted = sum(n for mnemonic, n in report.instructions.items() if mnemonic.startswith(conversion))
        elements = constants["BLOCK_P"] * constants["BLOCK_C"] // (32 * launch.num_warps)
        quads = "words_ptr" in launch.arguments
        beside = quads and constants["FORMAT"] == "e4m3"
        orders = 2 if quads else 1
        assert converted == orders * elements // 2, case
        # the columns beside quarters are loaded once they are stored
        loads = elements // 16 if beside else 0
        assert report.instructions["LDG.E.128"] == elements * case.dtype.itemsize // 16 + loads, case
        # y and words of quads; these again for the rows beside quarters, masked, and the columns beside them
        stores = orders + (2 if beside else 0)
        assert report.instructions["STG.E.128"] == stores * elements // 16, case
        assert report.permutes <= elements // 2, case
        # an H200 issues some 25 an element while it copies: a third of the time is left for waiting
        most = 17 if beside else 15 if quads else 14.125
        assert sum(report.instructions.values()) <= most * elements, case
        if case.arch == "sm_90":
            # four programs of as many warps share a multiprocessor, or three
            assert report.registers <= (168 if beside else 128), case
