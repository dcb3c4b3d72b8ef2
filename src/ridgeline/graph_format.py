"""An FX graph of operator calls as plain data and back, for files: nothing of a file becomes code or a name.

A call is [operator, arguments, keywords]; nodes are numbered in order. What a graph may call on the way in is PyTorch's
and ridgeline's operators, by name, without those that read files or give a tensor other memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ridgeline.errors import UsageError

_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_FORMATS = {
    str(form).removeprefix("torch."): form
    for form in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}
_OUTSIDE = frozenset({"from_file", "set_", "resize_", "resize_as_", "record_stream", "set_data"})
_MAX_NODES = 100_000
_MAX_TEXT = 200
# what PyTorch raises for a call with arguments that are not its own; a file may hold any
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def to_data(graph_module: fx.GraphModule, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
    """The graph as JSON-like data, and the weights it reads, in the order in which the data numbers them.

    `device` is where the graph runs. Raises UsageError for what has no plain form: control flow, operators of other
    packages, results that are neither tensors nor lists, tuples and dictionaries of them.
    """
    index: dict[fx.Node, int] = {}
    weights: list[Tensor] = []
    calls: list[Any] = []
    result: Any = None
    inputs = 0
    for node in graph_module.graph.nodes:
        if node.op == "output":
            # in the structure that the module returns, where the graph itself has a flat list
            result = _encode(graph_module.graph.process_outputs(node.args[0]), index, device)
            break
        index[node] = len(index)
        if node.op == "placeholder":
            inputs += 1
            calls.append("input")
        elif node.op == "get_attr":
            weights.append(operator.attrgetter(str(node.target))(graph_module).detach())
            calls.append("weight")
        else:
            parts = [_encode(part, index, device) for part in (tuple(node.args), dict(node.kwargs))]
            calls.append([_name_of(node), *parts])
    return {"inputs": inputs, "calls": calls, "result": result}, weights


def from_data(data: Mapping[str, Any], weights: Sequence[Tensor], examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph module that `to_data` made `data` of, on the device of `examples`; its nodes carry fake tensors.

    Raises ValueError for data that is none, and for calls that cannot be made.
    """
    if len(data["calls"]) > _MAX_NODES or data["inputs"] != len(examples):
        raise ValueError(f"{len(data['calls'])} calls on {data['inputs']} inputs, {len(examples)} described")
    graph, nodes, root = fx.Graph(), [], nn.Module()
    given = iter(weights)
    for number, call in enumerate(data["calls"]):
        # names are numbers: FX writes them into the Python code of the module
        if call == "input":
            nodes.append(graph.placeholder(f"input_{number}"))
        elif call == "weight":
            root.register_buffer(f"weight_{number}", next(given))
            nodes.append(graph.get_attr(f"weight_{number}"))
        else:
            name, args, kwargs = call
            args, kwargs = (_decode(part, nodes, examples[0].device) for part in (args, kwargs))
            if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(map(_is_word, kwargs)):
                raise ValueError(f"call {number} of {name!r:.80} has no arguments")
            target = _operator(name)
            if isinstance(target, torch._ops.OpOverload) and _lacks_a_tensor(target, args):
                raise ValueError(f"call {number} of {name} has null for a tensor")
            nodes.append(graph.call_function(target, args, kwargs))
    graph.output(_decode(data["result"], nodes, examples[0].device))
    graph_module = fx.GraphModule(root, graph)
    try:
        graph.lint()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        FakeTensorProp(graph_module, mode).propagate(*examples)
    except _REFUSALS as error:
        raise ValueError(f"its calls do not fit together ({type(error).__name__}: {str(error)[:_MAX_TEXT]})") from error
    return graph_module


def _name_of(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload) and _is_known(node.target):
        return str(node.target)  # "aten.conv2d.default"
    raise UsageError(
        f"save: the graph calls {node.target}, which a file cannot hold: keep the module, and compile it where it runs"
    )


def _operator(name: Any) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    if isinstance(name, str) and name.count(".") == 2 and all(map(_is_word, name.split("."))):
        namespace, packet, overload = name.split(".")
        if namespace in ("aten", "ridgeline"):
            found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
            if isinstance(found, torch._ops.OpOverload) and _is_known(found):
                return found
    raise ValueError(f"operator {name!r:.80} is not known, or not allowed in a file")


def _is_known(overload: torch._ops.OpOverload) -> bool:
    name = overload._schema.name.partition("::")[2]
    # without a kernel it belongs to TorchScript, which has operators that open files
    has_kernel = torch._C._dispatch_has_kernel(overload.name())
    return overload.namespace in ("aten", "ridgeline") and has_kernel and name[0] != "_" and name not in _OUTSIDE


def _lacks_a_tensor(overload: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    # the dispatcher takes None for any tensor, and the operator may not
    needed = (isinstance(argument.type, torch.TensorType) for argument in overload._schema.arguments)
    return any(value is None and is_tensor for value, is_tensor in zip(args, needed, strict=False))


def _is_word(text: Any) -> bool:
    return isinstance(text, str) and text.isidentifier() and len(text) <= _MAX_TEXT


def _encode(value: Any, index: Mapping[fx.Node, int], device: torch.device) -> Any:
    """Numbers, strings, None and lists as they are; everything else as an object with one entry that names its kind."""
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [_encode(part, index, device) for part in value]}
    if isinstance(value, list):  # FX keeps lists of its own kind
        return [_encode(part, index, device) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _encode(part, index, device)] for key, part in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if value is torch.strided:
        return {"layout": "strided"}
    if isinstance(value, torch.device) and value.type in ("cpu", device.type):
        return {"device": "graph" if value.type == device.type else "cpu"}
    raise UsageError(
        f"save: the graph holds {value!r:.80}, a {type(value).__name__}, which a file cannot hold: keep the module, "
        f"and compile it where it runs"
    )


def _decode(data: Any, nodes: Sequence[fx.Node], device: torch.device) -> Any:
    if data is None or type(data) in (bool, int, float) or (isinstance(data, str) and len(data) <= _MAX_TEXT):
        return data
    if isinstance(data, list):
        return [_decode(part, nodes, device) for part in data]
    if isinstance(data, dict) and len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "node" and type(value) is int and 0 <= value < len(nodes):
            return nodes[value]
        if kind == "tuple" and isinstance(value, list):
            return tuple(_decode(part, nodes, device) for part in value)
        if kind == "dict" and isinstance(value, list):
            return {str(key): _decode(part, nodes, device) for key, part in value}
        if kind == "float" and value in ("inf", "-inf", "nan"):
            return float(value)
        if kind == "dtype" and value in _DTYPES:
            return _DTYPES[value]
        if kind == "memory_format" and value in _FORMATS:
            return _FORMATS[value]
        if kind == "layout" and value == "strided":
            return torch.strided
        if kind == "device" and value in ("graph", "cpu"):
            return device if value == "graph" else torch.device("cpu")
    raise ValueError(f"{data!r:.80} is no argument of a call")
