"""adamw_ema against torch's clip and AdamW and against Ema, in fp32 and float64; what it skips, refuses, becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ridgeline.cudagraph import capture
from ridgeline.ema import Ema
from ridgeline.kernels._adamw_ema import SCALARS
from ridgeline.kernels.adamw_ema import (
    CONFIGS,
    Averaging,
    Config,
    Group,
    Plan,
    build,
    cost,
    launches,
    locate,
    step_,
)
from ridgeline.numerics import compare
from ridgeline.sass import compile_many, inspect

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
SHAPES = ((1,), (37,), (5, 3, 3, 3))  # the last one channels-last
SPLIT = 2  # the first two are one group, the others the second
LR, WEIGHT_DECAY, BETAS = (1e-2, 3e-3), (0.1, 0.0), ((0.9, 0.999), (0.8, 0.99))
MAX_NORM = 4.0  # clips some of the steps: the norm of 173 normal numbers times `loudness` lies around it


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=DEVICE)


def randoms(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=g).to(DEVICE) for shape in shapes]
    return [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]


def group(parameters: Sequence[Tensor], *, index: int = 0, step: float = 0.0, optional: bool = True) -> Group:
    """With state as after many steps where `step` is not 0."""
    seen = bool(step)
    return Group(
        parameters=tuple(parameters),
        exp_avgs=tuple(torch.full_like(p, 0.3 * seen) for p in parameters),
        exp_avg_sqs=tuple(torch.full_like(p, 0.9 * seen) for p in parameters),
        steps=tuple(scalar(step) for _ in parameters),
        lr=scalar(LR[index]),
        weight_decay=scalar(WEIGHT_DECAY[index]),
        betas=BETAS[index],
        averages=tuple(p.clone() for p in parameters) if optional else (),
        copies=tuple(p.bfloat16() for p in parameters) if optional else (),
    )


def averaging() -> Averaging:
    return Averaging(decay=scalar(0.98), updates=scalar(0.0))


def everything(plan: Plan) -> list[Tensor]:
    """What a step writes, copies excepted."""
    return [t for g in plan.groups for ts in (g.parameters, g.exp_avgs, g.exp_avg_sqs, g.averages, g.steps) for t in ts]


class Torch:
    """Clip, AdamW and Ema one after another, as a loop without ridgeline has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        # the numbers that the device scalars hold, so that float64 is exact for what the kernel is told
        parameters = [nn.Parameter(p.to(dtype)) for p in randoms(0)]
        groups = [
            {"params": ps, "lr": scalar(lr).item(), "weight_decay": scalar(decay).item(), "betas": betas}
            for ps, lr, decay, betas in zip(
                (parameters[:SPLIT], parameters[SPLIT:]), LR, WEIGHT_DECAY, BETAS, strict=True
            )
        ]
        self.optimizer = torch.optim.AdamW(groups, fused=dtype == torch.float32)
        self.model = nn.ParameterList(parameters)
        self.ema = Ema(self.model, 0.98)

    def step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.model, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        clip_grads_with_norm_(self.model, MAX_NORM, get_total_norm([p.grad for p in self.model]))
        self.optimizer.step()
        self.ema.update_(self.model)

    def tensors(self, name: str) -> list[Tensor]:
        """Under the names that Group has for them."""
        if name in ("exp_avgs", "exp_avg_sqs"):
            return [self.optimizer.state[p][name.removesuffix("s")] for p in self.model]
        return list(self.model if name == "parameters" else self.ema.module.parameters())


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


# a step takes the interpreter 80 ms, so the thousand are the GPU's
@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.gpu)])
def test_many_steps_err_about_as_torch_does(steps: int):
    """Two groups, clipping, decay, averages with warm-up, halved learning rates; `compare` is the project's rule."""
    theirs, exact = Torch(torch.float32), Torch(torch.float64)
    parameters = randoms(0)
    groups = [group(parameters[:SPLIT]), group(parameters[SPLIT:], index=1)]
    rule = averaging()
    plan = build(groups, averaging=rule, max_norm=MAX_NORM)
    clipped = 0
    for n in range(steps):
        if n == steps // 2:
            for rival in (theirs, exact):
                for options in rival.optimizer.param_groups:
                    options["lr"] /= 2
            for each in groups:
                each.lr.div_(2)
        gradients = [(0.3 + 0.1 * (n % 3)) * g for g in randoms(1 + n)]
        norm = get_total_norm(gradients)
        clipped += bool(norm > MAX_NORM)
        for rival in (theirs, exact):
            rival.step(gradients)
        step_(plan, locate(plan, gradients), norm=norm)
    assert 0 < clipped < steps
    for name in ("parameters", "exp_avgs", "exp_avg_sqs", "averages"):
        ours = [t for g in groups for t in getattr(g, name)]
        verdict = compare(*(joined(tensors) for tensors in (ours, exact.tensors(name), theirs.tensors(name))))
        assert verdict.passed, f"{name}: {verdict.reason}"
    assert {t.item() for g in groups for t in g.steps} == {steps} == {rule.updates.item()}
    for g in groups:
        for copy, parameter in zip(g.copies, g.parameters, strict=True):
            assert_copied(copy, parameter)


