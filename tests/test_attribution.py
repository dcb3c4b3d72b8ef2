"""Kernels find their operator, module, line, phase and work: in eager steps, backward, and inside CUDA graphs."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import traces_made as made
from ridgeline.attribution import step_of
from ridgeline.errors import UsageError
from ridgeline.graph_alignment import aligned
from ridgeline.nesting import Nesting
from ridgeline.step_view import Ceilings, Kernel, Step
from ridgeline.trace import Call, Range, Trace
from ridgeline.trace_reader import read_trace

REAL = Path(__file__).parent / "fixtures" / "traces"
H200 = Ceilings("NVIDIA H200", 132, 4.3e12, {"tensor_bf16": 790e12, "cuda_fp32": 60e12}, 50e6, measured=True)

CONV = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
DGRAD, WGRAD = CONV.replace("fprop", "dgrad"), CONV.replace("fprop", "wgrad")
LAYOUT = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>(int)"
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(float)"
BF16 = "c10::BFloat16"
X, W = ((8, 64, 32, 32), BF16), ((64, 64, 3, 3), BF16)
PARAMETERS = (((), "Scalar"),) * 7
FORWARD_ARGUMENTS = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
BACKWARD_ARGUMENTS = ["", "", "", "", *FORWARD_ARGUMENTS[3:], "[True, True, False]"]


def training_step(at_us: float, number: int) -> list[made.Event]:
    """One step of 1000 µs on the host: forward, backward on another thread, optimizer; kernels 300 µs later."""
    ids = 100 * number
    ac = made.op
    return [
        made.annotation(f"ProfilerStep#{number}", at_us, 1000),
        made.frame("train.py(10): <module>", at_us, 1000),
        made.frame("nn.Module: Net_0", at_us + 10, 200),
        made.frame("net.py(42): forward", at_us + 11, 198),
        made.frame("nn.Module: Conv2d_3", at_us + 20, 180),
        made.frame("torch/nn/modules/conv.py(548): forward", at_us + 21, 178),
        ac("aten::conv2d", at_us + 30, 100, external_id=ids + 1, sequence=(7, 0)),
        ac("aten::convolution", at_us + 31, 98, external_id=ids + 2, sequence=(7, 0),
           inputs=(X, W, *PARAMETERS), extra={"Concrete Inputs": FORWARD_ARGUMENTS}),
        ac("aten::cudnn_convolution", at_us + 40, 80, external_id=ids + 3, inputs=(X, W, *PARAMETERS[:4]),
           extra={"Concrete Inputs": ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]}),
        made.launch(at_us + 50, 5, correlation=ids + 1, external_id=ids + 3),
        made.launch(at_us + 60, 5, correlation=ids + 2, external_id=ids + 3),
        made.kernel(LAYOUT, at_us + 300, 10, correlation=ids + 1, external_id=ids + 3),
        made.kernel(CONV, at_us + 312, 40, correlation=ids + 2, external_id=ids + 3),
        ac("autograd::engine::evaluate_function: ConvolutionBackward0", at_us + 300, 100, external_id=ids + 4,
           sequence=(7, 1), thread=200),
        ac("aten::convolution_backward", at_us + 310, 80, external_id=ids + 5, thread=200,
           inputs=(X, X, W, *PARAMETERS, ((), "ScalarList")), extra={"Concrete Inputs": BACKWARD_ARGUMENTS}),
        made.launch(at_us + 320, 5, correlation=ids + 3, external_id=ids + 5, thread=200),
        made.launch(at_us + 330, 5, correlation=ids + 4, external_id=ids + 5, thread=200),
        made.kernel(WGRAD, at_us + 400, 60, correlation=ids + 3, external_id=ids + 5),
        made.kernel(DGRAD, at_us + 461, 50, correlation=ids + 4, external_id=ids + 5),
        made.annotation("Optimizer.step#AdamW.step", at_us + 600, 100),
        ac("aten::_fused_adamw_", at_us + 610, 50, external_id=ids + 6,
           inputs=[((), "TensorList")], extra={"Input Dims": [[[64, 64, 3, 3], [64]]]}),
        made.launch(at_us + 620, 5, correlation=ids + 5, external_id=ids + 6),
        made.kernel(ADAM, at_us + 900, 20, correlation=ids + 5, external_id=ids + 6),
    ]  # fmt: skip


def read(tmp_path: Path, events: list[made.Event]) -> Trace:
    return read_trace(made.write(tmp_path / "made.json", made.trace(events)))


@pytest.fixture
def step(tmp_path: Path) -> Step:
    events = [event for number in (1, 2, 3) for event in training_step(1000.0 * number, number)]
    return step_of(read(tmp_path, events), ceilings=H200)


def kernel(step: Step, name: str) -> Kernel:
    return next(each for each in step.kernels if each.activity.name == name)


def test_a_step_lasts_from_its_first_kernel_to_that_of_the_next(step: Step) -> None:
    assert len(step.kernels) == 5
    assert step.duration_s == pytest.approx(1e-3)
    assert step.kernels[0].activity.name == LAYOUT
    assert step.busy_s == pytest.approx(180e-6)
    assert step.trained


def test_forward_kernels_are_named_by_the_general_operator(step: Step) -> None:
    conv = kernel(step, CONV)
    assert conv.call is not None and conv.call.name == "aten::cudnn_convolution"
    assert (conv.op, conv.module, conv.source, conv.phase) == ("aten.convolution", "Conv2d_3", "net.py:42", "forward")
    assert conv.shapes == "8x64x32x32 * 64x64x3x3 s1 p1"
    assert conv.flops == 2 * 8 * 64 * 32 * 32 * 64 * 9
    assert conv.bytes == 2 * (2 * 8 * 64 * 32 * 32 + 64 * 64 * 9)
    assert conv.floor_s == pytest.approx(max(conv.flops / 790e12, conv.bytes / 4.3e12))


def test_helpers_of_a_convolution_get_none_of_its_work(step: Step) -> None:
    layout = kernel(step, LAYOUT)
    assert (layout.op, layout.flops, layout.bytes, layout.floor_s) == ("aten.convolution", None, None, None)


def test_gradients_belong_to_the_forward_module_and_line(step: Step) -> None:
    dgrad, wgrad = kernel(step, DGRAD), kernel(step, WGRAD)
    for gradient in (dgrad, wgrad):
        assert gradient.op == "aten.convolution_backward"
        assert (gradient.module, gradient.source, gradient.phase) == ("Conv2d_3", "net.py:42", "backward")
    assert dgrad.shapes.startswith("dgrad ") and wgrad.shapes.startswith("wgrad ")
    assert dgrad.flops == wgrad.flops == kernel(step, CONV).flops


def test_the_optimizer_is_its_own_phase_and_tells_the_parameters(step: Step) -> None:
    adam = kernel(step, ADAM)
    assert (adam.op, adam.phase) == ("aten._fused_adamw_", "optimizer")
    assert step.parameters == (((64, 64, 3, 3), "float"), ((64,), "float"))


def test_without_ceilings_nothing_has_a_roofline_time(tmp_path: Path) -> None:
    step = step_of(read(tmp_path, training_step(1000.0, 1)))
    assert step.kernels and all(each.floor_s is None for each in step.kernels)


def test_the_median_step_of_whole_ones_is_shown(tmp_path: Path) -> None:
    starts_us = (1000, 2000, 3900, 5000)  # periods of 1000, 1900 and 1100 µs, and a last one whose end nobody knows
    events = [event for number, at_us in enumerate(starts_us) for event in training_step(at_us, number)]
    step = step_of(read(tmp_path, events))
    assert (step.index, step.duration_s) == (2, pytest.approx(1100e-6))


def test_a_stepless_trace_is_one_step(tmp_path: Path) -> None:
    step = step_of(read(tmp_path, [made.kernel("k", 100, 50), made.kernel("k", 200, 100)]))
    assert len(step.kernels) == 2
    assert step.duration_s == pytest.approx(200e-6)
    assert [gap.cause for gap in step.gaps] == ["unknown"]
    assert step.kernels[0].op == ""


def test_the_copy_of_the_input_belongs_to_a_step_that_nobody_marked(tmp_path: Path) -> None:
    copy = made.memcpy("Memcpy HtoD (Pageable -> Device)", 60, 30, size_bytes=4096, correlation=8)
    events = [made.launch(50, 9, correlation=8, name="cudaMemcpyAsync"), copy, *graph_events(["a"])]
    (found, kernel) = step_of(read(tmp_path, events)).kernels
    assert (found.known.category, kernel.activity.name) == ("memcpy", "a")


def test_a_kernel_that_runs_into_the_next_step_ends_with_its_own(tmp_path: Path) -> None:
    events = [event for number in (1, 2) for event in training_step(1000.0 * number, number)]
    events += [made.launch(1700, 5, correlation=900), made.kernel("long", 1950, 1000, correlation=900, stream=9)]
    step = step_of(read(tmp_path, events))
    assert kernel(step, "long").seconds == pytest.approx((2300 - 1950) * 1e-6)
    assert step.busy_s + step.idle_s == pytest.approx(step.duration_s)


def test_a_trace_without_gpu_work_is_refused() -> None:
    empty = Trace("cpu.json", "kineto", (), ())
    with pytest.raises(UsageError, match="no kernel, copy or fill ran"):
        step_of(empty)


def test_operators_without_external_id_are_found_by_time(tmp_path: Path) -> None:
    events = [
        made.op("aten::relu", 0, 100, external_id=1),
        made.launch(10, 5, correlation=4),
        made.launch(50, 5, correlation=5, thread=7),  # another thread: no operator of this one
        made.kernel("relu_kernel", 200, 10, correlation=4),
        made.kernel("other", 220, 10, correlation=5),
    ]
    step = step_of(read(tmp_path, events))
    assert [each.op for each in step.kernels] == ["aten.relu", ""]


@pytest.mark.parametrize(
    ("chain", "name", "op"),
    [
        (("aten::copy_", "aten::_to_copy", "aten::to"), "copy_kernel", "aten._to_copy"),
        (("aten::copy_",), "copy_kernel", "aten.copy_"),
        (("aten::fill_", "ridgeline::conv2d_act"), "fill", "ridgeline.conv2d_act"),
        ((), "conv2d_act_kernel", "ridgeline.conv2d_act"),
        (("CompiledFunction",), "triton_poi_fused_add_3", "triton_poi_fused_add_3"),
    ],
)
def test_names_a_person_would_use(chain: tuple[str, ...], name: str, op: str, tmp_path: Path) -> None:
    nested = [made.op(each, i, 100 - 2 * i, external_id=i + 1) for i, each in enumerate(reversed(chain))]
    events = [*nested, made.launch(40, 5, correlation=9), made.kernel(name, 200, 10, correlation=9)]
    assert step_of(read(tmp_path, events)).kernels[0].op == op


def test_own_triton_kernels_learn_dtype_and_tensor_cores_from_their_operands(tmp_path: Path) -> None:
    arguments = ((X[0], "c10::Half"), (W[0], "c10::Half"), ((64,), "c10::Half"), ((), ""), *PARAMETERS[:5])
    concrete = ["", "", "", "", "[1, 1]", "[1, 1]", "silu", "tf32", "False"]
    events = [
        made.op("ridgeline::conv2d_act", 0, 100, external_id=1, inputs=arguments, extra={"Concrete Inputs": concrete}),
        made.launch(10, 5, correlation=4, external_id=1, name="cuLaunchKernelEx"),
        made.kernel("conv2d_act_kernel", 200, 10, correlation=4, external_id=1),
    ]
    (conv,) = step_of(read(tmp_path, events)).kernels
    assert (conv.known.dtype, conv.known.tensor_core, conv.op) == ("fp16", True, "ridgeline.conv2d_act")
    assert conv.flops == 2 * 8 * 64 * 32 * 32 * 64 * 9


@pytest.mark.parametrize(
    ("ranges", "module"),
    [
        (("ProfilerStep#1", "mine", "module: backbone.0.conv", "inner"), "backbone.0.conv"),
        (("ProfilerStep#1", "mine"), "mine"),
        (("ProfilerStep#1", "Torch-Compiled Region: 0/0"), ""),
    ],
)
def test_modules_come_from_ranges_where_there_are_no_frames(
    ranges: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    nested = [made.annotation(name, i, 100 - 2 * i) for i, name in enumerate(ranges)]
    events = [*nested, made.launch(40, 5, correlation=9), made.kernel("k", 200, 10, correlation=9)]
    assert step_of(read(tmp_path, events)).kernels[0].module == module


def test_open_events_are_those_that_hold_the_moment() -> None:
    generator = random.Random(0)
    spans = [(0, 100), (5, 40), (5, 30), (10, 20), (20, 30), (45, 90), (50, 50), (60, 80), (100, 120)]
    ranges = [Range(i, str(i), start, end - start, 1) for i, (start, end) in enumerate(spans)]
    other = Range(99, "other thread", 0, 200, 2)
    nesting = Nesting(generator.sample([*ranges, other], k=len(ranges) + 1))
    for moment in range(125):
        expected = {r.id for r in ranges if r.start_s <= moment <= r.end_s}
        assert {r.id for r in nesting.around(1, moment)} <= expected
        # an event that begins where another ends hides it: the one that goes on is meant
        assert {r.id for r in ranges if r.start_s <= moment < r.end_s} <= {r.id for r in nesting.around(1, moment)}
    assert [r.id for r in nesting.around(1, 15)] == [3, 2, 1, 0]
    assert [r.id for r in nesting.enclosing(ranges[7])] == [7, 5, 0]


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


def graph_events(names: list[str], *, nodes: bool = False) -> list[made.Event]:
    replay = [
        made.kernel(name, 100 + 20 * i, 10, correlation=9, extra={"graph node id": 50 + i} if nodes else {})
        for i, name in enumerate(names)
    ]
    return [made.launch(0, 5, correlation=9, name="cudaGraphLaunch"), *replay]


def eager_events(names: list[str]) -> list[made.Event]:
    parts = [
        [
            made.op(f"aten::op{i}", 20 * i, 10, external_id=i + 1),
            made.launch(20 * i + 1, 5, correlation=i + 1, external_id=i + 1),
            made.kernel(name, 500 + 20 * i, 10, correlation=i + 1, external_id=i + 1),
        ]
        for i, name in enumerate(names)
    ]
    return [event for part in parts for event in part]


def test_kernels_of_a_graph_are_all_counted_under_its_launch(tmp_path: Path) -> None:
    step = step_of(read(tmp_path, graph_events(["a", "b", "a"])))
    assert [(each.in_graph, each.op) for each in step.kernels] == [(True, "")] * 3


def test_a_graph_takes_its_operators_from_an_eager_step(tmp_path: Path) -> None:
    eager = read(tmp_path, eager_events(["a", "b", "only eager", "a", "c"]))
    step = step_of(read(tmp_path, graph_events(["a", "b", "only graph", "a", "c"])), eager=eager)
    assert [each.op for each in step.kernels] == ["aten.op0", "aten.op1", "", "aten.op3", "aten.op4"]


def test_nodes_are_aligned_in_the_order_of_capture(tmp_path: Path) -> None:
    """Two streams of a graph may run their kernels in another order than they were captured."""
    events = graph_events(["b", "a"])
    events[1]["args"]["graph node id"], events[2]["args"]["graph node id"] = 8, 7  # pyright: ignore
    step = step_of(read(tmp_path, events), eager=read(tmp_path, eager_events(["a", "b"])))
    assert [each.op for each in step.kernels] == ["aten.op1", "aten.op0"]


def test_marks_of_nodes_are_modules_until_an_eager_step_knows_better(tmp_path: Path) -> None:
    events = graph_events(["a", "b", "c"], nodes=True)
    events[1]["args"] |= {"str": "backbone", "stream": 3}  # pyright: ignore
    events[2]["args"] |= {"annotation": "['head']"}  # pyright: ignore
    assert [each.module for each in step_of(read(tmp_path, events)).kernels] == ["backbone", "['head']", ""]
    eager = [*eager_events(["a", "b", "c"]), made.annotation("module: stem", 0, 15)]
    step = step_of(read(tmp_path, events), eager=read(tmp_path, eager))
    assert [(each.op, each.module) for each in step.kernels] == [
        ("aten.op0", "stem"), ("aten.op1", "['head']"), ("aten.op2", ""),
    ]  # fmt: skip


def test_another_grid_is_matched_by_name_between_sure_matches(tmp_path: Path) -> None:
    eager = step_of(read(tmp_path, eager_events(["a", "b", "c"]))).kernels
    replay = step_of(read(tmp_path, graph_events(["a", "b", "c"]))).kernels
    other = replace(replay[1], activity=replace(replay[1].activity, grid=(7, 1, 1)))
    assert [each.op for each in aligned((replay[0], other, replay[2]), eager)] == ["aten.op0", "aten.op1", "aten.op2"]


# -- kernels of this project -------------------------------------------------------------------------------------------


def one_graph(names: list[str]) -> list[made.Event]:
    """A replay of a graph with these kernels, in which nothing but their names is left."""
    events = [made.launch(5, 40, correlation=99, name="cudaGraphLaunch")]
    return events + [made.kernel(name, 100 + 10 * at, 8, correlation=99) for at, name in enumerate(names)]


def test_common_names_in_a_graph_are_ours_beside_an_unmistakable_one(tmp_path: Path) -> None:
    ours = step_of(read(tmp_path, one_graph(["conv2d_act_kernel", "collect_kernel", "rank_kernel"])))
    assert [each.op for each in ours.kernels] == ["ridgeline.conv2d_act", *["ridgeline.detect_topk"] * 2]
    assert [each.known.category for each in ours.kernels] == ["conv", "sort", "sort"]
    updates = step_of(read(tmp_path, one_graph(["forward_kernel", "scalars_kernel", "update_kernel"])))
    assert [each.known.category for each in updates.kernels] == ["norm", "optimizer", "optimizer"]
    assert updates.trained


def test_common_names_in_a_graph_of_others_stay_unknown(tmp_path: Path) -> None:
    theirs = step_of(read(tmp_path, one_graph(["nvjet_hsh_64x64", "forward_kernel", "update_kernel"])))
    assert [each.op for each in theirs.kernels] == ["", "", ""]
    assert [each.known.category for each in theirs.kernels] == ["gemm", "unknown", "unknown"]
    assert not theirs.trained


def test_outside_a_graph_the_operator_says_whose_a_kernel_is(tmp_path: Path) -> None:
    def launched(operator: str, at_us: float, number: int) -> list[made.Event]:
        return [
            made.op(operator, at_us, 20, external_id=number),
            made.launch(at_us + 5, 5, correlation=number, external_id=number, name="cuLaunchKernelEx"),
            made.kernel("forward_kernel", at_us + 30, 20, correlation=number, external_id=number),
        ]

    events = [*launched("ridgeline::group_norm_silu", 0, 1), *launched("theirs::norm", 100, 2)]
    ours, theirs = step_of(read(tmp_path, events)).kernels
    assert (ours.op, ours.known.category) == ("ridgeline.group_norm_silu", "norm")
    assert (theirs.op, theirs.known.category) == ("theirs.norm", "unknown")


# -- traces taken on an H200 -------------------------------------------------------------------------------------------


@cache
def real(name: str, eager: str = "") -> Step:
    beside = read_trace(REAL / f"{eager}.json.gz") if eager else None
    return step_of(read_trace(REAL / f"{name}.json.gz"), ceilings=H200, eager=beside)


def share(step: Step, field: str) -> float:
    total_s = sum(each.seconds for each in step.kernels)
    return sum(each.seconds for each in step.kernels if getattr(each, field)) / total_s


@pytest.mark.parametrize(
    ("name", "eager", "modules"),
    [
        ("yolo26n-eager", "", 1.0),
        ("yolo26n-graph", "yolo26n-eager", 1.0),
        ("syncing", "", 0.9),
        ("loader-bound", "", 0.8),
    ],
)
def test_real_steps_are_attributed(name: str, eager: str, modules: float) -> None:
    step = real(name, eager)
    assert share(step, "op") > 0.99
    assert share(step, "module") >= modules
    assert sum(each.seconds for each in step.kernels if each.known.category == "unknown") == 0
    assert step.busy_s + step.idle_s == pytest.approx(step.duration_s, rel=1e-9)


def test_the_graph_of_a_training_step_keeps_the_phases_of_its_eager_step() -> None:
    step = real("ddpm-graph", "ddpm-graph-operators")
    assert share(step, "op") > 0.99 and share(step, "in_graph") > 0.99
    phases = {each.phase for each in step.kernels}
    assert {"forward", "backward", "optimizer"} <= phases
    convolutions = [each for each in step.kernels if each.known.category == "conv" and each.flops]
    # no convolution of the net beats its roof by more than the error of a measured ceiling
    assert len(convolutions) > 100
    assert all((each.floor_s or 0) <= 1.05 * each.seconds for each in convolutions)


def test_sources_of_a_real_eager_step_are_lines_of_the_net() -> None:
    step = real("yolo26n-eager")
    sources = {each.source.partition(":")[0] for each in step.kernels}
    assert "ridgeline/models/blocks.py" in sources
    assert not any(source.startswith("torch/") for source in sources)


def test_parameters_of_a_real_optimizer_that_loops_over_lists() -> None:
    parameters = real("loader-bound").parameters
    assert len(parameters) == 14
    assert {dtype for _, dtype in parameters} == {"float"}
    assert parameters[0][0] == (64, 3, 3, 3)


def test_calls_of_kernels_are_innermost() -> None:
    step = real("loader-bound")
    names = {each.call.name for each in step.kernels if isinstance(each.call, Call)}
    assert "aten::cudnn_convolution" in names
    assert "aten::conv2d" not in names
