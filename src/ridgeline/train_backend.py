"""torch.compile for a training step: dynamo's graph, rewritten, then AOTAutograd and Inductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.fp8_step import Fp8Step
from ridgeline.launches import compile_kernels
from ridgeline.train_rewrites import (
    BY_NAME,
    cancel_views,
    fuse_attention,
    fuse_attention_bias_gradient,
    fuse_bias_gradient,
    fuse_gradient_add,
    fuse_quantize,
    fuse_residual_add,
    overlap_weight_gradients,
    read_concats,
    use_convolutions,
    use_fp8,
)
from ridgeline.train_rewrites._match import copied
from ridgeline.weight_copies import WeightCopies, given_narrow, narrow_weights

_AFTER_FP8 = "use_convolutions"  # takes what FP8 leaves

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def inductor(
    mode: str,
    watch: Callable[[fx.GraphModule], None] | None = None,
    overlapped: Callable[[int], None] | None = None,
) -> Compiler:
    """Inductor, as torch.compile's `mode` sets it up; `watch` sees each aten graph that it is given, before.

    With `overlapped`, which is told how many, weight gradients run beside the rest: `overlap_weight_gradients`.

    Maps in FP8 are quantised by the kernels that make them, where those can: `fuse_quantize`. Norms sum the gradients
    of the biases before them: `fuse_bias_gradient`. Attentions sum those of the biases of q, k and v:
    `fuse_attention_bias_gradient`. Convolutions add residual maps: `fuse_residual_add`. All of these look behind views
    that lead back to a map: `cancel_views`. On a GPU this project's kernels are compiled first, in parallel.
    """

    def finish(aten_module: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        if watch is not None:
            watch(aten_module)
        if (gpu := _gpu_of(given)) is not None:
            compile_kernels(aten_module, gpu)
        if overlapped is not None and options.get("is_backward"):
            overlapped(overlap_weight_gradients.apply(aten_module))
        _make_known(aten_module.graph)
        return compile_fx_inner(aten_module, given, **options)

    return _by_aten_graphs(mode, finish, {} if overlapped is None else overlap_weight_gradients.INDUCTOR)


def only_watched(mode: str, watch: Callable[[fx.GraphModule], None]) -> Compiler:
    """`inductor` up to where `watch` sees the aten graphs, forward and backward at once; compiles and runs nothing."""

    def finish(aten_module: fx.GraphModule, _given: Sequence[Any], **_options: Any) -> Any:
        watch(aten_module)
        return aten_module.forward

    to_aten = _by_aten_graphs(mode, finish)

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._functorch import config

        # else a backward graph would wait for the first gradient
        with config.patch(force_non_lazy_backward_lowering=True):
            return to_aten(graph_module, inputs)

    return compiler


def fuse(aten_module: fx.GraphModule) -> None:
    """The passes over a graph of aten operators, forward or backward, in their order."""
    cancel_views.apply(aten_module)
    fuse_gradient_add.apply(aten_module)
    fuse_quantize.apply(aten_module)
    fuse_bias_gradient.apply(aten_module)
    fuse_attention_bias_gradient.apply(aten_module)
    fuse_residual_add.apply(aten_module)
    read_concats.keep_order(aten_module)


def _by_aten_graphs(
    mode: str, finish: Callable[..., Any], choices: Mapping[str, Any] = MappingProxyType({})
) -> Compiler:
    """AOTAutograd as Inductor sets it up; `finish` gets the aten graphs, fused, in Inductor's place."""

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # seconds to import, which steps that are not compiled need not wait for
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        def fused(aten_module: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
            fuse(aten_module)
            return finish(aten_module, given, **options)

        patches = {} if mode == "default" else torch._inductor.list_mode_options(mode)
        # graphs that are in AOTAutograd's cache would not be seen; those in Inductor's are
        with config.patch(enable_autograd_cache=False):
            return compile_fx(  # pyright: ignore[reportReturnType]
                graph_module, inputs, inner_compile=fused, config_patches={**patches, **choices}
            )

    return compiler


def _make_known(graph: fx.Graph) -> None:
    """Tell Inductor this project's operators before it meets them.

    PyTorch 2.11 describes an operator that it meets for the first time by its operands, each by its own operands again,
    even if nobody reads it. Behind a chain of operators with several results that takes minutes, or hours.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for node in graph.nodes:
        if getattr(node.target, "namespace", None) == "ridgeline" and node.target not in lowerings:
            tag = get_layout_constraint_tag(node.target)
            make_fallback(node.target, tag_to_layout_constraint(tag), warn=False)


def _gpu_of(inputs: Sequence[Any]) -> torch.device | None:
    return next((tensor.device for tensor in inputs if isinstance(tensor, Tensor) and tensor.is_cuda), None)


@dataclass(eq=False)  # dynamo gives the graphs of one backend to another that equals it
class TrainBackend:
    """A backend for torch.compile: applies `rewrites`, in the order of the pipeline, then hands on to `compiler`.

    Weights that `copies` may copy become bf16 inputs of the graph, where the graph would only cast them. With `fp8`,
    convolutions are computed in FP8, by graphs that are compiled for certain weights and anew for others.
    """

    rewrites: Sequence[str]
    compiler: Compiler
    copies: WeightCopies = field(default_factory=WeightCopies)
    fp8: Fp8Step | None = None
    sites: Counter[str] = field(default_factory=Counter)  # changed so far, in all graphs, by rewrite
    notes: list[str] = field(default_factory=list)  # of the graphs so far: whose kernels compute what tables choose

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.fp8 is None:
            return self._compiled(graph_module, example_inputs)
        return self._compiled_by_key(graph_module, example_inputs, self.fp8)

    def _compiled(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for name, rewrite in BY_NAME.items():
            if name == _AFTER_FP8 and self.fp8 is not None:
                self.sites["use_fp8"] += use_fp8.apply(graph_module, example_inputs, self.fp8)
            if name in self.rewrites:
                self.sites[name] += rewrite.apply(graph_module)
        self.notes += filter(None, [use_convolutions.in_words(graph_module), fuse_attention.in_words(graph_module)])
        # last, since rewrites may bring calls that cast
        narrow = narrow_weights(graph_module, example_inputs, self.copies)
        inputs = [narrow.get(position, given) for position, given in enumerate(example_inputs)]
        compiled = self.compiler(graph_module, inputs)
        return given_narrow(compiled, narrow, self.copies) if narrow else compiled

    def _compiled_by_key(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], fp8: Fp8Step
    ) -> Callable[..., Any]:
        """The graph for the weights and layers in FP8 of each call: dynamo may give one graph the weights of others."""
        # of convolutions and of linear layers
        weights = tuple(n for n, t in enumerate(example_inputs) if isinstance(t, Tensor) and t.dim() in (2, 4))
        variants: dict[tuple, Callable[..., Any]] = {}

        def compiled_for(inputs: Sequence[Any]) -> Callable[..., Any]:
            key = fp8.key(inputs, weights)
            if key not in variants:
                for outdated in [known for known in variants if known[0] != key[0]]:
                    del variants[outdated]
                # dynamo's own graph may have no attributes that dynamo has not put there
                variants[key] = self._compiled(copied(graph_module), inputs)
            return variants[key]

        compiled_for(example_inputs)
        return lambda *inputs: compiled_for(inputs)(*inputs)
