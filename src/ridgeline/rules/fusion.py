"""Rules on passes that belong into a neighbour: K1 pointwise chains, K4 additions after convolutions, K17 attention."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise, takewhile

from ridgeline import units
from ridgeline.finding import Abstention, Edit, Finding
from ridgeline.rules._kernels import (
    COMPILE,
    COMPILE_BF16_STEP,
    COMPILE_STEP,
    ITEM_BYTES,
    called,
    convolves,
    elements,
    freed_s,
    largest_bytes,
    names_of,
    runs,
    saving_of,
    streams,
    unseen,
    verb,
    without_kernels,
)
from ridgeline.rules._rule import LAUNCH_CAUSES, STALL_S, evidence, exposed_of, notable, plural, seconds_of
from ridgeline.rules.optimizer import weight_updates
from ridgeline.step_view import Kernel, Step
from ridgeline.trace import Dims

_ADDITIONS = ("add", "add_")
# what Inductor writes behind a library's convolution, whose bias it has split off: only the bias, or a residual too
_COMPILED_ADDITION = re.compile(r"triton_poi_fused_(_to_copy_)?(add_)?convolution_\d+$")
_FUSABLE = ("pointwise", "copy", "index")  # categories that a compiler puts into one loop
_SMALL = 4096  # elements below which a kernel is nothing but its launch, and its values a reader's to recompute
_PRODUCERS = ("norm", "layout", "pointwise")  # what a residual may follow, besides a convolution
_ATTENTION_REACH = 6  # kernels from one product of an attention to the other: scale, mask, softmax, dropout, copies
_RESIDUAL_KEPT = 1 / 3  # of an addition in an epilogue: the other tensor is still read
_ROUNDING_S = 1e-8  # of a trace: a gap begins where a kernel ends
_NAMED = 4  # kinds of chains listed in a finding
_PRODUCTS = ("bmm", "baddbmm", "matmul")


def pointwise_chains(step: Step) -> Iterator[Finding | Abstention]:
    """K1: pointwise kernels in a row over the same number of elements, each reading what the one before wrote.

    Eager copies, casts and lookups within a row belong to it, and so does what has a few elements. Holds for tensors
    larger than half of L2; of smaller ones the pause between kernels is most of what is won, and the estimate, which
    starts from measured times, shrinks with them. Needs shapes.
    """
    updates = weight_updates(step)
    pointwise = [k for k in step.kernels if k.known.category == "pointwise" and k.activity.id not in updates]
    yield from unseen("K1", pointwise, "pointwise kernels")
    ids = {kernel.activity.id for kernel in step.kernels if _is_fusable(kernel)} - updates
    stretches = runs(step, lambda kernel: kernel.activity.id in ids)
    chains = [chain for stretch in stretches for chain in _chains(stretch) if _is_chain(chain)]
    if not chains:
        return
    seconds: dict[int, float] = {}
    gaps: dict[int, float] = {}
    best_s = 0.0
    for chain in chains:
        seconds |= _fused(chain)
        gaps |= _pauses_within(step, chain)
        best_s += exposed_of(chain) - max(kernel.exposed_s for kernel in chain)
    edit = Edit(seconds, gaps)
    if not notable(step, freed_s(step, edit)):
        return
    found = [kernel for chain in chains for kernel in chain]
    size_bytes = max((kernel.bytes or 0.0) for kernel in found)
    small = bool(step.ceilings) and size_bytes < step.ceilings.l2_bytes / 2
    named = Counter(" → ".join(called(kernel) for kernel in chain) for chain in chains).most_common(_NAMED)
    yield Finding(
        rule="K1",
        title=f"{len(found)} small passes stand in {plural(len(chains), 'chain')} that could be one kernel each",
        fix="Compile the function that contains them, so that each chain reads its inputs and writes its result once.",
        verb=verb(step, training=COMPILE_STEP, inference=COMPILE),
        saving=saving_of(step, edit, low=0.25 if small else 0.5, high_s=best_s),
        effort="M",
        confidence="modelled",
        wrong_if="an intermediate result has another reader, or is kept for backward",
        evidence=evidence(found),
        edit=edit,
        note=f"{'; '.join(f'{count} of {name}' for name, count in named)}. Middle: each chain's bytes without its "
        "intermediate results" + (", which fit L2 here" if small else ""),
    )


def separate_additions(step: Step) -> Iterator[Finding | Abstention]:
    """K4: biases and residuals are added by passes of their own behind a convolution, norm or activation.

    Holds for forward passes: sums of gradients in backward belong to no epilogue. Needs shapes.
    """
    yield from unseen("K4", [k for k in step.kernels if k.known.category == "pointwise"], "pointwise kernels")
    biases, residuals = [], []
    for lane in streams(step):
        for before, kernel in pairwise(lane):
            if not _adds(kernel) or not (convolves(before) or before.known.category in _PRODUCERS):
                continue
            if _adds_map(kernel):
                residuals.append(kernel)
            elif _adds_bias(kernel):
                biases.append(kernel)
    found = [*biases, *residuals]
    edit = without_kernels(step, biases)
    kept = {kernel.activity.id: _RESIDUAL_KEPT * kernel.seconds for kernel in residuals}
    edit = Edit({**edit.seconds, **kept}, edit.gaps)
    if not found or not notable(step, freed_s(step, edit)):
        return
    yield Finding(
        rule="K4",
        title=f"{plural(len(biases), 'bias addition')} and {plural(len(residuals), 'residual addition')} run as passes "
        f"of their own, {units.seconds(exposed_of(found))}",
        fix="Let the convolution (or the norm) before add them as it stores.",
        verb=verb(step, training=COMPILE_BF16_STEP, inference=COMPILE),
        saving=saving_of(step, edit, high_s=exposed_of(found)),
        effort="L" if step.trained else "S",
        confidence="modelled",
        wrong_if="the sum before the addition is needed too, as in a residual that branches again",
        evidence=evidence(found),
        edit=edit,
        note=verb(
            step, training="the recipe adds within the convolutions that `ridgeline tune` found faster", inference=""
        ),
    )


def naive_attention(step: Step) -> Iterator[Finding | Abstention]:
    """K17: attention as product, softmax, product, with the matrix of scores in memory.

    Holds where both products are batched and of one size. Their own time stays; reading and writing the scores goes.
    """
    softmaxes = [kernel for kernel in step.kernels if kernel.known.category == "softmax"]
    sites = [site for lane in streams(step) for site in _attentions(lane)]
    if not sites:
        yield from unseen("K17", softmaxes, "softmax kernels")
        return
    between = [kernel for _, inner, _ in sites for kernel in inner]
    products = [kernel for first, _, last in sites for kernel in (first, last)]
    edit = without_kernels(step, between)
    best_s = exposed_of(between) + sum(max(k.exposed_s - (k.floor_s or k.exposed_s), 0.0) for k in products)
    if not notable(step, freed_s(step, edit)):
        return
    scores = max((_size(kernel) for kernel in between), default=0)
    yield Finding(
        rule="K17",
        title=f"scores of {plural(len(sites), 'attention')} go through memory: {len(between)} kernels between products",
        fix="Call torch.nn.functional.scaled_dot_product_attention, which keeps the scores on the chip.",
        verb=verb(step, training="", inference=COMPILE),
        saving=saving_of(step, edit, high_s=best_s),
        effort="S",
        confidence="modelled",
        wrong_if="a mask or bias is used that no fused kernel takes, so that PyTorch falls back to the same products",
        evidence=evidence([*between, *products]),
        edit=edit,
        note=f"scores of up to {scores} elements" if scores else "",
    )


def _chains(run: list[Kernel]) -> Iterator[list[Kernel]]:
    """Cut a stretch where the number of elements changes, or is unknown; a small kernel goes with any."""
    chain: list[Kernel] = []
    whole = 0  # elements of the chain's large kernels
    for kernel in run:
        size = _size(kernel)
        fits = size <= _SMALL or whole <= _SMALL or size == whole
        if chain and size and fits and kernel.phase == chain[-1].phase:
            chain.append(kernel)
            whole = max(whole, size)
            continue
        if chain:
            yield chain
        chain, whole = ([kernel], size) if size else ([], 0)
    if chain:
        yield chain


def _pauses_within(step: Step, chain: list[Kernel]) -> dict[int, float]:
    """The launch gaps between a chain's kernels, of which one kernel has none; a stall has a reason of its own."""
    first_s, last_s = chain[0].activity.end_s, chain[-1].activity.start_s
    at = bisect_left(step.gaps, first_s - _ROUNDING_S, key=lambda gap: gap.start_s)
    within = takewhile(lambda pair: pair[1].start_s < last_s, enumerate(islice(step.gaps, at, None), at))
    return {i: 0.0 for i, gap in within if gap.cause in LAUNCH_CAUSES and gap.duration_s < STALL_S}


