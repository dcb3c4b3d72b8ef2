"""What is special about conv_chain: random chains with every tile, slices as operands, and each refusal."""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from chain_calls import CHANNELS, DEVICE, bias, check, check_into, sliced, tails, tensor
from torch import Tensor

from ridgeline import tuning
from ridgeline.kernels import conv_chain
from ridgeline.kernels._nhwc import random_nhwc, round_to_tf32
from ridgeline.kernels._op import Launch, Sample, target_of, typical_target
from ridgeline.kernels.depthwise_conv2d_act import pack
from ridgeline.numerics import TF32_EPS, compare, to_float64
from ridgeline.precompile import precompile, request

CASES = 300


def chain(seed: int, *, sizes: tuple[int, ...] = (1, 2, 5)) -> dict[str, Any]:
    """A random call. Every map may be a channel slice of a wider one."""
    draw = random.Random(seed)
    dtype = draw.choice((torch.float32, torch.float16))
    n, c, h, w = draw.choice((1, 1, 1, 2)), draw.choice(CHANNELS), draw.choice(sizes), draw.choice(sizes)
    depthwise = c > 1 and draw.random() < 0.3
    k, r = c if depthwise else draw.choice(CHANNELS), draw.choice((1, 1, 3, 5))
    stride, padding = draw.choice((1, 1, 2)), r // 2
    oh, ow = ((side + 2 * padding - r) // stride + 1 for side in (h, w))
    count = draw.choice((1, 2, 3))
    behind = tails(count, (n, k, oh, ow), seed, dtype, draw)
    weight = tensor((k, 1 if depthwise else c, r, r), seed + 30, dtype) * ((1 if depthwise else c) * r * r) ** -0.5
    return {
        "x": sliced((n, c, h, w), seed + 40, dtype, draw),
        "weight": pack(weight) if depthwise else weight,
        "bias": draw.choice((None, bias(k, seed + 50))),
        "residual": draw.choice((None, sliced((n, k, oh, ow), seed + 60, dtype, draw))),
        **behind,
        "stride": (stride, stride),
        "padding": (padding, padding),
        "acts": " ".join(draw.choice(("silu", "none")) for _ in range(count + 1)),
        "precision": "ieee",
    }


@pytest.mark.parametrize("first", range(0, CASES, 20))
def test_random_chains(first):
    for seed in range(first, first + 20):
        arguments = chain(seed)
        check(conv_chain.OP, arguments, conv_chain.OP(**arguments))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_every_tile_on_odd_maps(block_m, block_n, early):
    checked = 0
    for seed in range(6):
        arguments = chain(1000 + seed, sizes=(7 if block_m == 16 else 13,))
        config = conv_chain.Config(block_m, block_n, 16, 4, 1 + 2 * (seed % 2), early)
        if checked < 2 and config.is_valid(conv_chain.Problem(**arguments), typical_target("sm_90")):
            launch = conv_chain.plan(config=config, **arguments)
            launch.output.fill_(float("nan"))
            launch.run()
            check(conv_chain.OP, arguments, launch.output)
            checked += 1
    assert checked


def test_writes_into_a_slice_and_leaves_the_rest_alone():
    check_into(conv_chain.OP, chain(5))


def plain(**changes: Any) -> dict[str, Any]:
    sample = next(s for s in conv_chain.SAMPLES if "3x3, residual" in s.why)
    return {**sample.arguments(torch.float32, DEVICE), **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"skips": [-1]}, "needs 1 to 3 tails"),
        ({"weights": [], "biases": [], "extras": [], "skips": []}, "needs 1 to 3 tails"),
        ({"acts": "silu silu"}, "acts must name 3"),
        ({"acts": "silu relu none"}, "acts must name 3"),
        ({"skips": [0, -1]}, "skips must each"),
        ({"skips": [-1, 2]}, "skips must each"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"extras": [None, None]}, r"weights\[0\] must be contiguous"),
        ({"biases": [torch.zeros(3), None]}, r"biases\[0\] must have shape"),
        ({"weight": torch.zeros(16, 8, 3, 3)}, "weight must be channels_last"),
        ({"residual": torch.zeros(1, 24, 6, 5)}, "residual must be"),
    ],
)
def test_refuses(changes, text):
    moved = {
        name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in changes.items()
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"conv_chain: {text}"):
        conv_chain.Problem(**plain(**moved))


