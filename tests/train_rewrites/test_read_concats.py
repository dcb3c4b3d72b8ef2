"""Concatenations that a norm and a convolution read become two maps: where, with what values, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fp8_steps import Aot, fp8_by_reference
from graphs import targets
from ridgeline.fp8_step import Fp8Step
from ridgeline.kernels import (
    concat_conv2d,
    concat_conv2d_wgrad,
    conv2d_dgrad,
    conv2d_fprop,
    group_norm_silu,
    group_norm_silu_backward_concat,
    group_norm_silu_fp8,
)
from ridgeline.models.ddpm_unet import UNet, UNetConfig
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites import BY_NAME, overlap_weight_gradients
from ridgeline.train_rewrites._operators import arguments
from ridgeline.train_rewrites.fp8_passes import PASSES
from ridgeline.weight_copies import WeightCopies
from shared_kernels import plant_rows

FAST = {name: (1e-5, 2e-5) for name in ("conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad")}
NAMES = tuple(name for name in BY_NAME if name not in ("fuse_attention", "fuse_upsample_conv"))
OURS = (concat_conv2d.OP, concat_conv2d_wgrad.OP)
NORMS = (group_norm_silu_backward_concat.OP, group_norm_silu_backward_concat.SUMMED_OP)
C1, C2, K = 32, 16, 16


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_rows(monkeypatch, FAST, conv2d_fprop)


class Block(nn.Module):
    """Layers for `body(block, h, kept)`, two maps that convolutions made."""

    def __init__(self, body: Callable[..., Tensor], c1: int = C1, c2: int = C2) -> None:
        super().__init__()
        torch.manual_seed(0)
        c = c1 + c2
        self.body = body
        self.up, self.down = nn.Conv2d(3, c1, 3, padding=1), nn.Conv2d(3, c2, 3, padding=1)
        self.norm, self.other = nn.GroupNorm(4, c), nn.GroupNorm(4, c)
        self.conv, self.skip = nn.Conv2d(c, K, 3, padding=1), nn.Conv2d(c, K, 1)
        self.narrow, self.film = nn.Conv2d(c, K, 2, stride=2), nn.Linear(4, 2 * c)
        for one in (self.norm, self.other):
            nn.init.normal_(one.weight)
            nn.init.normal_(one.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.up(x), self.down(x))


def joined(h: Tensor, kept: Tensor) -> Tensor:
    return torch.cat((h, kept), dim=1)


def block(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = joined(h, kept)
    return m.skip(x) + m.conv(F.silu(m.norm(x)))


def skip_first(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = torch.cat([h, kept], 1)
    y = m.skip(x)
    return y * m.conv(m.norm(x))


def modulated(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    w, b = m.film(torch.ones(2, 4))[:, :, None, None].chunk(2, dim=1)
    x = torch.cat(tensors=(h, kept), dim=-3)
    return m.conv(F.silu(m.norm(x) * (1 + w) + b)) + m.skip(x)


def both_read_on(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    return block(m, h, kept) + h[:, :K] * kept


def image() -> Tensor:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


class Trained:
    """A forward and a backward pass under autocast, compiled by AOTAutograd alone."""

    def __init__(self, model: nn.Module, *inputs: Tensor, names: tuple[str, ...] = NAMES, fp8: Any = None) -> None:
        self.compiler = Aot(lambda _: None)
        copies = WeightCopies()
        copies.open_(model.parameters())
        backend = TrainBackend(names, self.compiler, copies, fp8)
        torch.compiler.reset()
        with fp8_by_reference():
            with torch.autocast("cpu", torch.bfloat16):
                self.y = torch.compile(model, backend=backend, dynamic=False)(*inputs)
            self.y.float().square().mean().backward()
        self.sites = backend.sites["read_concats"]
        self.notes = backend.notes
        self.gradients = {
            name: one.grad if one.grad is not None else copies.gradient(one) for name, one in model.named_parameters()
        }

    @property
    def calls(self) -> Counter[str]:
        return sum((targets(graph) for graph in self.compiler.graphs), Counter())

    def counts(self) -> list[int]:
        """Calls of the convolutions of two maps, and of norms' backwards in either form."""
        return [*(self.calls[op.name] for op in OURS), sum(self.calls[op.name] for op in NORMS)]

    def map_copies(self, name: str) -> list[Tensor]:
        """What this operator makes of more than one pixel."""
        target = getattr(torch.ops.aten, name).default
        made = [node.meta["val"] for graph in self.compiler.graphs for node in find(graph, target)]
        return [one for one in made if one.dim() == 4 and one.shape[2] > 1]


