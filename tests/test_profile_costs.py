"""Work of recorded operators without torch: equal to `ridgeline.cost`, which saw the same calls run."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ridgeline import kernels
from ridgeline.call_work import Work, shapes_of
from ridgeline.cost import CostMode
from ridgeline.kernels import (
    attention_packed,
    attention_packed_backward,
    group_norm_silu_backward,
    group_norm_silu_backward_concat,
    group_norm_silu_backward_fp8,
    group_norm_silu_fp8,
    quantize_fp8,
)
from ridgeline.profile_costs import works_of
from ridgeline.trace import Call

CONVOLUTIONS = (  # n, c, k, image, filter, stride, padding, dilation, groups, transposed
    (2, 3, 8, (9, 11), (3, 3), 1, 1, 1, 1, False),
    (1, 8, 16, (12, 12), (3, 3), 2, 1, 1, 2, False),
    (2, 16, 16, (7, 7), (3, 3), 1, 1, 1, 16, False),
    (3, 8, 4, (10, 6), (1, 1), 1, 0, 1, 1, False),
    (1, 4, 8, (16, 16), (5, 3), 2, 2, 2, 1, False),
    (2, 4, 4, (8, 8), (3, 3), 2, 1, 1, 4, True),
    (2, 6, 4, (5, 7), (4, 4), 2, 1, 1, 1, True),
)


def recorded(run: Callable[[], object], folder: Path) -> list[Call]:
    """The operators of one run, as the profiler writes them."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [call_of(event) for event in events if event.get("cat") == "cpu_op" and "Input Dims" in event["args"]]


def call_of(event: dict) -> Call:
    args = event["args"]
    dims = [tuple(() if _is_list(d) else tuple(d) for d in args[key]) for key in ("Input Dims", "Input Strides")]
    lists = tuple(tuple(map(tuple, d)) for d in args["Input Dims"] if _is_list(d))
    return Call(
        id=0,
        name=event["name"],
        start_s=event["ts"],
        duration_s=event["dur"],
        thread=1,
        external_id=0,
        shapes=dims[0],
        strides=dims[1],
        dtypes=tuple(args["Input type"]),
        concrete=tuple(args["Concrete Inputs"]),
        lists=lists,
    )


def _is_list(value: list) -> bool:
    return bool(value) and isinstance(value[0], list)


