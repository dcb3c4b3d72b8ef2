"""How many steps the benchmarks of whole loops take, as their command lines ask for them."""

from __future__ import annotations

from ridgeline import bench
from ridgeline.errors import UsageError
from ridgeline.timing import MIN_REPEATS


def protocol_of(steps: int, warmup: int) -> bench.Protocol:
    """So many timed steps in as few runs as can be compared. Raises UsageError for numbers that cannot be."""
    if steps < MIN_REPEATS or steps % MIN_REPEATS or warmup < 1:
        raise UsageError(f"steps must be a multiple of {MIN_REPEATS} and warmup at least 1, got {steps} and {warmup}")
    return bench.Protocol(warmup=warmup, runs=MIN_REPEATS, steps_a_run=steps // MIN_REPEATS)
