"""PyTorch's attention beside attention_packed: who is timed, what `tune` stores, and what the tables then say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmark_scripts import load
from ridgeline import tuned
from ridgeline.errors import EnvironmentUnusable
from ridgeline.kernels import attention_packed, attention_packed_backward
from ridgeline.kernels._attention_packed_call import attention_sample
from ridgeline.kernels._op import RIVAL, Op
from ridgeline.kernels.attention_packed import Price, price
from ridgeline.kernels.attention_packed_backward import by_backend, fastest
from ridgeline.numerics import compare, to_float64
from ridgeline.timing import Timing
from ridgeline.train_rewrites.fuse_attention import Attention
from ridgeline.tuning import Backend, tune_all
from shared_kernels import plant_rows

FORWARD, BACKWARD = attention_packed.OP, attention_packed_backward.OP
GPU = "NVIDIA Test"
GIVEN = attention_sample("", 2, 9, 2, 16, backward=True).arguments(torch.float16, "cpu")
FORWARD_GIVEN = {name: GIVEN[name] for name in ("qkv", "heads")}


@pytest.mark.parametrize(("op", "given"), [(FORWARD, FORWARD_GIVEN), (BACKWARD, GIVEN)], ids=["forward", "backward"])
def test_each_kernel_that_takes_the_problem_computes_what_ours_does(op: Op, given: dict[str, Any]):
    """A CPU has two of the four."""
    calls = by_backend(op.reference, **given)
    assert list(calls) == ["flash", "math"]
    assert op.launcher.rival is not None
    # by the textbook, beside which an error of PyTorch's kernels shows
    exact = dense(**to_float64(given))
    for call in (*calls.values(), op.launcher.rival(**given)):
        found = call()
        assert found.is_contiguous() and found.shape == exact.shape
        verdict = compare(found, exact, dense(**given))
        assert verdict.passed, verdict.reason


def test_the_benchmark_times_each_of_them_both_ways():
    script = load("attention_packed")
    job = script.Job(BACKWARD.samples[0], "fp16", GIVEN)
    calls = list(script.rivals(job, compiled=False))
    ways = ("forward", FORWARD_GIVEN), ("forward+backward", GIVEN)
    assert [(call.what, call.recipe) for call in calls] == [(way, n) for n in ("flash", "math") for way, _ in ways]
    for call, (_, given) in zip(calls, ways * 2, strict=True):
        torch.testing.assert_close(call.run(), dense(**given), rtol=2e-3, atol=2e-3)
    script.check(job)


def dense(qkv: Tensor, heads: int, dout: Tensor | None = None, **_: Any) -> Tensor:
    """out, or of a gradient of it that of qkv."""
    leaf = qkv.detach().requires_grad_()
    q, k, v = leaf.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return out.detach() if dout is None else torch.autograd.grad(out, leaf, dout)[0]


def test_the_fastest_is_the_rival(monkeypatch: pytest.MonkeyPatch):
    def made(calls: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        return {name: SimpleNamespace(median_s=call().item()) for name, call in calls.items()}

    monkeypatch.setattr(attention_packed_backward, "time_many", made)
    calls = {str(seconds): (lambda s=seconds: torch.tensor(s)) for seconds in (3.0, 1.0, 2.0)}
    assert fastest(calls, GIVEN["qkv"])() == 1.0
    with pytest.raises(EnvironmentUnusable, match=r"no kernel of PyTorch's takes \(2, 9, 96\) torch.float16 on cpu"):
        fastest({}, GIVEN["qkv"])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # the backward's rival computes its forward too, so the forward's own is not added
        ({FORWARD.name: (1.0, 9.0), BACKWARD.name: (3.0, 5.0)}, Price(4.0, 5.0)),
        ({FORWARD.name: (1.0, 2.0)}, None),
        ({BACKWARD.name: (3.0, 5.0)}, None),
        ({FORWARD.name: (1.0, 2.0), BACKWARD.name: (3.0, "not timed")}, None),
        ({}, None),
    ],
)
def test_the_price_is_of_both_ways_and_needs_both(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, Any], expected: Price | None
):
    plant_rows(monkeypatch, seconds, attention_packed)
    assert price(**FORWARD_GIVEN) == expected


def test_only_what_takes_less_pays():
    assert Price(1.0, 2.0).pays
    assert not Price(2.0, 2.0).pays and not Price(3.0, 2.0).pays


def test_nothing_is_known_off_a_gpu():
    assert price(**FORWARD_GIVEN) is None


def test_what_tune_stores_is_what_the_price_finds(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path))
    tuned.load.cache_clear()

    def compiled(requests: Sequence[str], jobs: int) -> Any:
        yield from (None for _ in requests)

    def measured(calls: Mapping[str, Any], repeats: int) -> dict[str, Timing]:
        seconds = {tag: 40.0 if tag == RIVAL else 20.0 for tag in calls}
        return {tag: Timing(s, s, s, s, 9, "cuda-event", "warm") for tag, s in seconds.items()}

    def on_test_gpu(op: Op, **arguments: Any) -> tuned.Row | None:
        return tuned.load(op.name, GPU, op.source_hash).row("fp16", op.key(**arguments))

    monkeypatch.setattr(attention_packed, "tuned_row", on_test_gpu)
    backend = Backend(compiled, measured, lambda _: GPU)
    known = Attention((2, 9, 96), 2, 0.5, torch.float16, torch.device("cpu"))
    try:
        rows = tune_all(known.problems(), width=0, backend=backend)
        assert [(row.op, row.seconds, row.tried[RIVAL]) for row in rows] == [
            (BACKWARD.name, 1.0, 2.0),  # the costlier first
            (FORWARD.name, 1.0, 2.0),
        ]
        assert price(GIVEN["qkv"], heads=2, scale=0.5) == Price(2.0, 2.0)
        assert price(GIVEN["qkv"], heads=4, scale=0.5) is None
        assert price(GIVEN["qkv"], heads=2) is None
    finally:
        tuned.load.cache_clear()


@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_backward_on_a_cpu_needs_no_autograd(scale: float | None):
    """A compiled graph calls it below autograd, where gradients cannot be asked for."""
    arguments = attention_sample("", 2, 9, 3, 12, backward=True, scale=scale).arguments(torch.float64, "cpu")
    expected = attention_packed_backward.reference(**arguments)
    with torch._C._AutoDispatchBelowAutograd():
        found = attention_packed_backward.on_cpu(**arguments)
        with pytest.raises(RuntimeError, match="does not require grad"):
            attention_packed_backward.reference(**arguments)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.shape == arguments["qkv"].shape and found.is_contiguous()
