"""1x1 convolutions as products of matrices by PyTorch: what they compute, and when a convolution's pass is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline import tuned
from ridgeline.kernels import PASSES, Op, conv2d_dgrad, conv2d_fprop, conv2d_wgrad
from ridgeline.kernels._op import MATMUL, RIVAL


def maps(*shape: int, seed: int, pitch: int = 0) -> Tensor:
    """A channels_last map; with a pitch the first channels of a wider one."""
    n, c, h, w = shape
    wide = torch.randn((n, pitch or c, h, w), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return wide.contiguous(memory_format=torch.channels_last)[:, :c]


def problems(pitch: int = 0) -> dict[Op, dict[str, Any]]:
    n, c, k, h, w = 3, 40, 24, 7, 13
    x, dy = maps(n, c, h, w, seed=0, pitch=pitch), maps(n, k, h, w, seed=1, pitch=pitch)
    weight, bias = maps(k, c, 1, 1, seed=2), torch.linspace(-1, 1, k, dtype=torch.float64)
    residuals = maps(n, k, h, w, seed=3), maps(n, c, h, w, seed=4)
    return {
        conv2d_fprop.OP: {"x": x, "weight": weight, "bias": bias, "residual": residuals[0], "padding": (0, 0)},
        conv2d_dgrad.OP: {"dy": dy, "weight": weight, "residual": residuals[1], "padding": (0, 0)},
        conv2d_wgrad.OP: {"dy": dy, "x": x, "kernel_size": (1, 1), "padding": (0, 0)},
    }


@pytest.mark.parametrize("pitch", [0, 48], ids=["dense", "slices of channels"])
@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
def test_each_pass_is_that_of_the_convolution(op: Op, pitch: int):
    given = problems(pitch)[op]
    assert op.launcher.matmul is not None
    call = op.launcher.matmul(**given)
    assert call is not None
    found, expected = call(), op.reference(**given)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    without = {name: value for name, value in given.items() if name not in ("bias", "residual")}
    call = op.launcher.matmul(**without)
    assert call is not None
    torch.testing.assert_close(call(), op.reference(**without))


@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
def test_other_convolutions_are_none(op: Op):
    assert op.launcher.matmul is not None
    for sample in op.samples:
        given = sample.arguments(torch.bfloat16, "meta")
        filter_size = given["kernel_size"] if "kernel_size" in given else given["weight"].shape[2:]
        alone = tuple(filter_size) == (1, 1) and given["stride"] == 1
        assert (op.launcher.matmul(**given) is not None) is alone, sample.why


# --- the choice ------------------------------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, **seconds: tuple[float, float, float | None]) -> None:
    """(ours, cuDNN's, cuBLAS's) by the end of an op's name."""

    def row(op: Op, **arguments: Any) -> tuned.Row | None:
        ours, *theirs = seconds[op.name.removeprefix("conv2d_")]
        tried = {tag: one for tag, one in zip((RIVAL, MATMUL), theirs, strict=True) if one is not None}
        return tuned.Row(op.name, "hash", "GPU", "bf16", "1x1", {"k": 1}, ours, None, "2", "3", "5", tried)

    monkeypatch.setattr(conv2d_fprop, "tuned_row", row)


def called(function: Any) -> list[str]:
    """The operators that a call runs, but for views."""
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func).split(".")[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return [name for name in seen if name in ("addmm", "mm", "convolution", "convolution_backward") or "conv2d" in name]


def test_each_pass_runs_the_kernel_that_was_fastest(monkeypatch: pytest.MonkeyPatch):
    x, weight, dy = maps(2, 16, 4, 4, seed=0), maps(8, 16, 1, 1, seed=1), maps(2, 8, 4, 4, seed=2)
    wanted = {"of_x": True, "of_weight": True}

    def ran() -> list[str]:
        forward = called(lambda: conv2d_fprop.forward(x, weight, torch.zeros(8).double(), (0, 0)))
        return forward + called(lambda: conv2d_fprop.gradients(dy, x, weight, (0, 0), **wanted))

    planted(monkeypatch, fprop=(1.0, 3.0, 2.0), dgrad=(3.0, 2.0, 1.0), wgrad=(3.0, 1.0, 2.0))
    assert [name for name in ran() if name != "convolution"] == ["conv2d_fprop", "convolution_backward", "mm"]
    planted(monkeypatch, fprop=(3.0, 2.0, 1.0), dgrad=(3.0, 2.0, 1.0), wgrad=(3.0, 2.0, 1.0))
    assert ran() == ["addmm", "mm", "mm"]
    # rows of before cuBLAS was timed
    planted(monkeypatch, fprop=(3.0, 2.0, None), dgrad=(3.0, 2.0, None), wgrad=(3.0, 2.0, None))
    assert ran() == ["convolution", "convolution_backward"]
    planted(monkeypatch, fprop=(1.0, 2.0, None), dgrad=(1.0, 2.0, None), wgrad=(1.0, 2.0, None))
    assert [name for name in ran() if "conv2d" in name] == ["conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"]


def test_the_times_of_a_row(monkeypatch: pytest.MonkeyPatch):
    planted(monkeypatch, fprop=(1.0, 3.0, 2.0), dgrad=(1.0, 2.0, 3.0), wgrad=(1.0, 2.0, None))
    x, weight = maps(2, 16, 4, 4, seed=0), maps(8, 16, 1, 1, seed=1)
    rows = {name: row for name, (row, _) in conv2d_fprop.choice(x, weight, (0, 0)).items()}
    assert {name: conv2d_fprop.rival_seconds(row) for name, row in rows.items()} == dict.fromkeys(rows, 2.0)
    assert {name: conv2d_fprop.matmul_seconds(row) for name, row in rows.items()} == {
        "fprop": 2.0, "dgrad": 3.0, "wgrad": None
    }  # fmt: skip
    assert {name: conv2d_fprop.by_matmul(row) for name, row in rows.items()} == {
        "fprop": True, "dgrad": False, "wgrad": False
    }  # fmt: skip


def test_gradients_by_products_are_those_of_the_convolution(monkeypatch: pytest.MonkeyPatch):
    x, weight, dy = maps(2, 16, 4, 5, seed=0), maps(8, 16, 1, 1, seed=1), maps(2, 8, 4, 5, seed=2)
    wanted = {"of_x": True, "of_weight": True}
    expected = conv2d_fprop.gradients(dy, x, weight, (0, 0), **wanted)
    planted(monkeypatch, fprop=(3.0, 2.0, 1.0), dgrad=(3.0, 2.0, 1.0), wgrad=(3.0, 2.0, 1.0))
    found = conv2d_fprop.gradients(dy, x, weight, (0, 0), **wanted)
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other)
        assert one.shape == other.shape
    assert conv2d_fprop.gradients(dy, x, weight, (0, 0), of_x=False, of_weight=True)[0] is None
