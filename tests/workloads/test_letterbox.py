"""Letterbox: the rounding table, the pixels, and boxes there and back."""

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import UsageError
from ridgeline.workloads import letterbox
from ridgeline.workloads.letterbox import Letterbox, plan

SIDES = st.integers(1, 5000)


def numbers(fit: Letterbox) -> tuple[int, ...]:
    return fit.new_h, fit.new_w, fit.left, fit.top, fit.right, fit.bottom


@pytest.mark.parametrize(
    ("h", "w", "mode", "expected", "why"),
    [
        # new_h, new_w, left, top, right, bottom
        (640, 640, "square", (640, 640, 0, 0, 0, 0), "already there"),
        (640, 640, "rect", (640, 640, 0, 0, 0, 0), "already there"),
        (1080, 810, "square", (640, 480, 80, 0, 80, 0), "even pad"),
        (1080, 810, "rect", (640, 480, 0, 0, 0, 0), "480 is a multiple of 32"),
        (720, 1280, "square", (360, 640, 0, 140, 0, 140), "even pad"),
        (720, 1280, "rect", (360, 640, 0, 12, 0, 12), "280 mod 32 = 24"),
        (512, 773, "rect", (424, 640, 0, 12, 0, 12), "423.9 rounds to 424"),
        (427, 640, "square", (427, 640, 0, 106, 0, 107), "odd pad: the extra pixel is below"),
        (640, 427, "square", (640, 427, 106, 0, 107, 0), "odd pad: the extra pixel is right"),
        (427, 640, "rect", (427, 640, 0, 10, 0, 11), "213 mod 32 = 21"),
        (639, 640, "square", (639, 640, 0, 0, 0, 1), "a pad of one pixel"),
        (637, 640, "square", (637, 640, 0, 1, 0, 2), "a pad of three pixels"),
        (1, 256, "square", (2, 640, 0, 319, 0, 319), "2.5 rounds half to even, down"),
        (3, 256, "square", (8, 640, 0, 316, 0, 316), "7.5 rounds half to even, up"),
        (5, 256, "square", (12, 640, 0, 314, 0, 314), "12.5 rounds half to even, down"),
        (1, 1, "square", (640, 640, 0, 0, 0, 0), "one pixel is scaled up"),
        (1, 1, "rect", (640, 640, 0, 0, 0, 0), "one pixel is scaled up"),
        (1, 5000, "square", (1, 640, 0, 319, 0, 320), "0.128 rounds to 0, kept at 1"),
        (1, 5000, "rect", (1, 640, 0, 15, 0, 16), "639 mod 32 = 31"),
        (5000, 1, "square", (640, 1, 319, 0, 320, 0), "the same upright"),
        (100, 200, "square", (320, 640, 0, 160, 0, 160), "scaled up"),
        (4000, 6000, "rect", (427, 640, 0, 10, 0, 11), "426.67 rounds to 427"),
    ],
)
def test_rounding_table(h, w, mode, expected, why):
    assert numbers(plan(h, w, 640, mode=mode)) == expected, why


@pytest.mark.parametrize(
    ("mode", "expected"), [("square", (50, 100, 270, 295, 270, 295)), ("rect", (50, 100, 14, 7, 14, 7))]
)
def test_without_scaleup_a_small_image_keeps_its_size(mode, expected):
    assert numbers(plan(50, 100, 640, mode=mode, scaleup=False)) == expected


def test_without_scaleup_a_large_image_still_shrinks():
    assert plan(720, 1280, mode="square", scaleup=False) == plan(720, 1280, mode="square")


@given(h=SIDES, w=SIDES, size=st.sampled_from((32, 320, 640, 1280)), mode=st.sampled_from(letterbox.MODES))
@settings(max_examples=200, deadline=None)
def test_every_plan_fills_a_canvas_of_whole_strides(h, w, size, mode):
    fit = plan(h, w, size, mode=mode)
    assert max(fit.new_h, fit.new_w) == size and min(fit.new_h, fit.new_w) >= 1
    assert fit.height % 32 == 0 and fit.width % 32 == 0
    assert fit.right - fit.left in (0, 1) and fit.bottom - fit.top in (0, 1)
    if mode == "square":
        assert (fit.height, fit.width) == (size, size)
    else:
        assert fit.height - fit.new_h < 32 and fit.width - fit.new_w < 32


