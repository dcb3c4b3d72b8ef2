"""explain: order, what is left for later findings, and what it refuses to promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.explainer import explain
from ridgeline.finding import Abstention, Edit, Finding, Saving
from ridgeline.rules import RULES
from ridgeline.step_view import Step
from rules.steps_made import POINTWISE, US, copy, fill, idle, op, step, wait, work


def finding(rule: str, saved_us: float | None, edit: Edit, *, effort: str = "S", confidence: str = "measured"):
    saving = None if saved_us is None else Saving(saved_us / 2 * US, saved_us * US, saved_us * US)
    return Finding(rule, rule, "fix", "", saving, effort, confidence, "never", (int(rule[1:]),), edit=edit)


def said(*words: Finding | Abstention):
    """The rules that say so, whatever the step."""
    return [lambda _step, word=word: [word] for word in words]


def rules_of(findings) -> list[str]:
    return [found.rule for found in findings]


def gone(*ids: int) -> Edit:
    return Edit(seconds=dict.fromkeys(ids, 0.0))


# kernels 1, 3, 5 of 100, 200, 300 µs one after the other, ids 2, 4, 6 being their launches
ROW = step(work(100), work(200), work(300), idle(400))


def test_order_is_worth_times_trust_over_effort():
    words = said(
        finding("K1", 100, gone(1)),
        finding("K2", 200, gone(3), effort="L"),
        finding("K3", 300, gone(5), confidence="bound"),
        finding("H9", 400, Edit(gaps={0: 0.0}), effort="M", confidence="unknown"),
    )
    findings, _, left_s = explain(ROW, rules=words)
    assert rules_of(findings) == ["K3", "K1", "K2", "H9"]  # 120, 100, 50, 20
    assert left_s == pytest.approx([700 * US, 600 * US, 400 * US, 0.0])


def test_equal_worth_keeps_the_catalogues_order():
    words = said(*(finding(rule, 100, gone(1)) for rule in ("W1", "K10", "K2", "L1", "H9")))
    findings, _, left_s = explain(ROW, rules=words)
    assert rules_of(findings) == ["K2", "K10", "L1", "W1", "H9"]  # H9 leaves its saving to W1
    assert [f.saving.mid_s for f in findings[:4]] == pytest.approx([100 * US, 0, 0, 0])
    assert (findings[4].saving, findings[4].within) == (None, "W1")
    assert left_s == pytest.approx([900 * US] * 5)


def test_overlap_in_part_is_reckoned_anew_and_ranked_anew():
    words = said(
        finding("K1", 500, gone(3, 5)),
        finding("K2", 300, gone(1, 3)),  # 100 µs are left of it after K1
        finding("K3", 150, Edit(gaps={0: 250 * US})),
    )
    findings, _, left_s = explain(ROW, rules=words)
    assert rules_of(findings) == ["K1", "K3", "K2"]
    saving = findings[2].saving
    assert "before it already" in findings[2].note and "already" not in findings[0].note
    assert (saving.low_s, saving.mid_s, saving.high_s) == pytest.approx((50 * US, 100 * US, 100 * US))
    assert left_s == pytest.approx([500 * US, 350 * US, 250 * US])


def test_hidden_kernels_save_what_they_expose():
    made = step(work(30), work(20, beside=True, lead=0), work(50))
    (found,), _, left_s = explain(made, rules=said(finding("K1", 20, gone(3))))
    assert found.saving == Saving(0.0, 0.0, 0.0)
    assert left_s == pytest.approx((80 * US,))


def test_findings_without_a_saving_stand_last():
    words = said(finding("H12", None, Edit()), finding("H2", None, Edit()), finding("W1", 100, gone(1)))
    findings, _, left_s = explain(ROW, rules=words)
    assert rules_of(findings) == ["W1", "H2", "H12"]
    assert left_s == pytest.approx([900 * US] * 3)


def test_a_healthy_step_has_no_findings():
    findings, abstentions, left_s = explain(step(work(1000)))
    assert (findings, left_s) == ((), ())
    assert {"H13", "H15", "W6"} <= {abstention.rule for abstention in abstentions}


def test_an_empty_step_is_explained_too():
    assert explain(step())[0] == ()


def test_an_incomplete_trace_is_the_one_finding():
    made = step(idle(400, "loader"), work(600), settings={"coverage": "0.5"})
    findings, abstentions, left_s = explain(made)
    assert rules_of(findings) == ["W6"]
    assert abstentions == ()
    assert left_s == pytest.approx((1000 * US,))


# --- what sets the pace ----------------------------------------------------------------------------------------------


def test_input_bound_steps_name_the_loader_first():
    # trap 44: the loader takes 40 of 50 ms, and a kernel fix of little effort seems worth 9 ms
    made = step(idle(40_000, "loader"), work(9_000), work(1_000), settings={})
    findings, _, left_s = explain(made, rules=[*_rules("loader_wait"), *said(finding("K1", 9_000, gone(1)))])
    assert rules_of(findings) == ["H1", "K1"]
    assert findings[0].title.startswith("input-bound 80.0 %")
    assert findings[1].saving.low_s == 0.0 and findings[1].confidence == "bound"
    assert left_s == pytest.approx((10_000 * US, 1_000 * US))


def test_other_advice_is_capped_by_the_loader():
    made = step(idle(500, "loader"), idle(480, "unknown"), work(20))
    other = finding("H14", 480, Edit(gaps={1: 0.0}))
    findings, _, _ = explain(made, rules=[*_rules("loader_wait"), *said(other)])
    assert rules_of(findings) == ["H1", "H14"]
    assert [f.saving.mid_s for f in findings] == pytest.approx([260 * US, 260 * US])


def test_a_loader_that_does_not_set_the_pace_is_ranked_like_any_other():
    made = step(idle(100, "loader"), work(900), work(100))
    findings, _, _ = explain(made, rules=[*_rules("loader_wait"), *said(finding("K1", 900, gone(1)))])
    assert rules_of(findings) == ["K1", "H1"]
    assert findings[0].saving.low_s == pytest.approx(450 * US)


LAUNCH_BOUND = [piece for _ in range(100) for piece in (idle(10), work(5, lead=2))]


def test_graph_and_launch_bound_do_not_count_twice():
    findings, _, left_s = explain(step(*LAUNCH_BOUND))
    assert rules_of(findings) == ["W1", "H9"]
    assert findings[0].saving.mid_s == pytest.approx(900 * US)
    assert (findings[1].saving, findings[1].within, findings[1].edit) == (None, "W1", Edit())
    assert left_s == pytest.approx([600 * US] * 2)


def test_a_wait_comes_before_the_graph_that_cannot_hold_it():
    wait_, graph = finding("H5", 10, Edit(gaps={0: 390 * US})), finding("W1", 390, Edit(gaps={0: 10 * US}))
    findings, _, left_s = explain(ROW, rules=said(graph, wait_))
    assert rules_of(findings) == ["H5", "W1"]
    assert [f.saving.mid_s for f in findings] == pytest.approx([10 * US, 380 * US])
    assert left_s == pytest.approx([990 * US, 610 * US])


def test_shorter_kernels_promise_nothing_for_certain_while_launches_set_the_pace():
    shorter, removed = finding("K1", 4, Edit(seconds={1: 1 * US})), finding("K2", 5, gone(3))
    launches = finding("H9", 3, Edit(gaps={0: 7 * US}))
    for rules, low_us in (([launches, shorter, removed], 0.0), ([shorter, removed], 2.0)):
        findings, _, _ = explain(step(work(5), work(5), idle(10)), rules=said(*rules))
        low_s = {f.rule: f.saving.low_s for f in findings}
        assert low_s["K1"] == pytest.approx(low_us * US)
        assert low_s["K2"] == pytest.approx(2.5 * US)


def test_behind_the_fix_of_the_launches_shorter_kernels_count_in_full():
    shorter, launches = finding("K1", 4, Edit(seconds={1: 1 * US})), finding("H9", 9, Edit(gaps={0: 1 * US}))
    findings, _, _ = explain(step(work(5), work(5), idle(10)), rules=said(shorter, launches))
    assert rules_of(findings) == ["H9", "K1"]
    assert findings[1].saving.low_s == pytest.approx(2 * US)
    assert "hidden behind the host's launches today" in findings[1].note


# --- the profiler's own time -----------------------------------------------------------------------------------------


def test_launch_gaps_that_the_profiler_made_are_no_finding():
    assert "W1" in rules_of(explain(step(*LAUNCH_BOUND))[0])
    assert explain(step(*LAUNCH_BOUND, wall=501))[0] == ()


def test_idle_time_that_nobody_timed_is_a_bound():
    findings, abstentions, left_s = explain(step(*LAUNCH_BOUND, work(1000), wall=None))
    assert rules_of(findings)[0] == "W1"
    assert findings[0].confidence == "bound" and findings[0].saving.low_s == 0.0
    assert [a for a in abstentions if a.rule == "wall"]
    assert left_s[0] == pytest.approx((2500 - 900) * US)


def test_kernel_savings_need_no_unprofiled_time():
    found = finding("K1", 100, gone(1))
    (kept,), _, _ = explain(replace(ROW, wall_s=None), rules=said(found))
    assert kept == found


def test_nothing_is_promised_beyond_the_clock():
    # the kernels alone take 600 µs in the trace, the whole step 300 on the clock
    (found,), _, left_s = explain(replace(ROW, wall_s=300 * US), rules=said(finding("K1", 600, gone(1, 3, 5))))
    assert found.saving.mid_s == pytest.approx(300 * US)
    assert left_s == pytest.approx((0.0,), abs=1e-12)


def test_the_catalogue_is_complete():
    """Each rule's docstring begins with its id, and RULES has the catalogue's, each once, in its order."""
    ids = [rule.__doc__.partition(":")[0] for rule in RULES]
    sizes = {"H": 15, "L": 13, "K": 20, "W": 6}
    assert ids == [f"{letter}{number}" for letter, size in sizes.items() for number in range(1, size + 1)]


# --- any step --------------------------------------------------------------------------------------------------------

WORK = st.builds(
    work,
    st.floats(0.5, 300),
    st.sampled_from([POINTWISE, "Kernel2", "nchwToNhwcKernel"]),
    beside=st.booleans(),
    lead=st.sampled_from([1.0, 500.0]),
    in_graph=st.booleans(),
    call=st.sampled_from([None, op("aten::add", (8, 64), (8, 64))]),
)
COPY = st.builds(
    copy,
    st.floats(1, 300),
    st.sampled_from(["Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"]),
    nbytes=st.integers(1, 10**7),
)
IDLE = st.builds(
    idle,
    st.floats(0.5, 900),
    st.sampled_from(["loader", "launch", "copy", "compile", "unknown"]),
    runtime=st.sampled_from(["", "cudaMalloc"]),
)
WAIT = st.builds(wait, st.sampled_from(["aten::item", "aten::nonzero"]), bubble=st.floats(0, 300))
PIECES = st.lists(st.one_of(WORK, COPY, IDLE, WAIT, st.just(fill(2.0))), min_size=1, max_size=15)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.sampled_from([0.3, 0.8, 1.0, 1.2, None]), st.booleans())
def test_savings_never_add_up_to_more_than_there_is(pieces, clock, trained):
    made = step(*pieces, trained=trained)
    made = replace(made, wall_s=clock and made.duration_s * clock)
    findings, _, left_s = explain(made)
    now_s = made.duration_s if made.wall_s is None else made.wall_s
    assert len(left_s) == len(findings)
    assert all(0.0 <= after_s <= before_s for before_s, after_s in zip((now_s, *left_s), left_s, strict=False))
    savings = [found.saving for found in findings if found.saving]
    assert now_s - sum(saving.mid_s for saving in savings) == pytest.approx((now_s, *left_s)[-1], abs=1e-12)
    assert all(saving.high_s <= now_s + 1e-12 for saving in savings)
    assert explain(made) == explain(made)


def _rules(*names: str):
    """The real rules of these names."""
    found = [rule for rule in RULES if rule.__name__ in names]
    assert len(found) == len(names)
    return found


def test_step_is_left_as_it_was():
    made = step(*LAUNCH_BOUND, wall=1000)
    before = repr(made)
    explain(made)
    assert repr(made) == before
    assert isinstance(made, Step)
