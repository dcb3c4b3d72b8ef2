"""conv2d_act by specialised warps: which calls and configs they take, what they compute, and what they compile to.

Without a GPU tests/gluon_interpreter.py runs the kernel, in plain Python; what comes before the wait for the
predecessor then finds NaN where the predecessor has not yet written.
"""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from test_conv2d_act_tma import DEVICE, HAS_GPU, TARGET, WIDE, check, in_nan_buffer, make, meta
from torch import Tensor

import gluon_interpreter
from gluon_interpreter import Shared, Values
from ridgeline.cudagraph import capture
from ridgeline.kernels._conv2d_act_boxes import programs, specialised_configs
from ridgeline.kernels._conv2d_act_gluon import conv2d_act_gluon_kernel
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import Launch, Target, typical_target
from ridgeline.kernels.conv2d_act import Config, Problem, candidates, default_config, plan
from ridgeline.sass import compile_many, inspect
from ridgeline.tuned import build

H200 = typical_target("sm_90")
GOOD = Config(64, 64, 32, 4, 3, 1, 8, 8, specialised=True)

needs_wgmma = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() != (9, 0), reason="wgmma needs compute capability 9.0"
)

IMPORTED = (
    ("from triton.language.core import builtin", "from test_conv2d_act_gluon import builtin"),
    ("from ridgeline.kernels._nhwc import", "from test_conv2d_act_gluon import"),
    ("limit_registers(128)", "pass"),
)
PENDING: dict[str, tuple[Tensor, Tensor]] = {}  # where a predecessor still writes what, by the partition that reads it
let_dependent_in = bool  # nothing depends on a call in Python


def builtin(function: Any) -> Any:
    return function


def activate(z: Any, ACT: str) -> Any:
    return z / (1 + np.exp(-z)) if ACT == "silu" else z


def wait_holding_dependent(PDL: bool) -> None:
    reader = sys._getframe(1).f_code.co_name
    if PDL and reader in PENDING:
        place, value = PENDING.pop(reader)
        place.copy_(value)


def in_python(source: str) -> str:
    for old, new in IMPORTED:
        assert old in source
        source = source.replace(old, new)
    return source


def run(launch: Launch, edit: gluon_interpreter.Edit = str) -> None:
    """All launches of a plan, here or on the GPU."""
    if HAS_GPU:
        launch.run()
        return
    for part in launch.parts:
        if part.kernel is conv2d_act_gluon_kernel:
            gluon_interpreter.run(part, edit=lambda source: edit(in_python(source)))
        else:
            # Triton's interpreter knows no early starts
            Launch.run(replace(part, constants={**part.constants, "PDL": False}, pdl=False))


@pytest.fixture(autouse=True)
def _loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Shared, _layout: Any) -> Values:
        return self.data.float().numpy().copy().view(Values)

    monkeypatch.setattr(Shared, "load", load, raising=False)


