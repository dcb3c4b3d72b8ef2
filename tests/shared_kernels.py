"""What tests of the training convolutions share: results judged, sizes that compile once, planted tuned tables."""

import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from ridgeline import tuned
from ridgeline.kernels import conv2d_wgrad_fp8
from ridgeline.kernels._op import MATMUL, RIVAL, Launch, Op, Target, typical_target
from ridgeline.numerics import compare, to_float64

SM_90 = typical_target("sm_90")
Size = tuple[int, int, int]


def sizes_of_one_kernel(launch_of: Callable[[Size], Launch], seed: int, *, most: int = 25) -> list[Size]:
    """At least five sizes (n, h, w), drawn at random, whose launches differ in run-time values alone."""
    chosen = random.Random(seed)

    def drawn() -> Size:
        return chosen.choice((1, 2, 5, 33)), chosen.randint(1, 40), chosen.randint(1, 40)

    def sources(size: Size) -> list:
        return [part.source("sm_90") for part in launch_of(size).parts]

    found: list[Size] = []
    while len(found) < 5:
        first = drawn()
        found, compiled = [first], sources(first)
        for _ in range(300):
            # some sides stay as they are, because the best box depends on them, and a 1 is compiled in
            n, h, w = (new if chosen.random() < 0.5 else old for new, old in zip(drawn(), first, strict=True))
            if len(found) < most and (n, h, w) not in found and sources((n, h, w)) == compiled:
                found.append((n, h, w))
    return found


def right(op: Op, arguments: Mapping[str, Any], config: Any = None) -> None:
    """Launch on a GPU and compare with float64."""
    launch = op.launcher.plan(config=config, target=SM_90, **arguments)
    launch.output.fill_(float("nan"))
    launch.run()
    exact = op.reference(**to_float64(arguments))
    verdict = compare(launch.output, exact, op.reference(**arguments), error_factor=op.error_factor)
    assert verdict.passed, f"{op.name} {config}: {verdict.reason}"


def plant_rows(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, tuple[float, ...]], *modules: ModuleType) -> None:
    """Tuned rows for every shape: (ours, PyTorch's) by op, or (ours, PyTorch's, PyTorch's by a product of matrices).

    An op that is left out was not tuned.
    """

    def row(op: Op, **arguments: Any) -> tuned.Row | None:
        if op.name not in seconds:
            return None
        ours, *theirs = seconds[op.name]
        matmul = op.launcher.matmul
        tags = (RIVAL, MATMUL) if matmul is not None and matmul(**arguments) is not None else (RIVAL,)
        tried = dict(zip(tags, theirs, strict=False))
        key = op.key(**arguments)
        return tuned.Row(op.name, "hash", "GPU", "bf16", key, {"k": 1}, ours, None, "2", "3", "5", tried)

    for module in modules:
        monkeypatch.setattr(module, "tuned_row", row)


def assert_valid_and_distinct(op: Op, arguments: Mapping[str, Any]) -> None:
    """Of the configs that are proposed for a call."""
    configs = op.launcher.candidates(target=SM_90, **arguments)
    assert configs and len(set(configs)) == len(configs)
    for config in configs:
        op.launcher.plan(config=config, target=SM_90, **arguments)


def random_problem(rng: random.Random) -> tuple[tuple[int, int, int, int], tuple[int, int, int], int]:
    """(x, weight, promote) for `wgrad_fp8_sample`: small maps of every width, all filters, all kinds of promotion."""
    h, w = 4 * rng.randint(1, 3), rng.choice([4, 4, 8, 8, 16, 32])
    c, k = (16 * rng.randint(1, 5) for _ in range(2))
    promotions = [0, *(128 * rows for rows in range(1, h // 4 + 1) if h // 4 % rows == 0)]
    n, r, s = rng.randint(1, 9 if w < 16 else 3), rng.choice([1, 3]), rng.choice([1, 3])
    return (n, c, h, w), (k, r, s), rng.choice(promotions)


def right_gradients(arguments: Mapping[str, Any], config: Any = None, *, target: Target = SM_90) -> Launch:
    """Launch conv2d_wgrad_fp8 and compare both results with float64."""
    launch = conv2d_wgrad_fp8.plan(config=config, target=target, **arguments)
    db = launch.arguments["db_ptr"]
    assert isinstance(db, torch.Tensor)
    for tensor in (launch.output, launch.parts[0].output, db):
        tensor.fill_(float("nan"))
    launch.run()
    # conv2d's own sums of FP8 values in fp32: TF32 would round them
    with torch.backends.cudnn.flags(allow_tf32=False):
        eager, eager_db = conv2d_wgrad_fp8.gradients(**arguments)
    exact, exact_db = conv2d_wgrad_fp8.gradients(**to_float64(arguments))
    # the interpreter multiplies exactly: only the rounding to bf16 is allowed for
    eps = conv2d_wgrad_fp8.eps(**arguments) if db.is_cuda else None
    for found, wide, theirs in ((launch.output, exact, eager), (db, exact_db, eager_db)):
        verdict = compare(found, wide, theirs, eps=eps)
        assert verdict.passed, f"{config}: {verdict.reason}"
    return launch


def whole(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of small whole numbers every product and sum is exact, in any order."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.copy_(torch.randint(-2, 3, value.shape, generator=generator))

    return {name: drawn(value) for name, value in arguments.items()}
