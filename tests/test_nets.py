"""The networks in nets.py are what they say: published sizes and FLOPs, trainable, reproducible."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import nets
from nets import (
    ALL,
    convnext_tiny,
    edm2_block_net,
    mobilenet_v3_like,
    resnet50,
    resnext_block,
    yolo_like,
)


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (resnet50, 25_557_032),
        (convnext_tiny, 28_589_128),
        # 256·128 + 128·4·9 + 128·256 in convolutions, 2·(128 + 128 + 256) in norms
        (resnext_block, 71_168),
        # designs of our own: pinned, so that figures that cite them stay true
        (edm2_block_net, 43_252),
        (mobilenet_v3_like, 73_244),
        (yolo_like, 812_884),
    ],
)
def test_parameter_totals(build, parameters):
    assert sum(p.numel() for p in build()[0].parameters()) == parameters


@pytest.mark.parametrize(("build", "gflop"), [(resnet50, 8.18), (convnext_tiny, 8.91)])
def test_published_work_at_224(build, gflop):
    """4.09 and 4.46 GMAC at 224², as the papers and torchvision's table state them."""
    module, (x,) = build(size=224)
    with FlopCounterMode(display=False) as counter:
        module.to("meta")(x.to("meta"))
    assert counter.get_total_flops() / 1e9 == pytest.approx(gflop, rel=0.005)


@pytest.mark.parametrize("build", ALL)
def test_trains(build):
    module, inputs = build(batch=2)
    y = module(*inputs)
    assert y.shape[0] == 2 and y.isfinite().all()
    y.square().mean().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("build", ALL)
def test_builders_are_reproducible_and_leave_the_random_state(build):
    torch.manual_seed(5)
    module, inputs = build()
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    again, again_inputs = build()
    assert all(torch.equal(a, b) for a, b in zip(inputs, again_inputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (resnet50, (1, 1000)),
        (convnext_tiny, (1, 1000)),
        (mobilenet_v3_like, (1, 100)),
        (edm2_block_net, (2, 3, 8, 8)),
        (resnext_block, (2, 256, 16, 16)),
        (yolo_like, (1, 12, 8 * 8 + 4 * 4 + 2 * 2)),
    ],
)
def test_output_shapes(build, shape):
    module, inputs = build()
    with torch.no_grad():
        assert module.eval()(*inputs).shape == shape


def test_edm2_forces_unit_weights_only_in_train_mode():
    module, inputs = edm2_block_net()
    with torch.no_grad():
        before = [weight.mul_(3).clone() for weight in module.parameters()]
        module.eval()(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        module.train()(*inputs)
    for name, rms in _weight_rms(module):
        assert rms == pytest.approx(1.0, abs=1e-3), name


def test_edm2_pieces_preserve_magnitude():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, channels, 8, 8, generator=generator) for channels in (64, 64))
    narrow = torch.randn(64, 16, 8, 8, generator=generator)
    joined = nets._mp_cat(a, narrow)
    halves = joined.split((64, 16), dim=1)
    conv = nets._MPConv(64, 64, 1)
    for y in (nets._mp_silu(a), nets._mp_sum(a, b, 0.3), joined, conv(a), nets._unit_rms(7 * a, (1,))):
        assert float(y.detach().square().mean().sqrt()) == pytest.approx(1.0, rel=0.02)
    power = [float(half.square().sum()) for half in halves]
    assert power[0] == pytest.approx(power[1], rel=0.02)


def _weight_rms(module):
    for name, weight in module.named_parameters():
        if weight.dim() >= 2:
            yield from ((name, float(rms)) for rms in weight.detach().flatten(1).square().mean(1).sqrt())


def test_depthwise_and_grouped_convolutions_are_there():
    def groups(build):
        return {module.groups for module in build()[0].modules() if isinstance(module, nn.Conv2d)}

    assert groups(resnext_block) == {1, 32}
    assert groups(convnext_tiny) == {1, 96, 192, 384, 768}
    assert groups(mobilenet_v3_like) == {1, 16, 64, 72, 120}
    assert groups(yolo_like) == {1, 64, 96, 128}
