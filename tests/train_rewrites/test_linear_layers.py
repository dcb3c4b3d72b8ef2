"""Which linear layers of a bf16 step become 1x1 convolutions, by tables that a test makes up, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fp8_steps import Aot, Uses, fp8_by_reference
from graphs import targets
from ridgeline.kernels import conv2d_fprop
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites import overlap_weight_gradients, use_convolutions
from ridgeline.train_rewrites.fuse_residual_add import residuals
from ridgeline.train_rewrites.use_convolutions import convolutions_of, convolve, multiply
from ridgeline.weight_copies import WeightCopies
from shared_kernels import plant_rows

OPS = ("conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad")
FAST = dict.fromkeys(OPS, (10e-6, 30e-6, 20e-6))  # ours, cuDNN's, cuBLAS's
SLOW = dict.fromkeys(OPS, (30e-6, 20e-6, 10e-6))


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    torch._dynamo.reset()
    with fp8_by_reference():
        yield


def tables(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, tuple[float, ...]]) -> None:
    plant_rows(monkeypatch, seconds, conv2d_fprop)


def linear(c: int = 16, k: int = 24, **choices: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(c, k, **choices)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image(c: int = 16, side: int = 8) -> Tensor:
    return normal(2, c, side, side).contiguous(memory_format=torch.channels_last)


def pixels(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def residual(m: Any, x: Tensor) -> Tensor:
    """As the projection behind attention is added to what its block was given."""
    return x + m.a(pixels(x.tanh())).transpose(1, 2).unflatten(2, x.shape[2:])


class Ran:
    """A module's graphs as a step's compiler gets them, and what it computed."""

    def __init__(self, module: nn.Module, x: Tensor, *, copies: bool = False) -> None:
        torch._dynamo.reset()
        module.zero_grad()
        self.dynamo: list[fx.GraphModule] = []
        self.compiler = Aot(lambda _: None)
        self.copies = WeightCopies()
        if copies:
            self.copies.open_(module.parameters())

        def compiler(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            self.dynamo.append(graph_module)
            return self.compiler(graph_module, inputs)

        rewrites = ("fuse_group_norm_silu", "keep_channels_last", "use_convolutions")
        self.backend = TrainBackend(rewrites, compiler, copies=self.copies)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            self.y = torch.compile(module, backend=self.backend)(leaf)
        self.y.float().square().mean().backward()
        gradients = {name: self.copies.gradient(one) for name, one in module.named_parameters()}
        self.gradients = {"x": leaf.grad, **gradients}

    @property
    def sites(self) -> int:
        return self.backend.sites["use_convolutions"]

    @property
    def calls(self) -> list[Any]:
        """The functions that replaced a layer."""
        nodes = self.dynamo[0].graph.nodes
        return [node.target for node in nodes if node.target in (convolve, multiply)]

    def operators(self) -> tuple[Any, Any]:
        """How often each operator is called, forward and backward."""
        forward, backward = self.compiler.graphs
        return targets(forward), targets(backward)


def check(module: nn.Module, x: Tensor, ran: Ran) -> None:
    """What was computed, by references, against the same module as PyTorch has it."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(leaf)
    expected.float().square().mean().backward()
    assert ran.y.dtype == expected.dtype and ran.y.shape == expected.shape
    # biases are added in fp32 and a residual's sum is rounded once
    torch.testing.assert_close(ran.y.float(), expected.float(), rtol=2**-6, atol=2**-6)
    wanted = {"x": leaf.grad, **{name: one.grad for name, one in module.named_parameters()}}
    for name, gradient in wanted.items():
        found = ran.gradients[name]
        assert found is not None and gradient is not None and found.shape == gradient.shape, name
        atol = 2**-5 * gradient.abs().max().item()
        torch.testing.assert_close(found.float(), gradient.float(), rtol=2**-5, atol=atol)


# --- what fires ------------------------------------------------------------------------------------------------------

