"""What of a lowered network is tuned, and on which data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.compiler import lower
from ridgeline.kernels import ALL, conv2d_act, detect_topk
from ridgeline.launches import problems_of
from ridgeline.recipe import Recipe


def test_the_problems_of_a_network_are_its_kernel_calls():
    """Weights are the network's own, maps have its strides, and a map that is two arguments is one tensor."""
    shortcut = nn.Conv2d(8, 8, 3, padding=1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = shortcut
            self.act = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.act(self.conv(x))

    graph_module, _ = lower(Net().eval(), [torch.randn(1, 8, 6, 6)], Recipe(dtype="fp32"))
    ((op, arguments),) = problems_of(graph_module, ALL)
    assert op is conv2d_act.OP
    assert arguments["x"] is arguments["residual"]
    assert arguments["x"].is_contiguous(memory_format=torch.channels_last)
    assert arguments["x"].std() > 0.5
    assert torch.equal(arguments["weight"], shortcut.weight)
    assert "x 1x8x6x6" in op.key(**arguments)


def test_detections_are_tuned_on_logits_like_a_detectors():
    """With the strides of the graph's maps; on normal noise half of all scores would be above 0.5."""
    given = detect_topk.SAMPLES[0].arguments(torch.float32, "cpu")
    given["logits_p3"] = torch.zeros(1, 8, 8, 4).contiguous(memory_format=torch.channels_last)[:, 2:7]
    assert detect_topk.OP.launcher.typical is not None
    made = detect_topk.OP.launcher.typical(**given)
    assert made.keys() == given.keys()
    assert all(made[name] is given[name] for name in given if not name.startswith("logits"))
    for name in ("logits_p3", "logits_p4", "logits_p5"):
        assert made[name].shape == given[name].shape and made[name].stride() == given[name].stride()
        assert made[name].mean() < -10
