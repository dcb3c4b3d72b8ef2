"""Read whole image sets: folders, zip files, numpy arrays and parquet tables, each to one uint8 [N, H, W, C] array.

Everything is untrusted: declared sizes are checked before memory is taken for them, and no pickle is read.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.workloads.images import (
    EXTENSIONS,
    MAX_FILE_BYTES,
    MAX_PIXELS,
    _header,
    _looks_like_image,
    _probe_for,
    read_image,
)

MAX_SET_BYTES = 64 << 30

Image = NDArray[np.uint8]
Entry = tuple[str, Callable[[], Image]]  # a name, and what reads it or raises UsageError


def folder_images(folder: Path) -> list[Path]:
    """The images in `folder` and in the folders below it, sorted by path."""
    return sorted(path for path in folder.rglob("*") if _looks_like_image(path))


def read_files(paths: list[Path]) -> Iterator[Entry]:
    for path in paths:
        yield str(path), partial(read_image, path)


def read_zip(path: Path) -> Iterator[Entry]:
    """The images in a zip file, sorted by name, whatever the folders in it."""
    with _open_zip(path) as archive:
        found = {entry.filename: entry for entry in archive.infolist() if _is_image_name(entry.filename)}
        for name, entry in sorted(found.items()):
            yield f"{path}:{name}", partial(_read_zipped, archive, entry)


def read_parquet(paths: list[Path]) -> Iterator[Entry]:
    """The images of a Hugging Face table: a column of encoded files, or of structs with the file under `bytes`."""
    try:
        # not at the top of the file: it is optional, and takes longer to import than a small set to read
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise EnvironmentUnusable(f"reading '{paths[0]}' needs pyarrow: `pip install pyarrow`") from error
    for path in paths:
        try:
            table = pyarrow.parquet.ParquetFile(path)
            column = _image_column(path, table.schema_arrow.names)
            for batch in table.iter_batches(columns=[column]):
                for row, value in enumerate(batch.column(0).to_pylist()):
                    data = value.get("bytes") if isinstance(value, dict) else value
                    name = f"{path}:{value['path'] if isinstance(value, dict) and value.get('path') else row}"
                    yield name, partial(decode_image, data if isinstance(data, bytes) else b"", name)
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError(f"'{path}' is no readable parquet file ({error}): fetch it again") from error


def read_array(path: Path, split: str) -> Image:
    """The images of an .npz or .npy file, as [N, H, W, C].

    Takes uint8 [N, H, W, C], [N, C, H, W] or [N, H, W] with 1 or 3 channels; of several such arrays in an .npz the one
    with `split` in its name.
    """
    try:
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                shapes = _array_shapes(path, {path.stem: file})
            _one_array(path, shapes, split)
            return to_nhwc(np.load(path, allow_pickle=False))
        with _open_zip(path) as archive:
            files = {name: archive.open(name) for name in archive.namelist() if name.endswith(".npy")}
            name = _one_array(path, _array_shapes(path, files), split)
            with archive.open(name) as file:
                return to_nhwc(np.lib.format.read_array(file, allow_pickle=False))
    # what zipfile and numpy raise on damage, by kind of damage
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise UsageError(f"'{path}' is damaged or no numpy file ({error}): save it again") from error


def decode_images(
    entries: Iterator[Entry], source: str, *, size: int | None, skip_bad: bool
) -> tuple[Image, list[str]]:
    """All entries as one array, each fitted to `size`, and the names of damaged ones, which are left out.

    Raises UsageError when an image is damaged and `skip_bad` is off (all of them are named), when none is left, and
    when they differ in size and `size` is None.
    """
    images: list[Image] = []
    damaged: list[str] = []
    shapes: dict[tuple[int, ...], str] = {}
    for name, read in entries:
        try:
            image = read()
        except UsageError:
            damaged.append(name)
            continue
        image = image if size is None else fit(image, size)
        shapes.setdefault(image.shape, name)
        images.append(image)
        check_bytes(source, (len(images), *image.shape))
    if damaged and not skip_bad:
        raise UsageError(
            f"{len(damaged)} of {len(images) + len(damaged)} images in '{source}' cannot be read: "
            f"{', '.join(damaged)}; repair them or pass --skip-bad"
        )
    if not images:
        raise UsageError(f"'{source}' holds no image that can be read: files ending in {', '.join(EXTENSIONS)} are")
    if len(shapes) > 1:
        (first, first_name), (other, other_name) = list(shapes.items())[:2]
        raise UsageError(
            f"images in '{source}' have {len(shapes)} sizes ({first[1]} x {first[0]} in {first_name}, "
            f"{other[1]} x {other[0]} in {other_name}): pass --size to resize them"
        )
    return np.stack(images), damaged


def decode_image(data: bytes, name: str) -> Image:
    """`images.read_image` of a file that is already in memory; `name` stands in the refusal."""
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"'{name}' is larger than the {MAX_FILE_BYTES} bytes that are read: scale it down first")
    probe = _probe_for(data[:12])
    if probe is None:
        raise UsageError(f"'{name}' is not a JPEG, PNG, BMP or WebP image: convert it to one of them")
    header = _header(Path(name), data, probe)
    if header.width * header.height > MAX_PIXELS:
        raise UsageError(f"'{name}' has more than the {MAX_PIXELS} pixels that are read: scale it down first")
    try:
        bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        bgr = None
    if bgr is None:
        raise UsageError(f"'{name}' is damaged, its {header.format} data cannot be decoded: export it again")
    return np.asarray(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr), np.uint8)


def fit(image: Image, size: int) -> Image:
    """The central square of [H, W, C], resized to `size` pixels a side; an image of that size comes back as it is."""
    height, width, channels = image.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[top : top + side, left : left + side]
    if side == size:
        return square
    # area averaging is right for shrinking, and nearest-neighbour blocks for enlarging
    how = cv2.INTER_AREA if size < side else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(square, (size, size), interpolation=how), np.uint8).reshape(size, size, channels)


def to_nhwc(images: Image) -> Image:
    """[N, H, W, C], [N, C, H, W] or [N, H, W] as contiguous [N, H, W, C]; which one it is was checked before."""
    if images.ndim == 3:
        images = images[..., None]
    elif images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images)


def check_bytes(source: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) > MAX_SET_BYTES:
        raise UsageError(f"'{source}' takes more than the {MAX_SET_BYTES} bytes that are read: pass a smaller --size")


def _array_shapes(path: Path, files: dict[str, IO[bytes]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that can be images, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, file in files.items():
        version = np.lib.format.read_magic(file)
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        channels = shape[1:2] + shape[3:4] if len(shape) == 4 else (1,)
        if dtype == np.uint8 and len(shape) in (3, 4) and {1, 3} & set(channels) and 0 not in shape:
            check_bytes(str(path), shape)
            shapes[name] = shape
    return shapes


def _one_array(path: Path, shapes: dict[str, tuple[int, ...]], split: str) -> str:
    if not shapes:
        raise UsageError(f"'{path}' has no uint8 array [N, H, W, C] with 1 or 3 channels: save the images as one")
    fitting = list(shapes) if len(shapes) == 1 else [name for name in shapes if split in name.lower()]
    if len(fitting) != 1:
        names = ", ".join(name.removesuffix(".npy") for name in shapes)
        raise UsageError(f"'{path}' has {len(shapes)} arrays of images ({names}): save one with '{split}' in its name")
    return fitting[0]


def _image_column(path: Path, names: list[str]) -> str:
    for name in ("img", "image"):
        if name in names:
            return name
    raise UsageError(f"'{path}' has no column named img or image, only {', '.join(names)}: rename the one with images")


def _is_image_name(name: str) -> bool:
    inner = PurePosixPath(name)
    return inner.suffix.lower() in EXTENSIONS and not inner.name.startswith(".")


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, struct.error) as error:
        raise UsageError(f"'{path}' is damaged or no zip file ({error}): fetch it again") from error


def _read_zipped(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Image:
    name = f"{archive.filename}:{entry.filename}"
    # reading stops at the declared size, so that checking it is the whole defence against zip bombs
    if entry.file_size > MAX_FILE_BYTES:
        raise UsageError(f"'{name}' is larger than the {MAX_FILE_BYTES} bytes that are read: scale it down first")
    try:
        data = archive.read(entry)
    # NotImplementedError: an unknown compression; RuntimeError: an encrypted entry
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"'{name}' is damaged ({error}): pack it again") from error
    return decode_image(data, name)
