"""Read the pickle inside a checkpoint as data: no class is imported, no function is called, whatever the file says.

A pickle is a program for a small stack machine. Python's own machine calls what the file names; this one knows the
handful of constructors that tensors need and turns everything else into an inert `Stub`. Method: the opcode table in
the standard library (`pickletools.genops`) decodes, `_Machine` interprets. Every bound below is far above what a
checkpoint of this project's models needs.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_PICKLE_BYTES = 16 << 20
MAX_OPCODES = 1_000_000
MAX_MODULE_ENTRIES = 100_000
MAX_MODULE_DEPTH = 64
MAX_NAME_LENGTH = 256
MAX_DIMENSIONS = 8


class PickleRefused(ValueError):
    """The pickle is malformed, too large or asks for something no checkpoint needs; one clause, no full stop."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name such as `os.system`: never imported, only compared."""

    name: str


@dataclass(eq=False, slots=True)
class Stub:
    """Stands for an object of class (or result of function) `name`; holds the attributes the file gives it."""

    name: str
    attributes: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Storage:
    """`numel` elements of `dtype` in the archive entry `key`."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A strided view of a storage, in elements; guaranteed to lie inside it and to be no larger."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


STORAGE_DTYPES = {
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


def read_pickle(data: bytes) -> object:
    """The object a pickle describes, made of builtins, TensorRecord, Global and Stub; sets come back as lists.

    Raises PickleRefused.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise PickleRefused(f"its pickle holds {len(data)} bytes, more than the {MAX_PICKLE_BYTES} allowed")
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise PickleRefused(f"its pickle has more than the {MAX_OPCODES} instructions allowed")
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except PickleRefused:
        raise
    # what genops raises on bytes that are no pickle (ValueError), and the machine on a program that underflows its
    # stack, reads an unset memo slot or uses a value as what it is not
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise PickleRefused(f"its pickle is malformed ({type(error).__name__})") from error
    raise PickleRefused("its pickle has no end")


def is_module(value: object) -> bool:
    return isinstance(value, Stub) and isinstance(value.attributes.get("_modules"), dict)


def module_tensors(root: Stub) -> Iterator[tuple[str, TensorRecord]]:
    """Dotted names and tensors of a pickled module tree: parameters, then persistent buffers, then children.

    Raises PickleRefused for a tree deeper or larger than any network: one object may be its own child, or everybody's.
    """
    budget = MAX_MODULE_ENTRIES
    pending = [("", root, 0)]
    while pending:
        prefix, module, depth = pending.pop()
        tables = {name: _entries(module, name) for name in ("_parameters", "_buffers", "_modules")}
        listed = module.attributes.get("_non_persistent_buffers_set")
        listed = listed if isinstance(listed, list) else []
        budget -= 1 + len(listed) + sum(map(len, tables.values()))
        if budget < 0 or depth > MAX_MODULE_DEPTH:
            raise PickleRefused(
                f"its modules hold more than {MAX_MODULE_ENTRIES} entries or nest deeper than {MAX_MODULE_DEPTH} levels"
            )
        transient = {name for name in listed if isinstance(name, str)}
        children = []
        for table, entries in tables.items():
            for name, value in entries.items():
                if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
                    raise PickleRefused("its modules have members without a sensible name")
                if isinstance(value, Stub) and table == "_modules":
                    children.append((f"{prefix}{name}.", value, depth + 1))
                elif isinstance(value, TensorRecord) and not (table == "_buffers" and name in transient):
                    yield prefix + name, value
        pending += reversed(children)


def _entries(module: Stub, table: str) -> dict:
    entries = module.attributes.get(table)
    return entries if isinstance(entries, dict) else {}


class _Machine:
    """Stack, marks and memo of one pickle program."""

    def __init__(self) -> None:
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def pop(self) -> Any:
        # a program may not reach below the innermost mark
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError("empty stack")
        return self.stack.pop()

    def pop_to_mark(self) -> list:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def step(self, opcode: str, argument: object) -> None:
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _OPERATIONS:
            _OPERATIONS[opcode](self, argument)
        else:
            raise PickleRefused(f"its pickle uses {opcode}, which no checkpoint needs")


def _nothing(_machine: _Machine, _argument: object) -> None:
    pass


def _constant(value: object) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(value)


def _fresh(kind: type) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(kind())


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def build(machine: _Machine, _: object) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(items)))

    return build


def _from_mark(make: Callable[[list], object]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make(machine.pop_to_mark()))


def _put(machine: _Machine, slot: Any) -> None:
    machine.memo[len(machine.memo) if slot is None else slot] = machine.stack[-1]


def _get(machine: _Machine, slot: Any) -> None:
    machine.stack.append(machine.memo[slot])


def _global(machine: _Machine, name: Any) -> None:
    module, attribute = name.split(" ", 1)  # genops joins the two with a space
    machine.stack.append(Global(f"{module}.{attribute}"))


def _stack_global(machine: _Machine, _: object) -> None:
    attribute, module = machine.pop(), machine.pop()
    if not isinstance(attribute, str) or not isinstance(module, str):
        raise PickleRefused("its pickle names a class by something that is not text")
    machine.stack.append(Global(f"{module}.{attribute}"))


def _extend(machine: _Machine, items: list) -> None:
    target = machine.stack[-1]
    if isinstance(target, list):
        target += items
    elif not isinstance(target, Stub):  # a list subclass is a stub: what it holds is not needed
        raise PickleRefused(f"its pickle appends to a value of type {type(target).__name__}")


