"""find_images and read_image: what is found, what every pixel format becomes, what is refused and how."""

import base64
import os
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest

from ridgeline.errors import UsageError
from ridgeline.workloads.images import MAX_PIXELS, find_images, read_image

# An 8 x 8 CMYK JPEG of (0, 255, 255, 0): red
CMYK_RED = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwPFxgWFBgSFBUU"
    "/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABQAAQAAAAAAAAAAAAAAAAAAAAn/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oADgRDAE0AWQBLAAA/AFTFUKoqb//Z"
)
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6  # PNG colour types


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, colour: int, rows: bytes, *, bits: int = 8, before_data: bytes = b"") -> bytes:
    """A PNG from rows that each start with filter byte 0."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    data = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + before_data + data + png_chunk(b"IEND", b"")


def encoded(extension: str, image_rgb: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(extension, image_rgb[..., ::-1], list(options))[1].tobytes()


@pytest.fixture
def ramp() -> np.ndarray:
    """30 x 40 RGB, all channels different, no two corners alike."""
    y, x = np.mgrid[:30, :40]
    return np.dstack([x * 6, y * 8, 255 - x * 3]).astype(np.uint8)


def read_bytes(folder: Path, data: bytes, name: str = "x.img") -> np.ndarray:
    path = folder / name
    path.write_bytes(data)
    return read_image(path)


def refusal(folder: Path, data: bytes) -> str:
    with pytest.raises(UsageError) as refused:
        read_bytes(folder, data)
    sentence = str(refused.value)
    assert "x.img" in sentence and "\n" not in sentence
    return sentence


# --- finding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def album(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.PNG", "c.webp", "notes.txt", "._b.jpg", "deep/d.bmp", "deep/e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "none").mkdir()
    return tmp_path


def names(paths: list[Path], album: Path) -> list[str]:
    return [str(path.relative_to(album)) for path in paths]


def test_folder_is_sorted_and_filtered_by_extension(album):
    assert names(find_images([album]), album) == ["a.PNG", "b.jpg", "c.webp"]


def test_globs_expand_here_and_below(album):
    assert names(find_images([f"{album}/?.jpg"]), album) == ["b.jpg"]
    assert names(find_images([f"{album}/**/*"]), album) == ["a.PNG", "b.jpg", "c.webp", "deep/d.bmp"]


def test_mix_keeps_order_and_drops_duplicates(album):
    os.symlink(album / "a.PNG", album / "z.png")
    mixed = [album / "deep/d.bmp", f"{album}/c.*", album, str(album / "deep/../b.jpg"), album / "z.png"]
    assert names(find_images(mixed), album) == ["deep/d.bmp", "c.webp", "a.PNG", "b.jpg"]


def test_named_file_is_taken_whatever_its_name(album):
    bracketed = album / "photo[1].dat"
    bracketed.touch()
    assert find_images([bracketed]) == [bracketed]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("none", "holds no image"),
        ("*.tif", "matches no image"),
        ("*.txt", "matches no image"),
        ("absent.jpg", "does not exist"),
        ("pipe", "neither a file nor a folder"),
    ],
)
def test_entry_that_yields_nothing_is_refused(album, entry, says):
    os.mkfifo(album / "pipe")
    with pytest.raises(UsageError, match=says) as refused:
        find_images([album / "b.jpg", f"{album}/{entry}"])
    assert entry in str(refused.value)


def test_no_paths_at_all_is_refused():
    with pytest.raises(UsageError, match="no images were named"):
        find_images([])


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [".png", ".bmp", ".webp"])
def test_lossless_formats_return_the_pixels(tmp_path, ramp, extension):
    options = (cv2.IMWRITE_WEBP_QUALITY, 101) if extension == ".webp" else ()  # above 100: lossless
    image = read_bytes(tmp_path, encoded(extension, ramp, *options))
    assert image.dtype == np.uint8 and image.flags.c_contiguous
    np.testing.assert_array_equal(image, ramp)


@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)])
def test_jpeg_is_rgb_and_equal_to_opencv(tmp_path, ramp, options):
    image = read_bytes(tmp_path, encoded(".jpg", ramp, *options))
    np.testing.assert_array_equal(image, cv2.imread(str(tmp_path / "x.img"), cv2.IMREAD_COLOR)[..., ::-1])
    assert np.abs(image.astype(int) - ramp).mean() < 4  # in this channel order


def test_lossy_webp_is_close(tmp_path, ramp):
    image = read_bytes(tmp_path, encoded(".webp", ramp, cv2.IMWRITE_WEBP_QUALITY, 90))
    assert np.abs(image.astype(int) - ramp).mean() < 6


def test_file_name_outside_ascii(tmp_path, ramp):
    np.testing.assert_array_equal(read_bytes(tmp_path, encoded(".png", ramp), "Straße 街 🚌.png"), ramp)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(png(2, 1, GREY, b"\0\x0a\xc8"), [[10] * 3, [200] * 3], id="grey"),
        pytest.param(png(2, 1, GREY, b"\0\x40", bits=1), [[0] * 3, [255] * 3], id="one bit"),
        pytest.param(png(2, 1, GREY_ALPHA, b"\0\x0a\x00\xc8\xff"), [[10] * 3, [200] * 3], id="grey, alpha dropped"),
        pytest.param(
            png(2, 1, RGBA, b"\0\x01\x02\x03\x00\x04\x05\x06\x80"), [[1, 2, 3], [4, 5, 6]], id="alpha dropped"
        ),
        pytest.param(
            png(2, 1, RGB, b"\0\x12\xff\x34\x00\x56\x80\x00\x7f\xff\xff\x01\x00", bits=16),
            [[0x12, 0x34, 0x56], [0x00, 0xFF, 0x01]],
            id="16 bits keep the high byte",
        ),
        pytest.param(
            png(2, 1, PALETTE, b"\0\x01\x00", before_data=png_chunk(b"PLTE", b"\xff\x00\x00\x00\xff\x07")),
            [[0, 255, 7], [255, 0, 0]],
            id="palette",
        ),
    ],
)
def test_png_pixel_formats_become_rgb(tmp_path, data, expected):
    np.testing.assert_array_equal(read_bytes(tmp_path, data), [expected])


def test_cmyk_jpeg_becomes_rgb(tmp_path):
    image = read_bytes(tmp_path, CMYK_RED)
    assert image.shape == (8, 8, 3)
    assert np.abs(image.astype(int) - (255, 0, 0)).max() <= 2


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 50), (50, 1)])
@pytest.mark.parametrize("extension", [".png", ".jpg", ".bmp", ".webp"])
def test_one_pixel_sides(tmp_path, extension, height, width):
    image = read_bytes(tmp_path, encoded(extension, np.full((height, width, 3), 90, np.uint8)))
    assert image.shape == (height, width, 3)
    assert np.abs(image.astype(int) - 90).max() <= 2


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_exif_orientation_is_applied(tmp_path, ramp, orientation, turns):
    tag = struct.pack("<HHII", 0x0112, 3, 1, orientation)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + tag + struct.pack("<I", 0)
    jpeg = encoded(".jpg", ramp)
    rotated = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]
    np.testing.assert_array_equal(read_bytes(tmp_path, rotated), np.rot90(read_bytes(tmp_path, jpeg), turns))


def test_markers_inside_a_jpeg_segment_do_not_count(tmp_path, ramp):
    # what an EXIF thumbnail looks like: a frame header of another size, then an end marker
    thumbnail = b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", 60000, 60000) + b"\xff\xd9"
    jpeg = encoded(".jpg", ramp)
    nested = jpeg[:2] + b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + jpeg[2:]
    assert read_bytes(tmp_path, nested).shape == ramp.shape
    assert "cut short" in refusal(tmp_path, nested[:-40])


def test_bytes_after_the_end_are_ignored(tmp_path, ramp):
    for extension in (".jpg", ".png", ".bmp"):
        assert read_bytes(tmp_path, encoded(extension, ramp) + b"tail" * 9).shape == ramp.shape


# --- refusing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [".jpg", ".png", ".bmp", ".webp"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.9])
def test_truncated_file_is_refused(tmp_path, ramp, extension, kept):
    data = encoded(extension, np.tile(ramp, (4, 4, 1)))
    data = data[: max(int(len(data) * kept), 16)]
    assert f"cut short after {len(data)} bytes" in refusal(tmp_path, data)


@pytest.mark.parametrize(
    "data", [b"\xff\xd8\xff", b"BM", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"], ids=["jpeg", "bmp", "png", "webp"]
)
def test_signature_alone_is_refused(tmp_path, data):
    assert "cut short" in refusal(tmp_path, data)


def test_damaged_data_is_refused(tmp_path, ramp):
    png_data = bytearray(encoded(".png", ramp))
    png_data[60:70] = b"\x11" * 10
    assert "damaged" in refusal(tmp_path, bytes(png_data))
    assert "damaged" in refusal(tmp_path, b"\xff\xd8\xff\xfe\x00\x04hi\xff\xd9")  # a JPEG without a frame
    assert "damaged" in refusal(tmp_path, png(0, 4, RGB, b""))


def test_other_files_are_refused(tmp_path):
    assert "empty (0 bytes)" in refusal(tmp_path, b"")
    for data in (b"hello", b"GIF89a" + b"\0" * 40, b"\0" * 64, b"RIFF\x24\0\0\0WAVEfmt "):
        assert "not a JPEG, PNG, BMP or WebP" in refusal(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        png(100_000, 100_000, RGB, b""),
        png(2**31 - 1, 1, GREY, b"\0"),
        b"\xff\xd8\xff\xc0\x00\x11\x08" + struct.pack(">HH", 65000, 65000) + b"\x03" + b"\0" * 9 + b"\xff\xd9",
        # run-length coded, so that the file may be far smaller than the picture
        b"BM" + struct.pack("<IIIIiiHHI", 100, 0, 54, 40, 60000, -60000, 1, 8, 1) + b"\0" * 66,
        b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + b"\xff\x3f\0\xff\x3f\0",
    ],
    ids=["png", "png line", "jpeg", "bmp", "webp"],
)
def test_huge_dimensions_are_refused_before_decoding(tmp_path, data):
    sentence = refusal(tmp_path, data)
    assert f"more than the {MAX_PIXELS} that are read" in sentence


def test_folder_and_missing_path_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent.png"):
        with pytest.raises(UsageError, match="is not a file"):
            read_image(path)


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    path = tmp_path / "x.png"
    path.touch()
    with pytest.raises(UsageError, match=r"x\.png' cannot be read \(Permission denied\)"):
        read_image(path)
