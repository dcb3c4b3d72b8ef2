"""`TrainStep.verify`: right steps agree, each planted fault is named, and nothing is left changed."""

import random

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

import recorded_graph
from ridgeline import step_program, step_verifier
from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.step_verifier import StepLimits
from steps import OPTIMIZERS, batches, loss, net, train_step

STEPS = 14


def made(name="adamw", *, dropout=0.2, average=True, **options):
    model = net(dropout=dropout)
    optimizer = OPTIMIZERS[name](model)
    options = {"capture": recorded_graph.capture, "clip": 1.0, **options}
    ema = Ema(model, 0.9) if average else None
    return train_step(model, optimizer, batches(1)[0], ema=ema, **options), model, optimizer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd nesterov", {}),
        ("sgd maximize", {"clip": None, "average": False}),
        ("adam", {"capture": None}),
        ("adamw", {"accumulate": 3}),
        ("adamw", {"dtype": "bf16"}),
        ("adamw", {"dtype": "fp16", "clip": None}),
    ],
)
def test_right_steps_agree(name, options):
    step, _, optimizer = made(name, **options)
    agreement = step.verify(batches(STEPS))
    assert agreement.steps == STEPS
    assert agreement.replayed == (0 if "capture" in options else STEPS)
    assert 0 <= agreement.used < 0.5  # 0 where kernels do the very same
    state = sum(len(state) for state in optimizer.state.values())
    # of the network 7 weights, 3 buffers, once more in the average; the losses, its updates, the scaler's two
    averaged = 11 if options.get("average", True) else 0
    assert agreement.tensors == 1 + 10 + averaged + state + (2 if options.get("dtype") == "fp16" else 0)
    assert f"{STEPS} steps, {agreement.replayed} replayed" in agreement.lines()[0]
    assert agreement.nearest in agreement.lines()[1]


def wrong_rate(step, _):
    program, refresh = step._program, step._program.refresh

    def wrong():
        refresh()
        for (rate, _), group in zip(program._update.scalars(), program.parts.optimizer.param_groups, strict=True):
            rate.fill_(1.01 * group["lr"])

    program.refresh = wrong


def wrong_average(step, _):
    """With the right weights."""
    step._program.parts.ema.device_decay.fill_(0.5)


def loose_clip(_, monkeypatch):
    clip_ = step_program.clip_grads_with_norm_
    monkeypatch.setattr(
        step_program, "clip_grads_with_norm_", lambda ps, limit, norm, **kw: clip_(ps, 1.01 * limit, norm, **kw)
    )


def statistics_moved_twice(step, _):
    run = step._program.run

    def twice(leaves, structure, *, compiled):
        result = run(leaves, structure, compiled=compiled)
        step._program.parts.model.norm.num_batches_tracked.add_(1)
        return result

    step._program.run = twice


def one_dropout_mask(step, _):
    """As a graph whose generator does not advance."""
    run, state = step._program.run, torch.get_rng_state()

    def again(leaves, structure, *, compiled):
        torch.set_rng_state(state)
        return run(leaves, structure, compiled=compiled)

    step._program.run = again


def never_unscaled(step, _):
    step._program.scaler.unscale_ = lambda _: step._program.scaler._found_inf.zero_()


@pytest.mark.parametrize(
    ("fault", "tensor", "options"),
    [
        (wrong_rate, "losses", {}),
        (wrong_rate, "losses", {"name": "sgd nesterov"}),
        (wrong_average, r"ema\.conv\.weight", {"average": True}),
        (loose_clip, "losses", {"name": "sgd", "clip": 0.3}),
        (statistics_moved_twice, r"model\.norm\.num_batches_tracked", {}),
        (one_dropout_mask, "losses", {}),
        (never_unscaled, "losses", {"dtype": "fp16", "name": "sgd", "clip": None}),
    ],
)
def test_a_planted_fault_is_named(fault, tensor, options, monkeypatch):
    step, _, _ = made(capture=None, **{"average": False, **options})
    fault(step, monkeypatch)
    with pytest.raises(VerificationFailed, match=rf"verify: {tensor} after {STEPS} steps is not a plain loop's: .*"):
        step.verify(batches(STEPS))


def decays_rounded_to(digits, step):
    """A step's 1 - beta is of betas with so many binary digits; in PyTorch's fused kernels they may have fp32's 24."""
    update, group = step._program._update, step._program.parts.optimizer.param_groups
    step_, exact = update.step_, [each["betas"] for each in group]

    def rounded(found_inf):
        for each in group:
            each["betas"] = tuple(round(beta * 2**digits) / 2**digits for beta in each["betas"])
        step_(found_inf)
        for each, betas in zip(group, exact, strict=True):
            each["betas"] = betas

    update.step_ = rounded


def test_second_moments_may_have_a_decay_of_fp32():
    """1 - 0.999 is then off by 1.3e-5 of itself, a hundred times what rounding the weights changes."""
    step, _, _ = made("adamw", dropout=0.0, capture=None, average=False)
    decays_rounded_to(24, step)
    agreement = step.verify(batches(STEPS))
    assert agreement.nearest.endswith("exp_avg_sq") and 0.1 < agreement.used < 0.5


def test_second_moments_of_another_decay_are_found_and_told_with_their_size():
    step, _, _ = made("adamw", dropout=0.0, capture=None, average=False)
    decays_rounded_to(20, step)
    said = r"exp_avg_sq after 14 steps .* elements, of RMS \S+, so \S+ of it where \S+ is allowed; fewer"
    with pytest.raises(VerificationFailed, match=said):
        step.verify(batches(STEPS))


