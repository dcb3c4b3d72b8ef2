"""compile: export, rewrite into fused kernels, capture in one CUDA graph a signature, verify against the original."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline import tuned, tuning
from ridgeline.cudagraph import Captured, capture
from ridgeline.errors import EnvironmentUnusable, NotEngaged, UsageError, VerificationFailed
from ridgeline.graph import Finding, export, interior, is_view, repair_layout
from ridgeline.kernels import ALL, BY_OVERLOAD, Op
from ridgeline.recipe import Recipe
from ridgeline.rewrites import PIPELINE
from ridgeline.streams import StreamedGraph, schedule
from ridgeline.verifier import Agreement, agree

_PDL_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Graph:
    """What a graph became: how often each rewrite fired, the kernels left, and what still stands between them."""

    sites: tuple[tuple[str, int], ...]
    kernels: tuple[tuple[str, int], ...]  # ridgeline ops and how often each is launched
    foreign: tuple[tuple[str, int], ...]  # everything else that computes: left to PyTorch
    interior: tuple[Finding, ...]

    @property
    def launches(self) -> int:
        return sum(count for _, count in self.kernels)

    def lines(self) -> list[str]:
        rows = [f"rewrite {name}: {count} sites" for name, count in self.sites]
        rows += [f"kernel {name}: {count}" for name, count in self.kernels]
        rows += [f"left to PyTorch, {name}: {count}" for name, count in self.foreign]
        return rows + [f"{finding.what} inside: {finding.node}, {finding.where}" for finding in self.interior]


class Compiled:
    """The compiled module: call it like the original, with tensors of the example's shape, dtype and device.

    One CUDA graph a signature; a call copies inputs into static buffers and replays. What it returns are those
    buffers: the next call overwrites them, so clone what must live longer.
    """

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.agreement: Agreement | None = None
        self._module = module
        self._weights = _fingerprint(module)
        self._built: dict[tuple, tuple[Graph, Callable[..., Any]]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        self._check_weights()
        with torch.no_grad():
            return self._runner(inputs)(*inputs)

    def graph(self, *inputs: Tensor) -> Graph:
        """What was built for inputs of this signature."""
        self._runner(inputs)
        return self._built[_signature(inputs)][0]

    def replayer(self, *inputs: Tensor) -> Callable[[], Any]:
        """A call without arguments that replays the graph of these inputs: what a benchmark times."""
        self(*inputs)
        runner = self._runner(inputs)
        return runner if isinstance(runner, _Replay) else lambda: runner(*inputs)

    def _runner(self, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        key = _signature(inputs)
        if key not in self._built:
            with torch.no_grad(), _no_autocast(inputs):
                graph_module, graph = lower(self._module, inputs, self.recipe)
                self._built[key] = (graph, _runner(graph_module, graph, inputs, self.recipe))
        return self._built[key][1]

    def _check_weights(self) -> None:
        if _fingerprint(self._module) != self._weights:
            raise UsageError(
                "the module's weights or mode changed after compile, which replays the old ones: compile it again"
            )


def compile(  # noqa: A001 - the verb's name, always used as ridgeline.compile
    module: nn.Module, inputs: Tensor | Sequence[Tensor], recipe: Recipe | None = None, *, verify: bool = True
) -> Compiled:
    """A callable with the module's results and fewer, fused kernels.

    inputs   example arguments; shapes, dtypes and device are those it will be called with
    verify   compare with the untouched module on the examples; raises VerificationFailed, naming the first rewrite
             that breaks the limit
    Raises NotEngaged where the module cannot be exported or captured, and the reason.
    """
    recipe = recipe or Recipe()
    examples = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if any(part.training for part in module.modules()):
        raise UsageError("compile: the module is in training mode; call .eval() first, or use compile_step to train")
    if not examples:
        raise UsageError("compile: the module's inputs are needed, at least one tensor, got none")
    compiled = Compiled(module, recipe)
    out = compiled(*examples)
    if verify:
        compiled.agreement = agree(module, examples, out, recipe)
        if not compiled.agreement.passed:
            raise VerificationFailed(f"compile: {compiled.agreement.reason}; {_blame(module, examples, recipe)}")
    return compiled


def lower(module: nn.Module, inputs: Sequence[Tensor], recipe: Recipe) -> tuple[fx.GraphModule, Graph]:
    """The module as a graph of fused kernels in the recipe's dtype, not yet captured; `module` is untouched."""
    dtype = recipe.torch_dtype
    graph_module = export(_prepared(module, dtype), [cast(tensor, dtype) for tensor in inputs])
    sites = [(r.name, r.apply(graph_module)) for r in PIPELINE if r.name in recipe.rewrites]
    _choose(graph_module, recipe, inputs[0].device)
    repair_layout(graph_module, BY_OVERLOAD)
    return graph_module, _describe(graph_module, sites)


