"""Steps are found from the profiler's ranges, from marks, from optimizer steps, or the trace is one step."""

from itertools import pairwise

import pytest

from ridgeline.trace_reader import read_trace
from ridgeline.trace_steps import MARK, step_windows
from traces_made import annotation, kernel, launch, op, trace, write

WORK = [kernel("k", 5, 10, correlation=1), launch(2, 2, correlation=1)]


@pytest.fixture
def windows_us(tmp_path):
    """The windows, in microseconds, of a trace with `ranges` and a kernel at 5 to 15."""

    def windows(*ranges):
        made = write(tmp_path / "made.json", trace([*WORK, *ranges]))
        return [(round(start_s * 1e6, 3), round(end_s * 1e6, 3)) for start_s, end_s in step_windows(read_trace(made))]

    return windows


def test_profiler_steps_come_first(windows_us):
    steps = [annotation(f"ProfilerStep#{i}", 100 * i, 90) for i in range(1, 4)]
    others = [annotation(MARK, 7, 0), annotation("Optimizer.step#SGD.step", 50, 5), annotation("ProfilerStep", 2, 1)]
    assert windows_us(*others, *steps) == [(98, 188), (198, 288), (298, 388)]  # from the first event, which is at 2


def test_marks_end_steps(windows_us):
    marks = [annotation(MARK, 2 + 100 * i, 0.5) for i in range(4)]
    assert windows_us(*marks) == [(0, 100), (100, 200), (200, 300)]


def test_marks_may_span_steps(windows_us):
    spans = [annotation(MARK, 2 + 100 * i, 80) for i in range(3)]
    assert windows_us(*spans) == [(0, 100), (100, 200), (200, 280)]
    assert windows_us(spans[0]) == [(0, 80)]


def test_optimizer_steps_end_steps(windows_us):
    steps = [annotation("Optimizer.step#AdamW.step", 2 + 100 * i, 30) for i in range(3)]
    zeroed = [annotation("Optimizer.zero_grad#AdamW.zero_grad", 40 + 100 * i, 5) for i in range(3)]
    assert windows_us(*steps, *zeroed) == [(30, 130), (130, 230)]


def test_the_last_of_several_optimizers_ends_the_step(windows_us):
    both = [
        annotation(f"Optimizer.step#{name}.step", 2 + 100 * i + after, 10)
        for i in range(3)
        for name, after in (("Adam", 0), ("SGD", 50))
    ]
    assert windows_us(*both) == [(60, 160), (160, 260)]


def backward(at_us, number):
    return op("autograd::engine::evaluate_function: MulBackward0", at_us, 5, external_id=number)


def update(at_us, number, dims, duration_us=10):
    """An optimizer's step over parameters of these shapes."""
    lists = {"Input Dims": [dims], "Input type": ["TensorList"]}
    return [
        annotation("Optimizer.step#Adam.step", at_us, duration_us),
        op("aten::_foreach_add_", at_us + 1, 5, external_id=number, extra=lists),
    ]


def test_optimizers_of_one_class_after_one_backward_pass_are_one_step(windows_us):
    events = []
    for i in range(3):
        at_us = 2 + 100 * i
        events += [backward(at_us, 10 * i + 1), *update(at_us + 20, 10 * i + 2, [[4]])]
        events += update(at_us + 40, 10 * i + 3, [[4]])
    assert windows_us(*events) == [(50, 150), (150, 250)]


def test_optimizers_of_one_class_with_parameters_of_their_own_are_one_step(windows_us):
    """As of a generator and its discriminator, each with a backward pass."""
    events = []
    for i in range(3):
        for after, dims in ((0, [[4]]), (50, [[8, 2], [8]])):
            at_us = 2 + 100 * i + after
            events += [backward(at_us, 10 * i + after + 1), *update(at_us + 20, 10 * i + after + 2, dims)]
    assert windows_us(*events) == [(80, 180), (180, 280)]


def test_an_optimizer_whose_gradients_come_and_go_still_ends_every_step(windows_us):
    events = []
    for i, dims in enumerate(([[4], [2]], [[4]], [[4]], [[4], [2]])):
        at_us = 2 + 100 * i
        events += [backward(at_us, 10 * i + 1), *update(at_us + 20, 10 * i + 2, dims)]
    assert windows_us(*events) == [(30, 130), (130, 230), (230, 330)]


@pytest.mark.parametrize(
    "ranges",
    [(), (annotation("Optimizer.step#SGD.step", 6, 2),), (annotation(MARK, 4, 0),)],
    ids=["stepless", "one optimizer step", "one mark"],
)
def test_without_two_marks_the_whole_trace_is_the_step(windows_us, ranges):
    assert windows_us(*ranges) == [(0, 13)]


def test_the_whole_trace_reaches_to_the_last_end_on_either_side(windows_us):
    assert windows_us(op("aten::add", 8, 92, external_id=3)) == [(0, 98)]


def test_windows_are_in_order(windows_us):
    starts = [start for start, _ in windows_us(*(annotation(f"ProfilerStep#{i}", 900 - 100 * i, 90) for i in range(9)))]
    assert all(a < b for a, b in pairwise(starts))
    assert len(starts) == 9
