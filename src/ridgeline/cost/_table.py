"""COSTS, every formula in one table, and `cost_of`, which looks an operator up in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ridgeline.cost import attention, conv, data, matmul, norm, optim, pointwise, reduce
from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import Formula, Work, tensors_in, touches
from ridgeline.errors import UsageError

COSTS: dict[str, Formula] = {
    **conv.FORMULAS,
    **matmul.FORMULAS,
    **attention.FORMULAS,
    **norm.FORMULAS,
    **reduce.FORMULAS,
    **pointwise.FORMULAS,
    **data.FORMULAS,
    **optim.FORMULAS,
}

_QUALIFIED = re.compile(r"\w+(\.\w+)+")

# Formulas of `register_cost`: they come first, and keep a composite operator from being taken apart.
_REGISTERED: dict[str, Formula] = {}


def op_name(op: str | OpOverload | OpOverloadPacket | Any) -> str:
    """`"aten.add"` from `"aten::add"`, `torch.ops.aten.add` or `torch.ops.aten.add.Tensor`."""
    if isinstance(op, OpOverload):
        return str(op.overloadpacket)
    if isinstance(op, OpOverloadPacket):
        return str(op)
    if isinstance(op, str):
        return op.replace("::", ".")
    return f"{getattr(op, 'namespace', 'higher_order')}.{op.name()}"


def register_cost(
    op: str | OpOverload | OpOverloadPacket, formula: Callable[..., Cost], *, kind: str = "other"
) -> None:
    """Teaches the cost of an operator: `formula(*args, **kwargs) -> Cost` takes the operator's own arguments.

    `op` is `"mylib::myop"` or `torch.ops.mylib.myop`. A later registration replaces an earlier one. Raises UsageError
    for an operator without a namespace and for a formula that cannot be called.
    """
    known = isinstance(op, (str, OpOverload, OpOverloadPacket, HigherOrderOperator))
    if not known or not _QUALIFIED.fullmatch(op_name(op)):
        raise UsageError(f"register_cost: op must be 'mylib::myop' or torch.ops.mylib.myop, got {op!r:.80}")
    if not callable(formula):
        raise UsageError(f"register_cost: the formula of {op} must be callable and return a Cost, got {formula!r:.80}")

    def works(*args: Any, result: Any, **kwargs: Any) -> Work:
        return Work(formula(*args, **kwargs), touches(args, kwargs), touches(result))

    _REGISTERED[op_name(op)] = Formula(kind, works)


def unregister_cost(op: str | OpOverload | OpOverloadPacket) -> None:
    """Forgets a formula given to `register_cost`; raises KeyError where there is none."""
    del _REGISTERED[op_name(op)]


def formula_of(op: Any) -> Formula | None:
    """The formula of an operator, an in-place form (`add_`) falling back on the plain one; None where there is none."""
    name = op_name(op)
    for key in (name, name.removesuffix("_")):
        if formula := _REGISTERED.get(key) or COSTS.get(key):
            return formula
    return None


def works_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, tf32: bool = False
) -> tuple[Work, ...] | None:
    """The kernels of one call, () for a view, None for an operator without a formula."""
    formula = formula_of(op)
    if formula is None:
        return None
    works = formula.work(*args, result=out, **kwargs)
    works = (works,) if isinstance(works, Work) else works
    if op_name(op) in _REGISTERED:
        works = tuple(replace(work, writes=touches(out, mutated(op, args, kwargs))) for work in works)
    return tuple(_resolved(work, formula.kind, tf32) for work in works)


def mutated(op: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    """Arguments an operator's schema says it writes."""
    if not isinstance(op, OpOverload):
        return ()
    written = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return tuple(tensors_in(written))


def cost_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, out: Any = None, *, tf32: bool = False
) -> Cost | None:
    """The cost of one call from its (fake) arguments and result; None for an operator without a formula.

    `tf32` lets fp32 matrix products run on tensor cores. A convolution's backward is the sum of its two kernels.
    """
    works = works_of(op, args, kwargs or {}, out, tf32=tf32)
    if works is None:
        return None
    return total(work.cost for work in works)


def total(costs: Any) -> Cost:
    """The sum of costs, skipping None; its pipe is that of the largest share."""
    known = [cost for cost in costs if cost is not None]
    if not known:
        return Cost()
    largest = max(known, key=lambda cost: cost.flops)
    return replace(
        largest,
        flops=sum(cost.flops for cost in known),
        read_bytes=sum(cost.read_bytes for cost in known),
        write_bytes=sum(cost.write_bytes for cost in known),
    )


def _resolved(work: Work, kind: str, tf32: bool) -> Work:
    cost = work.cost
    if cost.pipe == "tensor_tf32" and not tf32:
        cost = replace(cost, pipe="cuda_fp32")
    return replace(work, cost=cost, kind=work.kind or kind)
