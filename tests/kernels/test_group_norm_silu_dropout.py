"""Dropout of group_norm_silu: one mask in both directions and every tiling, its share, its independence, its bits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from test_group_norm_silu import DEVICE, FORWARD, H200, run_forward
from torch import Tensor

from ridgeline.cudagraph import capture
from ridgeline.kernels import group_norm_silu_backward
from ridgeline.kernels._group_norm_silu_call import Config
from ridgeline.kernels._group_norm_silu_dropout import RANDOM_STEPS, ROUNDS, scaled_mask
from ridgeline.kernels._group_norm_silu_samples import gradient_sample, norm_sample


def test_both_directions_drop_the_same_elements_in_every_tiling():
    for shape, groups, configs in (
        ((1, 32, 2, 4), 4, (Config(4, 8, 4), Config(2, 8, 1), Config(4, 4, 1))),
        ((1, 15, 3, 2), 3, (Config(3, 8, 4), Config(1, 8, 1), Config(3, 4, 2))),
    ):
        arguments = gradient_sample("", shape, groups, act="none", p=0.5).arguments(torch.float32, DEVICE)
        arguments |= {"beta": arguments["beta"] + 100, "dy": torch.ones_like(arguments["dy"])}
        mask = scaled_mask(arguments["x"], arguments["seed"], arguments["offset"], 0.5) == 0
        assert 0.2 < mask.float().mean() < 0.8
        for config in configs:
            assert torch.equal(run_forward(arguments, config) == 0, mask)
            back = group_norm_silu_backward.plan(config=config, target=H200, **arguments)
            back.run()
            # the sum of g over pixels counts what is kept, twice over for p of a half
            sums = back.arguments["sums_ptr"].sum(1)[:, 0]
            torch.testing.assert_close(sums, 2 * (~mask).sum((2, 3)).float())


def drawn(p: float, shape: tuple[int, ...], *, seed: int = 7, offset: int = 7) -> Tensor:
    """What the reference drops, which the kernels drop too."""
    random_ = (torch.tensor([value], dtype=torch.int64, device=DEVICE) for value in (seed, offset))
    return scaled_mask(torch.empty(shape, device=DEVICE), *random_, p) == 0


def test_the_share_kept_and_independence_of_streams():
    shape, p = (4, 36, 32, 32), 0.1
    first = drawn(p, shape)
    sigma = math.sqrt(p * (1 - p) / first.numel())
    assert abs(first.float().mean().item() - p) < 5 * sigma
    # of samples, channels, rows and columns, each alone
    for axis in range(4):
        shares = first.float().mean([other for other in range(4) if other != axis])
        assert (shares - p).abs().max() < 6 * sigma * math.sqrt(shares.numel())
    others = [drawn(p, shape, **changed) for changed in ({"offset": 8}, {"seed": 8}, {"offset": 7 + 2**32})]
    assert torch.equal(first, drawn(p, shape))
    for one, other in pairwise([first, *others]):
        both = (one & other).float().mean().item()
        assert abs(both - p * p) < 6 * p * math.sqrt(1 / first.numel())


def test_different_offsets_drop_different_elements_in_the_kernel():
    arguments = norm_sample("", (1, 64, 4, 4), 4, p=0.5).arguments(torch.float32, DEVICE)
    first = run_forward(arguments) == 0
    arguments["offset"] = arguments["offset"] + 2**32
    assert 0.3 < (first != (run_forward(arguments) == 0)).float().mean() < 0.7


def test_philox_is_philox():
    x = torch.empty(1, 8, 1, 1, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    mask = scaled_mask(x, zero, zero, 0.5).flatten()
    # from counter 0 and key 0, in Python's integers
    counter, key = [0, 0, 0, 0], [0, 0]
    for _ in range(ROUNDS):
        a, c = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(c >> 32) ^ counter[1] ^ key[0], c & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    halves = [half for word in counter for half in (word & 0xFFFF, word >> 16)]
    assert mask.tolist() == [2.0 if half >= RANDOM_STEPS // 2 else 0.0 for half in halves]


def test_p_of_zero_is_no_dropout():
    arguments = norm_sample("", (2, 16, 4, 4), 4, scale=True).arguments(torch.float32, DEVICE)
    random_ = {name: torch.ones(1, dtype=torch.int64, device=DEVICE) for name in ("seed", "offset")}
    assert torch.equal(FORWARD(**arguments), FORWARD(**arguments, **random_, p=0.0))
    assert not drawn(0.0, (2, 16, 4, 4)).any()
    assert drawn(1 - 1e-9, (4, 64, 8, 8)).float().mean() > 0.99


@pytest.mark.gpu
def test_a_captured_call_draws_anew():
    arguments = norm_sample("", (2, 32, 16, 16), 8, act="none", p=0.5).arguments(torch.bfloat16, "cuda")
    captured = capture(lambda: FORWARD(**arguments), (), warmup=1)
    masks = []
    for offset in (7, 8, 7):
        arguments["offset"].fill_(offset)
        masks.append(captured.replay().clone() == 0)
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
