"""bf16 copies of fp32 weights for compiled steps under autocast, instead of a cast at every use.

Autocast casts the weight of a convolution or a linear layer to bf16, and its gradient, which is computed in bf16, to
fp32: two small kernels for each weight and step. A copy is a leaf in the weight's place, which autocast leaves alone;
its gradient stays bf16. Both are exact: a copy is the weight as autocast casts it, and fp32 holds every bf16 number.

Copies go in where a compiled graph takes its inputs, so the model, its state dict and eager steps know fp32 weights
only. Who steps the optimizer writes them: kernels/adamw_ema.py, in the pass that it makes anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from ridgeline.train_rewrites import fuse_upsample_conv, merge_linears, read_concats, use_convolutions, use_fp8
from ridgeline.train_rewrites._match import value

# what casts operands under autocast, and which
_CASTING = {
    F.linear: slice(None),
    merge_linears.linears: slice(None),
    use_convolutions.multiply: slice(1, 3),
    # biases of these are added in fp32, as they come
    use_convolutions.convolve: slice(1, 2),
    read_concats.norm_and_convolve: slice(2, 3),
    fuse_upsample_conv.upsample_convolve: slice(1, 2),
    use_fp8.convolve_fp8: slice(1, 2),  # or reads no value of it, but leaves a bf16 gradient
    torch.conv1d: slice(None),
    torch.conv2d: slice(None),
    torch.conv3d: slice(None),
    torch.conv_transpose1d: slice(None),
    torch.conv_transpose2d: slice(None),
    torch.conv_transpose3d: slice(None),
}


class WeightCopies:
    """The copies of one step, by weight, and whether they still are what the weights are.

    A copy is made when a compiled graph asks for it, up to `close_`: what writes them must know them all.
    """

    def __init__(self) -> None:
        self._candidates: dict[int, Tensor] = {}
        self._asked: Counter[int] = Counter()
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._open = False
        self._versions = 0

    def open_(self, weights: Iterable[Tensor]) -> None:
        """Forget all copies; some of `weights` may get one from now on."""
        self._candidates = {id(weight): weight for weight in weights if _suits(weight)}
        self._asked.clear()
        self._pairs = {}
        self._open = bool(self._candidates)

    def close_(self) -> bool:
        """After the first step: make no more copies; returns whether there are some, at the first call after `open_`.

        A weight that several graphs or calls of one have asked for loses its copy: their gradients are summed in fp32.
        """
        if not self._open:
            return False
        self._open = False
        for key in [key for key in self._pairs if self._asked[key] > 1]:
            _widen_(*self._pairs.pop(key))
        self.written()
        return bool(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def of(self, weight: Tensor) -> Tensor | None:
        """The copy of a weight that has one."""
        pair = self._pairs.get(id(weight))
        return None if pair is None else pair[1]

    def is_candidate(self, weight: object) -> bool:
        return id(weight) in self._candidates

    def narrow(self, weight: Tensor) -> Tensor:
        """A weight in bf16 for a graph: its copy, or where it has none a cast that gradients flow through."""
        if self._open and id(weight) in self._candidates:
            self._asked[id(weight)] += 1
            if id(weight) not in self._pairs:
                copy = weight.detach().to(torch.bfloat16, memory_format=torch.preserve_format)
                self._pairs[id(weight)] = weight, copy.requires_grad_()
        copy = self.of(weight)
        return weight.to(torch.bfloat16) if copy is None else copy

    def gradient(self, weight: Tensor) -> Tensor | None:
        """The gradient of a weight, bf16 where a graph left it at the copy."""
        copy = self.of(weight)
        return weight.grad if copy is None or copy.grad is None else copy.grad

    def merge_gradients_(self) -> None:
        """Leave one gradient a weight: graphs of one step may have read the weight as well as its copy."""
        for weight, copy in self._pairs.values():
            if weight.grad is not None:
                _widen_(weight, copy)

    def widen_gradients_(self) -> None:
        """Hand all gradients to the weights, in fp32, for an optimizer that knows no copies."""
        for weight, copy in self._pairs.values():
            _widen_(weight, copy)

    def drop_gradients_(self) -> None:
        for _, copy in self._pairs.values():
            copy.grad = None

    @torch.no_grad()
    def refresh_(self) -> None:
        """Write every copy from its weight."""
        if self._pairs:
            weights, copies = zip(*self._pairs.values(), strict=True)
            torch._foreach_copy_(list(copies), list(weights))  # pyright: ignore[reportPrivateImportUsage]
        self.written()

    def refresh_where_changed_(self) -> None:
        """`refresh_` if a weight was written since copies were last known to be right; asks the host alone."""
        if self._count_writes() != self._versions:
            self.refresh_()

    def written(self) -> None:
        """Take note that copies are what the weights are now."""
        self._versions = self._count_writes()

    def _count_writes(self) -> int:
        # each only ever grows, so that equal sums mean that no weight was written
        return sum(weight._version for weight, _ in self._pairs.values())


def narrow_weights(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], copies: WeightCopies
) -> dict[int, Tensor]:
    """The inputs of dynamo's graph that may be bf16 copies of weights: their positions, and a fake copy for each.

    Those candidates of `copies` that one call alone reads, which casts them under the autocast that is on now. A weight
    read twice is left: its two gradients are summed in fp32.
    """
    found: dict[int, Tensor] = {}
    inside = _under_autocast_of_their_own(graph_module.graph)
    for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        weight, fake = example_inputs[position], value(node)
        if fake is None or not copies.is_candidate(weight) or not _autocasts_to_bf16(weight.device.type):
            continue
        users = list(node.users)
        if len(users) == 1 and users[0] not in inside and _casts_once(users[0], node):
            found[position] = fake.detach().to(torch.bfloat16).requires_grad_(weight.requires_grad)
            node.meta["example_value"] = found[position]
    return found


def given_narrow(compiled: Callable[..., Any], positions: Iterable[int], copies: WeightCopies) -> Callable[..., Any]:
    """A compiled graph that takes bf16 at `positions`, for callers that have fp32 weights."""
    positions = tuple(positions)

    def call(*inputs: Any) -> Any:
        given = list(inputs)
        for position in positions:
            given[position] = copies.narrow(given[position])
        return compiled(*given)

    return call


def norm_in_fp32(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of fp32 and bf16 gradients together.

    torch.nn.utils.get_total_norm rounds the norm of each bf16 tensor to bf16; of fp32 alone this is the same.
    """
    norms: dict[int, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        alike = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
        if alike:
            tensors = [gradients[i] for i in alike]
            found = torch._foreach_norm(tensors, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
            norms |= zip(alike, found, strict=True)
    # in the order of the gradients, on which the rounding of the sum depends
    return torch.linalg.vector_norm(torch.stack([norms[i] for i in range(len(gradients))]))


def _widen_(weight: Tensor, copy: Tensor) -> None:
    """Add the gradient at the copy to that at the weight."""
    if copy.grad is not None:
        gradient, copy.grad = copy.grad.to(weight.dtype), None
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _suits(weight: Tensor) -> bool:
    """Whether nothing but the optimizer awaits the gradient of a weight, which is fp32."""
    hooked = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    return isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 and weight.requires_grad and not hooked


def _autocasts_to_bf16(kind: str) -> bool:
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16


def _casts_once(user: fx.Node, operand: fx.Node) -> bool:
    if user.op != "call_function" or user.target not in _CASTING:
        return False
    operands: list[Any] = [*user.args, *user.kwargs.values()]
    return operands.count(operand) == 1 and operand in operands[_CASTING[user.target]]


def _under_autocast_of_their_own(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between an entry of the user's own autocast and its exit, which may switch casts off."""
    inside: set[fx.Node] = set()
    depth = 0
    for node in graph.nodes:
        depth += (node.target is _enter_autocast) - (node.target is _exit_autocast)
        if depth:
            inside.add(node)
    return inside
