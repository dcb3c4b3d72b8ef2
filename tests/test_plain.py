"""Dataclasses to JSON and back: what comes in is checked against the types of the fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from ridgeline.errors import UsageError
from ridgeline.plain import from_plain, to_plain
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class Inner:
    name: str
    size: int = 0


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    pairs: tuple[tuple[str, int], ...]
    floats: tuple[float, ...]
    table: Mapping[str, int | float | str]
    flag: bool = True


VALUE = Outer(Inner("a", 2), (("x", 1), ("y", 2)), (1.5, -math.inf, 2.0), {"k": 1, "l": 0.5, "m": "n"})


@pytest.mark.parametrize("value", [VALUE, replace(VALUE, inner=None, pairs=(), flag=False), Recipe(dtype="bf16")])
def test_round_trip(value):
    text = json.dumps(to_plain(value), allow_nan=False)
    assert from_plain(type(value), json.loads(text)) == value


def test_nan_comes_back():
    (value,) = from_plain(Outer, to_plain(replace(VALUE, floats=(math.nan,)))).floats
    assert math.isnan(value)


def test_an_integer_may_stand_for_a_float_but_no_float_for_an_integer():
    assert from_plain(Outer, {**to_plain(VALUE), "floats": [3]}).floats == (3.0,)
    with pytest.raises(ValueError, match=r"Outer\.inner\.size must be int, got 2\.5"):
        from_plain(Outer, {**to_plain(VALUE), "inner": {"name": "a", "size": 2.5}})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"flag": 1}, r"Outer\.flag must be bool, got 1"),
        ({"pairs": [["x"]]}, r"Outer\.pairs\[0\] must be tuple\[str, int\], got \['x'\]"),
        ({"pairs": {"x": 1}}, r"Outer\.pairs must be tuple"),
        ({"table": {"k": [1]}}, r"Outer\.table\['k'\] must be int, got \[1\]"),
        ({"floats": ["1.5"]}, r"Outer\.floats\[0\] must be float, got '1\.5'"),
        ({"inner": {"name": "a"}}, r"Outer\.inner must be"),
        ({"new": 1}, r"Outer must be an object with inner, pairs, floats, table, flag, got"),
    ],
)
def test_refuses(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_plain(Outer, {**to_plain(VALUE), **change})


def test_a_dataclasss_own_checks_run():
    with pytest.raises(UsageError, match="dtype must be one of"):
        from_plain(Recipe, {**to_plain(Recipe()), "dtype": "int4"})


def test_what_has_no_plain_form_is_refused():
    with pytest.raises(TypeError, match="set has no plain form"):
        to_plain({"a": {1}})
