"""Runs warp-specialised Gluon kernels in plain Python, which Triton's interpreter cannot: what they compute, in order.

    run(launch)                 every program of a launch on CPU tensors; its outputs are written
    run(launch, edit=edit)      of the source of the kernel's module as `edit` changes it

The module of a kernel is executed once more with stand-ins for Gluon: partitions are threads, barriers count arrivals
and bytes as mbarrier does, copies fill boxes with zeros beside the map. Copies arrive when their barrier is waited for,
and leave at `store_wait`; products are computed as late as `warpgroup_mma_wait` allows: each from whatever shared
memory holds by then, so that a buffer handed back or read too early, a wrong phase or a deadlock shows. Not modelled:
layouts, registers, and rounding other than to the dtype of what is stored.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

Edit = Callable[[str], str]

DEADLOCK_S = 20.0  # that a thread waits at most
_NO_NUMBER = 0x7F  # bytes of NaN in every format but bf16, where they are huge


class Number(int):
    """An integer that has the methods of a scalar in a kernel."""

    def to(self, _dtype: Any) -> Number:
        return self


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor"):

    def _operator(self: Number, other: Any, _name: str = f"__{_name}__") -> Any:
        found = getattr(int, _name)(self, other)
        return Number(found) if isinstance(found, int) else found

    setattr(Number, f"__{_name}__", _operator)


class Dtype:
    """What a kernel asks of a dtype."""

    def __init__(self, torch_dtype: torch.dtype) -> None:
        self.torch = torch_dtype
        self.primitive_bitwidth = 8 * torch_dtype.itemsize


class Values(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype: Dtype) -> Values:
        return torch.from_numpy(np.asarray(self)).to(dtype.torch).to(torch.float32).numpy().view(Values)

    def permute(self, order: Sequence[int]) -> Values:
        return self.transpose(order)


class Pointer:
    """A tensor's memory, element by element."""

    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    __radd__ = __add__


class Turns(threading.Condition):
    """Knows of a kernel's partitions who waits for what, so that one can let the others go on as far as they can."""

    def __init__(self) -> None:
        super().__init__()
        self.partitions = 0
        self.resting = 0  # partitions that have ended, or wait here
        self.waits: list[tuple[Barrier, int]] = []  # barriers that others wait for, with the phase that must end

    def yield_(self) -> None:
        """Return when nobody else can go on."""
        with self:
            self.resting += 1
            self.notify_all()
            assert self.wait_for(self._all_rest, DEADLOCK_S), "a partition does not end"
            self.resting -= 1

    def end(self) -> None:
        with self:
            self.resting += 1
            self.notify_all()

    def _all_rest(self) -> bool:
        # whose phase is over goes on as soon as it is its turn
        return self.resting + sum(barrier.phase == phase for barrier, phase in self.waits) >= self.partitions


class Barrier:
    """mbarrier: a phase is over when all have arrived and all expected bytes are there."""

    def __init__(self, shared: Turns) -> None:
        self.shared, self.count, self.pending, self.bytes, self.phase = shared, 0, 0, 0, 0
        self.copies: list[tuple[Callable[[], None], int]] = []  # on their way, and of how many bytes

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def change(self, *, arrivals: int = 0, expected: int = 0) -> None:
        with self.shared:
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
            self.shared.notify_all()

    def bring(self, copy: Callable[[], None], nbytes: int) -> None:
        """A copy that arrives no sooner than someone waits for it."""
        with self.shared:
            self.copies.append((copy, nbytes))
            if any(barrier is self for barrier, _ in self.shared.waits):
                self._arrive()

    def _arrive(self) -> None:
        for copy, nbytes in self.copies:
            copy()
            self.change(expected=-nbytes)
        self.copies.clear()

    def wait(self, phase: int) -> None:
        with self.shared:
            self._arrive()
            self.shared.waits.append((self, phase))
            self.shared.notify_all()
            over = self.shared.wait_for(lambda: self.phase != phase, DEADLOCK_S)
            self.shared.waits.remove((self, phase))
        assert over, "deadlock"


class Shared:
    """A buffer in shared memory by its axes: what it holds is asked for when it is needed."""

    def __init__(self, view: Callable[[], torch.Tensor]) -> None:
        self._view = view
        self.shape = list(self.data.shape)
        self.dtype = Dtype(self.data.dtype)

    @property
    def data(self) -> torch.Tensor:
        return self._view()

    def index(self, at: int) -> Shared:
        return Shared(lambda: self.data[at])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(lambda: self.data.view(list(shape)))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(lambda: self.data.permute(list(order)))

    def load(self, _layout: Any) -> Values:
        return self.data.float().numpy().copy().view(Values)

    def store(self, values: Values) -> None:
        self.data.copy_(torch.from_numpy(np.asarray(values)))

    def _reinterpret(self, dtype: Dtype, shape: Sequence[int], _layout: Any) -> Shared:
        """Only what the kernels do: planes [planes, ..., rows, words] as rows [rows, bytes of all planes]."""

        def rows() -> torch.Tensor:
            planes = self.data.view(-1, shape[0], self.shape[-1]).view(torch.uint8)
            return planes.transpose(0, 1).reshape(shape[0], -1).view(dtype.torch)

        return Shared(rows)


