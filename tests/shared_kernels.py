"""Maps of many sizes for which a convolution runs the same machine code, so that a GPU test compiles few kernels."""

import random
from collections.abc import Callable

from ridgeline.kernels._op import Launch

Size = tuple[int, int, int]


def sizes_of_one_kernel(launch_of: Callable[[Size], Launch], seed: int, *, most: int = 25) -> list[Size]:
    """At least five sizes (n, h, w), drawn at random, whose launches differ in run-time values alone."""
    chosen = random.Random(seed)

    def drawn() -> Size:
        return chosen.choice((1, 2, 5, 33)), chosen.randint(1, 40), chosen.randint(1, 40)

    def sources(size: Size) -> list:
        return [part.source("sm_90") for part in launch_of(size).parts]

    found: list[Size] = []
    while len(found) < 5:
        first = drawn()
        found, compiled = [first], sources(first)
        for _ in range(300):
            # some sides stay as they are, because the best box depends on them, and a 1 is compiled in
            n, h, w = (new if chosen.random() < 0.5 else old for new, old in zip(drawn(), first, strict=True))
            if len(found) < most and (n, h, w) not in found and sources((n, h, w)) == compiled:
                found.append((n, h, w))
    return found
