"""Convolution of an upsampled map by phases: its three passes in plain Python, their machine code, numbers on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gluon_interpreter
from ridgeline import tuned
from ridgeline.cost import conv_forward
from ridgeline.kernels import UPSAMPLED, upsample_conv2d, upsample_conv2d_dgrad, upsample_conv2d_wgrad
from ridgeline.kernels._conv2d_pass import Config, WgradConfig
from ridgeline.kernels._op import RIVAL, Launch, typical_target
from ridgeline.kernels._upsample_conv2d import phase_gradients_kernel, phase_weights_kernel
from ridgeline.kernels._upsample_conv2d_call import phase_weights
from ridgeline.numerics import compare, to_float64
from ridgeline.sass import compile_many, inspect
from shared_kernels import assert_valid_and_distinct, right, sizes_of_one_kernel, whole

SM_90 = typical_target("sm_90")
# one program, so that a ring goes round from tile to tile
ALONE = replace(SM_90, sm_count=1)
ALL = [(op, sample) for op in UPSAMPLED for sample in op.samples]
SMALL = [(op, sample) for op, sample in ALL if not sample.real_size]
HAS_GPU = torch.cuda.is_available()


def named(cases):
    return [pytest.param(op, sample, id=f"{op.name}-{sample.why}") for op, sample in cases]


def sample_of(op, size, c, k, *, bias=False):
    """Of a pass from c to k channels; `size` is (N, H, W) of the smaller map."""
    n, h, w = size
    if op is upsample_conv2d.OP:
        return upsample_conv2d.upsample_sample("", (n, c, h, w), k, bias=bias)
    if op is upsample_conv2d_dgrad.OP:
        return upsample_conv2d_dgrad.upsample_dgrad_sample("", (n, k, 2 * h, 2 * w), c)
    return upsample_conv2d_wgrad.upsample_wgrad_sample("", (n, c, h, w), k)


# --- the function ----------------------------------------------------------------------------------------------------


DEVICE = "cuda" if HAS_GPU else "cpu"


def phases_of(weight):
    launch = phase_weights(
        phase_weights_kernel, weight.to(DEVICE).contiguous(memory_format=torch.channels_last), typical_target("sm_90")
    )
    launch.run()
    return launch.output.flatten(2).cpu()


def turned_back(sums):
    """[K, 9, C] fp32 of [parts, K, 16, C]."""
    sums = sums.to(DEVICE)
    parts, k, _, c = sums.shape
    dw = torch.full((k, 9, c), float("nan"), device=DEVICE)
    arguments = {"parts_ptr": sums, "dw_ptr": dw, "numel": dw.numel()}
    numbers = {"C": c, "PARTS": parts, "AT_ONCE": 2, "BLOCK": 1024, "PDL": False}
    Launch(phase_gradients_kernel, (-(-dw.numel() // 1024),), arguments, numbers, 4, 1, dw).run()
    return dw.cpu()


def matrix_of_phases():
    """[16, 9]: what a weight's taps are multiplied by."""
    return phases_of(torch.eye(9).view(9, 1, 3, 3))[:, 0].T


def test_phases_are_the_convolution_of_the_upsampled_map():
    matrix = matrix_of_phases().double()
    assert matrix.sum(0).tolist() == [4.0] * 9
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 3, 3, 3, generator=generator, dtype=torch.float64)
    phases = (weight.flatten(2) @ matrix.T).view(6, 3, 2, 2, 2, 2)
    y = torch.empty(2, 6, 8, 10, dtype=torch.float64)
    for a, b in itertools.product(range(2), range(2)):
        around = F.pad(x, (1 - b, b, 1 - a, a))
        y[:, :, a::2, b::2] = F.conv2d(around, phases[:, :, a, b])
    torch.testing.assert_close(y, upsample_conv2d.reference(x, weight), rtol=0, atol=1e-12)


def test_gradients_of_phases_are_turned_back_by_the_transpose():
    back = turned_back(torch.eye(16).view(1, 16, 16, 1))[:, :, 0].T
    assert torch.equal(back, matrix_of_phases().T)


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_parts_and_phases_are_summed(parts):
    """Whole numbers, whose sums fp32 holds: of 40 filters and 24 channels, more than a program has."""
    generator = torch.Generator().manual_seed(parts)
    sums = torch.randint(-9, 10, (parts, 40, 16, 24), generator=generator).float()
    assert torch.equal(turned_back(sums), torch.einsum("pkvc,vt->ktc", sums, matrix_of_phases()))


