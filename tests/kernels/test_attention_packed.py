"""attention_packed beside float64: values, gradients, edges; its machine code is in test_machine_code_training.py."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels import attention_packed, attention_packed_backward
from ridgeline.kernels._attention_packed_call import (
    MOST_CHANNELS,
    MOST_TOKENS,
    BackwardCall,
    Call,
    Config,
    attention,
    attention_sample,
    default_config,
)
from ridgeline.kernels._op import typical_target
from ridgeline.numerics import compare, to_float64

FORWARD, BACKWARD = attention_packed.OP, attention_packed_backward.OP
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# the interpreter cuts what it turns into bf16, instead of rounding it
DTYPES = (torch.float16, torch.float32, torch.bfloat16) if HAS_GPU else (torch.float16, torch.float32)
# lse is fp32, but sums on tensor cores, exp2 and log2 are not as exact as fp32
EPS = {"lse": 2.0**-19}
H200 = typical_target("sm_90")


def run_forward(arguments: dict[str, Any], config: Config | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernel, NaN before; `arguments` may be the backward's."""
    forward = {name: value for name, value in arguments.items() if name in ("qkv", "heads", "scale")}
    launch = attention_packed.plan(config=config, target=H200, **forward)
    lse = launch.arguments["lse_ptr"]
    assert isinstance(lse, Tensor)
    for result in (launch.output, lse):
        result.fill_(math.nan)
    launch.run()
    return launch.output, lse


def run_backward(arguments: dict[str, Any], config: Config | None = None) -> Tensor:
    launch = attention_packed_backward.plan(config=config, target=H200, **arguments)
    launch.output.fill_(math.nan)
    launch.run()
    return launch.output


