"""Tuned configs as data: which config of an op was the fastest on one problem, on one GPU, found by `tuning`.

A table is a JSON file of rows, one a line. The shipped ones lie in `tables/<gpu>/<op>.json` of the package and are only
read; the user's own, in the cache folder, are layered over them. `lookup` never searches and never raises: a row of
another version of the kernel, a foreign row or a damaged file is a warning, and the op takes its default.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.atomic import write_file
from ridgeline.cache import cache_dir, cache_path
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError

try:
    import fcntl
except ImportError:  # Windows has none, and no Triton to tune for either
    fcntl = None

_log = logging.getLogger(__name__)

SCHEMA = 1
_MAX_BYTES = 2**25  # some 30,000 rows; a larger file is no table of ours
_SHIPPED = files("ridgeline") / "tables"

Config = TypeVar("Config")
Value = int | float | str  # a bool is an int
_given: ContextVar[Mapping[tuple[str, str, str, str], Row]] = ContextVar("given")  # by identity


@dataclass(frozen=True)
class Row:
    """The fastest config of one op on one problem, with what it was measured against and on."""

    op: str
    source_hash: str  # of the kernel that was tuned
    device: str  # as the driver prints it
    dtype: str  # "fp16"
    key: str  # the problem, as the op spells it: "1x64x80x80 64x3x3 s1 p1 silu res"
    config: Mapping[str, Value]
    seconds: float  # of one launch in a chain of them
    runner_up_seconds: float | None  # None: every other candidate failed
    torch: str
    triton: str
    driver: str
    tried: Mapping[str, float | str]  # config's values, joined -> seconds, or why it was dropped

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What a table holds one row of."""
        return self.op, self.device, self.dtype, self.key


@dataclass(frozen=True)
class TunedTable:
    """The rows of one op on one device that belong to the present version of its kernel."""

    rows: Mapping[tuple[str, str], Row]  # by (dtype, key)

    def row(self, dtype: str, key: str) -> Row | None:
        return self.rows.get((dtype, key))


def lookup(
    op: str, device: str, dtype: str, key: str, *, source_hash: str, table: TunedTable | None = None
) -> dict[str, Value] | None:
    """The tuned config of a problem; None where there is none. `table` defaults to `load`'s."""
    row = (load(op, device, source_hash) if table is None else table).row(dtype, key)
    given = _given.get({}).get((op, device, dtype, key))
    if row is None and given is not None and given.source_hash == source_hash:
        row = given
    return None if row is None else dict(row.config)


@contextmanager
def using(rows: Iterable[Row]) -> Iterator[None]:
    """Inside, `lookup` falls back on these rows, of a saved file, for problems that are in no table."""
    token = _given.set({row.identity: row for row in rows})
    try:
        yield
    finally:
        _given.reset(token)


@cache
def load(op: str, device: str, source_hash: str) -> TunedTable:
    """The shipped table with the user's own over it; read once a process, and again after `merge` or `clear`."""
    return read_table(op, device, source_hash, shipped=_SHIPPED, user=_user_folder())


def read_table(op: str, device: str, source_hash: str, *, shipped: Traversable, user: Traversable) -> TunedTable:
    """The same from two given folders, uncached."""
    folder, file = _file(op, device).parts[-2:]
    rows: dict[tuple[str, str], Row] = {}
    stale: dict[tuple[str, str], Row] = {}
    foreign = 0
    for row in (*_read(shipped / folder / file), *_read(user / folder / file)):
        if (row.op, row.device) != (op, device):
            foreign += 1
        else:
            (rows if row.source_hash == source_hash else stale)[row.dtype, row.key] = row
    if foreign:
        _log.warning("%s: %d tuned rows ignored, they are not for %s", op, foreign, device)
    outdated = stale.keys() - rows.keys()
    if outdated:
        _log.warning(
            "%s: %d tuned rows for %s ignored, they belong to another version of the kernel: run `ridgeline tune`",
            op,
            len(outdated),
            device,
        )
    return TunedTable(rows)


def build(kind: type[Config], config: Mapping[str, Value]) -> Config | None:
    """`kind(**config)` for a dataclass of plain values; None with one warning where names or types are not its own."""
    types = {field.name: getattr(field.type, "__name__", field.type) for field in fields(kind)}  # pyright: ignore
    if {name: type(value).__name__ for name, value in config.items()} != types:
        _warn_once(f"tuned config {dict(config)} ignored: {kind.__module__}.{kind.__name__} has fields {types}")
        return None
    return kind(**config)