def test_refuses_values_that_registers_cannot_hold():
    sample = next(s for s in conv_chain.SAMPLES if "stride 2, two images" in s.why).arguments(torch.float16, DEVICE)
    wide = {
        "weight": random_nhwc((272, 8, 3, 3), torch.float16, DEVICE, seed=0),
        "bias": None,
        "weights": [random_nhwc((16, 272, 1, 1), torch.float16, DEVICE, seed=1).contiguous()],
    }
    with pytest.raises(ValueError, match="at most 256 channels"):
        conv_chain.Problem(**{**sample, **wide})


@pytest.mark.parametrize("name", ["x", "residual"])
def test_refuses_to_write_over_what_other_programs_read(name):
    arguments = plain()
    arguments["skips"] = [-1, -1]
    if name == "x":
        arguments["x"] = random_nhwc((1, 16, 6, 5), torch.float32, DEVICE, seed=0)
    buffer = random_nhwc((1, 24, 6, 5), torch.float32, DEVICE, seed=0)
    arguments[name] = buffer[:, :16]
    with pytest.raises(ValueError, match="out must share no memory"):
        conv_chain.Problem(**arguments, out=buffer)


def test_no_candidate_needs_more_shared_memory_than_there_is():
    """Compiled for sm_90 it takes 245,760 B of 232,448 B: a weight waits beside three steps of a loop."""
    target = typical_target("sm_90")
    sample = next(s for s in conv_chain.SAMPLES if "PSA tail" in s.why).arguments(torch.float32, "meta")
    large = conv_chain.Config(64, 256, 32, 8, 3, False)
    assert not large.is_valid(conv_chain.Problem(**sample), target)
    # one step at a time, or half the columns: 163,840 B each
    for small in (replace(large, num_stages=1), replace(large, block_n=128)):
        assert small.is_valid(conv_chain.Problem(**sample), target)
    assert large not in conv_chain.candidates(target=target, **sample)


CALLS = [(sample, dtype) for dtype in conv_chain.FLOATS for sample in conv_chain.SAMPLES if sample.real_size]


def launches(sample: Sample, dtype: torch.dtype) -> tuple[dict[str, Any], dict[Any, Launch]]:
    """The call, and a launch for each candidate that `tune` would try. Weights are rounded, as TF32 needs them."""
    arguments = sample.arguments(dtype, DEVICE)
    if dtype == torch.float32:
        arguments["weight"] = round_to_tf32(arguments["weight"])
        arguments["weights"] = [round_to_tf32(weight) for weight in arguments["weights"]]
    configs = conv_chain.candidates(**arguments)[: 1 + tuning.WIDTH]
    return arguments, {config: conv_chain.plan(config=config, **arguments) for config in configs}


@pytest.fixture(scope="module")
def refused() -> dict[tuple[str, torch.dtype, Any], str | None]:
    """Why a candidate does not compile, or None. All are compiled at once: one takes seconds, together minutes."""
    requests = {}
    for sample, dtype in CALLS:
        for config, made in launches(sample, dtype)[1].items():
            target = target_of(made.output)
            where = {"arch": target.arch, "shared_limit_bytes": target.shared_bytes}
            text = request(made.kernel, made.arguments, made.constants, made.options, **where)
            requests[sample.why, dtype, config] = text
    with closing(precompile(list(requests.values()), len(os.sched_getaffinity(0)))) as reasons:
        return dict(zip(requests, reasons, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("sample", "dtype"), CALLS, ids=lambda value: getattr(value, "why", str(value)))
def test_every_candidate_is_right(sample, dtype, refused):
    arguments, made = launches(sample, dtype)
    exact, eager = conv_chain.reference(**to_float64(arguments)), conv_chain.reference(**arguments)
    wrong = []
    for config, launch in made.items():
        reason = refused[sample.why, dtype, config]
        if reason is None:
            launch.output.fill_(float("nan"))
            launch.run()
            verdict = compare(launch.output, exact, eager, eps=TF32_EPS if dtype == torch.float32 else None)
            reason = None if verdict.passed else verdict.reason
        wrong += [f"{config}: {reason}"] if reason else []
    assert not wrong, "\n".join(wrong)
