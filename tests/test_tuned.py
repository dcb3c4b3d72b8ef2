"""Tuned tables: what is found, what is refused without harm, and that nothing is lost in writing."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from ridgeline import tuned
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.tuned import Row, build, lookup, merge, read_table, source_hash

GPU = "NVIDIA H200"
ROW = Row(
    op="conv2d_act",
    source_hash="0123456789ab",
    device=GPU,
    dtype="fp16",
    key="1x64x80x80 64x3x3 s1 p1 silu res",
    config={"block_m": 64, "block_n": 32, "num_warps": 4},
    seconds=3.1e-6,
    runner_up_seconds=3.2e-6,
    torch="2.11.0",
    triton="3.6.0",
    driver="580.159",
    tried={"64 32 4": 3.1e-6, "128 64 8": 3.2e-6, "256 64 8": "wrong: RMS error 0.2"},
)
HASHES = {"conv2d_act": ROW.source_hash}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder and no shipped tables; `load` starts afresh before and after."""
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "shipped")
    tuned.load.cache_clear()
    yield tmp_path / "cache" / "tuned"
    tuned.load.cache_clear()


def write(folder: Path, *rows: Row, device: str = "nvidia-h200", text: str | None = None) -> Path:
    path = folder / device / "conv2d_act.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or json.dumps({"schema": tuned.SCHEMA, "rows": [asdict(row) for row in rows]}))
    return path


def config_of(row: Row, **changes: str):
    wanted = {"op": row.op, "device": row.device, "dtype": row.dtype, "key": row.key, **changes}
    return lookup(**wanted, source_hash=ROW.source_hash)


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# --- looking up --------------------------------------------------------------------------------------------------


def test_found_by_op_device_dtype_and_key(cache, caplog):
    merge([ROW])
    assert config_of(ROW) == ROW.config
    assert list(config_of(ROW)) == ["block_m", "block_n", "num_warps"]  # the order that `tried` is spelled in
    for other in ({"op": "other"}, {"device": "NVIDIA L4"}, {"dtype": "bf16"}, {"key": "2x64x80x80"}):
        assert config_of(ROW, **other) is None
    assert warnings(caplog) == []


def test_changing_what_was_found_changes_no_later_lookup(cache):
    merge([ROW])
    config_of(ROW)["block_m"] = 1
    assert config_of(ROW) == ROW.config


def test_the_users_rows_lie_over_the_shipped_ones(tmp_path):
    other = replace(ROW, key="other")
    write(tmp_path / "shipped", replace(ROW, config={"block_m": 16}), other)
    write(tmp_path / "user", ROW)
    table = read_table("conv2d_act", GPU, ROW.source_hash, shipped=tmp_path / "shipped", user=tmp_path / "user")
    assert table.row("fp16", ROW.key) == ROW
    assert table.row("fp16", "other") == other


def test_an_outdated_row_of_the_user_does_not_hide_a_shipped_one(cache, caplog):
    write(cache.parents[1] / "shipped", ROW)
    merge([replace(ROW, source_hash="old", config={"block_m": 16})])
    assert config_of(ROW) == ROW.config
    assert warnings(caplog) == []


def test_rows_of_another_version_are_ignored_with_one_warning(cache, caplog):
    merge([replace(ROW, source_hash="old"), replace(ROW, source_hash="old", key="other")])
    for _ in range(3):
        assert config_of(ROW) is None
    (message,) = warnings(caplog)
    assert "2 tuned rows for NVIDIA H200" in message and "another version" in message


def test_loaded_once_until_rows_are_merged(cache):
    merge([ROW])
    assert config_of(ROW) is not None
    write(cache, replace(ROW, config={"block_m": 16}))
    assert config_of(ROW) == ROW.config  # behind the back of this process
    merge([replace(ROW, key="other")])
    assert config_of(ROW) == {"block_m": 16}


def test_an_explicit_table_is_asked_alone(cache, tmp_path):
    merge([ROW])
    empty = read_table("conv2d_act", GPU, ROW.source_hash, shipped=tmp_path / "no", user=tmp_path / "neither")
    assert lookup("conv2d_act", GPU, "fp16", ROW.key, source_hash=ROW.source_hash, table=empty) is None


