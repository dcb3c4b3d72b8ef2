"""Convolutions of two maps side by side, and their gradients: numbers in plain Python, configs, machine code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_interpreter
from gluon_launches import SM_90
from ridgeline.kernels import (
    CONCAT,
    Op,
    concat_conv2d,
    concat_conv2d_wgrad,
    conv2d_fprop,
    conv2d_wgrad,
)
from ridgeline.kernels._conv2d_pass import Config, WgradConfig
from ridgeline.numerics import compare, to_float64
from ridgeline.own_process import call_apart
from ridgeline.sass import compile_many, inspect

ALONE = replace(SM_90, sm_count=1)  # one program takes every tile
FPROP, WGRAD = CONCAT
SMALL = [(op, sample) for op in CONCAT for sample in op.samples if not sample.real_size]


def result(op: Op, arguments: dict[str, Any], config: Any, target: Any = SM_90) -> Tensor:
    """What a launch writes, of a weight gradient the sums of its parts; NaN before."""
    launch = op.launcher.plan(config=config, target=target, **arguments).parts[0]
    launch.output.fill_(float("nan"))
    gluon_interpreter.run(launch)
    return launch.output


def joined(op: Op, arguments: dict[str, Any]) -> tuple[Op, dict[str, Any]]:
    """The same call of the concatenation."""
    names = ("x1", "x2")
    whole = torch.cat([arguments[name] for name in names], 1).contiguous(memory_format=torch.channels_last)
    rest = {name: value for name, value in arguments.items() if name not in names}
    return {FPROP: conv2d_fprop.OP, WGRAD: conv2d_wgrad.OP}[op], {**rest, "x": whole}


def as_gradient(op: Op, output: Tensor, shape: torch.Size) -> Tensor:
    if op is not WGRAD:
        return output
    k, c, r, s = shape
    return output.sum(0).view(k, r, s, c).permute(0, 3, 1, 2).half()


@pytest.mark.parametrize(("op", "sample"), [pytest.param(*case, id=f"{case[0].name}-{case[1].why}") for case in SMALL])
def test_every_tile_is_of_the_right_map(op: Op, sample: Any):
    arguments = sample.arguments(torch.float16, "cpu")
    configs = op.launcher.candidates(target=SM_90, **arguments)
    exact, eager = op.reference(**to_float64(arguments)), op.reference(**arguments)
    for config, target in ((configs[0], SM_90), (configs[len(configs) // 2], ALONE), (configs[-1], ALONE)):
        found = as_gradient(op, result(op, arguments, config, target), exact.shape)
        verdict = compare(found, exact, eager, error_factor=op.error_factor, eps=1e-3)
        assert verdict.passed, f"{config}: {verdict.reason}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op", CONCAT, ids=lambda op: op.name)
def test_bits_are_those_of_the_concatenation(op: Op, seed: int):
    """The same tiles reduce the same steps in the same order."""
    rng = random.Random(seed)
    # as many channels as one step reduces, or half of them
    channels = (64 if op is FPROP else 32) * rng.randint(1, 3), 16 * rng.randint(1, 6)
    image, weight = (rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 9)), (8 * rng.randint(1, 9), 1, 1)
    if rng.random() < 0.5:
        weight = (weight[0], 3, rng.choice([1, 3]))
    sample = {FPROP: concat_conv2d, WGRAD: concat_conv2d_wgrad}[op]._sample
    arguments = sample("", channels, image, weight).arguments(torch.float16, "cpu")
    config = rng.choice(op.launcher.candidates(target=SM_90, **arguments))
    ours = result(op, arguments, config)
    one, whole = joined(op, arguments)
    launch = one.launcher.plan(config=config, target=SM_90, **whole).parts[0]
    launch.output.fill_(float("nan"))
    gluon_interpreter.run(launch)
    assert torch.equal(ours, launch.output), (channels, image, weight, config)


@pytest.mark.parametrize("op", CONCAT, ids=lambda op: op.name)
def test_configs_are_those_of_the_concatenation(op: Op, monkeypatch: pytest.MonkeyPatch):
    """Those that are tuned for it, and where their tiles would have channels of both maps another."""
    module = {FPROP: concat_conv2d, WGRAD: concat_conv2d_wgrad}[op]
    arguments = op.samples[0].arguments(torch.bfloat16, "meta")
    other, whole = joined(op, arguments)
    config = WgradConfig(64, 128, 1, 6, 4, 1) if op is WGRAD else Config(64, 128, 6, 4)
    asked = []

    def tuned(one: Op, _kind: type, is_valid: Callable[[Any], bool], **given: Any) -> Any:
        asked.append((one.name, one.key(**given)))
        return config if is_valid(config) else None

    monkeypatch.setattr(module, "tuned_config", tuned)
    constants = module.plan(target=SM_90, **arguments).parts[0].constants
    assert asked == [(other.name, other.key(**whole))]
    assert constants["BLOCK_C" if op is WGRAD else "BLOCK_N"] == 128
    if op is not FPROP:
        # 96 channels of the first: no tile of 128
        narrow = module._sample("", (96, 128), (2, 4, 4), (64, 1, 1)).arguments(torch.bfloat16, "meta")
        constants = module.plan(target=SM_90, **narrow).parts[0].constants
        assert 96 % constants["BLOCK_C" if op is WGRAD else "BLOCK_N"] == 0


def test_operators_in_plain_pytorch():
    for op, sample in SMALL:
        arguments = sample.arguments(torch.float32, "cpu")
        found = op(**arguments)
        torch.testing.assert_close(found, op.reference(**arguments))
        assert found.is_contiguous(memory_format=torch.channels_last)
    for op in CONCAT:
        arguments = next(sample for sample in op.samples if not sample.real_size).arguments(torch.float32, "cpu")
        outcome = torch.library.opcheck(op.overload, (), arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", CONCAT, ids=lambda op: op.name)
def test_costs_are_those_of_the_concatenation(op: Op):
    arguments = op.samples[0].arguments(torch.bfloat16, "meta")
    one, whole = joined(op, arguments)
    assert op.cost(**arguments) == one.cost(**whole)


X1, X2 = (torch.zeros(2, c, 4, 4, dtype=torch.float16).contiguous(memory_format=torch.channels_last) for c in (32, 16))
WEIGHT = torch.zeros(8, 48, 1, 1, dtype=torch.float16)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"x2": X2[:1]}, ValueError, "both maps must have the same images and pixels"),
        ({"x1": X1[:, :24]}, ValueError, "the first map must have a multiple of 16 channels, .* got 24 and 16"),
        ({"x2": X2[:, :0]}, ValueError, "the second some, got 32 and 0"),
        ({"x2": X2.contiguous()}, ValueError, "x2 must be channels_last"),
        ({"x2": X2.float()}, TypeError, "x2 must be torch.float16"),
        ({"weight": WEIGHT[:, :40]}, ValueError, "must have the 48 channels of both maps"),
        ({"config": Config(96, 128, 4, 4)}, ValueError, "is not valid"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], words: str):
    given: dict[str, Any] = {"x1": X1, "x2": X2, "weight": WEIGHT, "padding": (0, 0)}
    concat_conv2d.plan(**given)
    with pytest.raises(error, match=words):
        concat_conv2d.plan(**{**given, **changed})


def test_a_weight_gradient_refuses_tiles_of_both_maps():
    dy = torch.zeros(2, 8, 4, 4, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"WgradConfig.* is not valid for .* with 32 channels of x1"):
        sizes: dict[str, Any] = {"kernel_size": (1, 1), "padding": (0, 0)}
        concat_conv2d_wgrad.plan(dy, X1, X2, **sizes, config=WgradConfig(64, 64, 1, 8, 4, 1))


@pytest.mark.parametrize(
    ("channels", "k", "taken"), [((32, 16), 8, True), ((16, 32), 8, False), ((32, 8), 8, False), ((32, 16), 4, False)]
)
def test_what_both_take(channels: tuple[int, int], k: int, taken: bool):
    assert concat_conv2d.takes(channels, k) == taken
    if taken:
        for module in (concat_conv2d, concat_conv2d_wgrad):
            module.plan(**module._sample("", channels, (1, 4, 4), (k, 1, 1)).arguments(torch.bfloat16, "meta"))


# --- machine code --------------------------------------------------------------------------------------------------


def test_nothing_spills_and_only_results_pass_through_registers():
    """256 and 128 channels at 32x32, by the config that is taken first."""
    launches = [
        op.launcher.plan(target=SM_90, **op.samples[0].arguments(torch.bfloat16, "meta")).parts[0] for op in CONCAT
    ]
    reports = [inspect(binary) for binary in compile_many([launch.source("sm_90") for launch in launches])]
    for op, report in zip(CONCAT, reports, strict=True):
        assert not report.problems, op.name
        assert {name.split(".")[0] for name in report.matrix_instructions} == {"HGMMA"}, op.name
        assert report.count("LDG") == 0, op.name
        assert report.count("STG") == 0 or op is WGRAD, op.name
        assert (report.count("UTMASTG") > 0) == (op is not WGRAD), op.name


def run_as_a_step_does(name: str, why: str) -> None:
    """A chain of equal calls, launched early as in a step, in this process, which may hang."""
    op = next(op for op in CONCAT if op.name == name)
    arguments = next(sample for sample in op.samples if sample.why == why).arguments(torch.bfloat16, "cuda")
    for _ in range(20):
        op(**arguments)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "sample"),
    [pytest.param(op, s, id=f"{op.name}-{s.why}") for op in CONCAT for s in op.samples if s.real_size],
)
def test_calls_in_a_row_end_on_a_gpu(op: Op, sample: Any):
    call_apart(partial(run_as_a_step_does, op.name, sample.why), budget_s=90)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("op", "sample"), [pytest.param(op, s, id=f"{op.name}-{s.why}") for op in CONCAT for s in op.samples]
)
def test_on_a_gpu(op: Op, sample: Any, dtype: torch.dtype):
    arguments = sample.arguments(dtype, "cuda")
    for config in (None, *op.launcher.candidates(**arguments)):
        launch = op.launcher.plan(config=config, **arguments)
        launch.output.fill_(float("nan"))
        launch.run()
        exact, eager = op.reference(**to_float64(arguments)), op.reference(**arguments)
        verdict = compare(launch.output, exact, eager, error_factor=op.error_factor)
        assert verdict.passed, f"{config}: {verdict.reason}"
