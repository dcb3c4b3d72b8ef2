"""What is special about conv_pair_chain: random pairs with every tile, slices as operands, and each refusal."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from chain_calls import CHANNELS, DEVICE, HAS_GPU, bias, check, check_into, sliced, tails, tensor
from torch import Tensor

from ridgeline.kernels import conv_chain, conv_pair_chain
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.numerics import TF32_EPS

CASES = 300 if HAS_GPU else 60


def pair(seed: int, *, sizes: tuple[int, ...] = (1, 2, 5)) -> dict[str, Any]:
    """A random call. Every map may be a channel slice of a wider one."""
    draw = random.Random(seed)
    dtype = draw.choice((torch.float32, torch.float16))
    n, c, h, w = draw.choice((1, 1, 2)), draw.choice(CHANNELS), draw.choice(sizes), draw.choice(sizes)
    inner, k, count = draw.choice(CHANNELS), draw.choice(CHANNELS), draw.choice((0, 0, 1, 2, 3))
    behind = tails(count, (n, k, h, w), seed, dtype, draw)
    return {
        "x": sliced((n, c, h, w), seed + 40, dtype, draw),
        "inner_weight": tensor((inner, c, 3, 3), seed + 30, dtype) * (9 * c) ** -0.5,
        "inner_bias": draw.choice((None, bias(inner, seed + 45))),
        "weight": tensor((k, inner, 3, 3), seed + 35, dtype) * (9 * inner) ** -0.5,
        "bias": draw.choice((None, bias(k, seed + 50))),
        "residual": draw.choice((None, sliced((n, k, h, w), seed + 60, dtype, draw))),
        **behind,
        "acts": " ".join(draw.choice(("silu", "none")) for _ in range(count + 2)),
        "precision": "ieee",
    }


@pytest.mark.parametrize("first", range(0, CASES, 20))
def test_random_pairs(first):
    for seed in range(first, first + 20):
        arguments = pair(seed)
        check(conv_pair_chain.OP, arguments, conv_pair_chain.OP(**arguments))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("block_n", [16, 32])
def test_every_tile_on_odd_maps(block_m, block_n, early):
    checked = 0
    for seed in range(8):
        arguments = pair(1000 + seed, sizes=(7, 13))
        config = conv_pair_chain.Config(block_m, block_n, 16, 8, 1 + 2 * (seed % 2), early)
        if checked < 2 and config.is_valid(conv_pair_chain.PairProblem(**arguments), typical_target("sm_90")):
            launch = conv_pair_chain.plan(config=config, **arguments)
            launch.output.fill_(float("nan"))
            launch.run()
            check(conv_pair_chain.OP, arguments, launch.output)
            checked += 1
    assert checked


def test_the_reference_is_one_convolution_in_front_of_a_chain():
    arguments = plain()
    geometry = {"stride": (1, 1), "padding": (1, 1)}
    inner = torch.nn.functional.conv2d(arguments["x"], arguments["inner_weight"], arguments["inner_bias"], padding=1)
    names = ("weight", "bias", "residual", "weights", "biases", "extras", "skips")
    rest = {name: arguments[name] for name in names}
    behind = conv_chain.reference(torch.nn.functional.silu(inner), acts="silu silu silu", **rest, **geometry)
    assert torch.equal(conv_pair_chain.reference(**arguments), behind)


def test_the_outer_convolution_pads_with_zeros():
    """With a bias the inner value outside the image would not be zero."""
    arguments = plain(inner_bias=torch.full((8,), 3.0, device=DEVICE), precision="ieee")
    check(conv_pair_chain.OP, arguments, conv_pair_chain.OP(**arguments))


def test_writes_into_a_slice_and_leaves_the_rest_alone():
    check_into(conv_pair_chain.OP, pair(5))


def plain(**changes: Any) -> dict[str, Any]:
    sample = next(s for s in conv_pair_chain.SAMPLES if "two tails" in s.why)
    return {**sample.arguments(torch.float32, DEVICE), **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"skips": [-1]}, "needs 0 to 3 tails"),
        ({"acts": "silu silu silu"}, "acts must name 4"),
        ({"acts": "silu silu relu none"}, "acts must name 4"),
        ({"skips": [-1, 2]}, "skips must each"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"extras": [None, None]}, r"weights\[0\] must be contiguous"),
        ({"inner_weight": torch.zeros(8, 16, 3, 3)}, "inner_weight must be channels_last"),
        ({"inner_weight": torch.zeros(8, 16, 1, 1)}, "inner_weight must be channels_last"),
        ({"weight": torch.zeros(16, 16, 3, 3)}, "weight must be channels_last"),
        ({"inner_bias": torch.zeros(16)}, "inner_bias must have shape"),
        ({"residual": torch.zeros(1, 24, 5, 5)}, "residual must be"),
    ],
)
def test_refuses(changes, text):
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=f"conv_pair_chain: {text}"):
        conv_pair_chain.PairProblem(**plain(**moved))


def test_refuses_a_weight_of_another_dtype():
    weight = random_nhwc((8, 16, 3, 3), torch.float16, DEVICE, seed=0)
    with pytest.raises(ValueError, match="inner_weight must be"):
        conv_pair_chain.PairProblem(**plain(inner_weight=weight))


@pytest.mark.parametrize("name", ["x", "residual"])
def test_refuses_to_write_over_what_other_programs_read(name):
    buffer = random_nhwc((1, 24, 5, 5), torch.float32, DEVICE, seed=0)
    with pytest.raises(ValueError, match="out must share no memory"):
        conv_pair_chain.PairProblem(**plain(**{name: buffer[:, :16]}), out=buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("sample", [s for s in conv_pair_chain.SAMPLES if s.real_size], ids=lambda s: s.why)
@pytest.mark.parametrize("dtype", conv_pair_chain.FLOATS, ids=str)
def test_every_candidate_is_right(sample, dtype):
    arguments = sample.arguments(dtype, "cuda")
    for config in conv_pair_chain.candidates(**arguments):
        launch = conv_pair_chain.plan(config=config, **arguments)
        launch.run()
        check(conv_pair_chain.OP, arguments, launch.output, eps=TF32_EPS if dtype == torch.float32 else None)
