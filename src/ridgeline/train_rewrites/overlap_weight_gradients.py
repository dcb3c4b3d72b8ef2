"""Gradients of weights and biases run beside the rest of the backward: nothing reads them before the optimizer.

A pass over the backward's graph of aten operators, as AOTAutograd hands it to a compiler. `meta["val"]` is what a node
returns. While the graph runs none of its buffers may be reused: `INDUCTOR` are the settings of Inductor that see to it.

Kernels of small maps leave most of a large GPU idle, and take the time of their latencies. Those that fill it still
cover each other's ends. On an H200 the DDPM's step gained as much from all of them as from the small ones alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import concat_conv2d_wgrad, conv2d_wgrad, conv2d_wgrad_fp8, upsample_conv2d_wgrad
from ridgeline.side_stream import beside, join
from ridgeline.train_rewrites._operators import OUTPUT_MASK, arguments

# the last would lay out convolutions anew and copy their gradients back too early; here they are channels-last already
INDUCTOR = {"allow_buffer_reuse": False, "inplace_buffers": False, "layout_optimization": False}

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution_backward.default
# to Inductor these are other ways to read the same memory
_VIEWS = frozenset(
    {
        *(operator.getitem, _aten.view.default, _aten.permute.default, _aten.t.default),
        *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default),
    }
)
_OWNERS = (conv2d_wgrad, conv2d_wgrad_fp8, concat_conv2d_wgrad, upsample_conv2d_wgrad)
_OWN = tuple(module.OP.overload for module in _OWNERS)
_PRODUCTS = frozenset({_CONVOLUTION, _aten.mm.default, _aten.addmm.default, _aten.bmm.default})
_SUM = _aten.sum.dim_IntList
_TAKEN = frozenset({_aten.mm.default, _SUM, *_OWN})


def apply(graph_module: fx.GraphModule) -> int:
    """Put gradients of weights and biases beside the rest; returns how many.

    Takes weight gradients of this project's convolutions, of PyTorch's (as calls of their own, where one made that of x
    too), and of linear layers: products of two matrices that the graph returns. And bias gradients: sums that the graph
    returns, of what a product or an operator of this project made. Other sums Inductor fuses with what they are of.
    Does not fire on: results that an operator of the graph reads, transposed convolutions.
    """
    graph = graph_module.graph
    moved = []
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _CONVOLUTION:
            moved += _split(graph, node)
        elif node.target in _TAKEN and _is_returned(node) and not (node.target is _SUM and _is_fused(node)):
            node.target = twin_of(node.target)
            moved.append(node)
    if moved:
        made = [one for node in moved for one in (_items(node) or [node])]
        with graph.inserting_before(graph.output_node()):
            graph.call_function(_JOIN, (made,))
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return len(moved)


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]


def _split(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The weight gradient of one of PyTorch's convolutions as a call of its own, beside; none where it may not be."""
    given = arguments(node)
    mask = list(given["output_mask"])
    readers = [user for user in node.users if user.args[1] == 1]
    if not mask[1] or given["transposed"] or not readers or not all(map(_is_returned, readers)):
        return []
    maps = (given["grad_output"], given["input"], given["weight"])
    with graph.inserting_before(node):
        numbers = (given["stride"], given["padding"], given["dilation"], given["groups"])
        alone = graph.call_function(_weight_gradient, (*maps, *map(_plain, numbers[:3]), numbers[3]))
    alone.meta |= {"val": node.meta["val"][1], "eager_input_vals": ((*(one.meta["val"] for one in maps), *numbers), {})}
    for reader in readers:
        reader.replace_all_uses_with(alone)
        graph.erase_node(reader)
    mask[1] = False
    if any(mask):
        node.update_arg(OUTPUT_MASK, mask)
        dx, _, db = node.meta["val"]
        node.meta["val"] = (dx, None, db)
    else:
        graph.erase_node(node)
    return [alone]


def _plain(numbers: Any) -> list[int]:
    return [int(number) for number in numbers]


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph only returns what the node makes."""
    return bool(node.users) and all(
        user.op == "output" or (user.target in _VIEWS and _is_returned(user)) for user in node.users
    )


def _is_fused(total: fx.Node) -> bool:
    """Whether Inductor may sum in the kernel that makes what is summed."""
    source = total.all_input_nodes[0]
    while source.target in _VIEWS:
        source = source.all_input_nodes[0]
    return source.target not in _PRODUCTS and getattr(source.target, "namespace", None) != "ridgeline"


# --- operators ------------------------------------------------------------------------------------------------------


def twin_of(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operator that does the same on the side stream."""
    if overload not in _TWINS:
        _TWINS[overload] = _registered(overload)
    return _TWINS[overload]


_TWINS: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}


def _registered(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    def run(*args: Any, **kwargs: Any) -> Any:
        return beside(lambda: overload(*args, **kwargs), _tensors(args, kwargs))

    name, _, schema = str(overload._schema).partition("(")
    return _operator(name.partition("::")[2].replace(".", "_"), run, overload, f"({schema}")


def weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """dw [K, C / groups, R, S] of a convolution that is not transposed, by PyTorch's own kernel, on the side stream."""
    return beside(lambda: _gradient(dy, x, weight, stride, padding, dilation, groups), (dy, x, weight))


def _gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    flags = [False, True, False]
    return _CONVOLUTION(dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups, flags)[1]


def _operator(name: str, run: Callable[..., Any], meaning: Callable[..., Any], schema: str) -> torch._ops.OpOverload:
    op = torch.library.custom_op(
        f"ridgeline::{name}_beside",
        run,
        mutates_args=(),
        schema=schema,
        # Inductor would otherwise hand over whatever layout its neighbours prefer
        tags=(torch.Tag.needs_exact_strides,),
    )
    op.register_fake(meaning)
    return getattr(torch.ops.ridgeline, f"{name}_beside").default


def join_beside(gradients: list[Tensor]) -> None:
    """Let what reads gradients run behind what runs beside: the graph takes this for what writes them."""
    join(gradients)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


_weight_gradient = _operator(
    "weight_gradient", weight_gradient, _gradient, torch.library.infer_schema(weight_gradient, mutates_args=())
)
torch.library.custom_op("ridgeline::join_beside", join_beside, mutates_args=("gradients",)).register_fake(
    lambda gradients: None  # noqa: ARG005
)
_JOIN = torch.ops.ridgeline.join_beside.default
