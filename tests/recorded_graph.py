"""A CUDA graph's behaviour on the CPU: operators recorded with the tensors they had, run again on the same memory.

As in a real graph, Python runs once, at capture: numbers are frozen, tensors that were replaced since are still read
and written where they lay, and a tensor's value cannot be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.cudagraph import Captured
from ridgeline.errors import NotEngaged


class RecordedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def pool(self) -> Any:
        return (0, 0)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            read = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                # a view or the target of a write in place is up to date already
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in read:
                    old.detach().copy_(new)


def capture(fn, inputs, *, warmup: int = 2) -> Captured:
    """As `cudagraph.capture`, on the CPU."""
    buffers = tuple(tensor.detach().clone() for tensor in inputs)
    for _ in range(warmup):
        fn(*buffers)
    graph = RecordedGraph()
    try:
        with graph:
            outputs = fn(*buffers)
    except RuntimeError as error:
        raise NotEngaged(f"capture: {error}") from error
    return Captured(buffers, outputs, graph, fn)
