"""trace_forward and trace_train_step: whole nets on fake tensors, the user's module untouched, no memory used."""

from __future__ import annotations

import resource
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

import nets
from ridgeline.cost import CostMode, Trace, trace_forward, trace_train_step
from ridgeline.errors import UsageError


def conv_norm_act() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))


@cache
def step_of(build) -> Trace:
    return trace_train_step(*build())


@pytest.mark.parametrize("build", nets.ALL, ids=lambda build: build.__name__)
def test_every_operator_of_the_nets_trains_known(build):
    step = step_of(build)
    assert step.unknown == ()
    assert step.parameters == sum(parameter.numel() for parameter in build()[0].parameters())
    assert {call.phase for call in step.calls} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("build", [nets.resnet50, nets.convnext_tiny, nets.edm2_block_net], ids=lambda b: b.__name__)
def test_every_operator_of_the_nets_infers_known(build):
    module, inputs = build()
    assert trace_forward(module.eval(), inputs).unknown == ()


def test_resnet_agrees_with_the_stock_counter():
    # every convolution of it is dense, so that the stock counter is right
    module, (x,) = nets.resnet50()
    with FlopCounterMode(display=False) as stock:
        module.to("meta")(x.to("meta")).square().mean().backward()
    calls = step_of(nets.resnet50).calls
    counted = (call for call in calls if call.kind.startswith("conv") or call.kind == "matmul")
    assert sum(call.cost.flops for call in counted) == stock.get_total_flops() > 0


def test_trace_equals_a_real_run():
    net, x = conv_norm_act().eval(), torch.zeros(2, 3, 16, 16)
    with CostMode(net) as mode, torch.no_grad():
        net(x)
    trace = trace_forward(net, x)
    assert [(c.op, c.module, c.shape, c.cost) for c in trace.calls] == [
        (c.op, c.module, c.shape, c.cost) for c in mode.calls
    ]
    assert trace.total == mode.total


def test_dtype_casts_weights_and_inputs_of_inference():
    net, x = conv_norm_act().eval(), torch.zeros(2, 3, 16, 16)
    single, half = trace_forward(net, x), trace_forward(net, x, dtype=torch.float16)
    assert half.weight_bytes * 2 == single.weight_bytes == 4 * single.parameters
    assert half.total.flops == single.total.flops
    assert half.total.bytes * 2 == single.total.bytes
    assert {call.cost.pipe for call in half.calls if "conv" in call.kind} == {"tensor_fp16"}
    tf32 = trace_forward(net, x, tf32=True)
    assert {call.cost.pipe for call in tf32.calls if "conv" in call.kind} == {"tensor_tf32"}


def test_integer_inputs_are_not_cast():
    net = nn.Embedding(10, 4)
    trace = trace_forward(net, (torch.zeros(3, dtype=torch.long),), dtype=torch.float16)
    (call,) = trace.calls
    assert (call.cost.read_bytes, call.cost.write_bytes) == (3 * 4 * 2 + 3 * 8, 3 * 4 * 2)


def snapshot(module: nn.Module) -> tuple:
    tensors = {name: (id(t), t._version, t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in module.modules()]
    return tensors, [m.training for m in module.modules()], hooks, [p.grad for p in module.parameters()]


def test_module_is_untouched():
    net, x = conv_norm_act().train(), torch.randn(2, 3, 16, 16)
    before = snapshot(net)
    trace_forward(net, x)
    trace_train_step(net, x, dtype=torch.bfloat16)
    after = snapshot(net)
    assert before[1:] == after[1:]
    for name, (identity, version, value) in before[0].items():
        assert after[0][name][:2] == (identity, version), name
        assert torch.equal(after[0][name][2], value), name
    assert int(net[1].num_batches_tracked) == 0


def test_mode_of_the_module_decides():
    net, x = conv_norm_act(), torch.zeros(2, 3, 16, 16)
    kinds = {mode: [c for c in trace_forward(net.train(mode), x).calls if c.kind == "norm"] for mode in (True, False)}
    assert kinds[True][0].cost.flops == 4 * kinds[False][0].cost.flops
    assert (kinds[True][0].foldable, kinds[False][0].foldable) == (False, True)


def test_nothing_is_allocated():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(type(x))
            return x

    # 59 M parameters on meta and 64 GiB of activations in fp32: a real run would not fit
    net = nn.Sequential(nn.Linear(7680, 7680, device="meta"), Spy(), nn.ReLU())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = trace_train_step(net, torch.empty(1 << 20, 7680, device="meta"))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert seen == [FakeTensor]
    assert trace.parameters == 7680 * 7681
    assert trace.total.write_bytes > 64 * 2**30
    assert grown_kib < 200 * 1024


def test_train_step_runs_every_part():
    net, x = conv_norm_act(), torch.zeros(2, 3, 16, 16)
    step = trace_train_step(net, x)
    operators = Counter(call.op for call in step.calls if call.phase == "optimizer")
    assert operators["aten._fused_adamw_"] == operators["aten._foreach_norm"] == operators["aten._foreach_lerp_"] == 1
    assert not any("zeros_like" in op for op in operators)  # the optimizer's first step is not the one recorded
    adamw = next(call for call in step.calls if call.op == "aten._fused_adamw_")
    tensors = len(list(net.parameters()))
    assert adamw.cost.bytes == 28 * step.parameters + 8 + 4 * (tensors - 2)
    lerp = next(call for call in step.calls if call.op == "aten._foreach_lerp_")
    assert lerp.cost.bytes == 12 * (step.parameters + 16)  # parameters and BatchNorm's running statistics

    bare = trace_train_step(net, x, clip=None, ema=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
    assert Counter(c.op for c in bare.calls if c.phase == "optimizer") == {"aten._fused_sgd_": 1}


def test_loss_is_the_users():
    net, x, labels = nn.Linear(8, 4), torch.zeros(5, 8), torch.zeros(5, dtype=torch.long)
    step = trace_train_step(net, (x, labels), loss=lambda module, x, labels: F.cross_entropy(module(x), labels))
    assert {"aten.nll_loss_forward", "aten._log_softmax_backward_data"} <= {call.op for call in step.calls}


def test_autocast_follows_cudas_policy():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3))
    step = trace_train_step(net, torch.zeros(2, 3, 16, 16), dtype=torch.bfloat16)
    forward = [call for call in step.calls if call.phase == "forward"]
    pipes = {call.cost.pipe for call in step.calls if call.kind == "conv3x3"}
    assert pipes == {"tensor_bf16"}
    (norm,) = (call for call in forward if call.kind == "norm")
    # CUDA runs group_norm in fp32, the CPU would leave it in bf16
    assert norm.inputs[0].dtype == norm.outputs[0].dtype == torch.float32
    weights = [call for call in forward if call.kind == "copy" and call.module == "3"]
    assert len(weights) == 3  # activation, weight, bias
    assert step.weight_bytes == 4 * step.parameters


