"""Convolutions of stride 2 by the phases of x: the three passes in plain Python, what they refuse, their tables."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gluon_interpreter
from ridgeline import tuned
from ridgeline.kernels import PASSES, conv2d_dgrad, conv2d_fprop, conv2d_wgrad
from ridgeline.kernels._conv2d_pass import Config, box_count
from ridgeline.kernels._op import RIVAL, typical_target
from ridgeline.numerics import compare, to_float64
from shared_kernels import right, sizes_of_one_kernel, whole

SM_90 = typical_target("sm_90")
# one program, so that a ring goes round from tile to tile
ALONE = replace(SM_90, sm_count=1)


def arguments_of(op, size, c, k, filter_size, padding, *, dtype=torch.float16, device="cpu"):
    """Of a pass from c to k channels; `size` is (N, H, W) of y."""
    (n, h, w), (r, s) = size, filter_size
    x = conv2d_fprop.fprop_sample("", (n, c, 2 * h, 2 * w), (k, r, s), stride=2).arguments(dtype, device)
    dy = conv2d_dgrad.dgrad_sample("", (n, k, h, w), (c, r, s), stride=2).arguments(dtype, device)
    choices = {"padding": padding, "stride": 2}
    if op is conv2d_fprop.OP:
        return {**x, **choices}
    if op is conv2d_dgrad.OP:
        return {**dy, **choices}
    return {"dy": dy["dy"], "x": x["x"], "kernel_size": filter_size, **choices}


def interpreted(op, arguments, config=None, *, target=SM_90, edit: gluon_interpreter.Edit = str):
    """What the kernel for wgmma computes."""
    launch = op.launcher.plan(config=config, target=target, **arguments).parts[0]
    launch.output.fill_(float("nan"))
    gluon_interpreter.run(launch, edit=edit)
    if op is not conv2d_wgrad.OP:
        return launch.output.double()
    k, c, r, s = op.reference(**arguments).shape
    return launch.output.sum(0).view(k, r, s, c).permute(0, 3, 1, 2).double()


# --- what the kernels compute, in plain Python -----------------------------------------------------------------------

# filter and padding: every one that halves a map, up to 5 x 5, and a mixed one
FILTERS = (((1, 1), (0, 0)), ((2, 2), (0, 0)), ((3, 3), (1, 1)), ((4, 4), (1, 1)), ((5, 5), (2, 2)), ((1, 3), (0, 1)))


@pytest.mark.parametrize("target", [SM_90, ALONE], ids=["whole GPU", "one program"])
@pytest.mark.parametrize(("filter_size", "padding"), FILTERS, ids=str)
@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
def test_every_pixel_meets_the_taps_of_its_phase(op, filter_size, padding, target):
    arguments = whole(arguments_of(op, (2, 5, 3), 48, 40, filter_size, padding))
    exact = op.reference(**to_float64(arguments))
    assert exact.abs().max() < 2048
    configs = op.launcher.candidates(target=target, **arguments)
    for config in (configs[0], configs[-1]):
        assert torch.equal(interpreted(op, arguments, config, target=target), exact), config


@pytest.mark.parametrize(("filter_size", "padding"), FILTERS[2:5], ids=str)
def test_no_tile_of_dx_writes_into_the_neighbouring_phase(filter_size, padding):
    """What is written later would hide it, so tiles are taken backward too."""
    op = conv2d_dgrad.OP
    arguments = whole(arguments_of(op, (2, 4, 4), 80, 16, filter_size, padding))
    exact = op.reference(**to_float64(arguments))
    backward = ("_place(tile, ", "_place(tiles - 1 - tile, ")
    kept = ("gl.minimum(first, OUT - BLOCK_N)", "first")

    def found(*changes):
        def edit(source):
            for old, new in changes:
                assert old in source
                source = source.replace(old, new)
            return source

        return interpreted(op, arguments, Config(64, 64, 4, 4), target=ALONE, edit=edit)

    assert torch.equal(found(backward), exact)
    assert not torch.equal(found(backward, kept), exact)


def test_fp16_of_a_network_is_rounded_once():
    for op in PASSES:
        arguments = arguments_of(op, (2, 4, 6), 32, 24, (3, 3), (1, 1))
        exact = op.reference(**to_float64(arguments))
        verdict = compare(interpreted(op, arguments).half(), exact, op.reference(**arguments), eps=1e-3)
        assert verdict.passed, f"{op.name}: {verdict.reason}"


def test_pixels_of_the_next_column_are_not_reduced_with_those_of_a_phase():
    """Behind the channels of a phase of x lie those of its neighbour, which hold infinities here."""
    arguments = whole(arguments_of(conv2d_fprop.OP, (2, 5, 3), 48, 16, (1, 1), (0, 0)))
    x = arguments["x"]
    exact = conv2d_fprop.reference(**to_float64(arguments))
    for beside in (x[:, :, 1::2], x[:, :, :, 1::2]):
        beside.fill_(torch.inf)
    assert torch.equal(interpreted(conv2d_fprop.OP, arguments), exact)


@pytest.mark.parametrize("config", [Config(128, 128, 4, 4), Config(64, 32, 8, 4), Config(256, 64, 4, 8)], ids=str)
def test_every_program_gets_some_of_each_phase(config):
    """Of 3 x 3 taps a phase of dx has 1, 2, 2 or 4: beside one tile, no program has much more to do than the mean."""
    sample = next(one for one in conv2d_dgrad.SAMPLES if "UNet 32x32 128->128 by 2" in one.why)
    launch = conv2d_dgrad.plan(**sample.arguments(torch.bfloat16, "meta"), config=config, target=SM_90)
    box, (programs,) = [launch.constants[name] for name in ("BOX_N", "BOX_H", "BOX_W")], launch.grid
    place = gluon_interpreter.Interpreter(launch, str).module._place
    boxes = box_count(128, 16, 16, tuple(box))
    taps = [0] * programs
    for tile in range(boxes * 4 * (128 // config.channels)):
        *_, phase, _ = place(tile, 16 // box[1], 16 // box[2], 128, 2, 4, *box, config.channels)
        taps[tile % programs] += (1, 2, 2, 4)[phase]
    assert sum(taps) == boxes * 9 * (128 // config.channels)
    assert max(taps) < 1.2 * sum(taps) / programs + 4, config


# --- configs, checks, keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
def test_every_problem_has_a_config_on_hopper_alone(op):
    for c, k in itertools.product((16, 48, 208, 512), (8, 24, 200, 512)):
        arguments = arguments_of(op, (3, 7, 9), c, k, (3, 3), (1, 1), device="meta")
        configs = op.launcher.candidates(target=SM_90, **arguments)
        assert configs and len(set(configs)) == len(configs)
        for config in configs:
            op.launcher.plan(config=config, target=SM_90, **arguments)
        assert op.launcher.plan(target=SM_90, **arguments).parts[0].output.numel()
        with pytest.raises(ValueError, match=f"{op.name}: None is not valid for .* on sm_120"):
            op.launcher.plan(target=typical_target("sm_120"), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 3}, "stride must be 1 or 2, got 3"),
        ({"x": (1, 16, 7, 8)}, r"with stride 2 x must have twice the rows and columns of y, got \(7, 8\) and \(4, 4\)"),
        ({"x": (1, 16, 8, 7)}, r"with stride 2 x must have twice .* got \(8, 7\) and \(4, 4\)"),
        ({"padding": (0, 0)}, r"with stride 2 x must have twice .* filter \(3, 3\) with padding \(0, 0\)"),
        ({"padding": (2, 2)}, r"with stride 2 x must have twice .* got \(8, 8\) and \(5, 5\)"),
        ({"x": (1, 24, 8, 8), "weight": (16, 24, 3, 3)}, "with stride 2 channels must be a multiple of 16, got 24"),
    ],
)
def test_what_cannot_be_computed_is_refused(change, message):
    shapes = {"x": (1, 16, 8, 8), "weight": (16, 16, 3, 3), **change}
    x, weight = (
        torch.empty(shapes[name], dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        for name in ("x", "weight")
    )
    choices = {"padding": change.get("padding", (1, 1)), "stride": change.get("stride", 2), "target": SM_90}
    with pytest.raises(ValueError, match=f"conv2d_fprop: {message}"):
        conv2d_fprop.plan(x, weight, **choices)
    dy = conv2d_fprop.reference(x, weight, padding=choices["padding"], stride=choices["stride"])
    with pytest.raises(ValueError, match=f"conv2d_wgrad: {message}"):
        conv2d_wgrad.plan(dy, x, kernel_size=(3, 3), **choices)
    if "x" not in change or x.shape[1] == 24:
        with pytest.raises(ValueError, match=r"conv2d_dgrad: (stride|with stride 2)"):
            conv2d_dgrad.plan(dy, weight, **choices)


@pytest.mark.parametrize("op", [conv2d_fprop.OP, conv2d_wgrad.OP], ids=lambda op: op.name)
def test_a_channel_slice_has_no_phases(op):
    arguments = arguments_of(op, (1, 4, 4), 32, 16, (3, 3), (1, 1), device="meta")
    wide = torch.empty(1, 64, 8, 8, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    sliced = {**arguments, "x": wide[:, :32]}
    with pytest.raises(ValueError, match=f"{op.name}: with stride 2 x must be channels_last, got strides"):
        op.launcher.plan(target=SM_90, **sliced)


@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
def test_keys_of_stride_1_are_those_of_the_shipped_tables(op):
    """Of rows that `tune` wrote when there was no stride."""
    table = tuned.load(op.name, "NVIDIA H200", op.source_hash)
    keys = {key for dtype, key in table.rows if dtype == "bf16" and "stride" not in key}
    assert len(keys) > 10
    for key in keys:
        words = dict(part.split(" ", 1) for part in key.split(", "))
        maps = {
            name: torch.empty(tuple(map(int, words[name].split("x"))), device="meta") for name in words.keys() & MAPS
        }
        lists = {name: tuple(map(int, words[name].split())) for name in words.keys() - MAPS}
        assert op.key(**maps, **lists) == op.key(**maps, **lists, stride=1) == key
        assert table.row("bf16", op.key(**maps, **lists, stride=1)) is not None
        by_2 = op.key(**maps, **lists, stride=2)
        assert by_2 != key and re.sub(", stride 2", "", by_2) == key


MAPS = {"x", "dy", "weight"}


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("filter_size", "padding"), FILTERS, ids=str)
def test_gradients_are_those_of_conv2d(filter_size, padding):
    given = arguments_of(conv2d_fprop.OP, (2, 3, 4), 16, 8, filter_size, padding, dtype=torch.float64)
    leaves = [given[name].double().detach().requires_grad_() for name in ("x", "weight", "bias")]
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = conv2d_fprop.OP(*leaves, padding=list(padding), stride=2)
    expected = F.conv2d(*copies, padding=padding, stride=2)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    y.backward(dy)
    expected.backward(dy)
    for ours, theirs in zip(leaves, copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def all_tuned(monkeypatch, seen):
    """Every call of ours is in the tables, and wins."""

    def row(op, **arguments):
        seen.append((op.name, arguments["stride"]))
        key = op.key(**arguments)
        return tuned.Row(op.name, "hash", "GPU", "bf16", key, {"k": 1}, 1e-5, None, "2", "3", "5", {RIVAL: 2e-5})

    monkeypatch.setattr(conv2d_fprop, "tuned_row", row)


def test_gradients_by_our_kernels_are_those_of_conv2d_too(monkeypatch):
    seen = []
    all_tuned(monkeypatch, seen)
    test_gradients_are_those_of_conv2d((3, 3), (1, 1))
    assert seen == [(op.name, 2) for op in PASSES]


def test_an_odd_map_has_no_row_even_where_a_gradient_of_the_same_dy_was_tuned(monkeypatch):
    all_tuned(monkeypatch, [])
    weight = torch.empty(8, 16, 3, 3, device="meta")
    assert conv2d_fprop.choice(torch.empty(1, 16, 8, 8, device="meta"), weight, (1, 1), 2).keys() == {
        "fprop", "dgrad", "wgrad"
    }  # fmt: skip
    assert conv2d_fprop.choice(torch.empty(1, 16, 7, 7, device="meta"), weight, (1, 1), 2) == {}


def test_an_odd_map_gets_its_gradients_without_a_gpu(monkeypatch):
    all_tuned(monkeypatch, [])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, 7, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 16, 3, 3, generator=generator, dtype=torch.float64)
    (ours,) = torch.autograd.grad(conv2d_fprop.OP(x, weight, None, padding=[1, 1], stride=2).sum(), x)
    (theirs,) = torch.autograd.grad(F.conv2d(x, weight, padding=1, stride=2).sum(), x)
    torch.testing.assert_close(ours, theirs)


# --- numbers, on a GPU -----------------------------------------------------------------------------------------------


# (C, K, filter, padding): each, with the sizes that share its boxes, is compiled once
KERNELS = (
    *((16, 8, (3, 3), (1, 1)), (48, 72, (1, 1), (0, 0)), (80, 200, (2, 2), (0, 0)), (144, 64, (3, 3), (1, 1))),
    *((128, 128, (5, 5), (2, 2)), (208, 40, (1, 3), (0, 1)), (256, 512, (1, 1), (0, 0)), (96, 136, (4, 4), (1, 1))),
)


@pytest.mark.parametrize("seed", range(len(KERNELS)))
@pytest.mark.parametrize("op", PASSES, ids=lambda op: op.name)
@pytest.mark.gpu
def test_random_sizes(op, seed):
    c, k, filter_size, padding = KERNELS[seed]
    dtype = (torch.float16, torch.bfloat16)[seed % 2]

    def of(size, device):
        return arguments_of(op, size, c, k, filter_size, padding, dtype=dtype, device=device)

    sizes = sizes_of_one_kernel(lambda size: op.launcher.plan(target=SM_90, **of(size, "meta")), seed)
    for size in sizes:
        right(op, of(size, "cuda"))


@pytest.mark.gpu
def test_what_no_tap_meets_has_a_gradient_of_zero():
    arguments = arguments_of(conv2d_dgrad.OP, (2, 9, 7), 48, 24, (1, 1), (0, 0), dtype=torch.bfloat16, device="cuda")
    for config in conv2d_dgrad.candidates(**arguments):
        right(conv2d_dgrad.OP, arguments, config)
        dx = conv2d_dgrad.plan(**arguments, config=config)
        dx.run()
        assert dx.output[:, :, 1::2].count_nonzero() == dx.output[:, :, :, 1::2].count_nonzero() == 0
