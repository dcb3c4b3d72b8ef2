"""Convolutions in FP8: what each pass computes, which layers of a graph are taken, and for which weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from fp8_steps import Uses, backend_of, fp8_by_reference
from ridgeline.fp8_scaling import DelayedScaling
from ridgeline.kernels import conv2d_fp8, conv2d_wgrad_fp8
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.conv2d_fp8 import for_dgrad
from ridgeline.numerics import rms
from ridgeline.sass import SHARED_LIMIT_BYTES
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import ARCHITECTURES, PASSES, chosen_passes, impossible_passes
from ridgeline.train_rewrites.use_fp8 import convolve_fp8

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    torch._dynamo.reset()
    with fp8_by_reference():
        yield


def image(c: int, side: int = 16, seed: int = 1, n: int = 2) -> Tensor:
    x = torch.randn(n, c, side, side, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def conv(c: int = 16, k: int = 32, size: int = 3, **choices: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(c, k, size, **{"padding": size // 2, **choices}).to(memory_format=torch.channels_last)


# --- what is computed ----------------------------------------------------------------------------------------------

SUBSETS = [subset for size in range(1, 4) for subset in combinations(PASSES, size)]


def rounded(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What FP8 makes of a tensor, exactly, in float64."""
    return (tensor.detach().float() * scale).to(dtype).double() / scale.double()


@pytest.mark.parametrize("passes", SUBSETS, ids="+".join)
@pytest.mark.parametrize("size", [1, 3])
def test_each_pass_multiplies_what_it_has(passes: tuple[str, ...], size: int):
    """Those in FP8 the quantised operands, the others the bf16 ones; results within a rounding of bf16, in float64."""
    layer = conv(size=size).bfloat16()
    x, dy = image(16).bfloat16().requires_grad_(), image(32, seed=2).bfloat16() * 1e-3
    scaling = DelayedScaling({"x": "e4m3", "w": "e4m3", "dy": "e5m2"})
    for value, name in ((x, "x"), (layer.weight, "w"), (dy, "dy")):
        scaling.refresh_(value.detach(), name)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    copy = (layer.weight.detach().float() * scaling.scale[1]).to(e4m3)
    state = (scaling.scale, scaling.inverse, scaling.amax, scaling.counts)
    weight, bias = layer.weight, layer.bias.detach().float().requires_grad_()
    y = convolve_fp8(x, weight, bias, (copy, for_dgrad(copy)), state, (0, 1, 2), layer.padding, passes)
    y.backward(dy)

    exact = {"x": x.detach().double(), "w": weight.detach().double(), "dy": dy.double()}
    fp8 = {
        "x": rounded(x, scaling.scale[0], e4m3),
        "w": rounded(weight, scaling.scale[1], e4m3),
        "dy": rounded(dy, scaling.scale[2], e5m2),
    }

    def operands(name: str, *which: str) -> list[Tensor]:
        return [(fp8 if name in passes else exact)[one].clone().requires_grad_() for one in which]

    a, w = operands("fprop", "x", "w")
    assert close(y, F.conv2d(a, w, bias.detach().double(), padding=layer.padding))
    w, g = operands("dgrad", "w", "dy")
    assert close(x.grad, torch.nn.grad.conv2d_input(x.shape, w, g, padding=layer.padding))
    a, g = operands("wgrad", "x", "dy")
    assert close(weight.grad, torch.nn.grad.conv2d_weight(a, weight.shape, g, padding=layer.padding))
    assert close(bias.grad, g.sum((0, 2, 3)))
    # each is quantised once, by whichever passes read it
    quantised = [
        x.numel() * bool({"fprop", "wgrad"} & set(passes)),
        0,
        dy.numel() * bool({"dgrad", "wgrad"} & set(passes)),
    ]
    assert scaling.counts[:, 2].tolist() == quantised
    assert [amax > 0 for amax in scaling.amax.tolist()] == [n > 0 for n in quantised]
    assert (y.dtype, weight.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def close(actual: Tensor | None, expected: Tensor) -> bool:
    """Within the rounding of bf16 of the whole result."""
    assert actual is not None
    error = (actual.double() - expected.detach()).abs().max().item()
    return error <= 2**-8 * expected.abs().max().item()


# --- which layers --------------------------------------------------------------------------------------------------


def ran(module: nn.Module, x: Tensor, backend: TrainBackend) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.compile(module, backend=backend)(x)


def frozen() -> nn.Conv2d:
    return conv().requires_grad_(False)


def uncast(m: Uses, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.a(x.float())


LEFT = {
    "stride": (conv(stride=2), "its stride is (2, 2)"),
    "dilation": (conv(dilation=2, padding=2), "its dilation is (2, 2)"),
    "groups": (conv(c=32, groups=2), "it has 2 groups"),
    "padding": (conv(padding=0), "its padding (0, 0) does not keep the size under a filter (3, 3)"),
    "an even filter": (conv(size=2), "its padding (1, 1) does not keep the size under a filter (2, 2)"),
    "padding in words": (conv(padding="same"), "its padding is 'same'"),
    "filters": (conv(k=24), "it has 24 filters of 16 channels, and FP8 takes multiples of 16"),
    "channels": (conv(c=8), "it has 32 filters of 8 channels, and FP8 takes multiples of 16"),
    "NCHW weight": (nn.Conv2d(16, 16, 3, padding=1), "its weight is not channels-last"),
    "frozen": (frozen(), "its weight is frozen"),
    "bf16 weight": (conv().bfloat16(), "its weight is bf16"),
}


@pytest.mark.parametrize("name", LEFT)
def test_does_not_fire_on(name: str):
    layer, reason = LEFT[name]
    module = Uses(lambda m, x: m.a(x), a=layer)
    backend = backend_of(module)
    y = ran(module, image(layer.in_channels), backend)
    assert backend.sites["use_fp8"] == 0
    (found,) = backend.fp8.report()
    assert (found.layer, found.passes, found.reason) == ("a.weight", (), reason)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(y, module(image(layer.in_channels)))


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, x: m.a(x) + m.a(x * 2), "its weight is read elsewhere too"),
        (lambda m, x: m.a(x) * m.a.weight.square().mean(), "its weight is read elsewhere too"),
        (lambda m, x: F.conv2d(x, m.a.weight * 2, padding=1), "its weight is no parameter of the model"),
        (uncast, "its result is fp32"),
    ],
    ids=["twice", "a penalty", "computed", "no autocast"],
)
def test_does_not_fire_where_a_weight_is_used_otherwise(use: Callable[..., Tensor], reason: str):
    module = Uses(use, a=conv(bias=False))
    backend = backend_of(module)
    ran(module, image(16), backend)
    assert backend.sites["use_fp8"] == 0 and {found.reason for found in backend.fp8.report()} == {reason}


