"""What `ridgeline verify` is asked to look at."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import UsageError
from ridgeline.models.yolo26 import YOLO26
from ridgeline.workloads.subjects import STREET, subject
from tiny_detector import save_pictures

NET = """
import torch
def build(): return torch.nn.Conv2d(3, 4, 1).eval(), torch.zeros(1, 3, 8, 8)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, empty."""
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_detector_without_weights_is_a_seeded_one_on_the_bundled_picture():
    found = subject("yolo26n", size=96)
    assert found.text == "yolo26n with seeded random weights"
    assert isinstance(found.module, YOLO26) and found.module.fused and not found.module.training
    assert [tuple(x.shape) for x in found.inputs] == [(1, 3, 96, 96)]
    assert found.inputs[0].std() > 0 and [str(path) for path in found.images or ()] == [STREET]
    again = subject("yolo26n", size=96)
    assert all(torch.equal(a, b) for a, b in zip(found.module.parameters(), again.module.parameters(), strict=True))


def test_the_first_image_is_the_example(tmp_path):
    pictures = save_pictures(tmp_path / "pictures", 2)
    found = subject("yolo26n", images=[str(pictures)], size=64)
    assert [path.name for path in found.images or ()] == ["0.png", "1.png"]
    assert not torch.equal(found.inputs[0], subject("yolo26n", size=64).inputs[0])


def test_weights_are_the_named_ones_else_those_of_the_cache(test_data, cache):
    file = test_data / "yolo26n-w8.pt"
    named = subject("yolo26n", weights=file, size=64)
    assert named.text == f"yolo26n with {file}"
    (cache / "weights").mkdir(parents=True)
    (cache / "weights" / "yolo26n.pt").write_bytes(file.read_bytes())
    cached = subject("yolo26n", size=64)
    assert cached.text == f"yolo26n with {cache / 'weights' / 'yolo26n.pt'}"
    assert all(torch.equal(a, b) for a, b in zip(named.module.parameters(), cached.module.parameters(), strict=True))


def test_damaged_weights_are_refused_and_not_replaced(cache):
    (cache / "weights").mkdir(parents=True)
    (cache / "weights" / "yolo26n.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UsageError):
        subject("yolo26n", size=64)


def test_a_module_of_the_users_brings_its_own_inputs(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    found = subject(f"{tmp_path}/net.py:build")
    assert found.images is None and [tuple(x.shape) for x in found.inputs] == [(1, 3, 8, 8)]
    pictures = save_pictures(tmp_path / "pictures", 1)
    assert len(subject(f"{tmp_path}/net.py:build", images=[str(pictures)]).images or ()) == 1
    for choice in ({"size": 64}, {"weights": tmp_path / "a.pt"}):
        with pytest.raises(UsageError, match=r"is for yolo26n, .* brings its own"):
            subject(f"{tmp_path}/net.py:build", **choice)