USES: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "tokens": (lambda m, x: m.a(x), normal(2, 64, 16)),
    "tokens of an odd count": (lambda m, x: m.a(x), normal(2, 50, 16)),
    "of more axes": (lambda m, x: m.a(x), normal(2, 3, 8, 4, 16)),
    "of a map's pixels": (lambda m, x: m.a(pixels(x.tanh())), image()),
    "as rows and columns": (lambda m, x: m.a(x.tanh().permute(0, 2, 3, 1)), image()),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", USES)
def test_a_layer_that_pays_is_a_convolution_both_ways(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, FAST)
    use, x = USES[name]
    module = Uses(use, a=linear(bias=bias))
    ran = Ran(module, x)
    assert (ran.sites, ran.calls) == (1, [convolve])
    forward, backward = ran.operators()
    assert forward["conv2d_fprop"] == backward["conv2d_dgrad"] == backward["conv2d_wgrad"] == 1
    assert backward["mm"] == forward["mm"] == forward["addmm"] == 0
    # no map is copied into another layout
    assert forward["clone"] == backward["clone"] == 0
    check(module, x, ran)


def test_passes_that_lose_are_pytorchs_products(monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, {**SLOW, "conv2d_dgrad": FAST["conv2d_dgrad"]})
    module, x = Uses(lambda m, x: m.a(x), a=linear()), normal(2, 64, 16)
    ran = Ran(module, x)
    assert (ran.sites, ran.calls) == (1, [multiply])
    forward, backward = ran.operators()
    assert (forward["addmm"], backward["conv2d_dgrad"], backward["mm"]) == (1, 1, 1)
    assert forward["conv2d_fprop"] == backward["conv2d_wgrad"] == backward["convolution_backward"] == 0
    check(module, x, ran)

    tables(monkeypatch, {**SLOW, "conv2d_fprop": FAST["conv2d_fprop"], "conv2d_wgrad": (30e-6, 10e-6, 20e-6)})
    ran = Ran(module, x)
    forward, backward = ran.operators()
    # cuDNN's where it was fastest
    assert (forward["conv2d_fprop"], backward["mm"], backward["convolution_backward"]) == (1, 1, 1)
    check(module, x, ran)


def test_a_residual_is_added_by_the_layer_before_it(monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, FAST)
    module, x = Uses(residual, a=linear(k=16)), image().bfloat16()
    ran = Ran(module, x)
    forward, _ = ran.operators()
    assert residuals(ran.compiler.graphs[0]) == 1 and forward["add"] == 0
    check(module, x, ran)


def test_a_residual_of_tokens_is_added_by_the_layer_too(monkeypatch: pytest.MonkeyPatch):
    """As in a transformer: what is added to tokens is added to the map that they are."""
    tables(monkeypatch, FAST)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.tanh()
        x = x + m.a(x.sin())
        return x + m.b(x.sin())

    module, x = Uses(forward, a=linear(k=16), b=linear(k=16)), normal(2, 50, 16).bfloat16()
    ran = Ran(module, x)
    forward_calls, _ = ran.operators()
    assert residuals(ran.compiler.graphs[0]) == 2 and forward_calls["add"] == forward_calls["clone"] == 0
    check(module, x, ran)


@pytest.mark.parametrize(
    ("use", "ours"),
    [
        (residual, True),
        (lambda m, x: m.a(pixels(x)).transpose(1, 2).unflatten(2, x.shape[2:]).add(x), True),
        (lambda m, x: m.a(pixels(x)), False),
        (lambda m, x: m.a(pixels(x)) + 1.0, False),
        (lambda m, x: m.a(pixels(x)) + pixels(x)[:1], False),
        (lambda m, x: m.a(pixels(x)) + pixels(x).float(), False),
        (lambda m, x: (y := m.a(pixels(x))) * 2 + y, False),
    ],
    ids=["residual", "method", "alone", "number", "other shape", "other dtype", "other readers"],
)
def test_a_first_pass_that_saves_a_sum_may_take_as_much_longer(use: Any, ours: bool, monkeypatch: Any):
    """At least two microseconds."""
    tables(monkeypatch, {**FAST, "conv2d_fprop": (11.9e-6, 10e-6, 10e-6)})
    ran = Ran(Uses(use, a=linear(k=16)), image().bfloat16())
    assert ran.calls == [convolve if ours else multiply]
    tables(monkeypatch, {**FAST, "conv2d_fprop": (12.1e-6, 10e-6, 10e-6)})
    assert Ran(Uses(use, a=linear(k=16)), image().bfloat16()).calls == [multiply]


