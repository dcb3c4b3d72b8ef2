"""`torch.compile(model, backend="ridgeline")`: the graphs that dynamo finds, as fused kernels in CUDA graphs.

For inference with static shapes. Dynamo hands over parameters and buffers as inputs; here they become weights, and are
folded. As with any backend, results are fresh tensors, and a weight that changed is seen at the next call (which lowers
the graph again). What cannot be done is refused at the first call, by NotEngaged.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo import register_backend

from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.kernels._op import DTYPES
from ridgeline.lowering import channels_last, lower_prepared
from ridgeline.recipe import Recipe
from ridgeline.runner import Runner, make_runner, no_autocast
from ridgeline.verifier import agree
from ridgeline.watch import Watch, watch_tensors

_log = logging.getLogger(__name__)

NAME = "ridgeline"
GROUP = "torch_dynamo_backends"
_MOST_BUILT = 64  # graphs in memory of one that dynamo found; more only where weights are replaced again and again


def ridgeline(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, for `torch.compile(model, backend="ridgeline", options={…})`.

    options  fields of Recipe; "dtype" is that of the model unless given, and results keep the model's dtype
    """
    return _Engine(graph_module, example_inputs, dict(options or {}), mode)


class _Engine:
    """One of dynamo's graphs, lowered at its first call: there inputs are real, and a refusal reaches the caller."""

    def __init__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], mode: str | None
    ) -> None:
        self._graph_module = graph_module
        self._options = options
        self._mode = mode
        (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
        self._result_dtypes = [node.meta["example_value"].dtype for node in output.args[0]]
        self._static = [i for i, example in enumerate(example_inputs) if _is_weight(example)]
        self._given = [i for i, example in enumerate(example_inputs) if not _is_weight(example)]
        self._built: dict[tuple[int, ...], tuple[Watch, Runner]] = {}

    def __call__(self, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            raise NotEngaged(
                "backend 'ridgeline' computes no gradients, and an input or weight requires one: call the model under "
                "torch.no_grad()"
            )
        weights = [arguments[i] for i in self._static]
        inputs = [arguments[i] for i in self._given]
        if not inputs:
            return self._graph_module(*arguments)  # a graph of weights alone has nothing to be fast at
        with torch.no_grad():
            results = self._runner(weights, inputs).call(*inputs)
        # what a captured graph returns is its own memory, and callers of torch.compile keep results
        return tuple(result.to(dtype, copy=True) for result, dtype in zip(results, self._result_dtypes, strict=True))

    def _runner(self, weights: list[Tensor], inputs: Sequence[Tensor]) -> Runner:
        # layers of one class may share a graph: dynamo has it called with the weights of each
        key = tuple(map(id, weights))
        watch, runner = self._built.get(key, (None, None))
        if runner is None or watch is None or watch.changed():
            if len(self._built) >= _MOST_BUILT:
                self._built.clear()
            with torch.inference_mode(mode=False), torch.no_grad():
                runner = self._build(weights, inputs)
            self._built[key] = (watch_tensors(weights), runner)  # which keeps the tensors, and so their ids
            _log.info("a graph was lowered: %s", runner.report)
        return runner

    def _build(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> Runner:
        placeholders = [node for node in self._graph_module.graph.nodes if node.op == "placeholder"]
        _refuse(self._graph_module, placeholders)
        recipe = self._recipe([*weights, *inputs])
        statistics = {index for index in self._static if _is_statistic(placeholders[index])}
        dtype = recipe.torch_dtype
        cast = {
            index: channels_last(weight.detach().to(dtype) if _casts(weight, index in statistics) else weight.detach())
            for index, weight in zip(self._static, weights, strict=True)
        }
        with no_autocast(inputs):
            graph_module, report = lower_prepared(DynamoGraph(self._graph_module, cast), inputs, recipe)
            runner = make_runner(graph_module, report, inputs, recipe)
            untouched = DynamoGraph(self._graph_module, dict(zip(self._static, weights, strict=True)))
            verdict = agree(untouched, inputs, runner.call(*inputs), recipe)
        if not verdict.passed:
            told = "; ".join(filter(None, [verdict.reason, verdict.remedy]))
            raise VerificationFailed(f"backend 'ridgeline': {told}")
        return runner

    def _recipe(self, tensors: Sequence[Tensor]) -> Recipe:
        """The model's own dtype and PyTorch's precision of convolutions, unless the options say otherwise."""
        if self._mode is not None:
            raise UsageError(f"backend 'ridgeline' has no modes, got {self._mode!r}: use options={{…}} for its choices")
        unknown = self._options.keys() - {field.name for field in fields(Recipe)}
        if unknown:
            raise UsageError(f"backend 'ridgeline' has no option {min(unknown)!r}: options are the fields of Recipe")
        own = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        names = [name for name, dtype in DTYPES.items() if dtype in own]
        device = tensors[-1].device.type
        if "dtype" not in self._options:
            if len(own) != 1 or not names:
                raise NotEngaged(
                    f"backend 'ridgeline' runs a graph in one of {', '.join(DTYPES)}, this one has "
                    f"{', '.join(sorted(str(dtype) for dtype in own)) or 'no floating tensor'}: convert the model, or "
                    f"give options={{'dtype': …}}"
                )
            if torch.is_autocast_enabled(device):
                raise NotEngaged(
                    "backend 'ridgeline' keeps the model's dtype, and autocast asks for another: call the model "
                    "outside autocast, or give options={'dtype': 'fp16'}"
                )
        convolutions = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
        precision = "tf32" if convolutions.fp32_precision == "tf32" else "ieee"
        base = Recipe(dtype=names[0] if names else "fp32", precision=precision)
        return replace(base, **self._options)


class DynamoGraph(nn.Module):
    """Dynamo's graph with some of its inputs as buffers, by their positions."""

    def __init__(self, graph_module: fx.GraphModule, weights: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph_module = graph_module
        for position, weight in weights.items():
            self.register_buffer(f"weight_{position}", weight)
        self._positions = frozenset(weights)
        self._count = sum(node.op == "placeholder" for node in graph_module.graph.nodes)
        self.eval()

    def forward(self, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        arguments = (getattr(self, f"weight_{i}") if i in self._positions else next(rest) for i in range(self._count))
        # a call of the graph module would print its code where `agree` finds that float64 does not fit into it
        return fx.Interpreter(self.graph_module).run(*arguments)


def _is_weight(example: Any) -> bool:
    """Whether dynamo says that an input is a parameter or buffer of the model."""
    return isinstance(example, nn.Parameter) or hasattr(example, "_dynamo_static_input_type")


def _is_statistic(placeholder: fx.Node) -> bool:
    """Of a batch norm: folded in float64, so fp16 must not cut its digits or its range first."""
    users = list(placeholder.users)
    return bool(users) and all(user.target is F.batch_norm for user in users)


def _casts(weight: Tensor, is_statistic: bool) -> bool:
    return weight.is_floating_point() and not is_statistic


def _refuse(graph_module: fx.GraphModule, placeholders: Sequence[fx.Node]) -> None:
    """Raise NotEngaged for a graph with sizes that may change, in training mode, or with parameters inside."""
    for node in placeholders:
        example = node.meta.get("example_value")
        for size in example.shape if isinstance(example, Tensor) else (example,):
            if isinstance(size, torch.SymInt):
                raise NotEngaged(
                    f"backend 'ridgeline' needs static shapes, and dynamo made {size} of {node.target} dynamic: call "
                    f"torch.compile with dynamic=False"
                )
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and inspect.isfunction(node.target):
            given = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments
            if given.get("training") is True:
                raise NotEngaged(
                    f"backend 'ridgeline' is for inference, and {node.target.__name__} trains: call .eval() first"
                )
    inside = [name for name, _ in graph_module.named_parameters()]
    if inside:
        raise NotEngaged(
            f"backend 'ridgeline' takes parameters as inputs of a graph, and {inside[0]} is a part of it: leave "
            f"torch._dynamo.config.inline_inbuilt_nn_modules on"
        )


# an installed package is found by its entry point, and dynamo refuses a name that is registered twice
if not entry_points(group=GROUP, name=NAME):
    register_backend(ridgeline, name=NAME)
