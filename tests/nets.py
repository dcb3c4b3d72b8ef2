"""Small but faithful networks of the kinds ridgeline meets; each builder returns (module, inputs), seeded.

Written from the papers' descriptions: what matters is that operators, shapes and dataflow are those of the real nets.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.models.classifiers import Bottleneck, ConvNeXtTiny, ResNet50

Built = tuple[nn.Module, tuple[Tensor, ...]]


def resnet50(batch: int = 1, size: int = 64) -> Built:
    """ResNet-50 (He et al. 2016; stride in the 3x3), 1000 classes, 25,557,032 parameters."""
    return _seeded(ResNet50, (batch, 3, size, size))


def convnext_tiny(batch: int = 1, size: int = 64) -> Built:
    """ConvNeXt-T (Liu et al. 2022), 1000 classes, 28,589,128 parameters."""
    return _seeded(ConvNeXtTiny, (batch, 3, size, size))


def mobilenet_v3_like(batch: int = 1, size: int = 64) -> Built:
    """Inverted residuals with depthwise 3x3 and 5x5, squeeze-excite and hard-swish (Howard et al. 2019), shortened."""
    return _seeded(_MobileNetV3Like, (batch, 3, size, size))


def edm2_block_net(batch: int = 2, size: int = 8) -> Built:
    """An EDM2-style denoiser (Karras et al. 2024, arXiv 2312.02696): magnitude-preserving, no biases, cosine attention.

    Inputs are the image and one noise level an image. In train mode the forward pass rewrites the weights.
    """
    module, (x,) = _seeded(_EDM2Net, (batch, 3, size, size))
    return module, (x, torch.linspace(-2.0, 2.0, batch))


def resnext_block(batch: int = 2, size: int = 16) -> Built:
    """One ResNeXt bottleneck (Xie et al. 2017), 32 groups of 4 channels, 256 in and out."""
    return _seeded(lambda: Bottleneck(256, 128, 256, groups=32), (batch, 256, size, size))


def yolo_like(batch: int = 1, size: int = 64) -> Built:
    """A one-stage detector's shape: split-and-concat blocks, pooled pyramid, upsample, three heads -> [N, 4 + 8, A]."""
    return _seeded(_YoloLike, (batch, 3, size, size))


ALL = (resnet50, mobilenet_v3_like, convnext_tiny, edm2_block_net, resnext_block, yolo_like)


def _seeded(build, shape: tuple[int, ...]) -> Built:
    # the caller's random state stays as it was: a builder must not change what a test draws next
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build(), (torch.randn(shape),)


# MobileNet V3


class _SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * F.hardsigmoid(scale)


class _InvertedResidual(nn.Module):
    def __init__(self, c_in: int, c_mid: int, c_out: int, *, kernel: int, stride: int, excite: bool) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(c_in, c_mid, 1, bias=False), nn.BatchNorm2d(c_mid), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(c_mid, c_mid, kernel, stride, kernel // 2, groups=c_mid, bias=False),
            nn.BatchNorm2d(c_mid),
            nn.Hardswish(),
        )
        self.excite = _SqueezeExcite(c_mid) if excite else nn.Identity()
        self.project = nn.Sequential(nn.Conv2d(c_mid, c_out, 1, bias=False), nn.BatchNorm2d(c_out))
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.excite(self.depthwise(self.expand(x))))
        return x + y if self.residual else y


class _MobileNetV3Like(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()),
            _InvertedResidual(16, 16, 16, kernel=3, stride=1, excite=False),
            _InvertedResidual(16, 64, 24, kernel=3, stride=2, excite=False),
            _InvertedResidual(24, 72, 24, kernel=3, stride=1, excite=False),
            _InvertedResidual(24, 72, 40, kernel=5, stride=2, excite=True),
            _InvertedResidual(40, 120, 40, kernel=5, stride=1, excite=True),
            nn.Sequential(nn.Conv2d(40, 240, 1, bias=False), nn.BatchNorm2d(240), nn.Hardswish()),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(240, 100)),
        )


# EDM2


