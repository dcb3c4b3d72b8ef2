"""Whether replays of a CUDA graph give one result: kernels that do not wait for one another betray themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ridgeline.cudagraph import Captured
from ridgeline.timing import MIN_REPEATS, evictor, time_callable

REPLAYS, LEAST = 64, 8
_SECONDS = 0.5

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unsteady(captured: Captured, *, evict: Callable[[], object] | None = None) -> tuple[int, int]:
    """(different, replays): how many replays on the inputs as they are gave other bits than the one before them all.

    Every second one begins with an L2 without the graph's weights, which then come late and show who does not wait for
    them: `evict` empties it, by default as `timing` does on the GPU. There are REPLAYS of them, or of a slow graph as
    many as half a second holds, but LEAST. What they find is no proof: an error that is rare enough stays unseen.
    """
    evict = evict or evictor()
    captured.graph.replay()
    expected = [_bits(tensor).clone() for tensor in _tensors(captured)]
    one = time_callable(captured.graph.replay, warmup=1, repeats=MIN_REPEATS, log_clocks=False)
    replays = max(LEAST, min(REPLAYS, int(_SECONDS / max(one.median_s, 1e-9))))
    found = []
    for i in range(replays):
        if i % 2:
            evict()
        captured.graph.replay()
        changed = [(_bits(t) != e).any() for t, e in zip(_tensors(captured), expected, strict=True)]
        found.append(torch.stack(changed).any())
    return int(torch.stack(found).sum()), replays


def _tensors(captured: Captured) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(captured.outputs) if isinstance(leaf, Tensor)]


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, which equal themselves whatever number they stand for."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()])