WHOLE = json.dumps({"schema": tuned.SCHEMA, "rows": [asdict(ROW)]})


@pytest.mark.parametrize(
    "text",
    [
        WHOLE[:-40],
        "\x00\x01\x02",
        "null",
        "[1, 2]",
        "[" * 200_000,
        "9" * 5000,
        '{"rows": []}',
        WHOLE.replace('"schema": 1', '"schema": 2'),
        '{"schema": 1, "rows": {"a": 1}}',
        WHOLE + " " * tuned._MAX_BYTES,
    ],
    ids=["truncated", "binary", "null", "list", "nested", "digits", "no-schema", "later-schema", "rows", "huge"],
)
def test_a_damaged_table_is_a_warning(cache, caplog, text):
    path = write(cache, text=text)
    assert config_of(ROW) is None
    (message,) = warnings(caplog)
    assert str(path) in message
    merge([ROW])  # and can be written anew
    assert config_of(ROW) == ROW.config


def test_a_folder_or_bad_utf8_in_place_of_a_table_is_a_warning(cache, caplog):
    write(cache).write_bytes(b'{"schema": 1, "rows": ["\xff"]}')
    assert config_of(ROW) is None
    tuned.load.cache_clear()
    (cache / "nvidia-h200" / "conv2d_act.json").unlink()
    (cache / "nvidia-h200" / "conv2d_act.json").mkdir()
    assert config_of(ROW) is None
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seconds": "3"}, "seconds"),
        ({"seconds": -1.0}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"runner_up_seconds": float("inf")}, "seconds"),
        ({"config": []}, "config"),
        ({"config": {}}, "config"),
        ({"config": {"block_m": [64]}}, "config"),
        ({"config": {"block_m": float("nan")}}, "config"),
        ({"tried": {"64": None}}, "tried"),
        ({"device": None}, "device"),
        ({"op": "//"}, "op"),
        ({"extra": 1}, "object with"),
    ],
)
def test_a_bad_row_is_left_out_and_the_others_stay(cache, caplog, change, complaint):
    rows = [{**asdict(ROW), **change}, asdict(replace(ROW, key="good")), 7]
    write(cache, text=json.dumps({"schema": tuned.SCHEMA, "rows": rows}))
    assert config_of(ROW) is None
    assert config_of(ROW, key="good") == ROW.config
    (message,) = warnings(caplog)
    assert "2 of 3 rows" in message and complaint in message


def test_rows_of_a_foreign_device_are_ignored(cache, caplog):
    write(cache, replace(ROW, device="NVIDIA L4"), replace(ROW, op="other"), ROW)
    assert config_of(ROW) == ROW.config
    (message,) = warnings(caplog)
    assert "2 tuned rows ignored" in message


@dataclass(frozen=True)
class Config:
    block_m: int
    act: str


@pytest.mark.parametrize(
    "config", [{"block_m": 64}, {"block_m": 64, "act": "silu", "x": 1}, {"block_m": "64", "act": "silu"}]
)
def test_build_refuses_what_is_not_the_dataclass(caplog, config):
    tuned._warn_once.cache_clear()
    assert build(Config, {"block_m": 64, "act": "silu"}) == Config(64, "silu")
    assert build(Config, {"block_m": True, "act": "silu"}) is None
    for _ in range(3):
        assert build(Config, config) is None
    assert len(warnings(caplog)) == 2


# --- writing -----------------------------------------------------------------------------------------------------


def test_one_row_a_line_sorted_and_stable(cache):
    rows = [replace(ROW, key=key, dtype=dtype) for key in ("b", "a") for dtype in ("fp32", "bf16")]
    merge(rows)
    path = cache / "nvidia-h200" / "conv2d_act.json"
    text = path.read_text()
    lines = [json.loads(line.rstrip(",")) for line in text.splitlines()[1:-1]]
    assert [(line["dtype"], line["key"]) for line in lines] == [
        ("bf16", "a"),
        ("bf16", "b"),
        ("fp32", "a"),
        ("fp32", "b"),
    ]
    merge(reversed(rows))
    assert path.read_text() == text
    merge([replace(ROW, key="a", dtype="fp32", seconds=1.0)])
    changed = set(path.read_text().splitlines()) ^ set(text.splitlines())
    assert len(changed) == 2
    assert [p.name for p in path.parent.iterdir()] == ["conv2d_act.json"]


