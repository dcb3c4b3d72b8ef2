"""Linear layers in FP8: which are taken as which 1x1 convolutions, and that they compute what those do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fp8_steps import Aot, Uses, backend_of, fp8_by_reference
from ridgeline import train_tuning
from ridgeline.fp8_scaling import DelayedScaling
from ridgeline.kernels._quads import why_not
from ridgeline.kernels.conv2d_fp8 import for_dgrad
from ridgeline.numerics import rms
from ridgeline.step_recipe import NAMED
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import PASSES, takes
from ridgeline.train_rewrites.linear_layers import map_size
from ridgeline.train_rewrites.use_fp8 import convolve_fp8

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    torch._dynamo.reset()
    with fp8_by_reference():
        yield


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(c: int = 16, k: int = 32, **choices: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(c, k, **choices)


def ran(module: Callable[..., Tensor], x: Tensor, backend: TrainBackend) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.compile(module, backend=backend)(x)


def tokens_of(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


# --- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        *((16, (4, 4)), (32, (8, 4)), (64, (8, 8)), (128, (16, 8)), (256, (16, 16)), (144, (36, 4))),
        *((3136, (196, 16)), (2**16, (512, 128)), (1, None), (8, None), (50, None), (49, None)),
    ],
)
def test_tokens_are_the_squarest_map_that_has_quads(tokens: int, size: tuple[int, int] | None):
    assert map_size(tokens) == size and (size is None) is (tokens % 16 > 0)
    if size is not None:
        assert size[0] * size[1] == tokens and why_not(*size) is None


@pytest.mark.parametrize("passes", [PASSES, ("fprop",), ("dgrad",), ("wgrad",)], ids="+".join)
def test_a_matrix_is_the_weight_of_a_1x1_filter(passes: tuple[str, ...]):
    """To the bit, and its gradient is a matrix."""
    x = normal(2, 16, 4, 8).contiguous(memory_format=torch.channels_last)
    copy = (normal(32, 16, 1, 1, seed=2) * 64).to(torch.float8_e4m3fn).contiguous(memory_format=torch.channels_last)
    results = []
    for axes in (2, 4):
        scaling = DelayedScaling({"x": "e4m3", "w": "e4m3", "dy": "e5m2"})
        state = (scaling.scale, scaling.inverse, scaling.amax, scaling.counts)
        given = x.bfloat16().requires_grad_()
        weight = normal(32, 16, *[1] * (axes - 2), seed=2).requires_grad_()
        bias = normal(32, seed=3).requires_grad_()
        y = convolve_fp8(given, weight, bias, (copy, for_dgrad(copy)), state, (0, 1, 2), (0, 0), passes)
        y.float().square().sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape
        results.append((y, given.grad, weight.grad.reshape(32, 16), bias.grad, scaling.amax, scaling.counts))
    for matrix, filters in zip(*results, strict=True):
        assert torch.equal(matrix, filters)


@pytest.mark.parametrize(
    ("shape", "bias"), [((2, 64, 16), True), ((2, 64, 16), False), ((2, 16, 4, 16), True), ((2, 2, 8, 4, 16), False)]
)
def test_a_layer_computes_what_a_1x1_convolution_does(shape: tuple[int, ...], bias: bool):
    """To the bit, forward and every gradient, and so does the same layer of a view of a channels_last map."""
    layer = linear(bias=bias)
    conv = nn.Conv2d(16, 32, 1, bias=bias)
    conv.load_state_dict({name: tensor.reshape(getattr(conv, name).shape) for name, tensor in layer.named_parameters()})
    conv.to(memory_format=torch.channels_last)
    tokens = normal(*shape)
    of_tokens = trained(Uses(lambda m, x: m.a(F.relu(x)), a=layer), tokens)
    of_view = trained(Uses(lambda m, x: m.a(tokens_of(F.relu(image_of(x)))), a=layer), tokens)
    of_map = trained(Uses(lambda m, x: m.a(F.relu(image_of(x))).permute(0, 2, 3, 1), a=conv), tokens)
    assert of_tokens[0].shape == (*shape[:-1], 32)
    for one, two, expected in zip(of_tokens, of_view, of_map, strict=True):
        assert torch.equal(one.reshape(-1), expected.reshape(-1)) and torch.equal(two.reshape(-1), expected.reshape(-1))


def image_of(tokens: Tensor) -> Tensor:
    return tokens.reshape(2, 8, 8, 16).permute(0, 3, 1, 2)


def trained(module: nn.Module, x: Tensor) -> list[Tensor]:
    """y and every gradient of a module of one layer, of which all passes run in FP8."""
    torch._dynamo.reset()
    module.zero_grad()
    backend, given = backend_of(module), x.clone().requires_grad_()
    y = ran(module, given, backend)
    y.float().square().mean().backward()
    assert backend.fp8 is not None and [found.passes for found in backend.fp8.report()] == [PASSES]
    return [y.detach(), *(one.grad for one in (given, *module.parameters()) if one.grad is not None)]


# --- which layers --------------------------------------------------------------------------------------------------


def uncast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.a(x)


def transposed(m: Any, x: Tensor) -> Tensor:
    return m.a(x.relu().reshape(2, 16, 16).transpose(1, 2))


LEFT = {
    "outputs": (linear(k=24), lambda m, x: m.a(x), "it has 24 outputs of 16 inputs, and FP8 takes multiples of 16"),
    "bf16 weight": (linear(dtype=torch.bfloat16), lambda m, x: m.a(x), "its weight is bf16"),
    "frozen": (linear().requires_grad_(False), lambda m, x: m.a(x), "its weight is frozen"),
    "twice": (linear(), lambda m, x: m.a(x) + m.a(x * 2), "its weight is read elsewhere too"),
    "computed": (linear(), lambda m, x: F.linear(x, m.a.weight * 2), "its weight is no parameter of the model"),
    "no autocast": (linear(), uncast, "its result is fp32"),
    "apart": (linear(), transposed, "the channels of its input are not adjacent"),
}


@pytest.mark.parametrize("name", LEFT)
def test_does_not_fire_on(name: str):
    layer, use, reason = LEFT[name]
    module = Uses(use, a=layer)
    backend = backend_of(module)
    x = normal(2, 16, 16)
    y = ran(module, x, backend)
    assert backend.sites["use_fp8"] == 0 and backend.fp8 is not None
    assert {(found.passes, found.reason) for found in backend.fp8.report()} == {((), reason)}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(y, module(x))


def test_one_row_an_image_is_not_even_noted():
    """As embeddings of time steps have."""
    module = Uses(lambda m, x: m.a(x), a=linear())
    backend = backend_of(module)
    ran(module, normal(64, 16), backend)
    assert backend.sites["use_fp8"] == 0 and backend.fp8 is not None and backend.fp8.report() == ()
    why = "no compiled step has a convolution or a linear layer over tokens"
    assert backend.fp8.in_words() == (f"nothing runs in FP8: {why}",)


def test_tokens_without_quads_train():
    module = Uses(lambda m, x: m.a(x), a=linear())
    backend, x = backend_of(module), normal(2, 50, 16)
    ran(module, x, backend).float().square().sum().backward()
    assert backend.fp8 is not None
    (found,) = backend.fp8.report()
    assert found.passes == ("fprop", "dgrad")
    assert found.reason == "wgrad stays bf16: quads need a multiple of 16 tokens, got 50"
    expected = linear()
    with torch.autocast("cpu", torch.bfloat16):
        expected(x).float().square().sum().backward()
    assert 0 < rms(module.a.weight.grad - expected.weight.grad) < 0.1 * rms(expected.weight.grad)


def test_what_is_chosen_is_told_by_kind():
    module = Uses(lambda m, x: m.b(tokens_of(m.a(x))), a=nn.Conv2d(16, 16, 1), b=linear())
    known: list[Convolution] = []

    def choose(conv: Convolution, *, by_norm: bool) -> frozenset[str]:
        known.append(conv)
        return frozenset(PASSES if conv.weight[0] == 16 else ("dgrad",))

    backend = backend_of(module, choose=choose)
    ran(module, normal(2, 16, 8, 8).contiguous(memory_format=torch.channels_last), backend)
    assert known[1] == Convolution((2, 16, 8, 8), (32, 16, 1, 1), (0, 0), torch.bfloat16, CPU)
    assert backend.fp8 is not None
    why = "stays bf16: FP8 would save less than quantising costs"
    assert backend.fp8.in_words() == (
        "FP8 runs fprop of 1, dgrad of 2, wgrad of 1 of 1 convolutions and 1 linear layers",
        f"b.weight: fprop {why}; wgrad {why}",
    )


def test_a_layer_of_a_convolutions_tokens_reads_what_replaces_it():
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph_module)
        return graph_module.forward

    module = Uses(lambda m, x: m.b(tokens_of(m.a(x))), a=nn.Conv2d(16, 16, 1), b=linear())
    backend = backend_of(module, keep)
    ran(module, normal(2, 16, 8, 8).contiguous(memory_format=torch.channels_last), backend)
    first, second = graphs[0].graph.find_nodes(op="call_function", target=convolve_fp8)
    assert second.args[0] is first
    left = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert left == [convolve_fp8, convolve_fp8]


@pytest.mark.parametrize("also", [False, True], ids=["alone", "beside another reader"])
def test_a_norm_quantises_the_map_of_tokens_that_a_layer_alone_reads(also: bool):
    def use(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.stem(x))
        y = m.a(tokens_of(h))
        return y.sum() + h.sum() if also else y.sum()

    known: list[bool] = []

    def choose(conv: Convolution, *, by_norm: bool) -> frozenset[str]:
        known.append(by_norm)
        return frozenset(PASSES if conv.weight[2] == 1 else ())

    module = Uses(use, stem=nn.Conv2d(3, 16, 3, padding=1), norm=nn.GroupNorm(4, 16), a=linear())
    module.to(memory_format=torch.channels_last)
    backend = backend_of(module, choose=choose)
    assert backend.fp8 is not None
    backend.compiler = Aot(backend.fp8.see)
    backend.rewrites = ("fuse_group_norm_silu",)
    ran(module, normal(2, 3, 16, 16).contiguous(memory_format=torch.channels_last), backend).backward()
    assert known == [not also] and backend.sites["use_fp8"] == 1
    by = "2 by passes of their own" if also else "1 by norms, 1 by passes of their own"
    assert backend.fp8.in_words()[0].endswith(f"maps are quantised: {by}")


def test_one_graph_of_dynamo_serves_each_weight_its_own():
    """As where two layers of one kind are compiled by themselves, and dynamo takes the second for the first."""
    module = nn.ModuleList([linear(), linear()])
    with torch.no_grad():
        module[1].weight.mul_(-3)
    backend, x = backend_of(module), normal(2, 64, 16)
    compiled = torch.compile(lambda weight: F.linear(x, weight), backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (*module, *module):
            exact = F.linear(x, layer.weight.detach()).float()
            assert rms(compiled(layer.weight).float() - exact) < 0.06 * rms(exact)
    assert backend.sites["use_fp8"] == 2


def test_what_is_tuned_of_layers():
    """The convolutions that they can become in bf16, which are those that FP8 takes, and some that it does not."""
    module = Uses(lambda m, x: m.b(m.a(x)), a=linear(), b=linear(32, 24))
    found = {}
    for name in ("bf16", "fp8"):
        torch._dynamo.reset()
        found[name] = train_tuning.convolutions(module, lambda m, x: m(x).sum(), normal(2, 64, 16), NAMED[name])
    shapes = ((2, 16, 8, 8), (32, 16, 1, 1)), ((2, 32, 8, 8), (24, 32, 1, 1))
    expected = tuple(Convolution(x, weight, (0, 0), torch.bfloat16, CPU) for x, weight in shapes)
    assert found == {"bf16": expected, "fp8": expected}
    assert [takes(one) for one in expected] == [True, False]