# the interpreter cuts what it stores in bf16
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_the_weight_of_phases_is_rounded_once(dtype):
    weight = torch.randn(24, 40, 3, 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = weight.float().flatten(2) @ matrix_of_phases().T
    # sums of four in another order differ in the last bit of fp32, which may decide how half a step is rounded
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(phases_of(weight).float(), exact, rtol=step * 0.501, atol=1e-6)


# --- what the kernels compute, in plain Python -----------------------------------------------------------------------


def interpreted(launch, *, edit: gluon_interpreter.Edit = str):
    for part in launch.parts:
        part.output.fill_(float("nan"))
        if "gluon" in part.kernel.fn.__name__:
            gluon_interpreter.run(part, edit=edit)
        else:
            # the last one alone
            Launch.run(part)
    return launch.output


CASES = [(op, sample, SM_90) for op, sample in SMALL] + [
    (op, sample_of(op, (2, 8, 8), 24, 32, bias=True), ALONE) for op in UPSAMPLED
]


@pytest.mark.skipif(HAS_GPU, reason="the small kernels are compiled where there is a GPU, and take no CPU tensors")
@pytest.mark.parametrize(
    ("op", "sample", "target"), [pytest.param(*case, id=f"{case[0].name}-{case[1].why or 'alone'}") for case in CASES]
)
def test_every_pixel_meets_the_taps_of_its_phase(op, sample, target):
    arguments = whole(sample.arguments(torch.float16, "cpu"))
    configs = op.launcher.candidates(target=target, **arguments)
    exact = op.reference(**to_float64(arguments))
    assert exact.abs().max() < 2048
    for config in dict.fromkeys((configs[0], configs[len(configs) // 2], configs[-1])):
        found = interpreted(op.launcher.plan(config=config, target=target, **arguments))
        assert torch.equal(found.double(), exact), config


BACKWARD = ("_place(tile, ", "_place(tiles - 1 - tile, ")


@pytest.mark.skipif(HAS_GPU, reason="the small kernels are compiled where there is a GPU, and take no CPU tensors")
def test_no_tile_writes_into_the_neighbouring_phase():
    """What is written later would hide it, so tiles are taken backward too."""
    op, sample = SMALL[0]
    arguments = whole(sample.arguments(torch.float16, "cpu"))
    exact = op.reference(**to_float64(arguments))
    launch = op.launcher.plan(config=Config(64, 64, 4, 4), target=SM_90, **arguments)
    assert exact.shape[1] % 64

    def found(*changes):
        def edit(source):
            for old, new in changes:
                assert old in source
                source = source.replace(old, new)
            return source

        return interpreted(launch, edit=edit).double()

    assert torch.equal(found(BACKWARD), exact)
    assert not torch.equal(found(BACKWARD, ("gl.minimum(first, OUT - BLOCK_N)", "first")), exact)


# --- configs, checks, costs ------------------------------------------------------------------------------------------


def test_every_candidate_is_valid_and_distinct():
    for op, sample in ALL:
        arguments = sample.arguments(torch.bfloat16, "meta")
        assert_valid_and_distinct(op, arguments)


@pytest.mark.parametrize("op", UPSAMPLED, ids=lambda op: op.name)
def test_every_problem_has_a_config_on_hopper_alone(op):
    for c, k in itertools.product((8, 24, 200, 512), (16, 48, 208, 512)):
        arguments = sample_of(op, (3, 7, 9), c, k).arguments(torch.float16, "meta")
        assert op.launcher.candidates(target=SM_90, **arguments)
        assert op.launcher.plan(target=SM_90, **arguments).parts[0].output.numel()
        assert op.launcher.candidates(target=typical_target("sm_120"), **arguments) == ()
        with pytest.raises(ValueError, match=f"{op.name}: None is not valid for .* on sm_120"):
            op.launcher.plan(target=typical_target("sm_120"), **arguments)


def test_a_tile_wider_than_a_phase_is_refused():
    arguments = sample_of(upsample_conv2d.OP, (3, 7, 9), 24, 48).arguments(torch.float16, "meta")
    with pytest.raises(ValueError, match=r"upsample_conv2d: Config\(.*\) is not valid for"):
        upsample_conv2d.plan(config=Config(128, 64, 4, 4), target=SM_90, **arguments)


def test_dgrad_reduces_no_channel_of_the_neighbouring_phase():
    arguments = sample_of(upsample_conv2d_dgrad.OP, (3, 7, 9), 24, 48).arguments(torch.float16, "meta")
    launch = upsample_conv2d_dgrad.plan(target=SM_90, **arguments)
    assert launch.constants["BLOCK_K"] == 16


def test_a_pass_costs_16_products_for_36():
    for op in UPSAMPLED:
        arguments = sample_of(op, (2, 8, 8), 24, 32).arguments(torch.float16, "meta")
        cost = op.cost(**arguments)
        assert cost.flops == 2 * 16 * 2 * 8 * 8 * 24 * 32
        x, weight, y = 2 * 2 * 24 * 64, 2 * 9 * 24 * 32, 2 * 2 * 32 * 256
        read, written = {"upsample_conv2d": (x + weight, y), "upsample_conv2d_dgrad": (y + weight, x)}.get(
            op.name, (x + y, weight)
        )
        assert (cost.read_bytes, cost.write_bytes) == (read, written)
    full = conv_forward(upsample_conv2d._pass(torch.empty(2, 24, 8, 8), torch.empty(32, 24, 3, 3)).conv, torch.float16)
    assert full.flops * 16 == 2 * 16 * 2 * 8 * 8 * 24 * 32 * 36


BF16_NHWC = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (0, {"x": torch.empty(1, 8, 4, 4, **BF16_NHWC)}, "weight .* must have the 8 channels of x"),
        (0, {"x": torch.empty(1, 16, 4, 4, dtype=torch.bfloat16)}, "x must be channels_last, or a slice of it"),
        (0, {"x": torch.empty(1, 16, 4, 4)}, "x must be torch.float16 or torch.bfloat16"),
        (0, {"weight": torch.empty(24, 16, 3, 3, **BF16_NHWC)}, "filters must be a multiple of 16, got 24"),
        (0, {"weight": torch.empty(32, 16, 1, 3, **BF16_NHWC)}, "filters must be 3 x 3, got 1 x 3"),
        (0, {"weight": torch.empty(32, 16, 3, 3, dtype=torch.bfloat16)}, "weight must be channels_last"),
        (0, {"bias": torch.empty(5)}, r"bias must be fp32 or torch.bfloat16 of shape \(32,\)"),
        (1, {"dy": torch.empty(1, 32, 8, 7, **BF16_NHWC)}, "dy must have even rows and columns, got 8 and 7"),
        (1, {"dy": torch.empty(1, 16, 8, 8, **BF16_NHWC)}, "dy must have the 32 filters of weight as channels, got 16"),
        (1, {"dy": torch.empty(1, 48, 8, 8, **BF16_NHWC)[:, 8:40]}, "dy must be channels_last, got strides"),
        (2, {"dy": torch.empty(1, 32, 8, 6, **BF16_NHWC)}, r"dy must have the shape of y, \(1, 32, 8, 8\)"),
        (2, {"dy": torch.empty(1, 48, 8, 8, **BF16_NHWC)[:, 8:40]}, "dy must be channels_last, got strides"),
    ],
)
def test_what_cannot_be_computed_is_refused(op, change, message):
    op = UPSAMPLED[op]
    arguments = sample_of(op, (1, 4, 4), 16, 32).arguments(torch.bfloat16, "cpu")
    with pytest.raises((ValueError, TypeError), match=f"{op.name}: {message}"):
        op.launcher.plan(**{**arguments, **change}, target=SM_90)


# --- calls without a GPU, gradients, the choice ----------------------------------------------------------------------


@pytest.mark.parametrize(("op", "sample"), named(SMALL))
def test_without_a_gpu_a_pass_is_its_reference(op, sample):
    arguments = sample.arguments(torch.float32, "cpu")
    y = op(**arguments)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert compare(y, op.reference(**to_float64(arguments)), op.reference(**arguments)).passed
    torch.library.opcheck(op.overload, (), arguments, test_utils=("test_schema", "test_faketensor"))


def test_gradients_are_those_of_the_upsampled_map():
    arguments = SMALL[0][1].arguments(torch.float64, "cpu")
    tensors = [arguments[name].double().requires_grad_() for name in ("x", "weight", "bias")]
    copies = [t.detach().clone().requires_grad_() for t in tensors]
    y = upsample_conv2d.OP(*tensors)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y.backward(dy)
    F.conv2d(F.interpolate(copies[0], scale_factor=2), *copies[1:], padding=1).backward(dy)
    for ours, theirs in zip(tensors, copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_each_gradient_comes_from_the_faster_kernel(monkeypatch):
    arguments = SMALL[0][1].arguments(torch.float32, "cpu")
    tensors = [arguments[name].requires_grad_() for name in ("x", "weight")]
    times = ((2e-5, 3e-5), (4e-5, 3e-5), (1e-5, 2e-5))
    seconds = dict(zip((op.name for op in UPSAMPLED), times, strict=True))

    def row(op, **given):
        ours, theirs = seconds[op.name]
        key = op.key(**given)
        return tuned.Row(op.name, "hash", "GPU", "bf16", key, {"k": 1}, ours, None, "2", "3", "5", {RIVAL: theirs})

    monkeypatch.setattr(upsample_conv2d, "tuned_row", row)
    found = upsample_conv2d.choice(*tensors)
    assert {name: ours for name, (_, ours) in found.items()} == {"fprop": True, "dgrad": False, "wgrad": True}
    with torch.profiler.profile() as profile:
        upsample_conv2d.OP(*tensors).sum().backward()
    called = {event.name for event in profile.events() or ()}
    assert {"ridgeline::upsample_conv2d", "ridgeline::upsample_conv2d_wgrad", "aten::convolution_backward"} <= called
    assert "ridgeline::upsample_conv2d_dgrad" not in called


# --- machine code ----------------------------------------------------------------------------------------------------

# whole and in two pieces a tile; one tap and two
COMPILED = (
    (upsample_conv2d.OP, Config(128, 128, 4, 4)),
    (upsample_conv2d.OP, Config(128, 256, 4, 8)),
    (upsample_conv2d_dgrad.OP, Config(64, 64, 8, 4)),
    (upsample_conv2d_dgrad.OP, Config(256, 128, 4, 8)),
    (upsample_conv2d_wgrad.OP, WgradConfig(128, 128, 1, 6, 4, 1)),
    (upsample_conv2d_wgrad.OP, WgradConfig(128, 128, 2, 4, 8, 1)),
)


def test_operands_go_from_the_copy_engine_to_wgmma_and_nothing_spills():
    arguments = {op: op.samples[0].arguments(torch.bfloat16, "meta") for op in UPSAMPLED}
    launches = [op.launcher.plan(config=config, target=SM_90, **arguments[op]) for op, config in COMPILED]
    parts = [next(p for p in launch.parts if "gluon" in p.kernel.fn.__name__) for launch in launches]
    # the small kernels too, once each
    small = (launches[0].parts[0], launches[-1])
    *reports, weights, gradients = map(inspect, compile_many([part.source("sm_90") for part in (*parts, *small)]))
    assert [report.problems for report in (*reports, weights, gradients)] == [()] * 8
    for (op, config), part, report in zip(COMPILED, parts, reports, strict=True):
        (instruction,) = report.matrix_instructions
        assert instruction.startswith("HGMMA.") and instruction.endswith(".F32.BF16"), config
        assert report.num_warps == part.num_warps + 4, config
        # one byte permuted would mean that an operand is transposed in registers
        assert report.permutes == 0 and report.count("LDSM", "LDGSTS") == 0, config
        assert report.count("LDG") == 0 or op is upsample_conv2d.OP, config
        # the larger map has five axes
        large = "UTMASTG.5D" if op is upsample_conv2d.OP else "UTMALDG.5D"
        assert report.instructions[large] >= 1, config
        assert report.count("UTMASTG") == part.constants.get("PIECES", 0), config
    assert weights.matrix_instructions == gradients.matrix_instructions == {}


# --- numbers, on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "sample"), named(ALL))
def test_every_candidate_is_right(op, sample):
    arguments = sample.arguments(torch.bfloat16, "cuda")
    for config in op.launcher.candidates(**arguments):
        right(op, arguments, config)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "sample"), named(SMALL))
def test_whole_numbers_are_exact(op, sample):
    arguments = whole(sample.arguments(torch.float16, "cpu"))
    exact = op.reference(**to_float64(arguments))
    on_gpu = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    for config in op.launcher.candidates(**on_gpu):
        launch = op.launcher.plan(config=config, **on_gpu)
        launch.output.fill_(float("nan"))
        launch.run()
        assert torch.equal(launch.output.cpu().double(), exact), config


# (C, K): each, with the sizes that share its boxes, is compiled once
KERNELS = ((8, 16), (40, 208), (72, 64), (128, 48), (200, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(len(KERNELS)))
@pytest.mark.parametrize("op", UPSAMPLED, ids=lambda op: op.name)
def test_random_sizes(op, seed):
    c, k = KERNELS[seed]
    dtype, bias = (torch.float16, torch.bfloat16)[seed % 2], seed % 4 < 2

    def of(size):
        return sample_of(op, size, c, k, bias=bias)

    sizes = sizes_of_one_kernel(lambda size: op.launcher.plan(target=SM_90, **of(size).arguments(dtype, "meta")), seed)
    for size in sizes:
        right(op, of(size).arguments(dtype, "cuda"))


@pytest.mark.gpu
def test_equal_calls_give_equal_bits():
    arguments = upsample_conv2d_wgrad.SAMPLES[0].arguments(torch.bfloat16, "cuda")
    first = upsample_conv2d_wgrad.OP(**arguments)
    assert all(torch.equal(first, upsample_conv2d_wgrad.OP(**arguments)) for _ in range(5))
