"""Triton's interpreter, three times as fast: the same checks, without building types anew for every value.

Of the interpreter's time most went into Python objects: each sum of integers was also computed in int64 and compared
with the bounds of int32, for an assertion that is left out unless `debug` is on, which it never is; each value got a
tuple of sizes and a type for it; sizes of operands were compared one by one; and each call of a helper looked through
all of `triton.language` for what to replace. Here that comparison is off, types are made once for a shape, equal shapes
are seen at once, and the language is looked through once and replaced once a launch.

These are private parts of Triton, so they are replaced for the version they were read in, and any other runs as it is.
Remove this file when that version is no longer what the constraints pin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

VERSION = "3.6."


def install() -> None:
    """Replaces what is slow, for the rest of the process. Does nothing under another Triton."""
    if not triton.__version__.startswith(VERSION):
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _remembering_dtypes(interpreter._get_np_dtype)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._patch_builtin = _remembering_builtins
    semantic.TritonSemantic.broadcast_impl_value = _sparing_equal_shapes(semantic.TritonSemantic.broadcast_impl_value)
    core.block_type.__init__ = _remembering_blocks(core.block_type.__init__)
    core.tensor.__init__ = _remembering_shapes(core.tensor.__init__)


def _remembering_dtypes(slow: Any) -> Any:
    known: dict[str, np.dtype] = {}

    def numpy_dtype(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in known:
            known[name] = slow(kind)
        return known[name]

    return numpy_dtype


def _once_a_launch(slow: Any) -> Any:
    """A launch replaces the language and restores it at its end; helpers within find it replaced.

    Which of its two modules is replaced depends on what the function's globals name: a helper of Triton's own names
    `core`, a kernel names `tl`.
    """
    covered: set[str] = set()
    modules: dict[Any, set[str]] = {}

    def patch(function: Any) -> Any:
        if function not in modules:
            values = [value for value in function.__globals__.values() if value is tl or value is core]
            modules[function] = {module.__name__ for module in values}
        if covered and modules[function] <= covered:
            return interpreter._LangPatchScope()
        launch, scope = not covered, slow(function)
        covered.update(modules[function])
        if launch:
            restore = scope.restore
            scope.restore = lambda: (restore(), covered.clear())
        return scope

    return patch


_BUILTINS: dict[Any, dict[str, Any]] = {}


def _remembering_builtins(package: Any, builder: Any, scope: Any) -> None:
    """Replaces what is built in by the function behind its decorator, which only checks that it is told who calls."""
    if package not in _BUILTINS:
        members = {name: getattr(package, name) for name in dir(package)}
        _BUILTINS[package] = {name: _told(f, builder) for name, f in members.items() if core.is_builtin(f)}
    for name, function in _BUILTINS[package].items():
        scope.set_attr(package, name, function)


def _told(builtin: Any, builder: Any) -> Any:
    function, caller = getattr(builtin, "__wrapped__", builtin), semantic.TritonSemantic(builder)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = caller
        return function(*args, **kwargs)

    return call


def _sparing_equal_shapes(slow: Any) -> Any:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and a.shape.values == b.shape.values):
            return lhs, rhs
        return slow(self, lhs, rhs)

    return broadcast


def _remembering_blocks(slow: Any) -> Any:
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        if key not in known:
            slow(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def _remembering_shapes(slow: Any) -> Any:
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if type.name not in known:
            slow(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    return init
