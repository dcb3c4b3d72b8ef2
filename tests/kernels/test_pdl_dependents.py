"""A dependent is let in where only the store is left, or the last copy is on its way, in the machine code too."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from ridgeline.kernels import conv_chain, depthwise_conv2d_act, upsample_concat_conv_act
from ridgeline.kernels._nhwc import conv_sample
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels.conv2d_act import Config, plan
from ridgeline.sass import Binary, compile_many, disassemble, inspect

H200 = typical_target("sm_90")
TOLD = "ACQBULK", "PREEXIT", "LDGSTS", "UTMALDG", "STS", "HMMA", "HGMMA", "STG", "UTMASTG"
CONFIGS = {
    "pipelined": Config(64, 64, 64, 4, 3),
    "all loads at once": Config(16, 32, 64, 2, 1),
    "a reduction split by warps": Config(16, 32, 32, 4, 3, 4),
    "boxes": Config(64, 64, 64, 4, 3, 1, 8, 8),
    "specialised": Config(64, 64, 64, 4, 3, 1, 8, 8, True),
}


def launches(pdl: bool) -> Iterator[tuple[str, Launch]]:
    for name, config in CONFIGS.items():
        krs = (64, 1, 1) if config.num_stages == 1 else (64, 3, 3)
        arguments = conv_sample(name, (1, 64, 16, 16), krs, residual=not config.specialised).arguments
        yield name, plan(config=config, target=H200, **{**arguments(torch.float16, "meta"), "pdl": pdl})
    for op in (conv_chain, depthwise_conv2d_act, upsample_concat_conv_act):
        sample = next(sample for sample in op.OP.samples if sample.real_size)
        yield op.OP.name, op.plan(target=H200, **{**sample.arguments(torch.float16, "meta"), "pdl": pdl})


@pytest.fixture(scope="module")
def binaries() -> dict[str, Binary]:
    named = dict(launches(pdl=True))
    return dict(zip(named, compile_many([launch.source("sm_90") for launch in named.values()]), strict=True))


def told(binary: Binary) -> list[str]:
    """The instructions of TOLD in the order of the code."""
    return re.findall(rf"\*/\s+(?:@!?U?P\w+\s+)?({'|'.join(TOLD)})\b", disassemble(binary.cubin))


@pytest.mark.parametrize("name", [name for name, _ in launches(pdl=True)])
def test_a_dependent_is_let_in_when_only_the_store_is_left(name: str, binaries: dict[str, Binary]):
    code = told(binaries[name])
    assert inspect(binaries[name]).problems == ()
    assert code.count("PREEXIT") == 1
    before, after = code[: code.index("PREEXIT")], code[code.index("PREEXIT") + 1 :]
    assert "ACQBULK" in before and not {"LDGSTS", "UTMALDG"} & set(after)
    assert not {"STG", "UTMASTG"} & set(before) and {"STG", "UTMASTG"} & set(after)
    if name == "specialised":
        # the partitions lie one behind the other: that of the copying warp, which lets dependents in, is the first
        assert "UTMALDG" in before and code.count("ACQBULK") == 2
    elif name != "depthwise_conv2d_act":
        assert {"HMMA", "HGMMA"} & set(before) and not {"HMMA", "HGMMA"} & set(after)


def test_without_early_launch_there_is_no_trace_of_it():
    (launch,) = (launch for name, launch in launches(pdl=False) if name == "pipelined")
    (binary,) = compile_many([launch.source("sm_90")])
    assert not {"ACQBULK", "PREEXIT"} & set(told(binary))
