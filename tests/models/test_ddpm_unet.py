"""The DDPM UNet: exact size, arithmetic, layout, export, gradients, refusals."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import UsageError
from ridgeline.models.ddpm_unet import (
    CIFAR10,
    TINY,
    Attention,
    ResidualBlock,
    UNet,
    UNetConfig,
    ddpm_cifar10,
    sinusoidal_embedding,
)


def tiny(**changes):
    torch.manual_seed(0)
    model = UNet(replace(TINY, **changes))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, model.config.image_size, model.config.image_size, generator=generator)
    return model, x, torch.tensor([3, 700])


def test_cifar10_is_the_reference_network():
    with torch.device("meta"):
        model = UNet(CIFAR10)
    assert sum(p.numel() for p in model.parameters()) == 32_049_027
    count = Counter(type(module) for module in model.modules())
    assert (count[nn.Conv2d], count[nn.GroupNorm], count[Attention]) == (50, 50, 13)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert {conv.stride for conv in convs} == {(1, 1)}
    assert Counter(conv.kernel_size for conv in convs) == {(3, 3): 41, (1, 1): 9}
    assert all(module.bias is not None for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))


def test_attention_sits_at_16_8_4_and_in_the_middle():
    seen = []
    with torch.device("meta"):
        model = UNet(CIFAR10)
        for module in model.modules():
            if isinstance(module, Attention):
                module.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[-1]))
        model(torch.empty(1, 3, 32, 32), torch.empty(1))
    assert seen == [16, 16, 8, 8, 4, 4, 4, 4, 4, 8, 8, 16, 16]


def test_training_work_at_batch_128():
    """Brute count: 2 FLOP a multiply-accumulate, forward x3, less the gradient of the image nobody asks for."""
    work = Counter()

    def count(module, inputs, output):
        if isinstance(module, nn.Conv2d):
            work["conv"] += 2 * output.numel() * module.weight[0].numel()
            if module is model.conv_in:
                work["first dgrad"] += 2 * output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            work["linear"] += 2 * output.numel() * module.in_features
        elif isinstance(module, Attention):
            n, c, h, w = output.shape
            work["attention"] += 2 * (2 * n * (h * w) ** 2 * c)  # q·k, then weights·v

    with torch.device("meta"):
        model = UNet(CIFAR10)
        for module in model.modules():
            module.register_forward_hook(count)
        model(torch.empty(128, 3, 32, 32), torch.empty(128))
    teraflop = 1e12
    assert 3 * (work["conv"] + work["linear"]) - work["first dgrad"] == pytest.approx(3.80 * teraflop, rel=0.01)
    assert 3 * work["attention"] == pytest.approx(0.110 * teraflop, rel=0.01)


def test_builder_is_reproducible_and_in_train_mode():
    model, (x, t) = ddpm_cifar10(3)
    _, (again, _) = ddpm_cifar10(3)
    assert model.training
    assert x.shape == (3, 3, 32, 32) and torch.equal(x, again)
    assert t.shape == (3,) and t.dtype == torch.int64 and 0 <= int(t.min()) <= int(t.max()) < 1000
    with pytest.raises(UsageError, match="batch must be at least 1, got 0"):
        ddpm_cifar10(0)


def test_sinusoidal_embedding_is_cosine_then_sine():
    t = torch.tensor([0.0, 1.0, 999.0])
    y = sinusoidal_embedding(t, 6)
    for i in range(3):
        angle = t.double() * 10_000 ** (-i / 3)
        torch.testing.assert_close(y[:, i].double(), angle.cos(), atol=1e-4, rtol=0)
        torch.testing.assert_close(y[:, i + 3].double(), angle.sin(), atol=1e-4, rtol=0)


def test_bf16_weights_leave_the_time_embedding_exact():
    """A bf16 frequency table would map neighbouring late steps to one another."""
    model, _, _ = tiny()
    seen = []
    model.time_in.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    t = torch.tensor([998, 999])
    model.bfloat16()(torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16), t)
    assert torch.equal(seen[0], sinusoidal_embedding(t, 16).bfloat16())
    assert not torch.equal(seen[0][0], seen[0][1])


def test_block_is_its_formula():
    torch.manual_seed(0)
    block = ResidualBlock(replace(TINY, dropout=0.0), 8, 16)
    x, embedding = torch.randn(2, 8, 4, 4), torch.randn(2, TINY.time_features)
    w, b = block.scale_shift(embedding).split(16, dim=1)
    h = F.conv2d(F.silu(block.norm1(x)), block.conv1.weight, block.conv1.bias, padding=1)
    h = F.silu(
        (w[:, :, None, None] + 1) * F.group_norm(h, 4, block.norm2.weight, block.norm2.bias) + b[:, :, None, None]
    )
    expected = block.skip(x) + F.conv2d(h, block.conv2.weight, block.conv2.bias, padding=1)
    torch.testing.assert_close(block(x, embedding), expected)


def test_attention_is_softmax_over_pixels():
    torch.manual_seed(0)
    attention = Attention(TINY, 16)
    x = torch.randn(2, 16, 3, 5)
    rows = attention.norm(x).permute(0, 2, 3, 1).reshape(2, 15, 16)
    q, k, v = attention.qkv(rows).split(16, dim=2)
    heads = []
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        weights = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / 8**0.5, dim=-1)
        heads.append(weights @ v[..., part])
    y = attention.proj(torch.cat(heads, dim=2)).reshape(2, 3, 5, 16).permute(0, 3, 1, 2)
    torch.testing.assert_close(attention(x), x + y)


def test_network_is_its_layout():
    """The picture in the module's docstring, drawn out for the small network."""
    net, x, t = tiny()
    net.eval()
    e = F.silu(net.time_out(F.silu(net.time_in(sinusoidal_embedding(t, 16)))))
    skip1 = net.down[0].block(net.conv_in(x), e)
    skip2 = net.down[1].block(skip1, e)
    pooled = skip2.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5))
    skip3 = net.down[2].attention(net.down[2].block(pooled, e))
    skip4 = net.down[3].attention(net.down[3].block(skip3, e))
    h = net.middle_out(net.middle_attention(net.middle_in(skip4, e)), e)
    h = net.up[0].attention(net.up[0].block(torch.cat((h, skip4), 1), e))
    h = net.up[1].attention(net.up[1].block(torch.cat((h, skip3), 1), e))
    h = net.upsamples[0].conv(h.repeat_interleave(2, 2).repeat_interleave(2, 3))
    h = net.up[2].block(torch.cat((h, skip2), 1), e)
    h = net.up[3].block(torch.cat((h, skip1), 1), e)
    torch.testing.assert_close(net(x, t), net.conv_out(F.silu(net.norm_out(h))))