def test_each_device_and_op_has_its_file(cache):
    merge([ROW, replace(ROW, device="NVIDIA L4"), replace(ROW, op="other")])
    assert sorted(str(p.relative_to(cache)) for p in cache.glob("*/*")) == [
        "nvidia-h200/conv2d_act.json",
        "nvidia-h200/other.json",
        "nvidia-l4/conv2d_act.json",
    ]


def test_two_devices_that_share_a_file_name_keep_their_rows(cache, tmp_path):
    twin = replace(ROW, device="NVIDIA-H200", config={"block_m": 16})
    merge([ROW])
    merge([twin])
    assert config_of(ROW) == ROW.config
    assert config_of(twin) == twin.config


def merge_rows(name: str) -> None:
    for i in range(12):
        merge([replace(ROW, key=f"{name} {i}")])


def test_processes_that_merge_at_once_lose_nothing(cache):
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=merge_rows, args=(name,)) for name in "abcd"]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    (table,) = tuned.ls()
    assert {row.key for row in table.rows} == {f"{name} {i}" for name in "abcd" for i in range(12)}


def test_a_kill_while_writing_leaves_the_old_table(cache, monkeypatch):
    merge([ROW])

    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        merge([replace(ROW, key="other")])
    (table,) = tuned.ls()
    assert table.rows == (ROW,)
    assert [p.name for p in Path(table.path).parent.iterdir()] == ["conv2d_act.json"]


def test_a_folder_that_cannot_be_written_is_refused(cache):
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(EnvironmentUnusable, match="RIDGELINE_CACHE_DIR"):
        merge([ROW])


# --- the user's hand on it ---------------------------------------------------------------------------------------


def test_ls_names_every_table_and_its_outdated_rows(cache):
    write(cache.parents[1] / "shipped", ROW, replace(ROW, key="other", source_hash="old"))
    write(cache, text="{", device="nvidia-l4")
    shipped, user = tuned.ls()
    assert (shipped.origin, len(shipped.rows), user.origin, user.rows) == ("shipped", 2, "user", ())
    assert shipped.line(HASHES).startswith("shipped  conv2d_act on NVIDIA H200: 2 problems, 1 outdated  /")
    assert "unreadable: 0 problems" in user.line(HASHES)


def test_clear_deletes_the_users_tables_alone(cache):
    kept = write(cache.parents[1] / "shipped", ROW)
    merge([replace(ROW, device="NVIDIA L4", config={"block_m": 1}), ROW, replace(ROW, op="other")])
    assert config_of(ROW, device="NVIDIA L4") == {"block_m": 1}
    assert [p.parent.name for p in tuned.clear(device="NVIDIA L4")] == ["nvidia-l4"]
    assert config_of(ROW, device="NVIDIA L4") is None
    assert [p.name for p in tuned.clear(op="conv2d_act")] == ["conv2d_act.json"]
    assert [p.name for p in tuned.clear()] == ["other.json"]
    assert tuned.clear() == ()
    assert kept.exists()


