"""letterbox → convolution: one kernel where the canvas is the convolution's alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs import net, rewritten
from ridgeline.kernels import _letterbox
from ridgeline.workloads.frames import FromFrame
from ridgeline.workloads.letterbox import Letterbox

# 9 x 14 → 6 x 10 on a canvas of 8 x 10
FIT = Letterbox(9, 14, 6, 10, left=0, top=1, right=0, bottom=1)
FRAME = torch.randint(0, 256, (9, 14, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
FRAMES = torch.stack([FRAME, FRAME.flip(0)])


def layers() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, 8, 3, 2, 1), "same": nn.Conv2d(3, 3, 3, padding=1), "wide": nn.Conv2d(3, 4, (1, 22)),
        "tall": nn.Conv2d(3, 4, (17, 1), padding=(8, 0)), "each": nn.Conv2d(3, 3, 3, groups=3),
    }  # fmt: skip


def fused(forward, sites: int, frame: Tensor = FRAME, fit: Letterbox = FIT, order: str = "rgb"):
    detector = FromFrame(net(forward, **layers()), fit, order=order)
    # the comparison with float64 hands over its inputs as such; bytes are exact in any dtype
    module = net(lambda m, x: m.detector(x.to(torch.uint8)), detector=detector)
    return rewritten(module, (frame,), "fuse_conv_act", "fuse_letterbox", sites=sites)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.silu(m.conv(x)),
        lambda m, x: m.conv(x),
        lambda m, x: F.conv2d(x, m.conv.weight),
        lambda m, x: F.silu(m.conv(x)).relu() + m.conv.bias[:, None, None],
    ],
    ids=["silu", "no activation", "no bias or padding", "epilogue the kernel does not know"],
)
def test_fires(forward):
    _, found = fused(forward, 1)
    assert found["letterbox_conv_act"] == 1 and found["letterbox"] == found["conv2d_act"] == found["contiguous"] == 0


def test_a_bgr_frame_meets_a_flipped_filter():
    graph_module, found = fused(lambda m, x: m.conv(x), 1, order="bgr")
    assert found["letterbox_conv_act"] == 1 and found["flip"] == 0
    (filters,) = [tensor for name, tensor in graph_module.named_buffers() if name.endswith("_bgr")]
    assert filters.is_contiguous(memory_format=torch.channels_last)


def test_a_batch_of_frames():
    _, found = fused(lambda m, x: F.silu(m.conv(x)), 1, FRAMES)
    assert found["letterbox_conv_act"] == 1 and found["contiguous"] == 0


@pytest.mark.parametrize(
    ("fit", "blend"),
    [
        (FIT, True),
        (Letterbox(9, 14, 9, 14, left=1, top=0, right=1, bottom=2), False),
        (Letterbox(9, 14, 3, 14, left=0, top=3, right=0, bottom=3), False),
        (Letterbox(9, 14, 9, 7, left=0, top=0, right=0, bottom=0), True),
    ],
    ids=["both sides", "only moved", "a third", "one side halved"],
)
def test_blends_only_where_a_table_says_so(fit: Letterbox, blend: bool):
    graph_module, _ = fused(lambda m, x: m.conv(x), 1, fit=fit)
    (node,) = [node for node in graph_module.graph.nodes if "letterbox_conv_act" in str(node.target)]
    assert node.kwargs["blend"] is blend


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (m.conv(x), x),
        lambda m, x: m.conv(x) + m.conv(x * 2),
        lambda m, x: m.same(x) + x,
        lambda m, x: m.conv(x.relu()),
        lambda m, x: m.conv(x[:, :, 1:]),
        lambda m, x: F.conv2d(x, m.conv.weight * 2),
        lambda m, x: m.wide(F.pad(x, (6, 6))) + m.wide(F.pad(x, (6, 6))),
        lambda m, x: m.wide(torch.cat([x, x, x], 3)),
        lambda m, x: m.tall(x),
        lambda m, x: m.each(x),
        lambda m, x: F.max_pool2d(x, 2),
    ],
    ids=[
        "canvas returned", "canvas of two readers", "residual", "operator between", "slice between", "computed weight",
        "padded by an operator", "three canvases side by side", "filter too tall", "depthwise", "no convolution",
    ],
)  # fmt: skip
def test_does_not_fire(forward):
    _, found = fused(forward, 0)
    assert found["letterbox_conv_act"] == 0 and found["letterbox"] == 1


def test_does_not_fire_on_a_filter_too_wide():
    fit = Letterbox(9, 14, 6, 24, left=0, top=1, right=0, bottom=1)
    assert fused(lambda m, x: m.wide(x), 0, fit=fit)[1]["conv2d_act"] == 1


def test_does_not_fire_on_tables_that_are_computed():
    def forward(m, frame):
        frames = frame.to(torch.uint8).permute(2, 0, 1)[None]
        rows = m.rows + 0
        return m.conv(_letterbox.OPERATOR(frames, rows, m.columns, dtype=m.conv.weight.dtype))

    tables = {
        "rows": _letterbox.axis_table(9, 6, 1, 1, vertical=True),
        "columns": _letterbox.axis_table(14, 10, 0, 0, vertical=False),
    }
    module = net(forward, conv=nn.Conv2d(3, 8, 3), **tables)
    _, found = rewritten(module, (FRAME,), "fuse_conv_act", "fuse_letterbox", sites=0)
    assert found["letterbox"] == 1


def test_a_frame_in_another_layout_is_copied_once():
    """A crop of a larger frame: its rows lie further apart than the kernel reads them."""
    _, found = fused(lambda m, x: m.conv(x), 1, FRAME.repeat(1, 2, 1)[:, 7:21])
    assert found["letterbox_conv_act"] == 1 and found["contiguous"] == 1
