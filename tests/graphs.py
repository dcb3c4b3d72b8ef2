"""Small graphs for tests of rewrites: export, count, run, and compare with the module they came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from ridgeline.graph import export, repair_layout
from ridgeline.kernels import ALL, _op
from ridgeline.kernels._nhwc import pixel_pitch
from ridgeline.kernels._op import INTERPRETED
from ridgeline.numerics import compare
from ridgeline.rewrites import PIPELINE

KERNELS = tuple(overload for op in ALL for overload in (op.overload, op.into) if overload is not None)
BY_NAME = {rewrite.name: rewrite.apply for rewrite in PIPELINE}


class Net(nn.Module):
    """A forward function over named layers: `Net(lambda m, x: m.a(x), a=nn.Conv2d(3, 8, 1))`."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            if isinstance(layer, nn.Module):
                self.add_module(name, layer)
            else:
                self.register_buffer(name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def net(forward: Callable[..., Any], *, seed: int = 0, **layers: Any) -> Net:
    """`Net` in eval mode; every parameter and statistic is drawn from `seed`, so that no norm is the identity."""
    module = Net(forward, **layers).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        if not tensor.is_floating_point():
            continue
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        else:
            fan_in = max(tensor[0].numel(), 1) if tensor.dim() > 1 else 4
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * fan_in**-0.5)
    return module


def image(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def targets(graph_module: fx.GraphModule) -> Counter[str]:
    """How often each operator is called: "conv2d_act", "cat", …"""
    return Counter(
        str(node.target).split(".")[1] if "." in str(node.target) else node.target.__name__
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    )


def rewritten(
    module: nn.Module, inputs: Sequence[Tensor], *names: str, sites: int | None = None
) -> tuple[fx.GraphModule, Counter[str]]:
    """Export, apply the named rewrites as `compile` does, check the results.

    `sites` is what the last rewrite must have changed. The targets are counted after the repair of layouts.
    """
    graph_module = export(module, inputs)
    count = 0
    for name in names:
        count = BY_NAME[name](graph_module)
    if sites is not None:
        assert count == sites, f"{names[-1]} changed {count} sites, expected {sites}:\n{graph_module.graph}"
    repair_layout(graph_module, KERNELS)
    for node in graph_module.graph.nodes:
        for source in node.all_input_nodes if node.target in KERNELS else ():
            found = source.meta["val"]
            readable = source.op == "get_attr" or found.dim() != 4 or pixel_pitch(found) is not None
            assert readable, f"{node} reads {source}: {tuple(found.shape)}, strides {found.stride()}"
    check(graph_module, module, inputs)
    return graph_module, targets(graph_module)


def check(graph_module: fx.GraphModule, module: nn.Module, inputs: Sequence[Tensor]) -> None:
    """The graph's results against the module's, by the rule of `numerics`; inputs and module stay as they were.

    What the graph allocates without filling is NaN.
    """
    given = [tensor.clone() for tensor in inputs]
    with torch.no_grad(), by_reference(), nan_memory():
        actual = tensors(graph_module(*given))
    assert all(torch.equal(a, b) for a, b in zip(given, inputs, strict=True)), "the graph wrote to its input"
    with torch.no_grad():
        eager = tensors(module(*(tensor.clone() for tensor in inputs)))
        module.double()
        exact = tensors(module(*(tensor.double() for tensor in inputs)))
        module.float()
    assert len(actual) == len(exact) > 0
    for a, r, e in zip(actual, exact, eager, strict=True):
        # factor 4: the result of a sum in another order may be twice as far off as one lucky order
        verdict = compare(a, r.double(), e, error_factor=4.0)
        assert verdict.passed, verdict.reason


def tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


@contextmanager
def by_reference() -> Iterator[None]:
    """Run every op by its reference, as a machine without GPU and interpreter does: a hundred times faster."""
    with ExitStack() as stack:
        for op in ALL if INTERPRETED else ():
            stack.enter_context(op.call.set_kernel_enabled("cpu", enabled=True))
        stack.enter_context(patch.object(_op, "INTERPRETED", False))
        yield


def _nhwc(reference: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        y = reference(*args, **kwargs)
        return tuple(map(placed, y)) if isinstance(y, tuple) else placed(y)

    def placed(y: torch.Tensor) -> torch.Tensor:
        return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y.contiguous()

    return call


# under the interpreter the ops have no CPU kernels of their own: these stay off outside `by_reference`
_OFF = ExitStack()
if INTERPRETED:
    for op in ALL:
        op.call.register_kernel("cpu")(_nhwc(op.reference))
        _OFF.enter_context(op.call.set_kernel_enabled("cpu", enabled=False))


@contextmanager
def nan_memory() -> Iterator[None]:
    """`torch.empty` returns NaN: whatever is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