def _is_fusable(kernel: Kernel) -> bool:
    """Whether a compiler would put the kernel into a loop with its neighbours; its own kernels it has put already."""
    return kernel.known.category in _FUSABLE and not kernel.activity.name.startswith("triton_")


def _is_chain(chain: list[Kernel]) -> bool:
    """Two casts in a row, as of weights, make none."""
    return len(chain) > 1 and seconds_of(chain) > 0.0 and any(k.known.category == "pointwise" for k in chain)


def _size(kernel: Kernel) -> int:
    """Elements of the largest argument; 0 where unknown."""
    if kernel.call is None:
        return 0
    shapes, dtypes = kernel.call.shapes, kernel.call.dtypes
    # a tensor without axes has one element; what is no tensor has no type of an element
    scalars = (1 for dims, dtype in zip(shapes, dtypes, strict=False) if not dims and dtype in ITEM_BYTES)
    return max((*scalars, *(elements(dims) for dims in shapes if dims)), default=0)


def _fused(chain: list[Kernel]) -> dict[int, float]:
    """Seconds of a chain's kernels when fused: bytes without what it hands on within, never below its longest."""
    bytes_ = [kernel.bytes or 0.0 for kernel in chain]
    # an intermediate result is written once and read once
    handed_on = sum(2 * min(largest_bytes(before), largest_bytes(after)) for before, after in pairwise(chain))
    total_s = seconds_of(chain)
    share = max(1 - handed_on / sum(bytes_), 0.0) if all(bytes_) else 0.0
    after_s = max(total_s * share, *(kernel.seconds for kernel in chain))
    # every kernel keeps its part, so that overlap with other streams is counted once
    return {kernel.activity.id: kernel.seconds * after_s / total_s for kernel in chain}


