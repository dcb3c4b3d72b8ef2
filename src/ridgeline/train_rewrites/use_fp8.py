"""Convolutions of a bf16 step become convolve_fp8: the passes that are chosen in FP8, the others as they were.

So do linear layers over tokens, as 1x1 convolutions: see `linear_layers`.

    x8,  x quads  = quantize(x)                          e4m3, forward
    y             = conv2d(x8, w8) / scales + bias
    dy8, dy quads = quantize(dy)                         e5m2, backward
    dx            = conv2d(dy8, w8 turned) / scales
    dw, db        = wgrad(dy quads, x quads) / scales

An activation is kept for the backward pass as its quads (see `kernels._quads`), of 1.56 bytes an element at 32x32
and 2.25 at 16x16; the weight's value is not read at all, so that no graph casts it. Scales, and the FP8 copies of
weights, are attributes of the graph: tensors that the owner of the step writes in place, between graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels import (
    conv2d_fp8,
    conv2d_fprop,
    conv2d_wgrad_fp8,
    group_norm_silu,
    group_norm_silu_fp8,
    quantize_fp8,
)
from ridgeline.kernels._op import dtype_name
from ridgeline.train_rewrites._match import finish, is_channels_last, value
from ridgeline.train_rewrites.convolution_calls import Convolution, ConvolutionCall, convolution_calls
from ridgeline.train_rewrites.fp8_passes import PASSES, Chooser, impossible_passes
from ridgeline.train_rewrites.linear_layers import linear_calls


@dataclass(frozen=True, eq=False)
class Fp8State:
    """What all FP8 tensors of a step share: one row each, see `fp8_scaling.DelayedScaling`."""

    scale: Tensor  # [tensors] fp32
    inverse: Tensor  # [tensors] fp32
    amax: Tensor  # [tensors] fp32
    counts: Tensor  # [tensors, 3] int64


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A weight in FP8."""

    copy: Tensor  # [K, C, R, S] e4m3, channels_last; R = S = 1 of a linear layer
    turned: Tensor  # [C, K, R, S], as `conv2d_fp8.for_dgrad` turns it
    rows: tuple[int, int, int]  # of x, of the weight, of dy


class Layers(Protocol):
    """The owner of what graphs read: `fp8_step.Fp8Step`."""

    choose: Chooser
    allowed: frozenset[str]  # the passes that may run in FP8

    @property
    def state(self) -> Fp8State: ...

    def why_not(self, weight: object) -> str:
        """Why the layer of this input of a graph, None for what is no input, cannot run in FP8; "" where it can."""
        ...

    def ask(self, weight: object) -> Fp8Weight:
        """The FP8 copies of a weight that has no obstacle."""
        ...

    def note(self, weight: object, name: str, passes: tuple[str, ...], reason: str, *, kind: str) -> None:
        """Which passes of the layer run in FP8, and why not all of them; `name` is the weight's in the graph.

        `kind` is what the layer is called: "convolution", "linear layer".
        """
        ...


