"""The arithmetic that schedules reach on the device, and state that moves between ridgeline and plain loops."""

import pytest
import torch
from torch.optim import SGD, AdamW

from ridgeline.device_optimizer import DeviceOptimizer, axpy_, lerp_, load_state_, portable_state, refusal
from ridgeline.errors import UsageError
from steps import net


def test_axpy_and_lerp_of_many_tensors():
    g = torch.Generator().manual_seed(0)
    shapes = [(7,), (3, 5), (), (0, 2), (2, 3, 4, 4)]
    targets, sources = ([torch.randn(shape, generator=g) for shape in shapes] for _ in range(2))
    a, b = [t.clone() for t in targets], [t.clone() for t in targets]
    axpy_(a, sources, torch.tensor(0.25))
    lerp_(b, sources, torch.tensor(0.25))
    for target, source, moved, mixed in zip(targets, sources, a, b, strict=True):
        torch.testing.assert_close(moved, target - 0.25 * source, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mixed, torch.lerp(target, source, 0.25), rtol=1e-6, atol=1e-6)
    axpy_([], [], torch.tensor(1.0))


def test_axpy_onto_itself_and_skipped():
    x = torch.full((1000,), 2.0)
    axpy_([x], [x], torch.tensor(0.5), skip=torch.tensor(1.0))
    assert torch.equal(x, torch.full((1000,), 2.0))
    axpy_([x], [x], torch.tensor(0.5), skip=torch.tensor(0.0))
    assert torch.equal(x, torch.ones(1000))


def test_state_is_made_before_the_first_step_and_is_zero():
    model = net()
    optimizer = AdamW(model.parameters())
    DeviceOptimizer(optimizer, torch.device("cpu")).settle_()
    assert set(optimizer.state[model.conv.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert model.frozen.weight not in optimizer.state
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())
    optimizer = SGD(model.parameters(), lr=0.1)
    DeviceOptimizer(optimizer, torch.device("cpu")).settle_()
    assert not optimizer.state


def test_the_users_flags_survive_a_step_that_fails(monkeypatch):
    model = net()
    optimizer = AdamW(model.parameters(), foreach=True)
    update = DeviceOptimizer(optimizer, torch.device("cpu"))
    update.settle_()
    update.refresh()
    seen = []

    def step():
        seen.append(dict(optimizer.param_groups[0]))
        raise FloatingPointError

    monkeypatch.setattr(optimizer, "step", step)
    with pytest.raises(FloatingPointError):
        update.step_(torch.zeros(()))
    (inside,), after = seen, optimizer.param_groups[0]
    assert (inside["lr"].item(), inside["foreach"], inside["fused"]) == (pytest.approx(1e-3), False, True)
    assert (after["lr"], after["foreach"], after["fused"], after["weight_decay"]) == (1e-3, True, None, 1e-2)
    assert not hasattr(optimizer, "found_inf")


def test_state_of_another_shape_is_refused():
    """Fused kernels on the CPU do not check, and write past its end."""
    model = net()
    optimizer = AdamW(model.parameters())
    optimizer.state[model.conv.weight] = {"step": torch.ones(()), "exp_avg": torch.zeros(3)}
    with pytest.raises(UsageError, match=r"exp_avg of shape \[3\] for a parameter of shape \[8, 3, 3, 3\]"):
        DeviceOptimizer(optimizer, torch.device("cpu")).settle_()


def test_loaded_state_lands_in_the_tensors_that_are_there():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    DeviceOptimizer(optimizer, torch.device("cpu")).settle_()
    buffer = optimizer.state[model.conv.weight]["momentum_buffer"]
    buffer.fill_(3)
    state = portable_state(optimizer)
    buffer.fill_(5)
    fresh = SGD(model.parameters(), lr=0.1, momentum=0.9)
    load_state_(optimizer, fresh.state_dict())
    assert optimizer.state[model.conv.weight]["momentum_buffer"] is buffer
    assert not buffer.any()
    load_state_(fresh, state)
    assert "momentum_buffer" in fresh.state[model.conv.weight]


def test_supported_optimizers_are_not_refused():
    assert refusal(AdamW(net().parameters(), amsgrad=True, maximize=True, foreach=True)) is None
    assert refusal(SGD(net().parameters(), lr=0.1, dampening=0.5)) is None
