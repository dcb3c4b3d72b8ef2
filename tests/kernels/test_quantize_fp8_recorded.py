"""quantize_fp8_recorded: the map and its quads beside PyTorch's own casts, bit for bit, recorded without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.cost import cost_of
from ridgeline.kernels import quantize_fp8
from ridgeline.kernels._nhwc import random_nhwc
from ridgeline.kernels._op import typical_target
from ridgeline.kernels._quads import quads_shape, to_quads
from ridgeline.kernels._quantize_fp8 import FORMATS
from ridgeline.kernels._quantize_fp8_call import CONFIGS
from ridgeline.kernels.quantize_fp8 import RECORDED, quads_plan, quantized

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def nothing_seen(rows: int = 1) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, device=DEVICE), torch.zeros(rows, 3, dtype=torch.int64, device=DEVICE)


def codes(y: Tensor) -> Tensor:
    """The bytes of FP8 values, all NaN alike: only some conversions keep its sign."""
    return y.view(torch.uint8).where(~y.float().isnan(), 0x7F)


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("fp8_format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 48, 4, 16), (5, 16, 4, 4), (1, 80, 16, 32)])
def test_recorded_makes_quads_and_no_version(
    shape: tuple[int, int, int, int], fp8_format: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch
):
    """y as quantize_fp8 makes it, quads of it, one row of what was seen; autograd would not notice."""
    if not interpreted and not HAS_GPU:
        monkeypatch.setattr(quantize_fp8, "INTERPRETED", False)
    x = random_nhwc(shape, torch.float32, DEVICE, seed=0)
    scale = torch.tensor([1.0, 300.0], device=DEVICE)
    amax, counts = nothing_seen(2)
    amax[1], counts[1] = 0.5, 7
    versions = amax._version, counts._version
    y, quads = RECORDED(x, scale, amax, counts, row=1, fp8_format=fp8_format, quads=True)
    assert (amax._version, counts._version) == versions
    expected, _, largest, seen = quantized(x, scale[1], fp8_format=fp8_format)
    assert torch.equal(codes(y), codes(expected)) and y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(codes(quads), codes(to_quads(expected))) and quads.dtype == y.dtype
    assert amax.tolist() == [0.0, max(0.5, largest.item())]
    assert torch.equal(counts, torch.stack([torch.zeros_like(seen[0]), seen[0] + 7]))
    again, nothing = RECORDED(x, scale, amax, counts, row=0, fp8_format=fp8_format)
    assert nothing.numel() == 0 and again.dtype == y.dtype and amax[0] == largest[0]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 16, 6, 8), "quads need a multiple of 4 rows, got 6"),
        ((2, 16, 8, 12), "quads need 4, 8, 16 or a multiple of 32 columns, got 12"),
        ((32, 16), "only maps .* have quads"),
    ],
)
def test_maps_without_quads_are_refused(shape: tuple[int, ...], words: str):
    x = torch.randn(shape, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    with pytest.raises(ValueError, match=words):
        RECORDED(x, torch.ones(1, device=DEVICE), *nothing_seen(), row=0, fp8_format="e4m3", quads=True)


def test_a_slice_of_channels_and_what_is_not_finite():
    x = random_nhwc((2, 48, 8, 8), torch.float32, DEVICE, seed=0)
    x[0, 17, 3, 2], x[1, 20, 7, 7] = float("nan"), float("inf")
    part = x[:, 16:32]
    amax, counts = nothing_seen()
    y, quads = RECORDED(part, torch.ones(1, device=DEVICE), amax, counts, row=0, fp8_format="e4m3", quads=True)
    expected = quantized(part, torch.ones(1, device=DEVICE), fp8_format="e4m3")[0]
    assert torch.equal(codes(y), codes(expected)) and torch.equal(codes(quads), codes(to_quads(expected)))
    assert amax.isnan().all() and counts[0, 2] == part.numel()


def test_every_tile_makes_the_same():
    x = random_nhwc((3, 80, 8, 8), torch.float32, DEVICE, seed=0)
    expected = quantized(x, torch.ones(1, device=DEVICE), fp8_format="e5m2")
    for config in CONFIGS:
        seen = nothing_seen()
        launch = quads_plan(x=x, scale=torch.ones(1, device=DEVICE), fp8_format="e5m2", seen=seen, config=config)
        launch.arguments["words_ptr"].fill_(0x55555555)
        launch.run()
        words = launch.arguments["words_ptr"].view(torch.uint8).view(quads_shape(*x.shape))
        assert torch.equal(launch.output.view(torch.uint8), expected[0].view(torch.uint8)), config
        assert torch.equal(words, to_quads(expected[0]).view(torch.uint8)), config
        assert torch.equal(seen[0], expected[2]) and torch.equal(seen[1], expected[3]), config


def test_registration():
    x = random_nhwc((2, 16, 8, 4), torch.float32, DEVICE, seed=0)
    arguments: dict[str, Any] = {"row": 0, "fp8_format": "e4m3"}
    given = (x, torch.ones(1, device=DEVICE), *nothing_seen())
    for quads in (False, True):
        checked = torch.library.opcheck(RECORDED, given, {**arguments, "quads": quads}, test_utils="test_faketensor")
        assert set(checked.values()) == {"SUCCESS"}
    assert torch.Tag.needs_exact_strides in RECORDED.tags and not RECORDED._schema.is_mutable
    work = cost_of(RECORDED, given, {**arguments, "quads": True})
    # rows that lie beside a quarter are there twice
    assert work.write_bytes == x.numel() + 16 * 2 * (2 + 2) * 4 * 4 + 28 and work.read_bytes == x.nbytes + 4


def test_an_empty_batch():
    x = torch.empty(0, 16, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    y, quads = RECORDED(x, torch.ones(1, device=DEVICE), *nothing_seen(), row=0, fp8_format="e4m3", quads=True)
    assert y.shape == x.shape and quads.shape == quads_shape(*x.shape)


def test_two_programs_share_the_map_of_a_usual_batch():
    x = torch.empty((128, 128, 32, 32), dtype=torch.bfloat16, device="meta").to(memory_format=torch.channels_last)
    seen = torch.empty(1, device="meta"), torch.empty(1, 3, dtype=torch.int64, device="meta")
    scale, target = torch.empty(1, device="meta"), typical_target("sm_90")
    launch = quads_plan(x=x, scale=scale, fp8_format="e4m3", seen=seen, target=target)
    tile = launch.constants["BLOCK_P"] * launch.constants["BLOCK_C"]
    assert launch.grid == (x.numel() // tile,)
