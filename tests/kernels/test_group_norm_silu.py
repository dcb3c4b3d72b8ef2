"""group_norm_silu beside float64 autograd: values, gradients, machine code of both directions."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_group_norm_silu_fp8_assembly import bounded
from torch import Tensor

from ridgeline.kernels import group_norm_silu, group_norm_silu_backward
from ridgeline.kernels._group_norm_silu_call import BackwardCall, Call, Config
from ridgeline.kernels._group_norm_silu_samples import gradient_sample, norm_sample
from ridgeline.kernels._nhwc import next_power_of_2
from ridgeline.kernels._op import Op, typical_target
from ridgeline.numerics import compare, to_float64
from ridgeline.sass import compile_many, inspect

FORWARD, BACKWARD = group_norm_silu.OP, group_norm_silu_backward.OP
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.float16)
DIFFERENTIABLE = ("x", "gamma", "beta", "scale", "shift")
H200 = typical_target("sm_90")


def forward_only(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("dy", "residual")}


def autograd(arguments: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y and the gradients of PyTorch's own operators; a residual gradient is added to the first."""
    forward = forward_only(arguments)
    leaves = [forward[name].detach().requires_grad_() for name in DIFFERENTIABLE if forward.get(name) is not None]
    names = [name for name in DIFFERENTIABLE if forward.get(name) is not None]
    y = group_norm_silu.reference(**{**forward, **dict(zip(names, leaves, strict=True))})
    dx, *others = torch.autograd.grad(y, leaves, arguments["dy"])
    residual = arguments.get("residual")
    return y.detach(), (dx if residual is None else dx + residual, *others)


def run_forward(arguments: dict[str, Any], config: Config | None = None) -> Tensor:
    """y by the kernels, NaN before; `arguments` may be the backward's."""
    launch = group_norm_silu.plan(config=config, target=H200, **forward_only(arguments))
    launch.output.fill_(math.nan)
    launch.run()
    return launch.output


def run_backward(arguments: dict[str, Any], config: Config | None = None) -> tuple[Tensor, ...]:
    """The gradients of what is there, likewise."""
    launch = group_norm_silu_backward.plan(config=config, target=H200, **arguments)
    call = BackwardCall(**arguments)
    given = (call.gamma, call.beta, call.scale, call.shift)
    found = tuple(call.x.new_empty(0) if t is None else t.new_full(t.shape, math.nan) for t in given)
    launch.output.fill_(math.nan)
    launch.run()
    group_norm_silu_backward.parameters_launch(call, launch, found).run()
    return launch.output, *(t for t in found if t.numel())


def judged(arguments: dict[str, Any], config: Config, back_config: Config | None) -> dict[str, list[Tensor]]:
    """(ours, float64, eager) of y and, where there is a `back_config`, of each gradient; flat."""
    exact, eager = (autograd(a) for a in (to_float64(arguments), arguments))
    actual = [run_forward(arguments, config)]
    if back_config is not None:
        actual += run_backward(arguments, back_config)
    names = ("y", *(f"d{name}" for name in DIFFERENTIABLE if arguments.get(name) is not None))
    triples = zip(actual, (exact[0], *exact[1]), (eager[0], *eager[1]), strict=False)
    return {name: [t.flatten() for t in triple] for name, triple in zip(names, triples, strict=False)}


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
    """One problem, from InstanceNorm to LayerNorm, with any of the options."""
    most = 24 if HAS_GPU else 6
    samples = rng.randint(1, 3) if HAS_GPU or rng.random() < 0.05 else 1
    groups, group_channels = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3, 4, 5, 8, 12])
    shape = (samples, groups * group_channels, rng.randint(1, most), rng.randint(1, most))
    choices: dict[str, Any] = {
        "scale": rng.random() < 0.5, "residual": rng.random() < 0.5, "act": rng.choice(["silu", "none"]),
        "p": rng.choice([0.0, 0.0, 0.1, 0.5]), "eps": rng.choice([1e-5, 1e-3]),
    }  # fmt: skip
    arguments = gradient_sample("", shape, groups, **choices).arguments(dtype, DEVICE)
    if rng.random() < 0.3 and choices["scale"]:
        del arguments[rng.choice(["scale", "shift"])]
    return arguments, f"{dtype} {shape} groups={groups} {choices} without {set(DIFFERENTIABLE) - set(arguments)}"