def draw(rng: random.Random) -> tuple[dict[str, Any], Config, Target]:
    """A call, a config that it can take, and a GPU of few multiprocessors, so that programs take several tiles."""
    r, s = rng.choice([(1, 1), (3, 3), (3, 3), (1, 2), (2, 3)])
    largest, wider = (45, rng.choice([1, 2, 4])) if HAS_GPU else (13, 1)
    h, w = rng.randint(r, largest), rng.randint(s, largest)
    choices = {"residual": rng.random() < 0.5, "bias": rng.random() < 0.75, "act": rng.choice(["silu", "none"])}
    arguments = make(
        (rng.choice([1, 1, 2, 3]), wider * rng.choice([8, 16, 24, 40, 64, 72]), h, w),
        (rng.choice([8, 16, 40, 72, 136]), r, s),
        padding=(rng.randint(0, r), rng.randint(0, s)),
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        pdl=rng.random() < 0.5,
        **choices,
    )
    problem, target = Problem(**arguments), replace(H200, sm_count=rng.randint(1, 3))
    while True:
        warps = rng.choice([4, 4, 8])
        block_m = rng.choice([64, 128, 256])
        box_w = block_m if problem.is_product else 2 ** rng.randint(0, 5)
        box_h = 1 if problem.is_product else 2 ** rng.randint(0, 5)
        shape = block_m, rng.choice([16, 32, 64, 128]), rng.choice([16, 32, 64, 64]), warps
        config = Config(*shape, rng.choice([3, 4, 5]), rng.choice([1, 1, 2, 3]), box_h, box_w, True)
        if config.is_valid(problem, target):
            return arguments, config, target


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_random_calls_against_float64(first: int):
    """Maps in buffers of NaN, of which only y's own channels may be written; before its wait the kernel finds NaN."""
    for seed in range(first, first + 8):
        rng = random.Random(seed)
        arguments, config, target = draw(rng)
        real = dict(arguments)
        for name in ("x", "residual"):
            if arguments[name] is not None:
                arguments[name] = in_nan_buffer(arguments[name], rng, step=8)
        shape = Problem(**arguments).out_shape
        out = in_nan_buffer(torch.full(shape, torch.nan, dtype=real["x"].dtype, device=DEVICE), rng, step=8)
        for partition, name in (("_copy", "x"), ("_multiply", "residual")):
            if arguments["pdl"] and real[name] is not None and not HAS_GPU and (name == "x" or config.split_k == 1):
                PENDING[partition] = arguments[name], real[name]
                arguments[name].fill_(torch.nan)
        run(plan(config=config, target=target, out=out, **arguments))
        what = f"seed {seed}, {Problem(**real).conv}, {config}"
        check(real, out, what)
        assert out._base is not None
        assert int((~out._base.isnan()).sum()) == out.numel(), f"{what}: more than the slice was written"


def test_draws_cover_what_they_should():
    drawn = [draw(random.Random(seed)) for seed in range(32)]
    problems = [Problem(**arguments) for arguments, *_ in drawn]
    assert {problem.is_product for problem in problems} == {True, False}
    assert {problem.residual is None for problem in problems} == {True, False}
    configs = [config for _, config, _ in drawn]
    assert {c.split_k for c in configs} == {1, 2, 3} and {min(2, c.box_n) for c in configs} == {1, 2}
    assert any(problem.conv.c % config.block_k for problem, config in zip(problems, configs, strict=True))
    tiles = [
        programs(problem, config) / plan(config=config, target=target, **arguments).parts[0].grid[0]
        for problem, (arguments, config, target) in zip(problems, drawn, strict=True)
    ]
    assert max(tiles) > 3, "a program takes several tiles, and uses each stage and the buffer of y again"


@pytest.mark.skipif(HAS_GPU, reason="edits the kernel, which only runs in Python without a GPU")
@pytest.mark.parametrize("function", ["_copy", "_multiply"])
def test_without_its_wait_a_partition_reads_what_is_not_yet_written(function: str):
    arguments = make((1, 16, 8, 8), (16, 1, 1), padding=(0, 0), residual=True, pdl=True)
    launch = plan(config=Config(64, 16, 16, 4, 3, 1, 1, 64, True), target=H200, **arguments)

    def edit(source: str) -> str:
        start = source.index(f"def {function}(")
        return source[:start] + source[start:].replace("wait_holding_dependent(PDL)", "pass", 1)

    late = arguments[{"_copy": "x", "_multiply": "residual"}[function]]
    written = late.clone()
    for edited in (True, False):
        late.fill_(torch.nan)
        PENDING[function] = late, written
        run(launch, edit if edited else str)
        assert launch.output.isnan().any() == edited
    check(arguments, launch.output)


@pytest.mark.skipif(HAS_GPU, reason="edits the kernel, which only runs in Python without a GPU")
def test_a_stage_that_is_handed_back_while_it_is_read_gives_wrong_numbers():
    """Without a wait for the product of the step before, its operands are overwritten."""
    arguments = make((1, 64, 16, 8), (16, 3, 3))
    launch = plan(config=Config(64, 16, 16, 4, 3, 1, 8, 8, True), target=replace(H200, sm_count=1), **arguments)
    run(launch, edit=lambda source: source.replace("num_outstanding=IN_FLIGHT", "num_outstanding=9"))
    with pytest.raises(AssertionError, match="maximum error"):
        check(arguments, launch.output)
    run(launch)
    check(arguments, launch.output)


