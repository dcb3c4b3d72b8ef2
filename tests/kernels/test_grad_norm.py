"""grad_norm against torch's norms and float64, over random lists of tensors; what it refuses, captures, becomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ridgeline.cudagraph import capture
from ridgeline.kernels import grad_norm
from ridgeline.kernels._op import Target
from ridgeline.kernels.grad_norm import CONFIGS, Config, Plan, build, cost, launch, locate, norm, reference
from ridgeline.numerics import compare
from ridgeline.sass import compile_many, inspect

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = Config(256, 1, 1)  # chunks that lists of small tensors fill
LISTS = 320


@pytest.fixture
def few_programs(monkeypatch):
    """A GPU of three multiprocessors, so that each program has several chunks."""
    monkeypatch.setattr(grad_norm, "target_of", lambda _: Target("sm_90", 3, 232_448))


def found(tensors: Sequence[Tensor], config: Config = SMALL) -> Tensor:
    plan = build(tensors, config=config)
    return norm(plan, locate(plan, tensors))


def exact(tensors: Sequence[Tensor]) -> Tensor:
    return reference([t.double() for t in tensors])


def as_torch(tensors: Sequence[Tensor]) -> Tensor:
    """PyTorch's own, of the same numbers in fp32."""
    return get_total_norm([t.float() for t in tensors])


def a_tensor(g: torch.Generator) -> Tensor:
    """Of no, one, few or some thousand elements, of any dtype, in any order of dimensions, at any of 16 bytes."""

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=g))

    numel = (0, 1, 1 + number(20), 1 + number(300), 1 + number(3000), 256 * (1 + number(4)))[number(6)]
    dtype, start = DTYPES[number(3)], number(9) if number(2) else 0
    buffer = torch.full((start + numel + 9,), math.nan, dtype=dtype, device=DEVICE)  # spoils what reads too far
    tensor = buffer[start : start + numel]
    tensor.copy_(torch.randn(numel, generator=g) * 2.0 ** (number(9) - 4))
    if numel % 6 == 0 and number(2):
        return tensor.view(2, 3, numel // 6).permute(*torch.randperm(3, generator=g).tolist())
    return tensor


@pytest.mark.usefixtures("few_programs")
def test_random_lists_err_about_as_torch_does():
    g = torch.Generator().manual_seed(0)
    sizes: set[int] = set()
    for _ in range(LISTS):
        tensors = [a_tensor(g) for _ in range(int(torch.randint(1, 9, (), generator=g)))]
        sizes |= {t.numel() for t in tensors}
        verdict = compare(found(tensors), exact(tensors), as_torch(tensors))
        assert verdict.passed, f"{[(t.shape, t.dtype) for t in tensors]}: {verdict.reason}"
    assert {0, 1} < sizes and len(sizes) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_start_and_length_within_a_few_vectors(dtype: torch.dtype):
    """Both ends of the whole 16 bytes, the piece that has none, and the end of a chunk."""
    plan = None
    for start in range(9):
        for numel in (*range(1, 27), 255, 257):
            buffer = torch.full((400,), math.inf, dtype=dtype, device=DEVICE)
            tensor = buffer[start : start + numel]
            tensor.copy_(torch.arange(numel) % 8)
            plan = build([tensor], config=SMALL) if plan is None or plan.sizes != (numel,) else plan
            # integers that fp32 sums exactly
            expected = (tensor.double() ** 2).sum().sqrt().float()
            assert torch.equal(norm(plan, locate(plan, [tensor])), expected), (start, numel)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("config", CONFIGS)
def test_chunks_of_real_size(config: Config):
    """Two programs' worth and more of each dtype; numbers of all sizes, so that an element left out shows."""
    g = torch.Generator().manual_seed(1)
    programs = 3 * config.programs
    sizes = (config.block * programs + 3, 2 * config.block, config.block // 2 + 1)
    tensors = [torch.randn(n, generator=g).to(DEVICE, dtype) for n, dtype in zip(sizes, DTYPES, strict=True)]
    plan = build(tensors, config=config)
    assert len(plan.chunks) == programs + 4 and len(plan.partials) == programs
    verdict = compare(norm(plan, locate(plan, tensors)), exact(tensors), as_torch(tensors))
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((math.inf, 1.0), math.inf),
        ((-math.inf,), math.inf),
        ((math.nan, 1.0), math.nan),
        ((math.inf, math.nan), math.nan),
        ((0.0, -0.0), 0.0),
    ],
)
@pytest.mark.parametrize("place", [0, 300, 511], ids=["first", "whole", "edge"])
def test_infinite_and_not_a_number_get_through(dtype, values, expected, place):
    tensor = torch.zeros(512, dtype=dtype, device=DEVICE)
    others = torch.zeros(3, device=DEVICE)
    tensor[torch.arange(place, place + len(values)) % 512] = torch.tensor(values, dtype=dtype, device=DEVICE)
    torch.testing.assert_close(found([others, tensor]).item(), expected, equal_nan=True)


def test_squares_beyond_fp32_are_infinite_as_in_torch():
    tensors = [torch.full((8,), 2.0**63, device=DEVICE)]
    assert found(tensors).item() == as_torch(tensors).item() == math.inf
    assert found([torch.full((1,), 2.0**63, device=DEVICE)]).item() == 2.0**63


