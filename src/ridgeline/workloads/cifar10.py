"""CIFAR-10 in its official form: the python batches, as a folder or as the .tar.gz they are published in.

Each batch is a pickle of a dictionary whose `data` is a uint8 array [10000, 3072]; a row is an image as [3, 32, 32].
It is read as data: no class is imported and nothing it names is called (`ridgeline.models._unpickle`).
"""

from __future__ import annotations

import math
import pickletools
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import UsageError
from ridgeline.models._unpickle import MAX_OPCODES, PickleRefused, Stub, _Machine

BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
MAX_BATCH_BYTES = 64 << 20  # an official batch has 31 MB
SIDE, CHANNELS = 32, 3


def is_batches(source: Path) -> bool:
    """Whether `source` is a tar archive, or a folder with batches in it or in the one folder the archive unpacks to."""
    if source.is_dir():
        return _batch_folder(source) is not None
    return source.name.lower().endswith((".tar.gz", ".tgz", ".tar"))


def batch_files(source: Path, split: str) -> list[Path]:
    """The files that `read_batches` will read."""
    folder = _batch_folder(source) if source.is_dir() else None
    return [source] if folder is None else [folder / name for name in BATCHES[split]]


def read_batches(source: Path, split: str) -> NDArray[np.uint8]:
    """The images of one split as [N, 32, 32, 3]; raises UsageError for a batch that is missing, damaged or foreign."""
    folder = _batch_folder(source) if source.is_dir() else None
    pickles = _from_archive(source, split) if folder is None else _from_folder(folder, split)
    return np.concatenate([_images(data, name) for name, data in pickles])


def _batch_folder(source: Path) -> Path | None:
    known = [name for names in BATCHES.values() for name in names]
    for folder in (source, source / "cifar-10-batches-py"):
        if any((folder / name).is_file() for name in known):
            return folder
    return None


def _from_folder(folder: Path, split: str) -> Iterator[tuple[str, bytes]]:
    for name in BATCHES[split]:
        path = folder / name
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BATCH_BYTES + 1)
        except OSError as error:
            raise UsageError(f"batch '{path}' cannot be read ({error.strerror}): unpack the archive again") from error
        yield str(path), data


def _from_archive(path: Path, split: str) -> Iterator[tuple[str, bytes]]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in BATCHES[split] and member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None  # of a regular file
                    found[name] = file.read(MAX_BATCH_BYTES + 1)
    # what damage to an archive raises, by where it is
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UsageError(f"archive '{path}' is damaged or no tar archive ({error}): fetch it again") from error
    for name in BATCHES[split]:
        if name not in found:
            raise UsageError(f"archive '{path}' holds no {name}: give cifar-10-python.tar.gz or a folder of images")
        yield f"{path}:{name}", found[name]


def _images(data: bytes, name: str) -> NDArray[np.uint8]:
    row = CHANNELS * SIDE * SIDE
    if len(data) > MAX_BATCH_BYTES:
        raise UsageError(f"batch '{name}' has more than the {MAX_BATCH_BYTES} bytes that are read: it is no batch")
    try:
        shape, pixels = _read_array(data)
    except PickleRefused as refusal:
        raise UsageError(f"batch '{name}' is no CIFAR-10 batch: {refusal}; fetch the archive again") from refusal
    if len(shape) != 2 or shape[1] != row or math.prod(shape) != len(pixels):
        raise UsageError(
            f"batch '{name}' holds an array of shape {list(shape)} in {len(pixels)} bytes where CIFAR-10 has rows of "
            f"{row} bytes: fetch the archive again"
        )
    planes = np.frombuffer(pixels, np.uint8).reshape(-1, CHANNELS, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _read_array(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Shape and bytes of the array under `data`. Raises PickleRefused."""
    machine = _BatchMachine()
    root: object = None
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise PickleRefused(f"its pickle has more than the {MAX_OPCODES} instructions allowed")
            if opcode.name == "STOP":
                root = machine.pop()
                break
            machine.step(opcode.name, argument)
    except PickleRefused:
        raise
    # bytes that are no pickle, and programs that underflow the stack or use a value as what it is not
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise PickleRefused(f"its pickle is malformed ({type(error).__name__})") from error
    array = root.get("data", root.get(b"data")) if isinstance(root, dict) else None
    state = array.attributes.get("array") if isinstance(array, Stub) else None
    match state:
        case (int(), tuple() as shape, Stub("numpy.dtype"), False | 0, str() | bytes() as pixels) if all(
            isinstance(side, int) for side in shape
        ):
            # Python 2 wrote bytes as text, which pickletools reads as latin-1
            return shape, pixels.encode("latin-1") if isinstance(pixels, str) else pixels
    raise PickleRefused("it has no array of bytes under the key 'data'")


class _BatchMachine(_Machine):
    """The machine for checkpoints, keeping in addition a numpy array's state: version, shape, dtype, order, bytes."""

    def step(self, opcode: str, argument: object) -> None:
        target = self.stack[-2] if len(self.stack) > 1 else None
        if opcode == "BUILD" and isinstance(target, Stub) and target.name.endswith(".multiarray._reconstruct"):
            target.attributes = {"array": self.pop()}
        else:
            super().step(opcode, argument)