def tune(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    recipe: Recipe | None = None,
    *,
    budget_s: float | None = None,
    force: bool = False,
    progress: tuning.Progress | None = None,
) -> tuple[tuned.Row, ...]:
    """Search the configs of every kernel that `compile` would launch, for the user's tables; see `tuning.tune`.

    A second run tunes nothing. Raises EnvironmentUnusable when the inputs are on no GPU.
    """
    examples = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    graph_module, _ = lower(module, examples, recipe or Recipe())
    problems: dict[Op, list[dict[str, Any]]] = defaultdict(list)
    for op, arguments in tuning.problems_of(graph_module):
        problems[op].append(arguments)
    rows: list[tuned.Row] = []
    for op, asked in problems.items():
        rows += tuning.tune(op, asked, budget_s=budget_s, force=force, progress=progress)
    return tuple(rows)


def on_gpu(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and inputs on the current GPU. Raises EnvironmentUnusable without one."""
    if not torch.cuda.is_available():
        raise EnvironmentUnusable("this needs a CUDA GPU, and torch sees none: run `ridgeline doctor`")
    return module.cuda(), tuple(tensor.cuda() for tensor in inputs)


def source_hashes() -> dict[str, str]:
    """The hash that rows of each op must carry to be used."""
    return {op.name: tuned.source_hash(Path(inspect.getfile(op.launcher.plan))) for op in ALL}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating inputs in the recipe's dtype, images channels-last."""
    tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy for inference in `dtype`, filters channels-last."""
    prepared = copy.deepcopy(module).eval().requires_grad_(False).to(dtype)
    for part, original in zip(prepared.modules(), module.modules(), strict=True):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            # statistics are folded in float64: fp16 would cut their digits first, and a variance above 65504
            part.float().load_state_dict(original.state_dict())
    for tensor in (*prepared.parameters(), *prepared.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return prepared


def _no_autocast(inputs: Sequence[Tensor]) -> torch.autocast:
    """The recipe alone decides dtypes."""
    return torch.autocast(inputs[0].device.type, enabled=False)


def _choose(graph_module: fx.GraphModule, recipe: Recipe, device: torch.device) -> None:
    """Write the recipe's choices into every kernel call, in place."""
    has_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY
    choices = {"precision": recipe.precision, "pdl": recipe.pdl and has_pdl}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in BY_OVERLOAD:
            known = {argument.name for argument in node.target._schema.arguments}
            node.kwargs = {**node.kwargs, **{name: value for name, value in choices.items() if name in known}}
    graph_module.recompile()


def _describe(graph_module: fx.GraphModule, sites: Sequence[tuple[str, int]]) -> Graph:
    kernels: Counter[str] = Counter()
    foreign: Counter[str] = Counter()
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or is_view(node) or node.target is torch.ops.aten.empty.memory_format:
            continue
        op = BY_OVERLOAD.get(node.target)
        (kernels if op else foreign)[op.name if op else str(node.target)] += 1
    return Graph(tuple(sites), tuple(kernels.items()), tuple(foreign.items()), interior(graph_module))


def _runner(graph_module: fx.GraphModule, graph: Graph, inputs: Sequence[Tensor], recipe: Recipe) -> Callable[..., Any]:
    dtype = recipe.torch_dtype
    captured = inputs[0].is_cuda and recipe.capture
    run: Callable[..., Any] = graph_module
    if graph.foreign and inputs[0].is_cuda:
        run = torch.compile(graph_module, fullgraph=True)
    elif captured and recipe.side_streams:
        run = StreamedGraph(graph_module, schedule(graph_module.graph, side_streams=recipe.side_streams))

    def call(*tensors: Tensor) -> Any:
        with _no_autocast(tensors):
            return run(*(cast(tensor, dtype) for tensor in tensors))

    return _Replay(capture(call, tuple(inputs))) if captured else call


@dataclass(frozen=True)
class _Replay:
    """A captured call: with inputs, copies them in first."""

    captured: Captured

    def __call__(self, *inputs: Tensor) -> Any:
        return self.captured.replay(*inputs)


def _signature(inputs: Sequence[Tensor]) -> tuple:
    return tuple((tuple(t.shape), t.dtype, t.device) for t in inputs)


def _fingerprint(module: nn.Module) -> tuple:
    """Changes whenever weights are replaced or written in place, or a mode flips."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        # tensors made in inference mode count no writes
        tuple((name, t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for name, t in tensors),
        tuple(m.training for m in module.modules()),
    )


def _blame(module: nn.Module, inputs: Sequence[Tensor], recipe: Recipe) -> str:
    """Which rewrite breaks the limit first, found by running ever longer prefixes of the pipeline."""
    names = tuple(rewrite.name for rewrite in PIPELINE if rewrite.name in recipe.rewrites)
    for count in range(len(names) + 1):
        shorter = replace(recipe, rewrites=names[:count], capture=False)
        try:
            graph_module, graph = lower(module, inputs, shorter)
            with torch.no_grad():
                out = _runner(graph_module, graph, inputs, shorter)(*inputs)
        except NotEngaged as error:
            return f"without rewrites it cannot be run: {error}"
        if not agree(module, inputs, out, shorter).passed:
            return f"the first rewrite that breaks it is {names[count - 1]}" if count else "no rewrite is to blame"
    return "no part of the pipeline breaks it: the capture does, or the module's results vary from call to call"
