"""Find images by file, folder or glob, and read them as uint8 RGB.

Files are untrusted: format, size and completeness are read from the header before anything is decoded.
"""

from __future__ import annotations

import glob
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import UsageError

EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
MAX_PIXELS = 2**27  # 134 megapixels, 402 MB decoded
MAX_FILE_BYTES = 8 * MAX_PIXELS  # the same image as 16-bit RGBA without compression


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Image files named by `paths`: files as given, folders and globs expanded in sorted order, each file once.

    A folder yields the images directly inside it, by extension; `**` in a glob descends. An existing file is taken
    whatever its name, so `photo[1].jpg` needs no escaping. Raises UsageError when an entry yields nothing.
    """
    unique: dict[Path, Path] = {}
    for entry in paths:
        for path in _expand(entry):
            unique.setdefault(path.resolve(), path)
    if not unique:
        raise UsageError("no images were named: give files, folders or globs")
    return list(unique.values())


def read_image(path: str | Path) -> NDArray[np.uint8]:
    """The image as contiguous uint8 [height, width, 3] RGB, upright by its EXIF orientation.

    Decoded as OpenCV's colour mode does it: grey is repeated over the channels, alpha is dropped (not composited),
    palettes and CMYK are converted, 16-bit samples keep their high byte. Raises UsageError for whatever is not a
    complete JPEG, PNG, BMP or WebP of at most MAX_PIXELS pixels.
    """
    path = Path(path)
    data, probe = _read_file(path)
    header = _header(path, data, probe)
    if header.width * header.height > MAX_PIXELS:
        raise UsageError(
            f"'{path}' has {header.width} x {header.height} pixels, more than the {MAX_PIXELS} that are read: "
            "scale it down first"
        )
    try:
        bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        bgr = None
    if bgr is None:
        raise UsageError(f"'{path}' is damaged, its {header.format} data cannot be decoded: export it again")
    return np.asarray(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr), np.uint8)


def _expand(entry: str | Path) -> Iterator[Path]:
    path = Path(entry)
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from _images_in(path)
    elif glob.has_magic(str(entry)):
        yield from _matches(str(entry))
    elif path.exists():
        raise UsageError(f"'{entry}' is neither a file nor a folder: name an image file")
    else:
        raise UsageError(f"'{entry}' does not exist: name an image file, a folder or a glob")


def _images_in(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if _looks_like_image(path))
    except OSError as error:
        raise UsageError(f"folder '{folder}' cannot be listed ({error.strerror}): check its permissions") from error
    if not found:
        raise UsageError(f"folder '{folder}' holds no image: files ending in {', '.join(EXTENSIONS)} are looked for")
    return found


def _matches(pattern: str) -> list[Path]:
    found = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if _looks_like_image(path)]
    if not found:
        raise UsageError(f"'{pattern}' matches no image: files ending in {', '.join(EXTENSIONS)} are looked for")
    return found


def _looks_like_image(path: Path) -> bool:
    # "._photo.jpg" is metadata that macOS leaves on foreign disks
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()


@dataclass(frozen=True)
class _Header:
    format: str
    width: int
    height: int
    complete: bool  # the bytes reach the end that the format declares


Probe = Callable[[bytes], _Header]


def _read_file(path: Path) -> tuple[bytes, Probe]:
    if not path.is_file():
        raise UsageError(f"'{path}' is not a file: name an image file")
    try:
        with path.open("rb") as file:
            start = file.read(12)
            if not start:
                raise UsageError(f"'{path}' is empty (0 bytes): copy it again")
            probe = _probe_for(start)
            if probe is None:
                raise UsageError(f"'{path}' is not a JPEG, PNG, BMP or WebP image: convert it to one of them")
            data = start + file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}): check its permissions") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"'{path}' is larger than the {MAX_FILE_BYTES} bytes that are read: scale it down first")
    return data, probe


def _header(path: Path, data: bytes, probe: Probe) -> _Header:
    try:
        header = probe(data)
    except struct.error:  # a field lies beyond the last byte
        header = None
    # OpenCV before 5 decodes a truncated JPEG to a half-grey picture without a word
    if header is None or not header.complete:
        raise UsageError(f"'{path}' is cut short after {len(data)} bytes: copy it again")
    return header


def _probe_for(start: bytes) -> Probe | None:
    if start.startswith(b"\xff\xd8\xff"):
        return _probe_jpeg
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return _probe_png
    if start.startswith(b"BM"):
        return _probe_bmp
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return _probe_webp
    return None


# FF 00 is a data byte, FF D0..D7 restart the entropy decoder, FF FF is filling; all else is a marker
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_END = 0xD9


def _probe_jpeg(data: bytes) -> _Header:
    width = height = 0
    position = 2
    # segment by segment, because the thumbnail inside an EXIF segment has frame and end markers of its own
    while marker := _JPEG_MARKER.search(data, position):
        code, body = data[marker.end() - 1], marker.end()
        if code == _JPEG_END:
            return _Header("JPEG", width, height, complete=True)
        (length,) = struct.unpack_from(">H", data, body)
        if code in _JPEG_FRAMES and not width:
            height, width = struct.unpack_from(">HH", data, body + 3)
        position = body + length
    return _Header("JPEG", width, height, complete=False)


def _probe_png(data: bytes) -> _Header:
    width, height = struct.unpack_from(">II", data, 16)
    kind, position = b"", 8
    while kind != b"IEND" and position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        position += 12 + length
    return _Header("PNG", width, height, complete=kind == b"IEND" and position <= len(data))


def _probe_bmp(data: bytes) -> _Header:
    offset, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes == 12:  # the OS/2 header
        width, height, _, bits = struct.unpack_from("<4H", data, 18)
        compression = 0
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
        height = abs(height)  # negative: rows run top down
    row_bytes = (width * bits + 31) // 32 * 4
    run_length_coded = compression in (1, 2)
    return _Header("BMP", width, height, complete=run_length_coded or offset + row_bytes * height <= len(data))


def _probe_webp(data: bytes) -> _Header:
    riff_bytes, _, chunk = struct.unpack_from("<I4s4s", data, 4)
    if chunk == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        (low, high) = struct.unpack_from("<IH", data, 24)
        width, height = (low & 0xFFFFFF) + 1, (low >> 24 | high << 8) + 1
    return _Header("WebP", width, height, complete=riff_bytes + 8 <= len(data))
