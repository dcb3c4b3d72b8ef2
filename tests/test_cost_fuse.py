"""Fusion: which calls share a kernel, what the kernel moves, and how long the chain of kernels is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nets
from ridgeline.cost import (
    Cost,
    CostMode,
    chain_length,
    fuse,
    register_cost,
    trace_forward,
    trace_train_step,
    unfused,
    unregister_cost,
)

HALF = 2  # bytes an element of fp16
X = torch.zeros(1, 8, 16, 16)
MAP = X.numel() * HALF


class Fn(nn.Module):
    """A module around a function of (its layers, x)."""

    def __init__(self, fn, **layers: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.fn(self, x)


def conv(c: int = 8, k: int = 8, taps: int = 1, **options) -> nn.Conv2d:
    return nn.Conv2d(c, k, taps, padding=taps // 2, bias=False, **options)


def kernels(fn, x=X, *, train: bool = False, **layers: nn.Module):
    """Fused kernels of one function: inference in fp16."""
    trace = trace_forward(Fn(fn, **layers).train(train), x, dtype=torch.float16)
    return fuse(trace.calls, results=trace.results)


def moved(kernel) -> tuple[int, int]:
    return kernel.cost.read_bytes, kernel.cost.write_bytes


def test_convolution_swallows_batch_norm_and_activation():
    fused = kernels(lambda m, x: F.silu(m.n(m.c(x))), c=conv(taps=3), n=nn.BatchNorm2d(8))
    (kernel,) = fused
    assert [call.op for call in kernel.calls] == ["aten.convolution", "aten.native_batch_norm", "aten.silu"]
    assert moved(kernel) == (MAP + 8 * 8 * 9 * HALF, MAP)  # the norm's constants are in the weights
    assert kernel.cost.flops == 2 * X.numel() * 8 * 9 + 4 * X.numel()  # its FLOPs are gone, SiLU's are not
    assert kernel.cost.pipe == "tensor_fp16"
    assert (kernel.kind, kernel.module, kernel.phase, kernel.gemm.k) == ("conv3x3", "c", "forward", 72)


def test_training_batch_norm_keeps_its_kernel():
    fused = kernels(lambda m, x: F.silu(m.n(m.c(x))), train=True, c=conv(), n=nn.BatchNorm2d(8))
    assert [kernel.kind for kernel in fused] == ["conv1x1", "pointwise", "norm"]  # the pointwise one counts batches
    assert [call.op for call in fused[2].calls] == ["aten.native_batch_norm", "aten.silu"]
    assert fused[2].cost.flops == 8 * X.numel() + 4 * X.numel()


def test_batch_norm_does_not_fold_where_the_raw_output_is_needed():
    fused = kernels(lambda m, x: m.n(y := m.c(x)) + y, c=conv(), n=nn.BatchNorm2d(8))
    (kernel,) = fused
    assert kernel.cost.flops == 2 * X.numel() * 8 + 2 * X.numel() + X.numel()


def test_pre_activation_norm_of_a_concat_joins_its_consumer():
    fused = kernels(
        lambda m, x: m.c(F.relu(m.n(torch.cat([m.a(x), x], 1)))), a=conv(), n=nn.BatchNorm2d(16), c=conv(16)
    )
    assert [kernel.kind for kernel in fused] == ["conv1x1", "conv1x1"]
    assert moved(fused[1])[0] == 2 * MAP + 16 * 8 * HALF + 4 * 16 * HALF  # the norm is not free here


def test_residual_adds_one_external_read():
    plain = kernels(lambda m, x: m.b(m.a(x)), a=conv(), b=conv())
    residual = kernels(lambda m, x: m.b(m.a(x)) + x, a=conv(), b=conv())
    assert len(plain) == len(residual) == 2
    assert residual[1].cost.read_bytes - plain[1].cost.read_bytes == MAP
    assert residual[1].cost.write_bytes == plain[1].cost.write_bytes == MAP


def test_intermediate_read_elsewhere_is_written():
    fused = kernels(lambda m, x: m.b(F.silu(y := m.a(x))) + y, a=conv(), b=conv())
    assert [len(kernel.calls) for kernel in fused] == [2, 2]
    assert fused[0].cost.write_bytes == 2 * MAP  # before and after the activation


def test_chained_pointwise_convolutions_are_not_merged():
    fused = kernels(lambda m, x: m.b(m.a(x)), a=conv(), b=conv())
    assert [kernel.kind for kernel in fused] == ["conv1x1", "conv1x1"]
    assert chain_length(fused) == 2


def test_concat_is_its_parts():
    fused = kernels(lambda m, x: m.c(torch.cat([m.a(x), m.b(x), x], 1)), a=conv(), b=conv(), c=conv(24, 8))
    assert len(fused) == 3
    assert moved(fused[2]) == (3 * MAP + 24 * 8 * HALF, MAP)
    assert fused[2].depends_on == {0, 1}
    assert chain_length(fused) == 2


def test_kept_concat_costs_its_parts_only():
    fused = kernels(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), a=conv(), b=conv())
    assert [moved(kernel)[1] for kernel in fused] == [MAP, MAP]


def test_split_and_chunk_are_views():
    fused = kernels(lambda m, x: m.b(m.a(x).chunk(2, 1)[1]), a=conv(), b=conv(4, 8))
    assert moved(fused[1]) == (MAP // 2 + 4 * 8 * HALF, MAP)


def test_upsample_reads_the_source():
    fused = kernels(lambda m, x: m.b(F.interpolate(m.a(x), scale_factor=2)), a=conv(), b=conv())
    assert [kernel.kind for kernel in fused] == ["conv1x1", "conv1x1"]
    assert moved(fused[1]) == (MAP + 64 * HALF, 4 * MAP)


def test_upsample_inside_a_concat():
    fused = kernels(lambda m, x: m.b(torch.cat([F.interpolate(m.a(x), scale_factor=2), F.pad(x, (0, 16, 0, 16))], 1)),
                    a=conv(), b=conv(16, 8))  # fmt: skip
    assert moved(fused[1]) == (2 * MAP + 128 * HALF, 4 * MAP)


def test_first_normalisation_joins_its_consumer():
    fused = kernels(lambda m, x: m.c(x / 255), c=conv())
    (kernel,) = fused
    assert [call.op for call in kernel.calls] == ["aten.div", "aten.convolution"]
    assert moved(kernel) == (MAP + 64 * HALF, MAP)
    assert kernel.anchor.op == "aten.convolution"


def test_pointwise_chain_alone_is_one_kernel():
    (kernel,) = kernels(lambda _, x: (x + 1) * x - 2)
    assert moved(kernel) == (MAP, MAP)
    assert kernel.cost.flops == 3 * X.numel()


def test_squeeze_excite_gate_joins_the_convolution_that_reads_it():
    def block(m, x):
        y = m.a(x)
        return m.c(y * m.b(y.mean((2, 3), keepdim=True)).sigmoid())

    fused = kernels(block, a=conv(), b=conv(), c=conv())
    assert [kernel.kind for kernel in fused] == ["conv1x1", "reduction", "conv1x1", "conv1x1"]
    assert fused[3].cost.read_bytes == MAP + 8 * HALF + 64 * HALF
    assert fused[3].depends_on == {0, 2}


def test_normalisation_by_a_norm_is_one_kernel():
    (kernel,) = kernels(lambda _, x: x / x.flatten(1).norm(dim=1)[:, None, None, None])
    assert kernel.kind == "reduction"
    assert moved(kernel)[0] == MAP


def test_independent_branches_are_summed_by_their_reader():
    fused = kernels(lambda m, x: m.c(m.a(x) + m.b(x)), a=conv(), b=conv(taps=3), c=conv())
    assert chain_length(fused) == 2
    assert moved(fused[2])[0] == 2 * MAP + 64 * HALF
    # where the reader is no anchor, the later branch adds
    fused = kernels(lambda m, x: m.c(F.relu(m.a(x) + m.b(x))), a=conv(), b=conv(taps=3), c=conv())
    assert chain_length(fused) == 3
    assert moved(fused[2])[0] == MAP + 64 * HALF


def test_in_place_activation():
    (kernel,) = kernels(lambda m, x: F.relu_(m.a(x)), a=conv())
    assert moved(kernel) == (MAP + 64 * HALF, MAP)


def test_slices_of_a_buffer_filled_in_place():
    def fill(m, x):
        buffer = x.new_empty(1, 16, 16, 16)
        buffer[:, :8].copy_(m.a(x))
        buffer[:, 8:].copy_(m.b(x))
        return m.c(buffer)

    fused = kernels(fill, a=conv(), b=conv(), c=conv(16, 8))
    reader = fused[-1]
    assert {fused[index].anchor.module for index in reader.depends_on} == {"a", "b"}
    assert reader.cost.read_bytes == 2 * MAP + 128 * HALF


def test_naive_attention_is_one_kernel_unless_backward_needs_the_scores():
    q = torch.zeros(2, 4, 64, 32)
    (kernel,) = kernels(lambda _, x: (x @ x.transpose(-2, -1) * 0.5).softmax(-1) @ x, q)
    assert (kernel.kind, kernel.gemm) == ("attention", None)
    assert moved(kernel) == (q.numel() * HALF, q.numel() * HALF)
    assert len(kernel.calls) == 4

    layer = Fn(lambda m, x: (m.p(x) @ x.transpose(-2, -1)).softmax(-1) @ x, p=nn.Linear(32, 32))
    step = trace_train_step(layer, q)
    assert "softmax" in {kernel.kind for kernel in fuse(step.calls, results=step.results)}


def test_unread_indices_and_statistics_are_not_written():
    fused = kernels(lambda m, x: F.max_pool2d(m.a(x), 2), a=conv())
    assert moved(fused[1]) == (MAP, MAP // 4)


def test_dropout_noise_joins_the_kernel_it_meets():
    norm = nn.GroupNorm(2, 8)
    trace = trace_forward(Fn(lambda m, x: m.n(x) * torch.rand_like(x), n=norm), X)
    (kernel,) = fuse(trace.calls, results=trace.results)
    assert {call.op for call in kernel.calls} == {"aten.native_group_norm", "aten.rand_like", "aten.mul"}


def test_unknown_operator_is_an_opaque_kernel():
    @torch.library.custom_op("ridgeline_test::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    opaque.register_fake(torch.empty_like)
    a = conv().requires_grad_(False)

    def run():
        with CostMode() as mode:
            opaque(a(X)).relu_()
        return fuse(mode.calls)

    fused = run()
    assert [(kernel.kind, kernel.cost is None) for kernel in fused] == [
        ("conv1x1", False),
        ("other", True),
        ("pointwise", False),
    ]
    register_cost("ridgeline_test::opaque", lambda x: Cost(x.numel(), 3 * x.nbytes, x.nbytes))
    try:
        fused = run()
        assert len(fused) == 2
        assert moved(fused[1]) == (3 * X.nbytes, X.nbytes)  # the formula's own bytes count
    finally:
        unregister_cost("ridgeline_test::opaque")


def folded_flops(calls) -> int:
    """FLOPs of batch norms with fixed statistics: all of those in these nets follow a convolution."""
    return sum(call.cost.flops for call in calls if call.foldable)


@pytest.mark.parametrize("build", [nets.yolo_like, nets.edm2_block_net], ids=lambda b: b.__name__)
def test_flops_are_conserved_and_order_is_valid(build):
    module, inputs = build()
    forward = trace_forward(module.eval(), inputs, dtype=torch.float16)
    step = trace_train_step(module.train(), inputs, dtype=torch.bfloat16)
    for trace, folded in ((forward, folded_flops(forward.calls)), (step, 0)):
        fused = fuse(trace.calls, results=trace.results)
        assert sum(kernel.cost.flops for kernel in fused) + folded == trace.total.flops
        assert sum(kernel.cost.bytes for kernel in fused) < trace.total.bytes
        placed = [id(call) for kernel in fused for call in kernel.calls]
        assert len(placed) == len(set(placed)) <= len(trace.calls)
        for table in (fused, unfused(trace.calls)):
            assert all(max(kernel.depends_on, default=-1) < index for index, kernel in enumerate(table))
        assert chain_length(fused) < chain_length(unfused(trace.calls))


def test_train_step_writes_what_outlives_it():
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    step = trace_train_step(net, torch.zeros(4, 8))
    fused = fuse(step.calls, results=step.results)
    written = {kernel.anchor.op: kernel.cost.write_bytes for kernel in fused if kernel.kind == "optimizer"}
    assert written["aten._fused_adamw_"] == 3 * 4 * 64
    assert written["aten._foreach_lerp_"] == 4 * 64
    wgrad = next(kernel for kernel in fused if kernel.phase == "backward" and kernel.kind == "matmul")
    assert wgrad.cost.write_bytes == 4 * 64


def test_empty_program():
    assert fuse([]) == unfused([]) == ()
    assert chain_length(()) == 0
