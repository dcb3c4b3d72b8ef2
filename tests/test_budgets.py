"""The source keeps its own rules: sizes, and things that may not appear. Every check is first shown to fail."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted(SOURCE.rglob("*.py"))

MAX_FILE_LINES = 400
MAX_PARAMETERS = 8
MAX_FUNCTION_LINES = 60  # without the docstring

Violations = Iterator[tuple[int, str]]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def short_file(source: Source) -> Violations:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield lines, f"{lines} lines, the budget is {MAX_FILE_LINES}: split the file"


def short_functions(source: Source) -> Violations:
    for function in _functions(source):
        first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
        lines = (function.end_lineno or 0) - first.lineno + 1
        if lines > MAX_FUNCTION_LINES and not _is_kernel(function):
            yield function.lineno, f"{function.name} is {lines} lines long, the budget is {MAX_FUNCTION_LINES}"


def few_parameters(source: Source) -> Violations:
    for function in _functions(source):
        a = function.args
        names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        public = not function.name.startswith("_") or function.name == "__init__"
        if public and len(names) > MAX_PARAMETERS and not _is_kernel(function):
            yield function.lineno, f"{function.name} has {len(names)} parameters: use a frozen dataclass"


def no_print(source: Source) -> Violations:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print: return the text, cli.py prints it"


def narrow_except(source: Source) -> Violations:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in caught:
                # cleaning up and passing on is not catching
                cleanup = _last_name(kind) == "BaseException" and _ends_in_bare_raise(node)
                if kind is None or (_last_name(kind) in ("Exception", "BaseException") and not cleanup):
                    yield node.lineno, "catches everything: name the exception"
        elif isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
            for kind in node.args:
                if _last_name(kind) in ("Exception", "BaseException"):
                    yield node.lineno, "suppresses everything: name the exception"


def one_clock(source: Source) -> Violations:
    clocks = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "do_bench"}
    for node in ast.walk(source.tree):
        if _last_name(node) in clocks:
            yield node.lineno, f"{_last_name(node)}: timing.py is the only clock"
        elif isinstance(node, ast.Call) and _last_name(node.func) == "Event":
            yield node.lineno, "Event(…): timing.py is the only clock"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield node.lineno, "from time import …: timing.py is the only clock"


def no_environment(source: Source) -> Violations:
    for node in ast.walk(source.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) and node.module == "os" else []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = [node.attr]
        for name in names:
            if name in ("environ", "environb", "getenv", "putenv", "unsetenv"):
                yield node.lineno, f"os.{name}: take an argument; recipe.py and cache.py read the environment"


def no_unit_factors(source: Source) -> Violations:
    """1e9, 1e12 and 1e15 in any spelling: 1e+9, 1_000_000_000, 10**9."""
    for node in ast.walk(source.tree):
        value = None
        if isinstance(node, ast.Constant):
            value = node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base, power = (getattr(side, "value", None) for side in (node.left, node.right))
            if base in (10, 1000) and power in range(1, 16):
                value = base**power
        if isinstance(value, int | float) and value in (10**9, 10**12, 10**15):
            yield node.lineno, f"{ast.unparse(node)}: powers of ten belong to units.py"


def no_lazy_own_imports(source: Source) -> Violations:
    for function in _functions(source):
        for node in ast.walk(function):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            if relative or any(module.split(".")[0] == "ridgeline" for module in modules):
                yield node.lineno, f"{function.name} imports its own package: the layer is wrong"


def nothing_unfinished(source: Source) -> Violations:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
            yield token.start[0], f"{token.string.strip()}: finish it or leave it out"
    for node in ast.walk(source.tree):
        raised = node.exc if isinstance(node, ast.Raise) else None
        if _last_name(getattr(raised, "func", raised)) == "NotImplementedError":
            yield node.lineno, "raises NotImplementedError: finish it or leave it out"


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS))


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated with `triton.jit`: pointers, strides and tile sizes are its parameters by nature."""
    return any(_last_name(getattr(d, "func", d)) == "jit" for d in function.decorator_list)


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _ends_in_bare_raise(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None


def _nothing_is_exempt(path: str) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    check: Callable[[Source], Violations]
    bad: tuple[str, ...]  # each must be caught
    good: tuple[str, ...]  # none may be
    exempt: Callable[[str], bool] = _nothing_is_exempt


def _body(lines: int, docstring_lines: int = 0) -> str:
    docstring = '    """' + "doc\n    " * docstring_lines + '"""\n' if docstring_lines else ""
    return "def f():\n" + docstring + "    x = 1\n" * lines


RULES = (
    Rule(short_file, bad=("x = 1\n" * 401,), good=("x = 1\n" * 400,)),
    Rule(
        short_functions,
        bad=(_body(61), _body(61, docstring_lines=9), "class A:\n" + re.sub("(?m)^", "    ", _body(61))),
        good=(_body(60), _body(60, docstring_lines=50), "@triton.jit\n" + _body(90)),
    ),
    Rule(
        few_parameters,
        bad=(
            "def f(a, b, c, d, e, f, g, h, i): ...",
            "def f(a, b, c, d, *, e, f, g, h, i): ...",
            "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...",
        ),
        good=(
            "def f(a, b, c, d, e, f, g, h): ...",
            "class A:\n    def m(self, a, b, c, d, e, f, g, h): ...",
            "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): ...",
            "def _f(a, b, c, d, e, f, g, h, i): ...",
        ),
        # an operator's schema is flat: torch.library takes no dataclass
        exempt=lambda path: path.startswith("kernels/"),
    ),
    Rule(
        no_print,
        bad=("print('x')", "def f():\n    print()"),
        good=("log.info('print(x)')  # print(x)", "tl.device_print('x', x)"),
        exempt=lambda path: path == "cli.py" or path.startswith("cli_"),
    ),
    Rule(
        narrow_except,
        bad=(
            "try:\n    f()\nexcept:\n    pass",
            "try:\n    f()\nexcept Exception:\n    pass",
            "try:\n    f()\nexcept (ValueError, BaseException) as e:\n    pass",
            "try:\n    f()\nexcept Exception:\n    undo()\n    raise",
            "try:\n    f()\nexcept BaseException as e:\n    raise ValueError from e",
            "with contextlib.suppress(Exception):\n    f()",
        ),
        good=(
            "try:\n    f()\nexcept (ImportError, OSError):\n    pass",
            "try:\n    f()\nexcept BaseException:\n    undo()\n    raise",
            "class MyException(Exception): ...",
        ),
    ),
    Rule(
        one_clock,
        bad=(
            "import time\nt = time.perf_counter()",
            "from time import time",
            "start = torch.cuda.Event(enable_timing=True)",
            "triton.testing.do_bench(f)",
        ),
        good=("import time\nstamp = time.strftime('%Y')", "class KernelEvent: ...\nKernelEvent()"),
        exempt=lambda path: path in ("timing.py", "step_clock.py"),
    ),
    Rule(
        no_environment,
        bad=("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"),
        good=("import os\nos.replace('a', 'b')", "from os import PathLike"),
        # sass.py and profile_run.py read no setting: they hand their own environment, a variable changed, to a child
        exempt=lambda path: path in ("recipe.py", "cache.py", "sass.py", "profile_run.py"),
    ),
    Rule(
        no_unit_factors,
        bad=(
            "x = 1e9",
            "x = 1E+12",
            "x = y / 1e15",
            "x = 1_000_000_000",
            "x = 10**9",
            "x = 1000**4",
            "x = 1000000000.0",
        ),
        good=("x = 1e-9", "x = 1e6", "x = 1e30", "x = 2**30", "x = 10**6", "x = 0x1e9", "s = '1e9'", "x = 1024"),
        exempt=lambda path: path == "units.py",
    ),
    Rule(
        no_lazy_own_imports,
        bad=(
            "def f():\n    from ridgeline import cost",
            "def f():\n    import ridgeline.cost as cost",
            "class A:\n    def m(self):\n        from . import cost",
        ),
        good=("from ridgeline import cost", "def f():\n    import torch", "import ridgelines"),
    ),
    Rule(
        nothing_unfinished,
        bad=(
            "# TODO: later",
            '"""FIXME"""',
            "def f():\n    raise NotImplementedError",
            "raise NotImplementedError('x')",
        ),
        good=("todo = 1  # what is to do", "TODOS = ()", "try:\n    f()\nexcept NotImplementedError:\n    g()"),
    ),
)
NAMES = [rule.check.__name__ for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_each_rule_can_fail(rule):
    for snippet in rule.bad:
        assert list(rule.check(Source(snippet))), f"not caught: {snippet}"
    for snippet in rule.good:
        assert not list(rule.check(Source(snippet))), f"wrongly caught: {snippet}"


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_source_keeps_the_rule(rule):
    found = [
        f"{name}:{line}: {message}"
        for path in FILES
        if not rule.exempt(name := path.relative_to(SOURCE / "ridgeline").as_posix())
        for line, message in rule.check(Source(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_the_source_is_found():
    assert {"units.py", "errors.py"} <= {path.name for path in FILES}
