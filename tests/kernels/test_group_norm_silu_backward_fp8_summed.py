"""group_norm_silu_backward_fp8_summed: the sum of dx beside what the form without it returns, and machine code."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_group_norm_silu_backward_fp8 import DEVICE, H200, HAS_GPU, bits, draw, one_program, with_state
from test_group_norm_silu_fp8_assembly import bounded
from torch import Tensor

from ridgeline.kernels import (
    BY_TRAINING_OVERLOAD,
    TUNED_AS,
    group_norm_silu_backward,
    group_norm_silu_backward_fp8,
)
from ridgeline.kernels._group_norm_silu_backward_fp8_call import BackwardFp8Call
from ridgeline.kernels._group_norm_silu_call import Config
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.group_norm_silu_backward_fp8 import OP, SUMMED, SUMMED_OP, fp8_gradient_sample, plan
from ridgeline.numerics import compare, to_float64
from ridgeline.sass import compile_many

SUM = 3  # its place among the results


def run(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], config: Config) -> tuple[Tensor, ...]:
    """All results of the operator by the kernels, with these tiles, where a tensor not written is NaN."""
    monkeypatch.setattr(group_norm_silu_backward_fp8, "tuned_config", lambda *_args, **_given: config)
    monkeypatch.setattr(
        group_norm_silu_backward, "empty_sum", lambda x: torch.full((x.shape[1],), math.nan, device=x.device)
    )
    return SUMMED(**arguments)


def sum_of_dx(arguments: dict[str, Any]) -> Tensor:
    """By PyTorch, in the dtype of x."""
    return group_norm_silu_backward_fp8.gradients(**{**arguments, "keep": True})[0][0].sum((0, 2, 3))


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_are_summed_and_nothing_else_changes(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Also where channels do not fill the tile."""
    rng = random.Random(seed)
    for _ in range(20 if HAS_GPU else 3):
        arguments = draw(rng, torch.float32)
        call = BackwardFp8Call(**arguments)
        config = one_program(call, rng.choice([4, 16]))
        text = f"{tuple(call.x.shape)} {call.groups} p={call.p} {call.act}"
        dx, dx8, quads, total, *others = run(monkeypatch, arguments, config)
        plain = OP(**arguments)
        for found, expected in zip((dx, dx8, quads, *others), plain, strict=True):
            assert torch.equal(bits(found), bits(expected)), text
        assert total.shape == (call.x.shape[1],) and total.dtype == torch.float32
        exact, eager = (sum_of_dx(one) for one in (to_float64(arguments), arguments))
        verdict = compare(total, exact, eager, error_factor=4.0)
        assert verdict.passed, f"{verdict.reason}, {text}"


def test_channels_that_do_not_fill_a_tile_are_drawn():
    calls = [BackwardFp8Call(**draw(random.Random(seed), torch.float32)) for seed in range(20)]
    assert 3 < sum(one_program(call).block_c(call) > call.x.shape[1] for call in calls) < 17


@pytest.mark.parametrize("keep", [False, True])
def test_of_16_bits_the_sum_is_of_what_was_not_rounded(keep: bool, monkeypatch: pytest.MonkeyPatch):
    sample = fp8_gradient_sample("", (2, 16, 8, 8), 4, scale=True, residual=True, p=0.25, keep=keep)
    arguments = with_state(sample.arguments(torch.float16, DEVICE), 5_000.0)
    dx, dx8, _, total, *_ = run(monkeypatch, arguments, one_program(BackwardFp8Call(**arguments)))
    plain = group_norm_silu_backward_fp8.summed_on_cpu(**arguments)[SUM]
    for name in ("dy", "x", "scale", "shift", "residual"):
        arguments[name] = arguments[name].float()
    for expected in (plain, sum_of_dx(arguments)):
        torch.testing.assert_close(total, expected, rtol=2e-3, atol=2e-3)
    assert dx.numel() == (dx8.numel() if keep else 0)