def test_every_parameter_gets_a_finite_gradient():
    model, x, t = tiny()
    model(x, t).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


def test_images_do_not_mix_and_time_matters():
    model, x, t = tiny()
    model.eval()
    with torch.no_grad():
        both = model(x, t)
        torch.testing.assert_close(both[:1], model(x[:1], t[:1]))
        assert (both - model(x, t + 50)).abs().max() > 1e-4


def test_dropout_only_in_train_mode():
    model, x, t = tiny(dropout=0.5)
    with torch.no_grad():
        assert not torch.equal(model(x, t), model(x, t))
        model.eval()
        assert torch.equal(model(x, t), model(x, t))


class _Copies(TorchDispatchMode):
    """Operators that move a whole activation without computing."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_) and args[0].dim() >= 3:
            self.seen.append(f"{func} {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


def test_channels_last_needs_no_layout_copy():
    model, x, t = tiny()
    expected = model.eval()(x, t)
    model = model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    planar = []

    def look(module, _, output):
        if output.dim() == 4 and not output.is_contiguous(memory_format=torch.channels_last):
            planar.append(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(look)
    with torch.no_grad(), _Copies() as copies:
        y = model(x, t)
    assert planar == []
    assert copies.seen == []
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


def test_copy_detector_can_fail():
    with _Copies() as copies:
        torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert copies.seen == ["aten.clone.default [2, 3, 4, 4]"]


@pytest.mark.parametrize("train", [True, False])
def test_exports_with_a_free_batch(train):
    model, x, t = tiny(dropout=0.0)
    model.train(train)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x, t), dynamic_shapes=({0: batch}, {0: batch}))
    x5, t5 = torch.randn(5, 3, 8, 8), torch.arange(5)
    torch.testing.assert_close(program.module()(x5, t5), model(x5, t5))


def test_train_export_keeps_dropout():
    model, x, t = tiny()
    targets = [str(node.target) for node in torch.export.export(model, (x, t)).graph.nodes]
    blocks = sum(isinstance(module, ResidualBlock) for module in model.modules())
    assert targets.count("aten.dropout.default") == blocks


def test_autocast_bf16_stays_close_to_fp32():
    model, x, t = tiny()
    model.eval()
    with torch.no_grad():
        y = model(x, t)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = model(x, t)
    assert (low.float() - y).square().mean().sqrt() < 0.02 * y.square().mean().sqrt()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"channels": ()}, "channels is empty"),
        ({"channels": (30, 32)}, "multiples of groups=4, got 30"),
        ({"channels": (0, 32)}, "multiples of groups=4, got 0"),
        ({"channels": (16, 20), "heads": 3}, "multiples of heads=3, got 20"),
        ({"channels": (15, 30), "groups": 3}, "must be even .* got 15"),
        ({"image_size": 9}, "multiple of 2 for 2 stages, got 9"),
        ({"image_size": 0}, "multiple of 2 for 2 stages, got 0"),
        ({"attention_resolutions": (5,)}, "attention resolution 5 is no stage's; the stages are 8, 4"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": float("nan")}, "dropout must be in .* got nan"),
        ({"blocks": 0}, "blocks must be at least 1, got 0"),
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"in_channels": 0}, "in_channels must be at least 1, got 0"),
    ],
)
def test_refuses_bad_configs_in_one_sentence(changes, sentence):
    with pytest.raises(UsageError, match=sentence) as refusal:
        replace(TINY, **changes)
    assert "\n" not in str(refusal.value)


def test_heads_bind_only_where_attention_is():
    config = UNetConfig(image_size=8, channels=(12, 16), attention_resolutions=(4,), heads=8, groups=4)
    assert UNet(config)(torch.zeros(1, 3, 8, 8), torch.zeros(1)).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("channels", [(8,), (8, 16, 24)])
def test_other_depths_build(blocks, channels):
    model, x, t = tiny(blocks=blocks, channels=channels, attention_resolutions=())
    assert model(x, t).shape == x.shape
    assert sum(isinstance(module, Attention) for module in model.modules()) == 1


@pytest.mark.parametrize(
    ("x_shape", "t_shape", "sentence"),
    [
        ((2, 3, 16, 16), (2,), r"x must be \[N, 3, 8, 8\], got \[2, 3, 16, 16\]"),
        ((3, 8, 8), (2,), r"got \[3, 8, 8\]"),
        ((2, 3, 8, 8), (1,), r"one time step an image, \[2\], got \[1\]"),
        ((2, 3, 8, 8), (2, 1), r"got \[2, 1\]"),
    ],
)
def test_refuses_wrong_inputs(x_shape, t_shape, sentence):
    model, _, _ = tiny()
    with pytest.raises(ValueError, match=sentence):
        model(torch.zeros(x_shape), torch.zeros(t_shape))