def _set_items(machine: _Machine, items: list) -> None:
    target = machine.stack[-1]
    if isinstance(target, Stub):
        return
    if not isinstance(target, dict) or len(items) % 2:
        raise PickleRefused(f"its pickle sets items of a value of type {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[_key(key)] = value


def _key(key: object) -> object:
    # flat keys only: hashing a deeply nested tuple overflows the C stack, a shared one takes exponential time
    if key is not None and not isinstance(key, str | bytes | int | float | Global | Stub):
        raise PickleRefused(f"its pickle uses a {type(key).__name__} as dictionary key")
    return key


def _pairs(items: list) -> dict:
    if len(items) % 2:
        raise PickleRefused("its pickle builds a dictionary from an odd number of values")
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _reduce(machine: _Machine, _: object) -> None:
    arguments, function = machine.pop(), machine.pop()
    machine.stack.append(_construct(function, arguments))


def _new_object(machine: _Machine, _: object) -> None:
    arguments, kind = machine.pop(), machine.pop()
    machine.stack.append(_construct(kind, arguments))


def _new_object_ex(machine: _Machine, _: object) -> None:
    machine.pop()  # keyword arguments, which nothing on the list below takes
    _new_object(machine, None)


def _old_object(machine: _Machine, _: object) -> None:
    kind, *arguments = machine.pop_to_mark()
    machine.stack.append(_construct(kind, tuple(arguments)))


def _instance(machine: _Machine, name: object) -> None:
    arguments = tuple(machine.pop_to_mark())
    _global(machine, name)
    machine.stack.append(_construct(machine.pop(), arguments))


def _build(machine: _Machine, _: object) -> None:
    state, target = machine.pop(), machine.stack[-1]
    if isinstance(target, Stub):
        # (dict, slots) is the protocol's form for classes with __slots__
        state = state[0] if isinstance(state, tuple) and state else state
        if isinstance(state, dict):
            target.attributes = state
    elif not isinstance(target, dict):  # an OrderedDict's own attributes (`_metadata`) are not needed
        raise PickleRefused(f"its pickle sets the state of a value of type {type(target).__name__}")


def _construct(function: object, arguments: object) -> object:
    """The only place where a name in the file has an effect, and none of the effects is a call of that name."""
    if not isinstance(function, Global) or not isinstance(arguments, tuple):
        raise PickleRefused(f"its pickle calls a value of type {type(function).__name__}")
    name = function.name
    first = arguments[0] if arguments else None
    if name == "collections.OrderedDict" and not arguments:
        return {}
    # the list itself, not a copy: a file may ask for the set of one long list a hundred thousand times
    if name in ("__builtin__.set", "builtins.set", "builtins.frozenset"):
        return first if isinstance(first, list) else []
    if name == "torch.Size" and isinstance(first, tuple):
        return first
    if name == "torch._utils._rebuild_tensor_v2":
        return _tensor(*arguments[:4])
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return first
    return Stub(name)


def _persistent(machine: _Machine, _: object) -> None:
    identity = machine.pop()
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise PickleRefused("its pickle refers to something that is not a tensor storage")
    _, kind, key, _, numel = identity
    dtype = STORAGE_DTYPES.get(kind.name) if isinstance(kind, Global) else None
    if dtype is None:
        named = kind.name if isinstance(kind, Global) else type(kind).__name__
        raise PickleRefused(f"its pickle stores tensors as {named!r:.60}, which is not supported")
    if not isinstance(key, str) or not _is_count(numel):
        raise PickleRefused("its pickle describes a storage without a name or size")
    machine.stack.append(Storage(dtype, key, numel))


def _tensor(storage: object, offset: object, shape: object, stride: object) -> TensorRecord:
    """A checked record: the view lies inside its storage and is no larger (so a stride of 0 cannot inflate it)."""
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise PickleRefused("its pickle describes a tensor without storage, shape or stride")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, (offset, *shape, *stride))):
        raise PickleRefused("its pickle describes a tensor whose shape and stride do not fit together")
    assert isinstance(offset, int)
    numel, last = 1, offset
    for size, step in zip(shape, stride, strict=True):
        numel *= size
        last += max(size - 1, 0) * step
    if numel and (last >= storage.numel or numel > storage.numel):
        raise PickleRefused(
            f"its pickle describes a tensor of shape {list(shape)} outside its {storage.numel} elements"
        )
    return TensorRecord(storage, offset, shape, stride)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


# fmt: off
_LITERALS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8",
})
# fmt: on
_OPERATIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "PROTO": _nothing,
    "FRAME": _nothing,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_LIST": _fresh(list),
    "EMPTY_SET": _fresh(list),
    "EMPTY_DICT": _fresh(dict),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.pop_to_mark() if _at_mark(machine) else machine.pop(),
    "POP_MARK": lambda machine, _: machine.pop_to_mark(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "TUPLE": _from_mark(tuple),
    "LIST": _from_mark(list),
    "FROZENSET": _from_mark(list),
    "DICT": _from_mark(_pairs),
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _put,
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "APPEND": lambda machine, _: _extend(machine, [machine.pop()]),
    "APPENDS": lambda machine, _: _extend(machine, machine.pop_to_mark()),
    "ADDITEMS": lambda machine, _: _extend(machine, machine.pop_to_mark()),
    "SETITEM": lambda machine, _: _set_items(machine, [machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: _set_items(machine, machine.pop_to_mark()),
    "REDUCE": _reduce,
    "NEWOBJ": _new_object,
    "NEWOBJ_EX": _new_object_ex,
    "OBJ": _old_object,
    "INST": _instance,
    "BUILD": _build,
    "BINPERSID": _persistent,
}


def _at_mark(machine: _Machine) -> bool:
    return bool(machine.marks) and machine.marks[-1] == len(machine.stack)
