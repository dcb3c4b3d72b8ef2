"""Events taken from a Kineto trace's text are those that the JSON parser finds, and few need the parser."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import trace_kineto
from ridgeline.trace_reader import read_trace
from traces_made import kernel, op, trace, write

FIXTURES = Path(__file__).parent / "fixtures" / "traces"


@pytest.fixture
def read(tmp_path):
    """What is read of a trace with these events."""
    return lambda events, indent=2: read_trace(write(tmp_path / "made.json", trace(events), indent=indent))


@pytest.mark.parametrize("name", ["syncing", "yolo26n-graph"])
def test_text_and_parser_agree_on_a_real_trace(name, monkeypatch):
    path = FIXTURES / f"{name}.json.gz"
    taken = []
    glance = trace_kineto._Rows.glance
    monkeypatch.setattr(trace_kineto._Rows, "glance", lambda *a: taken.append(glance(*a)) or taken[-1])
    quick = read_trace(path)
    assert sum(filter(None, taken)) > 1000  # the quick way is taken at all
    monkeypatch.setattr(trace_kineto._Rows, "glance", lambda *_: None)
    assert read_trace(path) == quick
    assert len(quick.activities) > 400
    assert not {"malformed_events", "clamped_durations", "dropped_calls"} & set(quick.metadata)


@pytest.fixture
def parsed(monkeypatch):
    """How many events went to the JSON parser, by piece of text."""
    counts = []
    take = trace_kineto._Rows.take
    monkeypatch.setattr(trace_kineto._Rows, "take", lambda *a: counts.append(len(a[2])) or take(*a))
    return counts


def relus(count):
    return [op("aten::relu", 10 + i, 1, external_id=i) for i in range(count)]


@pytest.mark.parametrize(("lists", "most"), [(0, 100), (2000, 300)])
def test_an_event_that_no_text_shows_costs_few_others_the_parser(read, parsed, lists, most):
    """Of a block that is declined for one event, its neighbours within some 4 KB are parsed; all else is taken."""
    plain = relus(4000)
    # its arguments hold what looks like the end of one event and the beginning of the next
    args = {"of": [{"a": 1}, {"b": 2}] * lists}
    odd = {"ph": "X", "name": "aten::add", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 2010.5, "dur": 1, "args": args}
    found = read([*plain[:2000], odd, *plain[2000:], kernel("k", 1, 1, correlation=1)])
    assert [call.name for call in found.calls].index("aten::add") == 2001  # after the one that starts at 2010
    assert [call.external_id for call in found.calls if call.name == "aten::relu"] == list(range(4000))
    numbers = sorted(call.id for call in found.calls)
    assert numbers == list(range(numbers[0], numbers[0] + 4001))
    assert sum(parsed) < most


BRACES = {"Concrete Inputs": ["{'a': {'b': 1}}", "}}, {", "}"]}


@pytest.mark.parametrize("indent", [None, 2], ids=["compact", "as Kineto"])
@pytest.mark.parametrize(
    "event",
    [
        {"args": {"External id": 7, **BRACES, "Input Dims": [[4], [2, 2], []]}},
        {"args": {"External id": 7, **BRACES, "Input Dims": [[4]], "of": {"a": {"b": {}}}}},
        {"args": {**BRACES, "Input Dims": [], "of": [{"a": {"b": 1}}, {"c": 2}], "External id": 7}},
        {"name": 'said "so"'},
        {"name": 'C:\\"a" \\\\ "b"'},
    ],
    ids=["braces in texts", "nested objects", "objects in a list", "quotes", "backslashes"],
)
def test_braces_and_quotes_within_an_event_do_not_end_it(read, parsed, event, indent):
    odd = op("aten::add", 5, 1, external_id=7) | event
    (call, *_) = read([odd, *relus(1000), kernel("k", 1, 1)], indent=indent).calls
    assert sum(parsed) < 50  # it and its neighbours are taken from their text
    assert (call.name, call.external_id) == (odd["name"], 7)
    assert call.concrete == tuple(odd["args"].get("Concrete Inputs", ()))


def test_an_event_that_needs_the_parser_may_hold_braces_and_quotes(read, parsed):
    texts = {"Concrete Inputs": ["}" * 40, '"}},{'], "Input Dims": [[1], []]}
    odd = op('"' * 40 + "\\", 5, 1, external_id=7) | {"args": {"External id": 7, **texts}}
    (call, *_) = read([odd, *relus(1000), kernel("k", 1, 1)]).calls
    assert (call.name, call.concrete, call.external_id) == (odd["name"], tuple(texts["Concrete Inputs"]), 7)
    assert 1 < sum(parsed) < 100


def test_events_of_no_interest_cost_no_others_the_parser(read, parsed):
    span = {"ph": "X", "cat": "Trace", "ts": 1, "dur": 9, "pid": "Spans", "tid": "PyTorch Profiler", "name": "PyTorch"}
    bare = {"ph": "X", "cat": "overhead", "name": "Unrecognized", "pid": -1, "tid": 0, "ts": 1, "dur": 9}
    plain = relus(1000)
    made = read([*plain[:500], span, bare, *plain[500:], kernel("k", 1, 1)])
    assert [call.external_id for call in made.calls] == list(range(1000))
    assert sum(parsed) < 5  # those after the last edge


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


TEXTS = st.text(st.sampled_from('{}[]",:\\\n aé'), max_size=12) | st.sampled_from(
    ['}},{"ph"', '"ph": "X"', '"Ev Idx":1']
)


@settings(deadline=None, max_examples=100)
@given(name=TEXTS, texts=st.lists(TEXTS, max_size=3), last=st.booleans(), indent=st.sampled_from([None, 2]))
def test_text_and_parser_agree_whatever_an_event_says(scratch, name, texts, last, indent):
    inputs = {"Concrete Inputs": texts, "Input Dims": [[]] * len(texts)}
    args = inputs | {"External id": 7} if last else {"External id": 7} | inputs
    events = [op("aten::relu", 3, 1, external_id=6), op(name, 5, 1, external_id=7) | {"args": args}, *relus(3)]
    path = write(scratch / "made.json", trace([*events, kernel("k", 1, 1)]), indent=indent)
    quick = read_trace(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_kineto._Rows, "glance", lambda *_: None)
        assert read_trace(path) == quick
    assert (quick.calls[1].name, quick.calls[1].concrete) == (name, tuple(texts))
    assert "malformed_events" not in quick.metadata