def test_a_sum_of_two_layers_is_no_ones_saving(monkeypatch: pytest.MonkeyPatch):
    """One of them adds the other's result, the one with more products."""
    tables(monkeypatch, {**FAST, "conv2d_fprop": (11.9e-6, 10e-6, 10e-6)})

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(x) + m.a(pixels(x)).transpose(1, 2).unflatten(2, x.shape[2:])

    module = Uses(forward, a=linear(k=16), b=nn.Conv2d(16, 16, 1)).to(memory_format=torch.channels_last)
    assert Ran(module, image().bfloat16()).calls == [multiply, multiply]


def test_a_convolution_adds_behind_the_watch_on_its_gradient(monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, {**FAST, "conv2d_fprop": (11.9e-6, 10e-6, 10e-6)})
    module = Uses(lambda m, x: x + m.b(x), b=nn.Conv2d(16, 16, 1)).to(memory_format=torch.channels_last)
    ran = Ran(module, image().bfloat16())
    assert ran.calls == [convolve] and residuals(ran.compiler.graphs[0]) == 1
    assert Ran(Uses(lambda m, x: x * m.b(x), b=module.b), image().bfloat16()).calls == [multiply]


def test_what_a_sum_saves_can_be_all_that_pays(monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, dict.fromkeys(OPS, (10.5e-6, 10e-6, 10e-6)))
    assert Ran(Uses(residual, a=linear(k=16)), image().bfloat16()).calls == [convolve]
    assert Ran(Uses(lambda m, x: m.a(pixels(x)), a=linear(k=16)), image().bfloat16()).sites == 0


@pytest.mark.parametrize("seconds", [FAST, {**FAST, "conv2d_fprop": SLOW["conv2d_fprop"]}], ids=["ours", "cuBLAS's"])
def test_copies_in_bf16_stand_in_for_weights_and_get_their_gradients(seconds: Any, monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, seconds)
    module, x = Uses(lambda m, x: m.a(x), a=linear()), normal(2, 64, 16).bfloat16()
    ran = Ran(module, x, copies=True)
    # a bias that our kernel adds comes in fp32
    assert len(ran.copies) == (1 if ran.calls == [convolve] else 2)
    gradient = ran.gradients["a.weight"]
    assert gradient is not None and gradient.dtype == torch.bfloat16 and gradient.is_contiguous()
    assert [graph_casts(graph) for graph in ran.compiler.graphs] == [0, 0]
    check(module, x, ran)


def graph_casts(graph_module: fx.GraphModule) -> int:
    return targets(graph_module)["_to_copy"]


def test_a_norm_sums_the_gradient_of_the_bias_before_it(monkeypatch: pytest.MonkeyPatch):
    """Whose gradient of the map is that of the layer's tokens."""
    tables(monkeypatch, FAST)

    def forward(m: Any, x: Tensor) -> Tensor:
        return F.silu(m.norm(m.a(pixels(x)).transpose(1, 2).unflatten(2, x.shape[2:])))

    module, x = Uses(forward, a=linear(k=16), norm=nn.GroupNorm(4, 16)), image().bfloat16()
    ran = Ran(module, x)
    _, backward = ran.operators()
    assert (backward["group_norm_silu_backward_summed"], backward["sum"], backward["clone"]) == (1, 0, 0)
    check(module, x, ran)