def assert_copied(copy: Tensor, parameter: Tensor) -> None:
    # the interpreter cuts bits off where a GPU rounds
    torch.testing.assert_close(copy.float(), parameter.bfloat16().float(), rtol=0 if HAS_GPU else 2**-7, atol=0)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.5, 0.0)])
def test_one_step_equals_torch_to_the_ulp(betas: tuple[float, float]):
    (parameter, gradient), (copy,) = randoms(5, ((300,), (300,))), randoms(5, ((300,),))
    ours = replace(group([parameter], step=500.0, optional=False), betas=betas)
    theirs = nn.Parameter(copy)
    optimizer = torch.optim.AdamW([theirs], lr=LR[0], weight_decay=WEIGHT_DECAY[0], betas=betas, fused=True)
    state = {"step": scalar(500.0), "exp_avg": ours.exp_avgs[0].clone(), "exp_avg_sq": ours.exp_avg_sqs[0].clone()}
    optimizer.state[theirs] = state
    theirs.grad = gradient.clone()
    optimizer.step()
    plan = build([ours])
    versions = [t._version for t in everything(plan)]
    step_(plan, locate(plan, [gradient]))
    assert [t._version for t in everything(plan)] == [version + 1 for version in versions]
    pairs = ((parameter, theirs.data), (ours.exp_avgs[0], state["exp_avg"]), (ours.exp_avg_sqs[0], state["exp_avg_sq"]))
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-7)
    assert ours.steps[0].item() == state["step"].item() == 501


def test_a_skipped_step_moves_the_averages_alone():
    parameters = randoms(0)
    one = replace(group(parameters, step=0.0), averages=tuple(p + 1 for p in parameters))
    rule = averaging()
    plan = build([one], averaging=rule, max_norm=1.0)
    gradients = [torch.full_like(p, float("nan")) for p in parameters]
    before = [t.clone() for t in everything(plan)]
    expected = [torch.lerp(a, p, 0.9) for a, p in zip(one.averages, parameters, strict=True)]
    step_(plan, locate(plan, gradients), norm=scalar(float("nan")), found_inf=scalar(1.0))
    averages = {id(t) for t in one.averages}
    for old, new in zip(before, everything(plan), strict=True):
        assert torch.equal(old, new) == (id(new) not in averages)
    for actual, right in zip(one.averages, expected, strict=True):
        torch.testing.assert_close(actual, right)
    assert rule.updates.item() == 1
    for copy, parameter in zip(one.copies, parameters, strict=True):
        assert_copied(copy, parameter)


