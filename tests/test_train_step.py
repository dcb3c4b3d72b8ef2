"""A step through compile_step equals the plain loop: eagerly, and as a recorded graph that freezes what CUDA would."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import recorded_graph
from ridgeline import step_marks
from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.loss_scale import ScaleRule
from ridgeline.step_recipe import StepRecipe
from ridgeline.train_step import compile_step
from steps import OPTIMIZERS, Net, assert_close, batches, loss, net, plain, stepped, train_step

CAPTURES = pytest.mark.parametrize("capture", [None, recorded_graph.capture], ids=["eager", "recorded"])
STEPS = 50
# fused kernels order a few products differently from PyTorch's loop over tensors
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


@CAPTURES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_plain_loop(name, capture):
    data = batches(STEPS)
    runs = []
    for train in (plain, stepped):
        model = net()
        optimizer = OPTIMIZERS[name](model)
        schedule = CosineAnnealingLR(optimizer, STEPS)
        options = {} if train is plain else {"capture": capture}
        torch.manual_seed(7)
        runs.append(train(model, optimizer, data, clip=0.5, ema_decay=0.99, schedule=schedule, **options))
    (actual, step), expected = runs[1], runs[0]
    assert_close(actual, expected, **CLOSE)
    assert actual.model.norm.num_batches_tracked == STEPS
    assert (step.report.replays, step.report.eager_steps) == ((STEPS, 0) if capture else (0, STEPS))


def test_launching_the_operators_takes_the_step_that_replays_take():
    first, second = batches(2)
    runs = []
    for name in ("__call__", "launch_operators"):
        torch.manual_seed(7)
        model = net()
        step = train_step(model, AdamW(model.parameters(), lr=1e-3), first, capture=recorded_graph.capture)
        losses = [getattr(step, name)(batch) for batch in (first, second)]
        runs.append((losses, model.state_dict(), step.report.replays))
    (expected, weights, replays), (actual, theirs, none) = runs
    assert (replays, none) == (2, 0)
    torch.testing.assert_close(actual, expected, **CLOSE)
    torch.testing.assert_close(theirs, weights, **CLOSE)


@CAPTURES
def test_a_profile_is_told_of_each_step_once(capture, monkeypatch):
    told = []
    monkeypatch.setattr(step_marks, "_of_steps", [lambda: told.append(1)])
    data = batches(3)
    model = net()
    step = train_step(model, AdamW(model.parameters(), lr=1e-3), data[0], capture=capture)
    assert told == []
    for batch in data:
        step(batch)
    assert len(told) == 3


@CAPTURES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accumulates_micro_batches(dtype, capture):
    data = batches(STEPS, rows=6)
    options = {"accumulate": 3, "clip": 1.0, "dtype": dtype}
    torch.manual_seed(7)
    expected = plain(model := net(), AdamW(model.parameters(), lr=1e-3), data, **options)
    torch.manual_seed(7)
    actual, _ = stepped(model := net(), AdamW(model.parameters(), lr=1e-3), data, capture=capture, **options)
    # bf16 rounds to 8 bits, and a weight of Adam moves by 1e-3 a step whatever its gradient's size
    assert_close(actual, expected, **(CLOSE if dtype == "fp32" else {"rtol": 5e-2, "atol": 5e-3}))


def test_a_short_last_batch_weighs_its_micro_batches_by_rows():
    batch = batches(1, rows=5)[0]
    model, twin = net(dropout=0.0).eval(), net(dropout=0.0).eval()
    step = train_step(model, SGD(model.parameters(), lr=0.1), batch, accumulate=3)
    whole = plain(twin, SGD(twin.parameters(), lr=0.1), [batch])
    torch.testing.assert_close(step(batch), whole.losses[0])
    torch.testing.assert_close(model.conv.weight, twin.conv.weight)


@CAPTURES
def test_scales_fp16_losses_as_grad_scaler_does(capture):
    """A scale near the largest fp16 number overflows at once, so steps are skipped and the scale falls, then grows."""
    data = batches(STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=8)
    torch.manual_seed(7)
    expected = plain(model := net(), AdamW(model.parameters(), lr=1e-3), data, dtype="fp16", scaler=scaler, clip=1.0)
    torch.manual_seed(7)
    optimizer = AdamW((model := net()).parameters(), lr=1e-3)
    rule = ScaleRule(initial=2.0**18, interval=8)
    actual, step = stepped(model, optimizer, data, dtype="fp16", scale=rule, clip=1.0, capture=capture)
    assert step.loss_scale.item() == scaler.get_scale() != 2.0**18
    counts = {int(state["step"]) for state in optimizer.state.values()}
    assert counts == {int(state["step"]) for state in expected.optimizer.state.values()}
    assert max(counts) < STEPS  # some were skipped
    assert_close(actual, expected, rtol=2e-2, atol=2e-3)


def test_bn_and_lr_of_a_skipped_step():
    """An overflow skips weight decay too, whichever way the optimizer applies it."""
    for optimizer_of in (lambda p: AdamW(p, weight_decay=0.5), lambda p: Adam(p, weight_decay=0.5)):
        model = net()
        before = copy.deepcopy(model.state_dict())
        optimizer = optimizer_of(model.parameters())
        step = train_step(model, optimizer, batches(1)[0], dtype="fp16", scale=ScaleRule(initial=2.0**100))
        step(batches(1)[0])
        assert step.loss_scale.item() == 2.0**99
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        assert model.norm.num_batches_tracked == 1


@CAPTURES
def test_trap_19_compiling_leaves_no_trace(capture):
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    ema = Ema(model)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    step = train_step(model, optimizer, batches(1)[0], capture=capture, ema=ema, dtype="fp16")
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert torch.equal(ema.module.state_dict()[name], before[name]), name
    assert model.norm.num_batches_tracked == 0
    assert ema.state_dict()["updates"] == 0
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())
    assert step.loss_scale.item() == 65536
    if capture is None:
        assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_trap_24_schedules_are_not_frozen(kind):
    """The learning rate halves at every step, the weight decay doubles; both are floats that the caller sets."""
    data = batches(6)
    results = []
    for captured in (False, True):
        model = net(dropout=0.0)
        optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.01)
        step = train_step(model, optimizer, data[0], capture=recorded_graph.capture) if captured else None
        for batch in data:
            if step:
                step(batch)
            else:
                plain(model, optimizer, [batch])
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] *= 2
        assert optimizer.param_groups[0]["lr"] == 0.05 / 64
        results.append(model.state_dict())
    assert step is not None
    assert step.report.replays == 6
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=2e-6, msg=name)


def test_trap_24_a_parameter_without_gradient_is_named():
    model = net()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"2 parameters .* \(unused.weight, unused.bias\): freeze them"):
        train_step(model, SGD(model.parameters(), lr=0.1), batches(1)[0])


def test_schedulers_keep_floats_and_do_not_warn(recwarn):
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step = train_step(model, optimizer, batches(1)[0], capture=recorded_graph.capture)
    schedule = LambdaLR(optimizer, lambda n: 0.5**n)
    for n, batch in enumerate(batches(4)):
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**n
        step(batch)
        schedule.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
    assert [group["fused"] for group in optimizer.param_groups] == [None]


def test_tensor_learning_rates_are_followed():
    model = net()
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.0), fused=True)
    step = train_step(model, optimizer, batches(1)[0], capture=recorded_graph.capture)
    before = model.conv.weight.detach().clone()
    step(batches(1)[0])
    assert torch.equal(model.conv.weight, before)
    optimizer.param_groups[0]["lr"].fill_(0.1)
    step(batches(1)[0])
    assert not torch.equal(model.conv.weight, before)


def test_settings_that_change_at_every_step_run_eagerly_and_say_so():
    """OneCycleLR moves momentum: a constant of the kernels."""
    model, data = net(), batches(10)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = train_step(model, optimizer, data[0], capture=recorded_graph.capture)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
    with pytest.warns(RuntimeWarning, match="8 steps in a row ran eagerly, because the optimizer's settings"):
        for batch in data:
            step(batch)
            schedule.step()
    assert step.report.graphs == 1


def test_losses_and_norms_are_the_callers_own():
    model, data = net(dropout=0.0), batches(3)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = train_step(model, optimizer, data[0], capture=recorded_graph.capture, clip=1e9)
    losses, norms = [], []
    for batch in data:
        losses.append(step(batch))
        norms.append(step.grad_norm)
    assert len({value.item() for value in losses}) == len({value.item() for value in norms}) == 3
    assert all(p.grad is None for p in model.parameters())


def test_the_decay_of_the_average_can_change_between_steps():
    model, data = net(), batches(2)
    ema = Ema(model, 0.5, warmup=False)
    step = train_step(model, SGD(model.parameters(), lr=0.1), data[0], capture=recorded_graph.capture, ema=ema)
    ema.decay = 0.0
    step(data[0])
    assert torch.equal(ema.module.conv.weight, model.conv.weight)
    ema.decay = 1.0
    step(data[1])
    assert not torch.equal(ema.module.conv.weight, model.conv.weight)


@CAPTURES
def test_state_goes_to_a_plain_loop_and_back(capture):
    """Ten steps captured, ten plain from its state, ten captured from theirs: as thirty plain ones."""
    data = batches(30)
    expected = plain(model := net(dropout=0.0), AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), data)

    first = net(dropout=0.0)
    step = train_step(first, AdamW(first.parameters(), lr=1e-3, weight_decay=0.1), data[0], capture=capture)
    for batch in data[:10]:
        step(batch)
    state = copy.deepcopy(step.state_dict())

    middle = net(seed=3, dropout=0.0)
    optimizer = AdamW(middle.parameters(), lr=9.0)
    middle.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    plain(middle, optimizer, data[10:20])

    # back into the first one, whose graph must go on from the loaded weights and moments
    step.load_state_dict({"model": middle.state_dict(), "optimizer": optimizer.state_dict()})
    for batch in data[20:]:
        step(batch)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(first.state_dict()[name], tensor, rtol=1e-4, atol=2e-6, msg=name)
    if capture:
        assert (step.report.captures, step.report.replays) == (1, 20)


def test_scaler_state_is_grad_scalers():
    model = net()
    step = train_step(model, AdamW(model.parameters()), batches(1)[0], dtype="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.load_state_dict(step.state_dict()["scaler"])
    assert scaler.get_scale() == 65536
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.ones(()))
    step.load_state_dict({**step.state_dict(), "scaler": scaler.state_dict()})
    assert step.loss_scale.item() == 128


def test_channels_last_in_place():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    plain(model, optimizer, batches(2))  # state in the old layout
    ema = Ema(model, 0.9)
    step = train_step(model, optimizer, batches(1)[0], channels_last=True, ema=ema, capture=recorded_graph.capture)
    step(batches(1)[0])
    weight = model.conv.weight
    tensors = (weight, optimizer.state[weight]["exp_avg"], ema.module.conv.weight)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
    assert all(tensor.stride() == weight.stride() for tensor in tensors)
    assert optimizer.state[weight]["step"] == 3


def test_a_loss_may_draw_its_own_noise_and_have_weights():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, model, batch):
            noise = torch.randn_like(batch)
            return F.mse_loss(model(batch + noise) * self.gain, noise.mean((2, 3))[:, :1].expand(-1, 5))

    data = [batch["image"] for batch in batches(12)]
    results = []
    for capture in (None, recorded_graph.capture):
        model, noisy = net(), Noisy()
        optimizer = AdamW([*model.parameters(), *noisy.parameters()], lr=1e-2)
        step = train_step(model, optimizer, data[0], loss=noisy, capture=capture)
        torch.manual_seed(5)
        results.append(torch.stack([step(batch) for batch in data]))
        assert noisy.gain != 1
    assert torch.equal(*results)


@CAPTURES
def test_a_generator_of_the_losses_own_is_left_as_it_was_and_advances(capture):
    noise = torch.Generator().manual_seed(3)

    def noisy(model, batch):
        return loss(model, batch) + torch.rand((), generator=noise)

    model = net(dropout=0.0)
    options = {"loss": noisy, "capture": capture, "generators": (noise,)}
    step = train_step(model, SGD(model.parameters(), lr=0.0), batches(1)[0], **options)
    seen = [step(batches(1)[0]) for _ in range(3)]
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.stack(seen) - seen[0], drawn - drawn[0])
    before = noise.get_state()
    assert step.verify(batches(4)).steps == 4
    assert torch.equal(noise.get_state(), before)


def test_the_public_call_on_the_cpu():
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    data = batches(40)
    step = compile_step(model, loss, optimizer, data[0], ema=Ema(model), clip=1.0, recipe=StepRecipe(dtype="fp32"))
    losses = [step(data[0]).item() for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    assert "only a GPU has CUDA graphs" in step.report.reason
    with pytest.raises(NotEngaged, match="none of 40 steps was replayed"):
        step.check_engaged()
    with pytest.raises(NotEngaged, match="only a GPU has CUDA graphs"):
        compile_step(model, loss, optimizer, data[0], recipe=StepRecipe(require=True))
