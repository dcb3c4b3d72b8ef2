"""YOLO26 detectors n, s, m, l, x: clean-room, from the published architecture facts; weights are the user's own.

Input [N, 3, H, W], RGB in 0..1, H and W multiples of 32. Parameter names and counts are those of the public
checkpoints. The network has two heads of one shape: one-to-one gives final detections, one-to-many needs suppression.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ridgeline.models.blocks import BATCH_NORM_MOMENTUM, C2PSA, SPPF, Bottleneck, C3k, C3k2, Concat, Conv, PSABlock
from ridgeline.models.postprocess import anchor_grid, check_input_size, decode_cxcywh, decode_xyxy, top_detections

Head = Literal["one_to_one", "one_to_many"]
HEADS: tuple[Head, ...] = ("one_to_many", "one_to_one")
# attribute names of (box, class) branches in the checkpoints
BRANCHES: dict[Head, tuple[str, str]] = {
    "one_to_many": ("cv2", "cv3"),
    "one_to_one": ("one2one_cv2", "one2one_cv3"),
}

# of `randomise_`, measured on all scales from 64 to 640 pixels
_RANDOM_GAIN = 0.4
_RANDOM_DISTANCE = 4.0  # mean distance of a box's edge from its anchor, in grid units; deviations are near 0.6
_RANDOM_LOGIT = -3.0  # the best 300 class logits lie 1 to 6 above it


@dataclass(frozen=True, slots=True)
class Scale:
    """How one size differs from the base network."""

    depth: float
    width: float
    max_channels: int
    c3k_everywhere: bool  # the two smallest use plain bottlenecks in layers 2 and 4

    def channels(self, base: int) -> int:
        """Smallest multiple of 8 not below the scaled width."""
        return math.ceil(min(base, self.max_channels) * self.width / 8) * 8

    @property
    def repeats(self) -> int:
        """Inner blocks per stage; the base network has 2."""
        return max(round(2 * self.depth), 1)


SCALES = {
    "n": Scale(0.5, 0.25, 1024, c3k_everywhere=False),
    "s": Scale(0.5, 0.5, 1024, c3k_everywhere=False),
    "m": Scale(0.5, 1.0, 512, c3k_everywhere=True),
    "l": Scale(1.0, 1.0, 512, c3k_everywhere=True),
    "x": Scale(1.0, 1.5, 512, c3k_everywhere=True),
}


class YOLO26(nn.Module):
    """The detector. `forward` is `one_to_one` where that head is present, else `one_to_many`."""

    def __init__(self, scale: str = "n", classes: int = 80, *, heads: tuple[Head, ...] = HEADS) -> None:
        super().__init__()
        if scale not in SCALES:
            raise ValueError(f"YOLO26: scale must be one of {', '.join(SCALES)}, got {scale!r}")
        if classes < 1:
            raise ValueError(f"YOLO26: classes must be at least 1, got {classes}")
        if not heads or not set(heads) <= set(HEADS):
            raise ValueError(f"YOLO26: heads must be some of {', '.join(HEADS)}, got {heads!r}")
        self.scale = scale
        self.classes = classes
        self.model = nn.ModuleList(_layers(SCALES[scale], classes, heads))

    def forward(self, x: Tensor) -> Tensor:
        return self.one_to_one(x) if "one_to_one" in self.heads else self.one_to_many(x)

    def one_to_one(self, x: Tensor) -> Tensor:
        """Detections [N, k, 6], float32, best first: x1, y1, x2, y2 (input pixels), score, class; k = min(300, A)."""
        distances, logits = self.detect.raw(self.features(x), "one_to_one")
        points, strides = anchor_grid(x.shape[2], x.shape[3], x.device)
        return top_detections(decode_xyxy(distances, points, strides), logits)

    def one_to_many(self, x: Tensor) -> Tensor:
        """Predictions [N, 4 + classes, A], float32: cx, cy, w, h (input pixels) and class scores; needs suppression."""
        distances, logits = self.detect.raw(self.features(x), "one_to_many")
        points, strides = anchor_grid(x.shape[2], x.shape[3], x.device)
        return torch.cat([decode_cxcywh(distances, points, strides), logits.float().sigmoid()], dim=1)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Feature maps at strides 8, 16 and 32. Raises ValueError unless H and W are multiples of 32."""
        check_input_size(x.shape[2], x.shape[3])
        m = self.model
        c3 = m[4](m[3](m[2](m[1](m[0](x)))))
        c4 = m[6](m[5](c3))
        c5 = m[10](m[9](m[8](m[7](c4))))
        top_down = m[13](m[12]([m[11](c5), c4]))
        p3 = m[16](m[15]([m[14](top_down), c3]))
        p4 = m[19](m[18]([m[17](p3), top_down]))
        p5 = m[22](m[21]([m[20](p4), c5]))
        return p3, p4, p5

    @property
    def detect(self) -> Detect:
        head = self.model[-1]
        assert isinstance(head, Detect)
        return head

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads this module holds; `fuse` leaves one."""
        return self.detect.heads

    @property
    def fused(self) -> bool:
        """True when no batch norm is left."""
        return not any(isinstance(module, nn.BatchNorm2d) for module in self.modules())


class Detect(nn.Module):
    """Box and class branches on three levels, once per head."""

    def __init__(self, channels: tuple[int, int, int], classes: int, heads: tuple[Head, ...]) -> None:
        super().__init__()
        box_width = max(16, channels[0] // 4, 4)
        class_width = max(channels[0], min(classes, 100))
        for head in HEADS:
            if head in heads:
                box, cls = BRANCHES[head]
                setattr(self, box, nn.ModuleList(_box_branch(c, box_width) for c in channels))
                setattr(self, cls, nn.ModuleList(_class_branch(c, class_width, classes) for c in channels))

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(head for head in HEADS if hasattr(self, BRANCHES[head][0]))

    def raw(self, features: tuple[Tensor, Tensor, Tensor], head: Head) -> tuple[Tensor, Tensor]:
        """Distances [N, 4, A] in grid units and class logits [N, classes, A] of one head."""
        if head not in self.heads:
            raise ValueError(f"this detector holds the {self.heads[0]} head only, {head} was asked for")
        box, cls = (getattr(self, name) for name in BRANCHES[head])
        distances = torch.cat([branch(x).flatten(2) for branch, x in zip(box, features, strict=True)], dim=2)
        logits = torch.cat([branch(x).flatten(2) for branch, x in zip(cls, features, strict=True)], dim=2)
        return distances, logits


def fuse(model: YOLO26, *, head: Head = "one_to_one") -> YOLO26:
    """A new module in eval mode with batch norms folded (in float64) and only `head` left; `model` is untouched."""
    if head not in model.heads:
        raise ValueError(f"fuse: the model holds the {model.heads[0]} head only, {head} was asked for")
    fused = copy.deepcopy(model)
    for other in fused.heads:
        if other != head:
            for name in BRANCHES[other]:
                delattr(fused.detect, name)
    for module in fused.modules():
        if isinstance(module, Conv):
            module.fold_()
    return fused.eval().requires_grad_(False)


@torch.no_grad()
def randomise_(model: YOLO26, seed: int = 0) -> YOLO26:
    """Fill `model` with seeded values, batch-norm statistics taken from noise; returns it in eval mode.

    For measuring without weights. Scores are spread over 0..1 and boxes have positive sides at every input size, so
    that a comparison of outputs can fail: with PyTorch's defaults the signal shrinks at every layer until all anchors
    of a deep model have equal scores, and with norms of gain 1 it grows until all scores are 1.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) / math.sqrt(fan_in))
            if module.bias is not None:
                module.bias.zero_()
    for norm in norms:
        # as in trained networks, and here what keeps sixty layers from amplifying whatever noise did not show them
        norm.weight.fill_(_RANDOM_GAIN)
        norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator))
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average: after one pass, exactly that pass's statistics
    features = model.train().features(torch.rand((2, 3, 128, 128), generator=generator))
    for head in model.heads:
        model.detect.raw(features, head)
        box, cls = (getattr(model.detect, name) for name in BRANCHES[head])
        for box_branch, class_branch in zip(box, cls, strict=True):
            box_branch[-1].bias.fill_(_RANDOM_DISTANCE)
            class_branch[-1].bias.fill_(_RANDOM_LOGIT)
    for norm in norms:
        norm.momentum = BATCH_NORM_MOMENTUM
    return model.eval()