def _adds(kernel: Kernel) -> bool:
    adds = called(kernel) in _ADDITIONS or bool(_COMPILED_ADDITION.match(called(kernel)))
    return kernel.known.category == "pointwise" and kernel.phase != "backward" and adds


def _adds_bias(kernel: Kernel) -> bool:
    """Whether what is added has one element a channel."""
    whole, parts = _summands(kernel)
    return len(whole) == 4 and any(part != () and elements(part) == whole[1] for part in parts)


def _adds_map(kernel: Kernel) -> bool:
    whole, parts = _summands(kernel)
    return len(whole) >= 3 and whole in parts


def _summands(kernel: Kernel) -> tuple[Dims, tuple[Dims, ...]]:
    """The map and what is added to it: the second argument, of a compiled kernel all further ones."""
    shapes = kernel.call.shapes if kernel.call else ()
    if len(shapes) < 2:
        return (), ()
    return shapes[0], shapes[1:] if _COMPILED_ADDITION.match(called(kernel)) else shapes[1:2]


def _attentions(lane: list[Kernel]) -> Iterator[tuple[Kernel, list[Kernel], Kernel]]:
    """A batched product, what follows up to the softmax and after it, and the product with the values."""
    for index, kernel in enumerate(lane):
        if kernel.known.category != "softmax":
            continue
        before = _nearest_product(lane[max(index - _ATTENTION_REACH, 0) : index][::-1])
        after = _nearest_product(lane[index + 1 : index + 1 + _ATTENTION_REACH])
        if before is None or after is None:
            continue
        (first, scaling), (last, dropping) = before, after
        yield first, [*scaling[::-1], kernel, *dropping], last


def _nearest_product(kernels: list[Kernel]) -> tuple[Kernel, list[Kernel]] | None:
    """The first batched product and what stands before it; None where something else than a pass over scores does."""
    passed: list[Kernel] = []
    for kernel in kernels:
        if kernel.known.category == "gemm":
            return (kernel, passed) if any(name in _PRODUCTS for name in names_of(kernel)) else None
        if kernel.known.category not in ("pointwise", "copy", "random"):
            return None
        passed.append(kernel)
    return None
