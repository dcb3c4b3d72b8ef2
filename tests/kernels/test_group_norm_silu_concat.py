"""group_norm_silu of two maps: the bits of the concatenation in every form, gradients, refusals, machine code."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels import (
    group_norm_silu,
    group_norm_silu_backward,
    group_norm_silu_backward_concat,
    group_norm_silu_fp8,
)
from ridgeline.kernels._group_norm_silu_call import Call, Config
from ridgeline.kernels._group_norm_silu_samples import norm_sample
from ridgeline.kernels._op import Launch, Op, typical_target
from ridgeline.sass import SassReport, compile_many, inspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = typical_target("sm_90")
OP, BACKWARD = group_norm_silu.OP, group_norm_silu_backward_concat.OP


def given(shape: tuple[int, int, int, int], groups: int, second: int, **options: Any) -> dict[str, Any]:
    return norm_sample("", shape, groups, second=second, **options).arguments(torch.float32, DEVICE)


def joined(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call of the concatenation."""
    x = torch.cat((arguments["x"], arguments["x2"]), 1).contiguous(memory_format=torch.channels_last)
    return {**{name: value for name, value in arguments.items() if name != "x2"}, "x": x}


def run(launch: Launch) -> Launch:
    launch.output.fill_(float("nan"))
    launch.run()
    return launch


def draw(rng: random.Random) -> tuple[dict[str, Any], Config]:
    """Two maps of any channels, so that a group, a slab or a vector may have some of both; and any tiling."""
    groups, group_channels = rng.choice([1, 2, 3, 4, 8]), rng.choice([2, 4, 5, 8, 12])
    channels = groups * group_channels
    options = {"scale": rng.random() < 0.5, "p": rng.choice([0.0, 0.0, 0.25]), "act": rng.choice(["silu", "none"])}
    shape = (rng.randint(1, 2), channels, rng.randint(1, 5), rng.randint(1, 5))
    # of whole groups, or of any channels
    second = rng.choice([group_channels * rng.randint(1, groups), rng.randrange(1, channels)])
    arguments = given(shape, groups, second if second < channels else 1, **options)
    call = Call(**arguments)
    while True:
        config = Config(rng.randint(1, groups), 2 ** rng.randint(0, 5), rng.choice([1, 2, 4]), rng.random() < 0.4)
        if config.is_valid(call, H200) and config.programs(call) <= 12:
            return arguments, config


@pytest.mark.parametrize("seed", range(4))
def test_bits_are_those_of_the_concatenation(seed: int):
    rng = random.Random(seed)
    for _ in range(60 if DEVICE == "cuda" else 4):
        arguments, config = draw(rng)
        whole = joined(arguments)
        y, expected = (run(group_norm_silu.plan(config=config, **one)).output for one in (arguments, whole))
        assert torch.equal(y, expected), config
        dy = torch.randn(whole["x"].shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
        dy = dy.contiguous(memory_format=torch.channels_last)
        both = run(group_norm_silu_backward.plan(config=config, dy=dy, **arguments))
        one = run(group_norm_silu_backward.plan(config=config, dy=dy, **whole))
        assert torch.equal(torch.cat((both.output, second(both)), 1), one.output), config
        assert torch.equal(*(sums(launch) for launch in (both, one))), config


def second(launch: Launch) -> Tensor:
    dx2 = launch.arguments["dx2_ptr"]
    assert isinstance(dx2, Tensor)
    return dx2


def sums(launch: Launch) -> Tensor:
    found = launch.arguments["sums_ptr"]
    assert isinstance(found, Tensor)
    return found


def test_the_drawn_slabs_are_of_one_map_and_of_both():
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(100)]
    straddling = 0
    for arguments, config in drawn:
        call = Call(**arguments)
        straddling += arguments["x"].shape[1] % (config.groups * call.group_channels) != 0
    assert 10 < straddling < 90
    assert 10 < sum(config.again for _, config in drawn) < 90


