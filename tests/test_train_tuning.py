"""What of a training step is tuned."""

from dataclasses import replace

import pytest
import torch

from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.step_recipe import NAMED
from ridgeline.train_rewrites.fuse_attention import Attention
from ridgeline.train_tuning import convolutions, tunable
from ridgeline.workloads.diffusion import linear_schedule, noise_loss

SMALL = replace(TINY, channels=(16,), blocks=1, attention_resolutions=())


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_networks_attentions_are_tuned_beside_its_convolutions(recipe: str):
    torch.compiler.reset()
    step = UNet(SMALL), noise_loss(linear_schedule()), torch.zeros(2, 3, 8, 8), NAMED[recipe]
    found = tunable(*step)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[recipe]
    attentions = [one for one in found if isinstance(one, Attention)]
    assert attentions == [Attention((2, 64, 48), 2, None, dtype, torch.device("cpu"))]
    assert [op.name for op, _ in attentions[0].problems()] == ["attention_packed", "attention_packed_backward"]
    torch.compiler.reset()
    assert convolutions(*step) == tuple(one for one in found if not isinstance(one, Attention))
