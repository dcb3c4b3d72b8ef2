"""When a graph may not be replayed: other shapes, modes, weights and settings; and what the caller is told then."""

import contextlib
import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo.exc
import torch.nn.functional as F
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, RMSprop

import recorded_graph
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.step_program import Parts
from ridgeline.step_recipe import StepRecipe
from ridgeline.train_step import compile_step
from steps import batches, loss, net, plain, train_step


class Twins:
    """One model stepped through recorded graphs beside an equal one in a plain loop."""

    def __init__(self, optimizer=lambda p: AdamW(p, lr=1e-2), **recipe):
        self.ours, self.theirs = net(dropout=0.0), net(dropout=0.0)
        self.optimizer, self.plain_optimizer = optimizer(self.ours.parameters()), optimizer(self.theirs.parameters())
        self.step = train_step(
            self.ours, self.optimizer, batches(1)[0], capture=recorded_graph.capture, **{"max_graphs": 2, **recipe}
        )

    def change(self, what):
        what(self.ours, self.optimizer)
        what(self.theirs, self.plain_optimizer)

    def run(self, data):
        for batch in data:
            self.step(batch)
        plain(self.theirs, self.plain_optimizer, data)
        for name, tensor in self.theirs.state_dict().items():
            torch.testing.assert_close(self.ours.state_dict()[name], tensor, rtol=1e-4, atol=5e-6, msg=name)

    @property
    def counts(self):
        report = self.step.report
        return report.captures, report.replays, report.eager_steps


