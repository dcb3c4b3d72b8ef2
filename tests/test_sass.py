"""What the compiler makes of the kernels for GPUs that are not here, and proof that a bad kernel is seen."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import triton
import triton.language as tl

from ridgeline import sass
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.kernels import find
from ridgeline.kernels.conv2d_act import Config
from ridgeline.sass import SHARED_LIMIT_BYTES, Binary, KernelSource, SassReport, compile_many, compile_offline, inspect

OP = find("conv2d_act")
MATRIX = {"sm_89": "HMMA", "sm_90": "HGMMA", "sm_120": "HMMA"}
UNET = "UNet 16x16"


@triton.jit
def _spill(x_ptr, y_ptr, BLOCK: tl.constexpr):
    # one warp keeps BLOCK^2 fp32 until their sum is known: 512 registers a thread at 128
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i[:, None] * BLOCK + i[None, :])
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], x / tl.sum(x))


@pytest.fixture(scope="module")
def reports() -> dict[str, SassReport]:
    """All compilations of this file, so that one child process does them all."""
    sources = {f"{arch} {dtype}": OP.source(arch=arch, dtype=dtype) for arch in MATRIX for dtype in ("fp16", "bf16")}
    sources["sm_90 fp32"] = OP.source(arch="sm_90", dtype="fp32")
    sources["160x160 8->16"] = OP.source(arch="sm_90", sample="160x160 8->16", config=Config(128, 16, 64, 4, 3))
    sources["YOLO26n stem"] = OP.source(arch="sm_90", sample="YOLO26n stem")
    sources["32x32 tile"] = OP.source(arch="sm_90", config=Config(32, 32, 64, 4, 4))
    sources["unaligned"] = replace(sources["160x160 8->16"], aligned=())
    sources["spill"] = KernelSource(_spill, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 128}, "sm_90", num_warps=1)
    return {name: inspect(binary) for name, binary in zip(sources, compile_many(list(sources.values())), strict=True)}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("arch", MATRIX)
def test_conv2d_act_runs_on_the_matrix_unit_of_each_architecture(reports, arch: str, dtype: str):
    report = reports[f"{arch} {dtype}"]
    assert report.kernel == "conv2d_act_kernel"
    assert {name.split(".")[0] for name in report.matrix_instructions} == {MATRIX[arch]}
    assert all(("BF16" in name) == (dtype == "bf16") and "F32" in name for name in report.matrix_instructions)
    assert report.async_copies > 0
    assert all(".128" in name for name in report.instructions if name.startswith("LDGSTS"))  # 16 bytes each
    assert report.problems == ()
    assert report.spill_bytes == report.local_loads == report.local_stores == 0
    assert report.permutes < 16
    assert 0 < report.shared_bytes <= report.shared_limit_bytes == SHARED_LIMIT_BYTES[arch]
    assert report.registers <= 255


def test_fp32_runs_as_tf32(reports):
    assert all(".TF32" in name and name.startswith("HGMMA") for name in reports["sm_90 fp32"].matrix_instructions)
    assert reports["sm_90 fp32"].problems == ()


def test_few_channels_still_copy_16_bytes_at_a_time(reports):
    """A step of several taps: 8 channels of fp16 are the 16 bytes."""
    report = reports["160x160 8->16"]
    assert report.async_copies > 0
    assert all(".128" in name for name in report.instructions if name.startswith("LDGSTS"))
    assert report.count("HGMMA") > 0


def test_three_channels_cannot_copy_asynchronously(reports):
    """A pixel of 6 bytes has no 4-byte alignment, which cp.async needs: the stem gathers element by element."""
    assert reports["YOLO26n stem"].async_copies == 0
    assert reports["YOLO26n stem"].problems == ()


def test_a_tile_below_64_pixels_falls_to_mma_sync(reports):
    assert reports["32x32 tile"].count("HMMA") > 0
    assert reports["32x32 tile"].count("HGMMA") == 0


def test_unaligned_pointers_lose_the_async_copies(reports):
    assert reports["unaligned"].async_copies == 0


def test_spills_are_a_problem(reports):
    report = reports["spill"]
    assert report.spill_bytes > 0
    assert report.local_loads > 0
    assert report.local_stores > 0
    assert "spills" in report.problems[0]
    assert report.matrix_instructions == {}


def test_too_much_shared_memory_is_a_problem(reports):
    report = replace(reports["sm_90 fp16"], shared_limit_bytes=reports["sm_90 fp16"].shared_bytes - 1)
    limit = report.shared_limit_bytes
    assert report.problems == (f"needs {report.shared_bytes} B of shared memory, sm_90 has {limit} B",)


def test_report_prints_as_table_and_json(reports):
    report = reports["sm_90 fp16"]
    rows = dict(report.rows())
    assert rows["architecture"] == "sm_90"
    assert "HGMMA.64x128x16.F32" in rows["matrix instructions"]
    assert rows["problems"] == "none"
    assert len(report.lines()) == len(rows)
    parsed = json.loads(report.to_json())
    assert parsed["instructions"] == report.instructions
    assert parsed["async_copies"] == report.async_copies
    assert parsed["shared_bytes"] == report.shared_bytes


def test_count_ignores_modifiers():
    report = SassReport("k", "sm_90", {"LDG.E.128": 2, "LDG.E": 1, "LDGSTS.E": 4, "LDL": 1}, 32, 0, 0, 1, 4)
    assert report.count("LDG") == 3
    assert report.count("LDG", "LDGSTS") == 7
    assert report.problems == ("spills: 0 B of stack, 1 LDL, 0 STL",)


def test_unknown_architecture_is_refused():
    with pytest.raises(UsageError, match=r"architecture must be one of sm_80, .*, got 'sm_75'"):
        compile_offline(_spill, {}, {}, arch="sm_75")
    with pytest.raises(UsageError, match="got 'gfx942'"):
        sass.inspect_op(OP, arch="gfx942")


def test_unknown_dtype_and_sample_are_refused():
    with pytest.raises(UsageError, match="dtype must be one of fp32, fp16, bf16, got 'fp8'"):
        sass.inspect_op(OP, arch="sm_90", dtype="fp8")
    with pytest.raises(UsageError, match="no sample's reason contains '7x7'"):
        sass.inspect_op(OP, arch="sm_90", sample="7x7")


def test_a_child_that_fails_says_why():
    class Missing:
        __name__ = "kernel"

        def fn(self) -> None: ...

    Missing.fn.__module__ = "no_such_module"
    with pytest.raises(
        EnvironmentUnusable, match=r"compiling kernel offline failed .* No module named 'no_such_module'"
    ):
        compile_offline(Missing(), {}, {})


def test_absent_triton_is_named(monkeypatch):
    monkeypatch.setattr(sass, "triton", None)
    with pytest.raises(EnvironmentUnusable, match="needs Triton, which is not installed: pip install triton"):
        compile_offline(_spill, {}, {})


def test_inspect_refuses_what_the_disassembler_does_not_explain(monkeypatch):
    monkeypatch.setattr(sass, "_cuobjdump", lambda path: "")
    with pytest.raises(EnvironmentUnusable, match="cuobjdump printed no resource usage for k"):
        inspect(Binary("k", "sm_90", b"", "", 0, 4))


def test_importing_sass_needs_no_torch():
    code = "import sys, ridgeline.sass; sys.exit('torch' in sys.modules)"
    assert sass.subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