@pytest.mark.parametrize("norm", [2.0, 0.01])
def test_scaled_and_bf16_gradients_give_the_same_step(norm: float):
    gradients = [g.bfloat16().float() for g in randoms(1)]
    results = []
    for scale, dtype in ((1.0, torch.float32), (1024.0, torch.float32), (1.0, torch.bfloat16)):
        plan = build([group(randoms(0), step=3.0)], averaging=averaging(), max_norm=0.5)
        given = [(scale * g).to(dtype) for g in gradients]
        step_(
            plan,
            locate(plan, given),
            norm=scalar(scale * norm),
            found_inf=scalar(0.0),
            inverse_scale=None if scale == 1 else scalar(1 / scale),
        )
        results.append(everything(plan))
    # powers of two change no digit, except through the 1e-6 of the clip
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_gradients_of_both_dtypes_and_copies_of_some_give_the_same_step():
    gradients = [g.bfloat16().float() for g in randoms(1)]
    some = [gradients[0], gradients[1].bfloat16(), gradients[2].bfloat16()]
    results = []
    for given, copied in ((gradients, (0, 1, 2)), (some, (1, 2)), (some, ())):
        one = group(randoms(0), step=3.0)
        parts = [copy if i in copied else None for i, copy in enumerate(one.copies)]
        plan = build([replace(one, copies=tuple(parts))], averaging=averaging(), max_norm=0.5)
        located = locate(plan, given)
        assert located.dtypes == ("fp32" if given is gradients else "mixed")
        step_(plan, located, norm=scalar(2.0))
        results.append(everything(plan))
        for i, (copy, before) in enumerate(zip(one.copies, randoms(0), strict=True)):
            assert_copied(copy, one.parameters[i] if i in copied else before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_norm_that_is_not_a_number_spoils_the_step_as_in_torch():
    (parameter,) = randoms(0, ((8,),))
    plan = build([group([parameter], optional=False)], max_norm=1.0)
    step_(plan, locate(plan, [torch.ones_like(parameter)]), norm=scalar(float("nan")))
    assert parameter.isnan().all()


@pytest.mark.parametrize("numel", [8, 1023, 1024, 2053])
def test_ends_of_chunks_and_nothing_beyond(numel: int):
    """Every tensor inside a larger buffer; 1023 and 2053 end off a multiple of eight elements."""
    buffers = [torch.full((numel + 40,), 7.0, device=DEVICE) for _ in range(4)]
    wide = torch.full((numel + 40,), 7.0, device=DEVICE, dtype=torch.bfloat16)
    parameter, exp_avg, exp_avg_sq, average = (b[16 : 16 + numel] for b in buffers)
    one = Group(
        (parameter,), (exp_avg,), (exp_avg_sq,), (scalar(0.0),), scalar(0.5), scalar(0.0),
        averages=(average,), copies=(wide[16 : 16 + numel],),
    )  # fmt: skip
    for tensor in (parameter, exp_avg, exp_avg_sq, average):
        tensor.zero_()
    plan = build([one], averaging=averaging())
    gradient = torch.arange(1, numel + 1, device=DEVICE).float()
    step_(plan, locate(plan, [gradient]))
    # the first step of Adam is the learning rate, whatever the gradient
    torch.testing.assert_close(parameter, torch.full_like(parameter, -0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(exp_avg, 0.1 * gradient)
    torch.testing.assert_close(exp_avg_sq, 0.001 * gradient * gradient)
    torch.testing.assert_close(average, torch.full_like(average, -0.45), rtol=1e-6, atol=0)
    assert_copied(one.copies[0], parameter)
    for buffer in (*buffers, wide):
        assert (buffer[:16] == 7).all() and (buffer[16 + numel :] == 7).all()


def test_scalars_of_more_tensors_than_a_block():
    parameters = randoms(0, ((1,),) * 130)
    plan = build([group(parameters[:100]), group(parameters[100:], index=1)], averaging=averaging())
    launches(plan, locate(plan, [p.clone() for p in parameters]))[0].run()
    assert all(step.item() == 1 for each in plan.groups for step in each.steps)
    for tensor, index in ((0, 0), (99, 0), (100, 1), (129, 1)):
        row: dict[str, float] = dict(zip(SCALARS, plan.scalars[tensor].tolist(), strict=True))
        beta1, beta2 = BETAS[index]
        expected = {
            "gradient_scale": 1.0, "decay": LR[index] * WEIGHT_DECAY[index], "beta1": beta1, "1 - beta1": 1 - beta1,
            "beta2": beta2, "1 - beta2": 1 - beta2, "step_size": LR[index] / (1 - beta1),
            "denominator_scale": (1 - beta2) ** -0.5, "eps": 1e-8, "average_blend": 0.9, "applied": 1.0,
        }  # fmt: skip
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-7)


def test_tensors_without_elements_are_counted():
    empty, full = randoms(0, ((0, 3), (8,)))
    plan = build([group([empty, full], optional=False)])
    step_(plan, locate(plan, [empty.clone(), full.clone()]))
    assert [step.item() for step in plan.groups[0].steps] == [1, 1]
    nothing = build([group([empty], optional=False)])
    assert len(launches(nothing, locate(nothing, [empty.clone()]))) == 1


@pytest.mark.gpu
def test_a_captured_step_follows_schedules_and_the_averages_decay():
    rules = [averaging(), averaging()]
    plans = [build([group(randoms(0))], averaging=rule, max_norm=1.0) for rule in rules]
    gradients = randoms(1)

    def step(plan: Plan) -> None:
        step_(plan, locate(plan, gradients), norm=get_total_norm(gradients))

    captured = capture(lambda: step(plans[0]), (), warmup=1)
    step(plans[1])  # as the warm-up did
    for n in range(4):
        for plan, rule in zip(plans, rules, strict=True):
            plan.groups[0].lr.fill_(LR[0] / 2**n)
            rule.decay.fill_(0.9 / 2**n)
        captured.replay()
        step(plans[1])
    for a, b in zip(*map(everything, plans), strict=True):
        assert torch.equal(a, b)


def test_cost_counts_38_bytes_of_a_parameter():
    parameters = randoms(0)
    numel = sum(p.numel() for p in parameters)
    plan = build([group(parameters)], averaging=averaging())
    full = cost(plan, locate(plan, randoms(1)))
    assert (full.read_bytes, full.write_bytes) == (20 * numel, 18 * numel)
    bare = build([group(parameters, optional=False)])
    assert cost(bare, locate(bare, [g.bfloat16() for g in randoms(1)])).bytes == (12 + 2 + 12) * numel


P = torch.zeros(16, 4, device=DEVICE)
GOOD = group([P], optional=False)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"exp_avgs": (P.new_zeros(4, 16).t(),)}, ValueError, r"exp_avgs must have its parameter's strides \(4, 1\)"),
        ({"exp_avg_sqs": (P.new_zeros(64),)}, ValueError, r"exp_avg_sqs must have .* shape \[16, 4\], got \[64\]"),
        ({"exp_avgs": (P.new_zeros(65)[1:].view(16, 4),)}, ValueError, "multiple of 16 bytes, got a view at offset 1"),
        ({"exp_avgs": (P.double(),)}, TypeError, "exp_avgs must be torch.float32, got torch.float64"),
        ({"exp_avgs": ()}, ValueError, "exp_avgs must hold 1 tensors"),
        ({"exp_avgs": (P,)}, ValueError, "two of the tensors written are one"),
        ({"parameters": (P.new_zeros(16, 8)[:, ::2],)}, ValueError, r"parameters must be dense, got strides \(8, 2\)"),
        ({"copies": (P.half(),)}, TypeError, "copies must be torch.bfloat16"),
        ({"averages": (P.clone(),)}, ValueError, "averages and averaging go together"),
        ({"lr": torch.tensor([1.0, 2.0])}, TypeError, "lr must be one float32"),
        ({"steps": (torch.tensor(1),)}, TypeError, "a step must be one float32, got torch.int64"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas must lie in \[0, 1\), got \(0.9, 1.0\)"),
        ({"exp_avgs": (P.to("meta"),)}, ValueError, "all tensors must be on"),
    ],
)
def test_refusals_of_groups(change: dict, kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"adamw_ema: .*{words}"):
        build([replace(GOOD, **change)])