def compare(run: Callable[[], object], folder: Path, names: set[str], *, tolerance: float = 0.0) -> None:
    """Sums of FLOPs and bytes of the operators in `names`, as recorded, against CostMode's, which saw them run."""
    run()  # lazy initialisation leaves no operators of its own in the record
    with CostMode() as mode:
        run()
    expected = [call for call in mode.calls if call.op.replace(".", "::", 1) in names]
    calls = [call for call in recorded(run, folder) if call.name in names]
    # an operator may call an overload of its own name: the inner one does the work
    inner = [a for a in calls if not any(a.name == b.name and a.start_s < b.start_s < a.end_s for b in calls)]
    found = [work for call in inner for work in works(call)]
    assert expected and len(found) == len(expected)
    assert sum(work.flops for work in found) == sum(call.cost.flops for call in expected if call.cost)
    total = sum(call.cost.bytes for call in expected if call.cost)
    assert sum(work.bytes for work in found) == pytest.approx(total, rel=tolerance, abs=0)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions_and_their_gradients(case: tuple, tmp_path: Path) -> None:
    n, c, k, image, taps, stride, padding, dilation, groups, transposed = case
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, c, *image, generator=generator, requires_grad=True)
    shape = (c, k // groups, *taps) if transposed else (k, c // groups, *taps)
    weight = torch.randn(shape, generator=generator, requires_grad=True)
    bias = torch.randn(k, generator=generator, requires_grad=True)

    def run() -> None:
        if transposed:
            y = F.conv_transpose2d(x, weight, bias, stride, padding, 0, groups, dilation)
        else:
            y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        y.sum().backward()

    compare(run, tmp_path, {"aten::convolution", "aten::convolution_backward"})


def test_a_first_layer_has_no_input_gradient(tmp_path: Path) -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    calls = recorded(lambda: F.conv2d(x, weight).sum().backward(), tmp_path)
    backward = next(call for call in calls if call.name == "aten::convolution_backward")
    assert [work.pass_ for work in works(backward)] == ["wgrad"]


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda: torch.mm(torch.ones(3, 5), torch.ones(5, 7)), "mm"),
        (lambda: torch.addmm(torch.ones(7), torch.ones(3, 5), torch.ones(5, 7)), "addmm"),
        (lambda: torch.bmm(torch.ones(2, 3, 5), torch.ones(2, 5, 7)), "bmm"),
        (lambda: torch.mv(torch.ones(3, 5), torch.ones(5)), "mv"),
        (lambda: torch.ones(2, 3, 4) + torch.ones(3, 1), "add"),
        (lambda: torch.ones(4, 1).expand(4, 6) * torch.ones(4, 6), "mul"),
        (lambda: torch.ones(4, 6).mul_(2.0), "mul_"),
        (lambda: torch.ones(4, 6) > 0.5, "gt"),
        (lambda: F.silu(torch.ones(2, 3, 4)), "silu"),
        (lambda: torch.softmax(torch.ones(4, 9), -1), "_softmax"),
        (lambda: torch.ones(2, 3).clone(), "clone"),
        (lambda: torch.ones(2, 3).copy_(torch.ones(3)), "copy_"),
        (lambda: torch.empty(5, 3).fill_(1.0), "fill_"),
        (lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)], 1), "cat"),
        (lambda: torch.ones(5, 3).gather(0, torch.tensor([[0, 2, 1], [4, 0, 0]])), "gather"),
        (lambda: torch.ones(2, 3).gather(0, torch.zeros(9, 3, dtype=torch.long)), "gather"),
        (lambda: F.embedding(torch.tensor([3, 1]), torch.ones(9, 4)), "embedding"),
        (lambda: torch.ones(4, 6, 2).index_select(1, torch.tensor([5, 0, 0])), "index_select"),
        (lambda: F.interpolate(torch.ones(2, 3, 4, 4), scale_factor=2.0), "upsample_nearest2d"),
        (lambda: F.interpolate(torch.ones(2, 3, 4, 4), (7, 9), mode="bilinear"), "upsample_bilinear2d"),
        (lambda: torch.ops.aten.max_pool2d_with_indices(torch.ones(2, 3, 9, 9), 3, 2, 1), "max_pool2d_with_indices"),
        (lambda: F.batch_norm(torch.ones(2, 8, 4, 4), torch.zeros(8), torch.ones(8)), "native_batch_norm"),
        (lambda: F.group_norm(torch.ones(2, 8, 4, 4), 4, torch.ones(8), torch.ones(8)), "native_group_norm"),
        (lambda: F.layer_norm(torch.ones(6, 8), (8,), torch.ones(8), torch.ones(8)), "native_layer_norm"),
        (lambda: torch.ops.aten._foreach_mul_([torch.ones(3, 4), torch.ones(5)], 2.0), "_foreach_mul_"),
        (lambda: torch.ops.aten._foreach_lerp_([torch.ones(3, 4)], [torch.ones(3, 4)], 0.5), "_foreach_lerp_"),
    ],
)  # fmt: skip
def test_other_operators(run: Callable[[], object], names: str, tmp_path: Path) -> None:
    compare(run, tmp_path, {f"aten::{name}" for name in names.split()})


def test_backward_of_norms_pools_and_activations(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 8, 8, requires_grad=True)
    weight, bias = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    mean, var = torch.zeros(8), torch.ones(8)

    def run() -> None:
        y = F.batch_norm(F.silu(F.group_norm(x, 4, weight, bias)), mean, var, weight, bias, training=True)
        y = F.layer_norm(F.interpolate(F.max_pool2d(y, 2), scale_factor=2.0), (8,), weight, bias)
        torch.log_softmax(y.flatten(1), 1).mean().backward()

    names = """native_group_norm native_group_norm_backward silu_backward native_batch_norm native_batch_norm_backward
    max_pool2d_with_indices_backward upsample_nearest2d_backward native_layer_norm_backward
    _log_softmax_backward_data"""
    compare(run, tmp_path, {f"aten::{name}" for name in names.split()}, tolerance=0.01)


def test_fused_adamw_moves_28_bytes_a_parameter(tmp_path: Path) -> None:
    parameter = torch.ones(1000, requires_grad=True)
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    calls = recorded(optimizer.step, tmp_path)
    (work,) = works(next(call for call in calls if call.name.startswith("aten::_fused_adamw_")))
    assert work.bytes == pytest.approx(28 * 1000, rel=0.001)
    assert work.flops == 14 * 1000


def works(call: Call) -> tuple[Work, ...]:
    found = works_of(call, 4)
    assert found is not None
    return found


def attention(name: str, dims: tuple[int, ...], count: int) -> Call:
    return Call(0, name, 0, 1, 1, 0, shapes=(dims,) * count, dtypes=("c10::Half",) * count)