def apply(graph_module: fx.GraphModule, inputs: Sequence[Any], layers: Layers) -> int:
    """Replace every convolution and linear layer of which a pass is chosen to run in FP8; returns how many.

    Does not fire on: results that are not bf16; stride, dilation, groups, padding that changes the size; a weight that
    is no input of the graph, not channels_last, read by something else too, or that `layers` have an obstacle for;
    linear layers of tokens whose channels are not adjacent, or of one row an image, which are not noted either. The
    graph must not be dynamo's own but a copy of it, since it gets attributes that dynamo has no name for.
    """
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, inputs, strict=True))
    state: tuple[fx.Node, ...] | None = None
    replaced = 0
    # a linear layer is looked at when the convolutions before it have been replaced
    for call in chain(convolution_calls(graph_module), linear_calls(graph_module)):
        weight_node = call.given["weight"]
        weight = given.get(weight_node)
        reason = _why_not(call, weight, layers)
        if reason:
            layers.note(weight, weight_node.name, (), reason, kind=call.kind)
            continue
        padding, shapes = _shapes(call)
        impossible = {name: call.in_its_words(why) for name, why in impossible_passes(shapes).items()}
        chosen = layers.choose(shapes, by_norm=_is_of_norm(call, quads="wgrad" not in impossible))
        passes = tuple(name for name in PASSES if name in chosen & layers.allowed and name not in impossible)
        left_out = dict.fromkeys(frozenset(PASSES) - layers.allowed, "the recipe's fp8_passes leave it out")
        known = {**dict.fromkeys(PASSES, "FP8 would save less than quantising costs"), **left_out, **impossible}
        reasons = {name: known[name] for name in PASSES if name not in passes}
        stays = "; ".join(f"{name} stays bf16: {why}" for name, why in reasons.items())
        layers.note(weight, weight_node.name, passes, stays, kind=call.kind)
        if not passes:
            continue
        asked = layers.ask(weight)
        with graph.inserting_after(placeholders[-1]):
            state = state or tuple(_attribute(graph_module, f"fp8_{n}", t) for n, t in vars(layers.state).items())
            named = {f"fp8_{n}_{replaced}": tensor for n, tensor in (("copy", asked.copy), ("turned", asked.turned))}
            copies = tuple(_attribute(graph_module, name, tensor) for name, tensor in named.items())
        operands = (weight_node, call.given["bias"], copies, state, asked.rows, padding, passes)
        with graph.inserting_before(call.node):
            new = graph.call_function(convolve_fp8, (call.map_node(), *operands))
            new.meta["example_value"] = call.y
            result = call.result_node(new)
        call.node.replace_all_uses_with(result)
        replaced += 1
    finish(graph_module)
    return replaced


def convolve_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    copies: tuple[Tensor, Tensor],
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: tuple[int, int, int],
    padding: tuple[int, int],
    passes: tuple[str, ...],
) -> Tensor:
    """The convolution in bf16 with some passes in FP8: `copies` are Fp8Weight's tensors, `state` Fp8State's.

    A weight [K, C] is that of a 1x1 convolution.
    """
    x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    if {"fprop", "dgrad"} - set(passes):
        # a pass in bf16 reads the weight
        weight = weight.to(torch.bfloat16)
    weight = weight[:, :, None, None] if weight.dim() == 2 else weight
    return _Convolution.apply(x, weight, bias, Fp8Weight(*copies, rows), Fp8State(*state), padding, passes)


