"""Every rule speaks about a trace file, real or made, and not about its twin; no value in a trace breaks one."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces_made as made
from ridgeline.errors import RidgelineError
from ridgeline.explaining import explain
from ridgeline.finding import Finding
from ridgeline.profile_plan import Facts, facts_beside, write_record
from ridgeline.profile_record import WallTime
from ridgeline.rules import RULES
from test_docs import verbs
from test_explain_traces import TRACES, explained
from traces_of_rules import PAIRS, C, Loop, pooled, transposed

REAL = [path.name.partition(".")[0] for path in sorted(TRACES.glob("*.facts.json"))]
SPOKEN_OF = re.compile(r"ridgeline(?: (?P<command>[a-z]+)|(?P<name>(?:\.[A-Za-z_]\w*)+))")
NEVER_TOLD = {"W6"}  # a trace that lacks kernels is refused before its rules are asked
CATALOGUE = {rule.__doc__.partition(":")[0] for rule in RULES if rule.__doc__}


def findings(folder: Path, loop: Loop, told) -> dict[str, Finding]:
    path = made.write(folder / "made.json.gz", made.trace(loop.events))
    starts, ends = ([event["ts"] + event["dur"] * end for event in loop.events] for end in (0, 1))
    wall_s = 1e-6 * (max(ends) - min(starts))
    facts = Facts(
        WallTime(wall_s, wall_s, wall_s, 30), seen=40, first=10, complete=True, gpu="NVIDIA H200", settings=told
    )
    write_record(facts_beside(path), facts)
    return {finding.rule: finding for finding in explain(path).findings}


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("rule", PAIRS)
def test_a_rule_speaks_about_its_trace_and_not_about_its_twin(rule, tmp_path):
    pair = PAIRS[rule]
    found = findings(tmp_path, pair.fires, pair.settings)
    assert rule in found
    assert rule not in findings(tmp_path, pair.silent, pair.silent_settings)
    ids = range(len(pair.fires.events) + 2)
    assert all(event in ids for event in found[rule].evidence)


def test_transposed_convolutions_are_no_grouped_or_narrow_ones(tmp_path):
    # more channels out than in, as at the input of a generator; the weight's second axis is those going out
    wide = transposed(Loop(), 400, (C, 8 * C, 4, 4))
    narrow = transposed(Loop(), 400, (C, 1, 4, 4))
    assert not {"K15", "K19", "L11"} & set(findings(tmp_path, wide, {}))
    found = findings(tmp_path, narrow, {})
    assert "(64, 1)" in found["L11"].note and "K15" not in found


FIELDS = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs", "grid", "block", "registers per thread")
KEPT = [*(pair.fires for pair in PAIRS.values()), pooled(Loop(), 90), transposed(Loop(), 90, (C, C, 2, 2))]


def changed(held: object, value: object, draw) -> object:
    """`held`, or one member of it however deep, made `value`."""
    if not isinstance(held, list) or not held or draw(st.integers(0, 3)) == 0:
        return value
    place = draw(st.integers(0, len(held) - 1))
    return [*held[:place], changed(held[place], value, draw), *held[place + 1 :]]


@pytest.mark.parametrize(
    ("name", "value"), [("Concrete Inputs", ["", [], "[2, 2]", "[0, 0]", "[1, 1]", "False"]), ("Input type", [])]
)
def test_a_pooling_that_was_recorded_in_part_is_passed_over(tmp_path, name, value):
    call, *others = pooled(Loop(), 90).events
    findings(tmp_path, Loop([{**call, "args": {**call["args"], name: value}}, *others]), {})


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_value_in_a_trace_breaks_an_explanation(tmp_path_factory, data):
    loop = data.draw(st.sampled_from(KEPT))
    places = [(i, name) for i, event in enumerate(loop.events) for name in FIELDS if name in event["args"]]
    place, name = data.draw(st.sampled_from(places))
    event = loop.events[place]
    value = data.draw(st.sampled_from([0, 1, -1, 3, 10**6, [], [0], [0, 0], "", "[0, 0]", "[]", "True", None]))
    other = {**event, "args": {**event["args"], name: changed(event["args"][name], value, data.draw)}}
    with contextlib.suppress(RidgelineError):
        findings(tmp_path_factory.mktemp("odd"), Loop([*loop.events[:place], other, *loop.events[place + 1 :]]), {})


def test_verbs_name_what_there_is(tmp_path):
    said = [finding.verb for name in REAL for finding in explained(name)[0]]
    said += [f.verb for pair in PAIRS.values() for f in findings(tmp_path, pair.fires, pair.settings).values()]
    found = [match for verb in said for match in SPOKEN_OF.finditer(verb)]
    assert len({match[0] for match in found}) > 5
    assert {match["command"] for match in found} - {None} <= set(verbs())
    for path in {match["name"] for match in found} - {None}:
        module, _, name = f"ridgeline{path}".rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_every_rule_has_a_trace_that_it_speaks_about():
    assert len(REAL) >= 6
    spoken = {finding.rule for name in REAL for finding in explained(name)[0]}
    assert CATALOGUE - spoken - set(PAIRS) - NEVER_TOLD == {"L12"}  # asked of facts alone, which this does not read
