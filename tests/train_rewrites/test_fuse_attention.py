"""Attention of a dynamo graph reads its packed q, k and v: same loss and gradients, and only where that is so."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

from graphs import by_reference
from ridgeline.kernels import attention_packed
from ridgeline.models.ddpm_unet import Attention, UNetConfig
from ridgeline.train_backend import TrainBackend
from ridgeline.train_rewrites import fuse_attention
from ridgeline.train_rewrites._match import calls
from shared_kernels import plant_rows

NAME = "fuse_attention"
HEADS, D = 2, 8
C = HEADS * D
DEVICE: Any = "cuda" if torch.cuda.is_available() else "cpu"
sdpa: Any = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Dynamo gives up on a function that it compiled eight times."""
    torch._dynamo.reset()


class Block(nn.Module):
    """One attention over x [N, T, C], spelled as in `forward`."""

    def __init__(self, spelling: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.spelling, self.qkv, self.other = spelling, nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(self, x)


class Blocks(nn.ModuleList):
    """Any number of one input in one graph: several compile in half of the time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x).flatten(1) for block in self], dim=1)


def split(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.unflatten(2, (3, HEADS, D)).permute(2, 0, 3, 1, 4).unbind(0)


def rows(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def each(packed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.view(*t.shape[:2], HEADS, D).transpose(1, 2) for t in packed)


def by_index(m: Block, x: Tensor) -> Tensor:
    qkv = m.qkv(x).reshape(*x.shape[:2], 3, HEADS, D)
    q, k, v = (torch.transpose(qkv[:, :, i], 1, 2) for i in range(3))
    return torch.reshape(sdpa(q, k, v, dropout_p=0.0).permute(0, 2, 1, 3), x.shape)


def batch_first(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, HEADS, D).transpose(1, 3).movedim(2, 0)
    return sdpa(q, k, v).transpose(1, 2).reshape(x.shape)


TAKEN = {
    "one permutation": lambda m, x: rows(sdpa(*split(m.qkv(x)))),
    "chunks": lambda m, x: sdpa(*each(m.qkv(x).chunk(3, dim=-1)), scale=0.5).transpose(1, 2).contiguous().view(x.shape),
    "split in rows": lambda m, x: rows(sdpa(*each(m.qkv(x).split(C, dim=2)), attn_mask=None, is_causal=False)),
    "slices": lambda m, x: rows(sdpa(*each([(p := m.qkv(x))[..., :C], p[..., C : 2 * C], p[..., 2 * C :]]))),
    "indices": by_index,
    "three axes turned": batch_first,
    "rows that are a view": lambda m, x: rows(sdpa(*split(m.qkv(x.flatten(0, 1)).view(*x.shape[:2], 3 * C)))),
    "qkv read by another": lambda m, x: rows(sdpa(*split(y := m.qkv(x)))) + y[..., :C],
    "result read twice": lambda m, x: rows(y := sdpa(*split(m.qkv(x)))) + y.transpose(1, 2).flatten(2),
}
LEFT = {
    "a mask": lambda m, x: rows(sdpa(*split(m.qkv(x)), attn_mask=torch.ones(x.shape[1:2] * 2, dtype=torch.bool))),
    "causal": lambda m, x: rows(sdpa(*split(m.qkv(x)), is_causal=True)),
    "dropout": lambda m, x: rows(sdpa(*split(m.qkv(x)), dropout_p=1e-9)),
    "a negative scale": lambda m, x: rows(sdpa(*split(m.qkv(x)), scale=-1.0)),
    "queries from another tensor": lambda m, x: rows(sdpa(split(m.other(x))[0], *split(m.qkv(x))[1:])),
    "another order": lambda m, x: rows(sdpa(*split(m.qkv(x))[::-1])),
    "heads before q, k and v": lambda m, x: rows(
        sdpa(*m.qkv(x).unflatten(2, (HEADS, 3, D)).permute(3, 0, 2, 1, 4).unbind(0))
    ),
    "channels before heads": lambda m, x: rows(
        sdpa(*m.qkv(x).unflatten(2, (3, D, HEADS)).permute(2, 0, 4, 1, 3).unbind(0))
    ),
    "one head read as several": lambda m, x: rows(sdpa(*(t.flip(1) for t in split(m.qkv(x))))),
    "normalised queries": lambda m, x: rows(sdpa(F.layer_norm((p := split(m.qkv(x)))[0], (D,)), *p[1:])),
    "read head by head": lambda m, x: sdpa(*split(m.qkv(x))).flatten(1),
}  # fmt: skip


def tokens(count: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, count, C, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def channels_last(module: Any) -> nn.Module:
    return module.to(DEVICE, memory_format=torch.channels_last)


def image(channels: int) -> Tensor:
    """With a gradient: PyTorch 2.13's group_norm on a CPU reads a null pointer where its input has none."""
    x = torch.randn(2, channels, 4, 4, generator=torch.Generator().manual_seed(0))
    return x.to(DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()


def gradients(fn: Any, module: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    y = fn(*inputs)
    weights = torch.arange(y.numel(), device=y.device).view_as(y) / y.numel()
    (y.float() * weights).sum().backward()
    return [y.detach(), *(p.grad for p in module.parameters())]


def both(module: nn.Module, *inputs: Tensor, names: tuple[str, ...] = (NAME,), tolerance: float = 2e-2) -> int:
    """Sites found; loss and gradients must be those of the module untouched."""
    expected = gradients(module, module, *inputs)
    backend = TrainBackend(names, cast(Any, aot_eager))
    actual = gradients(torch.compile(module, backend=backend, dynamic=False), module, *inputs)
    for a, e in zip(actual, expected, strict=True):
        if e is not None:
            assert a is not None
            assert (a.float() - e.float()).norm() <= tolerance * e.float().norm()
    return backend.sites[NAME]


def blocks(*spellings: Any, dtype: torch.dtype = torch.bfloat16) -> Blocks:
    torch.manual_seed(0)
    return Blocks(map(Block, spellings)).to(DEVICE, dtype)


@pytest.mark.parametrize("name", TAKEN)
def test_equals_the_module(name: str):
    assert both(blocks(TAKEN[name]), tokens()) == 1


def left_alone(module: nn.Module, x: Tensor) -> bool:
    """Whether the graph is as before, and so its results."""
    backend = TrainBackend((NAME,), lambda graph_module, _inputs: graph_module.forward)
    torch.testing.assert_close(torch.compile(module, backend=backend, dynamic=False)(x), module(x))
    return backend.sites == {NAME: 0}


def test_does_not_fire():
    """All in one graph."""
    assert left_alone(blocks(*LEFT.values()), tokens())


def test_does_not_fire_on_products_in_fp32_or_too_many_tokens():
    one = TAKEN["one permutation"]
    assert left_alone(blocks(one, dtype=torch.float32), tokens(dtype=torch.float32))
    assert left_alone(blocks(one), tokens(1025))


def test_two_of_the_unets_attentions_under_autocast():
    torch.manual_seed(0)
    config = UNetConfig(image_size=8, channels=(16, 32), attention_resolutions=(4,), heads=2, groups=4)
    module = channels_last(nn.Sequential(Attention(config, 32), Attention(config, 32)))
    x = image(32)
    with torch.autocast(DEVICE, torch.bfloat16), by_reference():
        assert both(module, x, names=("fuse_group_norm_silu", NAME)) == 2


def packed_graph(qkv_dtype: torch.dtype, *views: torch.dtype) -> tuple[fx.GraphModule, fx.Node]:
    """A graph whose attention computes in bf16, and its placeholder of `qkv_dtype`, read through views of dtypes."""
    graph = fx.Graph()
    qkv = found = graph.placeholder("qkv")
    for view in views:
        found = graph.call_method("view", (found, view))
    parts, heads = graph.call_method("chunk", (found, 3, 2)), []
    for i in range(3):
        part = graph.call_method("unflatten", (graph.call_function(operator.getitem, (parts, i)), 2, (HEADS, D)))
        heads.append(graph.call_method("transpose", (part, 1, 2)))
    attention = graph.call_function(sdpa, tuple(heads))
    graph.output(graph.call_method("transpose", (attention, 1, 2)))
    qkv.meta["example_value"] = torch.empty(2, 5, 3 * C, dtype=qkv_dtype)
    for node in heads:
        node.meta["example_value"] = torch.empty(2, HEADS, 5, D, dtype=views[-1] if views else qkv_dtype)
    attention.meta["example_value"] = torch.empty(2, HEADS, 5, D, dtype=torch.bfloat16)
    return fx.GraphModule(nn.Module(), graph), qkv


def test_a_packed_tensor_in_fp32_is_cast_as_autocast_would():
    """CUDA's autocast casts what attention is given, so the graph is told what a GPU would have returned."""
    module, qkv = packed_graph(torch.float32)
    assert fuse_attention.apply(module) == 1
    (call,) = calls(module, attention_packed.OP.overload)
    cast = call.args[0]
    assert isinstance(cast, fx.Node) and cast.target == "to" and cast.args == (qkv, torch.bfloat16)
    assert module(torch.randn(2, 5, 3 * C, device=DEVICE)).dtype == torch.bfloat16


def test_bits_read_as_another_dtype_are_another_tensor():
    assert fuse_attention.apply(packed_graph(torch.bfloat16, torch.float16)[0]) == 0
    assert fuse_attention.apply(packed_graph(torch.bfloat16, torch.float16, torch.bfloat16)[0]) == 1


OPS = "attention_packed", "attention_packed_backward"


@pytest.mark.parametrize(
    ("seconds", "sites"),
    [
        ({OPS[0]: (3e-5, 2e-5), OPS[1]: (1e-5, 5e-5)}, 1),  # the backward makes up for the forward
        ({OPS[0]: (1e-5, 2e-5), OPS[1]: (5e-5, 5e-5)}, 0),
        ({OPS[0]: (1e-5, 2e-5), OPS[1]: (4e-5, 5e-5)}, 0),  # as fast
        ({OPS[0]: (9e-5, 2e-5)}, 1),  # of one way alone nothing follows
    ],
)
def test_both_ways_together_decide(monkeypatch: pytest.MonkeyPatch, seconds: Any, sites: int):
    """The second time is PyTorch's: of the backward's row that of its forward and backward."""
    plant_rows(monkeypatch, seconds, attention_packed)
    module, _ = packed_graph(torch.bfloat16)
    before = module.code
    assert fuse_attention.apply(module) == sites
    assert len(list(calls(module, sdpa))) == 1 - sites
    assert (module.code == before) == (not sites)


def test_the_choice_and_its_price_are_told(monkeypatch: pytest.MonkeyPatch):
    def told(theirs: float) -> str:
        plant_rows(monkeypatch, {OPS[0]: (1e-5, 2e-5), OPS[1]: (3e-5, theirs)}, attention_packed)
        module, _ = packed_graph(torch.bfloat16)
        fuse_attention.apply(module)
        return fuse_attention.in_words(module)

    one = "attention at 1 sites, forward and backward, takes"
    assert told(6e-5) == (
        f"{one} 40.0 µs by the tables, all by this project's kernels 40.0 µs, all by PyTorch's 60.0 µs: "
        "1 by this project's kernels, the others by PyTorch's"
    )
    assert told(3.5e-5) == (
        f"{one} 35.0 µs by the tables, all by this project's kernels 40.0 µs, all by PyTorch's 35.0 µs: "
        "0 by this project's kernels, the others by PyTorch's"
    )
    plant_rows(monkeypatch, {}, attention_packed)
    module, _ = packed_graph(torch.bfloat16)
    assert fuse_attention.apply(module) == 1
    assert fuse_attention.in_words(module) == ""


def test_tuning_finds_each_attention_once():
    """In the dtype that attention computes in, whether or not it is replaced."""
    module, _ = packed_graph(torch.float32)
    graph = module.graph
    (first,) = calls(module, sdpa)
    again: tuple[dict[str, Any], ...] = {}, {"scale": 1}
    with graph.inserting_after(first):
        for choices in again:
            graph.call_function(sdpa, first.args, choices).meta.update(first.meta)
    found = fuse_attention.attentions_of(module)
    expected = fuse_attention.Attention((2, 5, 3 * C), HEADS, None, torch.bfloat16, torch.device("cpu"))
    assert set(found) == {expected, replace(expected, scale=1.0)} and len(found) == 2
    assert [op.key(**arguments) for one in found for op, arguments in one.problems()] == [
        "heads 2, qkv 2x5x48",
        "dout 2x5x16, heads 2, lse 2x2x5, qkv 2x5x48",
        "heads 2, qkv 2x5x48, scale 1.0",
        "dout 2x5x16, heads 2, lse 2x2x5, qkv 2x5x48, scale 1.0",
    ]
    assert len(list(calls(module, sdpa))) == 3
