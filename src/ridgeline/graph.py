"""Export a module to a graph of aten calls, and look for what should not be inside it."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ridgeline.errors import NotEngaged
from ridgeline.kernels._nhwc import pixel_pitch

_log = logging.getLogger(__name__)
_LIBRARY = str(Path(torch.__file__).parent)

_COPIES = ("aten.clone.default", "aten.contiguous.default", "aten.copy.default", "aten.copy_.default")
_FILLS = ("aten.zeros.default", "aten.zeros_like.default", "aten.fill_.Scalar", "aten.zero_.default")
_CHECKS = ("aten._assert_tensor_metadata.default",)
_RESHAPES = ("aten.reshape.default", "aten.flatten.using_ints")


def export(module: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The module as a graph of aten calls whose nodes carry fake tensors, module path and source line.

    Weights stay attributes of the graph module and are shared with `module`. Raises NotEngaged, naming the line that
    stands in the way, for a module that torch.export refuses or whose shapes or numbers are read back from tensors.
    """
    try:
        with torch.no_grad(), _without_dump():
            graph_module = torch.export.export(module, tuple(inputs)).module()
    except GuardOnDataDependentSymNode as error:
        raise NotEngaged(
            f"{type(module).__name__} cannot be exported: it branches on the values of a tensor{_user_line(error)}: "
            f"choose by torch.where, or keep the branch out of the forward pass"
        ) from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and not _is_pytorchs(error):
            raise
        reason = f"{_first_sentence(error)}{_user_line(error)}"
        if "Cannot view" in reason or "view size" in reason:
            reason += ": maps are channels-last here, which reshape takes and view may not"
        raise NotEngaged(f"{type(module).__name__} cannot be exported: {reason}") from error
    assert isinstance(graph_module, fx.GraphModule)
    for node in list(graph_module.graph.nodes):
        # what the example inputs were: the compiled callable checks its inputs by signature
        if (node.op == "call_module" and node.target == "_guards_fn") or str(node.target) in _CHECKS:
            graph_module.graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            # a rewrite may hand over the source with other strides, and then only reshape works
            node.target = torch.ops.aten.reshape.default
        elif _reads_back(node):
            raise NotEngaged(
                f"{type(module).__name__} cannot be captured: {node.target} waits for a tensor's values in "
                f"{origin(node)}: keep .item(), nonzero and boolean masks out of the forward pass"
            )
    graph_module.recompile()
    if any(mutated(node) for node in graph_module.graph.nodes):
        # export gives dropout in eval mode memory of its own, which in truth is its input's: now that matters
        refresh(graph_module)
    return graph_module


def refresh(graph_module: fx.GraphModule) -> None:
    """Run the graph on fake tensors again, so that every node carries the shape and strides it really has, in place."""
    inputs = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(*inputs)


def repair_layout(graph_module: fx.GraphModule, kernels: Container[Any]) -> None:
    """Convert, in place, the maps that reach one of `kernels` in a layout it cannot read; every node's value is fresh.

    What a reshape made, inputs of the graph, and what PyTorch's operators make of channel slices.
    """
    refresh(graph_module)
    for node in list(graph_module.graph.nodes):
        for source in node.all_input_nodes if node.op == "call_function" and node.target in kernels else ():
            value = source.meta["val"]
            if source.op == "get_attr" or value.dim() != 4 or pixel_pitch(value) is not None:
                continue
            with graph_module.graph.inserting_before(node):
                form: dict[str, Any] = {"memory_format": torch.channels_last}
                converted = graph_module.graph.call_function(torch.ops.aten.contiguous.default, (source,), form)
            converted.meta = {**source.meta, "val": value.contiguous(memory_format=torch.channels_last)}
            node.replace_input_with(source, converted)
    graph_module.recompile()


@dataclass(frozen=True)
class Finding:
    """One thing a graph of fused kernels should not hold."""

    what: str  # "concat", "copy", "fill" or "layout change"
    node: str
    where: str  # module path and source line of the code that asked for it


def interior(graph_module: fx.GraphModule) -> tuple[Finding, ...]:
    """Concats, copies, fills and layout changes between the graph's input and output, each with its origin."""
    found = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        what = _offence(node)
        if what is not None:
            found.append(Finding(what, f"{node.name} = {node.target}", origin(node)))
    return tuple(found)


def origin(node: fx.Node) -> str:
    """ "model.4.cv1 (blocks.py:33)": the innermost module and the source line a node came from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0] if stack else ""
    frames = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    if not frames:
        return module
    path, line, *_ = frames[-1].removeprefix("File ").split(", ")
    return f"{module} ({path.strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')})".lstrip()


def is_view(node: fx.Node) -> bool:
    """Whether the node only renames memory of an argument: slices, dropout in eval mode, conversions to what it is."""
    shared = any(memory(node) & memory(source) for source in node.all_input_nodes)
    return node.op == "call_function" and shared and not mutated(node)


def memory(node: fx.Node) -> set[int]:
    """Identities of the memory that a node's values live in; a view has its source's."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}


def mutated(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that a call writes in place."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return ()
    written = [
        node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.is_write
    ]
    return tuple(argument for argument in written if isinstance(argument, fx.Node))


def _offence(node: fx.Node) -> str | None:
    name = str(node.target)
    if name == "aten.cat.default":
        return "concat"
    if name in (*_COPIES, *_RESHAPES) and not is_view(node):
        return "copy"
    if name in _FILLS:
        return "fill"
    value = node.meta.get("val")
    source = next((a.meta.get("val") for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)), None)
    if not isinstance(value, Tensor) or not isinstance(source, Tensor) or not value.dim() == source.dim() == 4:
        return None
    changed = is_nhwc(source) and not is_nhwc(value)
    return "layout change" if changed and not is_view(node) else None


def is_nhwc(x: Tensor) -> bool:
    """True also for a channel slice of a channels-last tensor, whose pixels lie further apart."""
    _, c, h, w = x.shape
    # a 1x1 map or a single channel is both layouts at once, so ask the predicate and never compare strides
    return c == 1 or h * w == 1 or x.stride(1) == 1 or x.is_contiguous(memory_format=torch.channels_last)


def _reads_back(node: fx.Node) -> bool:
    """Whether a call has a number, or a size, that only the device knows."""
    values = pytree.tree_leaves(node.meta.get("val"))
    numbers = [number for value in values for number in (value.shape if isinstance(value, Tensor) else (value,))]
    return any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in numbers)


@contextmanager
def _without_dump() -> Iterator[None]:
    """torch.export prints the graph so far before it refuses a read value, and warns beside it: here that is logged.

    What else is written to stderr meanwhile follows at the end.
    """
    symbols, written, dump = logging.getLogger("torch.fx.experimental.symbolic_shapes"), io.StringIO(), ""
    was = symbols.level
    symbols.setLevel(logging.ERROR)
    try:
        with redirect_stderr(written):
            yield
    except RuntimeError as error:
        dump = str(getattr(error, "partial_fx_graph", ""))
        _log.debug("torch.export refused after %s", dump)
        raise
    finally:
        symbols.setLevel(was)
        rest = written.getvalue()
        sys.stderr.write(rest.replace(f"{dump}\n", "") if dump else rest)


def _is_pytorchs(error: Exception) -> bool:
    """Whether PyTorch raised it, and not the module."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_LIBRARY)


def _user_line(error: Exception) -> str:
    """ " (net.py:12)": the innermost line outside PyTorch that an error passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARY)]
    own = [frame for frame in frames if frame.filename not in (__file__, "<string>")]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())
