"""Attention among the tokens of a short sequence reads q, k and v where one linear layer packed them: one op each way.

PyTorch's attention kernels return three gradients, which are then copied side by side for the linear layer's backward.
Where the tuned tables say that both ways together take PyTorch's fastest kernel no longer, that attention stays.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline import units
from ridgeline.kernels import Op, attention_packed, attention_packed_backward
from ridgeline.kernels._attention_packed_call import MOST_CHANNELS, MOST_TOKENS, attention_sample
from ridgeline.train_rewrites._match import arguments, calls, finish, value

# the dtypes that tensor cores multiply as they are; fp32 is left to PyTorch
_DTYPES = (torch.float16, torch.bfloat16)
# what may return another view of its first argument, as methods or functions; on meta tensors it shows whether it did
_ORDERS = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
_VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("unbind", "chunk", "split", "tensor_split", "select", "narrow", *_ORDERS),
)

PRICE = "price"  # of a node that computes an attention: what the tables say of it


@dataclass(frozen=True)
class _Site:
    """An attention that the op can compute: the packed q, k and v as they are, and in the dtype of its result."""

    node: fx.Node
    qkv_node: fx.Node
    qkv: Tensor
    heads: int
    scale: float | None
    result: Tensor


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every scaled_dot_product_attention of one packed q, k and v that no table forbids; returns how many.

    q, k and v are followed back, through whatever views, to one tensor [N, T, 3 heads D] with that order of channels.
    Does not fire on: masks, dropout, causal attention, a scale that is no positive number, q, k and v from several
    tensors or in another order, products in fp32, a result read otherwise than token by token, sizes that the op
    refuses or that are not fixed, shapes where the tables of the GPU say that PyTorch's kernels are as fast.
    """
    replaced = 0
    for site in list(_sites(graph_module)):
        price = attention_packed.price(site.qkv, heads=site.heads, scale=site.scale)
        if price is not None and not price.pays:
            site.node.meta[PRICE] = price
            continue
        with graph_module.graph.inserting_before(site.node):
            new, both = _call(graph_module.graph, site)
        new.meta["example_value"] = site.result
        both.meta |= {} if price is None else {PRICE: price}
        site.node.replace_all_uses_with(new)
        graph_module.graph.erase_node(site.node)
        replaced += 1
    finish(graph_module)
    return replaced


def in_words(graph_module: fx.GraphModule) -> str:
    """Who computes the attentions that were tuned, and what that takes by the tables; "" where none was."""
    found = [node.meta[PRICE] for node in graph_module.graph.nodes if PRICE in node.meta]
    if not found:
        return ""
    ours_s, theirs_s = sum(one.ours_s for one in found), sum(one.theirs_s for one in found)
    chosen_s = sum(min(one.ours_s, one.theirs_s) for one in found)
    return (
        f"attention at {len(found)} sites, forward and backward, takes {units.seconds(chosen_s)} by the tables, all by "
        f"this project's kernels {units.seconds(ours_s)}, all by PyTorch's {units.seconds(theirs_s)}: "
        f"{sum(one.pays for one in found)} by this project's kernels, the others by PyTorch's"
    )


@dataclass(frozen=True)
class Attention:
    """The sizes of an attention that could be replaced: what its kernels are tuned on."""

    qkv: tuple[int, ...]
    heads: int
    scale: float | None
    dtype: torch.dtype
    device: torch.device

    def problems(self) -> Iterator[tuple[Op, dict[str, Any]]]:
        """Forward and backward on normal data, for `tuning.tune_all`."""
        n, tokens, width = self.qkv
        sizes = n, tokens, self.heads, width // (3 * self.heads)
        given = attention_sample("", *sizes, backward=True, scale=self.scale).arguments(self.dtype, str(self.device))
        yield attention_packed.OP, {name: given[name] for name in ("qkv", "heads", "scale")}
        yield attention_packed_backward.OP, given


def attentions_of(graph_module: fx.GraphModule) -> tuple[Attention, ...]:
    """Every distinct attention that could be replaced."""
    found = (Attention(tuple(s.qkv.shape), s.heads, s.scale, s.qkv.dtype, s.qkv.device) for s in _sites(graph_module))
    return tuple(dict.fromkeys(found))


def _sites(graph_module: fx.GraphModule) -> Iterator[_Site]:
    for node in calls(graph_module, F.scaled_dot_product_attention):
        given = arguments(node, _attention)
        q, result = value(given["query"]), value(node)
        if not _is_plain(given) or q is None or result is None or q.dim() != 4 or not _suits(q, result):
            continue
        root = _packed(tuple(given[name] for name in ("query", "key", "value")), q)
        qkv = value(root)
        # the op makes a float of a whole number, and tables are asked for it as the op does
        scale = None if given["scale"] is None else float(given["scale"])
        if root is not None and qkv is not None and all(_reads_rows(user, result) for user in node.users):
            yield _Site(node, root, qkv.to(result.dtype), q.shape[1], scale, result)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    scale: Any = None, enable_gqa: Any = False,
) -> None:  # fmt: skip
    """The signature of F.scaled_dot_product_attention, which has none that Python can read."""


