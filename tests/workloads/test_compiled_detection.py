"""A compiled detector: one build an input shape, verified, with the boxes of the module it came from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphs import by_reference
from ridgeline.recipe import Recipe
from ridgeline.workloads.compiled_detection import CompiledDetector
from ridgeline.workloads.detection import Placed, detect
from tiny_detector import SIZE, TinyDetector

FP32 = Recipe(dtype="fp32")
WIDE = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
TALL, WIDE_TOO = WIDE.transpose(1, 0, 2), WIDE[::-1]


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


def test_detections_are_those_of_the_module():
    module = TinyDetector()
    compiled = CompiledDetector(module, FP32)
    for image in (WIDE, TALL, WIDE_TOO.copy()):
        expected = detect(module, image, mode="rect", size=SIZE)
        found = detect(compiled, image, mode="rect", size=SIZE)
        assert len(found) == len(expected) > 10
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-5)
    # two shapes, three images
    assert list(compiled.built) == [torch.Size((1, 3, 32, 64)), torch.Size((1, 3, 64, 32))]
    for build in compiled.built.values():
        assert build.verdict is not None and build.verdict.passed


def test_it_says_where_and_in_which_dtype_it_wants_images():
    compiled = CompiledDetector(TinyDetector(), Recipe(dtype="fp16"))
    assert isinstance(compiled, Placed)
    assert (compiled.device, compiled.dtype) == (torch.device("cpu"), torch.float16)


def test_a_result_outlives_the_next_call():
    compiled = CompiledDetector(TinyDetector(), FP32)
    images = torch.rand((2, 1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    first = compiled(images[0])
    kept = first.clone()
    compiled(images[1])
    assert torch.equal(first, kept)
