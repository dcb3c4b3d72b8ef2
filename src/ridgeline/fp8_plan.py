"""Which convolutions and linear layers would gain from FP8, pass by pass, by roofline arithmetic: nothing is run.

A product in FP8 takes the time of its roofline with 1-byte operands and the result as wide as it was; each activation
and gradient that enters one must be quantised first, once, whichever passes share it: x by forward and wgrad, dy by
dgrad and wgrad. Weights cost nothing, the optimizer's pass writes them. Of the eight ways to choose the passes of a
layer the fastest is taken. Method: T_fp8 = B/G + F/roof_fp8 against T_bf16 = F/roof_bf16, the seed of `fp8_pays`.

What the FP8 pass of a training step leaves alone (`train_rewrites.fp8_passes`, `linear_layers`) stays as it is here
too, and says why. A plan is told from the calls of a trace, which hold no tensors: sizes are read off their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ridgeline.cost import Call
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.roofline import QUANTISE_DYNAMIC, QUANTISE_FUSED, QUANTISE_STATIC, bound, fp8_seconds
from ridgeline.specs import DeviceSpec

PASSES = ("forward", "dgrad", "wgrad")
# bytes moved for an element that is quantised: by a pass of its own, with and without a search for the largest
# magnitude, or by the kernel that makes it
QUANTISE = {"static": QUANTISE_STATIC, "dynamic": QUANTISE_DYNAMIC, "fused": QUANTISE_FUSED}
_MULTIPLE = 16  # of channels, which FP8's matrix instructions and 16-byte loads need
_KINDS = ("conv", "matmul")
# of GPUs for which this project has kernels, and of maps and filters whose weight gradient it computes in FP8
_ARCHITECTURES = ("sm_89", "sm_90", "sm_120")
_FILTER_SIZES = (1, 3)
_ROWS, _COLUMNS = 4, (4, 8, 16, 32, 64, 128)
_TOKENS = 16
# a plain convolution: "128x256x16x16 * 256x256x3x3 s1 p1"; strides, paddings, dilations that differ are written "1x2"
_CONVOLUTION = re.compile(
    r"(?P<n>\d+)x(?P<c>\d+)x(?P<h>\d+)x(?P<w>\d+) \* (?P<k>\d+)x\d+x(?P<r>\d+)x(?P<s>\d+)"
    r" s(?P<stride>\S+) p(?P<padding>\S+)(?P<rest>.*)"
)


@dataclass(frozen=True)
class Fp8Layer:
    """One layer's passes. Seconds of one step; `chosen` are the passes that FP8 makes faster together."""

    layer: str
    shape: str
    bf16_s: Mapping[str, float]  # by pass
    fp8_s: Mapping[str, float]  # by pass, without quantising; those that FP8 kernels compute
    quantise_s: Mapping[str, float]  # by tensor, "x" and "dy"
    chosen: tuple[str, ...]
    reason: str  # why no pass is chosen, "" where one is

    @property
    def before_s(self) -> float:
        return sum(self.bf16_s.values())

    @property
    def after_s(self) -> float:
        return _seconds(self.bf16_s, self.fp8_s, self.quantise_s, self.chosen)


@dataclass(frozen=True)
class Fp8Plan:
    """The layers of a model in the order of its forward pass, those that stay as they are too."""

    gpu: str
    source: str  # of the ceilings
    quantise: str
    layers: tuple[Fp8Layer, ...]

    @property
    def before_s(self) -> float:
        return sum(layer.before_s for layer in self.layers)

    @property
    def after_s(self) -> float:
        return sum(layer.after_s for layer in self.layers)


def fp8_plan(calls: Sequence[Call], spec: DeviceSpec, *, quantise: str = "static") -> Fp8Plan:
    """The plan of a traced forward pass or training step (`cost.trace_train_step(...).calls`).

    quantise   "static" (3 bytes an element: delayed scaling), "dynamic" (5: its own maximum first) or "fused" (the
               producer writes one byte in place of two)
    A linear layer of as many rows as the first convolution has images is taken for one of a row an image.
    Raises UsageError for a step without 16-bit tensor-core products, EnvironmentUnusable for a GPU without FP8, or
    with FP8 that there are no kernels for.
    """
    if quantise not in QUANTISE:
        raise UsageError(f"quantise must be one of {', '.join(QUANTISE)}, got {quantise!r}")
    _require_fp8(spec)
    images = next((int(found["n"]) for call in calls if (found := _CONVOLUTION.fullmatch(call.shape))), 0)
    layers = tuple(_layer(group, spec, QUANTISE[quantise], images) for group in _groups(calls))
    if not layers:
        raise UsageError("no convolution or linear layer here runs in bf16 or fp16: pass --dtype bf16")
    return Fp8Plan(spec.name, spec.source, quantise, layers)


def _require_fp8(spec: DeviceSpec) -> None:
    if "tensor_fp8" not in spec.peaks:
        raise EnvironmentUnusable(
            f"{spec.name} ({spec.architecture}) has no FP8 unit: leave --fp8 out, or name a GPU that has one, such as "
            f"--gpu L4 or --gpu H200"
        )
    if spec.architecture not in _ARCHITECTURES:
        raise EnvironmentUnusable(
            f"{spec.name} is {spec.architecture}, and the FP8 kernels here are for {', '.join(_ARCHITECTURES)}: leave "
            f"--fp8 out, or name such a GPU with --gpu"
        )