def move(model, _):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def reload_optimizer(_, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def channels_last(model, _):
    model.to(memory_format=torch.channels_last)


def freeze(model, _):
    model.conv.weight.requires_grad_(False)


def reset_moments(_, optimizer):
    optimizer.state.clear()


@pytest.mark.parametrize("what", [move, reload_optimizer, channels_last, freeze, reset_moments])
def test_trap_23_replaced_tensors_are_followed(what):
    """One eager step after the change, then a new graph; the old one, on old memory, is gone."""
    twins = Twins()
    twins.run(batches(2))
    twins.change(what)
    twins.run(batches(4, seed=2))
    assert twins.counts == (2, 5, 1)
    assert twins.step.report.graphs == 1


@pytest.mark.parametrize("require", [False, True])
def test_trap_23_parameters_added_to_the_optimizer_are_stepped(require):
    def all_but_the_last(parameters):
        return AdamW(list(parameters)[:-1], lr=1e-2)

    twins = Twins(all_but_the_last, require=require)
    before = twins.ours.head.bias.clone()
    twins.run(batches(1))
    assert torch.equal(twins.ours.head.bias, before)
    twins.change(lambda model, optimizer: optimizer.add_param_group({"params": [model.head.bias], "lr": 0.1}))
    twins.run(batches(3, seed=2))
    assert not torch.equal(twins.ours.head.bias, before)
    assert twins.counts == ((2, 4, 0) if require else (2, 3, 1))


def test_trap_23_modes_have_graphs_of_their_own():
    twins = Twins()
    for mode in (True, False, True, False):
        twins.change(lambda model, _, mode=mode: model.train(mode))
        twins.run(batches(2, seed=3))
    assert twins.counts == (2, 7, 1)
    assert twins.ours.norm.num_batches_tracked == 4


def test_trap_23_weights_written_in_place_need_no_new_graph():
    twins = Twins()
    other = net(seed=9, dropout=0.0).state_dict()
    twins.change(lambda model, _: model.load_state_dict(other))
    twins.run(batches(3))
    assert twins.counts == (1, 3, 0)


def test_trap_23_weights_that_the_optimizer_does_not_know_are_an_error():
    twins = Twins()
    twins.ours.load_state_dict(net(seed=9).state_dict(), assign=True)
    with pytest.raises(UsageError, match="make the optimizer from the model's present parameters"):
        twins.step(batches(1)[0])
    twins = Twins()
    twins.ours.head = nn.Linear(8, 5)
    with pytest.raises(UsageError, match="2 parameters of the optimizer get no gradient"):
        twins.step(batches(1)[0])


def test_trap_23_no_grad_and_autocast_around_a_step_do_not_change_it():
    twins = Twins()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches(2):
            twins.step(batch)
        twins.step(batches(1, rows=4)[0])
    plain(twins.theirs, twins.plain_optimizer, [*batches(2), *batches(1, rows=4)])
    torch.testing.assert_close(twins.ours.conv.weight, twins.theirs.conv.weight, rtol=1e-4, atol=5e-6)


def test_trap_23_weights_cast_by_an_autocast_around_a_step_are_not_reused():
    """An outside autocast keeps bf16 copies of weights, which a graph or an eager step would read when they are old."""
    results = []
    for around in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        model = net(dropout=0.0)
        with around:
            options = {"capture": recorded_graph.capture, "dtype": "bf16"}
            step = train_step(model, SGD(model.parameters(), lr=0.1), batches(1)[0], **options)
            losses = []
            for batch, short in zip(batches(3), batches(3, rows=4), strict=True):
                row = torch.ones(1, 8, dtype=torch.bfloat16)
                fresh = F.linear(row, model.head.weight.bfloat16(), model.head.bias.bfloat16())
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    assert torch.equal(model.head(row), fresh)
                losses += [step(batch), step(short)]  # replayed, eager at first
            results.append(torch.stack(losses))
    assert torch.equal(*results)


def test_settings_have_graphs_of_their_own():
    twins = Twins(lambda p: SGD(p, lr=0.05, momentum=0.9))
    twins.run(batches(1))
    twins.change(lambda _, optimizer: optimizer.param_groups[0].update(momentum=0.5, nesterov=True))
    twins.run(batches(3))
    assert twins.counts == (2, 3, 1)


def test_trap_27_a_short_last_batch_gets_its_graph_at_its_second_coming():
    twins = Twins()
    epoch = [*batches(3), *batches(1, rows=2)]
    for _ in range(3):
        twins.run(epoch)
    assert twins.counts == (2, 11, 1)


def test_trap_27_many_shapes_are_bounded_and_named():
    twins = Twins(max_graphs=4)
    epoch = [batches(1, rows=rows)[0] for rows in range(2, 11)]
    twins.run(epoch)
    assert twins.counts == (1, 1, 8)
    with pytest.warns(RuntimeWarning, match="more than 4 shapes.*drop_last=True"):
        twins.run(epoch)
    assert twins.step.report.graphs == 4


def test_trap_21_a_required_graph_is_captured_at_once_or_raises():
    twins = Twins(require=True)
    twins.run(batches(1))
    twins.run(batches(1, rows=3))
    assert twins.counts == (2, 2, 0)
    with pytest.raises(NotEngaged, match="more than 2 shapes"):
        twins.step(batches(1, rows=5)[0])


def test_trap_21_a_graph_that_never_ran_is_an_error():
    twins = Twins()
    with pytest.raises(NotEngaged, match="each ran before its graph was made"):
        twins.step.check_engaged()
    twins.run(batches(1))
    twins.step.check_engaged()


def logging_loss(model, batch):
    value = loss(model, batch)
    if value.item() > 1e9:  # LINE
        raise FloatingPointError
    return value


def test_trap_25_the_line_that_breaks_capture_is_named():
    model = net()
    options = {"loss": logging_loss, "capture": recorded_graph.capture}
    with pytest.warns(RuntimeWarning, match=r"test_train_step_fallbacks.py:\d+ `if value.item.*LINE.*reads a tensor"):
        step = train_step(model, AdamW(model.parameters()), batches(1)[0], **options)
    step(batches(1)[0])
    assert step.report.eager_steps == 1
    with pytest.raises(NotEngaged, match="LINE"):
        train_step(model, AdamW(model.parameters()), batches(1)[0], require=True, **options)


def test_a_capture_that_fails_leaves_state_and_runs_eagerly():
    def capture(fn, inputs):
        fn(*inputs)
        raise NotEngaged("capture: operation not permitted")

    twins = Twins()
    with pytest.warns(RuntimeWarning, match="every step runs eagerly: capture: operation not permitted"):
        twins.step = train_step(twins.ours, twins.optimizer, batches(1)[0], capture=capture)
    twins.run(batches(3))
    assert twins.counts == (0, 0, 3)


def test_a_model_that_will_not_compile_is_captured_without(monkeypatch):
    def refuse(fn, **_):
        def call(model, batch):
            loss(model, batch)  # moves the statistics before it fails
            raise torch._dynamo.exc.Unsupported("no such opcode")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    twins = Twins()
    with pytest.warns(RuntimeWarning, match="captured without it .*no such opcode"):
        twins.step = train_step(
            twins.ours, twins.optimizer, batches(1)[0], capture=recorded_graph.capture, compile="loss"
        )
    twins.run(batches(3))
    assert twins.counts == (1, 3, 0)


def test_other_errors_of_the_step_pass_through():
    def broken(model, batch):
        return model(batch["image"][:, :2]).sum()

    model = net()
    with pytest.raises(RuntimeError, match="expected input"):
        train_step(model, AdamW(model.parameters()), batches(1)[0], loss=broken)


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's random"), (lambda: float(np.random.rand()), "numpy.random")]
)
def test_numbers_drawn_on_the_host_are_noticed(draw, name):
    model = net()
    states = random.getstate(), np.random.get_state()
    with pytest.warns(RuntimeWarning, match=f"draws numbers from {name}, which a graph would repeat"):
        step = train_step(
            model,
            AdamW(model.parameters()),
            batches(1)[0],
            loss=lambda m, b: loss(m, b) * (1 + draw()),
            capture=recorded_graph.capture,
        )
    assert states[0] == random.getstate()
    assert np.array_equal(states[1][1], np.random.get_state()[1])
    assert step.report.graphs == 0


