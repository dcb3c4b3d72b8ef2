"""A detector of six convolutions with the interface of YOLO26, quick to compile, and pictures for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.models.blocks import Conv
from ridgeline.models.postprocess import anchor_grid, decode_xyxy, top_detections
from ridgeline.workloads.draw import save_image

SIZE, CLASSES = 64, 3


class TinyDetector(nn.Module):
    """[N, 3, H, W] in 0..1 -> [N, k, 6]; three levels of which two are pooled, three classes, seeded weights."""

    def __init__(self, *, logit: float = -2.0, box: float = 3.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 16, 3, 2), Conv(16, 16, 3, 2))
        self.box = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(3))
        self.cls = nn.ModuleList(nn.Conv2d(16, CLASSES, 1) for _ in range(3))
        generator = torch.Generator().manual_seed(3)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                part.weight.data = (
                    torch.randn(part.weight.shape, generator=generator) * 1.5 / part.weight[0].numel() ** 0.5
                )
        for level in self.box:
            nn.init.constant_(level.bias, box)
        for level in self.cls:
            nn.init.constant_(level.bias, logit)
            level.weight.data *= 4
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.stem(x)]
        for _ in range(2):
            maps.append(nn.functional.avg_pool2d(maps[-1], 2))
        boxes, logits = (
            torch.cat([head(y).flatten(2) for head, y in zip(heads, maps, strict=True)], dim=2)
            for heads in (self.box, self.cls)
        )
        return top_detections(decode_xyxy(boxes, *anchor_grid(x.shape[2], x.shape[3], x.device)), logits)


def build() -> tuple[nn.Module, Tensor]:
    """For `ridgeline verify file.py:build`."""
    return TinyDetector(), torch.rand((1, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0))


def save_pictures(folder: Path, count: int = 3, *, brightest: int = 255) -> Path:
    """Blocks of random colour, one file a picture."""
    folder.mkdir(exist_ok=True)
    for index in range(count):
        blocks = np.random.default_rng(index).integers(0, brightest + 1, (8, 12, 3), dtype=np.uint8)
        save_image(folder / f"{index}.png", blocks.repeat(16, axis=0).repeat(16, axis=1))
    return folder
