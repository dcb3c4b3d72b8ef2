"""How far each kernel of a compiled module has drifted from the untouched module, layer by layer.

The graph of kernels and the untouched module run side by side, the latter in float64, the truth, and in the recipe's
dtype, what plain PyTorch errs in the worse of two memory layouts. A kernel is compared with the point of the untouched
module it took the place of: the call of the same module and source line with a result of the same shape. Nothing is
reset on the way, so errors accumulate as they do in the end result, and the first layer that is worse than it must be
is where to look.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline.errors import NotEngaged
from ridgeline.graph import export, mutated, origin
from ridgeline.kernels import BY_OVERLOAD, Op
from ridgeline.lowering import cast, channels_last, lower
from ridgeline.numerics import Verdict, compare, largest, rms
from ridgeline.recipe import Recipe
from ridgeline.verifier import is_detections, most_allowing, rounding

_aten = torch.ops.aten


@dataclass(frozen=True)
class Layer:
    """One kernel's result beside the same point of the untouched module; the float64 value is the truth."""

    op: str
    where: str  # module path and source line
    shape: tuple[int, ...]
    verdict: Verdict | None  # None: the untouched module has no such point
    size: float = 0.0  # RMS of the true value
    own_rms: float = 0.0  # RMS error of the untouched module in the recipe's dtype, the worse of its layouts
    own_max: float = 0.0

    @property
    def excess(self) -> float:
        """RMS error as a multiple of the allowed one; above 1 the layer is worse than it must be."""
        if self.verdict is None or self.verdict.rms_error == 0:
            return 0.0
        return self.verdict.rms_error / self.verdict.allowed_rms if self.verdict.allowed_rms else float("inf")

    def relative(self, error: float) -> float:
        """An error in units of the true value's RMS."""
        return error / self.size if self.size else 0.0


def drift(module: nn.Module, inputs: Sequence[Tensor], recipe: Recipe) -> tuple[Layer, ...]:
    """A row for each kernel that `compile` would launch, in order of execution.

    Of a selection of detections, whose rows may swap, only the sorted scores are compared. Raises NotEngaged where the
    module cannot be exported.
    """
    lowered, _ = lower(module, inputs, recipe)
    kernels = _kernels(lowered.graph)
    try:
        truth, exact = _Untouched.of(module, inputs, torch.float64, lowered.graph), True
    except NotEngaged:
        # a module that insists on float32 somewhere is its own reference in float32
        truth, exact = _Untouched.of(module, inputs, torch.float32, lowered.graph), False
    plain = _Untouched.of(module, inputs, recipe.torch_dtype, lowered.graph)
    truths, owns = truth.run(), (plain.run(), plain.run_channels_last_())
    eps = rounding(recipe, exact=exact, on_gpu=inputs[0].is_cuda)
    layers: list[Layer] = []

    def judge(kernel: fx.Node, result: Tensor) -> None:
        places = [place for place in truth.places[kernel] if place in plain.places[kernel]]
        op, where, shape = kernels[kernel].name, origin(kernel), tuple(result.shape)
        if not places:
            layers.append(Layer(op, where, shape, None))
            return
        mine = torch.cat([result[:, start:stop] for start, stop in places], dim=1)
        true, *own = (torch.cat([side[kernel, place] for place in places], dim=1) for side in (truths, *owns))
        true = true.double()
        if is_detections(true):
            mine, true, *own = (rows[..., 4] for rows in (mine, true, *own))
        factor = recipe.limits.error_factor
        verdict = most_allowing([compare(mine.to(o.dtype), true, o, error_factor=factor, eps=eps) for o in own])
        errors = [o.double() - true for o in own]
        layers.append(Layer(op, where, shape, verdict, rms(true), max(map(rms, errors)), max(map(largest, errors))))

    with torch.no_grad():
        _Watched(lowered, set(kernels), judge).run(*(cast(tensor, recipe.torch_dtype) for tensor in inputs))
    return tuple(layers)


Channels = tuple[int, int]  # first and one past the last