def test_an_optimizer_that_needs_the_host_is_named_and_still_steps():
    ours, theirs = net(dropout=0.0), net(dropout=0.0)
    with pytest.warns(RuntimeWarning, match="RMSprop cannot be captured, those that can are SGD, Adam, AdamW"):
        step = train_step(ours, RMSprop(ours.parameters()), batches(1)[0], capture=recorded_graph.capture)
    for batch in batches(4):
        step(batch)
    plain(theirs, RMSprop(theirs.parameters()), batches(4))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def refused(optimizer_of, message):
    model = net()
    with pytest.warns(RuntimeWarning, match=message):
        train_step(model, optimizer_of(model.parameters()), batches(1)[0], capture=recorded_graph.capture)


def test_optimizers_with_a_first_step_of_their_own_and_hooks_are_refused():
    def hooked(parameters):
        optimizer = SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    refused(hooked, "SGD has step hooks")
    refused(lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "SGD with dampening .* after one optimizer.step")
    refused(lambda p: AdamW(p, differentiable=True), "differentiable=True")
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    refused(lambda p: type("MyAdamW", (AdamW,), {})(p, betas=betas), "the optimizer MyAdamW cannot be captured")


def test_dampening_is_captured_after_one_step():
    twins = Twins()
    twins.optimizer = SGD(twins.ours.parameters(), lr=0.05, momentum=0.9, dampening=0.5)
    twins.plain_optimizer = SGD(twins.theirs.parameters(), lr=0.05, momentum=0.9, dampening=0.5)
    for model, optimizer in ((twins.ours, twins.optimizer), (twins.theirs, twins.plain_optimizer)):
        plain(model, optimizer, batches(1))
    twins.step = train_step(twins.ours, twins.optimizer, batches(1)[0], capture=recorded_graph.capture)
    twins.run(batches(5, seed=4))
    assert twins.counts == (1, 5, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip must be a positive norm, got 0.0"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"loss": lambda m, b: m(b["image"])}, r"the loss must be a scalar tensor .* got shape \[6, 5\]"),
        ({"loss": lambda m, b: loss(m, b).item()}, "got float"),
        ({"loss": lambda m, b: loss(m, b).detach()}, "got one without a gradient"),
        ({"generators": (SimpleNamespace(device=torch.device("cuda")),)}, "model's device cpu, got one on cuda"),
    ],
)
def test_arguments_are_refused_in_one_sentence(options, message):
    model = net()
    with pytest.raises(UsageError, match=message):
        train_step(model, AdamW(model.parameters()), batches(1)[0], **options)


