"""What the kernels of YOLO26 become on GPUs that are not here.

All are compiled in one child process: starting it, which imports PyTorch, takes longer than most of the compilations.
Those of training are in test_machine_code_training.py, or beside their other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from ridgeline.kernels import (
    attention_position,
    depthwise_conv2d_act,
    detect_topk,
    letterbox_conv_act,
    max_pool_chain,
    upsample_concat_conv_act,
)
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.sass import Binary, KernelSource, SassReport, compile_many, inspect

# module: part of a sample's reason, and (architecture, programmatic dependent launch) of each compilation
SINGLE = {
    attention_position: ("YOLO26n 20x20", [("sm_89", False), ("sm_90", False), ("sm_90", True), ("sm_120", True)]),
    depthwise_conv2d_act: (
        "40x40x128",
        [("sm_89", False), ("sm_90", False), ("sm_90", True), ("sm_120", False), ("sm_120", True)],
    ),
    max_pool_chain: ("YOLO26n", [("sm_89", False), ("sm_90", False), ("sm_90", True), ("sm_120", True)]),
}
LETTERBOX = {
    "HMMA": {"arch": "sm_89", "sample": "YOLO26x"},
    "HGMMA": {"arch": "sm_90", "sample": "YOLO26n from 720x1280"},
    "HGMMA, single pixels": {"arch": "sm_90", "sample": "YOLO26n from 1080x1920"},
    "HMMA, fp32": {"arch": "sm_120", "dtype": "fp32", "sample": "YOLO26n from 720x1280"},
}


def launch(
    module: ModuleType, why: str, *, arch: str = "sm_90", dtype: torch.dtype = torch.float16, **choices: Any
) -> Any:
    """The Launch, or Launches, that the op's `plan` makes for the sample of real size whose reason contains `why`."""
    sample = next(s for s in module.OP.samples if why in s.why and s.real_size)
    return module.plan(target=typical_target(arch), **{**sample.arguments(dtype, "meta"), **choices})


def detections() -> Iterator[tuple[str, bool, Launch]]:
    """Elsewhere than on sm_90 one of the three kernels stands for all: they take the compiler longest."""
    for arch, pdl, kernels in (("sm_90", True, (0, 1, 2)), ("sm_89", False, (1,)), ("sm_120", True, (0,))):
        last = launch(detect_topk, "YOLO26n", arch=arch, pdl=pdl)
        for kernel in kernels:
            yield arch, pdl, (*last.before, last)[kernel]


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, object], Binary]:
    sources: dict[tuple[str, object], KernelSource] = {
        (module.OP.name, case): launch(module, why, arch=case[0], pdl=case[1]).source(case[0])
        for module, (why, cases) in SINGLE.items()
        for case in cases
    }
    for precision in ("tf32", "ieee"):
        made = launch(attention_position, "YOLO26n 20x20", dtype=torch.float32, precision=precision)
        sources["attention_position", precision] = made.source("sm_90")
    for dtype in (torch.float32, torch.float16):
        made = launch(upsample_concat_conv_act, "", dtype=dtype)
        sources["upsample_concat_conv_act", dtype] = made.source("sm_90")
    for name, case in LETTERBOX.items():
        sources["letterbox_conv_act", name] = letterbox_conv_act.OP.source(**case)
    for arch, pdl, part in detections():
        assert part.pdl == pdl
        sources["detect_topk", (arch, part.kernel.__name__)] = part.source(arch)
    return dict(zip(sources, compile_many(list(sources.values())), strict=True))


def report_of(binary: Binary) -> SassReport:
    report = inspect(binary)
    assert report.problems == ()
    return report


def loads(report: SassReport) -> set[str]:
    return {name for name in report.instructions if name.startswith("LDG")}


def around_the_wait(binary: Binary, *, pdl: bool) -> tuple[str, str]:
    """PTX before and after the wait for the predecessor; all of it and nothing where there is none."""
    before, waits, after = binary.ptx.partition("griddepcontrol.wait")
    assert bool(waits) == ("griddepcontrol.launch_dependents" in binary.ptx) == pdl
    return before, after