@dataclass(frozen=True)
class _Untouched:
    """The untouched module in one dtype: which channels of each kernel's result it also has, and what computes them."""

    places: dict[fx.Node, tuple[Channels, ...]]
    graph_module: fx.GraphModule
    arguments: tuple[Tensor, ...]
    found: dict[tuple[fx.Node, Channels], fx.Node]

    @staticmethod
    def of(module: nn.Module, inputs: Sequence[Tensor], dtype: torch.dtype, lowered: fx.Graph) -> _Untouched:
        arguments = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
        graph_module = export(copy.deepcopy(module).eval().requires_grad_(False).to(dtype), arguments)
        found = _counterparts(lowered, graph_module.graph)
        places: dict[fx.Node, tuple[Channels, ...]] = {}
        for kernel in lowered.nodes:
            places[kernel] = tuple(place for owner, place in found if owner is kernel)
        return _Untouched(places, graph_module, arguments, found)

    def run(self) -> dict[tuple[fx.Node, Channels], Tensor]:
        """The values of those channels."""
        made: dict[fx.Node, Tensor] = {}
        with torch.no_grad():
            # copied as they are made: later calls may write over them
            watched = _Watched(self.graph_module, set(self.found.values()), lambda n, y: made.update({n: y.clone()}))
            watched.run(*self.arguments)
        return {key: made[node] for key, node in self.found.items()}

    def run_channels_last_(self) -> dict[tuple[fx.Node, Channels], Tensor]:
        """The same with inputs and weights channels-last, which they are from then on."""
        for tensor in (*self.graph_module.parameters(), *self.graph_module.buffers()):
            tensor.data = channels_last(tensor.data)
        return replace(self, arguments=tuple(map(channels_last, self.arguments))).run()


class _Watched(fx.Interpreter):
    """Runs a graph and shows what each of `nodes` made, or wrote, right after it ran."""

    def __init__(
        self, graph_module: fx.GraphModule, nodes: set[fx.Node], show: Callable[[fx.Node, Tensor], None]
    ) -> None:
        super().__init__(graph_module)
        self.nodes, self.show = nodes, show

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.nodes:
            self.show(n, self.env[_result(n)] if result is None else result)
        return result


def _counterparts(lowered: fx.Graph, original: fx.Graph) -> dict[tuple[fx.Node, Channels], fx.Node]:
    """For channels of each kernel's result the node of the untouched graph that has the same."""
    kernels = _kernels(lowered)
    left = {_call(node) for node in lowered.nodes if node not in kernels}
    known: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in original.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor) and _call(node) not in left:
            known[_key(node)].append(node)
    asked = [(kernel, node, place) for kernel in kernels for node, place in _parts(kernel, known)]
    # a module that is called twice has two kernels of one key, in the same order
    calls, met = Counter(_key(node) for _, node, _ in asked), Counter[tuple]()
    found = {}
    for kernel, node, place in asked:
        key = _key(node)
        met[key] += 1
        # of several results of one line the last is what the line was for
        chosen = known[key][met[key] * len(known[key]) // calls[key] - 1]
        user = next(iter(chosen.users))
        # a norm that was folded leaves the kernel the origin of its convolution
        folded = (chosen.target, user.target) == (_aten.conv2d.default, _aten.batch_norm.default)
        found[kernel, place] = user if folded and _call(user) not in left else chosen
    return found


def _parts(kernel: fx.Node, known: Container[tuple]) -> list[tuple[fx.Node, Channels]]:
    """What of a kernel's result the untouched graph has: all of it, else those of its channel slices that are read.

    Siblings merged into one convolution are such slices; one that is read within a concat has no node any more.
    """
    result = _result(kernel)
    if _key(kernel) in known:
        return [(kernel, (0, result.meta["val"].shape[1]))]
    slices = [user for user in result.users if user.target is _aten.slice.Tensor and user.args[1] == 1]
    ranges: list[Any] = [part.args[2:4] for part in slices]
    return [(part, tuple(place)) for part, place in zip(slices, ranges, strict=True) if _key(part) in known]


def _key(node: fx.Node) -> tuple:
    """Module path, source lines and shape of a node's result: the same in every export of a module."""
    value = _result(node).meta.get("val")
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    return stack[-1][0] if stack else "", node.meta.get("stack_trace"), shape


def _call(node: fx.Node) -> tuple:
    """A call's key and operator, whether it writes in place or not."""
    return _key(node), str(node.target).replace("_.", ".")


def _result(node: fx.Node) -> fx.Node:
    """The node that holds what a call makes: the written argument of a kernel that stores, else the node itself."""
    op = _op(node)
    return mutated(node)[0] if op is not None and node.target is op.into else node


def _kernels(graph: fx.Graph) -> dict[fx.Node, Op]:
    """The calls of ridgeline's operators, in order."""
    return {node: op for node in graph.nodes if (op := _op(node)) is not None}


def _op(node: fx.Node) -> Op | None:
    target: Any = node.target
    return BY_OVERLOAD.get(target)