def any_config(rng: random.Random, call: Call) -> Config:
    """Any valid tile, in one pass, in several or read again.

    Under the interpreter, where a program takes long, mostly one for all.
    """
    everything = next_power_of_2(call.pixels)
    most = 4096 if HAS_GPU else 4 if rng.random() < 0.2 else 0
    for _ in range(40 if most else 0):
        again = rng.random() < 0.5
        config = Config(rng.randint(1, call.groups), 2 ** rng.randint(0, 6), rng.choice([1, 2, 4]), again)
        if config.is_valid(call, H200) and config.programs(call) <= most:
            return config
    return next(
        c for w in (rng.choice([4, 16]), 16, 32) if (c := Config(call.groups, everything, w)).is_valid(call, H200)
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_against_float64_autograd(seed: int):
    """Ten shapes forward; under the interpreter, which takes 0.1 s for each, every second one backward too.

    Judged together: of the three elements that a small one has, the worst can be lucky in one of the two.
    """
    rng = random.Random(seed)
    results: dict[tuple[str, torch.dtype], list[list[Tensor]]] = {}
    problems = []
    for index in range(20 if HAS_GPU else 10):
        arguments, text = draw(rng, DTYPES[seed % len(DTYPES)])
        config = any_config(rng, Call(**forward_only(arguments)))
        back_config = any_config(rng, BackwardCall(**arguments)) if HAS_GPU or index % 2 else None
        problems.append(f"{text} {config} {back_config}")
        for name, triple in judged(arguments, config, back_config).items():
            results.setdefault((name, triple[0].dtype), []).append(triple)
    assert {name for name, _ in results} >= {"y", "dx", "dgamma", "dbeta"}
    for (name, _), triples in results.items():
        verdict = compare(*(torch.cat(tensors) for tensors in zip(*triples, strict=True)))
        assert verdict.passed, f"{name}: {verdict.reason}, in one of {problems}"


def test_the_random_problems_reach_every_path():
    rng = random.Random(0)
    calls = [Call(**forward_only(draw(rng, torch.float32)[0])) for _ in range(200)]
    chosen = [(call, any_config(rng, call)) for call in calls]
    assert 2 < sum(config.launches(call) for call, config in chosen) < 195
    assert 2 < sum(config.again for call, config in chosen) < 195
    assert 20 < sum(config.groups * call.group_channels % 8 == 0 for call, config in chosen) < 180
    assert 20 < sum(call.group_channels.bit_count() > 1 for call, _ in chosen) < 180


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_autograd_of_the_operator(p: float):
    arguments = norm_sample("", (2, 16, 4, 4), 2, scale=True, p=p).arguments(torch.float32, DEVICE)
    g = torch.Generator(DEVICE).manual_seed(9)
    # NCHW, as an operator that knows no layout hands it back
    dy = torch.randn(arguments["x"].shape, generator=g, device=DEVICE)
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in DIFFERENTIABLE}
    y = FORWARD(**{**arguments, **leaves})
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    expected = autograd({**arguments, "dy": dy})
    torch.testing.assert_close(y, expected[0])
    for gradient, right in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)
    assert gradients[0].is_contiguous(memory_format=torch.channels_last)


def test_registration_with_gradients():
    options: dict[str, Any] = {"scale": True, "p": 0.25}
    arguments = norm_sample("", (1, 8, 1, 3), 1, **options).arguments(torch.float32, DEVICE)
    for name in DIFFERENTIABLE:
        arguments[name] = arguments[name].detach().clone().requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(FORWARD.overload, (), arguments, test_utils=tests).values()) == {"SUCCESS"}
    backward = gradient_sample("", (1, 8, 1, 3), 1, residual=True, **options).arguments(torch.float32, DEVICE)
    outcome = torch.library.opcheck(BACKWARD.overload, (), backward, test_utils=("test_schema", "test_faketensor"))
    assert set(outcome.values()) == {"SUCCESS"}


def real(op: Op, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    marks = {True: (pytest.mark.gpu,), False: ()}
    return [
        pytest.param(s, dtype, id=f"{s.why}-{dtype}", marks=marks[s.real_size]) for s in op.samples for dtype in dtypes
    ]


@pytest.mark.parametrize(("sample", "dtype"), real(BACKWARD, DTYPES))
def test_backward_samples(sample: Any, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    exact, eager = (group_norm_silu_backward.gradients(**a) for a in (to_float64(arguments), arguments))
    for actual, right, theirs in zip(BACKWARD(**arguments), exact, eager, strict=True):
        verdict = compare(actual, right, theirs, error_factor=2.0 if sample.real_size else 4.0)
        assert verdict.passed, verdict.reason
    twice = (BACKWARD(**arguments), BACKWARD(**arguments))
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True)), "not the same bits"


