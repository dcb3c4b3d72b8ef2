"""verify end to end: a right build passes, wrong ones fail and are named, and nothing passes for want of evidence."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import fx, nn

from graphs import by_reference, image, net
from planted import plant, scale_a_weight
from ridgeline.errors import UsageError
from ridgeline.models.blocks import Conv
from ridgeline.recipe import Limits, Recipe
from ridgeline.rewrites._match import calls, finish, value
from ridgeline.verification import PictureLimits, Pictures, verify
from ridgeline.workloads.draw import save_image
from tiny_detector import CLASSES, SIZE, TinyDetector, build, save_pictures

FP16, FP32 = Recipe(dtype="fp16"), Recipe(dtype="fp32")


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


@pytest.fixture
def pictures(tmp_path):
    return save_pictures(tmp_path / "pictures")


def test_a_right_build_passes(pictures):
    module, x = build()
    found = verify(module, x, FP16, images=[pictures])
    assert found.passed and found.blame == ""
    assert [layer.op for layer in found.layers].count("detect_topk") == 1
    assert max(layer.excess for layer in found.layers) < 1
    assert found.agreement.detections is not None and found.agreement.detections.rows > 70
    assert found.pictures is not None and found.pictures.images == 3 and found.pictures.detections > 100
    assert found.pictures.map_5095 > 0.99
    # half precision moves boxes and scores, a little
    assert 0 < found.pictures.box_px < 0.5 and 0 < found.pictures.score < 0.01
    lines = found.lines(layers=2)
    assert len(lines) == 1 + 2 + 1 + 4 and lines[-1] == "verdict   passed"
    assert f"{len(found.layers) - 2} more kernels" in lines[3] and "0 of" in lines[4]
    assert len(found.lines(layers=0)) == 4
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["passed"] is True and (told["dtype"], told["precision"], told["pdl"]) == ("fp16", "tf32", True)
    assert [layer["where"] for layer in told["layers"]] == [layer.where for layer in found.layers]
    assert all(layer["compared"] and layer["of_allowed"] < 1 for layer in told["layers"])
    assert told["pictures"] == vars(found.pictures)
    assert told["results"]["detections"]["rows"] > 70 and told["results"]["dense"] == []


def test_a_planted_error_fails_and_is_named(monkeypatch, pictures):
    plant(monkeypatch, "functionalize", scale_a_weight(1))
    module, x = build()
    found = verify(module, x, FP32, images=[pictures])
    assert not found.passed and not found.agreement.passed
    assert found.blame == "the first rewrite that breaks it is functionalize"
    assert found.reason.startswith("scores differ by") and found.reason.endswith(found.blame)
    lost = [layer for layer in found.layers if layer.excess > 1]
    assert lost[0].where.startswith("stem.1.")
    lines = found.lines()
    assert lines[-1] == f"verdict   FAILED: {found.blame}"
    assert f"the first is {lost[0].op} in stem.1." in lines[-4]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["reason"] == found.reason


def cap_the_logits(graph_module: fx.GraphModule) -> int:
    """The planted error that an easy input does not show: class logits above -1 are cut off."""
    sites = 0
    for conv in calls(graph_module, torch.ops.aten.conv2d.default):
        if value(conv).shape[1] == CLASSES:
            with graph_module.graph.inserting_after(conv):
                capped = graph_module.graph.call_function(torch.ops.aten.clamp_max.default, (conv, -1.0))
            capped.meta["val"] = value(conv)
            conv.replace_all_uses_with(capped, lambda user, capped=capped: user is not capped)
            sites += 1
    finish(graph_module)
    return sites


def test_an_error_that_only_pictures_show_is_found_and_named(monkeypatch, pictures):
    plant(monkeypatch, "functionalize", cap_the_logits)
    module, x = TinyDetector(), build()[1] / 20
    assert (module(x)[..., 4].logit() < -1).all(), "the example must not reach the planted limit"
    found = verify(module, x, FP32, images=[pictures])
    assert found.agreement.passed and not found.passed
    assert found.pictures is not None and found.pictures.map_5095 < 0.99
    assert found.blame == "the first rewrite that breaks it is functionalize"
    assert "mAP 50-95 0." in found.reason and "allowed: mAP at least 0.99" in found.reason


def test_a_limit_that_the_dtype_itself_breaks_blames_no_rewrite(pictures):
    module, x = build()
    found = verify(module, x, FP16, images=[pictures], limits=PictureLimits(box_px=1e-6, score=0.5))
    assert not found.passed and found.agreement.passed
    assert "no rewrite is to blame: plain PyTorch in fp16 reaches 1.0000 itself" in found.blame
    assert "boxes 1e-06 px" in found.reason and "scores 0.5" in found.reason


def test_a_module_with_dense_results_needs_no_pictures():
    module = net(lambda m, x: m.b(m.a(x)), a=Conv(3, 8, 3), b=nn.Conv2d(8, 4, 1))
    found = verify(module, image(1, 3, 8, 8), FP32)
    assert found.passed and found.pictures is None and len(found.layers) >= 1
    told = found.to_json()
    assert told["pictures"] is None and told["results"]["detections"] is None
    assert [verdict["numel"] for verdict in told["results"]["dense"]] == [4 * 8 * 8]
    assert [line.split()[0] for line in found.lines(layers=0)] == ["layers", "results", "verdict"]


def test_limits_reach_the_agreement(monkeypatch):
    plant(monkeypatch, "fuse_conv_act", scale_a_weight(0, 1.0002))
    module = net(lambda m, x: m.a(x), a=Conv(3, 8, 3))
    x = image(1, 3, 8, 8)
    assert not verify(module, x, FP32).passed
    assert verify(module, x, Recipe(dtype="fp32", limits=Limits(1e5))).passed


# --- refusals --------------------------------------------------------------------------------------------------------


def test_pictures_without_an_object_are_no_evidence(tmp_path):
    save_image(tmp_path / "black.png", np.zeros((64, 64, 3), np.uint8))
    module = TinyDetector(logit=-9.0)
    with pytest.raises(UsageError, match=r"nothing in 1 image\(s\) is detected with a score above 0\.25"):
        verify(module, torch.zeros(1, 3, SIZE, SIZE), FP32, images=[tmp_path])


def test_pictures_are_for_detectors(pictures):
    dense = net(lambda m, x: m.a(x), a=nn.Conv2d(3, 8, 1))
    with pytest.raises(UsageError, match=r"returns rows \(1, k, 6\), best first, got \(1, 8, 64, 64\)"):
        verify(dense, torch.rand(1, 3, SIZE, SIZE), FP32, images=[pictures])
    for shape in ((1, 3, 32, 64), (2, 3, 64, 64)):
        with pytest.raises(UsageError, match=r"one input \(1, 3, S, S\), and this module's is \(\d, 3, \d\d, 64\)"):
            verify(dense, torch.rand(shape), FP32, images=[pictures])


def test_limits_out_of_range_are_refused():
    for choice, says in (({"map_5095": 1.1}, r"0\.\.1, got 1\.1"), ({"box_px": 0.0}, "above 0, got 0.0 px")):
        with pytest.raises(UsageError, match=says):
            PictureLimits(**choice)
    with pytest.raises(UsageError):
        PictureLimits(map_5095=math.nan)


def test_a_class_that_one_side_lacks_is_infinitely_far():
    lacking = Pictures(1, 2, 0.5, math.inf, math.inf)
    assert not lacking.within(PictureLimits()) and lacking.within(PictureLimits(map_5095=0.5))
    assert not lacking.within(PictureLimits(map_5095=0.5, box_px=9.0))