def test_residual_may_be_overwritten_in_place():
    arguments = make((1, 32, 9, 9), (40, 3, 3), residual=True)
    config = Config(64, 16, 32, 4, 3, 1, 8, 8, True)
    expected = plan(config=config, target=TARGET if HAS_GPU else H200, **arguments)
    run(expected)
    run(plan(config=config, target=replace(H200, sm_count=1), **arguments, out=arguments["residual"]))
    assert torch.equal(arguments["residual"], expected.output)


def test_configs_that_do_not_fit_are_refused():
    arguments = meta((1, 96, 40, 40), (96, 3, 3))
    problem = Problem(**arguments)
    assert GOOD.is_valid(problem, H200)
    for bad in (
        replace(GOOD, block_m=32, box_h=4),
        replace(GOOD, num_warps=2),
        replace(GOOD, num_warps=8),
        replace(GOOD, block_k=128),
        replace(GOOD, block_n=512),
        replace(GOOD, block_m=256, block_n=128),
        replace(GOOD, num_stages=2),
        replace(GOOD, num_stages=40),
        replace(GOOD, box_h=0),
        replace(GOOD, box_h=16),
        replace(GOOD, split_k=28),
        replace(GOOD, split_k=20),
    ):
        assert not bad.is_valid(problem, H200), bad
        with pytest.raises(ValueError, match=r"conv2d_act: Config\(.*specialised=True\) is not valid for 1x96x40x40"):
            plan(config=bad, target=H200, **arguments)
    assert replace(GOOD, split_k=14).is_valid(problem, H200), "27 steps of which no part is left without one"
    for arch in ("sm_80", "sm_89", "sm_120"):
        assert not GOOD.is_valid(problem, typical_target(arch))
        assert specialised_configs(problem, typical_target(arch)) == ()


def test_calls_that_no_specialised_warps_take():
    whole = make((1, 32, 8, 8), (64, 3, 3))
    wide, out = (random_nhwc((1, 96, 8, 8), torch.float16, DEVICE, seed=seed) for seed in (0, 1))
    taken = {
        "whole maps": whole,
        "slices that start at 16 bytes": {**whole, "x": wide[:, 8:40], "residual": wide[:, 32:], "out": out[:, 8:72]},
        "20 filters in a wider map": {**make((1, 32, 8, 8), (20, 3, 3)), "out": out[:, 16:36]},
    }
    refused = {
        "stride 2": make((1, 32, 8, 8), (64, 3, 3), stride=2),
        "fp32": make((1, 32, 8, 8), (64, 3, 3), dtype=torch.float32),
        "channels that are no multiple of 8": make((1, 12, 8, 8), (64, 3, 3)),
        "20 filters in a map of their own": make((1, 32, 8, 8), (20, 3, 3)),
        "x that starts at 8 bytes": {**whole, "x": wide[:, 4:36]},
        "y that starts at 8 bytes": {
            **whole,
            "out": random_nhwc((1, 96, 8, 8), torch.float16, DEVICE, seed=1)[:, 4:68],
        },
        "a residual that starts at 8 bytes": {**whole, "residual": wide[:, 4:68]},
        "an empty batch": {**whole, "x": whole["x"][:0]},
    }
    for why, arguments in taken.items():
        assert specialised_configs(Problem(**arguments), H200), why
    for why, arguments in refused.items():
        assert specialised_configs(Problem(**arguments), H200) == (), why
        assert not any(config.specialised for config in candidates(target=H200, **arguments)), why


LAYERS = {**WIDE, "160x160 48->48 3x3": meta((1, 48, 160, 160), (48, 3, 3))}


@pytest.mark.parametrize("name", LAYERS)
def test_three_of_the_twelve_likeliest_are_specialised_where_the_stride_is_1(name: str):
    problem, tried = Problem(**LAYERS[name]), candidates(target=H200, **LAYERS[name])
    assert len(set(tried)) == len(tried)
    found = [config for config in tried if config.specialised]
    assert all(config.is_valid(problem, H200) for config in found)
    tiles = {(config.block_m, config.block_n) for config in tried[1:13] if config.specialised}
    assert len(tiles) == (3 if problem.stride[0] == 1 else 0), "tiles of three shapes"
    assert not tried[0].specialised and tried[0] == default_config(problem, H200)


