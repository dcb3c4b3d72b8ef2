"""Rules of filling the GPU (K12-K14) and of the roofline (K15, K16, K20) on steps made by hand: each fires, or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.finding import Abstention, Finding
from ridgeline.rules import roof, tiles
from rules.steps_made import H200, US, op, step, work

FULL = {"grid": (132, 1, 1), "block": (256, 1, 1), "registers": 255}  # 65,280 registers: one block an SM


def conv(us: float, side: int = 32, gflop: float = 1.0, *, name: str = "conv2d_bn_silu_tiled", **more):
    """A convolution on a map of that side; `gflop` is its work."""
    call = op("aten::cudnn_convolution", (8, 64, side, side), (64, 64, 3, 3))
    fields = {"flops": gflop * 1e3 * 1e6, "shapes": f"8x64x{side}x{side} * 64x64x3x3", **FULL, **more}
    return work(us, name, category="conv", call=call, op="aten.convolution", **fields)


def only(rule, made):
    return [found for found in rule(made) if isinstance(found, Finding)]


# --- tiles ------------------------------------------------------------------------------------------------------------


def test_one_tile_for_unlike_shapes():
    # the large map runs at 10 µs a GFLOP, the small ones at 50: sigma is larger than the mean
    small = [conv(5, side=8, gflop=0.1) for _ in range(6)]
    made = step(conv(500, side=128, gflop=50), *small, work(100))
    (finding,) = only(tiles.tile_mismatch, made)
    assert finding.saving.low_s == 0
    assert finding.saving.high_s == pytest.approx(6 * 4 * US)
    assert finding.saving.mid_s == pytest.approx(6 * 2 * US)
    assert finding.title.startswith("one tile serves 2 shapes")


def test_the_roofline_limits_what_a_better_tile_brings():
    small = [conv(5, side=8, gflop=0.1, floor_s=3 * US) for _ in range(6)]
    (finding,) = only(tiles.tile_mismatch, step(conv(500, side=128, gflop=50), *small, work(100)))
    assert finding.saving.high_s == pytest.approx(6 * 2 * US)


def test_a_spread_that_vanishes_by_shape_is_no_mismatch():
    # sigma over mean above 1 by name, and yet each shape runs at 10 µs a GFLOP
    small = [conv(5, side=8, gflop=0.5) for _ in range(6)]
    made = step(conv(500, side=128, gflop=50), *small)
    assert tiles._spread(made.kernels) > 1
    assert not only(tiles.tile_mismatch, made)


def test_a_narrow_spread_is_no_mismatch():
    assert not only(
        tiles.tile_mismatch, step(conv(100, gflop=10), conv(90, side=8, gflop=1), conv(80, side=4, gflop=1))
    )


def test_without_shapes_a_spread_cannot_be_judged():
    bare = [work(us, "tiled", category="conv") for us in (500, 5, 5, 5, 5)]
    (abstention,) = tiles.tile_mismatch(step(*bare))
    assert isinstance(abstention, Abstention) and "record_shapes" in abstention.reason


def waves(us: float, blocks: int, **more):
    return conv(us, **{"grid": (blocks, 1, 1), **more})


def test_a_last_wave_that_is_almost_empty():
    (finding,) = only(tiles.wave_quantisation, step(waves(300, 140), work(100)))
    lost = 300 * (1 - 140 / 132 / 2)
    assert finding.saving.high_s == pytest.approx(lost * US)
    assert finding.saving.mid_s == pytest.approx(lost / 2 * US)
    assert finding.saving.low_s == 0
    assert "1.06" in finding.title


@pytest.mark.parametrize(
    "piece",
    [
        waves(300, 264),  # two whole waves
        waves(300, 132 * 9 + 1),  # the tenth wave hardly counts
        waves(300, 132),
        waves(300, 140, name="nvjet_sm90_tst_128x256"),  # persistent: walks its tiles
        waves(300, 140, name="gemm_streamk_kernel"),
        waves(300, 140, registers=0),  # what an SM holds is unknown
        waves(300, 140, registers=64, shared_bytes=60_000),  # shared memory decides, of an unknown size
        waves(300, 200, registers=128),  # two blocks an SM: one wave
    ],
    ids=["whole", "many", "one", "nvjet", "stream-k", "unknown", "shared", "two resident"],
)
def test_waves_that_waste_nothing_or_cannot_be_counted(piece):
    assert not only(tiles.wave_quantisation, step(piece, work(100)))


def test_blocks_an_sm_without_knowing_the_gpu():
    made = step(waves(300, 140, blocks_per_sm=140 / 132), work(100), ceilings=None)
    assert len(only(tiles.wave_quantisation, made)) == 1


def test_a_large_block_stands_alone_whatever_its_registers():
    made = step(waves(300, 140, registers=64, shared_bytes=200_000), work(100))
    assert len(only(tiles.wave_quantisation, made)) == 1


def test_fewer_blocks_than_sms():
    (finding,) = only(tiles.small_grids, step(waves(100, 33), waves(100, 400), work(100)))
    assert finding.saving.high_s == pytest.approx(75 * US)
    assert finding.saving.mid_s == pytest.approx(37.5 * US)
    assert finding.title.startswith("1 kernel of fewer blocks (33") and finding.evidence == (1,)
    assert not only(tiles.small_grids, step(waves(100, 132), work(100)))
    assert not only(tiles.small_grids, step(work(100, grid=(4, 1, 1)), waves(900, 400)))  # a pointwise kernel


# --- the roofline -----------------------------------------------------------------------------------------------------


def depthwise(us: float, floor: float):
    call = op("aten::_conv_depthwise2d", (8, 64, 32, 32), (64, 1, 3, 3))
    return work(us, "conv_depthwise2d_forward_kernel", category="conv", call=call, floor_s=floor * US)


def test_depthwise_far_from_its_bandwidth():
    (finding,) = only(roof.slow_depthwise, step(depthwise(100, 10), work(300)))
    assert finding.saving.mid_s == pytest.approx((100 - 12.5) * US)
    assert finding.saving.high_s == pytest.approx(90 * US)
    assert not only(roof.slow_depthwise, step(depthwise(100, 60), work(300)))
    assert not only(roof.slow_depthwise, step(conv(100, floor_s=10 * US), work(300)))  # not depthwise


def gradient(us: float, gflop: float, pass_: str = "dgrad", floor: float = 1.0):
    shapes = (8, 64, 32, 32), (8, 64, 32, 32), (64, 64, 3, 3)
    call = op("aten::convolution_backward", *shapes)
    fields = {"flops": gflop * 1e3 * 1e6, "pass_": pass_, "floor_s": floor * US, "phase": "backward"}
    return work(us, "cutlass_dgrad", category="conv", call=call, op="aten.convolution_backward", **fields)


def test_a_gradient_at_a_quarter_of_forwards_pace():
    made = step(conv(100, gflop=10, pass_="fprop"), gradient(400, 10), work(300), trained=True)
    (finding,) = only(roof.slow_backward, made)
    assert finding.saving.mid_s == pytest.approx((400 - 125) * US)
    assert finding.saving.high_s == pytest.approx(399 * US)
    # both gradients have twice forward's FLOPs, which is no reason to complain
    fair = step(conv(100, gflop=10, pass_="fprop"), gradient(120, 10), gradient(110, 10, "wgrad"), trained=True)
    assert not only(roof.slow_backward, fair)
    alone = step(conv(100, side=8, gflop=10, pass_="fprop"), gradient(400, 10), trained=True)
    assert not only(roof.slow_backward, alone)  # another problem's forward


def test_a_kernel_far_from_its_roof():
    (finding,) = only(roof.far_from_roof, step(conv(400, floor_s=40 * US), work(300)))
    assert finding.saving.mid_s == pytest.approx((400 - 50) / 2 * US)
    assert finding.saving.high_s == pytest.approx(360 * US)
    assert finding.saving.low_s == 0 and "not a promise" in finding.note


@pytest.mark.parametrize("floor", [200.0, 520.0, None], ids=["near", "above its roof", "no formula"])
def test_a_kernel_that_is_near_its_roof_or_has_none(floor):
    floor_s = None if floor is None else floor * US
    assert not only(roof.far_from_roof, step(conv(400, floor_s=floor_s), work(300)))


def test_what_the_roofline_needs():
    (abstention,) = roof.far_from_roof(step(conv(400), ceilings=None))
    assert "doctor" in abstention.reason
    blind = step(work(400, "sm90_xmma_dgrad", category="conv", pass_="dgrad"))
    for rule in (roof.far_from_roof, roof.slow_backward):
        (abstention,) = rule(blind)
        assert isinstance(abstention, Abstention) and "record_shapes" in abstention.reason
    assert not list(tiles.small_grids(replace(blind, ceilings=None)))
    assert H200.sm_count == 132  # what the numbers above reckon with