def test_export_writes_what_the_package_ships(cache, tmp_path):
    """The user's rows over the shipped ones, without what belongs to another version or an unknown op."""
    old = replace(ROW, key="old", source_hash="old")
    write(cache.parents[1] / "shipped", replace(ROW, seconds=1.0), replace(ROW, key="shipped"))
    merge([ROW, old, replace(ROW, op="unknown"), replace(ROW, device="NVIDIA L4")])
    written = tuned.export(tmp_path / "out", HASHES)
    assert [str(p.relative_to(tmp_path / "out")) for p in written] == [
        "nvidia-h200/conv2d_act.json",
        "nvidia-l4/conv2d_act.json",
    ]
    table = read_table("conv2d_act", GPU, ROW.source_hash, shipped=tmp_path / "out", user=tmp_path / "no")
    assert table.row("fp16", ROW.key) == ROW
    assert {key for _, key in table.rows} == {ROW.key, "shipped"}
    assert len(tuned.export(tmp_path / "one", HASHES, device="NVIDIA L4")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/nvidia-h200/conv2d_act\.json \(Not a directory\)"):
        tuned.export(tmp_path / "file", HASHES)


# --- the hash ----------------------------------------------------------------------------------------------------

KERNEL = '''"""A kernel."""
import triton.language as tl
from pieces import TAPS, activate, host
from elsewhere import unrelated

WIDTH = tl.constexpr(4)
DEPTH = tl.constexpr(TAPS)
SAMPLES = (1, 2)

@triton.jit
def kernel(x, N: tl.constexpr):
    y = activate(x)  # why

    host = y + WIDTH
    tl.store(x, host + DEPTH)

def candidates():
    return SAMPLES, host()
'''
PIECES = """import triton

TAPS = 9
MOST = 2

@triton.jit
def activate(x):
    return _shift(x)

@triton.jit
def _shift(x):
    return x + 1

def host():
    return MOST
"""
# an op whose kernel stands in the file beside it, as does host code
APART = """from kernel import candidates, kernel
from pieces import host

def plan():
    return kernel, candidates, host
"""


def hash_of(folder: Path, kernel: str = KERNEL, pieces: str = PIECES, *, of: str = "kernel") -> str:
    folder.mkdir()
    (folder / "pieces.py").write_text(pieces)
    (folder / "kernel.py").write_text(kernel)
    (folder / "apart.py").write_text(APART)
    return source_hash(folder / f"{of}.py")


@pytest.mark.parametrize(
    ("old", "new", "where", "same"),
    [
        ("host + DEPTH)", "host + DEPTH)   ", "kernel", True),
        ("    tl.store", "    # a comment\n\n    tl.store", "kernel", True),
        ("return MOST", "return -MOST", "pieces", True),
        ("MOST = 2", "MOST = 3", "pieces", True),
        ("TAPS = 9", "TAPS = 8", "pieces", False),
        ("    return x + 1", '    """Moved by one."""\n    return x + 1', "pieces", True),
        ('"""A kernel."""', '"""A better kernel."""', "kernel", True),
        ("return SAMPLES, ", "return SAMPLES[:1], ", "kernel", True),
        ("SAMPLES = (1, 2)", "SAMPLES = (1, 2, 3)", "kernel", True),
        ("y + WIDTH", "y - WIDTH", "kernel", False),
        ("constexpr(4)", "constexpr(8)", "kernel", False),
        ("@triton.jit\ndef kernel", "@triton.jit(noinline=True)\ndef kernel", "kernel", False),
        ("return _shift(x)", "return x", "pieces", False),
        ("x + 1", "x + 2", "pieces", False),
    ],
)
@pytest.mark.parametrize("of", ["kernel", "apart"])
def test_the_hash_follows_the_machine_code(tmp_path, old, new, where, same, of):
    """Of an op whose kernel stands in its file, and of one that imports it."""
    text = {"kernel": KERNEL, "pieces": PIECES}
    assert text[where].count(old) == 1
    changed = hash_of(tmp_path / "b", **{**text, where: text[where].replace(old, new)}, of=of)
    assert (changed == hash_of(tmp_path / "a", of=of)) == same
    assert len(changed) == 12 and int(changed, 16) >= 0


def test_a_file_without_a_kernel_has_no_hash(tmp_path):
    with pytest.raises(ValueError, match="has and imports no function decorated with jit"):
        hash_of(tmp_path / "a", kernel="x = 1\n", pieces="")


def test_shipped_kernels_depend_on_their_shared_pieces(tmp_path):
    folder = Path(tuned.__file__).parent / "kernels"
    text = {path.name: path.read_text() for path in folder.glob("*.py")}
    edits = {"device": ("tl.sigmoid(z)", "tl.exp(z)"), "host": ("pitch >= c", "pitch > c")}
    for side, (old, new) in edits.items():
        assert text["_nhwc.py"].count(old) == 1
        (tmp_path / side).mkdir()
        for name, content in text.items():
            (tmp_path / side / name).write_text(content.replace(old, new) if name == "_nhwc.py" else content)
    shipped = source_hash(folder / "conv2d_act.py")
    assert source_hash(tmp_path / "device" / "conv2d_act.py") != shipped
    assert source_hash(tmp_path / "host" / "conv2d_act.py") == shipped