class _Convolution(torch.autograd.Function):
    """Three passes, of which each runs in FP8 if it is among `passes`. A tracer sees the operators that they call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        asked: Fp8Weight,
        state: Fp8State,
        padding: tuple[int, int],
        passes: tuple[str, ...],
    ) -> Tensor:
        x_row, weight_row, _ = asked.rows
        fprop, wgrad = "fprop" in passes, "wgrad" in passes
        x8 = quads = None
        if fprop or wgrad:
            x8, quads = _quantize(x, state, x_row, "e4m3", quads=wgrad)
        if fprop:
            places = {"x_row": x_row, "weight_row": weight_row}
            y = conv2d_fp8.OP(x8, asked.copy, state.inverse, bias, **places, padding=list(padding))
        else:
            y = conv2d_fprop.forward(x, weight, bias, padding)
        # what no pass in bf16 reads is not kept
        bf16_x, bf16_weight = None if wgrad else x, None if "dgrad" in passes else weight
        ctx.save_for_backward(quads, bf16_x, bf16_weight, asked.turned, *vars(state).values())
        ctx.rows, ctx.padding, ctx.passes = asked.rows, padding, passes
        ctx.x_shape, ctx.weight_shape, ctx.weight_dtype = x.shape, weight.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        quads, x, weight, turned, *of_state = ctx.saved_tensors
        state, padding = Fp8State(*of_state), ctx.padding
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dgrad, wgrad = needs_x and "dgrad" in ctx.passes, needs_weight and "wgrad" in ctx.passes
        x_row, weight_row, dy_row = ctx.rows
        _, _, r, s = ctx.weight_shape
        # a gradient may come in any layout: that of a sum is one number expanded
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dw = db = dy8 = dy_quads = None
        if dgrad or wgrad:
            dy8, dy_quads = _quantize(dy, state, dy_row, "e5m2", quads=wgrad)
        if dgrad:
            places = {"x_row": dy_row, "weight_row": weight_row}
            back = [r - 1 - padding[0], s - 1 - padding[1]]
            dx = conv2d_fp8.OP(dy8, turned, state.inverse, **places, padding=back)
        if wgrad:
            places = {"dy_row": dy_row, "x_row": x_row}
            dw, db = conv2d_wgrad_fp8.OP(dy_quads, quads, state.inverse, kernel_size=[r, s], bias=needs_bias, **places)
        if (needs_x and not dgrad) or (needs_weight and not wgrad):
            # a pass reads only the shape of what it makes the gradient of
            x = _unread(dy, ctx.x_shape) if x is None else x
            weight = _unread(dy, ctx.weight_shape) if weight is None else weight
            wanted = {"of_x": needs_x and not dgrad, "of_weight": needs_weight and not wgrad}
            bf16_dx, bf16_dw = conv2d_fprop.gradients(dy, x, weight, padding, **wanted)
            dx, dw = dx if dgrad else bf16_dx, dw if wgrad else bf16_dw
        if needs_bias and db is None:
            db = dy.sum((0, 2, 3), dtype=torch.float32)
        dw = None if dw is None else dw.to(ctx.weight_dtype)
        return dx, dw, db.to(ctx.bias_dtype) if needs_bias and db is not None else None, *[None] * 4


def _quantize(x: Tensor, state: Fp8State, row: int, fp8_format: str, *, quads: bool) -> tuple[Tensor, Tensor | None]:
    choices = {"row": row, "fp8_format": fp8_format, "quads": quads}
    y, transposed = quantize_fp8.OP(x, state.scale, state.amax, state.counts, **choices)
    return y, transposed if quads else None


def _unread(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _why_not(call: ConvolutionCall, weight: object, layers: Layers) -> str:
    """Why a convolution stays bf16, "" where nothing stands in the way."""
    if reason := layers.why_not(weight):
        return reason
    if not call.adjacent:
        return "the channels of its input are not adjacent"
    conv = call.problem
    if conv is None:
        return f"its padding is {call.given['padding']!r}"
    if len(call.given["weight"].users) > 1:
        return "its weight is read elsewhere too"
    if call.y.dtype != torch.bfloat16:
        return f"its result is {dtype_name(call.y.dtype)}"
    if not is_channels_last(call.weight):
        return "its weight is not channels-last"
    for name in ("stride", "dilation"):
        if getattr(conv, name) != (1, 1):
            return f"its {name} is {getattr(conv, name)}"
    if conv.groups != 1:
        return f"it has {conv.groups} groups"
    if any(2 * p != size - 1 for p, size in zip(_padding(conv), conv.filter, strict=True)):
        return f"its padding {_padding(conv)} does not keep the size under a filter {conv.filter}"
    return ""


def _padding(conv: ConvProblem) -> tuple[int, int]:
    top, left = conv.padding  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    return top, left


def _shapes(call: ConvolutionCall) -> tuple[tuple[int, int], Convolution]:
    """The padding, and all that choices depend on."""
    assert call.problem is not None
    padding = _padding(call.problem)
    x, weight = tuple(call.x.shape), tuple(call.weight.shape)
    return padding, Convolution(x, weight, padding, call.y.dtype, call.x.device)


def _is_of_norm(call: ConvolutionCall, *, quads: bool) -> bool:
    """Whether a norm makes the input for this convolution alone, and can quantise it."""
    node = call.sole_source
    if node is None or node.target is not group_norm_silu.OP.overload:
        return False
    x, groups = value(node.args[0]), int(node.kwargs["groups"])  # pyright: ignore[reportArgumentType]
    return x is not None and group_norm_silu_fp8.fits(x, groups, quads=quads)


def _attribute(graph_module: fx.GraphModule, name: str, tensor: Tensor) -> fx.Node:
    graph_module.register_buffer(name, tensor, persistent=False)
    node = graph_module.graph.get_attr(name)
    node.meta["example_value"] = tensor
    return node
