"""The drift table: every kernel finds its place in the untouched module, and a planted error shows where it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nets
from graphs import by_reference, image, net
from planted import plant, scale_a_weight
from ridgeline.drift import drift
from ridgeline.models.blocks import SPPF, C3k, C3k2, Conv
from ridgeline.models.postprocess import anchor_grid, decode_xyxy, top_detections
from ridgeline.recipe import Recipe

FP32 = Recipe(dtype="fp32")
APART = ("fold_batch_norm", "fuse_conv_act")  # no rewrite that makes one kernel of several layers


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


def in_a_row(*layers: nn.Module) -> nn.Module:
    return net(lambda m, x: m.layers(x), layers=nn.Sequential(*layers))


def test_a_right_build_errs_as_plain_pytorch_does():
    module, x = in_a_row(Conv(3, 16, 3), Conv(16, 16, 3), nn.Conv2d(16, 8, 1)), (image(1, 3, 12, 12),)
    for dtype, size in (("fp32", 1e-6), ("fp16", 4e-3)):
        layers = drift(module, x, Recipe(dtype=dtype, rewrites=APART))
        assert [layer.op for layer in layers] == ["conv2d_act"] * 3
        assert [layer.shape for layer in layers] == [(1, 16, 12, 12), (1, 16, 12, 12), (1, 8, 12, 12)]
        for layer in layers:
            assert layer.verdict is not None
            errors = [layer.relative(error) for error in (layer.verdict.rms_error, layer.own_rms)]
            assert size / 100 < max(errors) < size and 0 < layer.excess < 1
            assert layer.verdict.max_error >= layer.verdict.rms_error > 0


def test_a_kernel_may_err_as_plain_pytorch_does_in_either_layout():
    """Sums of channels-last maps err more on a CPU, and kernels compute those."""
    layers = drift(in_a_row(nn.Conv2d(256, 256, 3, padding=1)), (image(1, 256, 14, 14).contiguous(),), FP32)
    assert [layer.op for layer in layers] == ["conv2d_act"] and 0 < layers[0].excess < 1
    assert layers[0].verdict is not None and layers[0].own_rms * 2 < layers[0].verdict.allowed_rms


def test_rows_name_module_and_line():
    layers = drift(in_a_row(Conv(3, 8, 3), nn.Conv2d(8, 4, 1)), (image(1, 3, 6, 6),), replace(FP32, rewrites=APART))
    assert layers[0].where.startswith("layers.0.act (activation.py:")
    assert layers[1].where.startswith("layers.1 (conv.py:")


def test_folded_norms_and_sums_whose_activation_is_left_to_pytorch_have_their_place():
    module, inputs = nets.resnext_block()
    layers = drift(module.eval(), inputs, FP32)
    assert len(layers) > 1
    assert [layer.where for layer in layers if layer.verdict is None or layer.excess > 1] == []


def test_merged_siblings_and_concats_in_place_are_compared_by_their_channels():
    module = net(lambda m, x: m.split(m.pools(x)), pools=SPPF(16), split=C3k2(16, 8, [C3k(8)], hidden=8))
    layers = drift(module, (image(1, 16, 8, 8),), FP32)
    widths = [layer.shape[1] for layer in layers]
    assert 8 in widths and "max_pool_chain" in {layer.op for layer in layers}
    assert [layer.where for layer in layers if layer.verdict is None or layer.excess > 1] == []


def test_a_module_that_is_called_twice_has_a_row_for_each_call():
    module = net(lambda m, x: m.a(m.a(x)), a=Conv(8, 8, 3))
    layers = drift(module, (image(1, 8, 6, 6),), FP32)
    assert len(layers) == 2 and layers[0].where == layers[1].where
    assert layers[0].size != layers[1].size and max(layer.excess for layer in layers) < 1


def test_a_module_that_insists_on_float32_is_its_own_reference():
    class Insists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ones((1, 4), dtype=torch.float32) @ self.conv(x).flatten(2)

    (layer,) = drift(Insists().eval(), (image(1, 3, 4, 4),), FP32)
    assert layer.verdict is not None and layer.excess < 1


def test_a_planted_error_shows_in_its_layer_first(monkeypatch):
    """The third of four convolutions is scaled by 1.01 by a rewrite: those before it stay, it and the last exceed."""
    module = in_a_row(*(Conv(8, 8, 3) for _ in range(4)))
    x = (image(1, 8, 10, 10),)
    recipe = replace(FP32, rewrites=APART)
    assert max(layer.excess for layer in drift(module, x, recipe)) < 1
    plant(monkeypatch, "fuse_conv_act", scale_a_weight(2))
    layers = drift(module, x, recipe)
    assert [layer.excess > 1 for layer in layers] == [False, False, True, True]
    assert layers[2].where.startswith("layers.2") and layers[2].verdict is not None
    # silu is steeper than a line where its argument is large, so a little more than one per cent
    assert layers[2].relative(layers[2].verdict.rms_error) == pytest.approx(0.01, rel=0.3)
    assert layers[2].relative(layers[2].own_rms) < 1e-6
    half = drift(module, x, replace(recipe, dtype="fp16"))
    assert [layer.excess > 1 for layer in half[:3]] == [False, False, True]


def test_a_wrong_kernel_shows_too(monkeypatch):
    """Not the graph but the kernel errs: the reference that runs in its stead here returns a map scaled by 1.01."""

    def forward(m, x):
        pools = [x]
        for _ in range(3):
            pools.append(torch.ops.aten.max_pool2d(pools[-1], [5, 5], [1, 1], [2, 2]))
        return m.a(torch.cat(pools, 1))

    module, x = net(forward, a=nn.Conv2d(12, 4, 1)), (image(1, 3, 8, 8),)
    assert max(layer.excess for layer in drift(module, x, FP32)) < 1
    right = F.max_pool2d
    # the module calls the operator itself, so that only the kernel's reference meets the wrong one
    monkeypatch.setattr(F, "max_pool2d", lambda *args, **choices: right(*args, **choices) * 1.01)
    layers = drift(module, x, FP32)
    assert [layer.op for layer in layers if layer.excess > 1] == ["max_pool_chain", "conv2d_act"]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.levels = nn.ModuleList(nn.Conv2d(3, 9, 1) for _ in range(3))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        maps = [level(F.max_pool2d(x, 2**i)) for i, level in enumerate(self.levels)]
        boxes, logits = (torch.cat([y[:, part].flatten(2) for y in maps], dim=2) for part in (slice(4), slice(4, 9)))
        return top_detections(decode_xyxy(boxes, *anchor_grid(64, 64)), logits)


def test_a_selection_is_compared_by_its_sorted_scores():
    """In half precision rows of nearly equal score swap, and their boxes lie far apart."""
    layers = drift(Head().eval(), (image(1, 3, 8, 8),), Recipe(dtype="fp16"))
    assert layers[-1].op == "detect_topk" and layers[-1].verdict is not None
    assert layers[-1].verdict.max_error < 0.01 and layers[-1].verdict.numel == 84
