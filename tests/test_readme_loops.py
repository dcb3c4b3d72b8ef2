"""The loops that README and how-to change: each text is run as it was and as it becomes, to the same weights.

timm and diffusers need not be installed: networks of their interfaces, small enough for a CPU, stand in for theirs.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from ridgeline.train_step import TrainStep

ROOT = Path(__file__).parents[1]
LOOP = re.compile(r"^<!-- loop -->\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {"timm": ROOT / "README.md", "diffusers": ROOT / "docs" / "howto-train-step.md"}


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


def loop_of(library: str) -> str:
    (diff,) = LOOP.findall(PAGES[library].read_text(encoding="utf-8"))
    return diff


def side(diff: str, sign: str) -> str:
    """The program before the change ("-") or behind it ("+")."""
    lines = [line for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(line[1:] for line in lines)


def loader(library: str, batches: int = 4) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    images = [torch.randn(6, 3, 8, 8, generator=g) for _ in range(batches)]
    if library == "diffusers":
        return images
    return [[batch, torch.randint(10, (6,), generator=g)] for batch in images]


@pytest.fixture(params=list(STAND_INS))
def library(request, monkeypatch) -> str:
    stand_in = types.ModuleType(request.param)
    vars(stand_in).update(STAND_INS[request.param])
    monkeypatch.setitem(sys.modules, request.param, stand_in)
    return request.param


def run(program: str, library: str, device: str = "cpu") -> dict[str, Any]:
    """The program's names after it ran on the same seed and batches."""
    torch.manual_seed(0)
    names = {"device": device, "loader": loader(library), "__name__": "example"}
    exec(compile(program, f"<{library} loop>", "exec"), names)
    return names


def differing(library: str, diff: str, *, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
    """Tensors of the model, and the last loss, that the two sides of a change do not agree on."""
    before, after = run(side(diff, "-"), library), run(side(diff, "+"), library)
    expected = {**before["model"].state_dict(), "loss": before["value"].detach()}
    actual = {**after["model"].state_dict(), "loss": after["value"]}
    assert expected.keys() == actual.keys()
    return [name for name, value in expected.items() if not torch.allclose(actual[name], value, rtol=rtol, atol=atol)]


def test_a_changed_loop_computes_the_same_bits(library):
    assert differing(library, loop_of(library).replace("AdamW(", "SGD(")) == []


def test_a_changed_loop_trains_to_the_same_weights(library):
    # AdamW with its learning rate on the device rounds in another order
    assert differing(library, loop_of(library), rtol=1e-5, atol=1e-6) == []


def test_another_loop_would_be_seen(library):
    diff = loop_of(library)
    faster = diff.replace("+step = ", "+optimizer.param_groups[0]['lr'] *= 1.1\n+step = ")
    parameters = [name for name, _ in run(side(diff, "+"), library)["model"].named_parameters()]
    assert set(parameters) <= set(differing(library, faster, rtol=1e-5, atol=1e-6))


def test_five_lines_change_the_loop_of_the_front_page():
    assert len([line for line in loop_of("timm").splitlines() if line.startswith("+")]) == 5


@pytest.mark.gpu
def test_a_changed_loop_is_captured(library):
    step = run(side(loop_of(library), "+"), library, device="cuda")["step"]
    assert isinstance(step, TrainStep)
    step.check_engaged()
    assert step.report.eager_steps == 0
