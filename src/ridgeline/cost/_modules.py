"""Which nn.Module an operator belongs to, in the forward pass and in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary


class ModulePaths:
    """The dotted path of the innermost nn.Module that is running, "" outside any and for `root` itself.

    Forward: a stack kept by global module hooks. Backward: autograd numbers its nodes in order of creation, and a
    node is created just before its operator runs, so the number seen in forward leads from a node back to its module.
    (Hooks on gradients, as torch.utils.module_tracker uses, miss modules whose input needs no gradient.)
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._paths = WeakIdKeyDictionary()  # module or parameter -> path
        self._nodes: dict[int, str] = {}  # autograd sequence number -> path
        self._stack: list[str] = []
        self._handles: list[RemovableHandle] = []
        if root is not None:
            self._name(root, "")

    def start(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._stack = [], []

    def current(self) -> str:
        """Path of the operator being dispatched. Call once per operator: forward calls are remembered."""
        if in_backward() and not self._stack:  # a stack in backward is a checkpointed module running again
            node = torch._C._current_autograd_node()
            if node is None:
                return ""
            if (variable := getattr(node, "variable", None)) is not None:  # AccumulateGrad of a parameter
                return self._paths.get(variable) or ""
            return self._nodes.get(node._sequence_nr(), "")
        path = self._stack[-1] if self._stack else ""
        # The first operator after a node's creation is the node's own; later ones may need no gradient.
        self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, path)  # pyright: ignore[reportPrivateImportUsage]
        return path

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if module not in self._paths:
            # Called inside a named module but not its child (a closure, a list): filed under the caller.
            self._name(module, ".".join(filter(None, [*self._stack[-1:], type(module).__name__])))
        self._stack.append(self._paths[module])

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _name(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules():
            path = ".".join(filter(None, (prefix, name)))
            self._paths.setdefault(module, path)
            for parameter in module.parameters(recurse=False):
                self._paths.setdefault(parameter, path)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