def test_refusals_of_gradients_and_scalars():
    plan = build([GOOD], max_norm=1.0)
    for gradients, kind, words in (
        ([], ValueError, "1 parameters need as many gradients, got 0"),
        ([P.half()], TypeError, "float32 or bfloat16, got torch.float16"),
        ([P.clone().t().contiguous().t()], ValueError, "a gradient must have its parameter's strides"),
    ):
        with pytest.raises(kind, match=words):
            locate(plan, gradients)
    located = locate(plan, [P.clone()])
    with pytest.raises(ValueError, match="norm goes with a plan that has max_norm"):
        step_(plan, located)
    with pytest.raises(TypeError, match=r"found_inf must be one float32, got torch\.bool"):
        step_(plan, located, norm=scalar(1.0), found_inf=torch.tensor(True))
    with pytest.raises(ValueError, match="there are no parameters"):
        build([])
    with pytest.raises(ValueError, match="4, 8 or 16 elements a thread"):
        build([GOOD], config=Config(1024, 1))
    assert all(config.is_valid for config in CONFIGS)


def test_machine_code():
    """16-byte accesses only where all is there and even, nothing spilled, nothing through shared memory."""
    cases = []
    for arch, config, narrow in (
        ("sm_89", CONFIGS[0], 1),
        ("sm_90", CONFIGS[0], 1),
        ("sm_90", Config(2048, 4), 0),
        ("sm_120", CONFIGS[0], 3),
    ):
        plan = build([group(randoms(0))], averaging=averaging(), max_norm=1.0, config=config)
        # the first `narrow` of three gradients are bf16
        gradients = [g.bfloat16() if i < narrow else g for i, g in enumerate(randoms(1))]
        both = launches(plan, locate(plan, gradients), norm=scalar(1.0))
        cases += [(config, narrow, launch.source(arch)) for launch in (both if not cases else both[1:])]
    for (config, narrow, source), binary in zip(cases, compile_many([case[2] for case in cases]), strict=True):
        report = inspect(binary)
        assert not report.problems and report.shared_bytes == 0, (source.arch, config, report.problems)
        if source.kernel.__name__ == "update_kernel":
            # of a thread: quads of elements, each five times loaded, four times stored, once as bf16; and 15 addresses
            quads = config.block // (32 * config.num_warps) // 4
            assert report.instructions["LDG.E.128"] == (4 if narrow == 3 else 5) * quads
            assert report.instructions["LDG.E.64"] == 15 + (quads if narrow else 0)
            assert report.instructions["STG.E.128"] == 4 * quads
            assert report.instructions["STG.E.64"] == quads
            # half of the threads that an SM could hold, each with 160 bytes on their way
            assert quads > 2 or report.registers <= 80
