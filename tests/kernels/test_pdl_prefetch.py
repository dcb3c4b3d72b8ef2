"""With early launch, weights that a kernel reads after its wait are asked for before it: all, and nothing else."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

from ridgeline.kernels import upsample_concat_conv_act
from ridgeline.kernels._nhwc import cdiv, conv_sample, line_of_share
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels.conv2d_act import Config, plan
from ridgeline.sass import Binary, compile_many, disassemble, inspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = typical_target("sm_90")
PREFETCH, WAIT = "CCTL.E.PF2", "ACQBULK"


@triton.jit
def _lines(lines_ptr, LINES: tl.constexpr, ROOM: tl.constexpr, THREADS: tl.constexpr):
    share = tl.cdiv(LINES, tl.num_programs(0))
    for first in range(0, share, THREADS):
        place = tl.program_id(0) * ROOM + first + tl.arange(0, THREADS)
        tl.store(lines_ptr + place, line_of_share(first, share, LINES, THREADS))


@pytest.mark.parametrize(("lines", "programs"), [(1, 1), (1, 7), (40, 7), (300, 2), (64, 2), (9, 64)])
def test_programs_share_all_lines_and_no_others(lines: int, programs: int):
    threads = 32
    room = cdiv(cdiv(lines, programs), threads) * threads
    found = torch.full((programs, room), -1, dtype=torch.int32, device=DEVICE)
    _lines[(programs,)](found, lines, room, threads, num_warps=1)
    assert set(found.flatten().tolist()) == set(range(lines))


def conv(config: Config, k: int = 64, side: int = 3, *, pdl: bool = True) -> Launch:
    arguments = conv_sample("", (1, 64, 16, 16), (k, side, side)).arguments(torch.float16, "meta")
    return plan(config=config, target=H200, **{**arguments, "pdl": pdl})


def upsampled() -> Launch:
    sample = next(sample for sample in upsample_concat_conv_act.OP.samples if sample.real_size)
    arguments = sample.arguments(torch.float16, "meta")
    return upsample_concat_conv_act.plan(target=H200, **{**arguments, "pdl": True})


def code(binary: Binary) -> list[str]:
    """Its prefetches and its wait, in the order of the code."""
    return re.findall(rf"\*/\s+(?:@!?U?P\w+\s+)?({re.escape(PREFETCH)}\w*|{WAIT})\b", disassemble(binary.cubin))


def test_machine_code_asks_for_weights_before_the_wait():
    asking = [
        conv(Config(64, 64, 64, 4, 3)),
        conv(Config(16, 32, 32, 4, 3, 4)),
        conv(Config(64, 64, 64, 4, 3, 1, 8, 8)),
        upsampled(),
    ]
    # weights in registers, and kernels that are launched when their predecessor is over
    silent = [conv(Config(16, 32, 64, 2, 1), side=1), conv(Config(64, 64, 64, 4, 3), pdl=False)]
    binaries = compile_many([launch.source("sm_90") for launch in (*asking, *silent)])
    for binary in binaries[: len(asking)]:
        found = code(binary)
        assert inspect(binary).problems == ()
        assert len(found) > 1 and found.index(WAIT) == len(found) - 1, "the wait is the last"
    assert [[line for line in code(binary) if line != WAIT] for binary in binaries[len(asking) :]] == [[], []]