def find(graph: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=target))


TAKEN = {
    "a block": block,
    "the convolution first, no activation": skip_first,
    "scale and shift": modulated,
    "both maps are read elsewhere too": both_read_on,
    "the convolution has taps": lambda m, h, kept: m.conv(x := joined(h, kept)) + m.skip(m.norm(x)),
}


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_two_maps_give_the_values_of_their_concatenation(body: Callable[..., Tensor]):
    without = tuple(name for name in NAMES if name != "read_concats")
    before, now = Trained(Block(body), image(), names=without), Trained(Block(body), image())
    assert (before.sites, now.sites) == (0, 1)
    assert torch.equal(now.y, before.y)
    for name, gradient in now.gradients.items():
        right = before.gradients[name]
        assert (gradient is None) == (right is None), name
        if gradient is None or right is None:
            continue
        if name.startswith(("up", "down")):
            # the gradient of a map is rounded as the norm leaves it, before the convolution's is added
            torch.testing.assert_close(gradient, right, rtol=2**-6, atol=2**-7 * right.abs().max().item())
        else:
            assert torch.equal(gradient, right), name
    assert now.counts() == [1, 1, 1]
    assert not now.map_copies("cat")
    assert len(now.map_copies("clone")) <= len(before.map_copies("clone"))


def test_what_needs_no_gradient_gets_none():
    def body(m: Any, h: Tensor, kept: Tensor) -> Tensor:
        return block(m, h.detach(), kept.detach())

    model = Block(body)
    model.skip.weight.requires_grad_(False)
    assert Trained(model, image()).counts() == [1, 0, 1]  # the norm has parameters


