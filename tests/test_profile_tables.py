"""The tables of a step: rows and their statistics, copies, waits, waterfall, timeline, roofline points."""

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.attribution import step_of
from ridgeline.profile_record import UNTRACED, Profile
from ridgeline.profile_tables import IDLE_STREAM, MOST_LANES, profile_of, timeline
from ridgeline.step_view import Ceilings, Gap, Kernel, KernelClass, Step, Sync
from ridgeline.trace import Activity, Launch
from ridgeline.trace_reader import read_trace

CONV = KernelClass("conv", tensor_core=True, dtype="bf16", layout="nhwc", pass_="fprop")
ADD = KernelClass("pointwise", tensor_core=False, dtype="bf16")
H200 = Ceilings("NVIDIA H200", 132, 4e12, {"tensor_bf16": 800e12, "cuda_fp32": 60e12}, 50e6, measured=True)


def kernel(name: str, known: KernelClass, start_us: float, duration_us: float, **fields: object) -> Kernel:
    grid = fields.pop("grid", (128, 1, 1))
    kind = known.category if known.category in ("memcpy", "memset") else "kernel"
    size = fields.pop("size_bytes", 0)
    activity = Activity(int(start_us), kind, name, start_us * 1e-6, duration_us * 1e-6, 0, 7, 0, grid=grid, bytes=size)  # pyright: ignore[reportArgumentType]
    return Kernel(activity, known, exposed_s=duration_us * 1e-6, **fields)  # pyright: ignore[reportArgumentType]


FORWARD = {"op": "aten.convolution", "phase": "forward", "flops": 4e9, "bytes": 1e6, "floor_s": 5e-6, "shapes": "a"}
BACKWARD = {**FORWARD, "phase": "backward", "bytes": 8e7, "floor_s": 20e-6, "shapes": "b", "grid": (64, 2, 1)}
KERNELS = (
    kernel("conv", CONV, 0, 10, module="Conv2d_0", **FORWARD),
    kernel("conv", CONV, 20, 30, module="Conv2d_1", **FORWARD),
    kernel("conv", CONV, 60, 20, **BACKWARD),
    kernel("add", ADD, 80, 10, flops=1e6, bytes=44e6, floor_s=11e-6),
    kernel("Memcpy HtoD (Pageable -> Device)", KernelClass("memcpy", tensor_core=False), 90, 5, size_bytes=4096),
)
GAPS = (Gap(10e-6, 10e-6, "launch", (1,)), Gap(50e-6, 10e-6, "sync", (2,)), Gap(95e-6, 5e-6, "loader", (3,)))
WAIT = Sync(Launch(9, "cudaStreamSynchronize", 45e-6, 7e-6, 1, 4), None, "train.py:31", 7e-6, 8e-6)


