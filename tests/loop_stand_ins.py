"""Networks of timm's and diffusers' interfaces, small enough for a CPU, for the loops that pages change."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu


class ResNet(nn.Module):
    """A stem, a basic block with its shortcut, a classifier: the operators of ResNet-18."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
        )
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc(relu(x + self.block(x)).mean((2, 3)))


class UNet2DModel(nn.Module):
    """Normalised convolutions around a skip, and an embedding of the time step."""

    def __init__(self, sample_size: int) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        assert not return_dict
        x = self.first(sample)
        y = silu(self.norm(x)) + self.time(timestep[:, None] / 1000)[:, :, None, None]
        return (self.last(torch.cat((x, y), dim=1)),)


class DDPMScheduler:
    """Noise by a linear schedule; like its model, `alphas_cumprod` begins on the host."""

    def __init__(self, num_train_timesteps: int) -> None:
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, num_train_timesteps), 0)

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        self.alphas_cumprod = self.alphas_cumprod.to(original_samples.device)
        kept = self.alphas_cumprod[timesteps][:, None, None, None]
        return kept.sqrt() * original_samples + (1 - kept).sqrt() * noise


STAND_INS: dict[str, dict[str, Any]] = {
    "timm": {"create_model": lambda name, num_classes: ResNet(num_classes)},
    "diffusers": {"UNet2DModel": UNet2DModel, "DDPMScheduler": DDPMScheduler},
}


def put(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Let `import` of the library find its stand-in, until the test is over."""
    stand_in = types.ModuleType(library)
    vars(stand_in).update(STAND_INS[library], __version__="0")
    monkeypatch.setitem(sys.modules, library, stand_in)
