"""What callers plausibly get wrong is refused in one sentence, by the public names of the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ridgeline
from graphs import by_reference, image
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError
from ridgeline.recipe import Limits
from ridgeline.step_recipe import StepRecipe

X = image(1, 3, 6, 6)
FP32 = ridgeline.Recipe(dtype="fp32")


def convs() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU()).eval()


def refused(call: Any, kind: type[RidgelineError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and not text.endswith(".")
    return text


@pytest.fixture(scope="module")
def compiled():
    with by_reference():
        yield ridgeline.compile(convs(), X, FP32)


@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        ((), "the module's inputs are needed, at least one tensor, got none"),
        ((X, X), "Sequential is called with (input), and got 2 inputs: too many positional arguments"),
        ((X.numpy(),), "inputs must be a tensor or a tuple of tensors, got ndarray"),
        (([X],), "inputs must be a tensor or a tuple of tensors, got list"),
    ],
    ids=["none", "two", "numpy", "list"],
)
def test_a_compiled_module_takes_the_modules_tensors(compiled, inputs, got):
    for call in (compiled, compiled.graph, compiled.replayer, compiled.launch_operators):
        assert refused(lambda call=call: call(*inputs)) == f"the compiled module: {got}"
    assert compiled(X).shape == (1, 4, 6, 6)


@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        (None, "inputs must be a tensor or a tuple of tensors, got NoneType"),
        ((X, 3), "inputs must be a tensor or a tuple of tensors, got Tensor, int"),
        ((X, X), "Sequential is called with (input), and got 2 inputs: too many positional arguments"),
    ],
    ids=["None", "a number", "two"],
)
def test_example_inputs_are_tensors(inputs, got):
    assert refused(lambda: ridgeline.compile(convs(), inputs, FP32)) == f"compile: {got}"
    assert refused(lambda: ridgeline.compiler.tune(convs(), inputs, FP32)) == f"tune: {got}"
    assert refused(lambda: ridgeline.verify(convs(), inputs, FP32)).endswith(got)


def test_a_module_and_a_recipe_are_what_they_must_be():
    text = refused(lambda: ridgeline.compile("yolo26n", X))  # pyright: ignore[reportArgumentType]
    assert text == "compile: the first argument must be a torch.nn.Module, got str"
    wrong: Any
    for wrong in ("fp16", StepRecipe()):
        for verb in (ridgeline.compile, ridgeline.verify, ridgeline.compiler.tune):
            assert f"must be a ridgeline.Recipe, as Recipe(dtype='fp16'), got {wrong!r:.20}" in refused(
                lambda verb=verb, wrong=wrong: verb(convs(), X, wrong)
            )


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"rewrites": "fold_batch_norm"}, "recipe: rewrites must be a tuple of names, got 'fold_batch_norm'"),
        ({"limits": 3}, "recipe: limits must be recipe.Limits, as Limits(error_factor=3), got 3"),
    ],
)
def test_a_recipes_choices_have_their_kinds(choices, text):
    assert refused(lambda: ridgeline.Recipe(**choices)) == text


def test_an_error_factor_is_a_number():
    wrong: Any = "3"
    assert refused(lambda: Limits(wrong)) == "limits: error_factor must be at least 1, got 3"


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:x", 3.5])
def test_a_file_is_loaded_to_a_device_that_exists(compiled, tmp_path, device):
    compiled.save(tmp_path / "net")
    text = refused(lambda: ridgeline.load(tmp_path / "net", device=device))
    assert text == f"load: device must be 'cpu' or 'cuda', or 'cuda:1' for the second GPU, got {str(device)!r}"


def test_a_gpu_beyond_the_last_is_refused(compiled, tmp_path, monkeypatch):
    compiled.save(tmp_path / "net")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = refused(lambda: ridgeline.load(tmp_path / "net", device="cuda:2"), EnvironmentUnusable)
    assert text == "load: torch sees 2 CUDA GPUs, counted from 0, got cuda:2"


def test_estimate_takes_a_gpu_by_name_and_one_tensor():
    by_name, by_spec = (ridgeline.estimate(convs(), X, gpu) for gpu in ("L4", ridgeline.find_spec("L4")))
    assert by_name == by_spec == ridgeline.estimate(convs(), (X,), "NVIDIA L4")
    assert refused(lambda: ridgeline.estimate(convs(), (X,), "L40000")).startswith("no spec for GPU 'L40000'")
    wrong: Any = 4
    text = refused(lambda: ridgeline.estimate(convs(), (X,), wrong))
    assert text == "estimate: spec must be a DeviceSpec, or a GPU's name as 'L4', got int"
    nothing: Any = None
    assert "must be a tensor or a tuple" in refused(lambda: ridgeline.estimate(convs(), nothing, "L4"))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, x: m(x), "shape [1, 4, 6, 6]"),
        (lambda m, x: 3.0, "float"),
        (lambda m, x: x.mean(), "one without a gradient"),
    ],
)
def test_estimates_loss_is_a_scalar(loss, got):
    text = refused(lambda: ridgeline.estimate(convs(), (X,), "L4", train=True, loss=loss))
    assert text == f"trace_train_step: the loss must be a scalar tensor that depends on the module, got {got}"


@pytest.mark.parametrize(
    ("op", "formula", "text"),
    [
        ("nope", lambda x: ridgeline.Cost(), "op must be 'mylib::myop' or torch.ops.mylib.myop, got 'nope'"),
        (3, lambda x: ridgeline.Cost(), "op must be 'mylib::myop' or torch.ops.mylib.myop, got 3"),
        ("mylib::myop", "x", "the formula of mylib::myop must be callable and return a Cost, got 'x'"),
    ],
)
def test_a_cost_is_of_an_operator_and_callable(op, formula, text):
    assert refused(lambda: ridgeline.register_cost(op, formula)) == f"register_cost: {text}"


def step(**choices: Any) -> ridgeline.TrainStep:
    model = convs().train()
    return ridgeline.compile_step(model, loss, torch.optim.AdamW(model.parameters()), X, **choices)


def loss(model, batch):
    return model(batch).square().mean()


def test_a_step_takes_its_own_recipe_and_its_own_average():
    text = refused(lambda: step(recipe=FP32))
    assert text.startswith("recipe must be a StepRecipe or one of bf16, fp8, fp16, fp32, writeup-5, got Recipe(dtype=")
    text = refused(lambda: step(ema=ridgeline.Ema(nn.Linear(2, 2))))
    assert text == (
        "Ema: it averages another model, whose weight [2, 2] stands where this one has 0.weight [4, 3, 3, 3]: "
        "make it with Ema(model)"
    )
    longer = ridgeline.Ema(nn.Sequential(convs(), nn.Linear(2, 2)))
    assert "whose 1.weight [2, 2] stands where this one has none []" in refused(lambda: step(ema=longer))
    # what wraps a model renames its weights
    assert step(ema=ridgeline.Ema(nn.Sequential(convs()))).report.eager_steps == 0