def test_small_layers_try_specialised_warps_last():
    tried = candidates(target=H200, **meta((1, 128, 20, 20), (128, 3, 3)))
    last = [config.specialised for config in tried]
    assert any(last) and not any(last[:33])


def test_few_tiles_share_reductions_and_many_share_multiprocessors():
    few, many = Problem(**WIDE["20x20 384->192 3x3"]), Problem(**meta((1, 384, 160, 160), (384, 1, 1)))
    assert specialised_configs(few, H200)[0].split_k > 1
    best = specialised_configs(many, H200)[0]
    assert best.split_k == 1 and best.resident(many, H200) == 2


@pytest.mark.parametrize("op", ["conv2d_act", "upsample_concat_conv_act"])
def test_configs_of_shipped_rows_have_all_fields(op: str):
    text = (files("ridgeline") / "tables" / "nvidia-h200" / f"{op}.json").read_text(encoding="utf-8")
    found = [build(Config, row["config"]) for row in json.loads(text)["rows"]]
    assert found and all(config is not None for config in found)


def test_as_many_programs_as_fit_take_the_tiles():
    arguments = meta((1, 512, 80, 80), (512, 1, 1))
    grid = {
        config: plan(config=config, target=H200, **arguments).grid
        for config in (
            Config(64, 128, 64, 4, 4, 1, 1, 64, True),
            Config(64, 128, 64, 4, 6, 1, 1, 64, True),
            Config(128, 128, 64, 8, 4, 1, 1, 128, True),
            Config(256, 256, 64, 8, 3, 1, 1, 256, True),
        )
        if config.is_valid(Problem(**arguments), H200)
    }
    assert list(grid.values()) == [(264,), (132,), (132,)], "400 and 200 tiles; 256 x 256 fit no registers"


def test_maps_say_where_channels_of_a_wider_buffer_lie():
    x, wide = (random_nhwc((2, c, 6, 5), torch.float16, DEVICE, seed=c) for c in (48, 96))
    arguments = {**make((2, 32, 6, 5), (64, 3, 3)), "x": x[:, 16:], "out": wide[:, 24:88]}
    maps: Any = plan(config=GOOD, target=H200, **arguments).arguments
    assert maps["x_desc"].base is arguments["x"] and maps["y_desc"].base is arguments["out"]
    assert (maps["x_desc"].shape, maps["x_desc"].strides) == ([2, 6, 5, 32], [6 * 5 * 48, 5 * 48, 48, 1])
    assert (maps["y_desc"].shape, maps["y_desc"].strides) == ([2, 6, 5, 64], [6 * 5 * 96, 5 * 96, 96, 1])
    one = {**make((2, 32, 6, 5), (64, 1, 1)), "x": x[:, 16:], "out": wide[:, 24:88]}
    maps = plan(config=replace(GOOD, box_h=1, box_w=64), target=H200, **one).arguments
    assert maps["y_desc"].shape == [1, 1, 60, 64] and maps["y_desc"].strides[2] == 96
    assert maps["residual_desc"] is None


def test_parts_are_added_with_the_epilogue_by_a_second_kernel():
    arguments = make((1, 32, 8, 8), (64, 3, 3), residual=True)
    parts: Any = plan(config=replace(GOOD, split_k=3), target=H200, **arguments).parts
    first, last = parts
    assert first.output.shape == (3, 64, 64) and first.output.dtype == torch.float32
    assert first.arguments["bias_ptr"] is first.arguments["residual_desc"] is None and first.constants["ACT"] == "none"
    assert first.arguments["y_desc"].shape == [3, 1, 8, 8, 64]
    assert last.arguments["parts_ptr"] is first.output and last.arguments["bias_ptr"] is arguments["bias"]
    assert last.arguments["residual_ptr"] is arguments["residual"] and last.constants["ACT"] == "silu"


