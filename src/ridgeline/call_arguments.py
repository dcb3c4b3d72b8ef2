"""The arguments of a recorded call by their position: shapes and bytes of tensors, numbers and lists out of text."""

from __future__ import annotations

from math import prod

from ridgeline.trace import Call, Dims

ITEM_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "long": 8, "long int": 8, "int": 4, "short": 2, "short int": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip


class Unknown(Exception):
    """An argument that somebody needs is not in the trace."""


class Arguments:
    """One call's arguments. `element_bytes` is the size of the members of its lists, whose type a trace lacks."""

    def __init__(self, call: Call, element_bytes: int = 0) -> None:
        self.call, self.element_bytes = call, element_bytes

    def has(self, place: int) -> bool:
        """Whether a tensor stands there."""
        dtypes = self.call.dtypes
        return place < min(len(dtypes), len(self.call.shapes)) and dtypes[place] in ITEM_BYTES

    def dims(self, place: int) -> Dims:
        """Shape of a tensor; () is a scalar one. Raises Unknown where none stands."""
        if not self.has(place):
            raise Unknown
        return self.call.shapes[place]

    def item(self, place: int) -> int:
        """Bytes an element."""
        if not self.has(place):
            raise Unknown
        return ITEM_BYTES[self.call.dtypes[place]]

    def bytes(self, *places: int) -> int:
        """Bytes of the tensors at these places, absent ones 0; a broadcast (stride 0) axis counts once."""
        return sum(self._extent(place) for place in places if self.has(place))

    def all_bytes(self) -> int:
        """Bytes of every tensor, those in lists too."""
        lists = sum(self.list_bytes(index) for index in range(len(self.call.lists)))
        return self.bytes(*range(len(self.call.shapes))) + lists

    def list_numel(self, index: int) -> int:
        """Elements of the `index`-th list that has tensors."""
        return sum(map(prod, self.call.lists[index]))

    def list_bytes(self, index: int) -> int:
        if not self.element_bytes:
            raise Unknown
        return self.list_numel(index) * self.element_bytes

    def numbers(self, place: int) -> tuple[int, ...]:
        """`[1, 1]` or `2` as integers."""
        text = self.call.concrete[place].strip("[]")
        return tuple(int(float(part)) for part in text.split(",") if part.strip())

    def factors(self, place: int) -> tuple[float, ...]:
        """`[2., 2.]` as floats."""
        return tuple(float(part) for part in self.call.concrete[place].strip("[]").split(",") if part.strip())

    def flag(self, place: int) -> bool:
        return self.call.concrete[place] == "True"

    def flags(self, place: int) -> tuple[bool, ...]:
        return tuple(part.strip() == "True" for part in self.call.concrete[place].strip("[]").split(","))

    def _extent(self, place: int) -> int:
        dims = self.call.shapes[place]
        strides = self.call.strides[place] if place < len(self.call.strides) else ()
        if len(strides) != len(dims):
            return prod(dims) * self.item(place)
        if 0 in dims:
            return 0
        elements = span = 1
        for size, stride in zip(dims, strides, strict=True):
            if stride:
                elements *= size
                span += (size - 1) * stride
        return min(elements, span) * self.item(place)


def by(dims: Dims) -> str:
    """`by((1, 64, 80, 80)) == "1x64x80x80"`."""
    return "x".join(map(str, dims)) or "scalar"
