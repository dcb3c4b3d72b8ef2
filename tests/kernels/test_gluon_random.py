"""Two hundred random calls of each convolution of training on sm_90, in plain Python, against float64.

Sizes, filters, strides, configs and the number of multiprocessors are drawn, so that programs take one tile or many.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import gluon_interpreter
from gluon_launches import FORMAT, SM_90, first_launch, result, wgmma_configs
from ridgeline.kernels import conv2d_dgrad, conv2d_fp8, conv2d_fprop, conv2d_wgrad, conv2d_wgrad_fp8
from ridgeline.numerics import compare, to_float64
from shared_kernels import random_problem

SEEDS, CALLS = range(20), 10


def random_pass(rng, of_x, *, by_2=True, adds=True):
    """One of `of_x`'s samples, a pass over small maps whose sides, channels and filters are odd to the tiles.

    Some of those that may add a map do.
    """
    stride = rng.choice([1, 1, 2]) if by_2 else 1
    n, h, w = rng.randint(1, 3), stride * rng.randint(1, 7), stride * rng.randint(1, 7)
    r, s = rng.choice([(1, 1), (3, 3), (3, 3), *([(1, 3), (5, 1)] if stride == 1 else [])])
    granule = 8 if by_2 and stride == 1 else 16
    c, k = (granule * rng.randint(1, 80 // granule) for _ in range(2))
    choices = {"stride": stride} if by_2 else {}
    if adds and stride == 1:
        choices["residual"] = rng.choice([False, True])
    return of_x("", (n, c, h, w), (k, r, s), **choices)


def of_fp8(rng):
    x, weight, promote = random_problem(rng)
    return conv2d_wgrad_fp8.wgrad_fp8_sample("", x, weight, promote=promote)


DRAWS = {
    conv2d_fprop.OP: lambda rng: random_pass(rng, conv2d_fprop.fprop_sample),
    conv2d_dgrad.OP: lambda rng: random_pass(rng, conv2d_dgrad.dgrad_sample),
    conv2d_wgrad.OP: lambda rng: random_pass(rng, conv2d_wgrad.wgrad_sample, adds=False),
    conv2d_fp8.OP: lambda rng: random_pass(rng, conv2d_fp8.fp8_sample, by_2=False),
    conv2d_wgrad_fp8.OP: of_fp8,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", DRAWS, ids=lambda op: op.name)
def test_random_calls_against_float64(op, seed):
    rng = random.Random(seed)
    for _ in range(CALLS):
        sample, target = DRAWS[op](rng), replace(SM_90, sm_count=rng.choice([1, 3, 9]))
        arguments = sample.arguments(FORMAT.get(op, torch.float16), "meta")
        config = rng.choice(wgmma_configs(op, arguments, target))
        launch, arguments = first_launch(op, sample, config, target=target)
        gluon_interpreter.run(launch)
        exact, eager = (op.reference(**given) for given in (to_float64(arguments), arguments))
        verdict = compare(result(op, launch, arguments), exact, eager, error_factor=op.error_factor, eps=1e-3)
        assert verdict.passed, f"{config} {launch.constants}: {verdict.reason}"
