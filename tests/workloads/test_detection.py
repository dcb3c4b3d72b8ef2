"""detect, its boundary checks, its JSON, and equality with the reference detections."""

import json
import runpy
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from ridgeline.errors import EnvironmentUnusable, UsageError, VerificationFailed
from ridgeline.models.weights import yolo26_from
from ridgeline.workloads import detection
from ridgeline.workloads.coco_names import COCO_NAMES
from ridgeline.workloads.detection import Detection, check_input, detect, detect_files, detections_to_json
from ridgeline.workloads.draw import save_image
from ridgeline.workloads.images import read_image

ROOT = Path(__file__).parents[2]
STREET = ROOT / "src" / "ridgeline" / "assets" / "street.jpg"
GREY_IMAGE = np.full((320, 640, 3), 128, np.uint8)  # square: 160 rows of padding above and below
DOG, CAT, STOP = COCO_NAMES.index("dog"), COCO_NAMES.index("cat"), COCO_NAMES.index("stop sign")


class Stub:
    """A model that returns fixed rows for each image and keeps what it was fed."""

    def __init__(self, *rows: tuple[float, ...]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
        self.inputs: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x)
        return self.rows.expand(x.shape[0], -1, -1)


@pytest.fixture
def three() -> Stub:
    return Stub(
        (100, 260, 200, 360, 0.9, DOG),
        (-9, 100, 700, 600, 0.5, CAT),
        (0, 160, 10, 170, 0.25, DOG),
    )


# --- detect ----------------------------------------------------------------------------------------------------------


def test_boxes_come_back_in_image_pixels_clamped_and_named(three):
    assert detect(three, GREY_IMAGE, mode="square") == [
        Detection(100, 100, 200, 200, float(np.float32(0.9)), DOG, "dog"),
        Detection(0, 0, 640, 320, 0.5, CAT, "cat"),
    ]


def test_threshold_is_strict(three):
    assert [found.score for found in detect(three, GREY_IMAGE, mode="square", conf=0.25)][-1] == 0.5
    assert len(detect(three, GREY_IMAGE, mode="square", conf=0.2499)) == 3
    assert detect(three, GREY_IMAGE, mode="square", conf=1.0) == []


def test_classes_and_max_det_cut_after_the_threshold(three):
    assert [found.class_id for found in detect(three, GREY_IMAGE, mode="square", conf=0, classes=[DOG])] == [DOG, DOG]
    assert [found.class_name for found in detect(three, GREY_IMAGE, mode="square", classes=iter([CAT]))] == ["cat"]
    assert detect(three, GREY_IMAGE, mode="square", classes=[]) == []
    assert len(detect(three, GREY_IMAGE, mode="square", conf=0, max_det=1)) == 1
    assert [f.class_id for f in detect(three, GREY_IMAGE, mode="square", classes=[CAT], max_det=1)] == [CAT]


def test_names_of_another_model():
    model = Stub((0, 0, 9, 9, 0.9, 1), (0, 0, 9, 9, 0.8, 2))
    assert [f.class_name for f in detect(model, GREY_IMAGE, mode="rect", names=("bolt", "nut"))] == ["nut", "class 2"]


@pytest.mark.parametrize(("mode", "shape"), [("square", (1, 3, 640, 640)), ("rect", (1, 3, 320, 640))])
def test_model_sees_the_letterboxed_rgb_image(three, mode, shape):
    image = GREY_IMAGE.copy()
    image[..., 0] = 255
    detect(three, image, mode=mode)
    (x,) = three.inputs
    assert x.shape == shape and x.dtype == torch.float32
    centre = x[0, :, shape[2] // 2, 320]
    assert torch.equal(centre, torch.tensor([255.0, 128.0, 128.0]) / 255)


def test_a_module_is_fed_in_the_dtype_of_its_weights():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))

        def forward(self, x):
            assert x.dtype == torch.float16
            return torch.tensor([[[0.0, 0, 320, 320, float(x.max()), 3]]], dtype=torch.float16)

    model = Half()
    with pytest.raises(UsageError, match=r"call model\.eval"):
        detect(model, GREY_IMAGE, mode="square")
    (found,) = detect(model.eval(), GREY_IMAGE, mode="rect")
    assert found.score == pytest.approx(128 / 255, abs=1e-3) and found.x2 == 320
    with pytest.raises(UsageError, match=r"must be torch\.float16 in 0\.\.1, got torch\.float32"):
        detection.predict(model, torch.zeros(1, 3, 32, 32))


