"""What is special to max_pool_chain: it is exact, windows overlap edges and each other, NaN spreads."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.cost import Cost
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.max_pool_chain import (
    OP,
    SAMPLES,
    Config,
    Problem,
    candidates,
    cost,
    default_config,
    plan,
    reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = typical_target("sm_90")


def make(shape=(1, 8, 5, 4), size=3, count=2, *, dtype=torch.float16, seed=0) -> dict[str, Any]:
    # few distinct values: ties everywhere
    x = (random_nhwc(shape, torch.float32, DEVICE, seed=seed) * 2).round() / 2
    return {"x": x.to(dtype).contiguous(memory_format=torch.channels_last), "size": size, "count": count}


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_are_exact(seed: int):
    """Odd everything, a random tile, x and y inside NaN buffers, some NaN and infinities of x's own."""
    rng = random.Random(seed)
    size, count = rng.choice([(3, 1), (3, 2), (3, 3), (5, 1), (5, 2), (1, 2)])
    shape = rng.randint(1, 2), rng.choice([1, 3, 8, 16, 17]), rng.randint(1, 5), rng.randint(1, 5)
    arguments = make(shape, size, count, dtype=rng.choice([torch.float32, torch.float16]), seed=seed)
    x = arguments["x"]
    for value in (math.nan, math.inf, -math.inf):
        if rng.random() < 0.3:
            x[tuple(rng.randrange(side) for side in shape)] = value
    n, c, h, w = shape
    wide = torch.full((n, h, w, c + 5), math.nan, dtype=x.dtype, device=DEVICE).permute(0, 3, 1, 2)
    wide[:, 2 : c + 2] = x
    arguments["x"] = wide[:, 2 : c + 2]
    out = torch.full((n, h, w, (count + 1) * c + 3), 7.0, dtype=x.dtype, device=DEVICE).permute(0, 3, 1, 2)
    y = out[:, 1 : (count + 1) * c + 1]
    problem = Problem(**arguments)
    tiles = [Config(*tile) for tile in ((32, 16, 2, 4), (64, 8, 1, 4), (128, 1, 4, 4), (16, 4, 3, 1))]
    config = rng.choice([default_config(problem, H200), *(t for t in tiles if t.is_valid(problem, H200))])
    plan(config=config, out=y, **arguments).run()
    torch.testing.assert_close(y, reference(**arguments), rtol=0, atol=0, equal_nan=True)
    # only the slice was written
    assert bool((out[:, 0] == 7).all()) and bool((out[:, -2:] == 7).all())


def test_sppf_is_three_pools_of_five():
    x = make((1, 4, 8, 7), dtype=torch.float32)["x"]
    y = plan(x=x, size=5, count=3, config=Config(64, 4, 4, 4))
    y.run()
    windows = [F.max_pool2d(x, side, stride=1, padding=side // 2) for side in (1, 5, 9, 13)]
    assert torch.equal(y.output, torch.cat(windows, dim=1))
    assert torch.equal(y.output, reference(x, size=5, count=3))


def test_nan_reaches_as_far_as_its_window():
    x = torch.zeros(1, 1, 9, 9, device=DEVICE)
    x[0, 0, 4, 4] = math.nan
    y = OP(x=x, size=3, count=2)
    assert y.isnan().sum(dim=(0, 2, 3)).tolist() == [1, 9, 25]


def test_an_empty_batch_is_empty():
    assert OP(x=random_nhwc((0, 8, 5, 4), torch.float16, DEVICE, seed=0), size=3, count=2).shape == (0, 24, 5, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": 4}, "size must be odd, got 4"),
        ({"size": -1}, "size must be odd, got -1"),
        ({"count": 0}, "count must be at least 1 .* got 0 pools of size 3"),
        ({"count": 40}, "last window at most 63 wide, got 40 pools of size 3"),
        ({"x": torch.zeros(1, 8, 5, 4)}, r"x must be channels_last .* got strides \(160, 20, 4, 1\)"),
        ({"x": torch.zeros(8, 5, 4)}, r"x must have 4 axes .* got shape \(8, 5, 4\)"),
        ({"x": torch.zeros(1, 8, 0, 4)}, r"a pixel and a channel, got shape \(1, 8, 0, 4\)"),
    ],
)
def test_refusals(change: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=f"max_pool_chain: .*{text}"):
        Problem(**{**make(), **change})
    with pytest.raises(TypeError, match=r"must be one of fp32, fp16, bf16, got torch\.int32"):
        Problem(torch.zeros(1, 8, 5, 4, dtype=torch.int32), 3, 1)
    wide = make((1, 24, 5, 4))["x"]
    with pytest.raises(ValueError, match="out must not share memory with x"):
        Problem(wide[:, :8], 3, 2, out=wide)


def test_offsets_beyond_32_bits_are_wide():
    for n, wide in ((63, False), (65, True)):
        x = torch.empty(n, 32, 512, 512, dtype=torch.float16, device="meta").contiguous(
            memory_format=torch.channels_last
        )
        assert plan(target=H200, x=x, size=5, count=3).constants["WIDE"] is wide


def test_cost_is_that_of_the_pools():
    x = torch.empty(2, 3, 5, 7, dtype=torch.float16, device="meta")
    assert cost(x, size=5, count=3) == Cost(3 * 25 * 210, 420, 1680)


def test_defaults_fill_the_gpu_and_candidates_are_valid():
    for sample in SAMPLES:
        arguments = sample.arguments(torch.float16, "meta")
        problem, found = Problem(**arguments), candidates(target=H200, **arguments)
        assert found[0] == default_config(problem, H200)
        assert len(set(found)) == len(found)
        assert all(config.is_valid(problem, H200) for config in found)
        assert not sample.real_size or plan(target=H200, **arguments).grid[0] >= H200.sm_count
