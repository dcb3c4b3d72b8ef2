"""Frozen dataclasses as JSON and back: what a saved file or a report holds, checked on the way in."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as objects and lists; a float that JSON cannot write as its name, "inf"."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"to_plain: {type(value).__name__} has no plain form")


def from_plain(kind: type[T], data: Any) -> T:
    """The value of `kind` (a dataclass, or what its fields may be) that `to_plain` made `data` of.

    Raises ValueError, naming the place, for anything else: data of an untrusted file builds nothing but `kind`.
    """
    return _build(kind, data, getattr(kind, "__name__", str(kind)))


def _build(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, data, where)
    if origin is tuple and isinstance(data, list):
        kinds = (arguments[0],) * len(data) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(data):
            return tuple(_build(k, part, f"{where}[{i}]") for i, (k, part) in enumerate(zip(kinds, data, strict=True)))
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(data, dict):
        return {key: _build(arguments[1], part, f"{where}[{key!r:.40}]") for key, part in data.items()}
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind)
        names = {field.name for field in fields(kind)}
        if data.keys() == names:
            return kind(**{name: _build(hints[name], data[name], f"{where}.{name}") for name in names})
    elif kind is float and (type(data) in (int, float) or data in ("inf", "-inf", "nan")):
        return float(data)
    elif kind in (int, str, bool, type(None)) and type(data) is kind:
        return data
    raise ValueError(f"{where} must be {_spelled(kind)}, got {data!r:.60}")


def _one_of(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    # None and exact types first: an int is no float where both may be
    for kind in kinds:
        if type(data) is kind:
            return data
    reasons = []
    for kind in kinds:
        try:
            return _build(kind, data, where)
        except ValueError as error:
            reasons.append(error)
    raise reasons[0]


def _spelled(kind: Any) -> str:
    if isinstance(kind, type) and is_dataclass(kind):
        return f"an object with {', '.join(field.name for field in fields(kind))}"
    return str(kind) if typing.get_origin(kind) else "null" if kind is type(None) else kind.__name__
