"""A norm and a convolution read the two maps of a concatenation where they are, and hand each its own gradient.

A decoder joins what comes up with what was kept on the way down: x = cat((h, skip), 1), which a block normalises and
its 1x1 convolution takes past it. The join is a copy of both, and the gradient of x, to which both readers add, is cut
into slices that are copied again. Here neither is made:

    n  = group_norm_silu(h, ..., x2=skip)                y  = concat_conv2d(h, skip, weight)
    dh, dskip = group_norm_silu_backward_concat(dn, ..., dx)      dx = conv2d_dgrad(dy, weight)

Values are those of the concatenation; of its gradient the norm's part is not rounded before the convolution's is added.
`keep_order` is a pass over the graphs of aten operators that this becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function

from ridgeline.kernels import (
    concat_conv2d,
    concat_conv2d_wgrad,
    conv2d_dgrad,
    conv2d_fprop,
    group_norm_silu,
    group_norm_silu_backward_concat,
)
from ridgeline.train_rewrites._match import calls, finish, is_channels_last, value
from ridgeline.train_rewrites.use_convolutions import LAUNCH_S, PASSES, Pass, convolve, multiply

# no GPU moves more: what copies take at least
_FASTEST_BYTES_PER_S = 8e12
_PARAMETERS = 6  # of a norm: gamma, beta, scale, shift, seed, offset
_SUM = torch.ops.aten.sum.dim_IntList


@dataclass(frozen=True)
class _Site:
    """A concatenation of two maps, its only readers, and what each pass of the convolution takes."""

    maps: tuple[fx.Node, fx.Node]
    norm: fx.Node
    convolution: fx.Node
    passes: tuple[Pass, ...]


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every concatenation that one group_norm_silu and one convolution of this project read; returns how many.

    Does not fire on: other readers, more or fewer; more maps than two; maps that are not channels_last, or not of the
    convolution's dtype; channels that the kernels do not take; stride 2; passes that were not tuned, or of which
    PyTorch's are faster by more than the copies take.
    """
    sites = [site for node in calls(graph_module, torch.cat) if (site := _site(node)) is not None]
    for site in sites:
        _replace(graph_module.graph, site)
    finish(graph_module)
    return len(sites)


