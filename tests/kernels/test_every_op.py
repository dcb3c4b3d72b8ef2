"""Every op in ALL, every sample, every dtype: value, layout, registration, cost, refusals. No kernel is named here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.cost import Cost
from ridgeline.errors import UsageError
from ridgeline.kernels import ALL, Op, Sample, find
from ridgeline.kernels._op import Autograd, Launch, Launcher, check_launchable, define
from ridgeline.numerics import TF32_EPS, Verdict, compare, judge, to_float64

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
NO_BF16 = pytest.mark.skip(reason="Triton's interpreter returns garbage for bf16 dots: run on a CUDA GPU")


def cases(*, every_dtype: bool) -> list[Any]:
    found = []
    for op in ALL:
        for sample in op.samples:
            for dtype in op.dtypes if every_dtype else op.dtypes[:1]:
                marks = [pytest.mark.gpu] if sample.real_size else []
                if dtype == torch.bfloat16 and not HAS_GPU:
                    marks.append(NO_BF16)
                name = f"{op.name}-{sample.why}-{str(dtype).removeprefix('torch.')}"
                found.append(pytest.param(op, sample, dtype, id=name, marks=marks))
    return found


def eps_of(arguments: dict[str, Any]) -> float | None:
    """TF32 rounds operands to ten bits on a GPU; the interpreter multiplies exactly, so it gets no such allowance."""
    fp32 = any(isinstance(v, Tensor) and v.dtype == torch.float32 and v.dim() == 4 for v in arguments.values())
    return TF32_EPS if HAS_GPU and fp32 and arguments.get("precision") != "ieee" else None


def tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(("op", "sample", "dtype"), cases(every_dtype=True))
def test_value_against_float64(op: Op, sample: Sample, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    verdict = judge(op, op.reference, arguments, error_factor=op.error_factor, eps=eps_of(arguments))
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(("op", "sample", "dtype"), cases(every_dtype=False))
def test_a_planted_error_is_caught(op: Op, sample: Sample, dtype: torch.dtype):
    arguments = sample.arguments(torch.float16, DEVICE)
    right, exact, eager = op(**arguments), op.reference(**to_float64(arguments)), op.reference(**arguments)

    def verdict(wrong: Tensor) -> Verdict:
        return compare(wrong, exact, eager, error_factor=op.error_factor)

    assert verdict(right).passed
    assert not verdict(right * 1.01).passed
    one_wrong = right.clone()
    one_wrong[(0,) * right.dim()] += 0.5
    assert not verdict(one_wrong).passed
    one_wrong[(0,) * right.dim()] = float("nan")
    assert not verdict(one_wrong).passed


@pytest.mark.parametrize(("op", "sample", "dtype"), cases(every_dtype=False))
def test_layout_and_registration(op: Op, sample: Sample, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    y = op(**arguments)
    if y.dim() == 4:
        assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.Tag.needs_exact_strides in op.overload.tags
    # raises with the reason where a check fails; tracing both ways takes a second, so only the first sample is traced
    traced = ("test_autograd_registration", "test_aot_dispatch_dynamic") if sample is op.samples[0] else ()
    outcome = torch.library.opcheck(op.overload, (), arguments, test_utils=("test_schema", "test_faketensor", *traced))
    assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("op", "sample", "dtype"), cases(every_dtype=False))
def test_flops_equal_the_flop_counter(op: Op, sample: Sample, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    expected = op.cost(**arguments).flops
    assert expected > 0
    with FlopCounterMode(display=False) as counter:
        op(**arguments)
    assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        op.reference(**arguments)
    # PyTorch counts matrix products alone; where the reference has any, both must agree
    assert counter.get_total_flops() in (0, expected)


@pytest.mark.parametrize(("op", "sample", "dtype"), cases(every_dtype=False))
def test_bytes_touch_every_tensor_once(op: Op, sample: Sample, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    cost = op.cost(**arguments)
    everything = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    assert cost.read_bytes == sum(t.numel() * t.element_size() for t in everything)
    y = op.reference(**arguments)
    assert cost.write_bytes == y.numel() * y.element_size()


@pytest.mark.parametrize(("op", "sample", "dtype"), cases(every_dtype=False))
def test_other_strides_are_right_or_refused(op: Op, sample: Sample, dtype: torch.dtype):
    """Each map as NCHW, as every second channel, expanded over the batch: right, or an error that names the strides."""
    arguments = sample.arguments(dtype, DEVICE)
    right = op(**arguments)
    refusals = 0
    for name, value in tensors(arguments).items():
        if value.dim() != 4:
            continue
        every_second = torch.stack((value, value), 2).flatten(1, 2)[:, ::2]
        for other in (value.clone(memory_format=torch.contiguous_format), every_second, value[:1].expand_as(value)):
            changed = {**arguments, name: other}
            try:
                actual = op(**changed)
            except ValueError as error:
                refusals += 1
                assert op.name in str(error)
                assert str(other.stride()) in str(error)
                continue
            torch.testing.assert_close(actual, right if torch.equal(other, value) else op.reference(**changed))
    assert refusals > 0 or max(value.shape[2] for value in tensors(arguments).values() if value.dim() == 4) == 1


def test_all_names_are_unique_and_found():
    assert len({op.name for op in ALL}) == len(ALL) > 0
    assert all(find(op.name) is op for op in ALL)
    with pytest.raises(UsageError, match=r"kernel must be one of .*, got 'conv3d'"):
        find("conv3d")


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_every_op_has_small_and_real_samples(op: Op):
    assert {sample.real_size for sample in op.samples} == {True, False}
    assert len({sample.why for sample in op.samples}) == len(op.samples)
    # reasons are how `source` and benchmarks name a sample, and a real one must not need its data
    for sample in op.samples:
        source = op.source(arch="sm_90", dtype="fp16", sample=sample.why)
        assert set(source.kernel.arg_names) == set(source.signature) | set(source.constants)
        assert (
            {"*fp16", "*bf16", "*fp32", "*i32", "*i64", "*u8", "i32", "i64"}
            > set(source.signature.values())
            >= {"*fp16"}
        )


@triton.jit
def _double(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=inside) * 2.0, mask=inside)


def double_for_test(x: Tensor) -> Tensor:
    check_launchable("double_for_test", _double, x)
    y = torch.empty_like(x)
    arguments = {"x_ptr": x, "y_ptr": y, "numel": x.numel()}
    Launch(_double, (triton.cdiv(x.numel(), 64),), arguments, {"BLOCK": 64}, num_warps=1, num_stages=1, output=y).run()
    return y


def test_define_registers_gradient_cost_and_fake():
    op = define(
        double_for_test,
        reference=lambda x: x * 2,
        cost=lambda x: Cost(x.numel(), x.nbytes, x.nbytes),
        launcher=Launcher(pytest.fail, pytest.fail),
        samples=(),
        dtypes=(torch.float32,),
        autograd=Autograd(setup=lambda ctx, inputs, output: None, backward=lambda ctx, grad: grad * 2),
    )
    x = torch.arange(70, dtype=torch.float32, device=DEVICE).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        op(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert counter.get_total_flops() == 70
    assert set(torch.library.opcheck(op.overload, (x,)).values()) == {"SUCCESS"}
    with pytest.raises(UsageError, match="double_for_test: dtype must be one of fp32, got 'bf16'"):
        op.source(arch="sm_90", dtype="bf16")
    with pytest.raises(UsageError, match="no sample's reason contains 'large'"):
        op.source(arch="sm_90", dtype="fp32", sample="large")


def test_launch_asks_for_dependent_launch_only_when_told():
    class Recorder:
        def __getitem__(self, grid):
            return lambda **options: seen.append((grid, options))

    seen: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    for pdl in (False, True):
        Launch(Recorder(), (3,), {"n": 1}, {"B": 2}, num_warps=4, num_stages=2, output=torch.zeros(1), pdl=pdl).run()
    plain = {"n": 1, "B": 2, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert seen == [((3,), plain), ((3,), {**plain, "launch_pdl": True})]


@pytest.mark.parametrize("op", [op for op in ALL if op.into is not None], ids=lambda op: op.name)
def test_into_writes_the_same_values_into_its_slice_alone(op):
    arguments = op.samples[0].arguments(torch.float32, DEVICE)
    expected = op(**arguments)
    n, c, h, w = expected.shape
    buffer = torch.full((n, c + 24, h, w), 7.0, device=DEVICE).contiguous(memory_format=torch.channels_last)
    op.into(buffer[:, 8 : 8 + c], **arguments)
    assert torch.equal(buffer[:, 8 : 8 + c], expected)
    assert (buffer[:, :8] == 7).all() and (buffer[:, 8 + c :] == 7).all()