def step(**changes: object) -> Step:
    made = Step(
        index=1,
        start_s=0.0,
        duration_s=100e-6,
        kernels=KERNELS,
        gaps=GAPS,
        syncs=(WAIT, WAIT),
        launches=(),
        calls=(),
        wall_s=None,
        ceilings=H200,
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def profile(of: Step, gpu: str = "") -> Profile:
    return profile_of(of, subject="net", command="ridgeline profile", environment={}, wall=None, coverage=0.99, gpu=gpu)


def test_rows_by_name_and_shapes_carry_the_statistics() -> None:
    conv_a = next(row for row in profile(step()).kernels if (row.name, row.shapes) == ("conv", "a"))
    assert (conv_a.count, conv_a.grid, conv_a.tensor_core, conv_a.module) == (2, "128x1x1", "yes", "Conv2d_1")
    assert conv_a.total_s == pytest.approx(40e-6)
    assert conv_a.mean_s == conv_a.median_s == pytest.approx(20e-6)
    assert (conv_a.min_s, conv_a.max_s) == pytest.approx((10e-6, 30e-6))
    assert conv_a.sigma_s == pytest.approx(10e-6)
    assert conv_a.intensity == pytest.approx(4000)
    assert (conv_a.bound, conv_a.of_roof) == ("compute", pytest.approx(0.25))


def test_rows_by_name_join_shapes() -> None:
    by_name = {row.name: row for row in profile(step()).by_name}
    conv = by_name["conv"]
    assert (conv.count, conv.shapes, conv.grid, conv.phase) == (3, "", "various", "forward")
    assert conv.bound == "memory"  # 20 of its 30 µs of roofline time
    assert by_name["add"].of_roof == pytest.approx(1.1)
    assert by_name["Memcpy HtoD (Pageable -> Device)"].of_roof is None
    assert [row.total_s for row in profile(step()).by_name] == sorted(
        (row.total_s for row in profile(step()).by_name), reverse=True
    )


def test_what_beats_its_roof_is_flagged_and_not_clipped() -> None:
    assert "add" in profile(step()).extra["above_roof"]
    assert "conv" not in profile(step()).extra["above_roof"]
    assert "above_roof" not in profile(step(kernels=KERNELS[:3])).extra


def test_unknown_names_are_listed_with_their_share() -> None:
    odd = kernel("odd", KernelClass("unknown", tensor_core=None), 40, 10)
    assert profile(step(kernels=(*KERNELS[:1], odd))).extra["unknown_kernels"] == "50.0 % of kernel time: odd"


def test_the_head_of_the_profile() -> None:
    shown = profile(step())
    assert (shown.gpu, shown.peaks["bandwidth"], shown.peaks_measured) == ("NVIDIA H200", 4e12, True)
    assert shown.idle == pytest.approx({"loader": 5e-6, "sync": 10e-6, "launch": 10e-6})
    assert shown.busy_s == pytest.approx(75e-6)
    assert shown.overlap_s == pytest.approx(0)
    assert shown.attributed_share == pytest.approx(60 / 75)
    assert shown.module_share == pytest.approx(40 / 75)
    # the copy has no roof and stays at its own time
    assert shown.floor_s == pytest.approx((5 + 5 + 20 + 11 + 5) * 1e-6)
    assert (shown.findings, shown.coverage) == ((), 0.99)


def test_an_unknown_gpu_has_no_roof() -> None:
    blind = tuple(replace(each, floor_s=None) for each in KERNELS)
    shown = profile(step(kernels=blind, ceilings=None), gpu="G")
    assert (shown.gpu, shown.peaks, shown.floor_s) == ("G", {}, None)
    assert all(row.of_roof is None and row.bound == "" for row in shown.kernels)


def test_ceilings_of_another_gpu_are_said_to_be() -> None:
    shown = profile(step(), gpu="NVIDIA T4")
    assert (shown.gpu, shown.ceilings_gpu) == ("NVIDIA T4", "NVIDIA H200")
    assert "from NVIDIA T4 and the ceilings are those of NVIDIA H200" in shown.extra["caution"]
    assert "above_roof" not in shown.extra  # which would look for causes in the kernels
    assert "caution" not in profile(step(), gpu="NVIDIA H200").extra


def test_idle_time_is_without_what_the_profiler_adds() -> None:
    shown = profile(step(wall_s=85e-6))  # of which 75 are work, and 5 the loader's
    assert shown.idle == pytest.approx({"loader": 5e-6, "sync": 2.5e-6, "launch": 2.5e-6})
    assert sum(bar.seconds for bar in shown.waterfall) == pytest.approx(85e-6)
    assert shown.syncs[0].bubble_s == pytest.approx(2 * 8e-6 / 4)
    assert shown.traced_step_s == pytest.approx(100e-6)
    lanes = [lane for lane in shown.timeline if lane.stream == IDLE_STREAM]
    assert sum(lane.duration_s for lane in lanes) == pytest.approx(25e-6)  # as traced
    longer = profile(step(wall_s=120e-6)).waterfall[-1]
    assert (longer.name, longer.seconds, longer.idle) == (UNTRACED, pytest.approx(20e-6), True)


def test_copies_and_waits() -> None:
    shown = profile(step())
    (copy,) = shown.copies
    assert (copy.name, copy.count, copy.bytes) == ("Memcpy HtoD (Pageable -> Device)", 1, 4096)
    (wait,) = shown.syncs
    assert (wait.call, wait.source, wait.count) == ("cudaStreamSynchronize", "train.py:31", 2)
    assert (wait.waited_s, wait.bubble_s) == pytest.approx((14e-6, 16e-6))


def test_the_waterfall_shares_overlapping_time_and_adds_up() -> None:
    beside = kernel("add", ADD, 60, 20)  # beside the third convolution
    shown = profile(step(kernels=(*KERNELS, beside)))
    bars = {bar.name: bar.seconds for bar in shown.waterfall}
    assert bars["conv"] == pytest.approx(50e-6)
    assert bars["pointwise"] == pytest.approx(20e-6)
    assert bars["sync bubble"] == pytest.approx(10e-6)
    assert sum(bars.values()) == pytest.approx(100e-6)
    assert shown.overlap_s == pytest.approx(20e-6)
    assert [bar.idle for bar in shown.waterfall] == sorted(bar.idle for bar in shown.waterfall)


def test_points_are_groups_with_work() -> None:
    found = {point.name: point for point in profile(step()).points}
    assert set(found) == {"conv a", "conv b", "add"}
    assert (found["conv a"].flops, found["conv a"].pipe) == (8e9, "tensor_bf16")
    assert found["add"].pipe == "cuda_fp32"


def test_the_timeline_shows_work_and_gaps() -> None:
    lanes = timeline(step())
    assert len(lanes) == len(KERNELS) + len(GAPS)
    assert [lane.start_s for lane in lanes] == sorted(lane.start_s for lane in lanes)
    assert {lane.name for lane in lanes if lane.stream == IDLE_STREAM} == {"launch gap", "sync bubble", "loader"}


def test_a_long_timeline_merges_its_shortest_neighbours() -> None:
    tiny = tuple(kernel("tiny", ADD, 2.0 * i, 1.0) for i in range(10_000))
    long = kernel("long", CONV, 20_000, 5_000)
    lanes = timeline(step(kernels=(*tiny, long), gaps=(), duration_s=25e-3))
    assert 100 < len(lanes) <= MOST_LANES
    assert any(lane.name == "long" and lane.duration_s >= 5e-3 for lane in lanes)
    assert max(lane.start_s + lane.duration_s for lane in lanes) == pytest.approx(25e-3)


def test_rows_of_a_real_step_make_up_its_time() -> None:
    path = Path(__file__).parent / "fixtures" / "traces" / "syncing.json.gz"
    shown = profile(step_of(read_trace(path), ceilings=H200))
    assert sum(row.total_s for row in shown.kernels) - shown.overlap_s == pytest.approx(shown.busy_s)
    assert shown.busy_s + sum(shown.idle.values()) == pytest.approx(shown.traced_step_s)
    assert shown.syncs[0].under == "clip_grad_norm_" and shown.syncs[0].bubble_s > 100e-6
    assert shown.kernels[0].category == "norm"