def norm_and_convolve(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parameters: Sequence[Tensor | None],
    choices: dict[str, Any],
    padding: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """(group_norm_silu, conv2d) of x1 and x2 side by side; `parameters` and `choices` are the norm's, in its order."""
    weight = weight.to(x1.dtype)
    return _NormAndConvolution.apply(choices, padding, x1, x2, weight, bias, *parameters)  # pyright: ignore


class _NormAndConvolution(Function):
    @staticmethod
    def forward(
        choices: dict[str, Any],
        padding: tuple[int, int],
        x1: Tensor,
        x2: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        norm = group_norm_silu.OP(x1, *parameters, x2, **choices)
        return norm, concat_conv2d.OP(x1, x2, weight, bias, padding=list(padding))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        ctx.choices, ctx.padding, x1, x2, weight, bias, *parameters = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x1, x2, weight, *parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # a branch that transposes hands back another layout
        dn, dy = (grad.contiguous(memory_format=torch.channels_last) for grad in grad_outputs)
        x1, x2, weight, *parameters = ctx.saved_tensors
        of_x1, of_x2, of_weight, of_bias = ctx.needs_input_grad[2:6]
        dw = db = residual = None
        if of_weight:
            shape, padding = list(weight.shape[2:]), list(ctx.padding)
            dw = concat_conv2d_wgrad.OP(dy, x1, x2, kernel_size=shape, padding=padding)
        if of_bias:
            db = conv2d_fprop.bias_gradient(dy, ctx.bias_dtype)
        if of_x1 or of_x2:
            residual = conv2d_dgrad.OP(dy, weight, padding=list(ctx.padding))
        dx1, dx2, *others = group_norm_silu_backward_concat.OP(dn, x1, x2, *parameters, residual, **ctx.choices)
        # seed and offset have none, nor what was not given
        found = (*others, None, None)
        of_parameters = (grad if given is not None else None for given, grad in zip(parameters, found, strict=True))
        return (None, None, dx1, dx2, dw, db, *of_parameters)


def keep_order(graph_module: fx.GraphModule) -> None:
    """Let each convolution run when it did: one function made both calls at once, and so their maps leave the caches.

    A result moves to before the first that reads it, and the gradients of weight and bias to behind what is read.
    """
    graph = graph_module.graph
    results = graph.find_nodes(op="call_function", target=concat_conv2d.OP.overload)
    gradients = graph.find_nodes(op="call_function", target=concat_conv2d_wgrad.OP.overload)
    for node in results:
        if node.users:
            min(node.users).prepend(node)
    inputs = graph.find_nodes(op="placeholder")
    for node in gradients:
        dy: Any = node.args[0]
        sums = [user for user in dy.users if user.target is _SUM and node < user]
        for moved in (*sums, node):
            max(*moved.all_input_nodes, inputs[-1]).append(moved)
    if results or gradients:
        graph.lint()
        graph_module.recompile()


# --- sites ----------------------------------------------------------------------------------------------------------


def _site(node: fx.Node) -> _Site | None:
    x, maps = value(node), _maps(node)
    readers = {user.target: user for user in node.users}
    norm, convolution = readers.get(group_norm_silu.OP.overload), readers.get(convolve, readers.get(multiply))
    if x is None or maps is None or norm is None or convolution is None or len(node.users) != 2:
        return None
    if not _joins(node, norm, convolution):
        return None
    first = value(maps[0])
    assert first is not None
    passes = _passes(x, first.shape[1], convolution)
    return None if passes is None else _Site(maps, norm, convolution, passes)


def _maps(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two maps of whose channels a concatenation is, if kernels take them."""
    given: Any = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors, x = given.get("tensors"), value(node)
    if x is None or x.dim() != 4 or given.get("dim") not in (1, -3) or not isinstance(tensors, (tuple, list)):
        return None
    found = [value(one) for one in tensors]
    if len(found) != 2 or any(one is None or one.dtype != x.dtype or not is_channels_last(one) for one in found):
        return None
    return tensors[0], tensors[1]


def _joins(node: fx.Node, norm: fx.Node, convolution: fx.Node) -> bool:
    """Whether both read the concatenation as their map alone, and one call in the place of the first can do both."""
    if any(one.args[0] is not node or one.all_input_nodes.count(node) != 1 for one in (norm, convolution)):
        return False
    before = min(norm, convolution)
    operands = [one for reader in (norm, convolution) for one in reader.all_input_nodes if one is not node]
    return all(one < before for one in operands) and len(norm.args) <= _PARAMETERS + 1


def _passes(x: Tensor, c1: int, convolution: fx.Node) -> tuple[Pass, ...] | None:
    """What a convolution's passes take by these kernels; None where they do not take it, or it does not pay."""
    weight_node, _, padding, stride, dtype = _operands(convolution)
    weight = value(weight_node)
    if weight is None or weight.dim() != 4 or stride != 1 or dtype != x.dtype:
        return None
    if not concat_conv2d.takes((c1, x.shape[1] - c1), weight.shape[0]):
        return None
    weight = weight.to(dtype)
    rows = conv2d_fprop.choice(x, weight, padding)
    if len(rows) < len(conv2d_fprop.passes_of(x, weight, x, padding)):
        return None
    passes = tuple(
        Pass(name, ours=True, seconds=row.seconds, rival_s=conv2d_fprop.rival_seconds(row))
        for name, (row, _) in rows.items()
    )
    lost_s = sum(max(0.0, one.seconds - one.rival_s) for one in passes)
    # both maps are copied forward; backward at least the slice of the one that nothing else reads
    copied_bytes = 2 * x.nbytes + 2 * x[:, :c1].numel() * x.element_size()
    return passes if lost_s < copied_bytes / _FASTEST_BYTES_PER_S + 2 * LAUNCH_S else None


def _operands(convolution: fx.Node) -> tuple[Any, Any, tuple[int, int], int, torch.dtype]:
    """(weight, bias, padding, stride, dtype); a product of matrices is a 1x1 convolution."""
    given: Any = convolution.args
    if convolution.target is multiply:
        _, weight, bias, dtype = given
        return weight, bias, (0, 0), 1, dtype
    _, weight, bias, padding, stride, dtype = given
    return weight, bias, padding, stride, dtype


def _replace(graph: fx.Graph, site: _Site) -> None:
    norm, convolution = site.norm, site.convolution
    weight, bias, padding, *_ = _operands(convolution)
    parameters = (*norm.args[1:], *([None] * _PARAMETERS))[:_PARAMETERS]
    with graph.inserting_before(min(norm, convolution)):
        operands = (*site.maps, weight, bias, parameters, dict(norm.kwargs), padding)
        both = graph.call_function(norm_and_convolve, operands)
        results = [graph.call_function(getitem, (both, index)) for index in (0, 1)]
    both.meta[PASSES] = site.passes
    for old, new in zip((norm, convolution), results, strict=True):
        new.meta["example_value"] = value(old)
        old.replace_all_uses_with(new)