def test_what_is_chosen_is_told():
    module = Uses(lambda m, x: m.b(F.relu(m.a(x))), a=conv(), b=conv(32, 16, 1))
    backend = backend_of(module, choose=lambda conv, *, by_norm: frozenset({"fprop"} if conv.weight[2] == 3 else ()))
    ran(module, image(16), backend)
    a, b = backend.fp8.report()
    why = "stays bf16: FP8 would save less than quantising costs"
    assert a.passes == ("fprop",) and a.reason == f"dgrad {why}; wgrad {why}"
    assert b.passes == () and b.reason.startswith(f"fprop {why}; dgrad")
    assert backend.fp8.in_words()[0] == "FP8 runs fprop of 1, dgrad of 0, wgrad of 0 of 2 convolutions"


def test_a_chooser_knows_whose_maps_norms_quantise():
    """Of two layers behind norms, one whose norm another reads too, and one behind an activation."""
    layers = {name: conv(16, 16) for name in "abc"} | {name: nn.GroupNorm(4, 16) for name in ("norm_a", "norm_b")}

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.silu(m.norm_b(m.a(F.silu(m.norm_a(x)))))
        return m.c(F.silu(m.b(y) + y))

    known = []

    def choose(conv: Convolution, *, by_norm: bool) -> frozenset[str]:
        known.append(by_norm)
        return frozenset(PASSES)

    module = Uses(forward, **layers)
    backend = backend_of(module, choose=choose)
    backend.rewrites = ("fuse_group_norm_silu",)
    ran(module, image(16), backend)
    assert backend.sites["fuse_group_norm_silu"] == 2 and known == [True, False, False]


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        ((1, 16, 16, 16), (16, 16, 3, 3), None),
        ((1, 16, 32, 128), (16, 16, 1, 1), None),
        ((1, 16, 32, 96), (16, 16, 1, 1), "quads need a power of two of columns, from 4 to 128, got 96"),
        ((1, 16, 14, 16), (16, 16, 3, 3), "quads need a multiple of 4 rows, got 14"),
        ((1, 16, 16, 24), (16, 16, 3, 3), "quads need a power of two of columns, from 4 to 128, got 24"),
        ((1, 16, 16, 16), (16, 16, 5, 5), "filters have 5 rows and 5 columns, not 1 or 3"),
        ((1, 16, 16, 16), (16, 16, 3, 5), "filters have 3 rows and 5 columns, not 1 or 3"),
    ],
)
def test_gradients_of_weights_that_have_no_kernel_stay_bf16(x: Sequence[int], weight: Sequence[int], words: str | None):
    shapes = Convolution(tuple(x), tuple(weight), (weight[2] // 2, weight[3] // 2), torch.bfloat16, CPU)
    assert impossible_passes(shapes) == ({} if words is None else {"wgrad": words})
    assert chosen_passes(shapes, by_norm=False) == frozenset(PASSES if words is None else ("fprop", "dgrad"))


@pytest.mark.parametrize(
    ("capability", "known"),
    [((8, 0), ()), ((8, 9), PASSES), ((9, 0), PASSES), ((10, 0), ()), ((12, 0), PASSES)],
)
def test_passes_without_a_kernel_for_the_gpu_stay_bf16(
    capability: tuple[int, int], known: Sequence[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    shapes = Convolution((1, 16, 16, 16), (16, 16, 3, 3), (1, 1), torch.bfloat16, torch.device("cuda"))
    assert chosen_passes(shapes, by_norm=False) == frozenset(known)
    arch = "sm_{}{}".format(*capability)
    for reason in impossible_passes(shapes).values():
        assert reason == f"its FP8 kernel is for sm_89, sm_90 and sm_120, and the GPU is {arch}"


@pytest.mark.parametrize("arch", SHARED_LIMIT_BYTES)
def test_architectures_are_those_that_the_kernel_has_configs_for(arch: str):
    arguments = conv2d_fp8.SAMPLES[0].arguments(torch.float8_e5m2, "meta")
    has = bool(conv2d_fp8.candidates(target=typical_target(arch), **arguments))
    assert (arch in ARCHITECTURES) is has
    weight_gradient = conv2d_wgrad_fp8.SAMPLES[0].arguments(torch.float8_e5m2, "meta")
    has = bool(conv2d_wgrad_fp8.candidates(target=typical_target(arch), **weight_gradient))
    assert (arch in ARCHITECTURES) is has


def test_a_layer_without_quads_trains():
    module = Uses(lambda m, x: m.a(x), a=conv())
    backend = backend_of(module)
    x = image(16, side=10)
    y = ran(module, x, backend)
    y.float().square().sum().backward()
    (found,) = backend.fp8.report()
    assert found.passes == ("fprop", "dgrad") and found.reason.startswith(
        "wgrad stays bf16: quads need a multiple of 4"
    )
    expected = conv()
    with torch.autocast("cpu", torch.bfloat16):
        expected(x).float().square().sum().backward()
    assert rms(module.a.weight.grad - expected.weight.grad) < 0.1 * rms(expected.weight.grad)


# --- what a graph holds --------------------------------------------------------------------------------------------


def test_weights_are_not_cast_and_activations_kept_in_fp8():
    """One layer, no copies of weights: its fp32 weight has no reader, and backward gets quads alone of the input."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    module = Uses(lambda m, x: m.a(F.relu(x)), a=conv())
    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    x = image(16).requires_grad_()
    ran(module, x, backend_of(module, compiler)).sum().backward()
    forward, backward = graphs
    unread = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder") if not node.users]
    assert [(value.shape, value.dtype) for value in unread] == [(module.a.weight.shape, torch.float32)]
    saved = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    maps = {str(value.dtype): tuple(value.shape) for value in saved if value.numel() >= x.numel()}
    # for relu, for the weight, and the gradient that comes in
    relu, quads, dy = tuple(x.shape), (2, 6, 16, 6, 4, 4), (2, 32, 16, 16)
    assert maps == {"torch.float32": relu, "torch.float8_e4m3fn": quads, "torch.bfloat16": dy}


def test_one_graph_of_dynamo_serves_each_weight_its_own():
    """As where two layers of one kind are compiled by themselves, and dynamo takes the second for the first."""
    module = nn.ModuleList([conv(16, 16), conv(16, 16)])
    with torch.no_grad():
        module[1].weight.mul_(-3)
    backend = backend_of(module)
    x = image(16)

    def call(weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=1)

    compiled = torch.compile(call, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (*module, *module):
            exact = F.conv2d(x, layer.weight.detach(), padding=1).float()
            assert rms(compiled(layer.weight).float() - exact) < 0.06 * rms(exact)
    assert backend.sites["use_fp8"] == 2
    assert [one.layer for one in backend.fp8.report()] == ["0.weight", "1.weight"]
    assert all(layer.tensors["x"].elements == 0 for layer in backend.fp8.report())  # no update yet
    assert backend.fp8.state.counts[[0, 3], 2].tolist() == [2 * x.numel()] * 2


def test_a_compiled_module_follows_its_own_bf16():
    """Forward and all gradients within FP8's rounding by scales of 1; gradients in the dtype of the weights."""
    module = Uses(lambda m, x: m.b(F.silu(m.a(x))), a=conv(), b=conv(32, 16, 1, bias=False))
    results = []
    for run in (lambda x: ran(module, x, backend_of(module)), module):
        module.zero_grad()
        x = image(16).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in module.parameters())
        results.append([y.detach().float(), x.grad, *(p.grad for p in module.parameters())])
    for fp8, bf16 in zip(*results, strict=True):
        assert 0 < rms(fp8 - bf16) < 0.15 * rms(bf16)
