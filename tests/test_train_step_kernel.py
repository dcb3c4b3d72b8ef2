"""Steps whose clip, AdamW and average are one pass (kernels/adamw_ema), under the interpreter, eager and recorded."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

import recorded_graph
from recorded_graph import RecordedGraph
from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.kernels._op import INTERPRETED, Launch
from ridgeline.loss_scale import ScaleRule
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import StepRecipe
from steps import OPTIMIZERS, assert_close, batches, loss, net, plain, stepped, train_step

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="a GPU runs these kernels: test_train_step_gpu.py has its tests"
)
CAPTURES = pytest.mark.parametrize("capture", [None, recorded_graph.capture], ids=["eager", "recorded"])
CLOSE = {"rtol": 2e-4, "atol": 2e-6}
ONE_PASS = "clip, AdamW and the average of the weights are one pass"


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Kernel launches, which a recorded graph sees as a CUDA graph would: made again at every replay."""
    made = []

    def run(launch):
        mode, made_before = _get_current_dispatch_mode(), made.append(launch)
        with _disable_current_modes():
            interpret(launch)
        if isinstance(mode, RecordedGraph):
            mode.calls.append((interpret, (launch,), {}, made_before))

    interpret = Launch.run
    monkeypatch.setattr(Launch, "run", run)
    return made


@CAPTURES
def test_equals_a_plain_loop(capture, launches):
    """Two groups, a frozen layer, a tied weight, buffers, clipping, an average with warm-up, a schedule."""
    steps = 7
    data = batches(steps)
    runs = []
    for train, options in ((plain, {}), (stepped, {"capture": capture, "optimizer_kernel": "always"})):
        model = net()
        with torch.no_grad():
            model.frozen.weight += 0.1
        optimizer = OPTIMIZERS["adamw"](model)
        schedule = CosineAnnealingLR(optimizer, steps)
        torch.manual_seed(7)
        runs.append(train(model, optimizer, data, clip=0.5, ema_decay=0.99, schedule=schedule, **options))
    (actual, step), expected = runs[1], runs[0]
    assert_close(actual, expected, **CLOSE)
    assert step.report.optimizer == ONE_PASS == step.report.lines()[-1]
    assert (step.report.replays, step.report.eager_steps) == ((steps, 0) if capture else (0, steps))
    # three launches a step, of them one the norm: those of an eager one, or two warm-ups and a capture
    assert len(launches) == 3 * (3 if capture else steps)


def test_verified_beside_a_plain_loop():
    model = net()
    optimizer = OPTIMIZERS["adamw"](model)
    options = {"ema": Ema(model, 0.9), "clip": 0.5, "accumulate": 2, "optimizer_kernel": "always"}
    step = train_step(model, optimizer, batches(1)[0], capture=recorded_graph.capture, **options)
    agreement = step.verify(batches(4))
    assert (agreement.replayed, step.report.optimizer) == (4, ONE_PASS)
    assert 0 < agreement.used < 0.5


def test_an_overflow_skips_the_step_and_the_scale_falls():
    """The average and the buffers move on, as after a step that a GradScaler skips."""
    results = []
    for choice in ("never", "always"):
        model = net()
        optimizer, ema = AdamW(model.parameters(), weight_decay=0.5), Ema(model, 0.9)
        rule = ScaleRule(initial=2.0**100)
        step = train_step(
            model, optimizer, batches(1)[0], ema=ema, dtype="fp16", scale=rule, clip=1.0, optimizer_kernel=choice
        )
        with torch.no_grad():
            model.conv.weight += 1
        before = copy.deepcopy(model.state_dict())
        step(batches(1)[0])
        assert step.loss_scale.item() == 2.0**99
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())
        assert ema.updates == 1
        results.append(ema.module.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, msg=name)


def test_state_goes_to_a_plain_loop_and_back():
    """Three steps, three plain ones from their state, three from theirs: as nine plain ones."""
    data = batches(9)
    expected = plain(model := net(dropout=0.0), AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), data)
    first = net(dropout=0.0)
    optimizer = AdamW(first.parameters(), lr=1e-3, weight_decay=0.1)
    step = train_step(first, optimizer, data[0], capture=recorded_graph.capture, optimizer_kernel="always")
    for batch in data[:3]:
        step(batch)
    state = copy.deepcopy(step.state_dict())
    middle = net(seed=3, dropout=0.0)
    optimizer = AdamW(middle.parameters(), lr=9.0)
    middle.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    plain(middle, optimizer, data[3:6])
    step.load_state_dict({"model": middle.state_dict(), "optimizer": optimizer.state_dict()})
    for batch in data[6:]:
        step(batch)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(first.state_dict()[name], tensor, **CLOSE, msg=name)
    assert {int(tensors["step"]) for tensors in step.state_dict()["optimizer"]["state"].values()} == {9}
    assert (step.report.captures, step.report.replays) == (1, 6)


