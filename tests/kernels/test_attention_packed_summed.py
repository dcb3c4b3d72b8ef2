"""attention_packed_backward_summed: the sums beside float64, and beside what the form without them returns."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from test_attention_packed import DEVICE, DTYPES, H200, HAS_GPU, any_config, draw, samples
from torch import Tensor

from ridgeline.kernels import BY_TRAINING_OVERLOAD, TUNED_AS, attention_packed_backward
from ridgeline.kernels._attention_packed_call import BackwardCall, Config, attention_sample
from ridgeline.kernels.attention_packed_backward import OP, SUMMED, SUMMED_OP, plan, plan_summed, summed_on_cpu
from ridgeline.numerics import compare, to_float64


def run(arguments: dict[str, Any], config: Config | None = None) -> tuple[Tensor, Tensor]:
    """(dqkv, sums) by the kernel, NaN before."""
    launch = plan_summed(config=config, target=H200, **arguments)
    sums = launch.arguments["sums_ptr"]
    assert isinstance(sums, Tensor)
    for result in (launch.output, sums):
        result.fill_(math.nan)
    launch.run()
    return launch.output, sums


def sums_of(arguments: dict[str, Any]) -> Tensor:
    """Over images and tokens, of what PyTorch makes and rounds."""
    dqkv = attention_packed_backward.reference(**arguments)
    return dqkv.sum((0, 1), dtype=torch.promote_types(dqkv.dtype, torch.float32))


def judged(arguments: dict[str, Any], ours: Tensor) -> list[Tensor]:
    """(ours, float64, eager)."""
    return [ours, sums_of(to_float64(arguments)), sums_of(arguments)]


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_are_summed_and_dqkv_stays_what_it_was(seed: int):
    """Ten shapes, judged together: of the few sums that one has, the worst can be lucky."""
    rng = random.Random(seed)
    triples, problems = [], []
    for _ in range(20 if HAS_GPU else 10):
        arguments, text = draw(rng, DTYPES[seed % len(DTYPES)])
        config = any_config(rng, BackwardCall(**arguments))
        problems.append(f"{text} {config}")
        dqkv, sums = run(arguments, config)
        plain = plan(config=config, target=H200, **arguments)
        plain.run()
        assert torch.equal(dqkv, plain.output), problems[-1]
        triples.append(judged(arguments, sums.sum((0, 1))))
    verdict = compare(*(torch.cat(tensors) for tensors in zip(*triples, strict=True)))
    assert verdict.passed, f"{verdict.reason}, in one of {problems}"


def in_groups() -> tuple[dict[str, Any], Config]:
    """Five images, four and one of which have a program together."""
    arguments = attention_sample("", 5, 7, 2, 12, backward=True).arguments(torch.float16, DEVICE)
    config = Config(32, 32, 4, 1)
    assert config.group(BackwardCall(**arguments)) == 4
    return arguments, config


def test_the_first_image_of_a_group_has_the_sum_of_all():
    arguments, config = in_groups()
    _, sums = run(arguments, config)
    assert sums.shape == (5, 1, 72)
    assert not sums[1:4].any() and sums[0].any() and sums[4].any()


def test_an_image_in_several_blocks_has_a_sum_of_each_block():
    arguments = attention_sample("", 2, 40, 1, 16, backward=True).arguments(torch.float32, DEVICE)
    _, sums = run(arguments, Config(16, 16, 4, 1))
    assert sums.shape == (2, 3, 48)
    _, expected = summed_on_cpu(**arguments)
    torch.testing.assert_close(sums.sum(1), expected, rtol=1e-4, atol=1e-5)


def test_keys_have_no_gradient_in_sum_and_values_that_of_the_result():
    """A shift of all keys changes no weight; also where `out` and `lse` are not those of qkv."""
    arguments, config = in_groups()
    arguments["lse"] = arguments["lse"] + 0.5
    dq, dk, dv = run(arguments, config)[1].sum((0, 1)).unflatten(0, (3, 24)).unbind()
    assert dq.any() and not dk.any()
    torch.testing.assert_close(dv, arguments["dout"].float().sum((0, 1)))


def test_the_planted_errors_are_caught():
    arguments, config = in_groups()
    total = run(arguments, config)[1].sum((0, 1))
    assert compare(*judged(arguments, total)).passed
    for part in (0, 2):  # dq, dv
        wrong = total.clone()
        wrong[24 * part : 24 * (part + 1)] *= 0.9
        assert not compare(*judged(arguments, wrong)).passed
    assert not compare(*judged(arguments, run(arguments, config)[1][:4].sum((0, 1)))).passed


@pytest.mark.parametrize(("sample", "dtype"), samples())
def test_samples(sample: Any, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    verdict = compare(*judged(arguments, SUMMED(**arguments)[1].sum(0)), error_factor=4.0)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("config", [Config(16, 16, 4, 1), Config(32, 16, 4, 1)], ids=["blocks", "one block"])
def test_the_operator_and_plain_pytorch_agree(config: Config, monkeypatch: pytest.MonkeyPatch):
    """Whatever the tiles: a compiled graph has been told the shape before."""
    arguments = attention_sample("", 2, 24, 2, 16, backward=True, scale=0.5).arguments(torch.float32, DEVICE)
    monkeypatch.setattr(attention_packed_backward, "tuned_config", lambda *_args, **_given: config)
    for one, other in zip(SUMMED(**arguments), summed_on_cpu(**arguments), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_registration():
    arguments = attention_sample("", 2, 3, 1, 4, backward=True).arguments(torch.float32, DEVICE)
    outcome = torch.library.opcheck(SUMMED, (), arguments, test_utils=("test_schema", "test_faketensor"))
    assert set(outcome.values()) == {"SUCCESS"}
    assert torch.Tag.needs_exact_strides in SUMMED.tags
    assert BY_TRAINING_OVERLOAD[SUMMED] is SUMMED_OP and TUNED_AS[SUMMED_OP] is OP
    assert SUMMED_OP.source_hash == OP.source_hash
    more_bytes = SUMMED_OP.cost(**arguments).bytes - OP.cost(**arguments).bytes
    assert more_bytes == SUMMED(**arguments)[1].nbytes


def test_empty_batch():
    arguments = attention_sample("", 0, 5, 2, 16, backward=True).arguments(torch.float32, DEVICE)
    dqkv, sums = SUMMED(**arguments)
    assert dqkv.shape == (0, 5, 96) and sums.shape == (0, 96)


def test_it_is_tuned_as_the_other_form(monkeypatch: pytest.MonkeyPatch):
    """Whose row it looks up, with the same key."""
    arguments, asked = OP.samples[-1].arguments(torch.bfloat16, "meta"), []
    config = Config(64, 32, 4, 1)

    def tuned(op: Any, _kind: Any, is_valid: Any, **given: Any) -> Config:
        asked.append((op.name, op.key(**given)))
        assert is_valid(config)
        return config

    monkeypatch.setattr(attention_packed_backward, "tuned_config", tuned)
    launches = [one.launcher.plan(target=H200, **arguments) for one in (OP, SUMMED_OP)]
    assert asked == [(OP.name, OP.key(**arguments))] * 2
    assert launches[0].arguments["sums_ptr"] is None
    assert launches[0].grid == launches[1].grid and launches[0].constants == launches[1].constants
