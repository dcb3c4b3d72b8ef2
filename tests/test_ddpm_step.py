"""The whole training step of the DDPM, as AOTAutograd gets it, in a process that runs operators by reference."""

from __future__ import annotations

from without_interpreter import output_of

PROGRAM = """
from collections import Counter
from dataclasses import replace
import torch
from fp8_steps import Aot, capture, fp8_by_reference
from ridgeline.kernels import conv2d_wgrad_fp8, group_norm_silu_backward_fp8
from ridgeline.launches import kernel_calls, planned
from ridgeline.models.ddpm_unet import UNet
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import NAMED
from ridgeline.train_step import TrainStep
from ridgeline.workloads.ddpm_ladder import Conditions
from ridgeline.workloads.diffusion import linear_schedule, noise_loss

model = UNet(Conditions().network).to(memory_format=torch.channels_last)
parts = Parts(model, noise_loss(linear_schedule()), torch.optim.AdamW(model.parameters(), lr=1e-4))
program = StepProgram(parts, replace(NAMED["fp8"], optimizer_kernel="never"))
program.backend.compiler = compiler = Aot(program._see)
images = torch.zeros(1, 3, 32, 32).to(memory_format=torch.channels_last)
with fp8_by_reference():
    step = TrainStep(program, images, capture=capture)
    loss = step(images).item()
report = step.report
names = "use_fp8", "fuse_attention", "fuse_residual_add"
print(report.replays, 0.5 < loss < 2, *(report.rewrites[name] for name in names))
print(report.fp8[0].partition(";")[0])
print(*(line.partition(":")[0] for line in report.fp8[1:]))
for graph in compiler.graphs:
    operators = [node for node in graph.graph.nodes if str(node.target).startswith("ridgeline.")]
    assert list(kernel_calls(graph)) == operators
    print(sum(len(planned(node, "meta")) > 0 for node in operators) == len(operators) > 100)
_, backward = compiler.graphs
summing = list(backward.graph.find_nodes(op="call_function", target=group_norm_silu_backward_fp8.SUMMED))
wgrads = backward.graph.find_nodes(op="call_function", target=conv2d_wgrad_fp8.OP.overload)
print(len(summing), *sorted(Counter(node.kwargs.get("bias", True) for node in wgrads).items()))
"""


def test_every_operator_of_the_whole_step_has_its_kernels():
    """All passes of all layers but the first and the last, where no chooser says what pays.

    Every norm whose gradient is in FP8 sums that of a bias; those that add a gradient sum those of others.
    """
    assert output_of(PROGRAM) == [
        "1 True 74 13 31",
        "FP8 runs fprop of 74, dgrad of 74, wgrad of 74 of 50 convolutions and 26 linear layers",
        "conv_in.weight conv_out.weight",
        "True",
        "True",
        "38 (False, 55) (True, 19)",
    ]


BF16 = """
from collections import Counter
from dataclasses import replace
import pytest
import torch
from fp8_steps import Aot, capture, fp8_by_reference
from ridgeline.kernels import conv2d_fprop
from ridgeline.models.ddpm_unet import UNet
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import NAMED
from ridgeline.train_rewrites import overlap_weight_gradients
from ridgeline.train_step import TrainStep
from ridgeline.workloads.ddpm_ladder import Conditions
from ridgeline.workloads.diffusion import linear_schedule, noise_loss
from shared_kernels import plant_rows

ops = "conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"
plant_rows(pytest.MonkeyPatch(), dict.fromkeys(ops, (1e-5, 3e-5, 2e-5)), conv2d_fprop)
model = UNet(Conditions().network).to(memory_format=torch.channels_last)
parts = Parts(model, noise_loss(linear_schedule()), torch.optim.AdamW(model.parameters(), lr=1e-4))
program = StepProgram(parts, replace(NAMED["bf16"], optimizer_kernel="never"))
program.backend.compiler = compiler = Aot(program._see)
images = torch.zeros(1, 3, 32, 32).to(memory_format=torch.channels_last)
with fp8_by_reference():
    step = TrainStep(program, images, capture=capture)
    loss = step(images).item()
names = "use_convolutions", "fuse_attention", "fuse_residual_add"
print(0.5 < loss < 2, *(step.report.rewrites[name] for name in names))
print(*step.report.convolutions)
for graph in compiler.graphs:
    calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    print(*(calls[f"ridgeline.{name}.default"] for name in ops), calls["aten.addmm.default"], calls["aten.mm.default"])
overlap_weight_gradients.apply(compiler.graphs[1])
calls = Counter(str(node.target) for node in compiler.graphs[1].graph.nodes)
names = "attention_packed_backward_summed", "attention_packed_backward", "sum_dim_IntList_beside"
print(*(calls[f"ridgeline.{name}.default"] for name in names))
"""


def test_every_linear_layer_of_the_whole_bf16_step_is_a_convolution():
    """Two of each of 13 attentions; but the three of the time embedding, of which one is that of all blocks.

    Eight more convolutions read two maps, forward and for their weights.

    Every projection adds its residual. Every attention sums the gradient of the bias of q, k and v over its tokens, and
    what is left to sum, over images, is put beside the rest.
    """
    assert output_of(BF16) == [
        "True 76 13 31",
        "150 passes of convolutions and 78 of linear layers take 2.28 ms for PyTorch's 5.79 ms by the tables: "
        "fprop 76, dgrad 76, wgrad 76 by this project's kernels, the others by PyTorch's",
        "68 0 0 3 0",
        "0 75 68 0 5",
        "13 0 13",
    ]
