"""Which passes are worth FP8, by tables and by rooflines."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ridgeline import tuned
from ridgeline.kernels import conv2d_fp8, conv2d_fprop, conv2d_wgrad_fp8
from ridgeline.kernels._quads import from_quads
from ridgeline.roofline import fp8_seconds
from ridgeline.specs import find_spec
from ridgeline.train_rewrites import fp8_prices
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import PASSES

H200 = find_spec("H200")
ALL = frozenset(PASSES)


def convolution(c, k, side, r, *, n=128, device="cpu"):
    return Convolution((n, c, side, side), (k, c, r, r), (r // 2, r // 2), torch.bfloat16, torch.device(device))


WIDE = convolution(256, 256, 32, 3)
SKIP = convolution(384, 128, 32, 1)


def test_a_wide_filter_is_worth_it_and_a_skip_is_not():
    assert fp8_prices.cheapest_passes(WIDE, ALL, H200, by_norm=False) == ALL
    assert fp8_prices.cheapest_passes(SKIP, ALL, H200, by_norm=False) == frozenset()
    # 21 us saved by three passes, and a map quantised at no cost
    assert fp8_prices.cheapest_passes(SKIP, ALL, H200, by_norm=True) == ALL


def test_what_has_no_kernel_is_not_chosen():
    assert fp8_prices.cheapest_passes(WIDE, ALL - {"wgrad"}, H200, by_norm=True) == {"fprop", "dgrad"}
    assert fp8_prices.cheapest_passes(WIDE, frozenset(), H200, by_norm=True) == frozenset()


def test_without_tables_both_times_are_rooflines():
    price = fp8_prices.prices(WIDE, H200)["fprop"]
    flops, x, weight = 2 * 128 * 32 * 32 * 256 * 256 * 9, 128 * 32 * 32 * 256, 256 * 256 * 9
    assert price.bf16_s == pytest.approx(flops / H200.rate("tensor_bf16"))
    assert price.fp8_s == pytest.approx(fp8_seconds(flops, x + weight, 2 * x, H200))
    assert not price.measured


def test_a_map_is_read_and_written_unless_its_norm_writes_it():
    x = 128 * 32 * 32 * 256

    def added(*passes, by_norm):
        seconds = fp8_prices.quantise_seconds(WIDE, frozenset(passes), H200, by_norm=by_norm)
        return seconds * H200.bandwidth / x

    launch, of_x, of_gradient = 2e-6 * H200.bandwidth / x, 40 * 40 / (32 * 32), 1
    assert added(by_norm=True) == 0.0
    assert added("dgrad", by_norm=True) == pytest.approx(3 + launch)
    of_both = (1 + of_x - 2) + (2 + 1 + of_gradient + launch)
    assert added("fprop", "wgrad", by_norm=True) == pytest.approx(of_both)
    # x is read, and written in FP8 and as quads, by a pass of its own
    assert added("fprop", "wgrad", by_norm=False) == pytest.approx(of_both + 4 + launch)
    # wgrad in bf16 reads the bf16 map, which then is written as before
    assert added("fprop", by_norm=True) == added("fprop", by_norm=False) == pytest.approx(3 + launch)


@pytest.fixture
def on_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


def test_bf16_times_are_those_of_the_shipped_tables(on_an_h200):
    found = fp8_prices._bf16_seconds(convolution(128, 128, 32, 3, device="cuda"))
    assert found.keys() == ALL
    table = tuned.load("conv2d_fprop", "NVIDIA H200", conv2d_fprop.OP.source_hash)
    row = table.row("bf16", "padding 1 1, weight 128x128x3x3, x 128x128x32x32")
    assert row is not None
    assert found["fprop"] == min(row.seconds, conv2d_fprop.rival_seconds(row))


def test_measured_times_are_used_where_there_are_both(on_an_h200, monkeypatch):
    load, asked = tuned.load, []

    def with_fp8(name, device, source_hash):
        if name not in ("conv2d_fp8", "conv2d_wgrad_fp8"):
            return load(name, device, source_hash)

        def row(dtype, key):
            asked.append((name, dtype, key))
            return SimpleNamespace(seconds=1e-6) if name == "conv2d_fp8" else None

        return SimpleNamespace(row=row)

    monkeypatch.setattr(tuned, "load", with_fp8)
    prices = fp8_prices.prices(convolution(256, 128, 32, 3, device="cuda"), H200)
    assert [prices[name].measured for name in PASSES] == [True, True, False]
    assert prices["fprop"].fp8_s == prices["dgrad"].fp8_s == 1e-6
    assert asked == [
        ("conv2d_fp8", "torch.float8_e4m3fn", "padding 1 1, weight 128x256x3x3, x 128x256x32x32"),
        ("conv2d_fp8", "torch.float8_e5m2", "padding 1 1, weight 256x128x3x3, x 128x128x32x32"),
        (
            "conv2d_wgrad_fp8",
            "torch.float8_e5m2",
            "dy 128x8x128x8x4x4, kernel_size 3 3, promote 128, x 128x10x256x10x4x4",
        ),
    ]


def test_problems_for_tuning_are_the_passes_of_one_convolution():
    conv = convolution(16, 32, 8, 3, n=2)
    given = {op.name: arguments for op, arguments in conv.problems()}
    x, dy = given["conv2d_fprop"]["x"].float(), given["conv2d_dgrad"]["dy"].float()
    weight = given["conv2d_fprop"]["weight"].float().requires_grad_()
    wide = x.requires_grad_()
    F.conv2d(wide, weight, padding=1).backward(dy)
    (forward, of_x), (back, of_dy), (wgrad, of_weight) = fp8_prices.problems(conv)
    assert (forward, back, wgrad) == (conv2d_fp8.OP, conv2d_fp8.OP, conv2d_wgrad_fp8.OP)
    assert of_x["x"].dtype == torch.float8_e4m3fn and of_dy["x"].dtype == torch.float8_e5m2
    assert from_quads(of_weight["x"], beside=True).shape == x.shape
    assert from_quads(of_weight["dy"], beside=False).shape == dy.shape
    results = (
        (forward(**of_x), F.conv2d(x, weight, padding=1)),
        (back(**of_dy), wide.grad),
        (wgrad(**of_weight)[0], weight.grad),
    )
    for found, exact in results:
        assert exact is not None
        error = (found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < 0.1


def test_keys_of_problems_are_those_that_prices_ask_for():
    conv = convolution(16, 32, 8, 3, n=2)
    keys = [op.key(**arguments) for op, arguments in fp8_prices.problems(conv)]
    asked = []

    def row(_conv, op, _dtype, arguments):
        asked.append(op.key(**arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_prices, "_row", row)
        fp8_prices._fp8_seconds(conv)
    assert asked == keys
