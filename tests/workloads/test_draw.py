"""draw and save_image: where boxes and labels land on any shape, and that files are whole or absent."""

import os

import numpy as np
import pytest
import torch

from ridgeline.errors import UsageError
from ridgeline.workloads.coco_names import COCO_NAMES
from ridgeline.workloads.detection import Detection, detect_files
from ridgeline.workloads.draw import class_colour, draw, draw_files, save_image
from ridgeline.workloads.images import read_image

GREY_IMAGE = np.full((320, 640, 3), 128, np.uint8)
DOG, STOP = COCO_NAMES.index("dog"), COCO_NAMES.index("stop sign")


# --- drawing ---------------------------------------------------------------------------------------------------------


def box(x1: float, y1: float, x2: float, y2: float, class_id: int = STOP) -> Detection:
    return Detection(x1, y1, x2, y2, 0.876, class_id, COCO_NAMES[class_id])


def test_draw_leaves_the_image_alone_and_paints_the_box_in_its_class_colour():
    untouched = GREY_IMAGE.copy()
    drawn = draw(GREY_IMAGE, [box(200, 100, 400, 300)])
    np.testing.assert_array_equal(GREY_IMAGE, untouched)
    assert drawn.shape == GREY_IMAGE.shape and drawn.dtype == np.uint8
    for x, y in ((200, 200), (400, 200), (300, 300)):
        np.testing.assert_array_equal(drawn[y, x], class_colour(STOP))
    np.testing.assert_array_equal(drawn[120:280, 220:380], GREY_IMAGE[120:280, 220:380])


@pytest.mark.parametrize(
    "place", [(200, 100, 400, 300), (600, 2, 639, 60), (0, 0, 20, 20), (630, 310, 640, 320), (0, 0, 640, 320)]
)
def test_the_whole_label_is_inside_the_image(place):
    """No letter is cut: as many pixels are inked as where the label has room on all sides."""

    def inked(drawn: np.ndarray) -> int:
        return int((drawn.min(axis=2) > 140).sum())  # brighter than the grey image and the green box

    assert inked(draw(GREY_IMAGE, [box(*place)])) == inked(draw(GREY_IMAGE, [box(300, 150, 400, 300)])) > 50


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (12, 40), (40, 400), (3000, 200)])
def test_draw_on_any_shape(shape):
    image = np.full((*shape, 3), 128, np.uint8)
    drawn = draw(image, [box(0, 0, shape[1], shape[0]), box(0, 0, 0, 0, DOG)])
    assert drawn.shape == image.shape
    assert (drawn != image).any()


def test_line_width_follows_the_image():
    def painted_columns(side: int) -> int:
        image = np.zeros((side, side, 3), np.uint8)
        drawn = draw(image, [box(side * 0.25, side * 0.25, side * 0.75, side * 0.75)])
        return int((drawn[side // 2] != 0).any(axis=1).sum())

    assert painted_columns(200) < painted_columns(1000) < painted_columns(2000)


def test_every_class_has_its_own_colour():
    assert len({class_colour(class_id) for class_id in range(80)}) == 80


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [".png", ".PNG", ".bmp", ".jpg", ".jpeg", ".webp"])
def test_save_writes_the_format_of_the_extension(tmp_path, extension):
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, 30:] = (250, 120, 10)
    path = tmp_path / f"out{extension}"
    save_image(path, image)
    tolerance = 0 if extension.lower() in (".png", ".bmp") else 24
    assert np.abs(read_image(path).astype(int) - image)[:, :28].max() <= tolerance
    assert np.abs(read_image(path).astype(int) - image)[:, 34:].max() <= tolerance
    assert os.listdir(tmp_path) == [path.name]


def test_save_replaces_whole_files_only(tmp_path, monkeypatch):
    path = tmp_path / "out.png"
    save_image(path, GREY_IMAGE)
    before = path.read_bytes()

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match="No space left on device"):
        save_image(path, GREY_IMAGE[:10])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["out.png"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("out.gif", "must end in one of"),
        ("out", "must end in one of"),
        ("absent/out.png", "No such file or directory"),
        ("file/out.png", "Not a directory"),
        ("folder.png", "Is a directory"),
    ],
)
def test_save_refuses_what_cannot_be_written(tmp_path, name, says):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=says) as refused:
        save_image(tmp_path / name, GREY_IMAGE)
    assert name in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.png"]


def test_save_refuses_sides_the_format_cannot_hold(tmp_path):
    with pytest.raises(UsageError, match=r"1 x 70000 pixels cannot be stored as \.jpg: choose \.png"):
        save_image(tmp_path / "tall.jpg", np.zeros((70000, 1, 3), np.uint8))


def test_draw_files_writes_one_picture_a_readable_file(tmp_path):
    def one_box(x):
        return torch.tensor([[[100.0, 260, 200, 360, 0.9, STOP]]])

    album = tmp_path / "album"
    (album / "more").mkdir(parents=True)
    for name in ("a.png", "more/a.jpg", "tall.png"):
        save_image(album / name, np.zeros((70000, 1, 3), np.uint8) if "tall" in name else GREY_IMAGE)
    (album / "broken.jpg").touch()
    before = (album / "a.png").read_bytes()
    pairs = list(draw_files(detect_files(one_box, [f"{album}/**/*"], mode="square"), album / "new" / "out"))
    pictures = {result.path.relative_to(album).as_posix(): picture and picture.name for result, picture in pairs}
    assert pictures == {
        "a.png": "a-detected.jpg",
        "broken.jpg": None,
        "more/a.jpg": "a-detected-2.jpg",
        "tall.png": "tall-detected.png",
    }
    assert sorted(os.listdir(album / "new" / "out")) == sorted(name for name in pictures.values() if name)
    drawn, image = read_image(album / "new" / "out" / "a-detected.jpg"), GREY_IMAGE
    assert drawn.shape == image.shape and np.abs(drawn.astype(int) - image).max() > 50
    assert (album / "a.png").read_bytes() == before


def test_draw_files_refuses_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/out' cannot be made \(Not a directory\)"):
        list(draw_files([], tmp_path / "file" / "out"))
