"""What `compile` made of a module, as a value: rewrites, kernels, what is left between them, memory, verdict."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from ridgeline import units
from ridgeline.graph import Finding, interior, is_view, memory
from ridgeline.kernels import BY_OVERLOAD
from ridgeline.launches import planned
from ridgeline.plain import to_plain
from ridgeline.recipe import Recipe
from ridgeline.streams import chain_length
from ridgeline.verifier import Agreement

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class InputSpec:
    """What tells one input from another: a graph is built for exactly these."""

    shape: tuple[int, ...]
    dtype: str  # "float16"
    device: str  # "cuda:0"
    channels_last: bool

    def __str__(self) -> str:
        layout = " channels-last" if self.channels_last else ""
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}{layout} on {self.device}"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a graph holds on to. Inputs and outputs are static: a replay reads and writes the same ones."""

    weight_bytes: int
    activation_bytes: int  # the peak of what kernels write for one another, each tensor living until its last reader
    input_bytes: int
    output_bytes: int
    pool_bytes: int | None  # reserved by the CUDA graph for activations, outputs, workspaces; None: not captured


@dataclass(frozen=True)
class GraphReport:
    """What one graph became: how often each rewrite fired, the kernels left, and what still stands between them."""

    inputs: tuple[InputSpec, ...]
    sites: tuple[tuple[str, int], ...]  # rewrites that ran, and how many places each changed
    kernels: tuple[tuple[str, int], ...]  # ridgeline operators and how often each is called
    foreign: tuple[tuple[str, int], ...]  # everything else that computes: left to PyTorch
    interior: tuple[Finding, ...]
    launches: int  # of ridgeline's kernels; an operator may need several
    chain_length: int  # launches on the longest chain of those that wait for one another, foreign operators included
    memory: MemoryPlan
    early_launch_dropped: str | None = None  # why kernels wait for the end of their predecessors though they need not

    def lines(self) -> list[str]:
        plan = self.memory
        rows = [f"rewrite {name}: {count} sites" for name, count in self.sites]
        rows += [f"kernel {name}: {count}" for name, count in self.kernels]
        rows += [f"left to PyTorch, {name}: {count}" for name, count in self.foreign]
        rows += [f"{finding.what} inside: {finding.node}, {finding.where}" for finding in self.interior]
        rows.append(f"launches: {self.launches}, {self.chain_length} of all calls in the longest chain")
        if self.early_launch_dropped is not None:
            rows.append(f"early launch dropped: {self.early_launch_dropped}")
        parts = {"weights": plan.weight_bytes, "activations": plan.activation_bytes, "inputs": plan.input_bytes}
        parts |= {"outputs": plan.output_bytes, "graph pool": plan.pool_bytes}
        said = (f"{name} {units.nbytes(size)}" for name, size in parts.items() if size is not None)
        return [*rows, f"memory: {', '.join(said)}"]


@dataclass(frozen=True)
class CompileReport:
    """`Compiled.report`: the recipe, one graph for each signature called so far, and how right the first one is."""

    recipe: Recipe
    verdict: Agreement | None  # None: not verified
    graphs: tuple[GraphReport, ...]
    gpu: str | None  # None: on the CPU
    versions: Mapping[str, str]  # of ridgeline, torch and triton

    def lines(self) -> list[str]:
        """Readable text, a fact a line."""
        if self.verdict is None:
            said = "not verified"
        else:
            said = f"{'agrees' if self.verdict.passed else 'DISAGREES'}: {self.verdict.reason}"
        rows = [f"{self.recipe.dtype} on {self.gpu or 'the CPU'}, {said}"]
        for graph in self.graphs:
            rows += [f"graph for {', '.join(map(str, graph.inputs))}", *(f"  {line}" for line in graph.lines())]
        return rows

    def to_json(self) -> str:
        """One JSON object; a float that is not finite is a string."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **to_plain(self)}, allow_nan=False)


def input_spec(tensor: Tensor) -> InputSpec:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return InputSpec(tuple(tensor.shape), dtype, str(tensor.device), last)


def describe(graph_module: fx.GraphModule, sites: Sequence[tuple[str, int]], inputs: Sequence[Tensor]) -> GraphReport:
    """Count a lowered graph; every node carries its fake tensor."""
    kernels: Counter[str] = Counter()
    foreign: Counter[str] = Counter()
    launches: dict[fx.Node, int] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or is_view(node) or node.target is torch.ops.aten.empty.memory_format:
            continue
        op = BY_OVERLOAD.get(node.target)
        (kernels if op else foreign)[op.name if op else str(node.target)] += 1
        launches[node] = len(planned(node, "meta")) if op else 1
    return GraphReport(
        inputs=tuple(map(input_spec, inputs)),
        sites=tuple(sites),
        kernels=tuple(kernels.items()),
        foreign=tuple(foreign.items()),
        interior=interior(graph_module),
        launches=sum(count for node, count in launches.items() if node.target in BY_OVERLOAD),
        chain_length=chain_length(graph_module.graph, lambda node: launches.get(node, 0)),
        memory=memory_plan(graph_module),
    )


def memory_plan(graph_module: fx.GraphModule) -> MemoryPlan:
    """Add up what a graph holds, and follow what its calls allocate from the first writer to the last reader."""
    nodes = list(graph_module.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    weights = [node for node in nodes if node.op == "get_attr"]
    output = next(node for node in nodes if node.op == "output")
    outside = {identity for node in (*given, *weights, *output.all_input_nodes) for identity in memory(node)}
    size_bytes: dict[int, int] = {}
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for identity, size in _storages((node,)).items():
            if identity not in outside:
                size_bytes[identity] = size
                born.setdefault(identity, index)
                dies[identity] = index
        for identity in set().union(*map(memory, node.all_input_nodes)) & born.keys():
            dies[identity] = index
    # at one call, what it makes is there before what it reads last is gone
    changes = [(born[identity], 0, size) for identity, size in size_bytes.items()]
    changes += [(dies[identity], 1, -size) for identity, size in size_bytes.items()]
    live = peak = 0
    for *_, change in sorted(changes):
        live += change
        peak = max(peak, live)
    held = (operator.attrgetter(str(node.target))(graph_module).untyped_storage() for node in weights)
    owned = {storage.data_ptr(): storage.nbytes() for storage in held}
    made = _storages(output.all_input_nodes)
    shared = _storages((*given, *weights)).keys()
    return MemoryPlan(
        weight_bytes=sum(owned.values()),
        activation_bytes=peak,
        input_bytes=sum(_storages(given).values()),
        output_bytes=sum(size for identity, size in made.items() if identity not in shared),
        pool_bytes=None,
    )


def _storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Identity and bytes of each piece of memory that the nodes' values live in."""
    values = (leaf for node in nodes for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    storages = [value.untyped_storage() for value in values]
    return {storage._cdata: storage.nbytes() for storage in storages}
