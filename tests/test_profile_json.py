"""A saved profile comes back equal whatever it holds, and a file that is none of ours is refused in one sentence."""

import gzip
import json
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import profiles_made
from ridgeline.errors import UsageError
from ridgeline.finding import CONFIDENCES, EFFORTS, Edit, Saving
from ridgeline.profile_json import read_profile, to_json, write_profile
from ridgeline.profile_record import SCHEMA_VERSION, Profile

FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = {int: st.integers(), float: FINITE, bool: st.booleans(), str: st.text(max_size=8), type(None): st.none()}
SAVINGS = st.tuples(*[st.floats(0, 1e9)] * 3).map(lambda ends: Saving(*sorted(ends)))


def anything(kind, name=""):
    """Values of a record's field: every optional field both ways, every list short."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Saving:
        return SAVINGS
    if name in ("effort", "confidence"):
        return st.sampled_from(EFFORTS if name == "effort" else CONFIDENCES)
    if name == "schema_version":
        return st.just(SCHEMA_VERSION)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: anything(hints[field.name], field.name) for field in fields(kind)})
    if origin is tuple:
        return st.lists(anything(arguments[0]), max_size=2).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(*map(anything, arguments), max_size=2)
    return st.one_of(*map(anything, arguments)) if arguments else PLAIN[kind]


@settings(max_examples=40, deadline=None)
@given(profile=anything(Profile), suffix=st.sampled_from([".json", ".json.gz"]))
def test_whatever_is_written_comes_back(tmp_path_factory, profile, suffix):
    path = tmp_path_factory.getbasetemp() / f"profile{suffix}"
    assert read_profile(write_profile(path, profile)) == profile


def test_the_golden_profiles_come_back(tmp_path):
    edit = Edit({4711: 0.0, 4715: 1e-6}, {3: 0.0})
    profile = profiles_made.made()
    profile = replace(profile, findings=(replace(profile.findings[0], edit=edit), *profile.findings[1:]))
    assert read_profile(write_profile(tmp_path / "p.json", profile)) == profile
    lone = replace(profile, subject="net\ud800")
    assert read_profile(write_profile(tmp_path / "p.json", lone)) == lone
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_the_file_names_its_schema_and_fields_in_si_units():
    data = json.loads(to_json(profiles_made.made()))
    assert data["schema_version"] == SCHEMA_VERSION
    assert next(iter(data)) == "schema_version"
    assert data["kernels"][0]["total_s"] == pytest.approx(0.01205, rel=1e-3)
    assert data["findings"][0]["saving"] == {"low_s": 4.1e-3, "mid_s": 4.92e-3, "high_s": 11e-3}


def test_equal_profiles_make_equal_bytes(tmp_path):
    first, second = (write_profile(tmp_path / f"{n}.json.gz", profiles_made.made()).read_bytes() for n in (1, 2))
    assert first == second


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named(value):
    profile = profiles_made.made()
    rows = (replace(profile.kernels[0], intensity=value), *profile.kernels[1:])
    with pytest.raises(ValueError, match=r"Profile\.kernels\[0\]\.intensity is not finite"):
        to_json(replace(profile, kernels=rows))


GOOD = json.loads(to_json(profiles_made.made()))
BAD = {
    "nothing": (b"", "is not JSON"),
    "cut": (to_json(profiles_made.made()).encode()[:-100], "is not JSON"),
    "not text": (b"\xff\xfe{}", "is not JSON"),
    "a list": (b"[1]", "is no saved profile"),
    "nested": (b"[" * 100_000, "is not JSON"),
    "a trace": (b'{"traceEvents": []}', "ridgeline explain"),
    "newer": (json.dumps(GOOD | {"schema_version": SCHEMA_VERSION + 1}).encode(), "schema_version 3"),
    "older": (json.dumps(GOOD | {"schema_version": 1}).encode(), "schema_version 1, this ridgeline reads 2"),
    "a field too many": (json.dumps(GOOD | {"more": 1}).encode(), "damaged profile"),
    "a wrong type": (json.dumps(GOOD | {"busy_s": "fast"}).encode(), r"Profile\.busy_s must be float"),
    "not finite": (json.dumps(GOOD | {"busy_s": float("nan")}).encode(), r"Profile\.busy_s is not finite"),
    "an impossible saving": (to_json(profiles_made.made()).replace("0.0041", "9.9").encode(), "low <= mid"),
}


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_refused_in_a_sentence(tmp_path, name):
    data, complaint = BAD[name]
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=complaint) as refusal:
        read_profile(path)
    assert "profile again" in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_an_edit_of_events_without_numbers_is_refused(tmp_path):
    data = json.loads(to_json(profiles_made.made()))
    data["findings"][0]["edit"]["seconds"] = {"first": 0.0}
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="damaged profile"):
        read_profile(path)


def test_damaged_compression_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "p.json.gz"
    for data in (b"{}", gzip.compress(b"{}" * 500)[:-9], gzip.compress(b"{}")[:12] + b"\0" * 9):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="cannot read"):
            read_profile(path)
    with pytest.raises(UsageError, match="No such file"):
        read_profile(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="Is a directory"):
        read_profile(tmp_path)
    with pytest.raises(UsageError, match="cannot write"):
        write_profile(tmp_path / "absent" / "p.json", profiles_made.empty())


def test_a_file_too_large_for_a_profile_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.profile_json.MAX_BYTES", 1000)
    packed, plain = tmp_path / "p.json.gz", tmp_path / "p.json"
    packed.write_bytes(gzip.compress(b" " * 2000))
    plain.write_bytes(b" " * 2000)
    with pytest.raises(UsageError, match="unpacks to more than 1000 bytes"):
        read_profile(packed)
    with pytest.raises(UsageError, match="has 2000 bytes"):
        read_profile(plain)
