"""A compiled module in one file: safetensors with the graphs, recipe and verdict as JSON in its header.

Not `torch.export.save`: its reader unpickles, and a file from elsewhere must not run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import triton
from safetensors import SafetensorError
from torch import Tensor, fx

from ridgeline.atomic import write_file
from ridgeline.compile_report import GraphReport, InputSpec
from ridgeline.errors import UsageError
from ridgeline.graph_format import from_data, to_data
from ridgeline.kernels import BY_OVERLOAD
from ridgeline.launches import arguments_of, kernel_calls, planned
from ridgeline.lowering import cast, choose_
from ridgeline.plain import from_plain, to_plain
from ridgeline.recipe import Recipe
from ridgeline.tuned import Row, load
from ridgeline.verifier import Agreement

SCHEMA_VERSION = 1
_KEY = "ridgeline.compiled"  # of the header: its one entry, because safetensors keeps no order
_MAX_BYTES = 1 << 36


@dataclass(frozen=True)
class Contents:
    """What a file holds, ready to be captured."""

    recipe: Recipe
    verdict: Agreement | None
    graphs: tuple[tuple[fx.GraphModule, GraphReport], ...]
    tuned: tuple[Row, ...] = ()  # what the tables said of the kernels, on the GPU that wrote the file


def write(path: Path, contents: Contents) -> None:
    """Write a file, whole or not at all.

    Raises UsageError for a graph that a file cannot hold, and a path that cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    described: list[Any] = []
    for graph_module, report in contents.graphs:
        data, weights = to_data(graph_module, torch.device(report.inputs[0].device))
        described.append({"graph": data, "weights": [_put(w, tensors) for w in weights], "report": to_plain(report)})
    gpu = gpu_of([report for _, report in contents.graphs])
    header = {
        "schema_version": SCHEMA_VERSION,
        "recipe": to_plain(contents.recipe),
        "verdict": to_plain(contents.verdict),
        "graphs": described,
        "tuned": to_plain(_tuned_rows(contents, gpu)),
        "versions": versions(),
        "gpu": gpu,
    }
    text = {_KEY: json.dumps(header, allow_nan=False)}
    data = safetensors.torch.save(tensors, text)
    try:
        write_file(path, lambda file: file.write(data))
    except OSError as error:
        raise UsageError(f"save: cannot write {str(path)!r} ({error.strerror}): give another path") from error


def read(path: Path, device: torch.device) -> Contents:
    """The contents of a file, its weights on `device` and its kernels chosen for it. Runs nothing of what it says."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            header = _header(path, file.metadata() or {})
            recipe = _read_recipe(path, header["recipe"])
            return Contents(
                recipe,
                from_plain(Agreement | None, header["verdict"]),  # pyright: ignore[reportArgumentType]
                tuple(_read_graph(file, part, recipe, device) for part in header["graphs"]),
                from_plain(tuple[Row, ...], header["tuned"]),
            )
    except FileNotFoundError as error:
        raise UsageError(f"load: {str(path)!r} does not exist: give a file that Compiled.save wrote") from error
    except torch.OutOfMemoryError:
        raise  # the file is not to blame
    except (AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"load: {str(path)!r} cannot be read ({type(error).__name__}: {reason}): save the compiled module again"
        ) from error


def examples(report: GraphReport, device: torch.device) -> tuple[Tensor, ...]:
    """Zeros of a graph's signature."""
    return tuple(_example(spec, device) for spec in report.inputs)


def versions() -> Mapping[str, str]:
    try:
        own = version("ridgeline")
    except PackageNotFoundError:
        own = "from a source tree"  # on the path, never installed
    return {"ridgeline": own, "torch": torch.__version__, "triton": triton.__version__}


def gpu_of(reports: Sequence[GraphReport]) -> str | None:
    """The name of the GPU that graphs were built for."""
    devices = [torch.device(spec.device) for report in reports for spec in report.inputs]
    return next((torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"), None)


def _tuned_rows(contents: Contents, gpu: str | None) -> tuple[Row, ...]:
    rows: dict[tuple[str, str, str, str], Row] = {}
    for graph_module, _ in contents.graphs if gpu is not None else ():
        for node in kernel_calls(graph_module):
            op = BY_OVERLOAD[node.target]  # pyright: ignore[reportArgumentType]
            table = load(op.name, str(gpu), op.source_hash)
            row = table.row(contents.recipe.dtype, op.key(**arguments_of(node, "meta")))
            rows |= {} if row is None else {row.identity: row}
    return tuple(rows.values())


def _header(path: Path, text: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in text:
        raise UsageError(f"load: {str(path)!r} is a safetensors file, but not one that Compiled.save wrote")
    header = json.loads(text[_KEY])
    found = header["schema_version"]
    if found != SCHEMA_VERSION:
        newer = type(found) is int and found > SCHEMA_VERSION
        raise UsageError(
            f"load: {str(path)!r} has schema {found!r:.20}, this version of ridgeline reads {SCHEMA_VERSION}: "
            f"{'upgrade ridgeline' if newer else 'save the compiled module again'}"
        )
    return header


def _read_recipe(path: Path, data: Any) -> Recipe:
    try:
        return from_plain(Recipe, data)
    except UsageError as error:  # a choice that this version does not have
        raise UsageError(f"load: {str(path)!r} is of another version of ridgeline: {error}") from error


def _read_graph(
    file: Any, part: Mapping[str, Any], recipe: Recipe, device: torch.device
) -> tuple[fx.GraphModule, GraphReport]:
    report = from_plain(GraphReport, part["report"])
    weights = [_get(file, entry) for entry in part["weights"]]
    inputs = [cast(tensor, recipe.torch_dtype) for tensor in examples(report, device)]
    graph_module = from_data(part["graph"], weights, inputs)
    choose_(graph_module, recipe, device)
    for node in kernel_calls(graph_module):
        planned(node, "meta")  # raises ValueError for a call that the kernel refuses
    return graph_module, report


def _example(spec: InputSpec, device: torch.device) -> Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {spec.dtype!r:.80} is not known")
    zeros = torch.zeros(spec.shape, dtype=dtype, device=device)
    return zeros.contiguous(memory_format=torch.channels_last) if spec.channels_last else zeros


def _put(weight: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Add a weight under the hash of its bytes, once however often it is used; returns how to get it back."""
    # safetensors has plain row-major tensors, so the axes go in the order of memory
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    if not weight.permute(order).is_contiguous():
        order = list(range(weight.dim()))
    stored = weight.permute(order).contiguous().cpu()
    name = hashlib.sha256(stored.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:32]
    name = f"{name}.{str(stored.dtype).removeprefix('torch.')}.{'x'.join(map(str, stored.shape))}"
    tensors[name] = stored
    return {"name": name, "order": order}


def _get(file: Any, entry: Mapping[str, Any]) -> Tensor:
    stored, order = file.get_tensor(entry["name"]), entry["order"]
    if sorted(order) != list(range(stored.dim())):
        raise ValueError(f"a weight of {stored.dim()} axes has its axes in the order {order!r:.40}")
    return stored.permute([order.index(axis) for axis in range(stored.dim())])