def test_other_betas_get_tables_of_their_own_and_old_graphs_keep_theirs():
    data = batches(6)
    model, twin = net(dropout=0.0), net(dropout=0.0)
    optimizer, plain_optimizer = (AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    step = train_step(model, optimizer, data[0], capture=recorded_graph.capture, optimizer_kernel="always")
    old = weakref.ref(step._program.one_pass)
    for betas, part in (((0.9, 0.999), data[:1]), ((0.5, 0.9), data[1:4]), ((0.9, 0.999), data[4:])):
        for each in (optimizer, plain_optimizer):
            each.param_groups[0]["betas"] = betas
        for batch in part:
            step(batch)
        plain(twin, plain_optimizer, part)
        gc.collect()
    assert (step.report.captures, step.report.replays, step.report.eager_steps) == (2, 5, 1)
    assert old() is not None and old() is not step._program.one_pass
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, **CLOSE, msg=name)
    # on new memory the graphs are gone, and their tables with them
    model.conv.weight.data = model.conv.weight.data.clone()
    step(data[0])
    gc.collect()
    assert old() is None


def test_replaced_and_frozen_weights_are_followed():
    model, twin = net(dropout=0.0), net(dropout=0.0)
    optimizer, plain_optimizer = (AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    step = train_step(model, optimizer, batches(1)[0], capture=recorded_graph.capture, optimizer_kernel="always")
    for change in (lambda m: setattr(m.conv.weight, "data", m.conv.weight.data.clone()),
                   lambda m: m.head.weight.requires_grad_(False)):  # fmt: skip
        data = batches(2)
        for batch in data:
            step(batch)
        plain(twin, plain_optimizer, data)
        change(model)
        change(twin)
    step(data[0])
    plain(twin, plain_optimizer, data[:1])
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, **CLOSE, msg=name)


def test_a_loss_with_weights_of_its_own_and_gradients_at_any_address():
    """Weights of the loss have no average; slices of one gradient of 27 + 5 elements begin where they do."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.full((27,), 0.1)), nn.Parameter(torch.full((5,), 0.1))

        def forward(self, x):
            return torch.cat([self.first, self.second]) * x

    class Gained(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, model, x):
            return F.mse_loss(model(x), x) * self.gain.sum()

    x, results, norms = torch.linspace(0, 1, 32), [], []
    for choice in ("never", "always"):
        model, gained = Split(), Gained()
        optimizer = AdamW([*model.parameters(), *gained.parameters()], lr=1e-2)
        ema = Ema(model, 0.9)
        step = train_step(model, optimizer, x, loss=gained, ema=ema, clip=0.5, optimizer_kernel=choice)
        for _ in range(4):
            step(x)
        norms.append(step.grad_norm)
        results.append([*model.parameters(), *gained.parameters(), *ema.tensors()])
        assert ema.updates == 4
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    torch.testing.assert_close(*norms, **CLOSE)
    assert not torch.equal(results[0][2], torch.ones(3))


def test_an_average_of_a_model_that_is_not_trained_itself():
    gain = nn.Parameter(torch.ones(4))
    model = nn.Linear(4, 4).requires_grad_(False)
    ema = Ema(model, 0.5, warmup=False)
    step = train_step(
        model, AdamW([gain], lr=0.1), torch.ones(2, 4), loss=lambda m, x: (m(x) * gain).square().sum(), ema=ema,
        optimizer_kernel="always",
    )  # fmt: skip
    expected = (model.weight + 0.5).clone()
    with torch.no_grad():
        model.weight += 1
    step(torch.ones(2, 4))
    torch.testing.assert_close(ema.module.weight, expected)
    assert ema.updates == 1 and (gain < 1).all()


def half(model):
    return model.bfloat16()


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (lambda p: SGD(p, lr=0.1), None, "computes AdamW, not SGD"),
        (Adam, None, "computes AdamW, not Adam"),
        (RMSprop, None, "the optimizer RMSprop cannot be captured"),
        (lambda p: AdamW(p, amsgrad=True), None, "has no amsgrad"),
        (lambda p: AdamW(p, maximize=True), None, "has no maximize"),
        (AdamW, half, "does not fit .*must be torch.float32, got torch.bfloat16"),
        (AdamW, lambda m: m.requires_grad_(False), "needs a parameter to train"),
    ],
)
def test_where_it_does_not_fit(make, change, words):
    model = net()
    if change:
        change(model)
    parts = Parts(model, loss, make(model.parameters()))
    with pytest.raises(NotEngaged, match=f"compile_step: optimizer_kernel='always', but .*{words}"):
        StepProgram(parts, StepRecipe(optimizer_kernel="always", dtype="fp32"))
    program = StepProgram(parts, StepRecipe(dtype="fp32"))
    program.device = torch.device("cuda")  # as it asks where "auto" means to try
    assert program._one_pass()[0] is None
    program.prepare_()
    assert program.optimizer_in_words().startswith(f"{type(parts.optimizer).__name__} steps by PyTorch's kernels: ")


def test_chosen_by_the_recipe():
    parts = Parts(model := net(), loss, AdamW(model.parameters()))
    for choice, words in (
        ("auto", "AdamW steps by PyTorch's kernels: the one-pass kernel is for a GPU, and the model is on the cpu"),
        ("never", "AdamW steps by PyTorch's kernels: the recipe has optimizer_kernel='never'"),
        ("always", ONE_PASS),
    ):
        assert StepProgram(parts, StepRecipe(optimizer_kernel=choice)).optimizer_in_words() == words
    with pytest.raises(UsageError, match="optimizer_kernel must be one of auto, always, never, got 'yes'"):
        StepRecipe(optimizer_kernel="yes")