@pytest.mark.usefixtures("few_programs")
def test_again_and_again_on_other_numbers_and_at_other_places():
    """A plan leaves nothing behind, and each norm is a tensor of its own."""
    g = torch.Generator().manual_seed(2)
    sizes = (1000, 5, 0, 700)
    plan, results, again = build([torch.empty(n, device=DEVICE) for n in sizes], config=SMALL), [], []
    for dtypes in (DTYPES * 2)[:4], (torch.bfloat16,) * 4, (torch.float32,) * 4:
        tensors = [torch.randn(n, generator=g).to(DEVICE, d) for n, d in zip(sizes, dtypes, strict=True)]
        results.append((norm(plan, locate(plan, tensors)), exact(tensors)))
        again.append(norm(plan, locate(plan, [t.clone() for t in tensors])))
        assert plan.finished.item() == 0
    for (actual, right), repeated in zip(results, again, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=3e-7, atol=0)
        assert torch.equal(actual, repeated)


@pytest.mark.gpu
def test_replays_follow_the_tensors_to_the_bit():
    """As many programs as the GPU holds at once, whose order of finishing is another at every replay."""
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(512, 512, 3, 3)] * 8 + [(512,)] * 100 + [(3,), (1,), (0,), (4_000_001,)]
    tensors = [torch.empty(s, device="cuda", dtype=DTYPES[i % 3]) for i, s in enumerate(shapes)]
    for config in CONFIGS:
        plan = build(tensors, config=config)
        captured = capture(lambda plan=plan: norm(plan, locate(plan, tensors)), (), warmup=1)
        for _ in range(5):
            for tensor in tensors:
                tensor.normal_(generator=g)
            results = [captured.replay().clone() for _ in range(100)]
            assert all(torch.equal(result, results[0]) for result in results)
            verdict = compare(results[0], exact(tensors), as_torch(tensors))
            assert verdict.passed, verdict.reason
            assert plan.finished.item() == 0


def test_nothing_to_sum():
    empty = torch.zeros(0, 3, device=DEVICE)
    assert found([empty]).item() == 0.0
    plan = build([empty, torch.zeros(0, device=DEVICE)])
    assert len(plan.chunks) == 0 and norm(plan, locate(plan, [empty, empty])).shape == ()


def test_cost_counts_each_byte_once():
    work = cost([torch.zeros(10), torch.zeros(3, 4, dtype=torch.bfloat16)])
    assert (work.flops, work.read_bytes, work.write_bytes) == (44, 64, 4)


X = torch.zeros(4, 6, device=DEVICE)


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        ([], ValueError, "a plan of 1 tensors needs as many, got 0"),
        ([X.double()], TypeError, "must be float32, bfloat16 or float16, got torch.float64"),
        ([X.to("meta")], ValueError, "all tensors must be on"),
        ([X[:2]], ValueError, "must have the plan's sizes, got 12 elements for 24"),
        ([torch.zeros(4, 12, device=DEVICE)[:, ::2]], ValueError, r"must be dense, got strides \(12, 2\)"),
        ([X[:1].expand(4, 6)], ValueError, r"must be dense, got strides \(0, 1\)"),
        ([X.flatten()[:8].as_strided((2, 3, 4), (1, 1, 5))], ValueError, "must be dense"),
    ],
)
def test_refusals_of_tensors(tensors: list[Tensor], kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"grad_norm: .*{words}"):
        locate(build([X]), tensors)


def test_refusals_of_plans_and_addresses():
    with pytest.raises(ValueError, match="grad_norm: there are no tensors"):
        build([])
    for config in (Config(1024, 8), Config(4096, 4, 16), Config(4096, 3)):
        with pytest.raises(ValueError, match="8, 16 or 32 elements a thread"):
            build([X], config=config)
    assert all(config.is_valid for config in CONFIGS)
    plan = build([X])
    other = build([X, X])
    with pytest.raises(ValueError, match="must have the sizes of the plan's 1 tensors"):
        norm(plan, locate(other, [X, X]))


def test_machine_code():
    """16-byte loads alone, nothing spilled, and registers that let a multiprocessor hold all programs at once."""
    cases = []
    for arch in ("sm_89", "sm_90", "sm_120"):
        for config in CONFIGS if arch == "sm_90" else CONFIGS[:1]:
            plan = replace(build([X], config=config), partials=torch.zeros(132 * config.programs, device=DEVICE))
            cases.append((config, launch(full(plan), locate(plan, [X])).source(arch)))
    for (config, source), binary in zip(cases, compile_many([case[1] for case in cases]), strict=True):
        report = inspect(binary)
        assert not report.problems, (source.arch, config, report.problems)
        assert report.instructions["LDG.E.128"] == config.block // (32 * config.num_warps) // 4
        assert report.instructions["ATOMG.E.ADD.STRONG.GPU"] == report.count("ATOMG") == 1
        # sm_89 and sm_120 hold as many registers as sm_90
        granted = -(-report.registers // 8) * 8
        assert granted * 32 * config.num_warps * config.programs <= 65_536, (source.arch, config, report.registers)


def full(plan: Plan) -> Plan:
    """With so many chunks that their number is no constant of the machine code."""
    return replace(plan, chunks=plan.chunks.repeat(9001, 1))
