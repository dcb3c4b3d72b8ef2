"""compile: export, rewrite into fused kernels, capture in one CUDA graph a signature, verify against the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline import saved, tuned, tuning
from ridgeline.compile_report import CompileReport, GraphReport, input_spec
from ridgeline.errors import EnvironmentUnusable, NotEngaged, UsageError, VerificationFailed
from ridgeline.example_inputs import check_fit, tensors
from ridgeline.kernels import ALL, ATTENTION, FP8, NORMS, PASSES, UPSAMPLED
from ridgeline.launches import problems_of
from ridgeline.lowering import cast as cast
from ridgeline.lowering import lower as lower
from ridgeline.recipe import Recipe, chosen
from ridgeline.rewrites import PIPELINE
from ridgeline.runner import Runner, make_runner, no_autocast
from ridgeline.verifier import Agreement, agree
from ridgeline.watch import watch

_CALL = "the compiled module"

Lowered = tuple[fx.GraphModule, GraphReport]


class Compiled:
    """The compiled module: call it like the original, with tensors of the example's shape, dtype and device.

    One CUDA graph a signature; a call copies inputs into static buffers and replays. What it returns are those
    buffers: the next call overwrites them, so clone what must live longer. From a file it has no module: it takes the
    signatures that were saved, and `verdict` is what was found before.
    """

    def __init__(self, recipe: Recipe, *, module: nn.Module | None = None, verdict: Agreement | None = None) -> None:
        self.recipe = recipe
        self.verdict = verdict
        self._module = module
        self._watch = None if module is None else watch(module)
        self._lowered: dict[tuple, Lowered] = {}  # by the signature of the cast inputs
        self._runners: dict[tuple, Runner] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        inputs = _checked(inputs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise UsageError("an input requires a gradient, and a compiled module has none: call it under no_grad")
        with torch.no_grad():
            out = self._runner(inputs).call(*inputs)
        # after the launch, because a GPU is busy with it meanwhile
        self._check_weights()
        return out

    @property
    def report(self) -> CompileReport:
        """What was built so far, and how right it is."""
        graphs = tuple(runner.report for runner in self._runners.values())
        return CompileReport(self.recipe, self.verdict, graphs, saved.gpu_of(graphs), saved.versions())

    def graph(self, *inputs: Tensor) -> GraphReport:
        """What was built for inputs of this signature."""
        return self._runner(_checked(inputs)).report

    def replayer(self, *inputs: Tensor) -> Callable[[], Any]:
        """A call without arguments that replays the graph of these inputs: what a benchmark times."""
        self(*inputs)
        return self._runner(inputs).replay(*inputs)

    def launch_operators(self, *inputs: Tensor) -> Any:
        """The kernels of the graph, launched one by one: for profilers, to which a graph's kernels have no operator."""
        captured = self._runner(_checked(inputs)).captured
        return self(*inputs) if captured is None else captured.owner(*inputs)

    def save(self, path: str | Path) -> None:
        """Write everything that `load` needs to one file: graphs, weights, recipe, verdict, tuned configs."""
        self._check_weights()
        graphs = tuple((runner.graph_module, runner.report) for runner in self._runners.values())
        saved.write(Path(path), saved.Contents(self.recipe, self.verdict, graphs))

    def _runner(self, inputs: Sequence[Tensor]) -> Runner:
        key = _signature(inputs)
        if key not in self._runners:
            self._check_weights()
            # what is built outlives the mode of the call that asks for it
            with torch.inference_mode(mode=False), torch.no_grad(), no_autocast(inputs):
                graph_module, report = self._lower(inputs)
                self._runners[key] = make_runner(graph_module, report, inputs, self.recipe)
        return self._runners[key]

    def _lower(self, inputs: Sequence[Tensor]) -> Lowered:
        # inputs that differ in layout or floating dtype alone share a graph, and its weights
        key = _signature([cast(tensor, self.recipe.torch_dtype) for tensor in inputs])
        if key not in self._lowered:
            if self._module is None:
                known = "; ".join(", ".join(map(str, runner.report.inputs)) for runner in self._runners.values())
                raise UsageError(
                    f"the file holds no graph for {', '.join(str(input_spec(tensor)) for tensor in inputs)}, but for "
                    f"{known}: compile the module for these inputs and save it again"
                )
            check_fit(self._module, tuple(inputs), of=_CALL)
            self._lowered[key] = lower(self._module, inputs, self.recipe)
        return self._lowered[key]

    def _check_weights(self) -> None:
        if self._watch is not None and self._watch.changed():
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
    Raises UsageError for what is no module in eval mode, no tensor, or no Recipe, and NotEngaged where the module
    cannot be exported or captured, and the reason.
    """
    recipe = chosen(recipe)
    if not isinstance(module, nn.Module):
        raise UsageError(f"compile: the first argument must be a torch.nn.Module, got {type(module).__name__}")
    if any(part.training for part in module.modules()):
        raise UsageError("compile: the module is in training mode; call .eval() first, or use compile_step to train")
    examples = tuple(tensor.detach() for tensor in tensors(inputs, of="compile"))
    check_fit(module, examples, of="compile")
    compiled = Compiled(recipe, module=module)
    out = compiled(*examples)
    if verify:
        compiled.verdict = agree(module, examples, out, recipe)
        if not compiled.verdict.passed:
            raise VerificationFailed(f"compile: {compiled.verdict.reason}; {blame(module, examples, recipe)}")
    return compiled


def load(path: str | Path, *, device: str | torch.device | None = None) -> Compiled:
    """The compiled module in a file, ready to call: captured anew on a GPU, through the references on the CPU.

    `device` defaults to the current GPU, else the CPU. Nothing in the file is run as code. Raises UsageError for a file
    that is damaged, of another kind, or of a newer version, and for a device that is neither; EnvironmentUnusable for a
    GPU that is not there.
    """
    place = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.inference_mode(mode=False), torch.no_grad():
        contents = saved.read(Path(path), place)
        compiled = Compiled(contents.recipe, verdict=contents.verdict)
        with tuned.using(contents.tuned):
            for graph_module, report in contents.graphs:
                examples = saved.examples(report, place)
                key = _signature([cast(tensor, contents.recipe.torch_dtype) for tensor in examples])
                compiled._lowered.setdefault(key, (graph_module, report))
                compiled._runner(examples)
    return compiled


def tune(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    recipe: Recipe | None = None,
    *,
    width: int | None = tuning.WIDTH,
    budget_s: float | None = None,
    force: bool = False,
    progress: tuning.Progress | None = None,
) -> tuple[tuned.Row, ...]:
    """Search the configs of every kernel that `compile` would launch, for the user's tables; see `tuning.tune_all`.

    A second run tunes nothing. Raises EnvironmentUnusable when the inputs are on no GPU.
    """
    examples = tensors(inputs, of="tune")
    check_fit(module, examples, of="tune")
    recipe = chosen(recipe)
    problems: list[tuning.Problem] = []
    # a chain is used only where it was seen to be faster than its parts, so both are measured
    apart = replace(recipe, rewrites=tuple(name for name in recipe.rewrites if name != "fuse_conv_chain"))
    for fused, explore in dict.fromkeys(((recipe, "pairs"), (recipe, "chains"), (apart, "chains"))):
        graph_module, _ = lower(module, examples, fused, explore=explore)
        problems += problems_of(graph_module, ALL)
    return tuning.tune_all(problems, width=width, budget_s=budget_s, force=force, progress=progress)


def on_gpu(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and inputs on the current GPU. Raises EnvironmentUnusable without one."""
    if not torch.cuda.is_available():
        raise EnvironmentUnusable("this needs a CUDA GPU, and torch sees none: run `ridgeline doctor`")
    return module.cuda(), tuple(tensor.cuda() for tensor in inputs)