def read_thrice(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = joined(h, kept)
    return m.skip(x) + m.conv(m.norm(x)) + x[:, :K]


def two_norms(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = joined(h, kept)
    return m.conv(m.norm(x)) + m.conv(m.other(x))


def of_rows(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = torch.cat((torch.cat((h, kept), 1), torch.cat((h, kept), 1)), 2)
    return m.skip(x) + m.conv(m.norm(x))


def of_three(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = torch.cat((h, kept[:, :8], kept[:, 8:]), 1)
    return m.skip(x) + m.conv(m.norm(x))


def strided(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    x = joined(h, kept)
    return m.narrow(x).mean() + m.conv(m.norm(x))


LEFT: dict[str, tuple[Callable[..., Tensor], tuple[int, int]]] = {
    "a third reader": (read_thrice, (C1, C2)),
    "no norm": (lambda m, h, kept: m.skip(joined(h, kept)), (C1, C2)),
    "no convolution": (lambda m, h, kept: m.conv(m.norm(joined(h, kept))), (C1, C2)),
    "two norms": (two_norms, (C1, C2)),
    "rows, not channels": (of_rows, (C1, C2)),
    "three maps": (of_three, (C1, C2)),
    "a stride": (strided, (C1, C2)),
    "fp32 maps": (lambda m, h, kept: block(m, h.float(), kept.float()), (C1, C2)),
    "another layout": (lambda m, h, kept: block(m, h.contiguous(), kept), (C1, C2)),
    "channels that tiles do not divide": (block, (16, 32)),
}


@pytest.mark.parametrize("why", LEFT)
def test_others_stay_as_they_are(why: str):
    body, channels = LEFT[why]
    assert Trained(Block(body, *channels), image()).sites == 0


@pytest.mark.parametrize(
    ("seconds", "sites"),
    [
        (FAST, 1),
        ({name: FAST[name] for name in ("conv2d_fprop", "conv2d_dgrad")}, 0),  # one pass was never tuned
        # PyTorch's weight gradient is faster by less than two launches take, or by more
        ({**FAST, "conv2d_wgrad": (23e-6, 20e-6)}, 1),
        ({**FAST, "conv2d_wgrad": (25e-6, 20e-6)}, 0),
    ],
)
def test_what_copies_take_must_be_more_than_what_is_lost(seconds: Any, sites: int, monkeypatch: pytest.MonkeyPatch):
    plant_rows(monkeypatch, seconds, conv2d_fprop)
    assert Trained(Block(block), image()).sites == sites


def test_the_report_counts_passes_by_these_kernels(monkeypatch: pytest.MonkeyPatch):
    plant_rows(monkeypatch, {**FAST, "conv2d_wgrad": (23e-6, 20e-6)}, conv2d_fprop)
    (note,) = Trained(Block(block), image()).notes
    assert "fprop 4, dgrad 4, wgrad 1 by" in note


def test_convolutions_run_when_they_did():
    """The result just before it is read, the gradient of the weight and the sum for the bias as soon as dy is there."""
    forward, backward = Trained(Block(block), image()).compiler.graphs
    (node,) = find(forward, concat_conv2d.OP.overload)
    (reader,) = node.users
    assert node.next is reader
    (wgrad,) = find(backward, concat_conv2d_wgrad.OP.overload)
    (norm,) = find(backward, group_norm_silu_backward_concat.SUMMED)
    sums = find(backward, torch.ops.aten.sum.dim_IntList)
    dy: Any = wgrad.args[0]
    of_dy = [one for one in sums if one.args[0] is dy]
    assert of_dy and all(one < norm for one in (wgrad, *of_dy))
    # which adds what the convolution hands back
    assert arguments(norm)["residual"].target is conv2d_dgrad.OP.overload
    assert max(wgrad.all_input_nodes).next is wgrad


def test_weight_gradients_go_beside_the_rest():
    _, backward = Trained(Block(block), image()).compiler.graphs
    assert overlap_weight_gradients.apply(backward) >= 2
    assert "concat_conv2d_wgrad_beside" in targets(backward)


def test_a_norm_of_two_maps_quantises():
    """Where the convolution after the norm runs in FP8, and the one beside it does not."""

    def choose(conv: Any, *, by_norm: bool) -> frozenset[str]:
        assert by_norm or conv.weight[2] == 1 or conv.weight[1] == 3
        return frozenset(PASSES) if conv.weight[1:] == (C1 + C2, 3, 3) else frozenset()

    def layers(model: nn.Module) -> Fp8Step:
        made = Fp8Step(torch.device("cpu"), choose=choose)
        made.open_(model.named_parameters())
        return made

    results = []
    for names in (NAMES, tuple(name for name in NAMES if name != "read_concats")):
        model = Block(block)
        results.append(Trained(model, image(), names=names, fp8=layers(model)))
    now, before = results
    assert now.sites == 1
    forward, _ = now.compiler.graphs
    (norm,) = find(forward, group_norm_silu_fp8.OP.overload)
    assert not find(forward, group_norm_silu.OP.overload)
    assert norm.kwargs.get("x2") is not None or len(norm.args) > 10
    assert norm.meta["val"][0].shape == (2, C1 + C2, 8, 8)
    assert torch.equal(now.y, before.y)


def test_every_concatenation_of_a_unet_is_read_in_place():
    """Two layers up, behind a block and an upsampling; y and gradients are those of a step with copies."""
    config = UNetConfig(
        image_size=8, channels=(32, 32), blocks=1, attention_resolutions=(), heads=2, groups=4, dropout=0.0
    )
    results = []
    for names in (NAMES, tuple(name for name in NAMES if name != "read_concats")):
        torch.manual_seed(0)
        model = UNet(config).to(memory_format=torch.channels_last)
        results.append(Trained(model, image(), torch.tensor([3, 500]), names=names))
    now, before = results
    assert (now.sites, before.sites) == (2, 0)
    assert torch.equal(now.y, before.y)
    for name in ("cat", "clone"):
        assert before.map_copies(name) and not now.map_copies(name)
    weights: list[Any] = [node.args[2] for node in find(now.compiler.graphs[0], concat_conv2d.OP.overload)]
    assert all(one.op == "placeholder" for one in weights), "copies of weights, not casts"
    for name, gradient in now.gradients.items():
        right = before.gradients[name]
        assert gradient is not None and right is not None, name
        apart = (gradient - right).float().norm() / right.float().norm()
        assert apart < 0.02, (name, apart)
