"""Kernels with their meaning and cost. `ALL` is the only list: tests, benchmarks and `ridgeline sass` follow it."""

from ridgeline.errors import UsageError
from ridgeline.kernels import conv2d_act as _conv2d_act
from ridgeline.kernels._op import Op as Op
from ridgeline.kernels._op import Sample as Sample

ALL = (_conv2d_act.OP,)


def find(name: str) -> Op:
    """The op called `name`. Raises UsageError for an unknown one."""
    for op in ALL:
        if op.name == name:
            return op
    raise UsageError(f"kernel must be one of {', '.join(op.name for op in ALL)}, got {name!r}")