def test_the_operator_and_plain_pytorch_agree():
    sample = fp8_gradient_sample("", (1, 16, 4, 4), 1, scale=True, residual=True, p=0.25)
    ours, theirs = (with_state(sample.arguments(torch.float32, DEVICE), 20_000.0) for _ in range(2))
    results, expected = SUMMED(**ours), group_norm_silu_backward_fp8.summed_on_cpu(**theirs)
    for one, other in zip(results, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    torch.testing.assert_close(results[SUM], expected[SUM], rtol=1e-4, atol=1e-5)
    assert torch.equal(ours["counts"], theirs["counts"]) and ours["amax"][1] > 0
    assert len({result.untyped_storage()._cdata for result in expected}) == len(expected), "shared memory"


def test_registration():
    sample = fp8_gradient_sample("", (1, 16, 4, 4), 1, scale=True, residual=True, p=0.25, keep=True)
    arguments = sample.arguments(torch.float32, DEVICE)
    for changed in ({}, {"keep": False, "quads": False, "scale": None, "shift": None, "residual": None}):
        outcome = torch.library.opcheck(SUMMED, (), {**arguments, **changed}, test_utils="test_faketensor")
        assert outcome == {"test_faketensor": "SUCCESS"}
    assert torch.Tag.needs_exact_strides in SUMMED.tags and not SUMMED._schema.is_mutable
    assert BY_TRAINING_OVERLOAD[SUMMED] is SUMMED_OP and TUNED_AS[SUMMED_OP] is OP
    assert len(SUMMED_OP(**arguments)) == 8 and len(OP(**arguments)) == 7


def test_empty_batch():
    sample = fp8_gradient_sample("", (0, 16, 4, 4), 4)
    total = SUMMED(**with_state(sample.arguments(torch.float32, DEVICE), 1.0))[SUM]
    assert total.shape == (16,) and not total.any()


def test_it_is_tuned_as_the_other_form(monkeypatch: pytest.MonkeyPatch):
    """Whose row it looks up, with the same key."""
    arguments, asked = OP.samples[-1].arguments(torch.bfloat16, "meta"), []
    config = Config(2, 1024, 8)

    def tuned(op: Any, _kind: Any, is_valid: Any, **given: Any) -> Config:
        asked.append((op.name, op.key(**given)))
        assert is_valid(config)
        return config

    monkeypatch.setattr(group_norm_silu_backward_fp8, "tuned_config", tuned)
    launches = [plan(target=H200, **arguments), SUMMED_OP.launcher.plan(target=H200, **arguments)]
    assert asked == [(OP.name, OP.key(**arguments))] * 2
    assert [launch.constants["ROWS"] for launch in launches] == [2, 3]
    assert {launch.grid for launch in launches} == {(config.programs(BackwardFp8Call(**arguments)),)}


# --- machine code ----------------------------------------------------------------------------------------------------


# of the maps that a step of the DDPM network has most of
LARGE, SMALL = (128, 128, 32, 32), (128, 256, 16, 16)


def test_machine_code(tmp_path: Path):
    """As many programs a multiprocessor as without the sum, and nothing spilled."""
    cases: list[tuple[str, tuple[int, int, int, int], int, dict[str, Any]]] = [
        ("sm_90", LARGE, 8, {"scale": True, "p": 0.1}),
        ("sm_90", SMALL, 4, {"residual": True, "keep": True}),
        ("sm_89", SMALL, 4, {}),
        ("sm_120", SMALL, 4, {}),
    ]
    launches = [
        plan(sum_dx=True, config=Config(4, shape[2] * shape[3], warps), target=typical_target(arch),
             **fp8_gradient_sample("", shape, 32, **options).arguments(torch.bfloat16, "meta"))
        for arch, shape, warps, options in cases
    ]  # fmt: skip
    binaries = compile_many([launch.source(arch) for (arch, *_), launch in zip(cases, launches, strict=True)])
    for case, launch, binary in zip(cases, launches, binaries, strict=True):
        report = bounded(binary, launch, tmp_path)
        assert not report.problems, (case, report.problems)
        assert report.registers <= launch.options["maxnreg"] == 128, case
