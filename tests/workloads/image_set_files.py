"""Image sets in the forms people have them, for tests."""

import io
import struct
import tarfile
import zipfile
from pathlib import Path

import cv2
import numpy as np


def pictures(count: int, side: int = 8, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [count, side, side, channels], no two alike."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def png(image_rgb: np.ndarray) -> bytes:
    return cv2.imencode(".png", image_rgb[..., ::-1])[1].tobytes()


def write_folder(folder: Path, images: np.ndarray) -> Path:
    """PNGs in two class folders, whose sorted order is that of `images`."""
    for i, image in enumerate(images):
        path = folder / ("a" if i < len(images) // 2 else "b") / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(image))
    return folder


def write_zip(path: Path, images: np.ndarray) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for i, image in enumerate(images):
            archive.writestr(f"train/cat/{i:04d}.png", png(image))
        archive.writestr("__MACOSX/train/cat/._0000.png", b"not an image")
        archive.writestr("train/readme.txt", "not an image")
    return path


def batch_pickle(images_nhwc: np.ndarray, *, raw: bytes | None = None, function: bytes = b"_reconstruct") -> bytes:
    """A CIFAR-10 batch byte for byte as Python 2's cPickle wrote it, protocol 2."""
    rows = images_nhwc.transpose(0, 3, 1, 2).reshape(len(images_nhwc), -1)
    raw = rows.tobytes() if raw is None else raw
    labels = b"".join(b"K" + bytes([i % 10]) for i in range(len(rows)))
    shape = b"M" + struct.pack("<H", rows.shape[0]) + b"M" + struct.pack("<H", rows.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n" + function + b"\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    state = b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(",
            labels,
            b"eU\x04dataq\x06",
            array,
            state,
            b"u.",
        )
    )


def write_batches(folder: Path, images: np.ndarray) -> Path:
    """Five training batches and a test batch, which repeats the first of the training images."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(np.array_split(images, 5), start=1):
        (folder / f"data_batch_{i}").write_bytes(batch_pickle(part))
    (folder / "test_batch").write_bytes(batch_pickle(images[:1]))
    return folder


def write_archive(path: Path, images: np.ndarray) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        parts = {f"data_batch_{i}": part for i, part in enumerate(np.array_split(images, 5), start=1)}
        for name, part in {**parts, "test_batch": images[:1]}.items():
            data = batch_pickle(part)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path