def judged(
    arguments: dict[str, Any], config: Config | None = None, back_config: Config | None = None
) -> dict[str, list[Tensor]]:
    """(ours, float64, eager) of out, lse and dqkv; flat. The backward gets what our forward returned."""
    exact, eager = to_float64(arguments), arguments
    forwards = [attention(a["qkv"], heads=a["heads"], scale=a.get("scale")) for a in (exact, eager)]
    out, lse = run_forward(arguments, config)
    dqkv = run_backward({**arguments, "out": out, "lse": lse}, back_config)
    ours = {"out": out, "lse": lse, "dqkv": dqkv}
    theirs = [
        {"out": f[0], "lse": f[1], "dqkv": attention_packed_backward.reference(**a)}
        for f, a in zip(forwards, (exact, eager), strict=True)
    ]
    return {name: [ours[name].flatten(), *(t[name].flatten() for t in theirs)] for name in ours}


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
    """One problem; under the interpreter, where a program takes long, mostly one head of images that fit a block."""
    tokens, channels = rng.randint(1, 300 if HAS_GPU else 36), rng.choice([1, 5, 8, 16, 16, 24, 32])
    few = 4 if HAS_GPU else 1 + (rng.random() < 0.05)
    images, heads = rng.randint(1, max(few, 20 // tokens)), rng.randint(1, few)
    scale = rng.choice([None, None, 0.1, 0.5])
    sample = attention_sample("", images, tokens, heads, channels, backward=True, scale=scale)
    return sample.arguments(dtype, DEVICE), f"{images}x{tokens}, {heads} heads of {channels}, scale {scale}, {dtype}"


def any_config(rng: random.Random, call: Call) -> Config:
    """Any valid blocks, under the interpreter mostly those of several with the fewest programs."""
    sizes, found = (16, 32, 64, 128), []
    while len(found) < (1 if HAS_GPU or rng.random() < 0.2 else 4):
        config = Config(rng.choice(sizes), rng.choice(sizes), rng.choice([4, 8]), rng.choice([1, 2]))
        if config.is_valid(call, H200):
            found.append(config)
    return min(found, key=lambda config: config.programs(call))


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_against_float64(seed: int):
    """Ten shapes, forward and backward. Judged together: of the few elements that one has, the worst can be lucky."""
    rng = random.Random(seed)
    results: dict[str, list[list[Tensor]]] = {}
    problems = []
    for _ in range(20 if HAS_GPU else 10):
        arguments, text = draw(rng, DTYPES[seed % len(DTYPES)])
        configs = any_config(rng, Call(**forward_only(arguments))), any_config(rng, BackwardCall(**arguments))
        problems.append(f"{text} {configs}")
        for name, triple in judged(arguments, *configs).items():
            results.setdefault(name, []).append(triple)
    for name, triples in results.items():
        verdict = compare(*(torch.cat(tensors) for tensors in zip(*triples, strict=True)), eps=EPS.get(name))
        assert verdict.passed, f"{name}: {verdict.reason}, in one of {problems}"


def forward_only(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in ("qkv", "heads", "scale")}


def test_the_random_problems_reach_every_path():
    rng = random.Random(0)
    calls = [BackwardCall(**draw(rng, torch.float16)[0]) for _ in range(200)]
    chosen = [(call, any_config(rng, call)) for call in calls]
    roles = [config.role(call) for call, config in chosen]
    assert 10 < roles.count("dq or dk, dv") < 180
    assert 10 < sum(config.group(call) > 1 for call, config in chosen) < 180
    assert 20 < sum(config.block_k < call.tokens for call, config in chosen) < 180
    assert 5 < sum(not config.constants(call)["TAIL"] for call, config in chosen) < 180


def test_autograd_of_the_operator():
    arguments = attention_sample("", 2, 9, 2, 8).arguments(torch.float32, DEVICE)
    leaf = arguments["qkv"].requires_grad_()
    out, lse = FORWARD(**arguments)
    assert not lse.requires_grad
    # one number expanded, as the gradient of a sum
    (ours,) = torch.autograd.grad(out.sum(), leaf)
    (theirs,) = torch.autograd.grad(attention(leaf, heads=2)[0].sum(), leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert ours.is_contiguous()


def test_registration_with_gradients():
    arguments = attention_sample("", 1, 3, 1, 4, scale=0.5).arguments(torch.float32, DEVICE)
    arguments["qkv"].requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    outcome = torch.library.opcheck(FORWARD.overload, (), arguments, test_utils=tests)
    assert set(outcome.values()) == {"SUCCESS"}
    backward = attention_sample("", 1, 3, 1, 4, backward=True).arguments(torch.float32, DEVICE)
    outcome = torch.library.opcheck(BACKWARD.overload, (), backward, test_utils=("test_schema", "test_faketensor"))
    assert set(outcome.values()) == {"SUCCESS"}


def samples() -> list[Any]:
    """The forward's are those of the backward and one more."""
    marks = {True: (pytest.mark.gpu,), False: ()}
    return [
        pytest.param(s, dtype, id=f"{s.why}-{dtype}", marks=marks[s.real_size])
        for s in BACKWARD.samples
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("sample", "dtype"), samples())
def test_samples(sample: Any, dtype: torch.dtype):
    arguments = sample.arguments(dtype, DEVICE)
    for name, triple in judged(arguments).items():
        verdict = compare(*triple, error_factor=2.0 if sample.real_size else 4.0, eps=EPS.get(name))
        assert verdict.passed, f"{name}: {verdict.reason}"
    assert torch.equal(BACKWARD(**arguments), BACKWARD(**arguments)), "not the same bits"


def test_one_token_attends_to_itself():
    arguments = attention_sample("", 3, 1, 2, 16, backward=True).arguments(torch.float32, DEVICE)
    q, k, v = arguments["qkv"].unflatten(2, (3, 2, 16)).unbind(2)
    out, lse = run_forward(arguments)
    torch.testing.assert_close(out, v.flatten(2))
    torch.testing.assert_close(lse[..., 0], (q * k).sum(-1)[:, 0] / 4)
    dq, dk, dv = run_backward(arguments).unflatten(2, (3, 2, 16)).unbind(2)
    torch.testing.assert_close(dv.flatten(2), arguments["dout"])
    assert max(dq.abs().max().item(), dk.abs().max().item()) < 1e-5


@pytest.mark.parametrize("block_k", [16, 32])
def test_scores_in_the_thousands_overflow_nothing(block_k: int):
    arguments = attention_sample("", 2, 24, 1, 16, backward=True, scale=300.0).arguments(torch.float32, DEVICE)
    config = Config(32, block_k, 4, 1)
    out, lse = run_forward(arguments, config)
    assert lse.abs().max() > 1000
    torch.testing.assert_close(out, attention(arguments["qkv"], heads=1, scale=300.0)[0], rtol=1e-3, atol=1e-3)
    assert run_backward({**arguments, "out": out, "lse": lse}, config).isfinite().all()


def test_the_planted_errors_are_caught():
    arguments = attention_sample("", 2, 24, 2, 16, backward=True).arguments(torch.float16, DEVICE)
    exact, eager = (attention_packed_backward.reference(**a) for a in (to_float64(arguments), arguments))
    # half of the scale, and no subtraction of dout's product with out
    assert not compare(run_backward({**arguments, "scale": 0.125}), exact, eager).passed
    assert not compare(run_backward({**arguments, "out": 0 * arguments["out"]}), exact, eager).passed
    # images whose tokens see each other
    joined = arguments["qkv"].reshape(1, 48, -1)
    apart = arguments["qkv"]
    out = run_forward({"qkv": joined, "heads": 2})[0].reshape(2, 24, -1)
    outs = [attention(a, heads=2)[0] for a in (apart.double(), apart)]
    assert not compare(out, *outs).passed


def test_empty_batch():
    arguments = attention_sample("", 0, 5, 2, 16, backward=True).arguments(torch.float32, DEVICE)
    out, lse = FORWARD(**forward_only(arguments))
    assert out.shape == (0, 5, 32) and lse.shape == (0, 2, 5)
    assert BACKWARD(**arguments).shape == (0, 5, 96)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    qkv = torch.zeros((2**17 + 1, 256, 3 * 32), dtype=torch.float16, device="cuda")
    qkv[-1].normal_(generator=torch.Generator("cuda").manual_seed(0))
    out, lse = FORWARD(qkv, heads=1)
    right = attention(qkv[-1:], heads=1)
    torch.testing.assert_close(out[-1:], right[0], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(lse[-1:], right[1], rtol=1e-3, atol=1e-3)
    dqkv = BACKWARD(out, qkv, out, lse, heads=1)
    last = attention_packed_backward.reference(out[-1:], qkv[-1:], out[-1:], lse[-1:], heads=1)
    torch.testing.assert_close(dqkv[-1:], last, rtol=1e-2, atol=1e-2)


GOOD = attention_sample("", 2, 5, 2, 16, backward=True).arguments(torch.float32, DEVICE)


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"qkv": GOOD["qkv"][0]}, ValueError, r"qkv must be \[N, T, 3 heads D\]"),
        ({"qkv": torch.zeros(1, 1025, 96, device=DEVICE)}, ValueError, "T from 1 to 1024, got shape"),
        ({"qkv": GOOD["qkv"].double()}, TypeError, "qkv must be one of fp32, fp16, bf16, got torch.float64"),
        ({"qkv": GOOD["qkv"].transpose(0, 1)}, ValueError, r"qkv must be contiguous, got strides \(96, 480, 1\)"),
        ({"heads": 5}, ValueError, "heads must split the 96 channels of qkv into 3 times heads of 1 to 128, got 5"),
        ({"heads": 0}, ValueError, "heads must split the 96 channels"),
        ({"qkv": torch.empty(1, 1, 3 * 2**20, device="meta"), "heads": 2**14}, ValueError, "some 2 million channels"),
        ({"scale": 0.0}, ValueError, "scale must be positive, got 0.0"),
        ({"scale": math.inf}, ValueError, "scale must be positive, got inf"),
        ({"dout": None}, ValueError, "dout must be given"),
        ({"dout": GOOD["dout"].half()}, ValueError, "dout must be torch.float32 of shape"),
        ({"out": GOOD["out"][:1]}, ValueError, r"out must be torch.float32 of shape \(2, 5, 32\)"),
        ({"lse": GOOD["lse"].transpose(1, 2)}, ValueError, r"lse must be torch.float32 of shape \(2, 2, 5\)"),
        ({"lse": GOOD["lse"].to("meta")}, ValueError, "lse must be on"),
    ],
)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=f"attention_packed_backward: .*{words}"):
        attention_packed_backward.plan(**{**GOOD, **changed})


