"""What torch's DataLoader gives a loop, of scripts that say nothing of it: how many shapes, and from how many workers.

The batch that counts is the last one that came before a step ended, so batches of a validation between steps do not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]

_MOST_TENSORS = 64  # of a batch that are looked at: lists of boxes may be long, and a step is being timed


class BatchWatch:
    """The batches of a loop from now on."""

    def __init__(self) -> None:
        self._given: Shapes = ()  # of the last batch, its tensors'
        self._given_by = 0  # workers of its loader
        self._seen: Counter[Shapes] = Counter()  # steps, by what they were given
        self._workers = 0

    def watch_(self, iterators: Any) -> None:
        """Replace `__next__` of the class, that of the iterators of `DataLoader`, by one that tells of its batches."""
        iterators.__next__ = _telling(iterators.__next__, self.given)

    def given(self, batch: object, workers: int) -> None:
        """A loader of so many workers gave this batch."""
        self._given, self._given_by = shapes_of(batch), workers

    def stepped(self) -> None:
        """A step ended."""
        if self._given:
            self._seen[self._given] += 1
            self._workers = max(self._workers, self._given_by)

    def settings(self) -> dict[str, str]:
        """As `Step.settings`; nothing where no loader gave a tensor."""
        if not self._seen:
            return {}
        usual = self._seen.most_common(1)[0][1] / self._seen.total()
        return {
            "distinct_shapes": str(len(self._seen)),
            "usual_shape_share": str(usual),
            "loader_workers": str(self._workers),
        }


def shapes_of(batch: object) -> Shapes:
    """Shapes of the tensors in a batch, in mappings, lists and tuples; of a long one the first."""
    found: list[tuple[int, ...]] = []
    left = [batch]
    while left and len(found) < _MOST_TENSORS:
        part = left.pop()
        if isinstance(part, Tensor):
            found.append(tuple(part.shape))
        elif isinstance(part, Mapping):
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            left.extend(part[:_MOST_TENSORS])
    return tuple(found)


def _telling(following: Callable[[Any], Any], told: Callable[[object, int], object]) -> Callable[[Any], Any]:
    @functools.wraps(following)
    def telling(iterator: Any) -> Any:
        batch = following(iterator)
        told(batch, getattr(iterator, "_num_workers", 0))
        return batch

    return telling
