"""Convolution costs against brute force: literal loops, indicator convolutions, and the tensors' own sizes."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.cost import ConvProblem, Cost, CostMode, conv_forward, conv_im2col, conv_input_grad, conv_weight_grad


def random_problem(rng: random.Random, largest: int) -> ConvProblem:
    """A small convolution with every parameter drawn, groups up to depthwise."""
    while True:
        groups = rng.choice((1, 1, 2, 3, 4))
        c, k = groups * rng.randint(1, 2), groups * rng.randint(1, 3)
        image = (rng.randint(1, largest), rng.randint(1, largest))
        taps, stride, padding, dilation = ((rng.randint(low, 3), rng.randint(low, 3)) for low in (1, 1, 0, 1))
        try:
            return ConvProblem(rng.randint(1, 2), c, k, image, taps, stride, padding, dilation, groups)
        except ValueError:  # the filter does not fit the image: draw again
            continue


def run(problem: ConvProblem, dtype: torch.dtype = torch.float32) -> tuple[Cost, Cost, Cost, torch.Tensor]:
    """Forward, input gradient and weight gradient as CostMode sees them, and the output."""
    x = torch.zeros(problem.n, problem.c, *problem.image, dtype=dtype, requires_grad=True)
    w = torch.zeros(problem.k, problem.c // problem.groups, *problem.filter, dtype=dtype, requires_grad=True)
    with CostMode(tf32=True) as mode:
        y = F.conv2d(x, w, None, problem.stride, problem.padding, problem.dilation, problem.groups)
        y.backward(torch.zeros_like(y))
    forward, dgrad, wgrad = (call.cost for call in mode.calls if call.op.startswith("aten.convolution"))
    return forward, dgrad, wgrad, y


def loop_macs(problem: ConvProblem) -> int:
    """One product per (image, filter, output pixel, channel of the group, tap): the lecture's seven loops, counted."""
    count = 0
    channels = range(problem.c // problem.groups)
    for _ in product(
        range(problem.n), range(problem.k), *map(range, problem.out), channels, *map(range, problem.filter)
    ):
        count += 1
    return count


def indicator_macs(problem: ConvProblem) -> tuple[int, int, int]:
    """Products of forward, dgrad and wgrad: convolutions of ones over the padded image count them, halo included."""
    ph, pw = problem.padding
    ones = {"dtype": torch.float64}
    x = torch.ones(problem.n, problem.c, problem.image[0] + 2 * ph, problem.image[1] + 2 * pw, **ones)
    w = torch.ones(problem.k, problem.c // problem.groups, *problem.filter, **ones)
    x.requires_grad_()
    w.requires_grad_()
    y = F.conv2d(x, w, None, problem.stride, 0, problem.dilation, problem.groups)
    y.backward(torch.ones_like(y))
    return int(y.sum()), int(x.grad.sum()), int(w.grad.sum())


@pytest.mark.parametrize("seed", range(10))
def test_equals_brute_force_on_random_problems(seed):
    rng = random.Random(seed)
    for _ in range(55):
        problem = random_problem(rng, largest=9)
        forward, dgrad, wgrad, y = run(problem)
        assert tuple(y.shape[2:]) == problem.out == (problem.oh, problem.ow)
        assert indicator_macs(problem) == (problem.macs,) * 3, problem
        x_bytes, w_bytes, y_bytes = 4 * problem.x_numel, 4 * problem.w_numel, 4 * y.numel()
        assert (forward.flops, forward.read_bytes, forward.write_bytes) == (
            2 * problem.macs,
            x_bytes + w_bytes,
            y_bytes,
        )
        assert (dgrad.flops, dgrad.read_bytes, dgrad.write_bytes) == (2 * problem.macs, y_bytes + w_bytes, x_bytes)
        assert (wgrad.flops, wgrad.read_bytes, wgrad.write_bytes) == (2 * problem.macs, x_bytes + y_bytes, w_bytes)
        # the formulas in pure numbers say the same as the operators'
        pure = (f(problem, torch.float32) for f in (conv_forward, conv_input_grad, conv_weight_grad))
        assert tuple(pure) == (forward, dgrad, wgrad)


def test_equals_literal_loops():
    rng = random.Random(1)
    for _ in range(60):
        problem = random_problem(rng, largest=5)
        assert loop_macs(problem) == problem.macs, problem


def test_transposed_equals_brute_force():
    rng = random.Random(2)
    for _ in range(100):
        groups = rng.choice((1, 1, 2, 4))
        c, k = groups * rng.randint(1, 3), groups * rng.randint(1, 3)
        taps, stride, dilation = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2)
        padding = rng.randint(0, min(2, dilation * (taps - 1)))
        extra = rng.randint(0, max(stride, dilation) - 1)
        x = torch.ones(rng.randint(1, 2), c, rng.randint(2, 5), rng.randint(2, 5), requires_grad=True)
        w = torch.ones(c, k // groups, taps, taps, requires_grad=True)
        try:
            with CostMode() as mode:
                y = F.conv_transpose2d(x, w, None, stride, padding, extra, groups, dilation)
                y.backward(torch.ones_like(y))
        except RuntimeError as error:  # an output without pixels is PyTorch's refusal, not ours
            assert "too small" in str(error)
            continue
        costs = [call.cost for call in mode.calls if call.op.startswith("aten.convolution")]
        # uncropped, every input element meets every tap of its group
        scattered = F.conv_transpose2d(x, w, None, stride, 0, 0, groups, dilation)
        assert [cost.flops for cost in costs] == [2 * int(scattered.sum())] * 3
        size = {name: 4 * tensor.numel() for name, tensor in (("x", x), ("w", w), ("y", y))}
        assert [cost.read_bytes for cost in costs] == [
            size["x"] + size["w"],
            size["y"] + size["w"],
            size["x"] + size["y"],
        ]
        assert [cost.write_bytes for cost in costs] == [size["y"], size["x"], size["w"]]


@pytest.mark.parametrize(("conv", "shape"), [(nn.Conv1d, (2, 4, 20)), (nn.Conv3d, (1, 4, 6, 7, 5))])
def test_one_and_three_axes(conv, shape):
    module, x = conv(4, 6, 3, padding=1, stride=2), torch.zeros(shape, requires_grad=True)
    with CostMode() as mode:
        y = module(x)
        y.sum().backward()
    macs = y.numel() * 4 * 3 ** (len(shape) - 2)
    costs = [call.cost.flops for call in mode.calls if call.op.startswith("aten.convolution")]
    assert costs == [2 * macs, 2 * macs, 2 * macs + y.numel()]  # the last one sums the bias gradient as well


def test_grouped_weight_gradient_is_divided_by_groups_once():
    # known-traps row 9 (pytorch PR 183405): the stock counter of 2.13 says 469.6 M for the backward pass
    module = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
    x = torch.zeros(2, 64, 56, 56, requires_grad=True)
    with CostMode() as mode:
        module(x).sum().backward()
    forward, dgrad, wgrad = (call.cost.flops for call in mode.calls if call.kind == "depthwise")
    assert forward == dgrad == wgrad == 2 * 2 * 64 * 56 * 56 * 9
    assert round(forward / 1e6, 3) == 7.225
    assert round((dgrad + wgrad) / 1e6, 1) == 14.5


def test_depthwise_transposed_convolution():
    # known-traps row 10 (pytorch #119806, DeepSpeed PR 8323)
    module = nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, groups=4, bias=False)
    with CostMode() as mode:
        module(torch.zeros(2, 4, 8, 8, requires_grad=True)).sum().backward()
    assert [call.cost.flops for call in mode.calls if call.kind == "conv_transpose"] == [9216] * 3


def test_first_layer_has_no_input_gradient():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    with CostMode(net) as mode:
        net(torch.zeros(1, 3, 16, 16)).sum().backward()
    passes = [(call.module, call.shape.split()[0]) for call in mode.calls if call.op == "aten.convolution_backward"]
    assert passes == [("1", "dgrad"), ("1", "wgrad"), ("0", "wgrad")]


def test_frozen_weight_has_no_weight_gradient():
    net = nn.Conv2d(3, 8, 3)
    net.weight.requires_grad_(False)
    with CostMode(net) as mode:
        net(torch.zeros(1, 3, 16, 16, requires_grad=True)).sum().backward()
    passes = [(call.shape.split()[0], call.kind) for call in mode.calls if call.op == "aten.convolution_backward"]
    assert passes == [("dgrad", "conv3x3"), ("bgrad", "reduction")]


def test_stock_counter_agrees_without_groups():
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3), nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ConvTranspose2d(16, 8, 2, 2)
    )
    x = torch.zeros(2, 3, 32, 32)
    with FlopCounterMode(display=False) as stock:
        net(x)
    with CostMode() as mode, torch.no_grad():
        net(x)
    assert mode.total.flops == stock.get_total_flops() > 0