def test_gradients_run_beside_the_rest(monkeypatch: pytest.MonkeyPatch):
    """That of the weight by whichever kernel; that of the bias where an operator of ours made what it sums."""
    x = normal(2, 64, 16).bfloat16()
    module = Uses(lambda m, x: m.b(m.a(x)), a=linear(), b=linear(24, 16))
    for seconds, twin in ((FAST, "conv2d_wgrad_beside"), ({**FAST, "conv2d_wgrad": SLOW["conv2d_wgrad"]}, "mm_beside")):
        tables(monkeypatch, seconds)
        backward = Ran(module, x, copies=True).compiler.graphs[1]
        assert overlap_weight_gradients.apply(backward) == 3
        found = targets(backward)
        assert (found[twin], found["sum_dim_IntList_beside"], found["sum"]) == (2, 1, 1)


# --- what does not ---------------------------------------------------------------------------------------------------


def uncast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.a(x)


LEFT: dict[str, tuple[nn.Linear, Callable[..., Tensor], Tensor]] = {
    "a row an image": (linear(), lambda m, x: m.a(x), normal(64, 16)),
    "channels apart": (linear(), lambda m, x: m.a(x.transpose(1, 2)), normal(2, 16, 64)),
    "gaps between images": (linear(), lambda m, x: m.a(x[:, 1:]), normal(2, 65, 16)),
    "gaps between tokens": (linear(), lambda m, x: m.a(x[..., :16]), normal(2, 64, 24)),
    "inputs": (linear(20), lambda m, x: m.a(x), normal(2, 64, 20)),
    "outputs": (linear(k=20), lambda m, x: m.a(x), normal(2, 64, 16)),
    "few outputs": (linear(k=3), lambda m, x: m.a(x), normal(2, 64, 16)),
    "fp32": (linear(), uncast, normal(2, 64, 16)),
    "a turned weight": (linear(16, 16), lambda m, x: F.linear(x, m.a.weight.t()) + m.a.bias, normal(2, 64, 16)),
}


@pytest.mark.parametrize("name", LEFT)
def test_does_not_fire_on(name: str, monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, FAST)
    layer, use, x = LEFT[name]
    ran = Ran(Uses(use, a=layer), x)
    assert ran.sites == 0 and convolutions_of(ran.dynamo[0]) == ()


@pytest.mark.parametrize(
    ("seconds", "sites"),
    [
        (FAST, 1),
        ({}, 0),  # never tuned
        (SLOW, 0),
        # cuDNN's time alone is no evidence about a linear layer
        ({name: (ours, cudnn) for name, (ours, cudnn, _) in FAST.items()}, 0),
        ({**FAST, "conv2d_wgrad": FAST["conv2d_wgrad"][:2]}, 0),
        *(({name: row for name, row in FAST.items() if name != left_out}, 0) for left_out in OPS),
        ({**SLOW, "conv2d_wgrad": FAST["conv2d_wgrad"]}, 1),
        # nothing of ours: PyTorch's own layer stays, though its convolution is faster in one pass
        ({**SLOW, "conv2d_wgrad": (30e-6, 10e-6, 20e-6)}, 0),
    ],
)
def test_all_passes_together_decide(seconds: Any, sites: int, monkeypatch: pytest.MonkeyPatch):
    tables(monkeypatch, seconds)
    assert Ran(Uses(lambda m, x: m.a(x), a=linear()), normal(2, 64, 16)).sites == sites


# --- words -----------------------------------------------------------------------------------------------------------


def test_layers_are_told_by_kind(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's time is that of its linear layer: cuBLAS's for one kind, the faster kernel's for the other."""
    tables(monkeypatch, {**FAST, "conv2d_dgrad": (30e-6, 10e-6, 20e-6)})
    module = Uses(lambda m, x: m.b(pixels(m.a(x))), a=nn.Conv2d(16, 16, 1), b=linear())
    ran = Ran(module.to(memory_format=torch.channels_last), image())
    assert use_convolutions.in_words(ran.dynamo[0]) == (
        "3 passes of convolutions and 3 of linear layers take 60.0 µs for PyTorch's 110 µs by the tables: fprop 2, "
        "dgrad 0, wgrad 2 by this project's kernels, the others by PyTorch's"
    )
    only = Ran(Uses(lambda m, x: m.a(x), a=linear()), normal(2, 64, 16))
    assert use_convolutions.in_words(only.dynamo[0]).startswith("3 passes of linear layers take 30.0 µs for")
