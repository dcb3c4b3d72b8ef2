"""WeightCopies: which inputs of a graph become bf16, what becomes of gradients, and when copies are written anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import StepRecipe
from ridgeline.train_backend import TrainBackend
from ridgeline.weight_copies import WeightCopies, norm_in_fp32


def filled(weights: Sequence[Tensor]) -> WeightCopies:
    copies = WeightCopies()
    copies.open_(weights)
    for weight in weights:
        copies.narrow(weight)
    assert copies.close_()
    return copies


def test_replays_of_another_step_are_seen():
    """A graph writes weights without the host's notice, so a step tells: `note_replay`."""
    model = nn.Linear(3, 3)
    other = StepProgram(Parts(model, F.mse_loss, AdamW(model.parameters())), StepRecipe(dtype="fp32"))
    weight = model.weight
    copies = filled([weight])
    with torch.autograd._unsafe_preserve_version_counter((weight,)), torch.no_grad():
        weight += 1
    copies.refresh_where_changed_()
    assert not torch.equal(copies.of(weight), weight.bfloat16())
    other.note_replay()
    copies.refresh_where_changed_()
    assert torch.equal(copies.of(weight), weight.bfloat16())


def test_gradients_are_merged_and_widened():
    """A weight that one graph reads in fp32 and another as its copy; a weight whose copy alone was read."""
    both_read, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    copies = filled([both_read, narrow])
    (both_read * 1.001 + copies.of(both_read) * 2 + copies.of(narrow) * 3).sum().backward()
    assert copies.gradient(both_read).dtype == torch.bfloat16 and narrow.grad is None
    copies.merge_gradients_()
    assert copies.gradient(both_read) is both_read.grad and both_read.grad.tolist() == pytest.approx([3.001] * 3)
    copies.widen_gradients_()
    assert copies.of(narrow).grad is None and torch.equal(narrow.grad, torch.full((3,), 3.0))


def test_closed_copies_cast_what_has_none():
    """As a graph needs it whose weights were no candidates at the step that made the copies."""
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    copies = WeightCopies()
    copies.open_([first, second])
    copy = copies.narrow(first)
    assert copies.close_() and not copies.close_() and len(copies) == 1
    assert copies.narrow(first) is copy and copy.is_leaf
    cast = copies.narrow(second)
    assert torch.equal(cast, second.bfloat16())
    cast.sum().backward()
    assert second.grad.dtype == torch.float32 and copies.of(second) is None


def test_a_weight_that_two_graphs_read_keeps_no_copy():
    """Neither is its gradient of the step that showed it lost."""
    twice, once = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    copies = WeightCopies()
    copies.open_([twice, once])
    (copies.narrow(twice) * 2 + copies.narrow(once) + copies.narrow(twice)).sum().backward()
    assert copies.close_() and copies.of(twice) is None and copies.of(once) is not None
    assert torch.equal(twice.grad, torch.full((3,), 3.0)) and once.grad is None


@pytest.mark.parametrize("narrow", [(0, 1, 2, 3), (1, 3), ()])
def test_norm_of_fp32_and_bf16_together(narrow):
    """To the bit that of the same gradients in fp32."""
    g = torch.Generator().manual_seed(0)
    wide = [torch.randn(n, generator=g).bfloat16().float() for n in (3, 50, 1, 1000)]
    mixed = [t.bfloat16() if i in narrow else t for i, t in enumerate(wide)]
    norm = norm_in_fp32(mixed)
    assert norm.dtype == torch.float32 and torch.equal(norm, get_total_norm(wide))
    if narrow:
        assert not torch.equal(get_total_norm(mixed).float(), norm)  # what it is there for


class Uses(nn.Module):
    """A weight used in one of several ways, after a layer whose weight is always narrowed."""

    def __init__(self, use: Callable[[Uses, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight, self.use = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 4)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.first(x))


def without_autocast(m: Uses, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), m.weight)


USES = {
    "linear": (lambda m, x: F.linear(x, m.weight), True),
    "by name": (lambda m, x: F.linear(x, weight=m.weight), True),
    "as an input": (lambda m, x: F.linear(m.weight, x), True),
    "twice": (lambda m, x: F.linear(F.linear(x, m.weight), m.weight), False),
    "twice in one call": (lambda m, x: F.linear(m.weight, m.weight) + x.sum(), False),
    "in fp32 too": (lambda m, x: F.linear(x, m.weight) + m.weight.square().sum(), False),
    "a view of it": (lambda m, x: F.linear(x, m.weight.t()), False),
    "no autocast": (without_autocast, False),
}


@dataclass(frozen=True)
class Ran:
    """A module's graph of dynamo, run as it is: what it took as bf16, and what came of it."""

    narrow: list[Tensor]
    output: Tensor
    gradients: list[Tensor]


def ran(
    module: nn.Module, x: Tensor, *, may: bool = True, dtype: torch.dtype | None = torch.bfloat16, rewrites: Any = ()
) -> Ran:
    copies, narrow = WeightCopies(), []
    copies.open_(module.parameters() if may else ())

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        narrow.extend(
            given
            for given, node in zip(weights, graph_module.graph.find_nodes(op="placeholder"), strict=True)
            if isinstance(given, nn.Parameter) and node.meta["example_value"].dtype == torch.bfloat16
        )
        return graph_module.forward

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        weights.extend(inputs)
        return TrainBackend(rewrites, compiler, copies)(graph_module, inputs)

    weights: list[Any] = []
    torch._dynamo.reset()
    module.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = torch.compile(module, backend=backend)(x)
    output.float().square().sum().backward()
    gradients = [copies.gradient(p) for p in module.parameters()]
    return Ran(narrow, output.detach(), [g.float() for g in gradients if g is not None])


def assert_same(module: nn.Module, x: Tensor, **options: Any) -> Ran:
    """With copies and without, to the bit; returns the run with copies."""
    expected, actual = ran(module, x, may=False, **options), ran(module, x, **options)
    assert not expected.narrow
    for a, b in zip([actual.output, *actual.gradients], [expected.output, *expected.gradients], strict=True):
        assert torch.equal(a, b)
    return actual


@pytest.mark.parametrize("name", USES)
def test_what_a_graph_takes_in_bf16(name):
    use, taken = USES[name]
    module = Uses(use)
    narrow = assert_same(module, torch.randn(4, 4)).narrow
    assert any(weight is module.first.weight for weight in narrow)
    assert any(weight is module.weight for weight in narrow) == taken


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_and_bias_of_a_convolution(rank, transposed):
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{rank}d")
    torch.manual_seed(0)
    module = kind(4, 4, 3, padding=1)
    assert len(assert_same(module, torch.randn(2, 4, *[5] * rank)).narrow) == 2


def test_weights_of_merged_linear_layers():
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, n) for n in (2, 3, 4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([layer(x) for layer in self.layers], dim=1)

    torch.manual_seed(0)
    assert len(assert_same(Siblings(), torch.randn(2, 8), rewrites=("merge_linears",)).narrow) == 8


def test_nothing_is_narrow_where_nothing_is_cast_or_somebody_waits_for_the_gradient():
    module, x = Uses(USES["linear"][0]), torch.randn(2, 4)
    assert not ran(module, x, dtype=None).narrow
    assert not ran(module, x, dtype=torch.float16).narrow
    module.weight.register_hook(lambda grad: grad)
    module.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert not ran(module, x).narrow
