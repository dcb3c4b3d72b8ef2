"""Records made quickly are those that their constructors make: equal, frozen, and of that very class."""

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ridgeline.trace import Activity, Call, Launch, Range
from ridgeline.trace_records import activity, call, launch, range_


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (make(*values), record(*values))
        for make, record, values in (
            (activity, Activity, (1, "kernel", "k", 0.5, 0.25, 0, 7, 9)),
            (activity, Activity, (1, "kernel", "k", 0.5, 0.25, 0, 7, 9, (1, 2, 3), (4,), 5, 6, 7.0, 8, 2)),
            (call, Call, (1, "aten::add", 0.5, 0.25, 3, 4)),
            (launch, Launch, (1, "cudaLaunchKernel", 0.5, 0.25, 3, 4, 5)),
            (range_, Range, (1, "module: net", 0.5, 0.25, 3)),
        )
    ],
    ids=["activity", "whole activity", "call", "launch", "range"],
)
def test_a_record_made_quickly_is_like_any_other(made, plain):
    assert type(made) is type(plain)
    assert made == plain
    assert hash(made) == hash(plain)
    assert (made.end_s, repr(made)) == (plain.end_s, repr(plain))
    assert pickle.loads(pickle.dumps(made)) == plain
    assert replace(made, name="other") == replace(plain, name="other")
    with pytest.raises(FrozenInstanceError):
        made.name = "other"
    assert all(hasattr(made, field.name) for field in fields(plain))