def test_attention_forward_two_products_backward_five() -> None:
    dims = (2, 4, 128, 64)
    forward = works(attention("aten::_scaled_dot_product_flash_attention", dims, 3))
    backward = works(attention("aten::_scaled_dot_product_flash_attention_backward", dims, 5))
    assert [work.flops for work in forward] == [4 * 2 * 4 * 128 * 128 * 64]
    assert [work.flops for work in backward] == [10 * 2 * 4 * 128 * 128 * 64]
    assert forward[0].bytes == 4 * math.prod(dims) * 2 + 4 * 2 * 4 * 128
    assert forward[0].shapes == "q 2x4x128x64, k 2x4x128x64, v 2x4x128x64"


def test_depthwise_weight_gradients_are_divided_by_groups_once() -> None:
    call = Call(
        id=0,
        name="aten::convolution_backward",
        start_s=0,
        duration_s=1,
        thread=1,
        external_id=0,
        shapes=((2, 64, 56, 56), (2, 64, 56, 56), (64, 1, 3, 3), *((),) * 8),
        dtypes=("float",) * 3 + ("Scalar",) * 8,
        concrete=("",) * 4 + ("[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "64", "[True, True, False]"),
    )
    dgrad, wgrad = works(call)
    assert (dgrad.flops, wgrad.flops) == (7_225_344, 7_225_344)
    assert dgrad.shapes == "dgrad 2x64x56x56 * 64x1x3x3 s1 p1 g64"


OPERATORS = (
    *kernels.ALL,
    *kernels.PASSES,
    *kernels.UPSAMPLED,
    *kernels.CONCAT,
    *kernels.FP8,
    group_norm_silu_backward.OP,
    group_norm_silu_backward_concat.OP,
    group_norm_silu_fp8.OP,
    group_norm_silu_backward_fp8.OP,
    quantize_fp8.OP,
    attention_packed.OP,
    attention_packed_backward.OP,
    attention_packed_backward.SUMMED_OP,
)


def is_told(arguments: dict) -> bool:
    """A trace leaves out texts and lists with gaps: silu, biases everywhere, and maps other than x are assumed."""
    x, extras = arguments.get("x"), arguments.get("extras", ())
    whole = None not in arguments.get("biases", ()) and not any(extra is x for extra in extras)
    return whole and ("gamma" not in arguments or arguments.get("act", "silu") == "silu")


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_the_operators_of_the_project(op: kernels.Op, tmp_path: Path) -> None:
    dtype = torch.float16 if torch.float16 in op.dtypes else op.dtypes[0]
    samples = [sample.arguments(dtype, "meta") for sample in op.samples]  # which run nothing
    told = [arguments for arguments in samples if is_told(arguments)]
    assert len(told) > 1
    expected = [(cost.flops, cost.bytes) for cost in (op.cost(**arguments) for arguments in told)]

    def run() -> None:
        for arguments in told:
            y = op.call(**arguments)
            if op.into is not None:
                op.into(y, **arguments)

    calls = recorded(run, tmp_path)
    for name in filter(None, (op.name, op.into and f"{op.name}_into")):
        found = [works(call) for call in calls if call.name == f"ridgeline::{name}"]
        assert [(work.flops, work.bytes) for (work,) in found] == expected


@pytest.mark.parametrize(
    "call",
    [
        Call(0, "aten::mm", 0, 1, 1, 0),
        Call(0, "my::op", 0, 1, 1, 0, shapes=((2, 3),), dtypes=("float",)),
        Call(0, "aten::mm", 0, 1, 1, 0, shapes=((2, 3),), dtypes=("float",)),
        Call(0, "aten::cat", 0, 1, 1, 0, shapes=((), ()), dtypes=("TensorList", "Scalar"), lists=(((2, 3),),)),
        Call(0, "aten::convolution", 0, 1, 1, 0, shapes=((2, 3, 8, 8), (4, 3, 3, 3)), dtypes=("float", "float")),
    ],
    ids=["no shapes", "no formula", "an argument missing", "members of unknown type", "no concrete inputs"],
)
def test_what_no_formula_knows_has_no_work(call: Call) -> None:
    assert works_of(call) is None


def test_generated_kernels_move_their_arguments_no_further_than_their_sizes_span() -> None:
    call = Call(
        id=0,
        name="triton_poi_fused_add_slice_0",
        start_s=0,
        duration_s=1,
        thread=1,
        external_id=0,
        shapes=((4, 8), (16, 8), ()),
        dtypes=("float", "c10::Half", "Scalar"),
        concrete=("", "", "32"),
    )
    assert [(work.flops, work.bytes) for work in works(call)] == [(0, 32 * 4 + 32 * 2)]
    assert shapes_of(call) == "4x8, 16x8"
