"""CostMode: the dispatch mode that records what any eager PyTorch code asks the device to do."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ridgeline.cost._cost import Cost
from ridgeline.cost._formula import VIEW, Gemm, Touch, Work, dims, touches
from ridgeline.cost._modules import ModulePaths, in_backward
from ridgeline.cost._table import formula_of, mutated, op_name, total, works_of
from ridgeline.cost.norm import batch_norm_trains

# Calls that ask about a tensor or mark the profiler's timeline; no kernel runs.
_QUIET_NAMESPACES = ("prim", "profiler")


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One operand of a call: which storage, and how much of it. Storage numbers are unique within one CostMode."""

    storage: int
    numel: int
    bytes: int
    dtype: torch.dtype
    storage_bytes: int

    @property
    def whole(self) -> bool:
        """The operand covers all of its storage."""
        return self.bytes >= self.storage_bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel PyTorch would launch; a convolution's backward is two. `cost` is None where there is no formula."""

    op: str  # "aten.convolution"
    module: str  # dotted path of the innermost nn.Module
    phase: str  # "forward", "backward" or "optimizer"
    kind: str  # "conv3x3", "conv1x1", "depthwise", "matmul", "norm", "pointwise", …
    shape: str  # "1x64x80x80 * 64x64x3x3 s1 p1"
    cost: Cost | None
    gemm: Gemm | None
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    foldable: bool = False  # a batch norm with fixed statistics: an affine map that a convolution can absorb


class CostMode(TorchDispatchMode):
    """Records a `Call` for each kernel of the code under it: real, meta or fake tensors, any grad or autocast mode.

    Enter it inside a FakeTensorMode, not around one. `module` is the root that paths start from; other modules are
    filed under their class name. `tf32` lets fp32 matrix products run on tensor cores.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module | None = None, *, tf32: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.tf32 = tf32
        self._paths = ModulePaths(module)
        self._phase: str | None = None
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        # A weak reference keeps a freed storage's address from being given to another.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def unknown(self) -> tuple[tuple[str, int], ...]:
        """Operators without a formula and how often each ran, the most frequent first."""
        return tuple(Counter(call.op for call in self.calls if call.cost is None).most_common())

    @property
    def total(self) -> Cost:
        """The sum of all known costs: a lower bound while `unknown` is not empty."""
        return total(call.cost for call in self.calls)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Files the calls under it as `name`. Without it, autograd and optimizer hooks tell the phases apart."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def storage_number(self, tensor: Tensor) -> int:
        """The number that `TensorUse.storage` carries for this tensor's memory."""
        if tensor.layout is not torch.strided:
            return -id(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage), len(self._storages)
        return self._storages[storage._cdata][1]

    def __enter__(self) -> CostMode:
        if self._depth == 0:
            self._paths.start()
            self._handles = [
                register_optimizer_step_pre_hook(lambda *_args: self._set_phase("optimizer")),
                register_optimizer_step_post_hook(lambda *_args: self._set_phase(None)),
            ]
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._depth -= 1
        if self._depth == 0:
            self._paths.stop()
            for handle in self._handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if func.namespace in _QUIET_NAMESPACES:
                return func(*args, **kwargs)
            # Under inference_mode composite operators (linear, conv2d, …) arrive whole: take them apart here.
            if formula_of(func) is None and _is_composite(func):
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        out = func(*args, **kwargs)
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        path = self._paths.current()
        formula = formula_of(func)
        if formula is None and not isinstance(func, HigherOrderOperator) and func.is_view:
            return
        if formula is not None and formula.kind == VIEW:
            return
        name = op_name(func)
        works = works_of(func, args, kwargs, out, tf32=self.tf32)
        if works is None:
            reads, writes = touches(args, kwargs), touches(out, mutated(func, args, kwargs))
            if not reads and not writes:
                return
            call = self._call(name, path, Work(Cost(), reads, writes, kind="other"), known=False)
            self.calls.append(call)
            return
        foldable = "batch_norm" in name and "backward" not in name and not batch_norm_trains(name, args)
        self.calls.extend(self._call(name, path, work, foldable=foldable) for work in works)

    def _call(self, name: str, path: str, work: Work, *, known: bool = True, foldable: bool = False) -> Call:
        return Call(
            op=name,
            module=path,
            phase=self._phase_of(work.kind),
            kind=work.kind,
            shape=work.shape or _shape(work),
            cost=work.cost if known else None,
            gemm=work.gemm,
            inputs=tuple(self._use(touch) for touch in work.reads),
            outputs=tuple(self._use(touch) for touch in work.writes),
            foldable=foldable,
        )

    def _use(self, touch: Touch) -> TensorUse:
        tensor = touch.tensor
        storage_bytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else touch.bytes
        return TensorUse(self.storage_number(tensor), tensor.numel(), touch.bytes, tensor.dtype, storage_bytes)

    def _phase_of(self, kind: str) -> str:
        if self._phase is not None:
            return self._phase
        if in_backward():
            return "backward"
        return "optimizer" if kind == "optimizer" else "forward"

    def _set_phase(self, name: str | None) -> None:
        self._phase = name


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    # Asked of the C++ dispatcher: Python decompositions would also take apart silu_backward and upsample_nearest2d.
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _shape(work: Work) -> str:
    """The operands of at least one axis, or the result where nothing is read: "1x64x80x80, 1x64x80x80"."""
    operands = [touch.tensor for touch in work.reads if touch.tensor.dim()] or [touch.tensor for touch in work.writes]
    shown = [dims(*tensor.shape) for tensor in operands[:3]]
    return ", ".join(shown) + (f" and {len(operands) - 3} more" if len(operands) > 3 else "")