@given(h=st.integers(20, 3000), w=st.integers(20, 3000))
@settings(max_examples=200, deadline=None)
def test_gains_and_pads_follow_from_the_two_shapes_alone(h, w):
    """In square mode the reference derives them from image and input shape; the plan must agree."""
    fit = plan(h, w, 640, mode="square")
    gain = min(640 / h, 640 / w)
    assert fit.gain_x == round(w * gain) / w and fit.gain_y == round(h * gain) / h
    assert fit.left == round((640 - round(w * gain)) / 2 - 0.1)
    assert fit.top == round((640 - round(h * gain)) / 2 - 0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"size": 600}, "multiple of 32, got 600"),
        ({"size": 0}, "multiple of 32, got 0"),
        ({"size": -640}, "multiple of 32, got -640"),
        ({"size": 640.0}, "multiple of 32, got 640.0"),
        ({"size": 4128}, "image size must be at most 4096, got 4128"),
        ({"h": 0}, "at least one pixel a side, got 0 x 100"),
        ({"mode": "auto"}, "square, rect, got 'auto'"),
    ],
)
def test_wrong_plan_is_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        plan(**{"h": 100, "w": 100, "mode": "square"} | arguments)


def test_apply_frames_with_114_and_keeps_pixels_of_the_right_size():
    image = np.random.default_rng(0).integers(0, 256, (427, 640, 3), np.uint8)
    framed = letterbox.apply(image, plan(427, 640, mode="rect"))
    assert framed.shape == (448, 640, 3) and framed.dtype == np.uint8
    np.testing.assert_array_equal(framed[10:437], image)
    assert (framed[:10] == 114).all() and (framed[437:] == 114).all()


@pytest.mark.parametrize(("h", "w"), [(375, 500), (1080, 811), (3, 500), (1, 1)])
def test_apply_scales_as_opencv_bilinear(h, w):
    image = np.random.default_rng(1).integers(0, 256, (h, w, 3), np.uint8)
    fit = plan(h, w, mode="square")
    framed = letterbox.apply(image, fit)
    inner = framed[fit.top : fit.top + fit.new_h, fit.left : fit.left + fit.new_w]
    np.testing.assert_array_equal(inner, cv2.resize(image, (fit.new_w, fit.new_h), interpolation=cv2.INTER_LINEAR))
    assert framed.shape == (640, 640, 3)
    assert (framed == 114).all(axis=2).sum() >= 640 * 640 - fit.new_h * fit.new_w


def test_apply_refuses_another_image_than_planned():
    with pytest.raises(ValueError, match=r"planned for uint8 \(10, 20, 3\), got uint8 \(20, 10, 3\)"):
        letterbox.apply(np.zeros((20, 10, 3), np.uint8), plan(10, 20, mode="square"))


def test_to_tensor_is_nchw_rgb_over_255():
    images = [np.random.default_rng(seed).integers(0, 256, (32, 64, 3), np.uint8) for seed in range(2)]
    x = letterbox.to_tensor(images)
    assert x.shape == (2, 3, 32, 64) and x.dtype == torch.float32 and x.is_contiguous()
    np.testing.assert_array_equal(x[1, 2].numpy(), images[1][:, :, 2].astype(np.float32) / np.float32(255))
    half = letterbox.to_tensor(images, dtype=torch.float16)
    assert torch.equal(half, x.half())


def test_to_tensor_refuses_mixed_shapes():
    with pytest.raises(ValueError, match=r"one shape, got \[\(32, 32, 3\), \(32, 64, 3\)\]"):
        letterbox.to_tensor([np.zeros((32, 32, 3), np.uint8), np.zeros((32, 64, 3), np.uint8)])


def test_boxes_back_by_hand():
    fit = plan(427, 640 * 2, 640, mode="square")  # gain 0.5 across, 214 / 427 down, 213 above
    boxes = letterbox.boxes_back([[10, 213, 20, 427], [-5, 0, 650, 640]], fit)
    np.testing.assert_allclose(boxes, [[20, 0, 40, 427], [0, 0, 1280, 427]], atol=1e-12)


@given(h=SIDES, w=SIDES, mode=st.sampled_from(letterbox.MODES))
@settings(max_examples=100, deadline=None)
def test_boxes_return_to_where_they_came_from(h, w, mode):
    fit = plan(h, w, 640, mode=mode)
    image_box = np.array([w * 0.2, h * 0.3, w * 0.7, h * 0.9])
    input_box = image_box * np.tile([fit.gain_x, fit.gain_y], 2)
    input_box += [fit.left, fit.top, fit.left, fit.top]
    np.testing.assert_allclose(letterbox.boxes_back(input_box, fit), image_box, rtol=1e-9)
    # the whole input covers exactly the image
    whole = letterbox.boxes_back([0, 0, fit.width, fit.height], fit)
    np.testing.assert_allclose(whole, [0, 0, w, h], rtol=1e-12)
    assert whole[2] <= w and whole[3] <= h


def test_boxes_back_of_no_boxes_is_empty():
    assert letterbox.boxes_back(np.zeros((0, 4)), plan(10, 10, mode="rect")).shape == (0, 4)
