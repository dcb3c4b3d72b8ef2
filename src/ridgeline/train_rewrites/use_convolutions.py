"""Convolutions, and linear layers over tokens, whose three passes were measured faster here become conv2d_fprop.

Which pass runs where is decided by the tuned tables: `conv2d_fprop.choice`. An untuned shape stays PyTorch's. A linear
layer is the 1x1 convolution of the same memory, see `linear_layers`, and competes with PyTorch's products of matrices.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline import units
from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import _conv2d_matmul, conv2d_fprop
from ridgeline.train_rewrites._match import finish, is_channels_last, only_user, value
from ridgeline.train_rewrites.convolution_calls import CONVOLUTIONS, Convolution, ConvolutionCall, convolution_calls
from ridgeline.train_rewrites.keep_channels_last import keep_gradient
from ridgeline.train_rewrites.linear_layers import LINEARS, VIEWS, LinearCall, linear_calls

PASSES = "passes"  # of a node that was put in: what the tables say of each

_ADDS = (operator.add, operator.iadd, torch.add)
LAUNCH_S = 2e-6  # of a pass of its own over a map, in a graph
_BYTES_PER_S = 4.8e12  # by which such a pass reads and writes; the kernels are for GPUs that have no more


@dataclass(frozen=True)
class Pass:
    """Who computes one pass of a convolution in a step, and what it takes, by the tables."""

    name: str  # "fprop", "dgrad", "wgrad"
    ours: bool
    seconds: float
    rival_s: float
    kind: str = ConvolutionCall.kind  # of the layer


@dataclass(frozen=True)
class _Site:
    """A layer that conv2d_fprop can compute: its operands in the dtype of its result, which autocast chose."""

    call: ConvolutionCall
    padding: tuple[int, int]
    stride: int
    x: Tensor
    weight: Tensor

    @property
    def is_linear(self) -> bool:
        return isinstance(self.call, LinearCall)


def apply(graph_module: fx.GraphModule) -> int:
    """Replace every convolution and linear layer of which the tables say that it pays; returns how many.

    Does not fire on: other strides than 1 and 2; with stride 2 maps that it does not halve, and channels that 16 does
    not divide; dilation, groups, weights in another layout than channels_last, fp32; channels or filters that 8 does
    not divide, unless they are fewer, 8 divides the others, and the filter is 7 x 7 at most; a GPU or shapes that were
    not tuned, shapes where PyTorch is faster. Of linear layers, besides: a single row an image [N, C]; tokens and
    weights that are not contiguous; inputs or outputs that 8 does not divide; shapes of which a pass was not tuned, or
    not beside PyTorch's product of matrices.
    """
    paying = 0
    for call in chain(convolution_calls(graph_module), linear_calls(graph_module)):
        # a linear layer is looked at when the convolutions before it have been replaced
        site = _site(call)
        if site is None:
            continue
        passes = _passes(site)
        if not _pays(site, passes):
            continue
        paying += 1
        with graph_module.graph.inserting_before(call.node):
            operands = (call.map_node(), call.given["weight"], call.given["bias"])
            if any(one.name == "fprop" and one.ours for one in passes):
                new = graph_module.graph.call_function(convolve, (*operands, site.padding, site.stride, site.x.dtype))
            else:
                new = graph_module.graph.call_function(multiply, (*operands, site.x.dtype))
            new.meta |= {"example_value": call.y, PASSES: passes}
            result = call.result_node(new)
        call.node.replace_all_uses_with(result)
    finish(graph_module)
    return paying


def in_words(graph_module: fx.GraphModule) -> str:
    """Which passes of the layers replaced run where, and what that saves by the tables; "" where none was."""
    passes = [found for node in graph_module.graph.nodes for found in node.meta.get(PASSES, ())]
    if not passes:
        return ""
    counts = [f"{name} {sum(one.name == name and one.ours for one in passes)}" for name in ("fprop", "dgrad", "wgrad")]
    chosen_s, theirs_s = sum(one.seconds for one in passes), sum(one.rival_s for one in passes)
    kinds = Counter(one.kind for one in passes)
    many = " and ".join(f"{count} of {kind}s" for kind, count in kinds.items()).replace(" of", " passes of", 1)
    known = f"{many} take {units.seconds(chosen_s)} for PyTorch's {units.seconds(theirs_s)}"
    return f"{known} by the tables: {', '.join(counts)} by this project's kernels, the others by PyTorch's"


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], stride: int, dtype: torch.dtype
) -> Tensor:
    """conv2d_fprop of operands cast to `dtype`; a bias is added in fp32 as it comes.

    A weight [K, C] is that of a 1x1 convolution.
    """
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return conv2d_fprop.OP(x, _filters(weight.to(dtype)), bias, padding=list(padding), stride=stride)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A 1x1 convolution whose forward pass is PyTorch's product of matrices; gradients as conv2d_fprop's."""
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return _Multiply.apply(x, _filters(weight.to(dtype)), bias)  # pyright: ignore[reportReturnType]


