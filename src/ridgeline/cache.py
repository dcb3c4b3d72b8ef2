"""The user's cache folder: small JSON files, written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

from ridgeline.atomic import write_file
from ridgeline.errors import EnvironmentUnusable

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """$RIDGELINE_CACHE_DIR, else `ridgeline` in the cache folder of the operating system. Not created here."""
    override = os.environ.get("RIDGELINE_CACHE_DIR")
    return Path(override).expanduser() if override else _system_cache() / "ridgeline"


def cache_path(*names: str) -> Path:
    """A file below the cache folder. Names such as a GPU's become safe file names; the last one gets `.json`."""
    if not names:
        raise ValueError("cache_path: give at least one name")
    *folders, last = map(_file_name, names)
    return cache_dir().joinpath(*folders, f"{last}.json")


def write_json(path: Path, data: object) -> None:
    """Write `data` atomically: a reader sees the old file or the new one. Raises EnvironmentUnusable if it cannot."""
    text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise EnvironmentUnusable(
            f"cannot write {path} ({error.strerror}): make the folder writable or set RIDGELINE_CACHE_DIR to another"
        ) from error


def read_json(path: Path) -> object | None:
    """What `write_json` wrote; None when the file is absent, and None with a warning when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError covers bad JSON and bad UTF-8
        _log.warning("%s: ignored, unreadable (%s)", path, error)
        return None


def _file_name(name: str) -> str:
    safe = re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")
    if not safe:
        raise ValueError(f"cache_path: {name!r} has no letter or digit to make a file name of")
    return safe


def _system_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification says to ignore a relative path
    return xdg if xdg.is_absolute() else Path.home() / ".cache"