def test_a_callable_is_fed_where_and_as_it_says():
    class Asks(Stub):
        device, dtype = torch.device("cpu"), torch.float16

    model = Asks((0, 0, 320, 320, 0.9, 3))
    detect(model, GREY_IMAGE, mode="rect")
    assert model.inputs[0].dtype == torch.float16
    assert not isinstance(Stub(), detection.Placed) and not isinstance(torch.nn.Identity(), detection.Placed)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"conf": 1.01}, r"conf must lie in 0\.\.1, got 1\.01"),
        ({"conf": -0.1}, r"conf must lie in 0\.\.1, got -0\.1"),
        ({"conf": float("nan")}, r"conf must lie in 0\.\.1, got nan"),
        ({"size": 500}, "multiple of 32, got 500"),
        ({"mode": "stretch"}, "one of square, rect, got 'stretch'"),
        ({"classes": [80, 3, -1]}, r"class ids must lie in 0\.\.79, got -1, 80"),
        ({"max_det": 0}, "max_det must be at least 1, got 0"),
    ],
)
def test_choices_out_of_range_are_refused_before_any_work(three, choice, says):
    with pytest.raises(UsageError, match=says):
        detect(three, GREY_IMAGE, **{"mode": "square"} | choice)
    with pytest.raises(UsageError, match=says):
        detect_files(three, [STREET], **{"mode": "square"} | choice)
    assert three.inputs == []


@pytest.mark.parametrize(
    "image",
    [GREY_IMAGE.astype(np.float32), GREY_IMAGE[..., 0], np.zeros((8, 8, 4), np.uint8)],
    ids=["float", "grey", "rgba"],
)
def test_arrays_that_are_not_rgb_bytes_are_refused(three, image):
    with pytest.raises(UsageError, match=r"must be uint8 \[height, width, 3\] RGB, got"):
        detect(three, image, mode="square")


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (900, 1)])
@pytest.mark.parametrize("mode", ["square", "rect"])
def test_one_pixel_sides_pass_through(three, mode, shape):
    for found in detect(three, np.zeros((*shape, 3), np.uint8), mode=mode, conf=0):
        assert 0 <= found.x1 <= found.x2 <= shape[1] and 0 <= found.y1 <= found.y2 <= shape[0]


# --- the boundary ----------------------------------------------------------------------------------------------------


def test_check_input_accepts_images_and_refuses_the_usual_mistakes():
    x = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    for dtype in detection.FLOAT_DTYPES:
        check_input(x.to(dtype))
    check_input(x.half(), dtype=torch.float16)
    for wrong, says in (
        (x * 255, r"must lie in 0\.\.1, got 0\.\d+\.\.25\d"),
        (x * 4 - 2, r"must lie in 0\.\.1, got -"),
        (x.where(x < 0.5, torch.nan), r"must lie in 0\.\.1, got nan"),
        ((x * 255).byte(), r"got torch\.uint8"),
        (x.double(), r"got torch\.float64"),
        (x.permute(0, 2, 3, 1), r"must be \(N, 3, H, W\), got \(2, 32, 64, 3\)"),
        (x[0], r"got \(3, 32, 64\)"),
        (x[:0], r"got \(0, 3, 32, 64\)"),
    ):
        with pytest.raises(UsageError, match=says):
            check_input(wrong)


def test_nan_in_the_output_is_an_error_and_not_an_empty_picture():
    model = Stub((0, 0, 9, 9, 0.9, 1), (0, 0, 9, 9, float("nan"), 2), (0, float("inf"), 9, 9, 0.1, 2))
    with pytest.raises(VerificationFailed, match=r"2 values of 18 that are NaN or infinite in torch\.float32"):
        detect(model, GREY_IMAGE, mode="square")


@pytest.mark.parametrize(
    ("output", "got"),
    [(torch.zeros(1, 84, 8400), r"\(1, 84, 8400\)"), (torch.zeros(2, 300, 6), r"\(2, 300, 6\)"), ([1], "list")],
)
def test_output_of_another_shape_is_refused(output, got):
    with pytest.raises(UsageError, match=rf"must return \(1, k, 6\), got {got}"):
        detect(lambda x: output, GREY_IMAGE, mode="square")


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert detection.choose_device("auto") == detection.choose_device("cpu") == torch.device("cpu")
    with pytest.raises(EnvironmentUnusable, match="--device cuda: torch sees no CUDA GPU"):
        detection.choose_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert detection.choose_device("auto") == detection.choose_device("cuda") == torch.device("cuda")
    assert detection.choose_device("cpu") == torch.device("cpu")
    assert detection.device_name(torch.device("cpu")) == "the CPU"


def test_fp32_products_are_strict_or_tf32s(monkeypatch):
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    try:
        for dtype, allowed in (("fp32", False), ("tf32", True), ("fp16", True)):
            detection.multiply_as_(dtype)
            assert [switch.allow_tf32 for switch in switches] == [allowed, allowed]
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


# --- files and JSON --------------------------------------------------------------------------------------------------


