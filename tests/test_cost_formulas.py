"""The lecture's numbers, attention, and bytes and FLOPs of single operators against counts made by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.cost import (
    COSTS,
    AttentionProblem,
    Cost,
    CostMode,
    attention_flash,
    attention_naive,
    chain_fused,
    chain_unfused,
    cost_of,
    matmul_cost,
    ops_per_access,
    softmax_fused,
    softmax_naive,
)

aten = torch.ops.aten
FP32, FP16 = torch.float32, torch.float16


def recorded(fn, *args) -> Cost:
    """Cost of everything `fn` runs."""
    with CostMode() as mode:
        fn(*args)
    assert mode.unknown == ()
    return mode.total


def test_elementwise_chain_of_the_lecture():
    # E = D + (A + B) * C: three loops of two loads, one store, one operation; fused: four loads, one store
    unfused, fused = chain_unfused(3, 1000, FP32), chain_fused(3, 1000, FP32)
    assert Fraction(ops_per_access(unfused, FP32)).limit_denominator(100) == Fraction(1, 3)
    assert Fraction(ops_per_access(fused, FP32)).limit_denominator(100) == Fraction(3, 5)
    assert unfused.flops == fused.flops == 3000


def test_recorded_chain_has_the_lectures_intensity():
    a, b, c, d = (torch.zeros(100) for _ in range(4))
    cost = recorded(lambda: (a + b) * c + d)
    assert cost == chain_unfused(3, 100, FP32)


def test_softmax_of_the_lecture():
    m, n = 48, 100
    naive, fused = softmax_naive(m, n, FP32), softmax_fused(m, n, FP32)
    assert naive.read_bytes == 4 * (5 * m * n + 2 * m)
    assert naive.write_bytes == 4 * (3 * m * n + 2 * m)
    assert fused.read_bytes == fused.write_bytes == 4 * m * n
    assert naive.flops == fused.flops
    assert naive.bytes / fused.bytes == (8 * m * n + 4 * m) / (2 * m * n)


def test_recorded_softmax_matches_both_forms():
    m, n = 48, 100
    x = torch.randn(m, n)

    def naive():
        shifted = (x - x.amax(1, keepdim=True)).exp()
        return shifted / shifted.sum(1, keepdim=True)

    assert recorded(naive) == softmax_naive(m, n, FP32)
    assert recorded(lambda: x.softmax(1)) == softmax_fused(m, n, FP32)


def test_attention_naive_moves_the_score_matrix_four_times():
    problem = AttentionProblem(batch=2, heads=4, q_len=256, k_len=256, head_dim=64, value_dim=64)
    naive, flash = attention_naive(problem, FP16), attention_flash(problem, FP16)
    assert naive.bytes - flash.bytes == 4 * 2 * problem.score_numel
    assert flash.bytes == 4 * 2 * (2 * 4 * 256 * 64)
    assert flash.flops == 4 * 2 * 4 * 256 * 256 * 64  # 4·B·h·S²·D
    assert problem.backward_flops == 10 * 2 * 4 * 256 * 256 * 64
    assert naive.flops - flash.flops == 5 * problem.score_numel


def test_recorded_attention_matches_both_forms():
    problem = AttentionProblem(2, 4, 32, 48, 64, 64)
    q, k, v = (torch.zeros(2, 4, length, 64) for length in (32, 48, 48))
    naive = recorded(lambda: (q @ k.transpose(-2, -1)).softmax(-1) @ v)
    assert (naive.flops, naive.bytes) == (attention_naive(problem, FP32).flops, attention_naive(problem, FP32).bytes)
    flash = recorded(lambda: F.scaled_dot_product_attention(q, k, v))
    logsumexp = 4 * 2 * 4 * 32
    expected = attention_flash(problem, FP32)
    assert (flash.flops, flash.bytes) == (expected.flops, expected.bytes + logsumexp)


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_gpu_attention_operators_cost_what_the_stock_counter_says(name):
    """Their formulas are called on meta tensors: no GPU is needed to know what a GPU would do."""
    q, k, v, out = (torch.empty(2, 4, length, 64, dtype=FP16, device="meta") for length in (32, 48, 48, 32))
    lse = torch.empty(2, 4, 32, device="meta")
    forward, backward = (getattr(aten, f"_scaled_dot_product_{name}{suffix}") for suffix in ("", "_backward"))
    cost = cost_of(forward, (q, k, v, None, True), {}, (out, lse))
    assert cost.flops == 4 * 2 * 4 * 32 * 48 * 64
    assert cost.read_bytes == 2 * (q.numel() + k.numel() + v.numel())
    assert cost.write_bytes == 2 * out.numel() + 4 * lse.numel()
    assert cost.pipe == "tensor_fp16"
    grads = cost_of(backward, (out, q, k, v, out, lse), {}, (q, k, v))
    assert grads.flops == 10 * 2 * 4 * 32 * 48 * 64


def test_matmul_family():
    a, b = torch.zeros(8, 16), torch.zeros(16, 24)
    assert recorded(lambda: a @ b) == Cost(2 * 8 * 24 * 16, 4 * (128 + 384), 4 * 192)
    bias = torch.zeros(24)
    addmm = recorded(lambda: torch.addmm(bias, a, b))  # the bias is expanded: its 24 elements are read, no FLOPs
    assert (addmm.flops, addmm.read_bytes) == (2 * 8 * 24 * 16, 4 * (128 + 384 + 24))
    batched = recorded(lambda: torch.bmm(torch.zeros(3, 8, 16), torch.zeros(3, 16, 24)))
    assert batched.flops == matmul_cost(8, 24, 16, FP32, count=3).flops
    assert (
        recorded(lambda: torch.einsum("bij,bkj->bik", torch.zeros(2, 3, 5), torch.zeros(2, 7, 5))).flops == 2 * 2 * 105
    )


def test_fp8_and_int8_products():
    left = torch.empty(32, 64, dtype=torch.float8_e4m3fn, device="meta")
    right = torch.empty(64, 16, dtype=torch.float8_e4m3fn, device="meta")
    scale, out = torch.empty((), device="meta"), torch.empty(32, 16, dtype=torch.bfloat16, device="meta")
    cost = cost_of(aten._scaled_mm, (left, right, scale, scale), {"out_dtype": torch.bfloat16}, out)
    assert cost == Cost(2 * 32 * 16 * 64, 32 * 64 + 64 * 16 + 4, 2 * 32 * 16, "tensor_fp8")
    cost = cost_of(aten._int_mm, (left.view(torch.int8), right.view(torch.int8)), {}, out.view(torch.int16))
    assert cost.pipe == "tensor_int8"


X = torch.zeros(2, 8, 16, 16)
NUMEL, SIZE = X.numel(), X.numel() * 4
TABLE = torch.zeros(100, 8)


@pytest.mark.parametrize(
    ("fn", "flops", "read", "write"),
    [
        pytest.param(lambda: F.silu(X), 4 * NUMEL, SIZE, SIZE, id="silu"),
        pytest.param(lambda: X + X, NUMEL, SIZE, SIZE, id="the same operand twice is read once"),
        pytest.param(lambda: X + torch.zeros(8, 1, 1), NUMEL, SIZE + 32, SIZE + 32, id="broadcast, plus its zeros"),
        pytest.param(lambda: X + X[:1].expand(2, -1, -1, -1), NUMEL, SIZE + SIZE // 2, SIZE, id="expanded"),
        pytest.param(lambda: X[:, :4].clone(), 0, SIZE // 2, SIZE // 2, id="slice"),
        pytest.param(lambda: X.clone().add_(1), NUMEL, 2 * SIZE, 2 * SIZE, id="in place reads and writes"),
        pytest.param(lambda: X.to(torch.float16), 0, SIZE, SIZE // 2, id="cast"),
        pytest.param(lambda: torch.cat([X, X[:, :4]], 1), 0, 3 * SIZE // 2, 3 * SIZE // 2, id="cat"),
        pytest.param(lambda: X.permute(0, 2, 3, 1).flatten(1, 2)[0, 1:].t(), 0, 0, 0, id="views"),
        pytest.param(lambda: torch.empty_like(X), 0, 0, 0, id="allocation"),
        pytest.param(lambda: torch.zeros_like(X), 0, 0, SIZE, id="fill"),
        pytest.param(lambda: torch.empty_like(X).copy_(X), 0, SIZE, SIZE, id="copy"),
        pytest.param(lambda: torch.empty_like(X).uniform_(), 0, 0, SIZE, id="random in place"),
        pytest.param(lambda: F.interpolate(X, scale_factor=2), 0, SIZE, 4 * SIZE, id="nearest"),
        pytest.param(lambda: F.interpolate(X, scale_factor=2, mode="bilinear"), 32 * NUMEL, SIZE, 4 * SIZE, id="mix"),
        pytest.param(lambda: F.pad(X, (1, 1, 1, 1)), 0, SIZE, 2 * 8 * 18 * 18 * 4, id="pad"),
        pytest.param(lambda: F.max_pool2d(X, 2), NUMEL, SIZE, NUMEL // 4 * (4 + 8), id="max pool and int64 indices"),
        pytest.param(lambda: F.avg_pool2d(X, 2), NUMEL, SIZE, SIZE // 4, id="average pool"),
        pytest.param(lambda: X.mean((2, 3)), NUMEL, SIZE, 64, id="global pool"),
        pytest.param(lambda: F.group_norm(X, 2), 8 * NUMEL, SIZE, SIZE + 2 * 2 * 2 * 4, id="group norm and statistics"),
        pytest.param(lambda: torch.var_mean(X, (2, 3)), 4 * NUMEL, SIZE, 2 * 64, id="var_mean"),
        pytest.param(lambda: TABLE[torch.zeros(3, dtype=torch.long)], 0, 96 + 24, 96 + 24, id="gather of 3 rows"),
        pytest.param(lambda: F.mse_loss(X, X.clone()), 3 * NUMEL, 3 * SIZE, SIZE + 4, id="mse loss"),
    ],
)  # fmt: skip
def test_single_operators(fn, flops, read, write):
    cost = recorded(fn)
    assert (cost.flops, cost.read_bytes, cost.write_bytes) == (flops, read, write)


def backward_calls(fn, *inputs):
    """Calls of the backward pass of `fn(*inputs)` from a dense gradient, copies left out."""
    out = fn(*[x.requires_grad_() for x in inputs])
    with CostMode() as mode:
        out.backward(torch.ones_like(out))
    assert mode.unknown == ()
    return [call for call in mode.calls if call.kind not in ("copy",) and "ones" not in call.op]


@pytest.mark.parametrize(
    ("fn", "flops", "read", "write"),
    [
        pytest.param(F.silu, 8 * NUMEL, 2 * SIZE, SIZE, id="silu reads x and dy"),
        pytest.param(F.relu, NUMEL, 2 * SIZE, SIZE, id="relu"),
        pytest.param(lambda x: F.max_pool2d(x, 2), NUMEL // 4, SIZE // 4 + NUMEL // 4 * 8, SIZE, id="max pool"),
        pytest.param(lambda x: F.avg_pool2d(x, 2), NUMEL, SIZE // 4, SIZE, id="average pool reads dy alone"),
        pytest.param(lambda x: F.interpolate(x, scale_factor=2), 4 * NUMEL, 4 * SIZE, SIZE, id="nearest"),
        pytest.param(lambda x: x.softmax(1), 4 * NUMEL, 2 * SIZE, SIZE, id="softmax"),
        pytest.param(lambda x: F.group_norm(x, 2), 11 * NUMEL, 2 * SIZE + 32, SIZE, id="group norm"),
    ],
)
def test_backward_operators(fn, flops, read, write):
    (call,) = backward_calls(fn, torch.randn(2, 8, 16, 16))
    assert (call.cost.flops, call.cost.read_bytes, call.cost.write_bytes) == (flops, read, write)


def test_batch_norm_trains_and_evaluates():
    norm = nn.BatchNorm2d(8)
    with CostMode(norm) as mode:
        norm(X)
        norm.eval()(X)
    train, evaluate = (call for call in mode.calls if call.kind == "norm")
    assert (train.cost.flops, evaluate.cost.flops) == (8 * NUMEL, 2 * NUMEL)
    # scale, shift and both running statistics; training writes the latter and two saved statistics
    assert (train.cost.read_bytes, train.cost.write_bytes) == (SIZE + 4 * 32, SIZE + 4 * 32)
    assert (evaluate.cost.read_bytes, evaluate.cost.write_bytes) == (SIZE + 4 * 32, SIZE)
    assert (train.foldable, evaluate.foldable) == (False, True)


@pytest.mark.parametrize("name", ["native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"])
def test_batch_norm_variants_agree(name):
    c = torch.zeros(8)
    training = cost_of(getattr(aten, name), (X, c, c.clone(), c.clone(), c.clone(), True, 0.1, 1e-5), {}, (X.clone(),))
    evaluate = cost_of(getattr(aten, name), (X, c, c.clone(), c.clone(), c.clone(), False, 0.1, 1e-5), {}, (X.clone(),))
    assert training == Cost(8 * NUMEL, SIZE + 128, SIZE + 64)
    assert evaluate == Cost(2 * NUMEL, SIZE + 128, SIZE)


@pytest.mark.parametrize(
    ("make", "bytes_per_parameter"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), 28),
        (lambda p: torch.optim.Adam(p, fused=True), 28),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 20),
    ],
)
def test_optimizers_cost_their_known_bytes(make, bytes_per_parameter):
    parameters = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(24))]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with CostMode() as mode:
            optimizer.step()
    (call,) = (call for call in mode.calls if "_fused_" in call.op)
    steps = 4 * 2 if "adam" in call.op else 0
    assert call.cost.bytes == 1024 * bytes_per_parameter + steps
    assert (call.kind, call.phase) == ("optimizer", "optimizer")


def test_average_and_clip_cost_their_known_bytes():
    average, weights = [torch.zeros(1000)], [torch.zeros(1000)]
    assert recorded(lambda: torch._foreach_lerp_(average, weights, 0.1)).bytes == 12 * 1000
    weights[0].grad = torch.zeros(1000)
    clip = recorded(lambda: nn.utils.clip_grad_norm_(weights, 1.0, foreach=True))
    assert 12 * 1000 <= clip.bytes <= 12 * 1000 + 100


def test_linear_agrees_with_stock_counter_forward_and_backward():
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), torch.zeros(4, 16, requires_grad=True)
    with FlopCounterMode(display=False) as stock:
        net(x).sum().backward()
    with CostMode() as mode:
        net(x).sum().backward()
    assert sum(call.cost.flops for call in mode.calls if call.kind == "matmul") == stock.get_total_flops() > 0


def test_cost_of_unknown_operator_and_view():
    assert cost_of("mylib::nothing", (X,), {}, X) is None
    assert cost_of(aten.empty.memory_format, ([2],), {}, torch.empty(2)) == Cost()


def test_table_is_spelled_like_operators():
    assert "aten.convolution" in COSTS
    assert all(name.startswith("aten.") and " " not in name for name in COSTS)