CASES = (
    # two programs a multiprocessor; all registers that eight warps have, which go to four; parts
    (meta((1, 256, 80, 80), (256, 3, 3), residual=True), Config(64, 128, 64, 4, 4, 1, 8, 8, True)),
    (meta((1, 512, 80, 80), (512, 1, 1)), Config(64, 256, 64, 4, 3, 1, 1, 64, True)),
    (meta((1, 384, 20, 20), (192, 3, 3)), Config(64, 64, 64, 4, 6, 4, 8, 8, True)),
)


def test_machine_code_multiplies_from_shared_memory_and_copies_weights_before_its_wait():
    launches: list[Any] = [
        plan(config=config, target=H200, pdl=True, **arguments).parts[0] for arguments, config in CASES
    ]
    binaries = compile_many([launch.source("sm_90") for launch in launches])
    for launch, binary in zip(launches, binaries, strict=True):
        found, columns = inspect(binary), launch.constants["BLOCK_N"]
        assert found.problems == () and found.num_warps == launch.num_warps + 4
        # both operands by descriptor, of fp16 to fp32
        assert list(found.matrix_instructions) == [f"HGMMA.64x{columns}x16.F32"]
        assert found.count("UTMASTG") == 1 and found.count("LDGSTS", "STG") == 0
        # what is loaded otherwise is the bias, two columns at a time
        assert found.count("LDG") == (0 if launch.arguments["bias_ptr"] is None else columns // 8)
        # what the copying warps give back leaves two programs their half of the registers
        assert (found.registers <= 128) == (columns < 256)
        # both partitions wait, and the one that copies lets the next kernel in
        assert found.count("ACQBULK") >= 2 and found.count("PREEXIT") == 1
        # the copying one stands last: what it does once, before its wait, is fetch weights and maps
        _, copying = binary.ptx.split("bulk.tensor.3d.shared", 1)
        before, waited, after = copying.partition("griddepcontrol.wait")
        maps = 2 + (launch.arguments["residual_desc"] is not None)
        assert waited and maps <= len(re.findall(r"bulk\.tensor\.[45]d\.shared", before))
        # in its loop the weights of later steps and all of x
        assert after.count("bulk.tensor.3d.shared") == after.count("bulk.tensor.4d.shared") == 1


@pytest.mark.gpu
@pytest.mark.slow
@needs_wgmma
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [((1, 96, 80, 80), 96, 3), ((1, 512, 20, 20), 256, 1), ((2, 64, 40, 40), 128, 3)])
def test_every_specialised_candidate_is_right_on_a_gpu(size: Any, dtype: torch.dtype):
    x, k, r = size
    arguments = make(x, (k, r, r), dtype=dtype, residual=True, pdl=True)
    configs = specialised_configs(Problem(**arguments), TARGET)
    assert len(configs) > 12
    for config in configs:
        launch = plan(config=config, target=TARGET, **arguments)
        launch.run()
        check(arguments, launch.output, config)


@pytest.mark.gpu
@needs_wgmma
@pytest.mark.parametrize("split", [1, 3])
def test_a_captured_chain_with_early_starts_is_the_same_bit_by_bit_on_a_gpu(split: int):
    """A chain whose residuals are the map before last; a kernel that reads too early would find another replay's."""
    weights = [random_nhwc((64, 64, 3, 3), torch.float16, "cuda", seed=seed) / 24 for seed in range(10)]
    config = Config(64, 64, 64, 4, 4, split, 8, 8, True)

    def chain(pdl: bool):
        def run_all(x: Tensor) -> Tensor:
            before = x
            for weight in weights:
                choices = {"stride": (1, 1), "padding": (1, 1), "act": "silu", "pdl": pdl}
                launch = plan(x=x, weight=weight, residual=before, config=config, **choices)
                launch.run()
                before, x = x, launch.output
            return x

        return run_all

    maps = [random_nhwc((1, 64, 20, 20), torch.float16, "cuda", seed=seed) for seed in range(50)]
    early, late = (capture(chain(pdl), (maps[0],)) for pdl in (True, False))
    for x in maps:
        assert torch.equal(early.replay(x).clone(), late.replay(x).clone())