def _device(name: str | torch.device) -> torch.device:
    """Where to load to, a GPU with its number."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):  # in words about torch's own backends
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"load: device must be 'cpu' or 'cuda', or 'cuda:1' for the second GPU, got {str(name)!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise EnvironmentUnusable("load: torch sees no CUDA GPU: load with device='cpu', or run `ridgeline doctor`")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise EnvironmentUnusable(f"load: torch sees {torch.cuda.device_count()} CUDA GPUs, counted from 0, got {name}")
    return torch.device("cuda", index)


def source_hashes() -> dict[str, str]:
    """The hash that rows of each op must carry to be used."""
    return {op.name: op.source_hash for op in (*ALL, *ATTENTION, *PASSES, *UPSAMPLED, *FP8, *NORMS)}


def _checked(inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tensors(inputs, of=_CALL)


def _signature(inputs: Sequence[Tensor]) -> tuple:
    # strides: one graph reads channels-last images as they come, another converts them first
    return tuple(
        (t.shape, t.dtype, t.device, t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))
        for t in inputs
    )


def blame(module: nn.Module, inputs: Sequence[Tensor], recipe: Recipe) -> str:
    """Which rewrite breaks the limit first, found by running ever longer prefixes of the pipeline."""
    names = tuple(rewrite.name for rewrite in PIPELINE if rewrite.name in recipe.rewrites)
    for count in range(len(names) + 1):
        shorter = replace(recipe, rewrites=names[:count], capture=False)
        try:
            graph_module, report = lower(module, inputs, shorter)
            with torch.no_grad():
                out = make_runner(graph_module, report, inputs, shorter).call(*inputs)
        except NotEngaged as error:
            return f"without rewrites it cannot be run: {error}"
        found = agree(module, inputs, out, shorter)
        if not found.passed and count:
            return f"the first rewrite that breaks it is {names[count - 1]}"
        if not found.passed:
            return ": ".join(filter(None, ["no rewrite is to blame", found.remedy]))
    return "no part of the pipeline breaks it: the capture does, or the module's results vary from call to call"
