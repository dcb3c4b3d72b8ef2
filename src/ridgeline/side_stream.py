"""A second stream of each GPU, for work whose results are read late: weight gradients, beside the rest of a backward.

A CUDA graph that is captured meanwhile gets branches, which run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ridgeline.errors import NotEngaged


class ReadEarly(NotEngaged):
    """What runs on the side stream was read before `join`."""


Results = TypeVar("Results", Tensor, tuple[Tensor, ...])


@dataclass
class _Side:
    stream: torch.cuda.Stream | None  # none off a GPU, where one call follows the other
    results: set[int] = field(default_factory=set)  # addresses of what was made since the last join


_SIDES: dict[torch.device, _Side] = {}


def beside(call: Callable[[], Results], read: Sequence[Tensor]) -> Results:
    """Results of `call` launched on the side stream, behind all that the current stream has so far.

    `read` are the tensors that it reads: their memory is not given away before it is through. What it allocates belongs
    to the side stream. Nothing may read the results before `join`.
    """
    device = read[0].device
    side = _side(device)
    if side.stream is None:
        results = call()
    else:
        side.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side.stream):
            results = call()
        for tensor in read:
            tensor.record_stream(side.stream)
    side.results |= {made.data_ptr() for made in (results if isinstance(results, tuple) else (results,))}
    return results


def join(results: Sequence[Tensor]) -> None:
    """Let the current stream wait for what runs beside it. Raises ReadEarly unless `results` are of `beside`.

    Others were made of those on the current stream, too early.
    """
    device = results[0].device
    side = _side(device)
    early = [tuple(one.shape) for one in results if one.data_ptr() not in side.results]
    if side.stream is not None:
        torch.cuda.current_stream(device).wait_stream(side.stream)
    side.results.clear()
    if early:
        raise ReadEarly(
            f"weight gradients cannot run beside the backward: torch.compile copies those of shapes {early} before it "
            f"is over: pass a recipe with side_stream=False"
        )


def _side(device: torch.device) -> _Side:
    if device not in _SIDES:
        _SIDES[device] = _Side(torch.cuda.Stream(device) if device.type == "cuda" else None)
    return _SIDES[device]