def test_gradients_of_the_operator_are_those_of_the_concatenation():
    arguments = given((2, 24, 4, 4), 3, 12, scale=True, p=0.25)
    names = [name for name in ("x", "gamma", "beta", "scale", "shift", "x2") if name in arguments]
    results = []
    for operator in (OP, lambda **one: OP(**joined(one))):
        leaves = {name: arguments[name].detach().clone().requires_grad_() for name in names}
        y = operator(**{**arguments, **leaves})
        dy = torch.randn(y.shape, generator=torch.Generator(DEVICE).manual_seed(9), device=DEVICE)
        results.append((y, *torch.autograd.grad(y, list(leaves.values()), dy)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert results[0][1].is_contiguous(memory_format=torch.channels_last)


def test_registration():
    forward = given((1, 8, 1, 3), 1, 4, scale=True, p=0.25)
    for name in ("x", "x2", "gamma", "beta"):
        forward[name] = forward[name].detach().clone().requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(torch.library.opcheck(OP.overload, (), forward, test_utils=tests).values()) == {"SUCCESS"}
    backward = BACKWARD.samples[0].arguments(torch.float32, DEVICE)
    outcome = torch.library.opcheck(BACKWARD.overload, (), backward, test_utils=("test_schema", "test_faketensor"))
    assert set(outcome.values()) == {"SUCCESS"}


def test_plain_pytorch_gives_the_same():
    for sample in BACKWARD.samples[:2]:
        arguments = sample.arguments(torch.float32, DEVICE)
        for ours, theirs in zip(
            BACKWARD(**arguments), group_norm_silu_backward_concat.gradients(**arguments), strict=True
        ):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x2": torch.zeros(2, 4, 3, 4)}, r"x2 must be torch.float32 on cpu of the samples and pixels of x"),
        ({"x2": torch.zeros(2, 4, 4, 4, dtype=torch.float16)}, "got torch.float16"),
        ({"x2": torch.zeros(2, 0, 4, 4)}, r"got torch.float32 on cpu of shape \(2, 0, 4, 4\)"),
        ({"x2": torch.zeros(2, 4, 4, 4)}, "x2 must be channels_last"),
        ({"groups": 5}, "groups must divide the 12 channels of x"),
        ({"gamma": torch.ones(8)}, r"gamma must be fp32 or torch.float32 of shape \(12,\)"),
    ],
)
def test_refusals(changed: dict[str, Any], words: str):
    arguments = norm_sample("", (2, 12, 4, 4), 3, second=4).arguments(torch.float32, "cpu")
    with pytest.raises(ValueError, match=words):
        group_norm_silu.plan(**{**arguments, **changed})


def test_an_empty_batch():
    arguments = given((2, 12, 4, 4), 3, 4)
    arguments |= {name: arguments[name][:0] for name in ("x", "x2")}
    y = OP(**arguments)
    assert y.shape == (0, 12, 4, 4)
    dx1, dx2, dgamma, *_ = BACKWARD(dy=y, **arguments)
    assert dx1.shape == (0, 8, 4, 4) and dx2.shape == (0, 4, 4, 4) and not dgamma.any()


# --- machine code --------------------------------------------------------------------------------------------------

PLANS = {
    OP: group_norm_silu.plan,
    group_norm_silu_fp8.OP: group_norm_silu_fp8.plan,
    BACKWARD: group_norm_silu_backward.plan,
}


def real_size(op: Op) -> dict[str, Any]:
    sample = next(s for s in op.samples if "32x32 256 + 128" in s.why)
    return sample.arguments(torch.bfloat16, "meta")


@pytest.fixture(scope="module")
def reports() -> list[SassReport]:
    """Of two maps and of their concatenation in turn; then the backward of two maps on other GPUs."""
    sources = []
    for op, plan in PLANS.items():
        arguments = real_size(op)
        sources += [plan(target=H200, **one).source("sm_90") for one in (arguments, joined(arguments))]
    for arch in ("sm_89", "sm_120"):
        sources.append(group_norm_silu_backward.plan(target=typical_target(arch), **real_size(BACKWARD)).source(arch))
    return [inspect(binary) for binary in compile_many(sources)]


def test_vectors_stay_whole(reports: list[SassReport]):
    """A border between groups, and so in slabs: 16 bytes an access, as many as of one map, a twentieth more code."""
    for both, whole in zip(reports[:6:2], reports[1:6:2], strict=True):
        for access in ("LDG.E.128", "STG.E.128"):
            assert both.instructions[access] == whole.instructions[access], (both.kernel, access)
        total, before = (sum(report.instructions.values()) for report in (both, whole))
        assert total <= 1.05 * before, (both.kernel, total, before)
    for report in (*reports[:6:2], *reports[6:]):
        narrow = [one for one in report.instructions if one.startswith(("LDG.E.U", "LDG.E.64", "STG.E.U"))]
        assert not narrow, (report.kernel, report.arch)
        # eight of them are there of one map too
        assert report.spill_bytes <= (24 if "backward" in report.kernel else 0), (report.kernel, report.arch)


@pytest.mark.gpu
@pytest.mark.parametrize("sample", [s for s in BACKWARD.samples if s.real_size], ids=lambda s: s.why)
def test_real_sizes_give_the_bits_of_the_concatenation_on_a_gpu(sample: Any):
    arguments = sample.arguments(torch.bfloat16, "cuda")
    forward = {name: value for name, value in arguments.items() if name != "dy"}
    for config in group_norm_silu.candidates(**forward)[:6]:
        launches = (group_norm_silu.plan(config=config, **one) for one in (forward, joined(forward)))
        assert torch.equal(*(run(launch).output for launch in launches)), config
    for config in group_norm_silu_backward.candidates(**arguments)[:6]:
        both, one = (run(group_norm_silu_backward.plan(config=config, **a)) for a in (arguments, joined(arguments)))
        assert torch.equal(torch.cat((both.output, second(both)), 1), one.output), config