@pytest.mark.parametrize("case", SINGLE[attention_position][1], ids=str)
def test_attention_position(binaries, case):
    """Matrix instructions, asynchronous copies, nothing spilled; with PDL the filter and bias come before the wait."""
    binary = binaries["attention_position", case]
    report = report_of(binary)
    assert report.matrix_instructions and report.async_copies > 0
    before, after = around_the_wait(binary, pdl=case[1])
    if case[1]:
        # 9 taps of fp16, and 8 channels of an fp32 bias in two loads
        assert before.count("ld.global") == 11 and "st.global" not in before and "cp.async" not in before
        assert "cp.async" in after and "st.global" in after


def test_attention_position_rounds_all_four_operands_of_fp32(binaries):
    tf32, ieee = binaries["attention_position", "tf32"], binaries["attention_position", "ieee"]
    assert report_of(tf32).matrix_instructions
    # q, k, p and v: each is converted at a place of its own
    lines = {line.split("//")[0].strip() for line in tf32.ptx.splitlines() if "cvt.rn.tf32.f32" in line}
    assert len(lines) >= 4 * 4
    assert "tf32" not in ieee.ptx and not inspect(ieee).matrix_instructions


@pytest.mark.parametrize("case", SINGLE[depthwise_conv2d_act][1], ids=str)
def test_depthwise_conv2d_act(binaries, case):
    """16-byte loads, nothing spilled; with PDL the filter and the bias come before the wait, everything else after."""
    binary = binaries["depthwise_conv2d_act", case]
    assert loads(report_of(binary)) == {"LDG.E.128"}
    before, after = around_the_wait(binary, pdl=case[1])
    if case[1]:
        # 9 taps of fp16, and 8 channels of an fp32 bias in two loads
        assert before.count("ld.global") == 11 and "st.global" not in before
        assert after.count("ld.global") % 9 == 0 and "st.global" in after


@pytest.mark.parametrize("case", SINGLE[max_pool_chain][1], ids=str)
def test_max_pool_chain(binaries, case):
    """Two halves a load, nothing spilled, both maxima at once; with PDL nothing is read before the wait."""
    binary = binaries["max_pool_chain", case]
    report = report_of(binary)
    assert loads(report) == {"LDG.E"}
    assert any("HMNMX2" in name for name in report.instructions)
    before, after = around_the_wait(binary, pdl=case[1])
    if case[1]:
        assert "ld.global" not in before and "st.global" not in before
        assert "ld.global" in after and "st.global" in after


def test_upsample_concat_conv_act_rounds_both_maps_of_fp32(binaries):
    fp32, fp16 = (report_of(binaries["upsample_concat_conv_act", dtype]) for dtype in (torch.float32, torch.float16))
    assert min(fp32.async_copies, fp16.async_copies) > 0
    assert sum(n for name, n in fp32.instructions.items() if name.startswith("F2FP.TF32")) > 0
    assert not any("TF32" in name for name in fp16.instructions)


def test_letterbox_conv_act_on_every_architecture(binaries):
    """Matrix units, no spills, and a frame that is not blended costs a quarter of the byte loads."""
    reports = {name: inspect(binaries["letterbox_conv_act", name]) for name in LETTERBOX}
    for name, report in reports.items():
        assert {mnemonic.split(".")[0] for mnemonic in report.matrix_instructions} == {name.split(",")[0]}
        assert report.spill_bytes == report.local_loads == 0 and report.registers <= 255

    def byte_loads(name: str) -> int:
        return sum(n for m, n in reports[name].instructions.items() if m.startswith("LDG") and ".U8" in m)

    assert byte_loads("HGMMA") == 4 * byte_loads("HGMMA, single pixels") > 0


def test_detect_topk(binaries):
    """Nothing spilled, no block moved through shared memory, one atomic a program; with PDL each waits first."""
    for arch, pdl, part in detections():
        binary = binaries["detect_topk", (arch, part.kernel.__name__)]
        report = report_of(binary)
        assert report.shared_bytes <= 512
        assert report.count("ATOMG", "ATOM", "RED") == (report.kernel == "collect_kernel")
        if report.kernel == "anchor_maxima_kernel":
            assert loads(report) == {"LDG.E.128"}
        if report.kernel == "rank_kernel":
            # four programs a multiprocessor
            assert report.registers <= 192
        before, after = around_the_wait(binary, pdl=pdl)
        if pdl:
            assert not any(word in before for word in ("ld.global", "st.global", "atom.global"))
            assert "ld.global" in after and "st.global" in after
