"""DDPM UNet for CIFAR-10: predicts the noise in an image, given the noised image and its time step.

Layout of the network, for `UNetConfig()` (32,049,027 parameters, 50 convolutions, 50 GroupNorms, 13 attentions):

    conv 3x3 ─ 4 stages down (2 x [block, attention at 16², 8², 4²], average-pool 2x between stages)
             ─ block, attention, block
             ─ 4 stages up (2 x [block on concat(h, skip), attention], nearest 2x + conv 3x3 between stages)
             ─ GroupNorm, SiLU, conv 3x3

Every convolution has stride 1 and a bias; skips leave after the attention of each down block and are popped in reverse.
The family: Ho et al. 2020 (arXiv 2006.11239); the scale-shift: Nichol & Dhariwal 2021 (arXiv 2102.09672).

Three times the forward work at batch 128 is 3.80 TFLOP in the convolutions and linears and 0.11 in attention itself.

Initialisation is PyTorch's default everywhere. Zero-initialised output convolutions, common in this family, would make
a fresh network return exactly zero: comparing two builds of it could then not fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of one UNet; refuses with `UsageError` what cannot be built. The default is the CIFAR-10 network."""

    image_size: int = 32  # pixels a side; stage i works at image_size >> i
    in_channels: int = 3
    out_channels: int = 3
    channels: tuple[int, ...] = (128, 256, 256, 256)  # by stage, finest first
    blocks: int = 2  # residual blocks a stage, the same down and up
    attention_resolutions: tuple[int, ...] = (16, 8, 4)  # pixels a side; the middle always attends
    heads: int = 4
    groups: int = 32  # of every GroupNorm
    dropout: float = 0.1  # before the second convolution of a block

    def __post_init__(self) -> None:
        if not self.channels:
            raise UsageError("UNetConfig: channels is empty, give at least one stage, for example (128, 256)")
        counts = {name: getattr(self, name) for name in ("in_channels", "out_channels", "blocks", "heads", "groups")}
        for name, count in counts.items():
            if count < 1:
                raise UsageError(f"UNetConfig: {name} must be at least 1, got {count}")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"UNetConfig: dropout must be in [0, 1), got {self.dropout}")
        self._check_resolutions()
        self._check_channels()

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Pixels a side, by stage."""
        return tuple(self.image_size >> stage for stage in range(len(self.channels)))

    @property
    def time_features(self) -> int:
        """Width of the time embedding inside the network; its sinusoidal input is `channels[0]` wide."""
        return 4 * self.channels[0]

    def _check_resolutions(self) -> None:
        halvings = len(self.channels) - 1
        if self.image_size < 1 or self.image_size % 2**halvings:
            raise UsageError(
                f"UNetConfig: image_size must be a positive multiple of {2**halvings} for {len(self.channels)} stages, "
                f"got {self.image_size}"
            )
        for resolution in self.attention_resolutions:
            if resolution not in self.resolutions:
                stages = ", ".join(map(str, self.resolutions))
                raise UsageError(
                    f"UNetConfig: attention resolution {resolution} is no stage's; the stages are {stages}"
                )

    def _check_channels(self) -> None:
        for channels in self.channels:
            if channels < 1 or channels % self.groups:
                raise UsageError(
                    f"UNetConfig: channels must be positive multiples of groups={self.groups}, got {channels}"
                )
        if self.channels[0] % 2:
            raise UsageError(
                f"UNetConfig: channels[0] must be even for the cosine and sine halves, got {self.channels[0]}"
            )
        attending = {
            channels
            for channels, resolution in zip(self.channels, self.resolutions, strict=True)
            if resolution in self.attention_resolutions
        } | {self.channels[-1]}
        for channels in sorted(attending):
            if channels % self.heads:
                raise UsageError(
                    f"UNetConfig: channels of attending stages must be multiples of heads={self.heads}, got {channels}"
                )


CIFAR10 = UNetConfig()
# every feature of the big one, in milliseconds on a CPU
TINY = UNetConfig(image_size=8, channels=(16, 32), attention_resolutions=(4,), heads=2, groups=4)


def ddpm_cifar10(batch: int = 128) -> tuple[UNet, tuple[Tensor, Tensor]]:
    """The CIFAR-10 network in train mode and example inputs: unit-normal images [batch, 3, 32, 32], steps in 0…999."""
    if batch < 1:
        raise UsageError(f"ddpm_cifar10: batch must be at least 1, got {batch}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, CIFAR10.in_channels, CIFAR10.image_size, CIFAR10.image_size, generator=generator)
    t = torch.randint(0, 1000, (batch,), generator=generator)
    return UNet(CIFAR10), (x, t)


class UNet(nn.Module):
    """Noise estimate eps(x, t) for a whole batch, each image at its own time step.

    x  [N, in_channels, image_size, image_size]  the dtype of the weights (or autocast); NCHW or channels_last, kept
    t  [N]                                       integer or floating
    returns [N, out_channels, image_size, image_size]. Raises ValueError on any other shape.
    """

    def __init__(self, config: UNetConfig = CIFAR10) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        self.time_in = nn.Linear(channels[0], config.time_features)
        self.time_out = nn.Linear(config.time_features, config.time_features)
        self.conv_in = nn.Conv2d(config.in_channels, channels[0], 3, padding=1)

        stages = [stage for stage in range(len(channels)) for _ in range(config.blocks)]
        skips = [channels[stage] for stage in stages]  # what each down layer leaves behind; the up layers pop it
        self.down = nn.ModuleList(
            UNetLayer(config, stage, c_in) for stage, c_in in zip(stages, [channels[0], *skips[:-1]], strict=True)
        )
        self.middle_in = ResidualBlock(config, channels[-1], channels[-1])
        self.middle_attention = Attention(config, channels[-1])
        self.middle_out = ResidualBlock(config, channels[-1], channels[-1])
        stages.reverse()
        skips.reverse()
        arriving = [channels[-1], *skips[:-1]]  # every up layer has the width of the down layer it mirrors
        self.up = nn.ModuleList(
            UNetLayer(config, stage, c_in + c_skip) for stage, c_in, c_skip in zip(stages, arriving, skips, strict=True)
        )
        self.upsamples = nn.ModuleList(Upsample(coarse) for _, coarse in reversed(list(pairwise(channels))))
        self.norm_out = nn.GroupNorm(config.groups, channels[0])
        self.conv_out = nn.Conv2d(channels[0], config.out_channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self._check_inputs(x, t)
        embedding = sinusoidal_embedding(t, self.config.channels[0]).to(self.time_in.weight.dtype)
        embedding = F.silu(self.time_out(F.silu(self.time_in(embedding))))

        h = self.conv_in(x)
        skips: list[Tensor] = []
        for index, layer in enumerate(self.down):
            if self._enters_stage(index):
                h = F.avg_pool2d(h, 2)
            h = layer(h, embedding)
            skips.append(h)

        h = self.middle_in(h, embedding)
        h = self.middle_attention(h)
        h = self.middle_out(h, embedding)

        for index, layer in enumerate(self.up):
            if self._enters_stage(index):
                h = self.upsamples[index // self.config.blocks - 1](h)
            h = layer(torch.cat((h, skips.pop()), dim=1), embedding)
        return self.conv_out(F.silu(self.norm_out(h)))

    def _enters_stage(self, index: int) -> bool:
        """Whether layer `index` is the first of its stage, past the first stage."""
        return index > 0 and index % self.config.blocks == 0

    def _check_inputs(self, x: Tensor, t: Tensor) -> None:
        image = (self.config.in_channels, self.config.image_size, self.config.image_size)
        if x.dim() != 4 or tuple(x.shape[1:]) != image:
            raise ValueError(f"UNet: x must be [N, {image[0]}, {image[1]}, {image[2]}], got {list(x.shape)}")
        if t.dim() != 1 or t.shape[0] != x.shape[0]:
            raise ValueError(f"UNet: t must hold one time step an image, [{x.shape[0]}], got {list(t.shape)}")


class UNetLayer(nn.Module):
    """A residual block and, in the stages that attend, its attention."""

    def __init__(self, config: UNetConfig, stage: int, c_in: int) -> None:
        super().__init__()
        channels = config.channels[stage]
        attends = config.resolutions[stage] in config.attention_resolutions
        self.block = ResidualBlock(config, c_in, channels)
        self.attention = Attention(config, channels) if attends else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.attention(self.block(x, embedding))


class ResidualBlock(nn.Module):
    """y = skip(x) + conv2(dropout(silu((w + 1)·norm2(conv1(silu(norm1(x)))) + b))), [w, b] = linear(embedding).

    x [N, c_in, H, W] → [N, c_out, H, W]; embedding [N, time_features], SiLU already applied: it is the same in every
    block. `skip` is a 1x1 convolution when c_in ≠ c_out.
    """

    def __init__(self, config: UNetConfig, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.scale_shift = nn.Linear(config.time_features, 2 * c_out)
        self.norm2 = nn.GroupNorm(config.groups, c_out)
        self.dropout = nn.Dropout(config.dropout)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        w, b = self.scale_shift(embedding)[:, :, None, None].chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.dropout(F.silu((w + 1) * self.norm2(h) + b))
        return self.skip(x) + self.conv2(h)


class Attention(nn.Module):
    """y = x + proj(attention(qkv(norm(x)))) over the pixels of each image, [N, C, H, W] → the same.

    The pixel rows [N, H·W, C] are views of an NHWC tensor, in and out: no layout copy.
    """

    def __init__(self, config: UNetConfig, channels: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.GroupNorm(config.groups, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)  # [N, T, C]
        qkv = self.qkv(pixels).unflatten(2, (3, self.heads, -1))  # [N, T, 3, heads, C/heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [N, heads, T, C/heads]
        rows = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [N, T, C]
        return x + self.proj(rows).transpose(1, 2).unflatten(2, x.shape[2:])


class Upsample(nn.Module):
    """Nearest 2x and a 3x3 convolution, [N, C, H, W] → [N, C, 2H, 2W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def sinusoidal_embedding(t: Tensor, features: int) -> Tensor:
    """[N] time steps → [N, features] fp32: cos(t·f), then sin(t·f), f = 10000^(-i / (features/2)).

    The frequencies are computed here, not kept as a buffer: `module.bfloat16()` would round a buffer, and t·f reaches
    1000 radians.
    """
    half = features // 2
    index = torch.arange(half, dtype=torch.float32, device=t.device)
    angle = t.to(torch.float32)[:, None] * torch.exp(index * (-math.log(10_000) / half))
    return torch.cat((angle.cos(), angle.sin()), dim=1)