def test_attention_and_dropout_are_the_kernels_of_cuda():
    class Block(nn.Module):
        def forward(self, q):
            return F.dropout(F.scaled_dot_product_attention(q, q, q), 0.1, self.training)

    q = torch.zeros(2, 4, 64, 32)
    kinds = Counter(call.kind for call in trace_forward(Block(), q, dtype=torch.float16).calls)
    assert kinds == {"attention": 1, "pointwise": 1}
    three_axes = trace_forward(Block().eval(), q[:, 0])
    assert [call.shape for call in three_axes.calls] == ["q 2x1x64x32, k 2x1x64x32, v 2x1x64x32"]


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    step = trace_train_step(Tied(), torch.zeros(3, 8))
    assert step.parameters == 64
    first, second = [call for call in step.calls if call.kind == "matmul"][:2]
    assert {use.storage for use in first.inputs} & {use.storage for use in second.inputs}


def test_buffers_and_shape_dependent_control_flow():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grid", torch.zeros(1, 1, 8, 8))
            self.constant = torch.ones(8)  # neither parameter nor buffer

        def forward(self, x):
            return x + self.grid if x.shape[-1] == 8 else x * self.constant.sum()

    small, large = (trace_forward(Net(), torch.zeros(1, 1, s, s), dtype=torch.bfloat16) for s in (8, 16))
    assert [call.op for call in small.calls] == ["aten.add"]
    assert small.calls[0].cost.bytes == 3 * 64 * 2
    assert [call.op for call in large.calls] == ["aten.sum", "aten.mul"]


def test_devices_in_the_code_need_not_exist():
    class Net(nn.Module):
        def forward(self, x):
            steps = torch.arange(4, device="cuda:7") + torch.ones(4).to("cuda")
            return x.cuda() + steps.to(device="cuda", dtype=x.dtype) + torch.zeros(4, device=x.device).to(0)

    assert trace_forward(Net(), torch.zeros(4)).unknown == ()


@pytest.mark.parametrize(
    "forward", [lambda x: x[x > 0], lambda x: x * x.sum().item(), lambda x: x if x.sum() > 0 else -x]
)
def test_data_dependent_modules_are_refused(forward):
    class Net(nn.Module):
        def forward(self, x):
            return forward(x)

    with pytest.raises(UsageError, match="Net asks for the values of a tensor"):
        trace_forward(Net(), torch.zeros(4))


def test_modules_that_cannot_be_copied_are_refused():
    module = nn.ReLU()
    module.stream = open(__file__)  # noqa: SIM115
    try:
        with pytest.raises(UsageError, match="ReLU cannot be copied"):
            trace_forward(module, torch.zeros(4))
    finally:
        module.stream.close()


def test_modules_that_cannot_train_are_refused():
    with pytest.raises(UsageError, match="ReLU has no parameter that requires a gradient"):
        trace_train_step(nn.ReLU(), torch.zeros(4))
    with pytest.raises(UsageError, match="pass loss="):
        trace_train_step(Detached(), torch.zeros(4, 4))


class Detached(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x).detach()
