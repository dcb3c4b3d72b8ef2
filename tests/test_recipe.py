"""A recipe is a checked value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from ridgeline.errors import UsageError
from ridgeline.recipe import DTYPES, PRECISIONS, Limits, Recipe
from ridgeline.rewrites import PIPELINE


def test_default_runs_the_whole_pipeline_in_order():
    assert Recipe().rewrites == tuple(rewrite.name for rewrite in PIPELINE)
    assert Recipe().dtype == "fp16" and Recipe().limits.error_factor == 2


def test_is_a_value():
    assert Recipe() == Recipe() and hash(Recipe()) == hash(Recipe())
    assert replace(Recipe(), dtype="bf16") != Recipe()
    with pytest.raises(FrozenInstanceError):
        Recipe().dtype = "bf16"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_dtype_and_precision(dtype, precision):
    assert Recipe(dtype=dtype, precision=precision, rewrites=()).rewrites == ()


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"dtype": "fp8"}, r"recipe: dtype must be one of fp32, fp16, bf16, got 'fp8'"),
        ({"dtype": "float16"}, r"got 'float16'"),
        ({"precision": "fp32"}, r"recipe: precision must be one of tf32, ieee, got 'fp32'"),
        (
            {"rewrites": ("fold_batch_norm", "fuse_everything")},
            r"unknown rewrite 'fuse_everything', known are function",
        ),
        ({"side_streams": -1}, r"side_streams must lie between 0 and 16, got -1"),
        ({"side_streams": 17}, r"got 17"),
    ],
)
def test_refuses(choices, complaint):
    with pytest.raises(UsageError, match=complaint):
        Recipe(**choices)


@pytest.mark.parametrize("factor", [0.5, 0, -1, float("nan")])
def test_limits_below_the_modules_own_error_are_refused(factor):
    with pytest.raises(UsageError, match="error_factor must be at least 1, got"):
        Limits(error_factor=factor)


def test_names_in_the_pipeline_are_unique():
    names = [rewrite.name for rewrite in PIPELINE]
    assert len(set(names)) == len(names)
    # the mutating rewrite comes last: nothing after it knows about buffers
    assert names[0] == "functionalize" and names[-1] == "write_into_concat"