def _layers(scale: Scale, classes: int, heads: tuple[Head, ...]) -> list[nn.Module]:
    """The 24 numbered layers; base widths 64 … 1024 are those of the unscaled network."""
    c64, c128, c256, c512, c1024 = (scale.channels(base) for base in (64, 128, 256, 512, 1024))

    def stage(c_in: int, c_out: int, *, quarter: bool = False) -> C3k2:
        hidden = int(c_out * (0.25 if quarter else 0.5))
        plain = quarter and not scale.c3k_everywhere
        inner = [Bottleneck(hidden, expansion=0.5) if plain else C3k(hidden) for _ in range(scale.repeats)]
        return C3k2(c_in, c_out, inner, hidden=hidden)

    hidden = c1024 // 2
    attention_stage = nn.Sequential(Bottleneck(hidden, expansion=0.5), PSABlock(hidden))
    return [
        Conv(3, c64, 3, 2),
        Conv(c64, c128, 3, 2),
        stage(c128, c256, quarter=True),
        Conv(c256, c256, 3, 2),
        stage(c256, c512, quarter=True),
        Conv(c512, c512, 3, 2),
        stage(c512, c512),
        Conv(c512, c1024, 3, 2),
        stage(c1024, c1024),
        SPPF(c1024),
        C2PSA(c1024, repeats=scale.repeats),
        nn.Upsample(scale_factor=2, mode="nearest"),
        Concat(),
        stage(c1024 + c512, c512),
        nn.Upsample(scale_factor=2, mode="nearest"),
        Concat(),
        stage(c512 + c512, c256),  # P3
        Conv(c256, c256, 3, 2),
        Concat(),
        stage(c256 + c512, c512),  # P4
        Conv(c512, c512, 3, 2),
        Concat(),
        C3k2(c512 + c1024, c1024, [attention_stage], hidden=hidden),  # P5
        Detect((c256, c512, c1024), classes, heads),
    ]


def _box_branch(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(Conv(channels, width, 3), Conv(width, width, 3), nn.Conv2d(width, 4, 1))


def _class_branch(channels: int, width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(Conv(channels, channels, 3, groups=channels), Conv(channels, width)),
        nn.Sequential(Conv(width, width, 3, groups=width), Conv(width, width)),
        nn.Conv2d(width, classes, 1),
    )
