"""Rules of input, waits and launches (H1-H11, H14, W1) on steps made by hand: each fires, with its number, or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ridgeline.finding import Abstention, Finding
from ridgeline.rules import RULES, host, inputs, syncs
from ridgeline.step_edit import remaining_s, unprofiled
from ridgeline.step_view import Step
from rules.steps_made import US, copy, idle, op, step, wait, work

MIB = 2**20
DEVICE = "cudaDeviceSynchronize"
FAR, NEAR = 100.0, 2.0  # µs from a launch to its kernel: the host ahead, and the host late
IMAGES = (128, 3, 32, 32)
IMAGE_BYTES = 4 * 128 * 3 * 32 * 32


def images(us: float, dtype: str = "float", nbytes: int = IMAGE_BYTES, **more: object):
    call = op("aten::copy_", IMAGES, IMAGES, dtypes=(dtype, dtype))
    return copy(us, nbytes=nbytes, call=call, **more)


def pageable(us: float, nbytes: int, **more: object):
    return copy(us, "Memcpy HtoD (Pageable -> Device)", nbytes=nbytes, **more)


def launches(count: int, *, lead: float, gap: float, us: float = 5.0, cause: str = "launch"):
    """Kernels with a gap before each."""
    return [piece for _ in range(count) for piece in (idle(gap, cause), work(us, lead=lead))]


def shaped(*, shapes: int, usual: float) -> Step:
    """A step with launch gaps, whose loop gets batches of so many shapes, the most frequent one in this share."""
    settings = {"distinct_shapes": str(shapes), "usual_shape_share": str(usual)}
    return step(*launches(9, lead=NEAR, gap=10), settings=settings)


@dataclass(frozen=True)
class Case:
    rule: object
    step: Step
    mid: float | None  # µs; None: the rule must be silent
    why: str
    high: float | None = None  # µs, where it is not the mid


BUBBLE = (work(500), wait("aten::item", bubble=50, source="train.py:9"), work(450))
# an upload that the host waits for, launched within the operator that waits
INPUT = [pageable(10, 2048), wait("aten::to", bubble=0.0, waited=50, called=100)]
CONSTANT = [pageable(10, 4), wait("aten::to", bubble=0.0, waited=50, called=100)]
# behind a wait the first kernel ends the bubble; two late ones follow, 15 µs of idle time before each
REFILL = [work(5, lead=NEAR), idle(15), work(5, lead=NEAR), idle(15), work(5, lead=NEAR)]
LATE = [idle(15), work(450, lead=NEAR)]
SCALED = [
    work(400),
    work(1, call=op("aten::_amp_foreach_non_finite_check_and_unscale_"), lead=600),
    wait("aten::item", bubble=60, waited=50),
    work(500, call=op("aten::_amp_update_scale_"), lead=1),
]
CASES = [
    Case(inputs.loader_wait, step(idle(400, "loader"), work(600)), 400.0, "nothing else holds the step back", 400.0),
    Case(inputs.loader_wait, step(idle(400, "loader"), work(500), idle(100)), 360.0, "a tenth idles otherwise", 400.0),
    Case(inputs.loader_wait, step(idle(4, "loader"), work(1000)), None, "too little to matter"),
    Case(inputs.loader_wait, step(idle(400, "launch"), work(600)), None, "idle for another reason"),
    Case(
        inputs.pageable_copies, step(pageable(200, 1_000_000), work(800)), 160.0, "1 MB at 25 GB/s takes 40 µs", 180.0
    ),
    Case(
        inputs.pageable_copies,
        step(pageable(200, MIB), copy(20, nbytes=MIB), work(800)),
        180.0,
        "priced against the pinned copy beside it",
    ),
    Case(inputs.pageable_copies, step(copy(200, nbytes=1_000_000), work(800)), None, "pinned"),
    Case(inputs.pageable_copies, step(work(800), pageable(200, 1_000_000, beside=True)), None, "hidden by a kernel"),
    Case(inputs.pageable_copies, step(pageable(1, 16), work(800)), None, "a scalar"),
    Case(inputs.blocking_copies, step(copy(100, nbytes=MIB), work(900)), 80.0, "all of it could be hidden", 100.0),
    Case(inputs.blocking_copies, step(copy(100, nbytes=MIB), work(50)), 40.0, "50 µs of work hide 50 µs", 50.0),
    Case(inputs.blocking_copies, step(work(900), copy(100, nbytes=MIB, beside=True)), None, "hidden already"),
    Case(inputs.blocking_copies, step(pageable(100, MIB), work(900)), None, "pageable copies cannot be hidden: H2"),
    Case(inputs.float_images, step(images(100), work(900)), 75 - IMAGE_BYTES * 5 / 4 / 4.3e6, "3/4 less a cast", 75.0),
    Case(inputs.float_images, step(images(100, "unsigned char"), work(900)), None, "bytes already"),
    Case(inputs.float_images, step(images(100, nbytes=2 * IMAGE_BYTES), work(900)), None, "copies something else"),
    Case(inputs.float_images, step(work(900), images(100, beside=True)), None, "hidden"),
    Case(syncs.item_syncs, step(*BUBBLE), 45.0, "the bubble, not the 500 µs of waiting", 50.0),
    Case(syncs.item_syncs, step(*BUBBLE, options=frozenset()), 40.0, "without recorded waits", 50.0),
    Case(
        syncs.item_syncs,
        step(work(500), wait(bubble=50), *REFILL, work(450, lead=FAR), *LATE),
        45.0,
        "and at most the gaps until launches are queued again",
        80.0,
    ),
    Case(
        syncs.item_syncs,
        step(work(500), wait(bubble=50), *REFILL, wait("aten::nonzero", bubble=30), *LATE),
        45.0,
        "or until the next wait",
        80.0,
    ),
    Case(syncs.item_syncs, step(work(500), wait(bubble=0.0), work(450)), None, "a wait without a bubble"),
    Case(syncs.item_syncs, step(work(500), wait("aten::nonzero"), work(450)), None, "not a read: H6"),
    Case(syncs.hidden_syncs, step(work(500), wait("aten::nonzero"), work(450)), 45.0, "mask indexing", 50.0),
    Case(syncs.hidden_syncs, step(work(500), wait("", runtime=DEVICE), work(450)), 45.0, "a bare one", 50.0),
    Case(syncs.hidden_syncs, step(work(500), wait("", runtime=DEVICE)), None, "a bare one at the end"),
    Case(syncs.hidden_syncs, step(*BUBBLE), None, "a read: H5"),
    Case(
        syncs.clip_syncs,
        step(work(500), wait("aten::item", under="clip_grad_norm_"), work(450), settings={"torch": "2.11.0"}),
        45.0,
        "error_if_nonfinite=True",
        50.0,
    ),
    Case(syncs.clip_syncs, step(work(500), work(450), settings={"torch": "2.11.0"}), None, "the norm stays on the GPU"),
    Case(syncs.clip_syncs, step(*BUBBLE), None, "a read elsewhere"),
    # replayed: the launch behind the wait comes 50 µs sooner, and 2 µs of latency and 1 between kernels stay
    Case(syncs.scaler_syncs, step(*SCALED), 57.0, "between the check of gradients and the update", 60.0),
    Case(syncs.scaler_syncs, step(*SCALED, *BUBBLE[1:]), 54.0, "a read after the update is not the scaler's", 60.0),
    Case(syncs.scaler_syncs, step(*BUBBLE), None, "no scaler"),
    Case(host.launch_bound, step(*launches(100, lead=NEAR, gap=10)), 900.0, "a graph leaves 1 µs of each", 1000.0),
    Case(host.launch_bound, step(*launches(100, lead=FAR, gap=4)), None, "the host is ahead: H10"),
    Case(host.launch_bound, step(*launches(100, lead=NEAR, gap=10, us=500)), None, "the GPU is busy"),
    Case(host.launch_bound, step(*launches(100, lead=NEAR, gap=10, cause="loader")), None, "idle for the loader"),
    Case(
        host.launch_bound,
        step(*launches(100, lead=NEAR, gap=10, us=95), wall=9600),
        None,
        "slow under the profiler alone",
    ),
    Case(host.queued_gaps, step(*launches(100, lead=FAR, gap=3)), 200.0, "2 µs of each", 300.0),
    Case(host.queued_gaps, step(*launches(100, lead=NEAR, gap=3)), None, "the host is late: H9"),
    Case(host.queued_gaps, step(*launches(100, lead=FAR, gap=1)), None, "as in a graph"),
    Case(host.allocations, step(work(500), idle(80, runtime="cudaMalloc"), work(500)), 80.0, "waits for the driver"),
    Case(host.allocations, step(work(500), idle(80, runtime="cudaMallocAsync"), work(500)), None, "asynchronous"),
    Case(host.allocations, step(work(500), idle(80), work(500)), None, "no allocation"),
    Case(
        host.python_stalls,
        step(work(500, call=op("aten::add")), idle(400), work(500, lead=1)),
        200.0,
        "half: it may be rare",
        400.0,
    ),
    Case(host.python_stalls, step(work(500), idle(400, call="aten::sort"), work(500, lead=1)), None, "in an operator"),
    Case(
        host.python_stalls,
        step(work(500, call=op("aten::add")), idle(400, "loader"), work(500, lead=1)),
        None,
        "in the loader: H1",
    ),
    Case(host.python_stalls, step(work(500, call=op("aten::add")), idle(40), work(500, lead=1)), None, "short"),
    Case(host.no_graph, step(*launches(100, lead=NEAR, gap=10)), 900.0, "1 µs of each gap stays", 1000.0),
    Case(
        host.no_graph,
        step(copy(1, nbytes=43 * MIB), *launches(100, lead=NEAR, gap=10)),
        900 - 20.97,
        "input copied",
        1000.0,
    ),
    Case(host.no_graph, step(*INPUT, *launches(100, lead=NEAR, gap=10)), 900.0, "the input's wait", 1000.0),
    Case(host.no_graph, step(*(work(5, in_graph=True) for _ in range(9)), idle(10), work(5, lead=1)), None, "a graph"),
    Case(host.no_graph, step(*launches(100, lead=NEAR, gap=10, us=3000)), None, "too little to matter"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule.__name__}: {case.why}")
def test_rule(case):
    findings = [word for word in case.rule(unprofiled(case.step)) if isinstance(word, Finding)]
    if case.mid is None:
        assert findings == []
        return
    (finding,) = findings
    assert finding.saving.mid_s == pytest.approx(case.mid * US, rel=1e-3)
    assert finding.saving.high_s == pytest.approx((case.high or case.mid) * US, rel=1e-3)
    assert finding.rule == case.rule.__doc__.partition(":")[0]
    assert finding.evidence and set(finding.evidence) <= ids(case.step)


@pytest.mark.parametrize("case", [case for case in CASES if case.mid is not None], ids=lambda case: case.why)
def test_edit_frees_the_middle_estimate(case):
    truth = unprofiled(case.step)
    (finding,) = (word for word in case.rule(truth) if isinstance(word, Finding))
    freed_s = truth.duration_s - remaining_s(truth, finding.edit)
    assert freed_s >= finding.saving.mid_s - 1e-12
    assert freed_s <= finding.saving.high_s + 1e-12


def test_every_rule_fires_and_keeps_silent():
    mine = {rule for rule in RULES if rule.__module__.rpartition(".")[2] in ("host", "inputs", "syncs")}
    for fires in (True, False):
        assert {case.rule for case in CASES if (case.mid is not None) == fires} == mine


@pytest.mark.parametrize(
    ("rule", "made", "needs"),
    [
        (inputs.float_images, step(copy(100, nbytes=MIB), work(900), options=frozenset()), "record_shapes"),
        (host.launch_bound, step(idle(50), work(50, launch="")), "no launches"),
        (host.python_stalls, step(work(50), idle(400), work(50)), "no operators"),
        (
            host.no_graph,
            step(work(5), wait("aten::nonzero", waited=1), *launches(9, lead=NEAR, gap=10)),
            "aten::nonzero",
        ),
        (host.no_graph, step(*CONSTANT, *launches(9, lead=NEAR, gap=10)), "aten::to"),
        (host.no_graph, step(*launches(9, lead=NEAR, gap=10), settings={"distinct_shapes": "9"}), "9 shapes"),
        (host.no_graph, shaped(shapes=2, usual=0.6), "2 shapes"),
    ],
)
def test_abstains(rule, made, needs):
    (word,) = rule(made)
    assert isinstance(word, Abstention)
    assert needs in word.reason


def test_trap_27_a_rare_other_shape_forbids_no_graph():
    (finding,) = host.no_graph(shaped(shapes=2, usual=0.975))
    assert finding.fix.endswith("Drop or pad the batches of other shapes, 2.5 % of all.")
    (finding,) = host.no_graph(shaped(shapes=1, usual=1.0))
    assert "shapes" not in finding.fix


def test_no_abstention_where_there_is_nothing_to_see():
    quiet = step(work(900), options=frozenset())
    assert [list(rule(quiet)) for rule in (inputs.float_images, host.python_stalls, host.no_graph)] == [[], [], []]


def test_headline_of_a_starved_step():
    (finding,) = inputs.loader_wait(step(idle(800, "loader"), work(200)))
    assert finding.title.startswith("input-bound 80.0 %")
    (finding,) = inputs.loader_wait(step(idle(200, "loader"), work(800)))
    assert finding.title.startswith("waiting for input 20.0 %")


def test_reads_at_one_line_are_one_finding():
    item = wait("aten::item", bubble=50, source="train.py:9")
    other = wait("aten::item", bubble=20, source="train.py:30")
    found = list(syncs.item_syncs(step(work(500), item, work(10), item, work(10), other, work(400))))
    assert [(f.source, f.saving.high_s) for f in found] == [
        ("train.py:9", pytest.approx(100 * US)),
        ("train.py:30", pytest.approx(20 * US)),
    ]
    assert "2 times" in found[0].title and "names the line" not in found[0].fix


def test_a_read_on_an_idle_gpu_costs_the_host_its_own_time():
    made = step(work(500), wait("aten::item", bubble=100, waited=8), work(450, lead=FAR))
    late = Step(**{**fields_of(made), "syncs": tuple(replace(sync, bubble_s=0.0) for sync in made.syncs)})
    (finding,) = syncs.item_syncs(late)
    assert finding.saving.mid_s == pytest.approx(0.9 * 8 * US)
    assert finding.saving.high_s == pytest.approx(8 * US)
    assert "idle already" in finding.title


def test_a_wait_that_a_late_host_hides_is_told_with_what_it_would_cost():
    late = [work(5, lead=NEAR), *[piece for _ in range(20) for piece in (idle(40), work(5, lead=NEAR))]]
    item = wait("aten::item", bubble=0, waited=1, source="train.py:9", called=20)
    (found,) = syncs.item_syncs(step(*late, idle(20), item, idle(20), *late))
    assert "hidden today, for the GPU is idle already" in found.title
    assert found.saving.high_s < 5 * US
    assert "were the GPU at work by then, it would idle" in found.note


def test_stalls_of_a_single_traced_step_are_its_ends_as_likely_as_the_loops():
    pieces = (work(500, call=op("aten::add")), idle(400), work(500, lead=1))
    (word,) = host.python_stalls(step(*pieces, settings={"traced_steps": "1"}))
    assert isinstance(word, Abstention) and "holds one step" in word.reason
    (found,) = host.python_stalls(step(*pieces, settings={"traced_steps": "2"}))
    assert isinstance(found, Finding)


def test_waits_before_one_gap_do_not_count_twice():
    twice = step(work(500), wait(bubble=50), work(450))
    twice = Step(**{**fields_of(twice), "syncs": twice.syncs * 2})
    (finding,) = syncs.item_syncs(twice)
    assert finding.saving.high_s == pytest.approx(50 * US)


def test_clipping_with_an_old_pytorch_advises_the_update():
    pieces = (work(500), wait("aten::item", under="clip_grad_norm_"), work(450))
    fixes = [next(iter(syncs.clip_syncs(step(*pieces, settings={"torch": v})))).fix for v in ("1.9.1", "2.11.0")]
    assert fixes[0].startswith("Update PyTorch") and "error_if_nonfinite" in fixes[1]


def test_graph_advice_names_the_reads_that_must_go():
    (finding,) = host.no_graph(step(wait(bubble=50), *launches(100, lead=NEAR, gap=10), trained=True))
    assert "must leave the step first" in finding.fix
    assert finding.verb == "ridgeline.compile_step"


def ids(made: Step) -> set[int]:
    events = (*made.launches, *made.calls, *(kernel.activity for kernel in made.kernels))
    return {event.id for event in events}


def fields_of(made: Step) -> dict[str, object]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}