class Product:
    """acc + a b, computed when it is waited for."""

    def __init__(self, a: Callable[[], Any], b: Shared, acc: Any) -> None:
        self.a, self.b, self.acc, self.value = a, b, acc, None

    def compute(self) -> None:
        before = self.acc.value if isinstance(self.acc, Product) else self.acc
        product = self.a().float() @ self.b.data.float()
        self.value = (np.asarray(before) + product.numpy()).view(Values)


class Interpreter:
    """One launch: `gl` and its neighbours as the kernel's module sees them."""

    def __init__(self, launch: Any, edit: Edit) -> None:
        self.launch = launch
        self.turns = Turns()
        self.in_flight: defaultdict[int, deque[Product]] = defaultdict(deque)  # of each thread: of each partition
        self.leaving: defaultdict[int, deque[Callable[[], Any]]] = defaultdict(deque)  # copies, likewise
        self.program = 0
        self.failures: list[BaseException] = []
        self.module = self._module(inspect.getmodule(launch.kernel.fn), edit)

    def run(self) -> None:
        kernel = getattr(self.module, self.launch.kernel.fn.__name__)
        arguments = {name: _argument(value) for name, value in self.launch.arguments.items()}
        (self.programs,) = self.launch.grid
        for program in range(self.programs):
            self.program = program
            kernel(**arguments, **self.launch.constants)

    def _module(self, original: ModuleType | None, edit: Edit = str) -> ModuleType:
        """The kernel's module, its own modules of the same kind included, on stand-ins."""
        assert original is not None and original.__file__ is not None
        made = ModuleType(original.__name__)
        source = edit(Path(original.__file__).read_text(encoding="utf-8"))
        names: dict[str, Any] = {"range": lambda *ends: map(Number, builtins.range(*map(int, ends)))}
        names["__import__"] = self._import
        made.__dict__["__builtins__"] = {**vars(builtins), **names}
        exec(compile(source, original.__file__, "exec"), made.__dict__)
        return made

    def _import(self, name: str, _globals: Any, _locals: Any, wanted: Sequence[str] = (), _level: int = 0) -> Any:
        if name == "triton.experimental":
            return SimpleNamespace(gluon=SimpleNamespace(jit=_same, constexpr_function=_same))
        if name == "triton.experimental.gluon":
            return SimpleNamespace(language=self._language())
        if name.endswith("nvidia.hopper"):
            return self._hopper()
        if name.startswith("ridgeline.") and "gluon" in name:
            return self._module(sys.modules[name])
        if name in ("triton", "triton.language"):
            return SimpleNamespace(
                jit=lambda *fn, **_: fn[0] if fn else _same, language=SimpleNamespace(constexpr=None)
            )
        return __import__(name, _globals, _locals, wanted, _level)

    def _language(self) -> SimpleNamespace:
        return SimpleNamespace(
            constexpr=None, float32=Dtype(torch.float32), int64="barriers",
            float8e5=Dtype(torch.float8_e5m2), float8e4nv=Dtype(torch.float8_e4m3fn),
            program_id=lambda _axis: Number(self.program),
            num_programs=lambda _axis: Number(self.programs),
            num_warps=lambda: self.launch.num_warps,
            cdiv=lambda a, b: Number(-(-a // b)),
            minimum=lambda a, b: Number(min(a, b)),
            static_range=lambda *ends: map(Number, builtins.range(*ends)),
            arange=lambda first, last, **_: np.arange(first, last),
            zeros=lambda shape, _dtype, _layout: np.zeros(shape, np.float32).view(Values),
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialise,
            load=_load, store=_store, split=lambda v: (v[..., 0], v[..., 1]), thread_barrier=lambda: None,
            DotOperandLayout=_layout, NVMMADistributedLayout=_layout, NVMMASharedLayout=_layout,
            SharedLinearLayout=_layout, SliceLayout=_layout,
        )  # fmt: skip

    def _hopper(self) -> SimpleNamespace:
        barrier = SimpleNamespace(
            MBarrierLayout=_layout,
            init=lambda one, count: one.init(count),
            wait=lambda one, phase: one.wait(phase),
            expect=lambda one, nbytes: one.change(arrivals=1, expected=nbytes),
            arrive=lambda one, count=1, pred=True: one.change(arrivals=count) if pred else None,
        )
        copies = SimpleNamespace(
            async_copy_global_to_shared=_copy_in,
            async_copy_shared_to_global=self._copy_out,
            store_wait=self._store_wait,
        )
        return SimpleNamespace(
            mbarrier=barrier, tma=copies, fence_async_shared=lambda: None,
            warpgroup_mma=self._multiply, warpgroup_mma_wait=self._wait,
        )  # fmt: skip

    def _allocate(self, dtype: Any, shape: Sequence[int], _layout: Any) -> Any:
        if dtype == "barriers":
            barriers = [Barrier(self.turns) for _ in builtins.range(shape[0])]
            return SimpleNamespace(index=lambda at: barriers[at])
        size = prod(shape) * dtype.torch.itemsize
        made = torch.full((size,), _NO_NUMBER, dtype=torch.uint8)
        return Shared(lambda: made.view(dtype.torch).view(list(shape)))

    def _specialise(self, partitions: Sequence[tuple[Any, tuple]], _warps: Any, _registers: Any) -> None:
        def guarded(partition: Any, arguments: tuple) -> None:
            try:
                partition(*arguments)
            except BaseException as error:
                self.failures.append(error)
            self.turns.end()

        self.turns.partitions, self.turns.resting = len(partitions), 0
        threads = [threading.Thread(target=guarded, args=one, daemon=True) for one in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        assert not any(self.in_flight.values()), "the kernel ends with products in flight"
        assert not any(self.leaving.values()), "the kernel ends while copies leave"

    def _multiply(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        start = acc if use_acc else np.zeros((a.shape[0], b.shape[1]), np.float32)
        product = Product(lambda: a.data if isinstance(a, Shared) else torch.from_numpy(np.asarray(a)), b, start)
        self.in_flight[threading.get_ident()].append(product)
        return product

    def _wait(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        # whoever may go on does so before the products are read
        self.turns.yield_()
        mine = self.in_flight[threading.get_ident()]
        while len(mine) > num_outstanding:
            mine.popleft().compute()
        done = tuple(one.value if isinstance(one, Product) and one.value is not None else one for one in deps)
        return done[0] if len(done) == 1 else done

    def _copy_out(self, desc: Any, place: Sequence[int], box: Shared) -> None:
        inside, there = _inside(desc, [int(p) for p in place])
        self.leaving[threading.get_ident()].append(lambda: desc.memory[tuple(there)].copy_(box.data[tuple(inside)]))

    def _store_wait(self, pendings: int) -> None:
        # as in `_wait`
        self.turns.yield_()
        mine = self.leaving[threading.get_ident()]
        while len(mine) > pendings:
            mine.popleft()()


def run(launch: Any, *, edit: Edit = str) -> None:
    """Run a launch of a Gluon kernel on CPU tensors. Raises AssertionError for a misuse of barriers, or a deadlock."""
    Interpreter(launch, edit).run()


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
        return Pointer(flat, value.storage_offset())
    if hasattr(value, "block_shape"):
        shape = list(value.block_shape)
        block = SimpleNamespace(shape=shape, nbytes=prod(shape) * value.base.element_size())
        return SimpleNamespace(
            dtype=Dtype(value.base.dtype), layout=None, block_type=block, shape=list(value.shape),
            memory=torch.as_strided(value.base, list(value.shape), list(value.strides), value.base.storage_offset()),
        )  # fmt: skip
    return Number(value) if isinstance(value, int) else value


def _same(function: Any = None, **_options: Any) -> Any:
    """A decorator, with options or without, that changes nothing."""
    return function or _same


def _layout(*_args: Any, **_kwargs: Any) -> None:
    return None


def _inside(desc: Any, place: Sequence[int]) -> tuple[list[slice], list[slice]]:
    """(where in the box, where in memory) the part of a box lies that exists.

    As on a GPU, where anything else is an illegal instruction, a box begins at a multiple of 16 bytes in its rows.
    """
    assert place[-1] * desc.memory.element_size() % 16 == 0, f"a box begins at {place} of {desc.memory.dtype}"
    firsts = [max(0, -p) for p in place]
    lasts = [min(size, whole - p) for size, whole, p in zip(desc.block_type.shape, desc.shape, place, strict=True)]
    inside = [slice(first, max(first, last)) for first, last in zip(firsts, lasts, strict=True)]
    return inside, [slice(one.start + p, one.stop + p) for one, p in zip(inside, place, strict=True)]


def _copy_in(desc: Any, place: Sequence[int], barrier: Barrier, box: Shared) -> None:
    inside, there = _inside(desc, [int(p) for p in place])
    bits = box.data.view(torch.uint8)  # PyTorch fills no FP8

    def arrive() -> None:
        bits.zero_()
        box.data[tuple(inside)] = desc.memory[tuple(there)]

    bits.fill_(_NO_NUMBER)
    barrier.bring(arrive, desc.block_type.nbytes)


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    at = np.asarray(pointer.at)
    mask = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape)
    found = pointer.memory.float().numpy()[np.where(mask, at, 0)]
    return np.where(mask, found, other).astype(np.float32).view(Values)


def _store(pointer: Pointer, values: Any, mask: Any) -> None:
    at, mask = np.broadcast_arrays(np.asarray(pointer.at), mask)
    kept = torch.from_numpy(np.ascontiguousarray(np.broadcast_to(np.asarray(values), at.shape)[mask]))
    pointer.memory[torch.from_numpy(at[mask])] = kept.to(pointer.memory.dtype)
