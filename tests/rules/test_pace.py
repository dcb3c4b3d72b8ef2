"""Launches and waits replayed: what a wait costs a host that runs ahead, and one that is late anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.rules._pace import pace_of
from ridgeline.step_view import Step, Sync
from ridgeline.trace import Launch
from rules.steps_made import US, idle, step, work

LATENCY = 2


def timed(*kernels: tuple[float, float], waits: tuple[tuple[float, float], ...] = ()) -> Step:
    """A step of kernels that the host launches at these moments (µs), each so long (µs), and waits from, to."""
    pieces, free = [], 0.0
    for launched, long in kernels:
        start = max(free + 1, launched + LATENCY) if pieces else launched + LATENCY
        pieces += [idle(start - free), work(long, lead=start - launched, launch_us=1)]
        free = start + long
    made = step(*pieces)
    syncs = [
        Sync(Launch(900 + i, "cudaStreamSynchronize", a * US, (b - a) * US, 1, 900 + i), None, "", (b - a) * US, 0.0)
        for i, (a, b) in enumerate(waits)
    ]
    return replace(made, syncs=tuple(syncs), launches=(*made.launches, *(sync.launch for sync in syncs)))


# the GPU works from 12 to 112; the host waits for it from 20, and needs 30 µs for each of three launches behind it
WAITING = timed((10, 100), (142, 5), (172, 5), (202, 5), waits=((20, 112),))


def test_the_replay_is_the_step_itself():
    pace = pace_of(WAITING)
    assert pace.factor == pytest.approx(1.0, abs=1e-3)
    assert pace.latency_s == pytest.approx(LATENCY * US)


def test_a_host_that_does_not_wait_has_its_launches_queued():
    (sync,) = WAITING.syncs
    edit, saved_s = pace_of(WAITING).without([sync])
    # launches come at 50, 80 and 110: the kernels follow at 113, 119 and 125, instead of at 204
    assert saved_s == pytest.approx((209 - 130) * US, rel=1e-3)
    assert sum(WAITING.gaps[i].duration_s - left_s for i, left_s in edit.gaps.items()) == pytest.approx(saved_s)
    assert all(left_s <= WAITING.gaps[i].duration_s for i, left_s in edit.gaps.items())


def test_what_the_wait_would_leave_idle_is_the_time_to_the_next_launch():
    (sync,) = WAITING.syncs
    assert pace_of(WAITING).catch_up_s(sync) == pytest.approx((30 + LATENCY) * US, rel=1e-3)


def test_a_wait_of_a_late_host_saves_no_more_than_itself():
    made = timed((10, 5), (100, 5), (200, 5), waits=((40, 42),))
    (sync,) = made.syncs
    edit, saved_s = pace_of(made).without([sync])
    # the GPU is idle at 40 already: the host finds nothing to wait for
    assert saved_s == 0.0 and not edit.gaps


def test_a_faster_host_waits_longer():
    # without the profiler the step takes 170 µs, of which the GPU needs as long as ever
    made = replace(WAITING, duration_s=170 * US)
    assert pace_of(made).factor == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize(
    "made",
    [
        step(*(work(5, in_graph=True) for _ in range(9)), idle(10)),
        step(work(100), work(100)),
        timed((10, 100), (60, 5), waits=((20, 112),)),
        step(),
    ],
    ids=["a graph", "the GPU sets the pace", "another thread launches during the wait", "nothing ran"],
)
def test_where_no_host_explains_the_step_there_is_no_pace(made):
    assert pace_of(made) is None
