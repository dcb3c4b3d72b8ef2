"""What the interpreter does not run of group_norm_silu_fp8: its assembly, executed here, and its machine code."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

from ridgeline.kernels._group_norm_silu_fp8 import _QUANTIZING, _WEAVING
from ridgeline.kernels._group_norm_silu_pieces import widening
from ridgeline.kernels._nhwc import next_power_of_2
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels.group_norm_silu_fp8 import OP, plan
from ridgeline.kernels.quantize_fp8 import quantized
from ridgeline.sass import Binary, SassReport, compile_many, inspect


def codes(y: Tensor) -> Tensor:
    """The bytes of FP8 values, all NaN alike."""
    return y.view(torch.uint8).where(~y.float().isnan(), 0x7F)


def to_bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF


def floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def run_ptx(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The registers after some PTX, all of 32 bits or fewer in int64, a warp side by side; predicates too."""
    registers = dict(inputs)
    lanes = len(next(iter(inputs.values())))

    def value(name: str) -> Tensor:
        if name.startswith("{"):
            low, high = map(value, name.strip("{}").split("|"))
            return low | high << 16
        number = name.replace("0f", "0x", 1)
        return torch.full((lanes,), int(number, 0)) if number[0].isdigit() else registers[name]

    def fp8(name: str) -> Tensor:
        y = floats(value(name)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes(y).long()

    def chosen(lut: int, *operands: Tensor) -> Tensor:
        bits = [[value_ >> bit & 1 for value_ in operands] for bit in range(32)]
        return sum((lut >> (a << 2 | b << 1 | c) & 1) << bit for bit, (a, b, c) in enumerate(bits))  # pyright: ignore

    def permuted(a: Tensor, b: Tensor, selector: int) -> Tensor:
        both = a | b << 32
        return sum((both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))  # pyright: ignore

    skipping = False
    for line in filter(
        None, map(str.strip, re.split(r"[;\n]|(?<=:)", text.strip("{}").replace("{low, high}", "{low|high}")))
    ):
        if skipping or line.startswith(".reg") or line.endswith(":"):
            skipping = skipping and not line.endswith(":")
            continue
        operation, rest = line.removeprefix("@!suspect ").split(" ", 1)
        to, *names = [name.strip() for name in rest.split(",")]
        match operation.split(".")[0], operation:
            case "mov", _:
                registers[to] = value(names[0])
            case "abs", _:
                registers[to] = value(names[0]) & 0x7FFFFFFF
            case "max", _:
                registers[to] = to_bits(torch.maximum(*map(floats, map(value, names))))
            case "cvt", _:
                registers[to] = fp8(names[1]) | fp8(names[0]) << 8
            case "and", _:
                registers[to] = value(names[0]) & value(names[1])
            case "or", _:
                registers[to] = value(names[0]) | value(names[1])
            case "mad", _:
                registers[to] = value(names[0]) * value(names[1]) + value(names[2]) & 0xFFFFFFFF
            case "add", _:
                registers[to] = value(names[0]) + value(names[1]) & 0xFFFFFFFF
            case "lop3", _:
                registers[to] = chosen(int(names[3], 0), *map(value, names[:3]))
            case "prmt", _:
                registers[to] = permuted(value(names[0]), value(names[1]), int(names[2], 0))
            case "selp", _:
                registers[to] = torch.where(value(names[2]) != 0, value(names[0]), value(names[1]))
            case "vote", _:
                registers[to] = value(names[0]).any().long().expand(lanes)
            case "bra", _:
                skipping = not registers["suspect"].any()
            case _, "setp.ne.u32":
                registers[to] = (value(names[0]) != value(names[1])).long()
            case _, "setp.gt.f32":
                registers[to] = (floats(value(names[0])) > floats(value(names[1]))).long()
            case _, "setp.le.f32":
                registers[to] = (floats(value(names[0])) <= floats(value(names[1]))).long()
            case _, "setp.neu.and.f32":
                registers[to] = (floats(value(names[0])) != floats(value(names[1]))).long() & value(names[2])
            case _:
                raise AssertionError(f"unknown PTX: {line}")
    return registers


@pytest.mark.parametrize("rare", [0.0, 0.02, 1.0])
def test_the_assembly_quantises_and_counts_as_the_interpreter_does(rare: float):
    """Elements as they mostly are, some from around every bound among them, or only such; 20 warps."""
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        bounds = torch.tensor([464.0, 448.0, 432.0, 2.0**-9, 2.0**-10, 0.0, math.inf, math.nan, 1e-40])
        special = bounds[torch.randint(len(bounds), (32, 8), generator=g)] * (
            1 + 1e-6 * torch.randn(32, 8, generator=g)
        )
        usual = torch.randn(32, 8, generator=g).clamp(min=-3) + 4
        y = torch.where(torch.rand(32, 8, generator=g) < rare, special, usual)
        kept = torch.where(torch.rand(32, 8, generator=g) < 0.1, 0.0, y)
        peak = torch.rand(32, generator=g)
        inputs = {f"${4 + i}": to_bits(kept[:, i].contiguous()) for i in range(8)}
        inputs |= {f"${12 + i}": to_bits(kept[:, i].contiguous()) for i in range(8)}
        inputs |= {f"${20 + i}": to_bits(y[:, i].contiguous()) for i in range(8)}
        found = run_ptx(_QUANTIZING.value, {**inputs, "$28": to_bits(peak), "$29": torch.arange(32)})
        right, _, seen = quantized(kept, torch.ones(1), fp8_format="e4m3")
        both = found["$0"] | found["$1"] << 32
        assert torch.equal(torch.stack([both >> 8 * i & 0xFF for i in range(8)], 1), codes(right).long())
        largest = torch.maximum(peak, kept.abs().amax(1))
        assert torch.equal(floats(found["$2"]).nan_to_num(nan=-1.0), largest.nan_to_num(nan=-1.0))
        events = found["$3"] - torch.arange(32)
        assert [(events >> 16).sum().item(), (events & 0xFFFF).sum().item()] == seen[0, :2].tolist()
        assert found["suspect"].any() == (rare > 0), "only some warps count"


def test_the_assembly_weaves_the_bytes_of_four_pieces():
    pieces = torch.randint(256, (4, 8, 4), generator=torch.Generator().manual_seed(0))
    shifts = torch.tensor([0, 8, 16, 24])
    found = run_ptx(_WEAVING.value, {f"${4 + k}": (pieces[k] << shifts).sum(1) for k in range(4)})
    for i in range(4):
        assert torch.equal(found[f"${i}"], (pieces[:, :, i].t() << shifts).sum(1))


@pytest.mark.parametrize(("words", "done_words"), [(4, 4), (2, 1)])
def test_the_assembly_widens_bf16_after_what_is_done(words: int, done_words: int):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(32, 2 * words, generator=g).bfloat16()
    inputs = {f"${2 * words + i}": to_bits(x[:, 2 * i : 2 * i + 2].contiguous())[:, 0] for i in range(words)}
    inputs |= {f"${3 * words + i}": torch.randint(1, 2**16, (32,), generator=g) for i in range(done_words)}
    for z in (0, 0xFFFF):
        found = run_ptx(widening(words, done_words), {**inputs, "%ctaid.z": torch.full((32,), z)})
        wide = torch.stack([floats(found[f"${i}"]) for i in range(2 * words)], 1)
        # %ctaid.z is zero; were it not, every result would depend on what is done
        assert torch.equal(wide, x.float()) == (z == 0)


# --- machine code --------------------------------------------------------------------------------------------------

# architecture, sample, registers, bytes spilled, instructions an element, and the dtype
CASES = (
    ("sm_90", "32x32 128, batch", 128, 0, 20.5, torch.bfloat16),
    ("sm_90", "32x32 384", 128, 0, 26.25, torch.bfloat16),
    ("sm_90", "16x16 128", 80, 0, 24.25, torch.bfloat16),
    ("sm_90", "16x16 256, scale", 128, 16, 33.25, torch.bfloat16),
    ("sm_120", "32x32 128, y alone", 128, 0, 17.75, torch.bfloat16),
    ("sm_90", "32x32 256", 128, 0, 21.5, torch.float16),
)


def test_machine_code(tmp_path: Path):
    """Sixteen warps or more a multiprocessor, wide accesses, next to nothing spilled, few instructions."""
    launches = [
        plan(
            target=typical_target(arch),
            **next(s for s in OP.samples if s.real_size and why in s.why).arguments(dtype, "meta"),
        )
        for arch, why, *_, dtype in CASES
    ]
    binaries = compile_many([launch.source(arch) for launch, (arch, *_) in zip(launches, CASES, strict=True)])
    for launch, binary, (arch, why, registers, spilled, most, _) in zip(launches, binaries, CASES, strict=True):
        report, where = bounded(binary, launch, tmp_path), (arch, why)
        assert report.shared_bytes <= report.shared_limit_bytes, where
        assert report.registers <= launch.options["maxnreg"] == registers, (where, report.registers)
        assert report.spill_bytes <= spilled, (where, report.problems)
        assert report.local_loads + report.local_stores <= spilled // 2, (where, report.problems)
        constants: dict[str, Any] = dict(launch.constants)
        elements = constants["PIECES"] * constants["BLOCK_P"] * constants["BLOCK_C"] // (32 * launch.num_warps)
        quads, drops = launch.arguments["words_ptr"] is not None, constants["DROPPED"] > 0
        padded = constants["BLOCK_C"] > constants["K"] * constants["CG"]
        converted = sum(n for name, n in report.instructions.items() if name.startswith("F2FP.SATFINITE.E4M3"))
        # what decides whether to count is converted too where it is something else
        assert converted == elements // 2 * (1 + (drops or padded)), where
        # the columns beside quarters are loaded again
        assert report.instructions["LDG.E.128"] >= elements // 8 + quads * elements // 16, where
        assert report.instructions["STG.E.64"] == elements // 8, where
        # words: each once, the first and the last of a quarter again, and the columns beside quarters, of two rows more
        edges = 2 * elements // 16 // (constants["PIECES"] // 4)
        rows = constants["BLOCK_P"] // constants["W"]
        columns = elements // 16 * next_power_of_2(max(4 * (rows + 2), rows * constants["W"] // 2))
        columns //= max(1, rows * constants["W"] // 2)
        assert report.instructions.get("STG.E.128", 0) == quads * (elements // 16 + edges + columns), where
        assert not {name for name in report.instructions if name.startswith("STG.E.U")}, where
        # seven an element stand behind branches that warps rarely take: they count
        assert sum(report.instructions.values()) <= (most + 7) * elements, where
    assert all(launch.num_warps <= 8 for launch in launches)


def bounded(binary: Binary, launch: Launch, folder: Path) -> SassReport:
    """With the registers that the op is launched with, which `compile_many` does not bound."""
    threads, target = f".reqntid {32 * launch.num_warps}\n", re.search(r"^\.target (\w+)", binary.ptx, re.MULTILINE)
    assert target is not None and binary.ptx.count(threads) == 1
    source, cubin = folder / "bounded.ptx", folder / "bounded.cubin"
    source.write_text(binary.ptx.replace(threads, f"{threads}.maxnreg {launch.options['maxnreg']}\n"))
    ptxas = get_ptxas(int(binary.arch.removeprefix("sm_")))
    subprocess.run([ptxas.path, f"--gpu-name={target[1]}", source, "-o", cubin], check=True)
    return inspect(replace(binary, cubin=cubin.read_bytes()))
