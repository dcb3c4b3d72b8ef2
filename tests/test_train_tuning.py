"""What of a training step is tuned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ridgeline.errors import EnvironmentUnusable
from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.step_recipe import NAMED
from ridgeline.train_rewrites import fp8_passes
from ridgeline.train_rewrites.fuse_attention import Attention
from ridgeline.train_tuning import convolutions, tunable, tune_step
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


def test_a_gpu_without_fp8_is_told_at_once(monkeypatch):
    monkeypatch.setattr(fp8_passes, "architecture_of", lambda _device: "sm_80")
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    words = "tune: FP8 kernels are for sm_89, sm_90 and sm_120, and the GPU is sm_80: tune in bf16"
    with pytest.raises(EnvironmentUnusable, match=words):
        tune_step(model, None, None, NAMED["fp8"])  # pyright: ignore[reportArgumentType]