class _Multiply(torch.autograd.Function):
    """A tracer sees the operators that the passes call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _conv2d_matmul.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, dw = conv2d_fprop.gradients(dy, x, weight, (0, 0), of_x=needs_x, of_weight=needs_weight)
        return dx, dw, conv2d_fprop.bias_gradient(dy, ctx.bias_dtype) if needs_bias else None


def convolutions_of(graph_module: fx.GraphModule) -> tuple[Convolution, ...]:
    """Every distinct convolution that could be replaced, or that a linear layer could become."""
    sites = filter(None, map(_site, chain(convolution_calls(graph_module), linear_calls(graph_module))))
    found = (
        Convolution(tuple(s.x.shape), tuple(s.weight.shape), s.padding, s.x.dtype, s.x.device, s.stride) for s in sites
    )
    return tuple(dict.fromkeys(found))


def _site(call: ConvolutionCall) -> _Site | None:
    """None where the kernels cannot compute the layer."""
    conv = call.problem
    if conv is None:
        return None
    top, left = conv.padding  # pyright: ignore[reportGeneralTypeIssues]
    fits = (
        conv2d_fprop.takes(conv)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and call.y.dtype in conv2d_fprop.DTYPES
        and all(p < size for p, size in zip((top, left), conv.filter, strict=True))
        and is_channels_last(call.weight)
        and (not isinstance(call, LinearCall) or _suits(call, conv))
    )
    if not fits:
        return None
    dtype, stride = call.y.dtype, conv.stride[0]  # pyright: ignore[reportIndexIssue]
    return _Site(call, (top, left), stride, call.x.to(dtype), call.weight.to(dtype))


def _suits(call: LinearCall, conv: ConvProblem) -> bool:
    whole = not (conv.c % conv2d_fprop.GRANULE or conv.k % conv2d_fprop.GRANULE)
    return whole and call.dense


def _filters(weight: Tensor) -> Tensor:
    return weight[:, :, None, None] if weight.dim() == 2 else weight


# --- what pays -------------------------------------------------------------------------------------------------------


def _passes(site: _Site) -> tuple[Pass, ...]:
    """Every pass that was tuned, by the fastest kernel; of a linear layer none unless all three were, beside matmuls.

    cuDNN's is none of the first pass, where it would add the bias in a launch of its own.
    """
    rows = conv2d_fprop.choice(site.x, site.weight, site.padding, site.stride)
    if site.is_linear and sum(conv2d_fprop.matmul_seconds(row) is not None for row, _ in rows.values()) < 3:
        return ()
    found = []
    for name, (row, wins) in rows.items():
        fastest_s, matmul_s = conv2d_fprop.rival_seconds(row), conv2d_fprop.matmul_seconds(row)
        ours, theirs_s = wins, fastest_s
        if name == "fprop":
            theirs_s = inf if matmul_s is None else matmul_s
            ours = row.seconds <= theirs_s + _saved_s(site)
        # what PyTorch runs for the layer as it stands
        rival_s = matmul_s if site.is_linear and matmul_s is not None else fastest_s
        found.append(Pass(name, ours, row.seconds if ours else theirs_s, rival_s, site.call.kind))
    return tuple(found)


def _pays(site: _Site, passes: tuple[Pass, ...]) -> bool:
    first = next((one for one in passes if one.name == "fprop"), None)
    if first is None or not any(one.ours for one in passes):
        return False
    saved_s = _saved_s(site) if first.ours else 0.0
    return sum(one.seconds for one in passes) < sum(one.rival_s for one in passes) + saved_s


def _saved_s(site: _Site) -> float:
    """What it saves that conv2d_fprop adds the map which its result is added to, as `fuse_residual_add` has it do."""
    if site.stride != 1 or not _is_added(site.call):
        return 0.0
    return LAUNCH_S + 2 * site.call.y.nbytes / _BYTES_PER_S


def _is_added(call: ConvolutionCall) -> bool:
    """Whether the result is only added to a map like it that no other layer returns: of two of them one adds."""
    node, user = call.node, only_user(call.node)
    while user is not None and _is_view(user):
        node, user = user, only_user(user)
    if user is None or (user.target not in _ADDS and (user.op, user.target) != ("call_method", "add")):
        return False
    operands = [value(one) for one in (*user.all_input_nodes, user)]
    alike = len(operands) == 3 and len({(one.shape, one.dtype) for one in operands if one is not None}) == 1
    return alike and not any(_is_layers(one) for one in user.all_input_nodes if one is not node)


def _is_view(node: fx.Node) -> bool:
    return node.target is keep_gradient or (node.op == "call_method" and node.target in VIEWS)


def _is_layers(node: fx.Node) -> bool:
    """Whether a layer returns it."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node.target in (*CONVOLUTIONS, *LINEARS, convolve, multiply)