def test_averages_may_have_a_decay_of_fp32():
    """1 - 0.9999 is off by 1.7e-4 of itself, which an average shows whose weights move by much."""
    model = net(dropout=0.0)
    optimizer = SGD(model.parameters(), lr=0.5)
    step = train_step(model, optimizer, batches(1)[0], ema=Ema(model, 0.9999, warmup=False))
    assert step.verify(batches(STEPS)).used < 0.5


@pytest.mark.parametrize("fault", [None, wrong_rate])
def test_nothing_is_left_changed(fault, monkeypatch):
    step, model, optimizer = made(dtype="fp16")
    for batch in batches(3, seed=5):
        step(batch)
    if fault:
        fault(step, monkeypatch)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before = {name: tensor.clone() for name, tensor in step._program.named_tensors()}
    rates = [group["lr"] for group in optimizer.param_groups]
    draws, report, norm = (random.getstate(), torch.get_rng_state()), step.report, step.grad_norm
    try:
        step.verify(batches(STEPS))
        assert fault is None
    except VerificationFailed:
        assert fault is not None
    for name, tensor in step._program.named_tensors():
        assert torch.equal(tensor, before[name]), name
    assert draws[0] == random.getstate() and torch.equal(draws[1], torch.get_rng_state())
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert (step.report, step.grad_norm) == (report, norm)
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert not step._program.watched.moved()


def test_begins_from_weights_that_were_replaced():
    step, model, _ = made(dropout=0.0)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1
    expected = model.conv.weight.detach().clone()
    agreement = step.verify(batches(3))
    assert torch.equal(model.conv.weight, expected)
    # the first of the steps is eager, as after every replacement
    assert agreement.replayed == 2


def test_a_graph_made_on_the_way_counts_and_stays():
    step, _, _ = made()
    short = batches(4, rows=3)
    assert step.verify(short).replayed == 3
    assert (step.report.graphs, step.report.replays, step.report.eager_steps) == (2, 0, 0)


def test_a_loss_with_weights_and_one_out_of_the_model():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, model, batch):
            return loss(model, batch) * self.gain

    model, weighted, free = net(), Weighted(), nn.Parameter(torch.ones(3))
    optimizer = AdamW([*model.parameters(), *weighted.parameters(), free], lr=1e-2)
    step = train_step(
        model, optimizer, batches(1)[0], loss=lambda m, b: weighted(m, b) + free.square().sum(), capture=None
    )
    names = [name for name, _ in step._program.named_tensors()]
    assert "group 0.7" in names and "optimizer.group 0.8.exp_avg" in names
    step = train_step(model, AdamW([*model.parameters(), *weighted.parameters()]), batches(1)[0], loss=weighted)
    assert "loss.gain" in [name for name, _ in step._program.named_tensors()]
    assert step.verify(batches(5)).used < 0.5


def test_other_draws_of_compiled_code_are_explained():
    three = [torch.ones(2), torch.full((2,), 2.0), torch.ones(2)]
    mine, plain, twin = ({"losses": values} for values in three)
    for other_draws, words in ((True, "set torch._inductor.config.fallback_random"), (False, "fewer batches show")):
        with pytest.raises(VerificationFailed, match=words):
            step_verifier._judge(mine, plain, [{"losses": plain["losses"]}], StepLimits(), other_draws=other_draws)
    # as far apart as the twin is not too far
    assert step_verifier._judge(mine, plain, [twin], StepLimits(error_factor=1.0), other_draws=False).used == 1 / (
        1 + 2**0.5 * 2 * torch.finfo(torch.float32).eps
    )
    nan = {"losses": torch.tensor([1.0, float("nan")])}
    with pytest.raises(VerificationFailed, match="NaN"):
        step_verifier._judge(nan, nan, [nan], StepLimits(), other_draws=False)


def judged(errors, twin_errors):
    """The verdict on one step's tensor of zeros but for `errors`, where the twin has `twin_errors`."""
    plain, mine, twin = (
        {"bias": torch.tensor(values), "losses": torch.ones(1)} for values in ([0.0] * len(errors), errors, twin_errors)
    )
    return step_verifier._judge(mine, plain, [twin], StepLimits(error_factor=1.0), other_draws=False)


def test_few_elements_are_judged_by_their_root_mean_square():
    """Of an RMS of 0.89 where 1 is allowed, and a maximum of 2 where the twin's is 1."""
    errors, ones = [2.0, 0.0, 0.0, 0.0, 0.0], [1.0] * 5
    assert judged(errors, ones).used == pytest.approx(0.8**0.5)
    for bad in (2.3, float("nan")):
        with pytest.raises(VerificationFailed, match="verify: bias after 1 steps"):
            judged([bad, *errors[1:]], ones)
    # a maximum says something from 17 elements on
    assert judged([2.0] + [0.0] * 15, [1.0] * 16).used == 0.5
    with pytest.raises(VerificationFailed, match=r"maximum error 2 \(allowed 1\), 17 elements"):
        judged([2.0] + [0.0] * 16, [1.0] * 17)


def test_refusals():
    step, model, _ = made()
    with pytest.raises(UsageError, match="at least one batch"):
        step.verify([])
    for options in ({"error_factor": 0.5}, {"twins": 0}):
        with pytest.raises(UsageError, match="error_factor and twins must be at least 1"):
            StepLimits(**options)
    plain = train_step(model, RMSprop(model.parameters()), batches(1)[0])
    with pytest.raises(NotEngaged, match="what a plain loop does, because the optimizer RMSprop cannot be captured"):
        plain.verify(batches(2))
