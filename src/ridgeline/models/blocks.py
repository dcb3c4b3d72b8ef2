"""Building blocks of YOLO26: clean-room, from the published architecture facts.

All maps are [N, C, H, W]; `c_in`, `c_out`, `hidden` are channel counts. Attribute names are those of the public
checkpoints (`cv1`, `m`, `attn.qkv`, …), because a state dict is addressed by them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BATCH_NORM_EPS = 1e-3
BATCH_NORM_MOMENTUM = 0.03
HEAD_CHANNELS = 64  # value channels of one attention head, at every scale
KEY_CHANNELS = 32  # query and key channels of one attention head


class Conv(nn.Module):
    """silu(batch_norm(conv(x))), bias-free, padded by kernel // 2."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, *, groups: int = 1, act: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(c_out, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)
        self.act = nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))

    @torch.no_grad()
    def fold_(self) -> None:
        """Fold the batch norm into the convolution, in place and in float64; a folded block is left alone."""
        if isinstance(self.bn, nn.Identity):
            return
        conv, bn = self.conv, self.bn
        assert bn.running_mean is not None and bn.running_var is not None
        # float64: in fp32 the product of two rounded factors already costs the last bit of every weight
        gain = bn.weight.double() / torch.sqrt(bn.running_var.double() + bn.eps)
        weight = conv.weight.double() * gain[:, None, None, None]
        bias = bn.bias.double() - bn.running_mean.double() * gain
        dtype = conv.weight.dtype
        conv.weight = nn.Parameter(weight.to(dtype))
        conv.bias = nn.Parameter(bias.to(dtype))
        self.bn = nn.Identity()


class Concat(nn.Module):
    """Channel concatenation; a module so that layer numbers agree with the checkpoints."""

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(maps), dim=1)


class Bottleneck(nn.Module):
    """x + cv2(cv1(x)), two 3x3 convolutions; the residual is added after the second activation."""

    def __init__(self, channels: int, *, expansion: float) -> None:
        super().__init__()
        hidden = int(channels * expansion)
        self.cv1 = Conv(channels, hidden, 3)
        self.cv2 = Conv(hidden, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x))


class C3k(nn.Module):
    """Two bottlenecks on one half of the channels, a bypass on the other, joined by a 1x1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = channels // 2
        self.cv1 = Conv(channels, hidden)
        self.cv2 = Conv(channels, hidden)
        self.cv3 = Conv(2 * hidden, channels)
        self.m = nn.Sequential(Bottleneck(hidden, expansion=1.0), Bottleneck(hidden, expansion=1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], dim=1))


class Attention(nn.Module):
    """Self-attention over the H·W positions, plus a depthwise 3x3 of the values as position encoding.

    qkv holds, per head, 32 query, 32 key and 64 value channels in that order.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = max(channels // HEAD_CHANNELS, 1)
        self.qkv = Conv(channels, channels + 2 * self.heads * KEY_CHANNELS, act=False)
        self.proj = Conv(channels, channels, act=False)
        self.pe = Conv(channels, channels, 3, groups=channels, act=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        head_channels = channels // self.heads
        qkv = self.qkv(x).view(batch, self.heads, 2 * KEY_CHANNELS + head_channels, height * width)
        q, k, v = qkv.split([KEY_CHANNELS, KEY_CHANNELS, head_channels], dim=2)
        # [batch, head, query, key]; spelled out rather than SDPA, whose graph depends on the device
        weights = (q.transpose(-2, -1) @ k * KEY_CHANNELS**-0.5).softmax(dim=-1)
        out = (v @ weights.transpose(-2, -1)).reshape(batch, channels, height, width)
        return self.proj(out + self.pe(v.reshape(batch, channels, height, width)))


class PSABlock(nn.Module):
    """x + attention(x), then x + ffn(x)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attn = Attention(channels)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, act=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class C3k2(nn.Module):
    """Split, chain of inner blocks on the second half, concat of every stage, 1x1; `inner` are the chained blocks."""

    def __init__(self, c_in: int, c_out: int, inner: Sequence[nn.Module], *, hidden: int) -> None:
        super().__init__()
        self.cv1 = Conv(c_in, 2 * hidden)
        self.cv2 = Conv((2 + len(inner)) * hidden, c_out)
        self.m = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        maps = list(self.cv1(x).chunk(2, dim=1))
        for block in self.m:
            maps.append(block(maps[-1]))
        return self.cv2(torch.cat(maps, dim=1))


class SPPF(nn.Module):
    """Three chained 5x5 max pools, concatenated with their input, 1x1, plus the block's input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = channels // 2
        self.cv1 = Conv(channels, hidden, act=False)
        self.cv2 = Conv(4 * hidden, channels)
        self.m = nn.MaxPool2d(kernel_size=5, stride=1, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        return x + self.cv2(torch.cat(maps, dim=1))


class C2PSA(nn.Module):
    """Split, a chain of attention blocks on the second half, concat, 1x1."""

    def __init__(self, channels: int, *, repeats: int) -> None:
        super().__init__()
        hidden = channels // 2
        self.cv1 = Conv(channels, 2 * hidden)
        self.cv2 = Conv(2 * hidden, channels)
        self.m = nn.Sequential(*(PSABlock(hidden) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.cv1(x).chunk(2, dim=1)
        return self.cv2(torch.cat([a, self.m(b)], dim=1))
