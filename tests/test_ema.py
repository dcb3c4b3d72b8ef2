"""The average follows its formula, on the device, and copies what is not to be averaged."""

import pytest
import torch
from torch import nn

from ridgeline.ema import Ema
from ridgeline.errors import UsageError
from steps import net


@pytest.mark.parametrize("warmup", [True, False])
def test_follows_the_formula(warmup):
    model = net()
    ema = Ema(model, 0.9, warmup=warmup)
    average = model.conv.weight.detach().double()
    for n in range(30):
        with torch.no_grad():
            model.conv.weight += 0.1
        ema.update_(model)
        decay = min(0.9, (1 + n) / (10 + n)) if warmup else 0.9
        average = decay * average + (1 - decay) * model.conv.weight.detach().double()
    torch.testing.assert_close(ema.module.conv.weight.double(), average, rtol=1e-5, atol=1e-6)
    assert ema.state_dict()["updates"] == 30


def test_buffers_are_copied_and_ties_and_modes_kept():
    model = net()
    ema = Ema(model, 0.5)
    model(torch.randn(4, 3, 6, 6))
    ema.update_(model)
    assert torch.equal(ema.module.norm.running_mean, model.norm.running_mean)
    assert ema.module.norm.num_batches_tracked == 1
    assert ema.module.down.weight is ema.module.up.weight
    assert not ema.module.training
    assert model.training
    assert not any(p.requires_grad for p in ema.module.parameters())
    assert not model.frozen.weight.requires_grad
    assert model.conv.weight.requires_grad


def test_state_is_loaded_in_place():
    model = net()
    ema, other = Ema(model), Ema(net(seed=5))
    other.update_(model)
    pointers = [tensor.data_ptr() for tensor in ema.tensors()]
    ema.load_state_dict(other.state_dict())
    assert [tensor.data_ptr() for tensor in ema.tensors()] == pointers
    assert torch.equal(ema.module.head.weight, other.module.head.weight)
    assert ema.state_dict()["updates"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_the_weights_dtype_and_mixes_them(dtype):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).to(dtype)])
    ema = Ema(model, 0.0, warmup=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.update_(model)
    for average, parameter in zip(ema.module.parameters(), model.parameters(), strict=True):
        assert average.dtype == parameter.dtype
        torch.testing.assert_close(average, parameter.detach())


def test_refuses_a_decay_outside_its_range():
    with pytest.raises(UsageError, match=r"between 0 and 1, got 1.5"):
        Ema(net(), 1.5)