def test_explicit_gemm_multiplies_traffic_by_taps():
    # the lecture: im2col needs R·S times the input's memory, written once and read once
    problem = ConvProblem(n=1, c=64, k=64, image=(56, 56), filter=(3, 3), padding=1)
    implicit, explicit = conv_forward(problem, torch.float16), conv_im2col(problem, torch.float16)
    assert problem.column_numel == 9 * problem.x_numel
    assert explicit.bytes - implicit.bytes == 2 * 9 * (2 * problem.x_numel)
    assert explicit.flops == implicit.flops
    assert explicit.intensity < implicit.intensity / 5


@pytest.mark.parametrize(
    ("dtype", "groups", "pipe"),
    [
        (torch.float16, 1, "tensor_fp16"),
        (torch.bfloat16, 1, "tensor_bf16"),
        (torch.float32, 1, "tensor_tf32"),
        (torch.float8_e4m3fn, 1, "tensor_fp8"),
        (torch.int8, 1, "tensor_int8"),
        (torch.float16, 8, "tensor_fp16"),  # 8 channels a group
        (torch.float16, 16, "cuda_fp32"),  # 4 channels a group
        (torch.float16, 64, "cuda_fp32"),  # depthwise
    ],
)
def test_pipe_follows_the_operands(dtype, groups, pipe):
    problem = ConvProblem(1, 64, 64, (8, 8), (3, 3), padding=1, groups=groups)
    assert conv_forward(problem, dtype).pipe == pipe


