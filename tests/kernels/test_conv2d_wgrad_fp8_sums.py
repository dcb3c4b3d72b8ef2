"""Sums after FP8 weight gradients: how they are tiled, that every part and pixel is added once, and machine code."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from ridgeline.kernels import _quads, conv2d_wgrad_fp8
from ridgeline.kernels._conv2d_wgrad_fp8_call import sums_tile
from ridgeline.kernels._conv2d_wgrad_fp8_sums import _assembly, _constraints, wgrad_fp8_sums_kernel
from ridgeline.kernels._nhwc import cdiv
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.sass import Binary, compile_many, disassemble, inspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCHES = ("sm_89", "sm_90", "sm_120")
H200 = typical_target("sm_90")
E4M3 = torch.float8_e4m3fn
OP = conv2d_wgrad_fp8.OP
SMALL = [sample for sample in OP.samples if not sample.real_size]
REAL = [sample for sample in OP.samples if sample.real_size]


@pytest.mark.parametrize(
    ("parts", "numel", "tile"),
    [
        pytest.param(22, 147_456, (1, 8, 1024, 1), id="128->128 at 32x32"),
        pytest.param(5, 589_824, (1, 5, 1024, 1), id="256->256 at 16x16"),
        pytest.param(2, 1_179_648, (1, 2, 1024, 4), id="512->256 at 16x16"),
        pytest.param(22, 49_152, (4, 6, 256, 1), id="384->128, 1x1"),
        pytest.param(1, 147_456, (1, 1, 1024, 1), id="one part is only scaled"),
        pytest.param(132, 256, (16, 8, 64, 1), id="16->16, 1x1"),
    ],
)
def test_tiles_fill_the_gpu_and_a_thread_loads_128_bytes_at_once(
    parts: int, numel: int, tile: tuple[int, int, int, int]
):
    assert tuple(sums_tile(parts, numel, H200).values()) == tile


def test_no_tile_has_more_than_what_is_there():
    for parts, numel, arch in product((1, 2, 5, 22, 264), (256, 2304, 49_152, 4_718_592), ARCHES):
        beside, loads, block, blocks = sums_tile(parts, numel, typical_target(arch)).values()
        assert block * beside == 1024 and blocks * loads <= 8
        assert blocks == 1 or numel >= blocks * block
        assert beside < 2 * parts and (loads - 1) * beside < parts


@pytest.mark.parametrize("seed", range(6))
def test_every_part_is_added_once(seed: int):
    """Of small whole numbers the sums are exact; on GPUs of several sizes, so that tiles are of every kind."""
    rng = random.Random(seed)
    parts, k, c = rng.choice([1, 2, 3, 7, 22, 45]), 16 * rng.randint(1, 3), 16 * rng.randint(1, 3)
    numel = 9 * k * c
    tile = sums_tile(parts, numel, replace(H200, sm_count=rng.choice([1, 3, 30])))
    generator = torch.Generator().manual_seed(seed)
    given = torch.randint(-4, 5, (parts, numel), generator=generator).float().to(DEVICE)
    dw = torch.full((numel,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    inverse = torch.tensor([0.5, 2.0**-3], device=DEVICE)
    constants = {"PDL": False, "NUMEL": numel, "K": k, "PARTS": parts, **tile, "QUARTER": 4, "W": 4}
    grid = (cdiv(numel, tile["BLOCKS"] * tile["BLOCK"]),)
    wgrad_fp8_sums_kernel[grid](given, None, inverse, dw, None, 0, 1, 1, **constants, num_warps=8)
    assert torch.equal(dw, (given.sum(0) * 2.0**-4).to(torch.bfloat16))


@pytest.mark.parametrize(("n", "h", "w"), [(1, 4, 4), (9, 8, 16), (5, 4, 128), (33, 32, 32)])
def test_every_pixel_is_added_once(n: int, h: int, w: int):
    """Fewer words than are loaded together, and more than at once; every finite e5m2 number is as it is in fp16."""
    k, generator = 16, torch.Generator().manual_seed(n)
    dy = torch.randint(-4, 5, (n, k, h, w), generator=generator).float()
    dy[0, :, 0, :4] = torch.tensor([57344.0, -57344.0, 2.0**-16, 2.0**-14])
    words = _quads.to_quads(dy.to(torch.float8_e5m2), beside=False).view(torch.int32).to(DEVICE)
    db, inverse = torch.full((k,), float("nan"), device=DEVICE), torch.tensor([0.25, 1.0], device=DEVICE)
    dw = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)
    constants = {"PDL": False, "NUMEL": 0, "K": k, "PARTS": 1, "BESIDE": 1, "LOADS": 1, "BLOCK": 1024, "BLOCKS": 1}
    constants |= {"QUARTER": h * w // 4, "W": w}
    parts = torch.empty(1, device=DEVICE)
    wgrad_fp8_sums_kernel[(k,)](parts, words, inverse, dw, db, 0, 1, n, **constants, num_warps=8)
    torch.testing.assert_close(db.double().cpu(), dy.double().sum((0, 2, 3)) / 4, rtol=1e-6, atol=1e-2)
    dy[0, :, 0, :2] = 0.0
    words = _quads.to_quads(dy.to(torch.float8_e5m2), beside=False).view(torch.int32).to(DEVICE)
    wgrad_fp8_sums_kernel[(k,)](parts, words, inverse, dw, db, 0, 1, n, **constants, num_warps=8)
    torch.testing.assert_close(db.double().cpu(), dy.double().sum((0, 2, 3)) / 4, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sample", SMALL, ids=lambda s: s.why)
def test_without_bias_nothing_reads_dy(sample):
    arguments = sample.arguments(E4M3, "cpu")
    whole = conv2d_wgrad_fp8.plan(target=H200, **arguments)
    alone = conv2d_wgrad_fp8.plan(target=H200, bias=False, **arguments)
    assert whole.grid[0] - alone.grid[0] == arguments["dy"].shape[2]
    assert alone.arguments["dy_ptr"] is None and alone.arguments["db_ptr"] is None
    assert alone.parts[0].constants == whole.parts[0].constants
    assert OP.key(**arguments) == OP.key(**arguments, bias=False)
    assert OP.launcher.candidates(**arguments) == OP.launcher.candidates(**arguments, bias=False)
    parts = whole.parts[0].output.normal_(generator=torch.Generator().manual_seed(1))
    alone.parts[0].output.copy_(parts)
    for launch in (whole, alone):
        launch.output.fill_(float("nan"))
        launch.kernel[launch.grid](**launch.arguments, **launch.constants)
    assert torch.equal(whole.output, alone.output) and alone.output.isfinite().all()


def test_without_bias_the_operator_returns_none_of_it():
    arguments = SMALL[0].arguments(E4M3, "cpu")
    (dw, db), (alone, empty) = OP(**arguments), OP(**arguments, bias=False)
    assert torch.equal(dw, alone) and empty.shape == (0,) and empty.dtype == db.dtype == torch.float32
    torch.library.opcheck(OP.overload, (), {**arguments, "bias": False}, test_utils=("test_faketensor",))


# --- machine code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_assembly_returns_what_it_is_given(count: int):
    """Each block, with what is a zero of all of them."""
    assert _constraints.fn(count).split(",") == ["=&r"] * count + ["r"] * (count + 1)
    blocks = [f"${count + i}" for i in range(count)]
    *ored, zero, rest = re.fullmatch(
        r"{\.reg \.b32 all; or\.b32 all, (.*?), (.*?);((?: or\.b32 all, all, \S+;)*) (and\S+ all, all, \S+;) (.*)}",
        _assembly.fn(count),
    ).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert re.findall(r"\$\d+", " ".join(ored)) == blocks and zero == f"and.b32 all, all, ${2 * count};"
    assert rest == " ".join(f"xor.b32 ${i}, {block}, all;" for i, block in enumerate(blocks))


def launch_of(arch: str, place: int, *, bias: bool) -> Launch:
    arguments = REAL[place].arguments(E4M3, "meta")
    return conv2d_wgrad_fp8.plan(target=typical_target(arch), bias=bias, **arguments)


def order(binary: Binary) -> str:
    """The program's loads of 16 bytes (L), sums (+) and branches (/)."""
    letters = {"LDG.E.128": "L", "FADD": "+", "BRA": "/"}
    found = re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?(LDG\.E\.128|FADD|BRA)\b", disassemble(binary.cubin))
    return "".join(letters[name] for name in found)


def test_machine_code():
    """Four programs of eight warps a multiprocessor, nothing spilled, and no load waits for another."""
    made = [(arch, launch_of(arch, 0, bias=True)) for arch in ARCHES]
    made += [("sm_90", launch_of("sm_90", place, bias=False)) for place in (0, 2, 5)]
    for (arch, launch), binary in zip(made, compile_many([one.source(arch) for arch, one in made]), strict=True):
        report, loads, blocks = inspect(binary), launch.constants["LOADS"], launch.constants["BLOCKS"]
        assert not report.problems, (arch, report.problems)
        assert launch.num_warps == 8 and report.registers <= 64, arch
        runs = [run for run in re.findall("L+", order(binary)) if len(run) > 1]
        assert runs == ["L" * 8] * (launch.arguments["db_ptr"] is not None) + ["L" * (loads * blocks)], arch  # pyright: ignore[reportOperatorIssue]