def test_the_planted_error_of_a_wrong_group_is_caught():
    arguments = gradient_sample("", (2, 16, 4, 4), 4).arguments(torch.float16, DEVICE)
    exact, eager = (group_norm_silu_backward.reference(**a) for a in (to_float64(arguments), arguments))
    wrong = group_norm_silu_backward.reference(**{**arguments, "groups": 2})
    assert not compare(wrong, exact, eager).passed
    # without the two sums over the group
    dx = BACKWARD(**arguments)[0]
    assert not compare(dx + 0.01 * dx.std(), exact, eager).passed


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Config(4, 64, 4), Config(4, 32, 4), Config(4, 16, 4, again=True)])
def test_a_mean_far_from_zero_costs_no_digits(config: Config):
    arguments = gradient_sample("", (1, 16, 8, 8), 4).arguments(torch.float32, DEVICE)
    arguments["x"] += 1000.0
    for name, triple in judged(arguments, config, config).items():
        verdict = compare(triple[0], triple[1], triple[2])
        assert verdict.passed, f"{name}: {verdict.reason}"


def test_empty_batch():
    arguments = gradient_sample("", (0, 16, 4, 4), 4, scale=True).arguments(torch.float32, DEVICE)
    dx, dgamma, dbeta, dscale, dshift = BACKWARD(**arguments)
    assert dx.shape == arguments["x"].shape
    assert not dgamma.any() and not dbeta.any()
    assert dscale.shape == dshift.shape == (0, 16)
    assert FORWARD(**{k: v for k, v in arguments.items() if k != "dy"}).shape == (0, 16, 4, 4)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.zeros((2**21 + 1, 32, 8, 4), dtype=torch.float16, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    x[-1].normal_(generator=torch.Generator("cuda").manual_seed(0))
    gamma = torch.ones(32, device="cuda")
    beta = torch.zeros(32, device="cuda")
    y = FORWARD(x, gamma, beta, groups=8)
    torch.testing.assert_close(y[-1:], group_norm_silu.reference(x[-1:], gamma, beta, groups=8), rtol=2e-3, atol=2e-3)
    del y
    dx = BACKWARD(x, x, gamma, beta, groups=8)[0]
    last = group_norm_silu_backward.reference(x[-1:], x[-1:], gamma, beta, groups=8)
    torch.testing.assert_close(dx[-1:], last, rtol=2e-3, atol=4e-3)


GOOD = gradient_sample("", (2, 16, 4, 4), 4, scale=True, p=0.5).arguments(torch.float32, DEVICE)
NCHW = torch.zeros(2, 16, 4, 4, device=DEVICE)


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"groups": 3}, ValueError, "groups must divide the 16 channels of x, got 3"),
        ({"x": NCHW}, ValueError, r"x must be channels_last, got strides \(256, 16, 4, 1\)"),
        ({"dy": NCHW}, ValueError, "dy must be channels_last"),
        ({"dy": GOOD["dy"].half()}, ValueError, "dy must be torch.float32 of shape"),
        ({"residual": NCHW}, ValueError, "residual must be channels_last"),
        ({"x": GOOD["x"].double()}, TypeError, "x must be one of fp32, fp16, bf16, got torch.float64"),
        ({"x": GOOD["x"][0]}, ValueError, "x must have 4 axes"),
        ({"gamma": torch.ones(8, device=DEVICE)}, ValueError, r"gamma must be fp32 .* of shape \(16,\)"),
        ({"scale": torch.ones(16, 2, device=DEVICE).t()}, ValueError, "scale must have adjacent channels"),
        ({"act": "relu"}, ValueError, "act must be one of none, silu, got 'relu'"),
        ({"p": 1.0}, ValueError, r"p must be in \[0, 1\), got 1.0"),
        ({"eps": -1.0}, ValueError, "eps must not be negative"),
        ({"seed": None}, ValueError, "p of 0.5 needs seed and offset"),
        ({"offset": torch.zeros(2, dtype=torch.int64, device=DEVICE)}, TypeError, "offset must be one int64"),
        ({"seed": torch.zeros(1, device=DEVICE)}, TypeError, "seed must be one int64, got torch.float32"),
        ({"beta": torch.ones(16, device="meta")}, ValueError, "beta must be on"),
    ],
)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"group_norm_silu_backward: {words}"):
        group_norm_silu_backward.plan(**{**GOOD, **changed})


