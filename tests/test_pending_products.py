"""Registers that are overwritten while a product waits for the matrix unit: found in listings, and in no kernel."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
import torch

from ridgeline.kernels import conv_pair_chain
from ridgeline.kernels._nhwc import conv_sample
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels.conv2d_act import Config, plan
from ridgeline.pending_products import overwrites
from ridgeline.sass import compile_many, inspect

H200 = typical_target("sm_90")
FIRST, SECOND = "HGMMA.64x64x16.F32 R24, R56, gdesc[UR8], R24", "HGMMA.64x64x16.F32 R24, R60, gdesc[UR8], R24"
ALL, ONE, TWO = (f"WARPGROUP.DEPBAR.LE gsb0, 0x{groups}" for groups in (0, 1, 2))
LOADS = "LDSM.16.M88.4 R56, [R21+UR8]", "LDSM.16.M88.4 R60, [R20+UR8]"


def listing(*code: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/   {text} ;   /* 0x000fe2000000 */\n" for i, text in enumerate(code))


def found(*code: str) -> list[int]:
    """The places in `code` of what is found."""
    return [int(line.split()[0], 16) // 16 for line in overwrites(listing(*code))]


@pytest.mark.parametrize(
    ("waits", "wrong"),
    [
        (ALL, []),
        (ONE, [1]),  # the first product is done, the second is not
        (TWO, [0, 1]),  # neither is
    ],
)
def test_a_loop_loads_what_its_last_step_still_needs(waits: str, wrong: list[int]):
    assert found(*LOADS, f"{FIRST}, gsb0", f"{SECOND}, gsb0", waits, "@P0 BRA 0x0") == wrong


def test_products_of_one_group_end_together():
    assert found(*LOADS, FIRST, f"{SECOND}, gsb0", ONE, "@P0 BRA 0x0") == [0, 1]
    assert found(*LOADS, FIRST, f"{SECOND}, gsb0", ALL, "@P0 BRA 0x0") == []
    # a wait says nothing of a product that is in no group yet
    assert found(FIRST, ALL, LOADS[0]) == [2]


@pytest.mark.parametrize(
    ("writer", "wrong"),
    [
        ("@!P1 IADD3 R57, R1, R2, RZ", True),
        ("IMAD.WIDE R58, R1, R2, R4", True),
        ("LDG.E.128 R52, desc[UR6][R42.64]", False),
        ("LDS.128 R56, [R3]", True),
        ("LDSM.16.M88 R55, [R3]", False),
        ("LDSM.16.MT88.4 R54, [R3]", True),
        ("ISETP.GE.AND P0, PT, R56, R57, PT", False),
        ("SHFL.BFLY PT, R59, R4, 0x1, 0x1f", True),
        ("STS.128 [R56], R8", False),
        ("IADD3 R60, R56, R57, RZ", False),
    ],
)
def test_what_an_instruction_writes(writer: str, wrong: bool):
    assert found(f"{FIRST}, gsb0", writer, ALL) == ([1] if wrong else [])


def test_operands_in_shared_memory_are_nobodys_registers():
    assert found("HGMMA.64x64x16.F32 R24, gdesc[UR8], R24, gsb0", "MOV R24, RZ", "MOV R56, RZ") == []


def test_the_end_of_a_kernel_is_no_loop():
    assert found(f"{FIRST}, gsb0", ALL, "EXIT", "BRA 0x30") == []


# --- our kernels -----------------------------------------------------------------------------------------------------


def boxed_rows() -> list[Launch]:
    """Every tuned convolution whose boxes are reshaped in registers."""
    text = (files("ridgeline") / "tables" / "nvidia-h200" / "conv2d_act.json").read_text(encoding="utf-8")
    launches = []
    for row in json.loads(text)["rows"]:
        config = Config(**row["config"])
        filters = [int(n) for n in re.search(r"weight (\S+),", row["key"])[1].split("x")]
        if not config.boxed or config.specialised or filters[2:] == [1, 1]:
            continue
        shape = [int(n) for n in re.search(r" x (\S+)$", row["key"])[1].split("x")]
        stride = tuple(int(n) for n in re.search(r"stride (\d+) (\d+)", row["key"]).groups())
        arguments = conv_sample("", tuple(shape), (filters[0], *filters[2:]), stride=stride).arguments(
            torch.float16, "meta"
        )
        launches.append(plan(config=config, target=H200, **{**arguments, "pdl": True}).parts[0])
    return launches


def rounded() -> list[Launch]:
    """Pipelined fp32 convolutions, whose pixels are rounded to TF32 in registers."""
    problems = ((1, 64, 80, 80), (64, 3, 3)), ((1, 32, 160, 160), (64, 3, 3)), ((1, 256, 20, 20), (256, 3, 3))
    launches = []
    for x, filters in problems:
        arguments = conv_sample("", x, filters).arguments(torch.float32, "meta")
        launches.append(plan(config=Config(64, 64, 32, 4, 3), target=H200, **{**arguments, "pdl": True}))
    real = [sample for sample in conv_pair_chain.OP.samples if sample.real_size][:2]
    return launches + [conv_pair_chain.plan(target=H200, **s.arguments(torch.float32, "meta")) for s in real]


def test_no_tuned_box_and_no_rounded_operand_is_overwritten():
    boxes = boxed_rows()
    assert len(boxes) >= 6
    for binary in compile_many([launch.source("sm_90") for launch in (*boxes, *rounded())]):
        report = inspect(binary)
        assert report.count("HGMMA") > 0 and report.overwrites == (), report.kernel
