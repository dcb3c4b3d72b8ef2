"""Editing a step: what it would take with parts shorter or gone, and without the profiler's own time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.finding import Edit
from ridgeline.step_edit import both, remaining_s, unprofiled
from rules.steps_made import US, idle, step, wait, work

# kernel 1 runs alone for 10 µs, then beside 2 for 20; 3 follows after a gap
OVERLAPPING = step(work(30, launch=""), work(20, beside=True, launch="", lead=0), idle(5), work(10, launch=""))


@pytest.mark.parametrize(
    ("edit", "left_us"),
    [
        (Edit(), 45),
        (Edit(seconds={1: 0.0}), 35),  # the 10 µs in which it ran alone
        (Edit(seconds={2: 0.0}), 45),  # hidden altogether
        (Edit(seconds={1: 0.0, 2: 0.0}), 15),
        (Edit(seconds={1: 25 * US}), 40),
        (Edit(seconds={3: 99.0}), 45),  # nothing is lengthened
        (Edit(gaps={0: 2 * US}), 42),
        (Edit(gaps={0: 99.0}), 45),
        (Edit(seconds={77: 0.0}, gaps={7: 0.0}), 45),  # of another step
    ],
)
def test_remaining(edit, left_us):
    assert remaining_s(OVERLAPPING, edit) == pytest.approx(left_us * US)


def test_both_edits_take_the_shorter_not_the_sum():
    first, second = Edit({1: 20 * US}, {0: 1.0}), Edit({1: 25 * US, 3: 0.0})
    assert both(first, second) == both(second, first) == Edit({1: 20 * US, 3: 0.0}, {0: 1.0})


PIECES = st.lists(
    st.one_of(
        st.builds(work, st.floats(0.1, 99), beside=st.booleans()),
        st.builds(idle, st.floats(0.1, 99), st.sampled_from(["launch", "loader", "copy", "sync", "unknown"])),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.lists(st.integers(1, 12), max_size=6))
def test_removing_kernels_frees_at_least_what_each_exposes(pieces, chosen):
    made = step(*pieces)
    assert remaining_s(made, Edit()) == pytest.approx(made.duration_s)
    ids = {kernel.activity.id: kernel.exposed_s for kernel in made.kernels}
    gone = {id_: 0.0 for id_ in chosen if id_ in ids}
    freed_s = made.duration_s - remaining_s(made, Edit(seconds=gone))
    assert sum(ids[id_] for id_ in gone) - 1e-12 <= freed_s <= made.duration_s + 1e-12
    if len(gone) == 1:
        assert freed_s == pytest.approx(sum(ids[id_] for id_ in gone), abs=1e-12)


def test_profilers_time_comes_out_of_the_gaps_of_the_host_first():
    made = step(work(500), idle(200, "loader"), idle(100, "launch"), wait(bubble=100), work(100), wall=900)
    truth = unprofiled(made)
    assert [gap.duration_s for gap in truth.gaps] == pytest.approx([200 * US, 50 * US, 50 * US])
    assert truth.syncs[0].bubble_s == pytest.approx(50 * US)
    assert truth.duration_s == pytest.approx(900 * US)


@pytest.mark.parametrize(
    ("wall", "gaps"),
    [(750, [150, 0]), (600, [0, 0]), (500, [0, 0]), (900, [200, 100]), (2000, [200, 100]), (None, [200, 100])],
)
def test_unprofiled_gaps(wall, gaps):
    truth = unprofiled(step(work(600), idle(200, "loader"), idle(100), wall=wall))
    assert [gap.duration_s for gap in truth.gaps] == pytest.approx([us * US for us in gaps], abs=1e-12)
    assert truth.duration_s == pytest.approx(600 * US + sum(gaps) * US)