@cache
def source_hash(path: Path) -> str:
    """12 hex digits over what decides a config's machine code: the @triton.jit functions of an op's file, its own and
    those that it imports from a file beside it, with the jit functions and module-level constants that they name there.

    Docstrings, empty lines, whole-line comments and trailing spaces do not count, and no host code does: a table
    outlives changes of candidates, checks and launches. What host code makes of a config needs no hash either, because
    `build` compares its fields and the op's `is_valid` their values before a row is used.
    """
    pending = [place for name in _definitions(path) if _on_device(*(place := _resolved(path, name)))]
    if not pending:
        raise ValueError(f"source_hash: {path} has and imports no function decorated with jit")
    texts: dict[tuple[str, str], str] = {}
    while pending:
        file, name = _resolved(*pending.pop())
        if (file.name, name) in texts or name not in _definitions(file):
            continue
        node, text = _definitions(file)[name]
        # a kernel calls no host function: a name that it shares with one is a local variable's
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom) and not _on_device(file, name):
            continue
        texts[file.name, name] = text
        pending += [(file, used.id) for used in ast.walk(node) if isinstance(used, ast.Name)]
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()[:12]


# --- writing -----------------------------------------------------------------------------------------------------


def merge(rows: Iterable[Row]) -> None:
    """Put rows into the user's tables, each in place of an older row of the same problem.

    Locked and atomic: of two processes that merge at once neither loses a row, and a reader sees whole files.
    Raises EnvironmentUnusable where the cache folder cannot be written.
    """
    groups = _by_file(rows)
    with _locked():
        for path, group in groups.items():
            _write(path, {row.identity: row for row in (*_read(path), *group)}.values())
    load.cache_clear()


def clear(*, op: str | None = None, device: str | None = None) -> tuple[Path, ...]:
    """Delete the user's tables, all or those of one op or device; returns the files deleted."""
    doomed = [Path(str(path)) for path in _tables(_user_folder(), op=op, device=device)]
    if doomed:
        with _locked():
            for path in doomed:
                path.unlink(missing_ok=True)
        load.cache_clear()
    return tuple(doomed)


def export(folder: Path, source_hashes: Mapping[str, str], *, device: str | None = None) -> tuple[Path, ...]:
    """Write the rows of present kernels, the user's over the shipped, below `folder` in the layout of the shipped ones.

    `source_hashes` are by op; rows of any other op or version are left out. Returns the files written.
    Raises UsageError where `folder` takes none.
    """
    rows: dict[tuple[str, str, str, str], Row] = {}
    for root in (_SHIPPED, _user_folder()):
        for path in _tables(root, device=device):
            rows |= {row.identity: row for row in _read(path) if row.source_hash == source_hashes.get(row.op)}
    written = {folder.joinpath(*path.parts[-2:]): group for path, group in _by_file(rows.values()).items()}
    for path, group in written.items():
        _write(path, group, refusal=UsageError)  # a path that the user gave
    return tuple(written)


@dataclass(frozen=True)
class TableFile:
    """One table on disk. A damaged one has no rows."""

    origin: str  # "shipped" or "user"
    path: str
    rows: tuple[Row, ...]

    def line(self, source_hashes: Mapping[str, str]) -> str:
        """Plain text: where, for which GPU and op, how many rows and how many of them are outdated."""
        what = sorted({(row.op, row.device) for row in self.rows})
        names = ", ".join(f"{op} on {device}" for op, device in what) or "unreadable"
        outdated = sum(row.source_hash != source_hashes.get(row.op, row.source_hash) for row in self.rows)
        note = f", {outdated} outdated" if outdated else ""
        return f"{self.origin:<7}  {names}: {len(self.rows)} problems{note}  {self.path}"


def ls() -> tuple[TableFile, ...]:
    """Every table, the shipped ones first."""
    roots = {"shipped": _SHIPPED, "user": _user_folder()}
    return tuple(TableFile(origin, str(path), _read(path)) for origin, root in roots.items() for path in _tables(root))


def _user_folder() -> Path:
    return cache_dir() / "tuned"


def _file(op: str, device: str) -> Path:
    """The user's table; its last two parts name the shipped one too."""
    return cache_path("tuned", device, op)


def _by_file(rows: Iterable[Row]) -> dict[Path, list[Row]]:
    groups: dict[Path, list[Row]] = {}
    for row in rows:
        groups.setdefault(_file(row.op, row.device), []).append(row)
    return groups


