"""Two classifiers that others train, 1000 classes each: ResNet-50 and ConvNeXt-T, from their papers' descriptions.

ResNet-50 (He et al. 2016, arXiv 1512.03385; stride in the 3x3, as torchvision has it): 25,557,032 parameters.
ConvNeXt-T (Liu et al. 2022, arXiv 2201.03545; without stochastic depth): 28,589,128 parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 (in `groups`), 1x1, each with BatchNorm, beside a skip; ResNeXt's with groups above 1."""

    def __init__(self, c_in: int, width: int, c_out: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, c_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(c_out)
        self.skip = (
            nn.Identity()
            if c_in == c_out and stride == 1
            else nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.skip(x))


class ResNet50(nn.Sequential):
    """Images [N, 3, H, W] to logits [N, 1000]."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        c_in = 64
        for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for index in range(depth):
                stride = 2 if index == 0 and width > 64 else 1
                layers.append(Bottleneck(c_in, width, 4 * width, stride=stride))
                c_in = 4 * width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, 1000))


class ConvNeXtTiny(nn.Sequential):
    """Images [N, 3, H, W] to logits [N, 1000]."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), _LayerNorm2d(96, eps=1e-6)]
        for channels, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
            if channels > 96:
                layers += [_LayerNorm2d(channels // 2, eps=1e-6), nn.Conv2d(channels // 2, channels, 2, 2)]
            layers += [_ConvNeXtBlock(channels) for _ in range(depth)]
        head = (nn.AdaptiveAvgPool2d(1), _LayerNorm2d(768, eps=1e-6), nn.Flatten(), nn.Linear(768, 1000))
        super().__init__(*layers, *head)


class _LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an NCHW-shaped tensor."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name it has in nn.LayerNorm
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm, and two linears over the channels, beside a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.reduce = nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.layer_scale * self.reduce(F.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)
