"""torch.compile(model, backend="ridgeline"): what its users expect, and refusals that reach them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn

import nets
import planted
from graphs import by_reference, image
from ridgeline import backend
from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.models.ddpm_unet import TINY, UNet

X = image(1, 3, 9, 8)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with by_reference(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        yield
    torch._dynamo.reset()


def small() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(), nn.Conv2d(8, 4, 1)
    ).eval()
    module[1].running_mean.normal_()
    module[1].running_var.uniform_(0.5, 2)
    return module


def compiled(module: nn.Module, **options) -> nn.Module:
    return torch.compile(module, backend="ridgeline", dynamic=False, options=options or None)


def lowered(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("a graph was lowered")]


# Results


@pytest.mark.parametrize("build", [nets.mobilenet_v3_like, lambda: (UNet(TINY), _unet_inputs())])
def test_networks(build, caplog):
    caplog.set_level(logging.INFO, logger="ridgeline.backend")
    module, inputs = build()
    fast = compiled(module.eval())
    torch.testing.assert_close(fast(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)
    assert len(lowered(caplog)) == 1 and "('conv2d_act', " in lowered(caplog)[0]


def _unet_inputs() -> tuple[Tensor, Tensor]:
    return image(2, TINY.in_channels, 8, 8), torch.tensor([3, 700])


def test_batch_norm_is_folded_and_a_graph_is_lowered_once(caplog):
    caplog.set_level(logging.INFO, logger="ridgeline.backend")
    module = small()
    fast = compiled(module)
    for seed in (1, 2):
        x = image(1, 3, 9, 8, seed=seed)
        torch.testing.assert_close(fast(x), module(x))
    (said,) = lowered(caplog)
    assert "('fold_batch_norm', 1)" in said and "batch_norm.default" not in said


def test_results_are_the_callers():
    fast = compiled(small())
    first = fast(X)
    kept = first.clone()
    assert not torch.equal(fast(image(1, 3, 9, 8, seed=9)), kept)
    assert torch.equal(first, kept)


def test_inference_mode():
    module = small()
    fast = compiled(module)
    with torch.inference_mode():
        inside = fast(X)
    torch.testing.assert_close(fast(X), inside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_models_dtype_is_kept(dtype):
    module = small().to(dtype)
    y = compiled(module)(X.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y, module(X.to(dtype)), rtol=2e-2, atol=2e-2)


def test_another_dtype_is_for_the_arithmetic_alone(caplog):
    caplog.set_level(logging.INFO, logger="ridgeline.backend")
    module = small()
    module[1].running_var.mul_(1e6)  # beyond fp16, and folded before it is cast
    y = compiled(module, dtype="fp16")(X)
    assert y.dtype == torch.float32 and not torch.equal(y, module(X))
    torch.testing.assert_close(y, module(X), rtol=5e-3, atol=5e-3)
    assert "dtype='float32'" in lowered(caplog)[0]  # of the input


# Weights


def test_changed_weights_are_seen():
    module = small()
    fast = compiled(module)
    before = fast(X)
    module[0].weight.mul_(2)
    torch.testing.assert_close(fast(X), module(X))
    module[4] = nn.Conv2d(8, 4, 1).eval()
    torch.testing.assert_close(fast(X), module(X))
    module.load_state_dict(small().state_dict())
    torch.testing.assert_close(fast(X), before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * 2


def test_layers_that_share_a_graph_keep_their_weights_apart(caplog):
    caplog.set_level(logging.INFO, logger="ridgeline.backend")
    blocks = [Block().eval() for _ in range(3)]
    fast = [compiled(block) for block in blocks]
    for _ in range(2):
        for block, quick in zip(blocks, fast, strict=True):
            torch.testing.assert_close(quick(X), block(X))
    assert len(lowered(caplog)) == 3


def test_weights_replaced_again_and_again_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(backend, "_MOST_BUILT", 2)
    engines: list[backend._Engine] = []
    module = nn.Conv2d(3, 4, 1).eval()

    def recorded(graph_module, example_inputs, **choices):
        engines.append(backend.ridgeline(graph_module, example_inputs, **choices))
        return engines[-1]

    fast = torch.compile(module, backend=recorded, dynamic=False)
    for _ in range(5):
        module.weight = nn.Parameter(torch.randn(4, 3, 1, 1))
        torch.testing.assert_close(fast(X), module(X))
    assert len(engines) == 1 and len(engines[0]._built) <= 2


# Refusals


def test_gradients_are_refused():
    module = small()
    fast = compiled(module)
    with torch.enable_grad(), pytest.raises(NotEngaged, match=r"computes no gradients, .* under torch\.no_grad\(\)"):
        fast(X)
    torch.testing.assert_close(fast(X), module(X))


def test_frozen_weights_need_no_grad_mode():
    module = small().requires_grad_(False)
    with torch.enable_grad():
        torch.testing.assert_close(compiled(module)(X), module(X))


@pytest.mark.parametrize("part", [1, 3], ids=["batch norm", "dropout"])
def test_training_is_refused(part):
    module = small()
    module[part].train()
    name = {1: "batch_norm", 3: "dropout"}[part]
    with pytest.raises(NotEngaged, match=rf"is for inference, and {name} trains: call \.eval\(\) first"):
        compiled(module)(X)


def test_dynamic_shapes_are_refused():
    fast = torch.compile(small(), backend="ridgeline", dynamic=True)
    with pytest.raises(NotEngaged, match=r"needs static shapes, and dynamo made s\d+ .* dynamic=False"):
        fast(X)


def test_static_shapes_are_a_graph_each():
    module = small()
    fast = compiled(module)
    for x in (X, image(2, 3, 5, 7)):
        torch.testing.assert_close(fast(x), module(x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).half())


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


@pytest.mark.parametrize(
    ("module", "x", "complaint"),
    [
        (small().double(), X.double(), r"in one of fp32, fp16, bf16, this one has torch\.float64: convert the model"),
        (Mixed(), X, r"this one has torch\.float16, torch\.float32"),
        (Writes(), X, "writes to its input .* in place"),
    ],
)
def test_what_it_cannot_do_is_refused(module, x, complaint):
    with pytest.raises(NotEngaged, match=complaint):
        compiled(module)(x.clone())


def test_autocast_is_refused_unless_the_dtype_is_given():
    module = small()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(NotEngaged, match=r"autocast asks for another: .* options={'dtype': 'fp16'}"):
            compiled(module)(X)
        torch._dynamo.reset()
        assert compiled(module, dtype="bf16")(X).dtype == torch.bfloat16  # as autocast promises


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"options": {"speed": 1}}, "backend 'ridgeline' has no option 'speed': options are the fields of Recipe"),
        ({"options": {"dtype": "int4"}}, "dtype must be one of fp32, fp16, bf16, got 'int4'"),
        ({"mode": "max-autotune"}, "backend 'ridgeline' has no modes, got 'max-autotune'"),
    ],
)
def test_wrong_choices_are_refused(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        torch.compile(small(), backend="ridgeline", **arguments)(X)


def test_a_wrong_rewrite_is_found(monkeypatch):
    planted.plant(monkeypatch, "fuse_conv_act", planted.scale_a_weight(0))
    with pytest.raises(VerificationFailed, match="backend 'ridgeline': RMS error"):
        compiled(small())(X)


# Finding it


def test_dynamo_lists_it():
    assert backend.NAME in torch._dynamo.list_backends()


def test_it_is_found_in_a_fresh_process():
    """By its entry point where the package is installed with it, else after an import."""
    program = (
        "import ridgeline.backend, torch\n"
        "f = torch.compile(torch.nn.ReLU().eval(), backend='ridgeline')\n"
        "print(f(torch.tensor([-1.0, 2.0])).tolist())\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[0.0,", "2.0]"]
