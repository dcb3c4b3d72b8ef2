"""In-place calls become their out-of-place twins where nobody else can see the memory they write."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ridgeline.graph import memory, mutated
from ridgeline.rewrites._match import finish, replace, value


def apply(graph_module: fx.GraphModule) -> int:
    """Replace relu_(x) by relu(x) and its like; returns how many. The other rewrites leave what stays in place alone.

    Does not fire on: writes to inputs and weights of the graph, memory that is read afterwards through an older view
    of it, sums that promote their dtype, calls that write more than their first argument.
    """
    sites = 0
    for node in list(graph_module.graph.nodes):
        twin = _twin(node)
        if twin is None or _seen_elsewhere(node):
            continue
        with graph_module.graph.inserting_before(node):
            pure = graph_module.graph.call_function(twin, node.args, dict(node.kwargs))
        replace(node, pure)
        graph_module.graph.erase_node(node)
        sites += 1
    finish(graph_module)
    return sites


def _twin(node: fx.Node) -> torch._ops.OpOverload | None:
    """aten.relu for aten.relu_: the overload of equal name, where operands and result share one dtype."""
    if len(node.args) == 0 or mutated(node) != (node.args[0],) or not isinstance(node.meta.get("val"), Tensor):
        return None
    schema, overload = node.target._schema, node.target._overloadname  # pyright: ignore[reportFunctionMemberAccess]
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    operands = [source.meta.get("val") for source in node.all_input_nodes]
    one_dtype = all(isinstance(operand, Tensor) and operand.dtype == value(node).dtype for operand in operands)
    return getattr(packet, overload, None) if packet is not None and one_dtype else None


def _seen_elsewhere(node: fx.Node) -> bool:
    """Whether the written memory outlives the graph, or is read later by a name older than the write."""
    written = memory(node.args[0])
    later, newer = False, {node}
    for other in node.graph.nodes:
        if other is node:
            later = True
        elif other.op in ("placeholder", "get_attr") and memory(other) & written:
            return True
        elif later:
            sharing = [source for source in other.all_input_nodes if memory(source) & written]
            if any(source not in newer for source in sharing):
                return True
            if sharing and memory(other) & written:
                newer.add(other)
    return False