def test_batches_optimizers_and_recipes_are_refused_in_one_sentence():
    model, optimizer = net(), AdamW(net().parameters())
    with pytest.raises(UsageError, match="got a object in it"):
        train_step(model, AdamW(model.parameters()), (torch.ones(2), object()))
    with pytest.raises(UsageError, match=r"one size in all its tensors, got \[2, 6\]"):
        batch = {"image": torch.ones(6, 3, 4, 4), "label": torch.ones(2).long()}
        train_step(model, AdamW(model.parameters()), batch, accumulate=2)
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        Parts(model, loss, LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="fp16 skips steps on the device, but the optimizer RMSprop"):
        train_step(model, RMSprop(model.parameters()), batches(1)[0], dtype="fp16")
    with pytest.raises(UsageError, match=r"get no gradient .* one that is not the model's"):
        train_step(model, optimizer, batches(1)[0])
    for options, message in (
        ({"dtype": "fp8"}, "dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        ({"compile": "all"}, "compile must be one of loss, model, none"),
        ({"compile_mode": "reduce-overhead"}, "compile_mode must be one of default, max-autotune-no-cudagraphs"),
        ({"max_graphs": 0}, "max_graphs must be at least 1"),
        ({"require": True, "capture": False}, "drop one of them"),
    ):
        with pytest.raises(UsageError, match=message):
            StepRecipe(**options)


def test_capture_false_is_eager_and_quiet(recwarn):
    model = net()
    recipe = StepRecipe(dtype="fp32", capture=False)
    step = compile_step(model, loss, AdamW(model.parameters()), batches(1)[0], recipe=recipe)
    assert step.report.lines() == [
        "0 steps replayed from 0 graphs, 0 run eagerly",
        "every step runs eagerly: the recipe has capture=False",
        "AdamW steps by PyTorch's kernels: the one-pass kernel is for a GPU, and the model is on the cpu",
    ]
    assert not recwarn.list


@pytest.mark.parametrize("recipe", ["bf16", "fp8", StepRecipe(channels_last=True, side_stream=True)], ids=str)
def test_kernels_that_a_recipe_asks_for_and_a_cpu_has_not_are_a_warning(recipe):
    model = net()
    with pytest.warns(RuntimeWarning, match="every step runs eagerly: the model is on the cpu") as told:
        compile_step(model, loss, AdamW(model.parameters()), batches(1)[0], recipe=recipe)
    fp8 = [str(warning.message) for warning in told if "FP8" in str(warning.message)]
    assert fp8 == (["compile_step: nothing runs in FP8: steps are not compiled"] if recipe == "fp8" else [])


@pytest.mark.parametrize("recipe", [None, "writeup-5"])
def test_a_recipe_that_asks_for_no_kernels_is_quiet_on_a_cpu(recipe, recwarn):
    model = net()
    compile_step(model, loss, AdamW(model.parameters()), batches(1)[0], recipe=recipe)
    assert not recwarn.list


def test_fp8_that_no_layer_can_use_is_a_warning_where_steps_are_captured():
    model = net()
    with pytest.warns(RuntimeWarning, match="compile_step: nothing runs in FP8: ") as told:
        train_step(
            model, AdamW(model.parameters()), batches(1)[0], capture=recorded_graph.capture, dtype="bf16", fp8="auto",
            channels_last=True, compile="loss",
        )  # fmt: skip
    assert not any("eagerly" in str(warning.message) for warning in told)