def test_tf32_is_a_setting():
    net, x = nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 8, 8)
    for tf32, pipe in ((False, "cuda_fp32"), (True, "tensor_tf32")):
        with CostMode(tf32=tf32) as mode:
            net(x)
        assert mode.calls[0].cost.pipe == pipe


def test_gemm_view_spans_the_products():
    problem = ConvProblem(2, 64, 96, (14, 14), (3, 3), padding=1, groups=4)
    net = nn.Conv2d(64, 96, 3, padding=1, groups=4, bias=False)
    with CostMode() as mode:
        net(torch.zeros(2, 64, 14, 14, requires_grad=True)).sum().backward()
    gemms = [call.gemm for call in mode.calls if call.kind == "conv3x3"]
    assert [(g.m, g.n, g.k, g.count) for g in gemms] == [(392, 24, 144, 4), (392, 16, 216, 4), (24, 144, 392, 4)]
    assert {g.m * g.n * g.k * g.count for g in gemms} == {problem.macs}
    assert gemms[0].tiles(128, 64) == 4 * 4 * 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 3}, "groups must divide c and k, got 3 for c=8, k=8"),
        ({"filter": (9, 9)}, "filter \\(9, 9\\) does not fit image \\(8, 8\\)"),
        ({"stride": (1, 1, 1)}, "stride must have 2 numbers like image, got \\(1, 1, 1\\)"),
    ],
)
def test_impossible_problems_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ConvProblem(**({"n": 1, "c": 8, "k": 8, "image": (8, 8), "filter": (3, 3)} | change))


def test_problem_in_words():
    assert str(ConvProblem(1, 64, 64, (80, 80), (3, 3), padding=1)) == "1x64x80x80 * 64x64x3x3 s1 p1"
    assert str(ConvProblem(1, 8, 8, (8, 8), (3, 1), 2, (1, 0), 2, 8)) == "1x8x8x8 * 8x1x3x1 s2 p1x0 d2 g8"
