"""Image sets for training: whatever people have, decoded once to one uint8 [N, H, W, C] array in the cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ridgeline.atomic import write_file
from ridgeline.cache import cache_dir
from ridgeline.errors import UsageError
from ridgeline.workloads import cifar10, image_files

_log = logging.getLogger(__name__)

Images = NDArray[np.uint8]
Split = Literal["train", "test"]
CACHE_VERSION = 1  # to be raised when the same files would be decoded differently


def load_images(
    source: str | Path, *, split: Split = "train", size: int | None = None, skip_bad: bool = False
) -> Images:
    """The images of `source` as uint8 [N, H, W, C], RGB or grey, mapped read-only from the user's cache folder.

    source is a folder of images (those in folders below it too), a zip file of them, CIFAR-10's python batches (folder
    or .tar.gz), an .npz or .npy array, or parquet (a file, or a folder of them). `split` matters where one source holds
    both. `size` crops each image to its central square and resizes it to so many pixels a side.

    The cache is keyed by path, sizes and modification times. Raises UsageError for a source that is absent, damaged
    or holds images of several sizes; it names every damaged image, unless `skip_bad` leaves those out with a warning.
    """
    path = Path(source)
    if not path.exists():
        raise UsageError(f"data '{source}' does not exist: give a folder, .zip, .tar.gz, .npz or .parquet file")
    if size is not None and size < 1:
        raise UsageError(f"size must be at least 1 pixel, got {size}")
    kind, files = _recognise(path, split)
    cached = _cache_file(path, files, f"{split} {size}")
    images = _read_cached(cached)
    if images is None:
        images, damaged = _read(kind, path, files, split, size, skip_bad)
        if damaged:
            # not cached, so that the next run says it again
            _log.warning("%s: skipped %d damaged images: %s", path, len(damaged), ", ".join(damaged))
        else:
            images = _write_cached(cached, images)
    return images


Kind = Literal["batches", "folder", "zip", "array", "parquet"]


def _recognise(path: Path, split: str) -> tuple[Kind, list[Path]]:
    """What `path` is, and the files that will be read."""
    suffix = path.suffix.lower()
    if cifar10.is_batches(path):
        return "batches", cifar10.batch_files(path, split)
    if path.is_dir():
        if images := image_files.folder_images(path):
            return "folder", images
        tables = sorted(path.rglob("*.parquet"))
        # Hugging Face names the files after their split
        if tables := [table for table in tables if table.name.startswith(split)] or tables:
            return "parquet", tables
        raise UsageError(f"folder '{path}' holds neither images, nor CIFAR-10 batches, nor parquet files")
    kinds: dict[str, Kind] = {".zip": "zip", ".npz": "array", ".npy": "array", ".parquet": "parquet"}
    if suffix not in kinds:
        raise UsageError(f"data '{path}' is of no known kind: give a folder, .zip, .tar.gz, .npz or .parquet file")
    return kinds[suffix], [path]


def _read(
    kind: Kind, path: Path, files: list[Path], split: str, size: int | None, skip_bad: bool
) -> tuple[Images, list[str]]:
    if kind in ("batches", "array"):
        images = cifar10.read_batches(path, split) if kind == "batches" else image_files.read_array(path, split)
        return (images if size is None else np.stack([image_files.fit(image, size) for image in images])), []
    entries: Iterator[image_files.Entry]
    if kind == "folder":
        entries = image_files.read_files(files)
    elif kind == "zip":
        entries = image_files.read_zip(path)
    else:
        entries = image_files.read_parquet(files)
    return image_files.decode_images(entries, str(path), size=size, skip_bad=skip_bad)


@dataclass(frozen=True)
class _CacheFile:
    """`path` holds the decoded set; files that match `stale` hold the same set as it was before a change."""

    path: Path
    stale: str


def _cache_file(source: Path, files: list[Path], choices: str) -> _CacheFile:
    try:
        facts = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in (file.stat(),)]
    except OSError as error:
        raise UsageError(f"'{error.filename}' cannot be read ({error.strerror}): check it is there") from error
    what = _digest([str(source.resolve()), choices])
    return _CacheFile(cache_dir() / "images" / f"{what}-{_digest([CACHE_VERSION, facts])}.npy", f"{what}-*.npy")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]


def _read_cached(cached: _CacheFile) -> Images | None:
    try:
        images = np.load(cached.path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s: ignored, unreadable (%s)", cached.path, error)
        return None
    return images if images.dtype == np.uint8 and images.ndim == 4 else None


def _write_cached(cached: _CacheFile, images: Images) -> Images:
    """Store the set and return it mapped; where it cannot be stored, warn and return it as it is."""
    folder = cached.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(cached.path, lambda file: np.save(file, images, allow_pickle=False))
        for old in folder.glob(cached.stale):
            if old != cached.path:
                old.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s: not cached (%s), so the images are decoded again next time", cached.path, error.strerror)
        return images
    return np.load(cached.path, mmap_mode="r", allow_pickle=False)
