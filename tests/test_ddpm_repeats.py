"""The DDPM's captured step gives equal bits from equal states: its kernels start early, and sum in one order."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.models.ddpm_unet import UNet
from ridgeline.step_recipe import NAMED
from ridgeline.train_step import TrainStep, compile_step
from ridgeline.workloads.ddpm_ladder import Conditions
from ridgeline.workloads.diffusion import linear_schedule, noise_loss

STEPS = 20


def losses(step: TrainStep, state: dict, images: Tensor) -> Tensor:
    step.load_state_dict(state)
    torch.cuda.manual_seed(5)
    return torch.stack([step(images).clone() for _ in range(STEPS)])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_two_runs_from_one_state_give_the_same_bits(recipe: str):
    torch.manual_seed(0)
    model = UNet(Conditions().network).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = noise_loss(linear_schedule().to("cuda"))
    step = compile_step(model, loss, optimizer, images, recipe=replace(NAMED[recipe], require=True))
    state = copy.deepcopy(step.state_dict())
    first = losses(step, state, images)
    ended = copy.deepcopy(dict(model.state_dict()))
    assert torch.equal(losses(step, state, images), first)
    assert step.report.replays == 2 * STEPS
    assert all(torch.equal(tensor, ended[name]) for name, tensor in model.state_dict().items())