def _is_plain(given: dict[str, Any]) -> bool:
    scale = given["scale"]
    positive = scale is None or (isinstance(scale, (int, float)) and 0.0 < scale < float("inf"))
    return given["attn_mask"] is None and given["dropout_p"] == 0.0 and given["is_causal"] is False and positive


def _suits(q: Tensor, result: Tensor) -> bool:
    """Whether the op takes such queries, in the dtype that attention computes in: autocast casts what it is given."""
    fixed = all(isinstance(size, int) for size in q.shape)
    fits = fixed and 1 <= q.shape[2] <= MOST_TOKENS and 1 <= q.shape[3] <= MOST_CHANNELS and q.shape[0] > 0
    return fits and q.is_floating_point() and result.dtype in _DTYPES


def _packed(parts: tuple[Any, ...], q: Tensor) -> fx.Node | None:
    """The contiguous [N, T, 3 heads D] of which q, k and v [N, heads, T, D] are views in that order."""
    n, heads, tokens, channels = q.shape
    width = 3 * heads * channels
    # where each channel of each token would stand
    strides = (tokens * width, channels, width, 1)
    chains = [_sources(part) for part in parts]
    for root in chains[0]:
        found = value(root)
        if found is None or tuple(found.shape) != (n, tokens, width) or not all(root in chain for chain in chains):
            continue
        like = torch.empty(found.shape, dtype=found.dtype, device="meta")
        views = [_replay(chain[: chain.index(root)], like) for chain in chains] if found.is_contiguous() else []
        offsets = range(0, width, heads * channels)
        if views and all(_is_view(v, like, q.shape, strides, at) for v, at in zip(views, offsets, strict=True)):
            return root
    return None


def _sources(node: Any) -> list[fx.Node]:
    """A node, what it is a view of, what that is a view of, and so on."""
    chain = [node]
    while _calls(chain[-1], _VIEWS) or _is_call(chain[-1], (operator.getitem,)):
        chain.append(chain[-1].args[0])
    return chain


def _calls(node: fx.Node, names: tuple[str, ...]) -> bool:
    """Whether a node is a method, or a function of torch, of one tensor and fixed numbers."""
    functions = tuple(getattr(torch, name) for name in names if hasattr(torch, name))
    return _is_call(node, functions if node.op == "call_function" else names)


def _is_call(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    called = node.op in ("call_method", "call_function") and node.target in targets
    return called and bool(node.args) and node.all_input_nodes == [node.args[0]]


def _replay(chain: list[fx.Node], tensor: Tensor) -> Any:
    """What a chain of views, the last one first, makes of a tensor."""
    found: Any = tensor
    for node in reversed(chain):
        call = getattr(type(found), node.target) if isinstance(node.target, str) else node.target
        found = call(found, *node.args[1:], **node.kwargs)
    return found


def _is_view(found: Any, of: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> bool:
    """Whether a replayed view reads exactly these elements; axes of one element may have any stride."""
    return (
        isinstance(found, Tensor)
        and found.untyped_storage()._cdata == of.untyped_storage()._cdata
        and found.dtype == of.dtype
        and found.shape == shape
        and all(size == 1 or a == b for size, a, b in zip(shape, found.stride(), strides, strict=True))
        and found.storage_offset() == offset
    )


def _reads_rows(user: fx.Node, result: Tensor) -> bool:
    """Whether a reader of attention's result turns it to [N, T, heads, D] first, which is how the op writes it."""
    n, heads, tokens, channels = result.shape
    rows = torch.empty(n, tokens, heads, channels, device="meta")
    if not _calls(user, _ORDERS):
        return False
    return _is_view(_replay([user], rows.transpose(1, 2)), rows, tuple(rows.shape), rows.stride(), 0)


def _call(graph: fx.Graph, site: _Site) -> tuple[fx.Node, fx.Node]:
    """The op's result as attention would return it, [N, heads, T, D], and the op's call."""
    qkv, found = site.qkv_node, value(site.qkv_node)
    assert found is not None
    if found.dtype != site.qkv.dtype:
        qkv = graph.call_method("to", (qkv, site.qkv.dtype))
    both = graph.call_function(attention_packed.OP.overload, (qkv,), {"heads": site.heads, "scale": site.scale})
    rows = graph.call_function(operator.getitem, (both, 0))
    heads = graph.call_method("unflatten", (rows, 2, site.result.shape[1::2]))
    return graph.call_method("transpose", (heads, 1, 2)), both