def _tables(root: Traversable, *, op: str | None = None, device: str | None = None) -> Iterator[Traversable]:
    folder, file = _file(op or "any", device or "any").parts[-2:]
    for gpu in sorted(root.iterdir(), key=lambda entry: entry.name) if root.is_dir() else ():
        if gpu.is_dir() and (device is None or gpu.name == folder):
            for path in sorted(gpu.iterdir(), key=lambda entry: entry.name):
                if path.name.endswith(".json") and (op is None or path.name == file):
                    yield path


@contextmanager
def _locked() -> Iterator[None]:
    """Alone among all processes that write tables. The system drops the lock of a process that dies."""
    if fcntl is None:
        raise EnvironmentUnusable("tuned tables need file locks, which this system lacks: tune on Linux")
    folder = _user_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise EnvironmentUnusable(
            f"cannot write {folder} ({error.strerror}): make it writable or set RIDGELINE_CACHE_DIR to another folder"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, rows: Iterable[Row], *, refusal: type[RidgelineError] = EnvironmentUnusable) -> None:
    ordered = sorted(rows, key=lambda row: row.identity)
    lines = [json.dumps(asdict(row), allow_nan=False) for row in ordered]
    text = f'{{"schema": {SCHEMA}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise refusal(f"cannot write {path} ({error.strerror}): make the folder writable") from error


# --- reading -----------------------------------------------------------------------------------------------------


def _read(path: Traversable) -> tuple[Row, ...]:
    """The valid rows of a file; none, and a warning, when it is no table; none when it is absent."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        table = json.loads(data)
        if not isinstance(table, dict) or table.get("schema") != SCHEMA or not isinstance(table.get("rows"), list):
            raise ValueError(f"not a table of schema {SCHEMA}")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        _log.warning("%s: ignored, no readable table (%s)", path, error)
        return ()
    good, bad = [], []
    for entry in table["rows"]:
        wrong = _complaint(entry)
        if wrong is None:
            good.append(Row(**entry))
        else:
            bad.append(wrong)
    if bad:
        _log.warning("%s: %d of %d rows ignored, the first because %s", path, len(bad), len(table["rows"]), bad[0])
    return tuple(good)


_TEXTS = ("op", "source_hash", "device", "dtype", "key", "torch", "triton", "driver")


def _complaint(entry: Any) -> str | None:
    """Why this is no row; None if it is one."""
    names = {field.name for field in fields(Row)}
    if not isinstance(entry, dict) or entry.keys() != names:
        return f"it must be an object with {', '.join(sorted(names))}"
    for name in _TEXTS:
        # a letter or digit, because file names are made of them
        if not isinstance(entry[name], str) or not any(c.isascii() and c.isalnum() for c in entry[name]):
            return f"{name} must be a string with a letter or digit"
    if not _is_duration(entry["seconds"]) or not (
        entry["runner_up_seconds"] is None or _is_duration(entry["runner_up_seconds"])
    ):
        return "seconds and runner_up_seconds must be positive numbers"
    config, tried = entry["config"], entry["tried"]
    if not isinstance(config, dict) or not config or not all(_is_plain(v) for v in config.values()):
        return "config must be an object of plain values"
    if not isinstance(tried, dict) or not all(isinstance(v, str) or _is_duration(v) for v in tried.values()):
        return "tried must be an object of seconds and reasons"
    return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


# --- hashing -----------------------------------------------------------------------------------------------------


@cache
def _definitions(path: Path) -> dict[str, tuple[ast.stmt, str]]:
    """What a file's module level defines or imports, by name, with its normalised text."""
    source = path.read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        told = _docstring_lines(node)
        kept = (
            lines[number - 1].rstrip() for number in range(first, (node.end_lineno or first) + 1) if number not in told
        )
        text = "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))
        found |= dict.fromkeys(_names(node), (node, text))
    return found


def _resolved(file: Path, name: str) -> tuple[Path, str]:
    """Where a name is defined: only a file beside this one is the kernel's own source."""
    while name in _definitions(file) and isinstance(node := _definitions(file)[name][0], ast.ImportFrom):
        beside = file.parent / f"{(node.module or '').rpartition('.')[2]}.py"
        if not beside.is_file():
            break
        file, name = beside, next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return file, name


def _docstring_lines(node: ast.stmt) -> range:
    if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _on_device(file: Path, name: str) -> bool:
    """Whether this is a function that Triton compiles, or evaluates while it compiles."""
    node, _ = _definitions(file)[name]
    decorators = (getattr(d, "func", d) for d in getattr(node, "decorator_list", ()))
    names = {getattr(d, "attr", getattr(d, "id", "")) for d in decorators}
    return not names.isdisjoint(("jit", "constexpr_function"))