def test_refusal_of_blocks():
    with pytest.raises(ValueError, match=r"attention_packed: Config\(block_q=24, .*is not valid for 2 heads"):
        attention_packed.plan(config=Config(24, 16, 4, 1), **forward_only(GOOD))


def test_every_call_has_a_config_for_every_gpu():
    targets = [typical_target(arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_120")]
    sizes = product((1, 7, 64, 197, MOST_TOKENS), (1, 33, 64, MOST_CHANNELS), (1, 128), (torch.float16, torch.float32))
    for tokens, channels, images, dtype in sizes:
        qkv = torch.empty(images, tokens, 6 * channels, dtype=dtype, device="meta")
        out, lse = qkv[..., : 2 * channels].contiguous(), qkv.new_empty(images, 2, tokens, dtype=torch.float32)
        for call, target in product((Call(qkv, 2), BackwardCall(qkv, 2, None, out, out, lse)), targets):
            default = default_config(call, target)
            assert default.is_valid(call, target)
            assert default.programs(call) > 0


def test_candidates_are_valid_and_begin_with_the_default():
    for op, kind in ((FORWARD, Call), (BACKWARD, BackwardCall)):
        for sample in op.samples:
            arguments = sample.arguments(torch.bfloat16, "meta")
            configs, call = op.launcher.candidates(target=H200, **arguments), kind(**arguments)
            assert all(config.is_valid(call, H200) for config in configs)
            assert configs[0] == default_config(call, H200)
            assert op.launcher.plan(target=H200, **arguments).grid == (configs[0].programs(call),)
            assert len(set(configs)) == len(configs) > (3 if sample.real_size else 0)


def test_keys_tell_problems_apart():
    arguments = BACKWARD.samples[0].arguments(torch.float32, DEVICE)
    keys = {BACKWARD.key(**arguments), BACKWARD.key(**{**arguments, "scale": 0.5})}
    assert len(keys) == 2
    assert "heads 2" in BACKWARD.key(**arguments)


def test_cost_is_that_of_the_products_and_of_each_tensor_once():
    arguments = next(s for s in BACKWARD.samples if "256 tokens" in s.why).arguments(torch.bfloat16, "meta")
    forward, backward = FORWARD.cost(**forward_only(arguments)), BACKWARD.cost(**arguments)
    scores, out = 128 * 4 * 256**2, arguments["out"].nbytes
    assert (forward.flops, backward.flops) == (4 * scores * 64, 10 * scores * 64)
    lse = 128 * 4 * 256 * 4
    assert (forward.read_bytes, forward.write_bytes) == (3 * out, out + lse)
    assert (backward.read_bytes, backward.write_bytes) == (5 * out + lse, 3 * out)


def test_the_backward_moves_every_byte_once_where_it_can():
    for tokens, arch, role in ((256, "sm_90", True), (256, "sm_89", False), (64, "sm_89", True), (16, "sm_120", True)):
        sample = next(s for s in BACKWARD.samples if s.real_size and s.why.startswith(f"{tokens} tokens"))
        arguments = sample.arguments(torch.bfloat16, "meta")
        constants: dict[str, Any] = dict(BACKWARD.launcher.plan(target=typical_target(arch), **arguments).constants)
        assert (constants["GROUP"] * tokens <= constants["BLOCK_Q"]) == role, (tokens, arch)
