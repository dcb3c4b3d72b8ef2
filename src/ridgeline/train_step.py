"""compile_step: forward, loss, backward, clip, optimizer and average of the weights, one CUDA graph, one launch a step.

The graph reads and writes the caller's own tensors: parameters, buffers, optimizer state, averages. Whatever a graph
would freeze is either on the device (learning rates, weight decays, decay of the average, step counts, loss scale) or
part of the key under which the graph is kept (shapes, train and eval modes, momentum, addresses of the weights); a step
whose key is new runs eagerly, by the same code, and gets its own graph when it comes again. Without a GPU every step
runs eagerly, with the same results.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline import cudagraph
from ridgeline.cudagraph import Captured
from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged
from ridgeline.fp8_step import Fp8LayerState
from ridgeline.obstacles import Finding, preflight
from ridgeline.side_stream import ReadEarly
from ridgeline.step_marks import step_taken
from ridgeline.step_program import Loss, Parts, StepProgram
from ridgeline.step_recipe import StepRecipe, step_recipe
from ridgeline.step_state import Key, Snapshot, Structure, flatten, signature
from ridgeline.step_verifier import StepAgreement, StepLimits, verify_steps

Capture = Callable[[Callable[..., Any], Sequence[Tensor]], Captured]

_SEEN_KEYS = 64  # remembered to tell a key that comes again
_EAGER_RUN = 8  # steps in a row after which eager running is worth a warning


def compile_step(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    example_batch: Any,
    *,
    ema: Ema | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    recipe: StepRecipe | str | None = None,
) -> TrainStep:
    """The training step `loss(model, batch)`, backward, clip, `optimizer.step()`, `ema.update_(model)` as one call.

    loss           a callable that returns a scalar tensor; a batch is a tensor or nested tuples, lists, dicts of them
    example_batch  one batch of the usual shape: the step is tried on it, and captured; no state is left changed
    clip           largest norm of all gradients together, as torch.nn.utils.clip_grad_norm_
    recipe         a StepRecipe or the name of one: "bf16", "fp8", "fp16", "fp32", "writeup-5"
    accumulate     slices of the batch that go forward and backward one after the other before the optimizer steps
    A step that cannot be captured runs eagerly; `.report` says why, and a warning, which only a recipe that has neither
    rewrites, side stream nor FP8 does without where there is no GPU. Another warning says that nothing runs in FP8.
    Raises NotEngaged if the recipe requires the graph, and UsageError for a loss that is no scalar, a parameter that
    gets no gradient, an average of another model, or what is no StepRecipe.
    """
    recipe = step_recipe(recipe)
    program = StepProgram(Parts(model, loss, optimizer, ema, clip, accumulate), recipe)
    capture = None
    if recipe.capture and program.device.type == "cuda":
        # one pool: the graphs of a step never run at the same time
        pool = torch.cuda.graph_pool_handle()
        capture = partial(cudagraph.capture, pool=pool, generators=recipe.generators)
    return TrainStep(program, example_batch, capture=capture)


@dataclass(frozen=True)
class StepReport:
    """What became of the steps so far."""

    graphs: int  # kept now
    captures: int  # made so far
    replays: int
    eager_steps: int
    reason: str | None  # why steps run eagerly, or the last one did
    findings: tuple[Finding, ...]  # lines of the step that stand in the way
    optimizer: str  # whose kernels step the optimizer, and why if not the project's own
    rewrites: dict[str, int]  # sites changed in the compiled graphs, by rewrite; empty until one is compiled
    convolutions: tuple[str, ...]  # a line a graph: which kernels compute its convolutions, or attentions, and the gain
    layout: str  # layout copies in the compiled graphs, in words; empty until one is compiled
    fp8: tuple[str, ...] = ()  # which passes of convolutions run in FP8, and why others do not, in words

    def lines(self) -> list[str]:
        engaged = f"{self.replays} steps replayed from {self.graphs} graphs, {self.eager_steps} run eagerly"
        rewritten = [f"{name} at {sites} sites" for name, sites in self.rewrites.items() if sites]
        layout = filter(None, [self.layout])
        return [
            engaged,
            *filter(None, [self.reason]),
            *map(str, self.findings),
            self.optimizer,
            *rewritten,
            *self.convolutions,
            *self.fp8,
            *layout,
        ]


class TrainStep:
    """Call it with a batch; it returns the loss, a tensor of its own on the device, without waiting.

    Gradients are used up by the step: `.grad` is None afterwards.
    """

    def __init__(self, program: StepProgram, example_batch: Any, *, capture: Capture | None) -> None:
        self._program = program
        self._capture = capture
        self._graphs: dict[Key, Captured] = {}
        self._seen: deque[Key] = deque(maxlen=_SEEN_KEYS)
        self._captures = self._replays = self._eager_steps = self._eager_run = 0
        self._generation = 0
        self._compiled = capture is not None and program.recipe.compile != "none"
        self._reason: str | None = None
        self.grad_norm: Tensor | None = None
        leaves, structure = flatten(example_batch)
        self._findings, drew_on_host = self._try(leaves, structure)
        obstacle = self._obstacle(drew_on_host)
        if capture is None:
            reason = None if program.recipe.capture else "the recipe has capture=False"
            self._disengage(reason, quiet=not _asks_for_compiled(program.recipe))
        elif obstacle is not None:
            self._disengage(obstacle)
        else:
            self._add_graph(self._key(leaves, structure), leaves, structure)
        program.check_copies()
        if program.recipe.fp8 != "never" and not program.fp8.engaged:
            warnings.warn(f"compile_step: {program.fp8.in_words()[0]}", RuntimeWarning, stacklevel=3)

    def __call__(self, batch: Any) -> Tensor:
        """One training step."""
        leaves, structure = flatten(batch)
        key = self._key(leaves, structure)
        graph = self._graph(key, leaves, structure)
        self._program.refresh()
        if graph is not None:
            for buffer, leaf in zip(graph.inputs, leaves, strict=True):
                buffer.copy_(leaf, non_blocking=True)
            loss, norm = graph.replay()
            self._program.note_replay()
            self._replays += 1
            self._eager_run = 0
        else:
            placed = [self._program.place(leaf) for leaf in leaves]
            loss, norm = self._program.run(placed, structure, compiled=False)
            self._eager_steps += 1
        # the graph's own memory is overwritten by the next replay; what the caller keeps must not change
        self.grad_norm = norm if norm is None or graph is None else norm.clone()
        loss = loss if graph is None else loss.clone()
        step_taken()
        return loss

    def launch_operators(self, batch: Any) -> Tensor:
        """One step as the graphs hold it, compiled as they are, its operators launched one by one; returns the loss.

        For profilers: a kernel inside a graph has no operator, and this step runs the same kernels in the same order.
        """
        leaves, structure = flatten(batch)
        self._program.refresh()
        placed = [self._program.place(leaf) for leaf in leaves]
        return self._program.run(placed, structure, compiled=self._compiled)[0]

    @property
    def report(self) -> StepReport:
        return StepReport(
            graphs=len(self._graphs),
            captures=self._captures,
            replays=self._replays,
            eager_steps=self._eager_steps,
            reason=self._reason,
            findings=self._findings,
            optimizer=self._program.optimizer_in_words(),
            rewrites=dict(self._program.backend.sites),
            convolutions=tuple(self._program.backend.notes),
            layout=self._program.layouts.in_words(),
            fp8=self._program.fp8.in_words(),
        )

    def fp8_layers(self) -> tuple[Fp8LayerState, ...]:
        """One record a convolution of the compiled graphs: passes in FP8, scales and counts; waits for the device."""
        return self._program.fp8.report()

    @property
    def loss_scale(self) -> Tensor | None:
        """The present scale of fp16 losses, a scalar on the device; None in other dtypes."""
        return None if self._program.scaler is None else self._program.scaler.scale

    def verify(self, batches: Iterable[Any], *, limits: StepLimits | None = None) -> StepAgreement:
        """As many steps as there are `batches`, beside those of a plain loop of PyTorch's own parts; see step_verifier.

        Both begin at the present state, which is afterwards what it was: weights, buffers, optimizer, averages, random
        generators, gradients and the counts of `report`. Takes some 2 + `limits.twins` times the steps, and memory for
        as many copies of the state. Raises VerificationFailed with the first tensor that differs too much.
        """
        batches = list(batches)
        if batches:
            self._key(*flatten(batches[0]))  # follows replaced weights before their values are kept
        counts = self._replays, self._eager_steps, self._eager_run, self.grad_norm
        try:
            agreement = verify_steps(self, self._program, batches, limits or StepLimits())
            return replace(agreement, replayed=self._replays - counts[0])
        finally:
            self._replays, self._eager_steps, self._eager_run, self.grad_norm = counts

    def check_engaged(self) -> None:
        """Raise NotEngaged if no step so far was replayed from a graph: the end of a run is a good place to ask."""
        if not self._replays:
            raise NotEngaged(
                f"compile_step: a captured step was asked for, but none of {self._eager_steps} steps was replayed: "
                f"{self._reason or 'each ran before its graph was made'}"
            )

    def state_dict(self) -> dict[str, Any]:
        """`model`, `optimizer`, `ema` and `scaler` as a plain loop would save them, each the owner's own format.

        `fp8` are scales, counts, and layers that have returned to bf16; None without FP8. Loading a state without it
        begins with fresh scales.
        """
        return self._program.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`, or from the same parts of a plain loop; in place, so graphs stay valid."""
        self._program.load_state_dict(state)

    def _key(self, leaves: Sequence[Tensor], structure: Structure) -> Key:
        program = self._program
        if program.moved():
            # graphs read tensors that are no longer the model's or the optimizer's, or compute too much in FP8
            self._graphs.clear()
            self._generation += 1
            program.settle_()
        return Key(signature(leaves, structure), program.watched.modes(), program.settings(), self._generation)

    def _graph(self, key: Key, leaves: Sequence[Tensor], structure: Structure) -> Captured | None:
        """The graph for this step; one is made for a key that comes the second time, or at once where required."""
        graph = self._graphs.get(key)
        if graph is not None or self._capture is None:
            return graph
        again = key in self._seen
        last = self._seen[-1] if self._seen else key
        self._seen.append(key)
        if again or self._program.recipe.require:
            if len(self._graphs) < self._program.recipe.max_graphs:
                return self._add_graph(key, leaves, structure)
            self._explain(
                f"batches come in more than {self._program.recipe.max_graphs} shapes, modes or settings: pad them to "
                f"a few, use drop_last=True, or raise max_graphs"
            )
        self._eager_run += 1
        if self._eager_run == _EAGER_RUN:
            self._explain(f"{_EAGER_RUN} steps in a row ran eagerly, because {last.changed(key)} differed each time")
        return None

    def _add_graph(self, key: Key, leaves: Sequence[Tensor], structure: Structure) -> Captured | None:
        assert self._capture is not None
        placed = [self._program.place(leaf) for leaf in leaves]
        self._program.prepare_()
        try:
            graph = self._captured(placed, structure)
        except NotEngaged as error:
            if self._program.recipe.require:
                raise
            self._disengage(str(error))
            return None
        # the graph reads the tables of its optimizer kernel, which other betas replace in the program, and of FP8
        graph = replace(graph, owner=(graph.owner, self._program.one_pass, self._program.fp8.plans()))
        self._graphs[key] = graph
        self._captures += 1
        return graph

    def _captured(self, leaves: Sequence[Tensor], structure: Structure) -> Captured:
        """Capture, compiled if that is asked for and possible; leaves all state as it was."""
        assert self._capture is not None
        program = self._program
        snapshot = program.snapshot()
        try:
            if self._compiled:
                try:
                    return self._capture_compiled(leaves, structure, snapshot)
                except RuntimeError as error:
                    if not _is_compile_error(error):
                        raise
                    self._compiled = False
                    if not self._graphs:
                        program.drop_copies_("torch.compile refused the step")
                    first_line = str(error).strip().partition("\n")[0]
                    self._explain(f"torch.compile refused the step, which is captured without it ({first_line})")
                    snapshot.restore_()
            return self._capture(partial(_run, program, structure, False), leaves)
        finally:
            snapshot.restore_()
            program.drop_gradients_()

    def _capture_compiled(self, leaves: Sequence[Tensor], structure: Structure, snapshot: Snapshot) -> Captured:
        """Capture the compiled step; without its side stream where that is not to be had."""
        assert self._capture is not None
        program = self._program
        try:
            return self._capture(partial(_run, program, structure, True), leaves)
        except (ReadEarly, NotEngaged, torch.OutOfMemoryError) as error:
            early = isinstance(error, ReadEarly)
            if program.recipe.require or not program.recipe.side_stream or not (early or _is_out_of_memory(error)):
                raise
            reason = error if early else "it takes more memory than there is"
            self._explain(f"the step is captured without a side stream: {reason}")
        snapshot.restore_()
        program.compile_anew_(side_stream=False)
        return self._capture(partial(_run, program, structure, True), leaves)

    def _try(self, leaves: Sequence[Tensor], structure: Structure) -> tuple[tuple[Finding, ...], str | None]:
        """Forward and backward once, watched: findings, and the host's generator that was drawn from, if one was.

        Leaves all state as it was.
        """
        program = self._program
        placed = [program.place(leaf) for leaf in leaves]
        snapshot = program.snapshot()
        step = partial(program.accumulate_, placed, structure, compiled=False)
        with program.gradients_kept():
            try:
                findings = preflight(step, device=program.device)
                return tuple(findings), snapshot.drew_on_host()
            finally:
                snapshot.restore_()

    def _obstacle(self, drew_on_host: str | None) -> str | None:
        """Why this step cannot be captured, as far as is known without trying."""
        if self._program.refusal is not None:
            return self._program.refusal
        breaking = [finding for finding in self._findings if finding.breaks]
        if breaking:
            more = f" (and {len(breaking) - 1} more in step.report.findings)" if len(breaking) > 1 else ""
            return f"{breaking[0]}{more}"
        if drew_on_host is not None:
            return (
                f"the step draws numbers from {drew_on_host}, which a graph would repeat for ever: draw them on "
                f"the device, or pass them in with the batch"
            )
        return None

    def _disengage(self, reason: str | None, *, quiet: bool = False) -> None:
        """Capture nothing from now on."""
        self._capture = None
        if reason is None:
            reason = f"the model is on the {self._program.device.type}, and only a GPU has CUDA graphs"
        if not self._graphs:
            self._program.drop_copies_("steps are not compiled")
        which = "steps without a graph run" if self._graphs else "every step runs"
        self._explain(f"{which} eagerly: {reason}", quiet=quiet)

    def _explain(self, reason: str, *, quiet: bool = False) -> None:
        if self._program.recipe.require:
            raise NotEngaged(f"compile_step: {reason}")
        self._reason = reason
        if not quiet:
            warnings.warn(f"compile_step: {reason}", RuntimeWarning, stacklevel=4)


def _asks_for_compiled(recipe: StepRecipe) -> bool:
    """Whether it asks for what only compiled steps have."""
    return bool(recipe.rewrites) or recipe.side_stream or recipe.fp8 != "never"


def _is_out_of_memory(error: Exception) -> bool:
    # a capture says so in its own words
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _run(program: StepProgram, structure: Structure, compiled: bool, *leaves: Tensor) -> tuple[Tensor, Tensor | None]:
    return program.run(leaves, structure, compiled=compiled)


def _is_compile_error(error: RuntimeError) -> bool:
    """By name: importing torch._dynamo for its exceptions would cost those seconds who never compile."""
    return any(kind.__module__ == "torch._dynamo.exc" for kind in type(error).__mro__)