def test_one_unreadable_file_does_not_stop_the_others(three, tmp_path):
    save_image(tmp_path / "a.png", GREY_IMAGE)
    (tmp_path / "b.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    save_image(tmp_path / "c.jpg", GREY_IMAGE[:160])
    first, broken, last = detect_files(three, [tmp_path], mode="square")
    assert (first.path.name, len(first.detections), first.error) == ("a.png", 2, None)
    assert broken.image is None and broken.detections == () and "cut short" in str(broken.error)
    assert last.to_json()["shape_hw"] == [160, 640]
    with pytest.raises(ValueError, match=r"b\.jpg' was not read"):
        broken.to_json()


def test_files_are_read_one_at_a_time(three, tmp_path):
    for name in "ab":
        save_image(tmp_path / f"{name}.png", GREY_IMAGE)
    results = detect_files(three, [tmp_path], mode="square")
    assert three.inputs == []
    next(results)
    assert len(three.inputs) == 1
    with pytest.raises(UsageError, match="does not exist"):
        detect_files(three, [tmp_path / "z.png"], mode="square")


def test_json_has_the_documented_keys_and_rounding():
    found = Detection(1.23456, 2.0, 3.0004, 4.9996, 0.1234567, STOP, "stop sign")
    record = detections_to_json(Path("in/street.jpg"), np.zeros((640, 960, 3)).shape[:2], [found])
    assert json.loads(json.dumps(record)) == {
        "image": "in/street.jpg",
        "shape_hw": [640, 960],
        "boxes": [{"x1": 1.235, "y1": 2.0, "x2": 3.0, "y2": 5.0, "score": 0.12346, "class": STOP, "name": "stop sign"}],
    }
    assert detections_to_json("x.png", (1, 2), [])["boxes"] == []


def test_coco_has_80_names():
    assert len(COCO_NAMES) == len(set(COCO_NAMES)) == 80
    assert (COCO_NAMES[0], COCO_NAMES[16], COCO_NAMES[79]) == ("person", "dog", "toothbrush")


# --- the bundled picture ---------------------------------------------------------------------------------------------


def test_bundled_picture_is_small_and_readable():
    assert read_image(STREET).shape == (640, 960, 3)
    assert STREET.stat().st_size < 120_000


def test_bundled_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "examples" / "draw_street.py"))["draw_street"]()
    # JPEG and the letters, whose font depends on the OpenCV version, leave a small difference
    assert np.abs(drawn.astype(int) - read_image(STREET)).mean() < 2


# --- equality with the reference -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def yolo26n(test_data):
    return yolo26_from(test_data / "yolo26n-w8.pt")


@pytest.mark.parametrize("name", ["bus.jpg", "dog.jpg", "eagle.jpg", "person.jpg", "zidane.jpg"])
@pytest.mark.parametrize(("mode", "key"), [("square", "square640"), ("rect", "rect640")])
def test_detections_equal_the_reference(test_data, yolo26n, mode, key, name):
    """Same count, classes and order; boxes within 0.5 pixel, scores within 0.002, as PyTorch versions may differ."""
    reference = json.loads((test_data / "reference-detections.json").read_text())["modes"][key][name]
    kept = [row for row, score in enumerate(reference["scores"]) if score > 0.25]
    (result,) = detect_files(yolo26n, [test_data / "images" / name], mode=mode)
    record = result.to_json()
    assert record["shape_hw"] == reference["shape_hw"]
    assert [found["class"] for found in record["boxes"]] == [reference["classes"][row] for row in kept]
    boxes = [[found[edge] for edge in ("x1", "y1", "x2", "y2")] for found in record["boxes"]]
    np.testing.assert_allclose(boxes, [reference["boxes"][row] for row in kept], rtol=0, atol=0.5)
    scores = [found["score"] for found in record["boxes"]]
    np.testing.assert_allclose(scores, [reference["scores"][row] for row in kept], rtol=0, atol=0.002)


def test_bundled_picture_shows_what_it_was_drawn_for(yolo26n):
    image = read_image(STREET)
    for mode in ("square", "rect"):
        seen = {found.class_name for found in detect(yolo26n, image, mode=mode)}
        assert {"stop sign", "clock", "traffic light", "bench"} <= seen


def test_grey_alpha_and_deep_copies_of_a_photo_detect_alike(test_data, yolo26n, tmp_path):
    """The same photo with alpha or 16 bits a channel is the same input; a grey copy still shows the dog."""
    bgr = cv2.imread(str(test_data / "images" / "dog.jpg"))
    cv2.imwrite(str(tmp_path / "alpha.png"), np.dstack([bgr, np.full(bgr.shape[:2], 7, np.uint8)]))
    cv2.imwrite(str(tmp_path / "deep.png"), bgr.astype(np.uint16) * 257)
    cv2.imwrite(str(tmp_path / "grey.png"), cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY))
    cv2.imwrite(str(tmp_path / "plain.png"), bgr)
    alpha, deep, grey, plain = (result.detections for result in detect_files(yolo26n, [tmp_path], mode="square"))
    assert alpha == deep == plain and len(plain) >= 3
    assert "dog" in {found.class_name for found in grey}
