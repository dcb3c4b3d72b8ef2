"""What the kernels for wgmma compute and in what order, in plain Python: tests/gluon_interpreter.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gluon_interpreter
from gluon_launches import FORMAT, SM_90, first_launch, result, wgmma_configs
from ridgeline.kernels import FP8, PASSES, conv2d_fprop, conv2d_wgrad, conv2d_wgrad_fp8
from ridgeline.numerics import compare, to_float64

SMALL = [(op, sample) for op in (*PASSES, *FP8) for sample in op.samples if not sample.real_size]
CASES = [
    (op, sample) for op, sample in SMALL if wgmma_configs(op, sample.arguments(FORMAT.get(op, torch.float16), "meta"))
]


@pytest.mark.parametrize(("op", "sample"), [pytest.param(*case, id=f"{case[0].name}-{case[1].why}") for case in CASES])
def test_every_pixel_meets_its_taps_in_every_tile(op, sample):
    arguments = sample.arguments(FORMAT.get(op, torch.float16), "cpu")
    configs = wgmma_configs(op, arguments)
    exact = op.reference(**to_float64(arguments))
    for config in (configs[0], configs[len(configs) // 2], configs[-1]):
        launch, arguments = first_launch(op, sample, config)
        gluon_interpreter.run(launch)
        found = result(op, launch, arguments)
        verdict = compare(found, exact, op.reference(**arguments), error_factor=op.error_factor, eps=1e-3)
        assert verdict.passed, f"{config}: {verdict.reason}"


def test_groups_of_warps_and_held_operands_are_among_those():
    """The config that is taken first, of each sample: (groups, held)."""
    samples = [sample for op, sample in CASES if op is conv2d_wgrad_fp8.OP]
    calls = (sample.arguments(torch.float8_e4m3fn, "meta") for sample in samples)
    first = [conv2d_wgrad_fp8.candidates(target=SM_90, **arguments)[0] for arguments in calls]
    assert {(config.groups, config.held) for config in first} == {(1, True), (2, True), (2, False), (1, False)}


# in one program, so that every ring goes round
ALONE = replace(SM_90, sm_count=1)
RINGS = (
    (conv2d_fprop.OP, conv2d_fprop.fprop_sample("", (2, 256, 8, 8), (64, 3, 3))),
    (conv2d_wgrad.OP, conv2d_wgrad.wgrad_sample("", (32, 16, 8, 8), (64, 1, 1))),
    (conv2d_wgrad_fp8.OP, conv2d_wgrad_fp8.wgrad_fp8_sample("", (8, 16, 32, 32), (64, 3, 3), promote=512)),
)


def without(text, *, of, place=0):
    """An edit that takes one of the lines that contain `text` out of the function `of`."""

    def edit(source):
        start = source.index(f"def {of}(")
        lines = source[start:].splitlines(keepends=True)
        at = [i for i, line in enumerate(lines) if text in line][place]
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at] = f"{indent}pass\n"
        return source[:start] + "".join(lines)

    return edit


@pytest.mark.parametrize("words", [1, 2])
def test_a_copy_that_begins_beside_16_bytes_is_refused(words, monkeypatch):
    """Of quads, whose words have four bytes: a tap shifts x by four of them."""
    monkeypatch.setattr(gluon_interpreter, "DEADLOCK_S", 0.5)  # what multiplies waits for the copy
    sample = conv2d_wgrad_fp8.wgrad_fp8_sample("", (2, 16, 4, 8), (16, 1, 3))
    launch, _ = first_launch(conv2d_wgrad_fp8.OP, sample, target=ALONE)
    shift = " * (1 + column - S // 2)"

    def narrower(source):
        assert source.count(f"4{shift}") == 1
        return source.replace(f"4{shift}", f"{words}{shift}")

    with pytest.raises(AssertionError, match=rf"a box begins at \[0, 1, 0, {words}\] of torch.int32"):
        gluon_interpreter.run(launch, edit=narrower)


@pytest.mark.parametrize(("op", "sample"), [pytest.param(*case, id=case[0].name) for case in RINGS])
def test_a_buffer_that_is_not_handed_back_is_a_deadlock(op, sample, monkeypatch):
    monkeypatch.setattr(gluon_interpreter, "DEADLOCK_S", 0.5)
    function = "_row" if op is conv2d_wgrad_fp8.OP else "_multiply"
    launch, _ = first_launch(op, sample, target=ALONE)
    with pytest.raises(AssertionError, match="deadlock"):
        gluon_interpreter.run(launch, edit=without("mbarrier.arrive(", of=function))


@pytest.mark.parametrize(("op", "sample"), [pytest.param(*case, id=case[0].name) for case in RINGS])
def test_a_buffer_that_is_handed_back_while_it_is_read_gives_wrong_numbers(op, sample):
    """Without a wait for the product of the step before, its operands are overwritten."""
    launch, arguments = first_launch(op, sample, target=ALONE)

    def eager(source):
        return source.replace("num_outstanding=1", "num_outstanding=5").replace(
            "0 if LAST else R)", "0 if LAST else 3 * R)"
        )

    gluon_interpreter.run(launch, edit=eager)
    exact = op.reference(**to_float64(arguments))
    assert not compare(result(op, launch, arguments), exact, op.reference(**arguments), eps=1e-3).passed
