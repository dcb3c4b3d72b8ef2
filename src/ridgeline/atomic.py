"""Write a file so that a kill or a power cut at any moment leaves the old one or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

PARTIAL = ".partial"  # how the name of an unfinished file ends


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write(file)` on a temporary name beside `path`, flush it to the disk, then rename it. Raises OSError."""
    # the same folder, because a rename is atomic only within one file system; not mkstemp, which ignores the umask
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_partials(folder: Path) -> None:
    """Remove what killed writers left in `folder`; there must be no other writer."""
    for partial in folder.glob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the folder itself, without which a rename may be lost with the power."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
