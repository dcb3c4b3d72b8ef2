"""What a captured training step depends on and what running it changes: batches, keys, snapshots."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import UsageError


@dataclass(frozen=True)
class Structure:
    """How a batch is built from its tensors in order: a tensor, a container of parts, or a constant."""

    kind: type
    names: tuple = ()
    parts: tuple[Structure, ...] = ()
    constant: object = None


@dataclass(frozen=True)
class Key:
    """A graph may be replayed where all of this is as it was at its capture."""

    batch: tuple  # structure, shapes and dtypes
    modes: tuple[bool, ...]  # training flags
    settings: tuple  # constants of the optimizer's kernels
    generation: int  # of the tensors: counts how often weights or optimizer state were replaced

    def changed(self, other: Key) -> str:
        """What differs, in words."""
        if self.batch != other.batch:
            return "the batch's shape"
        if self.modes != other.modes:
            return "train or eval mode"
        return "the optimizer's settings (momentum, betas)" if self.settings != other.settings else "replaced weights"


def flatten(batch: Any) -> tuple[tuple[Tensor, ...], Structure]:
    """The tensors of nested tuples, lists and mappings, in order. Raises UsageError for what a batch may not hold."""
    leaves: list[Tensor] = []
    structure = _describe(batch, leaves)
    return tuple(leaves), structure


def rebuild(structure: Structure, leaves: Iterator[Tensor]) -> Any:
    """The batch that `flatten` took apart, with these tensors."""
    if structure.kind is Tensor:
        return next(leaves)
    if not issubclass(structure.kind, (tuple, list, Mapping)):
        return structure.constant
    parts = [rebuild(part, leaves) for part in structure.parts]
    if issubclass(structure.kind, Mapping):
        return dict(zip(structure.names, parts, strict=True))
    return structure.kind(*parts) if hasattr(structure.kind, "_fields") else structure.kind(parts)


def signature(leaves: Sequence[Tensor], structure: Structure) -> tuple:
    return structure, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def micro_batches(leaves: Sequence[Tensor], count: int) -> list[tuple[float, tuple[Tensor, ...]]]:
    """Up to `count` slices along the first dimension, each with its share of the rows; scalars go into every slice.

    Shares make the mean over a short last batch right, whose slices are not all of one size.
    """
    if count == 1:
        return [(1.0, tuple(leaves))]
    rows = {leaf.shape[0] for leaf in leaves if leaf.dim()}
    if len(rows) != 1:
        raise UsageError(
            f"compile_step: accumulate={count} slices the batch's first dimension, which must be one size in all its "
            f"tensors, got {sorted(rows) or 'no tensor with dimensions'}"
        )
    total = rows.pop()
    slices = [leaf.tensor_split(count) if leaf.dim() else [leaf] * count for leaf in leaves]
    sizes = [total // count + (i < total % count) for i in range(count)]
    return [(size / total, tuple(part)) for size, *part in zip(sizes, *slices, strict=True) if size]


class Snapshot:
    """Values of tensors and of every random generator at one moment, put back in place by `restore_`.

    Every generator: the default ones of host and device, and `generators`.
    """

    def __init__(
        self, tensors: Iterable[Tensor], device: torch.device, generators: Iterable[torch.Generator] = ()
    ) -> None:
        # tied weights are one tensor
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in distinct]
        self._device = device
        self._host_random = _host_random()
        self._device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._generators = [(generator, generator.get_state()) for generator in generators]

    @torch.no_grad()
    def restore_(self) -> None:
        if self._device.type == "cuda":
            # a capture that failed leaves warm-up steps running on a stream of its own
            torch.cuda.synchronize(self._device)
        for tensor, value in self._tensors:
            tensor.copy_(value)
        python, numpy, torch_cpu = self._host_random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, self._device)
        for generator, state in self._generators:
            generator.set_state(state)

    def drew_on_device(self) -> bool:
        """Whether the GPU's default generator has moved since."""
        before = self._device_random
        return before is not None and not torch.equal(torch.cuda.get_rng_state(self._device), before)

    def drew_on_host(self) -> str | None:
        """Which generator of the host has moved since: a graph would repeat its numbers for ever."""
        python, numpy, torch_cpu = self._host_random
        python_now, numpy_now, torch_now = _host_random()
        if python_now != python:
            return "Python's random"
        if numpy_now[2] != numpy[2] or not np.array_equal(numpy_now[1], numpy[1]):
            return "numpy.random"
        if self._device.type != "cpu" and not torch.equal(torch_now, torch_cpu):
            return "torch's CPU generator"
        return None


class Watched:
    """The memory a graph reads: weights, buffers and optimizer state, in flat lists that C loops compare.

    Values written in place do not count as a change.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: Optimizer) -> None:
        # held, so that nothing new can take the identity of one that is gone
        parts = [part for module in modules for part in module.modules()]
        self._optimizer = optimizer
        self._attributes = [vars(part) for part in parts]
        self._children = [part._modules for part in parts]
        self._children_then = [dict(children) for children in self._children]
        self._state = optimizer.state
        self._moments = list(optimizer.state.values())
        self._stores = [store for part in parts for store in (part._parameters, part._buffers)] + self._moments
        self._stored = _values(self._stores)
        self._stepped = _stepped(optimizer)
        tensors = {id(value): value for value in (*self._stored, *self._stepped) if isinstance(value, Tensor)}
        self._tensors = list(tensors.values())
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        self._parameters = [tensor for tensor in self._tensors if isinstance(tensor, nn.Parameter)]
        self._trained = list(map(_requires_grad, self._parameters))

    def modes(self) -> tuple[bool, ...]:
        return tuple(map(_training, self._attributes))

    def moved(self) -> bool:
        """Whether a tensor was replaced or given other memory, a module swapped, a weight frozen, freed or added."""
        stored, stepped = _values(self._stores), _stepped(self._optimizer)
        return not (
            self._optimizer.state is self._state
            and len(self._state) == len(self._moments)
            and all(map(operator.is_, self._state.values(), self._moments))
            and self._children == self._children_then
            and len(stepped) == len(self._stepped)
            and all(map(operator.is_, stepped, self._stepped))
            and len(stored) == len(self._stored)
            and all(map(operator.is_, stored, self._stored))
            and list(map(Tensor.data_ptr, self._tensors)) == self._pointers
            and list(map(_requires_grad, self._parameters)) == self._trained
        )


_training = operator.itemgetter("training")
_requires_grad = operator.attrgetter("requires_grad")


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _values(stores: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, stores)))


def _describe(part: Any, leaves: list[Tensor]) -> Structure:
    if isinstance(part, Tensor):
        leaves.append(part)
        return Structure(Tensor)
    if isinstance(part, Mapping):
        return Structure(dict, tuple(part), tuple(_describe(value, leaves) for value in part.values()))
    if isinstance(part, (tuple, list)):
        return Structure(type(part), parts=tuple(_describe(value, leaves) for value in part))
    if part is None or isinstance(part, (bool, int, float, str)):
        return Structure(type(part), constant=part)
    raise UsageError(
        f"compile_step: a batch is made of tensors, tuples, lists, dicts and constants, got a {type(part).__name__} in "
        f"it: turn it into a tensor"
    )


def _host_random() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()
