"""The cache folder: where it is, and that a file is whole or not there."""

import json
import os
import sys
from pathlib import Path

import pytest

from ridgeline.cache import cache_dir, cache_path, read_json, write_json
from ridgeline.errors import EnvironmentUnusable


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_override_wins(folder):
    assert cache_dir() == folder
    assert not folder.exists()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x/cache"}, "/x/cache/ridgeline"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/ridgeline"),
        ("linux", {}, "/home/u/.cache/ridgeline"),
        ("darwin", {"XDG_CACHE_HOME": "/x/cache"}, "/home/u/Library/Caches/ridgeline"),
        ("win32", {"LOCALAPPDATA": "/c/local"}, "/c/local/ridgeline"),
        ("win32", {}, "/home/u/AppData/Local/ridgeline"),
        ("linux", {"RIDGELINE_CACHE_DIR": ""}, "/home/u/.cache/ridgeline"),
    ],
)
def test_the_system_folder_by_platform(monkeypatch, platform, variables, expected):
    for name in ("RIDGELINE_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/u"))
    assert cache_dir() == Path(expected)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("ceilings", "NVIDIA H100 80GB HBM3"), "ceilings/nvidia-h100-80gb-hbm3.json"),
        (("../../etc", "pass/wd"), "etc/pass-wd.json"),
    ],
)
def test_names_become_safe_files(folder, names, expected):
    assert cache_path(*names) == folder / expected


@pytest.mark.parametrize("names", [(), ("..",), ("ceilings", "//")])
def test_names_without_a_file_name_are_refused(folder, names):
    with pytest.raises(ValueError, match="cache_path"):
        cache_path(*names)


def test_round_trip_and_replacement(folder):
    path = cache_path("a", "b")
    assert read_json(path) is None
    for data in ({"µ": [1, 2.5, None]}, {"second": True}):
        write_json(path, data)
        assert read_json(path) == data
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": object()}])
def test_what_is_not_json_leaves_the_old_file(folder, data):
    path = cache_path("b")
    write_json(path, 1)
    with pytest.raises((TypeError, ValueError)):
        write_json(path, data)
    assert read_json(path) == 1


def test_a_kill_while_writing_leaves_the_old_file(folder, monkeypatch):
    path = cache_path("b")
    write_json(path, "old")

    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, "new")
    assert [p.name for p in folder.iterdir()] == ["b.json"]
    assert json.loads(path.read_text()) == "old"


@pytest.mark.parametrize("content", [b"", b'{"half": ', b"\xff\xfe"])
def test_a_damaged_file_is_ignored_with_a_warning(folder, content, caplog):
    path = cache_path("b")
    write_json(path, 1)
    path.write_bytes(content)
    assert read_json(path) is None
    assert "unreadable" in caplog.text


def test_an_impossible_folder_names_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(EnvironmentUnusable, match="set RIDGELINE_CACHE_DIR"):
        write_json(cache_path("b"), 1)