def _groups(calls: Sequence[Call]) -> Iterator[dict[str, Call]]:
    """Forward products with the backward ones of the same layer, told by the tensors they read."""
    products = [c for c in calls if c.gemm is not None and c.cost is not None and c.kind.startswith(_KINDS)]
    products = [c for c in products if c.cost is not None and c.cost.pipe in ("tensor_bf16", "tensor_fp16")]
    backward = [c for c in products if c.phase == "backward"]
    for call in (c for c in products if c.phase == "forward"):
        x, w = (use.storage for use in call.inputs[:2])
        group = {"forward": call}
        for other in list(backward):
            reads = {use.storage for use in other.inputs}
            name = "dgrad" if w in reads and x not in reads else "wgrad" if x in reads and w not in reads else None
            if name is not None and name not in group:
                group[name] = other
                backward.remove(other)
        yield group


def _layer(group: Mapping[str, Call], spec: DeviceSpec, quantise_bytes: float, images: int) -> Fp8Layer:
    forward = group["forward"]
    gemm = forward.gemm
    assert gemm is not None
    bf16_s = {name: bound(call.cost, spec).seconds for name, call in group.items() if call.cost is not None}
    per_element_s = quantise_bytes / spec.bandwidth
    quantise_s = {"x": per_element_s * forward.inputs[0].numel}
    if len(group) > 1:
        quantise_s["dy"] = per_element_s * gemm.m * gemm.n * gemm.count
    fp8_s: dict[str, float] = {}
    chosen: tuple[str, ...] = ()
    reason = _why_not(forward, images)
    if not reason:
        without = () if _has_quads(forward, images) else ("wgrad",)
        fp8_s = {name: _fp8_s(call, spec) for name, call in group.items() if name not in without}
        chosen = _best(bf16_s, fp8_s, quantise_s)
        reason = "" if chosen else "quantising costs more than FP8 saves"
    return Fp8Layer(forward.module, forward.shape, bf16_s, fp8_s, quantise_s, chosen, reason)


def _why_not(forward: Call, images: int) -> str:
    """Why a layer stays as it is, "" where kernels could compute it in FP8."""
    gemm, conv = forward.gemm, _CONVOLUTION.fullmatch(forward.shape)
    assert gemm is not None
    if gemm.count != 1:
        return "grouped: each group is too small a product"
    if conv is None and forward.kind.startswith("conv"):
        return "transposed, or not of two axes"
    inputs = int(conv["c"]) if conv else gemm.k
    if gemm.n % _MULTIPLE or inputs % _MULTIPLE:
        return f"{gemm.n} outputs from {inputs} inputs: FP8 takes multiples of {_MULTIPLE}"
    if conv is None:
        return f"one row an image ({gemm.m}): FP8 takes rows of tokens" if gemm.m <= images else ""
    if conv["stride"] != "1" or conv["rest"]:
        return f"stride {conv['stride']}{conv['rest']}: FP8 takes stride 1 without dilation"
    padding = (conv["padding"].split("x") * 2)[:2]
    if any(2 * int(p) != int(conv[size]) - 1 for p, size in zip(padding, "rs", strict=True)):
        return f"padding {conv['padding']}: FP8 takes what keeps the size of a map"
    return ""


def _has_quads(forward: Call, images: int) -> bool:
    """Whether kernels compute its weight gradient in FP8 too: from quads of its maps."""
    conv, gemm = _CONVOLUTION.fullmatch(forward.shape), forward.gemm
    assert gemm is not None
    if conv is None:
        return gemm.m // max(images, 1) % _TOKENS == 0
    filters = {int(conv["r"]), int(conv["s"])} <= {*_FILTER_SIZES}
    return filters and int(conv["h"]) % _ROWS == 0 and int(conv["w"]) in _COLUMNS


def _fp8_s(call: Call, spec: DeviceSpec) -> float:
    assert call.cost is not None
    operands = sum(use.numel for use in call.inputs)
    results = sum(use.bytes for use in call.outputs)
    return fp8_seconds(call.cost.flops, operands, results, spec)


def _best(bf16_s: Mapping[str, float], fp8_s: Mapping[str, float], quantise_s: Mapping[str, float]) -> tuple[str, ...]:
    subsets = [subset for size in range(len(fp8_s) + 1) for subset in combinations(fp8_s, size)]
    return min(subsets, key=lambda subset: _seconds(bf16_s, fp8_s, quantise_s, subset))


def _seconds(
    bf16_s: Mapping[str, float], fp8_s: Mapping[str, float], quantise_s: Mapping[str, float], chosen: Sequence[str]
) -> float:
    """Of a layer with the `chosen` passes in FP8, and what they need quantised."""
    total = sum(fp8_s[name] if name in chosen else seconds for name, seconds in bf16_s.items())
    if "forward" in chosen or "wgrad" in chosen:
        total += quantise_s["x"]
    if "dgrad" in chosen or "wgrad" in chosen:
        total += quantise_s["dy"]
    return total