def test_refusals_of_tiles_and_groups():
    with pytest.raises(ValueError, match=r"group_norm_silu: Config\(groups=3, .*is not valid for 4 groups"):
        group_norm_silu.plan(config=Config(3, 16, 1), **{k: v for k, v in GOOD.items() if k != "dy"})
    wide = norm_sample("", (1, 2**17, 1, 1), 1).arguments(torch.float32, "meta")
    with pytest.raises(ValueError, match="a group may have some thousand channels, got 131072"):
        group_norm_silu.plan(target=H200, **wide)


def test_candidates_are_valid_and_begin_with_the_default():
    for op, kind in ((FORWARD, Call), (BACKWARD, BackwardCall)):
        for sample in op.samples:
            arguments = sample.arguments(torch.bfloat16, "meta")
            configs = op.launcher.candidates(target=H200, **arguments)
            call = kind(**arguments)
            assert all(config.is_valid(call, H200) for config in configs)
            assert configs[0] == Config(configs[0].groups, configs[0].pixels, configs[0].num_warps)
            assert op.launcher.plan(target=H200, **arguments).grid == (configs[0].programs(call),)
            assert len(set(configs)) == len(configs) > (3 if sample.real_size else 0)


def test_keys_tell_problems_apart():
    arguments = BACKWARD.samples[1].arguments(torch.float32, DEVICE)
    without = {name: value for name, value in arguments.items() if name != "residual"}
    keys = {BACKWARD.key(**arguments), BACKWARD.key(**without), BACKWARD.key(**{**arguments, "p": 0.0})}
    assert len(keys) == 3
    assert "groups 4" in BACKWARD.key(**arguments)


def test_cost_reads_and_writes_each_map_once():
    arguments = BACKWARD.samples[0].arguments(torch.float16, DEVICE)
    work = group_norm_silu_backward.cost(**arguments)
    maps = arguments["x"].nbytes
    assert 0 < work.read_bytes - 2 * maps == work.write_bytes - maps == 2 * arguments["gamma"].nbytes
    assert work.flops == 27 * arguments["x"].numel()


# --- machine code ----------------------------------------------------------------------------------------------------


def test_machine_code(tmp_path: Path):
    """Maps move 16 bytes an access, nothing is spilled, and two slabs fit a multiprocessor, or three of 32 KB."""
    cases = [
        (arch, op, launch)
        for arch in ("sm_89", "sm_90", "sm_120")
        for op in (FORWARD, BACKWARD)
        for launch in launches_of(op, SLAB, arch)
    ]
    cases += [("sm_90", BACKWARD, launch) for launch in launches_of(BACKWARD, "two passes", "sm_90")]
    binaries = compile_many([launch.source(arch) for arch, _, launch in cases])
    for (arch, _, launch), binary in zip(cases, binaries, strict=True):
        report = bounded(binary, launch, tmp_path) if "PIECES" in launch.constants else inspect(binary)
        where = (arch, launch.kernel.__name__)
        assert not report.problems, (where, report.problems)
        constants = launch.constants
        elements = constants.get("PIECES", 1) * constants["BLOCK_P"] * constants["BLOCK_C"]
        accesses = elements // (32 * launch.num_warps) // 8
        maps = {"dy_ptr", "x_ptr"} & set(launch.arguments)
        assert report.instructions["LDG.E.128"] >= len(maps) * accesses, where
        if {"y_ptr", "dx_ptr"} & set(launch.arguments):
            assert report.instructions["STG.E.128"] == accesses, where
        if "PIECES" in constants:
            assert launch.num_warps == 8
            held = len(maps) * accesses * 4
            assert report.registers <= (80 if held <= 32 else 128), where


SLAB = "UNet 32x32 128, batch"


def launches_of(op: Op, name: str, arch: str) -> tuple[Any, ...]:
    arguments = next(s for s in op.samples if name in s.why).arguments(torch.bfloat16, "meta")
    launch = op.launcher.plan(target=typical_target(arch), **arguments)
    return (*getattr(launch, "before", ()), launch)


def test_sixteen_warps_share_a_multiprocessor():
    for op in (FORWARD, BACKWARD):
        for sample in (s for s in op.samples if s.real_size):
            launch = op.launcher.plan(target=H200, **sample.arguments(torch.bfloat16, "meta"))
            registers = launch.options.get("maxnreg", 128)
            assert 65_536 // (32 * launch.num_warps * registers) * launch.num_warps >= 16
            assert ("maxnreg" in launch.options) == ("PIECES" in launch.constants)
