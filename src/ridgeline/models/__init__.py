"""Networks built from torch alone, by name. A new one is a builder below and a word in MODELS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.ddpm_unet import ddpm_cifar10
from ridgeline.models.yolo26 import SCALES, YOLO26, fuse, randomise_

Builder = Callable[..., tuple[nn.Module, tuple[Tensor, ...]]]
YOLO26_NAMES = tuple(f"yolo26{scale}" for scale in SCALES)
DETECTOR_INPUT_PIXELS = 640


def build(name: str) -> nn.Module:
    """The untrained detector `yolo26n` … `yolo26x`: both heads, batch norms in place, seeded values, eval mode."""
    if name not in YOLO26_NAMES:
        raise UsageError(f"unknown detector {name!r}: use one of {', '.join(YOLO26_NAMES)}")
    return randomise_(YOLO26(name.removeprefix("yolo26")))


def _detector(name: str, batch: int = 1) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The detector as it is deployed (one-to-one head, batch norms folded) and images [batch, 3, 640, 640] in 0..1."""
    if batch < 1:
        raise UsageError(f"{name}: batch must be at least 1, got {batch}")
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((batch, 3, DETECTOR_INPUT_PIXELS, DETECTOR_INPUT_PIXELS), generator=generator)
    model = build(name)
    assert isinstance(model, YOLO26)
    return fuse(model), (images,)


# name -> builder: (batch) -> (module, example inputs); without an argument, the batch its published figures use
MODELS: Mapping[str, Builder] = MappingProxyType(
    {
        **{name: partial(_detector, name) for name in YOLO26_NAMES},
        "ddpm-cifar10": ddpm_cifar10,
    }
)
