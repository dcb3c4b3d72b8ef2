"""Recipes of a training step: by name, as given, or refused in a sentence that lists what there is."""

import pytest

from ridgeline.errors import UsageError
from ridgeline.step_recipe import NAMED, StepRecipe, step_recipe
from ridgeline.train_rewrites import PIPELINE


def test_a_recipe_is_given_or_named():
    mine = StepRecipe(dtype="fp32")
    assert step_recipe(mine) is mine
    assert step_recipe(None) == StepRecipe()
    assert {name: step_recipe(name) for name in NAMED} == NAMED


def test_names_say_what_they_do():
    assert [NAMED[name].dtype for name in ("bf16", "fp8", "fp16", "fp32")] == ["bf16", "bf16", "fp16", "fp32"]
    every = tuple(rewrite.name for rewrite in PIPELINE)
    assert all(NAMED[name].rewrites == every and NAMED[name].channels_last for name in ("bf16", "fp16", "fp32"))
    assert (NAMED["writeup-5"].rewrites, NAMED["writeup-5"].optimizer_kernel) == ((), "never")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: StepRecipe(channels_last=True, fp8="auto", fp8_passes=("fprop", "forward")),
            "fp8_passes must be one or more of fprop, dgrad, wgrad, got fprop, forward",
        ),
        (lambda: StepRecipe(channels_last=True, fp8="auto", fp8_passes=()), "fp8_passes must be .*, got none"),
        (lambda: step_recipe("fp9"), "one of bf16, fp8, fp16, fp32, writeup-5, got 'fp9'"),
        (lambda: StepRecipe(rewrites=("fuse",)), "rewrites must be among .*expand_upsample, .*got 'fuse'"),
        (lambda: StepRecipe(optimizer_kernel="maybe"), "optimizer_kernel must be one of auto, always, never"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(UsageError, match=text):
        make()
