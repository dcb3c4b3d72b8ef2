"""Rules of memory format (L1-L4, L11) and of norms (L5, L10, K2, K3) on steps made by hand: each fires, or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ridgeline.finding import Abstention, Finding
from ridgeline.rules import layout, norms
from ridgeline.rules._kernels import format_of
from ridgeline.step_view import Step
from rules.steps_made import US, idle, op, step, work

N, C, H = 8, 64, 32
MAP = (N, C, H, H)
NCHW = (C * H * H, H * H, H, 1)
NHWC = (C * H * H, 1, H * C, C)
FILTER = (C, C, 3, 3)
FILTER_NHWC = (C * 9, 1, 3 * C, C)
HALF = "c10::BFloat16"


def conv(us: float, x=NHWC, w=FILTER_NHWC, *, shapes=(MAP, FILTER), dtype: str = HALF, name="sm90_xmma_fprop", **more):
    call = op("aten::cudnn_convolution", *shapes, dtypes=(dtype, dtype), strides=(x, w))
    return work(us, name, category="conv", call=call, op="aten.convolution", phase="forward", **more)


def convert(us: float, name: str = "nchwToNhwcKernel", **more):
    return work(us, name, category="layout", **more)


def copied(us: float, target=NCHW, source=NHWC, **more):
    """A copy by PyTorch: only strides tell that it converts."""
    call = op("aten::copy_", MAP, MAP, strides=(target, source))
    return work(us, "direct_copy_kernel_cuda", category="copy", call=call, op="aten.copy_", **more)


def norm(us: float, x=NHWC, name: str = "RowwiseMomentsCUDAKernel", shapes=(MAP,), **more):
    concrete = ("", "", "", str(N), str(C), str(H * H), "32", "1e-05")
    call = op("aten::native_group_norm", *shapes, strides=(x,), dtypes=("float",), concrete=concrete)
    return work(us, name, category="norm", call=call, op="aten.native_group_norm", phase="forward", **more)


def one_call(made: Step, name: str) -> Step:
    """Neighbours whose operator is `name` as launched by one call of it."""
    kernels = list(made.kernels)
    for index in range(1, len(kernels)):
        before, call = kernels[index - 1].call, kernels[index].call
        if before and call and before.name == call.name == name:
            kernels[index] = replace(kernels[index], call=replace(call, id=before.id))
    return replace(made, kernels=tuple(kernels))


def sandwich(us: float = 60):
    """A convolution between the conversions that cuDNN makes for NCHW tensors."""
    return [convert(us), conv(200, NCHW, NCHW), convert(us, "nhwcToNchwKernel")]


def bare_conv(us: float):
    return work(us, "sm90_xmma_fprop_bf16_nhwckrsc_nhwc", category="conv")


INSTANSEG = step(convert(60), bare_conv(700), convert(60, "nhwcToNchwKernel"), work(180))
GROUPED = step(convert(60), bare_conv(700), convert(60, "nhwcToNchwKernel"), norm(100, NCHW), work(80))


@dataclass(frozen=True)
class Case:
    rule: object
    step: Step
    mid: float | None  # µs; None: the rule must be silent
    why: str
    low: float | None = None
    high: float | None = None


PASS_US = N * C * H * H * 4 / 4.3e12 / 0.8 / US  # one pass of an fp32 map at 80 % of the bandwidth
SPLIT_NORM = one_call(step(norm(40), norm(60, name="GroupNorm1dForward"), work(500)), "aten::native_group_norm")
CASES = [
    # trap 45: 12 % of conversions promise 12 %, what else NHWC brings stands in "most"
    Case(layout.conversions_around_convolutions, INSTANSEG, 120.0, "12 % is 12 %", 60.0, 120 + 0.25 * 700),
    Case(layout.conversions_around_convolutions, GROUPED, 12.0, "NHWC group norms take most of it back", 0.0, 320.0),
    Case(layout.conversions_around_convolutions, step(convert(60), bare_conv(900)), None, "one at the entry"),
    Case(
        layout.conversions_around_convolutions,
        step(bare_conv(900), work(9), convert(60)),
        None,
        "elsewhere",
    ),
    Case(
        layout.conversions_around_convolutions,
        step(*[piece for _ in range(4) for piece in (convert(9), conv(200))]),
        None,
        "convolutions get channels-last tensors: L3 speaks",
    ),
    Case(
        layout.transpose_pairs,
        step(conv(500), copied(30), work(40, call=op("aten::softmax", MAP)), copied(30, NHWC, NCHW), conv(500)),
        60.0,
        "there and back around a softmax",
    ),
    Case(
        layout.transpose_pairs,
        step(conv(500), copied(30), work(40, call=op("aten::softmax", MAP)), conv(500)),
        None,
        "nothing takes it back",
    ),
    Case(
        layout.transpose_pairs,
        step(conv(500), copied(30, NHWC, NHWC), work(40), copied(30, NHWC, NHWC), conv(500)),
        None,
        "plain copies keep the format",
    ),
    # trap 29: a group norm returns NCHW, and two conversions follow from each
    Case(
        layout.format_breakers,
        step(conv(300), copied(40), norm(50, NCHW), convert(40), conv(300), work(100)),
        80.0,
        "an eager group norm on CUDA",
    ),
    Case(layout.format_breakers, step(conv(300), norm(50), conv(300)), None, "a group norm that keeps the format"),
    Case(
        layout.format_breakers,
        step(conv(300), work(50, "CatArrayBatchedCopy", category="concat"), conv(300)),
        None,
        "a concat of channels-last tensors only",
    ),
    Case(layout.format_breakers, step(convert(40), conv(300), conv(300)), None, "the input is converted once"),
    Case(layout.format_breakers, step(*sandwich(), *sandwich()), None, "an NCHW step is L1's"),
    Case(
        layout.ambiguous_strides,
        one_call(
            step(
                conv(20, NCHW, NCHW, shapes=((N, 1, H, H), (C, 1, 3, 3)), name="nchwToNhwcKernel"),
                conv(300, (H * H, H * H, H, 1), (9, 9, 3, 1), shapes=((N, 1, H, H), (C, 1, 3, 3))),
            ),
            "aten::cudnn_convolution",
        ),
        20.0,
        "one channel reads as both formats",
    ),
    Case(layout.ambiguous_strides, step(*sandwich()), None, "clearly NCHW"),
    Case(
        layout.unaligned_channels,
        step(conv(100, shapes=((N, 3, H, H), (C, 3, 3, 3)), floor_s=40 * US), conv(400)),
        0.0,
        "a stem with 3 channels: padding is bounded, not promised",
        0.0,
        60.0,
    ),
    Case(
        layout.unaligned_channels,
        step(work(30, "nchwAddPaddingKernel", category="layout"), conv(400)),
        30.0,
        "a padding pass goes when the tensor is made padded",
        0.0,
        30.0,
    ),
    Case(layout.unaligned_channels, step(conv(400)), None, "64 channels"),
    Case(
        layout.unaligned_channels,
        step(conv(400, name="cutlass_16816fprop_align16", dtype="float")),
        None,
        "align16 is not align1, and fp32 has other multiples",
    ),
    # a group of 2 channels of 32x32 fp32 is 8 KiB: it fits, so x moves twice in all
    Case(norms.split_group_norms, SPLIT_NORM, 100 - 2 * PASS_US, "moments and apply in one kernel"),
    Case(norms.split_group_norms, step(norm(60), work(500)), None, "a norm that is one kernel already"),
    Case(
        norms.split_group_norms,
        one_call(step(norm(2 * PASS_US / 2), norm(2 * PASS_US / 2), work(500)), "aten::native_group_norm"),
        None,
        "two kernels as fast as one could be",
    ),
]


def findings(case: Case) -> list[Finding]:
    return [found for found in case.rule(case.step) if isinstance(found, Finding)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.rule.__name__}: {case.why}" for case in CASES])
def test_rule(case):
    found = findings(case)
    if case.mid is None:
        assert not found
        return
    (finding,) = found
    assert finding.saving.mid_s == pytest.approx(case.mid * US)
    if case.low is not None:
        assert finding.saving.low_s == pytest.approx(case.low * US)
    if case.high is not None:
        assert finding.saving.high_s == pytest.approx(case.high * US)
    ids = {kernel.activity.id for kernel in case.step.kernels}
    assert finding.evidence and set(finding.evidence) <= ids
    assert set(finding.edit.seconds) <= ids


def cast(us: float, target: str, source: str, shape=MAP):
    call = op("aten::copy_", shape, shape, dtypes=(target, source))
    return work(us, "direct_copy_kernel_cuda", category="copy", call=call)


def test_casts_around_a_norm_that_autocast_promotes():
    made = step(cast(30, "float", HALF), norm(60), cast(20, HALF, "float"), conv(400))
    (finding,) = norms.casts_around_norms(made)
    assert finding.saving.mid_s == pytest.approx(50 * US)
    assert finding.title.startswith("2 casts")


def test_casts_elsewhere_and_of_weights_are_not_the_norms():
    away = step(cast(30, "float", HALF), conv(400), norm(60), conv(90), cast(20, HALF, "float"))
    assert not list(norms.casts_around_norms(away))
    weight = step(cast(30, HALF, "float", (C,)), norm(60), conv(400))
    assert not list(norms.casts_around_norms(weight))


def batch_norm(us: float):
    call = op("aten::native_batch_norm", MAP)
    return work(us, "batch_norm_transform_input_kernel", category="norm", call=call, op="aten.native_batch_norm")


def silu(us: float, name: str = "aten::silu_", **more):
    return work(us, call=op(name, MAP), **more)


def test_a_batch_norm_behind_a_convolution_folds_in_inference():
    pieces = (conv(400), batch_norm(60), silu(40), idle(10), conv(400))
    (finding,) = norms.foldable_batch_norms(step(*pieces))
    # both kernels, and the pause that goes with one of their launches
    assert finding.saving.mid_s == pytest.approx(110 * US)
    assert finding.verb.startswith("ridgeline.compile(")
    assert not list(norms.foldable_batch_norms(step(*pieces, trained=True)))
    assert not list(norms.foldable_batch_norms(step(conv(400), work(20), batch_norm(60))))


def test_activations_after_norms_in_training():
    back = work(60, call=op("aten::silu_backward", MAP), phase="backward")
    made = step(conv(400), batch_norm(60), silu(40), back, norm(90), conv(300), trained=True)
    (finding,) = norms.activations_after_norms(made)
    # forward's pass goes, backward's still reads its second input
    assert finding.saving.mid_s == pytest.approx((40 + 60 * 2 / 3) * US)
    assert not list(norms.activations_after_norms(step(conv(400), silu(40), batch_norm(60), trained=True)))


@pytest.mark.parametrize(
    "rule", [layout.format_breakers, layout.unaligned_channels, norms.split_group_norms, norms.casts_around_norms]
)
def test_without_shapes_a_rule_says_what_it_needs(rule):
    bare = step(
        work(300, "sm90_xmma_fprop_bf16", category="conv", dtype="bf16"),
        work(90, "RowwiseMomentsCUDAKernel", category="norm"),
        work(90, "direct_copy_kernel", category="copy"),
    )
    (abstention,) = rule(bare)
    assert isinstance(abstention, Abstention) and "record_shapes" in abstention.reason


def test_a_norm_is_not_judged_without_ceilings():
    (abstention,) = norms.split_group_norms(replace(SPLIT_NORM, ceilings=None))
    assert "doctor" in abstention.reason


def test_sources_of_conversions_are_named():
    name = "triton_red_fused_native_group_norm_7"
    made = step(conv(300), work(50, name, call=op(name, MAP), category="norm"), convert(40), conv(300))
    (finding,) = layout.format_breakers(made)
    assert finding.note == "the tensors come from 1 native_group_norm"


@pytest.mark.parametrize(
    ("dims", "strides", "expected"),
    [
        ((2, 3, 32, 32), (3072, 1, 96, 3), "nhwc"),
        ((2, 3, 32, 32), (3072, 1024, 32, 1), "nchw"),
        ((1, 3, 32, 32), (3, 1, 96, 3), "nhwc"),  # reshape leaves N = 1 any stride
        ((2, 1, 32, 32), (1024, 1, 32, 1), "both"),
        ((64, 32, 1, 1), (32, 1, 32, 32), "both"),
        ((2, 3, 32, 32), (6144, 2048, 64, 2), ""),  # every second column
        ((2, 0, 32, 32), (0, 1, 0, 0), ""),
        ((2, 3, 32), (96, 32, 1), ""),
    ],
)
def test_formats_by_strides(dims, strides, expected):
    assert format_of(dims, strides) == expected
