"""CostMode: which kernels it sees, where it files them, and what it does with operators it does not know."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

from ridgeline.cost import ConvProblem, Cost, CostMode, conv_forward, register_cost, unregister_cost


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x))) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def costs(mode: CostMode) -> list:
    return [(call.op, call.shape, call.cost) for call in mode.calls]


def test_real_meta_and_fake_tensors_cost_the_same():
    def run(net, x):
        with CostMode(net) as mode:
            net(x).sum().backward()
        return costs(mode)

    real = run(Net(), torch.zeros(2, 3, 8, 8))
    assert real
    assert run(Net().to("meta"), torch.zeros(2, 3, 8, 8, device="meta")) == real
    with FakeTensorMode():
        fake = run(Net(), torch.zeros(2, 3, 8, 8))
    assert fake == real


def test_inference_mode_sees_what_no_grad_sees():
    # known-traps row 11 (pytorch #126268): the stock counter once said 0 under inference_mode
    net, x = Net().eval(), torch.zeros(2, 3, 8, 8)
    with CostMode(net) as no_grad, torch.no_grad():
        net(x)
    with CostMode(net) as inference, torch.inference_mode():
        net(x)
    assert inference.total.flops > 0
    assert costs(inference) == costs(no_grad)
    assert [call.module for call in inference.calls] == [call.module for call in no_grad.calls]


def test_autocast_casts_and_pipes_are_seen():
    net, x = nn.Conv2d(8, 8, 3), torch.zeros(1, 8, 8, 8)
    with CostMode(net) as mode, torch.autocast("cpu", torch.bfloat16):
        net(x)
    assert [call.kind for call in mode.calls].count("copy") == 3  # x, weight, bias
    assert mode.calls[-1].cost.pipe == "tensor_bf16"


def test_modules_and_phases_forward_and_backward():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
    with CostMode(net) as mode:
        net(torch.zeros(2, 3, 8, 8)).sum().backward()  # the input needs no gradient: the stem is still found
        optimizer.step()
    places = {(call.phase, call.kind, call.module) for call in mode.calls}
    for phase in ("forward", "backward"):
        assert (phase, "conv3x3", "stem") in places
        for block in ("blocks.0", "blocks.1"):
            assert (phase, "conv3x3", f"{block}.conv") in places
            assert (phase, "norm", f"{block}.norm") in places
            assert (phase, "pointwise", block) in places  # the activation
        assert (phase, "matmul", "head") in places
    assert {call.kind for call in mode.calls if call.phase == "optimizer"} == {"optimizer"}
    assert {call.phase for call in mode.calls if "backward" in call.op} == {"backward"}
    convs = [call.module for call in mode.calls if call.op == "aten.convolution_backward" and "wgrad" in call.shape]
    assert convs == ["blocks.1.conv", "blocks.0.conv", "stem"]


def test_module_inside_a_custom_function_and_a_checkpoint():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Doubling(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Residual(), Doubling()

        def forward(self, x):
            return self.second(checkpoint(self.first, x, use_reentrant=False))

    net = Outer()
    with CostMode(net) as mode:
        net(torch.zeros(1, 4, 8, 8)).sum().backward()
    muls = [(call.phase, call.module) for call in mode.calls if call.op == "aten.mul"]
    assert muls == [("forward", "second"), ("backward", "second")]
    convs = [(call.phase, call.module) for call in mode.calls if call.op == "aten.convolution"]
    assert convs == [("forward", "first.conv"), ("backward", "first.conv")]  # the checkpoint runs it again in backward


def test_modules_outside_the_root_go_by_class_name():
    net, x = Net(), torch.zeros(1, 3, 8, 8)
    with CostMode() as mode:
        net(x)
        torch.zeros(3) + 1
    assert mode.calls[0].module == "Net.stem"
    assert mode.calls[-1].module == ""


def test_phase_can_be_named():
    x = torch.zeros(3)
    with CostMode() as mode:
        x + 1
        with mode.phase("optimizer"):
            x + 1
    assert [call.phase for call in mode.calls] == ["forward", "optimizer"]


def test_storages_tell_dependencies():
    x = torch.zeros(4, 4)
    with CostMode() as mode:
        y = x + 1
        y[:2].mul_(2)
    add, mul = mode.calls
    assert add.inputs[0].storage == mode.storage_number(x)
    assert add.outputs[0].storage == mul.inputs[0].storage == mul.outputs[0].storage == mode.storage_number(y)
    assert add.outputs[0].whole
    assert not mul.outputs[0].whole
    assert (mul.inputs[0].numel, mul.inputs[0].bytes, mul.inputs[0].dtype) == (8, 32, torch.float32)


def test_freed_memory_gets_no_second_number():
    x = torch.zeros(1 << 16)
    with CostMode() as mode:
        for _ in range(20):
            x + 1  # freed at once, so that the allocator hands the same block out again
    assert len({call.outputs[0].storage for call in mode.calls}) == 20


def test_hooks_are_gone_afterwards_even_after_an_error():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("planted")

    mode = CostMode()
    with pytest.raises(RuntimeError, match="planted"), mode:
        Broken()(torch.zeros(1))
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks
    with mode:  # usable again, with an empty stack
        torch.zeros(1) + 1
    assert mode.calls[-1].module == ""


@torch.library.custom_op("ridgeline_test::conv", mutates_args=())
def custom_conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w)


@torch.library.custom_op("ridgeline_test::scale_", mutates_args=("x",))
def custom_scale_(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


def test_unknown_operators_are_counted_then_registered():
    # known-traps row 11 (pytorch #131041): custom operators silently counted as 0
    x, w = torch.zeros(1, 8, 16, 16), torch.zeros(4, 8, 3, 3)

    def run():
        with CostMode() as mode:
            custom_conv(x, w)
            custom_conv(x, w)
            custom_scale_(x, 2.0)
            x + 1
        return mode

    mode = run()
    assert mode.unknown == (("ridgeline_test.conv", 2), ("ridgeline_test.scale_", 1))
    unknown = mode.calls[0]
    assert (unknown.cost, unknown.kind, unknown.shape) == (None, "other", "1x8x16x16, 4x8x3x3")
    assert mode.total == mode.calls[-1].cost  # a lower bound: what is known
    assert mode.calls[2].outputs[0].storage == mode.storage_number(x)  # the schema says x is written

    def formula(x, w):
        return conv_forward(ConvProblem(1, x.shape[1], w.shape[0], x.shape[2:], w.shape[2:]), x.dtype)

    register_cost("ridgeline_test::conv", formula, kind="conv3x3")
    register_cost(torch.ops.ridgeline_test.scale_, lambda x, factor: Cost(x.numel(), x.nbytes, x.nbytes))
    try:
        mode = run()
        assert mode.unknown == ()
        assert mode.calls[0].cost == Cost(2 * 4 * 8 * 9 * 14 * 14, 4 * (2048 + 288), 4 * 4 * 14 * 14)
        assert mode.calls[0].kind == "conv3x3"
        assert mode.calls[2].outputs[0].storage == mode.storage_number(x)
    finally:
        unregister_cost("ridgeline_test::conv")
        unregister_cost("ridgeline_test::scale_")
    assert run().unknown


def test_shapes_in_words():
    with CostMode() as mode:
        torch.zeros(2, 3) @ torch.zeros(3, 4)
        torch.cat([torch.zeros(1, 2) for _ in range(4)])
        torch.zeros(()) + 1
    shapes = {call.op: call.shape for call in mode.calls}
    assert shapes["aten.mm"] == "2x3 @ 3x4"
    assert shapes["aten.cat"] == "1x2, 1x2, 1x2 and 1 more"
    assert shapes["aten.add"] == "scalar"