def _unit_rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x scaled so that its RMS over `dims` is 1, computed in fp32."""
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
    count = math.prod(x.shape[dim] for dim in dims)
    return x / (norm / math.sqrt(count) + 1e-4).to(x.dtype)


def _mp_silu(x: Tensor) -> Tensor:
    return F.silu(x) / 0.596  # RMS of silu of a unit normal


def _mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    return a.lerp(b, t) / math.sqrt((1 - t) ** 2 + t**2)


def _mp_cat(a: Tensor, b: Tensor) -> Tensor:
    """Concatenation in which both parts contribute equally and the RMS stays 1."""
    total, n_a, n_b = a.shape[1] + b.shape[1], a.shape[1], b.shape[1]
    scale = math.sqrt(total / 2)
    return torch.cat((a * (scale / math.sqrt(n_a)), b * (scale / math.sqrt(n_b))), dim=1)


class _MPConv(nn.Module):
    """Convolution (or, with kernel 0, linear) whose weight is forced to unit norm an output channel."""

    def __init__(self, c_in: int, c_out: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, c_in, *(kernel, kernel) if kernel else ()))

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        fan_in = self.weight[0].numel()
        dims = tuple(range(1, self.weight.dim()))
        if self.training:
            with torch.no_grad():
                self.weight.copy_(_unit_rms(self.weight, dims))
        weight = (_unit_rms(self.weight, dims) * (gain / math.sqrt(fan_in))).to(x.dtype)
        return F.linear(x, weight) if weight.dim() == 2 else F.conv2d(x, weight, padding=weight.shape[-1] // 2)


class _EDM2Block(nn.Module):
    """On the way down the skip and a pixel norm come first; on the way up (`decoder`) the skip comes last."""

    def __init__(self, c_in: int, c_out: int, embedding: int, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.heads = 2
        self.skip = _MPConv(c_in, c_out, 1) if c_in != c_out else nn.Identity()
        self.conv1 = _MPConv(c_in if decoder else c_out, c_out, 3)
        self.embed = _MPConv(embedding, c_out, 0)
        self.embed_gain = nn.Parameter(torch.tensor(0.1))
        self.conv2 = _MPConv(c_out, c_out, 3)
        self.qkv = _MPConv(c_out, 3 * c_out, 1)
        self.proj = _MPConv(c_out, c_out, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if not self.decoder:
            x = _unit_rms(self.skip(x), (1,))
        scale = self.embed(embedding, gain=self.embed_gain) + 1
        y = self.conv2(_mp_silu(self.conv1(_mp_silu(x)) * scale[:, :, None, None]))
        if self.decoder:
            x = self.skip(x)
        x = _mp_sum(x, y, 0.3)
        return _mp_sum(x, self._attention(x), 0.3).clip(-256, 256)

    def _attention(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(x).reshape(n, self.heads, c // self.heads, 3, h * w)
        q, k, v = _unit_rms(qkv, (2,)).unbind(3)
        weights = torch.einsum("nhcq,nhck->nhqk", q, k / math.sqrt(q.shape[2])).softmax(dim=3)
        return self.proj(torch.einsum("nhqk,nhck->nhcq", weights, v).reshape(n, c, h, w))


class _EDM2Net(nn.Module):
    def __init__(self, channels: int = 16, embedding: int = 32) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2 * math.pi * torch.randn(channels))
        self.register_buffer("phases", 2 * math.pi * torch.rand(channels))
        self.embed = _MPConv(channels, embedding, 0)
        self.conv_in = _MPConv(3 + 1, channels, 3)
        self.fine_in = _EDM2Block(channels, channels, embedding, decoder=False)
        self.coarse = _EDM2Block(channels, 2 * channels, embedding, decoder=False)
        self.fine_out = _EDM2Block(3 * channels, channels, embedding, decoder=True)
        self.conv_out = _MPConv(channels, 3, 3)
        self.out_gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, noise_level: Tensor) -> Tensor:
        fourier = torch.cos(noise_level[:, None] * self.frequencies + self.phases) * math.sqrt(2)
        embedding = _mp_silu(self.embed(fourier.to(x.dtype)))
        # a constant channel stands for the bias the convolutions do not have
        h = self.conv_in(torch.cat((x, torch.ones_like(x[:, :1])), dim=1))
        skip = self.fine_in(h, embedding)
        h = self.coarse(F.avg_pool2d(skip, 2), embedding)
        h = self.fine_out(_mp_cat(F.interpolate(h, scale_factor=2.0, mode="nearest"), skip), embedding)
        return self.conv_out(h, gain=self.out_gain)


# A one-stage detector


class _ConvBnSilu(nn.Sequential):
    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(c_out), nn.SiLU())


class _SplitConcat(nn.Module):
    """1x1, split in halves, a residual 3x3 pair on one of them, everything concatenated, 1x1."""

    def __init__(self, channels: int, c_out: int) -> None:
        super().__init__()
        half = channels // 2
        self.enter = _ConvBnSilu(channels, channels)
        self.inner = nn.Sequential(_ConvBnSilu(half, half, 3), _ConvBnSilu(half, half, 3))
        self.leave = _ConvBnSilu(3 * half, c_out)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.enter(x).chunk(2, dim=1)
        return self.leave(torch.cat((a, b, b + self.inner(b)), dim=1))


class _PooledPyramid(nn.Module):
    """1x1, three chained 5x5 stride-1 max pools, all four concatenated, 1x1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = _ConvBnSilu(channels, channels // 2)
        self.leave = _ConvBnSilu(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.enter(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, 1, 2))
        return self.leave(torch.cat(maps, dim=1))


class _YoloLike(nn.Module):
    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(_ConvBnSilu(3, 16, 3, 2), _ConvBnSilu(16, 32, 3, 2), _SplitConcat(32, 32))
        self.p3 = nn.Sequential(_ConvBnSilu(32, 64, 3, 2), _SplitConcat(64, 64))
        self.p4 = nn.Sequential(_ConvBnSilu(64, 96, 3, 2), _SplitConcat(96, 96))
        self.p5 = nn.Sequential(_ConvBnSilu(96, 128, 3, 2), _PooledPyramid(128))
        self.up4 = _SplitConcat(128 + 96, 96)
        self.up3 = _SplitConcat(96 + 64, 64)
        self.heads = nn.ModuleList(
            nn.Sequential(_ConvBnSilu(c, c, 3, groups=c), _ConvBnSilu(c, 32), nn.Conv2d(32, 4 + classes, 1))
            for c in (64, 96, 128)
        )

    def forward(self, x: Tensor) -> Tensor:
        p3 = self.p3(self.stem(x))
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        p4 = self.up4(torch.cat((F.interpolate(p5, scale_factor=2.0, mode="nearest"), p4), dim=1))
        p3 = self.up3(torch.cat((F.interpolate(p4, scale_factor=2.0, mode="nearest"), p3), dim=1))
        levels = [head(level).flatten(2) for head, level in zip(self.heads, (p3, p4, p5), strict=True)]
        boxes, scores = torch.cat(levels, dim=2).split((4, levels[0].shape[1] - 4), dim=1)
        return torch.cat((boxes, scores.sigmoid()), dim=1)
