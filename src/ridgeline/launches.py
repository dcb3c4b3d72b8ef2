"""The kernel launches that a graph will make: counted on any machine, compiled in parallel on a GPU.

And the problems to tune them on.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg
from triton.errors import TritonError

from ridgeline.kernels import BY_TRAINING_OVERLOAD, TUNED_AS, Op


def planned(node: fx.Node, device: torch.device | str) -> tuple[Any, ...]:
    """The launches that a call of a ridgeline operator makes on tensors like its own, in order; runs nothing."""
    op = BY_TRAINING_OVERLOAD[node.target]  # pyright: ignore[reportArgumentType]
    return op.launcher.plan(**arguments_of(node, device)).parts


def arguments_of(node: fx.Node, device: torch.device | str) -> dict[str, Any]:
    """The arguments of a call by name, with uninitialised tensors like its own."""
    return _arguments(node, lambda source: _stand_in(source.meta["val"], device))


def problems_of(graph_module: fx.GraphModule, ops: Sequence[Op]) -> Iterator[tuple[Op, dict[str, Any]]]:
    """Every call of one of `ops` in a graph, with arguments to tune it on; of a form of one, as a call of that op.

    Weights are the graph's own; other tensors are normal data with the layout and device that the graph records, or
    what the op says is typical.
    """
    for node in kernel_calls(graph_module):
        called = BY_TRAINING_OVERLOAD[node.target]  # pyright: ignore[reportArgumentType]
        op = TUNED_AS.get(called, called)
        if op in ops:
            arguments = _arguments(node, lambda source: _tensor_of(graph_module, source))
            yield op, arguments if op.launcher.typical is None else op.launcher.typical(**arguments)


def kernel_calls(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of ridgeline's operators, in order."""
    nodes = graph_module.graph.nodes
    return (node for node in nodes if node.op == "call_function" and node.target in BY_TRAINING_OVERLOAD)


def compile_kernels(graph_module: fx.GraphModule, device: torch.device) -> None:
    """Compile, a thread a core, every kernel that the graph launches on the GPU `device`.

    Threads, not the child processes of `precompile`: these configs are known to compile, a thread starts at once, and
    of some 0.7 s a kernel (Triton 3.6, sm_90, a 2.5 GHz Xeon) only the first tenth holds the interpreter's lock. What
    Triton's disk cache has is only read. A kernel that fails does so again, and says why, where it is launched.
    """
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    # a compiler that asks for this may make fake tensors of all that is made: they have no address to be aligned
    with unset_fake_temporarily():
        with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            _compile_each(graph_module, device)
        # Before Python 3.11.8 and 3.12.2 two threads in `ast.parse` may fail (CPython issue 106905): one thread does
        # what they left, and finds the rest in memory.
        _compile_each(graph_module, device)


def _compile_each(graph_module: fx.GraphModule, device: torch.device) -> None:
    for node in kernel_calls(graph_module):
        # of what does not fit beside a model in training either
        with contextlib.suppress(TritonError, RuntimeError, SystemError):
            for launch in planned(node, device):
                launch.kernel.warmup(**launch.arguments, **launch.constants, **launch.options, grid=launch.grid)


def _arguments(node: fx.Node, tensor_of: Callable[[fx.Node], Tensor]) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    # one tensor for a node that is two arguments
    made = {source: tensor_of(source) for source in node.all_input_nodes}
    return {name: map_arg(value, made.__getitem__) for name, value in given.items()}


def _tensor_of(graph_module: fx.GraphModule, node: fx.Node) -> Tensor:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(graph_module).detach()
    tensor = _stand_in(node.meta["val"], node.meta["val"].device)
    generator = torch.Generator(tensor.device).manual_seed(0)
    return (
        tensor.normal_(generator=generator)
        if tensor.is_floating_point()
        else tensor.random_(0, 256, generator=generator)
    )


def _stand_in(fake: Tensor, device: torch.device | str) -> Tensor:
    """Uninitialised memory with the layout and alignment of a fake tensor, which a kernel may be specialised on."""
    length = fake.untyped_storage().nbytes() // fake.element_size()
    memory = torch.empty(length, dtype=fake.dtype, device=device)
    return memory.as_strided(fake.shape, fake.stride(), fake.storage_offset())
