"""CUDA-graph capture of a callable with static input buffers; one replay is one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.errors import EnvironmentUnusable, NotEngaged


class Graph(Protocol):
    """What `Captured` asks of a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...

    def pool(self) -> Any: ...


@dataclass(frozen=True)
class Captured:
    """A captured call. `inputs` and `outputs` are the graph's own memory: each replay overwrites `outputs`.

    A caller may fill `inputs` in place (`captured.inputs[0].copy_(pinned, non_blocking=True)`), then replay without.
    """

    inputs: tuple[Tensor, ...]
    outputs: Any
    graph: Graph
    owner: Any = None  # the captured callable: the graph reads its tensors (weights above all), so they must live on

    def replay(self, *new_inputs: Tensor) -> Any:
        """Copy `new_inputs` (all of them or none) into the buffers, launch the graph, return `outputs` without waiting.

        Raises ValueError when a tensor's shape, dtype or device is not the captured one.
        """
        if new_inputs and len(new_inputs) != len(self.inputs):
            raise ValueError(f"replay: the graph was captured with {len(self.inputs)} inputs, got {len(new_inputs)}")
        # all are checked before the first is copied, so that a refusal leaves the buffers as they were
        for i, (buffer, new) in enumerate(zip(self.inputs, new_inputs, strict=False)):
            if (new.shape, new.dtype, new.device) != (buffer.shape, buffer.dtype, buffer.device):
                raise ValueError(
                    f"replay: input {i} must be {_signature(buffer)} as captured, got {_signature(new)}: "
                    f"convert it or capture again"
                )
        for buffer, new in zip(self.inputs, new_inputs, strict=False):
            if new is not buffer:
                buffer.copy_(new)
        self.graph.replay()
        return self.outputs


def capture(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    warmup: int = 3,
    pool: Any = None,
    generators: Sequence[torch.Generator] = (),
) -> Captured:
    """Run `fn` on copies of `inputs` `warmup` times, then capture one call of it.

    The warm-up calls are real: state that `fn` updates (BatchNorm statistics, RNG, optimizer) advances with them, so a
    caller with state saves and restores it. `pool` (of `torch.cuda.graph_pool_handle()`) shares memory between graphs
    that never run at the same time. `generators` are those that `fn` draws from besides the GPU's default one: each
    replay then advances them, as a call would. Raises EnvironmentUnusable without a GPU, NotEngaged when `fn` cannot be
    captured.
    """
    if warmup < 1:
        raise ValueError(f"capture: warmup must be at least 1 (lazy set-up cannot be captured), got {warmup}")
    if not torch.cuda.is_available():
        raise EnvironmentUnusable("capture: a CUDA graph needs a GPU, and torch sees none: call the function directly")
    for i, tensor in enumerate(inputs):
        if tensor.device.type != "cuda" or tensor.device.index != torch.cuda.current_device():
            raise ValueError(f"capture: input {i} must be on the current GPU, got {_signature(tensor)}: move it first")
    for generator in generators:
        if generator.device.type != "cuda":
            raise ValueError(
                f"capture: generators must be on the GPU, got one on {generator.device}, whose numbers a graph would "
                f"repeat for ever: make it with torch.Generator('cuda')"
            )
    buffers = tuple(tensor.detach().clone() for tensor in inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # torch.cuda.graph leaves its stream current when a capture fails; this outer context puts the caller's back
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            fn(*buffers)
        try:
            # "thread_local": a data loader's pinning thread calls CUDA at any moment, and must not break the capture
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = fn(*buffers)
        except RuntimeError as error:
            # ending the broken capture raises a second, vaguer error on top of the one that says what happened
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            raise NotEngaged(f"capture: the call cannot become a CUDA graph ({reason}): {_remedy(reason)}") from error
    torch.cuda.current_stream().wait_stream(stream)
    return Captured(buffers, outputs, graph, fn)


def pool_bytes(captured: Captured) -> int:
    """What the allocator holds for a graph and those it shares a pool with: activations, outputs, workspaces."""
    pool = tuple(captured.graph.pool())
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)


def _remedy(reason: str) -> str:
    # what PyTorch speaks of where a generator that the graph does not know is asked for numbers
    if any(word in reason.lower() for word in ("generator", "philox", "rng")):
        return "name the generators that it draws from besides the default one as `generators`"
    return (
        "keep .item(), .cpu(), nonzero, boolean masks and tensors made from Python values out of it, or run it "
        "without capture"
    )


def _signature(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
