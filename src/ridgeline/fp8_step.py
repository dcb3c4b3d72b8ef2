"""FP8 in a training step: the scales, the FP8 copies of weights, and which layers run in FP8, from step to step.

    begin_     weights in FP8, by the scales of the steps before
    forward and backward quantise activations and gradients, and record what they saw, in graphs that `use_fp8` changed
    end_       the scales of the next step

All three are launches of the step itself, so they can be captured with it, and a weight that was written by hand before
a step is quantised as it is. Tensors have the names of parameters: "conv.weight.x" and "conv.weight.w" are e4m3,
"conv.weight.dy" is e5m2. Graphs hold the tensors of this object as attributes and are made for certain weights and
certain layers in FP8: `key` says for which, and a graph is compiled anew where it differs.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.errors import NotEngaged, UsageError
from ridgeline.fp8_review import Fp8Limits, Review
from ridgeline.fp8_scaling import DelayedScaling, ScalingRule, TensorCounts
from ridgeline.kernels import quantize_weights_fp8
from ridgeline.kernels._op import dtype_name
from ridgeline.specs import DeviceSpec, find_spec
from ridgeline.train_rewrites import fp8_prices, fuse_quantize
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import (
    ARCHITECTURES,
    MULTIPLE,
    PASSES,
    Chooser,
    architecture_of,
    chosen_passes,
    listed,
)
from ridgeline.train_rewrites.use_fp8 import Fp8State, Fp8Weight

_FORMATS = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}  # of the tensors of a layer, in the order of its rows
# Gradients of a mean are small: by a scale of 1 all of them might vanish, and so would all that the layers before get,
# one layer more a step. So e5m2 holds 2e-10 to 0.87 at first; what is larger saturates for one step.
_FIRST_DY_SCALE = 2.0**16
_MOST_NAMED = 3  # layers of one reason


@dataclass(frozen=True)
class Fp8LayerState:
    """One layer of a step, by the name of its weight."""

    layer: str
    passes: tuple[str, ...]  # in FP8, of "fprop", "dgrad", "wgrad"
    reason: str  # why not all are
    tensors: Mapping[str, TensorCounts]  # "x", "w", "dy": scales and counts; empty for what FP8 cannot run


class Fp8Step:
    """Owns what graphs in FP8 read, for a step on one device; of a step that is not `wanted` in FP8, nothing."""

    def __init__(
        self,
        device: torch.device,
        *,
        wanted: bool = True,
        rule: ScalingRule | None = None,
        limits: Fp8Limits | None = None,
        choose: Chooser = chosen_passes,
        passes: Sequence[str] = PASSES,
    ) -> None:
        self.choose = choose
        self.allowed = frozenset(passes)
        self._wanted = wanted
        self._device, self._rule, self._limits = device, rule, limits or Fp8Limits()
        self._scaling: DelayedScaling | None = None
        self._review: Review | None = None
        self._state: Fp8State | None = None
        self._weights: dict[int, tuple[str, Tensor]] = {}  # parameters of 4 axes, or 2, by identity
        self._rows: dict[str, tuple[int, int, int]] = {}  # of those that FP8 could run
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._asked: dict[str, Fp8Weight] = {}
        self._plans: tuple[quantize_weights_fp8.Plan, ...] | None = None
        self._open = False
        self._excluded: dict[str, str] = {}  # layers that have returned to bf16, and why
        self._stale = False
        self._generation = 0
        self._found: dict[str, tuple[tuple[str, ...], str, str]] = {}  # passes in FP8, why not all, kind, by layer
        self._quantised: Counter[str] = Counter()  # in compiled graphs: by whom
        self._off = _why_not_here(device, choose) if wanted else "the recipe has fp8='never'"

    # --- weights ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def open_(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take the model's parameters as they are now; graphs may ask for the FP8 copies of those that fit."""
        weights = {name: weight for name, weight in named if weight.dim() in (2, 4) and self._wanted}
        self._weights = {id(weight): (name, weight) for name, weight in weights.items()}
        shapes = {name: tuple(weight.shape) for name, weight in weights.items() if not _unfit(weight)}
        if shapes != self._shapes:
            self._shapes = shapes
            self._rows = {name: (3 * n, 3 * n + 1, 3 * n + 2) for n, name in enumerate(shapes)}
            self._renew_()
            self.fresh_()
        self._plans, self._open = None, True

    def why_not(self, weight: object) -> str:
        """Why the layer of an input of a graph cannot run in FP8, "" where it can; see `use_fp8.Layers`."""
        if self._off:
            return self._off
        if id(weight) not in self._weights:
            return "its weight is no parameter of the model"
        name, known = self._weights[id(weight)]
        if name not in self._rows:
            return _unfit(known)
        if not known.requires_grad:
            return "its weight is frozen"
        if not self._open and name not in self._asked:
            return "the first compiled step did not have it"
        return self._excluded.get(name, "")

    @torch.no_grad()
    def ask(self, weight: object) -> Fp8Weight:
        """What a graph reads for a weight; quantised now where it is asked for the first time."""
        name, known = self._weights[id(weight)]
        if name not in self._asked:
            rows = self._rows[name]
            plan = quantize_weights_fp8.build([_filters(known)], rows[1:2])
            self._asked[name] = Fp8Weight(plan.copies[0], plan.turned[0], rows)
            self._quantize_([plan])
            self._plans = None
        return self._asked[name]

    def note(self, weight: object, name: str, passes: tuple[str, ...], reason: str, *, kind: str) -> None:
        """What has become of a layer in a graph; see `use_fp8.Layers`."""
        known = self._weights.get(id(weight))
        self._found[name if known is None else known[0]] = passes, reason, kind

    def see(self, graph_module: fx.GraphModule) -> None:
        """Look at a compiled graph: who quantises what it multiplies."""
        self._quantised.update(fuse_quantize.quantised_by(graph_module))

    def key(self, inputs: Sequence[Any], positions: Iterable[int]) -> tuple:
        """What a graph with these inputs must have been compiled for; at `positions` are weights."""
        known = (self._weights.get(id(inputs[position])) for position in positions)
        return self._generation, *(None if one is None else one[0] for one in known)

    # --- steps -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Fp8State:
        assert self._state is not None
        return self._state

    def begin_(self) -> None:
        """Before forward: quantise the weights."""
        if self._plans is None:
            self._plans = self._built(lambda _: None)
        self._quantize_(self._plans)

    def end_(self, copy_of: Callable[[Tensor], Tensor | None]) -> None:
        """After backward: new scales. `copy_of` are bf16 copies, which are read from the next step on."""
        if self._open:
            self._open = False
            self._plans = self._built(copy_of)
        if self._asked and self._scaling is not None:
            with self._on_device():
                self._scaling.update_()

    def note_step(self) -> None:
        """After a step that a graph took."""
        if self._review is not None and self._asked:
            self._review.note_step()

    def review_(self) -> bool:
        """Before a step, without waiting: whether layers have left FP8, or come back, since graphs were compiled."""
        beyond = self._review.look_() if self._review is not None else {}
        for tensor, figures in beyond.items():
            layer, _, part = tensor.rpartition(".")
            if layer in self._asked and layer not in self._excluded:
                self._excluded[layer] = f"of its {part}, {figures}"
                warnings.warn(
                    f"compile_step: {layer} returns to bf16: {self._excluded[layer]}", RuntimeWarning, stacklevel=5
                )
                self._stale = True
        if self._stale:
            self._stale = False
            self._renew_graphs_()
            return True
        return False

    def drop_(self, reason: str) -> None:
        """Run nothing in FP8 from now on."""
        self._off = self._off or reason
        self._renew_graphs_()

    # --- state -----------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """What a step writes and a snapshot keeps."""
        if self._scaling is not None:
            yield from (tensor for _, tensor in self._scaling.named_tensors())
            yield from (self._scaling.amax, self._scaling.counts)

    def plans(self) -> tuple[quantize_weights_fp8.Plan, ...]:
        """What a captured step launches, for it to hold."""
        return self._plans or ()

    @torch.no_grad()
    def fresh_(self) -> None:
        """Scales as they are without history: of each weight by itself, of activations 1, of gradients 2^16."""
        scaling = self._scaling
        if scaling is None or self._review is None:
            return
        empty = DelayedScaling(scaling.formats, rule=self._rule, device=self._device)
        scaling.load_state_dict(empty.state_dict())
        with self._on_device():
            for name, weight in self._weights.values():
                if name in self._rows:
                    scaling.refresh_(weight.detach(), f"{name}.w")
                    slot = scaling.slot(f"{name}.dy")
                    slot.scale.fill_(_FIRST_DY_SCALE)
                    slot.inverse.fill_(1 / _FIRST_DY_SCALE)
        self._review.begin()

    def state_dict(self) -> dict[str, Any] | None:
        """Scales, counts, and layers that have returned to bf16; None where no layer fits FP8."""
        if self._scaling is None:
            return None
        return {"scaling": self._scaling.state_dict(), "excluded": dict(self._excluded)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """From `state_dict`; None, as a bf16 step saves it, begins with fresh scales, by the weights as they are."""
        if self._scaling is None or self._review is None:
            return
        excluded = {} if state is None else dict(state["excluded"])
        if state is None:
            self.fresh_()
        else:
            self._scaling.load_state_dict(state["scaling"])
            self._review.begin()
        self._stale |= excluded.keys() != self._excluded.keys()
        self._excluded = excluded

    # --- words -----------------------------------------------------------------------------------------------------

    def report(self) -> tuple[Fp8LayerState, ...]:
        """One record a layer of the compiled graphs, with scales and counts; waits for the device, once."""
        counts = {} if self._scaling is None else {one.name: one for one in self._scaling.report()}
        return tuple(
            Fp8LayerState(
                layer, passes, reason, {part: counts[f"{layer}.{part}"] for part in _FORMATS if layer in self._rows}
            )
            for layer, (passes, reason, _) in self._found.items()
        )

    @property
    def engaged(self) -> bool:
        """Whether a layer runs in FP8."""
        return bool(self._asked)

    def check(self) -> None:
        """Raise NotEngaged if no layer runs in FP8."""
        if not self.engaged:
            raise NotEngaged(f"compile_step: fp8='always', but {self._why_none()}")

    def in_words(self) -> tuple[str, ...]:
        """Which passes of how many layers run in FP8, and why others do not; does not wait."""
        if not self._wanted:
            return ()
        if not self.engaged:
            return (f"nothing runs in FP8: {self._why_none()}",)
        counts = [f"{name} of {sum(name in passes for passes, _, _ in self._found.values())}" for name in PASSES]
        kinds = Counter(kind for _, _, kind in self._found.values())
        runs = f"FP8 runs {', '.join(counts)} of {' and '.join(f'{count} {kind}s' for kind, count in kinds.items())}"
        if self._quantised:
            by = ", ".join(f"{count} by {who}" for who, count in sorted(self._quantised.items()))
            runs = f"{runs}; maps are quantised: {by}"
        return (runs, *self._reasons())

    def _reasons(self) -> Iterator[str]:
        layers: dict[str, list[str]] = defaultdict(list)
        for name, (passes, reason, _) in self._found.items():
            if reason:
                layers[reason if passes else f"bf16: {reason}"].append(name)
        for reason, names in layers.items():
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            yield f"{', '.join(names[:_MOST_NAMED])}{more}: {reason}"

    def _why_none(self) -> str:
        if self._off or not self._rows:
            return self._off or f"no weight has filters and channels in multiples of {MULTIPLE}"
        return "; ".join(self._reasons()) or "no compiled step has a convolution or a linear layer over tokens"

    # --- parts -----------------------------------------------------------------------------------------------------

    def _renew_(self) -> None:
        """Scales for other weights."""
        formats = {f"{name}.{part}": kind for name in self._rows for part, kind in _FORMATS.items()}
        self._scaling = self._review = self._state = None
        if formats:
            scaling = DelayedScaling(formats, rule=self._rule, device=self._device)
            self._scaling, self._review = scaling, Review(scaling, self._limits)
            self._state = Fp8State(scaling.scale, scaling.inverse, scaling.amax, scaling.counts)
        self._renew_graphs_()

    def _renew_graphs_(self) -> None:
        """Have every graph compiled anew, which asks anew."""
        self._generation += 1
        self._asked, self._found, self._plans = {}, {}, None
        self._quantised.clear()

    def _built(self, copy_of: Callable[[Tensor], Tensor | None]) -> tuple[quantize_weights_fp8.Plan, ...]:
        """The launches that write all copies asked for: one for the sources in bf16, one for those in fp32."""
        sources: dict[torch.dtype, list[tuple[Tensor, Fp8Weight]]] = defaultdict(list)
        for name, weight in self._weights.values():
            if name in self._asked:
                copy = copy_of(weight)
                source = _filters(weight if copy is None else copy)
                sources[source.dtype].append((source, self._asked[name]))
        plans = []
        for pairs in sources.values():
            weights = [source for source, _ in pairs]
            asked = [one for _, one in pairs]
            copies, turned = [one.copy for one in asked], [one.turned for one in asked]
            rows = [one.rows[1] for one in asked]
            plans.append(quantize_weights_fp8.build(weights, rows, copies=copies, turned=turned))
        return tuple(plans)

    def _quantize_(self, plans: Iterable[quantize_weights_fp8.Plan]) -> None:
        with self._on_device():
            for plan in plans:
                quantize_weights_fp8.quantize_(plan, self.state.scale, self.state.amax, self.state.counts)

    def _on_device(self) -> Any:
        # Triton launches on the current device, which need not be the model's
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def chooser(fp8: str) -> Chooser:
    """What a recipe's choice of `fp8` lets run: of "always" every pass that has a kernel, else those that pay."""
    return chosen_passes if fp8 == "always" else paying_passes


def paying_passes(conv: Convolution, *, by_norm: bool) -> frozenset[str]:
    """Those that FP8 makes faster, quantising included, by `fp8_prices`; all that have a kernel where no GPU is."""
    possible = chosen_passes(conv, by_norm=by_norm)
    if conv.device.type != "cuda":
        return possible
    return fp8_prices.cheapest_passes(conv, possible, _spec(conv.device), by_norm=by_norm)


def _why_not_here(device: torch.device, choose: Chooser) -> str:
    if device.type != "cuda":
        return ""
    arch = architecture_of(device)
    if arch not in ARCHITECTURES:
        return f"FP8 convolutions are for {listed(ARCHITECTURES)}, and the GPU is {arch}"
    if choose is paying_passes:
        try:
            _spec(device)
        except UsageError as error:
            return f"what FP8 gains here is not known, and fp8='always' would not ask: {error}"
    return ""


def _spec(device: torch.device) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(device)
    return find_spec(properties.name, sm_count=properties.multi_processor_count)


def _filters(weight: Tensor) -> Tensor:
    """The weight [K, C, R, S] of the same memory: that of a linear layer has R = S = 1."""
    weight = weight.detach()
    return weight if weight.dim() == 4 else weight[:, :, None, None]


def _unfit(weight: Tensor) -> str:
    """Why a parameter of 4 axes, or 2, has no FP8 copy, "" where it can have one."""
    linear, (k, c) = weight.dim() == 2, weight.shape[:2]
    if weight.dtype != torch.float32:
        return f"its weight is {dtype_name(weight.dtype)}"
    if not weight.numel() or k % MULTIPLE or c % MULTIPLE:
        sizes = f"{k} outputs of {c} inputs" if linear else f"{k} filters of {c} channels"
        return f"it has {sizes}, and FP8 takes multiples of {MULTIPLE}"
    if not _filters(weight).is_contiguous(memory_format=torch.channels_last):
        return f"its weight is not {'contiguous' if linear else 'channels-last'}"
    if weight.data_ptr() % 16:
        return f"its weight does not begin at a multiple of {MULTIPLE} bytes"
    return ""
